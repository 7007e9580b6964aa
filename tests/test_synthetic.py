"""Synthetic weights: seeded, the same when asked again, sliced like ranks, with scales that vary."""

from dataclasses import replace

import numpy as np
import pytest

from moedecode import ExpertSpec, InvalidInput, WeightFormat, presets
from moedecode.synthetic import FP8_SCALES, block_weights, expert_weights, tokens

SPEC = ExpertSpec(intermediate=160, bias=True)
FORMATS = [pytest.param(fmt, id=fmt.value) for fmt in WeightFormat]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_order", ["contiguous", "trainium"])
def test_an_expert_asked_for_again_is_the_same_and_experts_differ(fmt, block_order):
    weights = expert_weights(SPEC, 512, 3, fmt, seed=5, block_order=block_order)
    first, again, other = weights.expert(1), weights.expert(1), weights.expert(2)
    for name in ("gate", "up", "down"):
        values = getattr(first, name).values()
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values, getattr(again, name).values())
        assert (values != getattr(other, name).values()).mean() > 0.5
    assert (first.gate.values() != first.up.values()).mean() > 0.5


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("fp8_scale", FP8_SCALES)
def test_scales_vary_and_products_stay_near_one(fmt, fp8_scale):
    weights = expert_weights(SPEC, 512, 1, fmt, fp8_scale=fp8_scale)
    matrix = weights.expert(0).gate
    if fmt.is_mx or (fmt.is_fp8 and fp8_scale != "tensor"):
        assert len(np.unique(matrix.scale)) > 2
    assert 0.5 < matrix.values().std() * np.sqrt(512) < 2.5


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_rank_holds_a_slice_of_the_whole(fmt):
    whole = expert_weights(SPEC, 128, 4, fmt, seed=2)
    rank = expert_weights(SPEC, 128, 2, fmt, seed=2, first_expert=2)
    for e in range(2):
        np.testing.assert_array_equal(rank.expert(e).down.values(), whole.expert(2 + e).down.values())
    for name in ("gate_bias", "up_bias", "down_bias"):
        np.testing.assert_array_equal(getattr(rank, name), getattr(whole, name)[2:])


def test_trainium_padding_is_code_zero():
    for fmt in (WeightFormat.MXFP4, WeightFormat.MXFP8_E4M3, WeightFormat.BF16):
        weights = expert_weights(ExpertSpec(45), 512, 1, fmt, block_order="trainium")
        padding = weights.intermediate_order.gather < 0
        assert padding.any() and (weights.expert(0).down.values()[:, padding] == 0).all()


def test_block_weights_have_what_the_spec_says_and_nothing_else():
    for name in ("gpt-oss-20b", "glm-4.5-air", "qwen2-57b-a14b", "mixtral-8x7b"):
        spec = presets[name]
        small = ExpertSpec(64, bias=spec.experts.bias)
        spec = replace(spec, hidden=128, experts=small, shared=spec.shared and small)
        weights = block_weights(spec, WeightFormat.BF16)
        assert (weights.router_bias is not None) == spec.router.bias
        assert (weights.selection_bias is not None) == spec.router.selection_bias
        assert (weights.shared is not None) == (spec.shared is not None)
        assert (weights.shared_gate is not None) == spec.shared_gate
        assert (weights.experts.gate_bias is not None) == spec.experts.bias


def test_tokens_are_seeded_and_may_have_outlier_channels():
    np.testing.assert_array_equal(tokens(4, 256, seed=1), tokens(4, 256, seed=1))
    assert (tokens(4, 256, seed=1) != tokens(4, 256, seed=2)).any()
    plain, large = (tokens(8, 2048, "float32", outlier_size=size) for size in (1.0, 8.0))
    grown = large[0] == 8 * plain[0]
    assert 5 < grown.sum() < 60


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"fp8_scale": "column"}, "fp8_scale='column'.*tensor, row, block"),
        ({"block_order": "odd"}, "block_order='odd'"),
    ],
)
def test_unknown_choices_are_refused(kwargs, message):
    with pytest.raises(InvalidInput, match=message):
        expert_weights(SPEC, 512, 1, WeightFormat.FP8_E4M3, **kwargs)


def test_mxfp4_needs_even_sizes():
    with pytest.raises(InvalidInput, match="share a byte"):
        expert_weights(ExpertSpec(45), 512, 1, WeightFormat.MXFP4).expert(0)
