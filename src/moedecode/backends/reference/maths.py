"""The contract in float64 NumPy, one formula per line: the truth that other backends are compared with.

The only casts are those the contract names; results are unrounded float64. Knows no masks, no output dtypes.
Letters: T tokens, H hidden, I intermediate, E experts, L of them local, K per token, n chosen rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...arrays import Array
from ...formats import BlockOrder, dequantise_e4m3
from ...spec import ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ...weights import ExpertWeights
from .. import Numerics

NO_SCALE, PRE_SCALE = ExpertAffinityScaleMode.NO_SCALE, ExpertAffinityScaleMode.PRE_SCALE


def rounded(x: Array, dtype: Any) -> Array:
    """``x`` after a trip through ``dtype``."""
    return x.astype(dtype).astype(np.float64)


def bounded(x: Array) -> Array:
    """``x [T, H]`` with NaN throughout every row that holds a NaN or an infinity."""
    return np.where(np.isfinite(x).all(-1, keepdims=True), x, np.nan)


def residual_sum(hidden: Array, residual: Array | None) -> Array:
    """s = x [+ residual], in float32 ``[T, H]``."""
    x = hidden.astype(np.float32)
    return x if residual is None else np.add(x, residual, dtype=np.float32)


def rmsnorm(s: Array, gamma: Array | None, eps: float, width: int) -> Array:
    """r = s * rsqrt(sum(s^2)/width + eps) * gamma, ``[T, H]``."""
    s = s.astype(np.float64)
    r: Array = s / np.sqrt((s**2).sum(-1, keepdims=True) / width + eps)  # [T, H]
    return r if gamma is None else r * gamma.astype(np.float64)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array) -> Array:
    """e^x over its sum, along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    p: Array = e / e.sum(-1, keepdims=True)
    return p


SCORES = {"softmax": softmax, "sigmoid": sigmoid}


def top_k(scores: Array, k: int) -> Array:
    """Ids of the k largest ``scores [T, E]``, best first; NaN counts as -inf, ties go to the lowest id."""
    scores = np.where(np.isnan(scores), -np.inf, scores)
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k].astype(np.int32)  # [T, K]


def route(
    x: Array, weight: Array, bias: Array | None, selection_bias: Array | None, spec: RouterSpec
) -> tuple[Array, Array, Array]:
    """Logits ``[T, E]``, index ``[T, K]`` and affinities ``[T, E]`` of ``x [T, H]``; ``weight [E, H]``.

    Scores order experts as their logits do: without a selection bias the logits are what is compared.
    """
    act = SCORES[spec.score]
    logits = rounded(x, spec.matmul_dtype) @ weight.astype(np.float64).T  # [T, E]
    logits = logits if bias is None else logits + bias.astype(np.float64)
    selection = logits  # [T, E]
    if selection_bias is not None:
        selection = (act(logits) if spec.pre_norm else logits) + selection_bias.astype(np.float64)
    index = top_k(selection, spec.top_k)  # [T, K]
    if spec.dense_affinities:
        return logits, index, act(logits) * spec.scale
    if spec.pre_norm:
        chosen = np.take_along_axis(act(logits), index, -1)  # [T, K]
    else:
        chosen = act(np.take_along_axis(logits, index, -1))  # [T, K]
    if spec.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + spec.norm_eps)
    affinities = np.zeros_like(logits)  # [T, E], zero where not selected
    np.put_along_axis(affinities, index, chosen * spec.scale, -1)
    return logits, index, affinities


_erfc = np.vectorize(math.erfc, otypes=[np.float64])

ACTIVATIONS = {
    "silu": lambda g, alpha: g * sigmoid(g),
    "swish": lambda g, alpha: g * sigmoid(alpha * g),
    "gelu": lambda g, alpha: 0.5 * g * _erfc(-g / math.sqrt(2.0)),
    "gelu_tanh": lambda g, alpha: 0.5 * g * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g**3))),
    "relu2": lambda g, alpha: np.maximum(g, 0.0) ** 2,
    "relu": lambda g, alpha: np.maximum(g, 0.0),
}


def clamp(x: Array, bounds: tuple[float | None, float | None]) -> Array:
    """``x`` within (lower, upper), either of which may be None."""
    lower, upper = bounds
    x = x if lower is None else np.maximum(x, lower)
    return x if upper is None else np.minimum(x, upper)


def operand(x: Array, order: BlockOrder, cols: int, numerics: Numerics) -> Array:
    """``x [n, natural]`` as a matrix of ``cols`` stored columns meets it: in order, E4M3 if "mxfp8"."""
    x = order.apply(x)  # [n, positions], zeros in the padding
    x = dequantise_e4m3(x) if numerics.precision == "mxfp8" else x
    return x[:, :cols]


def expert_mlp(x: Array, w: ExpertWeights, e: int, spec: ExpertSpec, numerics: Numerics, io: Any) -> Array:
    """y = h @ Wd + bd, h = act(gate) * (up + up_offset), for ``x [n, H]`` and local expert e: ``[n, H]``."""
    m = w.expert(e)
    bg, bu, bd = (0.0 if b is None else b[e].astype(float) for b in (w.gate_bias, w.up_bias, w.down_bias))
    q = operand(x, w.hidden_order, m.gate.shape[1], numerics)  # [n, cols]
    gate = clamp(q @ m.gate.values().T + bg, spec.gate_clamp)  # [n, I]
    up = clamp(q @ m.up.values().T + bu, spec.up_clamp)  # [n, I]
    h = ACTIVATIONS[spec.activation](gate, spec.alpha) * (up + spec.up_offset)  # [n, I]
    h = rounded(h, io) if numerics.h_rounding == "io" else h
    y: Array = operand(h, w.intermediate_order, m.down.shape[1], numerics) @ m.down.values().T + bd  # [n, H]
    return y


def local_affinities(affinities: Array, index: Array, first: int, count: int, dense: bool) -> Array:
    """This rank's slice ``[T, L]`` of ``affinities [T, E]``; of a dense row only the selected stay."""
    ids = np.arange(first, first + count)  # [L]
    chosen = (index[:, :, None] == ids).any(1)  # [T, L]
    return np.where(chosen, affinities[:, ids], 0.0) if dense else affinities[:, ids]


def visits(
    strategy: str, index: Array | None, affinities: Array, first: int, count: int, everywhere: bool
) -> Iterator[tuple[Array, int, Array]]:
    """(rows, local expert, affinity of each row) in the order of a strategy; experts ascend for every token.

    selective and grouped read ``index [T, K]`` and ``affinities [T, K]``; all_expert ``affinities [T, L]``,
    where an exact 0 means "not selected" unless ``everywhere``. An id of -1 or of another rank is never met.
    """
    if strategy == "all_expert":
        for e in range(count):
            rows = np.flatnonzero((affinities[:, e] != 0) | everywhere)
            yield rows, e, affinities[rows, e]
    elif index is not None and strategy == "grouped":
        for e in range(count):
            rows, slots = np.nonzero(np.equal(index, first + e))  # an id given twice makes two pairs
            yield rows, e, affinities[rows, slots]
    elif index is not None:
        for t, ids in enumerate(index):
            for k in np.argsort(ids, kind="stable"):
                if first <= ids[k] < first + count:
                    yield np.array([t]), int(ids[k]) - first, affinities[[t], k]


def expert_sum(
    r: Array, w: ExpertWeights, spec: ExpertSpec, mode: ExpertAffinityScaleMode, strategy: str,
    index: Array | None, affinities: Array, first: int, numerics: Numerics, io: Any,
) -> Array:  # fmt: skip
    """out = sum over the selected experts of a * y, from ``r [T, H]``: ``[T, H]``. The others are skipped."""
    r = bounded(r.astype(np.float64))
    out = np.where(np.isnan(r), np.nan, 0.0)  # a row that is not finite stays NaN, whatever it selects
    for rows, e, a in visits(strategy, index, affinities, first, w.num_experts, everywhere=mode is NO_SCALE):
        a = np.ones((len(rows), 1)) if mode is NO_SCALE else a.astype(np.float64)[:, None]  # [n, 1]
        before, after = (a, 1.0) if mode is PRE_SCALE else (1.0, a)
        if len(rows):
            np.add.at(out, rows, after * expert_mlp(before * r[rows], w, e, spec, numerics, io))  # [n, H]
    return out


def shared_expert(
    r: Array, w: ExpertWeights, gate: Array | None, spec: ExpertSpec, numerics: Numerics, io: Any
) -> Array:
    """The shared expert's output ``[T, H]``, times sigmoid(r . gate) when ``gate [H]`` is given."""
    y = expert_mlp(r, w, 0, spec, numerics, io)  # [T, H]
    return y if gate is None else y * sigmoid(r @ gate.astype(np.float64))[:, None]
