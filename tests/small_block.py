"""Small random blocks, as specs and weights and as plain nested lists for the scalar implementation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import moedecode as md
from moedecode.backends import Numerics
from moedecode.backends.reference import ReferenceBackend


@dataclass
class SmallBlock:
    """Dense float32 arrays of one block: gate, up ``[E, I, H]``, down ``[E, H, I]``, router ``[E, H]``."""

    spec: md.BlockSpec
    arrays: dict[str, np.ndarray]
    block_order: str = "contiguous"

    def weights(self, local=slice(None)):
        """The block's weights; ``local`` slices the experts of one rank."""
        a = self.arrays
        biases = {f"{n}_bias": a[f"{n}_bias"][local] for n in ("gate", "up", "down") if f"{n}_bias" in a}
        experts = md.ExpertWeights.from_experts(
            a["gate"][local], a["up"][local], a["down"][local], **biases, block_order=self.block_order
        )
        shared = None
        if self.spec.shared is not None:
            shared = md.ExpertWeights.from_experts(
                [a["shared_gate_w"]], [a["shared_up_w"]], [a["shared_down_w"]]
            )
        optional = {n: a.get(n) for n in ("gamma", "router_bias", "selection_bias", "shared_gate")}
        return md.BlockWeights(a["router"], experts, shared=shared, **optional)

    def values(self, x, residual=None, strategy="grouped", rank=0, ranks=1, numerics=None):
        """The reference's unrounded result."""
        count = self.spec.router.num_experts // ranks
        weights = self.weights(slice(rank * count, (rank + 1) * count))
        block = ReferenceBackend().block(
            self.spec, weights, weights.experts, weights.shared, numerics or Numerics(), threads=1
        )
        return block.values(x, residual, strategy, rank * count)

    def block(self, backend, rank=0, ranks=1, **options):
        """A MoEBlock over the experts of one rank."""
        count = self.spec.router.num_experts // ranks
        weights = self.weights(slice(rank * count, (rank + 1) * count))
        return md.MoEBlock(self.spec, weights, backend=backend, rank_id=rank, **options)


def tokens(count, hidden, dtype=np.float32, seed=1):
    """Random hidden states ``[T, H]``."""
    return np.random.default_rng(seed).standard_normal((count, hidden)).astype(dtype)


def small_block(
    *,
    hidden=40,
    intermediate=33,
    experts=6,
    top_k=2,
    router=None,
    expert=None,
    seed=0,
    block_order="contiguous",
    **block_options,
):
    """A block with odd sizes; ``router`` and ``expert`` are options of their specs."""
    rng = np.random.default_rng(seed)
    router_spec = md.RouterSpec(experts, top_k, **({"matmul_dtype": "float32"} | (router or {})))
    expert_spec = md.ExpertSpec(intermediate, **(expert or {}))
    spec = md.BlockSpec(hidden, router_spec, expert_spec, **block_options)

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    arrays = {
        "gate": normal(experts, intermediate, hidden, scale=hidden**-0.5),
        "up": normal(experts, intermediate, hidden, scale=hidden**-0.5),
        "down": normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        "router": normal(experts, hidden, scale=hidden**-0.5),
        "gamma": 1 + normal(hidden, scale=0.1),
    }
    if expert_spec.bias:
        arrays |= {"gate_bias": normal(experts, intermediate), "up_bias": normal(experts, intermediate)}
        arrays["down_bias"] = normal(experts, hidden)
    if router_spec.bias:
        arrays["router_bias"] = normal(experts)
    if router_spec.selection_bias:
        arrays["selection_bias"] = normal(experts)
    if spec.shared is not None:
        width = spec.shared.intermediate
        arrays |= {"shared_gate_w": normal(width, hidden), "shared_up_w": normal(width, hidden)}
        arrays["shared_down_w"] = normal(hidden, width)
    if spec.shared_gate:
        arrays["shared_gate"] = normal(hidden)
    return SmallBlock(spec, arrays, block_order)
