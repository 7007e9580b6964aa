"""The enumerations of nki.isa: engines, reduce commands, DMA modes, core versions.

Owns names only; what they do lives with the instructions that take them.
"""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    "dge_mode",
    "dma_engine",
    "engine",
    "gpsimd_engine",
    "matmul_perf_mode",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "scalar_engine",
    "tensor_engine",
    "unknown_engine",
    "vector_engine",
]


class engine(Enum):
    """Engines of a NeuronCore; ``unknown`` leaves the choice to the machine."""

    tensor = "tensor"
    vector = "vector"
    scalar = "scalar"
    gpsimd = "gpsimd"
    dma = "dma"
    sync = "sync"
    unknown = "unknown"


class reduce_cmd(Enum):
    """What an instruction does with the engine's reduction registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates DMA descriptors: nobody (static), GpSimd, hardware, or the compiler's choice."""

    none = 0
    swdge = 1
    hwdge = 2
    unknown = 3


class oob_mode(Enum):
    """What an indirect DMA does with an index out of bounds."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """``double_row``: FP8 operands with a contraction of 2 x 128."""

    none = 0
    double_row = 1


class nc_version(IntEnum):
    """NeuronCore versions by chip: trn1, trn2, trn3."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """How ``sendrecv`` travels."""

    dma = 0
    gpsimd_dma = 1


tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown
