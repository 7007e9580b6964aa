"""What a block computes: frozen dataclasses that check themselves and whose repr evaluates back to them.

Owns the words of the contract (router, experts, scale modes). Knows no arrays, no backends, no formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from .gates import require

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
        require(self.num_experts >= 1, "num_experts", self.num_experts, "must be at least 1", "name the global expert count")
        require(
            1 <= self.top_k <= self.num_experts, "top_k", self.top_k,
            f"must lie in 1..num_experts ({self.num_experts})", "choose fewer experts per token",
        )
        _require_one_of("score", self.score, SCORES)
        _require_one_of("matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        require(self.norm_eps >= 0, "norm_eps", self.norm_eps, "must not be negative", "use 0.0 for no epsilon")
        require(math.isfinite(self.scale), "scale", self.scale, "must be finite", "use 1.0 for no scale")

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
        require(self.intermediate >= 1, "intermediate", self.intermediate, "must be at least 1", "name the expert's width I")
        _require_one_of("activation", self.activation, ACTIVATIONS)
        require(math.isfinite(self.alpha), "alpha", self.alpha, "must be finite", "gpt-oss uses 1.702")
        require(math.isfinite(self.up_offset), "up_offset", self.up_offset, "must be finite", "gpt-oss uses 1.0")
        for name in ("gate_clamp", "up_clamp"):
            bounds = getattr(self, name)
            ok = isinstance(bounds, tuple) and len(bounds) == 2
            require(ok, name, bounds, "must be a pair (lower, upper)", "use None for a bound that is absent")
            lower, upper = bounds
            for bound in bounds:
                require(bound is None or not math.isnan(bound), name, bounds, "a bound is NaN", "use None for no bound")
            ordered = lower is None or upper is None or lower <= upper
            require(ordered, name, bounds, "the lower bound exceeds the upper", "write (lower, upper)")


@dataclass(frozen=True)
class BlockSpec:
    """The whole feed-forward block of one decoder layer.

    - ``hidden``: stored width H. ``hidden_actual``: the width that divides the sum of squares when H is padded.
    - ``shared``: a shared expert that every token visits; ``shared_gate`` multiplies it by ``sigmoid(r @ w_gate)``.
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
        require(self.hidden >= 1, "hidden", self.hidden, "must be at least 1", "name the model width H")
        require(self.eps >= 0, "eps", self.eps, "must not be negative", "1e-6 and 1e-5 are usual")
        actual = self.hidden_actual
        require(
            actual is None or 1 <= actual <= self.hidden, "hidden_actual", actual,
            f"must lie in 1..hidden ({self.hidden})", "leave it None when H is not padded",
        )
        require(
            self.shared is not None or not self.shared_gate, "shared_gate", self.shared_gate,
            "needs a shared expert", "give shared=ExpertSpec(...) too",
        )
        require(
            self.affinity_scale is not ExpertAffinityScaleMode.PRE_SCALE_DELAYED, "affinity_scale", self.affinity_scale,
            "is a prefill-only mode", "use PRE_SCALE or POST_SCALE",
        )

    @property
    def norm_width(self) -> int:
        """The divisor of the sum of squares."""
        return self.hidden_actual or self.hidden


def _require_one_of(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, argument, repr(value), "is not known", f"choose one of {', '.join(allowed)}")
