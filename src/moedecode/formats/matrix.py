"""One weight matrix exactly as it is stored: codes, scales and what they are worth.

Rows are outputs, columns the contraction axis in the block order of the weights. Knows nothing of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..gates import require
from .numbers import MX_BLOCK, WeightFormat, e8m0_values, element_values

FP8_BLOCK = 128
"""Rows and columns that share one float scale in block-scaled FP8 (DeepSeek-V3)."""


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """``codes [rows, cols]`` in ``fmt`` (MXFP4: uint8 ``[rows, cols/2]``, low nibble first) with ``scale``.

    ``scale`` is None (plain floats), E8M0 uint8 ``[rows, ceil(cols/32)]`` for MX, for FP8 float32: ``[1]``
    per tensor, ``[rows]`` per row or ``[ceil(rows/128), ceil(cols/128)]`` per block.
    """

    fmt: WeightFormat
    codes: Array
    scale: Array | None = None

    def __post_init__(self) -> None:
        rows, cols = self.shape
        if self.fmt.is_mx:
            want: tuple[tuple[int, ...], ...] = ((rows, -(-cols // MX_BLOCK)),)
        elif self.fmt.is_fp8:
            want = ((1,), (rows,), (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)))
        else:
            require(
                self.scale is None,
                "scale",
                "given",
                f"{self.fmt.value} weights have no scale",
                "leave it out",
            )
            return
        got = None if self.scale is None else self.scale.shape
        require(
            got in want,
            "scale",
            f"shape {got}",
            f"{self.fmt.value} weights [{rows}, {cols}] need a scale of shape " + " or ".join(map(str, want)),
            "give the whole scale tensor",
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) in elements."""
        rows, cols = self.codes.shape
        return rows, cols * (2 if self.fmt is WeightFormat.MXFP4 else 1)

    def values(self) -> Array:
        """The matrix in float64, ``[rows, cols]``."""
        elements: Array = element_values(self.fmt, self.codes)
        if self.scale is None:
            return elements
        rows, cols = elements.shape
        if self.fmt.is_mx:
            scale: Array = np.repeat(e8m0_values(self.scale), MX_BLOCK, axis=1)[:, :cols]
        elif self.scale.ndim == 2:
            scale = np.repeat(np.repeat(self.scale, FP8_BLOCK, 0), FP8_BLOCK, 1)[:rows, :cols]
        else:
            scale = self.scale[:, None]
        values: Array = elements * scale.astype(np.float64)
        return values
