"""The router of the kernels, on the model, against the reference and the golden vectors.

Covers every combination of score, pre-norm, normalisation and bias; K = 1, odd, 8, more than 8 (22), K = E;
E below 8, prime, beyond one PSUM bank; ties; T = 1, a prime, 128, 130; and that weights are read once.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from kernel_probe import assert_hbm_is, assert_read_once, hidden_major, per_core, run, unfold

import golden
from moedecode.backends.reference import maths
from moedecode.neuron.kernels import masking, router, stages
from moedecode.neuron.kernels.nki_names import nisa, nl
from moedecode.spec import RouterActFn, RouterSpec
from numeric import assert_bits_equal, assert_close

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
NEAR_TIE = 1e-3


def _probe(
    hidden, weights, bias, act_fn, k, pre_norm, norm_topk_prob, mm_dtype=None, form="dense", extras=None
):
    """What both cores hold, and what is in HBM: (index, eager, affinities per core), logits[, affinities]."""
    sb = nl.ndarray(tuple(hidden.shape), dtype=hidden.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=sb, src=hidden)
    t, e = hidden.shape[2], weights.shape[1]
    logits = nl.ndarray((t, e), dtype=hidden.dtype, buffer=nl.shared_hbm)
    in_hbm = nl.ndarray((t, e), dtype=nl.float32, buffer=nl.shared_hbm) if form == "hbm" else None
    extras = None if extras is None else router.RouterExtras(**extras)
    routing = router.router_topk_sb(
        sb,
        weights,
        bias,
        logits,
        act_fn,
        k,
        pre_norm,
        norm_topk_prob,
        mm_dtype,
        in_hbm,
        form == "dense",
        extras,
    )
    assert routing.tokens == t
    on_chip = [routing.expert_index, routing.eager, *([routing.affinities] if form == "dense" else [])]
    return per_core(*on_chip), logits, in_hbm


def _draw(t, h, e, dtype, bias, seed=0):
    rng = np.random.default_rng(seed + 7 * t + e)
    x = rng.standard_normal((t, h)).astype(dtype)
    w = (rng.standard_normal((h, e)) * 2 / h**0.5).astype(dtype)
    return x, w, rng.standard_normal((1, e)).astype(dtype) if bias else None


def _reference(x, w, bias, score, k, pre, normalise, mm_dtype):
    """As the flat functions: norm_topk_prob does nothing after top-k."""
    spec = RouterSpec(
        num_experts=w.shape[1], top_k=k, score=score, pre_norm=pre, norm_topk_prob=normalise and pre,
        bias=bias is not None, matmul_dtype=np.dtype(mm_dtype).name,
    )  # fmt: skip
    return maths.route(x.astype(np.float64), w.T, None if bias is None else bias[0], None, spec)


def _check(outputs, t, want, k):
    """``outputs`` of the probe against (logits, index, affinities) of the reference, near ties left out."""
    (on_chip, logits, in_hbm), (want_logits, want_index, want_affinities) = outputs, want
    for core in on_chip:
        assert_bits_equal("the two cores", core[0], core[1])
    index, eager = unfold(on_chip[0][0], t), unfold(on_chip[1][0], t)
    affinities = unfold(on_chip[2][0], t) if len(on_chip) > 2 else in_hbm
    bound = {BF16: 4e-3, F16: 5e-4, F32: 1e-5}[logits.dtype]
    assert_close("logits", logits.astype(np.float64), want_logits, bound)
    ordered = np.sort(want_logits, -1)[:, ::-1]
    clear = np.abs(np.diff(ordered[:, : k + 1], axis=-1)).min(-1, initial=1.0) > NEAR_TIE
    assert clear.mean() > 0.5
    assert_bits_equal("expert_index", index[clear].astype(np.int32), want_index[clear])
    assert_close("affinities", affinities[clear], want_affinities[clear], 1e-4)
    assert_bits_equal("zeros", affinities[clear] == 0, want_affinities[clear] == 0)
    assert_bits_equal("eager", eager, np.take_along_axis(affinities, index.astype(np.int64), 1))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_every_combination(score):
    """pre_norm x norm_topk_prob x bias, over sizes with a reason each."""
    sizes = [
        (1, 256, 32, 4, BF16),  # one token
        (5, 256, 5, 5, BF16),  # fewer experts than max8 takes; K = E
        (7, 384, 13, 3, F16),  # an odd number of H tiles, a prime E
        (4, 128, 16, 1, F32),  # one H tile: the second core has none
        (3, 256, 40, 22, F32),  # three rounds
        (130, 256, 24, 9, F32),  # two tiles of tokens, a last round of one
    ]
    for (t, h, e, k, dtype), pre, normalise, bias in itertools.product(sizes, *[(True, False)] * 3):
        x, w, b = _draw(t, h, e, dtype, bias)
        outputs, report = run(_probe, hidden_major(x), w, b, score, k, pre, normalise)
        _check(outputs, t, _reference(x, w, b, score, k, pre, normalise, dtype), k)
        assert_read_once(report, "weights", *(["bias"] if bias else []))


@pytest.mark.parametrize(
    ("t", "e", "k"), [(2, 520, 8), (128, 128, 4), (33, 256, 8), (1, 16, 16), (2, 48, 24)]
)
def test_sizes(t, e, k):
    """E beyond a PSUM bank of 512; a full tile of tokens; K = E; K a multiple of eight."""
    x, w, _ = _draw(t, 256, e, F32, False)
    outputs, report = run(_probe, hidden_major(x), w, None, RouterActFn.SOFTMAX, k, True, True)
    _check(outputs, t, _reference(x, w, None, "softmax", k, True, True, F32), k)
    assert_read_once(report, "weights")


@pytest.mark.parametrize(("t", "pre"), [(1, True), (3, False), (130, True)])
def test_the_hbm_form(t, pre):
    """Affinities handed over in shared HBM: each row stored by one core, the same values."""
    x, w, b = _draw(t, 256, 16, BF16, True)
    outputs, report = run(_probe, hidden_major(x), w, b, "sigmoid", 4, pre, False, None, "hbm")
    _check(outputs, t, _reference(x, w, b, "sigmoid", 4, pre, False, BF16), 4)
    (row,) = (r for r in report.rows if r.nbytes == t * 16 * 4 and r.kind == "shared" and sum(r.written))
    assert sum(row.written) == row.distinct_written_chip == row.nbytes


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("selection", [False, True])
def test_beyond_the_flat_functions(score, selection):
    """pre_norm x normalise x norm_eps x scale, with and without a bias of the selection alone."""
    options = itertools.product([(5, 24, 4), (3, 6, 5), (130, 40, 11)], *[(True, False)] * 4)
    for (t, e, k), pre, normalise, eps, scale in options:
        x, w, _ = _draw(t, 256, e, F32, False)
        chooses = (np.random.default_rng(e).standard_normal((1, e)) * (0.2 if pre else 3)).astype(np.float32)
        spec = RouterSpec(
            num_experts=e, top_k=k, score=score, pre_norm=pre, norm_topk_prob=normalise,
            matmul_dtype="float32", norm_eps=0.05 if eps else 0.0, scale=2.5 if scale else 1.0,
            selection_bias=selection,
        )  # fmt: skip
        extras = {"scale": spec.scale, "norm_eps": spec.norm_eps, "normalise_post_norm": True}
        extras |= {"selection_bias": chooses} if selection else {}
        outputs, report = run(
            _probe, hidden_major(x), w, None, score, k, pre, normalise, None, "dense", extras
        )
        bias = chooses[0] if selection else None
        logits, index, affinities = maths.route(x.astype(np.float64), w.T, None, bias, spec)
        compared = logits
        if selection:
            compared = (maths.SCORES[score](logits) if pre else logits) + chooses
        got_index, eager, row = (unfold(a[0], t) for a in outputs[0])
        ordered = np.sort(compared, -1)[:, ::-1][:, : k + 1]
        clear = np.abs(np.diff(ordered, axis=-1)).min(-1, initial=1.0) > 1e-5
        assert clear.mean() > 0.9
        assert_bits_equal("expert_index", got_index[clear].astype(np.int32), index[clear])
        assert_close("affinities", row[clear], affinities[clear], 1e-5)
        assert_bits_equal("zeros", row[clear] == 0, affinities[clear] == 0)
        assert_bits_equal("eager", eager, np.take_along_axis(row, got_index.astype(np.int64), 1))
        assert_read_once(report, "weights", *(["extras['selection_bias']"] if selection else []))


def test_a_larger_logit_that_is_not_chosen_does_not_overflow():
    """Post-norm softmax with a selection bias that leaves out a logit 300 above the chosen."""
    x, w = np.zeros((2, 128), np.float32), np.zeros((128, 8), np.float32)
    bias = np.array([[300, 1, 2, 0, 0, 0, 0, 0]], np.float32)
    chooses = np.array([[-1000, 0, 0, 0, 0, 0, 0, 0]], np.float32)
    outputs, _ = run(
        _probe,
        hidden_major(x),
        w,
        bias,
        "softmax",
        2,
        False,
        False,
        None,
        "dense",
        {"selection_bias": chooses},
    )
    row = outputs[0][2][0]
    assert_close("row", row, np.tile([0, 1, np.e, 0, 0, 0, 0, 0], (2, 1)) / (1 + np.e), 1e-6)


def test_the_hand_off_is_ordered_between_cores():
    """What one core stored, the other may read: the HBM form ends with a barrier."""

    def kernel(hidden, weights, rank_id):
        sb = nl.ndarray(tuple(hidden.shape), dtype=hidden.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=sb, src=hidden)
        handed = nl.ndarray((hidden.shape[2], weights.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
        routing = router.router_topk_sb(sb, weights, None, None, "sigmoid", 2, affinities_hbm=handed)
        local = masking.local_affinities(routing.affinities, rank_id, 4, True, routing.expert_index)
        straight = masking.local_affinities(routing, rank_id, 4)
        row = nl.ndarray(tuple(handed.shape), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=row, src=routing.affinities)  # also what the other core stored
        return per_core(local, straight, row)

    x, w, _ = _draw(6, 256, 8, F32, False)
    (local, straight, row), _ = run(kernel, hidden_major(x), w, np.array([[1]], np.int32))
    assert_bits_equal("both ways", local, straight)
    assert local.any()
    assert_bits_equal("whole rows", row[0], row[1])


def test_ties_go_to_the_lowest_id():
    """Equal columns give equal logits: chosen in ascending id, within a round and across rounds."""
    x, w, _ = _draw(6, 256, 4, F32, False)
    wide = np.concatenate([w, w, w, w, w, w], 1)  # [H, 24]: six experts share each logit
    outputs, _ = run(_probe, hidden_major(x), wide, None, "softmax", 13, False, False)
    index = outputs[0][0][0].astype(np.int32)
    want = maths.top_k(np.tile((x.astype(np.float64) @ w), 6), 13)
    assert_bits_equal("expert_index", index, want)
    zero = np.zeros((256, 11), np.float32)
    outputs, _ = run(_probe, hidden_major(x), zero, None, "sigmoid", 10, True, True)
    assert_bits_equal("all equal", outputs[0][0][0], np.tile(np.arange(10, dtype=np.uint32), (6, 1)))
    row = np.zeros((6, 11), np.float32)
    row[:, :10] = np.float32(0.5) / np.float32(5)
    assert_close("their affinities", outputs[0][2][0], row, 1e-6)


@pytest.mark.parametrize("mm_dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("io", "weight"), [(BF16, BF16), (F32, BF16), (F16, F32), (F32, F32)])
def test_matmul_dtype(io, weight, mm_dtype):
    """The hidden is rounded to router_mm_dtype, the weights are taken as stored."""
    x, w, _ = _draw(3, 256, 16, F32, False)
    x, w = x.astype(io), w.astype(weight)
    outputs, _ = run(_probe, hidden_major(x), w, None, "softmax", 4, True, True, mm_dtype)
    want = _reference(x, w, None, "softmax", 4, True, True, mm_dtype)
    assert_close("affinities", outputs[0][2][0], want[2], 1e-5)


def test_only_what_is_asked_for_touches_hbm():
    """No affinities form: nothing but the inputs and the logits; without a grid one core does it all."""
    x, w, b = _draw(3, 256, 16, BF16, True)
    outputs, report = run(_probe, hidden_major(x), w, b, "softmax", 4, True, True, None, "none")
    assert len(outputs[0]) == 2
    assert_hbm_is(report, "hidden", "weights", "bias")
    alone, report = run(_probe, hidden_major(x), w, b, "softmax", 4, True, True, cores=1)
    assert_read_once(report, "weights", "bias")
    assert_bits_equal("index", alone[0][0][0], outputs[0][0][0])


@pytest.mark.parametrize(
    ("change", "words"), [({"act_fn": "relu"}, "act_fn='relu'"), ({"k": 17}, "k=17"), ({"k": 0}, "k=0")]
)
def test_refusals(change, words):
    x, w, _ = _draw(2, 256, 16, BF16, False)
    options = {"act_fn": "softmax", "k": 4, "pre_norm": True, "norm_topk_prob": True} | change
    with pytest.raises(ValueError, match=words):
        run(_probe, hidden_major(x), w, None, **options)
    with pytest.raises(ValueError, match="256 rows, the hidden 384"):
        run(_probe, np.zeros((128, 3, 2), BF16), w, None, **(options | {"act_fn": "softmax", "k": 4}))


@pytest.mark.parametrize("case", golden.cases("router"))
def test_golden(case):
    """The HBM-to-HBM kernel on the stored inputs, both layouts of x; each input read once."""
    inputs, o = case.inputs(), case.options
    (logits, index, affinities, eager), report = run(
        stages.router_topk,
        inputs["x"],
        inputs["w"],
        inputs["w_bias"],
        o["router_act_fn"],
        o["top_k"],
        o["router_pre_norm"],
        o["norm_topk_prob"],
        return_eager_affi=True,
        x_hbm_layout=1 if o["x_hbm_layout"] == "[T,H]" else 0,
    )
    compare = case.meta["compare"]
    pipeline = "float32_pipeline" if inputs["x"].dtype == np.float32 else "io_dtype_pipeline"
    assert_bits_equal("expert_index", index.astype(np.int32), case.want("expert_index"))
    assert_close(
        "logits", logits.astype(np.float64), case.want("router_logits"), compare["router_logits"][pipeline]
    )
    want = case.want("expert_affinities")
    assert_close("affinities", affinities, want, compare["expert_affinities"]["float32_pipeline"])
    assert_bits_equal("zeros", affinities == 0, want == 0)
    assert_bits_equal("eager", eager, np.take_along_axis(affinities, index.astype(np.int64), 1))
    assert_read_once(report, "x", "w", *(["w_bias"] if inputs["w_bias"] is not None else []))
