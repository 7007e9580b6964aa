"""Writing a matplotlib figure to a file. Knows no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..gates import MoEDecodeError

__all__ = ["save"]


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` as PNG. Raises MoEDecodeError, naming ``--plot``, where the file cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise MoEDecodeError(
            f"--plot {path}: cannot be written ({error.strerror}); choose another file"
        ) from error
