"""The affinities of this rank's experts: the rank slice, and the mask of what a token did not select.

Owns what stands between the router and the all-expert leaves. Knows no router and no experts.
Letters: T tokens, E experts, L of them local (rank r owns [r*L, (r+1)*L)), K per token; n tokens of one tile.
"""

from __future__ import annotations

from .nki_names import nisa, nl
from .router import store_share
from .tiles import (
    PARTITIONS,
    Routing,
    Tensor,
    core,
    exchange_and_add,
    from_core_0,
    share,
    tiles,
    token_shape,
    token_tile,
)

COMPARED = 2048
"""Values that one comparison of local ids with a token's K ids may hold, per partition."""


def local_affinities(
    source: Routing | Tensor,
    rank_id: Tensor,
    local_experts: int,
    mask_unselected: bool = True,
    expert_index: Tensor | None = None,
) -> Tensor:
    """Affinities of rank ``rank_id [1, 1]``: ``[T, L]`` float32 in SBUF on both cores, folded when T > 128.

    ``source`` is the router's :class:`Routing`, whose chosen ids and affinities say everything: no HBM is
    touched, and what a token did not select is 0. Or it is an HBM tensor ``[T, E]``: its rank slice, masked
    by ``expert_index [T, K]`` (SBUF or HBM) where ``mask_unselected`` (needed for pre-norm rows without
    normalisation, which are dense). HBM rows are read once per chip.
    """
    offset = _first_local_expert(rank_id, local_experts)  # [128, 1] float32
    ids = _local_ids(offset, local_experts)  # [128, L] float32
    if isinstance(source, Routing):
        t = _tokens(source.expert_index, source)
        local = _local(t, local_experts)
        for number, (_, n) in enumerate(tiles(t)):
            chosen = token_tile(source.expert_index, number, n)
            _weigh(token_tile(local, number, n), ids, chosen, token_tile(source.eager, number, n))
        return local
    local = _rank_slice(source, offset, local_experts)
    if mask_unselected:
        if expert_index is None:
            raise ValueError("expert_index=None: mask_unselected needs the chosen ids; pass them or unset it")
        _mask(local, ids, expert_index, source.shape[0])
    return local


def local_choices(routing: Routing, rank_id: Tensor, local_experts: int, weighted: bool = True) -> Routing:
    """``routing`` counted from the first expert of rank ``rank_id [1, 1]``: ids in [0, L), ``eager`` with it.

    A choice of another rank's expert becomes expert 0 with affinity 0. Without ``weighted`` the affinities of
    the others are 1.
    """
    offset = _first_local_expert(rank_id, local_experts)  # [128, 1] float32
    t, k = _tokens(routing.expert_index, routing), routing.expert_index.shape[-1]
    index = nl.ndarray(token_shape(t, k), dtype=nl.uint32, buffer=nl.sbuf, name="local_index")
    eager = nl.ndarray(token_shape(t, k), dtype=nl.float32, buffer=nl.sbuf, name="local_eager")
    for number, (_, n) in enumerate(tiles(t)):
        ids = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.sbuf, name="local_ids")
        mine = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.sbuf, name="is_local")
        chosen = token_tile(routing.expert_index, number, n)
        nisa.tensor_scalar(dst=ids, data=chosen, op0=nl.subtract, operand0=offset[0:n, :])
        nisa.tensor_scalar(dst=mine, data=ids, op0=nl.greater_equal, operand0=0.0)
        nisa.scalar_tensor_tensor(
            dst=mine,
            data=ids,
            op0=nl.less,
            operand0=float(local_experts),
            op1=nl.multiply,
            operand1=mine,
        )
        nisa.tensor_tensor(dst=token_tile(index, number, n), data1=ids, data2=mine, op=nl.multiply)
        weight = token_tile(eager, number, n)
        if weighted:
            affinity = token_tile(routing.eager, number, n)
            nisa.tensor_tensor(dst=weight, data1=affinity, data2=mine, op=nl.multiply)
        else:
            nisa.tensor_copy(dst=weight, src=mine)
    return Routing(index, None, eager, t)


def per_token_to_hbm(rows: Tensor, t: int) -> Tensor:
    """Per-token ``rows`` (SBUF, whole on both cores, folded) as ``[T, m]`` in shared HBM; no barrier."""
    out = nl.ndarray((t, rows.shape[-1]), dtype=rows.dtype, buffer=nl.shared_hbm, name="per_token_rows")
    for number, (first, n) in enumerate(tiles(t)):
        store_share(out, token_tile(rows, number, n), first)
    return out


def load_per_token(tensor: Tensor) -> Tensor:
    """HBM ``[T, m]`` into SBUF on both cores, folded by 128 tokens; each core reads half of the rows."""
    t, m = tensor.shape
    rows = nl.ndarray(token_shape(t, m), dtype=tensor.dtype, buffer=nl.sbuf, name="per_token_rows")
    for number, (first, n) in enumerate(tiles(t)):
        tile = token_tile(rows, number, n)
        start, count = share(n)
        nisa.memset(dst=tile, value=0)
        if count:
            mine = nl.ds(first + start, count)
            nisa.dma_copy(dst=tile[nl.ds(start, count), :], src=tensor[mine, :])
        exchange_and_add(tile)  # the other half of each is zeros
    return rows


def _local(t: int, local_experts: int) -> Tensor:
    shape = token_shape(t, local_experts)
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name="local_affinities")


def _tokens(index: Tensor, routing: Routing) -> int:
    if len(index.shape) == 2:
        return int(index.shape[0])
    if routing.tokens is None:
        raise ValueError(
            "Routing.tokens=None: a folded expert_index does not say how many tokens it holds; set it"
        )
    return routing.tokens


def _first_local_expert(rank_id: Tensor, local_experts: int) -> Tensor:
    """rank * L on every partition, ``[128, 1]`` float32. Core 0 reads the rank and sends it."""
    rank = nl.ndarray((1, 1), dtype=rank_id.dtype, buffer=nl.sbuf, name="rank_id")
    if core()[0] == 0:
        nisa.dma_copy(dst=rank, src=rank_id)
    from_core_0(rank)
    first = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf, name="first_local_id")
    nisa.tensor_scalar(dst=first, data=rank, op0=nl.multiply, operand0=float(local_experts))
    ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf, name="ones")
    nisa.memset(dst=ones, value=1.0)
    spread = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.psum, name="first_local_id")
    nisa.nc_matmul(dst=spread, stationary=ones, moving=first, is_stationary_onezero=True)
    offset = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf, name="first_local_id")
    nisa.tensor_copy(dst=offset, src=spread)
    return offset


def _local_ids(offset: Tensor, local_experts: int) -> Tensor:
    """The global ids of the local experts on every partition, ``[128, L]`` float32 (exact: ids are small)."""
    count = nl.ndarray((PARTITIONS, local_experts), dtype=nl.float32, buffer=nl.sbuf, name="local_count")
    nisa.iota(dst=count, pattern=[[1, local_experts]], offset=0, channel_multiplier=0)
    ids = nl.ndarray((PARTITIONS, local_experts), dtype=nl.float32, buffer=nl.sbuf, name="local_ids")
    nisa.tensor_scalar(dst=ids, data=count, op0=nl.add, operand0=offset)
    return ids


def _matches(ids: Tensor, chosen: Tensor, start: int, count: int) -> Tensor:
    """``[n, count, K]`` float32: 1 where slot k of a token chose local expert start + i."""
    n, k = chosen.shape
    wanted = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.sbuf, name="wanted_ids")
    nisa.tensor_copy(dst=wanted, src=chosen)
    equal = nl.ndarray((n, count, k), dtype=nl.float32, buffer=nl.sbuf, name="matches")
    nisa.tensor_tensor(
        dst=equal,
        data1=ids.ap([[ids.shape[1], n], [1, count], [0, k]], offset=start),
        data2=wanted.ap([[k, n], [0, count], [1, k]]),
        op=nl.equal,
    )
    return equal


def _expert_chunks(local_experts: int, k: int) -> list[tuple[int, int]]:
    return tiles(local_experts, max(1, COMPARED // k))


def _weigh(dst: Tensor, ids: Tensor, chosen: Tensor, eager: Tensor) -> None:
    """``dst [n, L]`` = the affinity with which a token chose each local expert, 0 where it did not."""
    n, k = chosen.shape
    weights = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.sbuf, name="choice_affinities")
    nisa.tensor_copy(dst=weights, src=eager)
    for start, count in _expert_chunks(dst.shape[1], k):
        equal = _matches(ids, chosen, start, count)
        nisa.tensor_tensor(
            dst=equal, data1=equal, data2=weights.ap([[k, n], [0, count], [1, k]]), op=nl.multiply
        )
        nisa.tensor_reduce(dst=dst[:, nl.ds(start, count)], op=nl.add, data=equal, axis=2)  # [n, count]


def _rank_slice(affinities: Tensor, offset: Tensor, local_experts: int) -> Tensor:
    """Columns [rank*L, (rank+1)*L) of HBM ``affinities [T, E]``, float32, folded by 128 tokens."""
    t, e = affinities.shape
    first = nl.ndarray((1, 1), dtype=nl.uint32, buffer=nl.sbuf, name="first_local_id")
    nisa.tensor_copy(dst=first, src=offset[0:1, :])
    local = _local(t, local_experts)
    for number, (row, n) in enumerate(tiles(t)):
        tile = token_tile(local, number, n)
        start, count = share(n)
        nisa.memset(dst=tile, value=0.0)
        if count:
            source = affinities.ap(
                [[e, count], [1, local_experts]],
                offset=(row + start) * e,
                scalar_offset=first,
                indirect_dim=1,
            )
            nisa.dma_copy(dst=tile[nl.ds(start, count), :], src=source)
        exchange_and_add(tile)
    return local


def _mask(local: Tensor, ids: Tensor, expert_index: Tensor, t: int) -> None:
    """Multiply ``local`` by how often ``expert_index [T, K]`` names an expert: mostly 0 or 1."""
    if expert_index.buffer != nl.sbuf:
        expert_index = load_per_token(expert_index)
    for number, (_, n) in enumerate(tiles(t)):
        tile, chosen = token_tile(local, number, n), token_tile(expert_index, number, n)
        for start, count in _expert_chunks(local.shape[-1], chosen.shape[1]):
            selected = nl.ndarray((n, count), dtype=nl.float32, buffer=nl.sbuf, name="selected_experts")
            equal = _matches(ids, chosen, start, count)
            nisa.tensor_reduce(dst=selected, op=nl.add, data=equal, axis=2)  # [n, count]
            part = tile[:, nl.ds(start, count)]
            nisa.tensor_tensor(dst=part, data1=part, data2=selected, op=nl.multiply)
