"""What a run moved and needed: HBM bytes beside their floor, engine times, peaks; from the machine's report.

Owns the floor and the figures that commands print. Runs nothing, knows no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...neuron.floor import BlockSize, expert_floor
from .layout import KernelExperts

__all__ = ["Figures", "figures", "floor_bytes"]

MICRO = 1e6
EXPERT_TENSORS = (
    "expert_gate_up_weights",
    "expert_down_weights",
    "expert_gate_up_weights_scale",
    "expert_down_weights_scale",
    "expert_gate_up_bias",
    "expert_down_bias",
)


@dataclass(frozen=True)
class Figures:
    """One run in numbers. Peaks and limits are bytes per partition of the fuller core; times are
    microseconds.

    ``engines_us`` holds what each engine needs at least, of the core that needs most; ``bottleneck`` names
    the largest. ``schedule_us`` is the model's in-order schedule.
    """

    hbm_bytes: int
    hbm_floor_bytes: int
    engines_us: Mapping[str, float]
    bottleneck: str
    schedule_us: float
    sbuf_peak_bytes: int
    sbuf_limit_bytes: int
    psum_peak_bytes: int
    psum_limit_bytes: int
    races: int
    instructions: tuple[int, ...]

    @property
    def hbm_ratio(self) -> float:
        """Bytes moved over the floor."""
        return self.hbm_bytes / self.hbm_floor_bytes if self.hbm_floor_bytes else math.nan

    @property
    def bound_us(self) -> float:
        """The time that no schedule beats."""
        return max(self.engines_us.values(), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return {
            "hbm_bytes": self.hbm_bytes,
            "hbm_floor_bytes": self.hbm_floor_bytes,
            "hbm_ratio": self.hbm_ratio,
            "engines_us": dict(self.engines_us),
            "bottleneck": self.bottleneck,
            "bound_us": self.bound_us,
            "schedule_us": self.schedule_us,
            "sbuf_peak_bytes": self.sbuf_peak_bytes,
            "sbuf_limit_bytes": self.sbuf_limit_bytes,
            "psum_peak_bytes": self.psum_peak_bytes,
            "psum_limit_bytes": self.psum_limit_bytes,
            "races": self.races,
            "instructions": list(self.instructions),
        }


def floor_bytes(arguments: Mapping[str, Any], outputs: int, experts: KernelExperts, visits: int) -> int:
    """Bytes that must cross HBM: every input once, the experts of ``visits`` visits, ``outputs`` bytes once.

    ``arguments`` are those of the launch. An expert counts what its matrices hold: lanes that the packed
    layout only pads with are left out.
    """
    others = sum(
        _nbytes(a) for name, a in arguments.items() if hasattr(a, "dtype") and name not in EXPERT_TENSORS
    )
    return others + outputs + visits * expert_floor(_expert_size(experts))


def _expert_size(experts: KernelExperts) -> BlockSize:
    """One expert's dimensions and element sizes."""
    scale = experts.gate_up_scale
    gate_up, down = (
        0 if bias is None else bias.dtype.itemsize for bias in (experts.gate_up_bias, experts.down_bias)
    )
    return BlockSize(
        hidden=experts.padded,
        intermediate=experts.intermediate,
        experts=experts.num_experts,
        top_k=1,
        fmt=experts.fmt,
        bias_bytes=gate_up,
        down_bias_bytes=down,
        per_tensor_scales=scale is not None and scale.shape[-1] == 1,
    )


def _nbytes(array: Any) -> int:
    count: int = math.prod(array.shape)
    return count * int(array.dtype.itemsize)


def figures(report: Any, floor: int) -> Figures:
    """The figures of a machine's report."""
    bottleneck, _ = report.timeline.bottleneck()
    return Figures(
        hbm_bytes=report.hbm_bytes,
        hbm_floor_bytes=floor,
        engines_us={engine: MICRO * seconds for engine, seconds in report.timeline.bounds().items()},
        bottleneck=bottleneck,
        schedule_us=MICRO * report.timeline.makespan(),
        sbuf_peak_bytes=report.sbuf_peak,
        sbuf_limit_bytes=report.chip.sbuf_partition_bytes,
        psum_peak_bytes=report.psum_peak,
        psum_limit_bytes=report.chip.psum_partition_bytes,
        races=len(report.races),
        instructions=tuple(report.instructions),
    )
