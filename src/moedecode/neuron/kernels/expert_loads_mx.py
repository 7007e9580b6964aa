"""MX experts on their way from HBM into SBUF: slabs of gate and up, chunks of down, biases.

Owns the shapes of the tiles in SBUF, how much is loaded at once, and the zeros that padding lanes need. Knows
no arithmetic and no cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .expert_mx import BLOCKS, Expert, Piece, pieces
from .nki_names import nisa, nl
from .tiles import MX_TILE, PARTITIONS, QUAD, ExpertTensors, Tensor, tiles

LOAD_BYTES = 96 * 1024
"""Codes and scales of one load, per partition: a third of SBUF leaves room for the next load and the rest."""


@dataclass(frozen=True)
class Slab:
    """Gate and up columns of some pieces in SBUF: codes and scales ``[128, 2, H/512, columns]``.

    ``offsets[i][q]`` is where quad q of ``pieces[i]`` starts, ``first`` the number of the first piece.
    """

    first: int
    pieces: list[Piece]
    offsets: list[list[int]]
    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class DownChunk:
    """Columns from ``start`` of the down weights: codes and scales ``[128, pieces, columns]``."""

    start: int
    codes: Tensor
    scales: Tensor

    @property
    def columns(self) -> int:
        """How many columns of H."""
        columns: int = self.codes.shape[2]
        return columns


@dataclass(frozen=True)
class ExpertTiles:
    """One expert in SBUF. Slabs and chunks are loaded as they are taken, once; all at once if resident.

    ``gate_up_bias [128, 2, pieces, 4]`` float32, of gate and of up + up_offset; ``down_bias [H/128, 128]``
    hidden-major, else ``[1, H]``. None without a bias.
    """

    pieces: list[Piece]
    slabs: Iterable[Slab]
    chunks: Iterable[DownChunk]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class ExpertLoader:
    """Loads the same lanes, all or one ``half``, of one expert after the other.

    ``up_offset`` is added to the bias of up. ``hidden_major`` says how y will lie.
    ``resident``: all of an expert stays in SBUF, else two chunks are alive at a time.
    """

    def __init__(
        self,
        weights: ExpertTensors,
        half: int | None,
        up_offset: float,
        hidden_major: bool,
        resident: bool = False,
    ) -> None:
        self.weights, self.half, self.up_offset = weights, half, up_offset
        self.hidden_major, self.resident = hidden_major, resident
        self.hidden: int = weights.down.shape[-1]
        self.pieces = pieces(weights.gate_up.shape[-1], half)
        self._padded = any(piece.lanes < piece.rows for piece in self.pieces)
        self._buffers: list[tuple[Tensor, Tensor]] = []
        if self._padded and not resident:
            # Padding must hold zeros, and clearing a tile costs more than loading it: two that stay clear.
            self._buffers = [self._clear(self._most_columns()) for _ in range(2)]

    def load(self, expert: Expert) -> ExpertTiles:
        """The tiles of ``expert``."""
        slabs: Iterable[Slab] = self._slabs(expert)
        chunks: Iterable[DownChunk] = self._chunks(expert)
        bias, down_bias = self._gate_up_bias(expert), self._down_bias(expert)
        if self.resident:
            slabs, chunks = list(slabs), list(chunks)
        return ExpertTiles(self.pieces, slabs, chunks, bias, down_bias)

    def _slabs(self, expert: Expert) -> Iterator[Slab]:
        """Gate and up columns, as many I-tiles at once as LOAD_BYTES allows."""
        codes_hbm, scales_hbm = self.weights.gate_up, self.weights.gate_up_scale
        _, _, _, h_tiles, intermediate = codes_hbm.shape
        most = max(1, LOAD_BYTES // (2 * h_tiles * MX_TILE * (codes_hbm.dtype.itemsize + 1)))
        for first, count in tiles(len(self.pieces), most):
            group = self.pieces[first : first + count]
            offsets, runs = _columns(group)
            shape = (PARTITIONS, 2, h_tiles, sum(n for _, n in runs))
            codes = nl.ndarray(shape, dtype=codes_hbm.dtype, buffer=nl.sbuf, name="gate_up_weights")
            scales = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name="gate_up_scales")
            at = 0
            for start, n in runs:
                place = (slice(None), slice(None), slice(None), nl.ds(at, n))
                pattern = [[h_tiles * intermediate, 2], [intermediate, h_tiles], [1, n]]
                rows = [[2 * h_tiles * intermediate, PARTITIONS], *pattern]
                nisa.dma_copy(dst=codes[place], src=expert.view(codes_hbm, rows, start))
                expert.load_scales(scales[place], scales_hbm, BLOCKS, pattern, start)
                at += n
            yield Slab(first, group, offsets, codes, scales)

    def _gate_up_bias(self, expert: Expert) -> Tensor | None:
        bias_hbm = self.weights.gate_up_bias
        if bias_hbm is None:
            return None
        i_tiles = bias_hbm.shape[3]
        shape = (PARTITIONS, 2, len(self.pieces), QUAD)
        stored = nl.ndarray(shape, dtype=bias_hbm.dtype, buffer=nl.sbuf, name="stored_gate_up_bias")
        bias = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name="gate_up_bias")
        for first, count in self._alike():
            piece, which = self.pieces[first], nl.ds(first, count)
            lanes = slice(0, piece.lanes)
            pattern = [[2 * i_tiles * QUAD, piece.lanes], [i_tiles * QUAD, 2], [QUAD, count], [1, QUAD]]
            offset = piece.lane * 2 * i_tiles * QUAD + piece.tile * QUAD
            nisa.dma_copy(dst=stored[lanes, :, which, :], src=expert.view(bias_hbm, pattern, offset))
            for g, addend in enumerate((0.0, self.up_offset)):
                place = (lanes, g, which, slice(None))
                nisa.tensor_scalar(dst=bias[place], data=stored[place], op0=nl.add, operand0=addend)
        return bias

    def _chunks(self, expert: Expert) -> Iterator[DownChunk]:
        """Down rows of the lanes, as many columns at once as LOAD_BYTES allows (a multiple of 512)."""
        codes_hbm, scales_hbm = self.weights.down, self.weights.down_scale
        row = codes_hbm.shape[2] * self.hidden
        for number, (start, n) in enumerate(tiles(self.hidden, self._most_columns())):
            codes, scales = self._tiles(number, n)
            for first, count in self._alike():
                piece, which = self.pieces[first], nl.ds(first, count)
                pattern, offset = [[self.hidden, count], [1, n]], piece.tile * self.hidden + start
                source = expert.view(codes_hbm, [[row, piece.lanes], *pattern], piece.lane * row + offset)
                nisa.dma_copy(dst=codes[0 : piece.lanes, which, :], src=source)
                expert.load_scales(
                    scales[0 : piece.rows, which, :], scales_hbm, piece.blocks, pattern, offset
                )
            yield DownChunk(start, codes, scales)

    def _down_bias(self, expert: Expert) -> Tensor | None:
        """None for the second half of an expert: the first adds it."""
        bias_hbm = self.weights.down_bias
        if bias_hbm is None or self.half == 1:
            return None
        shape = (self.hidden // PARTITIONS, PARTITIONS) if self.hidden_major else (1, self.hidden)
        row = nl.ndarray(shape, dtype=bias_hbm.dtype, buffer=nl.sbuf, name="down_bias")
        nisa.dma_copy(dst=row, src=expert.view(bias_hbm, [[shape[1], shape[0]], [1, shape[1]]], 0))
        return row

    def _alike(self) -> Iterator[tuple[int, int]]:
        """(first, count) of neighbouring pieces with the same lanes: one DMA moves them."""
        kinds = [(piece.lane, piece.lanes) for piece in self.pieces]
        starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        for first, after in zip(starts, [*starts[1:], len(kinds)], strict=True):
            yield first, after - first

    def _most_columns(self) -> int:
        budget = LOAD_BYTES // 2 if self._padded else LOAD_BYTES  # two buffers of a padded expert stay
        columns: int = budget // (max(1, len(self.pieces)) * (self.weights.down.dtype.itemsize + 1))
        return min(self.hidden, max(1, columns // MX_TILE) * MX_TILE)

    def _tiles(self, number: int, columns: int) -> tuple[Tensor, Tensor]:
        """Codes and scales ``[128, pieces, columns]`` of a chunk, zero on padding lanes."""
        if self._buffers:
            codes, scales = self._buffers[number % 2]
            return codes[:, :, 0:columns], scales[:, :, 0:columns]
        return self._clear(columns)

    def _clear(self, columns: int) -> tuple[Tensor, Tensor]:
        shape = (PARTITIONS, len(self.pieces), columns)
        codes = nl.ndarray(shape, dtype=self.weights.down.dtype, buffer=nl.sbuf, name="down_weights")
        scales = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name="down_scales")
        for i, piece in enumerate(self.pieces):
            if piece.lanes < piece.rows:
                for tile in (codes, scales):  # four bytes a cycle
                    nisa.memset(dst=tile.view(nl.float32)[0 : piece.rows, i, :], value=0.0)
        return codes, scales


def _columns(group: list[Piece]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Where each quad of each piece lies in a slab, and the runs (start, length) of I that fill the slab."""
    offsets: list[list[int]] = []
    runs: list[tuple[int, int]] = []
    width = 0
    for piece in group:
        offsets.append([width + sum(piece.columns[:q]) for q in range(QUAD)])
        width += sum(piece.columns)
        for start, n in zip(piece.starts, piece.columns, strict=True):
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + n)
            elif n:
                runs.append((start, n))
    return offsets, runs
