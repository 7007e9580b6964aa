"""The selective leaf for weights without block scales: every token goes through the K experts it chose.

Owns which core works on which token and chosen expert. Knows no layouts.
Letters: T tokens, K experts per token; item t*K + k is the k-th choice of token t.
"""

from __future__ import annotations

from .down_bias import add_chosen_biases
from .nki_names import nl
from .partial_sum import PartialSum
from .plain_expert import RoutedExpert, pieces
from .projections import add_expert
from .selective_mx import spread
from .tiles import PARTITIONS, ExpertOptions, ExpertTensors, Routing, Tensor, core, token_tile


def selective(
    r: Tensor,
    routing: Routing,
    weights: ExpertTensors,
    out: Tensor,
    options: ExpertOptions,
    partial: Tensor | None = None,
) -> None:
    """``out [T, H]`` = sum over k of eager[t, k] * expert_index[t, k](r_t) (no eager under "no_scale").

    ``r [128, H/128, T]`` in SBUF, whole on both cores. Every (token, choice) reads its expert once per chip.
    ``partial [128, H/128, T]`` float32: a summand of this core to start from.
    """
    tokens, k = r.shape[2], routing.expert_index.shape[-1]
    _, intermediate, hidden = weights.down.shape
    weighted = options.scaling != "no_scale"
    affinities = spread(routing.eager, tokens) if weighted else None  # [128, K, T]
    for first, count, alone in _groups(tokens, partial is None and out.buffer != nl.sbuf):
        total = PartialSum(count, hidden, True, partial)
        if weights.down_bias is not None:
            add_chosen_biases(total, weights.down_bias, routing, weighted, first, alone)
        for piece in pieces(count * k, intermediate, alone):
            if not piece.columns:
                continue
            t, choice = first + piece.index // k, piece.index % k
            index = token_tile(routing.expert_index, t // PARTITIONS, t % PARTITIONS + 1)
            expert = RoutedExpert(weights, index[nl.ds(t % PARTITIONS, 1), nl.ds(choice, 1)])
            weight = None if affinities is None else affinities[:, choice, nl.ds(t, 1)]  # [128, 1]
            add_expert(total, r[:, :, nl.ds(t, 1)], expert, piece, weight, options, first=t - first)
        total.finish(out[nl.ds(first, count), :], alone)


def _groups(tokens: int, apart: bool) -> list[tuple[int, int, bool]]:
    """(first token, tokens, whether this core is alone with them).

    ``apart``: each core takes half of the tokens and nothing is exchanged; an odd last one they share.
    """
    this, cores = core()
    half = tokens // 2
    if cores == 1 or not apart or not half:
        return [(0, tokens, False)]
    own = (this * half, half, True)
    return [own, (tokens - 1, 1, False)] if tokens % 2 else [own]
