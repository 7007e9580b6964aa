"""The five invariants of the cpu backend, bit by bit, for every stored format, precision and instruction set.

A token's output does not depend on its neighbours, on the number of threads, on the strategy, or on when it
runs; a token that is not finite or masked touches no other.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import moedecode as md
from blocks import MODES, STORED, STRATEGIES, Stored, spec_of
from moedecode import _native
from moedecode.backends import Numerics
from moedecode.backends.cpu import CpuBackend
from moedecode.formats import StoredMatrix, WeightFormat
from moedecode.spec import PRECISIONS
from moedecode.synthetic import expert_weights, tokens
from numeric import assert_bits_equal

ISAS = _native.available_isas()
NO_SCALE, POST_SCALE, PRE_SCALE = MODES


def _blocks(stored, **options):
    """(label, block, 128 tokens) per precision and instruction set; K = 3, so the order of sums shows."""
    spec = spec_of(512, 72, top_k=3, **options)
    weights = stored.weights(spec)
    x = tokens(128, 512, "float32", seed=3)
    for precision in PRECISIONS:
        block = md.MoEBlock(spec, weights, precision=precision, strategy="grouped")
        for isa in ISAS:
            _native.use_isa(isa)
            yield f"{precision} {isa}", block, x


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_token_does_not_see_its_batch(stored):
    """Alone, in batches of 7 and of 70 (more than one chunk of 64), at several positions, in any order."""
    order = np.random.default_rng(0).permutation(128)
    for name, block, x in _blocks(stored):
        want = block(x)
        assert np.isfinite(want).all()
        assert_bits_equal(f"again {name}", block(x), want)
        assert_bits_equal(f"permuted {name}", block(x[order]), want[order])
        for first, count in ((0, 1), (64, 1), (127, 1), (3, 7), (121, 7), (17, 70)):
            part = slice(first, first + count)
            assert_bits_equal(f"{count} tokens from {first} {name}", block(x[part]), want[part])
        assert_bits_equal(f"no token {name}", block(x[:0]), want[:0])


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_strategies_give_the_same_bits(stored):
    for mode in (POST_SCALE, PRE_SCALE):
        for name, block, x in _blocks(stored, affinity_scale=mode):
            wanted = None
            for strategy in STRATEGIES:
                block.strategy = strategy
                got = block(x[:33])
                wanted = got if wanted is None else wanted
                assert_bits_equal(f"{strategy} {mode.name} {name}", got, wanted)


@pytest.mark.parametrize("stored", [s for s in STORED if s.block_order == "contiguous"], ids=str)
def test_threads_do_not_matter(stored):
    spec = spec_of(160, 72, top_k=3)
    weights = stored.weights(spec)
    x = tokens(33, 160, "float32")
    for precision in PRECISIONS:
        blocks = [md.MoEBlock(spec, weights, precision=precision, threads=n) for n in (1, 2, 3, 7)]
        for isa, count, strategy in itertools.product(ISAS, (1, 33), STRATEGIES):
            _native.use_isa(isa)
            outputs = []
            for block in blocks:
                block.strategy = strategy
                outputs.append(block(x[:count]))
            for n, got in enumerate(outputs):
                assert_bits_equal(f"{precision} {isa} {count} {strategy} {n}", got, outputs[0])


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_poisons_only_itself(stored, bad):
    """Its row is all NaN, its ids are 0..K-1, and every other row keeps its bits, whatever the strategy."""
    rest = ~np.isin(np.arange(40), (7, 39))
    for name, block, x in _blocks(stored):
        want = block(x[:40])
        poisoned = x[:40].copy()
        poisoned[7, 511] = bad
        poisoned[39, 0] = bad
        for strategy in STRATEGIES:
            block.strategy = strategy
            got = block(poisoned, return_router=True)
            assert np.isnan(got.out[~rest]).all()
            assert (got.expert_index[~rest] == [0, 1, 2]).all()
            assert_bits_equal(f"{strategy} {name}", got.out[rest], want[rest])
        block.strategy = "grouped"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_row_on_a_rank_that_owns_none_of_its_experts(dtype, mode, isa):
    """Even where it would add nothing, the row is NaN; and so it is in the experts alone."""
    spec = spec_of(64, 32, 4, 2, affinity_scale=mode)
    weights = Stored(WeightFormat.MXFP4).weights(spec, local_experts=2, first_expert=2)
    x = tokens(5, 64, dtype)
    x[2, 3] = np.inf
    for strategy in STRATEGIES:
        got = md.MoEBlock(spec, weights, rank_id=1, strategy=strategy)(x).astype(np.float32)
        assert np.isnan(got).all(1).tolist() == [False, False, True, False, False]
        assert np.isfinite(got[[0, 1, 3, 4]]).all()
        out = np.empty(x.shape, np.float32)
        index, weight = np.full((5, 2), -1, np.int32), np.zeros((5, 2), np.float32)
        dense = strategy == "all_expert"
        backend = CpuBackend()
        backend.experts(
            x, backend.pack(weights.experts), spec.experts, mode, strategy, None if dense else index,
            weight, 2, Numerics(), out,
        )  # fmt: skip
        assert np.isnan(out).all(1).tolist() == [False, False, True, False, False]
        if not (dense and mode is NO_SCALE):
            assert not out[[0, 1, 3, 4]].any()


def _with_nan_expert(weights, bad):
    """Every matrix of expert ``bad`` is NaN."""
    whole = weights.experts.expert

    def spoiled(m):
        if m.fmt.is_mx:
            return StoredMatrix(m.fmt, m.codes, np.full_like(m.scale, 0xFF))
        return StoredMatrix(m.fmt, np.full_like(m.codes, np.nan), m.scale)

    def expert(e):
        m = whole(e)
        return replace(m, gate=spoiled(m.gate), up=spoiled(m.up), down=spoiled(m.down)) if e == bad else m

    return replace(weights, experts=replace(weights.experts, expert=expert))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_masked_tokens_load_no_expert(stored):
    """An expert of NaN weights that only masked tokens would visit changes nothing; masked rows are zero."""
    spec = spec_of(512, 72)
    weights = stored.weights(spec)
    x = tokens(40, 512, "float32", seed=3)
    usual = md.MoEBlock(spec, weights)(x, return_router=True)
    bad = int(usual.expert_index[0, 0])
    mask = (usual.expert_index != bad).all(1)
    assert 0 < mask.sum() < 40
    for precision, mode in itertools.product(PRECISIONS, MODES):
        block_spec = replace(spec, affinity_scale=mode)
        clean = md.MoEBlock(block_spec, weights, precision=precision)
        block = md.MoEBlock(block_spec, _with_nan_expert(weights, bad), precision=precision)
        for isa, strategy in itertools.product(ISAS, STRATEGIES):
            if mode is NO_SCALE and strategy == "all_expert":
                continue  # there every expert is added
            _native.use_isa(isa)
            block.strategy = clean.strategy = strategy
            name = f"{precision} {mode.name} {isa} {strategy}"
            got, want = block(x, token_mask=mask), clean(x)
            assert_bits_equal(name, got[mask], want[mask])
            assert not got[~mask].any(), name
            assert np.isnan(block(x)[~mask]).any(), "the spoiled expert is not what it should be"


def test_a_masked_token_that_is_not_finite_is_zero(isa):
    spec = spec_of(64, 32, shared=md.ExpertSpec(40), shared_gate=True)
    weights = Stored(WeightFormat.MXFP4).weights(spec)
    x = tokens(4, 64, "float32")
    x[1] = np.nan
    mask = np.array([True, False, True, True])
    for strategy, mode in itertools.product(STRATEGIES, MODES):
        block = md.MoEBlock(replace(spec, affinity_scale=mode), weights, strategy=strategy)
        got = block(x, token_mask=mask, return_router=True)
        assert not got.out[1].any()
        assert (got.expert_index[1] == -1).all()
        assert not got.affinities[1].any()
        assert not got.router_logits[1].any()
        assert got.out[mask].any(1).all()
        assert not block(x, token_mask=np.zeros(4, bool)).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.MXFP4, WeightFormat.MXFP8_E4M3])
def test_chunks_of_tokens_give_the_same_bits(fmt, mode, isa):
    """A small workspace splits the call; residual, mask, routing and the shared expert follow the chunks."""
    mlp = md.ExpertSpec(40)
    spec = spec_of(96, 48, shared=mlp, shared_gate=True, affinity_scale=mode)
    weights = replace(Stored(fmt).weights(spec), shared=expert_weights(mlp, 96, 1, fmt, seed=4))
    x, residual = tokens(45, 96, "bfloat16"), tokens(45, 96, "bfloat16", seed=8)
    mask = np.arange(45) % 4 != 1
    for strategy in STRATEGIES:
        block = md.MoEBlock(spec, weights, strategy=strategy)
        usual = block(x, residual=residual, token_mask=mask, return_router=True)
        for limit in (1, 20_000, 100_000):
            before = _native.set_workspace_limit(limit)
            try:
                got = block(x, residual=residual, token_mask=mask, return_router=True)
            finally:
                _native.set_workspace_limit(before)
            for part in ("out", "residual", "router_logits", "expert_index", "affinities"):
                assert_bits_equal(f"{strategy} {limit} {part}", getattr(got, part), getattr(usual, part))


def test_chunks_of_the_experts_alone(isa):
    spec, backend = spec_of(96, 48, 6, 3), CpuBackend()
    packed = backend.pack(Stored(WeightFormat.MXFP4).weights(spec).experts)
    rng = np.random.default_rng(0)
    x = tokens(45, 96, "float16")
    index = rng.integers(-1, 6, (45, 3)).astype(np.int32)
    for strategy, mode in itertools.product(STRATEGIES, MODES):
        dense = strategy == "all_expert"
        weight = rng.random((45, 6 if dense else 3), np.float32)
        outputs = []
        for limit in (1 << 29, 1, 30_000):
            out = np.empty((45, 96), np.float32)
            before = _native.set_workspace_limit(limit)
            try:
                backend.experts(
                    x,
                    packed,
                    spec.experts,
                    mode,
                    strategy,
                    None if dense else index,
                    weight,
                    0,
                    Numerics(),
                    out,
                )
            finally:
                _native.set_workspace_limit(before)
            outputs.append(out)
        for out in outputs[1:]:
            assert_bits_equal(f"{strategy} {mode.name}", out, outputs[0])


def test_an_id_given_twice_counts_twice(isa):
    """Selective and grouped agree there too, and the order of the ids in a row does not matter."""
    spec, backend = spec_of(64, 32, 4, 3), CpuBackend()
    packed = backend.pack(Stored(WeightFormat.MXFP4).weights(spec).experts)
    x = tokens(6, 64, "float32")
    index = np.int32([[1, 1, 3], [3, 1, 1], [2, -1, 2], [0, 0, 0], [-1, -1, -1], [1, 3, 0]])
    weight = np.float32([[0.5, 0.25, 2], [2, 0.5, 0.25], [1, 9, 3], [1, 2, 3], [1, 1, 1], [1, 1, 1]])
    outputs = []
    for strategy in ("selective", "grouped"):
        out = np.empty((6, 64), np.float32)
        rows = np.concatenate([x[:1], x[:1], x[2:]])  # rows 0 and 1 differ in the order of their ids alone
        backend.experts(rows, packed, spec.experts, POST_SCALE, strategy, index, weight, 0, Numerics(), out)
        outputs.append(out)
        assert_bits_equal("order of ids", out[0], out[1])
        assert not out[4].any()
    assert_bits_equal("strategies", outputs[0], outputs[1])
