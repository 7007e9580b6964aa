"""From dtypes and their names to formats: every spelling, every disagreement, and IEEE-style float8."""

import ml_dtypes
import numpy as np
import pytest

from moedecode import InvalidInput, WeightFormat
from moedecode.formats.dtypes import as_codes, is_e8m0, logical_dtype, weight_format


@pytest.mark.parametrize(
    ("array", "declared", "e8m0", "want"),
    [
        (np.zeros(2, np.float32), None, False, WeightFormat.FP32),
        (np.zeros(2, np.float16), None, False, WeightFormat.FP16),
        (np.zeros(2, ml_dtypes.bfloat16), None, False, WeightFormat.BF16),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), None, False, WeightFormat.FP8_E4M3),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), None, True, WeightFormat.MXFP8_E4M3),
        (np.zeros(2, ml_dtypes.float8_e5m2), None, False, WeightFormat.FP8_E5M2),
        (np.zeros(2, ml_dtypes.float8_e5m2), None, True, WeightFormat.MXFP8_E5M2),
        (np.zeros(2, np.uint8), "float8_e5m2", False, WeightFormat.FP8_E5M2),
        (np.zeros(2, np.uint8), ml_dtypes.float8_e4m3fn, True, WeightFormat.MXFP8_E4M3),
        (np.zeros(2, np.uint8), "float4_e2m1fn", True, WeightFormat.MXFP4),
        (np.zeros(2, np.uint16), None, True, WeightFormat.MXFP4),
        (np.zeros(2, np.uint16), "float4_e2m1fn_x4", True, WeightFormat.MXFP4),
        (np.zeros(2, np.uint32), None, True, WeightFormat.MXFP8_E4M3),
        (np.zeros(2, np.uint32), "float8_e5m2_x4", True, WeightFormat.MXFP8_E5M2),
    ],
)
def test_formats_by_dtype_and_by_name(array, declared, e8m0, want):
    assert weight_format(logical_dtype(array, declared, "w"), e8m0, "w") is want


@pytest.mark.parametrize(
    ("array", "declared", "e8m0", "fragments"),
    [
        (
            np.zeros(2, np.uint8),
            "int4",
            False,
            ("expert_weight_dtype='int4'", "is not a weight dtype", "float4_e2m1fn_x4"),
        ),
        (np.zeros(2, np.uint32), "float4_e2m1fn_x4", True, ("w=array of uint32", "stored in uint16")),
        (np.zeros(2, np.uint16), "float8_e4m3fn_x4", True, ("w=array of uint16", "stored in uint32")),
        (np.zeros(2, np.float32), "bfloat16", False, ("w=array of float32", "declared bfloat16")),
        (np.zeros(2, np.float64), None, False, ("w=array of float64", "without E8M0")),
        (np.zeros(2, np.int8), None, False, ("w=array of int8", "not a weight format")),
        (np.zeros(2, np.float32), None, True, ("w=array of float32", "with E8M0")),
        (np.zeros(2, np.uint16), None, False, ("float4_e2m1fn_x4", "without E8M0")),
    ],
)
def test_disagreements_are_named(array, declared, e8m0, fragments):
    with pytest.raises(InvalidInput) as error:
        weight_format(logical_dtype(array, declared, "w"), e8m0, "w")
    for fragment in fragments:
        assert fragment in str(error.value)


def test_ieee_style_e4m3_keeps_every_value():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3)
    codes = codes[~np.isinf(codes.astype(np.float32))]
    got = as_codes(codes, "float8_e4m3", "w")
    assert got.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(got.astype(np.float32), codes.astype(np.float32))


@pytest.mark.parametrize("code", [0x78, 0xF8])
def test_an_infinity_of_ieee_style_e4m3_is_refused(code):
    with pytest.raises(InvalidInput, match="w=an infinity of float8_e4m3"):
        as_codes(np.array([0, code], np.uint8).view(ml_dtypes.float8_e4m3), "float8_e4m3", "w")


def test_what_counts_as_e8m0():
    assert is_e8m0(np.zeros(1, np.uint8)) and is_e8m0(np.zeros(1, ml_dtypes.float8_e8m0fnu))
    assert not is_e8m0(np.zeros(1, np.float32)) and not is_e8m0(None)
