"""MX instructions: goldens bit for bit, the block-scaled product, where scale bytes sit, what is refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from one_instruction import Bench, bench

from golden import Case, cases
from moedecode.formats import WeightFormat
from moedecode.formats.mx import quantise_mx
from moedecode.neuron.machine import dtypes
from moedecode.neuron.machine.chip import CHIPS
from moedecode.neuron.machine.errors import ConstraintViolation
from moedecode.neuron.machine.isa.mx import nc_matmul_mx, quantize_mx
from moedecode.neuron.machine.mx_tiles import ELEMENTS, decode, quantise_tile, scale_partitions, scale_rows
from moedecode.neuron.machine.tensor import Tensor

BF16 = ml_dtypes.bfloat16
FORMATS = {"float8_e4m3fn_x4": WeightFormat.MXFP8_E4M3, "float8_e5m2_x4": WeightFormat.MXFP8_E5M2}
X4 = {name: dtypes.DTYPES[name] for name in ELEMENTS}


def quantiser_cases(*, narrow: bool) -> list[object]:
    """The goldens that quantize_mx can be asked for: MXFP8 targets, with ``narrow`` from 16-bit sources."""
    return [
        made
        for made in cases("mx_quantize")
        if made.values[0] is None
        or (
            made.values[0].options["target"] in FORMATS
            and (not narrow or made.values[0].options["input_dtype"] != "float32")
        )
    ]


def on_chip_scales(dense: np.ndarray, partitions: int, unused: int = 0xAA) -> np.ndarray:
    """Dense scales [P / 8, N] as they sit in SBUF; what lies between them must not be read."""
    tile = np.full((partitions, dense.shape[1]), unused, np.uint8)
    for block in range(partitions // 8):
        tile[32 * (block // 4) + block % 4] = dense[block]
    return tile


def random_operand(packed: str, partitions: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = 4 * ELEMENTS[packed].itemsize if "8" in packed[5:7] else 2
    words = rng.integers(0, 256, (partitions, columns, width), dtype=np.uint8)
    if packed == "float8_e4m3fn_x4":
        words[(words & 0x7F) == 0x7F] = 0  # NaN codes
    if packed == "float8_e5m2_x4":
        words[(words & 0x7C) == 0x7C] = 0  # NaN and infinity codes
    scales = rng.integers(118, 137, (partitions // 8, columns), dtype=np.uint8)
    return words.view(f"<u{width}")[..., 0], scales


def dequantised(words: np.ndarray, dense: np.ndarray, packed: str) -> np.ndarray:
    """[P, N, 4] in float64, one element at a time in the formula."""
    codes = words.astype(np.uint64)[..., None] >> (
        np.arange(4, dtype=np.uint64) * (4 if "4_" in packed else 8)
    )
    elements = (
        (codes & (15 if "4_" in packed else 255)).astype(np.uint8).view(ELEMENTS[packed]).astype(np.float64)
    )
    return elements * np.exp2(np.repeat(dense, 8, axis=0).astype(np.float64) - 127)[..., None]


def operand(on: Bench, words: np.ndarray, dense: np.ndarray, packed: str) -> tuple[Tensor, Tensor]:
    return on.sbuf(words.view(X4[packed])), on.sbuf(on_chip_scales(dense, words.shape[0]))


# ---- the layout of scales ----------------------------------------------------------------------------------


def test_scale_rows_lead_each_quadrant() -> None:
    assert scale_rows(128).tolist() == [0, 1, 2, 3, 32, 33, 34, 35, 64, 65, 66, 67, 96, 97, 98, 99]
    assert scale_rows(64).tolist() == [0, 1, 2, 3, 32, 33, 34, 35]
    assert [scale_partitions(p) for p in (32, 64, 96, 128)] == [4, 36, 68, 100]


@pytest.mark.parametrize("packed", ELEMENTS)
def test_decode_all_codes(packed: str) -> None:
    codes = np.arange(16 if "4_" in packed else 256)
    shift = 4 if "4_" in packed else 8
    words = sum((np.roll(codes, q).astype(np.uint64) << np.uint64(shift * q)) for q in range(4))
    got = decode(words.astype(np.uint16 if shift == 4 else np.uint32)[None], packed)  # [4, 1, codes]
    values = codes.astype(np.uint8).view(ELEMENTS[packed]).astype(np.float32)
    for q in range(4):
        np.testing.assert_array_equal(got[q, 0], np.roll(values, q))


# ---- quantize_mx -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", quantiser_cases(narrow=False))
def test_quantiser_goldens(case: Case) -> None:
    target = case.options["target"]
    words, scales = quantise_tile(case.inputs()["data"].astype(np.float32), target)
    np.testing.assert_array_equal(scales, case.want("scale"))
    np.testing.assert_array_equal(words, case.want("packed"))


@pytest.mark.parametrize("case", quantiser_cases(narrow=True))
def test_instruction_on_the_16_bit_goldens(case: Case) -> None:
    target, data = case.options["target"], case.inputs()["data"]
    rows = -(-data.shape[0] // 32) * 32
    padded = np.zeros((rows, data.shape[1]), data.dtype)
    padded[: data.shape[0]] = data
    with bench() as on:
        dst, scale = (
            on.empty((rows, data.shape[1] // 4), X4[target]),
            on.empty((rows, data.shape[1] // 4), np.uint8),
        )
        quantize_mx(dst=dst, src=on.sbuf(padded), dst_scale=scale)
        np.testing.assert_array_equal(dst.array()[target][: data.shape[0]], case.want("packed"))
        np.testing.assert_array_equal(
            scale.array()[scale_rows(rows)][: data.shape[0] // 8], case.want("scale")
        )


@pytest.mark.parametrize("packed", FORMATS)
def test_quantiser_agrees_with_formats_mx(packed: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.normal(size=(64, 4 * 24)) * np.exp2(rng.integers(-30, 30, (64, 96)))).astype(BF16)
    values[8:16, 8:12] = 0
    values[16, 20] = np.inf
    values[40, 40] = np.nan
    words, scales = quantise_tile(values.astype(np.float32), packed)
    blocks = values.reshape(8, 8, 24, 4).transpose(0, 2, 1, 3).reshape(8, 24, 32)  # [P / 8, N, 32]
    codes, want = quantise_mx(blocks, FORMATS[packed])
    np.testing.assert_array_equal(scales, want[..., 0])
    got = words.view(np.uint8).reshape(8, 8, 24, 4).transpose(0, 2, 1, 3).reshape(8, 24, 32)
    np.testing.assert_array_equal(got, codes)


def test_source_may_be_a_strided_view() -> None:
    x = np.random.default_rng(0).normal(size=(128, 4, 6)).astype(BF16)
    with bench() as on:
        dst, scale = on.empty((128, 6), X4["float8_e4m3fn_x4"]), on.empty((128, 6), np.uint8)
        source = on.sbuf(x)
        quantize_mx(dst, source.permute(0, 2, 1), scale)  # [128, 4, 6] -> [128, 6, 4]
        words, scales = quantise_tile(
            np.ascontiguousarray(x.transpose(0, 2, 1)).reshape(128, 24).astype(np.float32), "float8_e4m3fn_x4"
        )
        np.testing.assert_array_equal(dst.array()["float8_e4m3fn_x4"], words)
        np.testing.assert_array_equal(scale.array()[scale_rows(128)], scales)


def test_partitions_between_scales_keep_what_they_held() -> None:
    with bench() as on:
        scale = on.sbuf(np.full((64, 2), 77, np.uint8))
        quantize_mx(on.empty((64, 2), X4["float8_e5m2_x4"]), on.sbuf(np.ones((64, 8)), BF16), scale)
        used = set(scale_rows(64).tolist())
        assert all((scale.array()[p] == 77).all() == (p not in used) for p in range(64))


def test_headroom_is_a_switch_of_the_chip() -> None:
    with bench() as on, bench(dataclasses.replace(CHIPS["trn3"], mx_scale_headroom=1)) as roomy:
        found = []
        for place in (on, roomy):
            place.prog.enter()
            scale = place.empty((32, 1), np.uint8)
            quantize_mx(
                place.empty((32, 1), X4["float8_e4m3fn_x4"]), place.sbuf(np.ones((32, 4)), BF16), scale
            )
            found.append(int(scale.array()[0, 0]))
        assert found == [127 - 8, 127 - 7]


def test_four_elements_per_cycle() -> None:
    with bench() as on:
        quantize_mx(
            on.empty((128, 512), X4["float8_e4m3fn_x4"]),
            on.sbuf(np.ones((128, 2048)), BF16),
            on.empty((128, 512), np.uint8),
        )
        assert on.seconds("vector") * 1.2e9 == pytest.approx(512)


# ---- nc_matmul_mx ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mx_matmul"))
def test_matmul_goldens(case: Case) -> None:
    given, options = case.inputs(), case.options
    with bench() as on:
        stationary = operand(on, given["stationary"], given["stationary_scale"], options["stationary_format"])
        moving = operand(on, given["moving"], given["moving_scale"], options["moving_format"])
        want = case.want("out")
        dst = on.empty_psum(want.shape)
        nc_matmul_mx(
            dst=dst,
            stationary=stationary[0],
            moving=moving[0],
            stationary_scale=stationary[1],
            moving_scale=moving[1],
        )
        assert np.linalg.norm(dst.array() - want) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("stationary", ELEMENTS)
@pytest.mark.parametrize("moving", ELEMENTS)
@pytest.mark.parametrize("partitions", [32, 96, 128])
def test_matmul_against_float64(stationary: str, moving: str, partitions: int) -> None:
    left, right = random_operand(stationary, partitions, 12, 1), random_operand(moving, partitions, 7, 2)
    want = np.einsum("pmq,pnq->mn", dequantised(*left, stationary), dequantised(*right, moving))
    with bench() as on:
        dst = on.empty_psum((12, 7))
        (a, a_scale), (b, b_scale) = operand(on, *left, stationary), operand(on, *right, moving)
        nc_matmul_mx(dst, a, b, a_scale, b_scale)
        size = np.einsum("pmq,pnq->mn", abs(dequantised(*left, stationary)), abs(dequantised(*right, moving)))
        assert (np.abs(dst.array() - want) <= 2e-6 * size).all()


def test_matmul_accumulates_like_nc_matmul() -> None:
    left, right = random_operand("float4_e2m1fn_x4", 128, 8, 1), random_operand("float8_e4m3fn_x4", 128, 6, 2)
    with bench() as on:
        dst = on.empty_psum((8, 6))
        (a, a_scale), (b, b_scale) = (
            operand(on, *left, "float4_e2m1fn_x4"),
            operand(on, *right, "float8_e4m3fn_x4"),
        )
        nc_matmul_mx(dst, a, b, a_scale, b_scale)
        once = dst.numpy()
        nc_matmul_mx(dst, a, b, a_scale, b_scale)
        np.testing.assert_allclose(dst.array(), 2 * once, rtol=1e-6)
        nc_matmul_mx(dst, a, b, a_scale, b_scale, accumulate=False)
        np.testing.assert_array_equal(dst.array(), once)
        assert on.seconds("tensor") * 2.4e9 == pytest.approx(3 * 8)


def test_scale_0xff_is_nan_and_stays_in_its_column() -> None:
    left, right = random_operand("float4_e2m1fn_x4", 32, 4, 1), random_operand("float4_e2m1fn_x4", 32, 4, 2)
    left[1][2, 3] = 0xFF
    with bench() as on:
        dst = on.empty_psum((4, 4))
        (a, a_scale), (b, b_scale) = (operand(on, *o, "float4_e2m1fn_x4") for o in (left, right))
        nc_matmul_mx(dst, a, b, a_scale, b_scale)
        assert np.isnan(dst.array()[3]).all()
        assert np.isfinite(dst.array()[:3]).all()


# ---- what is refused ---------------------------------------------------------------------------------------


def refused(
    message: str,
    partitions: int = 128,
    columns: int = 8,
    width: int = 6,
    chip: str = "trn3",
    dst: object = np.float32,
    **swap: object,
) -> None:
    left = random_operand("float4_e2m1fn_x4", partitions, columns, 1)
    right = random_operand("float8_e4m3fn_x4", partitions, width, 2)
    with bench(chip) as on:
        (a, a_scale), (b, b_scale) = (
            operand(on, *left, "float4_e2m1fn_x4"),
            operand(on, *right, "float8_e4m3fn_x4"),
        )
        given = {"stationary": a, "moving": b, "stationary_scale": a_scale, "moving_scale": b_scale}
        for name, make in swap.items():
            given[name] = make(on)
        with pytest.raises(ConstraintViolation, match=message):
            nc_matmul_mx(on.empty_psum((min(columns, 128), min(width, 512)), dst), **given)


@pytest.mark.parametrize("chip", ["trn1", "trn2"])
def test_chips_without_mx(chip: str) -> None:
    refused(f"nc_matmul_mx: chip {chip}: has no MX instructions", chip=chip)
    with bench(chip) as on, pytest.raises(ConstraintViolation, match=f"quantize_mx: chip {chip}: has no MX"):
        quantize_mx(
            on.empty((32, 1), X4["float8_e4m3fn_x4"]),
            on.sbuf(np.ones((32, 4)), BF16),
            on.empty((32, 1), np.uint8),
        )


def test_matmul_operand_rules() -> None:
    refused(r"stationary=.*40 partitions: must be 32, 64, 96 or 128", partitions=40)
    refused(r"stationary=.*7 columns: must be even", columns=7)
    refused(r"stationary=.*130 columns: must be even and at most 128", columns=130)
    refused(r"moving=.*513 columns: at most 512 for float32", width=513)
    refused(r"moving=.*1025 columns: at most 1024 for bfloat16", width=1025, dst=BF16)
    refused(r"moving=.*must be a packed x4 type", moving=lambda on: on.sbuf(np.ones((128, 6)), BF16))
    refused(
        "stationary_scale=.*must be uint8", stationary_scale=lambda on: on.sbuf(np.ones((128, 8), np.int32))
    )
    refused(
        "stationary_scale=.*the tile spans 100..128 partitions x 8",
        stationary_scale=lambda on: on.empty((64, 8), np.uint8),
    )
    refused(r"moving_scale=.*must lie in sbuf", moving_scale=lambda on: on.psum(np.zeros((128, 6), np.uint8)))
    refused(
        "moving=.*must have 128 like stationary",
        moving=lambda on: on.empty((64, 6), X4["float8_e4m3fn_x4"]),
        moving_scale=lambda on: on.empty((64, 6), np.uint8),
    )


@pytest.mark.parametrize(
    ("source", "target", "partitions", "message"),
    [
        (np.float32, "float8_e4m3fn_x4", 32, "src=.*must be float16 or bfloat16"),
        (BF16, "float4_e2m1fn_x4", 32, "dst=.*must be float8_e4m3fn_x4 or float8_e5m2_x4"),
        (BF16, "float8_e4m3fn_x4", 16, "src=.*16 partitions: must be 32"),
    ],
)
def test_quantiser_operand_rules(source: object, target: str, partitions: int, message: str) -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match=message):
        quantize_mx(
            on.empty((partitions, 2), X4[target]),
            on.sbuf(np.ones((partitions, 8)), source),
            on.empty((partitions, 2), np.uint8),
        )
