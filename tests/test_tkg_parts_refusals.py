"""Every malformed argument of moe_tkg, the small flat functions and handles: exception and message."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flat_arguments as given
import moedecode as md
from refusals import assert_refused, changed

BF16 = ml_dtypes.bfloat16
MX = {"weights": given.mx_experts(), "hidden": 512, "experts": 2}
INVALID, UNSUPPORTED = md.InvalidInput, md.UnsupportedConfig


def _zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


# name: (changes, exception, fragments of the message)
MOE = {
    "hidden of another H": ({"hidden_input": _zeros(4, 60)}, INVALID, ["hidden_input", "[T, 64]"]),
    "hidden of three axes": ({"hidden_input": _zeros(2, 2, 64)}, INVALID, ["hidden_input", "[T, 64]"]),
    "hidden of integers": (
        {"hidden_input": _zeros(4, 64, dtype=np.int16)},
        INVALID,
        ["hidden_input", "int16"],
    ),
    "packed hidden without scale": (
        MX | {"hidden_input": _zeros(128, 1, 4, dtype=np.uint32)},
        INVALID,
        ["hidden_input_scale=None"],
    ),
    "scale for plain hidden": (
        MX | {"hidden_input_scale": _zeros(16, 1, 4, dtype=np.uint8)},
        INVALID,
        ["hidden_input=", "uint32"],
    ),
    "hidden scale truncated": (
        MX
        | {
            "hidden_input": _zeros(128, 1, 4, dtype=np.uint32),
            "hidden_input_scale": _zeros(15, 1, 4, dtype=np.uint8),
        },
        INVALID,
        ["hidden_input_scale", "(16, 1, 4)"],
    ),
    "packed hidden with h_rounding": (
        MX
        | {
            "hidden_input": _zeros(128, 1, 4, dtype=np.uint32),
            "hidden_input_scale": _zeros(16, 1, 4, dtype=np.uint8),
            "h_rounding": "io",
        },
        INVALID,
        ["h_rounding='io'"],
    ),
    "static gate_up scale": (
        {"gate_up_input_scale": np.ones((6, 1), np.float32)},
        UNSUPPORTED,
        ["gate_up_input_scale", "online|None"],
    ),
    "static down scale": (
        {"down_input_scale": np.ones((6, 1), np.float32)},
        UNSUPPORTED,
        ["down_input_scale", "static"],
    ),
    "affinities of another T": (
        {"expert_affinities": _zeros(3, 6)},
        INVALID,
        ["expert_affinities", "[T, E] = [4, any]"],
    ),
    "affinities of integers": (
        {"expert_affinities": _zeros(4, 6, dtype=np.int32)},
        INVALID,
        ["expert_affinities", "int32"],
    ),
    "index of floats": (
        {"expert_index": _zeros(4, 2, dtype=np.float32)},
        INVALID,
        ["expert_index", "integers [4, K]"],
    ),
    "index of another T": (
        {"expert_index": _zeros(5, 2, dtype=np.int32)},
        INVALID,
        ["expert_index", "integers [4, K]"],
    ),
    "index of E": ({"expert_index": np.array([[0, 6]] * 4)}, INVALID, ["expert_index[0, 1]=6", "0..5", "-1"]),
    "index below -1": (
        {"expert_index": np.array([[0, 1]] * 3 + [[-2, 1]])},
        INVALID,
        ["expert_index[3, 0]=-2"],
    ),
    "index wraps": (
        {"expert_index": np.full((4, 2), 2**32, np.uint64)},
        INVALID,
        ["expert_index[0, 0]=4294967296"],
    ),
    "eager of another K": (
        {"expert_affinities_eager": _zeros(4, 3)},
        INVALID,
        ["expert_affinities_eager", "[4, 2]"],
    ),
    "all-expert without rank": ({"is_all_expert": True}, INVALID, ["rank_id=None"]),
    "rank above the last": ({"rank_id": 1}, INVALID, ["rank_id=1", "0..0"]),
    "more experts than affinities": (
        {"expert_affinities": _zeros(4, 5), "expert_index": _zeros(4, 2, dtype=np.int32)},
        INVALID,
        ["6 experts", "knows 5"],
    ),
    "unknown activation": ({"activation_fn": "gelu"}, INVALID, ["activation_fn='gelu'", "GELU"]),
    "delayed pre-scale": (
        {"expert_affinities_scaling_mode": md.ExpertAffinityScaleMode.PRE_SCALE_DELAYED},
        UNSUPPORTED,
        ["prefill"],
    ),
    "unknown output dtype": ({"output_dtype": "int8"}, INVALID, ["output_dtype='int8'"]),
    "out of the input's dtype": (
        {"output_dtype": "float32", "out": _zeros(4, 64)},
        INVALID,
        ["out=", "float32"],
    ),
}

X = np.zeros((4, 64), np.float32)
W = np.zeros((64, 6), np.float32)
AFFINITIES, INDEX = np.zeros((4, 6), np.float32), np.zeros((4, 2), np.int32)

OTHERS = {
    "x of one axis": (
        lambda: md.router_topk(X[0], W, None, "SOFTMAX", 2, backend="reference"),
        ["x=", "[T, H]"],
    ),
    "x of integers": (
        lambda: md.router_topk(X.astype(int), W, None, "SOFTMAX", 2, backend="reference"),
        ["x=", "int64"],
    ),
    "w of another H": (
        lambda: md.router_topk(X, W[:60], None, "SOFTMAX", 2, backend="reference"),
        ["w=", "[H, E]"],
    ),
    "w_bias too long": (
        lambda: md.router_topk(X, W, X[:1, :7], "SOFTMAX", 2, backend="reference"),
        ["w_bias", "[1, 6]"],
    ),
    "act_fn missing": (
        lambda: md.router_topk(X, W, k=2, backend="reference"),
        ["act_fn=None", "SIGMOID, SOFTMAX"],
    ),
    "k missing": (
        lambda: md.router_topk(X, W, act_fn="SOFTMAX", backend="reference"),
        ["k=None", "1..E (6)"],
    ),
    "k above E": (lambda: md.router_topk(X, W, None, "SOFTMAX", 7, backend="reference"), ["k=7", "1..E (6)"]),
    "unknown layout": (
        lambda: md.router_topk(X, W, None, "SOFTMAX", 2, x_hbm_layout=2, backend="reference"),
        ["x_hbm_layout=2"],
    ),
    "x transposed without saying so": (
        lambda: md.router_topk(X.T, W, None, "SOFTMAX", 2, backend="reference"),
        ["w=", "[4, any]"],
    ),
    "slice too wide": (
        lambda: md.mask_expert_affinities(AFFINITIES, INDEX, 0, 7, True),
        ["E_L=7", "1..E (6)"],
    ),
    "slice of none": (lambda: md.mask_expert_affinities(AFFINITIES, INDEX, 0, 0, True), ["E_L=0"]),
    "slice of another rank": (
        lambda: md.mask_expert_affinities(AFFINITIES, INDEX, 2, 3, True),
        ["rank_id=2", "0..1"],
    ),
    "slice without rank": (
        lambda: md.mask_expert_affinities(AFFINITIES, INDEX, None, 3, True),
        ["rank_id=None"],
    ),
    "mask with wrong ids": (
        lambda: md.mask_expert_affinities(AFFINITIES, INDEX + 6, 0, 3, True),
        ["expert_index[0, 0]=6"],
    ),
    "mask with other tokens": (
        lambda: md.mask_expert_affinities(AFFINITIES, INDEX[:3], 0, 3, True),
        ["expert_index", "[4, K]"],
    ),
    "norm of one axis": (lambda: md.rmsnorm_tkg(X[0], None, backend="reference"), ["inp=", "[B, S, H]"]),
    "norm with a long gamma": (lambda: md.rmsnorm_tkg(X, W, backend="reference"), ["gamma=", "[1, 64]"]),
    "norm with negative eps": (lambda: md.rmsnorm_tkg(X, None, -1.0, backend="reference"), ["eps=-1.0"]),
    "norm wider than H": (
        lambda: md.rmsnorm_tkg(X, None, hidden_actual=65, backend="reference"),
        ["hidden_actual=65"],
    ),
    "norm with another residual": (
        lambda: md.rmsnorm_tkg(X, None, residual=X[:3], backend="reference"),
        ["residual=", "(3, 64)"],
    ),
    "unpackable": (lambda: md.pack(W, W, backend="reference"), ["expert_gate_up_weights", "MX"]),
    "no experts": (lambda: _pack_empty(experts=0), ["E_L=0", "at least 1"]),
    "no hidden": (lambda: _pack_empty(tiles=0), ["H=0", "at least 1"]),
    "no intermediate": (lambda: _pack_empty(intermediate=0), ["I=0", "at least 1"]),
    "packed twice": (lambda: md.pack(HANDLE, None, backend="reference"), ["packed already"]),
}


def _pack_empty(experts=1, tiles=1, intermediate=64):
    """MX weights whose every axis fits, one of them empty."""
    lanes = 8 * -(-intermediate // 32)
    gate_up, down = (
        (experts, 128, 2, tiles, intermediate),
        (experts, lanes, -(-intermediate // 512), 512 * tiles),
    )
    scales = (experts, 16, *gate_up[2:]), (experts, lanes // 8, *down[2:])
    codes = [_zeros(*shape, dtype=np.uint16) for shape in (gate_up, down)]
    return md.pack(*codes, *(_zeros(*shape, dtype=np.uint8) for shape in scales), backend="reference")


HANDLE = md.pack(**given.plain_experts(), backend="reference")
HANDLES = {
    "another backend": (
        {"expert_gate_up_weights": HANDLE, "backend": "cpu"},
        ["backend='cpu'", "packed for 'reference'"],
    ),
    "with down weights": (
        {"expert_gate_up_weights": HANDLE, "expert_down_weights": W},
        ["expert_down_weights", "None"],
    ),
    "with a scale": (
        {"expert_gate_up_weights": HANDLE, "expert_down_weights_scale": W},
        ["expert_down_weights_scale", "anew"],
    ),
    "with a bias": (
        {"expert_gate_up_weights": HANDLE, "expert_gate_up_bias": W},
        ["expert_gate_up_bias", "anew"],
    ),
    "with a dtype": (
        {"expert_gate_up_weights": HANDLE, "expert_weight_dtype": "bfloat16"},
        ["expert_weight_dtype"],
    ),
    "with another order": (
        {"expert_gate_up_weights": HANDLE, "block_order": "trainium"},
        ["block_order", "contiguous"],
    ),
}


@pytest.mark.parametrize("name", MOE)
def test_moe(name):
    changes, exception, fragments = MOE[name]
    arguments = {"backend": "reference"} | changed(given.moe_arguments, changes)
    assert_refused(lambda: md.moe_tkg(**arguments), exception, fragments)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(name):
    call, fragments = OTHERS[name]
    assert_refused(call, INVALID, fragments)


@pytest.mark.parametrize("name", HANDLES)
@pytest.mark.parametrize("function", ["block", "moe"])
def test_handles(name, function):
    changes, fragments = HANDLES[name]
    make, call = (
        (given.block_arguments, md.moe_block_tkg)
        if function == "block"
        else (given.moe_arguments, md.moe_tkg)
    )
    arguments = make() | {"expert_down_weights": None, "backend": "reference"} | changes
    if arguments["backend"] == "cpu":
        pytest.importorskip("moedecode._native")
    assert_refused(lambda: call(**arguments), INVALID, fragments)
