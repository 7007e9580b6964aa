"""What the neuron backend refuses: one table for the spec's validators, one for what our kernels cannot do.

Owns rules and their messages, each a row of a table. Knows requests and chips; knows no weights, no kernels
and no machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...gates import invalid, unsupported
from ...neuron.machine.chip import CHIPS, Chip
from ...spec import ExpertAffinityScaleMode
from .. import Request

__all__ = ["GATES", "HARDWARE", "SPEC", "Gate", "chip_called", "enforce"]

CORES = 2
SWISH_ALPHA = 1.702
PARTITIONS = 128
MOST_SELECTIVE_TOKENS = PARTITIONS  # one token to a partition
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_tanh")
NO_SCALE, POST_SCALE = ExpertAffinityScaleMode.NO_SCALE, ExpertAffinityScaleMode.POST_SCALE


@dataclass(frozen=True)
class Gate:
    """One rule: ``breaks`` says that a request breaks it, ``value`` what to show of it."""

    argument: str
    breaks: Callable[[Request], bool]
    value: Callable[[Request], Any]
    rule: str
    instead: str

    def enforce(self, request: Request) -> None:
        """Raise :class:`~moedecode.gates.UnsupportedConfig` if ``request`` breaks the rule."""
        if self.breaks(request):
            raise unsupported(self.argument, self.value(request), self.rule, self.instead)


def _given(name: str) -> Callable[[Request], Any]:
    return lambda r: r.given.get(name)


def _is(strategy: str) -> Callable[[Request], bool]:
    return lambda r: r.strategy == strategy


def _tokens(r: Request) -> int:
    return r.tokens or 0


HARDWARE = (
    Gate(
        "precision",
        lambda r: r.fmt.is_mx and r.numerics.precision != "mxfp8",
        lambda r: r.numerics.precision,
        "an MX matmul takes MX operands on both sides",
        "use precision='mxfp8'",
    ),
    Gate(
        "precision",
        lambda r: not r.fmt.is_mx and r.numerics.precision != "a16",
        lambda r: r.numerics.precision,
        "weights without E8M0 scales are multiplied by activations in the io dtype",
        "use precision='a16'",
    ),
    Gate(
        "inp",
        lambda r: r.fmt.is_mx and r.dtype == "float32",
        lambda r: r.dtype,
        "the MX quantisation takes 16-bit sources",
        "cast to bfloat16 or float16",
    ),
    Gate(
        "threads",
        lambda r: r.threads not in (0, CORES),
        lambda r: r.threads,
        f"the kernel runs on the {CORES} cores of one logical core",
        f"use 0 or {CORES}",
    ),
    Gate(
        "activation",
        lambda r: r.spec.experts.activation not in ACTIVATIONS,
        lambda r: r.spec.experts.activation,
        f"the kernel has {', '.join(ACTIVATIONS)}",
        "use another backend",
    ),
    Gate(
        "block_size",
        lambda r: (
            bool(r.given.get("is_all_expert_dynamic"))
            and r.given.get("block_size") is not None
            and r.given["block_size"] not in range(2, 129, 2)
        ),
        _given("block_size"),
        "a block of routed tokens lies on partitions, in pairs",
        "use an even number in 2..128",
    ),
    Gate(
        "output_in_sbuf",
        lambda r: bool(r.given.get("output_in_sbuf")) and _tokens(r) > PARTITIONS,
        lambda r: f"True with T = {r.tokens}",
        f"a token takes a partition of SBUF, and there are {PARTITIONS}",
        "leave it False",
    ),
    Gate(
        "shared",
        lambda r: r.spec.shared is not None and r.spec.shared.activation not in ACTIVATIONS,
        lambda r: r.spec.shared,
        f"the kernel has {', '.join(ACTIVATIONS)}",
        "use another backend",
    ),
)
"""What no kernel here does, under either set of gates."""

SPEC = (
    Gate(
        "inp",
        lambda r: r.flat and r.spec.hidden % 256 != 0,
        lambda r: f"H = {r.spec.hidden}",
        "H must be a multiple of 128 and split evenly over two cores (H % 256 == 0)",
        "pad H and pass hidden_actual, or use gates='extended'",
    ),
    Gate(
        "strategy",
        _is("grouped"),
        lambda r: repr(r.strategy),
        "the spec has selective and all_expert",
        "use one of them, or gates='extended'",
    ),
    Gate(
        "inp",
        lambda r: r.strategy == "all_expert" and r.fmt.is_mx and _tokens(r) % 4 != 0,
        lambda r: f"T = {r.tokens}",
        "all-expert mode with MX weights needs T % 4 == 0",
        "pad the batch, or use gates='extended'",
    ),
    Gate(
        "inp",
        lambda r: r.strategy != "all_expert" and _tokens(r) > MOST_SELECTIVE_TOKENS,
        lambda r: f"T = {r.tokens}",
        f"selective mode takes at most {MOST_SELECTIVE_TOKENS} tokens",
        "split the batch, use all_expert, or gates='extended'",
    ),
    Gate(
        "rank_id",
        lambda r: r.strategy == "selective" and r.local_experts < r.spec.router.num_experts,
        lambda r: f"{r.local_experts} of {r.spec.router.num_experts} experts",
        "selective mode reads experts by their global id",
        "give all experts, or use all_expert",
    ),
    Gate(
        "shared_expert_gate_w",
        lambda r: r.spec.shared is not None,
        lambda r: "given",
        "the block kernel does not support a shared expert",
        "run it apart, or use gates='extended'",
    ),
    Gate(
        "residual",
        lambda r: r.residual and r.strategy is not None and not (r.strategy == "all_expert" and r.fmt.is_mx),
        lambda r: "given",
        "only all-expert mode with MX weights adds a residual",
        "add it before the call, or use gates='extended'",
    ),
    Gate(
        "hidden_act_scale_factor",
        lambda r: r.given.get("hidden_act_scale_factor") is not None,
        _given("hidden_act_scale_factor"),
        "is a placeholder that must be None",
        "leave it None, or use gates='extended'",
    ),
    Gate(
        "alpha",
        lambda r: r.spec.experts.activation == "swish" and r.spec.experts.alpha != SWISH_ALPHA,
        lambda r: r.spec.experts.alpha,
        f"the kernel's Swish has alpha {SWISH_ALPHA}",
        "use gates='extended'",
    ),
    Gate(
        "hidden_act_bias",
        lambda r: r.given.get("hidden_act_bias") is not None,
        _given("hidden_act_bias"),
        "is a placeholder that must be None",
        "fold it into the bias and the clamps of up, or use gates='extended'",
    ),
    Gate(
        "skip_router_logits",
        lambda r: bool(r.given.get("skip_router_logits")),
        _given("skip_router_logits"),
        "the router always stores its logits",
        "leave it False, or use gates='extended'",
    ),
    Gate(
        "expert_affinities_scaling_mode",
        lambda r: r.fmt.is_mx and r.spec.affinity_scale is not POST_SCALE,
        lambda r: r.spec.affinity_scale.name,
        "the MX leaves scale by the affinity after the down projection",
        "use POST_SCALE, or gates='extended'",
    ),
    Gate(
        "hidden_input_scale",
        lambda r: (
            r.given.get("hidden_input_scale") is not None and not (r.fmt.is_mx and r.strategy == "all_expert")
        ),
        lambda r: "given",
        "only all-expert mode with MX weights takes a quantised hidden state",
        "pass plain hidden states, or use gates='extended'",
    ),
    Gate(
        "expert_affinities_eager",
        lambda r: r.given.get("expert_affinities_eager") is not None and r.strategy == "all_expert",
        lambda r: "given",
        "belongs to selective mode",
        "leave it None, or use gates='extended'",
    ),
    Gate(
        "is_all_expert_dynamic",
        lambda r: bool(r.given.get("is_all_expert_dynamic")) and r.strategy != "all_expert",
        _given("is_all_expert_dynamic"),
        "needs is_all_expert=True",
        "leave it False, or use gates='extended'",
    ),
    Gate(
        "block_size",
        lambda r: bool(r.given.get("is_all_expert_dynamic")) and r.given.get("block_size") is None,
        _given("block_size"),
        "is_all_expert_dynamic needs a block size",
        "give one, or use gates='extended'",
    ),
    Gate(
        "mask_unselected_experts",
        lambda r: (
            bool(r.given.get("is_all_expert_dynamic"))
            and bool(r.given.get("mask_unselected_experts"))
            and r.spec.affinity_scale is not NO_SCALE
        ),
        _given("mask_unselected_experts"),
        "affinities that stay in HBM, as the dynamic loop reads them, cannot be masked by index",
        "mask them first, or use gates='extended'",
    ),
    Gate(
        "selection_bias",
        lambda r: r.spec.router.selection_bias,
        lambda r: True,
        "the spec's router selects by its logits",
        "use gates='extended'",
    ),
    Gate(
        "scale",
        lambda r: r.spec.router.scale != 1.0,
        lambda r: r.spec.router.scale,
        "the spec's router does not scale affinities",
        "use gates='extended'",
    ),
    Gate(
        "norm_eps",
        lambda r: r.spec.router.norm_topk_prob and r.spec.router.norm_eps != 0,
        lambda r: r.spec.router.norm_eps,
        "the spec's router divides by the plain sum",
        "use 0.0, or gates='extended'",
    ),
    Gate(
        "norm_topk_prob",
        lambda r: (
            r.spec.router.norm_topk_prob and not r.spec.router.pre_norm and r.spec.router.score != "softmax"
        ),
        lambda r: True,
        "the spec normalises scores taken before the selection only",
        "use pre_norm=True, or gates='extended'",
    ),
)
"""The spec's validators, with their asymmetry: T <= 128 binds selective mode only, T % 4 MX all-expert
only.
"""

GATES = {"spec": HARDWARE + SPEC, "extended": HARDWARE}


def chip_called(name: str) -> Chip:
    """The chip of that name, or InvalidInput."""
    if name not in CHIPS:
        raise invalid("chip", repr(name), "is not known", f"choose one of {', '.join(CHIPS)}")
    return CHIPS[name]


def enforce(request: Request, chip: Chip, gates: str) -> None:
    """Raise :class:`~moedecode.gates.UnsupportedConfig` for the first rule that ``request`` breaks."""
    if request.fmt.is_mx and not chip.has_mx:
        able = ", ".join(c.name for c in CHIPS.values() if c.has_mx)
        raise unsupported(
            "chip",
            repr(chip.name),
            f"has no MX instructions, the weights are {request.fmt.value}",
            f"use {able}",
        )
    if not chip.sendrecv:
        able = ", ".join(c.name for c in CHIPS.values() if c.sendrecv)
        raise unsupported("chip", repr(chip.name), "its cores cannot exchange SBUF tensors", f"use {able}")
    for gate in GATES[gates]:
        gate.enforce(request)
