"""The flat functions: the block and its parts with the names, order and defaults of the Trainium kernel.

Each reads its arguments into specs, weights and checked arrays (see :mod:`.flat`) and hands over to a
backend, by the same path as :class:`~moedecode.block.MoEBlock`. Owns signatures and their documentation;
computes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import IO_DTYPES, as_numpy, check_single, io_dtype, like_input
from .backends import Placement, Request, rank_slice
from .backends import backend as find_backend
from .checks import (
    check_backend,
    check_mask,
    check_numerics,
    check_out,
    check_threads,
    check_whole,
    checked_weights,
)
from .flat import arguments
from .flat.packed import (
    PackedWeights,
    check_handle_backend,
    expert_weights,
    pack,
    packed_for,
    shared_expert,
)
from .flat.quantised import moe_hidden
from .flat.specs import expert_spec, has_bias, router_spec, shared_spec, wanted_precision, wanted_strategy
from .gates import require, unsupported
from .plan import choose_strategy
from .spec import ActFn, BlockSpec, ExpertAffinityScaleMode, RouterActFn, RouterSpec
from .weights import BlockWeights

__all__ = [
    "PackedWeights",
    "mask_expert_affinities",
    "moe_block_tkg",
    "moe_tkg",
    "pack",
    "rmsnorm_tkg",
    "router_topk",
]


def moe_block_tkg(
    inp: Any,
    gamma: Any,
    router_weights: Any,
    expert_gate_up_weights: Any,
    expert_down_weights: Any,
    shared_expert_gate_w: Any = None,
    shared_expert_up_w: Any = None,
    shared_expert_down_w: Any = None,
    expert_gate_up_weights_scale: Any = None,
    expert_down_weights_scale: Any = None,
    router_bias: Any = None,
    expert_gate_up_bias: Any = None,
    expert_down_bias: Any = None,
    shared_expert_gate_bias: Any = None,
    shared_expert_up_bias: Any = None,
    shared_expert_down_bias: Any = None,
    eps: float = 1e-6,
    top_k: int = 1,
    router_act_fn: Any = RouterActFn.SIGMOID,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    expert_affinities_scaling_mode: Any = ExpertAffinityScaleMode.NO_SCALE,
    hidden_act_fn: Any = ActFn.SiLU,
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    router_mm_dtype: Any = "bfloat16",
    hidden_actual: int | None = None,
    skip_router_logits: bool = False,
    is_all_expert: bool = False,
    rank_id: Any = None,
    residual: Any = None,
    *,
    backend: str = "cpu",
    precision: str | None = None,
    h_rounding: str | None = None,
    expert_weight_dtype: Any = None,
    block_order: str | None = None,
    strategy: str | None = None,
    token_mask: Any = None,
    threads: int = 0,
    out: Any = None,
    gates: str | None = None,
    chip: str | None = None,
) -> tuple[Any, ...]:
    """The whole decode block: norm, router, experts, weighted sum (the contract in ``docs/architecture.md``).

    Arrays, NumPy or torch; what comes out is of the kind of ``inp``:

    - ``inp`` and ``residual``: ``[B, S, H]`` or ``[T, H]`` in float32, float16 or bfloat16, T = B*S;
      ``gamma``: ``[1, H]`` or None (ones); ``router_weights [H, E]``, ``router_bias [1, E]``;
    - expert weights in a float or fp8 dtype: ``expert_gate_up_weights [E_L, H, 2, I]``, ``expert_down_weights
      [E_L, I, H]``, fp8 scales ``[E_L, 2, I]`` or ``[E_L, 2, 1]`` and ``[E_L, H]`` or ``[E_L, 1]``, biases
      ``[E_L, 2, I]`` and ``[E_L, H]``;
    - or packed MX: ``[E_L, 128, 2, H/512, I]`` and ``[E_L, P_I, ceil(I/512), H]`` with E8M0 scales
      ``[E_L, 16, 2, H/512, I]`` and ``[E_L, ceil(P_I/8), ceil(I/512), H]``, gate/up bias
      ``[E_L, P_I, 2, ceil(I/512), 4]`` (``docs/layouts.md``);
    - or a :class:`PackedWeights` handle, with ``expert_down_weights`` None or the same handle;
    - ``shared_expert_gate_w`` and ``shared_expert_up_w [H, I_s]``, ``shared_expert_down_w [I_s, H]``, biases
      ``[1, I_s]``, ``[1, I_s]``, ``[1, H]``: one more expert, of the same activation and clamps, that every
      token visits with weight 1.

    Flags: ``norm_topk_prob`` does nothing unless ``router_pre_norm``. ``hidden_act_scale_factor`` is Swish's
    alpha (None: 1.702), ``hidden_act_bias`` is added to up. ``is_all_expert`` needs ``rank_id`` (an int or
    ``[1, 1]``) and under NO_SCALE adds every local expert; in selective mode ``rank_id`` names the slice that
    is here, and ids of other ranks contribute 0.

    Keyword-only: ``backend``; ``precision`` (None: "mxfp8" for MX weights, else "a16"), ``h_rounding`` and
    ``threads`` as in :class:`~moedecode.block.MoEBlock`; ``expert_weight_dtype`` names what integer arrays
    hold; ``block_order`` of plain weights under "mxfp8"; ``strategy`` overrides ``is_all_expert``;
    ``token_mask`` bool ``[B, S]`` (False marks padding, which yields zeros); ``out [T, H]`` to write into;
    ``gates`` ("spec" or "extended") and ``chip`` of the neuron backend.

    Returns ``(out [T, H], router_logits [T, E] unless skip_router_logits, residual_out [T, H] if residual)``,
    all in the dtype of ``inp``. Raises :class:`~moedecode.gates.InvalidInput` or
    :class:`~moedecode.gates.UnsupportedConfig` before any work.
    """
    check_single(
        eps=eps, top_k=top_k, router_act_fn=router_act_fn, router_pre_norm=router_pre_norm,
        norm_topk_prob=norm_topk_prob, expert_affinities_scaling_mode=expert_affinities_scaling_mode,
        hidden_act_fn=hidden_act_fn, hidden_act_scale_factor=hidden_act_scale_factor,
        hidden_act_bias=hidden_act_bias, gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit, up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit, router_mm_dtype=router_mm_dtype,
        hidden_actual=hidden_actual, skip_router_logits=skip_router_logits, is_all_expert=is_all_expert,
        backend=backend, precision=precision, h_rounding=h_rounding, expert_weight_dtype=expert_weight_dtype,
        block_order=block_order, strategy=strategy, threads=threads, gates=gates, chip=chip,
    )  # fmt: skip
    able = find_backend(backend, gates=gates, chip=chip)
    x = arguments.hidden_rows(inp, "inp")
    hidden, tokens = x.shape[-1], x.size // x.shape[-1]
    router = arguments.matrix(router_weights, "router_weights", hidden, None, "[H, E]")
    experts = router.shape[1]
    check_handle_backend(able, expert_gate_up_weights)
    weights = expert_weights(
        expert_gate_up_weights, expert_down_weights, expert_gate_up_weights_scale, expert_down_weights_scale,
        expert_gate_up_bias, expert_down_bias, dtype=expert_weight_dtype, block_order=block_order,
    )  # fmt: skip
    shared = shared_expert(
        hidden, shared_expert_gate_w, shared_expert_up_w, shared_expert_down_w,
        shared_expert_gate_bias, shared_expert_up_bias, shared_expert_down_bias,
    )  # fmt: skip
    expert = expert_spec(
        weights.intermediate, ("hidden_act_fn", hidden_act_fn),
        scale_factor=hidden_act_scale_factor, offset=hidden_act_bias,
        gate_clamp=(gate_clamp_lower_limit, gate_clamp_upper_limit),
        up_clamp=(up_clamp_lower_limit, up_clamp_upper_limit), bias=has_bias(weights),
    )  # fmt: skip
    routing = router_spec(
        experts, ("top_k", top_k), ("router_act_fn", router_act_fn), pre_norm=router_pre_norm,
        norm_topk_prob=norm_topk_prob, bias=router_bias is not None,
        matmul_dtype=arguments.dtype_name(router_mm_dtype, "router_mm_dtype"),
    )  # fmt: skip
    spec = BlockSpec(
        hidden, routing, expert, eps=eps, hidden_actual=hidden_actual,
        shared=shared_spec(expert, shared),
        affinity_scale=arguments.scale_mode(expert_affinities_scaling_mode),
    )  # fmt: skip
    scale = arguments.vector(gamma, "gamma", hidden)
    bias = arguments.vector(router_bias, "router_bias", experts)
    checked = checked_weights(spec, BlockWeights(router.T, weights, scale, bias, shared=shared))
    numerics = check_numerics(wanted_precision(precision, weights.fmt.is_mx), h_rounding)
    check_backend(able, spec, weights, numerics)
    local, wanted = weights.num_experts, wanted_strategy(strategy, is_all_expert)
    first = arguments.first_expert(arguments.rank(rank_id), local, experts, wanted == "all_expert")
    costs = able.costs(weights.fmt, numerics.precision) if wanted == "auto" else None
    chosen, _ = choose_strategy(wanted, spec, tokens, local, weights.fmt, able.capabilities, costs)
    x2 = x.reshape(tokens, hidden)
    r2 = None if residual is None else arguments.residual_like(residual, x, x2)
    mask = None if token_mask is None else check_mask(token_mask, x.shape[:-1])
    target = None if out is None else check_out(out, x2.shape, io_dtype(x, "inp"), [x2, r2, mask])
    threads = check_threads(threads)
    flat_only = {
        "hidden_act_scale_factor": hidden_act_scale_factor, "hidden_act_bias": hidden_act_bias,
        "skip_router_logits": skip_router_logits,
    }  # fmt: skip
    request = Request(
        spec, weights.fmt, numerics, local, chosen, tokens, io_dtype(x, "inp"), residual is not None, threads,
        flat=True, given=flat_only,
    )  # fmt: skip
    able.refuse(request)

    packed = packed_for(able, expert_gate_up_weights, weights)
    packed_shared = None if shared is None else able.pack(shared)
    result = able.block(spec, checked, packed, packed_shared, numerics, threads).run(
        x2, strategy=chosen, first_expert=first, residual=r2, token_mask=mask,
        return_router=not skip_router_logits, out=target,
    )  # fmt: skip
    outputs = [like_input(result.out, inp) if out is None else out]
    if result.routing is not None and not skip_router_logits:
        outputs.append(like_input(result.routing.logits, inp))
    if result.residual is not None:
        outputs.append(like_input(result.residual, inp))
    return tuple(outputs)


def moe_tkg(
    hidden_input: Any,
    expert_gate_up_weights: Any,
    expert_down_weights: Any,
    expert_affinities: Any,
    expert_index: Any,
    is_all_expert: bool,
    rank_id: Any = None,
    expert_gate_up_bias: Any = None,
    expert_down_bias: Any = None,
    expert_gate_up_weights_scale: Any = None,
    expert_down_weights_scale: Any = None,
    hidden_input_scale: Any = None,
    gate_up_input_scale: Any = None,
    down_input_scale: Any = None,
    mask_unselected_experts: bool = False,
    expert_affinities_eager: Any = None,
    expert_affinities_scaling_mode: Any = ExpertAffinityScaleMode.NO_SCALE,
    activation_fn: Any = ActFn.SiLU,
    output_dtype: Any = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    output_in_sbuf: bool = False,
    is_all_expert_dynamic: bool = False,
    block_size: int | None = None,
    *,
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    backend: str = "cpu",
    precision: str | None = None,
    h_rounding: str | None = None,
    expert_weight_dtype: Any = None,
    block_order: str | None = None,
    strategy: str | None = None,
    out: Any = None,
    gates: str | None = None,
    chip: str | None = None,
) -> Any:
    """The expert MLPs and their weighted sum alone: ``out [T, H]`` (the contract's last four formulas).

    - ``hidden_input [T, H]``; or quantised: uint32 float8_e4m3fn_x4 ``[128, H/512, T]`` with
      ``hidden_input_scale`` E8M0 ``[16, H/512, T]``. Weights, scales and biases as in :func:`moe_block_tkg`,
      or a handle.
    - ``expert_affinities [T, E]`` over the global experts, ``expert_index [T, K]`` integers; -1 means "no
      expert".
    - selective: each token visits its K experts, weighted by ``expert_affinities_eager [T, K]`` if given,
      else by the affinities at its ids. An id that stands twice in a row counts twice.
    - all-expert (needs ``rank_id``): every local expert whose affinity in this rank's slice is not 0, under
      NO_SCALE every local expert. ``mask_unselected_experts`` first masks as :func:`mask_expert_affinities`
      does.
    - ``output_dtype``: default that of ``hidden_input``, float32 when quantised.
    - ``output_in_sbuf``, ``is_all_expert_dynamic`` and ``block_size`` place buffers on a device (neuron): no
      number changes.
    - ``gate_up_input_scale`` and ``down_input_scale`` (static quantisation) are refused, as the kernel does.

    Keyword-only arguments as in :func:`moe_block_tkg`. Raises :class:`~moedecode.gates.InvalidInput` or
    :class:`~moedecode.gates.UnsupportedConfig` before any work.
    """
    check_single(
        is_all_expert=is_all_expert, mask_unselected_experts=mask_unselected_experts,
        expert_affinities_scaling_mode=expert_affinities_scaling_mode, activation_fn=activation_fn,
        output_dtype=output_dtype, gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit, up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit, hidden_act_scale_factor=hidden_act_scale_factor,
        hidden_act_bias=hidden_act_bias, backend=backend, precision=precision, h_rounding=h_rounding,
        expert_weight_dtype=expert_weight_dtype, block_order=block_order, strategy=strategy, gates=gates,
        chip=chip,
    )  # fmt: skip
    able = find_backend(backend, gates=gates, chip=chip)
    for name, scale in (("gate_up_input_scale", gate_up_input_scale), ("down_input_scale", down_input_scale)):
        if scale is not None:
            raise unsupported(name, "given", "static activation scales are not supported", "leave it None")
    check_handle_backend(able, expert_gate_up_weights)
    weights = expert_weights(
        expert_gate_up_weights, expert_down_weights, expert_gate_up_weights_scale, expert_down_weights_scale,
        expert_gate_up_bias, expert_down_bias, dtype=expert_weight_dtype, block_order=block_order,
    )  # fmt: skip
    numerics = check_numerics(wanted_precision(precision, weights.fmt.is_mx), h_rounding)
    x = moe_hidden(hidden_input, hidden_input_scale, weights, numerics)
    tokens = x.shape[0]
    affinities = arguments.matrix(expert_affinities, "expert_affinities", tokens, None, "[T, E]")
    experts = affinities.shape[1]
    index = arguments.expert_ids(expert_index, tokens, experts)
    top_k, eager = index.shape[1], None
    if expert_affinities_eager is not None:
        eager = arguments.matrix(expert_affinities_eager, "expert_affinities_eager", tokens, top_k, "[T, K]")
    spec = expert_spec(
        weights.intermediate, ("activation_fn", activation_fn),
        scale_factor=hidden_act_scale_factor, offset=hidden_act_bias,
        gate_clamp=(gate_clamp_lower_limit, gate_clamp_upper_limit),
        up_clamp=(up_clamp_lower_limit, up_clamp_upper_limit), bias=has_bias(weights),
    )  # fmt: skip
    local, wanted = weights.num_experts, wanted_strategy(strategy, is_all_expert)
    first = arguments.first_expert(arguments.rank(rank_id), local, experts, wanted == "all_expert")
    mode = arguments.scale_mode(expert_affinities_scaling_mode)
    block = BlockSpec(
        weights.hidden, RouterSpec(experts, max(1, min(top_k, experts))), spec, affinity_scale=mode
    )
    check_backend(able, block, weights, numerics)
    costs = able.costs(weights.fmt, numerics.precision) if wanted == "auto" else None
    chosen, _ = choose_strategy(wanted, block, tokens, local, weights.fmt, able.capabilities, costs)
    own = io_dtype(x, "hidden_input")
    dtype = own if output_dtype is None else arguments.dtype_name(output_dtype, "output_dtype")
    inputs = [x, affinities, index, eager]
    target = np.empty(x.shape, IO_DTYPES[dtype]) if out is None else check_out(out, x.shape, dtype, inputs)
    placement = Placement(bool(output_in_sbuf), bool(is_all_expert_dynamic), block_size)
    given = {
        "hidden_act_scale_factor": hidden_act_scale_factor, "hidden_act_bias": hidden_act_bias,
        "hidden_input_scale": hidden_input_scale, "expert_affinities_eager": expert_affinities_eager,
        "is_all_expert_dynamic": is_all_expert_dynamic, "block_size": block_size,
        "mask_unselected_experts": mask_unselected_experts, "output_in_sbuf": output_in_sbuf,
    }  # fmt: skip
    arrives = own if hidden_input_scale is None else None  # a quantised hidden state is in no io dtype
    able.refuse(Request(block, weights.fmt, numerics, local, chosen, tokens, arrives, flat=True, given=given))

    if chosen == "all_expert":
        by_index = bool(mask_unselected_experts) or not is_all_expert  # the sum that was asked for
        ids, chosen_affinities = None, rank_slice(affinities, index, first, local, by_index)  # [T, E_L]
    else:
        gathered = np.take_along_axis(affinities, np.maximum(index, 0), -1)  # [T, K]
        ids, chosen_affinities = index, gathered if eager is None else eager
    weight = np.ascontiguousarray(chosen_affinities, np.float32)
    packed = packed_for(able, expert_gate_up_weights, weights)
    able.experts(x, packed, spec, mode, chosen, ids, weight, first, numerics, target, placement)
    return like_input(target, hidden_input) if out is None else out


def router_topk(
    x: Any,
    w: Any,
    w_bias: Any = None,
    act_fn: Any = None,
    k: int | None = None,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    return_eager_affi: bool = False,
    *,
    x_hbm_layout: int = 1,
    backend: str = "cpu",
    chip: str | None = None,
) -> tuple[Any, ...]:
    """The router alone: logits, top-k (ties to the lowest expert id) and affinities.

    ``x [T, H]`` (``[H, T]`` with ``x_hbm_layout=0``), ``w [H, E]``, ``w_bias [1, E]`` or None. ``act_fn``
    (SIGMOID or SOFTMAX) and ``k`` must be given. ``router_pre_norm`` scores all logits, otherwise only the
    selected ones; ``norm_topk_prob`` (pre-norm only) divides the selected affinities by their sum, and
    without it a pre-norm row of affinities stays dense.

    Returns ``(router_logits, expert_index, expert_affinities[, eager])``: logits ``[T, E]`` in the dtype of
    x, int32 ``[T, k]``, float32 ``[T, E]``, float32 ``[T, k]``. Raises
    :class:`~moedecode.gates.InvalidInput`.
    """
    check_single(
        act_fn=act_fn, k=k, router_pre_norm=router_pre_norm, norm_topk_prob=norm_topk_prob,
        return_eager_affi=return_eager_affi, x_hbm_layout=x_hbm_layout, backend=backend, chip=chip,
    )  # fmt: skip
    able = find_backend(backend, chip=chip)
    require(
        x_hbm_layout in (0, 1), "x_hbm_layout", x_hbm_layout, "is not known", "use 1 for [T, H], 0 for [H, T]"
    )
    given = as_numpy(x, "x")
    require(given.ndim == 2, "x", f"shape {given.shape}", "must be [T, H] or [H, T]", "reshape it")
    rows = np.ascontiguousarray(given if x_hbm_layout == 1 else given.T)
    dtype = io_dtype(rows, "x")
    weight = arguments.matrix(w, "w", rows.shape[1], None, "[H, E]")
    bias = arguments.vector(w_bias, "w_bias", weight.shape[1])
    spec = router_spec(
        weight.shape[1], ("k", k), ("act_fn", act_fn), pre_norm=router_pre_norm,
        norm_topk_prob=norm_topk_prob, bias=bias is not None, matmul_dtype=dtype,
    )  # fmt: skip

    routing = able.router(rows, weight.T, bias, None, spec)
    outputs = [routing.logits, routing.index, routing.affinities]
    if return_eager_affi:
        outputs.append(np.take_along_axis(routing.affinities, routing.index, -1))
    return tuple(like_input(array, x) for array in outputs)


def mask_expert_affinities(
    expert_affinities: Any,
    expert_index: Any,
    rank_id: Any,
    E_L: int,
    mask_unselected_experts: bool,
    *,
    backend: str = "cpu",
    chip: str | None = None,
) -> Any:
    """This rank's slice of the affinities: ``[T, E]`` to ``[T, E_L]``, columns from ``rank_id*E_L``.

    With ``mask_unselected_experts`` an entry is multiplied by how often its expert stands in the token's row
    of ``expert_index [T, K]``: 0 where it was not selected. The dtype is kept. Raises
    :class:`~moedecode.gates.InvalidInput`.
    """
    check_single(E_L=E_L, mask_unselected_experts=mask_unselected_experts, backend=backend, chip=chip)
    able = find_backend(backend, chip=chip)
    affinities = arguments.matrix(expert_affinities, "expert_affinities", None, None, "[T, E]")
    tokens, experts = affinities.shape
    whole = isinstance(E_L, (int, np.integer)) and 1 <= E_L <= experts
    require(whole, "E_L", E_L, f"must be an integer in 1..E ({experts})", "count this rank's experts")
    first = arguments.first_expert(arguments.rank(rank_id), int(E_L), experts, all_expert=True)
    index = arguments.expert_ids(expert_index, tokens, experts)
    sliced = able.rank_slice(affinities, index, first, int(E_L), bool(mask_unselected_experts))
    return like_input(sliced, expert_affinities)


def rmsnorm_tkg(
    inp: Any,
    gamma: Any,
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    residual: Any = None,
    *,
    backend: str = "cpu",
    chip: str | None = None,
) -> Any:
    """RMSNorm of ``s = inp [+ residual]``: ``s * rsqrt(sum(s^2)/hidden_actual + eps) * gamma``, rounded once.

    ``inp [B, S, H]`` or ``[T, H]``, ``residual`` alike, ``gamma [1, H]``, ``[H]`` or None (ones).
    ``hidden_actual`` (default H) divides the sum, which still runs over all H columns. Returns the normed
    array in the shape and dtype of ``inp``, or ``(normed, residual_out)`` when ``residual`` is given,
    residual_out being s in that dtype. Raises :class:`~moedecode.gates.InvalidInput`.
    """
    check_single(eps=eps, hidden_actual=hidden_actual, backend=backend, chip=chip)
    able = find_backend(backend, chip=chip)
    x = arguments.hidden_rows(inp, "inp")
    hidden = x.shape[-1]
    scale = arguments.vector(gamma, "gamma", hidden)
    width = hidden
    if hidden_actual is not None:
        width = check_whole(hidden_actual, "hidden_actual", "leave it None when H is not padded")
    eps = arguments.number(eps, "eps", "1e-6 and 1e-5 are usual")
    require(eps >= 0, "eps", eps, "must not be negative", "1e-6 and 1e-5 are usual")
    fits = 1 <= width <= hidden
    require(
        fits, "hidden_actual", width, f"must lie in 1..H ({hidden})", "leave it None when H is not padded"
    )
    x2 = x.reshape(x.size // hidden, hidden)
    r2 = None if residual is None else arguments.residual_like(residual, x, x2)

    normed, summed = able.rmsnorm(x2, scale, eps, width, r2)
    result = like_input(normed.reshape(x.shape), inp)
    return result if summed is None else (result, like_input(summed.reshape(x.shape), inp))
