"""The operators and activation functions that instructions take: names of nki.language, arithmetic of NumPy.

Owns what each operator computes on float32 (or integer) arrays. Knows no tensors, engines or instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import Array

__all__ = ["OPS", "Op"]


class Op:
    """One operator: ``kind`` is "arithmetic", "compare", "bitwise" or "unary"; call it on arrays."""

    def __init__(self, name: str, kind: str, function: Callable[..., Any], reduce: Any = None) -> None:
        self.name = name
        self.kind = kind
        self._function = function
        self._reduce = reduce

    def __call__(self, *operands: Any) -> Array:
        """The result on NumPy arrays that broadcast against each other."""
        result: Array = self._function(*operands)
        return result

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (_named, (self.name,))  # one object per name: copies and pickles are the same operator

    @property
    def reduces(self) -> bool:
        """True when :meth:`reduce` exists."""
        return self._reduce is not None

    def reduce(self, values: Array, axis: int | tuple[int, ...]) -> Array:
        """Reduce along ``axis``, which stays with size one."""
        result: Array = self._reduce(values, axis=axis, keepdims=True)
        return result


OPS: dict[str, Op] = {}
"""Name in nki.language -> operator."""


def _named(name: str) -> Op:
    return OPS[name]


def _define(kind: str, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        OPS[name.rstrip("_")] = Op(name.rstrip("_"), kind, function)


def _reducible(name: str, reduce: Any) -> None:
    OPS[name] = Op(name, OPS[name].kind, OPS[name]._function, reduce)


def _as_float(compare: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compare(a, b).astype(np.float32)  # the engines write 1.0 and 0.0


def _sigmoid(x: Array) -> Array:
    one = np.float32(1)
    found: Array = one / (one + np.exp(-x))
    return found


def _erf(x: Array) -> Array:
    return np.fromiter(map(math.erf, x.ravel()), np.float64, x.size).reshape(x.shape).astype(x.dtype)


def _gelu(x: Array) -> Array:
    # erfc keeps the negative tail, which 1 + erf(x / sqrt 2) would round away.
    upper = np.fromiter(map(math.erfc, (x * -math.sqrt(0.5)).ravel()), np.float64, x.size).reshape(x.shape)
    return (0.5 * x * upper).astype(x.dtype)


def _gelu_tanh(x: Array) -> Array:
    half, cubic, root = np.float32(0.5), np.float32(0.044715), np.float32(math.sqrt(2 / math.pi))
    found: Array = half * x * (np.float32(1) + np.tanh(root * (x + cubic * x * x * x)))
    return found


_define(
    "arithmetic",
    add=np.add,
    subtract=np.subtract,
    multiply=np.multiply,
    divide=np.divide,
    maximum=np.maximum,
    minimum=np.minimum,
    power=np.power,
    mod=np.mod,
)
_define(
    "compare",
    equal=_as_float(np.equal),
    not_equal=_as_float(np.not_equal),
    less=_as_float(np.less),
    less_equal=_as_float(np.less_equal),
    greater=_as_float(np.greater),
    greater_equal=_as_float(np.greater_equal),
    logical_and=_as_float(np.logical_and),
    logical_or=_as_float(np.logical_or),
    logical_xor=_as_float(np.logical_xor),
)
_define(
    "bitwise",
    bitwise_and=np.bitwise_and,
    bitwise_or=np.bitwise_or,
    bitwise_xor=np.bitwise_xor,
    left_shift=np.left_shift,
    right_shift=np.right_shift,
)
_define(
    "unary",
    copy=lambda x: x,
    abs_=np.abs,
    negative=np.negative,
    square=np.square,
    sqrt=np.sqrt,
    rsqrt=lambda x: np.float32(1) / np.sqrt(x),
    reciprocal=lambda x: np.float32(1) / x,
    exp=np.exp,
    log=np.log,
    tanh=np.tanh,
    sin=np.sin,
    cos=np.cos,
    sign=np.sign,
    erf=_erf,
    relu=lambda x: np.maximum(x, np.float32(0)),
    sigmoid=_sigmoid,
    silu=lambda x: x * _sigmoid(x),
    softplus=lambda x: np.logaddexp(x, np.float32(0)),
    gelu=_gelu,
    gelu_apprx_tanh=_gelu_tanh,
    # The name's own approximation: x * sigmoid(1.702 x), which is Swish with that alpha.
    gelu_apprx_sigmoid=lambda x: x * _sigmoid(np.float32(1.702) * x),
)
_reducible("add", np.sum)
_reducible("multiply", np.prod)
_reducible("maximum", np.max)
_reducible("minimum", np.min)
