"""From the dtype of a weight tensor (and the name a user may give it) to its :class:`WeightFormat`.

Owns the names of the packed x4 types and the reading of IEEE-style float8_e4m3. Knows nothing of layouts.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import Array
from ..gates import invalid, require
from .numbers import WeightFormat

# Logical dtype name -> (format without E8M0 scales, format with them). None: does not exist.
_BY_NAME: dict[str, tuple[WeightFormat | None, WeightFormat | None]] = {
    "float32": (WeightFormat.FP32, None),
    "float16": (WeightFormat.FP16, None),
    "bfloat16": (WeightFormat.BF16, None),
    "float8_e4m3fn": (WeightFormat.FP8_E4M3, WeightFormat.MXFP8_E4M3),
    "float8_e4m3": (WeightFormat.FP8_E4M3, WeightFormat.MXFP8_E4M3),
    "float8_e5m2": (WeightFormat.FP8_E5M2, WeightFormat.MXFP8_E5M2),
    "float4_e2m1fn": (None, WeightFormat.MXFP4),
    "float4_e2m1fn_x4": (None, WeightFormat.MXFP4),
    "float8_e4m3fn_x4": (None, WeightFormat.MXFP8_E4M3),
    "float8_e5m2_x4": (None, WeightFormat.MXFP8_E5M2),
}

X4_CONTAINERS: dict[str, np.dtype[Any]] = {
    "float4_e2m1fn_x4": np.dtype(np.uint16),
    "float8_e4m3fn_x4": np.dtype(np.uint32),
    "float8_e5m2_x4": np.dtype(np.uint32),
}
"""Integer types that hold four elements, the first in the lowest bits."""

_DEFAULT_OF_CONTAINER = {"uint16": "float4_e2m1fn_x4", "uint32": "float8_e4m3fn_x4", "uint8": "float8_e4m3fn"}


def logical_dtype(array: Array, declared: Any, argument: str) -> str:
    """The logical dtype name of ``array``: what was ``declared``, else what its own dtype says."""
    own = str(array.dtype.name)
    if declared is None:
        return _DEFAULT_OF_CONTAINER.get(own, own)
    name = str(getattr(declared, "__name__", declared)).removeprefix("torch.")
    require(
        name in _BY_NAME,
        "expert_weight_dtype",
        repr(name),
        "is not a weight dtype",
        f"choose one of {', '.join(_BY_NAME)}",
    )
    if name in X4_CONTAINERS:
        want = X4_CONTAINERS[name].name
        require(
            own == want,
            argument,
            f"array of {own}",
            f"{name} is stored in {want}",
            "view the array as that type",
        )
    elif own != name:
        narrow = own == "uint8" and name.startswith("float")
        require(narrow, argument, f"array of {own}", f"is declared {name}", "view the array as that type")
    return name


def weight_format(name: str, has_e8m0_scale: bool, argument: str) -> WeightFormat:
    """The format of elements of logical dtype ``name``, with or without E8M0 scales."""
    plain, mx = _BY_NAME.get(name, (None, None))
    found = mx if has_e8m0_scale else plain
    if found is None:
        kind = "with E8M0 scales" if has_e8m0_scale else "without E8M0 (uint8) scales"
        raise invalid(
            argument,
            f"array of {name}",
            f"is not a weight format {kind}",
            "check the dtype and the scale tensor",
        )
    return found


def is_e8m0(scale: Array | None) -> bool:
    """True when ``scale`` holds E8M0 codes rather than floats."""
    return scale is not None and scale.dtype.name in ("uint8", "float8_e8m0fnu")


def as_codes(array: Array, name: str, argument: str) -> Array:
    """``array`` in the dtype its format stores: IEEE-style float8_e4m3 becomes float8_e4m3fn."""
    if name == "float8_e4m3":
        bits = array.view(np.uint8)
        magnitude = bits & 0x7F
        if (magnitude == 0x78).any():
            raise invalid(
                argument,
                "an infinity of float8_e4m3",
                "has no float8_e4m3fn code",
                "saturate the weights to 240",
            )
        bits = np.where(magnitude > 0x78, bits | 0x7F, bits)
        return bits.view(ml_dtypes.float8_e4m3fn)
    if name.startswith("float8") and array.dtype == np.uint8:
        return array.view(ml_dtypes.float8_e4m3fn if "e4m3" in name else ml_dtypes.float8_e5m2)
    return array
