"""The picture of `moedecode bench`: time over T on logarithmic axes, the roofline of memory, and peers.

Knows the rows and matplotlib; measures nothing.
"""

from __future__ import annotations

from pathlib import Path

from ..benchmark import Figures, Setting
from .picture import save

__all__ = ["draw"]

COLORS = ("tab:blue", "tab:orange", "tab:green")
PEER_STYLES = ("s--", "^--", "v--", "D--", "x--", "+--", "*--")


def draw(path: Path, setting: Setting, rows: list[Figures]) -> None:
    """Write the picture to ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    counts = sorted({row.tokens for row in rows})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    # one line for each strategy asked for; "auto" may take another one at each T
    asked = len(rows) // len(counts)
    for number, color in zip(range(asked), COLORS, strict=False):
        line = rows[number::asked]
        taken = list(dict.fromkeys(row.strategy for row in line))
        label = taken[0] if len(taken) == 1 else f"auto ({', '.join(taken)})"
        low, high = ([getattr(row, name) for row in line] for name in ("ms_p10", "ms_p90"))
        axes.fill_between(counts, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(counts, [row.ms_median for row in line], color=color, marker="o", label=label)
    names = dict.fromkeys(name for row in rows for name in row.peers)
    for name, style in zip(names, PEER_STYLES, strict=False):
        known = [row for row in rows[::asked] if name in row.peers]
        times = [row.peers[name][0] for row in known]
        at = [row.tokens for row in known]
        axes.plot(at, times, style, color="0.45", markersize=5, linewidth=1, label=name)
    floor = [row.floor_ms for row in rows[::asked]]
    axes.plot(counts, floor, color="black", linewidth=1, label="distinct expert bytes / stream read")
    axes.fill_between(counts, floor, min(floor) / 2, color="0.9", zorder=0)
    axes.set_ylim(bottom=min(floor) / 2)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a call (T)", ylabel="ms per call")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", linewidth=0.4)
    axes.set_title(
        f"One MoE block of {setting.preset}: {setting.fmt.value}, {setting.precision}, "
        f"{setting.threads} threads, stream read {rows[0].stream_gbps:.0f} GB/s",
        fontsize=10,
    )
    axes.legend(loc="upper left", fontsize=8)
    save(figure, path)
