"""The door to the backends: what every backend offers, and how one is found by name.

A backend computes stages on NumPy arrays that have been checked. It knows specs, formats and plans; not
blocks, flat functions, torch or commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..arrays import Array
from ..formats import WeightFormat
from ..gates import invalid, require
from ..machine import native
from ..plan import Capabilities, CostTable
from ..spec import BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ..weights import BlockWeights, ExpertWeights

__all__ = [
    "Backend",
    "BlockOutput",
    "Numerics",
    "Placement",
    "PreparedBlock",
    "Request",
    "Routing",
    "backend",
    "rank_slice",
]


@dataclass(frozen=True)
class Numerics:
    """How activations enter the expert products: ``precision`` and, for "mxfp8", ``h_rounding``."""

    precision: str = "a16"
    h_rounding: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where the expert MLPs of ``moe_tkg`` put things on a device; chooses nothing numerically.

    ``output_in_sbuf``: the result stays on chip. ``dynamic`` and ``block_size``: all_expert loops over blocks
    of that many routed tokens at run time.
    """

    output_in_sbuf: bool = False
    dynamic: bool = False
    block_size: int | None = None


@dataclass(frozen=True)
class Request:
    """A call as a backend's gates see it, before weights are packed and before any work.

    ``strategy`` and ``tokens`` are None while a block is made. ``flat``: the arguments are those of the flat
    functions, so H is the caller's to pad. ``given``: what only the flat functions take, by argument name.
    """

    spec: BlockSpec
    fmt: WeightFormat
    numerics: Numerics
    local_experts: int
    strategy: str | None = None
    tokens: int | None = None
    dtype: str | None = None
    residual: bool = False
    threads: int = 0
    flat: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)


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

    def refuse(self, request: Request) -> None:
        """Raise UnsupportedConfig for what the backend's gates refuse beyond its Capabilities."""
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

    def rank_slice(self, affinities: Array, index: Array, first: int, local: int, by_index: bool) -> Array:
        """See :func:`rank_slice`."""
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
        placement: Placement | None = None,
    ) -> None:
        """Expert MLPs and weighted sum of ``hidden [T, H]`` into ``out [T, H]``.

        selective and grouped: ``index`` int32 ``[T, K]`` of global ids (-1 and other ranks' ids contribute 0)
        and ``affinities`` float32 ``[T, K]``. all_expert: ``index`` None, ``affinities [T, E_L]``; an exact 0
        means not selected, except under NO_SCALE, where every local expert is added.
        """
        ...


def rank_slice(affinities: Array, index: Array, first: int, local: int, by_index: bool) -> Array:
    """The ``local`` columns from ``first`` of ``affinities [T, E]``, in their dtype.

    ``by_index`` multiplies each entry by how often ``index [T, K]`` names its expert.
    """
    ids = np.arange(first, first + local)
    sliced = affinities[:, first : first + local]  # [T, E_L]
    if not by_index:
        return np.ascontiguousarray(sliced)
    times = (index[:, :, None] == ids).sum(1)  # [T, E_L]
    with np.errstate(invalid="ignore"):  # an infinity that was not selected
        return np.where(times > 0, sliced * times.astype(sliced.dtype), np.zeros((), sliced.dtype))


def backend(name: str, *, gates: str | None = None, chip: str | None = None) -> Backend:
    """The backend called ``name``: "cpu", "reference" or "neuron".

    ``gates`` ("spec" or "extended", the default) and ``chip`` ("trn1", "trn2" or "trn3", the default) belong
    to "neuron".
    """
    if name == "neuron":
        from .neuron import NeuronBackend

        return NeuronBackend("trn3" if chip is None else chip, "extended" if gates is None else gates)
    for argument, value in (("gates", gates), ("chip", chip)):
        require(value is None, argument, repr(value), "belongs to backend='neuron'", "leave it None")
    if name == "cpu":
        native()
        from .cpu import CpuBackend

        return CpuBackend()
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend()
    raise invalid("backend", repr(name), "is not known", "choose one of cpu, reference, neuron")
