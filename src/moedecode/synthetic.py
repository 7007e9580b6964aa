"""Random weights and tokens for a spec, in every format, seeded: for demos, checks, tests and benchmarks.

Owns distributions: elements and scales vary, so that a wrong scale or a swapped row shows. Knows no backends.
One expert exists at a time: asking again for expert e draws the same numbers again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import IO_DTYPES, Array
from .formats import FP8_BLOCK, MX_BLOCK, StoredMatrix, WeightFormat, hidden_order, intermediate_order
from .gates import require
from .spec import BlockSpec, ExpertSpec
from .weights import BlockWeights, ExpertMatrices, ExpertWeights

__all__ = ["FP8_SCALES", "block_weights", "expert_weights", "tokens"]

FP8_SCALES = ("tensor", "row", "block")
_E8M0_OF_ONE = 127

# Root mean square of a stored element before its scale. MXFP4: of sixteen equally likely codes. FP8:
# the largest value is nine of these away, which normal numbers do not reach.
_ELEMENT_RMS = {
    WeightFormat.MXFP4: 2.93,
    WeightFormat.MXFP8_E4M3: 48.0,
    WeightFormat.MXFP8_E5M2: 4096.0,
    WeightFormat.FP8_E4M3: 48.0,
    WeightFormat.FP8_E5M2: 4096.0,
}
# Independent streams of random numbers, so that adding one never changes another.
_EXPERTS, _BIASES, _ROUTER, _SHARED, _TOKENS = range(5)


def tokens(
    count: int, hidden: int, dtype: str = "bfloat16", seed: int = 0, *, outlier_size: float = 1.0
) -> Array:
    """Normal hidden states ``[count, hidden]``; one channel in a hundred is ``outlier_size`` times larger."""
    rng = np.random.default_rng((seed, _TOKENS))
    x = rng.standard_normal((count, hidden), np.float32)
    outliers = np.random.default_rng(hidden).random(hidden) < 0.01
    x[:, outliers] *= np.float32(outlier_size)
    return x.astype(IO_DTYPES[dtype])


def expert_weights(
    spec: ExpertSpec,
    hidden: int,
    num_experts: int,
    fmt: WeightFormat,
    *,
    seed: int = 0,
    first_expert: int = 0,
    fp8_scale: str = "row",
    block_order: str = "contiguous",
) -> ExpertWeights:
    """Experts from ``first_expert`` on, drawn when asked for; a slice holds the same experts as the whole.

    ``fp8_scale``: "tensor", "row" or "block" (128x128) for the FP8 formats. ``block_order="trainium"`` gives
    columns in the order of the packed layout (and needs H % 512 == 0). MXFP4 needs even H and I otherwise.
    """
    require(
        fp8_scale in FP8_SCALES, "fp8_scale", repr(fp8_scale), "is not known", f"use {', '.join(FP8_SCALES)}"
    )
    order_h, order_i = hidden_order(block_order, hidden), intermediate_order(block_order, spec.intermediate)
    unpadded = block_order == "contiguous"
    cols_h, cols_i = (hidden, spec.intermediate) if unpadded else (order_h.positions, order_i.positions)

    def expert(e: int) -> ExpertMatrices:
        rng = np.random.default_rng((seed, _EXPERTS, first_expert + e))
        gate = _matrix(rng, fmt, spec.intermediate, cols_h, fp8_scale)
        up = _matrix(rng, fmt, spec.intermediate, cols_h, fp8_scale)
        down = _matrix(rng, fmt, hidden, cols_i, fp8_scale)
        if not unpadded:
            _clear_padding(down, order_i.gather < 0)
        return ExpertMatrices(gate, up, down)

    biases: dict[str, Array | None] = {"gate_bias": None, "up_bias": None, "down_bias": None}
    if spec.bias:
        rows = {"gate_bias": spec.intermediate, "up_bias": spec.intermediate, "down_bias": hidden}
        streams = [np.random.default_rng((seed, _BIASES, first_expert + e)) for e in range(num_experts)]
        biases = {
            name: np.stack([0.1 * rng.standard_normal(width, np.float32) for rng in streams])
            for name, width in rows.items()
        }
    return ExpertWeights(
        num_experts,
        hidden,
        spec.intermediate,
        fmt,
        order_h,
        order_i,
        expert,
        gate_bias=biases["gate_bias"],
        up_bias=biases["up_bias"],
        down_bias=biases["down_bias"],
    )


def block_weights(
    spec: BlockSpec,
    fmt: WeightFormat,
    *,
    seed: int = 0,
    local_experts: int | None = None,
    first_expert: int = 0,
    dtype: str = "bfloat16",
    fp8_scale: str = "row",
    block_order: str = "contiguous",
) -> BlockWeights:
    """All weights of one block; router, gamma and biases of the router are ``dtype``.

    ``local_experts`` experts from ``first_expert`` on (None: all) make the slice of a rank.
    """
    rng = np.random.default_rng((seed, _ROUTER))
    io, experts, hidden = IO_DTYPES[dtype], spec.router.num_experts, spec.hidden

    def draw(size: float, *shape: int) -> Any:
        return (size * rng.standard_normal(shape, np.float32)).astype(io)

    gamma = (1.0 + 0.2 * rng.standard_normal(hidden, np.float32)).astype(io)
    router = draw(2.0 / math.sqrt(hidden), experts, hidden)
    router_bias, selection_bias, shared_gate = (
        draw(0.5, experts),
        draw(0.2, experts),
        draw(1 / hidden, hidden),
    )
    shared = None
    if spec.shared is not None:
        shared_seed = int(np.random.default_rng((seed, _SHARED)).integers(1 << 31))
        shared = expert_weights(
            spec.shared, hidden, 1, fmt, seed=shared_seed, fp8_scale=fp8_scale, block_order=block_order
        )
    return BlockWeights(
        router=router,
        experts=expert_weights(
            spec.experts,
            hidden,
            experts if local_experts is None else local_experts,
            fmt,
            seed=seed,
            first_expert=first_expert,
            fp8_scale=fp8_scale,
            block_order=block_order,
        ),
        gamma=gamma,
        router_bias=router_bias if spec.router.bias else None,
        selection_bias=selection_bias if spec.router.selection_bias else None,
        shared=shared,
        shared_gate=shared_gate if spec.shared_gate else None,
    )


def _matrix(
    rng: np.random.Generator, fmt: WeightFormat, rows: int, cols: int, fp8_scale: str
) -> StoredMatrix:
    """``[rows, cols]`` of RMS about 1/sqrt(cols), so that products of it stay near 1."""
    size = 1.0 / math.sqrt(cols)
    if not fmt.is_mx and not fmt.is_fp8:
        values = rng.standard_normal((rows, cols), np.float32)
        values *= (size * rng.uniform(0.5, 1.5, (rows, 1))).astype(np.float32)
        return StoredMatrix(fmt, values.astype(fmt.element))
    if fmt is WeightFormat.MXFP4:
        require(cols % 2 == 0, "cols", cols, "two MXFP4 elements share a byte", "use even H and I")
        codes = rng.integers(0, 256, (rows, cols // 2), np.uint8)
    else:
        codes = rng.standard_normal((rows, cols), np.float32)
        codes *= np.float32(_ELEMENT_RMS[fmt])
        codes = codes.astype(fmt.element)
    wanted = size / _ELEMENT_RMS[fmt]
    if fmt.is_mx:
        exponent = _E8M0_OF_ONE + round(math.log2(wanted))
        scale = rng.integers(exponent - 1, exponent + 2, (rows, -(-cols // MX_BLOCK)), np.uint8)
    else:
        blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
        shape: tuple[int, ...] = {"tensor": (1,), "row": (rows,), "block": blocks}[fp8_scale]
        scale = (wanted * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
    return StoredMatrix(fmt, codes, scale)


def _clear_padding(matrix: StoredMatrix, padding: Array) -> None:
    """Code 0 in the padding columns, as packed layouts store it."""
    if matrix.fmt is WeightFormat.MXFP4:
        matrix.codes[:, padding[0::2]] &= 0xF0
        matrix.codes[:, padding[1::2]] &= 0x0F
    else:
        matrix.codes[:, padding] = 0
