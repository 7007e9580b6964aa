"""Owns the right answer: the same arguments put to moedecode's own float64 reference.

Must not know the library or the machine. It applies the casts of the contract: the normed hidden state and
(MX) the product of gate and up are rounded once to the io dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ... import tkg
from ...spec import ActFn, ExpertAffinityScaleMode, RouterActFn
from ..machine import dtypes
from .calls import CLAMP
from .configs import BlockConfig

__all__ = ["block_truth", "moe_truth", "rmsnorm_truth", "router_truth"]

Array = npt.NDArray[Any]

_ACTIVATIONS = {
    "silu": ActFn.SiLU,
    "swish": ActFn.Swish,
    "gelu": ActFn.GELU,
    "gelu_tanh": ActFn.GELU_Tanh_Approx,
}
_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


def block_truth(
    config: BlockConfig, arrays: dict[str, Any], *, backend: str = "reference"
) -> tuple[Array, Array]:
    """(out [T, H], router_logits [T, E]) of the fused block, by any backend of moedecode."""
    options: dict[str, Any] = {
        "top_k": config.top_k,
        "router_act_fn": RouterActFn[config.score.upper()],
        "router_pre_norm": config.pre_norm,
        "norm_topk_prob": config.norm_topk,
        "expert_affinities_scaling_mode": ExpertAffinityScaleMode[config.scaling],
        "hidden_act_fn": _ACTIVATIONS[config.activation],
        "router_mm_dtype": _NAMES[config.io],
        "hidden_actual": config.hidden_actual,
        "is_all_expert": config.all_expert,
    }
    outputs = tkg.moe_block_tkg(**_unpacked(arrays), **options, **_limits(config), **_how(config, backend))
    return outputs[0], outputs[1]


def moe_truth(
    config: BlockConfig,
    arrays: dict[str, Any],
    *,
    mask: bool,
    backend: str = "reference",
    block_size: int | None = None,
) -> Array:
    """`out [T, H]` of the expert MLPs alone, by any backend; `block_size` asks for its dynamic loop."""
    options: dict[str, Any] = {
        "is_all_expert": config.all_expert,
        "mask_unselected_experts": mask,
        "is_all_expert_dynamic": block_size is not None,
        "block_size": block_size,
        "expert_affinities_scaling_mode": ExpertAffinityScaleMode[config.scaling],
        "activation_fn": _ACTIVATIONS[config.activation],
    }
    given = _unpacked(arrays)
    given["expert_index"] = given["expert_index"].astype(np.int32)
    out: Array = tkg.moe_tkg(**given, **options, **_limits(config), **_how(config, backend))
    return out


def router_truth(
    config: BlockConfig, x: Array, weights: Array, bias: Array | None
) -> tuple[Array, Array, Array]:
    """(logits [T, E], index [T, K], affinities [T, E]) of `x [T, H]`."""
    logits, index, affinities = tkg.router_topk(
        x,
        weights,
        bias,
        RouterActFn[config.score.upper()],
        config.top_k,
        config.pre_norm,
        config.norm_topk,
        backend="reference",
    )
    return logits, index, affinities


def rmsnorm_truth(
    inp: Array, gamma: Array, hidden_actual: int | None, residual: Array | None
) -> tuple[Array, Array | None]:
    """(normed, residual_out) in the shape and dtype of `inp`."""
    made = tkg.rmsnorm_tkg(inp, gamma, hidden_actual=hidden_actual, residual=residual, backend="reference")
    return made if isinstance(made, tuple) else (made, None)


def _limits(config: BlockConfig) -> dict[str, Any]:
    limit = CLAMP if config.clamp else None
    return {
        "gate_clamp_upper_limit": limit,
        "up_clamp_upper_limit": limit,
        "up_clamp_lower_limit": None if limit is None else -limit,
    }


def _how(config: BlockConfig, backend: str) -> dict[str, Any]:
    """Backend and numerics. The reference visits expert by expert: the same sum, each expert decoded once."""
    how: dict[str, Any] = {"backend": backend}
    if config.is_mx:
        how |= {
            "h_rounding": "io",
            "expert_weight_dtype": {"mxfp4": "float4_e2m1fn_x4", "mxfp8": "float8_e4m3fn_x4"}[config.weights],
        }
    if not config.all_expert and backend == "reference":
        how["strategy"] = "grouped"
    return how


def _unpacked(arrays: dict[str, Any]) -> dict[str, Any]:
    """x4 arrays as the integers that the flat functions take, the rank as a number."""
    made = dict(arrays)
    for name, value in arrays.items():
        if isinstance(value, np.ndarray) and dtypes.is_x4(value.dtype):
            made[name] = value.view(np.uint16 if value.dtype.itemsize == 2 else np.uint32)
    if isinstance(arrays.get("rank_id"), np.ndarray):
        made["rank_id"] = int(arrays["rank_id"].reshape(-1)[0])
    return made
