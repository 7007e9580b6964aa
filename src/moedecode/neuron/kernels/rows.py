"""Token rows: how [T, H] lies in SBUF with tokens on partitions, and how it becomes hidden-major.

Owns which core loads which rows and columns (each element of HBM is read by exactly one core) and the turn by
PE transposes. Knows no norm and no router.
Letters: a row is (t, j): token t, segment j of the J segments into which this core's columns are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .nki_names import nisa, nl
from .tiles import PARTITIONS, Tensor, core, exchange, from_core_0, share, tiles

PSUM_BANK_BYTES = 2048


@dataclass(frozen=True)
class RowTiling:
    """The part of ``[T, H]`` that one core takes, as tiles of at most 128 rows.

    Tokens ``[token, token + tokens)`` and columns ``[128 * column, 128 * (column + columns))``. Segments fill
    the partitions when tokens are few: a norm of one token runs on H/256 partitions instead of one. An
    ``idle`` core cuts as the other does, but takes nothing.
    """

    hidden: int
    token: int
    tokens: int
    column: int
    columns: int
    idle: bool = False

    @property
    def segments(self) -> int:
        """J: the most segments that divide the columns and keep the largest tile within 128 rows."""
        room = PARTITIONS // max(1, min(PARTITIONS, self.tokens))
        return max(j for j in range(1, self.columns + 1) if self.columns % j == 0 and j <= max(1, room))

    @property
    def width(self) -> int:
        """Elements of one row."""
        return self.columns // self.segments * PARTITIONS

    @property
    def whole_rows(self) -> bool:
        """True when the core has all columns of its tokens: row statistics need no other core."""
        return self.columns * PARTITIONS == self.hidden

    def token_tiles(self) -> list[tuple[int, int]]:
        """(first token, tokens) of each tile; none for an idle core."""
        return [] if self.idle else [(self.token + start, n) for start, n in tiles(self.tokens)]

    def pieces(self, tensor: Tensor, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, view ``[rows, width]``) of HBM ``tensor [T, H]`` that make the tile's rows up.

        One piece where the rows lie at one stride in HBM, else one per token.
        """
        j, n, h = self.segments, self.width, self.hidden
        start = first * h + self.column * PARTITIONS
        if j == 1:
            yield 0, tensor.ap([[h, count], [1, n]], offset=start)
        elif self.whole_rows or count == 1:
            yield 0, tensor.ap([[n, count * j], [1, n]], offset=start)
        else:
            for t in range(count):
                yield t * j, tensor.ap([[n, j], [1, n]], offset=start + t * h)

    def load(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """The tile's rows of HBM ``tensor [T, H]`` in SBUF, ``[count * J, width]``."""
        rows = nl.ndarray(
            (count * self.segments, self.width), dtype=tensor.dtype, buffer=nl.sbuf, name="rows"
        )
        for at, view in self.pieces(tensor, first, count):
            nisa.dma_copy(dst=rows[nl.ds(at, view.shape[0]), :], src=view)
        return rows

    def store(self, tensor: Tensor, rows: Tensor, first: int, count: int) -> None:
        """The tile's ``rows`` into HBM ``tensor [T, H]``, cast to its dtype."""
        for at, view in self.pieces(tensor, first, count):
            nisa.dma_copy(dst=view, src=rows[nl.ds(at, view.shape[0]), :])

    def turn(self, rows: Tensor, hidden_major: Tensor, first: int, count: int) -> None:
        """``rows [count * J, width]`` into their place of ``hidden_major [128, H/128, T]``, h = 128*k + p."""
        j, blocks, tokens = self.segments, self.columns // self.segments, hidden_major.shape[2]
        used = count * j
        itemsize = 4 if rows.dtype == nl.float32 else 2
        group = max(1, PSUM_BANK_BYTES // (used * itemsize))
        for start, n in tiles(blocks, group):
            turned = nl.ndarray(
                (PARTITIONS, n, count, j), dtype=rows.dtype, buffer=nl.psum, name="turned_rows"
            )
            flat = turned.reshape((PARTITIONS, n * used))
            for i in range(n):
                nisa.nc_transpose(
                    dst=flat[:, nl.ds(i * used, used)],
                    data=rows[:, nl.ds((start + i) * PARTITIONS, PARTITIONS)],
                )
            place = hidden_major.ap(
                [
                    [tokens * self.hidden // PARTITIONS, PARTITIONS],
                    [tokens, n],
                    [1, count],
                    [tokens * blocks, j],
                ],
                offset=(self.column + start) * tokens + first,
            )  # [128, n blocks, count tokens, J segments]
            nisa.tensor_copy(dst=place, src=turned)


def part_of(hidden: int, t: int) -> RowTiling:
    """What this core takes of ``[T, H]`` so that both cores together take every element once.

    Half of the tokens when T is even, else half of the columns, else (T and H/128 both odd) core 0 takes all.
    """
    this, cores = core()
    k = hidden // PARTITIONS
    if t % 2 == 0 and t:
        return RowTiling(hidden, *share(t), 0, k)
    if k % 2 == 0 or cores == 1:
        return RowTiling(hidden, 0, t, *share(k))
    return RowTiling(hidden, 0, t, 0, k, idle=this == 1)


def load_hidden_major(x: Tensor) -> Tensor:
    """HBM ``x [T, H]`` as ``[128, H/128, T]`` in SBUF on both cores, h = 128*k + p, read once."""
    t, h = x.shape
    shape = (PARTITIONS, h // PARTITIONS, t)
    hidden_major = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf, name="hidden")
    part = part_of(h, t)
    for first, count in part.token_tiles():
        part.turn(part.load(x, first, count), hidden_major, first, count)
    complete(hidden_major, part)
    return hidden_major


def complete(hidden_major: Tensor, part: RowTiling) -> None:
    """``hidden_major [128, H/128, T]``, of which each core turned its part, becomes whole on both cores."""
    this, cores = core()
    if cores == 1:
        return
    _, k, t = hidden_major.shape
    if not part.whole_rows:
        mine, other = (hidden_major[:, nl.ds(*share(k, i)), :] for i in (this, 1 - this))
        exchange(other, mine)
    elif t % 2 == 0:
        mine, other = (hidden_major[:, :, nl.ds(*share(t, i))] for i in (this, 1 - this))
        exchange(other, mine)
    else:
        from_core_0(hidden_major)
