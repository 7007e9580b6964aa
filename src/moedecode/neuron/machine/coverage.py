"""Owns which bytes of one HBM tensor have been touched, by whom: the map that ledger and race detection
share.

Must not know programs, barriers or byte totals. The map has one entry per granule, the largest number of
bytes that every access so far is a multiple of, so that gigabytes of weights read in long runs need a few
thousand entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .tensor import Tensor

__all__ = ["Coverage", "Region", "read_bit", "region_of", "write_bit"]

_COARSEST = 1 << 16  # bytes


def read_bit(core: int) -> int:
    """The flag of a core that has read."""
    return 1 << 2 * core


def write_bit(core: int) -> int:
    """The flag of a core that has written."""
    return 2 << 2 * core


@dataclass(frozen=True)
class Region:
    """Bytes of a view: runs of `run` bytes, the first at `start`, the others at every combination of `outer`
    = (stride, count).

    `nbytes` is what moving the view costs; an element that a pattern repeats counts each time.
    """

    start: int
    run: int
    outer: tuple[tuple[int, int], ...]
    nbytes: int


def region_of(tensor: Tensor) -> Region:
    """The bytes of a view without dynamic offset."""
    width = tensor.dtype.itemsize
    dims = sorted(
        (stride * width, count)
        for stride, count in zip(tensor.strides, tensor.shape, strict=True)
        if count > 1 and stride
    )
    run = width
    outer: list[tuple[int, int]] = []
    for stride, count in dims:
        if stride == run and not outer:
            run *= count
        else:
            outer.append((stride, count))
    return Region(tensor.offset * width, run, tuple(outer), tensor.nbytes)


class Coverage:
    """Flags per granule of one tensor.

    Attributes:
        ever: who has touched it since the start.
        recent: who has touched it since the last barrier on it.
    """

    __slots__ = ("_nbytes", "ever", "granule", "recent")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.granule = math.gcd(nbytes, _COARSEST)
        self.ever = np.zeros(nbytes // self.granule, np.uint8)
        self.recent = np.zeros(nbytes // self.granule, np.uint8)

    def mark(self, region: Region, bit: int, *, conflicts: int = 0) -> int:
        """Flag a region and return the flags among `conflicts` that somebody had left there since the last
        barrier.
        """
        granule = math.gcd(self.granule, region.start, region.run, *(stride for stride, _ in region.outer))
        if granule != self.granule:
            factor = self.granule // granule
            self.ever, self.recent, self.granule = (
                np.repeat(self.ever, factor),
                np.repeat(self.recent, factor),
                granule,
            )
        recent = self._window(self.recent, region)
        found = 0
        if conflicts:
            hit = recent & np.uint8(conflicts)
            if hit.any():
                found = int(np.bitwise_or.reduce(hit, axis=None))
        recent |= np.uint8(bit)
        ever = self._window(self.ever, region)
        ever |= np.uint8(bit)
        return found

    def _window(self, flags: npt.NDArray[np.uint8], region: Region) -> npt.NDArray[np.uint8]:
        granule = self.granule
        shape = (*(count for _, count in region.outer), region.run // granule)
        strides = (*(stride // granule for stride, _ in region.outer), 1)
        window: npt.NDArray[np.uint8] = np.ndarray(shape, np.uint8, flags, region.start // granule, strides)
        return window

    def forget(self) -> None:
        """A barrier: what happened before it happens before everything after it."""
        self.recent[...] = 0

    def touched(self, bits: int) -> int:
        """Bytes that carry any of the flags."""
        return int(np.count_nonzero(self.ever & np.uint8(bits))) * self.granule

    def __reduce__(self) -> Any:
        raise TypeError("a coverage map is not meant to be stored; use the ledger's rows")
