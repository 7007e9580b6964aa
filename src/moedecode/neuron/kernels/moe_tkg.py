"""The dispatcher: one of six leaves on a hidden state that is on chip, and the kernel `moe_tkg` around it.

Owns the choice of the leaf and of the affinities it gets. Knows no norm, no router, no layouts.
Letters: T tokens, H hidden, I intermediate, E experts, L of them local, K per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .all_expert import all_expert
from .all_expert_mx import all_expert_mx
from .distinct_mx import distinct_mx
from .dynamic_mx import all_expert_mx_dynamic
from .masking import load_per_token, local_affinities, local_choices
from .nki_names import nisa, nl
from .norm import quantize_hidden
from .partial_sum import FEW_TOKENS
from .plain_expert import SharedTensors
from .rows import load_hidden_major
from .selective import selective
from .selective_mx import selective_mx
from .shared_expert import shared_expert
from .tiles import (
    PARTITIONS,
    ExpertOptions,
    ExpertTensors,
    Routing,
    Tensor,
    core,
    exchange,
    from_core_0,
    share,
    tiles,
    token_shape,
    token_tile,
)

ACTIVATIONS = {"silu": "silu", "swish": "swish", "gelu": "gelu", "gelu_tanh_approx": "gelu_tanh"}
SCALINGS = ("no_scale", "post_scale")
SCALES_PER_QUADRANT = 4
QUADRANT = 32


@dataclass(frozen=True)
class Leaf:
    """Which leaf runs: for ``mx`` weights or plain, every local expert or the chosen; and its form.

    ``dynamic``: all-expert MX in blocks of ``block_size`` routed tokens. ``distinct``: selective MX that
    reads each touched expert once.
    """

    mx: bool
    everyone: bool
    dynamic: bool = False
    block_size: int | None = None
    distinct: bool = False

    def __post_init__(self) -> None:
        if self.distinct and (self.everyone or not self.mx):
            raise ValueError(
                "distinct=True: a form of the selective MX leaf; take MX weights and is_all_expert=False"
            )
        if self.dynamic and not (self.everyone and self.mx):
            raise ValueError("is_all_expert_dynamic=True: a form of the all-expert MX leaf; take those")

    def hidden_major(self, tokens: int) -> bool:
        """The layout of the leaf's partial sum."""
        if not self.mx or not (self.everyone or self.distinct):
            return True
        return tokens <= FEW_TOKENS and not self.dynamic


@dataclass(frozen=True)
class Hidden:
    """The normed hidden: ``plain [128, H/128, T]``, or MX ``codes`` and ``scales [128, H/512, T]``."""

    plain: Tensor | None
    codes: Tensor | None = None
    scales: Tensor | None = None

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Codes and scales, made here unless the caller brought them."""
        return quantize_hidden(self.plain) if self.codes is None else (self.codes, self.scales)


def is_mx(weights: ExpertTensors) -> bool:
    """Whether the experts are packed MX."""
    return weights.gate_up.dtype in (nl.float4_e2m1fn_x4, nl.float8_e4m3fn_x4, nl.float8_e5m2_x4)


def expert_options(
    activation: Any,
    alpha: float | None,
    up_offset: float | None,
    gate_clamp: tuple[float | None, float | None],
    up_clamp: tuple[float | None, float | None],
    scaling_mode: Any,
    io_dtype: Any,
) -> ExpertOptions:
    """Options in the kernels' words from enum members, or names, of the flat functions.

    Raises:
        ValueError: an activation or a scaling mode that no leaf has.
    """
    name = str(getattr(activation, "name", activation)).lower()
    scaling = str(getattr(scaling_mode, "name", scaling_mode)).lower()
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation {name!r}: the kernels have {', '.join(ACTIVATIONS)}; take another backend"
        )
    if scaling not in SCALINGS:
        raise ValueError(
            f"scaling mode {scaling!r}: the leaves do {', '.join(SCALINGS)}; take another backend"
        )
    return ExpertOptions(
        ACTIVATIONS[name], alpha, float(up_offset or 0.0), gate_clamp, up_clamp, scaling, io_dtype
    )


def run_leaf(
    leaf: Leaf,
    hidden: Hidden,
    routing: Routing | None,
    affinities: Tensor | None,
    weights: ExpertTensors,
    options: ExpertOptions,
    out: Tensor,
    shared: SharedTensors | None = None,
    routed: Tensor | None = None,
) -> None:
    """Write ``out [T, H]``: the experts, and the shared expert if there is one.

    ``routing`` for the selective leaves, ``affinities [T, L]`` (SBUF, masked, None under "no_scale") for the
    others; ``routed [T, L]`` is not 0 where the dynamic form must compute (None: where affinities are not).
    """
    partial = None
    if shared is not None:
        tokens = out.shape[0]
        partial = shared_expert(hidden.plain, shared, leaf.hidden_major(tokens))
    if leaf.dynamic:
        block = PARTITIONS if leaf.block_size is None else leaf.block_size
        all_expert_mx_dynamic(hidden.plain, affinities, weights, out, options, block, partial, routed)
    elif leaf.everyone and leaf.mx:
        all_expert_mx(*hidden.quantised(), affinities, weights, out, options, partial)
    elif leaf.everyone:
        all_expert(hidden.plain, affinities, weights, out, options, partial)
    elif routing is None:
        raise ValueError("routing=None: the selective leaves ask which experts a token chose")
    elif leaf.distinct:
        distinct_mx(*hidden.quantised(), routing, weights, out, options, partial)
    elif leaf.mx:
        selective_mx(*hidden.quantised(), routing, weights, out, options, partial)
    else:
        selective(hidden.plain, routing, weights, out, options, partial)


def on_this_rank(
    routing: Routing, rank_id: Tensor, local_experts: int, options: ExpertOptions
) -> tuple[Routing, ExpertOptions]:
    """Choices counted from the rank's first expert; those of other ranks weigh 0, also under "no_scale"."""
    weighted = options.scaling != "no_scale"
    return local_choices(routing, rank_id, local_experts, weighted), replace(options, scaling="post_scale")


def moe_tkg(
    hidden_input: Tensor,
    expert_gate_up_weights: Tensor,
    expert_down_weights: Tensor,
    expert_affinities: Tensor,
    expert_index: Tensor,
    is_all_expert: bool,
    rank_id: Tensor | None = None,
    expert_gate_up_bias: Tensor | None = None,
    expert_down_bias: Tensor | None = None,
    expert_gate_up_weights_scale: Tensor | None = None,
    expert_down_weights_scale: Tensor | None = None,
    hidden_input_scale: Tensor | None = None,
    gate_up_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
    mask_unselected_experts: bool = False,
    expert_affinities_eager: Tensor | None = None,
    expert_affinities_scaling_mode: Any = "no_scale",
    activation_fn: Any = "silu",
    output_dtype: Any = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    output_in_sbuf: bool = False,
    is_all_expert_dynamic: bool = False,
    block_size: int | None = None,
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    distinct: bool = False,
) -> Tensor:
    """The expert MLPs alone: ``out [T, H]`` in shared HBM, or in SBUF on both cores (T <= 128).

    ``hidden_input [T, H]``, or quantised x4 ``[128, H/512, T]`` with ``hidden_input_scale [16, H/512, T]``;
    ``expert_affinities [T, E]`` float32, ``expert_index [T, K]`` uint32, ``expert_affinities_eager [T, K]``,
    all in HBM; weights as in :class:`~.tiles.ExpertTensors`. In all-expert mode the rank's columns of the
    affinities are masked by the index where ``mask_unselected_experts``. ``rank_id [1, 1]`` in selective
    mode: the ids are global, and other ranks' experts contribute nothing.

    Raises:
        ValueError: static input scales, or a combination that no leaf has.
    """
    for name, scale in (("gate_up_input_scale", gate_up_input_scale), ("down_input_scale", down_input_scale)):
        if scale is not None:
            raise ValueError(f"{name}: static input scales are not supported; pass None")
    weights = ExpertTensors(
        expert_gate_up_weights,
        expert_down_weights,
        expert_gate_up_weights_scale,
        expert_down_weights_scale,
        expert_gate_up_bias,
        expert_down_bias,
    )
    hidden = _load_hidden(hidden_input, hidden_input_scale)
    dynamic = is_all_expert_dynamic and hidden.plain is not None  # the dynamic form quantises what it gathers
    leaf = Leaf(is_mx(weights), is_all_expert, dynamic, block_size, distinct)
    if hidden.plain is None and not leaf.mx:
        raise ValueError("hidden_input_scale: plain weights take a plain hidden_input; pass that")
    io_dtype = nl.bfloat16 if hidden.plain is None else hidden_input.dtype
    options = expert_options(
        activation_fn,
        hidden_act_scale_factor,
        hidden_act_bias,
        (gate_clamp_lower_limit, gate_clamp_upper_limit),
        (up_clamp_lower_limit, up_clamp_upper_limit),
        expert_affinities_scaling_mode,
        io_dtype,
    )
    tokens, wide = expert_index.shape[0], expert_down_weights.shape[-1]
    out = _output(tokens, wide, io_dtype if output_dtype is None else output_dtype, output_in_sbuf)
    local_experts = expert_down_weights.shape[0]
    routing, affinities = None, None
    if not is_all_expert:
        weighted = options.scaling != "no_scale"
        routing = _load_routing(expert_index, expert_affinities, expert_affinities_eager, weighted)
        if rank_id is not None:
            routing, options = on_this_rank(routing, rank_id, local_experts, options)
    elif options.scaling != "no_scale":
        if rank_id is None:
            raise ValueError("rank_id=None: all-expert mode asks which experts are here; pass [[rank]]")
        affinities = local_affinities(
            expert_affinities, rank_id, local_experts, mask_unselected_experts, expert_index
        )
    run_leaf(leaf, hidden, routing, affinities, weights, options, out)
    if output_in_sbuf:
        _complete(out)
    return out


def _output(tokens: int, hidden: int, dtype: Any, in_sbuf: bool) -> Tensor:
    if in_sbuf and tokens > PARTITIONS:
        raise ValueError(f"output_in_sbuf=True with T={tokens}: a token takes a partition, T <= {PARTITIONS}")
    return nl.ndarray((tokens, hidden), dtype=dtype, buffer=nl.sbuf if in_sbuf else nl.shared_hbm, name="out")


def _complete(out: Tensor) -> None:
    """Each core has its half of H of ``out`` (SBUF): give it to the other."""
    this, cores = core()
    if cores > 1 and out.shape[1] > PARTITIONS:
        mine, other = (
            nl.ds(first * PARTITIONS, count * PARTITIONS)
            for first, count in (share(out.shape[1] // PARTITIONS, i) for i in (this, 1 - this))
        )
        exchange(out[:, other], out[:, mine])


def _load_hidden(hidden: Tensor, scale: Tensor | None) -> Hidden:
    if scale is None:
        return Hidden(load_hidden_major(hidden))
    codes = nl.ndarray(tuple(hidden.shape), dtype=hidden.dtype, buffer=nl.sbuf, name="hidden_codes")
    scales = nl.ndarray(tuple(hidden.shape), dtype=nl.uint8, buffer=nl.sbuf, name="hidden_scales")
    if core()[0] == 0:
        nisa.dma_copy(dst=codes, src=hidden)
        for quadrant, (row, n) in enumerate(tiles(scale.shape[0], SCALES_PER_QUADRANT)):
            nisa.dma_copy(dst=scales[nl.ds(quadrant * QUADRANT, n)], src=scale[nl.ds(row, n)])
    from_core_0(codes)
    from_core_0(scales)
    return Hidden(None, codes, scales)


def _load_routing(
    expert_index: Tensor, expert_affinities: Tensor, eager: Tensor | None, weighted: bool
) -> Routing:
    """Ids and, where ``weighted``, the affinities of the chosen, picked from the rows if need be."""
    tokens, k = expert_index.shape
    index = load_per_token(expert_index)
    if not weighted:
        return Routing(index, None, None, tokens)
    if eager is not None:
        return Routing(index, None, load_per_token(eager), tokens)
    rows = load_per_token(expert_affinities)
    picked = nl.ndarray(token_shape(tokens, k), dtype=nl.float32, buffer=nl.sbuf, name="picked_affinities")
    for number, (_, n) in enumerate(tiles(tokens)):
        nisa.nc_n_gather(
            dst=token_tile(picked, number, n),
            data=token_tile(rows, number, n),
            indices=token_tile(index, number, n),
        )
    return Routing(index, None, picked, tokens)
