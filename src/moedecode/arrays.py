"""NumPy views of what users hand in: NumPy arrays and torch tensors, without copying where layout allows.

Owns the border between torch and NumPy. Never imports torch: a tensor in hand proves that torch is loaded.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .gates import invalid

Array = NDArray[Any]

IO_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

_IO_NAMES = {dtype: name for name, dtype in IO_DTYPES.items()}

# Types NumPy cannot export by itself: torch name -> (integer type of the same width, ml_dtypes type).
_TORCH_BITS: dict[str, tuple[str, Any]] = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}


def is_torch(value: Any) -> bool:
    """True for a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_numpy(value: Any, argument: str) -> Array:
    """A NumPy view of an array or CPU tensor. Errors: :class:`~moedecode.gates.InvalidInput`."""
    if isinstance(value, np.ndarray):
        array = np.asarray(value)  # of a subclass, its plain array
    elif is_torch(value):
        array = _tensor_view(value, argument)
    elif isinstance(value, (list, tuple, int, float, np.generic)):
        array = _from_numbers(value, argument)
    else:
        kind, rule = type(value).__name__, "must be a NumPy array or a torch tensor"
        raise invalid(argument, kind, rule, "convert it first")
    if not array.dtype.isnative:
        rule = "is not in this machine's byte order"
        raise invalid(argument, f"array of {array.dtype.str}", rule, "convert it with astype")
    return array


def _from_numbers(value: Any, argument: str) -> Array:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        kind = type(value).__name__
        raise invalid(argument, kind, f"is not an array ({error})", "give rows of equal length") from error


def _tensor_view(tensor: Any, argument: str) -> Array:
    import torch

    if tensor.device.type != "cpu":
        raise invalid(argument, f"tensor on {tensor.device}", "must be in CPU memory", "call .cpu() on it")
    if tensor.layout is not torch.strided:
        raise invalid(argument, f"{tensor.layout} tensor", "must be dense", "call .to_dense() on it")
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        if name in _TORCH_BITS:
            bits, logical = _TORCH_BITS[name]
            return np.asarray(tensor.view(getattr(torch, bits)).numpy().view(logical))
        return np.asarray(tensor.numpy())
    except (TypeError, RuntimeError) as error:
        rule = "has no NumPy counterpart"
        raise invalid(argument, f"tensor of {name}", rule, "convert it to a plain dtype") from error


def check_single(**arguments: Any) -> None:
    """Refuse an array where one value is meant: positional arguments that slipped by one show here."""
    for argument, value in arguments.items():
        if not isinstance(value, np.ndarray) and not is_torch(value):
            continue
        shape = tuple(value.shape)
        if math.prod(shape) != 1:
            rule = "must be a single value"
            raise invalid(argument, f"array of shape {shape}", rule, "pass arguments by name")


def like_input(array: Array, example: Any) -> Any:
    """``array`` as the caller speaks: a torch tensor on its memory if ``example`` is one, else itself."""
    if not is_torch(example):
        return array
    import torch

    name = array.dtype.name
    if name in _TORCH_BITS:
        bits, _ = _TORCH_BITS[name]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(array)


def io_dtype(array: Array, argument: str) -> str:
    """The name of an input/output dtype: "float32", "float16" or "bfloat16"."""
    name = _IO_NAMES.get(array.dtype)
    if name is None:
        rule = "must be float32, float16 or bfloat16"
        raise invalid(argument, f"array of {array.dtype.name}", rule, "cast it first")
    return name


def as_float32(array: Array, argument: str) -> Array:
    """A contiguous float32 array of the values of ``array``, which must be floats."""
    name = array.dtype.name
    if name not in IO_DTYPES and name != "float64":
        raise invalid(argument, f"array of {name}", "must hold floats", "cast it to float32")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, np.float32)
