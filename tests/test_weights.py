"""Weight layouts: the same logical experts through every constructor, without copies."""

import ml_dtypes
import numpy as np
import pytest

from moedecode import ExpertWeights, WeightFormat
from moedecode.formats import quantise_mx
from trainium_layout import TRAINIUM_NAMES, trainium_pack

E, H, I = 3, 96, 40  # 96: three blocks; 40: a whole block and a quarter  # noqa: E741
RNG = np.random.default_rng(7)
GATE, UP = RNG.standard_normal((2, E, I, H)) * np.exp2(RNG.integers(-3, 4, (2, E, I, 1)))
DOWN = RNG.standard_normal((E, H, I)) * np.exp2(RNG.integers(-3, 4, (E, H, 1)))
BIAS = {
    "gate_bias": RNG.standard_normal((E, I)).astype(np.float32),
    "up_bias": RNG.standard_normal((E, I)).astype(np.float32),
    "down_bias": RNG.standard_normal((E, H)).astype(np.float32),
}


def rows(gate, up, interleaved: bool):
    """Gate and up ``[E, I, ...]`` to one tensor ``[E, 2I, ...]``."""
    axis = 2 if interleaved else 1
    return np.stack([gate, up], axis).reshape(len(gate), 2 * gate.shape[1], *gate.shape[2:])


def assert_same_experts(got: ExpertWeights, want: ExpertWeights) -> None:
    assert (got.num_experts, got.hidden, got.intermediate) == (
        want.num_experts,
        want.hidden,
        want.intermediate,
    )
    assert got.fmt is want.fmt
    for e in range(got.num_experts):
        for name in ("gate", "up", "down"):
            ours, theirs = getattr(got.expert(e), name), getattr(want.expert(e), name)
            np.testing.assert_array_equal(ours.values(), theirs.values(), err_msg=f"{name}[{e}]")
    for name in BIAS:
        ours, theirs = getattr(got, name), getattr(want, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def assert_holds(weights: ExpertWeights, gate, up, down) -> None:
    """The matrices, in natural column order, are these float64 values."""
    for e in range(weights.num_experts):
        stored = weights.expert(e)
        for matrix, order, want in (
            (stored.gate, weights.hidden_order, gate[e]),
            (stored.up, weights.hidden_order, up[e]),
            (stored.down, weights.intermediate_order, down[e]),
        ):
            values = matrix.values()
            natural = np.full(want.shape, np.nan)
            real = order.gather[: values.shape[1]] >= 0
            natural[:, order.gather[: values.shape[1]][real]] = values[:, real]
            np.testing.assert_array_equal(natural, want)
            assert (values[:, ~real] == 0).all()


# ------------------------------------------------------------------ plain and FP8


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize("biased", [False, True])
def test_plain_formats_through_every_layout(dtype, biased):
    gate, up, down = (a.astype(dtype) for a in (GATE, UP, DOWN))
    per_expert = ExpertWeights.from_experts(list(gate), list(up), list(down), **(BIAS if biased else {}))
    assert_holds(per_expert, *(a.astype(np.float64) for a in (gate, up, down)))
    assert per_expert.block_order == "contiguous"
    gate_bias, up_bias, down_bias = (BIAS[name] if biased else None for name in BIAS)
    for interleaved in (False, True):
        fused = rows(gate_bias, up_bias, interleaved) if biased else None
        got = ExpertWeights.from_rows(
            rows(gate, up, interleaved),
            down,
            gate_up_bias=fused,
            down_bias=down_bias,
            interleaved=interleaved,
        )
        assert_same_experts(got, per_expert)
    flat = ExpertWeights.from_flat(
        np.stack([gate, up], 2).transpose(0, 3, 2, 1),
        down.transpose(0, 2, 1),
        gate_up_bias=np.stack([gate_bias, up_bias], 1) if biased else None,
        down_bias=down_bias,
    )
    assert_same_experts(flat, per_expert)
    stacked = ExpertWeights.from_experts(gate, up, down, **(BIAS if biased else {}))
    assert_same_experts(stacked, per_expert)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_fp8_with_tensor_and_row_scales_through_every_layout(dtype, scales):
    gate, up, down = (np.clip(a, -200, 200).astype(dtype) for a in (GATE, UP, DOWN))
    width = {"tensor": (1, 1), "row": (I, H)}[scales]
    gate_scale, up_scale = RNG.uniform(0.5, 2, (2, E, width[0])).astype(np.float32)
    down_scale = RNG.uniform(0.5, 2, (E, width[1])).astype(np.float32)
    per_expert = ExpertWeights.from_experts(
        list(gate), list(up), list(down), gate_scale=gate_scale, up_scale=up_scale, down_scale=down_scale
    )
    widened = [
        codes.astype(np.float64) * scale.astype(np.float64)[..., None]
        for codes, scale in ((gate, gate_scale), (up, up_scale), (down, down_scale))
    ]
    assert_holds(per_expert, *widened)
    flat = ExpertWeights.from_flat(
        np.stack([gate, up], 2).transpose(0, 3, 2, 1),
        down.transpose(0, 2, 1),
        gate_up_scale=np.stack([gate_scale, up_scale], 1),
        down_scale=down_scale,
    )
    assert_same_experts(flat, per_expert)
    if scales == "row":
        for interleaved in (False, True):
            got = ExpertWeights.from_rows(
                rows(gate, up, interleaved),
                down,
                gate_up_scale=rows(gate_scale, up_scale, interleaved),
                down_scale=down_scale,
                interleaved=interleaved,
            )
            assert_same_experts(got, per_expert)


@pytest.mark.parametrize("shape", [(E, 1), (E,)])
def test_fused_rows_share_one_scale_per_tensor(shape):
    gate, up, down = (a.astype(ml_dtypes.float8_e4m3fn) for a in (GATE, UP, DOWN))
    scale = np.float32([0.5, 2, 3])
    got = ExpertWeights.from_rows(
        rows(gate, up, True),
        down,
        gate_up_scale=scale.reshape(shape),
        down_scale=scale.reshape(shape),
        interleaved=True,
    )
    factor = scale.astype(np.float64)[:, None, None]
    assert_holds(got, *(a.astype(np.float64) * factor for a in (gate, up, down)))


def test_fp8_with_128x128_block_scales_and_partial_last_blocks():
    hidden, intermediate = 200, 256  # two blocks of columns, the second partial
    gate, up = RNG.standard_normal((2, E, intermediate, hidden)).astype(ml_dtypes.float8_e4m3fn)
    down = RNG.standard_normal((E, hidden, intermediate)).astype(ml_dtypes.float8_e4m3fn)
    gate_scale, up_scale, down_scale = RNG.uniform(0.5, 2, (3, E, 2, 2)).astype(np.float32)
    apart = ExpertWeights.from_experts(
        gate, up, down, gate_scale=gate_scale, up_scale=up_scale, down_scale=down_scale
    )

    def widened(codes, scale):
        r, c = np.ogrid[: codes.shape[1], : codes.shape[2]]
        return codes.astype(np.float64) * scale.astype(np.float64)[:, r // 128, c // 128]

    assert_holds(apart, widened(gate, gate_scale), widened(up, up_scale), widened(down, down_scale))
    fused = ExpertWeights.from_rows(
        rows(gate, up, False), down, gate_up_scale=rows(gate_scale, up_scale, False), down_scale=down_scale
    )
    assert_same_experts(fused, apart)


# ------------------------------------------------------------------ MX checkpoints


def quantised(values, fmt):
    codes, scales = quantise_mx(values, fmt)
    return (codes if fmt is WeightFormat.MXFP4 else codes.view(fmt.element)), scales


@pytest.mark.parametrize(
    "fmt", [WeightFormat.MXFP4, WeightFormat.MXFP8_E4M3, WeightFormat.MXFP8_E5M2], ids=lambda f: f.value
)
def test_mx_checkpoints_through_every_layout(fmt):
    (gate, gate_scale), (up, up_scale), (down, down_scale) = (quantised(a, fmt) for a in (GATE, UP, DOWN))
    per_expert = ExpertWeights.from_experts(
        list(gate),
        list(up),
        list(down),
        gate_scale=gate_scale,
        up_scale=up_scale,
        down_scale=down_scale,
        **BIAS,
    )
    assert per_expert.fmt is fmt and per_expert.intermediate == I
    for interleaved in (False, True):
        got = ExpertWeights.from_rows(
            rows(gate, up, interleaved),
            down,
            gate_up_scale=rows(gate_scale, up_scale, interleaved),
            down_scale=down_scale.view(ml_dtypes.float8_e8m0fnu),
            gate_up_bias=rows(BIAS["gate_bias"], BIAS["up_bias"], interleaved),
            down_bias=BIAS["down_bias"],
            interleaved=interleaved,
        )
        assert_same_experts(got, per_expert)


def test_gpt_oss_blocks_of_sixteen_bytes():
    """Transformers' gpt-oss tensors: blocks [E, 2I, H/32, 16], scales [E, 2I, H/32], gate/up interleaved."""
    down_wide = RNG.standard_normal((E, H, 64))
    gate_wide, up_wide = RNG.standard_normal((2, E, 64, H))
    (gate, gs), (up, us), (down, ds) = (
        quantised(a, WeightFormat.MXFP4) for a in (gate_wide, up_wide, down_wide)
    )
    per_expert = ExpertWeights.from_experts(gate, up, down, gate_scale=gs, up_scale=us, down_scale=ds)
    got = ExpertWeights.from_rows(
        rows(gate, up, True).reshape(E, 128, H // 32, 16),
        down.reshape(E, H, 2, 16),
        gate_up_scale=rows(gs, us, True),
        down_scale=ds,
        interleaved=True,
    )
    assert_same_experts(got, per_expert)


# ------------------------------------------------------------------ the packed Trainium layout


@pytest.mark.parametrize("fmt", list(TRAINIUM_NAMES), ids=lambda f: f.value)
@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [
        (512, 9),  # four lanes, where a quarter would be three
        (512, 13),  # odd, mostly padding
        (512, 80),  # a partly filled block
        (512, 513),  # one column in the second tile
        (1024, 64),
        (1024, 640),
    ],
)
def test_trainium_layout(fmt, hidden, intermediate):
    tensors, gate_up, down = trainium_pack(
        fmt, E, hidden, intermediate, np.random.default_rng(hidden + intermediate)
    )
    got = ExpertWeights.from_trainium(
        *tensors, hidden=hidden, intermediate=intermediate, dtype=TRAINIUM_NAMES[fmt]
    )
    assert got.fmt is fmt and got.block_order == "trainium"
    assert_holds(got, gate_up[:, 0], gate_up[:, 1], down)


@pytest.mark.parametrize("intermediate", [13, 80, 640])
def test_trainium_biases(intermediate):
    tensors, _, _ = trainium_pack(WeightFormat.MXFP4, E, 512, intermediate, np.random.default_rng(3))
    lanes, tiles = tensors[1].shape[1:3]
    natural = np.random.default_rng(4).standard_normal((E, 2, intermediate)).astype(np.float32)
    packed = np.zeros((E, lanes, 2, tiles, 4), np.float32)
    for i in range(intermediate):
        t, r = divmod(i, 512)
        q, p = divmod(r, 2 * -(-min(512, intermediate - 512 * t) // 8))
        packed[:, p, :, t, q] = natural[:, :, i]
    down_bias = np.random.default_rng(5).standard_normal((E, 512)).astype(np.float32)
    got = ExpertWeights.from_trainium(
        *tensors, hidden=512, intermediate=intermediate, gate_up_bias=packed, down_bias=down_bias
    )
    np.testing.assert_array_equal(got.gate_bias, natural[:, 0])
    np.testing.assert_array_equal(got.up_bias, natural[:, 1])
    np.testing.assert_array_equal(got.down_bias, down_bias)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_plain_weights_in_trainium_order(dtype):
    gate, up = RNG.standard_normal((2, E, 13, 512)).astype(dtype)
    down = RNG.standard_normal((E, 512, 13)).astype(dtype)
    ones = np.ones((E, 1), np.float32)
    scales = (
        {}
        if dtype != ml_dtypes.float8_e4m3fn
        else dict.fromkeys(("gate_scale", "up_scale", "down_scale"), ones)
    )
    got = ExpertWeights.from_experts(gate, up, down, block_order="trainium", **scales)
    assert got.block_order == "trainium" and got.expert(0).down.shape == (512, 32)
    assert_holds(got, *(a.astype(np.float64) for a in (gate, up, down)))


# ------------------------------------------------------------------ torch and memory


def test_numpy_checkpoints_are_viewed_not_copied():
    gate_up, scales = quantised(rows(GATE, UP, True), WeightFormat.MXFP4)
    down, down_scale = quantised(DOWN, WeightFormat.MXFP4)
    got = ExpertWeights.from_rows(
        gate_up, down, gate_up_scale=scales, down_scale=down_scale, interleaved=True
    )
    for e in range(E):
        m = got.expert(e)
        for view, base in ((m.gate, gate_up), (m.up, gate_up), (m.down, down)):
            assert np.shares_memory(view.codes, base)
        assert np.shares_memory(m.up.scale, scales)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_tensors_of_every_dtype_without_copies(name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    gate_up = torch.from_numpy(rows(GATE, UP, False)).to(dtype)
    down = torch.from_numpy(DOWN).to(dtype)
    fp8 = name.startswith("float8")
    scale = {"gate_up_scale": torch.ones(E, 1), "down_scale": torch.full((E, 1), 2.0)} if fp8 else {}
    got = ExpertWeights.from_rows(gate_up, down, **scale)
    wide = gate_up.double().numpy()
    assert_holds(got, wide[:, :I], wide[:, I:], down.double().numpy() * (2 if fp8 else 1))
    codes = got.expert(1).up.codes
    assert codes.ctypes.data == gate_up[1, I].data_ptr()
    assert got.expert(2).down.codes.ctypes.data == down[2].data_ptr()


def test_torch_mx_scales_in_their_own_dtype():
    torch = pytest.importorskip("torch")
    (gate_up, scale), (down, down_scale) = (
        quantised(a, WeightFormat.MXFP8_E4M3) for a in (rows(GATE, UP, False), DOWN)
    )
    want = ExpertWeights.from_rows(gate_up, down, gate_up_scale=scale, down_scale=down_scale)
    tensors = [torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn) for a in (gate_up, down)]
    scales = [torch.from_numpy(a).view(torch.float8_e8m0fnu) for a in (scale, down_scale)]
    got = ExpertWeights.from_rows(*tensors, gate_up_scale=scales[0], down_scale=scales[1])
    assert_same_experts(got, want)
    assert got.expert(0).gate.scale.ctypes.data == scales[0].data_ptr()


def test_torch_parameters_that_require_grad_are_fine():
    torch = pytest.importorskip("torch")
    parameters = [
        torch.nn.Parameter(torch.from_numpy(a.astype(np.float32))) for a in (rows(GATE, UP, False), DOWN)
    ]
    assert ExpertWeights.from_rows(*parameters).fmt is WeightFormat.FP32


def test_read_only_and_strided_tensors_are_fine():
    gate, up, down = (a.astype(np.float32) for a in (GATE, UP, DOWN))
    want = ExpertWeights.from_experts(gate, up, down)
    strided = [np.repeat(a, 2, axis=-1)[..., ::2] for a in (gate, up, down)]
    for a in strided:
        a.flags.writeable = False
    assert_same_experts(ExpertWeights.from_experts(*strided), want)
