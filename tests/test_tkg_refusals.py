"""Every malformed argument of moe_block_tkg: what is wrong, the exception, what its message names."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flat_arguments as given
import moedecode as md
from refusals import assert_refused, changed

BF16 = ml_dtypes.bfloat16


def _zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


def _read_only(*shape):
    array = _zeros(*shape)
    array.flags.writeable = False
    return array


def _shared(**changes):
    shared = {
        "shared_expert_gate_w": _zeros(64, 24),
        "shared_expert_up_w": _zeros(64, 24),
        "shared_expert_down_w": _zeros(24, 64),
    }
    return shared | changes


MX = {"weights": given.mx_experts(), "hidden": 512, "experts": 2}
FP8 = {"weights": given.fp8_experts()}
INVALID, UNSUPPORTED = md.InvalidInput, md.UnsupportedConfig

# name: (changes, exception, fragments of the message)
BLOCK = {
    "inp is one vector": ({"inp": _zeros(64)}, INVALID, ["inp=", "[B, S, H]"]),
    "inp of integers": ({"inp": _zeros(4, 64, dtype=np.int32)}, INVALID, ["inp=", "int32", "bfloat16"]),
    "inp of float64": ({"inp": _zeros(4, 64, dtype=np.float64)}, INVALID, ["inp=", "float64", "cast"]),
    "inp of another H": ({"inp": _zeros(4, 60)}, INVALID, ["router_weights", "[H, E]", "60"]),
    "inp is None": ({"inp": None}, INVALID, ["inp=", "NoneType"]),
    "gamma too short": ({"gamma": _zeros(1, 63)}, INVALID, ["gamma=", "(1, 63)", "64"]),
    "gamma of float64": ({"gamma": _zeros(1, 64, dtype=np.float64)}, INVALID, ["gamma=", "float64"]),
    "router transposed": (
        {"router_weights": _zeros(6, 64)},
        INVALID,
        ["router_weights", "(6, 64)", "axis order"],
    ),
    "router of integers": (
        {"router_weights": _zeros(64, 6, dtype=np.int8)},
        INVALID,
        ["router_weights", "int8"],
    ),
    "router knows fewer experts": (
        {"router_weights": _zeros(64, 5)},
        INVALID,
        ["expert_gate_up_weights", "knows 5"],
    ),
    "router bias too short": ({"router_bias": _zeros(1, 5)}, INVALID, ["router_bias", "(1, 5)", "[1, 6]"]),
    "gate_up has three axes": (
        {"expert_gate_up_weights": _zeros(6, 64, 96)},
        INVALID,
        ["expert_gate_up_weights", "MX"],
    ),
    "gate_up without its pair": ({"expert_gate_up_weights": _zeros(6, 64, 3, 48)}, INVALID, ["[E, H, 2, I]"]),
    "gate_up of integers": (
        {"expert_gate_up_weights": _zeros(6, 64, 2, 48, dtype=np.int64)},
        INVALID,
        ["int64"],
    ),
    "gate_up of another H": (
        {"expert_gate_up_weights": _zeros(6, 60, 2, 48), "expert_down_weights": _zeros(6, 48, 60)},
        INVALID,
        ["(60, 48)", "(64, 48)"],
    ),
    "down transposed": (
        {"expert_down_weights": _zeros(6, 64, 48)},
        INVALID,
        ["expert_down_weights", "[E, I, H]"],
    ),
    "down of another dtype": (
        {"expert_down_weights": _zeros(6, 48, 64, dtype=np.float32)},
        INVALID,
        ["down[0]", "bf16"],
    ),
    "down missing": ({"expert_down_weights": None}, INVALID, ["expert_down_weights=None", "handle"]),
    "no experts": (
        {"expert_gate_up_weights": _zeros(0, 64, 2, 48), "expert_down_weights": _zeros(0, 48, 64)},
        INVALID,
        ["0 experts"],
    ),
    "gate_up bias of another shape": (
        {"expert_gate_up_bias": _zeros(6, 96)},
        INVALID,
        ["expert_gate_up_bias", "[E, 2, I]"],
    ),
    "down bias of another shape": ({"expert_down_bias": _zeros(6, 48)}, INVALID, ["down_bias", "(6, 64)"]),
    "scales for bf16 weights": (
        {
            "expert_gate_up_weights_scale": _zeros(6, 2, 48, dtype=np.float32),
            "expert_down_weights_scale": _zeros(6, 64, dtype=np.float32),
        },
        INVALID,
        ["scale", "bf16"],
    ),
    "fp8 without scales": (
        FP8 | {"expert_gate_up_weights_scale": None, "expert_down_weights_scale": None},
        INVALID,
        ["scale", "fp8_e4m3"],
    ),
    "fp8 with one scale": (
        FP8 | {"expert_down_weights_scale": None},
        INVALID,
        ["expert_down_weights_scale", "both"],
    ),
    "fp8 scale truncated": (
        FP8 | {"expert_gate_up_weights_scale": _zeros(6, 2, 47, dtype=np.float32)},
        INVALID,
        ["expert_gate_up_weights_scale", "(6, 2, 47)"],
    ),
    "MX without scales": (
        MX | {"expert_gate_up_weights_scale": None},
        INVALID,
        ["expert_gate_up_weights_scale=None"],
    ),
    "MX scale truncated": (
        MX | {"expert_down_weights_scale": _zeros(2, 1, 1, 512, dtype=np.uint8)},
        INVALID,
        ["expert_down_weights_scale", "(2, 2, 1, 512)"],
    ),
    "MX scale of floats": (
        MX | {"expert_gate_up_weights_scale": _zeros(2, 16, 2, 1, 64, dtype=np.float32)},
        INVALID,
        ["E8M0"],
    ),
    "MX codes too few lanes": (
        MX | {"expert_gate_up_weights": _zeros(2, 64, 2, 1, 64, dtype=np.uint16)},
        INVALID,
        ["(2, 128, 2, 1, 64)"],
    ),
    "MX codes of another container": (
        MX | {"expert_down_weights": _zeros(2, 16, 1, 512, dtype=np.uint32)},
        INVALID,
        ["expert_down_weights", "uint16"],
    ),
    "MX contiguous": (MX | {"block_order": "contiguous"}, INVALID, ["block_order='contiguous'", "Trainium"]),
    "MX weights of another H": (
        MX | {"inp": _zeros(4, 1024), "router_weights": _zeros(1024, 2), "gamma": None},
        INVALID,
        ["(512, 64)", "(1024, 64)"],
    ),
    "unknown weight dtype": (
        {"expert_weight_dtype": "int4"},
        INVALID,
        ["expert_weight_dtype='int4'", "float4_e2m1fn_x4"],
    ),
    "wrong weight dtype": ({"expert_weight_dtype": "float16"}, INVALID, ["bfloat16", "declared float16"]),
    "unknown block order": (
        {"block_order": "swizzled"},
        INVALID,
        ["block_order='swizzled'", "contiguous, trainium"],
    ),
    "shared expert without down": (
        _shared(shared_expert_down_w=None),
        INVALID,
        ["shared_expert_down_w=None", "all three"],
    ),
    "shared bias without expert": (
        {"shared_expert_up_bias": _zeros(1, 24)},
        INVALID,
        ["shared_expert_up_bias", "shared_expert_*_w"],
    ),
    "shared up of another width": (
        _shared(shared_expert_up_w=_zeros(64, 23)),
        INVALID,
        ["shared_expert_up_w", "[64, 24]"],
    ),
    "shared down transposed": (
        _shared(shared_expert_down_w=_zeros(64, 24)),
        INVALID,
        ["shared_expert_down_w", "[24, 64]"],
    ),
    "shared bias of another width": (
        _shared(shared_expert_gate_bias=_zeros(25)),
        INVALID,
        ["shared_expert_gate_bias", "24"],
    ),
    "negative eps": ({"eps": -1e-6}, INVALID, ["eps=", "negative"]),
    "NaN eps": ({"eps": float("nan")}, INVALID, ["eps=nan"]),
    "top_k of 0": ({"top_k": 0}, INVALID, ["top_k=0", "1..E (6)"]),
    "top_k above E": ({"top_k": 7}, INVALID, ["top_k=7", "1..E (6)"]),
    "top_k not whole": ({"top_k": 1.5}, INVALID, ["top_k=1.5", "integer"]),
    "unknown score": ({"router_act_fn": "TANH"}, INVALID, ["router_act_fn='TANH'", "SIGMOID, SOFTMAX"]),
    "unknown activation": ({"hidden_act_fn": "ReLU"}, INVALID, ["hidden_act_fn='ReLU'", "Swish"]),
    "unknown scale mode": (
        {"expert_affinities_scaling_mode": 1},
        INVALID,
        ["expert_affinities_scaling_mode=1", "POST_SCALE"],
    ),
    "delayed pre-scale": (
        {"expert_affinities_scaling_mode": "PRE_SCALE_DELAYED"},
        UNSUPPORTED,
        ["PRE_SCALE_DELAYED", "prefill"],
    ),
    "alpha for SiLU": (
        {"hidden_act_scale_factor": 1.5},
        INVALID,
        ["hidden_act_scale_factor=1.5", "SiLU has none"],
    ),
    "crossed clamp": (
        {"up_clamp_lower_limit": 2.0, "up_clamp_upper_limit": 1.0},
        INVALID,
        ["up_clamp=(2.0, 1.0)", "lower"],
    ),
    "NaN clamp": ({"gate_clamp_upper_limit": float("nan")}, INVALID, ["gate_clamp=(None, nan)"]),
    "unknown router dtype": (
        {"router_mm_dtype": "float64"},
        INVALID,
        ["router_mm_dtype='float64'", "bfloat16"],
    ),
    "hidden_actual of 0": ({"hidden_actual": 0}, INVALID, ["hidden_actual=0"]),
    "hidden_actual above H": ({"hidden_actual": 65}, INVALID, ["hidden_actual=65", "64"]),
    "all-expert without rank": ({"is_all_expert": True}, INVALID, ["rank_id=None", "all-expert"]),
    "rank above the last": (
        {"weights": given.plain_experts(2), "is_all_expert": True, "rank_id": 3},
        INVALID,
        ["rank_id=3", "0..2"],
    ),
    "negative rank": ({"rank_id": -1}, INVALID, ["rank_id=-1", "0..0"]),
    "rank of two": ({"rank_id": np.array([0, 1])}, INVALID, ["rank_id=", "one integer"]),
    "rank not whole": ({"rank_id": 0.0}, INVALID, ["rank_id=", "one integer"]),
    "slice without rank": ({"weights": given.plain_experts(2)}, INVALID, ["rank_id=None", "2 of 6"]),
    "residual of another shape": ({"residual": _zeros(2, 3, 64)}, INVALID, ["residual=", "(2, 3, 64)"]),
    "residual of another dtype": (
        {"residual": _zeros(2, 2, 64, dtype=np.float32)},
        INVALID,
        ["residual=", "float32", "bfloat16"],
    ),
    "mask of integers": ({"token_mask": np.ones((2, 2), np.int64)}, INVALID, ["token_mask", "bool"]),
    "mask too short": ({"token_mask": np.ones(3, bool)}, INVALID, ["token_mask", "(3,)"]),
    "unknown backend": ({"backend": "cuda"}, INVALID, ["backend='cuda'", "reference"]),
    "unknown precision": ({"precision": "a4"}, INVALID, ["precision='a4'", "mxfp8"]),
    "unknown h_rounding": ({"precision": "mxfp8", "h_rounding": "bf16"}, INVALID, ["h_rounding='bf16'"]),
    "h_rounding without mxfp8": ({"h_rounding": "io"}, INVALID, ["h_rounding='io'", "mxfp8"]),
    "unknown strategy": ({"strategy": "dense"}, INVALID, ["strategy='dense'", "grouped"]),
    "negative threads": ({"threads": -1}, INVALID, ["threads=-1", "0"]),
    "out of another shape": ({"out": _zeros(2, 2, 64)}, INVALID, ["out=", "(4, 64)"]),
    "out of another dtype": ({"out": _zeros(4, 64, dtype=np.float32)}, INVALID, ["out=", "bfloat16"]),
    "out read-only": ({"out": _read_only(4, 64)}, INVALID, ["out=read-only"]),
    "out strided": ({"out": _zeros(4, 128)[:, ::2]}, INVALID, ["out=strides", "contiguous"]),
}


@pytest.mark.parametrize("name", BLOCK)
def test_moe_block(name):
    changes, exception, fragments = BLOCK[name]
    arguments = {"backend": "reference"} | changed(given.block_arguments, changes)
    assert_refused(lambda: md.moe_block_tkg(**arguments), exception, fragments)


def test_out_may_not_overlap_an_input():
    arguments = given.block_arguments()
    out = arguments["inp"].reshape(4, 64)
    assert_refused(
        lambda: md.moe_block_tkg(**arguments, out=out, backend="reference"), INVALID, ["out=overlapping"]
    )
    arguments = given.moe_arguments()
    out = arguments["hidden_input"]
    assert_refused(
        lambda: md.moe_tkg(**arguments, out=out, backend="reference"), INVALID, ["out=overlapping"]
    )


def test_refusals_come_before_any_work():
    """A refused call leaves ``out`` as it was."""
    out = np.full((4, 64), 3, BF16)
    with pytest.raises(md.InvalidInput):
        md.moe_block_tkg(**given.block_arguments(), residual=_zeros(1, 64), out=out, backend="reference")
    assert (out == 3).all()


def test_a_tensor_elsewhere_is_refused():
    torch = pytest.importorskip("torch")
    arguments = given.block_arguments(inp=torch.zeros((4, 64), device="meta"))
    assert_refused(
        lambda: md.moe_block_tkg(**arguments, backend="reference"), INVALID, ["inp=tensor on meta", ".cpu()"]
    )
