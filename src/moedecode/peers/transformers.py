"""Transformers: the norm and MoE modules of its models in bf16, with each of its expert implementations.

GptOss modules where the block is gpt-oss', Qwen3-MoE modules where it is a plain softmax router with SiLU
experts (OLMoE and Mixtral compute the same). Weights are those of our bf16 block; torch uses our threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import machine
from ..arrays import Array, as_numpy
from ..formats import WeightFormat
from ..spec import BlockSpec
from ..synthetic import block_weights
from ..weights import BlockWeights
from . import Engine, missing
from .families import is_gpt_oss, is_plain_softmax
from .torch_tensors import floats, tensor

__all__ = ["PEER"]

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
BOUND = 2e-2  # every product and sum is rounded to bfloat16
GATHER_SHARE = 0.3  # of memory: batched_mm copies the weights of every (token, expert) pair


class _Peer:
    """The modules of the models, outside of a model."""

    name = "transformers bf16"

    def available(self) -> str | None:
        """See :meth:`moedecode.peers.Peer.available`."""
        return missing("transformers", "torch")

    def refuses(self, spec: BlockSpec, fmt: WeightFormat) -> str | None:
        """See :meth:`moedecode.peers.Peer.refuses`."""
        if fmt is not WeightFormat.BF16:
            return f"its bf16 weights stand beside bf16, not {fmt.value}"
        if not (is_gpt_oss(spec) or is_plain_softmax(spec)):
            return "no module of it that is known here computes this block"
        return None

    def build(self, spec: BlockSpec, fmt: WeightFormat, threads: int, copies: int) -> list[Engine]:
        """See :meth:`moedecode.peers.Peer.build`."""
        import torch

        torch.set_num_threads(threads)
        weights = block_weights(spec, WeightFormat.BF16)
        layers = [_layer(spec, weights) for _ in range(copies)]
        gathered = spec.router.top_k * 2 * spec.experts.intermediate * spec.hidden * 2  # bytes for a token
        most = int(GATHER_SHARE * (machine.memory_available() or 1 << 62)) // gathered
        return [
            Engine(
                f"transformers {name}",
                [_call(*layer, name) for layer in layers],
                "bfloat16",
                weights,
                BOUND,
                most_tokens=most if name == "batched_mm" else None,
            )
            for name in IMPLEMENTATIONS
        ]


PEER = _Peer()


def _layer(spec: BlockSpec, weights: BlockWeights) -> tuple[Any, Any]:
    """(norm, MoE module) with our weights, bfloat16."""
    import torch

    with torch.device("meta"):
        norm, moe = _gpt_oss(spec) if is_gpt_oss(spec) else _qwen3(spec)
    norm, moe = (module.to(torch.bfloat16).to_empty(device="cpu").eval() for module in (norm, moe))
    with torch.no_grad():
        norm.weight.copy_(tensor(weights.gamma))
        (_fill_gpt_oss if is_gpt_oss(spec) else _fill_qwen3)(moe, weights)
    return norm, moe


def _gpt_oss(spec: BlockSpec) -> tuple[Any, Any]:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP, GptOssRMSNorm

    config = GptOssConfig(
        hidden_size=spec.hidden,
        intermediate_size=spec.experts.intermediate,
        num_local_experts=spec.router.num_experts,
        num_experts_per_tok=spec.router.top_k,
        swiglu_alpha=spec.experts.alpha,
        swiglu_limit=spec.experts.gate_clamp[1],
    )
    return GptOssRMSNorm(spec.hidden, spec.eps), GptOssMLP(config)


def _fill_gpt_oss(moe: Any, weights: BlockWeights) -> None:
    moe.router.weight.copy_(tensor(weights.router))
    moe.router.bias.copy_(tensor(weights.router_bias))
    w, own = weights.experts, moe.experts
    for e in range(w.num_experts):
        m = w.expert(e)
        for half, matrix in enumerate((m.gate, m.up)):
            own.gate_up_proj[e, :, half::2] = tensor(matrix.codes).T
        own.down_proj[e] = tensor(m.down.codes).T
    for half, bias in enumerate((w.gate_bias, w.up_bias)):
        own.gate_up_proj_bias[:, half::2] = floats(bias)
    own.down_proj_bias.copy_(floats(w.down_bias))


def _qwen3(spec: BlockSpec) -> tuple[Any, Any]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=spec.hidden,
        moe_intermediate_size=spec.experts.intermediate,
        num_experts=spec.router.num_experts,
        num_experts_per_tok=spec.router.top_k,
        norm_topk_prob=spec.router.norm_topk_prob,
        hidden_act="silu",
    )
    return Qwen3MoeRMSNorm(spec.hidden, spec.eps), Qwen3MoeSparseMoeBlock(config)


def _fill_qwen3(moe: Any, weights: BlockWeights) -> None:
    moe.gate.weight.copy_(tensor(weights.router))
    for e in range(weights.experts.num_experts):
        m = weights.experts.expert(e)
        rows = m.gate.shape[0]
        moe.experts.gate_up_proj[e, :rows] = tensor(m.gate.codes)
        moe.experts.gate_up_proj[e, rows:] = tensor(m.up.codes)
        moe.experts.down_proj[e] = tensor(m.down.codes)


def _call(norm: Any, moe: Any, implementation: str) -> Callable[[Array], Array]:
    import torch

    def run(hidden: Array) -> Array:
        # one module serves all implementations, so that they share a copy of the weights
        moe.experts.config._experts_implementation = implementation
        with torch.inference_mode():
            out = moe(norm(tensor(hidden))[None])
        return as_numpy((out[0] if isinstance(out, tuple) else out)[0], "out")

    return run
