"""Owns `Tensor`, a strided view of a Storage: indexing, access patterns with dynamic offsets, reshapes and
reinterpretation.

Must not know programs or instructions. Offsets and strides count elements of the view's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import Array
from .dtypes import DType
from .errors import ConstraintViolation
from .memory import Buffer, Storage
from .views import contiguous_strides, last_element, reshape_strides

if TYPE_CHECKING:
    from .registers import Register

__all__ = ["DynamicIndex", "Tensor"]

Pattern = Sequence[Sequence[int]]

_WHOLE = slice(None)


@dataclass(frozen=True)
class DynamicIndex:
    """The part of an address that is known only when the instruction runs.

    Attributes:
        source: the tensor or register that holds the index.
        step: elements that an index of 1 moves the view by.
        limit: number of valid indices; others are out of bounds.
        per_partition: one index for each entry of the first dimension (then the first dimension has no stride
            of its own), else one for all.
    """

    source: Tensor | Register
    step: int
    limit: int
    per_partition: bool


class Tensor:
    """A view of a storage, as kernels see it.

    Attributes:
        storage: the memory.
        shape, dtype: of the view; on chip shape[0] is the partition dimension.
        strides, offset: in elements of `dtype`.
        index: a dynamic offset, or None.
    """

    __slots__ = ("dtype", "index", "offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        dtype: DType | None = None,
        index: DynamicIndex | None = None,
    ) -> None:
        self.storage = storage
        self.shape = storage.shape if shape is None else shape
        self.strides = contiguous_strides(self.shape) if strides is None else strides
        self.offset = offset
        self.dtype = storage.dtype if dtype is None else dtype
        self.index = index

    @property
    def buffer(self) -> Buffer:
        """The memory it is in: `nl.sbuf`, `nl.psum`, `nl.hbm`, ..."""
        return self.storage.buffer

    @property
    def name(self) -> str:
        """Name of the storage."""
        return self.storage.name

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that reading every element of the view moves (a repeated element counts each time)."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        dynamic = "" if self.index is None else " with a dynamic offset"
        return f"{list(self.shape)} {self.dtype}{dynamic} of {self.storage!r}"

    def __bool__(self) -> bool:
        """True: kernels ask `if tensor` for "was one given"; the value of a tensor is not known while a
        program is built.
        """
        return True

    # ---- indexing ----

    def __getitem__(self, key: Any) -> Tensor:
        """A sub-view. Keys: int, slice, `nl.ds(start, size)`, `...`, None.

        On chip an int on the partition dimension keeps it with size 1, and the result has at least two
        dimensions.

        Raises:
            ConstraintViolation: out of range, too many keys, or a key of another type.
        """
        keys = key if type(key) is tuple else (key,)
        have = len(self.shape)
        if len(keys) > have or any(entry is None or entry is Ellipsis for entry in keys):
            keys = _expand(keys, have, self)
        on_chip = self.storage.on_chip
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        dim = 0
        for entry in keys:
            if entry is None:
                shape.append(1)
                strides.append(0)
                continue
            count, stride = self.shape[dim], self.strides[dim]
            if type(entry) is slice:
                if entry == _WHOLE:
                    shape.append(count)
                    strides.append(stride)
                else:
                    start, stop, step = _bounds(entry, count, dim, self)
                    shape.append((stop - start + step - 1) // step)
                    strides.append(stride * step)
                    offset += start * stride
            else:
                position = int(entry)
                if position < 0:
                    position += count
                if not 0 <= position < count:
                    raise ConstraintViolation(
                        "indexing", f"[{entry}] on dimension {dim} of {self!r}", f"it has {count} elements"
                    )
                offset += position * stride
                if dim == 0 and on_chip:
                    shape.append(1)
                    strides.append(stride)
            dim += 1
        if dim < have:
            shape += self.shape[dim:]
            strides += self.strides[dim:]
        floor = 2 if on_chip else 1
        while len(shape) < floor:
            shape.append(1)
            strides.append(1)
        if self.index is not None and self.index.per_partition and shape[0] != self.shape[0]:
            raise ConstraintViolation(
                "indexing", repr(self), "dimension 0 of a view with a vector offset cannot be sliced"
            )
        return Tensor(self.storage, tuple(shape), tuple(strides), offset, self.dtype, self.index)

    def ap(
        self,
        pattern: Pattern,
        offset: int = 0,
        scalar_offset: Tensor | Register | None = None,
        vector_offset: Tensor | None = None,
        indirect_dim: int | None = None,
        dtype: DType | None = None,
    ) -> Tensor:
        """A view with an explicit access pattern.

        Args:
            pattern: [[stride, count], ...] in elements of the result's dtype; the first pair is the partition
                dimension on chip.
            offset: elements from the first element of this view.
            scalar_offset: int tensor of one element in SBUF, or a register: adds value * (stride of
                `indirect_dim` in this tensor, which for an unsliced tensor is prod(shape[indirect_dim +
                1:])).
            vector_offset: int tensor [P, 1]: the same with one index for each of the P entries of the first
                pair, in place of its stride.
            indirect_dim: the dimension that the dynamic offset counts.
            dtype: reinterpret the bytes.

        Raises:
            ConstraintViolation: out of bounds, both dynamic offsets, or a wrong index tensor.
        """
        new_dtype = self.dtype if dtype is None else np.dtype(dtype)
        start, steps = self._in_units_of(new_dtype)
        shape = tuple(int(count) for _, count in pattern)
        strides = tuple(int(stride) for stride, _ in pattern)
        index = None
        if scalar_offset is not None or vector_offset is not None:
            index = self._dynamic(shape, steps, scalar_offset, vector_offset, indirect_dim)
            if index.per_partition:
                strides = (0, *strides[1:])
        elif self.index is not None:
            index = self.index
        view = Tensor(self.storage, shape, strides, start + int(offset), new_dtype, index)
        view._check_bounds("ap")
        return view

    def _in_units_of(self, dtype: DType) -> tuple[int, tuple[int, ...]]:
        """Offset and strides of this view counted in elements of another dtype."""
        if dtype.itemsize == self.dtype.itemsize:
            return self.offset, self.strides
        ours, theirs = self.dtype.itemsize, dtype.itemsize
        if self.offset * ours % theirs:
            raise ConstraintViolation(
                "ap",
                f"dtype={dtype} of {self!r}",
                f"the offset of {self.offset * ours} bytes is not a multiple of {theirs}",
            )
        return self.offset * ours // theirs, tuple(stride * ours // theirs for stride in self.strides)

    def _dynamic(
        self,
        shape: tuple[int, ...],
        steps: tuple[int, ...],
        scalar_offset: Tensor | Register | None,
        vector_offset: Tensor | None,
        indirect_dim: int | None,
    ) -> DynamicIndex:
        if scalar_offset is not None and vector_offset is not None:
            raise ConstraintViolation(
                "ap", "scalar_offset and vector_offset", "at most one of the two can be given"
            )
        if self.index is not None:
            raise ConstraintViolation(
                "ap", repr(self), "a view that has a dynamic offset cannot get a second one"
            )
        dim = 0 if indirect_dim is None else int(indirect_dim)
        if not 0 <= dim < self.ndim:
            raise ConstraintViolation(
                "ap", f"indirect_dim={indirect_dim}", f"{self!r} has {self.ndim} dimensions"
            )
        source = scalar_offset if vector_offset is None else vector_offset
        wanted = 1 if vector_offset is None else shape[0]
        if isinstance(source, Tensor):
            if source.dtype.kind not in "iu":
                raise ConstraintViolation(
                    "ap", f"index {source!r}", "a dynamic offset must be an integer tensor"
                )
            if not source.buffer.on_chip:
                raise ConstraintViolation(
                    "ap", f"index {source!r}", "a dynamic offset must be in SBUF; copy it there first"
                )
            if source.size != wanted:
                raise ConstraintViolation(
                    "ap", f"index {source!r}", f"needs exactly {wanted} elements, it has {source.size}"
                )
        elif source is None:
            raise ConstraintViolation("ap", "scalar_offset", "must not be None")
        return DynamicIndex(source, steps[dim], self.shape[dim], vector_offset is not None)

    def _check_bounds(self, instruction: str) -> None:
        shape, strides, width = self.shape, self.strides, self.dtype.itemsize
        if min(shape) <= 0 or min(strides) < 0:
            raise ConstraintViolation(
                instruction,
                f"shape {shape}, strides {strides}",
                "counts are at least 1 and strides at least 0",
            )
        last = self.offset + last_element(shape, strides)
        have = self.storage.nbytes // width
        if self.offset < 0 or last >= have:
            raise ConstraintViolation(
                instruction,
                f"elements {self.offset}..{last} of {self.storage!r}",
                f"it holds {have} elements of {self.dtype}",
            )
        if self.storage.on_chip:
            row = self.storage.partition_bytes
            inside = self.offset * width % row + (last_element(shape[1:], strides[1:]) + 1) * width
            if inside > row or (shape[0] > 1 and strides[0] * width != row):
                raise ConstraintViolation(
                    instruction,
                    f"shape {shape}, strides {strides}, offset {self.offset} of {self.storage!r}",
                    f"a partition holds {row // width} elements: the first stride must be that, the others "
                    "stay inside one partition",
                )

    # ---- other shapes of the same elements ----

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in the same order under another shape (one entry may be -1), without a copy.

        Raises:
            ConstraintViolation: another number of elements, a layout that would need a copy, or on chip
                another number of partitions.
        """
        wanted = [int(n) for n in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)]
        if -1 in wanted:
            known = -math.prod(wanted)
            wanted[wanted.index(-1)] = self.size // known if known else 0
        if math.prod(wanted) != self.size:
            raise ConstraintViolation(
                "reshape", f"{self.shape} -> {tuple(wanted)}", f"{self.size} elements do not fill it"
            )
        if self.buffer.on_chip and wanted[0] != self.shape[0]:
            raise ConstraintViolation(
                "reshape",
                f"{self.shape} -> {tuple(wanted)}",
                f"the partition dimension of a tensor in {self.buffer.value} is fixed",
            )
        if self.buffer.on_chip:
            free = reshape_strides(self.shape[1:], self.strides[1:], wanted[1:])
            strides = None if free is None else (self.strides[0], *free)
        else:
            strides = reshape_strides(self.shape, self.strides, wanted)
        if strides is None:
            raise ConstraintViolation(
                "reshape", f"{self.shape} with strides {self.strides} -> {tuple(wanted)}", "would need a copy"
            )
        return Tensor(self.storage, tuple(wanted), strides, self.offset, self.dtype, self.index)

    def view(self, dtype: Any) -> Tensor:
        """The same bytes as another dtype; the last dimension grows or shrinks with the element size (as
        NumPy's `view`).
        """
        new = np.dtype(dtype)
        ours, theirs = self.dtype.itemsize, new.itemsize
        if ours == theirs:
            return Tensor(self.storage, self.shape, self.strides, self.offset, new, self.index)
        if self.index is not None:
            raise ConstraintViolation(
                "view", repr(self), "a view with a dynamic offset keeps its element size"
            )
        run = self.shape[-1] * ours
        if self.strides[-1] != 1 or run % theirs or any(s * ours % theirs for s in self.strides[:-1]):
            raise ConstraintViolation(
                "view",
                f"{new} of {self!r}",
                f"the last dimension must be contiguous and a multiple of {theirs} bytes",
            )
        offset, strides = self._in_units_of(new)
        return Tensor(self.storage, (*self.shape[:-1], run // theirs), (*strides[:-1], 1), offset, new)

    def permute(self, *order: Any) -> Tensor:
        """The dimensions in another order; on chip dimension 0 stays first."""
        axes = tuple(order[0]) if len(order) == 1 and not isinstance(order[0], int) else tuple(order)
        if sorted(axes) != list(range(self.ndim)) or (self.buffer.on_chip and axes[0] != 0):
            raise ConstraintViolation(
                "permute",
                f"{axes} of {self!r}",
                "must name every dimension once, on chip the partition dimension first",
            )
        shape, strides = tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes)
        return Tensor(self.storage, shape, strides, self.offset, self.dtype, self.index)

    def broadcast_to(self, *shape: Any) -> Tensor:
        """Repeat dimensions of size 1 (stride 0); the shape must have as many dimensions as this view."""
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        if len(wanted) != self.ndim or any(a not in (1, b) for a, b in zip(self.shape, wanted, strict=True)):
            raise ConstraintViolation(
                "broadcast_to", f"{self.shape} -> {wanted}", "only dimensions of size 1 can grow"
            )
        strides = tuple(s if a == b else 0 for a, b, s in zip(self.shape, wanted, self.strides, strict=True))
        return Tensor(self.storage, wanted, strides, self.offset, self.dtype, self.index)

    def expand_dim(self, dim: int) -> Tensor:
        """A new dimension of size 1 before `dim`."""
        shape, strides = (
            (*self.shape[:dim], 1, *self.shape[dim:]),
            (*self.strides[:dim], 0, *self.strides[dim:]),
        )
        return Tensor(self.storage, shape, strides, self.offset, self.dtype, self.index)

    # ---- for the machine ----

    def array(self) -> Array:
        """The elements as a NumPy view of the memory (writable unless the caller's array is not); zeros for a
        phantom.

        The dynamic offset must be resolved before (see `resolved`, `rows`).
        """
        if self.index is not None:
            raise ConstraintViolation("array", repr(self), "the dynamic offset has not been resolved")
        data = self.storage.data
        if data is None or not self.storage.real:
            return np.broadcast_to(np.zeros((), self.dtype), self.shape)
        width = self.dtype.itemsize
        strides = tuple(s * width for s in self.strides)
        view: Array = np.ndarray(self.shape, self.dtype, data, self.offset * width, strides)
        return view

    def on(self, flat: Array) -> Array:
        """This view of a flat array with one entry per element of the storage (for example
        `storage.written`).
        """
        if self.dtype.itemsize != self.storage.dtype.itemsize:
            raise ConstraintViolation("on", repr(self), "the view has another element size than its storage")
        width = flat.dtype.itemsize
        strides = tuple(s * width for s in self.strides)
        view: Array = np.ndarray(self.shape, flat.dtype, flat, self.offset * width, strides)
        return view

    def numpy(self) -> Array:
        """A copy of the elements, for tests and outputs."""
        copy: Array = self.array().copy()
        return copy

    def moved(self, elements: int) -> Tensor:
        """The view without its dynamic offset, shifted by some elements."""
        return Tensor(self.storage, self.shape, self.strides, self.offset + elements, self.dtype)

    def fits(self) -> bool:
        """Whether every element lies inside the storage."""
        return (
            self.offset >= 0
            and self.offset + last_element(self.shape, self.strides)
            < self.storage.nbytes // self.dtype.itemsize
        )


def _expand(keys: tuple[Any, ...], ndim: int, tensor: Tensor) -> tuple[Any, ...]:
    """Write an ellipsis out."""
    used = sum(1 for k in keys if k is not None and k is not Ellipsis)
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if used > ndim or len(dots) > 1:
        raise ConstraintViolation("indexing", f"{len(keys)} keys on {tensor!r}", f"it has {ndim} dimensions")
    at = dots[0] if dots else len(keys)
    return (*keys[:at], *(_WHOLE,) * (ndim - used), *keys[at + 1 :])


def _bounds(entry: slice, count: int, dim: int, tensor: Tensor) -> tuple[int, int, int]:
    step = 1 if entry.step is None else int(entry.step)
    start = 0 if entry.start is None else int(entry.start)
    stop = count if entry.stop is None else int(entry.stop)
    if start < 0:
        start += count
    if stop < 0:
        stop += count
    if step < 1 or not 0 <= start < stop <= count:
        raise ConstraintViolation(
            "indexing",
            f"[{entry.start}:{entry.stop}:{entry.step}] on dimension {dim} of {tensor!r}",
            f"must be a non-empty range inside 0..{count}",
        )
    return start, stop, step
