"""Owns when each on-chip tensor is alive (first write to last use) and how much SBUF and PSUM that takes at
once.

Must not know instructions; time is the number of the instruction within its core.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .errors import CapacityError
from .memory import Buffer, Storage

__all__ = ["Lifetime", "Liveness"]


@dataclass(slots=True)
class Lifetime:
    """One on-chip tensor: `first` is the instruction that writes it first, `last` the last one that reads or
    writes it.
    """

    core: int
    name: str
    buffer: Buffer
    shape: tuple[int, ...]
    dtype: str
    partition_bytes: int
    first: int
    last: int


@dataclass
class Liveness:
    """Collects the lifetimes of one run."""

    _lives: dict[tuple[int, int], Lifetime] = field(default_factory=dict)

    def touch(self, storage: Storage, core: int, clock: int) -> None:
        """An instruction of a core reads or writes a tensor."""
        life = self._lives.get((core, storage.key))
        if life is not None:
            life.last = clock
            return
        dtype = storage.dtype.names[0] if storage.dtype.names else str(storage.dtype)
        self._lives[core, storage.key] = Lifetime(
            core, storage.name, storage.buffer, storage.shape, dtype, storage.partition_bytes, clock, clock
        )

    def residency(self) -> list[Lifetime]:
        """Every on-chip tensor of every core, in the order of first use."""
        return list(self._lives.values())

    def _peak_of(self, buffer: Buffer, core: int) -> tuple[int, int]:
        """(bytes per partition, instruction) of the fullest moment."""
        change: dict[int, int] = defaultdict(int)
        for life in self._lives.values():
            if life.buffer is buffer and life.core == core:
                change[life.first] += life.partition_bytes
                change[life.last + 1] -= life.partition_bytes
        peak = now = when = 0
        for clock in sorted(change):
            now += change[clock]
            if now > peak:
                peak, when = now, clock
        return peak, when

    def peak(self, buffer: Buffer, core: int | None = None) -> int:
        """Largest number of bytes per partition that is alive at once, of one core or of the core that needs
        most.
        """
        cores = {life.core for life in self._lives.values()} if core is None else {core}
        return max((self._peak_of(buffer, c)[0] for c in cores), default=0)

    def check(self, limits: dict[Buffer, int]) -> None:
        """Compare the peaks with what the memories have.

        Raises:
            CapacityError: naming the memory, the core, the moment and the largest tensors alive then.
        """
        for buffer, limit in limits.items():
            for core in sorted({life.core for life in self._lives.values()}):
                peak, when = self._peak_of(buffer, core)
                if peak <= limit:
                    continue
                alive = [
                    x
                    for x in self._lives.values()
                    if x.core == core and x.buffer is buffer and x.first <= when <= x.last
                ]
                alive.sort(key=lambda x: -x.partition_bytes)
                top = ", ".join(f"{x.name} {list(x.shape)} ({x.partition_bytes})" for x in alive[:6])
                raise CapacityError(
                    f"{buffer.value} of core {core}: {peak} bytes per partition are alive "
                    f"at instruction {when}, the chip has {limit}; "
                    f"the largest of {len(alive)} tensors: {top}"
                )
