"""Blocks with synthetic weights for the tests of a backend: every stored format, tokens that route clearly.

The reference's unrounded values are what a backend is held against; tokens that nearly tie are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

import moedecode as md
from moedecode.backends import Numerics
from moedecode.backends.reference import ReferenceBackend, maths
from moedecode.formats import WeightFormat
from moedecode.synthetic import block_weights, tokens

STRATEGIES = ("selective", "grouped", "all_expert")
MODES = tuple(md.ExpertAffinityScaleMode[name] for name in ("NO_SCALE", "POST_SCALE", "PRE_SCALE"))
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Stored:
    """How weights are stored: a format, the kind of its FP8 scales and the block order."""

    fmt: WeightFormat
    fp8_scale: str = "row"
    block_order: str = "contiguous"

    def __str__(self):
        scale = f"-{self.fp8_scale}" if self.fmt.is_fp8 else ""
        return f"{self.fmt.value}{scale}-{self.block_order}"

    def weights(self, spec, **options):
        """Synthetic weights of ``spec``, drawn once; see :func:`moedecode.synthetic.block_weights`."""
        drawn = block_weights(
            spec, self.fmt, fp8_scale=self.fp8_scale, block_order=self.block_order, **options
        )
        return replace(drawn, experts=replace(drawn.experts, expert=cache(drawn.experts.expert)))


FP8, MX = [f for f in WeightFormat if f.is_fp8], [f for f in WeightFormat if f.is_mx]
STORED = [
    *(Stored(f) for f in (WeightFormat.FP32, WeightFormat.FP16, WeightFormat.BF16)),
    *(Stored(f, scale) for f in FP8 for scale in ("row", "tensor", "block")),
    *(Stored(f) for f in MX),
    Stored(WeightFormat.BF16, block_order="trainium"),
    Stored(WeightFormat.FP8_E4M3, block_order="trainium"),
    *(Stored(f, block_order="trainium") for f in MX),
]


def spec_of(hidden=160, intermediate=72, experts=8, top_k=2, *, router=None, expert=None, **options):
    """A BlockSpec with biases and clamps; ``router`` and ``expert`` change options of their specs."""
    rules = {"pre_norm": False, "bias": True, "matmul_dtype": "float32"} | (router or {})
    mlp = {
        "activation": "swish",
        "up_offset": 1.0,
        "bias": True,
        "gate_clamp": (None, 7.0),
        "up_clamp": (-7.0, 7.0),
    }
    return md.BlockSpec(
        hidden, md.RouterSpec(experts, top_k, **rules), md.ExpertSpec(intermediate, **(mlp | (expert or {}))),
        **({"eps": 1e-5} | options),
    )  # fmt: skip


def reference(spec, weights, precision="a16", h_rounding=None):
    """The reference's block; "a16" and "a8" are exact there."""
    numerics = Numerics("mxfp8" if precision == "mxfp8" else "a16", h_rounding)
    return ReferenceBackend().block(spec, weights, weights.experts, weights.shared, numerics, 1)


def values(block, x, residual=None, strategy="grouped", first_expert=0):
    """The reference block's unrounded result."""
    return block.values(x, residual, strategy, first_expert)


def selection_gap(router, weights, r):
    """Distance between the last chosen and the first refused selection score of each row of ``r [T, H]``."""
    logits, _, _ = maths.route(r, weights.router, weights.router_bias, None, router)
    scores = logits
    if weights.selection_bias is not None:
        scores = maths.SCORES[router.score](logits) if router.pre_norm else logits
        scores = scores + weights.selection_bias.astype(np.float64)
    ordered = np.sort(np.pad(scores, ((0, 0), (1, 0)), constant_values=-np.inf), axis=-1)
    return ordered[:, -router.top_k] - ordered[:, -router.top_k - 1]


def clear_tokens(count, spec, weights, dtype="float32", seed=0):
    """``count`` tokens whose routing leaves no doubt; at most a fifth of all drawn may be set aside."""
    drawn = tokens(count + count // 4 + 4, spec.hidden, dtype, seed)
    drawn[:, spec.norm_width :] = 0
    normed = maths.rmsnorm(drawn.astype(np.float32), weights.gamma, spec.eps, spec.norm_width)
    clear = selection_gap(spec.router, weights, maths.rounded(normed, drawn.dtype)) > NEAR_TIE
    assert clear.sum() >= count, f"{(~clear).sum()} of {len(drawn)} tokens nearly tie"
    return drawn[clear][:count]
