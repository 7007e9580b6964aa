"""What the neuron backend refuses, by table: the spec's validators under gates="spec", less under "extended".

Every row goes through the public functions. "launched" means that all gates let the call pass: the launch
itself is replaced, so no kernel runs here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import moedecode as md
from flat_arguments import (
    block_arguments,
    fp8_experts,
    moe_arguments,
    mx_experts,
    plain_experts,
    quantised_hidden,
)
from moedecode.backends import Request
from moedecode.backends.neuron import NeuronBackend, gates
from moedecode.formats import WeightFormat
from moedecode.presets import presets
from moedecode.synthetic import block_weights
from refusals import assert_refused

BF16 = ml_dtypes.bfloat16
MX = mx_experts(experts=6)
WIDE = {"hidden": 256}


class Launched(Exception):
    """The call passed every gate."""


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch):
    def launched(self, kernel, **arguments):
        raise Launched

    monkeypatch.setattr(NeuronBackend, "run", launched)


def tokens(count, hidden, dtype=BF16):
    return np.random.default_rng(0).standard_normal((1, count, hidden)).astype(dtype)


def block(mx=False, count=4, hidden=256, **changes):
    hidden = 512 if mx else hidden
    weights = MX if mx else plain_experts(hidden=hidden)
    a = block_arguments(weights=changes.pop("weights", weights), hidden=hidden)
    a["inp"] = tokens(count, hidden)
    return lambda **where: md.moe_block_tkg(**(a | changes), backend="neuron", **where)


def dispatch(mx=False, many=False, **changes):
    a = moe_arguments(weights=MX if mx else plain_experts(hidden=256), hidden=512 if mx else 256)
    if many:
        rows = ("hidden_input", "expert_affinities", "expert_index")
        a |= {name: np.repeat(a[name], 33, axis=0)[:129] for name in rows}
    return lambda **where: md.moe_tkg(**(a | changes), backend="neuron", **where)


def all_expert(**more):
    return {"is_all_expert": True, "rank_id": 0} | more


SHARED = {
    "shared_expert_gate_w": np.zeros((256, 64), BF16),
    "shared_expert_up_w": np.zeros((256, 64), BF16),
    "shared_expert_down_w": np.zeros((64, 256), BF16),
}
NO_SCALE = {"expert_affinities_scaling_mode": "NO_SCALE"}
EAGER = {"expert_affinities_eager": np.ones((4, 2), np.float32)}
DYNAMIC = {"is_all_expert_dynamic": True, "block_size": 64}
QUANTISED = dict(
    zip(("hidden_input", "hidden_input_scale"), quantised_hidden(np.ones((4, 512), np.float32)), strict=True)
)

# name, the call, what gates="spec" says of it (None: launched); gates="extended" launches every row
SPEC_TABLE = [
    ("selective, bf16", block(), None),
    ("selective, MX", block(mx=True), None),
    ("all-expert, bf16", block(**all_expert()), None),
    ("all-expert, MX", block(mx=True, **all_expert()), None),
    ("H % 256", block(hidden=384), ("inp=H = 384", "H % 256 == 0", "hidden_actual")),
    ("H % 128", block(hidden=320), ("inp=H = 320", "multiple of 128")),
    ("all-expert MX, T % 4", block(mx=True, count=6, **all_expert()), ("inp=T = 6", "T % 4 == 0", "pad")),
    ("all-expert bf16 has no such rule", block(count=6, **all_expert()), None),
    ("selective MX has no such rule", block(mx=True, count=6), None),
    ("selective, T = 128", block(count=128), None),
    ("selective, T > 128", block(count=129), ("inp=T = 129", "at most 128", "split")),
    ("selective MX, T > 128", block(mx=True, count=132), ("inp=T = 132", "at most 128")),
    ("all-expert bf16 goes past 128", block(count=129, **all_expert()), None),
    ("all-expert MX goes past 128", block(mx=True, count=132, **all_expert()), None),
    ("shared expert", block(**SHARED), ("shared_expert_gate_w=given", "shared expert")),
    (
        "residual, selective",
        block(residual=tokens(4, 256)),
        ("residual=given", "only all-expert mode with MX", "add it before"),
    ),
    ("residual, all-expert bf16", block(residual=tokens(4, 256), **all_expert()), ("residual=given",)),
    ("residual, selective MX", block(mx=True, residual=tokens(4, 512)), ("residual=given",)),
    ("residual, all-expert MX", block(mx=True, residual=tokens(4, 512), **all_expert()), None),
    (
        "act scale",
        block(hidden_act_fn="Swish", hidden_act_scale_factor=1.702),
        ("hidden_act_scale_factor=1.702", "placeholder"),
    ),
    ("act bias", block(hidden_act_bias=1.0), ("hidden_act_bias=1.0", "fold it")),
    ("act bias of zero is not None", block(hidden_act_bias=0.0), ("hidden_act_bias=0.0",)),
    ("skipped logits", block(skip_router_logits=True), ("skip_router_logits=True", "always stores")),
    (
        "NO_SCALE, MX",
        block(mx=True, **NO_SCALE),
        ("expert_affinities_scaling_mode=NO_SCALE", "after the down projection"),
    ),
    ("NO_SCALE, bf16", block(**NO_SCALE), None),
    ("NO_SCALE, all-expert bf16", block(**all_expert(**NO_SCALE)), None),
    ("quantised hidden, all-expert MX", dispatch(mx=True, **QUANTISED, **all_expert()), None),
    ("quantised hidden, selective MX", dispatch(mx=True, **QUANTISED), ("hidden_input_scale=given",)),
    ("eager, selective", dispatch(**EAGER), None),
    ("eager, all-expert", dispatch(**all_expert(**EAGER)), ("expert_affinities_eager=given", "selective")),
    ("dynamic", dispatch(mx=True, **all_expert(**DYNAMIC)), None),
    (
        "dynamic, selective",
        dispatch(mx=True, **DYNAMIC),
        ("is_all_expert_dynamic=True", "is_all_expert=True"),
    ),
    (
        "dynamic without a block size",
        dispatch(mx=True, **all_expert(is_all_expert_dynamic=True)),
        ("block_size=None", "needs a block size"),
    ),
    (
        "dynamic with an index mask",
        dispatch(mx=True, **all_expert(mask_unselected_experts=True, **DYNAMIC)),
        ("mask_unselected_experts=True", "cannot be masked"),
    ),
    ("distinct experts", block(mx=True, strategy="grouped"), ("strategy='grouped'", "selective")),
    (
        "selective, a rank's slice",
        block(weights=plain_experts(3, hidden=256), rank_id=1),
        ("rank_id=3 of 6 experts", "global id"),
    ),
    (
        "all-expert, a rank's slice",
        block(weights=plain_experts(3, hidden=256), **all_expert(rank_id=1)),
        None,
    ),
]


@pytest.mark.parametrize(("call", "refusal"), [pytest.param(*row[1:], id=row[0]) for row in SPEC_TABLE])
def test_the_spec_refuses(call, refusal):
    if refusal is None:
        with pytest.raises(Launched):
            call(gates="spec")
    else:
        assert_refused(lambda: call(gates="spec"), md.UnsupportedConfig, refusal)


@pytest.mark.parametrize("call", [pytest.param(row[1], id=row[0]) for row in SPEC_TABLE])
def test_the_extended_gates_let_all_of_that_pass(call):
    with pytest.raises(Launched):
        call()


BOTH_TABLE = [
    ("PRE_SCALE", block(expert_affinities_scaling_mode="PRE_SCALE"), ("affinity_scale=", "PRE_SCALE")),
    ("PRE_SCALE, all-expert MX", block(mx=True, **all_expert(expert_affinities_scaling_mode="PRE_SCALE")),
     ("affinity_scale=", "PRE_SCALE")),
    ("PRE_SCALE_DELAYED", dispatch(expert_affinities_scaling_mode="PRE_SCALE_DELAYED"), ("prefill-only",)),
    ("static activation scales", dispatch(gate_up_input_scale=np.ones(1), down_input_scale=np.ones(1)),
     ("gate_up_input_scale=given", "static")),
    ("a16 with MX weights", block(mx=True, precision="a16"), ("precision=a16", "MX", "mxfp8")),
    ("mxfp8 without MX weights", block(precision="mxfp8"), ("precision=mxfp8", "E8M0", "a16")),
    ("a8", block(precision="a8"), ("precision=a8",)),
    ("three cores", block(threads=3), ("threads=3", "2 cores")),
    ("one core", block(threads=1), ("threads=1", "2 cores")),
    ("grouped without MX", block(strategy="grouped"), ("strategy='grouped'", "selective")),
    ("odd block", dispatch(mx=True, **all_expert(is_all_expert_dynamic=True, block_size=63)),
    ("block_size=63", "even")), ("long block", dispatch(mx=True, **all_expert(is_all_expert_dynamic=True,
    block_size=130)), ("block_size=130",)), ("result on chip", dispatch(many=True, output_in_sbuf=True,
    **all_expert()), ("output_in_sbuf=True with T = 129",)),
]  # fmt: skip


@pytest.mark.parametrize("chosen", ["spec", "extended"])
@pytest.mark.parametrize(("call", "refusal"), [pytest.param(*row[1:], id=row[0]) for row in BOTH_TABLE])
def test_what_no_kernel_does_is_refused_either_way(call, refusal, chosen):
    assert_refused(lambda: call(gates=chosen), md.UnsupportedConfig, refusal)


@pytest.mark.parametrize(
    ("chip", "mx", "refusal"),
    [
        ("trn1", True, ("chip='trn1'", "no MX instructions", "trn3")),
        ("trn2", True, ("chip='trn2'", "no MX instructions", "use trn3")),
        ("trn1", False, ("chip='trn1'", "exchange", "use trn2, trn3")),
        ("trn2", False, None),
        ("trn3", True, None),
    ],
)
@pytest.mark.parametrize("chosen", ["spec", "extended"])
def test_mx_needs_a_chip_that_has_it(chip, mx, refusal, chosen):
    call = block(mx=mx)
    if refusal is None:
        with pytest.raises(Launched):
            call(chip=chip, gates=chosen)
    else:
        assert_refused(lambda: call(chip=chip, gates=chosen), md.UnsupportedConfig, refusal)


def test_float32_activations_cannot_be_quantised():
    a = block_arguments(weights=MX, hidden=512, dtype=np.float32)
    assert_refused(
        lambda: md.moe_block_tkg(**a, backend="neuron"),
        md.UnsupportedConfig,
        ("inp=float32", "16-bit", "bfloat16"),
    )


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"chip": "trn9"}, ("chip='trn9'", "trn1, trn2, trn3")),
        ({"gates": "none"}, ("gates='none'", "spec, extended")),
    ],
)
def test_unknown_names_are_invalid(options, refusal):
    assert_refused(lambda: block()(**options), md.InvalidInput, refusal)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("options", [{"chip": "trn3"}, {"gates": "spec"}])
def test_chip_and_gates_belong_to_this_backend(backend, options):
    a = block_arguments()
    (name,) = options
    assert_refused(
        lambda: md.moe_block_tkg(**a, backend=backend, **options), md.InvalidInput, (f"{name}=", "neuron")
    )


# ------------------------------------------------------------------ blocks


def made(preset, fmt=WeightFormat.BF16, hidden=256, **options):
    """A small block with the rules of a preset."""
    spec = presets[preset]
    router = replace(spec.router, num_experts=4, top_k=min(2, spec.router.top_k))
    experts = replace(spec.experts, intermediate=32)
    shared = None if spec.shared is None else replace(spec.shared, intermediate=32)
    spec = replace(spec, hidden=hidden, router=router, experts=experts, shared=shared)
    return lambda **where: md.MoEBlock(spec, block_weights(spec, fmt), backend="neuron", **options, **where)


BLOCK_TABLE = [
    ("gpt-oss", made("gpt-oss-20b"), None, None),
    ("gpt-oss, H to be padded", made("gpt-oss-20b", hidden=90), None, None),
    ("gpt-oss MX", made("gpt-oss-20b", WeightFormat.MXFP4, precision="mxfp8"), None, None),
    (
        "gpt-oss MX at 16 bits",
        made("gpt-oss-20b", WeightFormat.MXFP4),
        ("precision=a16",),
        ("precision=a16",),
    ),
    ("Qwen3", made("qwen3-235b-a22b"), None, None),
    ("Mixtral", made("mixtral-8x7b"), None, None),
    ("Qwen2, gated shared expert", made("qwen2-57b-a14b"), ("shared_expert_gate_w=given",), None),
    ("GLM-4.5", made("glm-4.5"), ("shared_expert_gate_w=given",), None),
    ("Llama-4", made("llama-4-scout"), ("PRE_SCALE",), ("PRE_SCALE",)),
]


@pytest.mark.parametrize(
    ("make", "spec", "extended"), [pytest.param(*row[1:], id=row[0]) for row in BLOCK_TABLE]
)
def test_models(make, spec, extended):
    for chosen, refusal in (("spec", spec), ("extended", extended)):
        if refusal is None:
            make(gates=chosen)
        else:
            assert_refused(lambda where=chosen: make(gates=where), md.UnsupportedConfig, refusal)


def test_a_block_folds_what_the_spec_has_no_place_for_and_pads_hidden():
    x = np.zeros((2, 90), BF16)
    for chosen in ("spec", "extended"):
        with pytest.raises(Launched):
            made("gpt-oss-20b", hidden=90)(gates=chosen)(x)


def test_a_block_refuses_a_residual_that_its_leaf_cannot_add():
    x = np.zeros((4, 256), BF16)
    call = made("gpt-oss-20b")(gates="spec", strategy="selective")
    assert_refused(lambda: call(x, residual=x), md.UnsupportedConfig, ("residual=given", "all-expert"))


def request_of(**changes):
    router = changes.pop("router", {})
    expert = changes.pop("expert", {})
    block = {name: changes.pop(name) for name in ("shared", "shared_gate") if name in changes}
    spec = md.BlockSpec(256, md.RouterSpec(4, 2, **router), md.ExpertSpec(32, **expert), **block)
    numerics = md.backends.Numerics("a16", None)
    return Request(spec, WeightFormat.BF16, numerics, 4, "selective", 4, "bfloat16", **changes)


def test_a_shared_expert_has_an_activation_of_its_own():
    """``"shared="`` names the argument."""
    NeuronBackend().refuse(request_of(shared=md.ExpertSpec(64, activation="gelu", bias=True)))
    other = request_of(shared=md.ExpertSpec(32, activation="relu"))
    assert_refused(lambda: NeuronBackend().refuse(other), md.UnsupportedConfig, ("shared=", "gelu_tanh"))


def test_an_activation_that_no_kernel_has():
    unknown = request_of(expert={"activation": "relu2"})
    for chosen in ("spec", "extended"):
        able = NeuronBackend(gates=chosen)
        assert_refused(
            lambda able=able: able.refuse(unknown), md.UnsupportedConfig, ("activation=relu2", "silu")
        )


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (request_of(router={"selection_bias": True}), ("selection_bias=True", "logits")),
        (request_of(router={"scale": 2.5}), ("scale=2.5",)),
        (request_of(router={"norm_topk_prob": True, "norm_eps": 1e-20}), ("norm_eps=1e-20",)),
        (
            request_of(router={"norm_topk_prob": True, "pre_norm": False, "score": "sigmoid"}),
            ("norm_topk_prob=True", "pre_norm=True"),
        ),
        (request_of(shared=md.ExpertSpec(32), shared_gate=True), ("shared_expert_gate_w=given",)),
    ],
)
def test_what_models_ask_beyond_the_spec(request_, refusal):
    NeuronBackend().refuse(request_)
    assert_refused(lambda: NeuronBackend(gates="spec").refuse(request_), md.UnsupportedConfig, refusal)


def test_a_softmax_over_the_chosen_is_normalised_already():
    NeuronBackend(gates="spec").refuse(
        request_of(router={"norm_topk_prob": True, "pre_norm": False, "score": "softmax"})
    )


def test_alpha_of_swish_is_fixed_in_the_spec_only():
    other = request_of(expert={"activation": "swish", "alpha": 1.0})
    NeuronBackend().refuse(other)
    assert_refused(lambda: NeuronBackend(gates="spec").refuse(other), md.UnsupportedConfig, ("alpha=1.0",))


def test_every_gate_is_met_by_a_row_above():
    """Each rule's argument stands in some refusal of the tables: a new gate asks for a row."""
    here = Path(__file__).read_text()
    for gate in gates.HARDWARE + gates.SPEC:
        assert f'"{gate.argument}=' in here, gate.argument


def test_all_expert_mode_asks_for_the_rank():
    for chosen in ("spec", "extended"):
        call = block(is_all_expert=True)
        assert_refused(
            lambda call=call, g=chosen: call(gates=g), md.InvalidInput, ("rank_id=None", "all-expert")
        )


def test_trn2_has_the_other_e4m3():
    """Its FP8 type ends at 240; larger codes would be read as infinities."""
    a = block_arguments(weights=fp8_experts(), hidden=64)
    with pytest.raises(Launched):
        md.moe_block_tkg(**a, backend="neuron", chip="trn2")
    codes = a["expert_gate_up_weights"].copy()
    codes[0, 0, 0, 0] = 256
    call = a | {"expert_gate_up_weights": codes}
    assert_refused(
        lambda: md.moe_block_tkg(**call, backend="neuron", chip="trn2"),
        md.UnsupportedConfig,
        ("codes above 240", "trn2", "use trn3"),
    )
    with pytest.raises(Launched):
        md.moe_block_tkg(**call, backend="neuron", chip="trn3")


def test_fp8_rows_pass():
    a = block_arguments(weights=fp8_experts(), hidden=64)
    with pytest.raises(Launched):
        md.moe_block_tkg(**a, backend="neuron")
