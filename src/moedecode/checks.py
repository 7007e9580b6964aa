"""What a call and its weights must be: every check that comes before any work.

Owns the comparison of arrays and weights with a spec, and its messages. Checks on the way of every call
build their message only when they fail. Knows no backend but its Capabilities.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from .arrays import IO_DTYPES, Array, as_numpy, io_dtype, is_torch
from .backends import Backend, Numerics
from .gates import invalid, require, unsupported
from .spec import PRECISIONS, BlockSpec, ExpertSpec
from .weights import BlockWeights, ExpertWeights

MAX_THREADS = 1024
"""More than the cores of any machine this runs on: a larger number is a mistake."""


def check_numerics(precision: str, h_rounding: str | None) -> Numerics:
    """The numerics of a call, or InvalidInput."""
    require(
        precision in PRECISIONS,
        "precision",
        repr(precision),
        "is not known",
        f"choose one of {', '.join(PRECISIONS)}",
    )
    require(h_rounding in (None, "io"), "h_rounding", repr(h_rounding), "is not known", "use 'io' or None")
    needs = h_rounding is None or precision == "mxfp8"
    require(
        needs,
        "h_rounding",
        repr(h_rounding),
        "belongs to precision='mxfp8'",
        "leave it None or set precision='mxfp8'",
    )
    return Numerics(precision, h_rounding)


def check_threads(threads: Any) -> int:
    """A number of threads, 0 for all cores."""
    count = check_whole(threads, "threads", "use 0 for all cores")
    rule = f"must lie in 0..{MAX_THREADS}"
    require(0 <= count <= MAX_THREADS, "threads", count, rule, "use 0 for all cores")
    return count


def check_rank(rank_id: Any, local: int, experts: int) -> int:
    """The rank, which must name a whole slice of the global experts; None where one rank has them all."""
    require(
        local <= experts,
        "experts",
        f"{local} local",
        f"the router knows {experts}",
        "give this rank's experts only",
    )
    if rank_id is None:
        rule = f"must be given, since the weights hold {local} of {experts} experts"
        require(local == experts, "rank_id", None, rule, "say whose slice they are, counting from 0")
        return 0
    rank_id = check_whole(rank_id, "rank_id", "ranks count from 0")
    require(rank_id >= 0, "rank_id", rank_id, "must not be negative", "ranks count from 0")
    last = experts // local - 1
    fits = (rank_id + 1) * local <= experts
    require(
        fits,
        "rank_id",
        rank_id,
        f"{experts} experts in slices of {local} end at rank {last}",
        f"use 0..{last}",
    )
    return int(rank_id)


def check_backend(able: Backend, spec: BlockSpec, experts: ExpertWeights, numerics: Numerics) -> None:
    """Refuse what the backend's Capabilities do not list."""
    can = able.capabilities
    if experts.fmt not in can.formats:
        raise unsupported(
            "weights", experts.fmt.value, f"the {able.name} backend cannot read it", "choose another backend"
        )
    if numerics.precision not in can.precisions:
        raise unsupported(
            "precision",
            numerics.precision,
            f"the {able.name} backend lacks it",
            f"use {', '.join(sorted(can.precisions))}",
        )
    if spec.affinity_scale not in can.scale_modes:
        raise unsupported(
            "affinity_scale", spec.affinity_scale, f"the {able.name} backend lacks it", "use POST_SCALE"
        )
    if spec.shared is not None and not can.shared_expert:
        raise unsupported(
            "shared", "given", f"the {able.name} backend has no shared expert", "run it outside the block"
        )


def check_mask(token_mask: Any, shape: tuple[int, ...]) -> Array:
    """A contiguous bool ``[T]`` view of the mask."""
    mask = as_numpy(token_mask, "token_mask")
    if mask.dtype != np.bool_:
        raise invalid("token_mask", f"array of {mask.dtype}", "must be bool", "True marks a real token")
    if mask.shape not in (shape, (math.prod(shape),)):
        raise invalid("token_mask", f"shape {mask.shape}", f"must be {shape}", "give one flag per token")
    return np.ascontiguousarray(mask.reshape(-1))


def check_out(out: Any, shape: tuple[int, ...], dtype: str, inputs: list[Array | None]) -> Array:
    """A writable, contiguous array that no input overlaps."""
    if not (isinstance(out, np.ndarray) or is_torch(out)):
        rule = "must be a NumPy array or a torch tensor"
        raise invalid("out", type(out).__name__, rule, "pass an array to write into")
    target = check_same(out, "out", shape, dtype)
    if not target.flags.aligned:
        raise invalid("out", "array at an odd address", "must be aligned", "pass a fresh array")
    if not target.flags.writeable:
        raise invalid("out", "read-only array", "must be writable", "pass a fresh array")
    if not target.flags.c_contiguous:
        strides = f"strides {target.strides}"
        raise invalid("out", strides, "must be C-contiguous", "pass a contiguous array")
    for array in inputs:
        if array is not None and np.may_share_memory(target, array):
            raise invalid("out", "overlapping memory", "must not overlap an input", "pass a separate array")
    return target


def check_same(value: Any, argument: str, shape: tuple[int, ...], dtype: str) -> Array:
    """An array of the shape and dtype of ``hidden``."""
    array = as_numpy(value, argument)
    if array.shape != shape:
        raise invalid(argument, f"shape {array.shape}", f"must be {shape} like hidden", "reshape it")
    if array.dtype != IO_DTYPES[dtype]:
        raise invalid(argument, f"array of {array.dtype}", f"must be {dtype} like hidden", "cast it")
    return array


def checked_weights(spec: BlockSpec, weights: BlockWeights) -> BlockWeights:
    """``weights`` with NumPy arrays in place of tensors, every shape checked against ``spec``."""
    experts, hidden = spec.router.num_experts, spec.hidden
    _check_experts("experts", weights.experts, spec.experts, hidden)
    given = weights.shared is not None
    require(
        given == (spec.shared is not None),
        "shared",
        f"weights {'given' if given else 'absent'}",
        "spec says otherwise",
        "make both agree",
    )
    if weights.shared is not None and spec.shared is not None:
        one = weights.shared.num_experts == 1
        require(
            one,
            "shared",
            f"{weights.shared.num_experts} experts",
            "must be one expert",
            "concatenate shared experts along I",
        )
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
        require(
            present == needed,
            name,
            "given" if present else None,
            f"the spec {'needs' if needed else 'has no'} {name}",
            "make both agree",
        )
        arrays[name] = _parameter(value, name, shape) if present else None
    return BlockWeights(
        experts=weights.experts, shared=weights.shared, block_order=weights.block_order, **arrays
    )


def _check_experts(argument: str, weights: ExpertWeights, spec: ExpertSpec, hidden: int) -> None:
    got, want = (weights.hidden, weights.intermediate), (hidden, spec.intermediate)
    require(got == want, argument, f"(H, I) = {got}", f"the spec says {want}", "make both agree")
    biased = [b is not None for b in (weights.gate_bias, weights.up_bias, weights.down_bias)]
    agrees = any(biased) == spec.bias
    require(
        agrees,
        f"{argument} bias",
        "given" if any(biased) else None,
        f"the spec says bias={spec.bias}",
        "make both agree",
    )


def _parameter(value: Any, name: str, shape: tuple[int, ...]) -> Array:
    array = as_numpy(value, name)
    require(
        array.shape in (shape, (1, *shape)) if len(shape) == 1 else array.shape == shape,
        name,
        f"shape {array.shape}",
        f"must be {shape}",
        "check the axes",
    )
    io_dtype(array, name)
    return array.reshape(shape)


def check_whole(value: Any, argument: str, instead: str) -> int:
    """An integer of any integer type."""
    try:
        return operator.index(value)
    except TypeError:
        raise invalid(argument, repr(value), "must be a whole number", instead) from None


def check_kinds(spec: Any, weights: Any) -> None:
    """The two arguments of a block are what they should be."""
    kinds: list[tuple[str, Any, type]] = [("spec", spec, BlockSpec), ("weights", weights, BlockWeights)]
    if isinstance(weights, BlockWeights):
        kinds.append(("experts", weights.experts, ExpertWeights))
        kinds += [("shared", weights.shared, ExpertWeights)] if weights.shared is not None else []
    for argument, value, kind in kinds:
        rule, instead = f"must be of type {kind.__name__}", f"use moedecode.{kind.__name__}"
        require(isinstance(value, kind), argument, type(value).__name__, rule, instead)
