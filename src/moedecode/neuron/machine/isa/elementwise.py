"""Elementwise and reducing instructions of the Vector engine, some of which Scalar and GpSimd do as well.

Owns their arithmetic (float32, cast on write), operand rules and costs. Knows nothing of matmul, DMA or
cores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....arrays import Array
from ..cost import Cost, compute, gpsimd
from ..dtypes import is_x4
from ..errors import ConstraintViolation
from ..operands import (
    Scalar,
    elements,
    engines_for,
    in_psum,
    is_16_bit,
    least_loaded,
    load_float,
    load_vector,
    on_chip,
    refuse_x4,
    same_elements,
    store_flat,
    vector_operand,
)
from ..ops import Op
from ..program import Program, current
from ..tensor import Tensor
from .constants import engine as Engine

__all__ = [
    "memset",
    "reciprocal",
    "scalar_tensor_tensor",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
]


def _cost(prog: Program, engine: str, cycles: float) -> Cost:
    return gpsimd(prog.chip, cycles) if engine == "gpsimd" else compute(prog.chip, engine, cycles)


def _fast_cycles(prog: Program, engine: str, dst: Tensor, *sources: Tensor) -> float:
    """Cycles of a copy or tensor_scalar: N, or less in the 16-bit modes of newer chips.

    Vector, from trn2: 4x when all is 16-bit, in SBUF and contiguous, 2x when one of the last two fails.
    Scalar, from trn3: 2x for 16-bit. Source: Trainium2 and Trainium3 architecture guides.
    """
    count = elements(dst)
    if not is_16_bit(dst, *sources):
        return count
    if engine == "scalar":
        return count / 2 if prog.chip.scalar_fast_modes else count
    if engine != "vector" or not prog.chip.has_fast_modes:
        return count
    in_sbuf = _all_sbuf(dst, *sources)
    contiguous = all(tensor.strides[-1] == 1 or tensor.shape[-1] == 1 for tensor in (dst, *sources))
    return count / (4 if in_sbuf and contiguous else 2 if in_sbuf or contiguous else 1)


def memset(dst: Tensor, value: Scalar, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """Fill ``dst`` with a constant; packed MX types take 0 only. Vector or GpSimd engine."""
    on_chip("memset", {"dst": dst})
    if is_x4(dst.dtype) and value != 0:
        raise ConstraintViolation("memset", "value", f"is {value}: packed MX types take 0 only")
    prog = current()
    automatic = ("vector",) if in_psum(dst) else ("vector", "gpsimd")
    lanes = engines_for("memset", engine, ("vector", "gpsimd"), automatic, dst)
    count = elements(dst)
    cycles = count / 2 if value == 0 and is_16_bit(dst) else count
    lane, cost = least_loaded(prog, {name: _cost(prog, name, cycles) for name in lanes})
    if prog.issue("memset", engine=lane, dst=dst, sources=(), cost=cost):
        prog.store(dst, _constant(dst, value))


def _constant(dst: Tensor, value: Scalar) -> Array:
    if is_x4(dst.dtype):
        return np.zeros(dst.shape, dst.dtype)
    if dst.dtype.kind in "iu":
        # -1 in an unsigned tensor is its bit pattern, all ones.
        return np.broadcast_to(np.array(int(value), np.int64).astype(dst.dtype), dst.shape)
    return np.broadcast_to(np.float32(value), dst.shape)


def tensor_copy(dst: Tensor, src: Tensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst = src: bits when the dtypes agree, through float32 otherwise. Vector, Scalar or GpSimd engine."""
    on_chip("tensor_copy", {"dst": dst, "src": src})
    same_elements("tensor_copy", dst, src=src)
    if dst.dtype != src.dtype and (is_x4(dst.dtype) or is_x4(src.dtype)):
        raise ConstraintViolation(
            "tensor_copy",
            "src",
            f"is {src.dtype}, dst is {dst.dtype}: packed MX types are copied to their own type only",
        )
    prog = current()
    if prog.chip.generation >= 3:
        lanes = engines_for(
            "tensor_copy", engine, ("vector", "scalar", "gpsimd"), ("vector", "scalar"), dst, src
        )
    else:  # NeuronCore-v2's Scalar engine copies with activation(op=nl.copy) only
        lanes = engines_for("tensor_copy", engine, ("vector", "gpsimd"), ("vector",), dst, src)
    lane, cost = least_loaded(
        prog, {name: _cost(prog, name, _fast_cycles(prog, name, dst, src)) for name in lanes}
    )
    if prog.issue("tensor_copy", engine=lane, dst=dst, sources=(src,), cost=cost):
        if dst.dtype == src.dtype:
            prog.store(dst, prog.load(src).reshape(dst.shape))
        else:
            store_flat(prog, dst, load_float(prog, src))


def _is_int32(*tensors: Tensor) -> bool:
    return all(tensor.dtype in (np.dtype(np.int32), np.dtype(np.uint32)) for tensor in tensors)


def tensor_tensor(
    dst: Tensor,
    data1: Tensor,
    data2: Tensor,
    op: Op,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 <op> data2, elementwise. Vector engine; GpSimd for all-32-bit-integer tiles in SBUF.

    float32 arithmetic except on GpSimd with 32-bit integers, which is exact. ``data1`` and ``data2`` cannot
    both lie in PSUM.
    """
    on_chip("tensor_tensor", {"dst": dst, "data1": data1, "data2": data2})
    same_elements("tensor_tensor", dst, data1=data1, data2=data2)
    refuse_x4("tensor_tensor", dst=dst, data1=data1, data2=data2)
    if in_psum(data1) and in_psum(data2):
        raise ConstraintViolation(
            "tensor_tensor", "data2", "lies in PSUM like data1: at most one of them may; copy one to SBUF"
        )
    prog = current()
    tiles = (dst, data1, data2)
    integers = _is_int32(*tiles) and _all_sbuf(*tiles)
    to_gpsimd = (integers and op.kind == "arithmetic") or op.name == "power"
    automatic = ("gpsimd",) if to_gpsimd else ("vector",)
    (lane,) = engines_for("tensor_tensor", engine, ("vector", "gpsimd"), automatic, *tiles)
    one_port_each = in_psum(data1) != in_psum(data2)
    cycles = elements(dst) * (1 if one_port_each or (is_16_bit(*tiles) and _all_sbuf(*tiles)) else 2)
    if not prog.issue(
        "tensor_tensor", engine=lane, dst=dst, sources=(data1, data2), cost=_cost(prog, lane, cycles)
    ):
        return
    with np.errstate(all="ignore"):
        if op.kind == "bitwise" or (integers and lane == "gpsimd"):
            left, right = (prog.load(data).reshape(dst.shape) for data in (data1, data2))
            prog.store(dst, op(left, right))
        else:
            store_flat(prog, dst, op(load_float(prog, data1), load_float(prog, data2)))


def _all_sbuf(*tensors: Tensor) -> bool:
    return not any(in_psum(tensor) for tensor in tensors)


def _apply(op: Op, left: Any, right: Any, reverse: bool) -> Array:
    if op.kind == "unary":
        return op(left)
    return op(right, left) if reverse else op(left, right)


def _scalar_engine_can(prog: Program, *ops: Op | None) -> bool:
    """Before trn3 the Scalar engine does multiply, add, or multiply then add."""
    names = tuple(op.name for op in ops if op is not None)
    return prog.chip.scalar_fast_modes or names in (("multiply", "add"), ("multiply",), ("add",))


def _tensor_scalar_engines(
    prog: Program, asked: Engine, ops: tuple[Op | None, Op | None], *tensors: Tensor
) -> tuple[str, ...]:
    """Vector does everything, Scalar arithmetic, GpSimd only rsqrt (nki.isa reference)."""
    if any(op is not None and op.kind == "bitwise" for op in ops):
        return engines_for("tensor_scalar", asked, ("vector",), ("vector",), *tensors)
    able = _scalar_engine_can(prog, *ops)
    automatic = ("vector", "scalar") if able else ("vector",)
    lanes = engines_for("tensor_scalar", asked, ("vector", "scalar", "gpsimd"), automatic, *tensors)
    names = " then ".join(op.name for op in ops if op is not None)
    if lanes == ("scalar",) and not able:
        raise ConstraintViolation(
            "tensor_scalar",
            "op0",
            f"{names} on the Scalar engine of {prog.chip.name}: it does multiply, add, or both",
        )
    if lanes == ("gpsimd",) and names != "rsqrt":
        rule = f"{names} on GpSimd: it does rsqrt only; take vector"
        raise ConstraintViolation("tensor_scalar", "op0", rule)
    return lanes


def tensor_scalar(
    dst: Tensor,
    data: Tensor,
    op0: Op | None,
    operand0: Tensor | Scalar | None,
    reverse0: bool = False,
    op1: Op | None = None,
    operand1: Tensor | Scalar | None = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data <op0> operand0) <op1> operand1 with constants or float32 ``[P, 1]``; ops may be None.

    float32 arithmetic; bitwise operators work on the integer bits. Vector, Scalar or GpSimd engine.
    """
    on_chip("tensor_scalar", {"dst": dst, "data": data})
    same_elements("tensor_scalar", dst, data=data)
    refuse_x4("tensor_scalar", dst=dst, data=data)
    steps: list[tuple[Op, Any, bool]] = []
    sources: tuple[Tensor, ...] = (data,)
    for label, op, operand, reverse in (
        ("operand0", op0, operand0, reverse0),
        ("operand1", op1, operand1, reverse1),
    ):
        if op is None:
            continue
        operand = 0 if operand is None and op.kind == "unary" else operand
        vectors = vector_operand("tensor_scalar", label, operand, data.shape[0])
        for vector in vectors:
            if op.kind != "bitwise" and vector.dtype != np.float32:
                raise ConstraintViolation(
                    "tensor_scalar",
                    label,
                    f"is {vector.dtype}: arithmetic operands of one value per partition must be float32",
                )
        sources += vectors
        steps.append((op, operand, reverse))
    bitwise = {op.kind == "bitwise" for op, _, _ in steps}
    if len(bitwise) >= 2:
        raise ConstraintViolation("tensor_scalar", "op1", "both operators must be bitwise, or neither")
    prog = current()
    lanes = _tensor_scalar_engines(prog, engine, (op0, op1), dst, *sources)
    lane, cost = least_loaded(
        prog, {name: _cost(prog, name, _fast_cycles(prog, name, dst, data)) for name in lanes}
    )
    if not prog.issue("tensor_scalar", engine=lane, dst=dst, sources=sources, cost=cost):
        return
    with np.errstate(all="ignore"):
        if True in bitwise:
            value = prog.load(data).reshape(data.shape[0], -1)
            for op, operand, reverse in steps:
                bits = prog.load(operand).reshape(-1, 1) if isinstance(operand, Tensor) else operand
                value = _apply(op, value, np.asarray(bits).astype(value.dtype), reverse)
            store_flat(prog, dst, value)
            return
        value = load_float(prog, data)
        for op, operand, reverse in steps:
            value = _apply(op, value, load_vector(prog, operand), reverse)
        store_flat(prog, dst, value)


def scalar_tensor_tensor(
    dst: Tensor,
    data: Tensor,
    op0: Op,
    operand0: Tensor | Scalar,
    op1: Op,
    operand1: Tensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data <op0> operand0) <op1> operand1; operand0 a number or ``[P, 1]``, operand1 a tile."""
    instruction = "scalar_tensor_tensor"
    on_chip(instruction, {"dst": dst, "data": data, "operand1": operand1})
    same_elements(instruction, dst, data=data, operand1=operand1)
    refuse_x4(instruction, dst=dst, data=data, operand1=operand1)
    vectors = vector_operand(instruction, "operand0", operand0, data.shape[0])
    if in_psum(data) and in_psum(operand1):
        raise ConstraintViolation(
            instruction, "operand1", "lies in PSUM like data: at most one of them may; copy one to SBUF"
        )
    for label, op in (("op0", op0), ("op1", op1)):
        if op.kind == "bitwise":
            raise ConstraintViolation(instruction, label, f"is {op}: bitwise operators are not supported")
    prog = current()
    sources = (data, *vectors, operand1)
    cost = _cost(prog, "vector", 2 * elements(dst))
    if prog.issue(instruction, engine="vector", dst=dst, sources=sources, cost=cost):
        with np.errstate(all="ignore"):
            value = _apply(op0, load_float(prog, data), load_vector(prog, operand0), reverse0)
            store_flat(prog, dst, _apply(op1, value, load_float(prog, operand1), reverse1))


def tensor_reduce(
    dst: Tensor,
    op: Op,
    data: Tensor,
    axis: int | tuple[int, ...] | list[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Reduce the last free axes with add, multiply, maximum or minimum, in float32. Vector engine."""
    on_chip("tensor_reduce", {"dst": dst, "data": data})
    refuse_x4("tensor_reduce", dst=dst, data=data)
    rank = len(data.shape)
    axes = tuple(sorted(a % rank for a in ([axis] if isinstance(axis, int) else axis)))
    if not axes or 0 in axes or axes != tuple(range(rank - len(axes), rank)):
        raise ConstraintViolation(
            "tensor_reduce",
            "axis",
            f"is {axis} of shape {data.shape}: must be the last free axes, up to the last one",
        )
    if not op.reduces:
        raise ConstraintViolation(
            "tensor_reduce", "op", f"is {op}: must be add, multiply, maximum or minimum"
        )
    kept = data.shape[: rank - len(axes)]
    if dst.shape[0] != data.shape[0] or elements(dst) != math.prod(kept[1:]):
        raise ConstraintViolation(
            "tensor_reduce",
            "dst",
            f"shape {dst.shape}: must hold {kept}, which is data {data.shape} without axis {axis}",
        )
    prog = current()
    halved = is_16_bit(dst, data) and op.name in ("add", "maximum")
    cost = _cost(prog, "vector", elements(data) / (2 if halved else 1))
    if prog.issue("tensor_reduce", engine="vector", dst=dst, sources=(data,), cost=cost):
        with np.errstate(all="ignore"):
            value = op.reduce(prog.load(data).astype(np.float32, copy=False), axes)
            prog.store(dst, (-value if negate else value).reshape(dst.shape))


def reciprocal(dst: Tensor, data: Tensor, name: str | None = None) -> None:
    """dst = 1 / data in float32. Vector engine, 8 cycles per element."""
    on_chip("reciprocal", {"dst": dst, "data": data})
    same_elements("reciprocal", dst, data=data)
    refuse_x4("reciprocal", dst=dst, data=data)
    prog = current()
    cost = _cost(prog, "vector", 8 * elements(data))
    if prog.issue("reciprocal", engine="vector", dst=dst, sources=(data,), cost=cost):
        with np.errstate(all="ignore"):
            store_flat(prog, dst, np.float32(1) / load_float(prog, data))


def tensor_copy_predicated(
    dst: Tensor,
    src: Tensor | Scalar,
    predicate: Tensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = src where ``predicate`` (unsigned integers) is not 0, else unchanged. Vector engine."""
    instruction = "tensor_copy_predicated"
    on_chip(instruction, {"dst": dst, "predicate": predicate})
    same_elements(instruction, dst, predicate=predicate)
    if predicate.dtype.kind != "u":
        raise ConstraintViolation(
            instruction, "predicate", f"is {predicate.dtype}: must be unsigned integers"
        )
    sources: tuple[Tensor, ...] = (predicate,)
    if isinstance(src, Tensor):
        on_chip(instruction, {"src": src})
        same_elements(instruction, dst, src=src)
        if src.dtype != dst.dtype:
            raise ConstraintViolation(instruction, "src", f"is {src.dtype}, must be {dst.dtype} like dst")
        if in_psum(src) and in_psum(predicate):
            raise ConstraintViolation(instruction, "src", "and predicate cannot both lie in PSUM")
        sources += (src,)
    prog = current()
    cycles = elements(dst) * (2 if _all_sbuf(*sources) else 1)
    # What is kept is read as well: the destination is a source.
    if prog.issue(
        instruction, engine="vector", dst=dst, sources=(*sources, dst), cost=_cost(prog, "vector", cycles)
    ):
        taken = prog.load(predicate).reshape(dst.shape) != 0
        fresh = prog.load(src).reshape(dst.shape) if isinstance(src, Tensor) else _constant(dst, src)
        prog.store(dst, np.where(taken ^ reverse_pred, fresh, prog.load(dst)))
