"""The MX leaves on the model against the reference with the same quantisation: numbers, bytes, residency.

Labelled shapes: I = 4 (two lanes), 64 (idle second core when split), 80 and 84 (ragged last block, short
last quad), 192 (one and a half quadrants), 516 and 640 (a full tile and a rest), 1100 (three tiles); T = 1,
odd, 65 (first token-major), 131 (two tiles of tokens); odd T*K and odd E_L (a unit split between the cores).
"""

import numpy as np
import pytest
from kernel_probe import assert_hbm_is, assert_read_once
from mx_leaves import (
    NO,
    POST,
    Experts,
    dense,
    gpt_oss_spec,
    random_experts,
    routing,
    run_leaf,
    want,
)

import golden
from moedecode.formats import WeightFormat
from moedecode.neuron.kernels import expert_loads_mx
from moedecode.neuron.kernels.expert_mx import pieces
from moedecode.neuron.machine import StandIn
from moedecode.neuron.machine.dtypes import DTYPES, bfloat16, float16
from moedecode.neuron.machine.errors import ConstraintViolation
from moedecode.spec import ExpertSpec
from numeric import assert_bits_equal, assert_close, worst_row_rel_l2

FLOAT = np.dtype(np.float32)
FP4, E4M3, E5M2 = WeightFormat.MXFP4, WeightFormat.MXFP8_E4M3, WeightFormat.MXFP8_E5M2
SPECS = {
    "gpt-oss": gpt_oss_spec,
    "silu": lambda i: ExpertSpec(intermediate=i),
    "swish1.3": lambda i: ExpertSpec(intermediate=i, activation="swish", alpha=1.3, up_offset=0.5),
    "gelu": lambda i: ExpertSpec(intermediate=i, activation="gelu", gate_clamp=(-1.0, None)),
    "gelu_tanh": lambda i: ExpertSpec(intermediate=i, activation="gelu_tanh", up_clamp=(None, 1.0)),
    "relu2": lambda i: ExpertSpec(intermediate=i, activation="relu2"),
}


def compute(
    leaf, t, h, i, e, k, fmt=FP4, io=float16, spec="gpt-oss", mode=POST, bias=True, cores=2, block=None
):
    """(out, want, report, experts)."""
    experts = random_experts(e, h, i, fmt, bias, io)
    x = np.random.default_rng(5).normal(size=(t, h)).astype(io)
    index, eager = routing(t, k, e)
    values = dense(index, eager, e) if leaf in ("all_expert", "dynamic") else eager
    case = (experts, x, index, values, SPECS[spec](i), mode)
    out, report = run_leaf(leaf, *case, cores=cores, block_size=block, out_dtype=FLOAT)
    return out, want(leaf, *case), report, experts


def assert_rows(out, expected):
    """Unrounded float32: rows agree to 2e-5 unless an E4M3 code moved, which 98% show by less than 2e-3."""
    rows = np.array([worst_row_rel_l2(o[None], w[None])[0] for o, w in zip(out, expected, strict=True)])
    assert out.dtype == np.float32 and np.isfinite(rows).all(), rows
    assert (rows <= 2e-5).mean() >= 0.5, f"median {np.median(rows):.3g}"
    assert (rows <= 2e-3).mean() >= 0.98 and rows.max() <= 1e-1, f"worst {rows.max():.3g}"


def weight_names(experts):
    return [f"tensors['{name}']" for name, value in experts.tensors.items() if value is not None]


SELECTIVE = [
    # T, H, I, E, K, more
    (1, 512, 64, 4, 2, {}),
    (1, 512, 84, 4, 1, {}),  # one unit of which the second core gets no lanes
    (1, 512, 192, 4, 1, {}),  # one unit, split by lanes
    (3, 512, 80, 4, 3, {"fmt": E4M3}),
    (5, 1024, 384, 8, 3, {"bias": False, "spec": "silu"}),
    (2, 512, 516, 4, 2, {"fmt": E4M3, "spec": "gelu_tanh"}),
    (2, 512, 512, 4, 2, {"fmt": E5M2, "mode": NO, "spec": "swish1.3"}),
    (2, 512, 192, 3, 3, {"spec": "relu2", "bias": False}),  # K = E
    (130, 512, 64, 4, 1, {}),
    (3, 512, 64, 4, 2, {"cores": 1}),
]


@pytest.mark.parametrize(("t", "h", "i", "e", "k", "more"), SELECTIVE)
def test_selective_is_the_reference(t, h, i, e, k, more):
    out, expected, report, experts = compute("selective", t, h, i, e, k, **more)
    assert_rows(out, expected)
    index, _ = routing(t, k, e)
    visits = np.bincount(index.ravel(), minlength=e)
    for name in weight_names(experts):
        row = report.ledger.named(name)
        each = row.nbytes // e
        assert each * visits.astype(bool).sum() >= row.distinct_read_chip, name
        assert sum(row.read) <= each * t * k, f"{name}: an expert was read more than once for a token"
    assert_only_io(report, experts, index=True)


ALL_EXPERT = [
    (1, 512, 4, 3, 2, {}),
    (4, 512, 640, 3, 2, {}),
    (33, 512, 1100, 1, 1, {}),
    (64, 1536, 64, 2, 2, {"mode": NO}),
    (65, 1024, 192, 2, 1, {"fmt": E4M3}),
    (131, 512, 192, 3, 2, {"spec": "gelu"}),
    (131, 512, 80, 2, 2, {"mode": NO, "cores": 1}),
    (5, 512, 32, 130, 1, {}),  # more experts than partitions: biases in two contractions
]


@pytest.mark.parametrize(("t", "h", "i", "e", "k", "more"), ALL_EXPERT)
def test_all_expert_is_the_reference(t, h, i, e, k, more):
    out, expected, report, experts = compute("all_expert", t, h, i, e, k, **more)
    assert_rows(out, expected)
    assert_once(report, experts)
    assert_only_io(report, experts)


DYNAMIC = [
    # T, B: fewer tokens than a block, several blocks, tokens on two tiles
    (3, 512, 80, 3, 1, {"block": 4}),
    (70, 1024, 80, 2, 2, {"block": 16, "fmt": E4M3}),
    (70, 512, 84, 2, 1, {"block": 128, "mode": NO, "cores": 1}),
    (131, 512, 600, 1, 1, {"block": 32}),
    (131, 512, 192, 5, 1, {"block": 2, "bias": False, "spec": "silu"}),
]


@pytest.mark.parametrize(("t", "h", "i", "e", "k", "more"), DYNAMIC)
def test_dynamic_is_the_reference(t, h, i, e, k, more):
    out, expected, report, experts = compute("dynamic", t, h, i, e, k, **more)
    assert_rows(out, expected)
    assert_once(report, experts)
    assert_only_io(report, experts)


DISTINCT = [
    (1, 512, 80, 6, 1, {}),
    (3, 512, 516, 6, 2, {"fmt": E4M3}),
    (64, 512, 192, 6, 2, {"mode": NO}),
    (131, 512, 80, 6, 2, {"spec": "gelu"}),
    (9, 512, 64, 40, 3, {"cores": 1, "bias": False}),
]


@pytest.mark.parametrize(("t", "h", "i", "e", "k", "more"), DISTINCT)
def test_distinct_is_the_reference_and_reads_each_touched_expert_once(t, h, i, e, k, more):
    out, expected, report, experts = compute("distinct", t, h, i, e, k, **more)
    assert_rows(out, expected)
    touched = len(np.unique(routing(t, k, e)[0]))
    for name in weight_names(experts):
        row = report.ledger.named(name)
        assert row.reread == 0, name
        assert row.distinct_read_chip <= row.nbytes // e * touched, name
    assert_only_io(report, experts, index=True)


def assert_once(report, experts):
    """Every needed element was read, once; ragged I leaves padding of down and of biases unread."""
    assert_read_once(report, "tensors['gate_up']", "tensors['gate_up_scale']")
    for name in weight_names(experts):
        row = report.ledger.named(name)
        assert row.reread == 0, name
        if experts.intermediate % 32 == 0 and experts.intermediate <= 512:
            assert row.distinct_read_chip == row.nbytes, name


def assert_only_io(report, experts, index=False):
    """Nothing but inputs and the output lives in HBM."""
    touched = {row.name for row in report.rows if row.kind == "input"}
    routed = {"index"} if index else set()
    affinities = touched & {"affinities"}  # absent under NO_SCALE
    assert_hbm_is(report, "x", *weight_names(experts), *routed, *affinities)
    assert [row.kind for row in report.rows if row.kind != "input"] == ["shared"], (
        "more than the output in HBM"
    )


@pytest.mark.parametrize("leaf", ["selective", "all_expert", "dynamic", "distinct"])
def test_the_output_is_rounded_once(leaf):
    experts = random_experts(3, 512, 80)
    x = np.random.default_rng(5).normal(size=(67, 512)).astype(bfloat16)
    index, eager = routing(67, 2, 3)
    values = dense(index, eager, 3) if leaf in ("all_expert", "dynamic") else eager
    case = (leaf, experts, x, index, values, gpt_oss_spec(80), POST)
    rounded, _ = run_leaf(*case, block_size=16)
    exact, _ = run_leaf(*case, block_size=16, out_dtype=FLOAT)
    assert rounded.dtype == bfloat16
    assert_bits_equal("out", rounded, exact.astype(bfloat16))


@pytest.mark.parametrize(
    ("leaf", "t"), [("selective", 2), ("all_expert", 3), ("all_expert", 70), ("dynamic", 5), ("distinct", 50)]
)
def test_experts_that_do_not_fit_are_loaded_in_pieces(leaf, t, monkeypatch):
    """One I-tile of gate and up and 512 columns of down at a time; T = 50 takes several PSUM tiles of y."""
    monkeypatch.setattr(expert_loads_mx, "LOAD_BYTES", 1)
    out, expected, report, experts = compute(leaf, t, 1536, 516, 3, 1, block=4)
    assert_rows(out, expected)
    assert all(report.ledger.named(name).reread == 0 or leaf == "selective" for name in weight_names(experts))


@pytest.mark.parametrize(("t", "mode"), [(3, POST), (67, POST), (131, NO)])
def test_biases_alone(t, mode):
    """Weights of zero leave the weighted sum of the down biases: none twice, no affinity rounded."""
    for leaf in ("selective", "all_expert", "dynamic", "distinct"):
        experts = random_experts(3, 512, 192)
        for name in ("gate_up", "down"):
            experts.tensors[name].view(np.uint16)[...] = 0  # shared with the reference
        x = np.random.default_rng(5).normal(size=(t, 512)).astype(bfloat16)
        index, eager = routing(t, 1, 3)
        values = dense(index, eager, 3) if leaf in ("all_expert", "dynamic") else eager
        case = (leaf, experts, x, index, values, gpt_oss_spec(192), mode)
        out, _ = run_leaf(*case, block_size=16, out_dtype=FLOAT)
        assert_close(leaf, out, want(*case), 2e-5)


def test_distinct_takes_a_rank_of_the_experts():
    """Ids of other ranks contribute nothing: experts 2..4 of 6."""
    experts = random_experts(3, 512, 80, io=float16)
    x = np.random.default_rng(2).normal(size=(7, 512)).astype(float16)
    index, eager = routing(7, 3, 6)
    spec = gpt_oss_spec(80)
    local = dense(index, eager, 6)[:, 2:5]
    out, _ = run_leaf("distinct", experts, x, index, eager, spec, POST, first_expert=2, out_dtype=FLOAT)
    assert_rows(out, want("all_expert", experts, x, index, local, spec, POST))


@pytest.mark.parametrize("leaf", ["all_expert", "dynamic"])
def test_a_rank_without_tokens_gives_zeros(leaf):
    experts = random_experts(2, 512, 80, io=float16)
    x = np.random.default_rng(2).normal(size=(5, 512)).astype(float16)
    out, report = run_leaf(
        leaf, experts, x, None, np.zeros((5, 2), np.float32), gpt_oss_spec(80), POST, block_size=4
    )
    assert not out.any()
    assert_once(report, experts)


def test_dynamic_computes_no_block_without_tokens():
    """A quarter of the tokens routed: the PE does much less than when all are."""
    experts = random_experts(1, 1024, 512, io=float16, bias=False)
    x = np.random.default_rng(2).normal(size=(64, 1024)).astype(float16)
    busy = {}
    for routed in (16, 64):
        affinities = (np.arange(64)[:, None] < routed).astype(np.float32)
        _, report = run_leaf("dynamic", experts, x, None, affinities, gpt_oss_spec(512), POST, block_size=16)
        busy[routed] = report.timeline.bounds()["tensor"]
    assert busy[16] < busy[64] / 2


def test_a_token_that_names_an_expert_twice_counts_it_twice():
    experts = random_experts(3, 512, 80, io=float16)
    x = np.random.default_rng(2).normal(size=(2, 512)).astype(float16)
    index, eager = np.array([[1, 1], [0, 2]], np.uint32), np.array([[0.5, 0.25], [1.0, 0.5]], np.float32)
    spec = gpt_oss_spec(80)
    for leaf in ("selective", "distinct"):
        out, _ = run_leaf(leaf, experts, x, index, eager, spec, POST, out_dtype=FLOAT)
        assert_rows(out, want(leaf, experts, x, index, eager, spec, POST))


def test_a_partial_sum_of_another_stage_is_added_once_per_core():
    """Ones from core 0 and zeros from core 1 come out as ones on top; every leaf and both layouts."""
    spec = gpt_oss_spec(80)
    for leaf, t in (
        ("selective", 3),
        ("all_expert", 3),
        ("all_expert", 70),
        ("dynamic", 3),
        ("distinct", 70),
    ):
        experts = random_experts(2, 512, 80, io=float16)
        x = np.random.default_rng(2).normal(size=(t, 512)).astype(float16)
        index, eager = routing(t, 1, 2)
        values = dense(index, eager, 2) if leaf in ("all_expert", "dynamic") else eager
        out, _ = run_leaf(
            leaf, experts, x, index, values, spec, POST, block_size=4, partial=True, out_dtype=FLOAT
        )
        assert_rows(out, want(leaf, experts, x, index, values, spec, POST) + 1.0)


@pytest.mark.parametrize("case", golden.cases("mx_projection"))
def test_golden_projections(case):
    """One expert, both projections: the stored output of an independent implementation."""
    given, options = case.inputs(), case.options
    name = case.logical(case.fields["inputs"]["gate_up_weights"])
    tensors = {
        "gate_up": given["gate_up_weights"][None].view(DTYPES[name]),
        "down": given["down_weights"][None].view(DTYPES[name]),
        "gate_up_scale": given["gate_up_scale"][None],
        "down_scale": given["down_scale"][None],
        "gate_up_bias": None if given["gate_up_bias"] is None else given["gate_up_bias"][None],
        "down_bias": given["down_bias"],
    }
    spec = ExpertSpec(intermediate=options["I"], activation="swish")
    experts = Experts(options["H"], options["I"], tensors, None)
    ones = np.ones((options["T"], 1), np.float32)
    out, _ = run_leaf("all_expert", experts, given["hidden"], None, ones, spec, POST)
    assert_close("out", out.astype(np.float32), case.want("out"), 5e-3)


FULL_SIZE = [
    # leaf, T, H, I, E, K, weights, bias: one core's SBUF and PSUM must hold it, weights are read once
    ("selective", 8, 3072, 384, 128, 4, "float4_e2m1fn_x4", True),
    ("selective", 1, 4096, 1536, 128, 8, "float8_e4m3fn_x4", False),
    ("all_expert", 256, 7168, 2048, 2, 8, "float8_e4m3fn_x4", False),
    ("all_expert", 128, 3072, 2880, 1, 4, "float8_e4m3fn_x4", True),
    ("dynamic", 256, 3072, 3072, 1, 4, "float4_e2m1fn_x4", True),
    ("distinct", 32, 3072, 384, 128, 4, "float4_e2m1fn_x4", True),
]


@pytest.mark.parametrize(("leaf", "t", "h", "i", "e", "k", "name", "bias"), FULL_SIZE)
def test_full_size_fits_and_reads_what_it_must(leaf, t, h, i, e, k, name, bias):
    """Addresses without data: capacity is checked by the machine, bytes against the experts that are met."""
    lanes, tiles = (128 if i >= 512 else 8 * -(-i // 32)), -(-i // 512)
    tensors = dict.fromkeys(("gate_up_bias", "down_bias"))
    tensors["gate_up"] = StandIn((e, 128, 2, h // 512, i), DTYPES[name])
    tensors["down"] = StandIn((e, lanes, tiles, h), DTYPES[name])
    tensors["gate_up_scale"] = StandIn((e, 16, 2, h // 512, i), np.uint8)
    tensors["down_scale"] = StandIn((e, lanes // 8, tiles, h), np.uint8)
    if bias:
        tensors["gate_up_bias"] = StandIn((e, lanes, 2, tiles, 4), bfloat16)
        tensors["down_bias"] = StandIn((e, h), bfloat16)
    index, _ = routing(t, min(k, e), e)
    width = e if leaf in ("all_expert", "dynamic") else k
    x, affinities = StandIn((t, h), bfloat16), StandIn((t, width), np.float32)
    options = gpt_oss_spec(i)
    _, report = run_leaf(
        leaf, Experts(h, i, tensors, None), x, index, affinities, options, POST, block_size=64, compute=False
    )
    met = {"selective": t * k, "distinct": len(np.unique(index))}.get(leaf, e)
    for key in ("gate_up", "gate_up_scale"):
        row = report.ledger.named(f"tensors['{key}']")
        assert sum(row.read) == row.nbytes // e * met, key
    if leaf == "selective":
        assert report.ledger.named("tensors['gate_up']").distinct_read_chip == row_bytes(
            tensors["gate_up"], len(np.unique(index))
        )


def row_bytes(tensor, experts):
    return int(np.prod(tensor.shape[1:])) * tensor.dtype.itemsize * experts


@pytest.mark.parametrize(
    "intermediate", [4, 8, 64, 80, 84, 192, 320, 384, 508, 512, 516, 640, 1100, 2880, 3072]
)
def test_halves_of_the_lanes_cover_every_column_once(intermediate):
    """Both halves together are the whole; each MX block of 8 lanes belongs to one half."""
    seen = np.zeros(intermediate, int)
    for half in (0, 1):
        for piece in pieces(intermediate, half):
            assert piece.lane % 32 == 0 and piece.lanes % 2 == 0
            for start, n in zip(piece.starts, piece.columns, strict=True):
                seen[start : start + n] += 1
    assert (seen == 1).all()
    whole = [s for piece in pieces(intermediate) for s in piece.columns]
    assert sum(whole) == intermediate


def test_refusals_say_why():
    experts = random_experts(1, 512, 64, io=float16)
    x, ones = np.ones((2, 512), float16), np.ones((2, 1), np.float32)
    spec = gpt_oss_spec(64)
    with pytest.raises(ValueError, match="block_size=3: must be even"):
        run_leaf("dynamic", experts, x, None, ones, spec, POST, block_size=3)
    with pytest.raises(ConstraintViolation, match="no MX instructions"):
        run_leaf("all_expert", experts, x, None, ones, spec, POST, chip="trn2")
    with pytest.raises(ValueError, match="activation='tanh'"):
        odd = ExpertSpec(intermediate=64)
        object.__setattr__(odd, "activation", "tanh")
        run_leaf("all_expert", experts, x, None, ones, odd, POST)
