"""Specs, weights and arrays in the words of the kernels: names, shapes and enums of the flat functions.

Owns the arguments of a launch and the unpacking of what comes back. Runs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import IO_DTYPES, Array
from ...formats import WeightFormat
from ...gates import unsupported
from ...neuron.kernels.tiles import ExpertOptions
from ...neuron.machine import dtypes
from ...neuron.machine.chip import Chip
from ...neuron.machine.memory import StandIn
from ...spec import ActFn, BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterActFn, RouterSpec
from ...weights import BlockWeights, ExpertWeights
from .. import Placement, Routing
from .gates import CORES, PARTITIONS, SWISH_ALPHA
from .layout import (
    KernelExperts,
    bias_shape,
    expert_shapes,
    fold_offset,
    kernel_intermediate,
    padded_hidden,
    permuted,
    shared_tensors,
)

LARGEST_IEEE_E4M3 = 0x77  # the code of 240; larger ones are infinity or NaN in float8_e4m3

ACT_FN = {"silu": ActFn.SiLU, "swish": ActFn.Swish, "gelu": ActFn.GELU, "gelu_tanh": ActFn.GELU_Tanh_Approx}
SCORE = {"softmax": RouterActFn.SOFTMAX, "sigmoid": RouterActFn.SIGMOID}
X4 = {
    WeightFormat.MXFP4: dtypes.float4_e2m1fn_x4,
    WeightFormat.MXFP8_E4M3: dtypes.float8_e4m3fn_x4,
    WeightFormat.MXFP8_E5M2: dtypes.float8_e5m2_x4,
}


def padding(hidden: int) -> Array | None:
    """The index of each padded hidden position, -1 past H; None when H fills whole partitions."""
    padded = -(-hidden // PARTITIONS) * PARTITIONS
    positions = np.arange(padded)
    return None if padded == hidden else np.where(positions < hidden, positions, -1)


def score(spec: RouterSpec) -> RouterActFn:
    """The router's score function by the flat functions' name."""
    return SCORE[spec.score]


def rank(strategy: str, first_expert: int, local: int, experts: int) -> Array | None:
    """``rank_id`` int32 ``[1, 1]``; None where the experts are all here and each token picks its own."""
    if strategy != "all_expert" and local == experts:
        return None
    return np.array([[first_expert // local]], np.int32)


def block_constants(
    block: BlockSpec, expert: ExpertSpec, weights: BlockWeights, experts: KernelExperts, chip: Chip
) -> dict[str, Any]:
    """The arguments of ``moe_block_tkg`` that every call of a block shares."""
    order, router = experts.hidden_map, block.router
    gamma = np.ones(experts.hidden, IO_DTYPES["bfloat16"]) if weights.gamma is None else weights.gamma
    padded = experts.padded != experts.hidden or block.hidden_actual is not None
    found = {
        "gamma": permuted(gamma, order)[None],  # [1, padded]
        "router_weights": np.ascontiguousarray(permuted(weights.router, order).T),  # [padded, E]
        "router_bias": None if weights.router_bias is None else weights.router_bias[None],
        "eps": block.eps,
        "top_k": router.top_k,
        "router_act_fn": score(router),
        "router_pre_norm": router.pre_norm,
        "norm_topk_prob": router.norm_topk_prob,
        "expert_affinities_scaling_mode": block.affinity_scale,
        "hidden_act_fn": ACT_FN[expert.activation],
        "router_mm_dtype": IO_DTYPES[router.matmul_dtype],
        "hidden_actual": block.norm_width if padded else None,
        **_activation(expert),
        **_tensors(experts, chip),
        **_router_extras(router, weights),
    }
    if weights.shared is not None and block.shared is not None:
        found |= shared_tensors(weights.shared, experts)
        found["shared_expert_options"] = _options(block.shared)
    if weights.shared_gate is not None:
        gate = permuted(weights.shared_gate, order)[:, None]  # [padded, 1]
        found["shared_expert_sigmoid_gate_w"] = np.ascontiguousarray(gate)
    return found


def _options(spec: ExpertSpec) -> ExpertOptions:
    """A shared expert's own activation and clamps in the kernels' words."""
    return ExpertOptions(spec.activation, spec.alpha, spec.up_offset, spec.gate_clamp, spec.up_clamp)


def _router_extras(router: RouterSpec, weights: BlockWeights) -> dict[str, Any]:
    """What the router does beyond the flat functions; nothing where it does not."""
    found: dict[str, Any] = {}
    if weights.selection_bias is not None:
        found["router_selection_bias"] = weights.selection_bias[None]
    if router.scale != 1.0:
        found["router_scale"] = router.scale
    if router.norm_topk_prob and router.norm_eps:
        found["router_norm_eps"] = router.norm_eps
    if router.norm_topk_prob and not router.pre_norm:
        # a softmax over the chosen alone already sums to 1
        found["router_normalise_post_norm"] = router.score != "softmax"
    return found


def moe_arguments(
    gates: str,
    chip: Chip,
    hidden: Array,
    experts: KernelExperts,
    spec: ExpertSpec,
    mode: ExpertAffinityScaleMode,
    strategy: str,
    index: Array | None,
    affinities: Array,
    first_expert: int,
    output_dtype: Any,
    placement: Placement,
) -> dict[str, Any]:
    """The arguments of ``moe_tkg`` on ``hidden [T, H]``.

    The kernel takes affinities over the global experts. In all-expert mode the rank's own columns, already
    masked, are given as if they were all; otherwise the chosen ones come as ``expert_affinities_eager``.
    """
    if gates == "spec":
        experts, spec = fold_offset(experts, spec)
    everyone = strategy == "all_expert"
    if index is None:
        index = np.zeros((len(hidden), 1), np.int32)
        wide, eager = affinities, None
    else:
        if (index < 0).any():  # no expert: any one of this rank, weighed with 0
            counted = np.ones_like(affinities) if mode is ExpertAffinityScaleMode.NO_SCALE else affinities
            affinities = np.where(index < 0, 0, counted).astype(np.float32)
            index, mode = np.where(index < 0, first_expert, index), ExpertAffinityScaleMode.POST_SCALE
        count = max(int(index.max(initial=0)) + 1, first_expert + experts.num_experts)
        wide, eager = np.zeros((len(hidden), count), np.float32), affinities
        np.put_along_axis(wide, index, affinities, -1)
    if experts.fmt.is_mx and hidden.dtype == np.float32:  # quantised on arrival: exact in 16 bits
        hidden = hidden.astype(IO_DTYPES["bfloat16"])
    found = {
        "hidden_input": permuted(hidden, experts.hidden_map),
        "expert_affinities": wide,
        "expert_index": index.astype(np.uint32),
        "expert_affinities_eager": eager,
        "is_all_expert": everyone,
        "rank_id": rank(strategy, 0 if everyone else first_expert, experts.num_experts, wide.shape[1]),
        "expert_affinities_scaling_mode": mode,
        "activation_fn": ACT_FN[spec.activation],
        "output_dtype": output_dtype,
        "output_in_sbuf": placement.output_in_sbuf,
        **_activation(spec),
        **_tensors(experts, chip),
    }
    if placement.dynamic and everyone and experts.fmt.is_mx:  # plain weights have one form
        found |= {"is_all_expert_dynamic": True, "block_size": placement.block_size or PARTITIONS}
    if strategy == "grouped":
        found["distinct"] = True
    return found


def described_experts(weights: ExpertWeights) -> KernelExperts:
    """The experts without their memory, for the ledger-only mode: nothing is drawn or converted."""
    fmt, count, padded = weights.fmt, weights.num_experts, padded_hidden(weights.hidden, weights.fmt)
    width = kernel_intermediate(weights)
    parts: list[Any] = [StandIn(*described) for described in expert_shapes(fmt, count, padded, width)]
    scales: list[Any] = parts[2:] or [None, None]
    biases: list[Any] = [None, None]
    if weights.gate_bias is not None or weights.up_bias is not None:
        shape, _ = bias_shape(fmt, count, width)
        biases[0] = StandIn(shape, dtypes.bfloat16)
    if weights.down_bias is not None:
        biases[1] = StandIn((count, padded), dtypes.bfloat16)
    positions = np.arange(padded)
    order = None if padded == weights.hidden else np.where(positions < weights.hidden, positions, -1)
    return KernelExperts(fmt, count, weights.hidden, padded, width, order, *parts[:2], *scales, *biases)


def engine_seconds(report: Any) -> dict[str, list[float]]:
    """Each engine's lower bound in seconds, one number per core."""
    timeline = report.timeline
    cores = [timeline.bounds(core) for core in range(CORES)]
    return {engine: [bound.get(engine, 0.0) for bound in cores] for engine in timeline.bounds()}


def _activation(spec: ExpertSpec) -> dict[str, Any]:
    """Activation factor, up offset and clamps, None where they do nothing."""
    alpha = spec.alpha if spec.activation == "swish" and spec.alpha != SWISH_ALPHA else None
    return {
        "hidden_act_scale_factor": alpha,
        "hidden_act_bias": spec.up_offset or None,
        "gate_clamp_upper_limit": spec.gate_clamp[1],
        "gate_clamp_lower_limit": spec.gate_clamp[0],
        "up_clamp_upper_limit": spec.up_clamp[1],
        "up_clamp_lower_limit": spec.up_clamp[0],
    }


def _tensors(experts: KernelExperts, chip: Chip) -> dict[str, Any]:
    return {
        "expert_gate_up_weights": _typed(experts.gate_up, experts.fmt, chip),
        "expert_down_weights": _typed(experts.down, experts.fmt, chip),
        "expert_gate_up_weights_scale": experts.gate_up_scale,
        "expert_down_weights_scale": experts.down_scale,
        "expert_gate_up_bias": experts.gate_up_bias,
        "expert_down_bias": experts.down_bias,
    }


def _typed(codes: Any, fmt: WeightFormat, chip: Chip) -> Any:
    """Codes in the machine's dtype: four MX elements are one of a structured type."""
    dtype = X4.get(fmt)
    if fmt is WeightFormat.FP8_E4M3 and not chip.has_mx:
        dtype = dtypes.float8_e4m3
        if not isinstance(codes, StandIn) and ((codes.view(np.uint8) & 0x7F) > LARGEST_IEEE_E4M3).any():
            raise unsupported(
                "weights",
                "fp8_e4m3 codes above 240",
                f"{chip.name} multiplies the FP8 type that has infinities above 240",
                "rescale the weights to 240, or use trn3",
            )
    if dtype is None:
        return codes
    return StandIn(codes.shape, dtype) if isinstance(codes, StandIn) else codes.view(dtype)


def no_routing(spec: RouterSpec, dtype: Any) -> Routing:
    """The routing of no tokens."""
    experts, k = spec.num_experts, spec.top_k
    return Routing(
        np.empty((0, experts), dtype), np.empty((0, k), np.int32), np.empty((0, experts), np.float32)
    )


def spread(routing: Routing, real: Array, rows: int) -> Routing:
    """The routing of the real tokens at their places among ``rows``; masked ones get 0, and the id -1."""
    filled = []
    for values, filler in ((routing.logits, 0), (routing.index, -1), (routing.affinities, 0)):
        whole = np.full((rows, values.shape[1]), filler, values.dtype)
        whole[real] = values
        filled.append(whole)
    return Routing(*filled)
