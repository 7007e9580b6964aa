"""Stored matrices: values of every scale layout against loops, and the shapes that are refused."""

import ml_dtypes
import numpy as np
import pytest
from decoders import e2m1, e4m3fn, e8m0

from moedecode import InvalidInput, WeightFormat
from moedecode.formats import StoredMatrix

RNG = np.random.default_rng(20)


def fp8(rows: int, cols: int) -> np.ndarray:
    return RNG.integers(0, 0x7F, (rows, cols), np.uint8).view(ml_dtypes.float8_e4m3fn)


# 2880: 90 scales to a row, no multiple of a vector; 90 and 2892: a short last block
@pytest.mark.parametrize("cols", [32, 90, 2880, 2892])
def test_mxfp4_values(cols):
    codes = RNG.integers(0, 256, (3, cols // 2), np.uint8)
    scales = RNG.integers(100, 150, (3, -(-cols // 32)), np.uint8)
    matrix = StoredMatrix(WeightFormat.MXFP4, codes, scales)
    assert matrix.shape == (3, cols)
    got = matrix.values()
    for r, c in np.ndindex(3, cols):
        code = codes[r, c // 2] >> 4 if c % 2 else codes[r, c // 2] & 15
        assert got[r, c] == e2m1(int(code)) * e8m0(int(scales[r, c // 32]))


def test_mx_scale_ff_makes_its_block_nan_and_nothing_else():
    scales = np.full((2, 3), 127, np.uint8)
    scales[1, 1] = 0xFF
    got = StoredMatrix(WeightFormat.MXFP4, np.full((2, 48), 0x22, np.uint8), scales).values()
    bad = np.zeros((2, 96), bool)
    bad[1, 32:64] = True
    assert np.isnan(got[bad]).all() and (got[~bad] == 1.0).all()


def test_mx_extreme_scales_are_exact():
    scales = np.array([[0], [254]], np.uint8)
    got = StoredMatrix(WeightFormat.MXFP4, np.full((2, 16), 0x77, np.uint8), scales).values()
    assert (got[0] == 6 * 2.0**-127).all() and (got[1] == 6 * 2.0**127).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_mxfp8_values(name):
    fmt = WeightFormat.MXFP8_E4M3 if "e4m3" in name else WeightFormat.MXFP8_E5M2
    codes = RNG.integers(0, 0x7B, (2, 70), np.uint8).view(getattr(ml_dtypes, name))
    scales = RNG.integers(120, 130, (2, 3), np.uint8)
    got = StoredMatrix(fmt, codes, scales).values()
    for r, c in np.ndindex(2, 70):
        assert got[r, c] == float(codes[r, c]) * e8m0(int(scales[r, c // 32]))


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (4, 7),  # a block larger than the matrix
        (128, 256),  # whole blocks
        (129, 130),  # one row and two columns in the last blocks
        (300, 200),
    ],
)
def test_fp8_scales_per_tensor_row_and_block(rows, cols):
    codes = fp8(rows, cols)
    plain = [[e4m3fn(int(c)) for c in row] for row in codes.view(np.uint8)]
    per_tensor = StoredMatrix(WeightFormat.FP8_E4M3, codes, np.float32([3]))
    np.testing.assert_array_equal(per_tensor.values(), np.multiply(plain, 3))
    per_row = RNG.uniform(0.5, 2, rows).astype(np.float32)
    got = StoredMatrix(WeightFormat.FP8_E4M3, codes, per_row).values()
    for r, c in ((0, 0), (rows - 1, cols - 1), (rows // 2, cols // 3)):
        assert got[r, c] == plain[r][c] * float(per_row[r])
    blocks = RNG.uniform(0.5, 2, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
    got = StoredMatrix(WeightFormat.FP8_E4M3, codes, blocks).values()
    for r, c in np.ndindex(rows, cols):
        assert got[r, c] == plain[r][c] * float(blocks[r // 128, c // 128])


@pytest.mark.parametrize(
    "fmt", [WeightFormat.FP32, WeightFormat.FP16, WeightFormat.BF16], ids=lambda f: f.value
)
def test_plain_values(fmt):
    codes = RNG.standard_normal((3, 5)).astype(fmt.element)
    matrix = StoredMatrix(fmt, codes)
    assert matrix.shape == (3, 5) and matrix.values().dtype == np.float64
    np.testing.assert_array_equal(matrix.values(), codes.astype(np.float64))


MX, E4 = WeightFormat.MXFP4, WeightFormat.FP8_E4M3


@pytest.mark.parametrize(
    ("fmt", "codes", "scale", "fragments"),
    [
        (MX, np.zeros((4, 32), np.uint8), None, ("scale=shape None", "mxfp4", "[4, 64]", "(4, 2)")),
        (MX, np.zeros((4, 1440), np.uint8), np.zeros((4, 89), np.uint8), ("shape (4, 89)", "(4, 90)")),
        (MX, np.zeros((4, 1440), np.uint8), np.zeros((4, 96), np.uint8), ("shape (4, 96)", "(4, 90)")),
        (MX, np.zeros((4, 32), np.uint8), np.zeros((3, 2), np.uint8), ("shape (3, 2)", "(4, 2)")),
        (WeightFormat.MXFP8_E4M3, fp8(4, 64), np.zeros(4, np.uint8), ("shape (4,)", "(4, 2)")),
        (E4, fp8(130, 64), np.ones(129, np.float32), ("shape (129,)", "(1,)", "(130,)", "(2, 1)")),
        (E4, fp8(130, 300), np.ones((2, 2), np.float32), ("shape (2, 2)", "(2, 3)")),
        (
            WeightFormat.BF16,
            np.zeros((2, 2), ml_dtypes.bfloat16),
            np.ones(1),
            ("scale=given", "bf16", "leave it out"),
        ),
    ],
)
def test_wrong_scales_are_refused(fmt, codes, scale, fragments):
    with pytest.raises(InvalidInput) as error:
        StoredMatrix(fmt, codes, scale)
    for fragment in fragments:
        assert fragment in str(error.value)
