"""Expert weights as the flat functions take them: plain tensors, Trainium MX tensors, or a packed handle.

Owns the recognition of a layout by its rank, and the handle class. Nothing is cached by identity: a handle is
the only way to keep packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..arrays import as_numpy, check_single
from ..backends import Backend
from ..backends import backend as find_backend
from ..formats.block_order import TILE
from ..gates import invalid, require
from ..weights import ExpertMatrices, ExpertWeights
from . import arguments


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeights:
    """Expert weights in the layout of one backend, made by :func:`pack`.

    ``weights`` describes them (sizes, format, block order, biases), ``packed`` is the backend's own object.
    Scales and biases are inside, so a call that gets a handle must not be given them again.
    """

    backend: str
    weights: ExpertWeights
    packed: Any

    def __repr__(self) -> str:
        w = self.weights
        sizes = f"experts={w.num_experts}, hidden={w.hidden}, intermediate={w.intermediate}"
        return f"<PackedWeights for {self.backend}: {sizes}, {w.fmt.value}, {w.block_order} blocks>"


def pack(
    expert_gate_up_weights: Any,
    expert_down_weights: Any,
    expert_gate_up_weights_scale: Any = None,
    expert_down_weights_scale: Any = None,
    expert_gate_up_bias: Any = None,
    expert_down_bias: Any = None,
    *,
    expert_weight_dtype: Any = None,
    block_order: str | None = None,
    backend: str = "cpu",
) -> PackedWeights:
    """Pack expert weights once; the flat functions take the handle in place of ``expert_gate_up_weights``.

    Shapes are those of :func:`moedecode.moe_block_tkg`: plain ``[E_L, H, 2, I]`` and ``[E_L, I, H]``, or
    Trainium MX ``[E_L, 128, 2, H/512, I]`` and ``[E_L, P_I, ceil(I/512), H]`` with their scales.
    ``block_order`` ("contiguous" or "trainium") says which 32 activations share a block; MX weights bring
    their own. Raises :class:`~moedecode.gates.InvalidInput` for malformed weights.
    """
    check_single(expert_weight_dtype=expert_weight_dtype, block_order=block_order, backend=backend)
    able = find_backend(backend)
    weights = expert_weights(
        expert_gate_up_weights, expert_down_weights, expert_gate_up_weights_scale, expert_down_weights_scale,
        expert_gate_up_bias, expert_down_bias, dtype=expert_weight_dtype, block_order=block_order,
    )  # fmt: skip
    fresh = not isinstance(expert_gate_up_weights, PackedWeights)
    require(fresh, "expert_gate_up_weights", "PackedWeights", "is packed already", "use the handle you have")
    return PackedWeights(able.name, replace(weights, expert=_gone, packed=None), able.pack(weights))


def expert_weights(
    gate_up: Any,
    down: Any,
    gate_up_scale: Any,
    down_scale: Any,
    gate_up_bias: Any,
    down_bias: Any,
    *,
    dtype: Any,
    block_order: str | None,
) -> ExpertWeights:
    """The per-expert view of plain or Trainium MX tensors, or the description of a handle's weights."""
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    if isinstance(gate_up, PackedWeights):
        parts = {
            f"expert_{name.replace('scale', 'weights_scale')}": v for name, v in (scales | biases).items()
        }
        _check_handle_alone(gate_up, down, parts | {"expert_weight_dtype": dtype}, block_order)
        return gate_up.weights
    require(
        down is not None, "expert_down_weights", None, "only a packed handle does without", "give the tensor"
    )
    codes = as_numpy(gate_up, "expert_gate_up_weights")
    if codes.ndim == 4:
        order = "contiguous" if block_order is None else block_order
        return ExpertWeights.from_flat(gate_up, down, **scales, **biases, dtype=dtype, block_order=order)
    rule = "must be [E_L, H, 2, I] or MX [E_L, 128, 2, H/512, I]"
    require(codes.ndim == 5, "expert_gate_up_weights", f"shape {codes.shape}", rule, "check the layout")
    own = block_order in (None, "trainium")
    require(
        own, "block_order", repr(block_order), "these weights are stored in Trainium order", "leave it None"
    )
    hidden, intermediate = codes.shape[3] * TILE, codes.shape[4]
    return ExpertWeights.from_trainium(
        gate_up, down, **scales, **biases, dtype=dtype, hidden=hidden, intermediate=intermediate
    )


def packed_for(able: Backend, gate_up: Any, weights: ExpertWeights) -> Any:
    """``weights`` in the layout of the backend ``able``: the handle's, or packed now."""
    return gate_up.packed if isinstance(gate_up, PackedWeights) else able.pack(weights)


def check_handle_backend(able: Backend, gate_up: Any) -> None:
    """A handle serves the backend it was packed for."""
    if isinstance(gate_up, PackedWeights):
        made, same = gate_up.backend, gate_up.backend == able.name
        require(
            same, "backend", repr(able.name), f"the weights are packed for {made!r}", f"pass backend={made!r}"
        )


def shared_expert(
    hidden: int, gate: Any, up: Any, down: Any, gate_bias: Any, up_bias: Any, down_bias: Any
) -> ExpertWeights | None:
    """The shared expert: gate and up ``[H, I_s]``, down ``[I_s, H]``, biases; None when all are None."""
    tensors = {"shared_expert_gate_w": gate, "shared_expert_up_w": up, "shared_expert_down_w": down}
    missing = [name for name, value in tensors.items() if value is None]
    if len(missing) == len(tensors):
        for name, bias in (("gate", gate_bias), ("up", up_bias), ("down", down_bias)):
            rule, way_out = "there is no shared expert", "give the three shared_expert_*_w too"
            require(bias is None, f"shared_expert_{name}_bias", "given", rule, way_out)
        return None
    if missing:
        raise invalid(missing[0], None, "a shared expert needs gate, up and down", "give all three or none")
    g = arguments.matrix(gate, "shared_expert_gate_w", hidden, None, "[H, I_s]")
    width = g.shape[1]
    u = arguments.matrix(up, "shared_expert_up_w", hidden, width, "[H, I_s]")
    d = arguments.matrix(down, "shared_expert_down_w", width, hidden, "[I_s, H]")
    bg = arguments.vector(gate_bias, "shared_expert_gate_bias", width)
    bu = arguments.vector(up_bias, "shared_expert_up_bias", width)
    bd = arguments.vector(down_bias, "shared_expert_down_bias", hidden)
    bg, bu, bd = (None if bias is None else bias[None] for bias in (bg, bu, bd))  # one expert
    return ExpertWeights.from_experts([g.T], [u.T], [d.T], gate_bias=bg, up_bias=bu, down_bias=bd)


def _check_handle_alone(
    handle: PackedWeights, down: Any, parts: dict[str, Any], block_order: str | None
) -> None:
    alone = down is None or down is handle
    require(alone, "expert_down_weights", type(down).__name__, "the handle holds it", "pass None")
    for argument, value in parts.items():
        require(
            value is None, argument, "given", "the handle holds it", "pass None, or pack the weights anew"
        )
    own, same = handle.weights.block_order, block_order in (None, handle.weights.block_order)
    require(same, "block_order", repr(block_order), f"the handle is {own}", "leave it None")


def _gone(expert: int) -> ExpertMatrices:
    raise invalid(
        "experts", expert, "a handle keeps no stored matrices", "use the tensors it was packed from"
    )
