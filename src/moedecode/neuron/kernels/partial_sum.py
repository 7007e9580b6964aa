"""What a core has summed up of the output, and how the two cores make the output of it.

Owns the float32 partial sum in SBUF, the weighting of y by affinities on its way there, the exchange of
halves of H and the store. Knows no experts.
Letters: T tokens, H hidden, J = H/128; hidden-major is ``[128, J, T]`` with h = 128*j + p, token-major ``[T,
H]`` by tiles of 128 tokens.
"""

from __future__ import annotations

from .nki_names import nisa, nl
from .tiles import PARTITIONS, Tensor, core, exchange, share, tiles, token_tiles

FEW_TOKENS = 64
"""Up to here hidden-major costs the Vector engine less: 2 passes of J*T columns against one of H."""


class PartialSum:
    """This core's summand of the output ``[T, H]``."""

    def __init__(self, tokens: int, hidden: int, hidden_major: bool, initial: Tensor | None = None) -> None:
        """``initial``, if given, becomes the sum: ``[128, J, T]``, or ``[T or 128, tiles, H]``."""
        self.tokens, self.hidden, self.hidden_major = tokens, hidden, hidden_major
        shape = (min(tokens, PARTITIONS), token_tiles(tokens), hidden)
        if hidden_major:
            shape = (PARTITIONS, hidden // PARTITIONS, tokens)
        self._written: set[int] = set()
        if initial is None:
            self.values = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name="partial_sum")
        else:
            self.values = initial.reshape(shape)
            self._written = set(range(tokens))

    def zero(self) -> None:
        """What has no summand yet becomes zero: for loops whose first round is not known, and at the end."""
        if not self._written:
            nisa.memset(dst=self.values, value=0.0)
        elif self.hidden_major:
            for t in sorted(set(range(self.tokens)) - self._written):
                nisa.memset(dst=self.values[:, :, nl.ds(t, 1)], value=0.0)
        self._written = set(range(self.tokens))

    def begin(self, first: int, n: int) -> bool:
        """Announce a summand for tokens ``[first, first + n)``: True if it is the first, which overwrites."""
        fresh = first not in self._written
        self._written.update(range(first, first + n))
        return fresh

    def add_hidden_major(self, y: Tensor, j: int, first: int, weight: Tensor | None, fresh: bool) -> None:
        """Add ``y [128, some j, n]`` (PSUM) times ``weight``, None or ``[128, n]`` alike on every partition.

        With n > 1 ``weight`` must be a whole tensor, not a slice.
        """
        place = self.values[:, nl.ds(j, y.shape[1]), nl.ds(first, y.shape[2])]
        self._add(place, y, weight, fresh)

    def add_token_major(
        self, y: Tensor, first: int, n: int, column: int, weight: Tensor | None, fresh: bool
    ) -> None:
        """Add the first n rows of ``y`` (PSUM) times ``weight [n, 1]`` or None."""
        place = self.values[0:n, first // PARTITIONS, nl.ds(column, y.shape[1])]
        self._add(place, y[0:n, :], weight, fresh)

    @staticmethod
    def _add(place: Tensor, y: Tensor, weight: Tensor | None, fresh: bool) -> None:
        target = place if fresh else y  # scaled where it lies: a sum with a PSUM operand is one pass, not two
        if weight is not None and weight.shape[1] > 1:
            rows, n = weight.shape
            each = weight.ap([[n, rows], [0, y.shape[1]], [1, n]])
            nisa.tensor_tensor(dst=target, data1=y, data2=each, op=nl.multiply)
        elif weight is not None:
            nisa.activation(dst=target, op=nl.copy, data=y, scale=weight)
        elif fresh:
            nisa.tensor_copy(dst=target, src=y)
        if not fresh:
            nisa.tensor_tensor(dst=place, data1=y, data2=place, op=nl.add)

    def finish(self, out: Tensor, alone: bool = False) -> None:
        """Exchange halves of H with the other core, add, round, store this core's half of ``out [T, H]``.

        A core that is ``alone`` with these tokens has the whole sum: it stores all of H, exchanges nothing.
        """
        self.zero()
        if self.hidden_major:
            self._finish_hidden_major(out, alone)
        else:
            self._finish_token_major(out, alone)

    def _summed(self, mine: Tensor, theirs: Tensor | None, dtype: object) -> Tensor:
        """``mine`` plus the other core's part of it, rounded; ``theirs`` is what this core sends."""
        total = nl.ndarray(tuple(mine.shape), dtype=dtype, buffer=nl.sbuf, name="output_half")
        if theirs is None:
            nisa.tensor_copy(dst=total, src=mine)
            return total
        received = nl.ndarray(tuple(mine.shape), dtype=nl.float32, buffer=nl.sbuf, name="received_sum")
        exchange(received, theirs)
        nisa.tensor_tensor(dst=total, data1=mine, data2=received, op=nl.add)
        return total

    @staticmethod
    def _halves(blocks: int, alone: bool) -> tuple[tuple[int, int], tuple[int, int] | None]:
        this, cores = core()
        if alone:
            return (0, blocks), None
        return share(blocks), share(blocks, 1 - this) if cores > 1 else None

    def _finish_hidden_major(self, out: Tensor, alone: bool) -> None:
        (first, count), other = self._halves(self.hidden // PARTITIONS, alone)
        theirs = None if other is None else self.values[:, nl.ds(*other), :]
        total = self._summed(self.values[:, nl.ds(first, count), :], theirs, out.dtype)  # [128, count, T]
        # A row of the transpose is (token, j): 128 consecutive elements of out.
        for t, n in tiles(self.tokens, max(1, PARTITIONS // count)):
            columns = total.ap([[count * self.tokens, PARTITIONS], [1, n], [self.tokens, count]], offset=t)
            turned = nl.ndarray(
                (n * count, PARTITIONS), dtype=out.dtype, buffer=nl.psum, name="turned_output"
            )
            rows = nl.ndarray((n * count, PARTITIONS), dtype=out.dtype, buffer=nl.sbuf, name="output_rows")
            nisa.nc_transpose(dst=turned, data=columns)
            nisa.tensor_copy(dst=rows, src=turned)
            place = out.ap(
                [[self.hidden, n], [PARTITIONS, count], [1, PARTITIONS]],
                offset=t * self.hidden + first * PARTITIONS,
            )
            nisa.dma_copy(dst=place, src=rows)

    def _finish_token_major(self, out: Tensor, alone: bool) -> None:
        (first, count), other = self._halves(self.hidden // PARTITIONS, alone)
        mine = nl.ds(first * PARTITIONS, count * PARTITIONS)
        for number, (t, n) in enumerate(tiles(self.tokens)):
            rows = self.values[0:n, number, :]
            theirs = None if other is None else rows[:, nl.ds(other[0] * PARTITIONS, other[1] * PARTITIONS)]
            total = self._summed(rows[:, mine], theirs, out.dtype)
            nisa.dma_copy(dst=out[nl.ds(t, n), mine], src=total)
