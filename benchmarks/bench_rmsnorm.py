"""The norm: rows of gpt-oss' width, with and without a residual. Bytes: every row that is read or written."""

import pytest

from moedecode.backends import backend
from moedecode.synthetic import tokens
from sizes import DTYPE, TOKENS

HIDDEN = 2880


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("count", (*TOKENS, 2048))
def test_rmsnorm(rate, count, residual):
    cpu, gamma = backend("cpu"), tokens(1, HIDDEN, "float32")[0]

    def arguments(number):
        x = tokens(count, HIDDEN, DTYPE, seed=number)
        return x, tokens(count, HIDDEN, DTYPE, seed=-number - 1 + 10**6) if residual else None

    moved = 2 * count * HIDDEN * (4 if residual else 2)
    rate(lambda x, r: cpu.rmsnorm(x, gamma, 1e-5, HIDDEN, r), arguments, moved)
