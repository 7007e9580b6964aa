"""Weights of any kind in the shapes the kernel reads, converted once, expert by expert.

Owns padding of H, the order in which the kernel sees hidden and intermediate indices, and the folding of an
up offset. Knows stored matrices and layouts; knows no kernels and no machine.

MX weights keep their codes and scales whatever their block order is. Weights with blocks of 32 consecutive
indices are given to the kernel under other names: hidden index h' of the kernel is the natural index that
sits where the packed layout puts h'. RMSNorm, router and experts do not care in which order hidden indices
are counted, so permuting ``inp``, ``gamma``, the router's rows and the columns of ``out`` alike changes no
result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays import Array
from ...formats import FP8_BLOCK, MX_BLOCK, BlockOrder, StoredMatrix, WeightFormat
from ...formats.block_order import TILE, intermediate_lanes, trainium_hidden, trainium_intermediate
from ...gates import unsupported
from ...layouts import PackedExpertTensors
from ...spec import ExpertSpec
from ...weights import ExpertWeights

__all__ = [
    "KernelExperts",
    "bias_shape",
    "expert_shapes",
    "fold_offset",
    "kernel_experts",
    "kernel_intermediate",
    "padded_hidden",
    "permuted",
    "restored",
    "shared_tensors",
]

PLAIN_MULTIPLE = 256  # 128 partitions on each of two cores
LANE_STEP = 8  # lanes of a scale block
QUAD = 4  # elements of a lane


@dataclass(frozen=True, eq=False)
class KernelExperts:
    """Expert weights as ``moe_tkg`` takes them (DESIGN of the tensors: ``docs/layouts.md``).

    ``hidden`` is H as the caller counts it, ``padded`` as the kernel does. ``hidden_map [padded]`` holds the
    caller's index at each index of the kernel, -1 for padding; None where they are the same. Codes of MX
    formats are unsigned integers of four elements.
    """

    fmt: WeightFormat
    num_experts: int
    hidden: int
    padded: int
    intermediate: int
    hidden_map: Array | None
    gate_up: Array
    down: Array
    gate_up_scale: Array | None = None
    down_scale: Array | None = None
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


def padded_hidden(hidden: int, fmt: WeightFormat) -> int:
    """H as the kernel sees it: a multiple of 512 for MX weights, of 256 for others."""
    multiple = TILE if fmt.is_mx else PLAIN_MULTIPLE
    return -(-hidden // multiple) * multiple


def permuted(values: Array, hidden_map: Array | None, axis: int = -1) -> Array:
    """``values`` with the caller's hidden axis brought into the kernel's order, zeros in the padding."""
    if hidden_map is None:
        return values
    taken = np.take(values, np.maximum(hidden_map, 0), axis=axis)
    padding = hidden_map < 0
    if padding.any():
        np.moveaxis(taken, axis, -1)[..., padding] = 0
    return taken


def restored(values: Array, experts: KernelExperts) -> Array:
    """``values [T, padded]`` of the kernel as the caller counts, ``[T, hidden]``."""
    if experts.hidden_map is None:
        return values
    natural = np.empty((*values.shape[:-1], experts.hidden), values.dtype)
    real = experts.hidden_map >= 0
    natural[..., experts.hidden_map[real]] = values[..., real]
    return natural


def kernel_experts(weights: ExpertWeights, only: Iterable[int] | None = None) -> KernelExperts:
    """``weights`` in the kernel's layout; tensors that came in the packed layout are taken as they are.

    ``only`` names the experts to convert where it is known that no other will be read: the others stay
    untouched memory.
    """
    chosen = range(weights.num_experts) if only is None else only
    if not weights.fmt.is_mx:
        return _plain_experts(weights, chosen)
    if weights.packed is not None:
        return _packed_experts(weights, weights.packed)
    return _mx_experts(weights, chosen)


def kernel_intermediate(weights: ExpertWeights) -> int:
    """I as the kernel counts it."""
    return _intermediate(weights)[0] if weights.fmt.is_mx else weights.intermediate


def expert_shapes(
    fmt: WeightFormat, count: int, hidden: int, intermediate: int
) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype of gate_up, down and (but for plain floats) their scales, H padded."""
    if not fmt.is_mx:
        scales = [((count, 2, intermediate), np.dtype(np.float32)), ((count, hidden), np.dtype(np.float32))]
        codes = [
            ((count, hidden, 2, intermediate), fmt.element),
            ((count, intermediate, hidden), fmt.element),
        ]
        return [*codes, *(scales if fmt.is_fp8 else [])]
    lanes, tiles = intermediate_lanes(intermediate), -(-intermediate // TILE)
    container, byte = np.dtype(f"<u{4 * fmt.bits // 8}"), np.dtype(np.uint8)
    return [
        ((count, 128, 2, hidden // TILE, intermediate), container),
        ((count, lanes, tiles, hidden), container),
        ((count, 16, 2, hidden // TILE, intermediate), byte),
        ((count, -(-lanes // LANE_STEP), tiles, hidden), byte),
    ]


def fold_offset(experts: KernelExperts, spec: ExpertSpec) -> tuple[KernelExperts, ExpertSpec]:
    """The same MLP without ``up_offset``: clamp(u) + o = clamp'(u + o) with both bounds moved by o."""
    offset = spec.up_offset
    if offset == 0:
        return experts, spec
    moved = tuple(None if bound is None else bound + offset for bound in spec.up_clamp)
    shape, up = bias_shape(experts.fmt, experts.num_experts, experts.intermediate)
    bias = (
        np.zeros(shape, np.float32)
        if experts.gate_up_bias is None
        else experts.gate_up_bias.astype(np.float32)
    )
    bias[up] += np.float32(offset)
    folded = replace(spec, up_offset=0.0, up_clamp=(moved[0], moved[1]), bias=True)
    return replace(experts, gate_up_bias=bias), folded


def shared_tensors(weights: ExpertWeights, experts: KernelExperts) -> dict[str, Array]:
    """The shared expert as the block kernel takes it: ``[H, I_s]``, ``[H, I_s]``, ``[I_s, H]``, dequantised.

    Plain weights keep their dtype; others become bfloat16 where that is exact, as for MX, else float32.
    """
    m = weights.expert(0)
    gate, up = (_natural(x, weights.hidden_order).T for x in (m.gate, m.up))  # [H, I_s]
    down = _natural(m.down, weights.intermediate_order).T  # [I_s, H]
    values = [permuted(a, experts.hidden_map, axis) for a, axis in ((gate, 0), (up, 0), (down, -1))]
    plain = not weights.fmt.is_mx and not weights.fmt.is_fp8
    dtype = weights.fmt.element if plain else _narrowest(values)
    found = {
        f"shared_expert_{name}_w": np.ascontiguousarray(a.astype(dtype))
        for name, a in zip(("gate", "up", "down"), values, strict=True)
    }
    biases = {"gate": weights.gate_bias, "up": weights.up_bias, "down": weights.down_bias}
    if biases["down"] is not None:
        biases["down"] = permuted(biases["down"], experts.hidden_map)
    for name, bias in biases.items():
        narrow = narrowed(bias)
        if narrow is not None:
            found[f"shared_expert_{name}_bias"] = narrow
    return found


def _narrowest(values: list[Array]) -> np.dtype[Any]:
    """bfloat16 if it holds all of ``values``, else float32."""
    narrow = WeightFormat.BF16.element
    exact = all(np.array_equal(a.astype(narrow).astype(np.float64), a) for a in values)
    return narrow if exact else WeightFormat.FP32.element


# ------------------------------------------------------------------ MX


def _packed_experts(weights: ExpertWeights, packed: PackedExpertTensors) -> KernelExperts:
    """The tensors as they are; an I that fills no whole lane gets zero columns, which takes a copy of
    gate_up.
    """
    width = kernel_intermediate(weights)
    missing = [(0, 0)] * 4 + [(0, width - weights.intermediate)]
    gate_up, scale = packed.gate_up, packed.gate_up_scale.view(np.uint8)
    if width != weights.intermediate:
        gate_up, scale = np.pad(gate_up, missing), np.pad(scale, missing)
    return KernelExperts(
        weights.fmt, weights.num_experts, weights.hidden, weights.hidden, width, None,
        gate_up, packed.down, scale, packed.down_scale.view(np.uint8),
        _mx_bias(weights, width), narrowed(weights.down_bias),
    )  # fmt: skip


def _mx_experts(weights: ExpertWeights, chosen: Iterable[int]) -> KernelExperts:
    """Stored rows, whose columns run in stored position order, into ``[partition, tile, row]`` integers."""
    padded = padded_hidden(weights.hidden, weights.fmt)
    width, rows = _intermediate(weights)
    hidden_map, count = _hidden_map(weights, padded), weights.num_experts
    shapes = expert_shapes(weights.fmt, count, padded, width)
    gate_up, down, gate_up_scale, down_scale = (np.zeros(*described) for described in shapes)
    container, (lanes, tiles_i), tiles_h = gate_up.dtype, down.shape[1:3], padded // TILE
    for e in chosen:
        m = weights.expert(e)
        for g, matrix in enumerate((m.gate, m.up)):
            codes, scale = _lanes(matrix, rows, 128, tiles_h, container)
            gate_up[e, :, g], gate_up_scale[e, :, g] = codes, scale
        down[e], down_scale[e] = _lanes(m.down, hidden_map, lanes, tiles_i, container)
    bias = None if weights.down_bias is None else permuted(weights.down_bias, hidden_map)
    return KernelExperts(
        weights.fmt, count, weights.hidden, padded, width, hidden_map,
        gate_up, down, gate_up_scale, down_scale, _mx_bias(weights, width), narrowed(bias),
    )  # fmt: skip


def _lanes(
    matrix: StoredMatrix, rows: Array | None, lanes: int, tiles: int, container: np.dtype[Any]
) -> tuple[Array, Array]:
    """Codes ``[lanes, tiles, rows]`` and scales ``[ceil(lanes/8), tiles, rows]``, rows taken as ``rows``
    says.
    """
    codes = _rows(np.ascontiguousarray(matrix.codes).view(np.uint8), rows, lanes * tiles * container.itemsize)
    blocks = lanes * tiles * 4 // MX_BLOCK
    scales = _rows(matrix.scale if matrix.scale is not None else codes[:, :0], rows, blocks)
    return (
        codes.view(container).reshape(-1, tiles, lanes).transpose(2, 1, 0),
        scales.reshape(-1, tiles, blocks // tiles).transpose(2, 1, 0),
    )


def _rows(stored: Array, rows: Array | None, width: int) -> Array:
    """uint8 ``[rows, width]``: the rows that ``rows`` names (-1: zeros), padded with zeros to ``width``."""
    columns = stored.shape[1]
    wide = np.zeros((len(stored) if rows is None else len(rows), width), np.uint8)
    if rows is None:
        wide[:, :columns] = stored
    else:
        real = rows >= 0
        wide[real, :columns] = stored[rows[real]]
    return wide


def _hidden_map(weights: ExpertWeights, padded: int) -> Array | None:
    """The caller's hidden index at each of the kernel's: what is stored at the same position."""
    stored = np.full(padded, -1, np.int32)
    gather = weights.hidden_order.gather
    stored[: len(gather)] = gather
    found = np.empty(padded, np.int32)
    found[trainium_hidden(padded).gather] = stored
    return None if np.array_equal(found, np.arange(padded)) else found


def _intermediate(weights: ExpertWeights) -> tuple[int, Array | None]:
    """I as the kernel counts it, and the stored row at each of its indices (None: the same).

    Every quad of a lane must hold a column: checkpoints get a multiple of 8, packed weights only where I % 4.
    """
    own = weights.intermediate_order
    width = -(-own.size // LANE_STEP) * LANE_STEP
    natural = np.where(np.arange(width) < own.size, np.arange(width), -1)
    if own.name == "trainium":
        return (own.size, None) if own.size % QUAD == 0 else (width, natural)
    gather = trainium_intermediate(width).gather
    rows = np.empty(width, np.int32)
    real = gather >= 0
    rows[gather[real]] = np.where(np.arange(len(gather)) < own.size, np.arange(len(gather)), -1)[real]
    return width, rows


def _mx_bias(weights: ExpertWeights, width: int) -> Array | None:
    """Gate and up bias ``[E, I]`` as ``[E, lanes, 2, tiles, 4]``, at the positions of their rows' columns."""
    gate, up = weights.gate_bias, weights.up_bias
    if gate is None and up is None:
        return None
    lanes, tiles, own = intermediate_lanes(width), -(-width // TILE), weights.intermediate_order
    gather = np.full(lanes * tiles * QUAD, -1, np.int32)
    gather[: len(own.gather)] = own.gather
    bias = np.zeros((weights.num_experts, lanes, 2, tiles, QUAD), np.float32)
    for g, values in enumerate((gate, up)):
        if values is not None:
            stored = np.where(gather >= 0, values[:, np.maximum(gather, 0)], 0)
            bias[:, :, g] = stored.reshape(len(bias), tiles, lanes, QUAD).transpose(0, 2, 1, 3)
    return narrowed(bias)


# ------------------------------------------------------------------ plain and FP8


def _plain_experts(weights: ExpertWeights, chosen: Iterable[int]) -> KernelExperts:
    padded, count, width = (
        padded_hidden(weights.hidden, weights.fmt),
        weights.num_experts,
        weights.intermediate,
    )
    hidden_map = None
    if padded != weights.hidden:
        hidden_map = np.where(np.arange(padded) < weights.hidden, np.arange(padded), -1)
    shapes = expert_shapes(weights.fmt, count, padded, width)
    gate_up, down = (np.zeros(*described) for described in shapes[:2])
    gate_up_scale, down_scale = (
        (np.ones(*described) for described in shapes[2:]) if shapes[2:] else (None, None)
    )
    for e in chosen:
        m = weights.expert(e)
        for g, matrix in enumerate((m.gate, m.up)):
            gate_up[e, : weights.hidden, g] = _natural_codes(matrix, weights.hidden_order).T
            if gate_up_scale is not None:
                gate_up_scale[e, g] = _row_scale(matrix)
        down[e, :, : weights.hidden] = _natural_codes(m.down, weights.intermediate_order).T
        if down_scale is not None:
            down_scale[e, : weights.hidden] = _row_scale(m.down)
    bias = None
    if weights.gate_bias is not None or weights.up_bias is not None:
        bias = np.zeros((count, 2, width), np.float32)
        for g, values in enumerate((weights.gate_bias, weights.up_bias)):
            bias[:, g] = 0 if values is None else values
    down_bias = None if weights.down_bias is None else permuted(weights.down_bias, hidden_map)
    return KernelExperts(
        weights.fmt, count, weights.hidden, padded, width, hidden_map,
        gate_up, down, gate_up_scale, down_scale, narrowed(bias), narrowed(down_bias),
    )  # fmt: skip


def _row_scale(matrix: StoredMatrix) -> Array:
    """The scale of each row; a scale of the whole matrix is every row's."""
    if matrix.scale is None or matrix.scale.ndim == 2:
        raise unsupported(
            "weights",
            f"{matrix.fmt.value} with {FP8_BLOCK}x{FP8_BLOCK} block scales",
            "the kernel multiplies by row scales after the product",
            "rescale by rows, or use another backend",
        )
    return matrix.scale


def _natural_codes(matrix: StoredMatrix, order: BlockOrder) -> Array:
    """Elements ``[rows, order.size]`` in natural column order."""
    if order.name == "contiguous":
        return matrix.codes[:, : order.size]
    natural = np.empty((len(matrix.codes), order.size), matrix.codes.dtype)
    real = order.gather >= 0
    natural[:, order.gather[real]] = matrix.codes[:, real]
    return natural


def _natural(matrix: StoredMatrix, order: BlockOrder) -> Array:
    """Values, float64 ``[rows, order.size]`` in natural column order."""
    values = matrix.values()
    if order.name == "contiguous":
        return values[:, : order.size]
    natural = np.empty((len(values), order.size))
    real = order.gather >= 0
    natural[:, order.gather[real]] = values[:, real]
    return natural


# ------------------------------------------------------------------ biases


def narrowed(bias: Array | None) -> Array | None:
    """The bias in bfloat16 where that loses nothing, as checkpoints store it: half the bytes to read."""
    if bias is None:
        return None
    narrow = bias.astype(WeightFormat.BF16.element)
    return narrow if np.array_equal(narrow.astype(np.float32), bias) else np.ascontiguousarray(bias)


def bias_shape(fmt: WeightFormat, count: int, width: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Shape of the gate/up bias of ``count`` experts, and where up stands in it."""
    every = slice(None)
    if fmt.is_mx:
        return (count, intermediate_lanes(width), 2, -(-width // TILE), 4), (every, every, slice(1, 2))
    return (count, 2, width), (every, slice(1, 2))
