"""The leaves for weights without block scales, on the model, against the float64 reference.

float32 activations show the arithmetic itself (2e-5); 16-bit ones add the rounding of h and of the output.
Memory is poisoned, so a value that nobody wrote shows as NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_probe import assert_read_once
from mx_leaves import dense, gpt_oss_spec, routing
from plain_leaves import BF16, BOUND, E4M3, E4M3_IEEE, FP16, FP32, NO, POST, random_experts, run_leaf, want

from moedecode.neuron.kernels import plain_expert
from moedecode.neuron.machine import StandIn
from moedecode.spec import ExpertSpec
from numeric import assert_close

LEAVES = ("selective", "all_expert")


def inputs(leaf, tokens, hidden, experts, k, io):
    x = np.random.default_rng(tokens + hidden).normal(size=(tokens, hidden)).astype(io)
    index, affinities = routing(tokens, k, experts)
    return x, index, dense(index, affinities, experts) if leaf == "all_expert" else affinities


def check(leaf, tokens, hidden, i, experts, k, io, dtype, mode=POST, spec=None, **options):
    made = {key: options.pop(key) for key in ("bias", "per_tensor") if key in options}
    weights = random_experts(experts, hidden, i, dtype, **made)
    spec = spec or ExpertSpec(intermediate=i, activation="silu", bias=True)
    given = inputs(leaf, tokens, hidden, experts, k, io)
    out, report = run_leaf(leaf, weights, *given, spec, mode, **options)
    assert_close("out", out, want(leaf, weights, *given, spec, mode), BOUND[io])
    return report


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("tokens, hidden, i, experts, k, why", [
    (1, 256, 64, 4, 2, "one token, one ragged I-tile: gate and up share the PE"),
    (1, 256, 64, 4, 1, "one unit of work: the cores split I"),
    (3, 384, 200, 5, 3, "H/128 odd, I ragged, odd T, E prime"),
    (2, 256, 1, 3, 1, "I = 1: one core has no column of a split expert"),
    (7, 256, 288, 3, 3, "K = E, ragged tile of 32 columns"),
    (5, 512, 300, 11, 5, "T = K, odd number of items"),
    (130, 256, 40, 3, 2, "more than 128 tokens, the last tile of 2"),
], ids=lambda v: v if isinstance(v, str) else None)  # fmt: skip
def test_shapes(leaf, tokens, hidden, i, experts, k, why):
    check(leaf, tokens, hidden, i, experts, k, FP32, FP32, spec=gpt_oss_spec(i))


@pytest.mark.parametrize("io", [FP32, FP16], ids=lambda io: io.name)
@pytest.mark.parametrize("tokens, i", [(600, 160), (140, 420)], ids=["tokens", "columns"])
def test_more_than_one_matmul_can_move(tokens, i, io):
    """Beyond 512 tokens, and beyond what I-tiles times tokens a PSUM bank holds."""
    check("all_expert", tokens, 256, i, 2, 2, io, io, spec=gpt_oss_spec(i))


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dtype", [FP32, E4M3], ids=lambda d: d.name)
def test_an_expert_in_many_loads(leaf, dtype, monkeypatch):
    """Loads of one I-tile, and of one block of H, as large experts need them."""
    monkeypatch.setattr(plain_expert, "LOAD_BYTES", 1)
    check(leaf, 3, 384, 300, 3, 2, FP32, dtype, spec=gpt_oss_spec(300))


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("io, dtype, options", [
    (BF16, BF16, {}), (FP16, FP16, {}), (FP32, BF16, {}), (BF16, E4M3, {}), (FP16, E4M3, {}),
    (FP32, E4M3, {}),
    (FP32, E4M3, {"per_tensor": True}), (BF16, E4M3_IEEE, {"chip": "trn2"}), (BF16, BF16, {"chip": "trn2"}),
    (BF16, BF16, {"bias": False}), (FP32, E4M3, {"bias": False}), (FP32, FP32, {"cores": 1}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("mode", [POST, NO], ids=lambda m: m.name)
def test_formats(leaf, io, dtype, options, mode):
    check(leaf, 3, 256, 160, 5, 3, io, dtype, mode, gpt_oss_spec(160), **options)


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("spec", [
    {"activation": "silu"}, {"activation": "swish", "alpha": 1.702}, {"activation": "swish", "alpha": 0.7},
    {"activation": "gelu"}, {"activation": "gelu_tanh"}, {"activation": "silu", "up_offset": 0.5},
    {"activation": "silu", "gate_clamp": (-0.3, None)}, {"activation": "silu", "up_clamp": (None, 0.2)},
    {"activation": "silu", "gate_clamp": (-1.0, 0.5), "up_clamp": (-0.5, 1.0), "up_offset": 1.0},
], ids=str)  # fmt: skip
def test_activations(leaf, spec):
    check(leaf, 2, 256, 144, 3, 2, FP32, FP32, spec=ExpertSpec(intermediate=144, bias=True, **spec))


@pytest.mark.parametrize("leaf", LEAVES)
def test_small_affinities_keep_their_bits_in_float16(leaf):
    """h times an affinity of 1e-6 is below what float16 resolves: there the affinity meets y instead."""
    weights = random_experts(3, 256, 128, FP16, bias=False)
    x, index, affinities = inputs(leaf, 4, 256, 3, 2, FP16)
    x, affinities = x * FP16.type(0.25), affinities * np.float32(1e-4)
    spec = ExpertSpec(intermediate=128, activation="silu")
    expected = want(leaf, weights, x, index, affinities, spec, POST)
    out, _ = run_leaf(leaf, weights, x, index, affinities, spec, POST)
    assert np.abs(expected).max() < 1e-4
    assert np.abs(out.astype(np.float64) - expected).max() < 2**-24  # half a step of the smallest float16


def test_a_repeated_id_counts_twice():
    weights = random_experts(4, 256, 96, FP32)
    spec = ExpertSpec(intermediate=96, activation="silu", bias=True)
    x, index, affinities = inputs("selective", 3, 256, 4, 2, FP32)
    index[1] = 2
    out, _ = run_leaf("selective", weights, x, index, affinities, spec, POST)
    assert_close("out", out, want("selective", weights, x, index, affinities, spec, POST), BOUND[FP32])


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("tokens, k", [(1, 1), (1, 3), (4, 2), (3, 3)])
def test_no_byte_of_a_weight_is_read_twice(leaf, tokens, k):
    """Every expert is chosen (T*K = E) or local, so each tensor is read exactly once per chip."""
    experts = tokens * k
    weights = random_experts(experts, 256, 192, E4M3)
    x, _, affinities = inputs(leaf, tokens, 256, experts, k, BF16)
    index = np.arange(experts, dtype=np.uint32).reshape(tokens, k)
    spec = ExpertSpec(intermediate=192, activation="silu", bias=True)
    out, report = run_leaf(leaf, weights, x, index, affinities, spec, POST)
    assert np.isfinite(out.astype(np.float32)).all()
    assert_read_once(report, *(row.name for row in report.rows if row.kind == "input"))
    inputs_read = [row for row in report.rows if row.kind == "input"]
    both = sum(row.read[0] for row in inputs_read), sum(row.read[1] for row in inputs_read)
    assert max(both) <= 0.56 * sum(both), f"the cores read {both}: not shared evenly"


def test_the_cores_need_the_same_time_when_experts_are_even():
    weights = random_experts(4, 512, 256, BF16)
    tensors = {name: None if a is None else StandIn(a.shape, a.dtype) for name, a in weights.tensors.items()}
    weights.tensors.update(tensors)
    given = inputs("all_expert", 64, 512, 4, 2, BF16)
    spec = ExpertSpec(intermediate=256, activation="silu", bias=True)
    _, report = run_leaf("all_expert", weights, *given, spec, POST, compute=False)
    first, second = (report.timeline.bounds(core)["tensor"] for core in (0, 1))
    assert abs(first - second) <= 0.02 * first
