"""The names of nki.language: memories, dtypes, allocation, indices, program ids, loops and operators.

Owns what a kernel needs besides instructions. Must not know single instructions.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .chip import CHIPS
from .dtypes import (
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float16,
    float32,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .memory import Buffer
from .ops import OPS
from .program import active, current
from .tensor import Tensor

# Dtypes carry their NumPy names; `nl.bool` and `nl.bool_` are one.
globals()["bool"] = bool_

sbuf = Buffer.sbuf
psum = Buffer.psum
hbm = Buffer.hbm
private_hbm = Buffer.private_hbm
shared_hbm = Buffer.shared_hbm

NkiTensor = Tensor


class _LenientDataclass(type):
    """Construction in the kernel language: a required field of a dataclass that is not given is None."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if dataclasses.is_dataclass(cls):
            fields = {field.name for field in dataclasses.fields(cls)}
            parameters = list(inspect.signature(cls.__init__).parameters.values())[1 + len(args) :]
            for parameter in parameters:
                if parameter.default is parameter.empty and parameter.name in fields:
                    kwargs.setdefault(parameter.name, None)
        return super().__call__(*args, **kwargs)


class NKIObject(metaclass=_LenientDataclass):
    """Base class of a kernel's own parameter objects.

    Dataclasses derived from it may be built with required fields left out.
    """


class _TileSize:
    """Limits of a tile on the chip that the kernel runs on (trn2's where none runs)."""

    pmax = 128
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512

    @property
    def _chip(self) -> Any:
        program = active()
        return CHIPS["trn2"] if program is None else program.chip

    @property
    def psum_fmax(self) -> int:
        """float32 elements per partition of a PSUM bank."""
        return int(self._chip.psum_bank_bytes) // 4

    @property
    def psum_min_align(self) -> int:
        """Bytes."""
        return 4

    @property
    def sbuf_min_align(self) -> int:
        """Bytes."""
        return 1

    @property
    def total_available_sbuf_size(self) -> int:
        """Bytes per partition."""
        return int(self._chip.sbuf_partition_bytes)


tile_size = _TileSize()


def ndarray(
    shape: Sequence[int] | int,
    dtype: Any = float32,
    buffer: Buffer = Buffer.sbuf,
    name: str | None = None,
    address: Any = None,
    **_: Any,
) -> Tensor:
    """Allocate a tensor of undefined (NaN-poisoned) content.

    Args:
        shape: on chip the first dimension is the partition dimension.
        dtype: element type.
        buffer: `nl.sbuf`, `nl.psum`, `nl.hbm` / `nl.private_hbm` (this core's) or `nl.shared_hbm` (of both
            cores).
        name: for reports.
        address: (partition, byte) where the kernel wants it; reports only, tensors never overlap here.

    Raises:
        ConstraintViolation: see `Program.allocate`.
    """
    extent = (shape,) if isinstance(shape, int) else tuple(shape)
    return current().allocate(extent, dtype, Buffer(getattr(buffer, "value", buffer)), name, address)


def zeros(
    shape: Sequence[int],
    dtype: Any = float32,
    buffer: Buffer = Buffer.sbuf,
    name: str | None = None,
    **_: Any,
) -> Tensor:
    """Allocate a tensor of zeros (a memset that costs nothing; kernels that care issue `nisa.memset`)."""
    tensor = ndarray(shape, dtype, buffer, name)
    tensor.storage.materialise()
    tensor.array()[...] = np.zeros((), tensor.dtype)
    return tensor


def ds(start: int, size: int) -> slice:
    """`size` elements from `start`, as an index."""
    return slice(int(start), int(start) + int(size))


def program_id(axis: int = 0) -> int:
    """Number of this program (core)."""
    return current().core if axis == 0 else 0


def num_programs(axes: int | Sequence[int] | None = 0) -> int:
    """Number of programs that run together."""
    del axes  # the grid has one dimension
    return current().count


def program_ndim() -> int:
    """Dimensions of the grid: 1, or 0 where a single program runs without a grid."""
    return 1 if current().count > 1 else 0


def affine_range(*bounds: Any, **_: Any) -> Iterable[int]:
    """A loop whose iterations are independent."""
    return range(*(int(b) for b in bounds))


def sequential_range(*bounds: Any, **_: Any) -> Iterable[int]:
    """A loop whose iterations depend on each other."""
    return range(*(int(b) for b in bounds))


def static_range(*bounds: Any, **_: Any) -> Iterable[int]:
    """A loop that the compiler unrolls."""
    return range(*(int(b) for b in bounds))


def shared_identity_matrix(n: int, dtype: Any = uint8) -> Tensor:
    """The n x n identity in SBUF, there before the kernel starts."""
    kind = np.dtype(dtype)
    return current().constant(f"identity {n} {kind}", np.eye(n, dtype=np.float32).astype(kind))


def device_print(*_: Any, **__: Any) -> None:
    """Ignored: use `Tensor.numpy()` under a debugger instead."""


globals().update(OPS)

__all__ = [
    "NKIObject",
    "NkiTensor",
    "affine_range",
    "bfloat16",
    "bool_",
    "device_print",
    "ds",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float16",
    "float32",
    "hbm",
    "int8",
    "int16",
    "int32",
    "int64",
    "ndarray",
    "num_programs",
    "private_hbm",
    "program_id",
    "program_ndim",
    "psum",
    "sbuf",
    "sequential_range",
    "shared_hbm",
    "shared_identity_matrix",
    "static_range",
    "tile_size",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "zeros",
]
__all__ += list(OPS)
