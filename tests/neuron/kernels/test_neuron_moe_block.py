"""The whole megakernel on the model: against the float64 reference and the golden vectors.

float32 activations show the arithmetic (2e-5). What HBM sees is in test_residency.py and
test_neuron_block_bytes.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from mx_leaves import gpt_oss_spec
from plain_leaves import BF16, BOUND, E4M3, E4M3_IEEE, FP16, FP32
from whole_blocks import Block

import golden
from moedecode.neuron.kernels.moe_block_tkg import moe_block_tkg
from moedecode.neuron.kernels.moe_tkg import moe_tkg
from moedecode.neuron.machine import Machine
from moedecode.neuron.machine.dtypes import DTYPES
from moedecode.spec import ExpertAffinityScaleMode, ExpertSpec
from numeric import assert_bits_equal, assert_close, assert_zero_where_zero

MODES = pytest.mark.parametrize("all_expert", [False, True], ids=["selective", "all_expert"])
NO = ExpertAffinityScaleMode.NO_SCALE
ROUTERS = [
    {"pre_norm": True},
    {"pre_norm": True, "norm_topk_prob": True},
    {"pre_norm": True, "score": "sigmoid"},
    {"pre_norm": True, "score": "sigmoid", "norm_topk_prob": True, "norm_eps": 0.1, "scale": 2.5,
     "selection_bias": True},
    {"pre_norm": False},
    {"pre_norm": False, "score": "sigmoid"},
    {"pre_norm": False, "score": "sigmoid", "norm_topk_prob": True},
]  # fmt: skip


def check(block, all_expert, bound=None, **options):
    got, _ = block.run(all_expert, **options)
    want = block.want(all_expert)
    assert_close("out", got["out"], want.out, BOUND[block.io] if bound is None else bound)
    assert_zero_where_zero("out", got["out"], want.out)
    return got, want


@MODES
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_router_combinations(router, all_expert):
    """In all-expert mode a rank with three of eight experts, so that unselected ones show."""
    check(Block(3, router=router, local=4 if all_expert else None, rank=int(all_expert)), all_expert)


@MODES
@pytest.mark.parametrize("io, dtype", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP32, E4M3)], ids=str)
@pytest.mark.parametrize("chip", ["trn2", "trn3"])
def test_formats(io, dtype, chip, all_expert):
    dtype = E4M3_IEEE if dtype is E4M3 and chip == "trn2" else dtype  # what that chip multiplies
    block = Block(5, i=160, io=io, dtype=dtype, spec=gpt_oss_spec(160), seed=3)
    want = block.want(all_expert)
    index = np.sort(want.index, -1)
    margins = np.sort(want.logits, -1)
    assert (margins[:, -3] - margins[:, -4]).min() > 5e-3, "choose another seed: a near tie"
    got, _ = check(block, all_expert, BOUND[io], chip=chip, return_routing=True)
    assert_bits_equal("expert_index", np.sort(got["expert_index"].astype(np.int32), -1), index)


@MODES
@pytest.mark.parametrize("tokens", [1, 2, 19, 132, 260])
def test_tokens(tokens, all_expert):
    check(Block(tokens, experts=5, k=2, i=40), all_expert)


@MODES
def test_no_scale_adds_every_local_or_chosen_expert(all_expert):
    check(Block(3, mode=NO, local=2 if all_expert else None, rank=int(all_expert)), all_expert)


@MODES
def test_outputs(all_expert):
    """Residual, logits, ids and affinities, in the order that the kernel promises."""
    block = Block(3, residual=True)
    got, want = check(block, all_expert, return_routing=True)
    assert_close("router_logits", got["router_logits"], want.logits, 2e-5)
    assert_bits_equal("residual_out", got["residual_out"], block.x + block.residual)
    assert_bits_equal("expert_index", got["expert_index"].astype(np.int32), want.index)
    assert_close("expert_affinities", got["expert_affinities"], want.affinities, 2e-5)


def test_logits_can_be_skipped():
    got, _ = check(Block(2), False, skip_router_logits=True)
    assert list(got) == ["out"]


@pytest.mark.parametrize("rank", [0, 3])
def test_selective_on_a_rank_ignores_the_experts_of_others(rank):
    for mode in (ExpertAffinityScaleMode.POST_SCALE, NO):
        check(Block(4, experts=8, local=2, rank=rank, mode=mode), False)


def test_one_core_does_it_alone():
    for all_expert in (False, True):
        check(Block(3), all_expert, cores=1)


@MODES
@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize("shared", [
    ExpertSpec(64, bias=True), ExpertSpec(200, "gelu", gate_clamp=(-1.0, 1.0), up_offset=0.5), ExpertSpec(1),
], ids=["biases", "own activation", "one column"])  # fmt: skip
@pytest.mark.parametrize("gate", [False, True], ids=["", "sigmoid gate"])
def test_shared_expert(tokens, shared, gate, all_expert):
    check(Block(tokens, experts=3, k=2, i=32, shared=shared, shared_gate=gate), all_expert)


def test_shared_expert_takes_the_activation_of_the_routed_ones_if_none_is_named():
    shared = ExpertSpec(64, "gelu", bias=True)
    block = Block(3, spec=ExpertSpec(96, "gelu", bias=True), shared=shared)
    check(block, False, shared_expert_options=None)


@pytest.mark.parametrize("argument, value, message", [
    ("expert_affinities_scaling_mode", ExpertAffinityScaleMode.PRE_SCALE, "pre_scale"),
    ("hidden_act_fn", "relu", "relu"),
    ("distinct", True, "distinct"),
    ("is_all_expert_dynamic", True, "is_all_expert_dynamic"),
])  # fmt: skip
def test_what_no_leaf_has_is_refused(argument, value, message):
    with pytest.raises(ValueError, match=message):
        Block(1).run(False, **{argument: value})


def test_all_expert_mode_needs_a_rank():
    with pytest.raises(ValueError, match="rank_id"):
        Machine("trn3").run(moe_block_tkg, **Block(1).arguments, is_all_expert=True)


# ------------------------------------------------------------------ golden vectors

MX_IO = 3.5e-2  # the stored values quantise an unrounded h
PLAIN_IO = {"bfloat16": 1e-2, "float16": 2e-3}


def _weights(case, given):
    """Weights in the machine's dtypes: packed x4 and float8 are stored as integers."""
    name = case.weight_dtype()
    for argument in ("expert_gate_up_weights", "expert_down_weights") if name else ():
        dtype = DTYPES["float8_e4m3fn" if name == "float8_e4m3" else name]
        given[argument] = given[argument].view(dtype)
    return given


def _rank(options):
    rank = options.pop("rank_id", None)
    return options | {"rank_id": None if rank is None else np.array([[rank]], np.int32)}


@pytest.mark.parametrize("case", golden.cases("block") + golden.cases("mx_block"))
def test_golden_block(case):
    given = _weights(case, case.inputs() | _rank(case.options))
    io = case.logical(case.fields["inputs"]["inp"])
    given["router_mm_dtype"] = DTYPES[given["router_mm_dtype"]]
    out = Machine("trn3").run(moe_block_tkg, **given).outputs[0]
    want = case.want("out_norm_rounded")
    mx = case.meta["kind"] == "mx_block"
    assert_close("out", out, want, MX_IO if mx else PLAIN_IO[io], 1e-1 if mx else None)
    assert_zero_where_zero("out", out, want)


@pytest.mark.parametrize("case", golden.cases("dispatcher"))
def test_golden_dispatcher(case):
    given = _weights(case, case.inputs() | _rank(case.options))
    given["expert_index"] = given["expert_index"].astype(np.uint32)
    out = Machine("trn3").run(moe_tkg, **given).outputs
    io = case.logical(case.fields["inputs"]["hidden_input"])
    assert_close("out", out, case.want("out"), {"bfloat16": 1e-2, "float16": 4e-3}[io])
    assert_zero_where_zero("out", out, case.want("out"))
