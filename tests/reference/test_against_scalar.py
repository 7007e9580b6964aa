"""The reference against the scalar implementation: every option once, unrounded values, relative 1e-12.

Shapes: T=3; H=40 and I=33 are no multiples of 32 and I is odd; E=6, K=2; H=512 for the Trainium blocks.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import scalar_block

import moedecode as md
from moedecode.backends import Numerics
from numeric import assert_bits_equal, assert_close
from small_block import small_block, tokens

MODES = md.ExpertAffinityScaleMode
CLAMPS = {"gate_clamp": (None, 0.4), "up_clamp": (-0.5, 0.6)}
SHARED = md.ExpertSpec(17, activation="gelu")

OPTIONS = {
    "plain": {},
    "sigmoid": {"router": {"score": "sigmoid"}},
    "post_norm": {"router": {"pre_norm": False}},
    "sigmoid_post_norm": {"router": {"pre_norm": False, "score": "sigmoid"}},
    "normalised": {"router": {"norm_topk_prob": True, "norm_eps": 0.25}},
    "normalised_post_norm": {"router": {"pre_norm": False, "score": "sigmoid", "norm_topk_prob": True}},
    "router_bias": {"router": {"bias": True}},
    "selection_bias": {
        "router": {"selection_bias": True, "score": "sigmoid", "norm_topk_prob": True, "scale": 2.5}
    },
    "selection_bias_post_norm": {"router": {"selection_bias": True, "pre_norm": False}},
    "scaled": {"router": {"scale": 3.0}},
    "router_in_bf16": {"router": {"matmul_dtype": "bfloat16"}},
    "router_in_fp16": {"router": {"matmul_dtype": "float16"}},
    "top_1": {"top_k": 1},
    "top_all": {"top_k": 6},
    "biases": {"expert": {"bias": True}},
    "clamps": {"expert": CLAMPS},
    "gate_lower_clamp": {"expert": {"gate_clamp": (-0.1, None)}},
    "gpt_oss": {
        "expert": {"activation": "swish", "up_offset": 1.0, "bias": True, **CLAMPS},
        "router": {"pre_norm": False},
    },
    "swish_alpha": {"expert": {"activation": "swish", "alpha": 0.7}},
    "gelu": {"expert": {"activation": "gelu"}},
    "gelu_tanh": {"expert": {"activation": "gelu_tanh"}},
    "relu2": {"expert": {"activation": "relu2"}},
    "relu": {"expert": {"activation": "relu"}},
    "no_scale": {"affinity_scale": MODES.NO_SCALE, "expert": {"bias": True}},
    "pre_scale": {"affinity_scale": MODES.PRE_SCALE, "expert": {"bias": True}},
    "shared": {"shared": SHARED},
    "shared_gate": {"shared": SHARED, "shared_gate": True},
    "large_eps": {"eps": 0.5},
    "hidden_actual": {"hidden_actual": 37},
}


def _lists(arrays):
    return {name: array.astype(float).tolist() for name, array in arrays.items()}


def _scalar(block, x, residual=None, **blocks):
    io, lists = x.dtype.name, _lists(block.arrays)
    residuals = [None] * len(x) if residual is None else residual.astype(float).tolist()
    rows = [
        scalar_block.block(row, extra, lists, block.spec, io, **blocks)
        for row, extra in zip(x.astype(float).tolist(), residuals, strict=True)
    ]
    return tuple(np.array(part) for part in zip(*rows, strict=True))


def _strategies(block):
    return (
        ("selective", "grouped")
        if block.spec.affinity_scale is MODES.NO_SCALE
        else ("selective", "grouped", "all_expert")
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name):
    block, x = small_block(**OPTIONS[name]), tokens(3, 40)
    out, logits, index = _scalar(block, x)
    for strategy in _strategies(block):
        got = block.values(x, strategy=strategy)
        assert_close("logits", got.logits, logits, 1e-12)
        assert_bits_equal("index", got.index, index.astype(np.int32))
        assert_close(strategy, got.out, out, 1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_io_dtype_and_residual(dtype):
    """r is rounded once to the io dtype; the residual enters in float32, before the norm."""
    block, x, residual = small_block(), tokens(3, 40, dtype), tokens(3, 40, dtype, seed=2)
    out, logits, _ = _scalar(block, x, residual)
    got = block.values(x, residual)
    assert_close("logits", got.logits, logits, 1e-12)
    assert_close("out", got.out, out, 1e-12)
    result = block.block("reference")(x, residual=residual, return_router=True)
    assert_bits_equal("out", result.out, out.astype(dtype))
    assert_bits_equal("logits", result.router_logits, logits.astype(dtype))
    assert_bits_equal(
        "residual", result.residual, (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    )


@pytest.mark.parametrize("mode", [MODES.POST_SCALE, MODES.PRE_SCALE])
def test_contiguous_quantisation(mode):
    """32 consecutive elements share a scale; the last block has 8 of H=40 and 1 of I=33."""
    block, x = small_block(affinity_scale=mode, shared=SHARED), tokens(3, 40, ml_dtypes.bfloat16)
    out, _, _ = _scalar(block, x, blocks_h=[range(32), range(32, 40)], blocks_i=[range(32), range(32, 33)])
    for strategy in _strategies(block):
        got = block.values(x, strategy=strategy, numerics=Numerics("mxfp8"))
        assert_close(strategy, got.out, out, 1e-12)
    exact = block.values(x).out
    assert np.linalg.norm(exact - out) > 5e-3 * np.linalg.norm(out), "the quantisation must show"


def test_trainium_quantisation():
    """Blocks by the index formulas: H=1024 in quads of 256, I=80 on 20 lanes of which 3 blocks of 8 exist."""
    hidden, intermediate = 1024, 80
    block = small_block(hidden=hidden, intermediate=intermediate, experts=2, top_k=1, block_order="trainium")
    x = tokens(2, hidden)
    blocks_h = [
        [q * (hidden // 4) + 128 * t + 8 * b + j for q in range(4) for j in range(8)]
        for t in range(2)
        for b in range(16)
    ]
    lanes = 2 * -(-intermediate // 8)
    blocks_i = [
        [q * lanes + p for q in range(4) for p in range(8 * b, min(8 * b + 8, lanes))] for b in range(3)
    ]
    assert sorted(i for b in blocks_i for i in b) == list(range(intermediate))
    out, _, _ = _scalar(block, x, blocks_h=blocks_h, blocks_i=blocks_i)
    assert_close("out", block.values(x, numerics=Numerics("mxfp8")).out, out, 1e-12)


def test_h_rounding():
    """h is rounded to the io dtype before its quantisation, and only then."""
    block, x = small_block(), tokens(3, 40, ml_dtypes.bfloat16)
    plain, rounded = (block.values(x, numerics=Numerics("mxfp8", h)).out for h in (None, "io"))
    assert 0 < np.linalg.norm(plain - rounded) < 2e-2 * np.linalg.norm(plain)


def test_no_scale_all_expert_adds_every_local_expert():
    block, x = small_block(affinity_scale=MODES.NO_SCALE, top_k=6), tokens(3, 40)
    everyone, _, _ = _scalar(block, x)
    few = small_block(affinity_scale=MODES.NO_SCALE, top_k=1)
    few.arrays = block.arrays
    assert_close("out", few.values(x, strategy="all_expert").out, everyone, 1e-12)
