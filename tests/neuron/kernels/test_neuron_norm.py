"""RMSNorm and the MX quantiser of the kernels, on the model, against the reference and the golden vectors.

Shapes: T = 1 (halves of H), even T (halves of T), odd T (halves of H, several segments per token), T and
H/128 both odd (one core does it), T beyond one tile of 128.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_probe import assert_hbm_is, assert_read_once, per_core, run, token_major

import golden
from moedecode.backends.reference import maths
from moedecode.formats import WeightFormat, quantise_mx
from moedecode.neuron.kernels import norm, stages
from moedecode.neuron.kernels.nki_names import nl
from moedecode.neuron.kernels.rows import part_of
from numeric import assert_bits_equal, assert_close

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
ROUNDED = {BF16: 4e-3, F16: 5e-4, F32: 1e-6}
"""Half a unit in the last place, which a row can reach; float32: the order of the sum."""


def _draw(t, h, dtype, seed=0):
    return (np.random.default_rng(seed + t + h).standard_normal((t, h)) * 1.5).astype(dtype)


def _norm_probe(inp, gamma, eps, hidden_actual, residual):
    out = None
    if residual is not None:
        out = nl.ndarray((inp.shape[0], inp.shape[1]), dtype=inp.dtype, buffer=nl.shared_hbm)
    (copies,) = per_core(norm.rmsnorm(inp, gamma, eps, hidden_actual, residual, out))
    return (copies, out) if out is not None else (copies,)


SHAPES = [
    (1, 256),
    (1, 2816),
    (2, 384),
    (3, 512),
    (4, 1024),
    (5, 384),
    (7, 768),
    (19, 512),
    (128, 256),
]
SHAPES += [(64, 1024), (23, 1536), (130, 256), (129, 512), (256, 256), (300, 128)]


@pytest.mark.parametrize(("t", "h"), SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm(t, h, with_residual):
    """Both cores hold the same, right normed hidden; every input is read once per chip."""
    dtype = {0: BF16, 1: F16, 2: F32}[(t + h // 128) % 3]
    inp, gamma = _draw(t, h, dtype), _draw(1, h, dtype, 1)
    residual = _draw(t, h, dtype, 2) if with_residual else None
    width = h - 32
    outputs, report = run(_norm_probe, inp, gamma, 1e-3, width, residual)
    s = maths.residual_sum(inp, residual)
    want = maths.rmsnorm(s, gamma[0], 1e-3, width)
    assert_bits_equal("the two cores", outputs[0][0], outputs[0][1])
    bound = ROUNDED[dtype]
    assert_close("normed", token_major(outputs[0][0]).astype(np.float64), want, bound, bound)
    if with_residual:
        assert_bits_equal("residual_out", outputs[1], s.astype(dtype))
    names = ["inp", "gamma", *(["residual"] if with_residual else [])]
    assert_read_once(report, *names)
    assert_hbm_is(report, *names)


def test_work_is_halved_where_it_can_be():
    """Even T: half of the rows; odd T: half of the columns; both odd: core 0, which then sends all of it."""

    def kernel(inp):
        for t, h in ((4, 384), (3, 512), (3, 384)):
            part = part_of(h, t)
            taken = sum(n for _, n in part.token_tiles()) * part.columns * 128
            assert taken == (t * h // 2 if (t, h) != (3, 384) else t * h * (1 - nl.program_id(0)))
        return inp

    run(kernel, np.zeros((1, 128), np.float32))


@pytest.mark.parametrize("chip", ["trn2", "trn3"])
def test_one_core_alone(chip):
    inp, gamma = _draw(3, 384, BF16), _draw(1, 384, BF16)
    outputs, report = run(_norm_probe, inp, gamma, 1e-6, None, None, chip=chip, cores=1)
    want = maths.rmsnorm(inp.astype(np.float32), gamma[0], 1e-6, 384)
    assert_close("normed", token_major(outputs[0][0]).astype(np.float64), want, 4e-3, 4e-3)
    assert_read_once(report, "inp", "gamma")


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_magnitudes(size):
    inp = (_draw(3, 256, F32) * np.float32(size)).astype(F32)
    outputs, _ = run(_norm_probe, inp, None, 0.0, None, None)
    want = maths.rmsnorm(inp, None, 0.0, 256)
    assert_close("normed", token_major(outputs[0][1]).astype(np.float64), want, 1e-6, 1e-6)


@pytest.mark.parametrize("case", golden.cases("rmsnorm"))
def test_golden_rmsnorm(case):
    """The HBM form and the SBUF form against the stored output and its hidden-major tile."""
    inputs, o = case.inputs(), case.options
    inp, gamma = inputs["inp"], inputs["gamma"]
    bound = case.meta["compare"]["out"][
        "float32_pipeline" if inp.dtype == np.float32 else "io_dtype_pipeline"
    ]
    outputs, _ = run(stages.rmsnorm_tkg, inp, gamma, o["eps"], o["hidden_actual"])
    want = case.want("out").reshape(outputs.shape)
    assert_close("out", outputs.astype(np.float64), want, bound)
    flat = inp.reshape(-1, inp.shape[-1])
    outputs, _ = run(_norm_probe, flat, gamma, o["eps"], o["hidden_actual"], None)
    assert_close("tile", token_major(outputs[0][1]).astype(np.float64), want, bound)
    tile = case.want("out_tile_tp")
    if tile is not None:
        assert_close("out_tile_tp", outputs[0][0].transpose(0, 2, 1).astype(np.float64), tile, bound)


def _quantise_probe(inp, gamma, eps, hidden_actual, residual):
    normed = norm.rmsnorm(inp, gamma, eps, hidden_actual, residual)
    codes, scales = norm.quantize_hidden(normed)
    return per_core(normed, codes, scales)


def _quads(r):
    """``[T, H]`` as ``[T, H/512, 16, 32]``: the 8 partitions x 4 quads of each MX block, quad innermost."""
    t, h = r.shape
    cut = r.reshape(t, 4, h // 512, 16, 8).transpose(0, 2, 3, 4, 1)  # [T, tile, block, lane, quad]
    return np.ascontiguousarray(cut).reshape(t, h // 512, 16, 32)


SCALE_ROWS = [32 * (b // 4) + b % 4 for b in range(16)]


@pytest.mark.parametrize(("t", "h"), [(1, 512), (3, 1024), (8, 512), (130, 512)])
def test_quantize_hidden(t, h):
    """Bit for bit the contract's quantiser on the kernel's own normed hidden, equal on both cores."""
    outputs, report = run(_quantise_probe, _draw(t, h, BF16), _draw(1, h, BF16, 1), 1e-6, None, None)
    normed, codes, scales = outputs
    assert_bits_equal("codes of the cores", codes[0], codes[1])
    r = token_major(normed[0]).astype(np.float32)
    want_codes, want_scales = quantise_mx(_quads(r), WeightFormat.MXFP8_E4M3)
    words = codes[0].view(np.uint32)  # [128, H/512, T]
    got = words.transpose(2, 1, 0).reshape(t, h // 512, 16, 8)
    got = (
        np.stack([(got >> (8 * q)) & 255 for q in range(4)], -1).astype(np.uint8).reshape(t, h // 512, 16, 32)
    )
    assert_bits_equal("codes", got, want_codes.reshape(got.shape).view(np.uint8))
    got = scales[0][SCALE_ROWS].transpose(2, 1, 0)  # [T, H/512, 16]
    assert_bits_equal("scales", got, want_scales.reshape(got.shape))
    assert_hbm_is(report, "inp", "gamma")


@pytest.mark.parametrize("case", golden.cases("rmsnorm_mx_quantize"))
def test_golden_quantize(case):
    """End to end: dequantised within the stored bound, residual_out exact."""
    inputs, o = case.inputs(), case.options
    inp = inputs["inp"].reshape(-1, inputs["inp"].shape[-1])
    residual = inputs["residual"]
    residual = None if residual is None else residual.reshape(inp.shape)
    (normed, codes, scales), _ = run(
        _quantise_probe, inp, inputs["gamma"], o["eps"], o["hidden_actual"], residual
    )
    want = case.want("rmsnorm_out").astype(np.float64)
    assert_close("rmsnorm_out", token_major(normed[0]).astype(np.float64), want, 5e-3)

    def values(words, scale):
        bytes_ = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
        return (
            bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 8, axis=0)[..., None]
        )

    got = values(codes[0].view(np.uint32), scales[0][SCALE_ROWS])
    truth = values(case.want("out_quant"), case.want("out_scale"))
    assert_close("dequantised", got.reshape(128, -1), truth.reshape(128, -1), 3e-2, 1e-1)
    if residual is not None:
        total, _ = run(stages.rmsnorm_tkg, inp, inputs["gamma"], o["eps"], o["hidden_actual"], residual)
        assert_bits_equal("residual_out", total[1], case.want("residual_out"))
