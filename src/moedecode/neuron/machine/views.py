"""Owns the arithmetic of strided views: shapes, strides and offsets in elements.

Must not know memories, dtypes or programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["contiguous_strides", "last_element", "reshape_strides"]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = []
    step = 1
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Distance, in elements, from the first to the furthest element of a view with non-negative strides."""
    last = 0
    for count, stride in zip(shape, strides, strict=True):
        last += (count - 1) * stride
    return last


def reshape_strides(
    shape: Sequence[int], strides: Sequence[int], new_shape: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of the same elements in the same order under another shape; None where that would need a copy.

    Args:
        shape, strides: the present view.
        new_shape: with the same number of elements.
    """
    if math.prod(shape) != math.prod(new_shape):
        return None
    # Runs of dimensions that lie behind each other are one block; a new dimension must not straddle two
    # blocks.
    blocks: list[list[int]] = []  # [count, stride of the innermost]
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if blocks and blocks[-1][1] == stride * count:
            blocks[-1] = [blocks[-1][0] * count, stride]
        else:
            blocks.append([count, stride])
    new_strides = [0] * len(new_shape)
    left, step = blocks.pop() if blocks else [1, 1]
    for dim in range(len(new_shape) - 1, -1, -1):
        count = new_shape[dim]
        if count != 1 and left == 1 and blocks:
            left, step = blocks.pop()
        if left % count:
            return None
        new_strides[dim] = step
        left //= count
        step *= count
    return tuple(new_strides)
