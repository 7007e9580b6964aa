"""Instructions that pick the largest values of each partition: max8, nc_find_index8, nc_match_replace8.

Owns the order among equal values: the k-th occurrence in the list of 8 is the k-th occurrence in the data, so
ties resolve to ascending indices. Knows nothing of routers.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from ....arrays import Array
from ..cost import compute
from ..errors import ConstraintViolation
from ..memory import Storage
from ..operands import elements, load_float, on_chip, refuse_x4, same_elements, store_flat
from ..program import Program, current
from ..tensor import Tensor

__all__ = ["max8", "nc_find_index8", "nc_match_replace8"]

_EIGHT = 8
_LONGEST = 16_384  # elements per partition
_NOT_FOUND = 0xFFFFFFFF  # an index no tensor has: the reference leaves the case undefined, here it shows

# Ledger-only mode, where logits have no values: the random order of columns drawn for a tensor, and how far
# it has been handed out. Rounds of 8 over one tensor thus get distinct indices, as they would with data.
_drawn: WeakKeyDictionary[Storage, tuple[Array, int]] = WeakKeyDictionary()


def _check_data(instruction: str, name: str, data: Tensor, least: int = _EIGHT) -> None:
    on_chip(instruction, {name: data})
    refuse_x4(instruction, **{name: data})
    if not least <= elements(data) <= _LONGEST:
        raise ConstraintViolation(
            instruction,
            f"{name}={data!r}",
            f"{elements(data)} elements per partition: must be {least}..{_LONGEST}; pad with a very negative "
            "value",
        )


def _check_eight(instruction: str, name: str, tile: Tensor, data: Tensor) -> None:
    on_chip(instruction, {name: tile})
    if tile.shape[0] != data.shape[0] or elements(tile) != _EIGHT:
        raise ConstraintViolation(
            instruction, f"{name}={tile!r}", f"must hold {_EIGHT} elements on {data.shape[0]} partitions"
        )


def max8(dst: Tensor, src: Tensor, name: str | None = None) -> None:
    """dst [P, 8] = the 8 largest values of each partition, descending, repeats included. Vector engine."""
    _check_data("max8", "src", src)
    _check_eight("max8", "dst", dst, src)
    prog = current()
    if prog.issue(
        "max8", engine="vector", dst=dst, sources=(src,), cost=compute(prog.chip, "vector", elements(src))
    ):
        value = load_float(prog, src)
        # np.sort puts NaN last, hence first here: poison shows instead of being passed over.
        largest = np.sort(value, axis=1)[:, : -_EIGHT - 1 : -1]
        store_flat(prog, dst, largest)


def _equal(data: Array, value: Array) -> Array:
    same: Array = (data == value) | (np.isnan(data) & np.isnan(value))
    return same


def _occurrences(data: Array, values: Array) -> Array:
    """Index in ``data [P, N]`` of each of ``values [P, 8]``, repeat k at its occurrence k; -1 if none."""
    matches = _equal(data[:, None, :], values[:, :, None])  # [P, 8, N]
    repeats = _equal(values[:, None, :], values[:, :, None])  # [P, 8, 8]
    rank = np.tril(repeats, -1).sum(axis=2)  # earlier equal entries of the list
    wanted = matches & (np.cumsum(matches, axis=2) == rank[:, :, None] + 1)
    found: Array = np.where(wanted.any(axis=2), wanted.argmax(axis=2), -1)
    return found


def nc_find_index8(dst: Tensor, data: Tensor, vals: Tensor, name: str | None = None) -> None:
    """dst [P, 8] (uint16, uint32) = index in ``data`` of each of the 8 ``vals`` of its partition. Vector.

    A value that occurs k times in ``vals`` gets its first k occurrences, ascending. A value that ``data``
    lacks gives the largest index of the dtype. In ledger-only mode data without values gives random distinct
    indices.
    """
    instruction = "nc_find_index8"
    _check_data(instruction, "data", data)
    _check_eight(instruction, "vals", vals, data)
    _check_eight(instruction, "dst", dst, data)
    if dst.dtype.name not in ("uint16", "uint32"):
        raise ConstraintViolation(instruction, f"dst={dst!r}", "must be uint16 or uint32")
    prog = current()
    cost = compute(prog.chip, "vector", elements(data))
    if not prog.issue(instruction, engine="vector", dst=dst, sources=(data, vals), cost=cost):
        return
    if _is_drawn(prog, data):
        found = _draw(prog, data)
    else:
        found = _occurrences(load_float(prog, data), load_float(prog, vals))
    index = np.where(found < 0, _NOT_FOUND, found).astype(np.uint32).astype(dst.dtype)
    prog.store(dst, index.reshape(dst.shape))


def _is_drawn(prog: Program, data: Tensor) -> bool:
    """Whether the indices come from the generator: in ledger-only mode, for data that carries no values."""
    return not prog.compute and not data.storage.real


def _draw(prog: Program, data: Tensor) -> Array:
    """8 random indices per partition that this tensor has not given yet (all over again when it runs out)."""
    rows, columns = data.shape[0], elements(data)
    order, used = _drawn.get(data.storage, (None, 0))
    if order is None or order.shape != (rows, columns) or used + _EIGHT > columns:
        order, used = np.argsort(prog.random.random((rows, columns)), axis=1), 0
    _drawn[data.storage] = (order, used + _EIGHT)
    return order[:, used : used + _EIGHT]


def nc_match_replace8(
    dst: Tensor,
    data: Tensor,
    vals: Tensor,
    imm: float,
    dst_idx: Tensor | None = None,
    name: str | None = None,
) -> None:
    """dst = ``data`` with one occurrence of each of the 8 ``vals`` replaced by ``imm``. Vector engine.

    Equal values in ``vals`` replace as many occurrences, ascending; ``dst_idx [P, 8]`` receives their
    indices.
    """
    instruction = "nc_match_replace8"
    _check_data(instruction, "data", data, least=1)
    on_chip(instruction, {"dst": dst})
    same_elements(instruction, dst, data=data)
    _check_eight(instruction, "vals", vals, data)
    outputs: tuple[Tensor, ...] = (dst,)
    if dst_idx is not None:
        _check_eight(instruction, "dst_idx", dst_idx, data)
        if dst_idx.dtype.name not in ("uint16", "uint32"):
            raise ConstraintViolation(instruction, f"dst_idx={dst_idx!r}", "must be uint16 or uint32")
        outputs += (dst_idx,)
    prog = current()
    cost = compute(prog.chip, "vector", elements(data))
    executes = prog.issue(instruction, engine="vector", dst=outputs, sources=(data, vals), cost=cost)
    if _is_drawn(prog, data):
        if dst_idx is not None:
            prog.store(dst_idx, _draw(prog, data).astype(dst_idx.dtype).reshape(dst_idx.shape))
        if data.storage in _drawn:
            _drawn[dst.storage] = _drawn[data.storage]  # what is replaced stays given out
        return
    if not executes:
        return
    value = load_float(prog, data).copy()
    found = _occurrences(value, load_float(prog, vals))
    rows, places = np.nonzero(found >= 0)
    value[rows, found[rows, places]] = np.float32(imm)
    store_flat(prog, dst, value)
    if dst_idx is not None:
        index = np.where(found < 0, _NOT_FOUND, found).astype(np.uint32).astype(dst_idx.dtype)
        prog.store(dst_idx, index.reshape(dst_idx.shape))
