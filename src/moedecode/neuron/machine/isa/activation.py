"""The Scalar engine's activation instruction: scale, bias, a function, and a row sum kept in registers.

Owns its operand rules, its cost and the reduction registers. The functions themselves live in ops.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from ....arrays import Array
from ..cost import compute
from ..errors import ConstraintViolation
from ..operands import (
    Scalar,
    elements,
    load_float,
    load_vector,
    on_chip,
    refuse_x4,
    same_elements,
    start_partition,
    store_flat,
    vector_operand,
)
from ..ops import Op
from ..program import Program, current
from ..tensor import Tensor
from .constants import reduce_cmd as ReduceCommand

__all__ = ["activation", "activation_reduce"]

_READ_REGISTERS = 64  # cycles to write the reduction registers out (NeuronDevice Architecture Guide)

# The Scalar engine's 128 reduction registers, one row per partition, of each running program.
_registers: WeakKeyDictionary[Program, Array] = WeakKeyDictionary()


def activation(
    dst: Tensor,
    op: Op,
    data: Tensor,
    bias: Tensor | Scalar | None = None,
    scale: Tensor | Scalar = 1.0,
    reduce_op: Op | None = None,
    reduce_res: Tensor | None = None,
    reduce_cmd: ReduceCommand = ReduceCommand.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias) on the Scalar engine, with an optional row sum in its registers.

    ``scale`` is a constant or float32 ``[P, 1]``, ``bias`` a constant (from trn2) or ``[P, 1]``.
    ``reduce_cmd`` says what the result does to the registers, ``reduce_res [P, 1]`` receives them afterwards.
    """
    on_chip("activation", {"dst": dst, "data": data})
    same_elements("activation", dst, data=data)
    refuse_x4("activation", dst=dst, data=data)
    if op.kind != "unary":
        raise ConstraintViolation(
            "activation", "op", f"is {op}: must be an activation function of one argument"
        )
    scales = vector_operand("activation", "scale", scale, data.shape[0])
    for vector in scales:
        if vector.dtype != np.float32:
            raise ConstraintViolation("activation", "scale", f"is {vector.dtype}: must be float32")
    biases = () if bias is None else vector_operand("activation", "bias", bias, data.shape[0])
    prog = current()
    if prog.chip.generation < 3 and bias is not None and not biases and bias != 0:
        raise ConstraintViolation(
            "activation",
            "bias",
            f"is the constant {bias}: {prog.chip.name} takes a [P, 1] tile only; memset one",
        )
    sums = reduce_cmd in (ReduceCommand.reduce, ReduceCommand.reset_reduce)
    if sums and (reduce_op is None or reduce_op.name != "add"):
        raise ConstraintViolation("activation", "reduce_op", f"is {reduce_op}: must be nl.add")
    outputs: tuple[Tensor, ...] = (dst,)
    if reduce_res is not None:
        vector_operand("activation", "reduce_res", reduce_res, data.shape[0])
        outputs += (reduce_res,)
    cycles = max(elements(data), prog.chip.minimum_cycles) + (
        _READ_REGISTERS if reduce_res is not None else 0
    )
    if not prog.issue(
        "activation",
        engine="scalar",
        dst=outputs,
        sources=(data, *scales, *biases),
        cost=compute(prog.chip, "scalar", cycles),
    ):
        return
    with np.errstate(all="ignore"):
        value = load_float(prog, data)
        if scales or scale != 1.0:
            value = value * load_vector(prog, scale)
        if bias is not None:
            value = value + load_vector(prog, bias)
        value = op(value)
        _reduce_rows(prog, start_partition(data), value, reduce_res, reduce_cmd)
        store_flat(prog, dst, value)


def _reduce_rows(
    prog: Program, first: int, value: Array, reduce_res: Tensor | None, command: ReduceCommand
) -> None:
    """Sum ``value`` into the registers of its lanes, which start at ``first``, and read them out."""
    registers = _registers.setdefault(prog, np.zeros((prog.chip.partitions, 1), np.float32))
    rows = registers[first : first + value.shape[0]]
    if command in (ReduceCommand.reset, ReduceCommand.reset_reduce):
        registers[:] = 0
    if command in (ReduceCommand.reduce, ReduceCommand.reset_reduce):
        rows += value.sum(axis=1, keepdims=True, dtype=np.float32)
    if reduce_res is not None:
        store_flat(prog, reduce_res, rows.copy())


def activation_reduce(
    dst: Tensor,
    op: Op,
    data: Tensor,
    reduce_op: Op,
    reduce_res: Tensor,
    bias: Tensor | Scalar | None = None,
    scale: Tensor | Scalar = 1.0,
    name: str | None = None,
) -> None:
    """:func:`activation` that resets the registers, sums the row and writes it to ``reduce_res [P, 1]``."""
    activation(dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCommand.reset_reduce)
