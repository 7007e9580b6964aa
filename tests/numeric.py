"""Comparing arrays: relative L2 over the whole array and over the worst row, and equality of bits.

Every figure is relative; rows much smaller than the rest are measured against a floor scaled by the array's
RMS.
"""

from __future__ import annotations

import numpy as np

ROW_FLOOR = 0.05
"""Rows below this fraction of the RMS row norm are measured against it: an empty row has no scale."""


def _rows(a):
    a = np.asarray(a).astype(np.float64)
    return a.reshape(-1, a.shape[-1]) if a.ndim else a.reshape(1, 1)


def rel_l2(got, want):
    """||got - want|| / ||want|| over the whole array; NaN where both are NaN counts as equal."""
    got, want = _rows(got), _rows(want)
    difference = np.where(np.isnan(got) & np.isnan(want), 0.0, got - want)
    size = np.linalg.norm(np.nan_to_num(want))
    return float(np.linalg.norm(difference) / size) if size else float(np.linalg.norm(difference) > 0)


def worst_row_rel_l2(got, want):
    """(relative L2, index) of the worst row."""
    got, want = _rows(got), _rows(want)
    if not want.size:
        return 0.0, -1
    difference = np.where(np.isnan(got) & np.isnan(want), 0.0, got - want)
    size = np.linalg.norm(np.nan_to_num(want), axis=1)
    floor = ROW_FLOOR * np.sqrt((size**2).mean())
    error = np.linalg.norm(difference, axis=1)
    relative = np.where(error == 0, 0.0, error / np.maximum(np.maximum(size, floor), np.finfo(float).tiny))
    relative = np.where(np.isnan(relative), np.inf, relative)
    return float(relative.max()), int(relative.argmax())


def assert_close(name, got, want, bound, row_bound=None):
    """Whole-array and worst-row relative L2 within ``bound`` and ``row_bound`` (default: twice the bound)."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    if not want.size:
        return
    row_bound = 2 * bound if row_bound is None else row_bound
    whole, (worst, row) = rel_l2(got, want), worst_row_rel_l2(got, want)
    figures = f"relative L2 {whole:.3g} (bound {bound:.3g}), row {row} {worst:.3g} (bound {row_bound:.3g})"
    assert whole <= bound and worst <= row_bound, f"{name}: {figures}"


def assert_zero_where_zero(name, got, want):
    """Where every value of a row of ``want`` is exactly 0, so is ``got``."""
    got, want = _rows(got), _rows(want)
    empty = ~want.any(1)
    wrong = np.flatnonzero(empty & got.any(1))
    assert not len(wrong), (
        f"{name}: row {wrong[0]} must be exactly 0, holds {got[wrong[0]][got[wrong[0]] != 0][0]}"
    )


def assert_bits_equal(name, got, want):
    """The same shape, dtype and bits; names the first coordinate that differs and both values."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, want {want.dtype}"
    bits = f"u{got.dtype.itemsize}"
    differs = np.argwhere(np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits))
    if len(differs):
        at = tuple(map(int, differs[0]))
        raise AssertionError(
            f"{name}: {len(differs)} of {got.size} differ, first at {at}: {got[at]!r}, want {want[at]!r}"
        )
