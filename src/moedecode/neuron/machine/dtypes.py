"""Owns the number formats of the machine as NumPy dtypes, their poison patterns and the packing of the x4
types.

Must not know tensors, memories or instructions. The x4 types hold four codes that the matrix unit reads as
one element; they are structured dtypes of one field so that they differ from the plain integers of the same
width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...arrays import Array

__all__ = [
    "DTYPES",
    "bfloat16",
    "bool_",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float16",
    "float32",
    "holds_addresses",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_float",
    "is_integer",
    "is_poison",
    "is_x4",
    "itemsize",
    "pack_x4",
    "poison_byte",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unpack_x4",
    "x4_element",
]

DType = np.dtype[Any]

float32: DType = np.dtype(np.float32)
float16: DType = np.dtype(np.float16)
bfloat16: DType = np.dtype(ml_dtypes.bfloat16)
float8_e4m3: DType = np.dtype(ml_dtypes.float8_e4m3)  # with infinity, largest value 240
float8_e4m3fn: DType = np.dtype(ml_dtypes.float8_e4m3fn)  # OCP: no infinity, largest value 448
float8_e5m2: DType = np.dtype(ml_dtypes.float8_e5m2)
int8: DType = np.dtype(np.int8)
int16: DType = np.dtype(np.int16)
int32: DType = np.dtype(np.int32)
int64: DType = np.dtype(np.int64)
uint8: DType = np.dtype(np.uint8)
uint16: DType = np.dtype(np.uint16)
uint32: DType = np.dtype(np.uint32)
uint64: DType = np.dtype(np.uint64)
bool_: DType = np.dtype(np.bool_)
float4_e2m1fn_x4: DType = np.dtype([("float4_e2m1fn_x4", "<u2")])
float8_e4m3fn_x4: DType = np.dtype([("float8_e4m3fn_x4", "<u4")])
float8_e5m2_x4: DType = np.dtype([("float8_e5m2_x4", "<u4")])

_FLOATS = frozenset({float32, float16, bfloat16, float8_e4m3, float8_e4m3fn, float8_e5m2})
_X4_ELEMENT: dict[DType, DType] = {
    float4_e2m1fn_x4: np.dtype(ml_dtypes.float4_e2m1fn),
    float8_e4m3fn_x4: float8_e4m3fn,
    float8_e5m2_x4: float8_e5m2,
}
# Largest finite element, by the OCP definitions.
_LARGEST: dict[DType, float] = {float4_e2m1fn_x4: 6.0, float8_e4m3fn_x4: 448.0, float8_e5m2_x4: 57344.0}
DTYPES: dict[str, DType] = {
    "float32": float32,
    "float16": float16,
    "bfloat16": bfloat16,
    "float8_e4m3": float8_e4m3,
    "float8_e4m3fn": float8_e4m3fn,
    "float8_e5m2": float8_e5m2,
    "int8": int8,
    "int16": int16,
    "int32": int32,
    "int64": int64,
    "uint8": uint8,
    "uint16": uint16,
    "uint32": uint32,
    "uint64": uint64,
    "bool": bool_,
    "float4_e2m1fn_x4": float4_e2m1fn_x4,
    "float8_e4m3fn_x4": float8_e4m3fn_x4,
    "float8_e5m2_x4": float8_e5m2_x4,
}


def is_x4(dtype: DType) -> bool:
    """Whether the dtype is one of the packed types of four codes."""
    return dtype in _X4_ELEMENT


def is_float(dtype: DType) -> bool:
    """Whether instructions compute on the dtype as a float (x4 types are not: only the MX instructions read
    them).
    """
    return dtype in _FLOATS


def is_integer(dtype: DType) -> bool:
    """Whether the dtype is a plain integer or bool."""
    return dtype.kind in "iub"


def holds_addresses(dtype: DType) -> bool:
    """Whether values of the dtype can be ids and offsets (integers of 16 bits and more); the ledger-only mode
    keeps them real.
    """
    return dtype.kind in "iu" and dtype.itemsize > 1


def itemsize(dtype: DType) -> int:
    """Bytes of one element; an x4 type counts as one element of 2 or 4 bytes."""
    return int(dtype.itemsize)


def x4_element(dtype: DType) -> DType:
    """The dtype of the four codes inside an x4 type."""
    return _X4_ELEMENT[dtype]


def poison_byte(dtype: DType) -> int:
    """The byte that fills memory nobody has written.

    0xFF is NaN in every float format here and in E8M0, and the largest value of an unsigned integer. Signed
    integers get 0x7F: all ones would be -1, which kernels use for "nothing here" (see `is_poison`).
    """
    if dtype.kind == "i":
        return 0x7F
    return 0x01 if dtype.kind == "b" else 0xFF


def is_poison(value: int, dtype: DType) -> bool:
    """Whether a signed integer of 16 bits or more is one that nobody has written."""
    return (
        dtype.kind == "i"
        and dtype.itemsize > 1
        and value == int.from_bytes(b"\x7f" * dtype.itemsize, "little")
    )


@lru_cache(maxsize=8)
def _decode_table(dtype: DType) -> npt.NDArray[np.float32]:
    element = _X4_ELEMENT[dtype]
    if dtype == float4_e2m1fn_x4:
        words = np.arange(1 << 16, dtype=np.uint32)
        codes = (words[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & 15  # [65536, 4], lowest nibble first
        return codes.astype(np.uint8).view(element).astype(np.float32)
    return np.arange(256, dtype=np.uint8).view(element).astype(np.float32)


def unpack_x4(array: Array) -> npt.NDArray[np.float32]:
    """Decode an array of an x4 type.

    Args:
        array: [...] of float4_e2m1fn_x4 (lowest nibble first), float8_e4m3fn_x4 or float8_e5m2_x4 (lowest
            byte first).

    Returns:
        [..., 4] float32, the four codes of each element.
    """
    table = _decode_table(array.dtype)
    words = array[array.dtype.names[0]]  # type: ignore[index]
    if array.dtype == float4_e2m1fn_x4:
        return np.take(table, words, axis=0)
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return np.take(table, codes)


def pack_x4(values: Array, dtype: DType) -> Array:
    """Round float32 values to the element type (nearest even, saturating) and pack four to an element.

    Args:
        values: [..., 4] float32; already divided by their scale.
        dtype: an x4 type.

    Returns:
        [...] of `dtype`. NaN stays NaN in the 8-bit types; float4_e2m1fn has none and gets its sign bit with
        code 7.
    """
    element = _X4_ELEMENT[dtype]
    largest = _LARGEST[dtype]
    clipped = np.clip(values.astype(np.float32, copy=False), -largest, largest)
    codes = np.ascontiguousarray(clipped.astype(element)).view(np.uint8)
    if dtype != float4_e2m1fn_x4:
        return codes.view(dtype)[..., 0]
    nibbles = codes.astype(np.uint16) & 15
    words = nibbles[..., 0] | nibbles[..., 1] << 4 | nibbles[..., 2] << 8 | nibbles[..., 3] << 12
    return words.astype(np.uint16).view(dtype)
