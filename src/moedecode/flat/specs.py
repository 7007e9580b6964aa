"""From the flat functions' flags to the typed specs that blocks and backends understand.

Owns the translation of names and the rules between flags. Reads no arrays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..gates import require
from ..spec import ActFn, Clamp, ExpertSpec, RouterActFn, RouterSpec
from ..weights import ExpertWeights
from .arguments import member, number

SWISH_ALPHA = 1.702

ACTIVATION_NAMES = {
    ActFn.SiLU: "silu",
    ActFn.GELU: "gelu",
    ActFn.GELU_Tanh_Approx: "gelu_tanh",
    ActFn.Swish: "swish",
}


def router_spec(
    experts: int,
    top_k: tuple[str, Any],
    act_fn: tuple[str, Any],
    *,
    pre_norm: bool,
    norm_topk_prob: bool,
    bias: bool,
    matmul_dtype: str,
) -> RouterSpec:
    """The router; ``top_k`` and ``act_fn`` come with the names of their arguments.

    ``norm_topk_prob`` does nothing unless ``pre_norm``: the flat functions normalise pre-norm scores only.
    """
    score = member(RouterActFn, act_fn[1], act_fn[0]).name.lower()
    k = top_k[1]
    whole = isinstance(k, (int, np.integer)) and not isinstance(k, bool) and int(k) in range(1, experts + 1)
    require(whole, top_k[0], k, f"must be an integer in 1..E ({experts})", "choose fewer experts per token")
    return RouterSpec(
        num_experts=experts,
        top_k=int(k),
        score=score,
        pre_norm=bool(pre_norm),
        norm_topk_prob=bool(norm_topk_prob and pre_norm),
        bias=bias,
        matmul_dtype=matmul_dtype,
    )


def expert_spec(
    intermediate: int,
    act_fn: tuple[str, Any],
    *,
    scale_factor: float | None,
    offset: float | None,
    gate_clamp: Clamp,
    up_clamp: Clamp,
    bias: bool,
) -> ExpertSpec:
    """One expert's MLP; ``scale_factor`` is Swish's alpha, ``offset`` is added to up."""
    act = member(ActFn, act_fn[1], act_fn[0])
    takes = scale_factor is None or act is ActFn.Swish
    rule = f"is Swish's alpha, {act.name} has none"
    require(takes, "hidden_act_scale_factor", scale_factor, rule, "use Swish or None")
    return ExpertSpec(
        intermediate=intermediate,
        activation=ACTIVATION_NAMES[act],
        alpha=SWISH_ALPHA
        if scale_factor is None
        else number(scale_factor, "hidden_act_scale_factor", f"None is {SWISH_ALPHA}"),
        up_offset=0.0 if offset is None else number(offset, "hidden_act_bias", "None is 0"),
        gate_clamp=gate_clamp,
        up_clamp=up_clamp,
        bias=bias,
    )


def has_bias(weights: ExpertWeights) -> bool:
    """True when any of the three projections has a bias."""
    return any(bias is not None for bias in (weights.gate_bias, weights.up_bias, weights.down_bias))


def shared_spec(expert: ExpertSpec, shared: ExpertWeights | None) -> ExpertSpec | None:
    """The shared expert does what the routed ones do, at its own width and with its own biases."""
    return (
        None if shared is None else replace(expert, intermediate=shared.intermediate, bias=has_bias(shared))
    )


def wanted_strategy(strategy: str | None, is_all_expert: bool) -> str:
    """What the caller named, else what ``is_all_expert`` says."""
    return strategy if strategy is not None else "all_expert" if is_all_expert else "selective"


def wanted_precision(precision: str | None, is_mx: bool) -> str:
    """What the caller named, else "mxfp8" for MX weights, as the Trainium leaves do, and "a16" for others."""
    return precision if precision is not None else "mxfp8" if is_mx else "a16"
