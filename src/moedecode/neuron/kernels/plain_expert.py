"""One expert without block scales in HBM: where its tensors lie, and how they come into SBUF.

Owns the layouts ``[L, H, 2, I]`` / ``[L, I, H]`` and the shared expert's, and who works on which columns of
I. Knows no arithmetic.
Letters: L local experts, H hidden, I intermediate; index i of a piece of I sits on partition i mod 128 of
I-tile i div 128, hidden index h = 128*j + p on partition p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .nki_names import nisa, nl
from .tiles import PARTITIONS, ExpertOptions, ExpertTensors, Tensor, ceil_div, core, exchange, share, tiles

LOAD_BYTES = 64 * 1024
"""Weights of one load, per partition: room for the next load, the hidden and the partial sums beside it."""
Pattern = list[list[int]]


@dataclass(frozen=True)
class Piece:
    """Columns ``[start, start + columns)`` of item ``index``: an expert, or a choice of a token."""

    index: int
    start: int
    columns: int
    shared: bool
    """Whether the other core works on the rest of the item."""


def pieces(count: int, intermediate: int, alone: bool = False) -> list[Piece]:
    """This core's share of ``count`` items: all if it is ``alone`` with them, else every other one.

    Of an odd last one the core takes half of I.
    """
    this, cores = core()
    if alone or cores == 1:
        return [Piece(i, 0, intermediate, False) for i in range(count)]
    whole = [Piece(i, 0, intermediate, False) for i in range(this, count - count % 2, 2)]
    start, columns = share(intermediate)
    last = [Piece(count - 1, start, columns, True)] if count % 2 else []
    return [*whole, *last]


class PlainExpert(Protocol):
    """What the arithmetic asks of an expert."""

    @property
    def hidden(self) -> int:
        """H."""

    @property
    def gate_up_columns(self) -> int:
        """How many columns of gate and up one load should take."""

    def gate_up(self, start: int, columns: int) -> Tensor:
        """Columns ``[start, start + columns)`` of gate and up in SBUF: ``[128, H/128, 2, columns]``."""

    def gate_up_scale(self, piece: Piece) -> list[Tensor | None]:
        """Scales of gate and of up, float32: ``[128, I-tiles]``, ``[128, 1]`` for all of them, or None."""

    def gate_up_bias(self, piece: Piece) -> list[Tensor | None]:
        """Biases of gate and of up, float32 ``[128, I-tiles]``, or None."""

    def down(self, piece: Piece, column: int, columns: int) -> Tensor:
        """Those columns of H, rows of ``piece``: ``[128, I-tiles, columns]`` in SBUF."""

    def down_columns(self, piece: Piece) -> int:
        """How many columns of H one load should take."""

    def down_scale(self, piece: Piece) -> Tensor | None:
        """Scales of y, float32: ``[128, H/128]``, ``[128, 1]`` for all of it, or None."""


@dataclass(frozen=True)
class RoutedExpert:
    """Expert ``number`` of ``weights``: an int, or an integer ``[1, 1]`` in SBUF."""

    weights: ExpertTensors
    number: int | Tensor

    @property
    def hidden(self) -> int:
        """See :class:`PlainExpert`."""
        return int(self.weights.down.shape[2])

    @property
    def gate_up_columns(self) -> int:
        """See :class:`PlainExpert`."""
        return columns_of_gate_up(self.weights.gate_up, self.hidden)

    def view(self, tensor: Tensor, pattern: Pattern, offset: int) -> Tensor:
        """The access pattern within this expert's part of ``tensor [L, ...]``."""
        if isinstance(self.number, int):
            return tensor.ap(pattern, offset=offset + self.number * (tensor.size // tensor.shape[0]))
        return tensor.ap(pattern, offset=offset, scalar_offset=self.number, indirect_dim=0)

    def gate_up(self, start: int, columns: int) -> Tensor:
        """See :class:`PlainExpert`."""
        _, hidden, _, width = self.weights.gate_up.shape
        blocks = hidden // PARTITIONS
        shape = (PARTITIONS, blocks, 2, columns)
        dtype = self.weights.gate_up.dtype
        tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name="gate_up_weights")
        row = 2 * width
        pattern = [[row, PARTITIONS], [PARTITIONS * row, blocks], [width, 2], [1, columns]]
        nisa.dma_copy(dst=tile, src=self.view(self.weights.gate_up, pattern, start))
        return tile

    def gate_up_scale(self, piece: Piece) -> list[Tensor | None]:
        """See :class:`PlainExpert`."""
        return self._gate_and_up(self.weights.gate_up_scale, piece)

    def gate_up_bias(self, piece: Piece) -> list[Tensor | None]:
        """See :class:`PlainExpert`."""
        return self._gate_and_up(self.weights.gate_up_bias, piece)

    def _gate_and_up(self, tensor: Tensor | None, piece: Piece) -> list[Tensor | None]:
        if tensor is None:
            return [None, None]
        width = tensor.shape[2]
        if width == 1:
            return [on_every_partition(self, tensor, g) for g in (0, 1)]
        places = [(tensor, g * width + piece.start) for g in (0, 1)]
        return [*in_columns(self, places, piece.columns)]

    def down(self, piece: Piece, column: int, columns: int) -> Tensor:
        """See :class:`PlainExpert`."""
        return load_down(self, self.weights.down, piece, column, columns)

    def down_columns(self, piece: Piece) -> int:
        """See :class:`PlainExpert`."""
        return columns_of_a_load(self.weights.down, piece)

    def down_scale(self, piece: Piece) -> Tensor | None:
        """See :class:`PlainExpert`. Two cores that share the expert read half each."""
        tensor = self.weights.down_scale
        if tensor is None:
            return None
        if tensor.shape[1] == 1:
            return on_every_partition(self, tensor, 0)
        blocks = self.hidden // PARTITIONS
        if not piece.shared or blocks < 2:
            return in_columns(self, [(tensor, 0)], self.hidden)[0]
        scale = nl.ndarray((PARTITIONS, blocks), dtype=nl.float32, buffer=nl.sbuf, name="down_scale")
        (first, count), other = share(blocks), share(blocks, 1 - core()[0])
        half = in_columns(self, [(tensor, first * PARTITIONS)], count * PARTITIONS)[0]
        nisa.tensor_copy(dst=scale[:, nl.ds(first, count)], src=half)
        exchange(scale[:, nl.ds(*other)], half)
        return scale


@dataclass(frozen=True)
class SharedTensors:
    """The shared expert in HBM: ``gate``, ``up [H, I]``, ``down [I, H]``, biases ``[1, I]`` and ``[1, H]``.

    ``sigmoid_gate [H, 1]``: the output is multiplied by sigmoid(r . sigmoid_gate). ``options``: its own.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    sigmoid_gate: Tensor | None = None
    options: ExpertOptions = field(default_factory=ExpertOptions)


@dataclass(frozen=True)
class SharedExpert:
    """:class:`SharedTensors` as an expert."""

    tensors: SharedTensors

    @property
    def hidden(self) -> int:
        """See :class:`PlainExpert`."""
        return int(self.tensors.down.shape[1])

    @property
    def gate_up_columns(self) -> int:
        """See :class:`PlainExpert`."""
        return columns_of_gate_up(self.tensors.gate, self.hidden)

    @staticmethod
    def view(tensor: Tensor, pattern: Pattern, offset: int) -> Tensor:
        """The access pattern within ``tensor``."""
        return tensor.ap(pattern, offset=offset)

    def gate_up(self, start: int, columns: int) -> Tensor:
        """See :class:`PlainExpert`."""
        hidden, width = self.tensors.gate.shape
        shape = (PARTITIONS, hidden // PARTITIONS, 2, columns)
        dtype = self.tensors.gate.dtype
        tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name="shared_gate_up_weights")
        pattern = [[width, PARTITIONS], [PARTITIONS * width, hidden // PARTITIONS], [1, columns]]
        for g, tensor in enumerate((self.tensors.gate, self.tensors.up)):
            nisa.dma_copy(dst=tile[:, :, g, :], src=tensor.ap(pattern, offset=start))
        return tile

    def gate_up_scale(self, piece: Piece) -> list[Tensor | None]:
        """See :class:`PlainExpert`."""
        return [None, None]

    def gate_up_bias(self, piece: Piece) -> list[Tensor | None]:
        """See :class:`PlainExpert`."""
        both = (self.tensors.gate_bias, self.tensors.up_bias)
        places = [[] if b is None else [(b, piece.start)] for b in both]
        return [in_columns(self, p, piece.columns)[0] if p else None for p in places]

    def down(self, piece: Piece, column: int, columns: int) -> Tensor:
        """See :class:`PlainExpert`."""
        return load_down(self, self.tensors.down, piece, column, columns)

    def down_columns(self, piece: Piece) -> int:
        """See :class:`PlainExpert`."""
        return columns_of_a_load(self.tensors.down, piece)

    def down_scale(self, piece: Piece) -> Tensor | None:
        """See :class:`PlainExpert`."""
        return None


Source = RoutedExpert | SharedExpert


def columns_of_gate_up(tensor: Tensor, hidden: int) -> int:
    """How many columns of gate and up one load takes: whole I-tiles, of LOAD_BYTES at most."""
    return max(1, LOAD_BYTES // (2 * hidden * int(tensor.dtype.itemsize))) * PARTITIONS


def columns_of_a_load(down: Tensor, piece: Piece) -> int:
    """How many columns of ``down`` one load takes: whole blocks of 128, of LOAD_BYTES at most."""
    row = ceil_div(piece.columns, PARTITIONS) * int(down.dtype.itemsize) * PARTITIONS
    return max(1, LOAD_BYTES // row) * PARTITIONS


def rows_of(columns: int) -> Iterator[tuple[int, int, int]]:
    """(first I-tile, I-tiles, rows): the whole tiles of ``columns``, then the ragged last one."""
    whole, rest = divmod(columns, PARTITIONS)
    if whole:
        yield 0, whole, PARTITIONS
    if rest:
        yield whole, 1, rest


def load_down(source: Source, down: Tensor, piece: Piece, column: int, columns: int) -> Tensor:
    """Those columns, rows of ``piece``: ``[128, I-tiles, columns]``, lanes past the last row unwritten."""
    hidden = source.hidden
    shape = (PARTITIONS, ceil_div(piece.columns, PARTITIONS), columns)
    tile = nl.ndarray(shape, dtype=down.dtype, buffer=nl.sbuf, name="down_weights")
    for first, count, rows in rows_of(piece.columns):
        pattern = [[hidden, rows], [PARTITIONS * hidden, count], [1, columns]]
        offset = (piece.start + first * PARTITIONS) * hidden + column
        nisa.dma_copy(dst=tile[0:rows, nl.ds(first, count), :], src=source.view(down, pattern, offset))
    return tile


def in_columns(source: Source, places: list[tuple[Tensor, int]], count: int) -> list[Tensor]:
    """``count`` values from each place (tensor, offset), 128 to a column: ``[128, ceil(count/128)]`` float32.

    They come as rows, runs of 128 values, and the PE turns them: a DMA of single values would crawl.
    """
    height = ceil_div(count, PARTITIONS)
    if len(places) > 1 and len(places) * height > PARTITIONS:
        return [in_columns(source, [place], count)[0] for place in places]
    total, dtype = len(places) * height, places[0][0].dtype
    columns = nl.ndarray((PARTITIONS, total), dtype=nl.float32, buffer=nl.sbuf, name="columns")
    for first, n in tiles(total):
        rows = nl.ndarray((n, PARTITIONS), dtype=dtype, buffer=nl.sbuf, name="rows_to_turn")
        if count % PARTITIONS:
            nisa.memset(dst=rows, value=0.0)
        for number, (tensor, offset) in enumerate(places):
            here = min(count - first * PARTITIONS, n * PARTITIONS)
            for row, whole, length in rows_of(here):
                at = offset + (first + row) * PARTITIONS
                view = source.view(tensor, [[PARTITIONS, whole], [1, length]], at)
                nisa.dma_copy(dst=rows[nl.ds(number * height + row, whole), 0:length], src=view)
        turned = nl.ndarray((PARTITIONS, n), dtype=dtype, buffer=nl.psum, name="turned_rows")
        nisa.nc_transpose(dst=turned, data=rows)
        nisa.tensor_copy(dst=columns[:, nl.ds(first, n)], src=turned)
    return [columns[:, nl.ds(number * height, height)] for number in range(len(places))]


def on_every_partition(source: Source, tensor: Tensor, offset: int) -> Tensor:
    """One value in HBM as ``[128, 1]`` float32."""
    value = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf, name="tensor_scale")
    ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf, name="ones")
    spread = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.psum, name="tensor_scale")
    everywhere = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf, name="tensor_scale")
    nisa.dma_copy(dst=value, src=source.view(tensor, [[1, 1], [1, 1]], offset))
    nisa.memset(dst=ones, value=1.0)
    nisa.nc_matmul(dst=spread, stationary=ones, moving=value)
    nisa.tensor_copy(dst=everywhere, src=spread)
    return everywhere
