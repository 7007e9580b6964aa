"""Owns the verdict: how far the library's kernel, its own reference and the right answer are from each other,
and what that means.

Must not know how any of the three was computed.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BOUNDS", "Difference", "Verdict", "compared", "judged"]

Array = npt.NDArray[Any]

BOUNDS = {
    # relative L2 and the worst row's; the kernels accumulate in the io dtype and keep gate and up in 16 bits
    "plain": (1.5e-2, 4e-2),
    # one moved E4M3 code is 6% of an element, and bf16 moves about one in twenty
    "mx": (6e-2, 1e-1),
    "router": (1e-2, 2e-2),
    "norm": (5e-3, 1e-2),
}


class Verdict(enum.Enum):
    """What a row of the table says."""

    agrees = "agrees"  # kernel, its reference and ours
    kernel_wrong = "kernel wrong"  # it disagrees with its reference, which is right by ours
    reference_wrong = "reference wrong"  # they disagree, and the kernel is right by ours
    both_wrong = "both wrong"
    unwritten = "unwritten memory"  # its result depends on memory that nobody wrote
    refused = "refused"  # by an assert of its own
    fails = "fails"  # with an exception that is no assert
    machine = "breaks a rule"  # of the machine


@dataclass(frozen=True)
class Difference:
    """Between two outputs `[T, N]`.

    Attributes:
        l2: relative L2 over everything.
        row: the worst row's relative L2 (rows smaller than 1% of the average are measured against that).
        rows: numbers of the rows beyond the row bound, worst first.
    """

    l2: float
    row: float
    rows: tuple[int, ...] = ()

    def within(self, kind: str) -> bool:
        """Whether both figures are inside the bounds of a kind of kernel; NaN is not."""
        whole, row = BOUNDS[kind]
        return self.l2 <= whole and self.row <= row


def compared(got: Any, want: Any, kind: str = "plain") -> Difference:
    """How far `got [T, N]` is from `want [T, N]`; NaN anywhere makes it NaN."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"outputs of shape {a.shape} and {b.shape} cannot be compared")
    scale = math.sqrt(float((b * b).sum(-1).mean())) or 1.0
    distance, size = np.linalg.norm(a - b, axis=-1), np.linalg.norm(b, axis=-1)
    rows = distance / np.maximum(size, 1e-2 * scale)  # [T]
    order = np.argsort(-np.nan_to_num(rows, nan=np.inf), kind="stable")
    far = tuple(int(t) for t in order if not rows[t] <= BOUNDS[kind][1])
    whole = float(np.linalg.norm(distance)) / (float(np.linalg.norm(size)) or 1.0)
    return Difference(whole, float(rows.max()) if not np.isnan(rows).any() else math.nan, far)


def judged(
    kernel_to_reference: Difference, kernel_to_truth: Difference, reference_to_truth: Difference, kind: str
) -> Verdict:
    """The verdict on one output."""
    if kernel_to_reference.within(kind) and kernel_to_truth.within(kind):
        return Verdict.agrees
    kernel, reference = kernel_to_truth.within(kind), reference_to_truth.within(kind)
    if kernel and reference:
        return Verdict.agrees  # each within its bound of the truth, on different sides of it
    if kernel:
        return Verdict.reference_wrong
    return Verdict.kernel_wrong if reference else Verdict.both_wrong
