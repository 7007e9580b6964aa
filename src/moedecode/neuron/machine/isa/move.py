"""Instructions that move or make index data: shuffles across partitions, gathers, iota, nonzero_with_count.

Owns their layouts (quadrants of 32 partitions, GpSimd processors of 16) and rules. Does no arithmetic on
floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost import Cost, compute, gpsimd
from ..errors import ConstraintViolation
from ..memory import Buffer
from ..operands import elements, on_chip
from ..program import current
from ..tensor import Tensor

__all__ = ["iota", "local_gather", "nc_n_gather", "nc_stream_shuffle", "nonzero_with_count"]

_QUADRANT = 32
_KEEP = 255
_PER_PROCESSOR = 16  # partitions that one of the eight GpSimd processors connects to


def nc_stream_shuffle(dst: Tensor, src: Tensor, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """In each quadrant, partition i of ``dst`` = ``shuffle_mask[i]`` of ``src``; 255 leaves it. Vector.

    Args:
        dst: SBUF or PSUM, the dtype and elements per partition of ``src``; may be ``src`` itself.
        src: SBUF or PSUM. Tiles need not fill a quadrant or be of one height: ``dst`` is cut to its
            partitions, and a mask entry that one of them uses must lie within ``src``.
        shuffle_mask: 32 integers, each 0..31 or 255; the same for every quadrant. A ``src`` of one quadrant
            serves every quadrant of ``dst``.
        name: ignored.

    Raises:
        ConstraintViolation: an operand breaks a rule.
    """
    instruction = "nc_stream_shuffle"
    on_chip(instruction, {"dst": dst, "src": src})
    mask = [int(entry) for entry in shuffle_mask]
    if not (len(mask) == _QUADRANT and all(0 <= entry < _QUADRANT or entry == _KEEP for entry in mask)):
        raise ConstraintViolation(
            instruction, f"shuffle_mask={mask}", "must be 32 entries, each 0..31 or 255"
        )
    if dst.dtype != src.dtype:
        raise ConstraintViolation(instruction, f"src={src!r}", f"must be {dst.dtype} like dst; cast first")
    if elements(dst) != elements(src):
        raise ConstraintViolation(
            instruction, f"src={src!r}", f"must have {elements(dst)} elements per partition like dst"
        )
    into = np.arange(dst.shape[0])
    entry = np.array(mask)[into % _QUADRANT]
    into, entry = into[entry != _KEEP], entry[entry != _KEEP]
    quadrant = into // _QUADRANT if src.shape[0] > _QUADRANT else np.zeros_like(into)
    source = quadrant * _QUADRANT + entry
    beyond = source[source >= src.shape[0]]
    if beyond.size != 0:
        raise ConstraintViolation(
            instruction,
            f"src={src!r}",
            f"the mask asks for partition {int(beyond[0]) if beyond.size else 0}: use 255 where nothing is "
            "to "
            "be written",
        )
    prog = current()
    cost = compute(prog.chip, "vector", elements(src))
    # Kept partitions are read as well, so that nobody may clobber dst in between.
    sources = (src, dst) if into.size < dst.shape[0] else (src,)
    if prog.issue(instruction, engine="vector", dst=dst, sources=sources, cost=cost):
        taken = prog.load(src)[source]
        if into.size == dst.shape[0]:
            prog.store(dst, taken.reshape(dst.shape))
            return
        value = prog.load(dst).copy()
        value[into] = taken.reshape(into.size, *dst.shape[1:])
        prog.store(dst, value)


def iota(
    dst: Tensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, i, j, ..] = offset + p * channel_multiplier + i * step_i + j * step_j + ...; GpSimd, SBUF.

    ``pattern`` is up to four [step, count], slowest first; the counts multiply to the elements of a
    partition.
    """
    on_chip("iota", {"dst": dst}, (Buffer.sbuf,))
    if not 1 <= len(pattern) <= 4:
        raise ConstraintViolation("iota", f"pattern={pattern}", "must be one to four [step, count]")
    counts = [int(count) for _, count in pattern]
    if int(np.prod(counts)) != elements(dst):
        raise ConstraintViolation(
            "iota",
            f"pattern={pattern}",
            f"makes {int(np.prod(counts))} elements per partition, dst {dst.shape} holds {elements(dst)}",
        )
    prog = current()
    if prog.issue("iota", engine="gpsimd", dst=dst, sources=(), cost=gpsimd(prog.chip, elements(dst))):
        value = np.array(int(offset), np.int64)
        for step, count in pattern:
            value = value[..., None] + int(step) * np.arange(int(count), dtype=np.int64)
        channels = int(channel_multiplier) * np.arange(dst.shape[0], dtype=np.int64)
        # 32-bit integer arithmetic, then a cast to whatever dst is.
        values = (channels[:, None] + value.reshape(1, -1)).astype(np.int32)
        prog.store(dst, values.reshape(dst.shape))


def local_gather(
    dst: Tensor,
    src_buffer: Tensor,
    index: Tensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> None:
    """Gather along the free axis, with one list of indices per 16 partitions. GpSimd engine, SBUF.

    Each group of 16 partitions flattens its 16 rows of ``index`` (uint16), partition first, into one list,
    takes the first ``num_valid_indices`` of it, and reads ``num_elem_per_idx`` elements from each, on all 16
    partitions.

    Args:
        dst: [P, num_valid_indices * num_elem_per_idx] of src_buffer's dtype.
        src_buffer: [P, N], P a multiple of 16.
        index: uint16 [P, M].
        num_elem_per_idx: 1, 2, 4, 8, 16 or 32.
        num_valid_indices: default all 16 * M; at most 4096.
        name: ignored.

    Raises:
        ConstraintViolation: an operand breaks a rule, or an index lies outside ``src_buffer``.
    """
    instruction = "local_gather"
    on_chip(instruction, {"dst": dst, "src_buffer": src_buffer, "index": index}, (Buffer.sbuf,))
    if dst.dtype != src_buffer.dtype:
        raise ConstraintViolation(instruction, f"dst={dst!r}", f"must be {src_buffer.dtype} like src_buffer")
    if index.dtype != np.uint16:
        raise ConstraintViolation(instruction, f"index={index!r}", "must be uint16")
    partitions = src_buffer.shape[0]
    if partitions != index.shape[0] or partitions % _PER_PROCESSOR:
        raise ConstraintViolation(
            instruction,
            f"index={index!r}",
            f"and src_buffer {src_buffer.shape} must have the same multiple of 16 partitions",
        )
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        raise ConstraintViolation(
            instruction, f"num_elem_per_idx={num_elem_per_idx}", "must be 1, 2, 4, 8, 16 or 32"
        )
    there = _PER_PROCESSOR * elements(index)
    valid = there if num_valid_indices is None else int(num_valid_indices)
    if not 0 < valid <= min(there, 4096):
        raise ConstraintViolation(
            instruction,
            f"num_valid_indices={valid}",
            f"must be 1..{min(there, 4096)}: 16 rows of index hold {there}",
        )
    if dst.shape[0] != partitions or elements(dst) != valid * num_elem_per_idx:
        raise ConstraintViolation(
            instruction, f"dst={dst!r}", f"must hold [{partitions}, {valid * num_elem_per_idx}]"
        )
    prog = current()
    # 150 + valid * per / C with C = ((28 + t * per) / (t * per)) / min(4 / bytes, per), t = 4 (nki.isa
    # reference).
    per = num_elem_per_idx
    rate = ((28 + 4 * per) / (4 * per)) / min(4 / src_buffer.dtype.itemsize, per)
    if not prog.issue(
        instruction,
        engine="gpsimd",
        dst=dst,
        sources=(src_buffer, index),
        cost=gpsimd(prog.chip, valid * per / rate),
    ):
        return
    data = prog.load(src_buffer).reshape(partitions // _PER_PROCESSOR, _PER_PROCESSOR, -1)  # [groups, 16, N]
    lists = prog.load(index).reshape(partitions // _PER_PROCESSOR, _PER_PROCESSOR, -1)  # [groups, 16, M]
    flat = lists.transpose(0, 2, 1).reshape(lists.shape[0], -1)[:, :valid].astype(np.int64)
    places = (flat[:, :, None] + np.arange(per)).reshape(flat.shape[0], 1, -1)  # [groups, 1, valid * per]
    largest = int(places.max())
    if largest >= data.shape[2]:
        raise ConstraintViolation(
            instruction,
            f"index={index!r}",
            f"holds an index that reads element {largest} of {data.shape[2]}; set unused entries to 0",
        )
    prog.store(dst, np.take_along_axis(data, places, axis=2).reshape(dst.shape))


def nc_n_gather(dst: Tensor, data: Tensor, indices: Tensor, name: str | None = None) -> None:
    """dst[p, i] = data[p, indices[p, i]] over flattened free axes; indices uint32. GpSimd engine, SBUF."""
    instruction = "nc_n_gather"
    on_chip(instruction, {"dst": dst, "data": data, "indices": indices}, (Buffer.sbuf,))
    if dst.dtype != data.dtype:
        raise ConstraintViolation(instruction, f"dst={dst!r}", f"must be {data.dtype} like data")
    if indices.dtype != np.uint32:
        raise ConstraintViolation(instruction, f"indices={indices!r}", "must be uint32")
    if not (dst.shape[0] == data.shape[0] == indices.shape[0] and elements(dst) == elements(indices)):
        raise ConstraintViolation(
            instruction,
            f"indices={indices!r}",
            f"must have {dst.shape[0]} partitions and {elements(dst)} elements per partition like dst",
        )
    prog = current()
    # No public figure: one start per group of 512 elements, as the name's n groups suggest.
    groups = -(-elements(dst) // 512)
    cost = Cost(prog.chip.seconds("gpsimd", groups * prog.chip.gpsimd_start_cycles + elements(dst)))
    if prog.issue(instruction, engine="gpsimd", dst=dst, sources=(data, indices), cost=cost):
        places = prog.load(indices).reshape(dst.shape[0], -1).astype(np.int64)
        flat = prog.load(data).reshape(dst.shape[0], -1)
        largest = int(places.max())
        if largest >= flat.shape[1]:
            raise ConstraintViolation(
                instruction,
                f"indices={indices!r}",
                f"holds {largest}, data has {flat.shape[1]} elements per partition",
            )
        prog.store(dst, np.take_along_axis(flat, places, axis=1).reshape(dst.shape))


def nonzero_with_count(
    dst: Tensor, src: Tensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> None:
    """dst = indices of the nonzero elements, padding, and at the end their number. GpSimd engine, SBUF.

    Reads and writes partitions 0, 16, 32, ... only: the others keep what they held.

    Args:
        dst: int32 [P, N + 1].
        src: float32 or int32 [P, N].
        index_offset: added to every index.
        padding_val: fills the unused indices.
        name: ignored.

    Raises:
        ConstraintViolation: a chip before trn2, or an operand breaks a rule.
    """
    instruction = "nonzero_with_count"
    prog = current()
    if prog.chip.generation < 3:
        raise ConstraintViolation(instruction, f"chip {prog.chip.name}", "needs trn2 or newer")
    on_chip(instruction, {"dst": dst, "src": src}, (Buffer.sbuf,))
    if src.dtype.name not in ("float32", "int32"):
        raise ConstraintViolation(instruction, f"src={src!r}", "must be float32 or int32")
    if dst.dtype != np.int32:
        raise ConstraintViolation(instruction, f"dst={dst!r}", "must be int32")
    if dst.shape[0] != src.shape[0] or elements(dst) != elements(src) + 1:
        raise ConstraintViolation(
            instruction,
            f"dst={dst!r}",
            f"must be [{src.shape[0]}, {elements(src) + 1}]: one place more than src for the count",
        )
    # No public figure: a start and one pass over the elements.
    cost = gpsimd(prog.chip, elements(src))
    if not prog.issue(instruction, engine="gpsimd", dst=dst, sources=(src, dst), cost=cost):
        return
    count = elements(src)
    rows = slice(0, None, _PER_PROCESSOR)
    mask = prog.load(src).reshape(src.shape[0], -1)[rows] != 0
    value = prog.load(dst).reshape(dst.shape[0], -1).copy()
    first = np.argsort(~mask, axis=1, kind="stable")  # nonzero places first, ascending
    number = mask.sum(axis=1)
    value[rows, :count] = np.where(
        np.arange(count) < number[:, None], first + int(index_offset), int(padding_val)
    )
    value[rows, count] = number
    prog.store(dst, value.reshape(dst.shape))
