"""Owns a machine: it runs a kernel as SPMD programs on one chip and keeps what they did in a report.

Must not know single instructions or kernels.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .baton import Baton, Stopped
from .chip import Chip, chip_named
from .errors import MachineError
from .ledger import Ledger, LedgerRow
from .liveness import Lifetime, Liveness
from .memory import Buffer, StandIn, Storage, wrap
from .program import Program, active
from .races import Race, RaceDetector
from .tensor import Tensor
from .timeline import Timeline

__all__ = ["Machine", "Report", "Result"]


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes:
        chip: the chip.
        ledger: HBM traffic; `ledger.rows()`, `.bytes_read`, `.bytes_written`, `.named(tensor)`.
        liveness: on-chip lifetimes; `liveness.residency()`, `.peak(buffer)`.
        timeline: cost per engine; `timeline.bounds()`, `.bottleneck()`, `.makespan()`, `.trace()`.
        races: conflicts on shared HBM (empty unless the machine records them instead of raising).
        instructions: per core.
    """

    chip: Chip
    ledger: Ledger
    liveness: Liveness
    timeline: Timeline
    races: Sequence[Race]
    instructions: tuple[int, ...]

    @property
    def rows(self) -> Sequence[LedgerRow]:
        """HBM traffic per tensor."""
        return self.ledger.rows()

    @property
    def residency(self) -> Sequence[Lifetime]:
        """On-chip tensors with first and last use."""
        return self.liveness.residency()

    @property
    def hbm_bytes(self) -> int:
        """Bytes read from and written to HBM by all cores."""
        return self.ledger.bytes_moved

    @property
    def sbuf_peak(self) -> int:
        """Bytes per partition of SBUF that are alive at once, on the fuller core."""
        return self.liveness.peak(Buffer.sbuf)

    @property
    def psum_peak(self) -> int:
        """The same for PSUM."""
        return self.liveness.peak(Buffer.psum)


@dataclass(frozen=True)
class Result:
    """Outputs of core 0 (tensors as NumPy arrays, structured as the kernel returned them) and the report."""

    outputs: Any
    report: Report


class Machine:
    """A chip on which kernels run.

    Args:
        chip: "trn1", "trn2", "trn3" or a `Chip`.
        compute: False is the ledger-only mode: instructions and addresses are executed, large float data is
            not.
        poison: fill fresh memory with NaN.
        check_capacity: raise if the live tensors do not fit SBUF or PSUM.
        on_race: "raise" or "record".
        barrier_scope: "tensor": a core_barrier orders accesses to the tensor it is given; "all": to every
            tensor.
        barrier_on_chip: let core_barrier name a tensor in SBUF or PSUM: its documentation asks for shared
            HBM, public kernels do it.
        seed: of the routings drawn in ledger-only mode.
    """

    def __init__(
        self,
        chip: str | Chip = "trn3",
        *,
        compute: bool = True,
        poison: bool = True,
        check_capacity: bool = True,
        on_race: str = "raise",
        barrier_scope: str = "tensor",
        barrier_on_chip: bool = False,
        seed: int = 0,
    ) -> None:
        if on_race not in ("raise", "record"):
            raise ValueError(f'on_race={on_race!r}: must be "raise" or "record"')
        if barrier_scope not in ("tensor", "all"):
            raise ValueError(f'barrier_scope={barrier_scope!r}: must be "tensor" or "all"')
        self.chip = chip_named(chip) if isinstance(chip, str) else chip
        self.compute = compute
        self.poison = poison
        self.check_capacity = check_capacity
        self.on_race = on_race
        self.barrier_scope = barrier_scope
        self.barrier_on_chip = barrier_on_chip
        self.seed = seed
        self._reset(1)

    def _reset(self, count: int) -> None:
        self.shared: list[Storage] = []
        self.ledger = Ledger(count)
        self.liveness = Liveness()
        self.races = RaceDetector(count, self.on_race, self.barrier_scope)
        self.timeline = Timeline(self.chip)
        self.baton = Baton(count)
        self.report: Report | None = None

    def run(self, kernel: Callable[..., Any], *args: Any, n_programs: int = 2, **kwargs: Any) -> Result:
        """Run a kernel on `n_programs` cores.

        Args:
            kernel: a function written against nki.language and nki.isa.
            args, kwargs: its arguments. NumPy arrays and `StandIn`s, also inside lists, tuples and dicts,
                become HBM tensors that wrap the caller's memory; everything else is passed as it is.
            n_programs: 1 or 2.

        Returns:
            the outputs and the report (also in `self.report`).

        Raises:
            MachineError: what the kernel did wrong; any exception of the kernel itself.
        """
        if n_programs not in (1, 2):
            raise ValueError(f"n_programs={n_programs}: a chip of the model has 1 or 2 cores that share HBM")
        if active() is not None:
            raise MachineError("a kernel cannot start another run; call the other kernel directly")
        self._reset(n_programs)
        names = _argument_names(kernel, args, kwargs)
        tensors: dict[int, Tensor] = {}
        wrapped = [
            _wrap(value, name, tensors, self.compute) for name, value in zip(names, args, strict=False)
        ]
        named = {name: _wrap(value, name, tensors, self.compute) for name, value in kwargs.items()}
        programs = [Program(self, core, n_programs) for core in range(n_programs)]
        returned: list[Any] = [None] * n_programs

        def body(program: Program) -> None:
            returned[program.core] = kernel(*wrapped, **named)

        if n_programs == 1:
            _run_alone(programs[0], body)
        else:
            self._run_together(programs, body)
        self.report = Report(
            self.chip,
            self.ledger,
            self.liveness,
            self.timeline,
            tuple(self.races.found),
            tuple(p.clock for p in programs),
        )
        if self.check_capacity:
            self.liveness.check(
                {Buffer.sbuf: self.chip.sbuf_partition_bytes, Buffer.psum: self.chip.psum_partition_bytes}
            )
        return Result(_outputs(returned[0]), self.report)

    def _run_together(self, programs: Sequence[Program], body: Callable[[Program], None]) -> None:
        baton = self.baton

        def work(program: Program) -> None:
            try:
                baton.start(program.core)
                program.enter()
                with np.errstate(all="ignore"):
                    body(program)
                baton.end(program.core)
            except Stopped:
                pass
            except BaseException as error:
                baton.fail(error)
            finally:
                program.leave()

        threads = [
            threading.Thread(target=work, args=(p,), name=f"core {p.core}", daemon=True) for p in programs
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except (
            BaseException
        ) as error:  # KeyboardInterrupt: let the programs end, they hold the caller's arrays
            baton.fail(error)
            raise
        if baton.failure is not None:
            raise baton.failure


def _run_alone(program: Program, body: Callable[[Program], None]) -> None:
    program.enter()
    try:
        with np.errstate(all="ignore"):
            body(program)
    finally:
        program.leave()


def _argument_names(kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    try:
        parameters = [
            p.name
            for p in inspect.signature(kernel).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    return [parameters[i] if i < len(parameters) else f"arg{i}" for i in range(len(args))]


def _wrap(value: Any, name: str, tensors: dict[int, Tensor], compute: bool) -> Any:
    if isinstance(value, np.ndarray | StandIn):
        if compute and isinstance(value, StandIn):
            raise ValueError(f"{name}: a StandIn has no data; use Machine(chip, compute=False)")
        if id(value) not in tensors:
            tensors[id(value)] = Tensor(wrap(value, name, compute=compute))
        return tensors[id(value)]
    if isinstance(value, list):
        return [_wrap(item, f"{name}[{i}]", tensors, compute) for i, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(_wrap(item, f"{name}[{i}]", tensors, compute) for i, item in enumerate(value))
    if type(value) is dict:
        return {key: _wrap(item, f"{name}[{key!r}]", tensors, compute) for key, item in value.items()}
    return value


def _outputs(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.array()
    if isinstance(value, list):
        return [_outputs(item) for item in value]
    if type(value) is tuple:
        return tuple(_outputs(item) for item in value)
    if type(value) is dict:
        return {key: _outputs(item) for key, item in value.items()}
    return value
