"""The megakernel: norm, router, shared expert and experts in one launch, only inputs and outputs in HBM.

Owns the order of the stages, the outputs and what each stage hands to the next. Knows no arithmetic.
Letters: T = B*S tokens, H hidden, I intermediate, E experts, L of them local, K per token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .masking import load_per_token, local_affinities, per_token_to_hbm
from .moe_tkg import Hidden, Leaf, expert_options, is_mx, on_this_rank, run_leaf
from .nki_names import jit, nisa, nl
from .norm import rmsnorm
from .plain_expert import SharedTensors
from .router import RouterExtras, router_topk_sb
from .tiles import ExpertOptions, ExpertTensors, Routing, Tensor, token_shape


@jit
def moe_block_tkg(
    inp: Tensor,
    gamma: Tensor,
    router_weights: Tensor,
    expert_gate_up_weights: Tensor,
    expert_down_weights: Tensor,
    shared_expert_gate_w: Tensor | None = None,
    shared_expert_up_w: Tensor | None = None,
    shared_expert_down_w: Tensor | None = None,
    expert_gate_up_weights_scale: Tensor | None = None,
    expert_down_weights_scale: Tensor | None = None,
    router_bias: Tensor | None = None,
    expert_gate_up_bias: Tensor | None = None,
    expert_down_bias: Tensor | None = None,
    shared_expert_gate_bias: Tensor | None = None,
    shared_expert_up_bias: Tensor | None = None,
    shared_expert_down_bias: Tensor | None = None,
    eps: float = 1e-6,
    top_k: int = 1,
    router_act_fn: Any = "sigmoid",
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    expert_affinities_scaling_mode: Any = "no_scale",
    hidden_act_fn: Any = "silu",
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    router_mm_dtype: Any = nl.bfloat16,
    hidden_actual: int | None = None,
    skip_router_logits: bool = False,
    is_all_expert: bool = False,
    rank_id: Tensor | None = None,
    residual: Tensor | None = None,
    return_routing: bool = False,
    distinct: bool = False,
    is_all_expert_dynamic: bool = False,
    block_size: int | None = None,
    shared_expert_sigmoid_gate_w: Tensor | None = None,
    shared_expert_options: ExpertOptions | None = None,
    router_selection_bias: Tensor | None = None,
    router_scale: float = 1.0,
    router_norm_eps: float = 0.0,
    router_normalise_post_norm: bool = False,
) -> tuple[Tensor, ...]:
    """The block on ``inp [B, S, H]``, H a multiple of 128 (of 512 with MX weights), on one or two cores.

    Parameters up to ``residual`` are the flat function's. ``shared_expert_sigmoid_gate_w [H, 1]``: multiplies
    the shared expert's output by sigmoid(r . w), ``shared_expert_options`` replaces the routed experts'
    activation and clamps for it. ``distinct``, ``is_all_expert_dynamic`` and ``block_size`` choose forms of
    the MX leaves; the ``router_*`` at the end are :class:`~.router.RouterExtras`. ``rank_id [1, 1]`` is
    needed in all-expert mode and where L < E.

    Returns:
        out ``[T, H]``, router logits ``[T, E]`` in the io dtype unless skipped, inp + residual ``[T, H]`` if
        there is a residual, and with ``return_routing`` the ids ``[T, K]`` uint32 and the affinities ``[T,
        E]`` float32.

    Raises:
        ValueError: a combination that no leaf has.
    """
    hidden = inp.shape[-1]
    tokens, experts = inp.size // hidden, router_weights.shape[1]
    weights = ExpertTensors(
        expert_gate_up_weights,
        expert_down_weights,
        expert_gate_up_weights_scale,
        expert_down_weights_scale,
        expert_gate_up_bias,
        expert_down_bias,
    )
    local_experts = expert_down_weights.shape[0]
    if rank_id is None and (is_all_expert or local_experts < experts):
        raise ValueError(f"rank_id=None: {local_experts} of {experts} experts are here; pass [[rank]]")
    leaf = Leaf(is_mx(weights), is_all_expert, is_all_expert_dynamic, block_size, distinct)
    options = expert_options(
        hidden_act_fn,
        hidden_act_scale_factor,
        hidden_act_bias,
        (gate_clamp_lower_limit, gate_clamp_upper_limit),
        (up_clamp_lower_limit, up_clamp_upper_limit),
        expert_affinities_scaling_mode,
        inp.dtype,
    )
    shared = None
    if shared_expert_gate_w is not None:
        shared = SharedTensors(
            shared_expert_gate_w,
            shared_expert_up_w,
            shared_expert_down_w,
            shared_expert_gate_bias,
            shared_expert_up_bias,
            shared_expert_down_bias,
            shared_expert_sigmoid_gate_w,
            replace(shared_expert_options or options, io_dtype=inp.dtype),
        )

    def output(columns: int, dtype: Any, name: str) -> Tensor:
        return nl.ndarray((tokens, columns), dtype=dtype, buffer=nl.shared_hbm, name=name)

    out = output(hidden, inp.dtype, "out")
    logits = None if skip_router_logits else output(experts, inp.dtype, "router_logits")
    summed = None if residual is None else output(hidden, inp.dtype, "residual_out")
    affinities_out = output(experts, nl.float32, "expert_affinities") if return_routing else None

    r = rmsnorm(inp, gamma, eps, hidden_actual, residual, summed)  # [128, H/128, T]
    routing = router_topk_sb(
        r,
        router_weights,
        router_bias,
        logits,
        router_act_fn,
        top_k,
        router_pre_norm,
        norm_topk_prob,
        router_mm_dtype,
        affinities_out,
        extras=RouterExtras(router_selection_bias, router_scale, router_norm_eps, router_normalise_post_norm),
    )
    index_out = per_token_to_hbm(routing.expert_index, tokens) if return_routing else None
    routing = Routing(routing.expert_index, None, routing.eager, tokens)  # what stays on chip says everything
    affinities, routed = None, None
    if is_all_expert and options.scaling != "no_scale":
        if leaf.dynamic:
            rank_id = load_per_token(rank_id)  # asked for twice below, read once
        # Built from the chosen ids, so that unselected experts weigh 0 in every combination of the router.
        affinities = local_affinities(routing, rank_id, local_experts)
        if leaf.dynamic:  # ids alone say which tokens an expert sees
            ones = nl.ndarray(token_shape(tokens, top_k), dtype=nl.float32, buffer=nl.sbuf, name="ones")
            nisa.memset(dst=ones, value=1.0)
            routed = local_affinities(
                Routing(routing.expert_index, None, ones, tokens), rank_id, local_experts
            )
    elif not is_all_expert and local_experts < experts:
        routing, options = on_this_rank(routing, rank_id, local_experts, options)
    run_leaf(leaf, Hidden(r), routing, affinities, weights, options, out, shared, routed)
    outputs = (out, logits, summed, index_out, affinities_out)
    return tuple(tensor for tensor in outputs if tensor is not None)
