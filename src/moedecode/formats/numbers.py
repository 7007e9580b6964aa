"""Number formats of stored weights: which codes exist and what each is worth.

Owns E2M1, E4M3, E5M2 and E8M0 (OCP Microscaling Formats v1.0, section 5) on top of ml_dtypes.
Knows nothing of matrices, experts or layouts.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import Array

MX_BLOCK = 32
"""Elements that share one E8M0 scale."""


class WeightFormat(Enum):
    """How the elements of a weight matrix are stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    MXFP8_E4M3 = "mxfp8_e4m3"
    MXFP8_E5M2 = "mxfp8_e5m2"
    MXFP4 = "mxfp4"

    def __repr__(self) -> str:
        return f"WeightFormat.{self.name}"

    @property
    def is_mx(self) -> bool:
        """True when every 32 elements share an E8M0 scale."""
        return self in (WeightFormat.MXFP8_E4M3, WeightFormat.MXFP8_E5M2, WeightFormat.MXFP4)

    @property
    def is_fp8(self) -> bool:
        """True for 8-bit elements whose scale, if any, is a float."""
        return self in (WeightFormat.FP8_E4M3, WeightFormat.FP8_E5M2)

    @property
    def element(self) -> np.dtype[Any]:
        """The element's dtype. MXFP4 elements are stored two to a byte, the first in the low nibble."""
        return _ELEMENT[self]

    @property
    def bits(self) -> int:
        """Bits per element without scales."""
        return 4 if self is WeightFormat.MXFP4 else self.element.itemsize * 8

    @property
    def bits_with_scale(self) -> float:
        """Bits per element, E8M0 scales included."""
        return self.bits + (8 / MX_BLOCK if self.is_mx else 0)


_ELEMENT: dict[WeightFormat, np.dtype[Any]] = {
    WeightFormat.FP32: np.dtype(np.float32),
    WeightFormat.FP16: np.dtype(np.float16),
    WeightFormat.BF16: np.dtype(ml_dtypes.bfloat16),
    WeightFormat.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    WeightFormat.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    WeightFormat.MXFP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    WeightFormat.MXFP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    WeightFormat.MXFP4: np.dtype(ml_dtypes.float4_e2m1fn),
}


def e8m0_values(codes: Array) -> Array:
    """Scales of E8M0 ``codes`` (uint8, any shape) in float64: 2^(code-127), 0xFF is NaN."""
    values: Array = np.ldexp(1.0, codes.astype(np.int32) - 127)
    return np.where(codes == 0xFF, np.nan, values)


def split_nibbles(packed: Array) -> Array:
    """uint8 ``[..., n]`` to 4-bit codes uint8 ``[..., 2n]``, low nibble first."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    out[..., 0::2] = packed & 0xF
    out[..., 1::2] = packed >> 4
    return out


def join_nibbles(codes: Array) -> Array:
    """4-bit codes uint8 ``[..., 2n]`` to uint8 ``[..., n]``, low nibble first."""
    joined: Array = (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)
    return joined


def element_values(fmt: WeightFormat, codes: Array) -> Array:
    """Values (float64) of stored elements without their scales; MXFP4 ``codes`` are packed two to a byte."""
    if fmt is WeightFormat.MXFP4:
        codes = split_nibbles(codes)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return codes.view(fmt.element).astype(np.float64)
