"""What the kernels hand to each other: named tensors, layout arithmetic, and the exchanges between two cores.

Owns the records Routing, ExpertTensors and ExpertOptions and who owns which share of a dimension. Knows no
stage of the block.
Letters: T tokens, H hidden, I intermediate, E experts, L of them local, K per token; c the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .nki_names import nisa, nl

Tensor = Any
"""A tensor of the kernel language, on chip or in HBM."""

PARTITIONS = 128
"""Partitions of SBUF and PSUM, rows of a stationary operand."""
QUAD = 4
"""Elements that an x4 type packs."""
MX_TILE = PARTITIONS * QUAD
"""Contraction length of one MX matmul."""
MOVING = 512
"""Columns of a moving operand, and float32 columns of one PSUM bank."""
EVERY_CORE = (0, 1)


@dataclass(frozen=True)
class Routing:
    """What the router decided, in SBUF on both cores. Rows fold to ``[128, ceil(T/128), ...]`` when T > 128.

    ``expert_index [T, K]`` uint32, best first; ``eager [T, K]`` float32, the affinity of each chosen expert;
    ``affinities [T, E]`` float32 in SBUF or shared HBM, or None where no stage asked for it. ``tokens`` is T
    (None: the rows of an index that is not folded).
    """

    expert_index: Tensor
    affinities: Tensor | None
    eager: Tensor | None
    tokens: int | None = None


@dataclass(frozen=True)
class ExpertTensors:
    """HBM tensors of the local experts, in the shapes of ``moe_tkg``.

    MX: ``gate_up [L, 128, 2, H/512, I]`` x4, ``down [L, I_p, ceil(I/512), H]`` x4, scales uint8, biases
    ``[L, I_p, 2, ceil(I/512), 4]`` and ``[L, H]``. Else ``gate_up [L, H, 2, I]``, ``down [L, I, H]``, row
    scales ``[L, 2, I]`` and ``[L, H]`` (or ``[L, 2, 1]`` and ``[L, 1]``), biases ``[L, 2, I]`` and ``[L,
    H]``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertOptions:
    """How an expert turns gate and up into h, and how its output enters the sum.

    ``activation`` is a name of the kernel's table ("silu", "swish", "gelu", "gelu_tanh"); ``alpha`` is
    Swish's factor (None: 1.702); clamps are (lower, upper), either None, before the activation;
    ``up_offset`` is added to up after its clamp. ``scaling`` is "post_scale" or "no_scale"; ``io_dtype``
    that of h and of the output.
    """

    activation: str = "silu"
    alpha: float | None = None
    up_offset: float = 0.0
    gate_clamp: tuple[float | None, float | None] = (None, None)
    up_clamp: tuple[float | None, float | None] = (None, None)
    scaling: str = "post_scale"
    io_dtype: Any = None


def ceil_div(n: int, d: int) -> int:
    """``n / d`` rounded up."""
    return -(-n // d)


def tiles(n: int, size: int = PARTITIONS) -> list[tuple[int, int]]:
    """(start, length) of the tiles of at most ``size`` that cover ``n``."""
    return [(start, min(size, n - start)) for start in range(0, n, size)]


def core() -> tuple[int, int]:
    """(this core, number of cores); one core when the kernel was launched without a grid."""
    cores = nl.num_programs(0)
    return (nl.program_id(0), cores) if cores and cores > 1 else (0, 1)


def share(n: int, index: int | None = None) -> tuple[int, int]:
    """(start, length) of the part of ``n`` that a core (default: this one) owns; core 0 takes the odd one."""
    this, cores = core()
    this = this if index is None else index
    if cores == 1:
        return 0, n
    first = ceil_div(n, 2)
    return (0, first) if this == 0 else (first, n - first)


def token_tiles(t: int) -> int:
    """Tiles of 128 tokens."""
    return ceil_div(t, PARTITIONS)


def token_shape(t: int, free: int) -> tuple[int, ...]:
    """SBUF shape of ``free`` values per token: ``[T, free]``, ``[128, ceil(T/128), free]`` when T > 128."""
    return (t, free) if t <= PARTITIONS else (PARTITIONS, token_tiles(t), free)


def token_tile(tensor: Tensor, index: int, rows: int) -> Tensor:
    """Tile ``index`` of a per-token SBUF tensor: its first ``rows`` rows, ``[rows, free]``."""
    return tensor[0:rows, :] if len(tensor.shape) == 2 else tensor[0:rows, index, :]


def exchange(dst: Tensor, src: Tensor, pipe: int = 0) -> None:
    """``dst`` becomes the other core's ``src``, SBUF to SBUF; both cores call it, with equal shapes.

    With one core there is nobody to ask: callers own the whole dimension then and do not call it.
    """
    this, _ = core()
    nisa.sendrecv(src=src, dst=dst, send_to_rank=1 - this, recv_from_rank=1 - this, pipe_id=pipe)


def exchange_and_add(partial: Tensor, pipe: int = 0) -> None:
    """``partial`` (SBUF) becomes the sum of both cores' ``partial``, the same bits on both cores.

    Equal bits because an addition of two numbers does not depend on their order. One core: unchanged.
    """
    if core()[1] == 1:
        return
    other = nl.ndarray(tuple(partial.shape), dtype=partial.dtype, buffer=nl.sbuf, name="received")
    exchange(other, partial, pipe)
    nisa.tensor_tensor(dst=partial, data1=partial, data2=other, op=nl.add)


def from_core_0(tensor: Tensor, pipe: int = 0) -> None:
    """``tensor`` (SBUF) becomes what it is on core 0; core 1's copy need not have been written before."""
    this, cores = core()
    if cores == 1:
        return
    unused = nl.ndarray(tuple(tensor.shape), dtype=tensor.dtype, buffer=nl.sbuf, name="unsent")
    if this == 0:
        exchange(unused, tensor, pipe)
        return
    nisa.memset(dst=unused, value=0)
    exchange(tensor, unused, pipe)


def barrier(tensor: Tensor) -> None:
    """Both cores wait until what each wrote to ``tensor`` (shared HBM) is there."""
    if core()[1] > 1:
        nisa.core_barrier(tensor, EVERY_CORE)
