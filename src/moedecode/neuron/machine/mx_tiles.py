"""MX arithmetic on tiles as they lie in SBUF: 8 partitions x 4 packed elements share one E8M0 scale.

Owns the decode tables, the place of scale bytes on partitions, the block-scaled product and the quantiser.
Works on NumPy arrays alone: knows no tensors, chips or instructions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ...arrays import Array

__all__ = [
    "ELEMENTS",
    "block_product",
    "decode",
    "quantise_tile",
    "scale_partitions",
    "scale_rows",
]

BLOCK_PARTITIONS = 8
QUADRANT = 32
_BLOCKS_PER_QUADRANT = QUADRANT // BLOCK_PARTITIONS

ELEMENTS: dict[str, np.dtype[Any]] = {
    "float4_e2m1fn_x4": np.dtype(ml_dtypes.float4_e2m1fn),
    "float8_e4m3fn_x4": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2_x4": np.dtype(ml_dtypes.float8_e5m2),
}
"""Packed type -> type of one of its four elements."""

# Largest finite value, and its exponent, which the shared scale takes out (OCP MX v1.0, table 1).
_LARGEST = {"float8_e4m3fn_x4": 448.0, "float8_e5m2_x4": 57344.0}
_EMAX = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}


def _byte_table(element: np.dtype[Any]) -> Array:
    return np.arange(256, dtype=np.uint8).view(element).astype(np.float32)


def _nibble_tables() -> Array:
    """[4, 65536]: value of quad q of every 16-bit word; quad 0 is the lowest nibble."""
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    words = np.arange(1 << 16)
    return np.stack([values[(words >> 4 * quad) & 15] for quad in range(4)])


_E2M1 = _nibble_tables()
_BYTES = {
    name: _byte_table(element) for name, element in ELEMENTS.items() if element.itemsize == 1 and "8" in name
}
_E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)  # 0xFF is NaN


def decode(words: Array, packed: str) -> Array:
    """``words [P, N]`` (uint16 or uint32) of the packed type -> float32 ``[4, P, N]``, quad first."""
    if packed == "float4_e2m1fn_x4":
        values = np.empty((4, *words.shape), np.float32)
        for quad in range(4):
            np.take(_E2M1[quad], words, out=values[quad], mode="wrap")  # wrap: no bounds check, words fit
        return values
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    found: Array = np.take(_BYTES[packed], codes.transpose(2, 0, 1))  # [4, P, N]
    return found


@lru_cache(maxsize=8)
def scale_rows(partitions: int) -> Array:
    """Partition that holds the scale of each block of 8: block b of a quadrant sits on its row b."""
    block = np.arange(partitions // BLOCK_PARTITIONS)
    rows: Array = QUADRANT * (block // _BLOCKS_PER_QUADRANT) + block % _BLOCKS_PER_QUADRANT
    rows.flags.writeable = False
    return rows


def scale_partitions(partitions: int) -> int:
    """Partitions a scale tile must span for data of ``partitions``: up to its last used row."""
    return int(scale_rows(partitions)[-1]) + 1


def _operand(words: Array, scales: Array, packed: str) -> Array:
    """Dequantised ``[4 * P, N]``; ``scales`` is the tile in its on-chip form, [>= scale_partitions(P), N]."""
    partitions = words.shape[0]
    values = decode(words, packed)
    factor = np.repeat(_E8M0[scales[scale_rows(partitions)]], BLOCK_PARTITIONS, axis=0)  # [P, N]
    values *= factor
    return values.reshape(4 * partitions, -1)


def block_product(
    stationary: Array,
    stationary_scale: Array,
    stationary_type: str,
    moving: Array,
    moving_scale: Array,
    moving_type: str,
) -> Array:
    """stationary^T @ moving over partitions and quads: float32 ``[M, N]`` of words ``[P, M]`` and ``[P, N]``.

    Dequantised values are exact in float32 (3 mantissa bits at most, and a power of two), so only the order
    of the float32 sums is the machine's own.
    """
    left = _operand(stationary, stationary_scale, stationary_type)
    right = _operand(moving, moving_scale, moving_type)
    product: Array = np.matmul(left.T, right)
    return product


def quantise_tile(values: Array, packed: str, headroom: int = 0) -> tuple[Array, Array]:
    """Quantise ``values [P, 4 * N]`` (float32) to words uint32 ``[P, N]`` and scales uint8 ``[P / 8, N]``.

    Shared exponent = floor(log2(max|x|)) - (emax - headroom), clamped to the E8M0 range; elements round to
    nearest even and saturate. A block with NaN or Inf gets scale 0xFF, an all-zero block scale 0.
    """
    partitions, columns = values.shape[0], values.shape[1] // 4
    blocks = values.reshape(partitions // BLOCK_PARTITIONS, BLOCK_PARTITIONS, columns, 4)
    largest = np.abs(blocks).max(axis=(1, 3))  # [P / 8, N]
    bad = ~np.isfinite(largest)
    _, exponent = np.frexp(np.where(bad, np.float32(1), largest))  # largest = m * 2^exponent, m in [0.5, 1)
    code = np.clip(exponent - 1 - (_EMAX[packed] - headroom) + 127, 0, 254)
    code = np.where(largest == 0, 0, code)
    factor = np.ldexp(np.float64(1), 127 - code)[:, None, :, None]
    unit = np.where(bad[:, None, :, None], 0.0, blocks) * factor
    limit = _LARGEST[packed]
    elements = np.clip(unit, -limit, limit).astype(np.float32).astype(ELEMENTS[packed])
    words = np.ascontiguousarray(elements.reshape(partitions, 4 * columns)).view(np.uint32)
    return words, np.where(bad, 0xFF, code).astype(np.uint8)
