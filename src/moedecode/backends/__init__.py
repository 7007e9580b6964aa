"""The door to the backends: what every backend offers, and how one is found by name.

A backend computes stages on NumPy arrays that have been checked. It knows specs, formats and plans; not
blocks, flat functions, torch or commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..arrays import Array
from ..formats import WeightFormat
from ..gates import invalid
from ..machine import native
from ..plan import Capabilities, CostTable
from ..spec import BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ..weights import BlockWeights, ExpertWeights

__all__ = ["Backend", "BlockOutput", "Numerics", "PreparedBlock", "Routing", "backend"]


@dataclass(frozen=True)
class Numerics:
    """How activations enter the expert products: ``precision`` and, for "mxfp8", ``h_rounding``."""

    precision: str = "a16"
    h_rounding: str | None = None


@dataclass(frozen=True, eq=False)
class Routing:
    """The router's result.

    ``logits [T, E]`` in the io dtype, ``index`` int32 ``[T, K]``, ``affinities`` float32 ``[T, E]``.
    """

    logits: Array
    index: Array
    affinities: Array


@dataclass(frozen=True, eq=False)
class BlockOutput:
    """``out [T, H]``; ``residual [T, H]`` if one was given; ``routing`` if it was asked for."""

    out: Array
    residual: Array | None
    routing: Routing | None


class PreparedBlock(Protocol):
    """A block whose weights a backend holds in its own layout."""

    def run(
        self,
        hidden: Array,
        *,
        strategy: str,
        first_expert: int,
        residual: Array | None,
        token_mask: Array | None,
        return_router: bool,
        out: Array | None,
    ) -> BlockOutput:
        """One call: ``hidden``, ``residual``, ``out [T, H]`` (out contiguous), ``token_mask`` bool ``[T]``.

        ``first_expert`` is the global id of the first local expert. All arguments have been checked.
        """
        ...

    def profile(self, hidden: Array, *, strategy: str, first_expert: int) -> dict[str, list[float]]:
        """Seconds of one call by stage, one number per thread. Empty where a backend does not measure."""
        ...


class Backend(Protocol):
    """What a backend offers. Arrays have been checked; dtypes are float32, float16 or bfloat16."""

    name: str
    capabilities: Capabilities

    def costs(self, fmt: WeightFormat, precision: str) -> CostTable:
        """The rates of this machine for weights of ``fmt`` under ``precision``, for the plan."""
        ...

    def pack(self, weights: ExpertWeights) -> Any:
        """Expert weights in the backend's own layout."""
        ...

    def block(
        self,
        spec: BlockSpec,
        weights: BlockWeights,
        experts: Any,
        shared: Any,
        numerics: Numerics,
        threads: int,
    ) -> PreparedBlock:
        """A block over packed ``experts`` and ``shared`` (None without); ``threads`` 0 means all cores."""
        ...

    def rmsnorm(
        self, hidden: Array, gamma: Array | None, eps: float, width: int, residual: Array | None
    ) -> tuple[Array, Array | None]:
        """``(normed, residual_out)``, both ``[T, H]`` in the dtype of ``hidden``."""
        ...

    def router(
        self, x: Array, weight: Array, bias: Array | None, selection_bias: Array | None, spec: RouterSpec
    ) -> Routing:
        """Route ``x [T, H]`` with ``weight [E, H]``; x is rounded to ``spec.matmul_dtype`` first."""
        ...

    def experts(
        self,
        hidden: Array,
        packed: Any,
        spec: ExpertSpec,
        scale_mode: ExpertAffinityScaleMode,
        strategy: str,
        index: Array | None,
        affinities: Array,
        first_expert: int,
        numerics: Numerics,
        out: Array,
    ) -> None:
        """Expert MLPs and weighted sum of ``hidden [T, H]`` into ``out [T, H]``.

        selective and grouped: ``index`` int32 ``[T, K]`` of global ids (-1 and other ranks' ids contribute 0)
        and ``affinities`` float32 ``[T, K]``. all_expert: ``index`` None, ``affinities [T, E_L]``; an exact 0
        means not selected, except under NO_SCALE, where every local expert is added.
        """
        ...


def backend(name: str) -> Backend:
    """The backend called ``name``: "cpu" or "reference"."""
    if name == "cpu":
        native()
        from .cpu import CpuBackend

        return CpuBackend()
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend()
    raise invalid("backend", repr(name), "is not known", "choose one of cpu, reference")
