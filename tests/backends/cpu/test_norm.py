"""RMSNorm of the cpu backend against the reference: sizes, dtypes, residual, epsilon, rows not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moedecode.arrays import IO_DTYPES
from moedecode.backends.cpu import CpuBackend
from moedecode.backends.reference import ReferenceBackend, maths
from moedecode.synthetic import tokens
from numeric import assert_bits_equal, assert_close

CPU, REFERENCE = CpuBackend(), ReferenceBackend()
ROUNDED = {"float32": 5e-7, "bfloat16": 4e-3, "float16": 5e-4}
"""Half a unit in the last place, which a row of one element can reach."""


@pytest.mark.parametrize("dtype", list(IO_DTYPES))
def test_against_the_reference(dtype):
    io = IO_DTYPES[dtype]
    sizes = itertools.product((1, 2, 15, 16, 90, 2880), (0, 1, 7, 128), (True, False), (1e-6, 0.1))
    for hidden, count, with_residual, eps in sizes:
        x = tokens(count, hidden, dtype, seed=hidden)
        residual = tokens(count, hidden, dtype, seed=9) if with_residual else None
        gamma = tokens(1, hidden, "float32", seed=2)[0].astype(io) if with_residual else None
        width = max(1, hidden - 5)
        normed, total = CPU.rmsnorm(x, gamma, eps, width, residual)
        s = maths.residual_sum(x, residual)
        want = maths.rmsnorm(s, gamma, eps, width)
        assert_close(f"H={hidden} T={count}", normed.astype(np.float64), want, ROUNDED[dtype], ROUNDED[dtype])
        assert (total is None) == (residual is None)
        if total is not None:
            assert_bits_equal("residual", total, s.astype(io))


@pytest.mark.parametrize("size", [1e-30, 1e-40, 1e30, 3e38])
def test_extreme_magnitudes(size):
    """Squares that leave the range of float32 do not spoil the norm."""
    x = (tokens(3, 64, "float32").clip(-1, 1) * np.float32(size)).astype(np.float32)
    got, _ = CPU.rmsnorm(x, None, 0.0, 64, None)
    assert_close(str(size), got, maths.rmsnorm(x, None, 0.0, 64), 5e-7, 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", list(IO_DTYPES))
def test_a_row_that_is_not_finite_is_nan_throughout(bad, dtype):
    x = tokens(5, 70, dtype)
    clean, _ = CPU.rmsnorm(x, None, 1e-6, 70, None)
    x[2, 69] = bad
    got, _ = CPU.rmsnorm(x, None, 1e-6, 70, None)
    assert np.isnan(got[2].astype(np.float32)).all()
    rest = [0, 1, 3, 4]
    assert_bits_equal("other rows", got[rest], clean[rest])


def test_a_sum_that_overflows_is_not_finite():
    big = np.full((2, 8), 3e38, np.float32)
    got, total = CPU.rmsnorm(big, None, 1e-6, 8, big)
    assert np.isnan(got).all()
    assert np.isinf(total).all()


@pytest.mark.parametrize("case", ["0/0", "float16 overflow", "NaN in gamma", "infinity in gamma"])
def test_a_norm_that_is_not_finite_is_nan_throughout(case):
    """What the reference calls NaN throughout: r itself has no finite value somewhere in the row."""
    x, gamma, eps = tokens(3, 40, "float16"), np.ones(40, np.float32), 1e-6
    if case == "0/0":
        x[1], eps = 0, 0.0
    elif case == "float16 overflow":
        gamma[3] = 1e6
    else:
        gamma[3] = np.nan if "NaN" in case else np.inf
    got, _ = CPU.rmsnorm(x, gamma, eps, 40, None)
    want, _ = REFERENCE.rmsnorm(x, gamma, eps, 40, None)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got).all(1).any()
