"""NumPy views of what users hand in: NumPy arrays and torch tensors, without copying where layout allows.

Owns the border between torch and NumPy. Never imports torch: a tensor in hand proves that torch is loaded.
"""

from __future__ import annotations

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
        return value
    if is_torch(value):
        return _tensor_view(value, argument)
    if isinstance(value, (list, tuple, int, float, np.generic)):
        return np.asarray(value)
    raise invalid(
        argument, type(value).__name__, "must be a NumPy array or a torch tensor", "convert it first"
    )


def _tensor_view(tensor: Any, argument: str) -> Array:
    import torch

    if tensor.device.type != "cpu":
        raise invalid(argument, f"tensor on {tensor.device}", "must be in CPU memory", "call .cpu() on it")
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _TORCH_BITS:
        bits, logical = _TORCH_BITS[name]
        return np.asarray(tensor.view(getattr(torch, bits)).numpy().view(logical))
    try:
        return np.asarray(tensor.numpy())
    except (TypeError, RuntimeError) as error:
        raise invalid(
            argument, f"tensor of {name}", "has no NumPy counterpart", "convert it to a plain dtype"
        ) from error


def like_input(array: Array, example: Any) -> Any:
    """``array`` as the caller speaks: a torch tensor sharing its memory if ``example`` is one, else itself."""
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
    name = str(array.dtype.name)
    if name not in IO_DTYPES:
        raise invalid(argument, f"array of {name}", "must be float32, float16 or bfloat16", "cast it first")
    return name
