"""Puts the helper modules of this folder (numeric, golden) on the import path of every test below it."""
