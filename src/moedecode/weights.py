"""The weights of a block as users hold them: checkpoint and Trainium layouts behind one per-expert view.

Owns layouts (where gate, up and down of expert e lie in which tensor). Knows formats; knows no backend and never
copies more than one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array, as_numpy
from .formats import BlockOrder, StoredMatrix, WeightFormat, hidden_order, intermediate_order
from .formats.block_order import BLOCK_ORDERS, intermediate_lanes
from .formats.dtypes import X4_CONTAINERS, as_codes, is_e8m0, logical_dtype, weight_format
from .gates import require

__all__ = ["BlockWeights", "ExpertMatrices", "ExpertWeights"]


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """The three projections of one expert: gate and up ``[I, H]``, down ``[H, I]``, columns in block order."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The MLP weights of ``num_experts`` experts (those of this rank), read one expert at a time.

    Build it with one of the ``from_*`` constructors. Biases are float32: ``gate_bias`` and ``up_bias``
    ``[E_L, I]``, ``down_bias`` ``[E_L, H]``, each may be None.
    """

    num_experts: int
    hidden: int
    intermediate: int
    fmt: WeightFormat
    hidden_order: BlockOrder
    intermediate_order: BlockOrder
    expert: Callable[[int], ExpertMatrices]
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None

    def __post_init__(self) -> None:
        for name, size in (("E_L", self.num_experts), ("H", self.hidden), ("I", self.intermediate)):
            require(size >= 1, f"expert weights {name}", size, "must be at least 1", "check the axes of the tensors")

    @property
    def block_order(self) -> str:
        """ "contiguous" or "trainium"."""
        return self.hidden_order.name

    @classmethod
    def from_rows(
        cls,
        gate_up: Any,
        down: Any,
        *,
        gate_up_scale: Any = None,
        down_scale: Any = None,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        interleaved: bool = False,
        dtype: Any = None,
        block_order: str = "contiguous",
    ) -> ExpertWeights:
        """Stacked checkpoint tensors: gate_up ``[E, 2I, H]``, down ``[E, H, I]``.

        ``interleaved``: rows alternate gate, up (gpt-oss); else all gate rows come first. MXFP4 codes are uint8
        ``[E, 2I, H/2]`` or ``[E, 2I, H/32, 16]``. Scales: E8M0 uint8 ``[E, 2I, H/32]``; or float32 ``[E, 1]``,
        ``[E, 2I]``, ``[E, 2I/128, H/128]``; and likewise for down. Biases ``[E, 2I]`` and ``[E, H]``. For formats
        without E8M0 scales ``block_order`` says which activations share a block.
        """
        gate_up, down = as_numpy(gate_up, "gate_up"), as_numpy(down, "down")
        scale, bias = _optional(gate_up_scale, "gate_up_scale"), _optional(gate_up_bias, "gate_up_bias")
        require(
            gate_up.ndim >= 3,
            "gate_up",
            f"shape {gate_up.shape}",
            "must be [E, 2I, H]",
            "stack the experts first",
        )
        rows = gate_up.shape[1]
        require(
            rows % 2 == 0,
            "gate_up",
            f"shape {gate_up.shape}",
            "must have 2I rows",
            "give gate and up together",
        )
        if scale is not None and scale.ndim == 3 and not is_e8m0(scale):
            fits = not interleaved and rows % 256 == 0
            require(
                fits,
                "gate_up_scale",
                f"shape {scale.shape}",
                "128x128 block scales need I % 128 == 0 and gate rows first",
                "use from_experts with gate and up apart",
            )
        if bias is not None:
            want = (len(gate_up), rows)
            require(
                bias.shape == want,
                "gate_up_bias",
                f"shape {bias.shape}",
                f"must be [E, 2I] = {want}",
                "check the axes",
            )
        gate, up = _halves(interleaved, rows)
        return cls.from_experts(
            gate_up[:, gate],
            gate_up[:, up],
            down,
            gate_scale=_half_of_scale(scale, gate, rows, 0),
            up_scale=_half_of_scale(scale, up, rows, 1),
            down_scale=down_scale,
            gate_bias=None if bias is None else bias[:, gate],
            up_bias=None if bias is None else bias[:, up],
            down_bias=down_bias,
            dtype=dtype,
            block_order=block_order,
        )

    @classmethod
    def from_experts(
        cls,
        gate: Sequence[Any] | Any,
        up: Sequence[Any] | Any,
        down: Sequence[Any] | Any,
        *,
        gate_scale: Any = None,
        up_scale: Any = None,
        down_scale: Any = None,
        gate_bias: Any = None,
        up_bias: Any = None,
        down_bias: Any = None,
        dtype: Any = None,
        block_order: str = "contiguous",
    ) -> ExpertWeights:
        """One tensor per expert (or stacked): gate and up ``[I, H]``, down ``[H, I]``, each a sequence over E.

        Scales per expert as in :class:`~moedecode.formats.StoredMatrix`; biases ``[I]``, ``[I]``, ``[H]``.
        """
        for name, codes in (("gate", gate), ("up", up), ("down", down)):
            require(
                hasattr(codes, "__len__"),
                name,
                type(codes).__name__,
                "must be a sequence over experts",
                "stack them",
            )
        count = len(gate)
        require(
            count >= 1,
            "gate",
            f"{count} experts",
            "must name at least one expert",
            "give this rank's experts",
        )
        sources = {"gate": (gate, gate_scale), "up": (up, up_scale), "down": (down, down_scale)}
        for name, (codes, scale) in sources.items():
            require(
                len(codes) == count,
                name,
                f"{len(codes)} experts",
                f"gate has {count}",
                "give every expert's tensor",
            )
            given = scale is None or len(scale) == count
            require(
                given,
                f"{name}_scale",
                "one scale tensor is missing",
                f"there are {count} experts",
                "give one per expert",
            )

        def matrix(name: str, e: int) -> StoredMatrix:
            codes, scale = sources[name]
            return _stored(codes[e], None if scale is None else scale[e], dtype, name)

        def expert(e: int) -> ExpertMatrices:
            return ExpertMatrices(matrix("gate", e), matrix("up", e), matrix("down", e))

        first = expert(0)
        intermediate, hidden = first.gate.shape
        _check_matrices(expert, count, first.gate.fmt, hidden, intermediate)
        biases = {
            "gate_bias": _bias(gate_bias, "gate_bias", (count, intermediate)),
            "up_bias": _bias(up_bias, "up_bias", (count, intermediate)),
            "down_bias": _bias(down_bias, "down_bias", (count, hidden)),
        }
        if first.gate.fmt.is_mx:
            require(
                block_order == "contiguous",
                "block_order",
                repr(block_order),
                "MX checkpoints store blocks of consecutive elements",
                "use from_trainium for the packed Trainium layout",
            )
        ordered: Callable[[int], ExpertMatrices] = expert
        if block_order == "trainium":
            ordered = _reordered(expert, hidden, intermediate)
            ordered(0)  # what has no such order is refused now
        order_h, order_i = hidden_order(block_order, hidden), intermediate_order(block_order, intermediate)
        return cls(count, hidden, intermediate, first.gate.fmt, order_h, order_i, ordered, **biases)

    @classmethod
    def from_flat(
        cls,
        gate_up: Any,
        down: Any,
        *,
        gate_up_scale: Any = None,
        down_scale: Any = None,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        dtype: Any = None,
        block_order: str = "contiguous",
    ) -> ExpertWeights:
        """The flat functions' plain layout: gate_up ``[E, H, 2, I]``, down ``[E, I, H]``, biases ``[E, 2, I]``, ``[E, H]``.

        FP8 scales: ``[E, 2, I]`` and ``[E, H]`` per row, ``[E, 2, 1]`` and ``[E, 1]`` per tensor.
        """
        gate_up, down = as_numpy(gate_up, "expert_gate_up_weights"), as_numpy(down, "expert_down_weights")
        scale = _optional(gate_up_scale, "expert_gate_up_weights_scale")
        bias = _optional(gate_up_bias, "expert_gate_up_bias")
        ok = gate_up.ndim == 4 and gate_up.shape[2] == 2
        require(
            ok,
            "expert_gate_up_weights",
            f"shape {gate_up.shape}",
            "must be [E, H, 2, I]",
            "check the axis order",
        )
        experts, hidden, _, intermediate = gate_up.shape
        want = (experts, intermediate, hidden)
        require(
            down.shape == want,
            "expert_down_weights",
            f"shape {down.shape}",
            f"must be [E, I, H] = {want}",
            "check the axis order",
        )
        _check_flat_scales(
            scale, _optional(down_scale, "expert_down_weights_scale"), experts, hidden, intermediate
        )
        if bias is not None:
            want = (experts, 2, intermediate)
            require(
                bias.shape == want,
                "expert_gate_up_bias",
                f"shape {bias.shape}",
                f"must be [E, 2, I] = {want}",
                "check the axes",
            )
        return cls.from_experts(
            gate_up[:, :, 0].swapaxes(1, 2),
            gate_up[:, :, 1].swapaxes(1, 2),
            down.swapaxes(1, 2),
            gate_scale=None if scale is None else scale[:, 0],
            up_scale=None if scale is None else scale[:, 1],
            down_scale=down_scale,
            gate_bias=None if bias is None else bias[:, 0],
            up_bias=None if bias is None else bias[:, 1],
            down_bias=down_bias,
            dtype=dtype,
            block_order=block_order,
        )

    @classmethod
    def from_trainium(
        cls,
        gate_up: Any,
        down: Any,
        gate_up_scale: Any,
        down_scale: Any,
        *,
        hidden: int,
        intermediate: int,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        dtype: Any = None,
    ) -> ExpertWeights:
        """The packed MX layout of the Trainium kernel (four elements to an integer, see ``docs/layouts.md``).

        gate_up ``[E, 128, 2, H/512, I]``, its scales ``[E, 16, 2, H/512, I]``; down ``[E, P_I, ceil(I/512), H]``, its
        scales ``[E, ceil(P_I/8), ceil(I/512), H]``; gate_up_bias ``[E, P_I, 2, ceil(I/512), 4]``; down_bias ``[E, H]``.
        """
        gate_up, down = as_numpy(gate_up, "expert_gate_up_weights"), as_numpy(down, "expert_down_weights")
        require(
            gate_up_scale is not None,
            "expert_gate_up_weights_scale",
            None,
            "MX weights need scales",
            "give the E8M0 tensor",
        )
        require(
            down_scale is not None,
            "expert_down_weights_scale",
            None,
            "MX weights need scales",
            "give the E8M0 tensor",
        )
        gate_up_scale = as_numpy(gate_up_scale, "expert_gate_up_weights_scale")
        down_scale = as_numpy(down_scale, "expert_down_weights_scale")
        for name, array in (("expert_gate_up_weights", gate_up), ("expert_down_weights", down)):
            require(
                array.ndim > 1,
                name,
                f"shape {array.shape}",
                "must be [E, 128 or P_I, ...]",
                "see the Trainium layout",
            )
        require(
            intermediate >= 1, "intermediate", intermediate, "must be at least 1", "name the expert's width I"
        )
        experts, lanes, tiles = gate_up.shape[0], intermediate_lanes(intermediate), -(-intermediate // 512)
        order_h, order_i = hidden_order("trainium", hidden), intermediate_order("trainium", intermediate)
        bias = _optional(gate_up_bias, "expert_gate_up_bias")
        for name, array, want in (
            ("expert_gate_up_weights", gate_up, (experts, 128, 2, hidden // 512, intermediate)),
            ("expert_gate_up_weights_scale", gate_up_scale, (experts, 16, 2, hidden // 512, intermediate)),
            ("expert_down_weights", down, (experts, lanes, tiles, hidden)),
            ("expert_down_weights_scale", down_scale, (experts, -(-lanes // 8), tiles, hidden)),
            ("expert_gate_up_bias", bias, (experts, lanes, 2, tiles, 4)),
        ):
            if array is not None:
                require(
                    array.shape == want,
                    name,
                    f"shape {array.shape}",
                    f"must be {want}",
                    "see the Trainium layout",
                )
        for name, array in (
            ("expert_gate_up_weights_scale", gate_up_scale),
            ("expert_down_weights_scale", down_scale),
        ):
            require(
                is_e8m0(array),
                name,
                f"array of {array.dtype}",
                "must be E8M0 codes in uint8",
                "give the MX scale tensor",
            )
        logical = logical_dtype(gate_up, dtype, "expert_gate_up_weights")
        fmt = weight_format(logical, True, "expert_gate_up_weights")
        for name, array in (("expert_gate_up_weights", gate_up), ("expert_down_weights", down)):
            container = X4_CONTAINERS.get(logical)
            require(
                array.dtype == container,
                name,
                f"array of {array.dtype}",
                f"{logical} needs {container}",
                "pack four to an integer",
            )

        def matrix(codes: Array, scale: Array) -> StoredMatrix:
            # [partitions, tiles, rows] -> [rows, tiles, partitions]: four elements to an integer, first one lowest.
            rows = codes.shape[-1]
            packed = np.ascontiguousarray(codes.transpose(2, 1, 0)).astype(
                container.newbyteorder("<"), copy=False
            )  # type: ignore[union-attr]
            elements = packed.view(np.uint8).reshape(rows, -1)
            stored = elements if fmt is WeightFormat.MXFP4 else elements.view(fmt.element)
            scales = np.ascontiguousarray(scale.transpose(2, 1, 0)).view(np.uint8).reshape(rows, -1)
            return StoredMatrix(fmt, stored, scales)

        def expert(e: int) -> ExpertMatrices:
            gate, up = (matrix(gate_up[e, :, g], gate_up_scale[e, :, g]) for g in (0, 1))
            return ExpertMatrices(gate, up, matrix(down[e], down_scale[e]))

        biases = {
            "gate_bias": None if bias is None else _natural_bias(bias[:, :, 0], order_i),
            "up_bias": None if bias is None else _natural_bias(bias[:, :, 1], order_i),
            "down_bias": _bias(down_bias, "expert_down_bias", (experts, hidden)),
        }
        return cls(experts, hidden, intermediate, fmt, order_h, order_i, expert, **biases)


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """All weights of one block.

    - ``gamma [H]`` (None: ones), ``router [E, H]`` (rows are experts, as checkpoints store it), ``router_bias [E]``,
      ``selection_bias [E]`` (added to the selection scores only).
    - ``experts``: an :class:`ExpertWeights`. ``shared``: the same with one expert. ``shared_gate [H]``.
    - ``block_order`` must be that of ``experts``; it says which 32 activations share a block.
    """

    router: Any
    experts: ExpertWeights
    gamma: Any = None
    router_bias: Any = None
    selection_bias: Any = None
    shared: ExpertWeights | None = None
    shared_gate: Any = None
    block_order: str | None = None

    def __post_init__(self) -> None:
        order = self.block_order
        if order is not None:
            require(
                order in BLOCK_ORDERS,
                "block_order",
                repr(order),
                "is not known",
                f"choose one of {', '.join(BLOCK_ORDERS)}",
            )
            same = order == self.experts.block_order
            require(
                same,
                "block_order",
                repr(order),
                f"the experts are stored {self.experts.block_order}",
                "name their order",
            )


def _optional(value: Any, argument: str) -> Array | None:
    return None if value is None else as_numpy(value, argument)


def _halves(interleaved: bool, rows: int) -> tuple[slice, slice]:
    """The gate rows and the up rows of a fused tensor."""
    return (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(0, rows // 2), slice(rows // 2, None))
    )


def _half_of_scale(scale: Array | None, half: slice, rows: int, which: int) -> Array | None:
    if scale is None or scale.ndim < 2 or scale.shape[1] == 1:
        return scale if scale is None or scale.ndim > 1 else scale[:, None]
    if scale.shape[1] == rows:
        return scale[:, half]
    middle = scale.shape[1] // 2
    return scale[:, which * middle : (which + 1) * middle]


def _stored(codes: Any, scale: Any, dtype: Any, argument: str) -> StoredMatrix:
    codes, scale = as_numpy(codes, argument), _optional(scale, f"{argument}_scale")
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
        scale = scale.view(np.uint8) if e8m0 else np.atleast_1d(scale).astype(np.float32)
    return StoredMatrix(fmt, as_codes(codes, logical, argument), scale)


def _check_matrices(
    expert: Callable[[int], ExpertMatrices], count: int, fmt: WeightFormat, hidden: int, intermediate: int
) -> None:
    for e in range(count):
        m = expert(e)
        for name, matrix, want in (
            ("gate", m.gate, (intermediate, hidden)),
            ("up", m.up, (intermediate, hidden)),
            ("down", m.down, (hidden, intermediate)),
        ):
            require(
                matrix.shape == want,
                f"{name}[{e}]",
                f"shape {matrix.shape}",
                f"must be {want}",
                "check the layout",
            )
            require(
                matrix.fmt is fmt,
                f"{name}[{e}]",
                matrix.fmt.value,
                f"the first expert is {fmt.value}",
                "store all experts alike",
            )


def _check_flat_scales(
    scale: Array | None, down: Array | None, experts: int, hidden: int, intermediate: int
) -> None:
    both = (scale is None) == (down is None)
    require(
        both,
        "expert_down_weights_scale",
        "only one of two scales",
        "gate/up and down need their scales",
        "give both",
    )
    if scale is None or down is None:
        return
    for name, array, allowed in (
        ("expert_gate_up_weights_scale", scale, ((experts, 2, intermediate), (experts, 2, 1))),
        ("expert_down_weights_scale", down, ((experts, hidden), (experts, 1))),
    ):
        rule = "must be " + " or ".join(map(str, allowed))
        require(
            array.shape in allowed, name, f"shape {array.shape}", rule, "give per-row or per-tensor scales"
        )


def _bias(value: Any, argument: str, shape: tuple[int, int]) -> Array | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        value = np.stack([as_numpy(v, argument) for v in value])
    array = as_numpy(value, argument)
    require(
        array.shape == shape, argument, f"shape {array.shape}", f"must be {shape}", "give one bias per expert"
    )
    return np.ascontiguousarray(array, np.float32)


def _natural_bias(bias: Array, order: BlockOrder) -> Array:
    """Gate or up bias ``[E, P_I, tiles, 4]`` of the Trainium layout in natural order, float32 ``[E, I]``."""
    stored = bias.transpose(0, 2, 1, 3).reshape(len(bias), -1)
    natural = np.zeros((len(bias), order.size), np.float32)
    real = order.gather >= 0
    natural[:, order.gather[real]] = stored[:, real]
    return natural


def _reordered(
    expert: Callable[[int], ExpertMatrices], hidden: int, intermediate: int
) -> Callable[[int], ExpertMatrices]:
    """Columns brought into the Trainium order, for formats whose scales do not depend on it."""
    order_h, order_i = hidden_order("trainium", hidden), intermediate_order("trainium", intermediate)

    def columns(m: StoredMatrix, order: BlockOrder) -> StoredMatrix:
        blocked = m.scale is not None and m.scale.ndim == 2
        require(
            not blocked,
            "block_order",
            "'trainium'",
            "128x128 block scales follow the natural order",
            "use 'contiguous'",
        )
        return StoredMatrix(
            m.fmt, order.apply(m.codes.view(f"u{m.codes.itemsize}")).view(m.codes.dtype), m.scale
        )

    def reordered(e: int) -> ExpertMatrices:
        m = expert(e)
        return ExpertMatrices(columns(m.gate, order_h), columns(m.up, order_h), columns(m.down, order_i))

    return reordered
