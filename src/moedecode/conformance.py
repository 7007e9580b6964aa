"""Conformance: labelled cases that hold a backend against the float64 reference and its own invariants.

Owns the cases, the metric and the bounds; `moedecode check` prints what it finds, the tests assert it. Knows
blocks and synthetic weights; knows no commands and no golden files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .arrays import Array
from .backends import Numerics
from .backends.reference import ReferenceBackend, maths
from .block import MoEBlock
from .formats import WeightFormat
from .spec import PRECISIONS, BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from .synthetic import block_weights, tokens
from .weights import BlockWeights

__all__ = [
    "BOUNDS",
    "CASES",
    "Case",
    "Measure",
    "Shape",
    "errors",
    "invariants",
    "relative_errors",
    "undoubted_tokens",
    "worst",
]

STRATEGIES = ("selective", "grouped", "all_expert")
NEAR_TIE = 1e-3  # rows whose last chosen and first refused logits are closer may route either way
ROW_FLOOR = 0.05  # a row far below the RMS row is measured against this fraction of it
MX_TIGHT, MX_STRAY = 2e-3, 0.02  # "mxfp8": a moved E4M3 code may take this share of rows past the tight bound
MX_ROWS = 100  # fewer rows make no share

# Largest relative L2 of the whole output and of its worst row. float32 outputs show the arithmetic alone.
BOUNDS = {
    ("a16", "float32"): 1.5e-4,
    ("a8", "float32"): 2.5e-2,
    ("mxfp8", "float32"): 1e-1,
    ("a16", "bfloat16"): 4e-3,
    ("a8", "bfloat16"): 2.5e-2,
    ("mxfp8", "bfloat16"): 1e-1,
}
# A float32 norm may round to another bfloat16 than the reference's; nothing else separates the two.
ROUTER_BOUNDS = {"float32": 2e-5, "bfloat16": 4e-3}


@dataclass(frozen=True)
class Shape:
    """A labelled problem size; the label is the reason it is here."""

    label: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    hidden_actual: int | None = None
    block_order: str = "contiguous"
    style: str = "gpt-oss"
    """"gpt-oss" (biases, clamps, alpha, up_offset) or "shared" (normalised, PRE_SCALE, a shared expert)."""


SHAPES = (
    Shape("one token", 1, 256, 128, 8, 2),
    Shape("fewer tokens than K", 2, 128, 96, 8, 4),
    Shape("prime T, H off the tile", 7, 160, 72, 8, 2),
    Shape("scale rows of 90", 3, 2880, 32, 4, 2),
    Shape("H padded 448 to 512", 5, 512, 64, 8, 2, hidden_actual=448),
    Shape("K = 1", 11, 128, 64, 8, 1),
    Shape("K = E, E prime", 5, 96, 64, 7, 7),
    Shape("many tokens", 128, 128, 64, 16, 4),
    Shape("shared expert, PRE_SCALE", 5, 128, 64, 8, 2, style="shared"),
    Shape("Trainium blocks, odd I", 5, 512, 45, 8, 2, block_order="trainium"),
)


@dataclass(frozen=True)
class Case:
    """One block to hold against the reference; ``fp8_scale`` matters to the FP8 formats only."""

    shape: Shape
    fmt: WeightFormat
    precision: str
    dtype: str
    fp8_scale: str = "row"

    def __str__(self) -> str:
        scale = f" {self.fp8_scale} scales" if self.fmt.is_fp8 else ""
        return f"{self.fmt.value}{scale}, {self.precision}, {self.dtype}, {self.shape.label}"

    @property
    def spec(self) -> BlockSpec:
        """The block of this case."""
        return _shared(self.shape) if self.shape.style == "shared" else _gpt_oss(self.shape)

    def weights(self) -> BlockWeights:
        """The block's weights, the same on every call."""
        return block_weights(
            self.spec, self.fmt, seed=1, fp8_scale=self.fp8_scale, block_order=self.shape.block_order
        )


def _gpt_oss(s: Shape) -> BlockSpec:
    return BlockSpec(
        hidden=s.hidden,
        hidden_actual=s.hidden_actual,
        eps=1e-5,
        router=RouterSpec(s.experts, s.top_k, pre_norm=False, bias=True, matmul_dtype="float32"),
        experts=ExpertSpec(
            s.intermediate,
            activation="swish",
            up_offset=1.0,
            gate_clamp=(None, 7.0),
            up_clamp=(-7.0, 7.0),
            bias=True,
        ),
    )


def _shared(s: Shape) -> BlockSpec:
    return BlockSpec(
        hidden=s.hidden,
        router=RouterSpec(s.experts, s.top_k, norm_topk_prob=True, matmul_dtype="float32"),
        experts=ExpertSpec(s.intermediate),
        shared=ExpertSpec(2 * s.intermediate),
        shared_gate=True,
        affinity_scale=ExpertAffinityScaleMode.PRE_SCALE,
    )


def _formats() -> Iterator[tuple[WeightFormat, str]]:
    for fmt in WeightFormat:
        for scale in ("row", "tensor", "block") if fmt.is_fp8 else ("row",):
            yield fmt, scale


CASES = tuple(
    Case(shape, fmt, precision, dtype, scale)
    for fmt, scale in _formats()
    for precision in PRECISIONS
    for dtype in ("float32", "bfloat16")
    for shape in SHAPES
    if not (scale == "block" and shape.block_order == "trainium")  # 128x128 scales follow the natural order
)


@dataclass(frozen=True)
class Measure:
    """One figure beside its bound: ``kind`` groups figures, ``where`` says which case gave this one."""

    kind: str
    value: float
    bound: float
    where: str

    @property
    def passed(self) -> bool:
        """True within the bound; NaN is not."""
        return bool(self.value <= self.bound)


def relative_errors(got: Array, want: Array) -> tuple[float, Array]:
    """Relative L2 of the whole of ``got [T, H]`` and of each row; not finite where ``got`` is not."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    size, error = np.linalg.norm(want, axis=-1), np.linalg.norm(got - want, axis=-1)
    rms = np.sqrt((size**2).mean())
    if rms == 0:
        return float(np.linalg.norm(error)), error
    return float(np.linalg.norm(error) / np.linalg.norm(size)), error / np.maximum(size, ROW_FLOOR * rms)


def clear_tokens(case: Case, weights: BlockWeights) -> Array:
    """Tokens of a case whose routing leaves no doubt."""
    return undoubted_tokens(case.shape.tokens, case.spec, weights, case.dtype)


def undoubted_tokens(count: int, spec: BlockSpec, weights: BlockWeights, dtype: str) -> Array:
    """``[count, H]`` whose last chosen and first refused logits lie apart: near ties are drawn again."""
    top_k, kept = spec.router.top_k, list[Array]()
    for seed in range(100):
        x = tokens(2 * count, spec.hidden, dtype, seed)
        x[:, spec.norm_width :] = 0
        r = maths.rounded(
            maths.rmsnorm(x.astype(np.float32), weights.gamma, spec.eps, spec.norm_width), x.dtype
        )
        logits, _, _ = maths.route(r, weights.router, weights.router_bias, None, spec.router)
        ordered = np.sort(np.pad(logits, ((0, 0), (1, 0)), constant_values=-np.inf), axis=-1)
        kept.extend(x[ordered[:, -top_k] - ordered[:, -top_k - 1] > NEAR_TIE])
        if len(kept) >= count:
            break
    return np.stack(kept[:count])


def errors(case: Case, backend: str = "cpu") -> list[Measure]:
    """Errors of ``backend`` against the float64 reference in one case, for every strategy."""
    weights = case.weights()
    x = clear_tokens(case, weights)
    numerics = Numerics(case.precision, None)
    truth = ReferenceBackend().block(case.spec, weights, weights.experts, weights.shared, numerics, 1)
    want = truth.values(x, None, "grouped", 0)
    found = []
    for strategy in STRATEGIES:
        block = MoEBlock(case.spec, weights, backend=backend, strategy=strategy, precision=case.precision)
        got = block(x, return_router=True)
        where = f"{case}, {strategy}"
        misrouted = int((got.expert_index != want.index).any(-1).sum())
        found.append(Measure("tokens sent to other experts", misrouted, 0, where))
        _, rows = relative_errors(got.affinities, want.affinities)
        kind, bound = f"affinities of {case.dtype}, worst row", ROUTER_BOUNDS[case.dtype]
        found.append(Measure(kind, float(rows.max()), bound, where))
        whole, rows = relative_errors(got.out, want.out)
        kind, bound = f"{case.precision} {case.dtype} out", BOUNDS[case.precision, case.dtype]
        found.append(Measure(f"{kind}, whole", whole, bound, where))
        found.append(Measure(f"{kind}, worst row", float(rows.max()), bound, where))
        if case.precision == "mxfp8" and case.dtype == "float32" and len(rows) >= MX_ROWS:
            stray = float((rows > MX_TIGHT).mean())
            found.append(Measure(f"{kind}, rows past {MX_TIGHT:g}", stray, MX_STRAY, where))
    return found


def invariants(fmt: WeightFormat, precision: str, backend: str = "cpu") -> list[Measure]:
    """How many output rows break each bitwise promise, for one format and precision; the bound is none."""
    case = Case(Shape("invariants", 128, 160, 72, 8, 2), fmt, precision, "float32")
    spec, weights, where = case.spec, case.weights(), f"{fmt.value}, {precision}"
    x = tokens(128, spec.hidden, "float32", seed=3)

    def block(strategy: str = "grouped", threads: int = 0) -> MoEBlock:
        return MoEBlock(
            spec, weights, backend=backend, precision=precision, strategy=strategy, threads=threads
        )

    usual = block()
    want = usual(x)
    alone = np.concatenate([usual(x[t : t + 1]) for t in (0, 5, 64, 127)])
    seven = np.concatenate([usual(x[t : t + 7]) for t in (3, 60, 121)])
    picked = np.concatenate([np.arange(t, t + 7) for t in (3, 60, 121)])
    found = {
        "batch: a token alone": _differing(alone, want[[0, 5, 64, 127]]),
        "batch: seven tokens": _differing(seven, want[picked]),
        "batch: other positions": _differing(usual(x[::-1].copy()), want[::-1]),
        "repeat": _differing(usual(x), want),
    }
    for strategy in ("selective", "all_expert"):
        found[f"strategy: {strategy}"] = _differing(block(strategy)(x), want)
    for threads in (1, 2, 3):
        some = block(threads=threads)
        found[f"threads: {threads}"] = _differing(some(x), want) + _differing(some(x[:1]), want[:1])
    for name, bad in (("NaN", np.nan), ("infinity", np.inf)):
        poisoned = x.copy()
        poisoned[17, 3] = bad
        got = usual(poisoned)
        others = np.arange(128) != 17
        spread = _differing(got[others], want[others]) + int(not np.isnan(got[17]).all())
        found[f"bounded: a token with {name}"] = spread
    mask = np.arange(128) % 3 > 0
    got = usual(x, token_mask=mask)
    found["bounded: masked tokens"] = _differing(got[mask], want[mask]) + int(got[~mask].any(-1).sum())
    return [Measure(kind, value, 0, where) for kind, value in found.items()]


def worst(measures: list[Measure]) -> dict[str, Measure]:
    """The worst figure of each kind, in order of first appearance; one that failed is worse than any."""
    table: dict[str, Measure] = {}
    for m in measures:
        known = table.get(m.kind)
        if known is None or (known.passed, -known.value) > (m.passed, -m.value):
            table[m.kind] = m
    return table


def _differing(got: Array, want: Array) -> int:
    """Rows whose bits differ."""
    unsigned = f"u{got.itemsize}"
    same = np.ascontiguousarray(got).view(unsigned) == np.ascontiguousarray(want).view(unsigned)
    return int((~same).any(-1).sum())
