"""Where elements lie in the tensors of a layout: halves of fused tensors, scales, biases, packed integers.

Owns shapes and strides of checkpoints and of the Trainium layout (``docs/layouts.md``). Knows formats; knows
no experts as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array, as_float32, as_numpy
from .formats import BlockOrder, StoredMatrix, WeightFormat
from .formats.block_order import TILE, hidden_order, intermediate_lanes
from .formats.dtypes import X4_CONTAINERS, as_codes, is_e8m0, logical_dtype, weight_format
from .gates import require

__all__ = [
    "PackedExpertTensors",
    "check_flat_scales",
    "half_of_scale",
    "halves",
    "natural_bias",
    "optional",
    "packed_experts",
    "stacked_bias",
    "stored_matrix",
]


def optional(value: Any, argument: str) -> Array | None:
    """A NumPy view, or None for an argument that was left out."""
    return None if value is None else as_numpy(value, argument)


def halves(interleaved: bool, rows: int) -> tuple[slice, slice]:
    """The gate rows and the up rows of a fused tensor."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, rows // 2), slice(rows // 2, None)


def half_of_scale(scale: Array | None, half: slice, rows: int, which: int) -> Array | None:
    """Gate's (``which`` 0) or up's (1) scales out of those of a fused tensor of ``rows`` rows."""
    if scale is None:
        return None
    require(scale.ndim >= 1, "gate_up_scale", "a single number", "must have a row per expert", "give [E, 1]")
    if scale.ndim == 1 or scale.shape[1] == 1:
        return scale.reshape(len(scale), 1)
    if scale.shape[1] == rows:
        return scale[:, half]
    middle = scale.shape[1] // 2
    return scale[:, which * middle : (which + 1) * middle]


def stored_matrix(codes: Any, scale: Any, dtype: Any, argument: str) -> StoredMatrix:
    """One expert's matrix from its tensors: the format by dtypes, MXFP4 blocks of bytes laid flat."""
    codes, scale = as_numpy(codes, argument), optional(scale, f"{argument}_scale")
    e8m0 = is_e8m0(scale)
    if e8m0 and dtype is None and codes.dtype == np.uint8:
        dtype = "float4_e2m1fn"  # the one MX format whose elements have no byte of their own
    logical = logical_dtype(codes, dtype, argument)
    fmt = weight_format(logical, e8m0, argument)
    if codes.ndim == 3:  # [rows, blocks, bytes of a block]
        codes = codes.reshape(codes.shape[0], -1)
    require(
        codes.ndim == 2,
        argument,
        f"shape {codes.shape}",
        "an expert's matrix must have two axes",
        "check the layout",
    )
    if scale is not None:
        scale = scale.view(np.uint8) if e8m0 else as_float32(np.atleast_1d(scale), f"{argument}_scale")
    return StoredMatrix(fmt, as_codes(codes, logical, argument), scale)


def check_flat_scales(
    scale: Array | None, down: Array | None, experts: int, hidden: int, intermediate: int
) -> None:
    """FP8 scales of the flat layout come together, each per row or per tensor."""
    together = (scale is None) == (down is None)
    rule = "gate/up and down need their scales"
    require(together, "expert_down_weights_scale", "only one of two scales", rule, "give both")
    if scale is None or down is None:
        return
    for name, array, allowed in (
        ("expert_gate_up_weights_scale", scale, ((experts, 2, intermediate), (experts, 2, 1))),
        ("expert_down_weights_scale", down, ((experts, hidden), (experts, 1))),
    ):
        rule = "must be " + " or ".join(map(str, allowed))
        fits = array.shape in allowed
        require(fits, name, f"shape {array.shape}", rule, "give per-row or per-tensor scales")


def stacked_bias(value: Any, argument: str, shape: tuple[int, int]) -> Array | None:
    """A bias of every expert, float32 and contiguous; a list is stacked."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        rows = [as_numpy(v, argument) for v in value]
        lengths = sorted({row.shape for row in rows})
        rule = "must hold one bias of equal length per expert"
        require(len(lengths) == 1, argument, f"shapes {lengths}", rule, "give one bias per expert")
        value = np.stack(rows)
    array = as_numpy(value, argument)
    require(
        array.shape == shape, argument, f"shape {array.shape}", f"must be {shape}", "give one bias per expert"
    )
    return as_float32(array, argument)


def natural_bias(bias: Array, order: BlockOrder) -> Array:
    """Gate or up bias ``[E, P_I, tiles, 4]`` of the Trainium layout in natural order, float32 ``[E, I]``."""
    stored = bias.transpose(0, 2, 1, 3).reshape(len(bias), -1)
    natural = np.zeros((len(bias), order.size), np.float32)
    real = order.gather >= 0
    natural[:, order.gather[real]] = stored[:, real]
    return natural


@dataclass(frozen=True, eq=False)
class PackedExpertTensors:
    """Checked tensors of the Trainium layout; codes are four elements to an integer."""

    fmt: WeightFormat
    gate_up: Array
    gate_up_scale: Array
    down: Array
    down_scale: Array

    def matrices(self, e: int) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        """Gate, up and down of expert ``e``, columns in the order they are stored."""
        gate, up = (self._matrix(self.gate_up[e, :, g], self.gate_up_scale[e, :, g]) for g in (0, 1))
        return gate, up, self._matrix(self.down[e], self.down_scale[e])

    def _matrix(self, codes: Array, scale: Array) -> StoredMatrix:
        # [partitions, tiles, rows] -> [rows, tiles, partitions]; of four in an integer the lowest comes first
        rows = codes.shape[-1]
        packed = np.ascontiguousarray(codes.transpose(2, 1, 0))
        packed = packed.astype(packed.dtype.newbyteorder("<"), copy=False)
        elements = packed.view(np.uint8).reshape(rows, -1)
        stored = elements if self.fmt is WeightFormat.MXFP4 else elements.view(self.fmt.element)
        scales = np.ascontiguousarray(scale.transpose(2, 1, 0)).view(np.uint8).reshape(rows, -1)
        return StoredMatrix(self.fmt, stored, scales)


def packed_experts(
    gate_up: Any, down: Any, gate_up_scale: Any, down_scale: Any, hidden: int, intermediate: int, dtype: Any
) -> PackedExpertTensors:
    """The four tensors of the Trainium layout, their shapes, scales and dtypes checked."""
    size, instead = "expert weights I", "check the axes of the tensors"
    require(intermediate >= 1, size, intermediate, "must be at least 1", instead)
    hidden_order("trainium", hidden)  # refuses what has no such order
    tensors = {
        "expert_gate_up_weights": as_numpy(gate_up, "expert_gate_up_weights"),
        "expert_down_weights": as_numpy(down, "expert_down_weights"),
    }
    for name, value in (
        ("expert_gate_up_weights_scale", gate_up_scale),
        ("expert_down_weights_scale", down_scale),
    ):
        require(value is not None, name, None, "MX weights need scales", "give the E8M0 tensor")
        tensors[name] = scale = as_numpy(value, name)
        kind = f"array of {scale.dtype}"
        require(is_e8m0(scale), name, kind, "must be E8M0 codes in uint8", "give the MX scale tensor")
    codes, down_codes, scales, down_scales = tensors.values()
    experts = len(codes) if codes.ndim else 0
    lanes, tiles_h, tiles_i = intermediate_lanes(intermediate), hidden // TILE, -(-intermediate // TILE)
    shapes = (
        (experts, 128, 2, tiles_h, intermediate),
        (experts, lanes, tiles_i, hidden),
        (experts, 16, 2, tiles_h, intermediate),
        (experts, -(-lanes // 8), tiles_i, hidden),
    )
    for (name, array), shape in zip(tensors.items(), shapes, strict=True):
        right = array.shape == shape
        require(right, name, f"shape {array.shape}", f"must be {shape}", "see the Trainium layout")
    logical = logical_dtype(codes, dtype, "expert_gate_up_weights")
    fmt = weight_format(logical, True, "expert_gate_up_weights")
    container = X4_CONTAINERS.get(logical)
    for name in ("expert_gate_up_weights", "expert_down_weights"):
        own = tensors[name].dtype
        require(
            own == container,
            name,
            f"array of {own}",
            f"{logical} needs {container}",
            "pack four to an integer",
        )
    return PackedExpertTensors(fmt, codes, scales, down_codes, down_scales)
