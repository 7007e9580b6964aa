"""The reference backend: the door to the float64 formulas of :mod:`.maths`.

Owns what surrounds the formulas: masked tokens, the final rounding, the protocol. No speed, no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import Array
from ...formats import WeightFormat
from ...plan import Capabilities, CostTable
from ...spec import PRECISIONS, BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ...weights import BlockWeights, ExpertWeights
from .. import BlockOutput, Numerics, Placement, Request, Routing, rank_slice
from . import maths

__all__ = ["BlockValues", "ReferenceBackend", "ReferenceBlock"]

_quiet = np.errstate(all="ignore")  # an overflow is a value here, not an event


@dataclass(frozen=True, eq=False)
class BlockValues:
    """Unrounded: ``out [T, H]``, ``logits`` and ``affinities [T, E]``, with ``index [T, K]``."""

    out: Array
    logits: Array
    index: Array
    affinities: Array


@dataclass(frozen=True, eq=False)
class ReferenceBlock:
    """A block of this backend: nothing is packed, every call reads the weights as they are stored."""

    spec: BlockSpec
    weights: BlockWeights
    numerics: Numerics

    @_quiet
    def values(self, hidden: Array, residual: Array | None, strategy: str, first_expert: int) -> BlockValues:
        """The block's maths on ``hidden`` and ``residual [T, H]`` (or None), unrounded."""
        spec, w, io = self.spec, self.weights, hidden.dtype
        s = maths.residual_sum(hidden, residual)  # [T, H]
        r = maths.rounded(maths.rmsnorm(s, w.gamma, spec.eps, spec.norm_width), io)
        r = maths.bounded(r)  # [T, H]
        logits, index, affinities = maths.route(r, w.router, w.router_bias, w.selection_bias, spec.router)
        if strategy == "all_expert":
            count, dense = w.experts.num_experts, spec.router.dense_affinities
            a = maths.local_affinities(affinities, index, first_expert, count, dense)  # [T, L]
        else:
            a = np.take_along_axis(affinities, index, -1)  # [T, K]
        out = maths.expert_sum(r, w.experts, spec.experts, spec.affinity_scale, strategy, index, a,
                               first_expert, self.numerics, io)  # fmt: skip
        if w.shared is not None and spec.shared is not None:
            out += maths.shared_expert(r, w.shared, w.shared_gate, spec.shared, self.numerics, io)  # [T, H]
        return BlockValues(out, logits, index, affinities)

    def profile(self, hidden: Array, *, strategy: str, first_expert: int) -> dict[str, list[float]]:
        """Nothing is measured here."""
        return {}

    @_quiet
    def run(self, hidden: Array, *, strategy: str, first_expert: int, residual: Array | None,
            token_mask: Array | None, return_router: bool, out: Array | None) -> BlockOutput:  # fmt: skip
        """See :class:`~moedecode.backends.PreparedBlock`. A masked token is not computed at all."""
        io = hidden.dtype
        real = np.ones(len(hidden), bool) if token_mask is None else token_mask
        v = self.values(hidden[real], None if residual is None else residual[real], strategy, first_expert)
        target = np.empty(hidden.shape, io) if out is None else out
        target[...] = _spread(v.out, real, 0, io)
        s = None if residual is None else maths.residual_sum(hidden, residual).astype(io)
        if not return_router:
            return BlockOutput(target, s, None)
        logits, index = _spread(v.logits, real, 0, io), _spread(v.index, real, -1, np.int32)
        return BlockOutput(target, s, Routing(logits, index, _spread(v.affinities, real, 0, np.float32)))


def _spread(values: Array, real: Array, filler: int, dtype: Any) -> Array:
    """The rows of real tokens at their places, ``filler`` in those of masked ones, rounded to ``dtype``."""
    rows = np.full((len(real), values.shape[-1]), filler, dtype)
    rows[real] = values.astype(dtype)
    return rows


class ReferenceBackend:
    """Float64 NumPy: slow, short and right. Does the whole contract; "a16" and "a8" are exact here."""

    name = "reference"
    capabilities = Capabilities(
        backend="reference",
        formats=frozenset(WeightFormat),
        strategies=frozenset({"selective", "grouped", "all_expert"}),
        precisions=frozenset(PRECISIONS),
        shared_expert=True,
        scale_modes=frozenset(ExpertAffinityScaleMode) - {ExpertAffinityScaleMode.PRE_SCALE_DELAYED},
        resident="process memory",
    )

    def costs(self, fmt: WeightFormat, precision: str) -> CostTable:
        """Rates of NumPy in float64; decoding weights is what costs."""
        return CostTable(5e9, macs_per_second=1e10, decodes_per_second=5e7, seconds_per_call=1e-3)

    def refuse(self, request: Request) -> None:
        """Nothing."""

    def pack(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights themselves."""
        return weights

    def block(self, spec: BlockSpec, weights: BlockWeights, experts: ExpertWeights,
              shared: ExpertWeights | None, numerics: Numerics, threads: int) -> ReferenceBlock:  # fmt: skip
        """A block over ``weights`` with ``experts`` and ``shared``; ``threads`` changes nothing."""
        w = weights
        own = BlockWeights(w.router, experts, w.gamma, w.router_bias, w.selection_bias, shared, w.shared_gate)
        return ReferenceBlock(spec, own, numerics)

    @_quiet
    def rmsnorm(self, hidden: Array, gamma: Array | None, eps: float, width: int,
                residual: Array | None) -> tuple[Array, Array | None]:  # fmt: skip
        """r rounded once to the dtype of ``hidden``, and s in that dtype if a residual was given."""
        s, io = maths.residual_sum(hidden, residual), hidden.dtype
        r = maths.bounded(maths.rounded(maths.rmsnorm(s, gamma, eps, width), io))
        return r.astype(io), None if residual is None else s.astype(io)

    def rank_slice(self, affinities: Array, index: Array, first: int, local: int, by_index: bool) -> Array:
        """See :func:`moedecode.backends.rank_slice`."""
        return rank_slice(affinities, index, first, local, by_index)

    @_quiet
    def router(self, x: Array, weight: Array, bias: Array | None, selection_bias: Array | None,
               spec: RouterSpec) -> Routing:  # fmt: skip
        """The router alone; logits in the dtype of ``x``."""
        logits, index, affinities = maths.route(x, weight, bias, selection_bias, spec)
        return Routing(logits.astype(x.dtype), index, affinities.astype(np.float32))

    @_quiet
    def experts(self, hidden: Array, packed: ExpertWeights, spec: ExpertSpec,
                scale_mode: ExpertAffinityScaleMode, strategy: str, index: Array | None, affinities: Array,
                first_expert: int, numerics: Numerics, out: Array,
                placement: Placement | None = None) -> None:  # fmt: skip
        """Expert MLPs and weighted sum, rounded once to the dtype of ``out``."""
        total = maths.expert_sum(hidden, packed, spec, scale_mode, strategy, index, affinities, first_expert,
                                 numerics, hidden.dtype)  # fmt: skip
        out[...] = total.astype(out.dtype)
