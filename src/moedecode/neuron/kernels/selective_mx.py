"""The selective MX leaf: every token goes through the K experts it chose, each read for it from HBM.

Owns which core works on which chosen expert and how ids and affinities reach every partition. Knows no
layouts.
Letters: T tokens, K experts per token; unit t*K + k is the k-th choice of token t.
"""

from __future__ import annotations

from .expert_loads_mx import ExpertLoader
from .expert_mx import ChosenExpert, ChosenExperts, ScaleRows, units
from .nki_names import nisa, nl
from .partial_sum import PartialSum
from .projections_mx import Quantised, down_hidden_major, hidden_activations
from .tiles import MOVING, PARTITIONS, ExpertOptions, ExpertTensors, Routing, Tensor, tiles, token_tile


def selective_mx(
    r_q: Tensor,
    r_scale: Tensor,
    routing: Routing,
    weights: ExpertTensors,
    out: Tensor,
    options: ExpertOptions,
    partial: Tensor | None = None,
) -> None:
    """``out [T, H]`` = sum over k of eager[t, k] * expert_index[t, k](r_t) (no eager under "no_scale").

    ``r_q``, ``r_scale [128, H/512, T]`` as quantize_hidden gives them, ``weights`` in the packed MX layouts,
    L = E. Every (token, choice) reads its expert once per chip. ``partial [128, H/128, T]`` float32: a
    summand of this core to start from.
    """
    r = Quantised(r_q, r_scale)
    tokens, k = r_q.shape[2], routing.expert_index.shape[-1]
    experts = ChosenExperts(
        spread(routing.expert_index, tokens).reshape((PARTITIONS, k * tokens)), ScaleRows()
    )
    affinities = None if options.scaling == "no_scale" else spread(routing.eager, tokens)  # [128, K, T]
    total = PartialSum(tokens, weights.down.shape[-1], True, partial)
    loaders: dict[int | None, ExpertLoader] = {}
    for unit in units(tokens * k):
        if unit.half not in loaders:
            loaders[unit.half] = ExpertLoader(weights, unit.half, options.up_offset, hidden_major=True)
        loader = loaders[unit.half]
        if not loader.pieces:
            continue
        t, choice = divmod(unit.index, k)
        ids = token_tile(routing.expert_index, t // PARTITIONS, t % PARTITIONS + 1)
        id_ = ids[nl.ds(t % PARTITIONS, 1), nl.ds(choice, 1)]
        expert = loader.load(ChosenExpert(experts, choice * tokens + t, id_))
        h = hidden_activations(r.token(t), expert, options)
        weight = None if affinities is None else affinities[:, choice, nl.ds(t, 1)]
        fresh = total.begin(t, 1)
        for j, y in down_hidden_major(h, 1, expert):
            total.add_hidden_major(y, j, t, weight, fresh)
    total.finish(out)


def spread(rows: Tensor, tokens: int) -> Tensor:
    """Per-token ``rows [T, m]`` (SBUF, folded when T > 128) as ``[128, m, T]`` float32, every partition the
    same.
    """
    m = rows.shape[-1]
    result = nl.ndarray((PARTITIONS, m, tokens), dtype=nl.float32, buffer=nl.sbuf, name="spread_choices")
    for number, (first, n) in enumerate(tiles(tokens)):
        values = nl.ndarray((n, m), dtype=nl.float32, buffer=nl.sbuf, name="choices")
        nisa.tensor_copy(dst=values, src=token_tile(rows, number, n))
        for start, count in tiles(m, MOVING // n):
            turned = nl.ndarray(
                (PARTITIONS, count, n), dtype=nl.float32, buffer=nl.psum, name="turned_choices"
            )
            for i in range(count):
                repeated = values.ap([[m, n], [0, PARTITIONS]], offset=start + i)
                nisa.nc_transpose(dst=turned[:, i, :], data=repeated)
            nisa.tensor_copy(dst=result[:, nl.ds(start, count), nl.ds(first, n)], src=turned)
    return result
