"""What a block computes: frozen dataclasses that check themselves and whose repr evaluates back to them.

Owns the words of the contract (router, experts, scale modes). Knows no arrays, no backends, no formats.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

from .gates import invalid, require

__all__ = [
    "ACTIVATIONS",
    "PRECISIONS",
    "STRATEGIES",
    "ActFn",
    "BlockSpec",
    "ExpertAffinityScaleMode",
    "ExpertSpec",
    "RouterActFn",
    "RouterSpec",
]

SCORES = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_tanh", "relu2", "relu")
MATMUL_DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = ("a16", "a8", "mxfp8")
STRATEGIES = ("auto", "selective", "grouped", "all_expert")

Clamp = tuple[float | None, float | None]


class _NamedEnum(Enum):
    """An enum whose repr is the expression that names it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class RouterActFn(_NamedEnum):
    """Score function of the router, as the flat functions name it."""

    SIGMOID = 0
    SOFTMAX = 1


class ActFn(_NamedEnum):
    """Activation of the gate projection, as the flat functions name it. Swish is g*sigmoid(1.702*g)."""

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3


class ExpertAffinityScaleMode(_NamedEnum):
    """Where the affinity multiplies: nowhere, the expert's output, or the expert's input."""

    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2
    PRE_SCALE_DELAYED = 3


@dataclass(frozen=True)
class RouterSpec:
    """How tokens choose experts.

    ``logits = r @ W + bias``; the ``top_k`` largest selection scores win, ties go to the lowest expert id.

    - ``score``: "softmax" or "sigmoid", applied to all logits before top-k (``pre_norm=True``) or to the
      selected logits only (``pre_norm=False``).
    - ``norm_topk_prob``: divide the selected affinities by (their sum + ``norm_eps``).
    - ``bias``: the logits have a bias. ``selection_bias``: a second bias is added to the selection scores
      only, never to the affinities (DeepSeek-V3).
    - ``scale`` multiplies the affinities last.
    - ``matmul_dtype``: the normed hidden state is rounded to it before the router's product.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    pre_norm: bool = True
    norm_topk_prob: bool = False
    norm_eps: float = 0.0
    bias: bool = False
    selection_bias: bool = False
    scale: float = 1.0
    matmul_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _store_counts(self, num_experts="name the global expert count", top_k="name the experts per token")
        _store_flags(self, "pre_norm", "norm_topk_prob", "bias", "selection_bias")
        _store_finite(self, norm_eps="use 0.0 for no epsilon", scale="use 1.0 for no scale")
        require(
            self.top_k <= self.num_experts,
            "top_k",
            self.top_k,
            f"must lie in 1..num_experts ({self.num_experts})",
            "choose fewer experts per token",
        )
        _require_one_of("score", self.score, SCORES)
        _require_one_of("matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        require(self.norm_eps >= 0, "norm_eps", self.norm_eps, "must not be negative", "0.0 is no epsilon")

    @property
    def dense_affinities(self) -> bool:
        """True when the affinity row keeps all E entries, so that a leaf has to mask it (the keystone)."""
        return self.pre_norm and not self.norm_topk_prob


@dataclass(frozen=True)
class ExpertSpec:
    """One expert's MLP: ``h = act(clamp(r@Wg + bg)) * (clamp(r@Wu + bu) + up_offset)``, ``y = h@Wd + bd``.

    - ``activation``: one of :data:`ACTIVATIONS`; ``alpha`` is the factor of "swish", ``g*sigmoid(alpha*g)``.
    - ``gate_clamp`` and ``up_clamp`` are ``(lower, upper)``; either bound may be None.
    """

    intermediate: int
    activation: str = "silu"
    alpha: float = 1.702
    up_offset: float = 0.0
    gate_clamp: Clamp = (None, None)
    up_clamp: Clamp = (None, None)
    bias: bool = False

    def __post_init__(self) -> None:
        _store_counts(self, intermediate="name the expert's width I")
        _store_flags(self, "bias")
        _store_finite(self, alpha="gpt-oss uses 1.702", up_offset="gpt-oss uses 1.0")
        _require_one_of("activation", self.activation, ACTIVATIONS)
        for name in ("gate_clamp", "up_clamp"):
            bounds = getattr(self, name)
            ok = isinstance(bounds, tuple) and len(bounds) == 2
            require(ok, name, bounds, "must be a pair (lower, upper)", "use None for a bound that is absent")
            for bound in bounds:
                number = bound is None or _is_finite(bound)
                require(number, name, bounds, "a bound is not a finite number", "use None for no bound")
            lower, upper = (None if bound is None else float(bound) for bound in bounds)
            object.__setattr__(self, name, (lower, upper))
            ordered = lower is None or upper is None or lower <= upper
            require(ordered, name, bounds, "the lower bound exceeds the upper", "write (lower, upper)")


@dataclass(frozen=True)
class BlockSpec:
    """The whole feed-forward block of one decoder layer.

    - ``hidden``: stored width H. ``hidden_actual``: what divides the sum of squares when H is padded.
    - ``shared``: an expert that every token visits; ``shared_gate`` multiplies it by ``sigmoid(r @ w_gate)``.
    - ``affinity_scale``: where the affinity multiplies (POST_SCALE unless a model says otherwise).
    """

    hidden: int
    router: RouterSpec
    experts: ExpertSpec
    eps: float = 1e-6
    hidden_actual: int | None = None
    shared: ExpertSpec | None = None
    shared_gate: bool = False
    affinity_scale: ExpertAffinityScaleMode = ExpertAffinityScaleMode.POST_SCALE

    def __post_init__(self) -> None:
        _store_counts(self, hidden="name the model width H")
        _store_flags(self, "shared_gate")
        _store_finite(self, eps="1e-6 and 1e-5 are usual")
        _require_kind("router", self.router, RouterSpec)
        _require_kind("experts", self.experts, ExpertSpec)
        _require_kind("affinity_scale", self.affinity_scale, ExpertAffinityScaleMode)
        if self.shared is not None:
            _require_kind("shared", self.shared, ExpertSpec)
        if self.hidden_actual is not None:
            _store_counts(self, hidden_actual="leave it None when H is not padded")
        require(self.eps >= 0, "eps", self.eps, "must not be negative", "1e-6 and 1e-5 are usual")
        actual = self.hidden_actual
        require(
            actual is None or actual <= self.hidden,
            "hidden_actual",
            actual,
            f"must lie in 1..hidden ({self.hidden})",
            "leave it None when H is not padded",
        )
        require(
            self.shared is not None or not self.shared_gate,
            "shared_gate",
            self.shared_gate,
            "needs a shared expert",
            "give shared=ExpertSpec(...) too",
        )
        require(
            self.affinity_scale is not ExpertAffinityScaleMode.PRE_SCALE_DELAYED,
            "affinity_scale",
            self.affinity_scale,
            "is a prefill-only mode",
            "use PRE_SCALE or POST_SCALE",
        )

    @property
    def norm_width(self) -> int:
        """The divisor of the sum of squares."""
        return self.hidden_actual or self.hidden


def _require_one_of(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    known = isinstance(value, str) and value in allowed
    require(known, argument, repr(value), "is not known", f"choose one of {', '.join(allowed)}")


def _require_kind(argument: str, value: Any, kind: type) -> None:
    rule, instead = f"must be of type {kind.__name__}", f"use moedecode.{kind.__name__}"
    require(isinstance(value, kind), argument, repr(value), rule, instead)


def _store_flags(spec: Any, *names: str) -> None:
    """Check that these fields are True or False (of any boolean type) and store them as plain bools."""
    for name in names:
        value = getattr(spec, name)
        flag = type(value).__name__ in ("bool", "bool_")
        require(flag, name, repr(value), "must be True or False", "write one of them")
        object.__setattr__(spec, name, bool(value))


def _store_counts(spec: Any, **ways_out: str) -> None:
    """Check that these fields are whole numbers of at least 1 and store them as plain ints."""
    for name, instead in ways_out.items():
        value = getattr(spec, name)
        try:
            count = operator.index(value)
        except TypeError:
            raise invalid(name, repr(value), "must be a whole number", instead) from None
        require(count >= 1, name, count, "must be at least 1", instead)
        object.__setattr__(spec, name, count)


def _store_finite(spec: Any, **ways_out: str) -> None:
    """Check that these fields are finite numbers and store them as plain floats."""
    for name, instead in ways_out.items():
        value = getattr(spec, name)
        require(_is_finite(value), name, repr(value), "must be a finite number", instead)
        object.__setattr__(spec, name, float(value))


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int past the largest float
        return False
