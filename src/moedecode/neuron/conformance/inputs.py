"""Owns random inputs for a configuration, made so that the answer is unambiguous: no two experts nearly tie,
and this rank's experts are hit.

Must not know the library or the machine. Values are small numbers of a realistic spread; a seed and a config
give the same arrays.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..machine import dtypes
from .configs import BlockConfig

__all__ = [
    "IO_DTYPES",
    "X4_DTYPES",
    "block_inputs",
    "block_shapes",
    "expert_inputs",
    "margins",
    "router_inputs",
    "rows_apart",
    "used_lanes",
    "zero_gate_up_bias",
]

Array = npt.NDArray[Any]

IO_DTYPES = {"bf16": dtypes.bfloat16, "fp16": dtypes.float16, "fp32": dtypes.float32}
X4_DTYPES = {"mxfp4": dtypes.float4_e2m1fn_x4, "mxfp8": dtypes.float8_e4m3fn_x4}

_LOGIT_SPREAD = 2.0
_APART = 0.04 * _LOGIT_SPREAD  # of logits; bf16 operands move a logit by about 0.004 of their spread
_GATE_SPREAD = 2.0  # of gate pre-activations: the clamps at 7 act on a few of them


def block_inputs(config: BlockConfig, seed: int = 0, *, experts: bool = True) -> dict[str, Array | None]:
    """The array arguments of the fused block, under its parameter names; those of the experts only if
    `experts`.

    x4 weights have the machine's x4 dtypes, fp8 weights float8_e4m3 with magnitudes up to 240. `rank_id` is
    None in selective mode.
    """
    rng = np.random.default_rng([seed, zlib.crc32(config.name.encode())])
    io = IO_DTYPES[config.io]
    h, e = config.hidden, config.experts
    gamma = (1.0 + 0.1 * rng.standard_normal((1, h))).astype(io)
    router = (rng.standard_normal((h, e)) * _LOGIT_SPREAD / math.sqrt(h)).astype(io)
    router_bias = (0.3 * rng.standard_normal((1, e))).astype(io) if config.bias else None
    inp, residual, rank = _tokens(rng, config, gamma, router, router_bias)
    inputs: dict[str, Array | None] = {
        "inp": inp[None],  # [1, T, H]
        "gamma": gamma,
        "router_weights": router,
        "router_bias": router_bias,
        "residual": None if residual is None else residual[None],
        "rank_id": np.array([[rank]], np.uint32) if config.all_expert else None,
    }
    if not experts:
        return inputs
    return (
        inputs
        | (_mx_weights(rng, config) if config.is_mx else _plain_weights(rng, config))
        | _biases(rng, config)
    )


def expert_inputs(config: BlockConfig, *, dense: bool, seed: int = 0) -> dict[str, Array | None]:
    """The array arguments of the expert MLPs alone: as of the block, with hidden states and a routing in
    place of inp and router.

    Args:
        config: the call; `rank` None means 0.
        dense: affinities are not zero where an expert was not selected.
        seed: of everything.
    """
    rng = np.random.default_rng([seed, zlib.crc32(config.name.encode())])
    t, e, k = config.tokens, config.experts, config.top_k
    rank = config.rank or 0
    index = np.stack([rng.permutation(e)[:k] for _ in range(t)])  # [T, K]
    if config.all_expert:  # every third token visits the rank
        own = rank * config.local_experts + rng.integers(0, config.local_experts, t)
        visits = (np.arange(t) % 3 == 0) & ~(index == own[:, None]).any(-1)
        index[visits, 0] = own[visits]
    affinities = rng.uniform(0.1, 1.0, (t, e)).astype(np.float32) / k
    if not dense:
        chosen = np.zeros((t, e), bool)
        np.put_along_axis(chosen, index, True, -1)
        affinities *= chosen
    arrays: dict[str, Array | None] = {
        "hidden_input": rng.standard_normal((t, config.hidden)).astype(IO_DTYPES[config.io]),
        "expert_affinities": affinities,
        "expert_index": index.astype(np.int32),
        "rank_id": np.array([[rank]], np.uint32) if config.all_expert else None,
    }
    return (
        arrays
        | (_mx_weights(rng, config) if config.is_mx else _plain_weights(rng, config))
        | _biases(rng, config)
    )


def router_inputs(config: BlockConfig, seed: int = 0) -> tuple[Array, Array, Array | None]:
    """(x [T, H], w [H, E], bias [1, E] or None) without near-ties."""
    arrays = block_inputs(config.with_(all_expert=False), seed, experts=False)
    inp, w, bias = arrays["inp"], arrays["router_weights"], arrays["router_bias"]
    assert inp is not None and w is not None
    return inp[0], w, bias


def zero_gate_up_bias(config: BlockConfig, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a gate/up bias of zeros in the MX layout."""
    shape = (config.local_experts, config.lanes, 2, math.ceil(config.intermediate / 512), 4)
    return arrays | {"expert_gate_up_bias": np.zeros(shape, IO_DTYPES[config.io])}


def block_shapes(config: BlockConfig) -> dict[str, tuple[tuple[int, ...], Any] | None]:
    """(shape, dtype) of the same arguments, for runs without data."""
    n, h, i, e, io = (
        config.local_experts,
        config.hidden,
        config.intermediate,
        config.experts,
        IO_DTYPES[config.io],
    )
    tiles_h, tiles_i, lanes = h // 512, math.ceil(i / 512), config.lanes
    mx = config.is_mx
    weight = (
        X4_DTYPES[config.weights]
        if mx
        else dtypes.float8_e4m3
        if config.weights == "fp8_row"
        else IO_DTYPES[config.weights]
    )
    shapes: dict[str, tuple[tuple[int, ...], Any] | None] = {
        "inp": ((1, config.tokens, h), io),
        "gamma": ((1, h), io),
        "router_weights": ((h, e), io),
        "router_bias": ((1, e), io) if config.bias else None,
        "residual": ((1, config.tokens, h), io) if config.residual else None,
        "rank_id": ((1, 1), np.dtype(np.uint32)) if config.all_expert else None,
        "expert_gate_up_weights": ((n, 128, 2, tiles_h, i) if mx else (n, h, 2, i), weight),
        "expert_down_weights": ((n, lanes, tiles_i, h) if mx else (n, i, h), weight),
        "expert_gate_up_weights_scale": None,
        "expert_down_weights_scale": None,
        "expert_gate_up_bias": ((n, lanes, 2, tiles_i, 4) if mx else (n, 2, i), io) if config.bias else None,
        "expert_down_bias": ((n, h), io) if config.bias else None,
    }
    if mx:
        shapes["expert_gate_up_weights_scale"] = ((n, 16, 2, tiles_h, i), np.dtype(np.uint8))
        shapes["expert_down_weights_scale"] = ((n, math.ceil(lanes / 8), tiles_i, h), np.dtype(np.uint8))
    elif config.weights == "fp8_row":
        shapes["expert_gate_up_weights_scale"] = ((n, 2, i), np.dtype(np.float32))
        shapes["expert_down_weights_scale"] = ((n, h), np.dtype(np.float32))
    return shapes


def margins(logits: Array, top_k: int) -> Array:
    """Distance between the K-th and the (K+1)-th logit of each row `[T]`; infinite where every expert is
    selected.
    """
    if top_k >= logits.shape[-1]:
        return np.full(len(logits), np.inf)
    ordered = -np.sort(-logits, axis=-1)  # [T, E]
    gap: Array = ordered[:, top_k - 1] - ordered[:, top_k]
    return gap


def rows_apart(rows: Array, logits: Array, top_k: int) -> Array:
    """The rows whose selection no rounding path changes, in their order."""
    return rows[margins(logits, top_k) > _APART]


def _tokens(
    rng: np.random.Generator, config: BlockConfig, gamma: Array, router: Array, bias: Array | None
) -> tuple[Array, Array | None, int]:
    """(inp [T, H], residual or None, rank): tokens whose experts are clearly apart, some of which visit the
    rank.
    """
    io, t, h = IO_DTYPES[config.io], config.tokens, config.hidden
    pool = max(5 * t, 160)
    width = config.hidden_actual or h
    real = np.arange(h) < width
    inp = (rng.standard_normal((pool, h)) * real).astype(io)
    residual = (rng.standard_normal((pool, h)) * real).astype(io) if config.residual else None
    s = inp.astype(np.float32) + (0.0 if residual is None else residual.astype(np.float32))  # [pool, H]
    r = s / np.sqrt((s * s).sum(-1, keepdims=True) / width + 1e-6) * gamma.astype(np.float32)
    logits = r @ router.astype(np.float32) + (0.0 if bias is None else bias.astype(np.float32))  # [pool, E]
    rows = rows_apart(np.arange(pool), logits, config.top_k)
    if len(rows) < t:
        raise AssertionError(
            f"{config.name}: only {len(rows)} of {pool} rows have no near-tie, {t} are needed"
        )
    rank = config.rank or 0
    if config.all_expert:
        ids = np.argsort(-logits[rows], axis=-1)[:, : config.top_k] // config.local_experts  # [rows, K] ranks
        if config.rank is None:
            rank = int(np.bincount(ids.ravel()).argmax())
        hit = (ids == rank).any(-1)
        half = rows[hit][: (t + 1) // 2]
        rest = np.setdiff1d(rows, half, assume_unique=True)[: t - len(half)]
        rows = rng.permutation(np.concatenate([half, rest]))
    rows = rows[:t]
    return inp[rows], None if residual is None else residual[rows], rank


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], spread: float, dtype: Any) -> Array:
    """Uniform values of that standard deviation, slice by slice of the first dimension (float32 copies of
    all would not fit).
    """
    out = np.empty(shape, dtype)
    factor = np.float32(spread * math.sqrt(3.0) / 2**15)
    for part in out:
        part[...] = rng.integers(-(2**15), 2**15, part.shape, np.int16).astype(np.float32) * factor
    return out


def _plain_weights(rng: np.random.Generator, config: BlockConfig) -> dict[str, Array | None]:
    """Float or row-scaled fp8 weights `[E_L, H, 2, I]` and `[E_L, I, H]`, with scales `[E_L, 2, I]` and
    `[E_L, H]`.
    """
    n, h, i = config.local_experts, config.hidden, config.intermediate
    fp8 = config.weights == "fp8_row"
    dtype: Any = dtypes.float8_e4m3 if fp8 else IO_DTYPES[config.weights]
    stored = 60.0  # spread of fp8 codes: uniform values then stay below 104, of 240
    up, down = _GATE_SPREAD / math.sqrt(h), 1.0 / math.sqrt(i)
    made: dict[str, Array | None] = {
        "expert_gate_up_weights": _uniform(rng, (n, h, 2, i), stored if fp8 else up, dtype),
        "expert_down_weights": _uniform(rng, (n, i, h), stored if fp8 else down, dtype),
        "expert_gate_up_weights_scale": None,
        "expert_down_weights_scale": None,
    }
    if fp8:
        made["expert_gate_up_weights_scale"] = (up / stored * rng.uniform(0.5, 1.5, (n, 2, i))).astype(
            np.float32
        )
        made["expert_down_weights_scale"] = (down / stored * rng.uniform(0.5, 1.5, (n, h))).astype(np.float32)
    return made


def _mx_weights(rng: np.random.Generator, config: BlockConfig) -> dict[str, Array | None]:
    n, h, i = config.local_experts, config.hidden, config.intermediate
    tiles_h, tiles_i, lanes = h // 512, math.ceil(i / 512), config.lanes
    down = _codes(rng, (n, lanes, tiles_i, h), config.weights)
    used = used_lanes(config)  # [lanes, tiles]
    down[:, ~used] = np.zeros((), down.dtype)  # lanes beyond I are padding, code 0
    return {
        "expert_gate_up_weights": _codes(rng, (n, 128, 2, tiles_h, i), config.weights),
        "expert_down_weights": down,
        "expert_gate_up_weights_scale": _scales(rng, (n, 16, 2, tiles_h, i), _GATE_SPREAD / math.sqrt(h)),
        "expert_down_weights_scale": _scales(rng, (n, math.ceil(lanes / 8), tiles_i, h), 1.0 / math.sqrt(i)),
    }


def used_lanes(config: BlockConfig) -> Array:
    """Which partitions of each tile of I hold weights: `[P_I, ceil(I/512)]` bool."""
    tiles = range(math.ceil(config.intermediate / 512))
    columns = [min(512, config.intermediate - 512 * t) for t in tiles]
    return np.stack([np.arange(config.lanes) < 2 * math.ceil(c / 8) for c in columns], axis=1)


_CODE_SPREAD = 3.0  # standard deviation of the decoded codes below, before their scale


def _codes(rng: np.random.Generator, shape: tuple[int, ...], weights: str) -> Array:
    """x4 codes that decode to values of about `_CODE_SPREAD`."""
    if weights == "mxfp4":
        return rng.integers(0, 2**16, shape, np.uint16).view(X4_DTYPES[weights])
    levels = np.linspace(-1, 1, 256) * _CODE_SPREAD * math.sqrt(3.0)
    table = levels.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)  # [256], never a NaN code
    codes = np.take(table, rng.integers(0, 256, (*shape, 4), np.uint8))  # [..., 4]
    return codes.view(X4_DTYPES[weights])[..., 0]


def _scales(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> Array:
    """E8M0 scales that give weights of about that spread, each one of three neighbouring powers of two."""
    middle = 127 + round(math.log2(spread / _CODE_SPREAD))
    return (middle + rng.integers(-1, 2, shape, np.int8)).astype(np.uint8)


def _biases(rng: np.random.Generator, config: BlockConfig) -> dict[str, Array | None]:
    if not config.bias:
        return {"expert_gate_up_bias": None, "expert_down_bias": None}
    n, i, io = config.local_experts, config.intermediate, IO_DTYPES[config.io]
    shape = (n, config.lanes, 2, math.ceil(i / 512), 4) if config.is_mx else (n, 2, i)
    gate_up = (0.5 * rng.standard_normal(shape)).astype(io)
    if config.is_mx:
        gate_up *= used_lanes(config)[None, :, None, :, None].astype(io)
    return {
        "expert_gate_up_bias": gate_up,
        "expert_down_bias": (0.2 * rng.standard_normal((n, config.hidden))).astype(io),
    }
