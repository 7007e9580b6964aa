"""HBM bytes of the megakernel, from the ledger, against the floor: 1.02 times at most, at real sizes.

Ledger-only mode: the dimensions are those of gpt-oss-120b (2880 padded to 3072), Qwen3-235B and DeepSeek-V3
with I cut into 8 tensor-parallel shards, and 8 experts on the rank in all-expert mode.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from plain_leaves import BF16, E4M3
from whole_blocks import Block

from moedecode.formats import WeightFormat
from moedecode.neuron.floor import BlockSize, floor, floor_bytes
from moedecode.neuron.kernels.moe_block_tkg import moe_block_tkg
from moedecode.neuron.machine import Machine, StandIn, dtypes
from moedecode.spec import ExpertSpec

ALLOWED = 1.02
LOCAL = 8
MODELS = {
    "gpt-oss-120b": BlockSize(3072, 384, 128, 4, WeightFormat.MXFP4, bias_bytes=2, router_bias=True),
    "qwen3-235b": BlockSize(4096, 192, 128, 8, WeightFormat.BF16),
    "deepseek-v3": BlockSize(7168, 256, 256, 8, WeightFormat.FP8_E4M3),
}
PLAIN = {WeightFormat.BF16: BF16, WeightFormat.FP8_E4M3: E4M3}
X4 = {WeightFormat.MXFP4: dtypes.float4_e2m1fn_x4, WeightFormat.MXFP8_E4M3: dtypes.float8_e4m3fn_x4}


def experts(size):
    """Stand-ins of the experts on the rank."""
    n, h, i = size.here, size.hidden, size.intermediate
    if size.fmt.is_mx:
        lanes = 128 if i >= 512 else 8 * math.ceil(i / 32)
        tiles, u8 = math.ceil(i / 512), np.dtype(np.uint8)
        shapes = {
            "gate_up_weights": ((n, 128, 2, h // 512, i), X4[size.fmt]),
            "down_weights": ((n, lanes, tiles, h), X4[size.fmt]),
            "gate_up_weights_scale": ((n, 16, 2, h // 512, i), u8),
            "down_weights_scale": ((n, math.ceil(lanes / 8), tiles, h), u8),
            "gate_up_bias": ((n, lanes, 2, tiles, 4), BF16),
        }
    else:
        dtype, f32 = PLAIN[size.fmt], np.dtype(np.float32)
        shapes = {"gate_up_weights": ((n, h, 2, i), dtype), "down_weights": ((n, i, h), dtype)}
        shapes["gate_up_bias"] = ((n, 2, i), BF16)
        if size.fmt.is_fp8:
            shapes |= {"gate_up_weights_scale": ((n, 2, i), f32), "down_weights_scale": ((n, h), f32)}
    shapes["down_bias"] = ((n, h), BF16)
    wanted = {name: s for name, s in shapes.items() if size.bias_bytes or "bias" not in name}
    return {f"expert_{name}": StandIn(*s) for name, s in wanted.items()}


def report_of(size, leaf, tokens, **more):
    h, e = size.hidden, size.experts
    given = experts(size) | {
        "inp": StandIn((1, tokens, h), BF16), "gamma": StandIn((1, h), BF16),
        "router_weights": StandIn((h, e), BF16), "top_k": size.top_k, "router_act_fn": "softmax",
        "router_pre_norm": False, "expert_affinities_scaling_mode": "post_scale",
        "is_all_expert": leaf == "all_expert", "distinct": leaf == "distinct",
    }  # fmt: skip
    if size.router_bias:
        given["router_bias"] = StandIn((1, e), BF16)
    if leaf == "all_expert":
        given["rank_id"] = np.array([[1]], np.int32)
    return Machine("trn3", compute=False).run(moe_block_tkg, **given | more).report


def held(report, size, leaf, tokens, **what):
    least = floor_bytes(size, leaf, tokens, **what)
    ratio = report.hbm_bytes / least
    parts = ", ".join(f"{row.name} {sum(row.read) + sum(row.written)}" for row in report.rows)
    assert 1 - 1e-9 <= ratio <= ALLOWED, f"{ratio:.4f} of {dict(floor(size, leaf, tokens, **what))}: {parts}"


def _cases():
    for name, size in MODELS.items():
        formats = [size.fmt, *(f for f in (*PLAIN, *X4) if f is not size.fmt and name == "gpt-oss-120b")]
        for fmt in formats:
            for leaf, counts in (("selective", (1, 4, 8)), ("all_expert", (4, 32, 128, 256))):
                for tokens in counts if fmt is size.fmt else counts[:1]:
                    yield pytest.param(name, fmt, leaf, tokens, id=f"{name}-{fmt.value}-{leaf}-T{tokens}")


@pytest.mark.parametrize("name, fmt, leaf, tokens", list(_cases()))
def test_real_dimensions(name, fmt, leaf, tokens):
    size = replace(MODELS[name], fmt=fmt, local_experts=LOCAL if leaf == "all_expert" else None)
    held(report_of(size, leaf, tokens), size, leaf, tokens)


@pytest.mark.parametrize("leaf, tokens", [("selective", 3), ("all_expert", 5)])
@pytest.mark.parametrize("intermediate", [360, 1000])
def test_shards_that_fill_no_tile(leaf, tokens, intermediate):
    """2880 / 8 = 360, and a shard of almost two tiles of 512: padding lanes are no work and no bytes."""
    size = replace(MODELS["gpt-oss-120b"], intermediate=intermediate, local_experts=3)
    size = size if leaf == "all_expert" else replace(size, experts=16, local_experts=None)
    held(report_of(size, leaf, tokens), size, leaf, tokens)


def test_distinct_experts_are_read_once_each():
    size = replace(MODELS["gpt-oss-120b"], experts=32)
    report = report_of(size, "distinct", 16)
    row = report.ledger.named("expert_gate_up_weights")
    touched = row.distinct_read_chip * size.experts // row.nbytes
    assert 4 < touched <= 32
    held(report, size, "distinct", 16, index=[range(touched)])
    selective = report_of(size, "selective", 16)
    assert report.hbm_bytes < 0.6 * selective.hbm_bytes


@pytest.mark.parametrize("leaf", ["selective", "all_expert"])
def test_shared_expert_residual_and_routing(leaf):
    size = replace(
        MODELS["qwen3-235b"], shared_intermediate=192, local_experts=2 if leaf == "all_expert" else None
    )
    h, i = size.hidden, 192
    more = {
        "shared_expert_gate_w": StandIn((h, i), BF16), "shared_expert_up_w": StandIn((h, i), BF16),
        "shared_expert_down_w": StandIn((i, h), BF16), "residual": StandIn((1, 2, h), BF16),
        "return_routing": True,
    }  # fmt: skip
    report = report_of(size, leaf, 2, **more)
    held(report, size, leaf, 2, residual=True, routing=True)
    for name in [name for name in more if name != "return_routing"]:
        row = report.ledger.named(name)
        assert row.distinct_read_chip == row.nbytes and not row.reread, name


@pytest.mark.parametrize("all_expert", [False, True], ids=["selective", "all_expert"])
def test_small_blocks_with_data(all_expert):
    """The same count where numbers are computed, and the skipped logits are not written."""
    shared = ExpertSpec(64)
    block = Block(4, i=160, io=BF16, dtype=BF16, shared=shared, local=4 if all_expert else None)
    _, report = block.run(all_expert, skip_router_logits=True)
    size = replace(
        BlockSize(256, 160, 8, 3, WeightFormat.BF16, bias_bytes=2, router_bias=True, shared_intermediate=64),
        local_experts=4 if all_expert else None,
    )
    held(report, size, "all_expert" if all_expert else "selective", 4, logits=False)
