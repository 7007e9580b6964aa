"""What an instruction costs on an engine: cycles and bytes turned into seconds by the chip table.

Owns the cost formulas of the public nki.isa reference. Knows no tensors and no programs: callers pass counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .chip import Chip

__all__ = ["Cost", "barrier", "compute", "dma", "gpsimd", "matmul", "sendrecv"]


@dataclass(frozen=True)
class Cost:
    """Seconds of one instruction on one engine.

    ``bound`` is what cycles or bandwidth alone demand: bounds add up to the engine's lower bound of the
    kernel. ``busy`` is how long the engine is taken when scheduled (default: ``bound``); ``latency`` is how
    much later than that the result can be used, without keeping the engine from its next instruction.
    """

    bound: float
    busy: float = -1.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.busy < self.bound:
            object.__setattr__(self, "busy", self.bound)


def compute(chip: Chip, engine: str, cycles: float) -> Cost:
    """``cycles`` by the reference's formula on "vector" or "scalar", at least the initiation interval."""
    return Cost(
        bound=chip.seconds(engine, max(cycles, chip.minimum_cycles)),
        latency=chip.seconds(engine, chip.access_cycles),
    )


def gpsimd(chip: Chip, elements: float) -> Cost:
    """A GpSimd instruction: its start-up plus one cycle per element per partition."""
    return Cost(bound=chip.seconds("gpsimd", chip.gpsimd_start_cycles + elements))


def matmul(chip: Chip, stationary: int, moving: int, passes: float = 1.0) -> Cost:
    """A matmul of ``stationary`` and ``moving`` columns in a run of equal ones.

    max(min(64, stationary), moving) cycles for inputs of 16 bits or less and for MX (which contracts 4x more
    in the same time); ``passes`` is 4 for float32 inputs, 2 for float32 against zeros and ones.
    """
    cycles = passes * max(min(64, stationary), moving)
    return Cost(bound=chip.seconds("tensor", cycles), latency=chip.seconds("tensor", chip.access_cycles))


def dma(
    chip: Chip,
    nbytes: int,
    *,
    partitions: int = 128,
    run_bytes: int | None = None,
    hbm: bool = True,
    descriptors: bool = False,
) -> Cost:
    """A DMA of ``nbytes``, touching ``partitions`` of SBUF, in contiguous runs of ``run_bytes``.

    bound: all bytes at the core's full bandwidth. busy: only the engines whose 8 partitions take part move
    data, and short runs waste them. latency: semaphore to start, plus descriptor generation if
    ``descriptors``.
    """
    rate = chip.hbm_path_bytes_per_second if hbm else chip.dma_bytes_per_second
    per_engine = chip.partitions // chip.dma_engines
    engines = max(1, min(chip.dma_engines, -(-partitions // per_engine)))
    payload = run_bytes if run_bytes else max(1, nbytes // max(1, partitions))
    efficiency = payload / (payload + chip.dma_payload_overhead_bytes)
    moved = nbytes / (engines * chip.dma_engine_bytes_per_second * efficiency)
    latency = chip.dma_start_seconds + (chip.dma_descriptor_seconds if descriptors else 0.0)
    bound = nbytes / rate
    return Cost(bound=bound, busy=max(bound, moved), latency=latency)


def sendrecv(chip: Chip, nbytes: int) -> Cost:
    """SBUF to SBUF of the other core: ``nbytes`` leave and as many arrive at the same time."""
    return Cost(bound=nbytes / chip.dma_bytes_per_second, latency=chip.sendrecv_start_seconds)


def barrier(chip: Chip) -> Cost:
    """A core barrier: no work, only waiting."""
    return Cost(bound=0.0, latency=chip.barrier_seconds)
