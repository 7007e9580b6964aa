"""What every backend refuses, and the exceptions it refuses with.

Owns the exception types and the wording of a refusal. Knows nothing of specs, arrays or backends.
"""

from __future__ import annotations

from typing import Any


class MoEDecodeError(Exception):
    """Base of every exception that moedecode raises on purpose."""


class InvalidInput(MoEDecodeError, ValueError):
    """An argument is malformed: wrong shape, dtype, range or memory. No work was done."""


class UnsupportedConfig(MoEDecodeError, ValueError):
    """The request is well formed, but this backend does not do it. No work was done."""


class MissingExtra(MoEDecodeError, ImportError):
    """An optional dependency is not installed."""


def _sentence(argument: str, value: Any, rule: str, instead: str) -> str:
    return f"{argument}={value}: {rule}; {instead}"


def invalid(argument: str, value: Any, rule: str, instead: str) -> InvalidInput:
    """The exception for a malformed argument: what it is, what it was, the rule, the way out."""
    return InvalidInput(_sentence(argument, value, rule, instead))


def unsupported(argument: str, value: Any, rule: str, instead: str) -> UnsupportedConfig:
    """The exception for a request a backend does not do: same four parts as :func:`invalid`."""
    return UnsupportedConfig(_sentence(argument, value, rule, instead))


def require(condition: bool, argument: str, value: Any, rule: str, instead: str) -> None:
    """Raise :class:`InvalidInput` unless ``condition`` holds."""
    if not condition:
        raise invalid(argument, value, rule, instead)
