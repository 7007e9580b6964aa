"""The flat functions: signatures, forms of arguments, handles, torch, agreement with MoEBlock."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest

import flat_arguments as given
import moedecode as md
from moedecode.formats import WeightFormat, dequantise_e4m3, quantise_mx
from numeric import assert_bits_equal, assert_close

BACKENDS = ("reference", "cpu")
MODES, ACTS, SCORES = md.ExpertAffinityScaleMode, md.ActFn, md.RouterActFn

# Parameters in order; a name alone is required.
SIGNATURES = {
    md.moe_block_tkg: """inp gamma router_weights expert_gate_up_weights expert_down_weights
        shared_expert_gate_w=None shared_expert_up_w=None shared_expert_down_w=None
        expert_gate_up_weights_scale=None expert_down_weights_scale=None router_bias=None
        expert_gate_up_bias=None expert_down_bias=None shared_expert_gate_bias=None shared_expert_up_bias=None
        shared_expert_down_bias=None eps=1e-06 top_k=1 router_act_fn=RouterActFn.SIGMOID router_pre_norm=True
        norm_topk_prob=False expert_affinities_scaling_mode=ExpertAffinityScaleMode.NO_SCALE
        hidden_act_fn=ActFn.SiLU hidden_act_scale_factor=None hidden_act_bias=None gate_clamp_upper_limit=None
        gate_clamp_lower_limit=None up_clamp_upper_limit=None up_clamp_lower_limit=None
        router_mm_dtype='bfloat16' hidden_actual=None skip_router_logits=False is_all_expert=False
        rank_id=None residual=None""",
    md.moe_tkg: """hidden_input expert_gate_up_weights expert_down_weights expert_affinities expert_index
    is_all_expert
        rank_id=None expert_gate_up_bias=None expert_down_bias=None expert_gate_up_weights_scale=None
        expert_down_weights_scale=None hidden_input_scale=None gate_up_input_scale=None down_input_scale=None
        mask_unselected_experts=False expert_affinities_eager=None
        expert_affinities_scaling_mode=ExpertAffinityScaleMode.NO_SCALE activation_fn=ActFn.SiLU
        output_dtype=None gate_clamp_upper_limit=None gate_clamp_lower_limit=None up_clamp_upper_limit=None
        up_clamp_lower_limit=None output_in_sbuf=False is_all_expert_dynamic=False block_size=None""",
    md.router_topk: """x w w_bias=None act_fn=None k=None router_pre_norm=True norm_topk_prob=False
        return_eager_affi=False""",  # act_fn and k are required; None only lets w_bias have its default
    md.mask_expert_affinities: "expert_affinities expert_index rank_id E_L mask_unselected_experts",
    md.rmsnorm_tkg: "inp gamma eps=1e-06 hidden_actual=None residual=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_order_and_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    text = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional]
    assert text == SIGNATURES[function].split()
    rest = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in rest)


def test_moe_block_has_35_parameters():
    assert len(SIGNATURES[md.moe_block_tkg].split()) == 35


# --- forms of arguments ---------------------------------------------------------------------------


def _block(backend="reference", **changes):
    return md.moe_block_tkg(**given.block_arguments(**changes), backend=backend)


@pytest.mark.parametrize(
    "name, forms",
    [
        ("router_act_fn", ["SIGMOID", SCORES.SIGMOID]),
        ("hidden_act_fn", ["GELU_Tanh_Approx", ACTS.GELU_Tanh_Approx]),
        ("expert_affinities_scaling_mode", ["PRE_SCALE", MODES.PRE_SCALE]),
        ("router_mm_dtype", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]),
        ("router_mm_dtype", ["float32", np.float32, np.dtype(np.float32)]),
        ("router_mm_dtype", ["float16", np.float16]),
    ],
)
def test_members_or_names(name, forms):
    first, *others = [_block(**{name: form}) for form in forms]
    for other in others:
        assert_bits_equal("out", other[0], first[0])
        assert_bits_equal("logits", other[1], first[1])


@pytest.mark.parametrize("rank", [2, np.int64(2), np.array([[2]], np.uint32), [[2]]])
def test_forms_of_rank_id(rank):
    weights = given.plain_experts(experts=2)
    changes = {"is_all_expert": True, "weights": weights}
    assert_bits_equal("out", _block(rank_id=rank, **changes)[0], _block(rank_id=2, **changes)[0])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_what_is_returned(skip, with_residual):
    """(out, logits unless skipped, residual_out if residual), in that order."""
    inp = given.block_arguments()["inp"]
    outputs = _block(skip_router_logits=skip, residual=inp if with_residual else None)
    shapes = [(4, 64)] + [(4, 6)] * (not skip) + [(4, 64)] * with_residual
    assert isinstance(outputs, tuple)
    assert [o.shape for o in outputs] == shapes
    assert all(o.dtype == inp.dtype for o in outputs)
    if with_residual:
        assert_bits_equal(
            "residual_out", outputs[-1], (inp.astype(np.float32) * 2).astype(inp.dtype).reshape(4, 64)
        )


def test_norm_topk_prob_is_ignored_post_norm():
    options = {"router_act_fn": "SIGMOID", "router_pre_norm": False}
    assert_bits_equal("out", _block(norm_topk_prob=True, **options)[0], _block(**options)[0])
    pre = _block(norm_topk_prob=True, router_act_fn="SIGMOID")[0]
    assert not np.array_equal(pre, _block(router_act_fn="SIGMOID")[0])


def test_clamps_alpha_and_offset_reach_the_experts():
    """The flat names mean what the typed spec says: gpt-oss."""
    arguments = given.block_arguments(
        hidden_act_fn="Swish",
        hidden_act_scale_factor=1.5,
        hidden_act_bias=1.0,
        gate_clamp_upper_limit=0.3,
        up_clamp_upper_limit=0.4,
        up_clamp_lower_limit=-0.2,
        router_pre_norm=False,
    )
    experts = md.ExpertSpec(48, "swish", 1.5, 1.0, (None, 0.3), (-0.2, 0.4))
    router = md.RouterSpec(6, 2, pre_norm=False, matmul_dtype="float32")
    weights = md.BlockWeights(
        arguments["router_weights"].T,
        md.ExpertWeights.from_flat(arguments["expert_gate_up_weights"], arguments["expert_down_weights"]),
        gamma=arguments["gamma"],
    )
    block = md.MoEBlock(md.BlockSpec(64, router, experts), weights, backend="reference", strategy="selective")
    out, logits = md.moe_block_tkg(**arguments, backend="reference")
    want = block(arguments["inp"], return_router=True)
    assert_bits_equal("out", out, want.out.reshape(4, 64))
    assert_bits_equal("logits", logits, want.router_logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_expert(backend):
    """One more expert of weight 1, with its own width and biases."""
    rng = np.random.default_rng(4)
    wide = {
        "shared_expert_gate_w": (64, 24),
        "shared_expert_up_w": (64, 24),
        "shared_expert_down_w": (24, 64),
        "shared_expert_gate_bias": (1, 24),
        "shared_expert_up_bias": (24,),
        "shared_expert_down_bias": (1, 64),
    }
    shared = {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in wide.items()}
    arguments = given.block_arguments(dtype=np.float32)
    out = md.moe_block_tkg(**arguments, **shared, backend=backend)[0].astype(np.float64)
    routed = md.moe_block_tkg(**arguments, backend="reference")[0]
    r = (
        md.rmsnorm_tkg(arguments["inp"], arguments["gamma"], backend="reference")
        .reshape(4, 64)
        .astype(np.float64)
    )
    s = {name.removeprefix("shared_expert_"): value.astype(np.float64) for name, value in shared.items()}
    gate, up = r @ s["gate_w"] + s["gate_bias"], r @ s["up_w"] + s["up_bias"]
    want = (gate / (1 + np.exp(-gate)) * up) @ s["down_w"] + s["down_bias"]
    assert_close("shared", out, want + routed, 1.5e-4)


@pytest.mark.parametrize("strategy", ["selective", "grouped", "auto", "all_expert"])
def test_strategy_overrides_is_all_expert(strategy):
    """Under POST_SCALE every strategy gives the same sum."""
    changes = {"rank_id": 0, "strategy": strategy, "dtype": np.float32}
    assert_close("out", _block(**changes)[0], _block(dtype=np.float32)[0], 1e-6)
    arguments = given.moe_arguments(dtype=np.float32)
    want = md.moe_tkg(**arguments, backend="reference")
    masked = {"mask_unselected_experts": strategy == "all_expert"}
    got = md.moe_tkg(**arguments | masked, rank_id=0, strategy=strategy, backend="reference")
    assert_close("out", got, want, 1e-6)


def test_selective_with_a_rank():
    """Ids of other ranks contribute 0: three ranks add up to the whole."""
    whole = given.plain_experts(dtype=np.float32)
    arguments = given.block_arguments(dtype=np.float32)
    want = md.moe_block_tkg(**arguments, backend="reference")[0]
    total = 0
    for rank in range(3):
        part = {name: w[2 * rank : 2 * rank + 2] for name, w in whole.items()}
        total = total + md.moe_block_tkg(**arguments | part, rank_id=rank, backend="reference")[0].astype(
            np.float64
        )
    assert_close("sum of ranks", total, want, 1e-6)


def test_eager_affinities_take_the_place_of_the_gather():
    arguments = given.moe_arguments()
    eager = np.take_along_axis(arguments["expert_affinities"], arguments["expert_index"], 1)
    want = md.moe_tkg(**arguments, backend="reference")
    arguments["expert_affinities"] = np.zeros_like(arguments["expert_affinities"])
    got = md.moe_tkg(**arguments, expert_affinities_eager=eager, backend="reference")
    assert_bits_equal("out", got, want)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_output_dtype(name):
    arguments = given.moe_arguments()
    out = md.moe_tkg(**arguments, output_dtype=name, backend="reference")
    assert out.dtype.name == name
    assert_close("out", out, md.moe_tkg(**arguments, output_dtype=np.float32, backend="reference"), 4e-3)


def test_device_only_arguments_change_nothing():
    arguments = given.moe_arguments(is_all_expert=True, rank_id=0)
    want = md.moe_tkg(**arguments, backend="reference")
    placed = {"output_in_sbuf": True, "is_all_expert_dynamic": True, "block_size": 2}
    assert_bits_equal("out", md.moe_tkg(**arguments, **placed, backend="reference"), want)


@pytest.mark.parametrize("per_row", [True, False])
def test_fp8_scales(per_row):
    """Scales multiply the stored codes, per row or per tensor."""
    weights = given.fp8_experts(per_row)
    gate_up = (
        weights["expert_gate_up_weights"].astype(np.float32)
        * weights["expert_gate_up_weights_scale"][:, None]
    )
    down = weights["expert_down_weights"].astype(np.float32) * weights["expert_down_weights_scale"][:, None]
    dense = {"expert_gate_up_weights": gate_up, "expert_down_weights": down}
    options = {"dtype": np.float32}
    assert_close("out", _block(weights=weights, **options)[0], _block(weights=dense, **options)[0], 1e-6)
    bits = {n: w.view(np.uint8) if n.endswith("weights") else w for n, w in weights.items()}
    named = _block(weights=bits, expert_weight_dtype="float8_e4m3fn", **options)[0]
    assert_bits_equal("out from uint8", named, _block(weights=weights, **options)[0])


# --- precision ------------------------------------------------------------------------------------


def test_default_precision_follows_the_weights():
    mx = {"weights": given.mx_experts(), "hidden": 512, "experts": 2}
    assert_bits_equal("MX", _block(**mx)[0], _block(**mx, precision="mxfp8")[0])
    assert not np.array_equal(_block(**mx)[0], _block(**mx, precision="a16")[0])
    assert_bits_equal("plain", _block()[0], _block(precision="a16")[0])


def test_block_order_of_plain_weights():
    """It decides which activations share a scale, so it shows under mxfp8 and only there."""
    wide = {"weights": given.plain_experts(2, 512), "hidden": 512, "experts": 2, "dtype": np.float32}
    orders = ("contiguous", "trainium")
    contiguous, trainium = (_block(**wide, precision="mxfp8", block_order=order)[0] for order in orders)
    assert not np.array_equal(contiguous, trainium)
    assert_bits_equal("default", _block(**wide, precision="mxfp8")[0], contiguous)
    assert_close("a16", *(_block(**wide, block_order=order)[0] for order in orders), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_hidden_equals_quantising_online(backend):
    """x4 codes made by the quantisation rule, and the same hidden state quantised by the call."""
    weights = given.mx_experts()
    plain = given.moe_arguments(weights, hidden=512, experts=2, output_dtype="float32")
    want = md.moe_tkg(**plain, backend=backend)
    codes, scales = given.quantised_hidden(plain["hidden_input"])
    got = md.moe_tkg(**plain | {"hidden_input": codes, "hidden_input_scale": scales}, backend=backend)
    assert_bits_equal("out", got, want)
    as_e8m0 = scales.view(ml_dtypes.float8_e8m0fnu)
    got = md.moe_tkg(**plain | {"hidden_input": codes, "hidden_input_scale": as_e8m0}, backend=backend)
    assert_bits_equal("out", got, want)


@pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**100])
def test_quantising_twice_is_quantising_once(scale):
    """Also where blocks saturate and where the scale is clamped at its smallest value."""
    values = np.random.default_rng(0).standard_normal((200, 96)) * 2.0 ** np.random.default_rng(1).integers(
        -9, 9, (200, 96)
    )
    codes, scales = quantise_mx(values * scale, WeightFormat.MXFP8_E4M3)
    again = quantise_mx(dequantise_e4m3(values * scale), WeightFormat.MXFP8_E4M3)
    assert_bits_equal("codes", again[0], codes)
    assert_bits_equal("scales", again[1], scales)


def test_quantised_hidden_off_the_rule_is_refused():
    """A block scaled twice as large would saturate if it were quantised again: 240 of 480."""
    plain = given.moe_arguments(given.mx_experts(), hidden=512, experts=2)
    codes, scales = given.quantised_hidden(plain["hidden_input"])
    codes[:8, 0, 3] = 0x77  # 240 in one quad of the first block of token 3, nothing else
    changed = {"hidden_input": codes, "hidden_input_scale": scales}
    with pytest.raises(md.InvalidInput, match=r"hidden_input_scale\[0, 0, 3\].*again would move"):
        md.moe_tkg(**plain | changed, backend="reference")


# --- handles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "fp8", "mx"])
def test_a_handle_gives_the_same_bits(backend, kind):
    weights = {"plain": given.plain_experts, "fp8": given.fp8_experts, "mx": given.mx_experts}[kind]()
    shape = {"hidden": 512, "experts": 2} if kind == "mx" else {}
    experts, rows = weights["expert_gate_up_weights"].shape[0], weights["expert_down_weights"].shape[-1]
    bias = {"expert_down_bias": np.random.default_rng(1).standard_normal((experts, rows)).astype(np.float32)}
    handle = md.pack(**weights, **bias, backend=backend)
    alone = dict.fromkeys(weights) | {"expert_gate_up_weights": handle}
    both = alone | {"expert_down_weights": handle}
    for make, call in ((given.block_arguments, md.moe_block_tkg), (given.moe_arguments, md.moe_tkg)):
        want = call(**make(weights, **shape) | bias, backend=backend)
        want = want[0] if isinstance(want, tuple) else want
        for given_weights in (alone, both):
            got = call(**make(given_weights, **shape), backend=backend)
            assert_bits_equal(call.__name__, got[0] if isinstance(got, tuple) else got, want)


def test_a_handle_says_what_it_holds_and_is_frozen():
    handle = md.pack(**given.mx_experts(), backend="reference")
    assert repr(handle) == (
        "<PackedWeights for reference: experts=2, hidden=512, intermediate=64, mxfp4, trainium blocks>"
    )
    with pytest.raises(AttributeError):
        handle.backend = "cpu"


# --- out= and layouts of memory -------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_out(backend):
    arguments = given.block_arguments()
    out = np.full((4, 64), 9, ml_dtypes.bfloat16)
    returned = md.moe_block_tkg(**arguments, out=out, backend=backend)[0]
    assert returned is out
    assert_bits_equal("out", out, md.moe_block_tkg(**arguments, backend=backend)[0])
    arguments = given.moe_arguments(output_dtype="float32")
    out = np.full((4, 64), 9, np.float32)
    assert md.moe_tkg(**arguments, out=out, backend=backend) is out
    assert_bits_equal("out", out, md.moe_tkg(**arguments, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_and_strided_inputs(backend):
    arguments = given.block_arguments()
    want = md.moe_block_tkg(**arguments, backend=backend)
    changed = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            spread = np.zeros((*value.shape[:-1], 2 * value.shape[-1]), value.dtype)[..., ::2]
            spread[...] = value
            spread.flags.writeable = False
            changed[name] = spread
    got = md.moe_block_tkg(**arguments | changed, backend=backend)
    assert_bits_equal("out", got[0], want[0])
    assert_bits_equal("logits", got[1], want[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_mask(backend):
    mask = np.array([[True, False], [True, True]])
    arguments = given.block_arguments()
    got = md.moe_block_tkg(**arguments, token_mask=mask, backend=backend)
    want = md.moe_block_tkg(**arguments, backend=backend)
    for name, g, w in zip(("out", "logits"), got, want, strict=True):
        assert_bits_equal(name, g[mask.reshape(-1)], w[mask.reshape(-1)])
        assert not g[1].astype(np.float32).any()


@pytest.mark.parametrize("layout", [0, 1])
def test_router_layouts(layout):
    x, w = given.block_arguments()["inp"].reshape(4, 64), given.block_arguments()["router_weights"]
    got = md.router_topk(
        x.T if layout == 0 else x, w, None, "SOFTMAX", 2, x_hbm_layout=layout, backend="reference"
    )
    want = md.router_topk(
        np.ascontiguousarray(x), w, act_fn=SCORES.SOFTMAX, k=np.int64(2), backend="reference"
    )
    for g, w in zip(got, want, strict=True):
        assert_bits_equal("router", g, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["rmsnorm", "router", "mask", "moe"])
def test_zero_tokens(call, backend):
    """T = 0 returns empty arrays of the right shapes."""
    x, f32 = np.zeros((0, 64), np.float32), np.float32
    w = np.ones((64, 6), f32)
    affinities, index = np.zeros((0, 6), f32), np.zeros((0, 2), np.int32)
    if call == "rmsnorm":
        assert md.rmsnorm_tkg(x, None, backend=backend).shape == (0, 64)
        assert md.rmsnorm_tkg(x[None], None, backend=backend).shape == (1, 0, 64)
    elif call == "router":
        got = md.router_topk(x, w, None, "SIGMOID", 2, backend=backend)
        assert [a.shape for a in got] == [(0, 6), (0, 2), (0, 6)]
    elif call == "mask":
        assert md.mask_expert_affinities(affinities, index, 1, 3, True).shape == (0, 3)
    else:
        changes = {"hidden_input": x, "expert_affinities": affinities, "expert_index": index}
        assert md.moe_tkg(**given.moe_arguments() | changes, backend=backend).shape == (0, 64)


def test_mask_counts_repeats_and_drops_nan_of_the_unselected():
    affinities = np.array([[1.0, 2.0, np.nan, 4.0]], np.float32)
    got = md.mask_expert_affinities(affinities, np.array([[1, 1, 0]]), 0, 4, True)
    assert_bits_equal("masked", got, np.array([[1, 4, 0, 0]], np.float32))


# --- torch ----------------------------------------------------------------------------------------


def _tensors(arguments):
    torch = pytest.importorskip("torch")
    bits = {"bfloat16": ("int16", torch.bfloat16), "float8_e4m3fn": ("uint8", torch.float8_e4m3fn)}

    def tensor(value):
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.name in bits:
            plain, logical = bits[value.dtype.name]
            return torch.from_numpy(value.view(plain)).view(logical)
        return torch.from_numpy(value)

    return {name: tensor(value) for name, value in arguments.items()}


def _array(tensor):
    torch = pytest.importorskip("torch")
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["plain", "fp8", "mx"])
def test_torch_in_torch_out(backend, weights):
    shape = {"hidden": 512, "experts": 2} if weights == "mx" else {}
    experts = {"plain": given.plain_experts, "fp8": given.fp8_experts, "mx": given.mx_experts}[weights]()
    inp = given.block_arguments(**shape)["inp"]
    arguments = given.block_arguments(experts, **shape, residual=inp)
    want = md.moe_block_tkg(**arguments, backend=backend)
    got = md.moe_block_tkg(**_tensors(arguments), backend=backend)
    for g, w in zip(got, want, strict=True):
        assert_bits_equal("block", _array(g), w)
    arguments = given.moe_arguments(experts, **shape)
    assert_bits_equal(
        "moe",
        _array(md.moe_tkg(**_tensors(arguments), backend=backend)),
        md.moe_tkg(**arguments, backend=backend),
    )


def test_torch_router_norm_and_mask():
    a = given.block_arguments()
    t = _tensors(a)
    normed, want = (
        md.rmsnorm_tkg(v["inp"], v["gamma"], residual=v["inp"], backend="reference") for v in (t, a)
    )
    for n, w in zip(normed, want, strict=True):
        assert_bits_equal("rmsnorm", _array(n), w)
    rows = (t["inp"].reshape(4, 64), a["inp"].reshape(4, 64))
    got, want = (
        md.router_topk(
            x, v["router_weights"], None, "SOFTMAX", 2, return_eager_affi=True, backend="reference"
        )
        for x, v in zip(rows, (t, a), strict=True)
    )
    for g, w in zip(got, want, strict=True):
        assert_bits_equal("router", _array(g), w)
    masked = md.mask_expert_affinities(got[2], got[1], 1, 3, True)
    assert_bits_equal("mask", _array(masked), md.mask_expert_affinities(want[2], want[1], 1, 3, True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_out_is_written_in_place(backend):
    """No copy is made: the caller's tensor receives the result."""
    torch = pytest.importorskip("torch")
    arguments = _tensors(given.block_arguments())
    out = torch.full((4, 64), 9.0, dtype=torch.bfloat16)
    memory = out.data_ptr()
    returned = md.moe_block_tkg(**arguments, out=out, backend=backend)[0]
    assert returned is out
    assert out.data_ptr() == memory
    assert torch.equal(out, md.moe_block_tkg(**arguments, backend=backend)[0])
    assert arguments["inp"].grad_fn is None


def test_torch_dtypes_name_dtypes():
    torch = pytest.importorskip("torch")
    assert_bits_equal("out", _block(router_mm_dtype=torch.bfloat16)[0], _block(router_mm_dtype="bfloat16")[0])
    out = md.moe_tkg(**given.moe_arguments(), output_dtype=torch.float16, backend="reference")
    assert out.dtype == np.float16
