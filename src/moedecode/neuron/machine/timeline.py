"""When instructions run: sums per engine (a lower bound of time), an in-order schedule, a trace to look at.

Owns costs once they are recorded. Knows no tensors: memory is named by hashable keys, one per allocation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .chip import ENGINES, Chip
from .cost import Cost

__all__ = ["Event", "Timeline"]

_MICRO = 1e6
Access = tuple[Cost, Iterable[Hashable], Iterable[Hashable]]


@dataclass(frozen=True)
class Event:
    """One instruction on the schedule; times in seconds from the start of the kernel."""

    core: int
    engine: str
    name: str
    start: float
    busy: float
    end: float
    """When its result can be used: start + busy + latency."""


class Timeline:
    """Takes instructions in program order and schedules each as early as engine and operands allow.

    Every engine of a core runs its own instructions in order. An instruction waits for the last writer of
    each allocation it reads, and for the last writer and all readers of each allocation it writes.
    Allocations are whole tensors, so two halves of one tensor depend on each other: the schedule is an
    estimate on the late side, while :meth:`bounds` holds for any schedule.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.events: list[Event] = []
        self._free: dict[tuple[int, str], float] = {}  # (core, engine) -> when it takes the next instruction
        self._bound: dict[tuple[int, str], float] = {}
        self._count: dict[tuple[int, str], int] = {}
        self._written: dict[tuple[int, Hashable], float] = {}  # (core, allocation) -> end of its last writer
        self._read: dict[tuple[int, Hashable], float] = {}  # ... and the latest end among readers

    def add(
        self,
        core: int,
        name: str,
        engine: str,
        cost: Cost,
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
    ) -> Event:
        """Record one instruction; returns where it landed on the schedule."""
        reads, writes = tuple(reads), tuple(writes)
        return self._place(core, name, engine, cost, reads, writes, self._ready(core, engine, reads, writes))

    def rendezvous(self, name: str, engine: str, cores: Mapping[int, Access]) -> dict[int, Event]:
        """Record one instruction per core that start together: each waits for the other's operands too."""
        access = {core: (cost, tuple(reads), tuple(writes)) for core, (cost, reads, writes) in cores.items()}
        ready = max(self._ready(core, engine, reads, writes) for core, (_, reads, writes) in access.items())
        return {
            core: self._place(core, name, engine, cost, reads, writes, ready)
            for core, (cost, reads, writes) in access.items()
        }

    def _ready(
        self, core: int, engine: str, reads: tuple[Hashable, ...], writes: tuple[Hashable, ...]
    ) -> float:
        if engine not in ENGINES:
            raise ValueError(f"engine={engine!r}: no such engine; take one of {', '.join(ENGINES)}")
        ready = self._free.get((core, engine), 0.0)
        for key in reads:
            ready = max(ready, self._written.get((core, key), 0.0))
        for key in writes:
            ready = max(ready, self._written.get((core, key), 0.0), self._read.get((core, key), 0.0))
        return ready

    def _place(
        self,
        core: int,
        name: str,
        engine: str,
        cost: Cost,
        reads: tuple[Hashable, ...],
        writes: tuple[Hashable, ...],
        start: float,
    ) -> Event:
        lane = (core, engine)
        event = Event(core, engine, name, start, cost.busy, start + cost.busy + cost.latency)
        self._free[lane] = start + cost.busy
        self._bound[lane] = self._bound.get(lane, 0.0) + cost.bound
        self._count[lane] = self._count.get(lane, 0) + 1
        for key in reads:
            self._read[(core, key)] = max(self._read.get((core, key), 0.0), event.end)
        for key in writes:
            self._written[(core, key)] = event.end
        self.events.append(event)
        return event

    def bounds(self, core: int | None = None) -> dict[str, float]:
        """Seconds each engine needs at least, of ``core`` or (default) of the core that needs most."""
        found: dict[str, float] = {}
        for (owner, engine), seconds in self._bound.items():
            if core is None or owner == core:
                found[engine] = max(found.get(engine, 0.0), seconds)
        return {engine: found[engine] for engine in ENGINES if engine in found}

    def bound(self, core: int, engine: str) -> float:
        """Seconds that one engine of one core needs at least, so far."""
        return self._bound.get((core, engine), 0.0)

    def counts(self, core: int | None = None) -> dict[str, int]:
        """Instructions per engine, of ``core`` or of all cores together."""
        found: dict[str, int] = {}
        for (owner, engine), number in self._count.items():
            if core is None or owner == core:
                found[engine] = found.get(engine, 0) + number
        return {engine: found[engine] for engine in ENGINES if engine in found}

    def bottleneck(self) -> tuple[str, float]:
        """The engine with the largest bound and that bound: no schedule is faster. ("none", 0.0) if empty."""
        bounds = self.bounds()
        return max(bounds.items(), key=lambda item: item[1]) if bounds else ("none", 0.0)

    def makespan(self) -> float:
        """Seconds of the in-order schedule, from the start to the last result."""
        return max((event.end for event in self.events), default=0.0)

    def trace(self) -> dict[str, Any]:
        """The schedule in the Trace Event Format of Perfetto and chrome://tracing, in microseconds."""
        lanes = sorted({(event.core, ENGINES.index(event.engine)) for event in self.events})
        named = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": core,
                "args": {"name": f"core {core} ({self.chip.name})"},
            }
            for core in sorted({core for core, _ in lanes})
        ] + [
            {"ph": "M", "name": "thread_name", "pid": core, "tid": lane, "args": {"name": ENGINES[lane]}}
            for core, lane in lanes
        ]
        slices = [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.engine,
                "pid": event.core,
                "tid": ENGINES.index(event.engine),
                "ts": event.start * _MICRO,
                "dur": event.busy * _MICRO,
                "args": {"result_us": event.end * _MICRO},
            }
            for event in self.events
        ]
        return {"displayTimeUnit": "ns", "traceEvents": named + slices}
