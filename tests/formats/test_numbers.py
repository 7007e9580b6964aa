"""Every code of every number format, against the decoders written from bit fields."""

import numpy as np
import pytest
from decoders import decode, e2m1, e4m3fn, e5m2, e8m0

from moedecode.formats import WeightFormat
from moedecode.formats.numbers import e8m0_values, element_values, join_nibbles, split_nibbles


def assert_same_floats(got: np.ndarray, want: list[float]) -> None:
    """Equal values, NaN to NaN, and zeros of the same sign."""
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, want)
    real = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[real]), np.signbit(want)[real])


def test_the_sixteen_values_of_e2m1_are_the_published_ones():
    assert [e2m1(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_every_pair_of_e2m1_codes_in_a_byte():
    packed = np.arange(256, dtype=np.uint8)
    want = [value for byte in range(256) for value in (e2m1(byte & 15), e2m1(byte >> 4))]
    assert_same_floats(element_values(WeightFormat.MXFP4, packed), want)


@pytest.mark.parametrize("fmt", [WeightFormat.FP8_E4M3, WeightFormat.MXFP8_E4M3])
def test_every_code_of_e4m3fn(fmt):
    codes = np.arange(256, dtype=np.uint8)
    assert_same_floats(element_values(fmt, codes), [e4m3fn(code) for code in range(256)])


@pytest.mark.parametrize("fmt", [WeightFormat.FP8_E5M2, WeightFormat.MXFP8_E5M2])
def test_every_code_of_e5m2(fmt):
    codes = np.arange(256, dtype=np.uint8)
    assert_same_floats(element_values(fmt, codes), [e5m2(code) for code in range(256)])


def test_every_code_of_e8m0():
    assert_same_floats(e8m0_values(np.arange(256, dtype=np.uint8)), [e8m0(code) for code in range(256)])


@pytest.mark.parametrize(
    ("fmt", "exponent_bits", "bias"), [(WeightFormat.FP16, 5, 15), (WeightFormat.BF16, 8, 127)]
)
def test_every_code_of_the_16_bit_formats(fmt, exponent_bits, bias):
    codes = np.arange(65536, dtype=np.uint16)
    finite = (codes >> (15 - exponent_bits) & (1 << exponent_bits) - 1) != (1 << exponent_bits) - 1
    got = element_values(fmt, codes)
    want = [decode(int(code), exponent_bits, 15 - exponent_bits, bias) for code in codes[finite]]
    assert_same_floats(got[finite], want)
    assert not np.isfinite(got[~finite]).any()


def test_extremes_that_are_easy_to_get_wrong():
    assert e4m3fn(0x7E) == 448 and e4m3fn(0x01) == 2.0**-9
    assert e5m2(0x7B) == 57344 and e5m2(0x01) == 2.0**-16
    assert e8m0(0) == 2.0**-127 and e8m0(254) == 2.0**127


def test_nibbles_round_trip_low_nibble_first():
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes = split_nibbles(packed)
    assert codes.shape == (2, 256)
    assert list(codes[0, 2 * 0x5A : 2 * 0x5A + 2]) == [0xA, 0x5]
    np.testing.assert_array_equal(join_nibbles(codes), packed)


@pytest.mark.parametrize(
    ("fmt", "bits", "with_scale"),
    [
        (WeightFormat.FP32, 32, 32),
        (WeightFormat.FP16, 16, 16),
        (WeightFormat.BF16, 16, 16),
        (WeightFormat.FP8_E4M3, 8, 8),
        (WeightFormat.FP8_E5M2, 8, 8),
        (WeightFormat.MXFP8_E4M3, 8, 8.25),
        (WeightFormat.MXFP8_E5M2, 8, 8.25),
        (WeightFormat.MXFP4, 4, 4.25),
    ],
)
def test_bits_of_every_format(fmt, bits, with_scale):
    assert (fmt.bits, fmt.bits_with_scale) == (bits, with_scale)
    assert eval(repr(fmt)) is fmt
