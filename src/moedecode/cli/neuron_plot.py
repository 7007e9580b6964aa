"""The picture of `moedecode neuron run`: engine bounds, bytes per tensor, and what lives in SBUF over the
run.

Knows figures, the machine's report and matplotlib; runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .neuron_run import Done, Setting
from .neuron_tables import ENGINE_NAMES
from .picture import save

__all__ = ["draw"]

MOST_TENSORS = 14
MOST_LIVES = 40
BAR = 0.28  # height of one of the three bars of a tensor


def draw(path: Path, setting: Setting, done: Done) -> None:
    """Write the picture to ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    grid = figure.subplot_mosaic([["engines", "bytes"], ["lives", "lives"]], height_ratios=[1, 1.6])
    _engines(grid["engines"], done)
    _bytes(grid["bytes"], done)
    _lives(grid["lives"], done)
    f = done.figures
    figure.suptitle(
        f"{setting.name}, {setting.fmt.value}, {setting.strategy}, T = {setting.tokens} on {setting.chip}: "
        f"{f.hbm_ratio:.3f} of the HBM floor, at least {f.bound_us:.1f} us",
        fontsize=11,
    )
    save(figure, path)


def _engines(axes: Any, done: Done) -> None:
    f = done.figures
    names = [ENGINE_NAMES.get(engine, engine) for engine in f.engines_us]
    colors = ["tab:orange" if engine == f.bottleneck else "tab:blue" for engine in f.engines_us]
    axes.barh(names, list(f.engines_us.values()), color=colors)
    axes.invert_yaxis()
    axes.set(title="lower bound per engine", xlabel="us")


def _bytes(axes: Any, done: Done) -> None:
    rows = sorted(done.report.rows, key=lambda row: -(sum(row.read) + sum(row.written)))[:MOST_TENSORS]
    names = [row.name for row in rows]
    for place, (label, color, column) in enumerate(
        (
            ("read, core 0", "tab:blue", [row.read[0] for row in rows]),
            ("read, core 1", "tab:cyan", [row.read[-1] if len(row.read) > 1 else 0 for row in rows]),
            ("written, both", "tab:green", [sum(row.written) for row in rows]),
        )
    ):  # side by side: stacked, a logarithmic axis would shrink the second core
        heights = [line + BAR * (place - 1) for line in range(len(rows))]
        axes.barh(heights, [n / 1e3 for n in column], height=BAR, color=color, label=label)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(title="HBM bytes per tensor", xlabel="kB")
    axes.set_xscale("symlog", linthresh=1)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)


def _lives(axes: Any, done: Done) -> None:
    lives = [life for life in done.report.residency if life.core == 0 and life.buffer.value == "sbuf"]
    lives.sort(key=lambda life: -life.partition_bytes * (life.last - life.first + 1))
    shown = sorted(lives[:MOST_LIVES], key=lambda life: life.first)
    for place, life in enumerate(shown):
        axes.barh(place, life.last - life.first + 1, left=life.first, height=0.8, color="tab:blue", alpha=0.7)
        axes.text(life.first, place, f" {life.name} ({life.partition_bytes} B)", va="center", fontsize=6)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set(title="SBUF tensors of core 0, bytes per partition", xlabel="instruction")
