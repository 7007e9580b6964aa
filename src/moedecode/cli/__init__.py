"""The commands of moedecode. This file owns the entry point and the sentence for a missing extra.

It imports neither typer nor rich: they come with the extra [cli], and without them it says so.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The ``moedecode`` command. Exit code 2: cannot be served; 1: a check failed."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("moedecode"):
            raise
        print('The commands need the extra: pip install "moedecode[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(run())
