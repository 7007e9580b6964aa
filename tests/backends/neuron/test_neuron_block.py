"""MoEBlock on the neuron backend: against the float64 reference and against the cpu backend.

What the door adds is under test here: layouts, padding, masks, residuals, handles, routing and the report.
The kernels have tests of their own.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moedecode as md
from blocks import Stored, clear_tokens, spec_of
from flat_arguments import block_arguments, mx_experts
from moedecode.backends import Numerics, neuron
from moedecode.backends.neuron import NeuronBackend
from moedecode.backends.neuron.launch import described_experts
from moedecode.backends.reference import ReferenceBackend
from moedecode.formats import WeightFormat
from moedecode.neuron import floor
from numeric import assert_bits_equal, assert_close, assert_zero_where_zero

BF16 = np.dtype(ml_dtypes.bfloat16)
BIASES = ("gate_bias", "up_bias", "down_bias")
PLAIN_BOUND = 6e-3
"""h and the output are each rounded to bfloat16 (1.7e-3 for one rounding)."""
MX_BOUND, MX_ROW = 1e-2, 1e-1
"""The output's rounding and here and there a moved E4M3 code; a missing quantisation is 4 to 8 %."""

STORED = [
    Stored(WeightFormat.BF16),
    Stored(WeightFormat.FP16),
    Stored(WeightFormat.FP8_E4M3, "row"),
    Stored(WeightFormat.FP8_E4M3, "tensor"),
    Stored(WeightFormat.BF16, block_order="trainium"),
    Stored(WeightFormat.MXFP4),
    Stored(WeightFormat.MXFP8_E4M3),
    Stored(WeightFormat.MXFP8_E5M2),
    Stored(WeightFormat.MXFP4, block_order="trainium"),
    Stored(WeightFormat.MXFP8_E4M3, block_order="trainium"),
]


def numerics_of(fmt):
    return {"precision": "mxfp8", "h_rounding": "io"} if fmt.is_mx else {}


def make(spec, weights, **options):
    return md.MoEBlock(spec, weights, backend="neuron", **(numerics_of(weights.experts.fmt) | options))


def truth(spec, weights, x, residual=None, strategy="grouped", first=0):
    fmt = weights.experts.fmt
    numerics = Numerics("mxfp8", "io") if fmt.is_mx else Numerics("a16", None)
    block = ReferenceBackend().block(spec, weights, weights.experts, weights.shared, numerics, 1)
    return block.values(x, residual, strategy, first)


def assert_right(got, want, fmt, name="out"):
    bound, row = (MX_BOUND, MX_ROW) if fmt.is_mx else (PLAIN_BOUND, 2 * PLAIN_BOUND)
    assert_close(name, got, want, bound, row)


def case_of(stored, count=5, dtype="bfloat16", **options):
    hidden = options.pop("hidden", 512 if stored.block_order == "trainium" else 160)
    spec = spec_of(hidden=hidden, **options)
    weights = stored.weights(spec)
    return spec, weights, clear_tokens(count, spec, weights, dtype)


@pytest.mark.parametrize(
    ("stored", "strategy"),
    [
        pytest.param(stored, strategy, id=f"{stored}-{strategy}")
        for stored in STORED
        for strategy in ("selective", "all_expert", "grouped")
        if strategy != "grouped" or stored.fmt.is_mx  # each distinct expert once: a form of the MX leaf
    ],
)
def test_every_stored_format_in_every_strategy(stored, strategy):
    spec, weights, x = case_of(stored)
    got = make(spec, weights, strategy=strategy)(x)
    assert got.dtype == x.dtype
    assert_right(got, truth(spec, weights, x).out, stored.fmt)


@pytest.mark.parametrize("chosen", ["spec", "extended"])
@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.BF16])
def test_gpt_oss_with_padded_hidden_under_both_gates(fmt, chosen):
    """2880 becomes 3072; under the spec's gates the up offset is folded into bias and clamp."""
    spec, weights, x = case_of(Stored(fmt), count=4, hidden=2880, intermediate=48, experts=4)
    for strategy in ("selective", "all_expert"):
        got = make(spec, weights, strategy=strategy, gates=chosen)(x)
        assert_right(got, truth(spec, weights, x).out, fmt, strategy)


@pytest.mark.parametrize(
    ("fmt", "strategy"),
    [
        (WeightFormat.MXFP4, "all_expert"),
        (WeightFormat.MXFP4, "selective"),
        (WeightFormat.MXFP4, "grouped"),
        (WeightFormat.BF16, "all_expert"),
        (WeightFormat.BF16, "selective"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_an_expert_parallel_group_add_up(fmt, strategy, ranks):
    spec, whole, x = case_of(Stored(fmt))
    local, total = 8 // ranks, 0.0
    for rank in range(ranks):
        weights = Stored(fmt).weights(spec, local_experts=local, first_expert=rank * local)
        got = make(spec, weights, strategy=strategy, rank_id=rank)(x)
        want = truth(spec, weights, x, strategy="all_expert", first=rank * local).out
        assert_right(got, want, fmt, f"rank {rank}")
        assert_zero_where_zero(f"rank {rank}", got, want)
        total = total + got.astype(float)
    assert_right(total, truth(spec, whole, x).out, fmt)


@pytest.mark.parametrize(
    "stored", [Stored(WeightFormat.MXFP4, block_order="trainium"), Stored(WeightFormat.MXFP8_E4M3,
    block_order="trainium")], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_the_cpu_backend_agrees(stored, strategy):
    """precision="mxfp8", h_rounding="io", block_order="trainium": two implementations of one arithmetic."""
    spec, weights, x = case_of(stored, count=40, hidden=1024, intermediate=200)
    cpu = md.MoEBlock(spec, weights, strategy=strategy, **numerics_of(stored.fmt))
    got, want = make(spec, weights, strategy=strategy)(x), cpu(x)
    assert_close("neuron beside cpu", got, want, 4e-3, MX_ROW)


@pytest.mark.parametrize("stored", [Stored(WeightFormat.MXFP4), Stored(WeightFormat.BF16)], ids=str)
@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_residual_and_routing(stored, strategy):
    spec, weights, x = case_of(stored, router={"pre_norm": True, "bias": True})
    residual = x[::-1].copy()
    got = make(spec, weights, strategy=strategy)(x, residual=residual, return_router=True)
    want = truth(spec, weights, x, residual)
    gap = np.sort(want.logits, -1)[:, -2] - np.sort(want.logits, -1)[:, -3]
    clear = gap > 1e-2
    assert clear.sum() >= 3
    summed = (x.astype(np.float32) + residual.astype(np.float32)).astype(BF16)
    assert_bits_equal("residual", got.residual, summed)
    assert got.expert_index.dtype == np.int32 and got.affinities.dtype == np.float32
    assert_bits_equal("index", got.expert_index[clear], want.index[clear].astype(np.int32))
    assert_close("logits", got.router_logits, want.logits, 1e-2)
    chosen = [np.take_along_axis(a, want.index, -1)[clear] for a in (got.affinities, want.affinities)]
    assert_close("affinities", *chosen, 1e-2)
    assert_right(got.out[clear], want.out[clear], stored.fmt)


@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.BF16])
def test_masked_tokens_are_not_given_to_the_kernel(fmt):
    spec, weights, x = case_of(Stored(fmt))
    block = make(spec, weights, strategy="selective")
    mask = np.array([True, False, True, True, False])
    x[1] = np.nan
    got = block(x, token_mask=mask, return_router=True)
    assert_right(got.out[mask], truth(spec, weights, x[mask]).out, fmt)
    assert not got.out[~mask].any() and (got.expert_index[~mask] == -1).all()
    assert not got.affinities[~mask].any() and not got.router_logits[~mask].any()
    nobody = block(x, token_mask=np.zeros(5, bool), return_router=True)
    assert not nobody.out.any() and (nobody.expert_index == -1).all()


def test_no_tokens_and_an_array_to_write_into():
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4))
    block = make(spec, weights, strategy="selective")
    assert block(x[:0]).shape == (0, spec.hidden)
    out = np.full_like(x, 7)
    assert block(x, out=out) is out
    assert_bits_equal("out", out, block(x))


SILU = {
    "activation": "silu",
    "up_offset": 0.0,
    "gate_clamp": (None, None),
    "up_clamp": (None, None),
    "bias": False,
}


@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.FP16, WeightFormat.FP8_E4M3])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_a_shared_expert_is_added(strategy, gated, fmt):
    """Of another activation than the routed ones, with biases."""
    shared = md.ExpertSpec(64, activation="gelu_tanh", bias=True, gate_clamp=(None, 1.0))
    spec, weights, x = case_of(Stored(fmt), shared=shared, shared_gate=gated)
    got = make(spec, weights, strategy=strategy)(x)
    assert_right(got, truth(spec, weights, x).out, fmt)


@pytest.mark.parametrize("strategy", ["selective", "all_expert", "grouped"])
def test_a_shared_expert_beside_mx_runs_in_the_io_dtype(strategy):
    """The reference quantises its activations too: the sum of the two parts is taken apart here."""
    stored = Stored(WeightFormat.MXFP4)
    spec, weights, x = case_of(stored, expert=SILU, shared=md.ExpertSpec(64))
    alone = replace(spec, shared=None)
    routed = truth(alone, replace(weights, shared=None), x).out
    numerics = Numerics("a16", None)
    both, one = (
        ReferenceBackend()
        .block(s, w, weights.experts, w.shared, numerics, 1)
        .values(x, None, "grouped", 0)
        .out
        for s, w in ((spec, weights), (alone, replace(weights, shared=None)))
    )
    got = make(spec, weights, strategy=strategy)(x)
    assert_right(got, routed + both - one, stored.fmt)


def test_a_router_with_a_selection_bias_a_scale_and_normalised_sigmoids():
    """GLM-4.5 and DeepSeek-V3 but for its groups."""
    router = {
        "score": "sigmoid", "pre_norm": True, "norm_topk_prob": True, "norm_eps": 1e-20, "scale": 2.5,
        "selection_bias": True, "bias": False,
    }  # fmt: skip
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4), router=router)
    for strategy in ("selective", "all_expert", "grouped"):
        got = make(spec, weights, strategy=strategy)(x)
        assert_right(got, truth(spec, weights, x).out, WeightFormat.MXFP4, strategy)


@pytest.mark.parametrize("router", [
    {"pre_norm": True, "norm_topk_prob": False}, {"pre_norm": True, "norm_topk_prob": True},
    {"pre_norm": False, "norm_topk_prob": True, "score": "softmax"}, {"pre_norm": False, "score": "sigmoid"},
    {"pre_norm": False, "norm_topk_prob": True, "score": "sigmoid"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_every_router_combination(router, strategy):
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4), router=router)
    got = make(spec, weights, strategy=strategy)(x)
    assert_right(got, truth(spec, weights, x).out, WeightFormat.MXFP4)


@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.BF16])
@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_many_tokens(fmt, strategy):
    spec, weights, x = case_of(Stored(fmt), count=150)
    assert_right(make(spec, weights, strategy=strategy)(x), truth(spec, weights, x).out, fmt)


@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_float32_activations_with_plain_weights(strategy):
    spec, weights, x = case_of(Stored(WeightFormat.BF16), dtype="float32")
    assert_close("out", make(spec, weights, strategy=strategy)(x), truth(spec, weights, x).out, 1e-5)


@pytest.mark.parametrize("strategy", ["selective", "all_expert"])
def test_plain_weights_on_the_chip_before(strategy):
    spec, weights, x = case_of(Stored(WeightFormat.BF16))
    got = make(spec, weights, strategy=strategy, chip="trn2")(x)
    assert_right(got, truth(spec, weights, x).out, WeightFormat.BF16)


# ------------------------------------------------------------------ flat functions and reports


def test_a_handle_serves_the_flat_functions():
    a = block_arguments(weights=mx_experts(experts=6), hidden=512)
    names = (
        "expert_gate_up_weights",
        "expert_down_weights",
        "expert_gate_up_weights_scale",
        "expert_down_weights_scale",
    )
    handle = md.pack(*(a[n] for n in names), backend="neuron")
    packed = a | {"expert_gate_up_weights": handle, "expert_down_weights": None}
    packed |= dict.fromkeys(names[2:])
    want = md.moe_block_tkg(**a, backend="neuron")
    for got, wanted in zip(md.moe_block_tkg(**packed, backend="neuron"), want, strict=True):
        assert_bits_equal("outputs", got, wanted)


def test_the_flat_functions_take_torch_tensors():
    torch = pytest.importorskip("torch")
    a = block_arguments(weights=mx_experts(experts=6), hidden=512)
    want = md.moe_block_tkg(**a, backend="neuron")[0]
    a["inp"] = torch.from_numpy(a["inp"].view(np.int16)).view(torch.bfloat16)
    got = md.moe_block_tkg(**a, backend="neuron")[0]
    assert_bits_equal("out", got.view(torch.int16).numpy().view(BF16), want)


def test_the_last_report_is_kept():
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4))
    block = make(spec, weights, strategy="selective")
    assert block.report is None
    block(x)
    report = block.report
    assert report is neuron.last_report()
    read = report.ledger.named("expert_down_weights")
    assert 0 < read.distinct_read_chip <= read.nbytes and not report.races
    stages = block.profile(x)
    assert {"dma", "tensor"} <= set(stages) and all(len(seconds) == 2 for seconds in stages.values())
    assert md.MoEBlock(spec, weights, backend="reference").report is None


def test_figures_set_bytes_beside_their_floor():
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4), count=1, hidden=512, intermediate=512)
    able = NeuronBackend()
    block = able.block(spec, weights, able.pack(weights.experts), None, Numerics("mxfp8", "io"), 0)
    call = {"first_expert": 0, "residual": None, "token_mask": None, "return_router": False, "out": None}
    block.run(x, strategy="selective", **call)
    one = 3 * 512 * 512 * 17 // 32 + 2 * (2 * 512 + 512) * 2  # codes and scales, float32 biases
    rest = (512 + 512 + 512 * 8 + 8) * 2 + 512 * 2  # inp, gamma, router, its bias; out
    figures = block.figures()
    size = floor.BlockSize(
        512, 512, 8, 2, WeightFormat.MXFP4, bias_bytes=4, router_bias=True
    )  # the same floor, from dimensions alone
    assert figures.hbm_floor_bytes == floor.floor_bytes(size, "selective", 1, logits=False)
    assert figures.hbm_floor_bytes == pytest.approx(2 * one + rest, rel=1e-3)
    assert figures.hbm_floor_bytes <= figures.hbm_bytes <= 1.05 * figures.hbm_floor_bytes
    assert (
        figures.bottleneck in figures.engines_us
        and figures.bound_us == figures.engines_us[figures.bottleneck]
    )
    assert 0 < figures.sbuf_peak_bytes <= figures.sbuf_limit_bytes and figures.races == 0


def test_grouped_reads_a_distinct_expert_once_where_selective_reads_it_for_every_token():
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4), count=12)
    times = {}
    for strategy in ("selective", "grouped"):
        block = make(spec, weights, strategy=strategy)
        routed = block(x, return_router=True).expert_index
        row = block.report.ledger.named("expert_gate_up_weights")
        times[strategy] = row.times_read
        assert row.distinct_read_chip * 8 == row.nbytes * len(np.unique(routed))
    assert times["grouped"] == 1
    assert times["selective"] == pytest.approx(routed.size / len(np.unique(routed)))


def test_a_plan_speaks_of_sbuf_and_auto_takes_a_strategy_the_format_has():
    for fmt in (WeightFormat.BF16, WeightFormat.MXFP4):
        spec, weights, _ = case_of(Stored(fmt))
        plan = make(spec, weights, strategy="auto").plan(4)
        assert plan.backend == "neuron" and any(row.where == "SBUF" for row in plan.residency)
        assert fmt.is_mx or plan.strategy != "grouped"
    assert (
        "grouped"
        not in make(spec, weights, gates="spec", strategy="selective")._backend.capabilities.strategies
    )


def test_ledger_only_counts_what_the_full_run_counts():
    spec, weights, x = case_of(Stored(WeightFormat.MXFP4), count=4, hidden=512)
    rounded = {n: getattr(weights.experts, n).astype(BF16).astype(np.float32) for n in BIASES}  # as described
    weights = replace(weights, experts=replace(weights.experts, **rounded))
    call = {"first_expert": 0, "residual": None, "token_mask": None, "return_router": False, "out": None}
    counted = []
    for compute in (True, False):
        able = NeuronBackend(compute=compute)
        experts = able.pack(weights.experts) if compute else described_experts(weights.experts)
        block = able.block(spec, weights, experts, None, Numerics("mxfp8", "io"), 0)
        block.run(x, strategy="all_expert", **call)
        counted.append((block.figures(), {row.name: (row.read, row.written) for row in block.report.rows}))
    (full, full_rows), (ledger, ledger_rows) = counted
    assert full_rows == ledger_rows
    assert full == ledger


def test_hidden_actual_of_a_padded_model_reaches_the_norm():
    spec, _, _ = case_of(Stored(WeightFormat.MXFP4), hidden=512)
    spec = replace(spec, hidden_actual=448)
    weights = Stored(WeightFormat.MXFP4).weights(spec)
    x = clear_tokens(4, spec, weights, "bfloat16")
    assert_right(
        make(spec, weights, strategy="selective")(x), truth(spec, weights, x).out, WeightFormat.MXFP4
    )


def test_kernels_of_the_toolchain_are_not_run_on_the_model(monkeypatch):
    monkeypatch.setattr(neuron.backend, "on_model", False)
    with pytest.raises(md.UnsupportedConfig, match=r"MOEDECODE_NKI='toolchain': .* do not run on the model"):
        NeuronBackend()
