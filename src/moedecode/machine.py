"""This machine: cores, caches, instruction sets and the bandwidth of reading memory.

Owns measurements of hardware. Knows nothing of experts or blocks; opens the native core only when asked.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .gates import InvalidInput, MissingExtra, require

__all__ = [
    "Cache",
    "available_isas",
    "caches",
    "cores",
    "isa",
    "memory_available",
    "native",
    "peak_memory",
    "stream_read_gbps",
]

STREAM_MEGABYTES = 1024  # well past the last-level cache of one tenant, small beside 4 GB
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Cache:
    """One cache of core 0: ``kind`` is "Data", "Instruction" or "Unified", ``shared_by`` counts cores."""

    level: int
    kind: str
    bytes: int
    shared_by: int


def native() -> ModuleType:
    """The native core. Raises :class:`~moedecode.gates.MissingExtra` where it was not built."""
    try:
        return importlib.import_module("moedecode._native")
    except ImportError as error:
        raise MissingExtra(f"the native core is not installed ({error}); build it: pip install .") from error


def isa() -> str:
    """The instruction set in use; MOEDECODE_ISA in the environment overrides the choice."""
    try:
        return str(native().isa())
    except ValueError as error:
        raise InvalidInput(f"MOEDECODE_ISA: {error}") from error


def available_isas() -> list[str]:
    """Instruction sets that both this build and this CPU have."""
    return [str(name) for name in native().available_isas()]


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_available() -> int | None:
    """Bytes a process may still take without swapping; None where the kernel does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def stream_read_gbps(threads: int = 0, megabytes: int = STREAM_MEGABYTES, repeats: int = 3) -> float:
    """Best bandwidth of reading ``megabytes`` in order, in GB/s (1e9 bytes); 0 threads means all cores."""
    require(threads >= 0, "threads", threads, "must not be negative", "use 0 for all cores")
    return float(native().stream_read_gbps(megabytes, threads or cores(), repeats))


def caches(folder: Path = _CACHE_FOLDER) -> list[Cache]:
    """Caches as the kernel reports them, smallest level first; empty where it reports none."""
    found = []
    for index in sorted(folder.glob("index*")):
        try:
            size = (index / "size").read_text().strip()
            found.append(
                Cache(
                    level=int((index / "level").read_text()),
                    kind=(index / "type").read_text().strip(),
                    bytes=_bytes(size),
                    shared_by=_count((index / "shared_cpu_list").read_text().strip()),
                )
            )
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda cache: (cache.level, cache.kind))


def _bytes(size: str) -> int:
    """ "48K" -> 49152."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size)


def _count(cpu_list: str) -> int:
    """Number of CPUs in a list such as "0-3,8"."""
    ranges = [part.split("-") for part in cpu_list.split(",")]
    return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
