"""Owns how outcomes look: the lines of the table, what stands below them, and the JSON.

Must not know how an outcome was computed, nor any terminal: it makes strings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .compare import Difference, Verdict
from .run import Outcome

__all__ = ["HEADER", "LEGEND", "as_json", "figures_line", "remarks", "summary"]

_WIDTHS = {"L2": 7, "worst row": 9, "L2 to ours": 10, "HBM MB": 8, "x floor": 7, "bound us": 8}

HEADER = "  ".join(name.rjust(width) for name, width in _WIDTHS.items()) + "  by      verdict"
LEGEND = (
    "L2, worst row: relative error of the kernel against its own reference; to ours:\n"
    "against moedecode's; floor: the bytes that must move; bound: the time that the\n"
    "busiest engine needs at least, by: which one that is."
)
"""What the columns of ``HEADER`` mean."""


def figures_line(outcome: Outcome) -> str:
    """Errors, costs and verdict under `HEADER`; a dash where the row has none."""
    to_reference, to_truth, figures = outcome.kernel_to_reference, outcome.kernel_to_truth, outcome.figures
    values = [_error(to_reference, "l2"), _error(to_reference, "row"), _error(to_truth, "l2")]
    engine = "-"
    if figures is None:
        values += ["-", "-", "-"]
    else:
        values += [
            f"{figures.hbm_bytes / 1e6:.2f}",
            f"{figures.hbm_ratio:.3f}",
            f"{figures.bound_us:.1f}",
        ]
        engine = figures.bottleneck
    padded = [value.rjust(width) for value, width in zip(values, _WIDTHS.values(), strict=True)]
    return "  ".join((*padded, engine.ljust(6), outcome.verdict.value))


def _error(difference: Difference | None, figure: str) -> str:
    if difference is None:
        return "-"
    value = float(getattr(difference, figure))
    return "NaN" if math.isnan(value) else f"{value:.1e}"


def remarks(outcome: Outcome) -> list[str]:
    """What the row has to say beyond its figures: why it was refused, which rows are wrong, races, what was
    added.
    """
    lines = [outcome.detail] if outcome.detail else []
    lines += outcome.notes
    races = 0 if outcome.figures is None else outcome.figures.races
    if races:
        lines.append(f"races on shared HBM, both cores at the same bytes without a barrier between: {races}")
    return lines


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many rows have which verdict, most frequent first."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    order = list(Verdict)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], order.index(item[0])))
    return f"{len(outcomes)} rows; " + ", ".join(f"{verdict.value}: {count}" for verdict, count in ranked)


def as_json(outcomes: Sequence[Outcome], version: str, chip: str) -> dict[str, Any]:
    """Everything, for `--json`; figures that are not numbers are null."""
    return {"nki_library": version, "chip": chip, "rows": [_row(outcome) for outcome in outcomes]}


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "verdict": outcome.verdict.name,
        "detail": outcome.detail,
        "notes": list(outcome.notes),
        "kernel_to_reference": _numbers(outcome.kernel_to_reference),
        "kernel_to_truth": _numbers(outcome.kernel_to_truth),
        "reference_to_truth": _numbers(outcome.reference_to_truth),
        "figures": None if outcome.figures is None else outcome.figures.as_dict(),
        "seconds": outcome.seconds,
    }


def _numbers(difference: Difference | None) -> dict[str, float | None] | None:
    if difference is None:
        return None
    pairs = {"rel_l2": difference.l2, "max_row": difference.row}
    return {name: value if math.isfinite(value) else None for name, value in pairs.items()}
