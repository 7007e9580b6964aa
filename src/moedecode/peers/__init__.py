"""Peers: other packages that compute the same block, each measured through its own public interface.

Owns what a peer is and which there are; each lives in a module of its own and imports its package only when
asked. Knows specs and synthetic weights; knows nothing of how we compute or of timing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

from ..arrays import Array
from ..formats import WeightFormat
from ..spec import BlockSpec
from ..weights import BlockWeights

__all__ = ["MODULES", "Engine", "Peer", "missing", "peers"]

MODULES = ("onnxruntime", "llama_cpp", "vllm_cpu", "transformers")


@dataclass(frozen=True, eq=False)
class Engine:
    """A peer with its weights in place.

    - Each of ``calls`` maps hidden states ``[T, H]`` of ``dtype`` to ``out [T, H]`` (valid until the next
      call) and holds its own copy of the weights.
    - ``weights`` are those the peer computes with, in natural order, for the check against the reference;
      ``bound`` is the relative L2 that its arithmetic may cost.
    """

    name: str
    calls: Sequence[Callable[[Array], Array]]
    dtype: str
    weights: BlockWeights
    bound: float
    most_tokens: int | None = None
    """More tokens than this do not fit in memory, as this peer works."""


class Peer(Protocol):
    """One package. ``build`` is called only when ``available`` and ``refuses`` gave no reason."""

    name: str

    def available(self) -> str | None:
        """Why the package cannot be used here, None if it can."""
        ...

    def refuses(self, spec: BlockSpec, fmt: WeightFormat) -> str | None:
        """Why the package does not compute this block or has nothing to set beside this format."""
        ...

    def build(self, spec: BlockSpec, fmt: WeightFormat, threads: int, copies: int) -> list[Engine]:
        """The package's engines for this job, each with ``copies`` copies of the weights."""
        ...


def peers() -> list[Peer]:
    """Every peer, in the order of the reports."""
    return [importlib.import_module(f".{name}", __name__).PEER for name in MODULES]


def missing(*packages: str) -> str | None:
    """The first of these distributions that is not installed, as a reason."""
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return None
