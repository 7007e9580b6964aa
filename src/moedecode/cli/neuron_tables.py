"""What `moedecode neuron` prints: ledger, residency, peaks and bounds, for 80 columns.

Knows figures and the machine's report; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends.neuron.traffic import Figures
from ..spec import BlockSpec
from .console import console, print_text, table
from .neuron_run import Done, Setting
from .neuron_sweep import Row

__all__ = ["print_run", "print_sweep"]

MOST_RESIDENTS = 16  # rows of the residency table
ENGINE_NAMES = {
    "dma": "DMA",
    "tensor": "PE",
    "vector": "Vector",
    "scalar": "Scalar",
    "gpsimd": "GpSimd",
    "sync": "sync",
}


def print_run(setting: Setting, shard: int, done: Done) -> None:
    """Everything about one run."""
    _print_heading(setting, shard, done)
    _print_ledger(done)
    _print_residents(done)
    _print_memories(done.figures)
    _print_engines(done.figures)


def _print_heading(setting: Setting, shard: int, done: Done) -> None:
    spec, e = setting.spec, setting.spec.experts
    console.print(f"[bold]The megakernel on {setting.chip}: {setting.name}[/], {setting.strategy}, ", end="")
    console.print("1 token" if setting.tokens == 1 else f"{setting.tokens} tokens")
    r = spec.router
    console.print(
        f"H {spec.hidden}, I {e.intermediate}{_part(shard)}, {setting.local} of {r.num_experts} experts, ",
        end="",
    )
    console.print(f"{r.top_k} per token, {setting.fmt.value}")
    console.print()
    f = done.figures
    if done.error is None:
        print_text("error    not computed: ledger only, routing drawn at random")
    else:
        verdict = "ok" if done.passed else "TOO LARGE"
        whole, row = done.bounds
        worst = f"worst row {done.worst_row:.1e} ({row:.0e})"
        print_text(f"error    {done.error:.1e} relative L2 (bound {whole:.0e}), {worst}: {verdict}")
    print_text(f"HBM      {_bytes(f.hbm_bytes)}, floor {_bytes(f.hbm_floor_bytes)}, ratio {f.hbm_ratio:.3f}")
    bound, name = f.bound_us, ENGINE_NAMES.get(f.bottleneck, f.bottleneck)
    print_text(f"time     at least {bound:.1f} us ({name}); in-order schedule {f.schedule_us:.1f} us")
    count = " + ".join(map(str, f.instructions))
    print_text(f"races    {f.races}; instructions {count}; the model took {done.seconds:.1f} s")
    console.print()


def _print_ledger(done: Done) -> None:
    made = table(
        "HBM, bytes per tensor and core", "tensor", "read 0", "read 1", "written 0", "written 1", "times"
    )
    for row in done.report.rows:
        read, written = ([_bytes(n) if n else "" for n in side] for side in (row.read, row.written))
        times = f"{row.times_read:.2f}" if sum(row.read) else ""
        made.add_row(_short(row.name), *read, *written, times)
    console.print(made)
    console.print("times: bytes read over distinct bytes read; 1.00 is once per chip")
    console.print()


def _print_residents(done: Done) -> None:
    """The on-chip tensors of core 0 that hold most bytes for longest; same names are one row."""
    lives = [life for life in done.report.residency if life.core == 0]
    end = max((life.last for life in lives), default=0) + 1
    groups: dict[tuple[str, str], list[Any]] = {}
    for life in lives:
        groups.setdefault((life.name.split("#")[0], life.buffer.value), []).append(life)
    held = {
        key: sum(x.partition_bytes * (x.last - x.first + 1) for x in group) for key, group in groups.items()
    }
    shown = sorted(groups, key=lambda key: -held[key])[:MOST_RESIDENTS]
    made = table("Residency, core 0", "tensor", "memory", "count", "shape", "B/part.", "from", "to", left=2)
    for key in sorted(shown, key=lambda key: min(x.first for x in groups[key])):
        group = groups[key]
        largest = max(group, key=lambda x: x.partition_bytes)
        made.add_row(
            *key,
            str(len(group)),
            "x".join(map(str, largest.shape)),
            str(largest.partition_bytes),
            f"{100 * min(x.first for x in group) / end:.0f} %",
            f"{100 * (max(x.last for x in group) + 1) / end:.0f} %",
        )
    console.print(made)
    rest = len(groups) - len(shown)
    more = f"; {rest} smaller names not shown" if rest else ""
    console.print(f"from, to: first write and last use, in instructions of the core{more}")
    console.print()


def _print_memories(f: Figures) -> None:
    made = table("On-chip peaks, bytes per partition", "memory", "peak", "limit", "share")
    for name, peak, limit in (
        ("SBUF", f.sbuf_peak_bytes, f.sbuf_limit_bytes),
        ("PSUM", f.psum_peak_bytes, f.psum_limit_bytes),
    ):
        made.add_row(name, str(peak), str(limit), f"{100 * peak / limit:.0f} %")
    console.print(made)
    console.print()


def _print_engines(f: Figures) -> None:
    made = table("Lower bound per engine", "engine", "us", "of the largest", "")
    for engine, us in sorted(f.engines_us.items(), key=lambda item: -item[1]):
        last = "bottleneck" if engine == f.bottleneck else ""
        share = f"{100 * us / f.bound_us:.0f} %" if f.bound_us else ""
        made.add_row(ENGINE_NAMES.get(engine, engine), f"{us:.2f}", share, last)
    console.print(made)


def print_sweep(
    name: str, spec: BlockSpec, shard: int, chip: str, fmt: str, rows: Sequence[Row], *, beside: bool
) -> None:
    """One line for each run, the public kernel's figures beside ours where they were asked for."""
    e = spec.experts
    print_text(f"{name} on {chip}: H {spec.hidden}, I {e.intermediate}{_part(shard)}, {fmt}")
    columns = ["HBM", "of floor", "bound us", "bottleneck"]
    title = "Bytes and bounds" + (" (public nki-library in brackets)" if beside else "")
    made = table(title, "strategy", "T", "experts", *columns)
    for row in rows:
        made.add_row(row.strategy, str(row.tokens), str(row.experts), *_cells(row))
    console.print(made)
    for row in rows:
        if isinstance(row.public, str):
            print_text(f"the public kernel refuses {row.strategy} at T = {row.tokens}: {row.public}")


def _cells(row: Row) -> list[str]:
    """HBM bytes, ratio, bound and bottleneck, the public kernel's in brackets."""
    mine = _costs(row.ours)
    if row.public is None:
        return mine
    if isinstance(row.public, str):
        return [*mine[:3], f"{mine[3]} (refused)"]
    return [f"{a} ({b})" for a, b in zip(mine, _costs(row.public), strict=True)]


def _costs(f: Any) -> list[str]:
    engine = ENGINE_NAMES.get(f.bottleneck, f.bottleneck)
    return [_bytes(f.hbm_bytes), f"{f.hbm_ratio:.3f}", f"{f.bound_us:.1f}", engine]


def _part(shard: int) -> str:
    return f" (1 of {shard} shards)" if shard > 1 else ""


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def _short(name: str) -> str:
    """The name of an argument without the words that they all share."""
    return name.removeprefix("expert_").replace("_weights", "").replace("affinities", "aff.")
