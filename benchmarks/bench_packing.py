"""Packing experts from the checkpoint's layout into the cpu backend's. Bytes: those of the stored weights."""

import pytest

from moedecode import ExpertSpec, WeightFormat
from moedecode.backends import backend
from moedecode.plan import expert_bytes
from moedecode.synthetic import expert_weights

HIDDEN, EXPERTS = 2880, 4
SPEC = ExpertSpec(2880)


@pytest.mark.parametrize("fmt", list(WeightFormat), ids=lambda fmt: fmt.value)
def test_packing(rate, fmt):
    drawn = expert_weights(SPEC, HIDDEN, 1, fmt).expert(0)
    weights = expert_weights(SPEC, HIDDEN, EXPERTS, fmt)
    object.__setattr__(weights, "expert", lambda e: drawn)  # drawing random numbers is not what is timed
    moved = EXPERTS * expert_bytes(SPEC, HIDDEN, fmt)
    rate(backend("cpu").pack, lambda number: (weights,), moved, rounds=5)
