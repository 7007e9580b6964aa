"""Our arrays as the torch tensors that peers on torch want. Imports torch only when called."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import IO_DTYPES, Array

__all__ = ["floats", "tensor"]


def tensor(array: Array) -> Any:
    """A torch tensor on the memory of a bfloat16 array."""
    import torch

    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(np.ascontiguousarray(writable).view(np.int16)).view(torch.bfloat16)


def floats(array: Array | None) -> Any:
    """A bfloat16 torch tensor of the values of a float32 array."""
    assert array is not None
    return tensor(array.astype(IO_DTYPES["bfloat16"]))
