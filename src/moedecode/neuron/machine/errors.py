"""Owns the exception types of the machine model. Must not know instructions, tensors or chips."""

from __future__ import annotations

__all__ = ["CapacityError", "ConstraintViolation", "MachineError", "RaceError", "RendezvousError"]


class MachineError(Exception):
    """A program does what the modelled machine would not do, or would do with an undefined result."""


class ConstraintViolation(MachineError):
    """An instruction whose operands break a rule of the machine.

    Args:
        instruction: name of the instruction, as in `nki.isa`.
        operand: name of the operand and what was wrong with it (shape, dtype or value).
        rule: the rule that it breaks, and what to do instead.
    """

    def __init__(self, instruction: str, operand: str, rule: str) -> None:
        super().__init__(f"{instruction}: {operand}: {rule}")
        self.instruction = instruction
        self.operand = operand
        self.rule = rule

    def __reduce__(self) -> tuple[type[ConstraintViolation], tuple[str, str, str]]:
        return type(self), (self.instruction, self.operand, self.rule)


class RaceError(MachineError):
    """Two cores touch the same bytes of shared HBM, at least one writes, no barrier is between."""


class RendezvousError(MachineError):
    """The cores do not meet: one waits in sendrecv or core_barrier for a partner that does something else or
    has ended.
    """


class CapacityError(MachineError):
    """The tensors that are alive at one moment do not fit into SBUF or PSUM."""
