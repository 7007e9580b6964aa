"""The cpu backend: checked NumPy arrays in, one native call per block.

Owns the translation of specs and weights into what ``moedecode._native`` takes. Knows no torch and no blocks.
"""

from __future__ import annotations

from .backend import CpuBackend

__all__ = ["CpuBackend"]
