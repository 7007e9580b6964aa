"""Operators: float32 in and out, activation functions against float64 formulas, one object per name."""

import copy
import math
import pickle

import numpy as np
import pytest

from moedecode.neuron.machine.ops import OPS

X = np.concatenate([np.linspace(-12, 12, 4001), [-90.0, -1e-6, 0.0, 1e-6, 90.0]]).astype(np.float32)
WIDE = X.astype(np.float64)
ERF = np.vectorize(math.erf)
ERFC = np.vectorize(math.erfc)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


TRUTH = {
    "copy": WIDE,
    "square": WIDE**2,
    "exp": np.exp(WIDE),
    "sigmoid": sigmoid(WIDE),
    "silu": WIDE * sigmoid(WIDE),
    "gelu_apprx_sigmoid": WIDE * sigmoid(1.702 * WIDE),
    "gelu": 0.5 * WIDE * ERFC(-WIDE / math.sqrt(2)),
    "gelu_apprx_tanh": 0.5 * WIDE * (1 + np.tanh(math.sqrt(2 / math.pi) * (WIDE + 0.044715 * WIDE**3))),
    "erf": ERF(WIDE),
    "tanh": np.tanh(WIDE),
    "relu": np.maximum(WIDE, 0),
    "abs": np.abs(WIDE),
}


@pytest.mark.parametrize("name", TRUTH)
def test_activation_against_float64(name: str) -> None:
    with np.errstate(all="ignore"):
        got = OPS[name](X)
    assert got.dtype == np.float32
    want = TRUTH[name]
    # exp of a rounded argument is off by |x| * 2^-24; tanh-GELU cancels below -3, in units of x; below 1e-37
    # sigmoid underflows.
    cancels = 2e-7 * np.abs(WIDE) if name == "gelu_apprx_tanh" else 0
    fits = np.abs(want) < 3e38
    assert (np.abs(got - want) <= 1e-5 * np.abs(want) + cancels + 1e-37)[fits].all()


@pytest.mark.parametrize("name", ["rsqrt", "sqrt", "log", "reciprocal"])
def test_functions_of_positive_numbers(name: str) -> None:
    x = np.geomspace(1e-6, 1e6, 1001).astype(np.float32)
    wide = x.astype(np.float64)
    want = {"rsqrt": wide**-0.5, "sqrt": wide**0.5, "log": np.log(wide), "reciprocal": 1 / wide}[name]
    got = OPS[name](x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_comparisons_are_ones_and_zeros(name: str) -> None:
    a, b = np.float32([1, 2, 3]), np.float32([2, 2, 2])
    got = OPS[name](a, b)
    assert got.dtype == np.float32
    assert got.tolist() == getattr(np, name)(a, b).astype(float).tolist()


def test_one_object_per_operator() -> None:
    assert copy.deepcopy(OPS["add"]) is OPS["add"]
    assert pickle.loads(pickle.dumps(OPS["silu"])) is OPS["silu"]
    assert repr(OPS["abs"]) == "nl.abs"


def test_only_associative_operators_reduce() -> None:
    assert {name for name, op in OPS.items() if op.reduces} == {"add", "multiply", "maximum", "minimum"}
