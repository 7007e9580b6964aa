"""Owns the command: arguments, the progress bar, printing and the exit code.

Must not know how a row is run or judged.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from ..machine import CHIPS
from .checkout import CheckoutError, open_checkout
from .rows import chosen_rows
from .run import Outcome, run_row
from .table import HEADER, LEGEND, as_json, figures_line, remarks, summary

__all__ = ["command", "print_head", "print_row"]


def command() -> Callable[..., None]:
    """The function for `typer.run`. typer and rich are imported here: the package does without them."""
    import typer

    def conformance(
        path: Annotated[Path, typer.Argument(help="A checkout of the public nki-library.")],
        quick: Annotated[bool, typer.Option("--quick", help="A small selection of rows.")] = False,
        only: Annotated[
            list[str] | None,
            typer.Option(help="Only rows whose name contains this; may be repeated."),
        ] = None,
        chip: Annotated[str, typer.Option(help="trn2 or trn3 (MX needs trn3).")] = "trn3",
        json_file: Annotated[
            Path | None, typer.Option("--json", help="Also write everything to this file.")
        ] = None,
    ) -> None:
        """Run the kernels of an nki-library checkout, unmodified, on the machine model.

        They are compared with the library's own PyTorch references and with moedecode's.

        Exit code 0: the table is printed, whatever it says; 2: no usable checkout, or no such row.
        """
        _run(path, quick, only or [], chip, json_file)

    return conformance


def _run(path: Path, quick: bool, only: Sequence[str], chip: str, json_file: Path | None) -> None:
    from rich.console import Console

    if chip not in CHIPS:
        _give_up(f"--chip {chip}: must be one of {', '.join(CHIPS)}")
    rows = chosen_rows(only, quick=quick)
    if not rows:
        _give_up(f"--only {' '.join(only)}: no row has such a name")
    console = Console(highlight=False)
    outcomes: list[Outcome] = []
    version = ""
    try:
        with open_checkout(path) as library, _progress() as bar:
            version = library.version
            print_head(f"nki-library {version} on {chip}", console)
            task = bar.add_task("running", total=len(rows))
            for row in rows:
                bar.update(task, description=row.name)
                outcomes.append(run_row(library, row, chip))
                print_row(outcomes[-1], console)
                bar.advance(task)
    except CheckoutError as error:
        _give_up(str(error))
    except KeyboardInterrupt:  # what has been run is worth keeping
        console.print("interrupted", style="bold red")
    console.print(f"\n{summary(outcomes)}", style="bold", soft_wrap=True)
    if json_file is not None:
        _write(json_file, outcomes, version, chip)


def print_head(title: str, console: Any) -> None:
    """Print the title, what the figures are and their names to a rich console."""
    console.print(title, style="bold")
    console.print(f"{LEGEND}\n", style="dim", soft_wrap=True)
    console.print(HEADER, style="bold", soft_wrap=True)


def print_row(outcome: Outcome, console: Any) -> None:
    """Print a row: its name, its figures, its remarks."""
    console.print(outcome.name, style="cyan", markup=False, soft_wrap=True)
    console.print(figures_line(outcome), markup=False, soft_wrap=True)
    for line in remarks(outcome):
        text = textwrap.fill(line, max(40, console.width), initial_indent="    ", subsequent_indent="    ")
        console.print(text, markup=False, soft_wrap=True, style="dim")


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _give_up(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def _write(path: Path, outcomes: Sequence[Outcome], version: str, chip: str) -> None:
    try:
        path.write_text(json.dumps(as_json(outcomes, version, chip), indent=2) + "\n")
    except OSError as error:
        _give_up(f"--json {path}: cannot be written ({error.strerror}); choose another file")
