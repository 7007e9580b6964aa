"""Families of blocks that other packages have code for: what a spec has to be to belong to one.

Knows specs only.
"""

from __future__ import annotations

from ..spec import BlockSpec, ExpertAffinityScaleMode

__all__ = ["is_gpt_oss", "is_plain_softmax"]


def is_plain_softmax(spec: BlockSpec) -> bool:
    """True for a softmax over all experts, normalised or not, and SiLU experts with nothing added."""
    r, e = spec.router, spec.experts
    plain_router = r.score == "softmax" and r.pre_norm and not (r.bias or r.selection_bias) and r.scale == 1.0
    plain_expert = e.activation == "silu" and not e.bias and e.up_offset == 0.0
    no_clamps = e.gate_clamp == e.up_clamp == (None, None)
    return plain_router and plain_expert and no_clamps and _is_bare(spec)


def is_gpt_oss(spec: BlockSpec) -> bool:
    """True for a softmax over chosen, biased logits and clamped Swish experts with biases and (up + 1)."""
    r, e = spec.router, spec.experts
    router = r.score == "softmax" and not r.pre_norm and r.bias and not r.selection_bias and r.scale == 1.0
    expert = e.activation == "swish" and e.bias and e.up_offset == 1.0
    limit = e.gate_clamp[1]
    clamps = limit is not None and e.gate_clamp[0] is None and e.up_clamp == (-limit, limit)
    return router and expert and clamps and _is_bare(spec)


def _is_bare(spec: BlockSpec) -> bool:
    bare = spec.shared is None and spec.hidden_actual is None
    return bare and spec.affinity_scale is ExpertAffinityScaleMode.POST_SCALE
