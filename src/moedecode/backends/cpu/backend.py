"""Specs, weights and arrays in the words of the native core.

Every array that crosses the border is contiguous or strided plain memory seen as integers or floats; the
logical type travels beside it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import _native
from ...arrays import IO_DTYPES, Array
from ...formats import StoredMatrix, WeightFormat
from ...machine import isa
from ...plan import Capabilities, CostTable
from ...spec import PRECISIONS, BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ...weights import BlockWeights, ExpertWeights
from .. import BlockOutput, Numerics, Placement, Request, Routing, rank_slice
from .costs import machine_costs

__all__ = ["CpuBackend"]

_STRATEGIES = ("selective", "grouped", "all_expert")

CAPABILITIES = Capabilities(
    backend="cpu",
    formats=frozenset(WeightFormat),
    strategies=frozenset(_STRATEGIES),
    precisions=frozenset(PRECISIONS),
    shared_expert=True,
    scale_modes=frozenset(ExpertAffinityScaleMode) - {ExpertAffinityScaleMode.PRE_SCALE_DELAYED},
    resident="cache",
)

_PLAIN = {dtype: np.dtype(f"u{dtype.itemsize}") for dtype in IO_DTYPES.values()}
_STRATEGY = {name: getattr(_native.Strategy, name) for name in _STRATEGIES}
_IO = {dtype: getattr(_native.IoType, name) for name, dtype in IO_DTYPES.items()}


class CpuBackend:
    """The core behind the protocol. Raises InvalidInput where MOEDECODE_ISA names no instruction set."""

    name = "cpu"
    capabilities = CAPABILITIES

    def __init__(self) -> None:
        isa()

    def costs(self, fmt: WeightFormat, precision: str) -> CostTable:
        """Rates of this machine for the kernels in use; measured once, see :mod:`.costs`."""
        return machine_costs(fmt, precision, isa(), _native.cores())

    def refuse(self, request: Request) -> None:
        """Nothing: the core does whatever its Capabilities list."""

    def pack(self, weights: ExpertWeights) -> _native.PackedExperts:
        """Repack expert by expert: beside the result, never more than one expert is held."""
        first = weights.expert(0).gate
        packed = _native.PackedExperts(
            weights.num_experts, weights.hidden, weights.intermediate,
            getattr(_native.Format, weights.fmt.value), _scale_kind(first),
            weights.hidden_order.gather, weights.intermediate_order.gather,
        )  # fmt: skip
        threads = _native.cores()
        biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
        for e in range(weights.num_experts):
            matrices = weights.expert(e)
            for name, bias in zip(("gate", "up", "down"), biases, strict=True):
                matrix = getattr(matrices, name)
                codes, scale, row_scale = _plain(matrix)
                projection = getattr(_native.Projection, name)
                packed.set(
                    e,
                    projection,
                    codes,
                    scale,
                    row_scale,
                    _optional_floats(None if bias is None else bias[e]),
                    threads,
                )
        return packed

    def block(
        self,
        spec: BlockSpec,
        weights: BlockWeights,
        experts: _native.PackedExperts,
        shared: _native.PackedExperts | None,
        numerics: Numerics,
        threads: int,
    ) -> CpuBlock:
        """A block ready to run."""
        return CpuBlock(spec, weights, experts, shared, numerics, threads or _native.cores())

    def rmsnorm(
        self, hidden: Array, gamma: Array | None, eps: float, width: int, residual: Array | None
    ) -> tuple[Array, Array | None]:
        """See :meth:`moedecode.backends.Backend.rmsnorm`."""
        out = np.empty(hidden.shape, hidden.dtype)
        total = None if residual is None else np.empty_like(out)
        _native.run_norm(
            _IO[hidden.dtype], hidden.shape[-1], width, eps, _optional_floats(gamma), _bits(hidden),
            _optional_bits(residual), _bits(out), _optional_bits(total), _native.cores(),
        )  # fmt: skip
        return out, total

    def rank_slice(self, affinities: Array, index: Array, first: int, local: int, by_index: bool) -> Array:
        """See :func:`moedecode.backends.rank_slice`."""
        return rank_slice(affinities, index, first, local, by_index)

    def router(
        self, x: Array, weight: Array, bias: Array | None, selection_bias: Array | None, spec: RouterSpec
    ) -> Routing:
        """See :meth:`moedecode.backends.Backend.router`."""
        tokens, hidden = x.shape
        routing = _empty_routing(spec, tokens, x.dtype)
        router = _router(spec, weight, bias, selection_bias)
        _native.run_router(
            router,
            _IO[x.dtype],
            _bits(x),
            _bits(routing.logits),
            routing.index,
            routing.affinities,
            hidden,
            _native.cores(),
        )
        return routing

    def experts(
        self,
        hidden: Array,
        packed: _native.PackedExperts,
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
        """See :meth:`moedecode.backends.Backend.experts`; there is one place for everything here."""
        _native.run_experts(
            packed, _expert_spec(spec, scale_mode, numerics), _IO[hidden.dtype], _bits(hidden),
            None if index is None else np.require(index, np.int32, ("C", "A")), _floats(affinities),
            _STRATEGY[strategy], first_expert, _IO[out.dtype], _bits(out), _native.cores(),
        )  # fmt: skip


class CpuBlock:
    """One block in the native core."""

    def __init__(
        self,
        spec: BlockSpec,
        weights: BlockWeights,
        experts: _native.PackedExperts,
        shared: _native.PackedExperts | None,
        numerics: Numerics,
        threads: int,
    ) -> None:
        self._spec = spec
        self._threads = threads
        router = _router(spec.router, weights.router, weights.router_bias, weights.selection_bias)
        shared_spec = None
        if spec.shared is not None:
            shared_spec = _expert_spec(spec.shared, ExpertAffinityScaleMode.POST_SCALE, numerics)
        self._block = _native.Block(
            spec.hidden, spec.norm_width, spec.eps, _optional_floats(weights.gamma), router, experts,
            _expert_spec(spec.experts, spec.affinity_scale, numerics), shared, shared_spec,
            _optional_floats(weights.shared_gate),
        )  # fmt: skip

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
        """See :meth:`moedecode.backends.PreparedBlock.run`."""
        if out is None:
            out = np.empty(hidden.shape, hidden.dtype)
        total = None if residual is None else np.empty(hidden.shape, hidden.dtype)
        routing = _empty_routing(self._spec.router, len(hidden), hidden.dtype) if return_router else None
        self._block.run(
            _IO[hidden.dtype],
            _bits(hidden),
            _optional_bits(residual),
            None if token_mask is None else token_mask.view(np.uint8),
            _bits(out),
            _optional_bits(total),
            None if routing is None else _bits(routing.logits),
            None if routing is None else routing.index,
            None if routing is None else routing.affinities,
            _STRATEGY[strategy],
            first_expert,
            self._threads,
            None,
        )
        return BlockOutput(out, total, routing)

    def profile(self, hidden: Array, *, strategy: str, first_expert: int) -> dict[str, list[float]]:
        """See :meth:`moedecode.backends.PreparedBlock.profile`."""
        stages = _native.stages()
        seconds = np.zeros((self._threads, len(stages)))
        out = np.empty(hidden.shape, hidden.dtype)
        self._block.run(
            _IO[hidden.dtype], _bits(hidden), None, None, _bits(out), None, None, None, None,
            _STRATEGY[strategy], first_expert, self._threads, seconds,
        )  # fmt: skip
        return {name: seconds[:, i].tolist() for i, name in enumerate(stages)}


def _bits(array: Array) -> Array:
    """The array as contiguous plain integers (a copy only if it is strided or not aligned)."""
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.require(array, requirements=("C", "A"))
    return array.view(_PLAIN[array.dtype])


def _optional_bits(array: Array | None) -> Array | None:
    return None if array is None else _bits(array)


def _floats(array: Array) -> Array:
    return np.require(array, np.float32, ("C", "A"))


def _optional_floats(array: Array | None) -> Array | None:
    return None if array is None else _floats(array)


def _empty_routing(spec: RouterSpec, tokens: int, dtype: np.dtype[Any]) -> Routing:
    return Routing(
        np.empty((tokens, spec.num_experts), dtype),
        np.empty((tokens, spec.top_k), np.int32),
        np.empty((tokens, spec.num_experts), np.float32),
    )


def _router(
    spec: RouterSpec, weight: Array, bias: Array | None, selection_bias: Array | None
) -> _native.Router:
    fmt = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[weight.dtype.name]
    return _native.Router(
        _codes(weight), getattr(_native.Format, fmt), spec.top_k, getattr(_native.Score, spec.score),
        spec.pre_norm, spec.norm_topk_prob, spec.norm_eps, spec.scale, _IO[IO_DTYPES[spec.matmul_dtype]],
        _optional_floats(bias), _optional_floats(selection_bias),
    )  # fmt: skip


def _expert_spec(spec: ExpertSpec, mode: ExpertAffinityScaleMode, numerics: Numerics) -> _native.ExpertSpec:
    def bound(value: float | None, absent: float) -> float:
        return absent if value is None else value

    return _native.ExpertSpec(
        getattr(_native.Activation, spec.activation), spec.alpha, spec.up_offset,
        bound(spec.gate_clamp[0], -math.inf), bound(spec.gate_clamp[1], math.inf),
        bound(spec.up_clamp[0], -math.inf), bound(spec.up_clamp[1], math.inf),
        getattr(_native.AffinityScale, mode.name), getattr(_native.Precision, numerics.precision),
        numerics.h_rounding == "io",
    )  # fmt: skip


def _scale_kind(matrix: StoredMatrix) -> _native.ScaleKind:
    if matrix.fmt.is_mx:
        return _native.ScaleKind.e8m0
    blocked = matrix.scale is not None and matrix.scale.ndim == 2
    return _native.ScaleKind.block128 if blocked else _native.ScaleKind.none


def _plain(matrix: StoredMatrix) -> tuple[Array, Array | None, Array | None]:
    """(codes as integers, tile scales, row scales) of a stored matrix."""
    codes, scale = _codes(matrix.codes), matrix.scale
    if scale is None:
        return codes, None, None
    return (codes, _regular(scale), None) if scale.ndim == 2 else (codes, None, _floats(scale))


def _codes(array: Array) -> Array:
    """Elements as integers of their width."""
    return _regular(array).view(f"u{array.itemsize}")


def _regular(array: Array) -> Array:
    """The array itself, any strides; a copy if they are no multiples of an element (a field of a record)."""
    whole = array.flags.aligned and not any(stride % array.itemsize for stride in array.strides)
    return array if whole else array.copy()
