"""How many HBM bytes a block cannot do without: pure arithmetic on dimensions, formats and routing.

Owns the floor that the kernels' ledgers are held against. Knows no arrays, no kernels and no machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..formats import WeightFormat

__all__ = ["LEAVES", "BlockSize", "expert_floor", "floor", "floor_bytes", "visits"]

LEAVES = ("selective", "all_expert", "distinct")
BLOCK_LANES = 8  # lanes that share an MX scale
I_TILE = 512
SCALE_BYTES = 4  # float32 row scales
RANK_BYTES = 4
ID_BYTES = 4
AFFINITY_BYTES = 4


@dataclass(frozen=True)
class BlockSize:
    """The dimensions of one block on one rank, and what it is stored in.

    ``hidden`` is the padded H that the kernel runs on, ``intermediate`` this rank's tensor-parallel shard of
    I; ``experts`` E, ``local_experts`` those on this rank (None: all), ``top_k`` K. ``fmt`` is the format of
    the experts, ``per_tensor_scales`` says that a float8 matrix has one scale instead of one per output.
    ``io_bytes`` are those of an element of the activations, gamma, the router and the shared expert;
    ``bias_bytes`` of the expert biases, 0 without, ``down_bias_bytes`` of down's where they differ;
    ``shared_intermediate`` the shared expert's shard of I, 0 without one.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    fmt: WeightFormat
    local_experts: int | None = None
    io_bytes: int = 2
    router_bytes: int = 2
    bias_bytes: int = 0
    down_bias_bytes: int | None = None
    router_bias: bool = False
    per_tensor_scales: bool = False
    shared_intermediate: int = 0

    @property
    def here(self) -> int:
        """Experts on this rank."""
        return self.experts if self.local_experts is None else self.local_experts


def expert_floor(size: BlockSize) -> int:
    """Bytes of one expert: numbers, scales, biases; lanes that a layout only pads with are left out."""
    h, i, fmt = size.hidden, size.intermediate, size.fmt
    down_bias = h * (size.bias_bytes if size.down_bias_bytes is None else size.down_bias_bytes)
    matrices = 3 * h * i * fmt.bits // 8
    if fmt.is_mx:
        lanes = _lanes(i)
        gate_up = 2 * h * i * fmt.bits // 8 + 2 * (h // (4 * BLOCK_LANES)) * i
        down = sum(lanes) * 4 * h * fmt.bits // 8 + sum(math.ceil(n / BLOCK_LANES) for n in lanes) * h
        return gate_up + down + 2 * 4 * sum(lanes) * size.bias_bytes + down_bias
    scales = 0
    if fmt.is_fp8:
        scales = 3 if size.per_tensor_scales else 2 * i + h
    return matrices + scales * SCALE_BYTES + 2 * i * size.bias_bytes + down_bias


def visits(leaf: str, size: BlockSize, tokens: int, index: Iterable[Iterable[int]] | None = None) -> int:
    """How often an expert must be read: per token and choice, per local expert, or per distinct choice.

    ``index``, the chosen ids of each token, is needed for "distinct" alone.

    Raises:
        ValueError: an unknown leaf, or "distinct" without ``index``.
    """
    if leaf == "selective":
        return tokens * size.top_k
    if leaf == "all_expert":
        return size.here
    if leaf != "distinct":
        raise ValueError(f"leaf={leaf!r}: no such leaf; take one of {', '.join(LEAVES)}")
    if index is None:
        raise ValueError("index=None: the distinct experts depend on the routing; pass the ids [T, K]")
    return len({int(e) for row in index for e in row})


def floor(
    size: BlockSize,
    leaf: str,
    tokens: int,
    *,
    index: Iterable[Iterable[int]] | None = None,
    residual: bool = False,
    logits: bool = True,
    routing: bool = False,
) -> Mapping[str, int]:
    """Bytes by part that a block must move: every input and output once, an expert once per visit.

    ``residual``: there is one, read and summed out. ``logits`` and ``routing``: outputs. Beside the weights,
    all is counted on the padded H, because that is what the kernel is given.
    """
    t, h, e, io = tokens, size.hidden, size.experts, size.io_bytes
    shared = size.shared_intermediate
    rank = RANK_BYTES if leaf == "all_expert" or size.here < e else 0
    parts = {
        "inp": t * h * io,
        "gamma": h * io,
        "router": h * e * size.router_bytes + (e * size.router_bytes if size.router_bias else 0),
        "experts": visits(leaf, size, t, index) * expert_floor(size),
        "shared_expert": 3 * h * shared * io,
        "rank_id": rank,
        "residual": 2 * t * h * io if residual else 0,
        "out": t * h * io,
        "router_logits": t * e * io if logits else 0,
        "routing": t * (size.top_k * ID_BYTES + e * AFFINITY_BYTES) if routing else 0,
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def floor_bytes(size: BlockSize, leaf: str, tokens: int, **given: object) -> int:
    """The sum of :func:`floor`, whose arguments it takes."""
    return sum(floor(size, leaf, tokens, **given).values())  # type: ignore[arg-type]


def _lanes(intermediate: int) -> list[int]:
    """Lanes that hold columns, per tile of the packed layout."""
    rest = [min(I_TILE, intermediate - start) for start in range(0, intermediate, I_TILE)]
    return [2 * math.ceil(columns / BLOCK_LANES) for columns in rest]
