"""Holding that a call is refused: the exception, what its message names, and its four parts.

A message reads ``argument=value: rule; way out``.
"""

from __future__ import annotations

import pytest


def changed(make, changes):
    """Arguments made by ``make``, with ``changes``; weights, hidden and experts go into the making."""
    shape = {name: changes[name] for name in ("weights", "hidden", "experts") if name in changes}
    return make(**shape) | {name: value for name, value in changes.items() if name not in shape}


def assert_refused(call, exception, fragments):
    """``call`` raises exactly ``exception``, and its message holds every fragment."""
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception
    message = str(caught.value)
    for fragment in fragments:
        assert any(choice in message for choice in fragment.split("|")), message
    argument, _, rest = message.partition("=")
    assert argument and ": " in rest and "; " in rest, (
        f"{message!r} must name argument, value, rule and way out"
    )
