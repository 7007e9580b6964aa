"""One MX expert in HBM: which lanes of it a core works on, and where they lie.

Owns the index formulas of the packed layouts and the addresses of experts that are known on chip only. Knows
no arithmetic and no SBUF tiles.
Letters: I-tile t holds the columns [512t, 512t + R) on L = 2*ceil(R/8) lanes; quad q of lane p is column 512t
+ q*L + p. A unit of work is an expert, or half of its lanes when two cores share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .nki_names import nisa, nl
from .tiles import MX_TILE, PARTITIONS, QUAD, ExpertTensors, Tensor, ceil_div, core, tiles

BLOCK_LANES = 8
QUADRANT = 32
SCALES_PER_QUADRANT = QUADRANT // BLOCK_LANES
BLOCKS = (0, PARTITIONS // BLOCK_LANES)


@dataclass(frozen=True)
class Piece:
    """Lanes ``[lane, lane + lanes)`` of an I-tile; quad q has ``columns[q]`` of them from ``starts[q]``."""

    tile: int
    lane: int
    starts: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """Lanes that hold a column."""
        return self.columns[0]

    @property
    def rows(self) -> int:
        """Partitions that the MX instructions take: whole quadrants."""
        return QUADRANT * ceil_div(self.lanes, QUADRANT)

    @property
    def blocks(self) -> tuple[int, int]:
        """(first, count) of the MX blocks of the lanes, which are the rows of the down scales."""
        return self.lane // BLOCK_LANES, ceil_div(self.lanes, BLOCK_LANES)

    @property
    def padded(self) -> bool:
        """True when some (partition, quad) holds no column and must count as zero."""
        return any(n != self.rows for n in self.columns)


@dataclass(frozen=True)
class Unit:
    """Work item ``index``, an expert or a token's chosen one, or one of the two halves of its lanes."""

    index: int
    half: int | None = None


def units(n: int) -> list[Unit]:
    """This core's share of ``n`` units: every other one, and half of the lanes of an odd last one."""
    this, cores = core()
    if cores == 1:
        return [Unit(i) for i in range(n)]
    whole = [Unit(i) for i in range(this, n - n % 2, 2)]
    return [*whole, Unit(n - 1, this)] if n % 2 else whole


def pieces(intermediate: int, half: int | None = None) -> list[Piece]:
    """The lanes of an expert by I-tile; a half ends at a multiple of 32 lanes and may be empty."""
    spans = tiles(intermediate, MX_TILE)
    lanes = [2 * ceil_div(size, BLOCK_LANES) for _, size in spans]
    middle = QUADRANT * ceil_div(sum(lanes), 2 * QUADRANT)
    first, last = {None: (0, sum(lanes)), 0: (0, middle), 1: (middle, sum(lanes))}[half]
    found = []
    for tile, ((start, size), count) in enumerate(zip(spans, lanes, strict=True)):
        low, high = max(first - PARTITIONS * tile, 0), min(last - PARTITIONS * tile, count)
        if low < high:
            columns = tuple(max(0, min(high, size - q * count) - low) for q in range(QUAD))
            found.append(Piece(tile, low, tuple(start + q * count + low for q in range(QUAD)), columns))
    return found


class Expert(Protocol):
    """Where one expert lies in tensors ``[L, ...]``: its number, or a value on chip."""

    def view(self, tensor: Tensor, pattern: list[list[int]], offset: int) -> Tensor:
        """The access pattern within the expert's part of ``tensor``."""

    def load_scales(
        self, dst: Tensor, tensor: Tensor, rows: tuple[int, int], pattern: list[list[int]], offset: int
    ) -> None:
        """Rows (first, count) of scales ``[L, R, ...]`` to the leading partitions of ``dst``'s quadrants."""


@dataclass(frozen=True)
class KnownExpert:
    """An expert whose number is known while the kernel is built."""

    number: int

    def view(self, tensor: Tensor, pattern: list[list[int]], offset: int) -> Tensor:
        """See :class:`Expert`."""
        return tensor.ap(pattern, offset=offset + self.number * _size(tensor, 1))

    def load_scales(
        self, dst: Tensor, tensor: Tensor, rows: tuple[int, int], pattern: list[list[int]], offset: int
    ) -> None:
        """See :class:`Expert`; one DMA per quadrant."""
        row = _size(tensor, 2)
        for partition, start, count in _scale_places(*rows):
            source = self.view(tensor, [[row, count], *pattern], offset + start * row)
            nisa.dma_copy(dst=dst[nl.ds(partition, count)], src=source)


class ScaleRows:
    """Row numbers of scale tensors per partition, as gathers need them: row = id * factor + addend.

    ``factor`` and ``addend [partitions, 1]`` float32 are made once per row layout; -1 makes a gather skip.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, tuple[int, int], int], tuple[Tensor, Tensor]] = {}

    def prepare(self, weights: ExpertTensors, chosen: list[Piece]) -> ScaleRows:
        """Make what loading ``chosen`` will ask for, ahead of a dynamic loop."""
        scales: tuple[Tensor, Tensor] = weights.gate_up_scale, weights.down_scale
        self._layout(scales[0].shape[1], BLOCKS, PARTITIONS)
        for piece in chosen:
            self._layout(scales[1].shape[1], piece.blocks, piece.rows)
        return self

    def of(self, ids: Tensor, stored: int, rows: tuple[int, int], partitions: int) -> Tensor:
        """Rows ``[partitions, N]`` int32 of ``[L * stored, ...]`` for the N ``ids [128, N]``."""
        factor, addend = self._layout(stored, rows, partitions)
        table = nl.ndarray((partitions, ids.shape[1]), dtype=nl.int32, buffer=nl.sbuf, name="scale_rows")
        nisa.tensor_scalar(
            dst=table,
            data=ids[0:partitions, :],
            op0=nl.multiply,
            operand0=factor,
            op1=nl.add,
            operand1=addend,
        )
        return table

    def _layout(self, stored: int, rows: tuple[int, int], partitions: int) -> tuple[Tensor, Tensor]:
        key = (stored, rows, partitions)
        if key not in self._layouts:
            factor = nl.ndarray((partitions, 1), dtype=nl.float32, buffer=nl.sbuf, name="scale_row_factor")
            addend = nl.ndarray((partitions, 1), dtype=nl.float32, buffer=nl.sbuf, name="scale_row_addend")
            nisa.memset(dst=factor, value=0.0)
            nisa.memset(dst=addend, value=-1.0)
            for partition, start, count in _scale_places(*rows):
                at = nl.ds(partition, count)
                nisa.memset(dst=factor[at], value=float(stored))
                nisa.iota(dst=addend[at], pattern=[[1, 1]], offset=start, channel_multiplier=1)
            self._layouts[key] = (factor, addend)
        return self._layouts[key]


@dataclass
class ChosenExperts:
    """N experts whose ids lie on chip: ``ids [128, N]`` float32, the same on every partition."""

    ids: Tensor
    scale_rows: ScaleRows
    tables: dict[tuple[int, tuple[int, int], int], Tensor] = field(default_factory=dict)

    def table(self, stored: int, rows: tuple[int, int], partitions: int) -> Tensor:
        """:meth:`ScaleRows.of` for all N ids at once."""
        key = (stored, rows, partitions)
        if key not in self.tables:
            self.tables[key] = self.scale_rows.of(self.ids, stored, rows, partitions)
        return self.tables[key]


@dataclass(frozen=True)
class ChosenExpert:
    """Entry ``number`` of :class:`ChosenExperts`, with its id ``[1, 1]`` as an integer in SBUF."""

    experts: ChosenExperts
    number: int
    id: Tensor

    def view(self, tensor: Tensor, pattern: list[list[int]], offset: int) -> Tensor:
        """See :class:`Expert`."""
        return tensor.ap(pattern, offset=offset, scalar_offset=self.id, indirect_dim=0)

    def load_scales(
        self, dst: Tensor, tensor: Tensor, rows: tuple[int, int], pattern: list[list[int]], offset: int
    ) -> None:
        """See :class:`Expert`; one gather, which skips the partitions that hold no scales."""
        partitions = dst.shape[0]
        table = self.experts.table(tensor.shape[1], rows, partitions)
        flat = tensor.reshape((tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
        source = flat.ap(
            [[_size(tensor, 2), partitions], *pattern],
            offset=offset,
            vector_offset=table[:, nl.ds(self.number, 1)],
            indirect_dim=0,
        )
        nisa.dma_copy(dst=dst, src=source, oob_mode=nisa.oob_mode.skip)


def _size(tensor: Tensor, dim: int) -> int:
    size = 1
    for n in tensor.shape[dim:]:
        size *= n
    return size


def _scale_places(first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(partition, row, rows) of scale rows ``[first, first + count)``: four per quadrant."""
    for quadrant, (start, n) in enumerate(tiles(count, SCALES_PER_QUADRANT)):
        yield quadrant * QUADRANT, first + start, n
