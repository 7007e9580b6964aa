"""Reading single arguments of the flat functions: enums, dtypes of any library, ranks, expert ids, shapes.

Every function here returns a clean value or raises; none of them computes.
"""

from __future__ import annotations

import math
from enum import Enum
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from ..arrays import IO_DTYPES, Array, as_numpy, io_dtype
from ..gates import invalid, require, unsupported
from ..spec import ExpertAffinityScaleMode

Member = TypeVar("Member", bound=Enum)


def member(kind: type[Member], value: Any, argument: str) -> Member:
    """The member of ``kind`` that ``value`` is or names: a string, or another library's enum of that name."""
    name = value if isinstance(value, str) else getattr(value, "name", None)
    members = ", ".join(kind.__members__)
    known = isinstance(name, str) and name in kind.__members__
    require(known, argument, repr(value), f"is not a {kind.__name__}", f"choose one of {members}")
    return kind[str(name)]


def scale_mode(value: Any) -> ExpertAffinityScaleMode:
    """The affinity scale mode; PRE_SCALE_DELAYED belongs to prefill and is refused."""
    argument = "expert_affinities_scaling_mode"
    mode = member(ExpertAffinityScaleMode, value, argument)
    if mode is ExpertAffinityScaleMode.PRE_SCALE_DELAYED:
        raise unsupported(argument, mode.name, "is a prefill-only mode", "use PRE_SCALE or POST_SCALE")
    return mode


def dtype_name(value: Any, argument: str) -> str:
    """ "float32", "float16" or "bfloat16" from a string or a NumPy, ml_dtypes or torch dtype."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
    name = str(name).removeprefix("torch.")
    known = ", ".join(IO_DTYPES)
    require(name in IO_DTYPES, argument, repr(value), "is not a dtype of activations", f"use {known}")
    return name


def number(value: Any, argument: str, instead: str) -> float:
    """A finite number."""
    try:
        finite = isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int past the largest float
        finite = False
    require(finite, argument, repr(value), "must be a finite number", instead)
    return float(value)


def rank(rank_id: Any) -> int | None:
    """``rank_id`` as an int: None, an int, or an integer array of one element such as ``[1, 1]``."""
    if rank_id is None:
        return None
    array = as_numpy(rank_id, "rank_id")
    whole = array.size == 1 and array.dtype.kind in "iu"
    require(whole, "rank_id", _kind(array), "must be one integer", "pass an int or [[r]]")
    return int(array.reshape(-1)[0])


def first_expert(rank_id: int | None, local: int, experts: int, all_expert: bool) -> int:
    """Global id of the first local expert; ``local`` of ``experts`` are here."""
    given = rank_id is not None
    require(
        given or not all_expert,
        "rank_id",
        None,
        "all-expert mode needs this rank's id",
        "pass 0 on a single rank",
    )
    few = 1 <= local <= experts
    require(
        few,
        "expert_gate_up_weights",
        f"{local} experts",
        f"the router knows {experts}",
        "check the first axis",
    )
    whole = given or local == experts
    require(
        whole,
        "rank_id",
        None,
        f"the weights hold {local} of {experts} experts",
        "say which slice this rank owns",
    )
    chosen, last = rank_id or 0, experts // local - 1
    fits = 0 <= chosen <= last
    require(
        fits,
        "rank_id",
        rank_id,
        f"{experts} experts in slices of {local} end at rank {last}",
        f"use 0..{last}",
    )
    return chosen * local


def hidden_rows(value: Any, argument: str) -> Array:
    """Activations ``[T, H]`` or ``[B, S, H]`` in an io dtype, as given."""
    array = as_numpy(value, argument)
    shaped = array.ndim in (2, 3) and array.shape[-1] > 0
    require(shaped, argument, f"shape {array.shape}", "must be [B, S, H] or [T, H]", "reshape it")
    io_dtype(array, argument)
    return array


def same_kind(value: Any, argument: str, like: Array) -> Array:
    """An array of the shape and dtype of ``like``."""
    array = as_numpy(value, argument)
    same = array.shape == like.shape and array.dtype == like.dtype
    require(same, argument, _kind(array), f"must be {_kind(like)} like the input", "reshape or cast it")
    return array


def residual_like(value: Any, inp: Array, flat: Array) -> Array:
    """The residual as ``[T, H]``: of the shape of ``inp``, or ``[T, H]`` as the functions return it."""
    array = as_numpy(value, "residual")
    return same_kind(array, "residual", flat if array.shape == flat.shape else inp).reshape(flat.shape)


def vector(value: Any, argument: str, length: int) -> Array | None:
    """A float vector ``[n]`` or ``[1, n]`` as ``[n]``; None stays None."""
    if value is None:
        return None
    array = as_numpy(value, argument)
    fits = array.shape in ((length,), (1, length))
    require(fits, argument, f"shape {array.shape}", f"must be [1, {length}] or [{length}]", "check the axes")
    io_dtype(array, argument)
    return array.reshape(length)


def matrix(value: Any, argument: str, rows: int | None, columns: int | None, axes: str) -> Array:
    """A float matrix of the given sizes (None: any); ``axes`` names them in messages."""
    array = as_numpy(value, argument)
    fits = array.ndim == 2 and rows in (None, array.shape[0]) and columns in (None, array.shape[1])
    sizes = f"[{'any' if rows is None else rows}, {'any' if columns is None else columns}]"
    require(fits, argument, f"shape {array.shape}", f"must be {axes} = {sizes}", "check the axis order")
    io_dtype(array, argument)
    return array


def expert_ids(expert_index: Any, tokens: int, experts: int) -> Array:
    """``expert_index`` as int32 ``[T, K]``; every id lies in 0..E-1 or is -1, which means "no expert"."""
    array = as_numpy(expert_index, "expert_index")
    whole = array.ndim == 2 and array.shape[0] == tokens and array.dtype.kind in "iu"
    require(
        whole, "expert_index", _kind(array), f"must be integers [{tokens}, K]", "give K expert ids per token"
    )
    wrong = (array >= experts) | (array < 0) & (array != -1) if array.dtype.kind == "i" else array >= experts
    if wrong.any():
        t, k = map(int, np.argwhere(wrong)[0])
        where, rule = f"expert_index[{t}, {k}]", f"must be an expert id in 0..{experts - 1}"
        raise invalid(where, int(array[t, k]), rule, "use -1 for no expert")
    return np.ascontiguousarray(array, np.int32)


def _kind(array: Array) -> str:
    return f"{array.dtype} array of shape {array.shape}"
