"""Rows apart from one another: masked tokens, NaN and infinite tokens, -1 ids, on every backend."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import moedecode as md
from numeric import assert_bits_equal, assert_close
from small_block import small_block, tokens

BACKENDS = ("reference", "cpu")
STRATEGIES = ("selective", "grouped", "all_expert")
LIMITS = {"lower": -1.0, "upper": 1.0}
DENSE = {"pre_norm": True}
SPARSE = {"pre_norm": False, "score": "sigmoid"}

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("router", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poisoned_rows_poison_only_themselves(backend, strategy, poison, router):
    """A NaN or infinity gives an all-NaN row and ids 0..K-1; the other rows keep their bits."""
    block = small_block(router=router, expert={"gate_clamp": (-1.0, 1.0), "up_clamp": (-1.0, 1.0)})
    run = block.block(backend, strategy=strategy)
    clean = tokens(5, 40, ml_dtypes.bfloat16)
    x = clean.copy()
    x[1, 7] = x[4, 39] = poison
    want, got = (run(v, return_router=True) for v in (clean, x))
    bad, good = [1, 4], [0, 2, 3]
    assert np.isnan(got.out[bad].astype(np.float32)).all()
    assert np.isnan(got.router_logits[bad].astype(np.float32)).all()
    assert (got.expert_index[bad] == [0, 1]).all()
    assert np.isnan(got.affinities[bad][:, :2]).all()
    for part in ("out", "router_logits", "expert_index", "affinities"):
        assert_bits_equal(part, getattr(got, part)[good], getattr(want, part)[good])


def test_an_overflow_in_the_io_dtype_poisons_its_row(backend):
    """s is finite, but r = s * gamma leaves float16."""
    block = small_block()
    block.arrays["gamma"] = np.full(40, 3e4, np.float32)
    x = tokens(3, 40, np.float16)
    x[[0, 2]] = np.sign(x[[0, 2]])  # every r is 3e4 here
    x[1, 1] = 10
    got = block.block(backend)(x, return_router=True)
    for rows in (got.out, got.router_logits):
        assert np.isnan(rows[1]).all()
        assert not np.isnan(rows[[0, 2]]).any()
    assert got.expert_index[1].tolist() == [0, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_poisoned_rows_are_nan_on_every_rank(backend, strategy):
    """Also on a rank that owns none of the ids 0..K-1."""
    x = tokens(3, 40)
    x[1, 0] = np.nan
    out = small_block().block(backend, rank=2, ranks=3, strategy=strategy)(x)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["POST_SCALE", "PRE_SCALE", "NO_SCALE"])
def test_masked_tokens(backend, strategy, mode):
    """A masked token yields zeros, no ids, no affinities, even when it holds NaN; residual_out is still s."""
    scale = md.ExpertAffinityScaleMode[mode]
    block = small_block(expert={"bias": True}, shared=md.ExpertSpec(9), affinity_scale=scale)
    run = block.block(backend, strategy=strategy)
    x, residual = tokens(5, 40, ml_dtypes.bfloat16), tokens(5, 40, ml_dtypes.bfloat16, seed=2)
    want = run(x, residual=residual, return_router=True)
    mask = np.array([True, False, True, True, False])
    x[4, 3] = np.nan
    got = run(x, residual=residual, return_router=True, token_mask=mask, out=np.full_like(x, 3))
    for part in ("out", "router_logits", "affinities"):
        assert not getattr(got, part)[~mask].astype(np.float32).any(), part
    assert (got.expert_index[~mask] == -1).all()
    for part in ("out", "router_logits", "affinities", "expert_index"):
        assert_bits_equal(part, getattr(got, part)[mask], getattr(want, part)[mask])
    s = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    same = (got.residual == s) | (np.isnan(s.astype(np.float32)) & np.isnan(got.residual.astype(np.float32)))
    assert same.all()


def test_every_token_masked(backend):
    out = small_block().block(backend)(
        tokens(3, 40), token_mask=np.zeros(3, bool), out=np.full((3, 40), 5, np.float32)
    )
    assert not out.any()


def _flat(block):
    a = block.arrays
    return np.stack([a["gate"], a["up"]], 1).transpose(0, 3, 1, 2), a["down"].swapaxes(1, 2)


@pytest.mark.parametrize("strategy", ["selective", "grouped"])
@pytest.mark.parametrize("mode", ["POST_SCALE", "PRE_SCALE", "NO_SCALE"])
def test_minus_one_means_no_expert(backend, strategy, mode):
    """-1 adds nothing: with the id in its place the other slot alone remains."""
    gate_up, down = _flat(small_block())
    x, affinities = tokens(3, 40), np.random.default_rng(3).random((3, 6), np.float32)
    options = {"expert_affinities_scaling_mode": mode, "strategy": strategy, "backend": backend}
    both = md.moe_tkg(x, gate_up, down, affinities, np.array([[-1, 4], [2, -1], [-1, -1]]), False, **options)
    want = md.moe_tkg(x[:2], gate_up, down, affinities[:2], np.array([[4], [2]]), False, **options)
    assert_bits_equal("rows with one expert", both[:2], want)
    assert not both[2].any()


@pytest.mark.parametrize("mode", ["POST_SCALE", "PRE_SCALE", "NO_SCALE"])
@pytest.mark.parametrize("strategy", ["selective", "grouped"])
def test_an_id_that_stands_twice_counts_twice(backend, mode, strategy):
    gate_up, down = _flat(small_block())
    x, affinities = tokens(2, 40), np.random.default_rng(3).random((2, 6), np.float32)
    options = {"expert_affinities_scaling_mode": mode, "strategy": strategy, "backend": backend}
    once = md.moe_tkg(x, gate_up, down, affinities, np.array([[3], [5]]), False, **options)
    twice = md.moe_tkg(x, gate_up, down, affinities, np.array([[3, 3], [5, 5]]), False, **options)
    assert_close("twice", twice, 2 * once.astype(np.float64), 1e-6)


def test_an_id_that_stands_twice_counts_twice_in_all_expert(backend):
    gate_up, down = _flat(small_block())
    x, affinities = tokens(2, 40), np.random.default_rng(3).random((2, 6), np.float32)
    options = {
        "expert_affinities_scaling_mode": "POST_SCALE",
        "mask_unselected_experts": True,
        "backend": backend,
    }
    once, twice = (
        md.moe_tkg(x, gate_up, down, affinities, np.array(ids), True, rank_id=0, **options)
        for ids in ([[3], [5]], [[3, 3], [5, 5]])
    )
    assert_close("twice", twice, 2 * once.astype(np.float64), 1e-6)


def test_nan_logits_lose(backend):
    """A NaN selection score counts as -inf: an expert with NaN router weights is chosen last."""
    block = small_block(top_k=5, router={"pre_norm": False})
    block.arrays["router"][2, 0] = np.nan
    index = block.block(backend)(tokens(4, 40), return_router=True).expert_index
    assert not (index == 2).any()


def test_nan_ties_with_minus_infinity(backend):
    """Both lose, and between them the lowest id goes first."""
    x = np.ones((1, 4), np.float32)
    w = np.zeros((4, 3), np.float32)
    w[0, 0] = np.nan
    bias = np.array([[0, -np.inf, 1]], np.float32)
    options = {"act_fn": "SIGMOID", "k": 3, "router_pre_norm": False, "backend": backend}
    assert md.router_topk(x, w, bias, **options)[1].tolist() == [[2, 0, 1]]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_rows_of_the_norm_and_the_experts(backend, poison):
    """The parts alone: a row with a NaN or an infinity becomes NaN, whatever a clamp could hide."""
    x = tokens(3, 40)
    x[1, 5] = poison
    normed = md.rmsnorm_tkg(x, None, backend=backend)
    gate_up, down = _flat(small_block())
    index, affinities = np.array([[0, 1]] * 3), np.ones((3, 6), np.float32)
    clamps = {f"{part}_clamp_{side}_limit": v for part in ("gate", "up") for side, v in LIMITS.items()}
    out = md.moe_tkg(x, gate_up, down, affinities, index, False, **clamps, backend=backend)
    for name, rows in (("rmsnorm", normed), ("out", out)):
        assert np.isnan(rows[1]).all(), name
        assert np.isfinite(rows[[0, 2]]).all(), name


@pytest.mark.parametrize("score", ["SIGMOID", "SOFTMAX"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_saturated_scores_keep_their_order(backend, score, pre_norm):
    """Logits of 60 and 200 score 1 alike in float32 under a sigmoid; the larger logit still wins."""
    w = np.array([[60, 200, 100, -300]], np.float32)
    options = {"router_pre_norm": pre_norm, "backend": backend}
    index = md.router_topk(np.ones((1, 1), np.float32), w, None, score, 4, **options)[1]
    assert index.tolist() == [[1, 2, 0, 3]]
