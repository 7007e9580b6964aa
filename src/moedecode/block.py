"""MoEBlock: a spec and weights become one call. Checks inputs, plans, and hands over to a backend.

Knows specs, weights, plans and the backend door; knows no layouts, no kernels and no commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array, as_numpy, io_dtype, like_input
from .backends import Backend, Numerics, backend as find_backend
from .gates import invalid, require, unsupported
from .plan import Plan, choose_strategy, make_plan
from .spec import PRECISIONS, BlockSpec, ExpertSpec
from .weights import BlockWeights, ExpertWeights

__all__ = ["BlockResult", "MoEBlock"]


@dataclass(frozen=True, eq=False)
class BlockResult:
    """What a call returns when more than ``out`` was asked for; absent parts are None.

    ``out`` and ``residual`` have the shape of the input; ``router_logits [T, E]`` the io dtype,
    ``expert_index`` int32 ``[T, K]``, ``affinities`` float32 ``[T, E]``.
    """

    out: Any
    residual: Any = None
    router_logits: Any = None
    expert_index: Any = None
    affinities: Any = None


class MoEBlock:
    """The fused block of one decoder layer.

    - ``backend``: "cpu" or "reference". ``strategy``: "auto", "selective", "grouped" or "all_expert".
    - ``precision``: "a16", "a8" or "mxfp8": how activations enter the expert products. ``h_rounding``: "io" rounds
      the intermediate to the io dtype before the "mxfp8" quantisation, None does not.
    - ``rank_id``: this rank owns experts ``[rank_id*E_L, (rank_id+1)*E_L)``, E_L = ``weights.experts.num_experts``.
    - ``threads``: 0 means all cores this process may use.

    Weights are packed once, here, expert by expert. Raises :class:`~moedecode.gates.InvalidInput` for malformed
    weights and :class:`~moedecode.gates.UnsupportedConfig` for what the backend does not do.
    """

    def __init__(
        self,
        spec: BlockSpec,
        weights: BlockWeights,
        *,
        backend: str = "cpu",
        strategy: str = "auto",
        precision: str = "a16",
        h_rounding: str | None = None,
        rank_id: int = 0,
        threads: int = 0,
    ) -> None:
        self.spec = spec
        self.strategy = strategy
        self._backend = find_backend(backend)
        self._format = weights.experts.fmt
        self._local = weights.experts.num_experts
        self._first = rank_id * self._local
        numerics = check_numerics(precision, h_rounding)
        require(threads >= 0, "threads", threads, "must not be negative", "use 0 for all cores")
        weights = checked_weights(spec, weights)
        check_rank(rank_id, self._local, spec.router.num_experts)
        check_backend(self._backend, spec, weights.experts, numerics)
        self._costs = self._backend.costs()
        self._choose(tokens=1)
        experts = self._backend.pack(weights.experts)
        shared = None if weights.shared is None else self._backend.pack(weights.shared)
        self._prepared = self._backend.block(spec, weights, experts, shared, numerics, threads)

    def plan(self, tokens: int) -> Plan:
        """What a call with ``tokens`` tokens will do and why; print it."""
        return make_plan(
            self.spec, tokens, self._format, self._backend.capabilities, self._costs,
            strategy=self.strategy, local_experts=self._local,
        )

    def __call__(
        self,
        hidden: Any,
        *,
        residual: Any = None,
        token_mask: Any = None,
        return_router: bool = False,
        out: Any = None,
    ) -> Any:
        """Run the block on ``hidden [T, H]`` or ``[B, S, H]`` (float32, float16 or bfloat16).

        - ``residual``: same shape and dtype, added before the norm; its sum is returned, ``out`` does not contain it.
        - ``token_mask``: bool ``[T]`` or ``[B, S]``; False marks padding, which loads no expert and yields zeros.
        - ``out``: a contiguous array to write into, same shape and dtype, not overlapping the inputs.

        Returns ``out``, or a :class:`BlockResult` when ``residual`` or ``return_router`` is given. NumPy in, NumPy
        out; torch in, torch out. Raises :class:`~moedecode.gates.InvalidInput` before any work.
        """
        x = as_numpy(hidden, "hidden")
        shape = x.shape
        if x.ndim not in (2, 3) or shape[-1] != self.spec.hidden:
            raise invalid("hidden", f"shape {shape}", f"must be [T, {self.spec.hidden}] or [B, S, {self.spec.hidden}]", "check H")
        dtype = io_dtype(x, "hidden")
        tokens = x.size // self.spec.hidden
        x2 = x.reshape(tokens, self.spec.hidden)
        r2 = None if residual is None else _same(residual, "residual", shape, dtype).reshape(x2.shape)
        mask = None if token_mask is None else check_mask(token_mask, shape[:-1])
        target = None if out is None else check_out(out, shape, dtype, [x, r2]).reshape(x2.shape)
        result = self._prepared.run(
            x2,
            strategy=self._choose(tokens),
            first_expert=self._first,
            residual=r2,
            token_mask=mask,
            return_router=return_router,
            out=target,
        )
        final = out if out is not None else like_input(result.out.reshape(shape), hidden)
        if residual is None and not return_router:
            return final
        routing = result.routing
        return BlockResult(
            out=final,
            residual=None if result.residual is None else like_input(result.residual.reshape(shape), hidden),
            router_logits=None if routing is None else like_input(routing.logits, hidden),
            expert_index=None if routing is None else like_input(routing.index, hidden),
            affinities=None if routing is None else like_input(routing.affinities, hidden),
        )

    def _choose(self, tokens: int) -> str:
        able = self._backend.capabilities
        return choose_strategy(self.strategy, self.spec, tokens, self._local, self._format, able, self._costs)[0]


def check_numerics(precision: str, h_rounding: str | None) -> Numerics:
    """The numerics of a call, or InvalidInput."""
    require(precision in PRECISIONS, "precision", repr(precision), "is not known", f"choose one of {', '.join(PRECISIONS)}")
    require(h_rounding in (None, "io"), "h_rounding", repr(h_rounding), "is not known", "use 'io' or None")
    needs = h_rounding is None or precision == "mxfp8"
    require(needs, "h_rounding", repr(h_rounding), "belongs to precision='mxfp8'", "leave it None or set precision='mxfp8'")
    return Numerics(precision, h_rounding)


def check_rank(rank_id: int, local: int, experts: int) -> None:
    """rank_id must name a whole slice of the global experts."""
    require(rank_id >= 0, "rank_id", rank_id, "must not be negative", "ranks count from 0")
    last = experts // local - 1
    require(local <= experts, "experts", f"{local} local", f"the router knows {experts}", "give this rank's experts only")
    fits = (rank_id + 1) * local <= experts
    require(fits, "rank_id", rank_id, f"{experts} experts in slices of {local} end at rank {last}", f"use 0..{last}")


def check_backend(able: Backend, spec: BlockSpec, experts: ExpertWeights, numerics: Numerics) -> None:
    """Refuse what the backend's Capabilities do not list."""
    can = able.capabilities
    if experts.fmt not in can.formats:
        raise unsupported("weights", experts.fmt.value, f"the {able.name} backend cannot read it", "choose another backend")
    if numerics.precision not in can.precisions:
        raise unsupported("precision", numerics.precision, f"the {able.name} backend lacks it", f"use {', '.join(sorted(can.precisions))}")
    if spec.affinity_scale not in can.scale_modes:
        raise unsupported("affinity_scale", spec.affinity_scale, f"the {able.name} backend lacks it", "use POST_SCALE")
    if spec.shared is not None and not can.shared_expert:
        raise unsupported("shared", "given", f"the {able.name} backend has no shared expert", "run it outside the block")


def check_mask(token_mask: Any, shape: tuple[int, ...]) -> Array:
    """A contiguous bool ``[T]`` view of the mask."""
    mask = as_numpy(token_mask, "token_mask")
    require(mask.dtype == np.bool_, "token_mask", f"array of {mask.dtype}", "must be bool", "True marks a real token")
    fits = mask.shape in (shape, (int(np.prod(shape)),))
    require(fits, "token_mask", f"shape {mask.shape}", f"must be {shape}", "give one flag per token")
    return np.ascontiguousarray(mask.reshape(-1))


def check_out(out: Any, shape: tuple[int, ...], dtype: str, inputs: list[Array | None]) -> Array:
    """A writable, contiguous array that no input overlaps."""
    target = _same(out, "out", shape, dtype)
    require(target.flags.writeable, "out", "read-only array", "must be writable", "pass a fresh array")
    require(target.flags.c_contiguous, "out", f"strides {target.strides}", "must be C-contiguous", "pass a contiguous array")
    for array in inputs:
        overlaps = array is not None and np.may_share_memory(target, array)
        require(not overlaps, "out", "overlapping memory", "must not overlap an input", "pass a separate array")
    return target


def checked_weights(spec: BlockSpec, weights: BlockWeights) -> BlockWeights:
    """``weights`` with NumPy arrays in place of tensors, every shape checked against ``spec``."""
    experts, hidden = spec.router.num_experts, spec.hidden
    _check_experts("experts", weights.experts, spec.experts, hidden)
    given = weights.shared is not None
    require(given == (spec.shared is not None), "shared", f"weights {'given' if given else 'absent'}", "spec says otherwise", "make both agree")
    if weights.shared is not None and spec.shared is not None:
        one = weights.shared.num_experts == 1
        require(one, "shared", f"{weights.shared.num_experts} experts", "must be one expert", "concatenate shared experts along I")
        _check_experts("shared", weights.shared, spec.shared, hidden)
    wanted: dict[str, tuple[bool, tuple[int, ...]]] = {
        "router": (True, (experts, hidden)),
        "gamma": (weights.gamma is not None, (hidden,)),
        "router_bias": (spec.router.bias, (experts,)),
        "selection_bias": (spec.router.selection_bias, (experts,)),
        "shared_gate": (spec.shared_gate, (hidden,)),
    }
    arrays: dict[str, Array | None] = {}
    for name, (needed, shape) in wanted.items():
        value = getattr(weights, name)
        present = value is not None
        require(present == needed, name, "given" if present else None, f"the spec {'needs' if needed else 'has no'} {name}", "make both agree")
        arrays[name] = _parameter(value, name, shape) if present else None
    return BlockWeights(experts=weights.experts, shared=weights.shared, block_order=weights.block_order, **arrays)


def _check_experts(argument: str, weights: ExpertWeights, spec: ExpertSpec, hidden: int) -> None:
    got, want = (weights.hidden, weights.intermediate), (hidden, spec.intermediate)
    require(got == want, argument, f"(H, I) = {got}", f"the spec says {want}", "make both agree")
    biased = [b is not None for b in (weights.gate_bias, weights.up_bias, weights.down_bias)]
    agrees = any(biased) == spec.bias
    require(agrees, f"{argument} bias", "given" if any(biased) else None, f"the spec says bias={spec.bias}", "make both agree")


def _parameter(value: Any, name: str, shape: tuple[int, ...]) -> Array:
    array = as_numpy(value, name)
    require(array.size == int(np.prod(shape)) and array.shape[-1:] == shape[-1:], name, f"shape {array.shape}", f"must be {shape}", "check the axes")
    io_dtype(array, name)
    return array.reshape(shape)


def _same(value: Any, argument: str, shape: tuple[int, ...], dtype: str) -> Array:
    array = as_numpy(value, argument)
    require(array.shape == shape, argument, f"shape {array.shape}", f"must be {shape} like hidden", "reshape it")
    require(array.dtype.name == dtype, argument, f"array of {array.dtype}", f"must be {dtype} like hidden", "cast it")
    return array
