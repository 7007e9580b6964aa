"""The dispatcher kernel on the model: masks, ranks, quantised hidden states, where the output lies."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_probe import assert_read_once, hidden_major, per_core
from mx_leaves import NO, POST, dense, gpt_oss_spec
from mx_leaves import random_experts as random_mx_experts
from mx_leaves import routing as draw
from mx_leaves import want as want_mx
from plain_leaves import BF16, BOUND, FP16, FP32, random_experts, want

from moedecode.formats import WeightFormat
from moedecode.neuron.kernels.moe_tkg import moe_tkg
from moedecode.neuron.kernels.nki_names import nisa, nl
from moedecode.neuron.kernels.norm import quantize_hidden
from moedecode.neuron.machine import Machine, dtypes
from numeric import assert_bits_equal, assert_close

NAMES = {
    "gate_up": "expert_gate_up_weights", "down": "expert_down_weights", "gate_up_bias": "expert_gate_up_bias",
    "down_bias": "expert_down_bias", "gate_up_scale": "expert_gate_up_weights_scale",
    "down_scale": "expert_down_weights_scale",
}  # fmt: skip


def arguments(experts, x, index, affinities, spec, mode=POST, **more):
    given = {NAMES[name]: value for name, value in experts.tensors.items()}
    given |= {
        "hidden_input": x, "expert_index": index, "expert_affinities": affinities, "is_all_expert": False,
        "activation_fn": spec.activation, "hidden_act_bias": spec.up_offset,
        "expert_affinities_scaling_mode": mode,
        "hidden_act_scale_factor": spec.alpha if spec.activation == "swish" else None,
    }  # fmt: skip
    for name, (low, high) in (("gate", spec.gate_clamp), ("up", spec.up_clamp)):
        given |= {f"{name}_clamp_lower_limit": low, f"{name}_clamp_upper_limit": high}
    return given | more


def run(given, **machine):
    result = Machine("trn3", **machine).run(moe_tkg, **given)
    return result.outputs, result.report


def plain_case(tokens=4, e=6, k=2, io=FP32, local=None, **made):
    experts = random_experts(e if local is None else local, 256, 96, io, **made)
    x = np.random.default_rng(9).normal(size=(tokens, 256)).astype(io)
    index, chosen = draw(tokens, k, e)
    return experts, x, index, chosen


SPEC = gpt_oss_spec(96)
RANK_0 = np.zeros((1, 1), np.int32)


@pytest.mark.parametrize("mode", [POST, NO], ids=lambda m: m.name)
@pytest.mark.parametrize("apart", [False, True], ids=["picked from the rows", "given apart"])
@pytest.mark.parametrize("tokens", [4, 131])
def test_selective_affinities(tokens, apart, mode):
    experts, x, index, chosen = plain_case(tokens)
    rows = dense(index, chosen, 6)
    given = arguments(experts, x, index, rows, SPEC, mode, expert_affinities_eager=chosen if apart else None)
    out, report = run(given)
    assert_close("out", out, want("selective", experts, x, index, chosen, SPEC, mode), BOUND[FP32])
    read = {row.name for row in report.rows if row.kind == "input" and sum(row.read)}
    assert ("expert_affinities" in read) == (mode is POST and not apart)
    assert_read_once(report, "hidden_input", "expert_index")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_all_expert_masks_dense_rows_by_the_index_where_asked(rank, masked):
    """The keystone: dense affinities of experts that a token did not choose count unless masked."""
    experts, x, index, _ = plain_case(local=2)
    rows = np.random.default_rng(3).uniform(0.1, 1, (4, 6)).astype(np.float32)
    given = arguments(experts, x, index, rows, SPEC, is_all_expert=True, rank_id=np.array([[rank]], np.int32),
                      mask_unselected_experts=masked)  # fmt: skip
    out, _ = run(given)
    own = rows[:, 2 * rank : 2 * rank + 2]
    chosen = (index[:, :, None] == np.arange(2 * rank, 2 * rank + 2)).any(1)
    own = np.where(chosen, own, 0) if masked else own
    assert_close("out", out, want("all_expert", experts, x, index, own, SPEC, POST), BOUND[FP32])


@pytest.mark.parametrize("mode", [POST, NO], ids=lambda m: m.name)
def test_selective_on_a_rank_takes_global_ids(mode):
    experts, x, index, chosen = plain_case(local=3, k=4)
    index[0, 0] = np.uint32(2**32 - 1)  # -1: no expert
    given = arguments(experts, x, index, np.zeros((4, 6), np.float32), SPEC, mode,
                      expert_affinities_eager=chosen, rank_id=np.array([[1]], np.int32))  # fmt: skip
    out, _ = run(given)
    local = index.astype(np.int64) - 3
    local = np.where((local >= 0) & (local < 3), local, -1)
    assert_close("out", out, want("selective", experts, x, local, chosen, SPEC, mode), BOUND[FP32])


@pytest.mark.parametrize("output_dtype", [None, BF16, FP32], ids=str)
def test_output_dtype(output_dtype):
    experts, x, index, chosen = plain_case(io=BF16)
    out, _ = run(arguments(experts, x, index, dense(index, chosen, 6), SPEC, output_dtype=output_dtype))
    assert out.dtype == (BF16 if output_dtype is None else output_dtype)
    assert_close("out", out, want("selective", experts, x, index, chosen, SPEC, POST), BOUND[BF16])


def _both_cores(**given):
    return per_core(moe_tkg(**given))[0]


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("mx", [False, True], ids=["plain", "mx"])
@pytest.mark.parametrize("all_expert", [False, True], ids=["selective", "all_expert"])
def test_output_in_sbuf_is_whole_on_both_cores(tokens, mx, all_expert):
    if mx:
        experts, x = (
            random_mx_experts(4, 512, 96),
            np.random.default_rng(1).normal(size=(tokens, 512)).astype(BF16),
        )
        index, chosen = draw(tokens, 2, 4)
    else:
        experts, x, index, chosen = plain_case(tokens, e=4)
    given = arguments(experts, x, index, dense(index, chosen, 4), SPEC, is_all_expert=all_expert,
                      rank_id=np.array([[0]], np.int32))  # fmt: skip
    both = Machine("trn3").run(_both_cores, **given, output_in_sbuf=True).outputs
    assert_bits_equal("core 1", both[1], both[0])
    there, _ = run(given)
    assert_close("out", both[0], there.astype(np.float64), 4e-3 if mx else BOUND[FP32])


def _quantised(x, out_codes, out_scales):
    """What `rmsnorm + quantise` leaves on chip, in HBM: codes, and the 16 rows of scales densely."""
    blocks, t = x.shape[1], x.shape[2]
    r = nl.ndarray((128, blocks, t), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=r, src=x)
    codes, scales = quantize_hidden(r)
    nisa.dma_copy(dst=out_codes, src=codes)
    for quadrant in range(4):
        nisa.dma_copy(dst=out_scales[nl.ds(4 * quadrant, 4)], src=scales[nl.ds(32 * quadrant, 4)])


def _quantise_kernel(x):
    blocks, t = x.shape[1] // 4, x.shape[2]
    codes = nl.ndarray((128, blocks, t), dtype=nl.float8_e4m3fn_x4, buffer=nl.shared_hbm)
    scales = nl.ndarray((16, blocks, t), dtype=nl.uint8, buffer=nl.shared_hbm)
    _quantised(x, codes, scales)
    return codes, scales


@pytest.mark.parametrize("all_expert", [False, True], ids=["selective", "all_expert"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_quantised_hidden_state_is_taken_as_it_is(tokens, all_expert):
    experts = random_mx_experts(4, 1024, 96)
    x = np.random.default_rng(1).normal(size=(tokens, 1024)).astype(BF16)
    index, chosen = draw(tokens, 2, 4)
    codes, scales = Machine("trn3").run(_quantise_kernel, hidden_major(x), n_programs=1).outputs
    assert codes.dtype == dtypes.float8_e4m3fn_x4 and scales.shape == (16, 2, tokens)
    given = arguments(experts, codes, index, dense(index, chosen, 4), SPEC, hidden_input_scale=scales,
                      is_all_expert=all_expert, rank_id=np.array([[0]], np.int32))  # fmt: skip
    out, report = run(given)
    assert_read_once(report, "hidden_input", "hidden_input_scale")
    affinities = dense(index, chosen, 4) if all_expert else chosen
    leaf = "all_expert" if all_expert else "selective"
    assert_close("out", out, want_mx(leaf, experts, x, index, affinities, SPEC, POST), 2e-2, 1e-1)
    plain, _ = run(given | {"hidden_input": x, "hidden_input_scale": None})
    assert_bits_equal("out beside the plain hidden state", out, plain)


@pytest.mark.parametrize("form", [
    {"distinct": True}, {"is_all_expert": True, "is_all_expert_dynamic": True, "block_size": 4},
    {"is_all_expert": True, "is_all_expert_dynamic": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.MXFP8_E4M3], ids=lambda f: f.value)
def test_forms_of_the_mx_leaves(form, fmt):
    experts = random_mx_experts(4, 512, 96, fmt, io=FP16)
    x = np.random.default_rng(1).normal(size=(9, 512)).astype(FP16)
    index, chosen = draw(9, 2, 4)
    rows = dense(index, chosen, 4)
    out, _ = run(arguments(experts, x, index, rows, SPEC, rank_id=np.array([[0]], np.int32), **form))
    leaf = "all_expert" if "is_all_expert" in form else "selective"
    affinities = rows if leaf == "all_expert" else chosen
    assert_close("out", out, want_mx(leaf, experts, x, index, affinities, SPEC, POST), 2e-3, 1e-1)


@pytest.mark.parametrize("more, message", [
    ({"gate_up_input_scale": np.ones((1, 1), np.float32)}, "gate_up_input_scale"),
    ({"down_input_scale": np.ones((1, 1), np.float32)}, "down_input_scale"),
    ({"is_all_expert": True}, "rank_id"),
    ({"distinct": True}, "distinct"),
    ({"is_all_expert": True, "is_all_expert_dynamic": True, "rank_id": RANK_0}, "dynamic"),
    ({"hidden_input_scale": np.zeros((16, 1, 4), np.uint8)}, "hidden_input_scale"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_what_no_leaf_does_is_refused(more, message):
    experts, x, index, chosen = plain_case()
    if "hidden_input_scale" in more:
        more = more | {"hidden_input": np.zeros((128, 1, 4), dtypes.float8_e4m3fn_x4)}
    with pytest.raises(ValueError, match=message):
        run(arguments(experts, x, index, dense(index, chosen, 6), SPEC) | more)


def test_an_output_in_sbuf_has_a_partition_per_token():
    experts, x, index, chosen = plain_case(131)
    with pytest.raises(ValueError, match="output_in_sbuf"):
        run(arguments(experts, x, index, dense(index, chosen, 6), SPEC, output_in_sbuf=True))
