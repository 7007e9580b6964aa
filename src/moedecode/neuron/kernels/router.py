"""The router: logits of every expert, the K best per token, and their affinities.

Owns stage 2. The weights are read once per chip: each core multiplies its half of H and the partial logits
are added. Knows no norm and no experts.
Letters: T tokens, H hidden, E experts, K per token; n tokens of one tile of at most 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .affinities import Affinities, Scoring
from .nki_names import nisa, nl
from .tiles import (
    MOVING,
    PARTITIONS,
    Routing,
    Tensor,
    barrier,
    core,
    exchange_and_add,
    from_core_0,
    share,
    tiles,
    token_shape,
    token_tile,
)
from .topk import FLOOR, padded_columns


@dataclass(frozen=True)
class RouterExtras:
    """What routers have beyond the flat functions.

    ``selection_bias [1, E]`` (HBM) is added to what top-k compares. ``scale`` multiplies the affinities,
    ``norm_eps`` joins the sum that they are divided by, and ``normalise_post_norm`` makes ``norm_topk_prob``
    hold after top-k too.
    """

    selection_bias: Tensor | None = None
    scale: float = 1.0
    norm_eps: float = 0.0
    normalise_post_norm: bool = False


def router_topk_sb(
    hidden: Tensor,
    router_weights: Tensor,
    router_bias: Tensor | None,
    logits_out: Tensor | None,
    act_fn: Any,
    k: int,
    pre_norm: bool = True,
    norm_topk_prob: bool = False,
    mm_dtype: Any = None,
    affinities_hbm: Tensor | None = None,
    dense: bool = False,
    extras: RouterExtras | None = None,
) -> Routing:
    """Route ``hidden [128, H/128, T]`` (SBUF, whole on both cores): who goes where, and with which weight.

    ``router_weights [H, E]``, ``router_bias [1, E]`` or None, ``logits_out [T, E]`` or None, all in HBM.
    ``act_fn`` is "softmax" or "sigmoid" (or an enum member of that name). ``pre_norm``: act on all logits,
    else on the chosen ones; ``norm_topk_prob`` divides by the sum of the chosen (pre-norm only, as in the
    flat functions). ``mm_dtype`` is the dtype that the hidden is rounded to for the matmul (None: its own).
    The row of affinities ``[T, E]`` is written to ``affinities_hbm`` (shared HBM, float32) if given, else
    kept in SBUF if ``dense``, else not made: ``eager [T, K]`` always is. Ties go to the lowest id. Both cores
    return the same.
    """
    extras = extras or RouterExtras()
    scoring = Scoring(
        str(getattr(act_fn, "name", act_fn)).lower(),
        pre_norm,
        norm_topk_prob and (pre_norm or extras.normalise_post_norm),
        extras.norm_eps,
        extras.scale,
    )
    e, t = router_weights.shape[1], hidden.shape[2]
    _check(k, e, router_weights.shape[0], hidden.shape[1] * PARTITIONS)
    logits_of = _Logits(hidden, router_weights, router_bias, mm_dtype)
    selection_bias = _selection_bias(extras.selection_bias)
    index = nl.ndarray(token_shape(t, k), dtype=nl.uint32, buffer=nl.sbuf, name="expert_index")
    eager = nl.ndarray(token_shape(t, k), dtype=nl.float32, buffer=nl.sbuf, name="eager_affinities")
    affinities = None
    if dense:
        shape = token_shape(t, e)
        affinities = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name="expert_affinities")
    for number, (first, n) in enumerate(tiles(t)):
        logits = logits_of.tile(first, n)  # [n, max(E, 8)]
        if logits_out is not None:
            store_share(logits_out, logits[:, 0:e], first)
        choice = Affinities(scoring, logits, e, k, selection_bias)
        nisa.tensor_copy(dst=token_tile(index, number, n), src=choice.ids)
        choice.chosen(token_tile(eager, number, n))
        if affinities_hbm is not None:
            row = nl.ndarray((n, e), dtype=nl.float32, buffer=nl.sbuf, name="affinity_rows")
            choice.row(row)
            store_share(affinities_hbm, row, first)
        elif affinities is not None:
            choice.row(token_tile(affinities, number, n))
    if affinities_hbm is not None:
        barrier(affinities_hbm)
        affinities = affinities_hbm
    return Routing(index, affinities, eager, t)


def _selection_bias(bias: Tensor | None) -> Tensor | None:
    """HBM ``[1, E]`` in SBUF on both cores, read by core 0."""
    if bias is None:
        return None
    row = nl.ndarray((1, bias.shape[-1]), dtype=bias.dtype, buffer=nl.sbuf, name="selection_bias")
    if core()[0] == 0:
        nisa.dma_copy(dst=row, src=bias.reshape(row.shape))
    from_core_0(row)
    return row


def _check(k: int, e: int, rows: int, hidden: int) -> None:
    if not 1 <= k <= e:
        raise ValueError(f"k={k}: a token takes 1..E={e} experts; lower top_k")
    if rows != hidden:
        raise ValueError(f"router_weights has {rows} rows, the hidden {hidden} columns; they must be equal")


def store_share(tensor: Tensor, rows: Tensor, first: int) -> None:
    """This core's share of ``rows [n, columns]`` (SBUF, equal on both cores) into HBM rows from ``first``."""
    start, count = share(rows.shape[0])
    if count:
        nisa.dma_copy(dst=tensor[nl.ds(first + start, count), :], src=rows[nl.ds(start, count), :])


class _Logits:
    """``hidden @ W + bias`` with this core's half of H in SBUF."""

    def __init__(self, hidden: Tensor, weights: Tensor, bias: Tensor | None, mm_dtype: Any) -> None:
        self.experts = weights.shape[1]
        self.tokens = hidden.shape[2]
        start, self.depth = share(hidden.shape[1])
        self.hidden: Tensor = None
        self.weights: Tensor = None
        self.bias: Tensor = None
        if self.depth:
            self.weights = self._load_weights(weights, start)  # [128, depth, E]
            self.hidden = self._load_hidden(hidden[:, nl.ds(start, self.depth), :], mm_dtype)
        if bias is not None and core()[0] == 0:  # one partial sum carries the bias
            self.bias = nl.ndarray((1, self.experts), dtype=bias.dtype, buffer=nl.sbuf, name="router_bias")
            nisa.dma_copy(dst=self.bias, src=bias.reshape((1, self.experts)))
            self.ones = nl.ndarray((1, PARTITIONS), dtype=bias.dtype, buffer=nl.sbuf, name="ones")
            nisa.memset(dst=self.ones, value=1.0)

    def _load_weights(self, weights: Tensor, start: int) -> Tensor:
        e = self.experts
        tile = nl.ndarray(
            (PARTITIONS, self.depth, e), dtype=weights.dtype, buffer=nl.sbuf, name="router_weights"
        )
        source = weights.ap(
            [[e, PARTITIONS], [PARTITIONS * e, self.depth], [1, e]], offset=start * PARTITIONS * e
        )
        nisa.dma_copy(dst=tile, src=source)
        return tile

    def _load_hidden(self, hidden: Tensor, mm_dtype: Any) -> Tensor:
        """``hidden`` rounded to ``mm_dtype``, then in a dtype that the PE multiplies with the weights."""
        mm_dtype = hidden.dtype if mm_dtype is None else mm_dtype
        hidden = _as(hidden, mm_dtype)
        if hidden.dtype != self.weights.dtype:
            hidden, self.weights = _as(hidden, nl.float32), _as(self.weights, nl.float32)
        return hidden

    def tile(self, first: int, n: int) -> Tensor:
        """Logits of tokens ``[first, first + n)``: ``[n, max(E, 8)]`` float32, FLOOR past E."""
        e, columns = self.experts, padded_columns(self.experts)
        partial = nl.ndarray((n, columns), dtype=nl.float32, buffer=nl.sbuf, name="router_logits")
        if columns > e:
            nisa.memset(dst=partial[:, nl.ds(e, columns - e)], value=FLOOR / 2)  # doubled by the addition
        if not self.depth and self.bias is None:
            nisa.memset(dst=partial[:, 0:e], value=0.0)
        else:
            for start, width in tiles(e, MOVING):
                self._multiply(partial, first, n, start, width)
        exchange_and_add(partial)
        return partial

    def _multiply(self, partial: Tensor, first: int, n: int, start: int, width: int) -> None:
        total = nl.ndarray((n, width), dtype=nl.float32, buffer=nl.psum, name="router_logits")
        at = nl.ds(start, width)
        for i in range(self.depth):
            nisa.nc_matmul(
                dst=total,
                stationary=self.hidden[:, i, nl.ds(first, n)],
                moving=self.weights[:, i, at],
            )
        if self.bias is not None:
            nisa.nc_matmul(
                dst=total, stationary=self.ones[:, 0:n], moving=self.bias[:, at], is_stationary_onezero=True
            )
        nisa.tensor_copy(dst=partial[:, at], src=total)


def _as(tensor: Tensor, dtype: Any) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    cast = nl.ndarray(tuple(tensor.shape), dtype=dtype, buffer=nl.sbuf, name="cast")
    nisa.tensor_copy(dst=cast, src=tensor)
    return cast
