"""Puts the helper modules of this folder (numeric, golden) on the import path of every test below it.

The reference multiplies small float64 matrices: one BLAS thread is several times faster than a pool.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before anything imports numpy
