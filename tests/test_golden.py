"""The golden vectors through the public functions, on every backend.

Covers all 29 files and 406 cases. Two pipelines: "io", the stored 16-bit inputs against the values whose
normed hidden state was rounded once (``out_norm_rounded``), and "float32", everything widened, against the
unrounded values.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import golden
import moedecode as md
from moedecode.formats import WeightFormat, hidden_order, intermediate_order, quantise_mx
from moedecode.formats.dtypes import as_codes
from moedecode.formats.matrix import StoredMatrix
from moedecode.formats.numbers import e8m0_values, element_values, join_nibbles
from numeric import assert_bits_equal, assert_close, assert_zero_where_zero

BACKENDS = ("reference", "cpu")
PIPELINES = ("io", "float32")

FORMATS = {
    "float4_e2m1fn_x4": WeightFormat.MXFP4,
    "float8_e4m3fn_x4": WeightFormat.MXFP8_E4M3,
    "float8_e5m2_x4": WeightFormat.MXFP8_E5M2,
}

BLOCK_IO = {"bfloat16": 4e-3, "float16": 2e-3}
"""16-bit output against out_norm_rounded: rounding the output alone gives 1.7e-3 (bf16) or 2e-4 (fp16)."""
MX_IO = 2e-2
"""A missing quantisation of the activations shows at 4 to 8 %."""
MX_FLOAT32 = 5e-3


def _tolerance(case, output, pipeline):
    return case.meta["compare"][output][f"{'io_dtype' if pipeline == 'io' else 'float32'}_pipeline"]


def _block_arguments(case, widen):
    arguments = case.inputs(widen) | case.options | {"expert_weight_dtype": case.weight_dtype()}
    if widen:
        arguments["router_mm_dtype"] = "float32"
    return arguments


def _run_block(case, backend, pipeline):
    arguments = _block_arguments(case, widen=pipeline == "float32")
    outputs = list(md.moe_block_tkg(**arguments, backend=backend))
    named = {"out": outputs.pop(0)}
    if not arguments["skip_router_logits"]:
        named["router_logits"] = outputs.pop(0)
    if arguments["residual"] is not None:
        named["residual_out"] = outputs.pop(0)
    assert not outputs
    return named


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", golden.cases("block") + golden.cases("mx_block"))
def test_block(case, pipeline, backend):
    got = _run_block(case, backend, pipeline)
    suffix = "_norm_rounded" if pipeline == "io" else ""
    want, io = case.want(f"out{suffix}"), case.logical(case.fields["inputs"]["inp"])
    if case.meta["kind"] == "mx_block":
        bound = MX_IO if pipeline == "io" else MX_FLOAT32
        row_bound = 1e-1  # one moved E4M3 code shows in its row
    else:
        bound = BLOCK_IO[io] if pipeline == "io" else _tolerance(case, "out", pipeline)
        row_bound = 2 * bound
    assert_close("out", got["out"], want, bound, row_bound)
    assert_zero_where_zero("out", got["out"], want)
    if "router_logits" in got:
        assert_close(
            "router_logits",
            got["router_logits"],
            case.want(f"router_logits{suffix}"),
            _tolerance(case, "router_logits", pipeline),
        )
    if "residual_out" in got:
        wanted = case.want("residual_out")
        wanted = wanted.astype(got["residual_out"].dtype)
        assert_bits_equal("residual_out", got["residual_out"], wanted.reshape(got["residual_out"].shape))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", golden.cases("block") + golden.cases("mx_block"))
def test_block_routing(case, pipeline, backend):
    """Norm, then router: the ids of the block's stages are exact and its affinities close."""
    a = _block_arguments(case, widen=pipeline == "float32")
    normed = md.rmsnorm_tkg(
        a["inp"], a["gamma"], a["eps"], a["hidden_actual"], a["residual"], backend=backend
    )
    normed = normed[0] if isinstance(normed, tuple) else normed
    x = normed.reshape(-1, normed.shape[-1])
    x = x.astype(np.float32) if a["router_mm_dtype"] == "float32" else x
    _, index, affinities, eager = md.router_topk(
        x,
        a["router_weights"],
        a["router_bias"],
        a["router_act_fn"],
        a["top_k"],
        a["router_pre_norm"],
        a["norm_topk_prob"],
        return_eager_affi=True,
        backend=backend,
    )
    assert_bits_equal("expert_index", index, case.want("expert_index"))
    want = case.want("expert_affinities")
    assert_close("expert_affinities", affinities, want, _tolerance(case, "expert_affinities", pipeline))
    assert_bits_equal("zeros of expert_affinities", affinities == 0, want == 0)
    assert_bits_equal("eager", eager, np.take_along_axis(affinities, index, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", golden.cases("dispatcher"))
def test_dispatcher(case, pipeline, backend):
    arguments = case.inputs(widen=pipeline == "float32") | case.options
    got = md.moe_tkg(**arguments, expert_weight_dtype=case.weight_dtype(), backend=backend)
    io = case.logical(case.fields["inputs"]["hidden_input"])
    bound = BLOCK_IO[io] if pipeline == "io" else _tolerance(case, "out", pipeline)
    assert_close("out", got, case.want("out"), bound)
    assert_zero_where_zero("out", got, case.want("out"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", golden.cases("router"))
def test_router(case, pipeline, backend):
    inputs, o = case.inputs(widen=pipeline == "float32"), case.options
    logits, index, affinities = md.router_topk(
        inputs["x"],
        inputs["w"],
        inputs["w_bias"],
        o["router_act_fn"],
        o["top_k"],
        o["router_pre_norm"],
        o["norm_topk_prob"],
        x_hbm_layout=1 if o["x_hbm_layout"] == "[T,H]" else 0,
        backend=backend,
    )
    assert_bits_equal("expert_index", index, case.want("expert_index"))
    assert_close(
        "router_logits", logits, case.want("router_logits"), _tolerance(case, "router_logits", pipeline)
    )
    want = case.want("expert_affinities")
    assert_close("expert_affinities", affinities, want, _tolerance(case, "expert_affinities", "float32"))
    assert_bits_equal("zeros of expert_affinities", affinities == 0, want == 0)


def _tiles(normed, order):
    """``[T, H]`` as the tile ``[128, T, H/128]`` of one of the three orders."""
    hidden = normed.shape[1]
    columns = hidden // 128
    p, k = np.meshgrid(np.arange(128), np.arange(columns), indexing="ij")
    if order == "out_tile_tp":
        h = 128 * k + p
    elif order == "out_tile_lnc1":
        h = p * columns + k
    else:
        half = columns // 2
        h = k // half * (hidden // 2) + p * half + k % half
    return normed[:, h].transpose(1, 0, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", golden.cases("rmsnorm"))
def test_rmsnorm(case, pipeline, backend):
    inputs, o = case.inputs(widen=pipeline == "float32"), case.options
    got = md.rmsnorm_tkg(inputs["inp"], inputs.get("gamma"), o["eps"], o["hidden_actual"], backend=backend)
    bound = _tolerance(case, "out", pipeline)
    assert_close("out", got, case.want("out"), bound)
    assert_zero_where_zero("out", got, case.want("out"))
    for order in ("out_tile_tp", "out_tile_lnc1", "out_tile_lnc2"):
        if (want := case.want(order)) is not None:
            assert_close(
                order, _tiles(got.reshape(-1, got.shape[-1]), order), want, bound, row_bound=2 * bound
            )


@pytest.mark.parametrize("case", golden.cases("affinity_mask"))
def test_affinity_mask(case):
    inputs, o = case.inputs(), case.options
    got = md.mask_expert_affinities(
        inputs["expert_affinities"],
        inputs["expert_index"],
        o["rank_id"],
        o["E_L"],
        o["mask_unselected_experts"],
    )
    assert got.dtype == inputs["expert_affinities"].dtype
    assert_bits_equal("out", got.astype(np.float32), case.want("out"))


def _packed_rows(codes, fmt):
    """Codes of ``[..., n]`` elements as x4 integers ``[..., n/4]``, first element lowest."""
    container = "<u2" if fmt is WeightFormat.MXFP4 else "<u4"
    return np.ascontiguousarray(codes).view(container)


@pytest.mark.parametrize("case", golden.cases("mx_quantize"))
def test_mx_quantize(case):
    data, fmt = case.inputs()["data"], FORMATS[case.options["target"]]
    rows, columns = data.shape
    blocks = (
        data.reshape(rows // 8, 8, columns // 4, 4).transpose(0, 2, 1, 3).reshape(rows // 8, columns // 4, 32)
    )
    codes, scales = quantise_mx(blocks, fmt)
    packed = (
        _packed_rows(codes, fmt)
        .reshape(rows // 8, columns // 4, 8)
        .transpose(0, 2, 1)
        .reshape(rows, columns // 4)
    )
    assert_bits_equal("packed", packed, case.want("packed"))
    assert_bits_equal("scale", scales[..., 0], case.want("scale"))
    with np.errstate(under="ignore"):
        values = (element_values(fmt, codes) * e8m0_values(scales)).astype(np.float32)
    values = values.reshape(rows // 8, columns // 4, 8, 4).transpose(0, 2, 1, 3).reshape(rows, columns)
    assert_bits_equal("dequantised", values, case.want("dequantised"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", golden.cases("rmsnorm_mx_quantize"))
def test_rmsnorm_mx_quantize(case, backend):
    inputs, o, want = case.inputs(), case.options, case.want("rmsnorm_out")
    normed = md.rmsnorm_tkg(
        inputs["inp"], inputs["gamma"], o["eps"], o["hidden_actual"], inputs["residual"], backend=backend
    )
    if inputs["residual"] is not None:
        normed, residual_out = normed
        assert_bits_equal("residual_out", residual_out.reshape(want.shape), case.want("residual_out"))
    hidden, tokens = want.shape[1], want.shape[0]
    bound = 1e-3 if inputs["residual"] is None else 5e-3  # these values were normed after rounding the sum
    assert_close("rmsnorm_out", normed.reshape(want.shape), want, bound)
    order = hidden_order("trainium", hidden)
    codes, scales = quantise_mx(order.apply(want.astype(np.float64)), WeightFormat.MXFP8_E4M3)
    packed = _packed_rows(codes, WeightFormat.MXFP8_E4M3).reshape(tokens, hidden // 512, 128).T
    assert_bits_equal("out_quant", np.ascontiguousarray(packed), case.want("out_quant"))
    dense = np.ascontiguousarray(scales.reshape(tokens, hidden // 512, 16).T)
    assert_bits_equal("out_scale", dense, case.want("out_scale"))
    on_chip = np.zeros((128, *dense.shape[1:]), np.uint8)
    row = np.arange(16)
    on_chip[32 * (row // 4) + row % 4] = dense
    assert_bits_equal("out_scale_sbuf", on_chip, case.want("out_scale_sbuf"))


def _stored(packed, scale, fmt):
    """``[K, M]`` x4 codes and ``[K/8, M]`` scales as a matrix with M rows and 4K columns."""
    codes = np.ascontiguousarray(packed.T).view(np.uint8)
    return StoredMatrix(
        fmt, codes if fmt is WeightFormat.MXFP4 else codes.view(fmt.element), np.ascontiguousarray(scale.T)
    )


@pytest.mark.parametrize("case", golden.cases("mx_matmul"))
def test_mx_matmul(case):
    inputs, o = case.inputs(), case.options
    stationary = _stored(inputs["stationary"], inputs["stationary_scale"], FORMATS[o["stationary_format"]])
    moving = _stored(inputs["moving"], inputs["moving_scale"], FORMATS[o["moving_format"]])
    assert_close("out", stationary.values() @ moving.values().T, case.want("out"), 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", golden.cases("mx_projection"))
def test_mx_projection(case, backend):
    """One expert on a hidden state that arrives quantised."""
    out = golden.mx_projection(case, backend)
    assert_close("out", out, case.want("out"), MX_FLOAT32)


@pytest.mark.parametrize("case", golden.cases("mx_projection"))
def test_mx_projection_intermediates(case):
    """Gate and up of the stored codes, at their places in the tile."""
    inputs, o = case.inputs(), case.options
    weights = md.ExpertWeights.from_trainium(
        inputs["gate_up_weights"][None],
        inputs["down_weights"][None],
        inputs["gate_up_scale"][None],
        inputs["down_scale"][None],
        hidden=o["H"],
        intermediate=o["I"],
        dtype=case.logical(case.fields["inputs"]["gate_up_weights"]),
        gate_up_bias=None if inputs.get("gate_up_bias") is None else inputs["gate_up_bias"][None],
    )
    tokens = o["T"]
    lanes = np.ascontiguousarray(inputs["hidden_quant"].T).reshape(tokens, -1).view(np.uint8)
    scales = np.repeat(
        e8m0_values(np.ascontiguousarray(inputs["hidden_scale"].T).reshape(tokens, -1)), 32, axis=1
    )
    hidden = element_values(WeightFormat.MXFP8_E4M3, lanes) * scales
    gather = intermediate_order("trainium", o["I"]).gather
    real = gather >= 0
    for name, matrix, bias in (
        ("gate", weights.expert(0).gate, weights.gate_bias),
        ("up", weights.expert(0).up, weights.up_bias),
    ):
        got = hidden @ matrix.values().T + (0 if bias is None else bias[0])
        tile = case.want(name)  # [128, tiles, T, 4]
        lanes_used = len(gather) // tile.shape[1] // 4
        stored = tile[:lanes_used].transpose(2, 1, 0, 3).reshape(tokens, -1)
        assert_close(name, got[:, gather[real]], stored[:, real], 2e-6)


@pytest.mark.parametrize("case", golden.cases("decode_tables"))
def test_decode_tables(case):
    every = np.arange(256, dtype=np.uint8)
    tables = {
        "e2m1": element_values(WeightFormat.MXFP4, join_nibbles(np.arange(16, dtype=np.uint8))),
        "e4m3fn": element_values(WeightFormat.FP8_E4M3, every),
        "e5m2": element_values(WeightFormat.FP8_E5M2, every),
    }
    for name, got in tables.items():
        assert np.array_equal(got.astype(np.float32), case.want(name), equal_nan=True), name
    assert np.array_equal(e8m0_values(every), case.want("e8m0"), equal_nan=True)


@pytest.mark.parametrize("case", golden.cases("decode_tables"))
def test_decode_table_of_ieee_e4m3(case):
    """Read as e4m3fn where values agree; an infinity has no such code and is refused."""
    every = np.arange(256, dtype=np.uint8)
    want = case.want("e4m3_ieee")
    finite = ~np.isinf(want)
    got = as_codes(every[finite].view(ml_dtypes.float8_e4m3), "float8_e4m3", "weights")
    assert np.array_equal(got.astype(np.float32), want[finite], equal_nan=True)
    for code in every[~finite]:
        with pytest.raises(md.InvalidInput, match="infinity"):
            as_codes(np.array([code]).view(ml_dtypes.float8_e4m3), "float8_e4m3", "weights")


@pytest.mark.skipif(not golden.PRESENT, reason=golden.ABSENT)
def test_every_file_and_case_is_covered():
    kinds = (
        "block",
        "mx_block",
        "dispatcher",
        "router",
        "rmsnorm",
        "affinity_mask",
        "rmsnorm_mx_quantize",
        "mx_quantize",
        "mx_matmul",
        "mx_projection",
        "decode_tables",
    )
    covered = [p.values[0] for kind in kinds for p in golden.cases(kind)]
    assert len({case.stem for case in covered}) == 29
    assert len(covered) == 406
