"""A model of the machine: chips, memories, tensors, SPMD programs, the instruction set and what a run costs.

Must not know kernels, specs or backends. Kernels use it through `language` and `isa`, tests and backends
through `Machine`.
"""

from __future__ import annotations

from .chip import CHIPS, Chip
from .errors import CapacityError, ConstraintViolation, MachineError, RaceError, RendezvousError
from .machine import Machine, Report, Result
from .memory import Buffer, StandIn
from .tensor import Tensor

__all__ = [
    "CHIPS",
    "Buffer",
    "CapacityError",
    "Chip",
    "ConstraintViolation",
    "Machine",
    "MachineError",
    "RaceError",
    "RendezvousError",
    "Report",
    "Result",
    "StandIn",
    "Tensor",
]
