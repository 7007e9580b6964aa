"""What two cores do together (sendrecv, core_barrier) and scalar registers.

Owns the matching rules of a rendezvous and what happens at it. Knows nothing of arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..baton import Meeting
from ..cost import barrier
from ..cost import sendrecv as sendrecv_cost
from ..dtypes import holds_addresses
from ..errors import ConstraintViolation, RendezvousError
from ..memory import Buffer
from ..program import Program, current
from ..registers import Register
from ..tensor import Tensor
from .constants import dma_engine as DmaEngine
from .constants import nc_version

__all__ = [
    "core_barrier",
    "get_nc_version",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "sendrecv",
]


def sendrecv(
    src: Tensor,
    dst: Tensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
    **options: Any,
) -> None:
    """Send `src` to the other core's `dst` and receive the other core's `src` into `dst`.

    Args:
        src, dst: SBUF views; the shapes and dtypes of one core's src and the other's dst must agree.
        send_to_rank, recv_from_rank: the other core.
        pipe_id: the same on both cores.
        dma_engine, name, options: change nothing here.

    Raises:
        ConstraintViolation: a chip without sendrecv, wrong memory, rank or dtype.
        RendezvousError: the other core does something else, or the operands do not fit together.
    """
    prog = current()
    _check_pair("sendrecv", prog)
    other = 1 - prog.core
    for operand, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if int(rank) != other:
            raise ConstraintViolation(
                "sendrecv", f"{operand}={rank}", f"core {prog.core} exchanges with core {other}"
            )
    for operand, tensor in (("src", src), ("dst", dst)):
        if not isinstance(tensor, Tensor) or tensor.buffer is not Buffer.sbuf:
            raise ConstraintViolation("sendrecv", f"{operand} {tensor!r}", "must be in SBUF")
    if src.dtype != dst.dtype:
        raise ConstraintViolation("sendrecv", f"src {src.dtype}, dst {dst.dtype}", "must have the same dtype")
    source, target = prog.resolved(src, "sendrecv"), prog.resolved(dst, "sendrecv")
    prog.issue("sendrecv", "dma", target, [source], schedule=False)
    what = f"sendrecv(pipe_id={pipe_id}, src {list(src.shape)} {src.dtype}, dst {list(dst.shape)})"
    meeting = Meeting(what, ("sendrecv", int(pipe_id)), frozenset((0, 1)), (prog, source, target))
    prog.machine.baton.meet(prog.core, meeting, _exchange)


def _exchange(meetings: Mapping[int, Meeting]) -> None:
    sides: list[tuple[Program, Tensor, Tensor]] = [meetings[core].payload for core in (0, 1)]
    values = []
    for prog, source, _ in sides:
        _, _, target = sides[1 - prog.core]
        if source.size != target.size or source.dtype != target.dtype or source.shape[0] != target.shape[0]:
            raise RendezvousError(
                f"sendrecv: core {prog.core} sends {source!r}, "
                f"core {1 - prog.core} expects {target!r}; shapes and dtypes must agree"
            )
        values.append(source.array().copy())
    access = {}
    for prog, source, target in sides:
        _, incoming, _ = sides[1 - prog.core]
        if not prog.compute:
            prog.executes([incoming], [target])
        if incoming.storage.real or holds_addresses(target.storage.dtype):
            prog.store(target, values[1 - prog.core].reshape(target.shape))
        access[prog.core] = (
            sendrecv_cost(prog.chip, source.nbytes),
            (source.storage.key,),
            (target.storage.key,),
        )
    sides[0][0].machine.timeline.rendezvous("sendrecv", "dma", access)


def core_barrier(
    data: Tensor, cores: Any = (0, 1), engine: Any = None, name: str | None = None, **options: Any
) -> None:
    """Wait until all cores have come: accesses to the shared tensor `data` before it happen before those
    after it.

    Args:
        data: a tensor in HBM that both cores see, the same on both. With `Machine(barrier_on_chip=True)` also
            a core's own tensor, of the same name on both; it then orders no accesses.
        cores: (0, 1).
        engine, name, options: change nothing here.

    Raises:
        ConstraintViolation: a private or on-chip tensor, other cores.
        RendezvousError: the other core does something else or names another tensor.
    """
    prog = current()
    wanted = frozenset(int(c) for c in cores)
    allowed = isinstance(data, Tensor) and (
        data.storage.core is None or (data.buffer.on_chip and prog.machine.barrier_on_chip)
    )
    if not allowed:
        raise ConstraintViolation("core_barrier", f"data {data!r}", "must be a tensor in shared_hbm")
    if wanted == {prog.core}:
        return
    _check_pair("core_barrier", prog)
    if wanted != {0, 1}:
        raise ConstraintViolation("core_barrier", f"cores={cores}", "must be (0, 1)")
    prog.issue("core_barrier", "sync", None, (), schedule=False)
    which = data.storage.name if data.buffer.on_chip else data.storage.key
    meeting = Meeting(f"core_barrier on {data.storage!r}", ("core_barrier", which), wanted, (prog, data))
    prog.machine.baton.meet(prog.core, meeting, _pass_barrier)


def _pass_barrier(meetings: Mapping[int, Meeting]) -> None:
    prog, data = next(iter(meetings.values())).payload
    prog.machine.races.barrier(data.storage)
    key = data.storage.key
    prog.machine.timeline.rendezvous(
        "core_barrier", "sync", {core: (barrier(prog.chip), (key,), (key,)) for core in meetings}
    )


def _check_pair(instruction: str, prog: Program) -> None:
    if not prog.chip.sendrecv:
        raise ConstraintViolation(
            instruction, f"chip {prog.chip.name}", "needs NeuronCore-v3 or newer; use trn2 or trn3"
        )
    if prog.count != 2:
        raise RendezvousError(
            f"{instruction}: one program runs, there is nobody to meet; run the kernel with n_programs=2"
        )


def register_alloc(x: Tensor | int | None = None) -> Register:
    """A register with a first value: an int, an integer tensor of one element, or nothing (0)."""
    register = Register()
    if x is not None:
        _set(register, x, "register_alloc")
    return register


def register_load(dst: Register, src: Tensor) -> None:
    """Load an integer tensor of one element into a register."""
    _set(dst, src, "register_load")


def register_move(dst: Register, src: Register | int) -> None:
    """Copy a register or an immediate into a register."""
    _set(dst, src, "register_move")


def register_store(dst: Tensor, src: Register) -> None:
    """Store a register into an integer tensor of one element."""
    prog = current()
    if dst.size != 1 or dst.dtype.kind not in "iu":
        raise ConstraintViolation(
            "register_store", f"dst {dst!r}", "must be an integer tensor of one element"
        )
    if prog.issue("register_store", "sync", dst):
        prog.store(dst, src.value)


def _set(register: Register, source: Tensor | Register | int, instruction: str) -> None:
    if not isinstance(register, Register):
        raise ConstraintViolation(instruction, f"dst {register!r}", "must be a register of register_alloc")
    if not isinstance(source, Tensor):
        register.value = int(source)
        return
    if source.size != 1 or source.dtype.kind not in "iu" or not source.buffer.on_chip:
        raise ConstraintViolation(
            instruction, f"src {source!r}", "must be an integer tensor of one element in SBUF or PSUM"
        )
    prog = current()
    prog.issue(instruction, "sync", None, [source])
    register.value = prog.scalar(source)


def get_nc_version() -> nc_version:
    """The generation of the chip that the kernel runs on."""
    return nc_version(current().chip.generation)
