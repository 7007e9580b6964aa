"""`python -m moedecode.neuron.conformance`: the command, and the sentence for a missing extra."""

from __future__ import annotations

import sys

from .command import command


def main() -> None:
    """Run the command."""
    try:
        import rich  # noqa: F401 (asked for here so that the sentence below names it)
        import typer
    except ModuleNotFoundError:
        print('The command needs the extras: pip install "moedecode[cli,torch]"', file=sys.stderr)
        raise SystemExit(2) from None
    typer.run(command())


if __name__ == "__main__":
    main()
