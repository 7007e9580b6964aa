"""The first stages as kernels of their own, HBM to HBM: norm, router, affinity mask.

Owns the entry points behind the flat functions of the same names. Knows no experts.
"""

from __future__ import annotations

from typing import Any

from .masking import local_affinities, per_token_to_hbm
from .nki_names import nisa, nl
from .norm import normed_rows
from .router import router_topk_sb
from .rows import RowTiling, part_of
from .tiles import PARTITIONS, Tensor, share

X_HIDDEN_BY_TOKEN = 0
X_TOKEN_BY_HIDDEN = 1


def rmsnorm_tkg(
    inp: Tensor,
    gamma: Tensor | None,
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    residual: Tensor | None = None,
) -> Any:
    """The normed hidden ``[T, H]`` in ``inp``'s dtype, and inp + residual ``[T, H]`` if there is one.

    ``inp`` and ``residual`` ``[B, S, H]`` or ``[T, H]``, ``gamma [1, H]`` or None; H a multiple of 128.
    """
    h = inp.shape[-1]
    t = inp.size // h
    out = nl.ndarray((t, h), dtype=inp.dtype, buffer=nl.shared_hbm, name="out")
    total = (
        None
        if residual is None
        else nl.ndarray((t, h), dtype=inp.dtype, buffer=nl.shared_hbm, name="residual_out")
    )
    part = part_of(h, t)
    for first, count, rows in normed_rows(inp, gamma, eps, hidden_actual, residual, total, part):
        part.store(out, rows, first, count)
    return out if total is None else (out, total)


def router_topk(
    x: Tensor,
    w: Tensor,
    w_bias: Tensor | None = None,
    act_fn: Any = "sigmoid",
    k: int = 1,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    return_eager_affi: bool = False,
    router_mm_dtype: Any = None,
    x_hbm_layout: int = X_TOKEN_BY_HIDDEN,
) -> tuple[Tensor, ...]:
    """Logits ``[T, E]`` in ``x``'s dtype, ids ``[T, K]`` uint32, affinities ``[T, E]`` float32 [and ``[T,
    K]``].

    ``x [T, H]``, or ``[H, T]`` with ``x_hbm_layout=0``; ``w [H, E]``; the rest as in
    :func:`~.router.router_topk_sb`. Each core reads the half of H that it multiplies.
    """
    hidden = _load_half(x, by_token=x_hbm_layout == X_TOKEN_BY_HIDDEN)
    t, e = hidden.shape[2], w.shape[1]
    logits = nl.ndarray((t, e), dtype=x.dtype, buffer=nl.shared_hbm, name="router_logits")
    affinities = nl.ndarray((t, e), dtype=nl.float32, buffer=nl.shared_hbm, name="expert_affinities")
    routing = router_topk_sb(
        hidden, w, w_bias, logits, act_fn, k, router_pre_norm, norm_topk_prob, router_mm_dtype, affinities
    )
    index = per_token_to_hbm(routing.expert_index, t)
    outputs: tuple[Tensor, ...] = (logits, index, affinities)
    return (*outputs, per_token_to_hbm(routing.eager, t)) if return_eager_affi else outputs


def mask_expert_affinities(
    expert_affinities: Tensor,
    expert_index: Tensor,
    rank_id: Tensor,
    E_L: int,
    mask_unselected_experts: bool = False,
) -> Tensor:
    """The rank's ``[T, E_L]`` float32 of ``expert_affinities [T, E]``, masked by ``expert_index [T, K]``."""
    local = local_affinities(expert_affinities, rank_id, E_L, mask_unselected_experts, expert_index)
    return per_token_to_hbm(local, expert_affinities.shape[0])


def _load_half(x: Tensor, by_token: bool) -> Tensor:
    """``[128, H/128, T]`` of which this core's share of H/128 is filled: what its partial logits need."""
    h, t = (x.shape[1], x.shape[0]) if by_token else x.shape
    k = h // PARTITIONS
    hidden = nl.ndarray((PARTITIONS, k, t), dtype=x.dtype, buffer=nl.sbuf, name="hidden")
    start, count = share(k)
    if not count:
        return hidden
    if by_token:
        part = RowTiling(h, 0, t, start, count)
        for first, n in part.token_tiles():
            part.turn(part.load(x, first, n), hidden, first, n)
    else:
        source = x.ap([[t, PARTITIONS], [PARTITIONS * t, count], [1, t]], offset=start * PARTITIONS * t)
        nisa.dma_copy(dst=hidden[:, nl.ds(start, count), :], src=source)
    return hidden
