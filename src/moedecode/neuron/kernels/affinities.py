"""From logits to the chosen experts and their weights: scores, selection, normalisation.

Owns every combination of score function, order of selection and activation, and normalisation. Knows no
weights of the router, no HBM, no cores.
Letters: n tokens of one tile, E experts, K per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .nki_names import nisa, nl
from .tiles import MOVING, Tensor, tiles
from .topk import FLOOR, TopK, top_k

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Scoring:
    """How logits become affinities.

    ``score``: "softmax" or "sigmoid", of all logits (``pre_norm``) or of the chosen ones; ``normalise``
    divides by (the sum of the chosen + ``norm_eps``); ``scale`` multiplies at the end.
    """

    score: str
    pre_norm: bool
    normalise: bool
    norm_eps: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"act_fn={self.score!r}: the router knows {SCORES}; pass one of them")

    @property
    def masked(self) -> bool:
        """True when the row is 0 where not selected; False leaves it dense."""
        return not self.pre_norm or self.normalise


class Affinities:
    """The choice of one tile of tokens.

    ``logits [n, max(E, 8)]`` float32, FLOOR past E. ``selection_bias [1, E]`` (SBUF) or None is added to
    what is compared, never to what is returned.

    Softmax is e^(x - peak) over a sum. Its sums are combined before anything is divided: normalised, the sum
    over all experts cancels, and one factor per token remains.
    """

    def __init__(
        self, scoring: Scoring, logits: Tensor, e: int, k: int, selection_bias: Tensor | None = None
    ) -> None:
        self.scoring, self.logits, self.e = scoring, logits, e
        self.softmax = scoring.score == "softmax"
        self.full: Tensor = None  # act of all logits, where some step needs it
        self.total: Tensor = None  # its sum
        self.offset: Tensor = None  # -peak
        if selection_bias is None:
            self.best = top_k(logits, k)
            chosen = self.best.chosen()
            if self.softmax:
                self.offset = _scaled(self.best.best(), -1.0)
        else:
            self.best, chosen = self._select(selection_bias, k)
        self.factor = self._finish(chosen)

    @property
    def ids(self) -> Tensor:
        """``[n, K]`` uint32, best first."""
        return self.best.ids[:, 0 : self.best.k]

    def _select(self, bias: Tensor, k: int) -> tuple[TopK, Tensor]:
        """Top-k of score (pre-norm) or logit plus bias; and the chosen logits, or scores when pre-norm."""
        n, columns = self.logits.shape
        every = self.logits[:, 0 : self.e]
        if self.softmax and self.scoring.pre_norm:
            self.offset = _peak(every)
        compared = self._act_all(with_sum=self.softmax) if self.scoring.pre_norm else every
        spread = _over_rows(bias, n)  # [n, E]
        selection = nl.ndarray((n, columns), dtype=nl.float32, buffer=nl.sbuf, name="biased_scores")
        if columns > self.e:
            nisa.memset(dst=selection[:, nl.ds(self.e, columns - self.e)], value=FLOOR)
        nisa.scalar_tensor_tensor(
            dst=selection[:, 0 : self.e],
            data=compared,
            op0=nl.multiply,
            operand0=1.0 if self.total is None else _inverse(self.total),
            op1=nl.add,
            operand1=spread,
        )
        best = top_k(selection, k)
        chosen = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.sbuf, name="chosen_scores")
        nisa.nc_n_gather(dst=chosen, data=compared, indices=best.ids[:, 0:k])
        if self.softmax and not self.scoring.pre_norm:
            self.offset = _peak(chosen)
        return best, chosen

    def _finish(self, chosen: Tensor) -> Tensor | float | None:
        """Sets the values of the chosen; returns what they are multiplied with (None: nothing)."""
        s = self.scoring
        summed = s.normalise or (self.softmax and not s.pre_norm)
        total = (
            nl.ndarray((chosen.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf, name="chosen_sum")
            if summed
            else None
        )
        if self.full is not None:  # already acted on
            self.values = chosen
            if total is not None:
                nisa.tensor_reduce(dst=total, op=nl.add, data=chosen, axis=1)
        else:
            self.values = self._act(chosen, total)
        if self.softmax and s.pre_norm and self.full is None and (not s.normalise or s.norm_eps):
            self._act_all(with_sum=True)
        if s.normalise and s.norm_eps:
            total = self._plus_eps(total)
        elif not summed:
            total = self.total  # the sum over all experts, or None
        if total is None:
            return None if s.scale == 1.0 else s.scale
        inverse = _inverse(total)
        return inverse if s.scale == 1.0 else _scaled(inverse, s.scale)

    def _plus_eps(self, total: Tensor) -> Tensor:
        """``total`` + norm_eps in units of the values: those of softmax are yet to be divided."""
        s = self.scoring
        out = nl.ndarray(tuple(total.shape), dtype=nl.float32, buffer=nl.sbuf, name="sum_plus_eps")
        if not self.softmax:
            nisa.tensor_scalar(dst=out, data=total, op0=nl.add, operand0=s.norm_eps)
        elif not s.pre_norm:
            nisa.tensor_scalar(dst=out, data=total, op0=nl.multiply, operand0=1.0 + s.norm_eps)
        else:
            nisa.scalar_tensor_tensor(
                dst=out, data=self.total, op0=nl.multiply, operand0=s.norm_eps, op1=nl.add, operand1=total
            )
        return out

    def _act(self, logits: Tensor, total: Tensor | None) -> Tensor:
        """act of ``logits [n, m]``, and its row sums into ``total [n, 1]`` on the way."""
        out = nl.ndarray(tuple(logits.shape), dtype=nl.float32, buffer=nl.sbuf, name="scores")
        options: dict[str, Any] = {} if self.offset is None else {"bias": self.offset}
        if total is not None:
            options.update(reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.activation(dst=out, op=nl.exp if self.softmax else nl.sigmoid, data=logits, **options)
        return out

    def _act_all(self, with_sum: bool) -> Tensor:
        if with_sum:
            self.total = nl.ndarray(
                (self.logits.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf, name="score_sum"
            )
        self.full = self._act(self.logits[:, 0 : self.e], self.total)
        return self.full

    def chosen(self, dst: Tensor) -> None:
        """The affinities of the chosen experts into ``dst [n, K]``."""
        self._times_factor(dst, self.values)

    def row(self, dst: Tensor) -> None:
        """The row of affinities into ``dst [n, E]``: 0 where not selected, dense if nothing masks it."""
        full = self.full
        if full is None:
            every = self.logits[:, 0 : self.e]
            if self.softmax and self.best.scores is not self.logits:
                # A selection bias can leave out larger logits, whose e^x must not overflow.
                capped = nl.ndarray(
                    tuple(every.shape), dtype=nl.float32, buffer=nl.sbuf, name="capped_logits"
                )
                peak = _scaled(self.offset, -1.0)
                nisa.tensor_scalar(dst=capped, data=every, op0=nl.minimum, operand0=peak)
                every = capped
            full = self._act(every, None)
        if not self.scoring.masked:
            self._times_factor(dst, full)
        elif self.factor is None:
            nisa.tensor_tensor(dst=dst, data1=full, data2=self.best.selected(self.e), op=nl.multiply)
        else:
            nisa.scalar_tensor_tensor(
                dst=dst,
                data=full,
                op0=nl.multiply,
                operand0=self.factor,
                op1=nl.multiply,
                operand1=self.best.selected(self.e),
            )

    def _times_factor(self, dst: Tensor, values: Tensor) -> None:
        if self.factor is None:
            nisa.tensor_copy(dst=dst, src=values)
        else:
            nisa.tensor_scalar(dst=dst, data=values, op0=nl.multiply, operand0=self.factor)


def _scaled(column: Tensor, by: float) -> Tensor:
    out = nl.ndarray(tuple(column.shape), dtype=nl.float32, buffer=nl.sbuf, name="scaled_column")
    nisa.tensor_scalar(dst=out, data=column, op0=nl.multiply, operand0=by)
    return out


def _inverse(column: Tensor) -> Tensor:
    out = nl.ndarray(tuple(column.shape), dtype=nl.float32, buffer=nl.sbuf, name="inverse_sum")
    nisa.reciprocal(dst=out, data=column)
    return out


def _peak(values: Tensor) -> Tensor:
    """Minus the largest of each row, ``[n, 1]``."""
    out = nl.ndarray((values.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf, name="peak")
    nisa.tensor_reduce(dst=out, op=nl.maximum, data=values, axis=1, negate=True)
    return out


def _over_rows(row: Tensor, n: int) -> Tensor:
    """``row [1, E]`` on n partitions, in SBUF (float32)."""
    e = row.shape[1]
    ones = nl.ndarray((1, n), dtype=row.dtype, buffer=nl.sbuf, name="ones")
    nisa.memset(dst=ones, value=1.0)
    out = nl.ndarray((n, e), dtype=nl.float32, buffer=nl.sbuf, name="selection_bias")
    for start, width in tiles(e, MOVING):
        spread = nl.ndarray((n, width), dtype=nl.float32, buffer=nl.psum, name="selection_bias_rows")
        moving = row[:, nl.ds(start, width)]
        nisa.nc_matmul(dst=spread, stationary=ones, moving=moving, is_stationary_onezero=True)
        nisa.tensor_copy(dst=out[:, nl.ds(start, width)], src=spread)
    return out
