"""What compute instructions ask of their operands: shapes, memories, dtypes, and float32 in and out.

Owns the checks that several instructions share and the loading of operands for arithmetic. Knows no
instruction in particular.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...arrays import Array
from .cost import Cost
from .dtypes import is_x4
from .errors import ConstraintViolation
from .isa.constants import engine as Engine
from .memory import Buffer
from .program import Program
from .tensor import Tensor

__all__ = [
    "elements",
    "engines_for",
    "in_psum",
    "is_16_bit",
    "least_loaded",
    "load_float",
    "load_vector",
    "on_chip",
    "refuse_x4",
    "same_elements",
    "start_partition",
    "store_flat",
    "vector_operand",
]

Scalar = int | float | np.float32


def elements(tensor: Tensor) -> int:
    """Elements per partition."""
    return math.prod(tensor.shape[1:])


def is_16_bit(*tensors: Tensor) -> bool:
    """True when every tensor is bfloat16 or float16, the types of the Vector engine's fast modes."""
    return all(tensor.dtype.itemsize == 2 and tensor.dtype.kind not in "iub" for tensor in tensors)


def in_psum(tensor: Tensor) -> bool:
    """True when the tensor lies in PSUM."""
    return tensor.buffer is Buffer.psum


def start_partition(tensor: Tensor) -> int:
    """The partition on which an on-chip view starts."""
    per_partition = tensor.storage.partition_bytes
    return tensor.offset * tensor.dtype.itemsize // per_partition if per_partition else 0


def on_chip(
    instruction: str, tensors: Mapping[str, Tensor], memories: tuple[Buffer, ...] = (Buffer.sbuf, Buffer.psum)
) -> None:
    """Operands must be tensors in one of ``memories``, on at most 128 partitions that start where they may.

    Start partitions follow the number of partitions: more than 64 start at 0, more than 32 at 0 or 64, the
    rest at 0, 32, 64 or 96 (NeuronDevice Architecture Guide, "accessing SBUF/PSUM tensors using compute
    engines").
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConstraintViolation(instruction, name, f"must be a tensor, not {type(tensor).__name__}")
        if tensor.buffer not in memories:
            raise ConstraintViolation(
                instruction,
                f"{name}={tensor!r}",
                f"must lie in {' or '.join(memory.value for memory in memories)}; move it with dma_copy or "
                "tensor_copy",
            )
        count, start = tensor.shape[0], start_partition(tensor)
        if count > 128:
            raise ConstraintViolation(
                instruction, f"{name}={tensor!r}", f"{count} partitions: there are 128; tile it"
            )
        step = 128 if count > 64 else 64 if count > 32 else 32
        if start % step:
            raise ConstraintViolation(
                instruction,
                f"{name}={tensor!r}",
                f"{count} partitions start at {start}: must start at a multiple of {step}; shuffle or DMA "
                "them "
                "there",
            )


def same_elements(instruction: str, dst: Tensor, **sources: Tensor) -> None:
    """Sources must have the partitions of ``dst`` and as many elements per partition."""
    for name, source in sources.items():
        if source.shape[0] != dst.shape[0] or elements(source) != elements(dst):
            raise ConstraintViolation(
                instruction,
                name,
                f"shape {source.shape} against dst {dst.shape}: partitions and elements per partition must "
                "agree",
            )


def vector_operand(
    instruction: str, name: str, operand: Tensor | Scalar | None, partitions: int
) -> tuple[Tensor, ...]:
    """Check a constant or one value per partition; returns the tensors among the instruction's sources."""
    if not isinstance(operand, Tensor):
        if not isinstance(operand, int | float | np.generic):
            raise ConstraintViolation(
                instruction,
                name,
                f"must be a number or a tensor of one element per partition, not {type(operand).__name__}",
            )
        return ()
    on_chip(instruction, {name: operand})
    if operand.shape[0] != partitions or elements(operand) != 1:
        raise ConstraintViolation(
            instruction, name, f"shape {operand.shape}: must be ({partitions}, 1), one element per partition"
        )
    return (operand,)


def engines_for(
    instruction: str,
    asked: Engine | None,
    allowed: tuple[str, ...],
    automatic: tuple[str, ...],
    *tensors: Tensor,
) -> tuple[str, ...]:
    """The engine asked for, if it is ``allowed``; without a wish the ``automatic`` ones to choose among.

    GpSimd has no path to PSUM, so it is refused when an operand lies there.
    """
    if asked is None or asked is Engine.unknown:
        return automatic
    name = str(asked.value)
    if name not in allowed:
        raise ConstraintViolation(
            instruction, "engine", f"is {name}; the instruction runs on {' or '.join(allowed)}"
        )
    if name == "gpsimd" and any(in_psum(tensor) for tensor in tensors):
        raise ConstraintViolation(instruction, "engine", "GpSimd cannot access PSUM; take vector or scalar")
    return (name,)


def least_loaded(prog: Program, costs: Mapping[str, Cost]) -> tuple[str, Cost]:
    """Of the engines in ``costs``, the one whose sum of bounds stays smallest; the first of equals.

    Stands for the compiler, which "selects the best engine based on engine workload" where a kernel leaves it
    open (nki.isa reference).
    """
    if len(costs) == 1:
        return next(iter(costs.items()))
    bound = prog.machine.timeline.bound
    return min(costs.items(), key=lambda item: bound(prog.core, item[0]) + item[1].bound)


def load_float(prog: Program, tensor: Tensor) -> Array:
    """The tensor as float32 ``[partitions, elements]``: what the engines compute with."""
    value: Array = prog.load(tensor).reshape(tensor.shape[0], -1).astype(np.float32, copy=False)
    return value


def load_vector(prog: Program, operand: Tensor | Scalar) -> Array | np.float32:
    """A constant, or one float32 per partition as ``[partitions, 1]``."""
    if isinstance(operand, Tensor):
        return load_float(prog, operand)
    constant: np.float32 = np.float32(operand)
    return constant


def store_flat(prog: Program, dst: Tensor, value: Array) -> None:
    """Write ``[partitions, elements]`` to ``dst`` of any shape with as many, cast on write."""
    prog.store(dst, np.broadcast_to(value, (dst.shape[0], elements(dst))).reshape(dst.shape))


def refuse_x4(instruction: str, **tensors: Tensor) -> None:
    """Packed MX types take part in copies, DMA and MX instructions only."""
    for name, tensor in tensors.items():
        if is_x4(tensor.dtype):
            raise ConstraintViolation(
                instruction, name, f"is {tensor.dtype}: packed MX types have no arithmetic; use nc_matmul_mx"
            )
