"""The command line: which commands exist and how an error of ours becomes one line.

Knows the commands by name; what they do lives in their own files.
"""

from __future__ import annotations

import typer
from rich.markup import escape

from .. import machine
from ..gates import MoEDecodeError
from .bench import bench
from .check import check
from .console import error_console
from .demo import demo
from .doctor import doctor
from .neuron import app as neuron
from .plan import plan

__all__ = ["app", "run"]

app = typer.Typer(
    name="moedecode",
    help="The feed-forward block of a Mixture-of-Experts decoder layer in one fused call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (doctor, plan, check, demo, bench):
    app.command()(command)
app.add_typer(neuron, name="neuron")


def run() -> int:
    """Run one command from ``sys.argv``; the exit code."""
    try:
        _serve()
    except MoEDecodeError as error:
        error_console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        return 1
    return 0


def _serve() -> None:
    try:
        app()
    except ImportError as error:
        if error.name == "moedecode._native":
            machine.native()  # raises the same as a sentence
        raise
