"""Quantising to Microscaling (MX) formats: one E8M0 scale per 32 elements of the last axis.

Rule (OCP MX v1.0, section 6.3): shared exponent = floor(log2(max|x|)) - emax(format), clamped to the
E8M0 range; elements round to nearest, ties to even, and saturate. A block with NaN or Inf gets scale 0xFF.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from .numbers import MX_BLOCK, WeightFormat, e8m0_values, join_nibbles

_EMAX = {WeightFormat.MXFP8_E4M3: 8, WeightFormat.MXFP8_E5M2: 15, WeightFormat.MXFP4: 2}
_LARGEST = {WeightFormat.MXFP8_E4M3: 448.0, WeightFormat.MXFP8_E5M2: 57344.0, WeightFormat.MXFP4: 6.0}


def quantise_mx(values: Array, fmt: WeightFormat) -> tuple[Array, Array]:
    """Quantise ``values [..., n]`` (any float dtype) to ``fmt``.

    Returns ``(codes, scales)``: codes uint8 ``[..., n]`` (MXFP4: ``[..., n/2]``, low nibble first) and E8M0
    scales uint8 ``[..., ceil(n/32)]``. A last block shorter than 32 is quantised over what it has.
    """
    n = values.shape[-1]
    blocks = -(-n // MX_BLOCK)
    padded = np.zeros((*values.shape[:-1], blocks * MX_BLOCK))
    padded[..., :n] = values
    padded = padded.reshape(*values.shape[:-1], blocks, MX_BLOCK)

    amax = np.abs(padded).max(-1)
    bad = ~np.isfinite(amax)
    _, exponent = np.frexp(np.where(bad, 1.0, amax))  # amax = m * 2^exponent with m in [0.5, 1)
    code = np.clip(exponent - 1 - _EMAX[fmt] + 127, 0, 254)
    code = np.where(amax == 0, 0, code)
    scales = np.where(bad, 0xFF, code).astype(np.uint8)

    unit = np.where(bad[..., None], 0.0, padded) / np.ldexp(1.0, code - 127)[..., None]
    unit = np.clip(unit, -_LARGEST[fmt], _LARGEST[fmt]).astype(np.float32)
    codes = unit.astype(fmt.element).view(np.uint8).reshape(*values.shape[:-1], blocks * MX_BLOCK)[..., :n]
    return (join_nibbles(codes) if fmt is WeightFormat.MXFP4 else np.ascontiguousarray(codes)), scales


def dequantise_e4m3(values: Array) -> Array:
    """``values [..., n]`` after a trip through MXFP8 E4M3 (n a multiple of 32), in float64."""
    codes, scales = quantise_mx(values, WeightFormat.MXFP8_E4M3)
    elements = codes.view(WeightFormat.MXFP8_E4M3.element).astype(np.float64)
    dequantised: Array = elements * np.repeat(e8m0_values(scales), MX_BLOCK, axis=-1)[..., : values.shape[-1]]
    return dequantised
