"""Random blocks for `moe_block_tkg`: the kernel's arguments, and the reference's unrounded values."""

from __future__ import annotations

import numpy as np
from plain_leaves import FP32, random_experts

from moedecode.backends import Numerics
from moedecode.backends.reference import ReferenceBlock
from moedecode.neuron.kernels.moe_block_tkg import moe_block_tkg
from moedecode.neuron.kernels.tiles import ExpertOptions
from moedecode.neuron.machine import Machine
from moedecode.spec import BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from moedecode.weights import BlockWeights, ExpertWeights

POST = ExpertAffinityScaleMode.POST_SCALE
EPS = 1e-5


class Block:
    """One random block with experts of ``dtype``, everything else in ``io``."""

    def __init__(
        self, tokens, hidden=256, i=96, experts=8, k=3, io=FP32, dtype=FP32, router=None, spec=None,
        mode=POST, bias=True, shared=None, shared_gate=False, local=None, rank=0, residual=False, seed=0,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        local = experts if local is None else local
        self.rank, self.local, self.io = rank, local, io
        made = random_experts(experts, hidden, i, dtype, bias, seed=seed + 1)
        own = slice(rank * local, (rank + 1) * local)
        tensors = {name: None if a is None else a[own] for name, a in made.tensors.items()}
        scales = {name: a for name, a in tensors.items() if name not in ("gate_up", "down")}
        reference = ExpertWeights.from_flat(tensors["gate_up"], tensors["down"], **scales)
        self.x = rng.normal(size=(tokens, hidden)).astype(io)
        self.residual = rng.normal(size=(tokens, hidden)).astype(io) if residual else None
        gamma = rng.uniform(0.5, 1.5, hidden).astype(io)
        weight = (rng.normal(size=(experts, hidden)) * 2 * hidden**-0.5).astype(io)
        router_bias = rng.normal(size=experts).astype(io)
        given = {"pre_norm": False} | (router or {})
        selection = rng.normal(size=experts).astype(io) if given.get("selection_bias") else None
        routing = RouterSpec(experts, k, bias=True, matmul_dtype=io.name, **given)
        spec = spec or ExpertSpec(intermediate=i, activation="silu", bias=bias)
        self.arguments = {
            "inp": self.x[None], "gamma": gamma[None], "router_weights": np.ascontiguousarray(weight.T),
            "router_bias": router_bias[None], "eps": EPS, "top_k": k, "router_act_fn": routing.score,
            "router_pre_norm": routing.pre_norm, "norm_topk_prob": routing.norm_topk_prob,
            "router_mm_dtype": io, "expert_affinities_scaling_mode": mode, "hidden_act_fn": spec.activation,
            "hidden_act_scale_factor": spec.alpha if spec.activation == "swish" else None,
            "hidden_act_bias": spec.up_offset,
            "residual": None if self.residual is None else self.residual[None],
            "router_selection_bias": None if selection is None else selection[None],
            "router_scale": routing.scale, "router_norm_eps": routing.norm_eps,
            "router_normalise_post_norm": routing.norm_topk_prob,
        }  # fmt: skip
        for name, (low, high) in (("gate", spec.gate_clamp), ("up", spec.up_clamp)):
            self.arguments |= {f"{name}_clamp_lower_limit": low, f"{name}_clamp_upper_limit": high}
        for name, argument in (("gate_up", "expert_gate_up_weights"), ("down", "expert_down_weights")):
            self.arguments |= {argument: tensors[name], f"{argument}_scale": tensors[f"{name}_scale"]}
            self.arguments[argument.replace("weights", "bias")] = tensors[f"{name}_bias"]
        self.shared_weights = shared_gate_w = None
        if shared is not None:
            self.shared_weights = self._shared(rng, hidden, shared, io)
            if shared_gate:
                shared_gate_w = (rng.normal(size=hidden) * 2 * hidden**-0.5).astype(io)
                self.arguments["shared_expert_sigmoid_gate_w"] = shared_gate_w[:, None]
        self.spec = BlockSpec(
            hidden, routing, spec, EPS, shared=shared, shared_gate=shared_gate, affinity_scale=mode
        )
        self.weights = BlockWeights(
            weight, reference, gamma, router_bias, selection, self.shared_weights, shared_gate_w
        )

    def _shared(self, rng, hidden, spec, io):
        i = spec.intermediate
        gate, up = ((rng.normal(size=(hidden, i)) * hidden**-0.5).astype(io) for _ in range(2))
        down = (rng.normal(size=(i, hidden)) * i**-0.5).astype(io)
        biases = {}
        if spec.bias:
            for name, n in (("gate", i), ("up", i), ("down", hidden)):
                biases[f"{name}_bias"] = rng.normal(size=(1, n)).astype(io)
        self.arguments |= {
            "shared_expert_gate_w": gate,
            "shared_expert_up_w": up,
            "shared_expert_down_w": down,
        }
        self.arguments |= {f"shared_expert_{name}": value for name, value in biases.items()}
        self.arguments["shared_expert_options"] = ExpertOptions(
            spec.activation, spec.alpha, spec.up_offset, spec.gate_clamp, spec.up_clamp
        )
        return ExpertWeights.from_experts([gate.T], [up.T], [down.T], **biases)

    def run(self, all_expert, cores=2, chip="trn3", **more):
        """({name: output}, report)."""
        given = self.arguments | {"is_all_expert": all_expert} | more
        if all_expert or self.local < self.spec.router.num_experts:
            given["rank_id"] = np.array([[self.rank]], np.int32)
        result = Machine(chip).run(moe_block_tkg, n_programs=cores, **given)
        names = ["out"]
        names += [] if given.get("skip_router_logits") else ["router_logits"]
        names += [] if self.residual is None else ["residual_out"]
        names += ["expert_index", "expert_affinities"] if given.get("return_routing") else []
        assert len(names) == len(result.outputs)
        return dict(zip(names, result.outputs, strict=True)), result.report

    def want(self, all_expert):
        """The reference's unrounded values."""
        block = ReferenceBlock(self.spec, self.weights, Numerics("a16", None))
        strategy = "all_expert" if all_expert else "selective"
        with np.errstate(all="ignore"):
            return block.values(self.x, self.residual, strategy, self.rank * self.local)
