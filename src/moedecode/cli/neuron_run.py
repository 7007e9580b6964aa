"""One run of the megakernel on the model: weights drawn, kernel launched, output held against the reference.

Knows blocks' backends and synthetic weights; prints nothing but progress.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import IO_DTYPES, Array
from ..backends import Numerics, Request
from ..backends.neuron import NeuronBackend
from ..backends.neuron.launch import described_experts
from ..backends.neuron.layout import KernelExperts, kernel_experts
from ..backends.neuron.traffic import Figures
from ..backends.reference import ReferenceBackend, maths
from ..checks import check_backend
from ..conformance import relative_errors, undoubted_tokens
from ..formats import StoredMatrix, WeightFormat
from ..gates import require
from ..plan import choose_strategy
from ..spec import BlockSpec, ExpertSpec
from ..synthetic import block_weights
from ..synthetic import tokens as random_tokens
from ..weights import BlockWeights, ExpertMatrices, ExpertWeights
from .console import progress

__all__ = ["Done", "Setting", "run_once"]

DTYPE = "bfloat16"
BOUNDS = {True: (2e-2, 1e-1), False: (4e-3, 1e-2)}
"""Relative L2 of the whole output and of its worst row, MX and plain. MX: a missing quantisation shows at 4
to 8 %, a moved E4M3 code of one row at less; plain: h and the output are rounded to bfloat16."""
LARGEST_IEEE = 240.0  # of the E4M3 that has infinities


@dataclass(frozen=True)
class Setting:
    """What is run: one rank's block and call; ``compute`` False is the ledger-only mode."""

    name: str
    spec: BlockSpec
    fmt: WeightFormat
    tokens: int
    strategy: str
    chip: str
    rank: int = 0
    local_experts: int | None = None
    compute: bool = True

    @property
    def local(self) -> int:
        """E_L."""
        return self.spec.router.num_experts if self.local_experts is None else self.local_experts

    @property
    def numerics(self) -> Numerics:
        """What the kernel does: MX weights meet quantised activations, and h passes through the io dtype."""
        return Numerics("mxfp8", "io") if self.fmt.is_mx else Numerics("a16", None)


@dataclass(frozen=True)
class Done:
    """The result: figures, the machine's report, and the error (None in ledger-only mode)."""

    figures: Figures
    report: Any
    seconds: float
    error: float | None = None
    worst_row: float | None = None
    bounds: tuple[float, float] = (0.0, 0.0)

    @property
    def passed(self) -> bool:
        """True when both errors are within their bounds; NaN is not."""
        if self.error is None or self.worst_row is None:
            return False
        return self.error <= self.bounds[0] and self.worst_row <= self.bounds[1]

    def as_json(self, setting: Setting, shard: int) -> dict[str, Any]:
        """Everything by name."""
        return {
            "preset": setting.name,
            "chip": setting.chip,
            "format": setting.fmt.value,
            "tokens": setting.tokens,
            "strategy": setting.strategy,
            "shard": shard,
            "intermediate": setting.spec.experts.intermediate,
            "local_experts": setting.local,
            "error_rel_l2": self.error,
            "error_worst_row": self.worst_row,
            **self.figures.as_json(),
            "model_seconds": self.seconds,
            "tensors": [
                {
                    "name": row.name,
                    "read": list(row.read),
                    "written": list(row.written),
                    "times_read": row.times_read,
                }
                for row in self.report.rows
            ],
        }


def run_once(setting: Setting) -> Done:
    """Draw what is needed, run the kernel, and compare. Refusals of the backend come before any drawing."""
    spec, fmt, experts = setting.spec, setting.fmt, setting.spec.router.num_experts
    local, last = setting.local, experts // max(1, setting.local) - 1
    fits = 1 <= local <= experts
    require(fits, "local_experts", local, f"must lie in 1..{experts}", "leave it out for all experts")
    fits = 0 <= setting.rank <= last
    require(
        fits,
        "rank",
        setting.rank,
        f"{experts} experts in slices of {local} end at rank {last}",
        f"use 0..{last}",
    )
    able = NeuronBackend(setting.chip, compute=setting.compute)
    request = Request(spec, fmt, setting.numerics, local, setting.strategy, setting.tokens, DTYPE)
    able.refuse(request)
    choose_strategy(setting.strategy, spec, setting.tokens, local, fmt, able.capabilities, None)
    first = setting.rank * local
    weights = block_weights(spec, fmt, local_experts=local, first_expert=first, dtype=DTYPE)
    weights = replace(weights, experts=_for_chip(able, _narrow_biases(weights.experts)))
    if weights.shared is not None:
        weights = replace(weights, shared=_for_chip(able, weights.shared))
    check_backend(able, spec, weights.experts, setting.numerics)
    if not setting.compute:
        x = random_tokens(setting.tokens, spec.hidden, DTYPE)
        return _launched(able, setting, weights, described_experts(weights.experts), x, first)[0]
    x = undoubted_tokens(setting.tokens, spec, weights, DTYPE)
    weights = _with_local_choice(setting, weights, x, first)
    want, touched = _reference(setting, weights, x, first)
    packed = kernel_experts(weights.experts, None if setting.strategy == "all_expert" else touched)
    done, got = _launched(able, setting, weights, packed, x, first)
    whole, rows = relative_errors(got, want)
    return replace(done, error=whole, worst_row=float(rows.max()), bounds=BOUNDS[fmt.is_mx])


def _narrow_biases(experts: ExpertWeights) -> ExpertWeights:
    """Biases of bfloat16 values, as checkpoints hold them."""
    named = {name: getattr(experts, name) for name in ("gate_bias", "up_bias", "down_bias")}
    rounded: dict[str, Any] = {
        name: None if bias is None else bias.astype(IO_DTYPES[DTYPE]).astype(np.float32)
        for name, bias in named.items()
    }
    return replace(experts, **rounded)


def _for_chip(able: NeuronBackend, experts: ExpertWeights) -> ExpertWeights:
    """E4M3 codes within the 240 that a chip without MX can multiply, as its users would store them."""
    if experts.fmt is not WeightFormat.FP8_E4M3 or able.chip.has_mx:
        return experts

    def expert(e: int) -> ExpertMatrices:
        m = experts.expert(e)
        return ExpertMatrices(_within_240(m.gate), _within_240(m.up), _within_240(m.down))

    return replace(experts, expert=expert)


def _within_240(matrix: StoredMatrix) -> StoredMatrix:
    codes = np.clip(matrix.codes.astype(np.float32), -LARGEST_IEEE, LARGEST_IEEE)
    return replace(matrix, codes=codes.astype(matrix.codes.dtype))


def _with_local_choice(setting: Setting, weights: BlockWeights, x: Array, first: int) -> BlockWeights:
    """The weights with a router that sends a token of ``x`` to a local expert: zeros would prove nothing.

    Where no token chose one, the first local expert changes places with the first token's best.
    """
    spec = setting.spec
    r = maths.rounded(maths.rmsnorm(x.astype(np.float32), weights.gamma, spec.eps, spec.norm_width), x.dtype)
    _, index, _ = maths.route(r, weights.router, weights.router_bias, weights.selection_bias, spec.router)
    if ((index >= first) & (index < first + setting.local)).any():
        return weights
    order = np.arange(spec.router.num_experts)
    order[[first, index[0, 0]]] = index[0, 0], first

    def moved(rows: Array | None) -> Array | None:
        return None if rows is None else rows[order]

    return replace(
        weights,
        router=weights.router[order],
        router_bias=moved(weights.router_bias),
        selection_bias=moved(weights.selection_bias),
    )


def _reference(setting: Setting, weights: BlockWeights, x: Array, first: int) -> tuple[Array, list[int]]:
    """The float64 output, and the local experts that it looked at."""
    touched: set[int] = set()
    with progress() as bar:
        task = bar.add_task("float64 reference, expert by expert", total=None)

        def shown(e: int) -> ExpertMatrices:
            touched.add(e)
            bar.advance(task)
            return weights.experts.expert(e)

        watched = replace(weights.experts, expert=shown)
        routed = replace(weights, experts=watched, shared=None, shared_gate=None)
        spec = replace(setting.spec, shared=None, shared_gate=False)
        truth = ReferenceBackend().block(spec, routed, watched, None, setting.numerics, 1)
        strategy = "all_expert" if setting.strategy == "all_expert" else "grouped"
        want = truth.values(x, None, strategy, first).out
        if weights.shared is not None and setting.spec.shared is not None:
            want = want + _shared(setting.spec, weights, weights.shared, setting.spec.shared, x)
    return want, sorted(touched)


def _shared(
    block: BlockSpec, weights: BlockWeights, experts: ExpertWeights, spec: ExpertSpec, x: Array
) -> Array:
    """The shared expert's part, whose activations the kernel does not quantise, beside MX experts either."""
    normed = maths.rmsnorm(x.astype(np.float32), weights.gamma, block.eps, block.norm_width)
    r = maths.rounded(normed, x.dtype)  # [T, H]
    return maths.shared_expert(r, experts, weights.shared_gate, spec, Numerics("a16", None), x.dtype)


def _launched(
    able: NeuronBackend, setting: Setting, weights: BlockWeights, packed: KernelExperts, x: Array, first: int
) -> tuple[Done, Array]:
    block = able.block(setting.spec, weights, packed, None, setting.numerics, 0)
    start = time.perf_counter()
    got = block.run(
        x, strategy=setting.strategy, first_expert=first, residual=None, token_mask=None, return_router=False,
        out=None,
    ).out  # fmt: skip
    seconds = time.perf_counter() - start
    return Done(block.figures(), block.report, seconds), np.asarray(got)
