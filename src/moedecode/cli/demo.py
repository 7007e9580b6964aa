"""`moedecode demo`: one block of a real model's dimensions, planned, timed and held against float64.

Owns the measurement (fresh random tokens in every call, token counts interleaved, bandwidth of the
same run) and its tables. Knows blocks through their public face only.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import typer

from .. import machine
from ..arrays import Array
from ..backends import Numerics
from ..backends.reference import ReferenceBackend
from ..block import MoEBlock
from ..conformance import BOUNDS, relative_errors
from ..formats import WeightFormat
from ..gates import require
from ..plan import expert_bytes
from ..presets import presets
from ..spec import BlockSpec
from ..synthetic import block_weights
from ..synthetic import tokens as random_tokens
from ..weights import BlockWeights, ExpertMatrices
from .console import console, gigabytes, print_text, progress, table
from .plan import FormatOption, PresetOption, parse_format, parse_tokens

__all__ = ["demo"]

ROUNDS = 24
SECONDS_PER_COUNT = 4.0  # stop timing a token count after this long, whatever the rounds
REFERENCE_TOKENS = 16  # the float64 reference takes about half a second for every expert it touches
DTYPE = "bfloat16"


@dataclass
class Timing:
    """The calls with one token count: an entry of each list for each call."""

    count: int
    seconds: list[float] = field(default_factory=list)
    distinct: list[int] = field(default_factory=list)
    bytes_per_second: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Error:
    """Relative L2 of ``rows`` tokens of one io dtype, of the whole output and of its worst row."""

    dtype: str
    rows: int
    whole: float
    worst_row: float
    bound: float


def demo(
    preset: PresetOption = "gpt-oss-20b",
    tokens: Annotated[str, typer.Option(help="New tokens of a call, as T or T,T,...")] = "1,4,16",
    fmt: FormatOption = "mxfp4",
    precision: Annotated[str, typer.Option(help="a16, a8 or mxfp8.")] = "a16",
    threads: Annotated[int, typer.Option(help="0 means all cores.")] = 0,
) -> None:
    """Pack one layer of a model, run it, and show the plan, the speed and the error."""
    spec, weight_format, counts = presets[preset], parse_format(fmt), sorted(set(parse_tokens(tokens)))
    require(counts[0] >= 1, "tokens", counts[0], "there is nothing to time", "use at least 1")
    _check_memory(spec, weight_format)
    _print_heading(preset, spec, weight_format, precision)
    weights = block_weights(spec, weight_format, dtype=DTYPE)
    block = _packed(spec, weights, precision, threads)
    _print_plans(block, counts)
    used = threads or machine.cores()
    with console.status("reading memory ..."):
        stream = machine.stream_read_gbps(used)
    timings = _timed(block, spec, weight_format, counts)
    errors = [e for io in (DTYPE, "float32") for e in _errors(block, spec, weights, precision, counts, io)]
    _print_speed(timings, stream, used, _layer_bytes(spec, weight_format))
    _print_errors(errors)


# ------------------------------------------------------------------ doing


def _check_memory(spec: BlockSpec, fmt: WeightFormat) -> None:
    needed = _layer_bytes(spec, fmt) + machine.STREAM_MEGABYTES * 1_000_000
    available = machine.memory_available()
    fits = available is None or needed < 0.8 * available
    have = "" if available is None else f", {gigabytes(available)} is available"
    require(
        fits,
        "preset",
        f"{gigabytes(needed)} of memory",
        f"does not fit{have}",
        "choose a smaller model or format",
    )


def _layer_bytes(spec: BlockSpec, fmt: WeightFormat) -> int:
    return spec.router.num_experts * expert_bytes(spec.experts, spec.hidden, fmt)


def _packed(spec: BlockSpec, weights: BlockWeights, precision: str, threads: int) -> MoEBlock:
    """The block, with a bar that moves as experts are drawn and packed one by one."""
    experts = weights.experts
    with progress() as bar:
        task = bar.add_task("drawing and packing experts", total=experts.num_experts)

        def shown(e: int) -> ExpertMatrices:
            matrices = experts.expert(e)
            bar.update(task, completed=e + 1)
            return matrices

        watched = replace(weights, experts=replace(experts, expert=shown))
        return MoEBlock(spec, watched, precision=precision, threads=threads)


def _timed(block: MoEBlock, spec: BlockSpec, fmt: WeightFormat, counts: list[int]) -> list[Timing]:
    """Every token count in turn, fresh tokens in every call, until the rounds or the time are used up."""
    timings = [Timing(count) for count in counts]
    size = expert_bytes(spec.experts, spec.hidden, fmt)
    with progress() as bar:
        task = bar.add_task("timing", total=ROUNDS * len(counts))
        for number in range(-1, ROUNDS):  # the first round warms up and does not count
            for timing in timings:
                if number < 0 or sum(timing.seconds) < SECONDS_PER_COUNT:
                    x = random_tokens(timing.count, spec.hidden, DTYPE, seed=1000 * timing.count + number + 1)
                    seconds, distinct = _call(block, x)
                    if number >= 0:
                        timing.seconds.append(seconds)
                        timing.distinct.append(distinct)
                        timing.bytes_per_second.append(distinct * size / seconds)
                if number >= 0:
                    bar.advance(task)
    return timings


def _call(block: MoEBlock, x: Array) -> tuple[float, int]:
    """Seconds of one call, and how many distinct experts it touched (asked for in a second call)."""
    out = np.empty_like(x)
    start = time.perf_counter()
    block(x, out=out)
    seconds = time.perf_counter() - start
    return seconds, len(np.unique(block(x, return_router=True).expert_index))


def _errors(
    block: MoEBlock, spec: BlockSpec, weights: BlockWeights, precision: str, counts: list[int], dtype: str
) -> list[Error]:
    """The error of every token count; smaller counts are the first rows of one reference pass."""
    most = min(counts[-1], REFERENCE_TOKENS)
    x = random_tokens(most, spec.hidden, dtype, seed=1)
    touched = np.unique(block(x, return_router=True).expert_index)
    with progress() as bar:
        task = bar.add_task(f"float64 reference, {dtype}", total=len(touched))

        def shown(e: int) -> ExpertMatrices:
            bar.advance(task)
            return weights.experts.expert(e)

        watched = replace(weights.experts, expert=shown)
        numerics = Numerics(precision, None)
        reference = ReferenceBackend().block(spec, weights, watched, weights.shared, numerics, 0)
        want = reference.values(x, None, "grouped", 0)
    found = []
    for count in counts:
        rows = min(count, most)
        got: Any = block(x[:rows], return_router=True)
        same = (got.expert_index == want.index[:rows]).all(-1)  # near ties may route either way
        whole, each = relative_errors(got.out[same], want.out[:rows][same])
        found.append(Error(dtype, rows, whole, float(each.max()), BOUNDS[precision, dtype]))
    return found


# ------------------------------------------------------------------ showing


def _print_heading(preset: str, spec: BlockSpec, fmt: WeightFormat, precision: str) -> None:
    e, r = spec.experts, spec.router
    layer = gigabytes(_layer_bytes(spec, fmt))
    console.print(f"[bold]One MoE block of {preset}[/]: H {spec.hidden}, I {e.intermediate}, ", end="")
    console.print(f"{r.num_experts} experts, {r.top_k} per token")
    console.print(f"{fmt.value} experts ({layer}), {DTYPE} tokens, precision {precision}, random weights")
    console.print(f"{machine.cores()} cores, {machine.isa()} kernels")
    console.print()


def _print_plans(block: MoEBlock, counts: list[int]) -> None:
    for count in counts:
        plan = block.plan(count)
        print_text(str(plan) if count == counts[-1] else plan.summary())
        console.print()


def _print_speed(timings: list[Timing], stream: float, threads: int, layer: int) -> None:
    cache = max((found.bytes for found in machine.caches()), default=0)
    speed = table(
        "Speed", "tokens", "calls", "median", "per token", "experts", "GB/s", "of stream read", left=0
    )
    for t in timings:
        median = statistics.median(t.seconds) * 1e3
        rate = statistics.median(t.bytes_per_second) / 1e9
        speed.add_row(
            str(t.count),
            str(len(t.seconds)),
            f"{median:.2f} ms",
            f"{median / t.count:.2f} ms",
            f"{statistics.mean(t.distinct):.1f}",
            f"{rate:.1f}",
            f"{100 * rate / stream:.0f} %",
        )
    console.print(speed)
    name = "1 thread" if threads == 1 else f"{threads} threads"
    console.print(f"GB/s counts each distinct expert once; stream read: {stream:.1f} GB/s with {name}")
    if layer < 4 * cache:
        console.print(f"the largest cache reported here, {gigabytes(cache)}, can hold part of these experts")
    console.print()


def _print_errors(errors: list[Error]) -> None:
    title = "Relative L2 against the float64 reference"
    made = table(title, "tokens in and out", "count", "whole", "worst row", "bound", "")
    for e in errors:
        verdict = "ok" if max(e.whole, e.worst_row) <= e.bound else "[bold red]TOO LARGE[/]"
        name = "float32 (no rounding)" if e.dtype == "float32" else e.dtype
        made.add_row(name, str(e.rows), f"{e.whole:.1e}", f"{e.worst_row:.1e}", f"{e.bound:.1e}", verdict)
    console.print(made)
    console.print(f"peak memory {gigabytes(machine.peak_memory())}")
