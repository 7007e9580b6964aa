"""Specs, weights and arrays in the words of the native core.

Every array that crosses the border is contiguous or strided plain memory seen as integers or floats; the logical
type travels beside it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import _native
from ...arrays import Array
from ...formats import StoredMatrix, WeightFormat
from ...plan import Capabilities, CostTable
from ...spec import PRECISIONS, BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ...weights import BlockWeights, ExpertWeights
from .. import BlockOutput, Numerics, Routing
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

_STRATEGY = {name: getattr(_native.Strategy, name) for name in _STRATEGIES}
_IO = {name: getattr(_native.IoType, name) for name in ("float32", "float16", "bfloat16")}


class CpuBackend:
    """The native core behind the backend protocol."""

    name = "cpu"
    capabilities = CAPABILITIES

    def costs(self) -> CostTable:
        """Rates of this machine for the kernels in use."""
        return machine_costs()

    def pack(self, weights: ExpertWeights) -> _native.PackedExperts:
        """Repack expert by expert: beside the result, never more than one expert is held."""
        first = weights.expert(0).gate
        packed = _native.PackedExperts(
            weights.num_experts, weights.hidden, weights.intermediate, getattr(_native.Format, weights.fmt.value),
            _scale_kind(first), weights.hidden_order.gather, weights.intermediate_order.gather,
        )  # fmt: skip
        threads = _native.cores()
        biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
        for e in range(weights.num_experts):
            matrices = weights.expert(e)
            for name, bias in zip(("gate", "up", "down"), biases, strict=True):
                matrix = getattr(matrices, name)
                codes, scale, row_scale = _plain(matrix)
                projection = getattr(_native.Projection, name)
                packed.set(e, projection, codes, scale, row_scale, None if bias is None else bias[e], threads)
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
            _IO[hidden.dtype.name], hidden.shape[-1], width, eps, _floats(gamma), _bits(hidden), _bits(residual),
            _bits(out), _bits(total), _native.cores(),
        )  # fmt: skip
        return out, total

    def router(
        self, x: Array, weight: Array, bias: Array | None, selection_bias: Array | None, spec: RouterSpec
    ) -> Routing:
        """See :meth:`moedecode.backends.Backend.router`."""
        tokens, hidden = x.shape
        routing = _empty_routing(spec, tokens, x.dtype)
        router = _router(spec, weight, bias, selection_bias)
        _native.run_router(
            router, _IO[x.dtype.name], _bits(x), _bits(routing.logits), routing.index, routing.affinities, hidden, _native.cores()
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
    ) -> None:
        """See :meth:`moedecode.backends.Backend.experts`."""
        _native.run_experts(
            packed, _expert_spec(spec, scale_mode, numerics), _IO[hidden.dtype.name], _bits(hidden),
            None if index is None else np.ascontiguousarray(index, np.int32), np.ascontiguousarray(affinities, np.float32),
            _STRATEGY[strategy], first_expert, _IO[out.dtype.name], _bits(out), _native.cores(),
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
            spec.hidden, spec.norm_width, spec.eps, _floats(weights.gamma), router, experts,
            _expert_spec(spec.experts, spec.affinity_scale, numerics), shared, shared_spec, _floats(weights.shared_gate),
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
            _IO[hidden.dtype.name],
            _bits(hidden),
            _bits(residual),
            None if token_mask is None else token_mask.view(np.uint8),
            _bits(out),
            _bits(total),
            None if routing is None else _bits(routing.logits),
            None if routing is None else routing.index,
            None if routing is None else routing.affinities,
            _STRATEGY[strategy],
            first_expert,
            self._threads,
        )
        return BlockOutput(out, total, routing)


def _bits(array: Array | None) -> Array | None:
    """The array as contiguous plain integers or floats (a copy only if it is strided)."""
    if array is None:
        return None
    array = np.ascontiguousarray(array)
    return array if array.dtype == np.float32 else array.view(np.uint16)


def _floats(array: Array | None) -> Array | None:
    return None if array is None else np.ascontiguousarray(array, np.float32)


def _empty_routing(spec: RouterSpec, tokens: int, dtype: np.dtype[Any]) -> Routing:
    return Routing(
        np.empty((tokens, spec.num_experts), dtype),
        np.empty((tokens, spec.top_k), np.int32),
        np.empty((tokens, spec.num_experts), np.float32),
    )


def _router(spec: RouterSpec, weight: Array, bias: Array | None, selection_bias: Array | None) -> _native.Router:
    fmt = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[weight.dtype.name]
    return _native.Router(
        weight.view(f"u{weight.itemsize}"), getattr(_native.Format, fmt), spec.top_k, getattr(_native.Score, spec.score),
        spec.pre_norm, spec.norm_topk_prob, spec.norm_eps, spec.scale, _IO[spec.matmul_dtype], _floats(bias),
        _floats(selection_bias),
    )  # fmt: skip


def _expert_spec(spec: ExpertSpec, mode: ExpertAffinityScaleMode, numerics: Numerics) -> _native.ExpertSpec:
    def bound(value: float | None, absent: float) -> float:
        return absent if value is None else value

    return _native.ExpertSpec(
        getattr(_native.Activation, spec.activation), spec.alpha, spec.up_offset,
        bound(spec.gate_clamp[0], -math.inf), bound(spec.gate_clamp[1], math.inf),
        bound(spec.up_clamp[0], -math.inf), bound(spec.up_clamp[1], math.inf),
        getattr(_native.AffinityScale, mode.name), getattr(_native.Precision, numerics.precision), numerics.h_rounding == "io",
    )  # fmt: skip


def _scale_kind(matrix: StoredMatrix) -> _native.ScaleKind:
    if matrix.fmt.is_mx:
        return _native.ScaleKind.e8m0
    blocked = matrix.scale is not None and matrix.scale.ndim == 2
    return _native.ScaleKind.block128 if blocked else _native.ScaleKind.none


def _plain(matrix: StoredMatrix) -> tuple[Array, Array | None, Array | None]:
    """(codes as integers, tile scales, row scales) of a stored matrix."""
    codes = matrix.codes if matrix.codes.dtype.kind == "u" else matrix.codes.view(f"u{matrix.codes.itemsize}")
    if matrix.scale is None or matrix.scale.ndim == 2:
        return codes, matrix.scale, None
    return codes, None, matrix.scale
