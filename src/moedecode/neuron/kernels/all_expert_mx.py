"""The all-expert MX leaf, static form: every local expert sees every token, affinities make the sum sparse.

Owns the loop over local experts. Knows no layouts and no routing.
Letters: T tokens, L local experts.
"""

from __future__ import annotations

from dataclasses import replace

from .down_bias import add_local_biases
from .expert_loads_mx import ExpertLoader, ExpertTiles
from .expert_mx import KnownExpert, units
from .nki_names import nisa, nl
from .partial_sum import FEW_TOKENS, PartialSum
from .projections_mx import Quantised, down_hidden_major, down_token_major, hidden_activations
from .tiles import PARTITIONS, ExpertOptions, ExpertTensors, Tensor, token_tile, token_tiles


def all_expert_mx(
    r_q: Tensor,
    r_scale: Tensor,
    affinities: Tensor | None,
    weights: ExpertTensors,
    out: Tensor,
    options: ExpertOptions,
    partial: Tensor | None = None,
) -> None:
    """``out [T, H]`` = sum over local experts e of affinities[t, e] * e(r_t).

    ``r_q``, ``r_scale [128, H/512, T]``; ``affinities [T, L]`` float32 in SBUF, masked, folded when T > 128;
    None under "no_scale": every expert counts once. Every local expert is read once per chip. ``partial``: a
    summand of this core to start from, ``[128, H/128, T]`` for T <= 64, else ``[T or 128, ceil(T/128), H]``
    float32.
    """
    r = Quantised(r_q, r_scale)
    tokens, hidden = r_q.shape[2], weights.down.shape[-1]
    total = PartialSum(tokens, hidden, tokens <= FEW_TOKENS, partial)
    unbiased = replace(weights, down_bias=None)  # the biases of all experts are added at once
    loaders: dict[int | None, ExpertLoader] = {}
    for unit in units(weights.gate_up.shape[0]):
        if unit.half not in loaders:
            loaders[unit.half] = ExpertLoader(unbiased, unit.half, options.up_offset, total.hidden_major)
        loader = loaders[unit.half]
        if loader.pieces:
            expert = loader.load(KnownExpert(unit.index))
            h = hidden_activations(r, expert, options, even=not total.hidden_major)
            add_expert(total, h, expert, _expert_weights(affinities, unit.index, tokens, total))
    if weights.down_bias is not None:
        add_local_biases(total, weights.down_bias, affinities)
    total.finish(out)


def add_expert(total: PartialSum, h: Quantised, expert: ExpertTiles, weights: list[Tensor] | None) -> None:
    """Add y of one expert for all tokens, times its affinities: ``[128, T]``, or ``[n, 1]`` per tile of
    tokens.
    """
    tokens = total.tokens
    fresh = total.begin(0, tokens)
    if total.hidden_major:
        for j, y in down_hidden_major(h, tokens, expert):
            total.add_hidden_major(y, j, 0, None if weights is None else weights[0], fresh)
        return
    for first, n, column, y in down_token_major(h, tokens, expert):
        weight = None if weights is None else weights[first // PARTITIONS]
        total.add_token_major(y, first, n, column, weight, fresh)


def _expert_weights(affinities: Tensor | None, e: int, tokens: int, total: PartialSum) -> list[Tensor] | None:
    if affinities is None:
        return None
    if total.hidden_major:
        return [over_partitions(affinities, e)]
    return [
        token_tile(affinities, i, min(PARTITIONS, tokens - i * PARTITIONS))[:, nl.ds(e, 1)]
        for i in range(token_tiles(tokens))
    ]


def over_partitions(rows: Tensor, column: int) -> Tensor:
    """A column of ``rows [T, m]`` (a whole tensor, T <= 128) as ``[128, T]`` float32, every partition the
    same.
    """
    tokens, m = rows.shape
    turned = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.psum, name="turned_affinities")
    result = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.sbuf, name="expert_affinity")
    nisa.nc_transpose(dst=turned, data=rows.ap([[m, tokens], [0, PARTITIONS]], offset=column))
    nisa.tensor_copy(dst=result, src=turned)
    return result
