"""Specs: their repr evaluates back to them, and a bad combination explains itself when built."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedecode import (
    ActFn,
    BlockSpec,
    ExpertAffinityScaleMode,
    ExpertSpec,
    InvalidInput,
    RouterActFn,
    RouterSpec,
    presets,
)
from moedecode.spec import ACTIVATIONS, MATMUL_DTYPES, SCORES

NAMES = {
    "BlockSpec": BlockSpec,
    "RouterSpec": RouterSpec,
    "ExpertSpec": ExpertSpec,
    "ExpertAffinityScaleMode": ExpertAffinityScaleMode,
    "ActFn": ActFn,
    "RouterActFn": RouterActFn,
}


def evaluated(value):
    """The value of repr(value), with nothing but the public names in reach."""
    return eval(repr(value), {"__builtins__": {}}, NAMES)


number = st.floats(-1e6, 1e6)
clamp = st.tuples(st.none() | st.floats(-9, 0), st.none() | st.floats(0, 9))
experts_specs = st.builds(
    ExpertSpec,
    intermediate=st.integers(1, 10**5),
    activation=st.sampled_from(ACTIVATIONS),
    alpha=number,
    up_offset=number,
    gate_clamp=clamp,
    up_clamp=clamp,
    bias=st.booleans(),
)


@st.composite
def router_specs(draw):
    experts = draw(st.integers(1, 1000))
    return RouterSpec(
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        score=draw(st.sampled_from(SCORES)),
        pre_norm=draw(st.booleans()),
        norm_topk_prob=draw(st.booleans()),
        norm_eps=draw(st.floats(0, 1)),
        bias=draw(st.booleans()),
        selection_bias=draw(st.booleans()),
        scale=draw(number),
        matmul_dtype=draw(st.sampled_from(MATMUL_DTYPES)),
    )


@st.composite
def block_specs(draw):
    hidden = draw(st.integers(1, 10**5))
    shared = draw(st.none() | experts_specs)
    modes = [mode for mode in ExpertAffinityScaleMode if mode.name != "PRE_SCALE_DELAYED"]
    return BlockSpec(
        hidden=hidden,
        router=draw(router_specs()),
        experts=draw(experts_specs),
        eps=draw(st.floats(0, 1)),
        hidden_actual=draw(st.none() | st.integers(1, hidden)),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        affinity_scale=draw(st.sampled_from(modes)),
    )


@settings(deadline=None)
@given(spec=block_specs())
def test_repr_evaluates_back(spec):
    again = evaluated(spec)
    assert again == spec and hash(again) == hash(spec) and repr(again) == repr(spec)


@pytest.mark.parametrize("name", presets)
def test_repr_of_every_preset_evaluates_back(name):
    assert evaluated(presets[name]) == presets[name]


@pytest.mark.parametrize("member", [*ActFn, *RouterActFn, *ExpertAffinityScaleMode])
def test_repr_of_every_enum_member_evaluates_back(member):
    assert evaluated(member) is member


def test_numpy_numbers_are_stored_as_plain_ones():
    spec = BlockSpec(
        hidden=np.int64(64),
        eps=np.float32(0.5),
        router=RouterSpec(num_experts=np.int32(4), top_k=np.uint8(2), scale=np.float64(2)),
        experts=ExpertSpec(intermediate=np.int16(32), up_clamp=(np.float32(-7), 7)),
    )
    assert evaluated(spec) == spec
    assert (type(spec.hidden), type(spec.eps), type(spec.experts.up_clamp[1])) == (int, float, float)


def test_specs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        presets["gpt-oss-20b"].hidden = 1


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_affinities_are_dense_exactly_pre_norm_without_normalisation(pre_norm, normalised):
    router = RouterSpec(8, 2, pre_norm=pre_norm, norm_topk_prob=normalised)
    assert router.dense_affinities == (pre_norm and not normalised)


def test_norm_width_is_the_actual_width_when_padded():
    router, experts = RouterSpec(4, 2), ExpertSpec(32)
    assert BlockSpec(3072, router, experts, hidden_actual=2880).norm_width == 2880
    assert BlockSpec(3072, router, experts).norm_width == 3072


ROUTER = {"num_experts": 8, "top_k": 2}
EXPERT = {"intermediate": 64}
BLOCK = {"hidden": 64, "router": RouterSpec(8, 2), "experts": ExpertSpec(64)}

# kind, its good arguments, what is changed, what the message must say: argument=value, the rule, the way out
REFUSED = [
    (RouterSpec, ROUTER, {"num_experts": 0}, ("num_experts=0", "at least 1", "global expert count")),
    (RouterSpec, ROUTER, {"num_experts": 8.0}, ("num_experts=8.0", "whole number", "global expert count")),
    (RouterSpec, ROUTER, {"num_experts": "8"}, ("num_experts='8'", "whole number", "global expert count")),
    (RouterSpec, ROUTER, {"top_k": 0}, ("top_k=0", "at least 1", "experts per token")),
    (RouterSpec, ROUTER, {"top_k": 9}, ("top_k=9", "1..num_experts (8)", "fewer experts")),
    (RouterSpec, ROUTER, {"top_k": None}, ("top_k=None", "whole number", "experts per token")),
    (RouterSpec, ROUTER, {"score": "tanh"}, ("score='tanh'", "not known", "softmax, sigmoid")),
    (
        RouterSpec,
        ROUTER,
        {"matmul_dtype": "int8"},
        ("matmul_dtype='int8'", "not known", "bfloat16, float16, float32"),
    ),
    (RouterSpec, ROUTER, {"pre_norm": "false"}, ("pre_norm='false'", "True or False")),
    (RouterSpec, ROUTER, {"norm_topk_prob": 1}, ("norm_topk_prob=1", "True or False")),
    (RouterSpec, ROUTER, {"score": ["softmax"]}, ("score=['softmax']", "not known")),
    (RouterSpec, ROUTER, {"norm_eps": -1e-9}, ("norm_eps=-1e-09", "not be negative", "0.0")),
    (RouterSpec, ROUTER, {"norm_eps": math.nan}, ("norm_eps=nan", "finite", "0.0")),
    (RouterSpec, ROUTER, {"scale": math.inf}, ("scale=inf", "finite", "1.0")),
    (RouterSpec, ROUTER, {"scale": "2.5"}, ("scale='2.5'", "finite number", "1.0")),
    (ExpertSpec, EXPERT, {"intermediate": 0}, ("intermediate=0", "at least 1", "width I")),
    (ExpertSpec, EXPERT, {"intermediate": 2.5}, ("intermediate=2.5", "whole number", "width I")),
    (ExpertSpec, EXPERT, {"activation": "mish"}, ("activation='mish'", "not known", ", ".join(ACTIVATIONS))),
    (ExpertSpec, EXPERT, {"activation": ["silu"]}, ("activation=['silu']", "not known", "silu")),
    (ExpertSpec, EXPERT, {"alpha": math.nan}, ("alpha=nan", "finite", "1.702")),
    (ExpertSpec, EXPERT, {"up_offset": math.inf}, ("up_offset=inf", "finite", "1.0")),
    (ExpertSpec, EXPERT, {"gate_clamp": 7.0}, ("gate_clamp=7.0", "pair (lower, upper)", "None for a bound")),
    (
        ExpertSpec,
        EXPERT,
        {"up_clamp": (1.0, 2.0, 3.0)},
        ("up_clamp=(1.0, 2.0, 3.0)", "pair", "None for a bound"),
    ),
    (
        ExpertSpec,
        EXPERT,
        {"gate_clamp": (None, math.nan)},
        ("gate_clamp=(None, nan)", "finite", "None for no bound"),
    ),
    (
        ExpertSpec,
        EXPERT,
        {"up_clamp": (-math.inf, 7.0)},
        ("up_clamp=(-inf, 7.0)", "finite", "None for no bound"),
    ),
    (ExpertSpec, EXPERT, {"up_clamp": ("low", 7.0)}, ("up_clamp=('low', 7.0)", "finite number", "None")),
    (
        ExpertSpec,
        EXPERT,
        {"up_clamp": (7.0, -7.0)},
        ("up_clamp=(7.0, -7.0)", "exceeds the upper", "(lower, upper)"),
    ),
    (BlockSpec, BLOCK, {"hidden": 0}, ("hidden=0", "at least 1", "width H")),
    (BlockSpec, BLOCK, {"hidden": -64}, ("hidden=-64", "at least 1", "width H")),
    (BlockSpec, BLOCK, {"eps": -1.0}, ("eps=-1.0", "not be negative", "1e-6")),
    (BlockSpec, BLOCK, {"eps": math.inf}, ("eps=inf", "finite", "1e-6")),
    (BlockSpec, BLOCK, {"hidden_actual": 0}, ("hidden_actual=0", "at least 1", "leave it None")),
    (BlockSpec, BLOCK, {"hidden_actual": 65}, ("hidden_actual=65", "1..hidden (64)", "leave it None")),
    (
        BlockSpec,
        BLOCK,
        {"shared_gate": True},
        ("shared_gate=True", "needs a shared expert", "shared=ExpertSpec"),
    ),
    (BlockSpec, BLOCK, {"shared": 64}, ("shared=64", "must be of type ExpertSpec", "moedecode.ExpertSpec")),
    (BlockSpec, BLOCK, {"router": 8}, ("router=8", "must be of type RouterSpec", "moedecode.RouterSpec")),
    (
        BlockSpec,
        BLOCK,
        {"experts": None},
        ("experts=None", "must be of type ExpertSpec", "moedecode.ExpertSpec"),
    ),
    (
        BlockSpec,
        BLOCK,
        {"affinity_scale": "POST_SCALE"},
        ("affinity_scale='POST_SCALE'", "ExpertAffinityScaleMode"),
    ),
    (
        BlockSpec,
        BLOCK,
        {"affinity_scale": ExpertAffinityScaleMode.PRE_SCALE_DELAYED},
        (
            "affinity_scale=ExpertAffinityScaleMode.PRE_SCALE_DELAYED",
            "prefill-only",
            "PRE_SCALE or POST_SCALE",
        ),
    ),
]


@pytest.mark.parametrize(("kind", "good", "change", "fragments"), REFUSED, ids=[r[3][0] for r in REFUSED])
def test_a_bad_value_is_named_with_its_rule_and_the_way_out(kind, good, change, fragments):
    kind(**good)
    with pytest.raises(InvalidInput) as error:
        kind(**(good | change))
    for fragment in fragments:
        assert fragment in str(error.value)
