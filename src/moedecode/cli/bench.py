"""`moedecode bench`: how fast the block is here, beside the bandwidth of memory and beside other packages.

Owns the options, the order of work, the tables and the report; what is measured and how is
:mod:`moedecode.benchmark`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from .. import benchmark, machine
from ..benchmark import Contender, Figures, Laps, Setting
from ..block import MoEBlock
from ..gates import MissingExtra, MoEDecodeError, require
from ..peers import Engine, Peer, peers
from ..presets import presets
from ..spec import PRECISIONS, STRATEGIES
from .console import console, gigabytes, print_text, progress, table
from .plan import FormatOption, PresetOption, parse_format, parse_tokens

__all__ = ["bench"]

ALL = "all"


def bench(
    preset: PresetOption = "gpt-oss-20b",
    fmt: FormatOption = "mxfp4",
    tokens: Annotated[str, typer.Option(help="New tokens of a call, as T or T,T,...")] = "1,4,16,64,128",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "a16",
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}, or all.")] = "auto",
    threads: Annotated[int, typer.Option(help="0 means all cores.")] = 0,
    with_peers: Annotated[bool, typer.Option("--peers", help="Measure installed peers in turn.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a call goes.")] = False,
    rounds: Annotated[int, typer.Option(help="Calls of each contender at each T.")] = benchmark.ROUNDS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also draw time over T, as PNG.")] = None,
) -> None:
    """Time a block with fresh tokens in every call, interleaved with reading memory and with peers."""
    counts = sorted(set(parse_tokens(tokens)))
    require(counts[0] >= 1, "tokens", counts[0], "there is nothing to time", "use at least 1")
    known = f"choose one of {', '.join(STRATEGIES)}, {ALL}"
    require(strategy in (*STRATEGIES, ALL), "strategy", repr(strategy), "is not known", known)
    known = f"choose one of {', '.join(PRECISIONS)}"
    require(precision in PRECISIONS, "precision", repr(precision), "is not known", known)
    require(threads >= 0, "threads", threads, "must not be negative", "use 0 for all cores")
    require(rounds >= 1, "rounds", rounds, "there is nothing to time", "use at least 1")
    if plot_file is not None:
        _require_matplotlib()
    setting = Setting(preset, presets[preset], parse_format(fmt), precision, threads or machine.cores())
    strategies = benchmark.FIXED_STRATEGIES if strategy == ALL else (strategy,)
    chosen = peers() if with_peers else []
    reasons = {peer.name: _reason(peer, setting) for peer in chosen}
    usable = [peer for peer in chosen if reasons[peer.name] is None]
    copies = _copies(setting, len(strategies) + len(usable))
    _print_heading(setting, copies)

    auto, ours = _ours(setting, strategies, copies, with_profile=profile)
    taken = {count: auto.plan(count).strategy for count in counts}
    engines = [engine for peer in usable for engine in _built(peer, setting, copies, reasons)]
    _print_peers(engines, reasons)
    contenders = [*ours, *(Contender(e.name, e.calls, e.dtype, e.most_tokens) for e in engines)]
    laps = _measured(setting, contenders, counts, rounds)
    rows = benchmark.figures(laps, setting, strategies, taken)

    _print_rows(rows, laps, setting, strategies, taken)
    _print_speedups(rows, taken if strategy == ALL else {row.tokens: row.strategy for row in rows})
    if profile:
        for count in counts:
            _print_profile(count, benchmark.profile(auto, setting.spec.hidden, count))
    if json_file is not None:
        _write(json_file, [row.as_json(setting) for row in rows])
    if plot_file is not None:
        from .bench_plot import draw

        draw(plot_file, setting, rows)


# ------------------------------------------------------------------ doing


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        way_out = 'install the extra: pip install "moedecode[plot]"'
        raise MissingExtra(f"--plot needs matplotlib; {way_out}") from error


def _reason(peer: Peer, setting: Setting) -> str | None:
    return peer.available() or peer.refuses(setting.spec, setting.fmt)


def _copies(setting: Setting, contenders: int) -> int:
    size, available = benchmark.layer_bytes(setting.spec, setting.fmt), machine.memory_available()
    fits = available is None or size * contenders < benchmark.MEMORY_SHARE * available
    have = "" if available is None else f", {gigabytes(available)} is available"
    needed = f"{gigabytes(size)} of memory for each of {contenders}"
    rule = f"does not fit{have}"
    require(fits, "preset", needed, rule, "choose a smaller model or format, or fewer contenders")
    return benchmark.weight_copies(size, contenders, available)


def _ours(
    setting: Setting, strategies: Sequence[str], copies: int, *, with_profile: bool
) -> tuple[MoEBlock, list[Contender]]:
    """The block that plans (and is profiled), and our contenders."""
    with progress() as bar:
        task = bar.add_task("drawing and packing experts", total=len(strategies) * copies + 1)

        def advance() -> None:
            bar.advance(task)

        planner = benchmark.own_block(setting, strategies[0] if len(strategies) == 1 else "auto")
        advance()
        return planner, benchmark.own_contenders(setting, strategies, copies, advance)


def _built(peer: Peer, setting: Setting, copies: int, reasons: dict[str, str | None]) -> list[Engine]:
    """A peer's engines, each held against the reference first: a wrong one is left out, loudly."""
    sound = []
    with console.status(f"building {peer.name} ..."):
        try:
            built = peer.build(setting.spec, setting.fmt, setting.threads, copies)
        except Exception as error:  # whatever another package raises must not end our own measurement
            reasons[peer.name] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            return []
        for engine in built:
            off = benchmark.error_of(engine.calls, engine.dtype, setting.spec, engine.weights)
            if off <= engine.bound:
                sound.append(engine)
            else:
                reasons[engine.name] = f"its output is off by {off:.1e}, more than {engine.bound:.1e}"
    return sound


def _measured(setting: Setting, contenders: list[Contender], counts: list[int], rounds: int) -> Laps:
    with progress() as bar:
        task = bar.add_task("timing", total=rounds * len(counts) * len(contenders))
        return benchmark.measure(
            setting, contenders, counts, rounds=rounds, advance=lambda: bar.advance(task)
        )


# ------------------------------------------------------------------ showing


def _print_heading(setting: Setting, copies: int) -> None:
    spec, size = setting.spec, benchmark.layer_bytes(setting.spec, setting.fmt)
    name = "1 thread" if setting.threads == 1 else f"{setting.threads} threads"
    e, r = spec.experts, spec.router
    console.print(
        f"[bold]One MoE block of {setting.preset}[/]: H {spec.hidden}, I {e.intermediate}, ", end=""
    )
    console.print(f"{r.num_experts} experts, {r.top_k} per token")
    how = f"precision {setting.precision}, {name}, {machine.isa()} kernels"
    console.print(f"{setting.fmt.value} experts, {how}")
    if copies == 1:
        console.print(f"one copy of the weights, {gigabytes(size)}")
    else:
        walked = gigabytes(copies * size)
        console.print(f"{copies} copies of the weights in turn, {walked} between two uses of one")
    console.print()


def _print_peers(engines: list[Engine], reasons: dict[str, str | None]) -> None:
    for engine in engines:
        print_text(f"peer {engine.name}: measured, {len(engine.calls)} in turn")
    for name, reason in reasons.items():
        if reason is not None:
            print_text(f"peer {name}: skipped, {reason}")
    if reasons:
        console.print()


def _print_rows(
    rows: list[Figures], laps: Laps, setting: Setting, ours: Sequence[str], taken: dict[int, str]
) -> None:
    made = table("Speed", "T", "strategy", "median", "p10..p90 ms", "GB/s", "of stream", "GFLOP/s", left=0)
    made.columns[1].justify = "left"
    several = len(ours) > 1
    for row in rows:
        chosen = several and row.strategy == taken[row.tokens]
        made.add_row(
            str(row.tokens),
            f"{row.strategy} *" if chosen else row.strategy,
            f"{_ms(row.ms_median)} ms",
            f"{_ms(row.ms_p10)}..{_ms(row.ms_p90)}",
            f"{row.gbps:.1f}",
            f"{100 * row.stream_ratio:.0f} %",
            f"{row.gflops:.0f}",
        )
    console.print(made)
    low, high = np.percentile(laps.stream_gbps, [10, 90])
    spread = f"p10..p90 {low:.1f}..{high:.1f}"
    console.print(f"stream read: {rows[0].stream_gbps:.1f} GB/s, {spread}, once a round")
    console.print("GB/s counts each distinct expert once; GFLOP/s what the result needs")
    if several:
        console.print("* what strategy=auto takes")
        for count in laps.tokens:
            best = min((row for row in rows if row.tokens == count), key=lambda row: row.ms_median)
            cells = laps.cells[best.strategy, count], laps.cells[taken[count], count]
            ratio = benchmark.paired_ratio(*cells)
            console.print(f"  T = {count}: auto reaches {ratio:.2f} of {best.strategy}, the best")
    console.print()


def _print_speedups(rows: list[Figures], taken: dict[int, str]) -> None:
    """One line for each peer and token count, beside the strategy of ours that was taken."""
    if not any(row.peers for row in rows):
        return
    title = "Beside peers (above 1: we are faster)"
    made = table(title, "peer", "T", "strategy", "theirs", "ours", "ratio")
    made.columns[2].justify = "left"
    for name in dict.fromkeys(name for row in rows for name in row.peers):
        for row in rows:
            # with all strategies, the one that auto takes stands for us; a peer may not take that many tokens
            if row.strategy != taken[row.tokens] or name not in row.peers:
                continue
            ms, speedup = row.peers[name]
            times = f"{_ms(ms)} ms", f"{_ms(row.ms_median)} ms"
            made.add_row(name, str(row.tokens), row.strategy, *times, f"{speedup:.2f}x")
    console.print(made)
    console.print("ratio: the median over rounds of their time / ours on the same tokens")
    console.print()


def _print_profile(tokens: int, stages: dict[str, list[float]]) -> None:
    if not stages:
        console.print("this backend measures no stages")
        return
    total = sum(map(sum, stages.values()))
    threads = len(next(iter(stages.values())))
    shown = threads if threads <= 4 else 0
    columns = [f"thread {n}" for n in range(shown)] or ["mean", "slowest"]
    made = table(f"Milliseconds, T = {tokens}", "stage", *columns, "share")
    for stage, seconds in stages.items():
        figures = seconds if shown else [sum(seconds) / threads, max(seconds)]
        made.add_row(stage, *(f"{1e3 * s:.3f}" for s in figures), f"{100 * sum(seconds) / total:.1f} %")
    console.print(made)


def _ms(value: float) -> str:
    """Three digits at least."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _write(path: Path, report: list[dict[str, object]]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise MoEDecodeError(
            f"--json {path}: cannot be written ({error.strerror}); choose another file"
        ) from error
