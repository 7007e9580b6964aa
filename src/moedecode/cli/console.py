"""How the commands look: one console, tables and progress bars for 80 columns, with or without colour.

Knows rich; knows nothing of blocks.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["console", "error_console", "gigabytes", "print_text", "progress", "rows", "table"]

console = Console(highlight=False)
error_console = Console(highlight=False, stderr=True)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """A table under a heading; the first ``left`` columns start at the left, numbers end at the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right", overflow="fold")
    return made


def rows(title: str, pairs: list[tuple[str, str]]) -> None:
    """Print a heading and name-value pairs, values wrapped under themselves."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    made.add_column(style="cyan", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    console.print(made)
    console.print()


def print_text(text: str) -> None:
    """Print text as it is: no markup, no wrapping."""
    console.print(text, markup=False, soft_wrap=True)


def progress() -> Progress:
    """A progress bar that disappears when done, so that the tables stand alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=error_console, transient=True, disable=not error_console.is_terminal)


def gigabytes(count: float) -> str:
    """Bytes as "1.23 GB"."""
    return f"{count / 1e9:.2f} GB"
