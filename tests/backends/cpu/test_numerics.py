"""The experts of the cpu backend against the float64 reference, before and after the rounding of the output.

Covers every stored format x precision x affinity mode x strategy x instruction set; the labelled shapes;
activations, clamps and biases; the shared expert; the MX quantiser bit by bit; NaN and infinite weights.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import moedecode as md
from blocks import MODES, STORED, STRATEGIES, Stored, clear_tokens, reference, spec_of, values
from moedecode import _native
from moedecode.backends import Numerics
from moedecode.backends.cpu import CpuBackend
from moedecode.backends.reference import ReferenceBackend
from moedecode.formats import StoredMatrix, WeightFormat, dequantise_e4m3
from moedecode.spec import ACTIVATIONS, PRECISIONS
from moedecode.synthetic import expert_weights, tokens
from moedecode.weights import ExpertMatrices, ExpertWeights
from numeric import assert_bits_equal, assert_close, worst_row_rel_l2

ISAS = _native.available_isas()
POST = md.ExpertAffinityScaleMode.POST_SCALE

FLOAT, FIXED16, FIXED8 = 2e-5, 1.5e-4, 2.5e-2
ROUNDED = {"float32": 0.0, "bfloat16": 4e-3, "float16": 1e-3}
"""Rounding the output costs 1.7e-3 in bfloat16, 2e-4 in float16; a norm rounded the other way the rest."""
MX_MOST_ROWS, MX_ANY_ROW, MX_SHARE = 2e-3, 1e-1, 0.98


def bound_of(fmt, precision):
    """The bound of the arithmetic alone: float activations, 16-bit or 8-bit fixed point."""
    if precision == "a8":
        return FIXED8
    return FIXED16 if fmt is WeightFormat.MXFP4 and precision == "a16" else FLOAT


def check(name, got, want, fmt, precision, dtype="float32", row_factor=1):
    """Whole array and worst row within the bound; "mxfp8": nearly all rows within the tight one."""
    rounding = ROUNDED[dtype]
    if precision != "mxfp8":
        bound = max(bound_of(fmt, precision), rounding)
        return assert_close(name, got, want, bound, row_factor * bound)
    rows = np.array([worst_row_rel_l2(g[None], w[None])[0] for g, w in zip(got, want, strict=True)])
    tight = (rows <= max(MX_MOST_ROWS, rounding)).sum()
    allowed = max(MX_SHARE * len(rows), 0) if len(rows) >= 50 else len(rows) - 1
    assert tight >= allowed, f"{name}: {tight} of {len(rows)} rows within {MX_MOST_ROWS}"
    return assert_close(name, got, want, MX_ANY_ROW, MX_ANY_ROW)


# --- every format ---


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_every_format(stored):
    """H = 512 so that every block order exists; I off the tile and off the block."""
    base = spec_of(512, 72)
    weights = stored.weights(base)
    x = clear_tokens(100, base, weights)
    for precision, mode in itertools.product(PRECISIONS, MODES):
        spec = replace(base, affinity_scale=mode)
        block = md.MoEBlock(spec, weights, precision=precision)
        truth = reference(spec, weights, precision)
        routed = values(truth, x).out
        for strategy in STRATEGIES:
            block.strategy = strategy
            dense = mode is MODES[0] and strategy == "all_expert"
            want = values(truth, x, None, strategy).out if dense else routed
            for isa in ISAS:
                _native.use_isa(isa)
                check(f"{precision} {mode.name} {strategy} {isa}", block(x), want, stored.fmt, precision)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_output(stored, dtype):
    spec = spec_of(512, 72)
    weights = stored.weights(spec)
    x = clear_tokens(64, spec, weights, dtype)
    for precision in PRECISIONS:
        want = values(reference(spec, weights, precision), x).out
        block = md.MoEBlock(spec, weights, precision=precision)
        for isa in ISAS:
            _native.use_isa(isa)
            got = block(x)
            assert got.dtype == x.dtype
            check(f"{dtype} {precision} {isa}", got.astype(np.float64), want, stored.fmt, precision, dtype)


def test_h_rounded_to_the_io_dtype(isa):
    """h_rounding="io" rounds h to bfloat16 before its quantisation, which is not the same as leaving it."""
    stored = Stored(WeightFormat.MXFP8_E4M3)
    spec = spec_of(128, 64)
    weights = stored.weights(spec)
    x = clear_tokens(64, spec, weights, "bfloat16")
    both = [values(reference(spec, weights, "mxfp8", h), x).out for h in ("io", None)]
    got = md.MoEBlock(spec, weights, precision="mxfp8", h_rounding="io")(x).astype(np.float64)
    check("h_rounding", got, both[0], stored.fmt, "mxfp8", "bfloat16")
    rows = [
        np.linalg.norm(got - want, axis=1) < np.linalg.norm(both[0] - both[1], axis=1) / 2 for want in both
    ]
    assert rows[0].sum() > 3 * rows[1].sum()


# --- labelled shapes ---


@dataclass(frozen=True)
class Shape:
    """A labelled problem size; the label is the reason it is here."""

    label: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int = 8
    top_k: int = 2
    odd: bool = False
    """H or I is odd: no MXFP4 in natural order."""
    spec: dict = field(default_factory=dict)

    def __str__(self):
        return self.label


SHAPES = (
    Shape("one token", 1, 128, 64),
    Shape("fewer tokens than K", 2, 128, 64, 8, 4),
    Shape("a prime number of tokens", 7, 128, 64),
    Shape("H off the tile and the block", 5, 90, 64),
    Shape("H one past a tile, odd I", 5, 113, 45, odd=True),
    Shape("everything tiny", 3, 2, 1, 2, 1, odd=True),
    Shape("I below a tile", 5, 64, 6),
    Shape("K = 1", 9, 128, 64, 8, 1),
    Shape("K = E, E prime", 5, 96, 64, 7, 7),
    Shape("one expert", 5, 64, 32, 1, 1),
    Shape("scale rows of 90", 3, 2880, 32, 4, 2),
    Shape("H padded 2880 to 3072", 3, 3072, 32, 4, 2, spec={"hidden_actual": 2880}),
    Shape("more tokens than a chunk", 130, 64, 48, 4, 2),
    Shape("many tokens, tiny block", 2048, 32, 32, 16, 4),
)
SHAPE_FORMATS = (
    (WeightFormat.FP32, "a16"),
    (WeightFormat.BF16, "a16"),
    (WeightFormat.FP16, "a8"),
    (WeightFormat.FP8_E4M3, "a16"),
    (WeightFormat.MXFP8_E4M3, "mxfp8"),
    (WeightFormat.MXFP8_E5M2, "a16"),
    (WeightFormat.MXFP4, "a16"),
    (WeightFormat.MXFP4, "a8"),
    (WeightFormat.MXFP4, "mxfp8"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    spec = spec_of(shape.hidden, shape.intermediate, shape.experts, shape.top_k, **shape.spec)
    for fmt, precision in SHAPE_FORMATS:
        if shape.odd and fmt is WeightFormat.MXFP4:
            continue
        stored = Stored(fmt, "block")
        weights = stored.weights(spec)
        x = clear_tokens(shape.tokens, spec, weights)
        want = values(reference(spec, weights, precision), x).out
        block = md.MoEBlock(spec, weights, precision=precision)
        for strategy, isa in itertools.product(STRATEGIES, ISAS):
            block.strategy = strategy
            _native.use_isa(isa)
            factor = 2 if shape.tokens > 1000 else 1  # the worst of very many rows lies further out
            check(f"{stored} {precision} {strategy} {isa}", block(x), want, fmt, precision, row_factor=factor)


@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.MXFP4])
def test_all_tokens_on_one_expert(fmt, isa):
    """One group of 70 tokens: more than one chunk of one expert, and nothing for the others."""
    spec = spec_of(64, 32, 4, 1)
    weights = Stored(fmt).weights(spec)
    bias = np.float32([0, 0, 100, 0])
    weights = replace(weights, router_bias=bias)
    x = tokens(70, 64, "float32")
    want = values(reference(spec, weights), x)
    assert (want.index == 2).all()
    for strategy in STRATEGIES:
        got = md.MoEBlock(spec, weights, strategy=strategy)(x)
        check(strategy, got, want.out, fmt, "a16")


@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.MXFP4])
def test_no_token_on_this_rank(fmt, isa):
    """Every token goes to experts 0 and 1; rank 1 owns 2 and 3 and adds exactly nothing."""
    spec = spec_of(64, 32, 4, 2)
    slices = [Stored(fmt).weights(spec, local_experts=2, first_expert=first) for first in (0, 2)]
    slices = [replace(w, router_bias=np.float32([100, 100, 0, 0])) for w in slices]
    x = tokens(9, 64, "float32")
    for strategy in STRATEGIES:
        here, elsewhere = (
            md.MoEBlock(spec, w, rank_id=rank, strategy=strategy)(x) for rank, w in enumerate(slices)
        )
        assert here.any(1).all()
        assert not elsewhere.any()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_add_up(mode, isa):
    """The partial sums of two ranks are the reference's, each on its own."""
    spec = spec_of(96, 40, 6, 3, affinity_scale=mode)
    x = clear_tokens(20, spec, Stored(WeightFormat.BF16).weights(spec))
    for rank, strategy in itertools.product((0, 1), STRATEGIES):
        weights = Stored(WeightFormat.BF16).weights(spec, local_experts=3, first_expert=3 * rank)
        want = values(reference(spec, weights), x, None, strategy, 3 * rank).out
        got = md.MoEBlock(spec, weights, rank_id=rank, strategy=strategy)(x)
        check(f"rank {rank} {strategy}", got, want, WeightFormat.BF16, "a16")


# --- activations, clamps, biases ---

CLAMPS = ((None, None), (-0.3, None), (None, 0.4), (-0.3, 0.4), (0.2, 0.2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, isa):
    """Bounds that bite: pre-activations are near 1."""
    cases = itertools.product((WeightFormat.FP32, WeightFormat.MXFP4), CLAMPS, CLAMPS[:4])
    for n, (fmt, gate, up) in enumerate(cases):
        options = {
            "gate_clamp": gate,
            "up_clamp": up,
            "bias": n % 3 > 0,
            "up_offset": (0.0, 1.0, -2.0)[n % 3],
        }
        alpha = (1.702, 0.5, -1.0)[n % 3]
        spec = spec_of(64, 48, 4, 2, expert={"activation": activation, "alpha": alpha} | options)
        weights = Stored(fmt).weights(spec)
        x = clear_tokens(12, spec, weights)
        want = values(reference(spec, weights), x).out
        # clamps leave some rows small beside the products that made them: those are allowed twice the bound
        check(f"{fmt.value} {options}", md.MoEBlock(spec, weights)(x), want, fmt, "a16", row_factor=2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_far_from_zero(activation, isa):
    """Gates from -40 to 40: no overflow, no lost tail (measured against the largest)."""
    width = 64
    spec = md.ExpertSpec(width, activation=activation, bias=True)
    eye = np.eye(width, dtype=np.float32)
    ramp = np.linspace(-40, 40, width, dtype=np.float32)
    zero = np.zeros_like(eye)
    for scale in (1.0, 0.1, 0.01, 10.0):
        weights = ExpertWeights.from_experts(
            [eye], [zero], [eye], gate_bias=(scale * ramp)[None], up_bias=np.ones((1, width), np.float32),
            down_bias=np.zeros((1, width), np.float32),
        )  # fmt: skip
        x = np.zeros((1, width), np.float32)
        got, want = (
            _experts(backend, x, weights, spec, "a16") for backend in (CpuBackend(), ReferenceBackend())
        )
        assert_close(f"{activation} {scale}", got, want, FLOAT, FLOAT)
        small = abs(scale * ramp) < 5
        np.testing.assert_allclose(got[0, small], want[0, small], rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("missing", ["gate_bias", "up_bias", "down_bias"])
def test_one_bias_missing(missing, isa):
    """Any of the three biases may be absent: it counts as zero."""
    spec = spec_of(64, 48, 4, 2)
    weights = Stored(WeightFormat.MXFP4).weights(spec)
    weights = replace(weights, experts=replace(weights.experts, **{missing: None}))
    x = clear_tokens(9, spec, weights)
    want = values(reference(spec, weights), x).out
    check(missing, md.MoEBlock(spec, weights)(x), want, WeightFormat.MXFP4, "a16")


# --- shared expert ---


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    "formats", [("MXFP4", "BF16"), ("FP8_E4M3", "MXFP8_E4M3"), ("BF16", "MXFP4")], ids="-".join
)
def test_shared_expert(formats, gate):
    """The shared expert has its own format, width, activation and biases, with and without its gate."""
    routed, own = (WeightFormat[name] for name in formats)
    mlp = md.ExpertSpec(56, activation="gelu", bias=True)
    for precision, mode in itertools.product(PRECISIONS, MODES):
        spec = spec_of(96, 40, 6, 2, shared=mlp, shared_gate=gate, affinity_scale=mode)
        weights = Stored(routed).weights(spec)
        shared = expert_weights(mlp, 96, 1, own, seed=7)
        wide = tokens(1, 96, "float32", seed=5)[0] if gate else None  # a gate that is far from one half
        weights = replace(weights, shared=shared, shared_gate=wide)
        x = clear_tokens(50, spec, weights)
        want = values(reference(spec, weights, precision), x).out
        for isa in ISAS:
            _native.use_isa(isa)
            got = md.MoEBlock(spec, weights, precision=precision)(x)
            coarse = WeightFormat.MXFP4 if WeightFormat.MXFP4 in (routed, own) else routed
            check(f"{precision} {mode.name} {isa}", got, want, coarse, precision)


# --- the MX quantiser, bit by bit ---


def _experts(backend, x, weights, spec, precision):
    """``x`` through local expert 0 alone, with affinity 1."""
    out = np.empty(x.shape, np.float32)
    index, one = np.zeros((len(x), 1), np.int32), np.ones((len(x), 1), np.float32)
    backend.experts(x, backend.pack(weights), spec, POST, "grouped", index, one, 0, Numerics(precision), out)
    return out


def _passing(down):
    """An expert with h = x quantised (gate 1, up the identity) and the given ``down`` matrix."""
    width = down.shape[1]
    eye = StoredMatrix(WeightFormat.FP32, np.eye(width, dtype=np.float32))
    zero = StoredMatrix(WeightFormat.FP32, np.zeros((width, width), np.float32))
    model = ExpertWeights.from_experts([eye.codes], [eye.codes], [np.eye(width, dtype=np.float32)])
    one = np.ones((1, width), np.float32)
    matrices = ExpertMatrices(zero, eye, StoredMatrix(WeightFormat.FP32, down))
    return replace(model, expert=lambda e: matrices, gate_bias=one), md.ExpertSpec(
        width, activation="relu", bias=True
    )


def _hard_blocks():
    """Rows of 64: powers of two, ties between codes, saturation, subnormals, zeros, every binade."""
    rng = np.random.default_rng(0)
    ties = np.float32([16 + n + 0.5 for n in range(32)] * 2)  # halfway between neighbours at three bits
    rows = [np.exp2(np.arange(64) % 23 - 15.0), ties, -ties / 64, np.full(64, 1.0), np.linspace(0, 447, 64)]
    rows += [np.full(64, 479.9), np.r_[np.zeros(32), rng.standard_normal(32)], np.zeros(64)]
    rows += [rng.standard_normal(64) * 2.0**e for e in range(-118, 112, 5)]
    rows += [rng.standard_normal(64) * np.exp2(rng.uniform(-20, 0, 64)) for _ in range(200)]
    rows += [np.r_[1.0, np.arange(1, 32) * 2.0**-18, 448.0, np.arange(31) * 2.0**-10]]
    return np.stack(rows).astype(np.float32)


def test_quantiser_bit_exact(isa):
    """Identity matrices carry the quantised input to the output: every bit is the rule's."""
    x = _hard_blocks()
    weights, spec = _passing(np.eye(64, dtype=np.float32))
    got = _experts(CpuBackend(), x, weights, spec, "mxfp8")
    assert_bits_equal("quantised", np.abs(got), np.abs(dequantise_e4m3(x).astype(np.float32)))


def test_matmul_on_given_codes(isa):
    """The product itself is exact to float32 arithmetic once the codes are given."""
    down = tokens(64, 64, "float32", seed=3)
    weights, spec = _passing(down)
    x = tokens(40, 64, "float32", seed=4)
    got = _experts(CpuBackend(), x, weights, spec, "mxfp8")
    assert_close("matmul", got, dequantise_e4m3(x) @ down.T.astype(np.float64), FLOAT, FLOAT)


# --- weights that are not finite ---


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_nan_weights(stored, isa):
    """A NaN code or scale of the down matrix makes its output column NaN, for the tokens of that expert."""
    hidden, row = 512, 37
    spec = spec_of(hidden, 64, 4, 1)
    weights = stored.weights(spec)
    whole = weights.experts.expert

    def expert(e):
        m = whole(e)
        if e != 1:
            return m
        codes, scale = m.down.codes.copy(), m.down.scale
        if stored.fmt is WeightFormat.MXFP4:
            scale = scale.copy()
            scale[row, 1] = 0xFF
        else:
            codes[row, 40] = np.nan
        return replace(m, down=StoredMatrix(m.down.fmt, codes, scale))

    weights = replace(weights, experts=replace(weights.experts, expert=expert))
    x = clear_tokens(40, spec, weights)
    for precision in PRECISIONS:
        want = values(reference(spec, weights, precision), x)
        got = md.MoEBlock(spec, weights, precision=precision)(x)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want.out))
        assert np.isnan(got[want.index[:, 0] == 1, row]).all()
        assert np.isnan(got).sum() == (want.index == 1).sum() > 0


def test_infinite_weights(isa):
    """float8_e5m2 has infinities: the column is not finite, and the others are untouched."""
    spec = spec_of(64, 64, 4, 1)
    weights = Stored(WeightFormat.FP8_E5M2, "tensor").weights(spec)
    whole = weights.experts.expert

    def expert(e):
        m = whole(e)
        codes = m.down.codes.copy()
        codes[5, 40] = np.inf
        return replace(m, down=StoredMatrix(m.down.fmt, codes, m.down.scale))

    x = clear_tokens(20, spec, weights)
    clean = md.MoEBlock(spec, weights)(x)
    got = md.MoEBlock(spec, replace(weights, experts=replace(weights.experts, expert=expert)))(x)
    others = np.arange(64) != 5
    assert not np.isfinite(got[:, 5]).any()
    assert_bits_equal("other columns", got[:, others], clean[:, others])


@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.MXFP8_E4M3, WeightFormat.MXFP8_E5M2])
def test_far_apart_scales(fmt, isa):
    """Neighbouring blocks and rows whose E8M0 scales differ by up to 2^60."""
    spec = spec_of(
        128, 64, 4, 1, expert={"gate_clamp": (None, None), "up_clamp": (None, None), "activation": "relu"}
    )
    weights = Stored(fmt).weights(spec)
    whole, rng = weights.experts.expert, np.random.default_rng(1)

    def expert(e):
        m = whole(e)
        scale = np.random.default_rng((e, 1)).integers(97, 158, m.down.scale.shape, np.uint8)
        return replace(m, down=StoredMatrix(m.down.fmt, m.down.codes, scale))

    weights = replace(weights, experts=replace(weights.experts, expert=expert))
    x = clear_tokens(60, spec, weights, seed=int(rng.integers(100)))
    for precision in PRECISIONS:
        want = values(reference(spec, weights, precision), x).out
        got = md.MoEBlock(spec, weights, precision=precision)(x)
        columns = np.linalg.norm(want, axis=0)  # each output column has its own magnitude
        check(precision, got / columns, want / columns, fmt, precision, row_factor=2)
