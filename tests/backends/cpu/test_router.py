"""The router of the cpu backend against the reference: every option, ties, saturation, bad rows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import moedecode as md
from blocks import NEAR_TIE, selection_gap
from moedecode.arrays import IO_DTYPES
from moedecode.backends.cpu import CpuBackend
from moedecode.backends.reference import ReferenceBackend, maths
from moedecode.synthetic import tokens
from numeric import assert_bits_equal, assert_close

CPU, REFERENCE = CpuBackend(), ReferenceBackend()
ROUNDED = {"float32": 2e-5, "bfloat16": 4e-3, "float16": 1e-3}


def _draw(experts, hidden, dtype, count=40):
    rng = np.random.default_rng(experts)
    weight = (rng.standard_normal((experts, hidden)) * 2 / hidden**0.5).astype(IO_DTYPES[dtype])
    return tokens(count, hidden, dtype), weight, rng.standard_normal(experts).astype(np.float32)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", list(IO_DTYPES))
def test_every_combination(score, dtype, isa):
    """pre_norm x norm_topk_prob x norm_eps x scale x bias x selection_bias x matmul_dtype x sizes."""
    sizes = ((8, 2, 64), (7, 7, 90), (33, 1, 40), (128, 8, 32))
    options = itertools.product(
        sizes, (True, False), (True, False), (0.0, 1e-2), (1.0, 2.5), (True, False), (True, False), IO_DTYPES
    )
    near, seen = 0, 0
    for (experts, k, hidden), pre, normalise, eps, scale, bias, chooses, matmul in options:
        if (experts, scale, eps) in ((33, 2.5, 0.0), (128, 1.0, 1e-2)):
            continue  # these two differ in nothing but numbers already covered
        spec = md.RouterSpec(experts, k, score, pre, normalise, eps, bias, chooses, scale, matmul)
        x, weight, biases = _draw(experts, hidden, dtype)
        arrays = {"router": weight, "router_bias": biases if bias else None}
        arrays["selection_bias"] = 0.3 * biases[::-1].copy() if chooses else None
        logits, index, affinities = maths.route(x, *arrays.values(), spec)
        clear = selection_gap(spec, SimpleNamespace(**arrays), x) > NEAR_TIE
        near, seen = near + (~clear).sum(), seen + len(x)
        got = CPU.router(x, *arrays.values(), spec)
        name = f"{spec!r}"
        bound = ROUNDED[dtype]
        assert_close(f"logits {name}", got.logits.astype(np.float64), logits, bound, bound)
        assert np.array_equal(np.sort(got.index[clear]), np.sort(index[clear])), name
        wide = np.diff(-np.sort(-np.take_along_axis(logits, index, -1)), axis=-1)
        ordered = clear & (wide < -NEAR_TIE).all(-1) if not chooses else np.zeros(len(x), bool)
        assert np.array_equal(got.index[ordered], index[ordered]), f"order of {name}"
        assert_close(f"affinities {name}", got.affinities[clear], affinities[clear], 2e-5, 2e-5)
        zero = affinities[clear] == 0
        assert not got.affinities[clear][zero].any(), name
    assert near < 0.05 * seen, f"{near} of {seen} rows nearly tie"


def test_ties_go_to_the_lowest_id(isa):
    """Equal logits, and rows of the weight that stand twice: the same bits, so the lower id comes first."""
    x, weight, _ = _draw(64, 48, "float32")
    for experts in (5, 16, 64):
        for pre, score in itertools.product((True, False), ("softmax", "sigmoid")):
            spec = md.RouterSpec(experts, 4, score, pre, matmul_dtype="float32")
            zero = CPU.router(x, np.zeros((experts, 48), np.float32), None, None, spec)
            assert (zero.index == np.arange(4)).all()
    twice = np.concatenate([weight[:20], weight[:20]])
    index = CPU.router(x, twice, None, None, md.RouterSpec(40, 8, matmul_dtype="float32")).index
    assert (index[:, ::2] < 20).all()
    assert_bits_equal("twins", index[:, 1::2], index[:, ::2] + 20)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_saturated_scores_still_order_as_their_logits(score):
    """Scores that round to 1 or to 0 are no ties: the larger logit wins, as in exact arithmetic."""
    bias = np.float32([20, 30, 25, -200, -150, 40])
    spec = md.RouterSpec(6, 5, score, bias=True, matmul_dtype="float32")
    arrays = (np.ones((1, 4), np.float32), np.zeros((6, 4), np.float32), bias, None, spec)
    want = REFERENCE.router(*arrays)
    got = CPU.router(*arrays)
    assert got.index.tolist() == want.index.tolist() == [[5, 1, 2, 0, 4]]
    np.testing.assert_allclose(got.affinities, want.affinities, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 70000.0])
def test_rows_that_are_not_finite(bad, isa):
    """No finite logit (70000 has no float16), distinct ids in range; the other rows keep their bits."""
    x, weight, _ = _draw(16, 48, "float32")
    for pre, normalise, score in itertools.product((True, False), (True, False), ("softmax", "sigmoid")):
        spec = md.RouterSpec(16, 3, score, pre, normalise, matmul_dtype="float16")
        clean = CPU.router(x, weight, None, None, spec)
        poisoned = x.copy()
        poisoned[5, 47] = bad
        got = CPU.router(poisoned, weight, None, None, spec)
        assert not np.isfinite(got.logits[5]).any()
        assert len(set(got.index[5].tolist()) & set(range(16))) == 3
        if np.isnan(bad):
            assert np.isnan(got.logits[5]).all()
            assert got.index[5].tolist() == [0, 1, 2]
        rest = np.arange(len(x)) != 5
        for part in ("logits", "index", "affinities"):
            assert_bits_equal(part, getattr(got, part)[rest], getattr(clean, part)[rest])


@pytest.mark.parametrize("place", ["weight", "bias"])
def test_an_expert_whose_logit_is_nan_comes_last(place):
    x, weight, bias = _draw(8, 40, "float32")
    weight, bias = weight.copy(), bias.copy()
    (weight if place == "weight" else bias)[4] = np.nan
    for pre, score in itertools.product((True, False), ("softmax", "sigmoid")):
        spec = md.RouterSpec(8, 3, score, pre, bias=True, matmul_dtype="float32")
        got, want = (b.router(x, weight, bias, None, spec) for b in (CPU, REFERENCE))
        assert (got.index != 4).all()
        assert_bits_equal(f"{pre} {score}", got.index, want.index)
        np.testing.assert_array_equal(np.isnan(got.affinities), np.isnan(want.affinities))


def test_no_tokens():
    _, weight, _ = _draw(8, 40, "float32")
    got = CPU.router(np.empty((0, 40), np.float32), weight, None, None, md.RouterSpec(8, 3))
    assert (got.logits.shape, got.index.shape, got.affinities.shape) == ((0, 8), (0, 3), (0, 8))


def test_the_weight_may_lie_anyhow():
    """Transposed, reversed and read-only weights are read in place."""
    x, weight, _ = _draw(8, 40, "float32")
    spec = md.RouterSpec(8, 3)
    want = CPU.router(x, weight, None, None, spec)
    transposed = np.ascontiguousarray(weight.T).T
    reversed_ = np.ascontiguousarray(weight[::-1, ::-1])[::-1, ::-1]
    frozen = weight.copy()
    frozen.flags.writeable = False
    spread = np.zeros((16, 80), np.float32)[::2, ::2]
    spread[...] = weight
    for other in (transposed, reversed_, frozen, spread):
        assert_bits_equal("logits", CPU.router(x, other, None, None, spec).logits, want.logits)
