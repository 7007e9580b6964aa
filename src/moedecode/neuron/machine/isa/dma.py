"""Data movement by the DMA engines: copies, gathers, scatters, transposes and sums between HBM and SBUF.

Owns their shape and memory rules, dynamic addresses and costs. Knows nothing of compute engines or of the
other core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cost import Cost, dma
from ..coverage import region_of
from ..dtypes import is_float, is_poison, is_x4
from ..errors import ConstraintViolation
from ..memory import Buffer
from ..program import Program, current
from ..tensor import Tensor
from .constants import dge_mode as DgeMode
from .constants import oob_mode as OobMode

__all__ = ["dma_compute", "dma_copy", "dma_transpose"]

_AXES: dict[int, tuple[int, ...]] = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_MOST_SOURCES = 16


def dma_copy(
    dst: Tensor,
    src: Tensor,
    dst_rmw_op: Any = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    name: str | None = None,
    **options: Any,
) -> None:
    """Copy between HBM and SBUF, with conversion; a view with a vector offset makes it a gather (src) or
    scatter (dst).

    Elements are taken in the row-major order of each side, so only their number must agree (with a vector
    offset also dimension 0).

    Args:
        dst, src: views in HBM or SBUF.
        dst_rmw_op: `nl.add` adds to what is there.
        oob_mode: what a dynamic index out of bounds does: `error`, or `skip` that transfer. A negative index
            is out of bounds.
        dge_mode: who makes the descriptors; costs only.
        name: kept for compatibility.
        options: engine, priority and the like, which change nothing here.

    Raises:
        ConstraintViolation: memory, shape, dtype or bounds rule.
    """
    prog = current()
    _check_memory("dma_copy", dst=dst, src=src)
    if dst.size != src.size:
        raise ConstraintViolation(
            "dma_copy", f"dst {dst.shape} and src {src.shape}", "must have the same number of elements"
        )
    _check_dtypes("dma_copy", dst, src)
    if dst_rmw_op is not None and getattr(dst_rmw_op, "name", getattr(dst_rmw_op, "__name__", "")) != "add":
        raise ConstraintViolation("dma_copy", f"dst_rmw_op={dst_rmw_op!r}", "only nl.add is supported")
    skip = oob_mode is OobMode.skip
    pairs = _pairs(prog, dst, src, skip)
    dynamic = [
        t.index.source for t in (dst, src) if t.index is not None and isinstance(t.index.source, Tensor)
    ]
    sources: list[Any] = [[s for _, s in pairs], dynamic]
    if dst_rmw_op is not None:
        sources.append([d for d, _ in pairs])
    cost = _cost(prog, pairs, descriptors=bool(dst.index or src.index) or dge_mode is not DgeMode.none)
    if not prog.issue("dma_copy", "dma", [d for d, _ in pairs], sources, cost=cost):
        return
    for to, source in pairs:
        if not source.storage.real and not prog.compute and source.size > 4096:
            continue  # ledger-only: large integer tensors from a stand-in are data, not addresses
        if dst_rmw_op is None:
            _move(prog, to, source)
        else:
            prog.store(to, (prog.load(to) + prog.load(source).reshape(to.shape)))


def dma_transpose(
    dst: Tensor,
    src: Tensor,
    axes: tuple[int, ...] | None = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
    **options: Any,
) -> None:
    """Transpose by DMA: axes (1, 0), (2, 1, 0) or (3, 1, 2, 0) for 2, 3 or 4 dimensions.

    Args:
        dst: view with as many elements, in the transposed order; on chip it may have more partitions, of
            which the leading ones are written (public documentation does not say; public kernels count on
            it).
        src: view of 2, 3 or 4 dimensions; a vector offset gathers rows first.
        axes: one of the three permutations; None takes the one for the number of dimensions.
        dge_mode, oob_mode, name, options: as in `dma_copy`.

    Raises:
        ConstraintViolation: memory, shape, axes, dtype or bounds rule.
    """
    prog = current()
    _check_memory("dma_transpose", dst=dst, src=src)
    allowed = _AXES.get(src.ndim)
    if allowed is None or (axes is not None and tuple(axes) != allowed):
        raise ConstraintViolation(
            "dma_transpose",
            f"src {src.shape}, axes={axes}",
            f"supported: {', '.join(map(str, _AXES.values()))}",
        )
    wanted = tuple(src.shape[a] for a in allowed)
    if dst.buffer.on_chip and dst.shape[0] > wanted[0] and dst.shape[1:] == wanted[1:]:
        dst = dst[: wanted[0]]
    if dst.size != src.size or _trimmed(dst.shape) != _trimmed(wanted):
        raise ConstraintViolation(
            "dma_transpose", f"dst {dst.shape}, src {src.shape}", f"the transposed shape is {wanted}"
        )
    _check_dtypes("dma_transpose", dst, src)
    if dst.index is not None:
        raise ConstraintViolation("dma_transpose", f"dst {dst!r}", "must have a static address")
    rows = _rows(prog, src, oob_mode is OobMode.skip, "dma_transpose")
    found = [r for r in rows if r is not None]
    index = [src.index.source] if src.index is not None and isinstance(src.index.source, Tensor) else []
    cost = _cost(prog, [(dst, src.moved(0))], descriptors=True)
    if not prog.issue("dma_transpose", "dma", dst, [found, index], cost=cost):
        return
    if src.index is None or not src.index.per_partition:
        if found:
            prog.store(dst, _values(prog, found[0], dst).transpose(allowed).reshape(dst.shape))
        return
    gathered = dst.array().reshape(wanted).transpose(allowed).copy()  # skipped rows keep what dst holds
    for position, row in enumerate(rows):
        if row is not None:
            gathered[position] = row.array().astype(dst.dtype)[0]
    prog.store(dst, gathered.transpose(allowed).reshape(dst.shape))


def dma_compute(
    dst: Tensor,
    srcs: Sequence[Tensor],
    reduce_op: Any = None,
    scales: Sequence[float] | None = None,
    name: str | None = None,
    **options: Any,
) -> None:
    """Add up to 16 tensors on the way: dst = sum(srcs), in float32, rounded once.

    Args:
        dst: result, in HBM or SBUF.
        srcs: operands with as many elements.
        reduce_op: `nl.add`.
        scales: all 1.0.
        name, options: as in `dma_copy`.

    Raises:
        ConstraintViolation: memory or shape rule, another operator, a scale that is not 1.
    """
    prog = current()
    if scales is not None and callable(reduce_op) is False and callable(scales):
        scales, reduce_op = reduce_op, scales  # older positional order: scales before reduce_op
    if not 1 <= len(srcs) <= _MOST_SOURCES:
        raise ConstraintViolation("dma_compute", f"{len(srcs)} srcs", f"1 to {_MOST_SOURCES} are supported")
    if getattr(reduce_op, "name", getattr(reduce_op, "__name__", "")) != "add":
        raise ConstraintViolation("dma_compute", f"reduce_op={reduce_op!r}", "only nl.add is supported")
    if scales is not None and any(s != 1.0 for s in scales):
        raise ConstraintViolation("dma_compute", f"scales={scales}", "all must be 1.0")
    _check_memory("dma_compute", dst=dst, **{f"srcs[{i}]": s for i, s in enumerate(srcs)})
    if any(t.index is not None for t in (dst, *srcs)):
        raise ConstraintViolation("dma_compute", "dynamic offset", "addresses must be static")
    if any(s.size != dst.size for s in srcs):
        raise ConstraintViolation(
            "dma_compute",
            f"dst {dst.shape}, srcs {[s.shape for s in srcs]}",
            "must have the same number of elements",
        )
    cost = _cost(prog, [(dst, s) for s in srcs], descriptors=False)
    if not prog.issue("dma_compute", "dma", dst, [list(srcs)], cost=cost):
        return
    total = prog.load(srcs[0]).astype(np.float32).reshape(dst.shape)
    for source in srcs[1:]:
        total = total + prog.load(source).reshape(dst.shape)
    prog.store(dst, total)


def _check_memory(instruction: str, **operands: Tensor) -> None:
    for operand, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise ConstraintViolation(instruction, f"{operand}={tensor!r}", "must be a tensor")
        if tensor.buffer is Buffer.psum:
            raise ConstraintViolation(
                instruction,
                f"{operand} {tensor!r}",
                "DMA reads and writes SBUF and HBM; copy PSUM with tensor_copy first",
            )


def _check_dtypes(instruction: str, dst: Tensor, src: Tensor) -> None:
    if dst.dtype == src.dtype:
        return
    if is_x4(dst.dtype) or is_x4(src.dtype):
        raise ConstraintViolation(
            instruction,
            f"dst {dst.dtype}, src {src.dtype}",
            "an x4 type is moved as it is; use .view(dtype) to reinterpret bytes",
        )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _pairs(prog: Program, dst: Tensor, src: Tensor, skip: bool) -> list[tuple[Tensor, Tensor]]:
    """(dst, src) views with resolved addresses: one pair, or one per row with a vector offset; skipped
    transfers are left out.
    """
    gather = src.index is not None and src.index.per_partition
    scatter = dst.index is not None and dst.index.per_partition
    tos, froms = _rows(prog, dst, skip, "dma_copy"), _rows(prog, src, skip, "dma_copy")
    if gather or scatter:
        if dst.shape[0] != src.shape[0]:
            raise ConstraintViolation(
                "dma_copy", f"dst {dst.shape}, src {src.shape}", "with a vector offset dimension 0 must agree"
            )
        tos = tos if scatter else _split(tos, dst.shape[0])
        froms = froms if gather else _split(froms, src.shape[0])
    return [
        (to, source) for to, source in zip(tos, froms, strict=True) if to is not None and source is not None
    ]


def _split(views: list[Tensor | None], count: int) -> list[Tensor | None]:
    view = views[0]
    return [None] * count if view is None else [view[i : i + 1] for i in range(count)]


def _rows(prog: Program, tensor: Tensor, skip: bool, instruction: str) -> list[Tensor | None]:
    """The views that a dynamic view stands for; None where an index is out of bounds and is to be skipped.

    Raises:
        ConstraintViolation: an index out of bounds that is not to be skipped.
    """
    index = tensor.index
    if index is None:
        return [tensor]
    if not index.per_partition:
        values = [prog.scalar(index.source)]
    else:
        assert isinstance(index.source, Tensor)
        values = [int(v) for v in prog.resolved(index.source).array().reshape(-1)]
    rows: list[Tensor | None] = []
    for value in values:
        if prog.machine.poison and isinstance(index.source, Tensor) and is_poison(value, index.source.dtype):
            raise ConstraintViolation(
                instruction,
                f"index of {tensor!r}",
                f"{index.source!r} was never written; fill it first (-1 skips)",
            )
        row = tensor.moved(value * index.step)
        if index.per_partition:
            row = Tensor(row.storage, (1, *row.shape[1:]), row.strides, row.offset, row.dtype)
        if 0 <= value < index.limit and row.fits():
            rows.append(row)
        elif skip:
            rows.append(None)
        else:
            raise ConstraintViolation(
                instruction,
                f"index {value} into {tensor!r}",
                f"is out of bounds (0..{index.limit - 1}, view inside the tensor); "
                "oob_mode.skip leaves such transfers out",
            )
    return rows


def _move(prog: Program, dst: Tensor, src: Tensor) -> None:
    if dst.dtype == src.dtype:
        storage = dst.storage
        if storage.real and storage.data is not None:
            source = src.array()
            dst.array()[...] = source if src.shape == dst.shape else source.reshape(dst.shape)
        return
    prog.store(dst, _values(prog, src, dst).reshape(dst.shape))


def _values(prog: Program, src: Tensor, dst: Tensor) -> Any:
    if src.dtype != dst.dtype and is_float(src.dtype):
        return prog.load(src)
    return src.array()


def _cost(prog: Program, pairs: Sequence[tuple[Tensor, Tensor]], *, descriptors: bool) -> Cost:
    moved = hbm = 0
    run = None
    partitions = 0
    for dst, src in pairs:
        moved += max(dst.nbytes, src.nbytes)
        for tensor in (dst, src):
            if tensor.buffer.is_hbm:
                hbm += tensor.nbytes
            else:
                partitions += tensor.shape[0]
    if pairs:
        dst, src = pairs[0]
        run = min(region_of(dst).run, region_of(src).run)
    return dma(
        prog.chip,
        max(moved, hbm),
        partitions=min(partitions, 128) or 128,
        run_bytes=run,
        hbm=hbm > 0,
        descriptors=descriptors,
    )
