"""Malformed weights: refused when handed in, with the argument, the value, the rule and the way out."""

import ml_dtypes
import numpy as np
import pytest

from moedecode import BlockWeights, ExpertWeights, InvalidInput, WeightFormat
from trainium_layout import trainium_pack

E, H, I = 3, 96, 40  # noqa: E741
F32 = [np.zeros((E, *shape), np.float32) for shape in ((I, H), (I, H), (H, I))]
FUSED = np.zeros((E, 2 * I, H), np.float32)
FLAT = np.zeros((E, H, 2, I), np.float32), np.zeros((E, I, H), np.float32)
FP8 = [a.astype(ml_dtypes.float8_e4m3fn) for a in F32]
ONE = np.ones((E, 1), np.float32)
TRN = trainium_pack(WeightFormat.MXFP4, E, 512, 64, np.random.default_rng(0))[0]
SIZE = {"hidden": 512, "intermediate": 64}

REFUSED = [
    ("from_rows", (F32[0][0], F32[2]), {}, ("gate_up=shape (40, 96)", "[E, 2I, H]")),
    ("from_rows", (FUSED[:, 1:], F32[2]), {}, ("gate_up=shape", "2I rows")),
    ("from_rows", (FUSED, F32[2][:2]), {}, ("down=2 experts", "gate has 3")),
    ("from_rows", (FUSED, F32[2][:, :, 1:]), {}, ("down[0]=shape (96, 39)", "(96, 40)")),
    ("from_rows", (FUSED, F32[2][:, 1:]), {}, ("down[0]=shape (95, 40)", "(96, 40)")),
    ("from_rows", (FUSED, FP8[2]), {}, ("scale=shape None", "fp8_e4m3")),
    ("from_rows", (FUSED, F32[2].astype(np.float16)), {}, ("down[0]=fp16", "fp32")),
    (
        "from_rows",
        (FUSED, F32[2]),
        {"gate_up_bias": np.zeros((E, I))},
        ("gate_up_bias=shape (3, 40)", "(3, 80)"),
    ),
    (
        "from_rows",
        (FUSED, F32[2]),
        {"gate_up_bias": np.zeros(2 * I)},
        ("gate_up_bias=shape (80,)", "(3, 80)"),
    ),
    ("from_rows", (FUSED, F32[2]), {"down_bias": np.zeros((E, I))}, ("down_bias=shape (3, 40)", "(3, 96)")),
    (
        "from_rows",
        (FUSED, F32[2]),
        {"down_bias": np.zeros((E, H), complex)},
        ("down_bias=array of complex128", "must hold floats", "float32"),
    ),
    (
        "from_rows",
        (FUSED, F32[2]),
        {"gate_up_bias": np.full((E, 2 * I), "x")},
        ("gate_bias=array of str", "must hold floats"),
    ),
    (
        "from_experts",
        FP8,
        {"gate_scale": ONE.astype(complex), "up_scale": ONE, "down_scale": ONE},
        ("gate_scale=array of complex128", "must hold floats"),
    ),
    (
        "from_experts",
        FP8,
        {"gate_scale": np.float32(1), "up_scale": ONE, "down_scale": ONE},
        ("gate_scale=float32", "sequence over experts"),
    ),
    ("from_experts", (np.array(3.0), F32[1], F32[2]), {}, ("gate=ndarray", "sequence over experts")),
    ("from_experts", ({}, F32[1], F32[2]), {}, ("gate=dict", "sequence over experts")),
    ("from_experts", F32, {"down_bias": ()}, ("down_bias=shapes []", "one bias per expert")),
    (
        "from_experts",
        F32,
        {"down_bias": [np.zeros(H, np.float32), np.zeros(3, np.float32), np.zeros(H, np.float32)]},
        ("down_bias=shapes [(3,), (96,)]", "equal length"),
    ),
    ("from_rows", ("gate", F32[2]), {}, ("gate_up=str", "NumPy array or a torch tensor")),
    ("from_rows", (FUSED.astype(np.float64), F32[2]), {}, ("float64", "not a weight format")),
    ("from_rows", (FUSED, F32[2]), {"dtype": "int3"}, ("expert_weight_dtype='int3'", "choose one of")),
    (
        "from_rows",
        (FUSED, F32[2]),
        {"block_order": "zigzag"},
        ("block_order='zigzag'", "contiguous, trainium"),
    ),
    (
        "from_rows",
        (FUSED, F32[2]),
        {"gate_up_scale": np.ones((E, 1, 1), np.float32)},
        ("gate_up_scale", "128x128"),
    ),
    ("from_experts", ([], [], []), {}, ("gate=0 experts", "at least one")),
    ("from_experts", (3, 3, 3), {}, ("gate=int", "sequence")),
    ("from_experts", (F32[0], F32[1][:2], F32[2]), {}, ("up=2 experts", "gate has 3")),
    ("from_experts", (F32[0], F32[1][:, 1:], F32[2]), {}, ("up[0]=shape (39, 96)", "(40, 96)")),
    (
        "from_experts",
        ([F32[0][0], F32[0][1][1:], F32[0][2]], F32[1], F32[2]),
        {},
        ("gate[1]=shape (39, 96)", "(40, 96)"),
    ),
    ("from_experts", (F32[0][:, 0], F32[1], F32[2]), {}, ("gate=shape (96,)", "two axes")),
    (
        "from_experts",
        FP8,
        {"gate_scale": ONE[:2], "up_scale": ONE, "down_scale": ONE},
        ("gate_scale=one scale tensor is missing", "3 experts"),
    ),
    ("from_experts", FP8, {"gate_scale": ONE, "up_scale": ONE}, ("scale=shape None", "fp8_e4m3")),
    (
        "from_experts",
        (*(np.zeros((E, 512, 512), ml_dtypes.float8_e4m3fn),) * 3,),
        {
            "block_order": "trainium",
            **dict.fromkeys(("gate_scale", "up_scale", "down_scale"), np.ones((E, 4, 4), np.float32)),
        },
        ("block_order='trainium'", "128x128"),
    ),
    (
        "from_experts",
        (*(np.zeros((E, 512, 512), ml_dtypes.float8_e4m3fn),) * 3,),
        {
            "block_order": "trainium",
            **dict.fromkeys(("gate_scale", "up_scale", "down_scale"), np.zeros((E, 512, 16), np.uint8)),
        },
        ("block_order='trainium'", "from_trainium"),
    ),
    (
        "from_flat",
        (FLAT[0][:, :, :1], FLAT[1]),
        {},
        ("expert_gate_up_weights=shape (3, 96, 1, 40)", "[E, H, 2, I]"),
    ),
    (
        "from_flat",
        (FLAT[0], FLAT[1].swapaxes(1, 2)),
        {},
        ("expert_down_weights=shape (3, 96, 40)", "(3, 40, 96)"),
    ),
    (
        "from_flat",
        FLAT,
        {"gate_up_bias": np.zeros((E, 2 * I))},
        ("expert_gate_up_bias=shape (3, 80)", "(3, 2, 40)"),
    ),
    ("from_flat", FLAT, {"down_bias": np.zeros(H)}, ("down_bias=shape (96,)", "(3, 96)")),
    ("from_flat", FLAT, {"gate_up_scale": np.ones((E, 2, I))}, ("only one of two scales", "give both")),
    (
        "from_flat",
        FLAT,
        {"gate_up_scale": np.ones((E, 2, 3)), "down_scale": np.ones((E, H))},
        ("expert_gate_up_weights_scale=shape (3, 2, 3)", "(3, 2, 40) or (3, 2, 1)"),
    ),
    (
        "from_flat",
        FLAT,
        {"gate_up_scale": np.ones((E, 2, 1)), "down_scale": np.ones((E, 7))},
        ("expert_down_weights_scale=shape (3, 7)", "(3, 96) or (3, 1)"),
    ),
    (
        "from_trainium",
        (TRN[0], TRN[1], None, TRN[3]),
        SIZE,
        ("expert_gate_up_weights_scale=None", "MX weights need scales"),
    ),
    (
        "from_trainium",
        (TRN[0], TRN[1], TRN[2], None),
        SIZE,
        ("expert_down_weights_scale=None", "MX weights need scales"),
    ),
    (
        "from_trainium",
        (TRN[0][:, :64], *TRN[1:]),
        SIZE,
        ("expert_gate_up_weights=shape (3, 64", "(3, 128, 2, 1, 64)"),
    ),
    (
        "from_trainium",
        (TRN[0], TRN[1][:2], *TRN[2:]),
        SIZE,
        ("expert_down_weights=shape (2,", "(3, 16, 1, 512)"),
    ),
    (
        "from_trainium",
        (TRN[0], TRN[1], TRN[2][:, :15], TRN[3]),
        SIZE,
        ("expert_gate_up_weights_scale=shape", "16, 2, 1"),
    ),
    (
        "from_trainium",
        (TRN[0], TRN[1], TRN[2], TRN[3][..., :90]),
        SIZE,
        ("expert_down_weights_scale=shape", "512"),
    ),
    (
        "from_trainium",
        (*TRN[:2], TRN[2].astype(np.float32), TRN[3]),
        SIZE,
        ("array of float32", "E8M0 codes in uint8"),
    ),
    (
        "from_trainium",
        (TRN[0], TRN[1].astype(np.uint32), *TRN[2:]),
        SIZE,
        ("expert_down_weights=array of uint32", "uint16"),
    ),
    ("from_trainium", TRN, {**SIZE, "dtype": "float8_e4m3fn_x4"}, ("array of uint16", "stored in uint32")),
    ("from_trainium", TRN, {"hidden": 500, "intermediate": 64}, ("hidden=500", "multiple of 512")),
    ("from_trainium", TRN, {"hidden": 512, "intermediate": 0}, ("expert weights I=0", "at least 1")),
    ("from_trainium", (np.uint16(3), *TRN[1:]), SIZE, ("expert_gate_up_weights=shape ()", "128")),
    (
        "from_trainium",
        TRN,
        {**SIZE, "gate_up_bias": np.zeros((E, 2, 64))},
        ("expert_gate_up_bias=shape (3, 2, 64)", "(3, 16, 2, 1, 4)"),
    ),
]


@pytest.mark.parametrize(
    ("constructor", "args", "kwargs", "fragments"), REFUSED, ids=[f"{r[0]}-{r[3][0][:40]}" for r in REFUSED]
)
def test_malformed_weights_are_refused_when_built(constructor, args, kwargs, fragments):
    with pytest.raises(InvalidInput) as error:
        getattr(ExpertWeights, constructor)(*args, **kwargs)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("order", "fragments"),
    [
        ("zigzag", ("block_order='zigzag'", "contiguous")),
        ("trainium", ("block_order='trainium'", "stored contiguous")),
    ],
)
def test_block_weights_name_a_block_order_that_is_not_theirs(order, fragments):
    experts = ExpertWeights.from_experts(*F32)
    assert BlockWeights(np.zeros((E, H)), experts, block_order="contiguous").experts is experts
    with pytest.raises(InvalidInput) as error:
        BlockWeights(np.zeros((E, H)), experts, block_order=order)
    for fragment in fragments:
        assert fragment in str(error.value)
