"""The all-expert leaf for weights without block scales: every local expert sees every token.

Owns the loop over local experts. Knows no layouts and no routing.
Letters: T tokens, L local experts.
"""

from __future__ import annotations

from .down_bias import add_local_biases
from .nki_names import nl
from .partial_sum import PartialSum
from .plain_expert import RoutedExpert, pieces
from .projections import add_expert
from .selective_mx import spread
from .tiles import PARTITIONS, ExpertOptions, ExpertTensors, Tensor


def all_expert(
    r: Tensor,
    affinities: Tensor | None,
    weights: ExpertTensors,
    out: Tensor,
    options: ExpertOptions,
    partial: Tensor | None = None,
) -> None:
    """``out [T, H]`` = sum over local experts e of affinities[t, e] * e(r_t).

    ``r [128, H/128, T]`` in SBUF, whole on both cores; ``affinities [T, L]`` float32 in SBUF, masked, folded
    when T > 128, None under "no_scale": every expert counts once. Every local expert is read once per chip.
    ``partial [128, H/128, T]`` float32: a summand of this core to start from.
    """
    tokens = r.shape[2]
    experts, intermediate, hidden = weights.down.shape
    total = PartialSum(tokens, hidden, True, partial)
    for piece in pieces(experts, intermediate):
        if piece.columns:
            weight = None if affinities is None else _over_partitions(affinities, piece.index, tokens)
            add_expert(total, r, RoutedExpert(weights, piece.index), piece, weight, options)
    if weights.down_bias is not None:
        add_local_biases(total, weights.down_bias, affinities)
    total.finish(out)


def _over_partitions(affinities: Tensor, e: int, tokens: int) -> Tensor:
    """Column e of ``affinities [T, L]`` on every partition: ``[128, T]`` float32."""
    at = nl.ds(e, 1)
    column = affinities[:, at] if len(affinities.shape) == 2 else affinities[:, :, at]
    return spread(column, tokens).reshape((PARTITIONS, tokens))
