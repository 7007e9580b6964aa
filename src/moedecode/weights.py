"""The weights of a block as users hold them: checkpoint and Trainium layouts behind one per-expert view.

Owns what belongs together: gate, up and down of an expert, the experts of a rank, the weights of a block.
Knows layouts and formats; knows no backend and never copies more than one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array, as_float32, as_numpy, is_torch
from .formats import BlockOrder, StoredMatrix, WeightFormat, hidden_order, intermediate_order
from .formats.block_order import BLOCK_ORDERS
from .formats.dtypes import is_e8m0
from .gates import require
from .layouts import (
    PackedExpertTensors,
    check_flat_scales,
    half_of_scale,
    halves,
    natural_bias,
    optional,
    packed_experts,
    stacked_bias,
    stored_matrix,
)

__all__ = ["BlockWeights", "ExpertMatrices", "ExpertWeights"]


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """The projections of one expert: gate and up ``[I, H]``, down ``[H, I]``, columns in block order."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The MLP weights of ``num_experts`` experts (those of this rank), read one expert at a time.

    Build it with one of the ``from_*`` constructors. Biases are float32: ``gate_bias`` and ``up_bias``
    ``[E_L, I]``, ``down_bias`` ``[E_L, H]``, each may be None. ``packed``: the tensors of the Trainium layout
    where the weights came as these, so that a backend that computes on them need not copy.
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
    packed: PackedExpertTensors | None = None

    def __post_init__(self) -> None:
        for name, size in (("E_L", self.num_experts), ("H", self.hidden), ("I", self.intermediate)):
            require(
                size >= 1,
                f"expert weights {name}",
                size,
                "must be at least 1",
                "check the axes of the tensors",
            )

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

        ``interleaved``: rows alternate gate, up (gpt-oss); else all gate rows come first. MXFP4 codes are
        uint8 ``[E, 2I, H/2]`` or ``[E, 2I, H/32, 16]``. Scales: E8M0 uint8 ``[E, 2I, H/32]``; or float32
        ``[E, 1]``, ``[E, 2I]``, ``[E, 2I/128, H/128]``; and likewise for down. Biases ``[E, 2I]`` and
        ``[E, H]``. For formats without E8M0 scales ``block_order`` says which activations share a block.
        """
        gate_up, down = as_numpy(gate_up, "gate_up"), as_numpy(down, "down")
        scale, bias = optional(gate_up_scale, "gate_up_scale"), optional(gate_up_bias, "gate_up_bias")
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
        gate, up = halves(interleaved, rows)
        return cls.from_experts(
            gate_up[:, gate],
            gate_up[:, up],
            down,
            gate_scale=half_of_scale(scale, gate, rows, 0),
            up_scale=half_of_scale(scale, up, rows, 1),
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
        """One tensor per expert, or stacked: gate and up ``[I, H]``, down ``[H, I]``, each a sequence over E.

        Scales per expert as in :class:`~moedecode.formats.StoredMatrix`; biases ``[I]``, ``[I]``, ``[H]``.
        """
        gate, up, down = (_per_expert(v, n) for n, v in (("gate", gate), ("up", up), ("down", down)))
        count = len(gate)
        require(
            count >= 1,
            "gate",
            f"{count} experts",
            "must name at least one expert",
            "give this rank's experts",
        )
        scales = {"gate": gate_scale, "up": up_scale, "down": down_scale}
        sources: dict[str, tuple[Any, Any]] = {}
        for name, codes in (("gate", gate), ("up", up), ("down", down)):
            require(
                len(codes) == count,
                name,
                f"{len(codes)} experts",
                f"gate has {count}",
                "give every expert's tensor",
            )
            scale = None if scales[name] is None else _per_expert(scales[name], f"{name}_scale")
            require(
                scale is None or len(scale) == count,
                f"{name}_scale",
                "one scale tensor is missing",
                f"there are {count} experts",
                "give one per expert",
            )
            sources[name] = codes, scale

        def matrix(name: str, e: int) -> StoredMatrix:
            codes, scale = sources[name]
            return stored_matrix(codes[e], None if scale is None else scale[e], dtype, name)

        def expert(e: int) -> ExpertMatrices:
            return ExpertMatrices(matrix("gate", e), matrix("up", e), matrix("down", e))

        first = expert(0)
        intermediate, hidden = first.gate.shape
        _check_matrices(expert, count, first.gate.fmt, hidden, intermediate)
        biases: dict[str, Any] = {
            "gate_bias": stacked_bias(gate_bias, "gate_bias", (count, intermediate)),
            "up_bias": stacked_bias(up_bias, "up_bias", (count, intermediate)),
            "down_bias": stacked_bias(down_bias, "down_bias", (count, hidden)),
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
        """The flat functions' plain layout: gate_up ``[E, H, 2, I]``, down ``[E, I, H]``.

        Biases ``[E, 2, I]`` and ``[E, H]``. FP8 scales: ``[E, 2, I]`` and ``[E, H]`` per row, ``[E, 2, 1]``
        and ``[E, 1]`` per tensor.
        """
        gate_up, down = as_numpy(gate_up, "expert_gate_up_weights"), as_numpy(down, "expert_down_weights")
        scale = optional(gate_up_scale, "expert_gate_up_weights_scale")
        bias = optional(gate_up_bias, "expert_gate_up_bias")
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
        check_flat_scales(
            scale, optional(down_scale, "expert_down_weights_scale"), experts, hidden, intermediate
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

        - gate_up ``[E, 128, 2, H/512, I]``, its scales ``[E, 16, 2, H/512, I]``;
        - down ``[E, P_I, ceil(I/512), H]``, its scales ``[E, ceil(P_I/8), ceil(I/512), H]``;
        - gate_up_bias ``[E, P_I, 2, ceil(I/512), 4]``, down_bias ``[E, H]``.
        """
        packed = packed_experts(gate_up, down, gate_up_scale, down_scale, hidden, intermediate, dtype)
        order_h, order_i = hidden_order("trainium", hidden), intermediate_order("trainium", intermediate)
        experts, lanes, _ = packed.down.shape[:3]
        bias = optional(gate_up_bias, "expert_gate_up_bias")
        if bias is not None:
            want = (experts, lanes, 2, -(-intermediate // 512), 4)
            require(
                bias.shape == want,
                "expert_gate_up_bias",
                f"shape {bias.shape}",
                f"must be {want}",
                "see the Trainium layout",
            )
            bias = as_float32(bias, "expert_gate_up_bias")

        def expert(e: int) -> ExpertMatrices:
            return ExpertMatrices(*packed.matrices(e))

        return cls(
            experts,
            hidden,
            intermediate,
            packed.fmt,
            order_h,
            order_i,
            expert,
            gate_bias=None if bias is None else natural_bias(bias[:, :, 0], order_i),
            up_bias=None if bias is None else natural_bias(bias[:, :, 1], order_i),
            down_bias=stacked_bias(down_bias, "expert_down_bias", (experts, hidden)),
            packed=packed,
        )


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """All weights of one block.

    - ``gamma [H]`` (None: ones), ``router [E, H]`` (rows are experts, as checkpoints store it),
      ``router_bias [E]``, ``selection_bias [E]`` (added to the selection scores only).
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


def _per_expert(values: Any, argument: str) -> Any:
    """``values`` as something that is counted and read expert by expert."""
    if isinstance(values, np.ndarray) or is_torch(values):
        values = as_numpy(values, argument)
        stacked = values.ndim > 0
    else:
        stacked = hasattr(values, "__len__") and hasattr(values, "__getitem__")
        stacked = stacked and not isinstance(values, Mapping)
    kind = type(values).__name__
    require(stacked, argument, kind, "must be a sequence over experts", "stack them")
    return values
