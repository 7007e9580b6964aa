"""Owns the happens-before rule of shared HBM: two cores, the same bytes, at least one write, no barrier
between: a race.

Must not know instructions. The order in which the model happens to run the cores does not matter: a conflict
is found from either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .coverage import Coverage, Region, read_bit, write_bit
from .errors import RaceError
from .memory import Storage

__all__ = ["Race", "RaceDetector"]


@dataclass(frozen=True)
class Race:
    """One conflict: what the core did to which tensor, and what the other core had done to the same bytes
    since the last barrier on it.
    """

    tensor: str
    instruction: str
    core: int
    access: str
    other_core: int
    other_access: str

    def __str__(self) -> str:
        return (
            f"{self.instruction}: core {self.core} {self.access} bytes of {self.tensor} "
            f"that core {self.other_core} {self.other_access} "
            f"since the last core_barrier on it; put nisa.core_barrier(tensor, (0, 1)) between the two"
        )


@dataclass
class RaceDetector:
    """Checks every access to HBM that both cores can see.

    Args:
        cores: number of programs.
        on_race: "raise" or "record".
        barrier_scope: "tensor": a barrier orders accesses to the tensor it names; "all": to every tensor.
    """

    cores: int
    on_race: str = "raise"
    barrier_scope: str = "tensor"
    found: list[Race] = field(default_factory=list)
    _maps: dict[int, Coverage] = field(default_factory=dict)

    def access(
        self,
        storage: Storage,
        coverage: Coverage,
        region: Region,
        core: int,
        instruction: str,
        *,
        write: bool,
    ) -> None:
        """Mark an access and report it if another core's access to the same bytes is unordered with it.

        Raises:
            RaceError: with on_race="raise".
        """
        conflicts = 0
        if storage.core is None and self.cores > 1:
            self._maps[storage.key] = coverage
            for other in range(self.cores):
                if other != core:
                    conflicts |= write_bit(other) | (read_bit(other) if write else 0)
        hit = coverage.mark(region, write_bit(core) if write else read_bit(core), conflicts=conflicts)
        if not hit:
            return
        other = next(c for c in range(self.cores) if hit & (read_bit(c) | write_bit(c)))
        race = Race(
            repr(storage),
            instruction,
            core,
            "writes" if write else "reads",
            other,
            "wrote" if hit & write_bit(other) else "read",
        )
        if self.on_race == "raise":
            raise RaceError(str(race))
        key: Callable[[Race], tuple[str, str, int]] = lambda r: (r.tensor, r.instruction, r.core)  # noqa: E731
        if key(race) not in map(key, self.found):
            self.found.append(race)

    def barrier(self, storage: Storage) -> None:
        """All cores have met at a barrier on this tensor."""
        maps = (
            self._maps.values()
            if self.barrier_scope == "all"
            else filter(None, (self._maps.get(storage.key),))
        )
        for coverage in maps:
            coverage.forget()
