"""Known models: the BlockSpec of one decoder layer's feed-forward block, by name.

Owns numbers from public model configurations. Knows specs only; a model is listed when the spec computes its
block exactly (DeepSeek-V3 is not: its router limits groups of experts).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from .gates import InvalidInput
from .spec import BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec

__all__ = ["UnknownPreset", "presets"]


class UnknownPreset(InvalidInput, KeyError):
    """No preset has this name; the message names the closest ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError alone would print the repr


class _Presets(Mapping[str, BlockSpec]):
    """A read-only mapping from model name to :class:`BlockSpec`."""

    def __init__(self, specs: Mapping[str, BlockSpec]) -> None:
        self._specs = dict(specs)

    def __getitem__(self, name: str) -> BlockSpec:
        if isinstance(name, str) and name in self._specs:
            return self._specs[name]
        close = difflib.get_close_matches(str(name).lower(), self._specs, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(self._specs)}"
        raise UnknownPreset(f"preset={name!r}: is not known; {hint}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        return f"presets({', '.join(self._specs)})"


def _gpt_oss(num_experts: int) -> BlockSpec:
    """Biased logits; softmax over the chosen four; clamped Swish with (up + 1)."""
    return BlockSpec(
        hidden=2880,
        eps=1e-5,
        router=RouterSpec(num_experts=num_experts, top_k=4, pre_norm=False, bias=True),
        experts=ExpertSpec(
            intermediate=2880,
            activation="swish",
            alpha=1.702,
            up_offset=1.0,
            gate_clamp=(None, 7.0),
            up_clamp=(-7.0, 7.0),
            bias=True,
        ),
    )


def _softmax(
    hidden: int, intermediate: int, num_experts: int, top_k: int, *, normalised: bool, eps: float = 1e-6
) -> BlockSpec:
    """Softmax over all experts, then top-k, renormalised or not: most public models."""
    return BlockSpec(
        hidden=hidden,
        eps=eps,
        router=RouterSpec(num_experts=num_experts, top_k=top_k, norm_topk_prob=normalised),
        experts=ExpertSpec(intermediate=intermediate),
    )


def _with_gated_shared(spec: BlockSpec, intermediate: int) -> BlockSpec:
    """A shared expert times a sigmoid gate (Qwen2-MoE, Qwen3-Next)."""
    return replace(spec, shared=ExpertSpec(intermediate=intermediate), shared_gate=True)


def _glm_4_5(hidden: int, intermediate: int, num_experts: int, scale: float) -> BlockSpec:
    """The router of DeepSeek-V3 with one group (a bias selects but does not weigh), a plain shared expert."""
    router = RouterSpec(
        num_experts=num_experts,
        top_k=8,
        score="sigmoid",
        norm_topk_prob=True,
        norm_eps=1e-20,
        selection_bias=True,
        scale=scale,
        matmul_dtype="float32",
    )
    expert = ExpertSpec(intermediate=intermediate)
    return BlockSpec(hidden=hidden, eps=1e-5, router=router, experts=expert, shared=expert)


def _llama_4(num_experts: int) -> BlockSpec:
    """One expert per token; the sigmoid of its logit multiplies the expert's input; a plain shared expert."""
    expert = ExpertSpec(intermediate=8192)
    return BlockSpec(
        hidden=5120,
        eps=1e-5,
        router=RouterSpec(num_experts=num_experts, top_k=1, score="sigmoid", pre_norm=False),
        experts=expert,
        shared=expert,
        affinity_scale=ExpertAffinityScaleMode.PRE_SCALE,
    )


presets: Mapping[str, BlockSpec] = _Presets(
    {
        "gpt-oss-20b": _gpt_oss(32),
        "gpt-oss-120b": _gpt_oss(128),
        "qwen3-30b-a3b": _softmax(2048, 768, 128, 8, normalised=True),
        "qwen3-235b-a22b": _softmax(4096, 1536, 128, 8, normalised=True),
        "qwen3-next-80b-a3b": _with_gated_shared(_softmax(2048, 512, 512, 10, normalised=True), 512),
        "qwen1.5-moe-a2.7b": _with_gated_shared(_softmax(2048, 1408, 60, 4, normalised=False), 5632),
        "qwen2-57b-a14b": _with_gated_shared(_softmax(3584, 2560, 64, 8, normalised=False), 20480),
        "olmoe-1b-7b": _softmax(2048, 1024, 64, 8, normalised=False, eps=1e-5),
        "mixtral-8x7b": _softmax(4096, 14336, 8, 2, normalised=True, eps=1e-5),
        "mixtral-8x22b": _softmax(6144, 16384, 8, 2, normalised=True, eps=1e-5),
        "jamba-v0.1": _softmax(4096, 14336, 16, 2, normalised=False),
        "glm-4.5": _glm_4_5(5120, 1536, 160, 2.5),
        "glm-4.5-air": _glm_4_5(4096, 1408, 128, 1.0),
        "llama-4-scout": _llama_4(16),
        "llama-4-maverick": _llama_4(128),
    }
)
"""BlockSpec of the known models. Qwen3-Next stores gamma - 1: add 1 to its norm weights."""
