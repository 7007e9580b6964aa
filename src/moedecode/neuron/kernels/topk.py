"""The K largest of each row, best first, ties to the lowest id, for any K.

Owns the rounds of eight that the Vector engine finds at once. Knows no activations and no affinities.
Letters: n rows (tokens), E candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

from .nki_names import nisa, nl
from .tiles import Tensor, ceil_div

EIGHT = 8
"""Values that one max8, and positions that one nc_find_index8, returns."""
FLOOR = -3.0e38
"""Stands for "already chosen" and for padding: below every finite logit that a router produces."""


@dataclass(frozen=True)
class TopK:
    """``values [n, R*8]`` float32 and ``ids [n, R*8]`` uint32 of R rounds, of which the first K count."""

    k: int
    scores: Tensor
    values: Tensor
    ids: Tensor
    remaining: Tensor
    """``scores`` with what all rounds but the last chose at FLOOR; ``scores`` itself after one round."""

    def best(self) -> Tensor:
        """``[n, 1]``: the largest score of each row."""
        return self.values[:, 0:1]

    def chosen(self) -> Tensor:
        """``[n, K]``: the chosen scores."""
        return self.values[:, 0 : self.k]

    def selected(self, e: int) -> Tensor:
        """``[n, E]`` float32: 1 at the chosen ids, 0 elsewhere."""
        n, padded = self.scores.shape
        last = self.k - (ceil_div(self.k, EIGHT) - 1) * EIGHT
        wanted = nl.ndarray((n, EIGHT), dtype=nl.float32, buffer=nl.sbuf, name="last_chosen")
        if last < EIGHT:  # FLOOR only ever replaces itself
            nisa.memset(dst=wanted, value=FLOOR)
        nisa.tensor_copy(dst=wanted[:, 0:last], src=self.values[:, nl.ds(self.k - last, last)])
        left = nl.ndarray((n, padded), dtype=nl.float32, buffer=nl.sbuf, name="unselected")
        nisa.nc_match_replace8(dst=left, data=self.remaining, vals=wanted, imm=FLOOR)
        mask = nl.ndarray((n, e), dtype=nl.float32, buffer=nl.sbuf, name="selected")
        nisa.tensor_scalar(dst=mask, data=left[:, 0:e], op0=nl.equal, operand0=FLOOR)
        return mask


def padded_columns(e: int) -> int:
    """Columns of a score tile: max8 wants eight at least."""
    return max(e, EIGHT)


def top_k(scores: Tensor, k: int) -> TopK:
    """The ``k`` largest of each row of ``scores [n, max(E, 8)]`` float32, whose columns past E hold FLOOR.

    Equal scores come in ascending id: the instruction reports equal values at ascending positions, and a
    later round sees only what earlier ones left.
    """
    n, columns = scores.shape
    rounds = ceil_div(k, EIGHT)
    values = nl.ndarray((n, rounds * EIGHT), dtype=nl.float32, buffer=nl.sbuf, name="top_scores")
    ids = nl.ndarray((n, rounds * EIGHT), dtype=nl.uint32, buffer=nl.sbuf, name="top_ids")
    data = scores
    for r in range(rounds):
        at = nl.ds(r * EIGHT, EIGHT)
        nisa.max8(dst=values[:, at], src=data)
        nisa.nc_find_index8(dst=ids[:, at], data=data, vals=values[:, at])
        if r + 1 < rounds:
            left = nl.ndarray((n, columns), dtype=nl.float32, buffer=nl.sbuf, name="remaining_scores")
            nisa.nc_match_replace8(dst=left, data=data, vals=values[:, at], imm=FLOOR)
            data = left
    return TopK(k, scores, values, ids, data)
