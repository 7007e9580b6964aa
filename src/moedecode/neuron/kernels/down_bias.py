"""The biases of y of all experts at once: one contraction over experts, not one addition per expert.

Owns which biases a core reads, so that each is read once per chip, and the matrices of affinities that they
are multiplied with. Knows no projections.
Letters: T tokens, K experts per token, L local experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

from .nki_names import nisa, nl
from .partial_sum import PartialSum
from .projections import add_product
from .tiles import PARTITIONS, Routing, Tensor, share, tiles, token_tile

Pairs = list[tuple[Tensor, Tensor]]


def add_shared_bias(total: PartialSum, bias: Tensor, weight: Tensor | None) -> None:
    """Add ``bias [1, H]`` (HBM) to every token, times ``weight [128, T]`` (alike on all partitions) or 1."""
    column, columns = _own_columns(total.hidden)
    if not columns:
        return
    total.zero()
    row = nl.ndarray((1, columns), dtype=bias.dtype, buffer=nl.sbuf, name="down_bias")
    nisa.dma_copy(dst=row, src=bias.ap([[total.hidden, 1], [1, columns]], offset=column))
    pairs = [(row, _ones(row, total.tokens))] if weight is None else _pairs(row, weight[0:1, :])
    add_product(total, pairs, column, 0, False)


def add_local_biases(total: PartialSum, biases: Tensor, affinities: Tensor | None) -> None:
    """Add, per token, the sum over e of affinities[t, e] * ``biases[e]``, ``[L, H]`` in HBM.

    ``affinities [T, L]`` float32 in SBUF, folded when T > 128; None: every expert counts once.
    """
    column, columns = _own_columns(total.hidden)
    if not columns:
        return
    total.zero()
    for first, count in tiles(biases.shape[0]):
        rows = nl.ndarray((count, columns), dtype=biases.dtype, buffer=nl.sbuf, name="down_bias")
        nisa.dma_copy(dst=rows, src=biases[nl.ds(first, count), nl.ds(column, columns)])
        if affinities is None:
            pairs = [(rows, _ones(rows, total.tokens))]
        else:
            pairs = _pairs(rows, _turned(affinities, first, count, total.tokens))
        add_product(total, pairs, column, 0, False)


def add_chosen_biases(
    total: PartialSum, biases: Tensor, routing: Routing, weighted: bool, first: int, alone: bool
) -> None:
    """Add, per token, the sum over its K choices of the affinity (1 if not ``weighted``) times the bias.

    The sum's tokens are those of ``routing`` from ``first``; a core that is ``alone`` with them adds all of
    H, else its half. A gather brings one row per (token, choice), as many as there are partitions; the PE
    adds up.
    """
    column, columns = (0, total.hidden) if alone else _own_columns(total.hidden)
    if not columns:
        return
    total.zero()
    k = routing.expert_index.shape[-1]
    room = max(1, PARTITIONS // k)
    owner = _owner(min(room, total.tokens), k)
    for t, n in _runs(first, total.tokens, room):
        chosen = _by_row(routing.expert_index, t, n)  # [n * K, 1]
        rows = nl.ndarray((n * k, columns), dtype=biases.dtype, buffer=nl.sbuf, name="down_bias")
        pattern = [[total.hidden, n * k], [1, columns]]
        nisa.dma_copy(dst=rows, src=biases.ap(pattern, offset=column, vector_offset=chosen, indirect_dim=0))
        each = owner[0 : n * k, 0:n]
        if weighted:
            placed = nl.ndarray((n * k, n), dtype=nl.float32, buffer=nl.sbuf, name="placed_affinities")
            eager = _by_row(routing.eager, t, n)
            nisa.tensor_scalar(dst=placed, data=each, op0=nl.multiply, operand0=eager)
            each = placed
        add_product(total, _pairs(rows, each), column, t - first, False)


def _own_columns(hidden: int) -> tuple[int, int]:
    """(first column, columns) of this core's half of H, in whole blocks of 128."""
    first, count = share(hidden // PARTITIONS)
    return first * PARTITIONS, count * PARTITIONS


def _pairs(rows: Tensor, weights: Tensor) -> Pairs:
    """``rows`` with float32 ``weights`` as the PE multiplies them.

    16-bit rows meet the weights as two bfloat16 summands: 16 bits of them, at half the cost of float32.
    """
    if rows.dtype == nl.float32:
        return [(rows, weights)]
    high, low = (
        nl.ndarray(tuple(weights.shape), dtype=nl.bfloat16, buffer=nl.sbuf, name="split_affinities")
        for _ in range(2)
    )
    nisa.tensor_copy(dst=high, src=weights)
    nisa.tensor_tensor(dst=low, data1=weights, data2=high, op=nl.subtract)
    return [(rows, high), (rows, low)]


def _ones(rows: Tensor, tokens: int) -> Tensor:
    ones = nl.ndarray((rows.shape[0], tokens), dtype=rows.dtype, buffer=nl.sbuf, name="ones")
    nisa.memset(dst=ones, value=1.0)
    return ones


def _runs(first: int, count: int, room: int) -> Iterator[tuple[int, int]]:
    """(token, tokens) of runs of at most ``room`` that stay within a tile of 128."""
    t = first
    while t < first + count:
        n = min(room, first + count - t, PARTITIONS - t % PARTITIONS)
        yield t, n
        t += n


def _by_row(values: Tensor, t: int, n: int) -> Tensor:
    """Rows of tokens ``[t, t + n)`` of ``values [T, K]`` (SBUF, folded), one value to a partition."""
    tile = token_tile(values, t // PARTITIONS, t % PARTITIONS + n)
    column = nl.ndarray((n * values.shape[-1], 1), dtype=values.dtype, buffer=nl.sbuf, name="choice_column")
    nisa.dma_copy(dst=column, src=tile[nl.ds(t % PARTITIONS, n), :])  # [n, K] -> [n * K, 1]
    return column


def _owner(n: int, k: int) -> Tensor:
    """``[n * K, n]`` float32: 1 where row (t, k) belongs to token t."""
    owner = nl.ndarray((n * k, n), dtype=nl.float32, buffer=nl.sbuf, name="choice_owner")
    identity = nl.shared_identity_matrix(PARTITIONS, dtype=nl.float32)
    nisa.dma_copy(dst=owner, src=identity.ap([[PARTITIONS, n], [0, k], [1, n]]))  # [n, K, n] -> [n * K, n]
    return owner


def _turned(affinities: Tensor, first: int, count: int, tokens: int) -> Tensor:
    """Columns ``[first, first + count)`` of ``affinities [T, L]`` as ``[count, T]``."""
    each = nl.ndarray((count, tokens), dtype=nl.float32, buffer=nl.sbuf, name="turned_affinities")
    for number, (token, n) in enumerate(tiles(tokens)):
        turned = nl.ndarray((count, n), dtype=nl.float32, buffer=nl.psum, name="turned_affinities")
        nisa.nc_transpose(dst=turned, data=token_tile(affinities, number, n)[:, nl.ds(first, count)])
        nisa.tensor_copy(dst=each[:, nl.ds(token, n)], src=turned)
    return each
