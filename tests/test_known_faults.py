"""Faults that users of other MoE decode libraries have met, each as a small test of the right value.

One test per kind. The right values come from :func:`plain`, loops over tokens and experts that share nothing
with the package. Every test that can runs on each backend.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import moedecode as md
from numeric import assert_bits_equal, assert_close, worst_row_rel_l2

BACKENDS = ("cpu", "reference", "neuron")
FLOAT32 = 2e-5
H, WIDTH, E, K = 256, 64, 8, 2


def draw(seed, *shape, size=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(np.float32)


class Weights:
    """Plain float32 weights of one block, by name."""

    def __init__(self, bias=True, hidden=H, intermediate=WIDTH, experts=E):
        self.gamma = 1 + draw(0, hidden, size=0.1)
        self.router, self.router_bias = draw(1, experts, hidden, size=0.3), draw(2, experts, size=0.1)
        self.gate, self.up = (
            draw(3, experts, intermediate, hidden, size=0.1),
            draw(4, experts, intermediate, hidden, size=0.1),
        )
        self.down = draw(5, experts, hidden, intermediate, size=0.2)
        names = {"gate_bias": intermediate, "up_bias": intermediate, "down_bias": hidden}
        for seed, (name, width) in enumerate(names.items(), start=6):
            setattr(self, name, draw(seed, experts, width) if bias else None)

    def experts(self, first=0, count=None, interleaved=False):
        """The experts of a rank as the package takes them: gate then up, or alternating."""
        mine = slice(first, first + (count or len(self.gate)))

        def both(gate, up):
            if gate is None:
                return None
            if interleaved:
                return np.stack([gate[mine], up[mine]], axis=2).reshape(len(gate[mine]), -1, *gate.shape[2:])
            return np.concatenate([gate[mine], up[mine]], axis=1)

        return md.ExpertWeights.from_rows(
            both(self.gate, self.up),
            self.down[mine],
            gate_up_bias=both(self.gate_bias, self.up_bias),
            down_bias=None if self.down_bias is None else self.down_bias[mine],
            interleaved=interleaved,
        )

    def block(self, spec, backend="cpu", *, experts=None, strategy="selective", **options):
        weights = md.BlockWeights(
            gamma=self.gamma,
            router=self.router,
            router_bias=self.router_bias if spec.router.bias else None,
            experts=experts or self.experts(),
            **{name: options.pop(name) for name in ("selection_bias",) if name in options},
        )
        return md.MoEBlock(spec, weights, backend=backend, strategy=strategy, **options)


def spec(hidden=H, *, experts=E, top_k=K, router=None, expert=None, **options):
    rules = {"pre_norm": False, "bias": True, "matmul_dtype": "float32"} | (router or {})
    return md.BlockSpec(
        hidden,
        md.RouterSpec(experts, top_k, **rules),
        md.ExpertSpec(**({"intermediate": WIDTH, "bias": True} | (expert or {}))),
        **options,
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def normed(x, w, eps=1e-6, width=None):
    x = x.astype(float)
    return x / np.sqrt((x**2).sum(-1, keepdims=True) / (width or x.shape[-1]) + eps) * w.gamma


def logits(x, w, **norm):
    return normed(x, w, **norm) @ w.router.T.astype(float) + w.router_bias


def post_norm(row):
    """The K largest of a row of logits, softmax over them: {expert: weight}."""
    chosen = sorted(range(len(row)), key=lambda e: (-row[e], e))[:K]
    return dict(zip(chosen, softmax(row[chosen]), strict=True))


def plain(x, w, choose, act=lambda g: g * sigmoid(g), up_offset=0.0, **norm):
    """The block's output, token by token and expert by expert, in float64."""
    r, rows, out = normed(x, w, **norm), logits(x, w, **norm), np.zeros(x.shape)
    for t in range(len(x)):
        for e, weight in sorted(choose(rows[t]).items()):
            bg, bu, bd = (0 if b is None else b[e] for b in (w.gate_bias, w.up_bias, w.down_bias))
            h = act(w.gate[e] @ r[t] + bg) * (w.up[e] @ r[t] + bu + up_offset)
            out[t] += weight * (w.down[e] @ h + bd)
    return out


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def check(name, got, want):
    """Within float32 arithmetic, and far from zero: a bound above the output says nothing."""
    assert np.linalg.norm(want) > 1
    assert_close(name, got, want, FLOAT32)


def test_01_the_offset_of_up_does_not_hang_on_a_bias(backend):
    """gpt-oss experts: (up + 1) also where the experts have no bias."""
    w, x = Weights(bias=False), draw(20, 5, H)
    block = w.block(spec(expert={"bias": False, "up_offset": 1.0}), backend)
    check("out", block(x), plain(x, w, post_norm, up_offset=1.0))


def test_02_selection_bias_and_route_scale_are_in_the_sum(backend):
    """DeepSeek-V3: the bias chooses, the unbiased sigmoid weighs, the scale multiplies."""
    w, x, extra = Weights(), draw(21, 9, H), draw(22, E, size=3.0)

    def choose(row, extra=extra):
        scores = sigmoid(row)
        chosen = np.argsort(-(scores + extra), kind="stable")[:K]
        return {int(e): 2.5 * scores[e] / (scores[chosen].sum() + 1e-20) for e in chosen}

    rules = {"score": "sigmoid", "pre_norm": True, "norm_topk_prob": True, "norm_eps": 1e-20, "scale": 2.5}
    block = w.block(spec(router=rules | {"selection_bias": True}), backend, selection_bias=extra)
    check("out", block(x), plain(x, w, choose))
    unbiased = plain(x, w, lambda row: choose(row, extra=0))
    assert worst_row_rel_l2(block(x), unbiased)[0] > 0.1, "the bias decides something here"


def test_03_experts_of_other_ranks_contribute_nothing(backend):
    """Selective decode on a rank's slice: ids elsewhere add 0; the ranks' outputs add up to the whole."""
    w, x = Weights(), draw(23, 6, H)
    ranks = [
        w.block(spec(), backend, experts=w.experts(first, 2), rank_id=first // 2)(x)
        for first in range(0, E, 2)
    ]
    for rank, out in enumerate(ranks):
        mine = range(2 * rank, 2 * rank + 2)
        here = plain(x, w, lambda row, mine=mine: {e: a for e, a in post_norm(row).items() if e in mine})
        assert_close(f"rank {rank}", out, here, FLOAT32)
    check("sum over ranks", np.sum(ranks, axis=0), plain(x, w, post_norm))


@pytest.mark.parametrize("renormalise", [False, True])
def test_04_without_renormalisation_weights_are_scores_and_the_scale_still_counts(backend, renormalise):
    w, x = Weights(), draw(24, 5, H)

    def choose(row):
        scores = softmax(row)
        chosen = np.argsort(-scores, kind="stable")[:K]
        total = scores[chosen].sum() if renormalise else 1.0
        return {int(e): 1.5 * scores[e] / total for e in chosen}

    rules = {"pre_norm": True, "norm_topk_prob": renormalise, "scale": 1.5}
    check("out", w.block(spec(router=rules), backend)(x), plain(x, w, choose))


def test_06_ties_go_to_the_lowest_id_for_every_batch_size_and_strategy(backend):
    """All logits equal: experts 0..K-1, whoever asks."""
    w = Weights()
    w.router[:], w.router_bias[:] = 0, 0
    for count in (1, 3, 17):
        for strategy in ("selective", "all_expert"):
            result = w.block(spec(), backend, strategy=strategy)(draw(25, count, H), return_router=True)
            assert (np.sort(result.expert_index) == np.arange(K)).all(), (count, strategy)


def test_07_a_padded_hidden_state_keeps_the_mean_the_width_and_the_padding(backend):
    """H = 2880 stored as 3072 (here 224 as 256): the mean is over what is real, zeros stay zeros."""
    actual, w, x = 224, Weights(), draw(26, 4, H)
    for tensor in (w.gate, w.up, w.router):
        tensor[..., actual:] = 0
    w.down[:, actual:], w.down_bias[:, actual:], x[:, actual:] = 0, 0, 0
    out = w.block(spec(hidden_actual=actual), backend)(x)
    assert out.shape == x.shape
    assert not np.asarray(out)[:, actual:].any()
    check("out", out, plain(x, w, post_norm, width=actual))


@pytest.mark.parametrize("hidden", [90 * 32, 32])
def test_08_scale_rows_of_any_length_and_a_nan_scale(hidden):
    """H/32 = 90 scales a row; E8M0 0xFF is NaN: it reaches what its rows feed, and nothing else."""
    rng, intermediate = np.random.default_rng(27), 64
    codes = [
        rng.integers(0, 256, s, np.uint8)
        for s in ((E, 2 * intermediate, hidden // 2), (E, hidden, intermediate // 2))
    ]
    scales = [
        np.full((E, 2 * intermediate, hidden // 32), 120, np.uint8),
        np.full((E, hidden, intermediate // 32), 120, np.uint8),
    ]
    chosen = spec(hidden, router={"bias": False}, expert={"bias": False})
    router = draw(28, E, hidden, size=0.3)

    def run(name):
        experts = md.ExpertWeights.from_rows(
            codes[0], codes[1], gate_up_scale=scales[0], down_scale=scales[1]
        )
        weights = md.BlockWeights(gamma=None, router=router, experts=experts)
        return md.MoEBlock(chosen, weights, backend=name)(draw(29, 6, hidden), return_router=True)

    sound = run("cpu")
    assert_close("out", sound.out, run("reference").out, 1.5e-4)
    row = 17  # of the down projection of expert 3: one column of the output
    scales[1][3, row, -1] = 0xFF
    broken, visits = run("cpu").out, (sound.expert_index == 3).any(1)
    assert visits.any()
    assert not visits.all()
    assert np.isnan(broken[visits, row]).all()
    rest = np.ones(broken.shape, bool)
    rest[visits, row] = False
    assert_bits_equal("everything else", broken[rest], sound.out[rest])


def test_09_the_down_bias_comes_once_and_times_the_affinity(backend):
    w, x = Weights(), draw(30, 5, H)
    w.down[:] = 0
    want = np.zeros(x.shape)
    for t, row in enumerate(logits(x, w)):
        want[t] = sum(weight * w.down_bias[e].astype(float) for e, weight in post_norm(row).items())
    for strategy in ("selective", "all_expert"):
        check(strategy, w.block(spec(), backend, strategy=strategy)(x), want)


def test_10_interleaved_and_concatenated_gate_and_up_are_not_each_other(backend):
    """The same experts in both layouts give the same bits; one read as the other gives something else."""
    w, x = Weights(), draw(31, 5, H)
    want = w.block(spec(), backend)(x)
    assert_bits_equal("interleaved", w.block(spec(), backend, experts=w.experts(interleaved=True))(x), want)
    alternating = np.stack([w.gate, w.up], axis=2).reshape(E, 2 * WIDTH, H)
    biases = np.stack([w.gate_bias, w.up_bias], axis=2).reshape(E, 2 * WIDTH)
    misread = md.ExpertWeights.from_rows(alternating, w.down, gate_up_bias=biases, down_bias=w.down_bias)
    assert worst_row_rel_l2(w.block(spec(), backend, experts=misread)(x), want)[0] > 0.1


def test_11_no_tokens_none_for_this_rank_and_none_for_an_expert(backend):
    w = Weights()
    empty = w.block(spec(), backend)(np.zeros((0, H), np.float32))
    assert empty.shape == (0, H)
    x = draw(32, 4, H)
    w.router_bias[:2] = 50  # every token goes to experts 0 and 1
    for strategy in ("selective", "all_expert"):
        idle = w.block(spec(), backend, experts=w.experts(4, 2), rank_id=2, strategy=strategy)
        assert_bits_equal(strategy, np.asarray(idle(x)), np.zeros_like(x))


def test_12_an_expert_id_of_e_is_an_error_and_minus_one_is_nobody():
    """Padding ids: E is not a sentinel; -1 is the one value that means "no expert"."""
    w, x = Weights(bias=False), draw(33, 3, H)
    gate_up = np.stack([w.gate, w.up], axis=1).transpose(0, 3, 1, 2)  # [E, H, 2, WIDTH]
    down, affinities = w.down.transpose(0, 2, 1), np.full((3, E), 0.5, np.float32)
    index = np.array([[0, 1], [2, 3], [4, 5]], np.int32)

    def run(ids):
        return md.moe_tkg(
            x, gate_up, down, affinities, ids, False, expert_affinities_scaling_mode="POST_SCALE"
        )

    for wrong in (E, -2):
        with pytest.raises(md.InvalidInput, match="expert_index"):
            run(np.where(index == 3, wrong, index).astype(np.int32))
    some = run(np.array([[0, -1], [-1, -1], [4, 5]], np.int32))
    assert_bits_equal("row of -1", some[1], np.zeros_like(some[1]))
    assert_bits_equal("untouched row", some[2], run(index)[2])


def test_13_bounds_are_relative_and_the_weights_of_these_tests_differ():
    """A tolerance above the output, or equal scales everywhere, would pass anything."""
    w, x = Weights(), draw(34, 5, H)
    want = plain(x, w, post_norm)
    with pytest.raises(AssertionError, match="relative L2"):
        check("zeros", np.zeros_like(want), want)
    with pytest.raises(AssertionError, match="relative L2"):
        check("one per mille", want * 1.001, want)
    for tensor in (w.gate, w.up, w.down, w.router):
        assert len(np.unique(tensor)) > 0.9 * tensor.size
    tiny = (want * 1e-6).astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close("tiny", np.zeros_like(tiny), tiny, FLOAT32)
