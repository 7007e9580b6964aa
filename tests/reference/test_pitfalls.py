"""What goes wrong in MoE decode elsewhere: each fault that users of other libraries reported, as a test.

Held on every backend through the public API; weights and arithmetic are float32, hence the bound.
"""

from __future__ import annotations

import numpy as np
import pytest

import moedecode as md
from numeric import assert_bits_equal, assert_close, worst_row_rel_l2
from small_block import small_block, tokens

BACKENDS = ("reference", "cpu", "neuron")
FLOAT32 = 2e-5

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def each_way(*strategies):
    """Every backend with these strategies; plain weights have no grouped form on neuron."""
    ways = [(b, s) for b in BACKENDS for s in strategies if (b, s) != ("neuron", "grouped")]
    return pytest.mark.parametrize("backend, strategy", ways)


@each_backend
def test_up_offset_without_bias(backend):
    """(up + 1) stays when the experts have no bias: gate*(up + 1) - gate*up is what the gate alone gives."""
    plain = small_block(expert={"up_offset": 0.0})
    offset = small_block(expert={"up_offset": 1.0})
    x = tokens(3, 40)
    no_up = small_block(expert={"up_offset": 1.0})
    no_up.arrays["up"] = np.zeros_like(no_up.arrays["up"])
    difference = offset.block(backend)(x).astype(np.float64) - plain.block(backend)(x)
    assert_close("difference", difference, no_up.values(x).out, 4 * FLOAT32)
    assert_close("out", offset.block(backend)(x), offset.values(x).out, FLOAT32)


@each_backend
def test_selection_bias_and_scale(backend):
    """DeepSeek-V3: the bias chooses, the unbiased sigmoid weighs, the scale multiplies."""
    rules = {"score": "sigmoid", "norm_topk_prob": True, "norm_eps": 1e-20, "scale": 2.5}
    block, x = small_block(router=rules | {"selection_bias": True}), tokens(9, 40)
    block.arrays["selection_bias"] *= 3
    out = block.block(backend)(x)
    assert_close("out", out, block.values(x).out, FLOAT32)
    unbiased = small_block(router=rules).values(x).out
    assert worst_row_rel_l2(out, unbiased)[0] > 0.1, "the bias decides something here"


@each_way("selective", "grouped", "all_expert")
def test_ranks_of_selective_decode_add_up(backend, strategy):
    """Experts of other ranks contribute 0, so the ranks' outputs add up to the whole."""
    block, x = small_block(expert={"bias": True}), tokens(5, 40)
    parts = [block.block(backend, rank, 3, strategy=strategy)(x) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert_close(f"rank {rank}", part, block.values(x, rank=rank, ranks=3).out, FLOAT32)
    assert_close("sum of ranks", sum(p.astype(np.float64) for p in parts), block.values(x).out, FLOAT32)


@each_backend
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
def test_scores_are_weights_and_the_scale_always_applies(backend, pre_norm, normalise):
    """Without renormalisation affinities are scores, not logits; a route scale applies in every branch."""
    options = {"pre_norm": pre_norm, "norm_topk_prob": normalise, "score": "sigmoid"}
    blocks = [small_block(router=options | {"scale": scale}) for scale in (1.0, 3.0)]
    one, three = (block.block(backend) for block in blocks)
    x = tokens(3, 40)
    assert_close("out", three(x), blocks[1].values(x).out, FLOAT32)
    base, scaled = one(x, return_router=True), three(x, return_router=True)
    chosen = np.take_along_axis(base.affinities, base.expert_index, 1)
    logits = np.take_along_axis(base.router_logits, base.expert_index, 1).astype(np.float64)
    want = 1 / (1 + np.exp(-logits))
    want = want / want.sum(1, keepdims=True) if normalise else want
    assert_close("affinities", chosen, want, 1e-5)
    assert_close("scaled affinities", scaled.affinities, 3 * base.affinities.astype(np.float64), 1e-6)
    assert_close("scaled out", scaled.out, 3 * base.out.astype(np.float64), FLOAT32)


@each_way("selective", "all_expert")
@pytest.mark.parametrize("count", [1, 7, 17])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_equal_logits_pick_the_lowest_ids(backend, strategy, count, score, pre_norm):
    """All-equal logits pick 0..K-1, alone and in a batch."""
    block = small_block(top_k=4, router={"score": score, "pre_norm": pre_norm})
    block.arrays["router"] = np.tile(block.arrays["router"][:1], (6, 1))
    result = block.block(backend, strategy=strategy)(tokens(count, 40), return_router=True)
    assert_bits_equal("index", result.expert_index, np.tile(np.arange(4, dtype=np.int32), (count, 1)))


@each_backend
def test_ties_between_some_experts_pick_the_lowest_id(backend):
    block = small_block(top_k=3)
    w = block.arrays["router"]
    w[4] = w[1] = 3 * np.abs(w[0]).max()
    w[5] = w[2]
    x = np.abs(tokens(4, 40))
    index = block.block(backend)(x, return_router=True).expert_index
    assert (index[:, :2] == [1, 4]).all()


@each_backend
@pytest.mark.parametrize("hidden, padded", [(90, 96), (2880, 3072)])
def test_padded_hidden(backend, hidden, padded):
    """The mean divides by hidden_actual, the width stays padded, and padding neither receives nor leaks."""
    block = small_block(hidden=hidden, experts=3, top_k=2, seed=3)
    wide = small_block(hidden=padded, hidden_actual=hidden, experts=3, top_k=2)
    for name, array in block.arrays.items():
        grown = np.zeros(wide.arrays[name].shape, np.float32)
        grown[tuple(slice(n) for n in array.shape)] = array
        wide.arrays[name] = grown
    x = tokens(2, hidden)
    got = wide.block(backend)(np.pad(x, ((0, 0), (0, padded - hidden))))
    assert got.shape == (2, padded)
    assert not got[:, hidden:].any()
    assert_close("out", got[:, :hidden], block.values(x).out, FLOAT32)


@each_way("selective", "grouped", "all_expert")
def test_down_bias_carries_the_affinity_once(backend, strategy):
    """With zero down weights the output is the affinity-weighted sum of down biases, over all ranks."""
    block = small_block(expert={"bias": True})
    block.arrays["down"] = np.zeros_like(block.arrays["down"])
    x = tokens(4, 40)
    result = block.block(backend)(x, return_router=True)
    chosen = np.take_along_axis(result.affinities, result.expert_index, 1).astype(np.float64)  # [T, K]
    want = (chosen[:, :, None] * block.arrays["down_bias"][result.expert_index]).sum(1)
    parts = [block.block(backend, rank, 2, strategy=strategy)(x).astype(np.float64) for rank in range(2)]
    assert_close("sum of ranks", sum(parts), want, FLOAT32)


@each_backend
def test_interleaved_is_not_concatenated(backend):
    """gpt-oss alternates gate and up rows; read either way, the same experts give the same bits."""
    block, x = small_block(), tokens(3, 40)
    gate, up, down = (block.arrays[name] for name in ("gate", "up", "down"))
    apart = block.weights()
    want = md.MoEBlock(block.spec, apart, backend=backend)(x)
    alternating = np.stack([gate, up], 2).reshape(6, 66, 40)
    following = np.concatenate([gate, up], 1)
    for rows, interleaved in ((alternating, True), (following, False)):
        experts = md.ExpertWeights.from_rows(rows, down, interleaved=interleaved)
        weights = md.BlockWeights(apart.router, experts, gamma=apart.gamma)
        assert_bits_equal("out", md.MoEBlock(block.spec, weights, backend=backend)(x), want)
    crossed = md.ExpertWeights.from_rows(alternating, down, interleaved=False)
    weights = md.BlockWeights(apart.router, crossed, gamma=apart.gamma)
    assert not np.allclose(md.MoEBlock(block.spec, weights, backend=backend)(x), want, rtol=0.1)


@each_way("selective", "grouped", "all_expert", "auto")
def test_no_tokens(backend, strategy):
    """T = 0 returns empty results of the right shapes."""
    block = small_block(shared=md.ExpertSpec(8)).block(backend, strategy=strategy)
    result = block(np.zeros((0, 40), np.float32), residual=np.zeros((0, 40), np.float32), return_router=True)
    assert result.out.shape == result.residual.shape == (0, 40)
    assert result.router_logits.shape == result.affinities.shape == (0, 6)
    assert result.expert_index.shape == (0, 2)
    assert block(np.zeros((4, 0, 40), np.float32)).shape == (4, 0, 40)


@each_way("selective", "grouped", "all_expert")
def test_no_token_on_this_rank(backend, strategy):
    """A rank whose experts nobody chose returns exact zeros, also into a buffer that held something else."""
    block = small_block(expert={"bias": True}, router={"bias": True})
    block.arrays["router_bias"][:] = [0, 0, 0, 0, 60, 60]
    buffer = np.full((5, 40), 7, np.float32)
    block.block(backend, 0, 3, strategy=strategy)(tokens(5, 40), out=buffer)
    assert not buffer.any()


@each_backend
@pytest.mark.parametrize("wrong", [6, 7, -2, 2**31, 2**40])
@pytest.mark.parametrize("all_expert", [True, False])
def test_expert_id_out_of_range_is_an_error(backend, wrong, all_expert):
    """An id of E is no padding sentinel; the message names where it stands."""
    index = np.array([[0, 1], [2, wrong]], np.int64)
    a = small_block().arrays
    gate_up = np.stack([a["gate"], a["up"]], 1).transpose(0, 3, 1, 2)  # [E, H, 2, I]
    with pytest.raises(md.InvalidInput, match=rf"expert_index\[1, 1\]={wrong}: .* 0..5.*-1"):
        md.moe_tkg(
            tokens(2, 40),
            gate_up,
            a["down"].swapaxes(1, 2),
            np.ones((2, 6), np.float32),
            index,
            all_expert,
            rank_id=0,
            backend=backend,
        )


@each_backend
def test_minus_one_is_nobody(backend):
    """The one id that means "no expert": a row of them is exactly 0, other rows keep their bits."""
    a, x = small_block().arrays, tokens(3, 40)
    gate_up, down = np.stack([a["gate"], a["up"]], 1).transpose(0, 3, 1, 2), a["down"].swapaxes(1, 2)

    def run(ids):
        return md.moe_tkg(
            x,
            gate_up,
            down,
            np.full((3, 6), 0.5, np.float32),
            np.array(ids, np.int32),
            False,
            expert_affinities_scaling_mode="POST_SCALE",
            backend=backend,
        )

    some = run([[0, -1], [-1, -1], [4, 5]])
    assert_bits_equal("row of -1", some[1], np.zeros_like(some[1]))
    assert_bits_equal("untouched row", some[2], run([[0, 1], [2, 3], [4, 5]])[2])


@pytest.mark.parametrize("hidden", [90 * 32, 32])
def test_scale_rows_of_any_length_and_a_nan_scale(hidden):
    """H/32 = 90 scales a row; E8M0 0xFF is NaN: it reaches what its rows feed, and nothing else."""
    experts, intermediate, rng = 6, 64, np.random.default_rng(27)
    shapes = (2 * intermediate, hidden), (hidden, intermediate)
    gate_up, down = (rng.integers(0, 256, (experts, n, m // 2), np.uint8) for n, m in shapes)
    scale, down_scale = (np.full((experts, n, m // 32), 120, np.uint8) for n, m in shapes)
    block, x = small_block(hidden=hidden, intermediate=intermediate), tokens(6, hidden)

    def run(backend):
        stored = md.ExpertWeights.from_rows(gate_up, down, gate_up_scale=scale, down_scale=down_scale)
        weights = md.BlockWeights(block.arrays["router"], stored, gamma=block.arrays["gamma"])
        return md.MoEBlock(block.spec, weights, backend=backend)(x, return_router=True)

    sound = run("cpu")
    assert_close("out", sound.out, run("reference").out, 1.5e-4)
    row = 17  # of the down projection of expert 3: one column of the output
    down_scale[3, row, -1] = 0xFF
    broken, visits = run("cpu").out, (sound.expert_index == 3).any(1)
    assert visits.any()
    assert not visits.all()
    assert np.isnan(broken[visits, row]).all()
    rest = np.ones(broken.shape, bool)
    rest[visits, row] = False
    assert_bits_equal("everything else", broken[rest], sound.out[rest])


def test_bounds_are_relative_and_weights_differ():
    """A tolerance above the output, or equal numbers everywhere, would pass anything."""
    block = small_block()
    want = block.values(tokens(5, 40)).out
    for name, got in (("zeros", np.zeros_like(want)), ("one per mille", want * 1.001)):
        with pytest.raises(AssertionError, match="relative L2"):
            assert_close(name, got, want, FLOAT32)
    tiny = (want * 1e-6).astype(np.float16)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close("tiny", np.zeros_like(tiny), tiny, FLOAT32)
    for array in block.arrays.values():
        assert len(np.unique(array)) > 0.9 * array.size
