"""Owns the scalar registers of a core. Must not know instructions beyond the one that loads a register."""

from __future__ import annotations

__all__ = ["Register"]


class Register:
    """A scalar register: the condition of a dynamic `while`, or the dynamic offset of an access pattern."""

    __slots__ = ("name", "value")

    def __init__(self, value: int = 0, name: str = "register") -> None:
        self.value = int(value)
        self.name = name

    def __bool__(self) -> bool:
        return self.value != 0

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"{self.name}={self.value}"
