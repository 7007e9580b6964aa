"""Owns the turn-taking of SPMD programs: one runs at a time, the turn changes only where programs meet.

Must not know instructions or tensors: a meeting is a key that must agree and an action that runs once when
all have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RendezvousError

__all__ = ["Baton", "Meeting", "Stopped"]


class Stopped(BaseException):
    """Raised in a program whose partner has failed."""


@dataclass(frozen=True)
class Meeting:
    """What a program waits for.

    Attributes:
        what: for messages, for example "sendrecv(pipe 0) of [128, 4]".
        key: must be equal for all; sendrecv and core_barrier put their kind in it.
        cores: who must come.
        payload: for the action.
    """

    what: str
    key: Hashable
    cores: frozenset[int]
    payload: Any


class Baton:
    """Turns of `count` programs. Program 0 starts; after a meeting the last to arrive goes on.

    Deterministic.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, Meeting] = {}
        self._ended: set[int] = set()
        self.failure: BaseException | None = None

    def start(self, core: int) -> None:
        """Wait for the first turn."""
        with self._changed:
            self._wait(core)

    def meet(self, core: int, meeting: Meeting, action: Callable[[Mapping[int, Meeting]], None]) -> None:
        """Wait until all cores of the meeting have come; the last one runs the action.

        Raises:
            RendezvousError: the others wait for something else, or have ended.
        """
        with self._changed:
            self._waiting[core] = meeting
            if all(c in self._waiting for c in meeting.cores):
                there = {c: self._waiting[c] for c in sorted(meeting.cores)}
                if any(m.key != meeting.key or m.cores != meeting.cores for m in there.values()):
                    raise self._fail(RendezvousError(self._story()))
                for c in there:
                    del self._waiting[c]
                try:
                    action(there)
                except BaseException as error:
                    raise self._fail(error) from None
                return
            self._pass_on(core)
            self._wait(core)

    def end(self, core: int) -> None:
        """A program has returned."""
        with self._changed:
            self._ended.add(core)
            if self.failure is None and len(self._ended) < self._count:
                self._pass_on(core)

    def fail(self, error: BaseException) -> None:
        """A program has raised: stop the others. The first failure is kept."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: BaseException) -> BaseException:
        if self.failure is None:
            self.failure = error
        self._changed.notify_all()
        return error

    def _pass_on(self, core: int) -> None:
        for step in range(1, self._count + 1):
            candidate = (core + step) % self._count
            if candidate not in self._ended and candidate not in self._waiting:
                self._turn = candidate
                self._changed.notify_all()
                return
        raise self._fail(RendezvousError(self._story()))

    def _wait(self, core: int) -> None:
        while self._turn != core or core in self._waiting:
            if self.failure is not None:
                raise Stopped
            self._changed.wait()
        if self.failure is not None:
            raise Stopped

    def _story(self) -> str:
        parts = []
        for c in range(self._count):
            if c in self._waiting:
                parts.append(f"core {c} waits in {self._waiting[c].what}")
            elif c in self._ended:
                parts.append(f"core {c} has ended")
        return (
            "the cores do not meet: "
            + ", ".join(parts)
            + "; every core must issue the same sendrecv and core_barrier in the same order"
        )
