"""Valid arguments of the flat functions, small and random, to be changed one at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from moedecode.formats import WeightFormat, hidden_order, quantise_mx

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 4, 64, 48, 6, 2


def _normal(shape, dtype, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def plain_experts(experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, dtype=ml_dtypes.bfloat16):
    """gate_up ``[E, H, 2, I]`` and down ``[E, I, H]``."""
    return {
        "expert_gate_up_weights": _normal((experts, hidden, 2, intermediate), dtype, 1, hidden**-0.5),
        "expert_down_weights": _normal((experts, intermediate, hidden), dtype, 2, intermediate**-0.5),
    }


def fp8_experts(per_row=True):
    """Plain experts in float8_e4m3fn with float32 scales per row or per tensor."""
    weights = plain_experts(dtype=np.float32)
    weights = {name: (w * 16).astype(ml_dtypes.float8_e4m3fn) for name, w in weights.items()}
    scale = np.random.default_rng(5)
    shapes = ((EXPERTS, 2, INTERMEDIATE if per_row else 1), (EXPERTS, HIDDEN if per_row else 1))
    for name, shape in zip(
        ("expert_gate_up_weights_scale", "expert_down_weights_scale"), shapes, strict=True
    ):
        weights[name] = (scale.random(shape) / 16).astype(np.float32)
    return weights


def mx_experts(experts=2, hidden=512, intermediate=64):
    """Random MXFP4 experts in the Trainium layout, with their scales."""
    rng = np.random.default_rng(3)
    lanes, tiles = 8 * -(-intermediate // 32), -(-intermediate // 512)

    def codes(*shape):
        return rng.integers(0, 2**16, shape, np.uint16)

    def scales(*shape):
        return rng.integers(118, 122, shape, np.uint8)

    return {
        "expert_gate_up_weights": codes(experts, 128, 2, hidden // 512, intermediate),
        "expert_down_weights": codes(experts, lanes, tiles, hidden),
        "expert_gate_up_weights_scale": scales(experts, 16, 2, hidden // 512, intermediate),
        "expert_down_weights_scale": scales(experts, -(-lanes // 8), tiles, hidden),
    }


def block_arguments(weights=None, hidden=HIDDEN, experts=EXPERTS, dtype=ml_dtypes.bfloat16, **changes):
    """Arguments of moe_block_tkg."""
    arguments = {
        "inp": _normal((2, TOKENS // 2, hidden), dtype, 10),
        "gamma": _normal((1, hidden), dtype, 11),
        "router_weights": _normal((hidden, experts), dtype, 12, hidden**-0.5),
        **(plain_experts(experts, hidden, dtype=dtype) if weights is None else weights),
        "top_k": TOP_K,
        "router_act_fn": "SOFTMAX",
        "expert_affinities_scaling_mode": "POST_SCALE",
        "router_mm_dtype": "float32",
    }
    return arguments | changes


def moe_arguments(weights=None, hidden=HIDDEN, experts=EXPERTS, dtype=ml_dtypes.bfloat16, **changes):
    """Arguments of moe_tkg."""
    rng = np.random.default_rng(20)
    arguments = {
        "hidden_input": _normal((TOKENS, hidden), dtype, 10),
        **(plain_experts(experts, hidden, dtype=dtype) if weights is None else weights),
        "expert_affinities": rng.random((TOKENS, experts)).astype(np.float32),
        "expert_index": np.array([rng.permutation(experts)[:TOP_K] for _ in range(TOKENS)], np.int32),
        "is_all_expert": False,
        "expert_affinities_scaling_mode": "POST_SCALE",
    }
    return arguments | changes


def quantised_hidden(hidden):
    """``[T, H]`` as uint32 ``[128, H/512, T]`` and E8M0 ``[16, H/512, T]``."""
    count, width = hidden.shape
    stored = hidden_order("trainium", width).apply(hidden.astype(np.float64))
    codes, scales = quantise_mx(stored, WeightFormat.MXFP8_E4M3)
    packed = codes.view("<u4").reshape(count, width // 512, 128)
    return np.ascontiguousarray(packed.T), np.ascontiguousarray(scales.reshape(count, width // 512, 16).T)
