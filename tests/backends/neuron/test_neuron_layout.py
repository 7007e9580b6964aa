"""Weights in the kernel's layout: what the packed tensors are worth, read back by the rules of the layout.

The MLP of every expert, computed by the reference from the converted tensors with the hidden axis in the
kernel's order, must equal that of the weights it came from: codes, scales, blocks and biases are where they
belong.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import moedecode as md
from moedecode.backends import Numerics
from moedecode.backends.neuron.layout import (
    fold_offset,
    kernel_experts,
    padded_hidden,
    permuted,
    restored,
    shared_tensors,
)
from moedecode.backends.reference import maths
from moedecode.formats import WeightFormat
from moedecode.synthetic import expert_weights
from numeric import assert_close
from refusals import assert_refused
from trainium_layout import TRAINIUM_NAMES, trainium_pack

SPEC = md.ExpertSpec(
    72, activation="swish", up_offset=1.0, up_clamp=(-0.5, 0.75), gate_clamp=(None, 1.0), bias=True
)
SHAPES = [
    pytest.param(2880, 360, id="gpt-oss, one shard of eight"),
    pytest.param(512, 45, id="odd I"),
    pytest.param(96, 46, id="H far below a tile"),
    pytest.param(1024, 1100, id="three tiles of I, the last a rest"),
]
MX = [fmt for fmt in WeightFormat if fmt.is_mx]


def drawn(fmt, hidden, intermediate, *, block_order="contiguous", experts=2, **options):
    spec = replace(SPEC, intermediate=intermediate)
    weights = expert_weights(spec, hidden, experts, fmt, seed=3, block_order=block_order, **options)
    return spec, weights


def read_back(packed):
    """Converted tensors as weights again."""
    if packed.fmt.is_mx:
        name = TRAINIUM_NAMES[packed.fmt]
        return md.ExpertWeights.from_trainium(
            packed.gate_up, packed.down, packed.gate_up_scale, packed.down_scale,
            hidden=packed.padded, intermediate=packed.intermediate,
            gate_up_bias=packed.gate_up_bias, down_bias=packed.down_bias, dtype=name,
        )  # fmt: skip
    return md.ExpertWeights.from_flat(
        packed.gate_up, packed.down, gate_up_scale=packed.gate_up_scale, down_scale=packed.down_scale,
        gate_up_bias=packed.gate_up_bias, down_bias=packed.down_bias,
    )  # fmt: skip


def mlp(x, weights, e, spec, numerics):
    return maths.expert_mlp(
        x, weights, e, replace(spec, intermediate=weights.intermediate), numerics, np.float32
    )


def assert_same_experts(weights, packed, spec, precision):
    numerics = Numerics(precision, None)
    x = np.random.default_rng(1).standard_normal((3, weights.hidden))
    back = read_back(packed)
    for e in range(weights.num_experts):
        want = mlp(x, weights, e, spec, numerics)
        got = restored(mlp(permuted(x, packed.hidden_map), back, e, spec, numerics), packed)
        assert_close(f"expert {e}", got, want, 1e-12)


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_mx_checkpoints_keep_codes_scales_and_blocks(fmt, hidden, intermediate):
    intermediate += fmt is WeightFormat.MXFP4 and intermediate % 2  # two elements share a byte
    spec, weights = drawn(fmt, hidden, intermediate)
    packed = kernel_experts(weights)
    assert packed.padded % 512 == 0 and packed.intermediate % 8 == 0
    assert_same_experts(weights, packed, spec, "mxfp8")


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize(("intermediate", "want"), [(76, 76), (77, 80), (530, 536)])
def test_mx_in_trainium_order_keeps_its_order(fmt, intermediate, want):
    """Only an I that leaves a quad of a lane empty gets columns of zeros."""
    spec, weights = drawn(fmt, 1024, intermediate, block_order="trainium")
    packed = kernel_experts(weights)
    assert packed.hidden_map is None and packed.intermediate == want
    assert_same_experts(weights, packed, spec, "mxfp8")


@pytest.mark.parametrize("fmt", MX)
def test_packed_tensors_are_taken_without_a_copy(fmt):
    tensors, _, _ = trainium_pack(fmt, 2, 512, 40, np.random.default_rng(0))
    gate_up, down, gate_up_scale, down_scale = tensors
    weights = md.ExpertWeights.from_trainium(*tensors, hidden=512, intermediate=40, dtype=TRAINIUM_NAMES[fmt])
    packed = kernel_experts(weights)
    assert np.shares_memory(packed.gate_up, gate_up) and np.shares_memory(packed.down, down)
    assert np.shares_memory(packed.gate_up_scale, gate_up_scale)
    assert np.shares_memory(packed.down_scale, down_scale)


def test_packed_tensors_with_an_odd_intermediate_get_columns_of_zeros():
    fmt = WeightFormat.MXFP4
    tensors, _, _ = trainium_pack(fmt, 2, 512, 45, np.random.default_rng(0))
    bias = np.random.default_rng(1).standard_normal((2, 16, 2, 1, 4)).astype(np.float32)
    weights = md.ExpertWeights.from_trainium(
        *tensors, hidden=512, intermediate=45, dtype=TRAINIUM_NAMES[fmt], gate_up_bias=bias
    )
    packed = kernel_experts(weights)
    assert packed.gate_up.shape[-1] == 48 and np.shares_memory(packed.down, tensors[1])
    assert_same_experts(weights, packed, md.ExpertSpec(45, activation="relu"), "mxfp8")


@pytest.mark.parametrize("fmt", [fmt for fmt in WeightFormat if not fmt.is_mx])
@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("block_order", ["contiguous", "trainium"])
def test_plain_weights_in_natural_order_with_padded_hidden(fmt, scale, block_order):
    hidden = 512 if block_order == "trainium" else 300
    spec, weights = drawn(fmt, hidden, 45, block_order=block_order, fp8_scale=scale)
    packed = kernel_experts(weights)
    assert packed.gate_up.shape == (2, 512, 2, 45) and packed.down.shape == (2, 45, 512)
    assert_same_experts(weights, packed, spec, "a16")


def test_only_the_named_experts_are_read():
    _, weights = drawn(WeightFormat.MXFP4, 512, 48, experts=4)
    asked = []
    watched = replace(weights, expert=lambda e: asked.append(e) or weights.expert(e))
    packed, whole = kernel_experts(watched, [1, 3]), kernel_experts(weights)
    assert asked == [1, 3]
    assert np.array_equal(packed.gate_up[1::2], whole.gate_up[1::2]) and not packed.gate_up[::2].any()


@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.BF16])
@pytest.mark.parametrize("biased", [True, False])
def test_an_up_offset_moves_into_bias_and_clamp(fmt, biased):
    spec, weights = drawn(fmt, 512, 48)
    if not biased:
        weights = replace(weights, gate_bias=None, up_bias=None, down_bias=None)
    folded, plain = fold_offset(kernel_experts(weights), spec)
    assert plain.up_offset == 0 and plain.up_clamp == (0.5, 1.75)
    x = np.random.default_rng(1).standard_normal((3, 512))
    numerics = Numerics("mxfp8" if fmt.is_mx else "a16", None)
    want = mlp(x, weights, 0, spec, numerics)
    got = restored(mlp(permuted(x, folded.hidden_map), read_back(folded), 0, plain, numerics), folded)
    assert_close("expert 0", got, want, 1e-5)  # the moved bias is a float32 sum


def test_block_scales_have_no_place_in_the_kernel():
    _, weights = drawn(WeightFormat.FP8_E4M3, 256, 128, fp8_scale="block")
    assert_refused(
        lambda: kernel_experts(weights), md.UnsupportedConfig, ("weights=fp8_e4m3", "128x128", "row scales")
    )


def test_biases_are_narrowed_only_where_nothing_is_lost():
    _, weights = drawn(WeightFormat.BF16, 256, 48)
    assert kernel_experts(weights).down_bias.dtype == np.float32
    rounded = weights.down_bias.astype(WeightFormat.BF16.element)
    narrow = kernel_experts(replace(weights, down_bias=rounded.astype(np.float32))).down_bias
    assert narrow.dtype == rounded.dtype and np.array_equal(narrow, rounded)


@pytest.mark.parametrize(
    ("hidden", "fmt", "want"),
    [
        (2880, WeightFormat.MXFP4, 3072),
        (2880, WeightFormat.BF16, 3072),
        (2560, WeightFormat.BF16, 2560),
        (4096, WeightFormat.MXFP8_E4M3, 4096),
        (1, WeightFormat.FP16, 256),
    ],
)
def test_hidden_is_padded_to_what_the_kernel_tiles(hidden, fmt, want):
    assert padded_hidden(hidden, fmt) == want


def test_a_shared_expert_is_dequantised_exactly():
    _, weights = drawn(WeightFormat.MXFP4, 96, 48, experts=1)
    _, experts = drawn(WeightFormat.MXFP4, 96, 48)
    packed = kernel_experts(experts)
    tensors = shared_tensors(weights, packed)
    assert {t.dtype for n, t in tensors.items() if n.endswith("_w")} == {WeightFormat.BF16.element}
    gate = weights.expert(0).gate.values()[:, :96]
    assert np.array_equal(restored(tensors["shared_expert_gate_w"].T, packed).astype(float), gate)
    down = weights.expert(0).down.values()[:, :48]
    assert np.array_equal(restored(tensors["shared_expert_down_w"], packed).astype(float), down.T)
