"""Owns allocations: one `Storage` is one tensor's bytes in SBUF, PSUM or HBM, poisoned at birth.

Must not know views, instructions or programs. Bytes of kernel inputs are the caller's own; nothing is copied.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import DType, holds_addresses, poison_byte
from .errors import ConstraintViolation

__all__ = ["Buffer", "StandIn", "Storage", "allocate", "wrap"]

_PARTITIONS = 128

_keys = itertools.count(1)


class Buffer(enum.Enum):
    """Where a tensor lives. `hbm` and `private_hbm` belong to one core, `shared_hbm` to both."""

    sbuf = "sbuf"
    psum = "psum"
    hbm = "hbm"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        """Whether the first dimension is the partition dimension."""
        return self in (Buffer.sbuf, Buffer.psum)

    @property
    def is_hbm(self) -> bool:
        """Whether the tensor is in HBM, shared or not."""
        return not self.on_chip


@dataclass(frozen=True)
class StandIn:
    """A kernel input without memory, for the ledger-only mode: `StandIn((128, 2880), nl.bfloat16)`."""

    shape: tuple[int, ...]
    dtype: DType

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))
        object.__setattr__(self, "dtype", np.dtype(dtype))


class Storage:
    """One allocation.

    Attributes:
        key: a number that no other storage has (object ids are reused, keys are not).
        buffer, name, shape, dtype: as allocated; shape[0] is the partition dimension on chip.
        core: the core that owns it, None where both cores see it (inputs and shared HBM).
        data: flat uint8 view of the bytes, None where there are none (ledger-only mode).
        real: whether the bytes mean something. In ledger-only mode whatever comes from the kernel's float
            inputs does not; it reads as zeros.
        written: per element, whether a PSUM location has been written; None elsewhere.
        is_input: whether the caller passed it in.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "buffer",
        "core",
        "data",
        "dtype",
        "is_input",
        "key",
        "name",
        "nbytes",
        "on_chip",
        "partition_bytes",
        "partitions",
        "poison",
        "real",
        "shape",
        "size",
        "written",
    )

    def __init__(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        name: str,
        core: int | None,
        data: npt.NDArray[np.uint8] | None,
        real: bool = True,
        poison: bool = True,
        is_input: bool = False,
        address: tuple[int, int] | None = None,
    ) -> None:
        self.key = next(_keys)
        self.buffer = buffer
        self.on_chip = buffer.on_chip
        self.shape = shape
        self.dtype = dtype
        self.name = name
        self.core = core
        self.data = data
        self.real = real
        self.poison = poison
        self.is_input = is_input
        self.address = address
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self.partitions = shape[0] if buffer.on_chip else 1
        self.partition_bytes = self.nbytes // self.partitions if self.partitions else 0
        self.written: npt.NDArray[np.bool_] | None = None

    def materialise(self) -> None:
        """Give it poisoned bytes if it has none."""
        if self.data is not None:
            return
        if self.poison:
            self.data = np.full(self.nbytes, poison_byte(self.dtype), np.uint8)
        else:
            self.data = np.zeros(self.nbytes, np.uint8)
        if self.buffer is Buffer.psum:
            self.written = np.zeros(self.size, np.bool_)

    @property
    def phantom(self) -> bool:
        """Whether it reads as zeros and drops what is stored (ledger-only mode)."""
        return not self.real

    def __repr__(self) -> str:
        where = "" if self.core is None else f" of core {self.core}"
        return f"{self.name!r} {list(self.shape)} {self.dtype} in {self.buffer.value}{where}"


def allocate(
    buffer: Buffer,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    name: str,
    core: int | None,
    limit: int | None = None,
    compute: bool = True,
    poison: bool = True,
    address: tuple[int, int] | None = None,
) -> Storage:
    """Allocate poisoned memory.

    Args:
        buffer: the memory.
        shape: elements; on chip shape[0] is the number of partitions and there is at least one more
            dimension.
        dtype: element type.
        name: for reports and messages.
        core: the owner, None for shared HBM.
        limit: bytes per partition that the memory has, checked on chip.
        compute: False in ledger-only mode: tensors that cannot hold addresses get no bytes before something
            real is written.
        poison: fill with NaN (see `dtypes.poison_byte`); off means zeros.
        address: (partition, byte) where the kernel places it, kept for reports.

    Raises:
        ConstraintViolation: more than 128 partitions, fewer than two dimensions on chip, an empty dimension,
            more bytes than the memory has.
    """
    if any(n <= 0 for n in shape) or not shape:
        raise ConstraintViolation(
            "nl.ndarray", f"shape={shape} ({name!r})", "every dimension must be at least 1"
        )
    if buffer.on_chip:
        if len(shape) < 2:
            raise ConstraintViolation(
                "nl.ndarray",
                f"shape={shape} ({name!r})",
                f"a tensor in {buffer.value} needs a partition and a free dimension",
            )
        if shape[0] > _PARTITIONS:
            raise ConstraintViolation(
                "nl.ndarray",
                f"shape={shape} ({name!r})",
                f"{buffer.value} has {_PARTITIONS} partitions; tile the first dimension",
            )
        per_partition = math.prod(shape[1:]) * dtype.itemsize
        if limit is not None and per_partition > limit:
            raise ConstraintViolation(
                "nl.ndarray",
                f"shape={shape} {dtype} ({name!r})",
                f"needs {per_partition} bytes per partition, {buffer.value} has {limit}; "
                "tile the free dimensions",
            )
    storage = Storage(buffer, shape, dtype, name=name, core=core, data=None, poison=poison, address=address)
    if compute or holds_addresses(dtype):
        storage.materialise()
    return storage


def wrap(source: npt.NDArray[Any] | StandIn, name: str, *, compute: bool = True) -> Storage:
    """Make an HBM tensor of a caller's array, without copying (a strided array is copied once), or of a
    stand-in without memory.

    In ledger-only mode only arrays of integers that can be addresses are real.
    """
    if isinstance(source, StandIn):
        return Storage(
            Buffer.hbm, source.shape, source.dtype, name=name, core=None, data=None, real=False, is_input=True
        )
    array = source if source.flags.c_contiguous else np.ascontiguousarray(source)
    shape = array.shape if array.ndim else (1,)
    data = array.reshape(-1).view(np.uint8)
    real = compute or holds_addresses(array.dtype)
    return Storage(Buffer.hbm, shape, array.dtype, name=name, core=None, data=data, real=real, is_input=True)
