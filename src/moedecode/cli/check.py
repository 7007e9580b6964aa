"""`moedecode check`: the conformance cases on this machine, the worst error of each kind beside its bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import conformance, machine
from ..backends import backend as find_backend
from ..conformance import Measure
from ..formats import WeightFormat
from ..gates import MoEDecodeError
from ..spec import PRECISIONS
from .console import console, print_text, progress, table
from .doctor import version

__all__ = ["check"]


def check(
    backend: Annotated[str, typer.Option(help="The backend to hold against the reference.")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Run the conformance cases here and print the worst error of each kind; exit code 1 if any fails."""
    find_backend(backend)  # an unknown name is refused before the bar appears
    cases = conformance.CASES
    promises = [(fmt, precision) for fmt in WeightFormat for precision in PRECISIONS]
    errors: list[Measure] = []
    invariants: list[Measure] = []
    with progress() as bar:
        task = bar.add_task("checking", total=len(cases) + len(promises))
        for case in cases:
            errors += conformance.errors(case, backend)
            bar.advance(task)
        for fmt, precision in promises:
            invariants += conformance.invariants(fmt, precision, backend)
            bar.advance(task)
    passed = all(m.passed for m in errors + invariants)
    _print_table("Relative L2 against the float64 reference", errors, "error", "{:.1e}")
    _print_table("Bitwise promises", invariants, "rows that differ", "{:.0f}")
    failed = sum(not m.passed for m in errors + invariants)
    total = len(errors) + len(invariants)
    console.print(f"[bold]{total - failed} of {total} figures within their bounds[/]")
    if json_file is not None:
        _write(json_file, backend, passed, errors + invariants)
    if not passed:
        raise typer.Exit(1)


def _print_table(title: str, measures: list[Measure], figure: str, form: str) -> None:
    made = table(title, "kind", "cases", f"worst {figure}", "bound", "")
    worst = conformance.worst(measures)
    for kind, m in worst.items():
        count = sum(other.kind == kind for other in measures)
        bound = form.format(m.bound) if m.bound else "none"
        made.add_row(
            kind, str(count), form.format(m.value), bound, "ok" if m.passed else "[bold red]FAILED[/]"
        )
    console.print(made)
    for m in worst.values():
        if not m.passed:
            print_text(f"  failed: {m.kind}: {m.where}")


def _write(path: Path, backend: str, passed: bool, measures: list[Measure]) -> None:
    figures = [
        {"kind": m.kind, "value": m.value, "bound": m.bound, "where": m.where, "passed": m.passed}
        for m in conformance.worst(measures).values()
    ]
    try:
        isa: str | None = machine.isa()
    except MoEDecodeError:
        isa = None
    report = {
        "moedecode": version("moedecode"),
        "backend": backend,
        "isa": isa,
        "cores": machine.cores(),
        "passed": passed,
        "figures": len(measures),
        "worst": figures,
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise MoEDecodeError(
            f"--json {path}: cannot be written ({error.strerror}); choose another file"
        ) from error
