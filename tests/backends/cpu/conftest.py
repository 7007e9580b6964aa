"""The instruction sets of this machine: a test may switch them, the one in use before comes back after it."""

from __future__ import annotations

import pytest

from moedecode import _native


@pytest.fixture(autouse=True)
def _restored_isa():
    before = _native.isa()
    yield
    _native.use_isa(before)


@pytest.fixture(params=_native.available_isas())
def isa(request):
    """The test runs once on every instruction set."""
    _native.use_isa(request.param)
    return request.param
