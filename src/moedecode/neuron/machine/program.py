"""Owns one running program (core): which one is current, and what every instruction does around its
arithmetic: checks, accounts, load and store.

Must not know single instructions: they call `current().issue(...)`, `load` and `store`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import Array
from .chip import Chip
from .coverage import region_of
from .dtypes import holds_addresses, is_float, is_integer
from .errors import ConstraintViolation, MachineError
from .memory import Buffer, allocate
from .registers import Register
from .tensor import Tensor

if TYPE_CHECKING:
    from .cost import Cost
    from .machine import Machine

__all__ = ["Operand", "Program", "active", "current"]

Operand = Tensor | Sequence[Tensor]

_COMPUTE_ENGINES = frozenset({"tensor", "vector", "scalar", "gpsimd"})

_local = threading.local()


def active() -> Program | None:
    """The program that runs in this thread, or None."""
    return getattr(_local, "program", None)


def current() -> Program:
    """The program that runs in this thread.

    Raises:
        MachineError: none does; NKI names only work inside `Machine.run`.
    """
    program = active()
    if program is None:
        raise MachineError("no program is running: call the kernel with Machine(chip).run(kernel, ...)")
    return program


class Program:
    """One core of a run.

    Attributes:
        machine, core, count: the machine, this program's number and how many there are.
        chip: its limits and costs.
        compute: False in ledger-only mode.
        random: generator with the same seed on every core, for routings drawn in ledger-only mode.
        clock: number of instructions issued.
    """

    def __init__(self, machine: Machine, core: int, count: int) -> None:
        self.machine = machine
        self.core = core
        self.count = count
        self.chip: Chip = machine.chip
        self.compute = machine.compute
        self.random = np.random.default_rng(machine.seed)
        self.clock = 0
        self._shared = 0
        self._names: dict[str, int] = {}
        self._constants: dict[Any, Tensor] = {}

    def enter(self) -> None:
        """Make this the current program of the calling thread."""
        _local.program = self

    @staticmethod
    def leave() -> None:
        """No program is current in the calling thread any more."""
        _local.program = None

    # ---- memory ----

    def allocate(
        self,
        shape: Sequence[int],
        dtype: Any,
        buffer: Buffer,
        name: str | None = None,
        address: tuple[int, int] | None = None,
    ) -> Tensor:
        """A new poisoned tensor; the N-th `shared_hbm` allocation of all cores is one tensor.

        Raises:
            ConstraintViolation: see `memory.allocate`, or the cores disagree about a shared tensor.
        """
        extent = tuple(int(n) for n in shape)
        kind = np.dtype(dtype)
        label = self._label(name or buffer.value, named=name is not None)
        limits = {Buffer.sbuf: self.chip.sbuf_partition_bytes, Buffer.psum: self.chip.psum_partition_bytes}
        if buffer is not Buffer.shared_hbm:
            storage = allocate(
                buffer,
                extent,
                kind,
                name=label,
                core=self.core,
                limit=limits.get(buffer),
                compute=self.compute,
                poison=self.machine.poison,
                address=address,
            )
            return Tensor(storage)
        number, self._shared = self._shared, self._shared + 1
        shared = self.machine.shared
        if number == len(shared):
            shared.append(
                allocate(
                    buffer,
                    extent,
                    kind,
                    name=label,
                    core=None,
                    compute=self.compute,
                    poison=self.machine.poison,
                )
            )
        storage = shared[number]
        if storage.shape != extent or storage.dtype != kind:
            raise ConstraintViolation(
                "nl.ndarray",
                f"{label!r} {extent} {kind} in shared_hbm",
                f"is allocation number {number} of core {self.core}, but another core made it {storage!r}; "
                "all cores must allocate the same shared tensors in the same order",
            )
        return Tensor(storage)

    def _label(self, name: str, *, named: bool) -> str:
        seen = self._names.get(name, 0)
        self._names[name] = seen + 1
        return name if named and not seen else f"{name}#{seen}"

    def constant(self, key: Any, values: Array) -> Tensor:
        """A constant that the compiler puts into SBUF before the kernel starts (an identity matrix), made
        once per core.
        """
        tensor = self._constants.get(key)
        if tensor is None:
            tensor = self.allocate(values.shape, values.dtype, Buffer.sbuf, str(key))
            tensor.storage.materialise()
            tensor.array()[...] = values
            self.machine.liveness.touch(tensor.storage, self.core, self.clock)
            self._constants[key] = tensor
        return tensor

    # ---- instructions ----

    def issue(
        self,
        name: str,
        engine: str,
        dst: Operand | None,
        sources: Sequence[Operand | Any] = (),
        *,
        cost: Cost | None = None,
        schedule: bool = True,
    ) -> bool:
        """Account for one instruction before its arithmetic.

        Args:
            name: as in nki.isa.
            engine: "tensor", "vector", "scalar", "gpsimd", "dma" or "sync".
            dst: the tensor it writes, or several.
            sources: what it reads; entries that are not tensors (immediates, None) are ignored.
            cost: seconds on the engine; None costs nothing.
            schedule: False for a rendezvous, which puts itself on the timeline and moves its own data.

        Returns:
            Whether to do the arithmetic. Always True but in ledger-only mode: there, if all sources are real
            (constants, ids and what is computed from them) or the result is an integer that may be an
            address; else the result is marked as not real.

        Raises:
            ConstraintViolation: a compute engine on HBM, or an operand that is not a tensor of this core.
            RaceError: the access is not ordered with one of the other core.
        """
        reads = list(_flatten(sources))
        writes = list(_flatten((dst,)))
        for tensor in (*reads, *writes):
            if tensor.index is not None and isinstance(tensor.index.source, Tensor):
                reads.append(tensor.index.source)
        self.clock += 1
        machine, core = self.machine, self.core
        on_chip_only = engine in _COMPUTE_ENGINES
        for tensor in reads:
            self._use(name, tensor, on_chip_only, write=False)
        for tensor in writes:
            self._use(name, tensor, on_chip_only, write=True)
        if schedule and cost is not None:
            machine.timeline.add(
                core, name, engine, cost, [t.storage.key for t in reads], [t.storage.key for t in writes]
            )
        return self.compute or not schedule or self.executes(reads, writes)

    @staticmethod
    def executes(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
        """The data flow rule of the ledger-only mode, see `issue`; updates which tensors are real."""
        real = all(t.storage.real for t in reads)
        for tensor in writes:
            storage = tensor.storage
            if holds_addresses(storage.dtype):
                real = True  # loads of phantoms are zeros; instructions that choose experts draw instead
            elif real:
                storage.materialise()
                if not storage.real and tensor.size * tensor.dtype.itemsize >= storage.nbytes:
                    storage.real = True
            else:
                storage.real = False
        return real

    def _use(self, name: str, tensor: Tensor, on_chip_only: bool, *, write: bool) -> None:
        storage = tensor.storage
        if storage.core is not None and storage.core != self.core:
            raise ConstraintViolation(
                name,
                repr(tensor),
                f"belongs to core {storage.core}, this is core {self.core}; use sendrecv or shared_hbm",
            )
        if storage.on_chip:
            self.machine.liveness.touch(storage, self.core, self.clock)
            return
        if on_chip_only:
            raise ConstraintViolation(
                name, repr(tensor), "compute engines read and write SBUF and PSUM only; move it with dma_copy"
            )
        if write and storage.data is not None and not storage.data.flags.writeable:
            raise ConstraintViolation(
                name, repr(tensor), "is a read-only input; write to an nl.ndarray in nl.shared_hbm instead"
            )
        if tensor.index is not None:
            raise ConstraintViolation(name, repr(tensor), "dynamic HBM addresses are for DMA instructions")
        region = region_of(tensor)
        machine = self.machine
        machine.ledger.count(storage, self.core, region.nbytes, write=write)
        machine.races.access(storage, machine.ledger.coverage(storage), region, self.core, name, write=write)

    def resolved(self, tensor: Tensor, name: str = "ap") -> Tensor:
        """The view with its scalar dynamic offset added in.

        Raises:
            ConstraintViolation: out of bounds, or a vector offset (see `rows`).
        """
        index = tensor.index
        if index is None:
            return tensor
        if index.per_partition:
            raise ConstraintViolation(name, repr(tensor), "a vector offset is for DMA instructions")
        value = self.scalar(index.source)
        moved = tensor.moved(value * index.step)
        if not 0 <= value < index.limit or not moved.fits():
            raise ConstraintViolation(
                name,
                repr(tensor),
                f"dynamic offset {value} is out of bounds (0..{index.limit - 1}, view inside the tensor)",
            )
        return moved

    def scalar(self, source: Tensor | Register) -> int:
        """The value of an integer tensor of one element or of a register."""
        if isinstance(source, Register):
            return source.value
        self.machine.liveness.touch(source.storage, self.core, self.clock)
        return int(self.resolved(source).array().reshape(-1)[0])

    def load(self, tensor: Tensor) -> Array:
        """The values of an on-chip view: floats as float32, integers and x4 types as stored. Read-only; zeros
        for a phantom.
        """
        array = self.resolved(tensor).array()
        if array.dtype != np.float32 and is_float(array.dtype):
            widened: Array = array.astype(np.float32)
            return widened
        array.flags.writeable = False
        return array

    def store(self, tensor: Tensor, value: Any) -> None:
        """Write values, converted to the view's dtype.

        Floats round to nearest even; beyond the largest value they become infinity (NaN in float8_e4m3fn,
        which has no infinity): the machine does not saturate. Float to integer rounds to nearest even and
        saturates, NaN becomes 0. Between integers the low bits stay. Into bool everything but zero is True.
        """
        view = self.resolved(tensor)
        storage = view.storage
        if not storage.real or storage.data is None:
            return
        array = view.array()
        values = np.asarray(value)
        if values.dtype != array.dtype and values.dtype.names is None and array.dtype.names is None:
            values = _convert(values, array.dtype)
        array[...] = values
        if storage.written is not None:
            view.on(storage.written)[...] = True


def _flatten(operands: Sequence[Any]) -> Sequence[Tensor]:
    found: list[Tensor] = []
    for operand in operands:
        if isinstance(operand, Tensor):
            found.append(operand)
        elif isinstance(operand, list | tuple):
            found.extend(t for t in operand if isinstance(t, Tensor))
    return found


def _convert(values: Array, dtype: np.dtype[Any]) -> Array:
    if (is_integer(dtype) and dtype.kind != "b" and is_float(values.dtype)) or (
        values.dtype == np.float64 and dtype.kind in "iu"
    ):
        limits = np.iinfo(dtype)
        rounded = np.nan_to_num(
            np.rint(values.astype(np.float64)), nan=0.0, posinf=limits.max, neginf=limits.min
        )
        whole: Array = np.clip(rounded, limits.min, limits.max).astype(dtype)
        return whole
    if dtype.kind != "b" and is_float(dtype) and values.dtype == np.float64:
        return values.astype(np.float32).astype(dtype)
    return values.astype(dtype)
