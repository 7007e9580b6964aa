"""Quantising to MX against a scalar implementation that searches the nearest code."""

import math
from itertools import pairwise

import numpy as np
import pytest
from decoders import e2m1, e4m3fn, e5m2, e8m0
from hypothesis import given, settings
from hypothesis import strategies as st

from moedecode.formats import WeightFormat, dequantise_e4m3, quantise_mx
from moedecode.formats.numbers import split_nibbles

# format -> (decoder of a code, codes, exponent of the largest value)
ELEMENTS = {
    WeightFormat.MXFP4: (e2m1, 16, 2),
    WeightFormat.MXFP8_E4M3: (e4m3fn, 256, 8),
    WeightFormat.MXFP8_E5M2: (e5m2, 256, 15),
}
FORMATS = list(ELEMENTS)


def nearest_code(value: float, fmt: WeightFormat) -> int:
    """The code nearest to ``value``; a tie goes to the even code, a value past the largest to the largest."""
    decoder, count, _ = ELEMENTS[fmt]
    half = count // 2
    positive = [code for code in range(half) if math.isfinite(decoder(code))]
    size = min(abs(value), max(map(decoder, positive)))
    code = min(positive, key=lambda c: (abs(decoder(c) - size), c & 1))
    return code + half if math.copysign(1.0, value) < 0 else code


def quantise_scalar(block: list[float], fmt: WeightFormat) -> tuple[list[int], int]:
    """One block: (codes, scale code)."""
    if not all(math.isfinite(v) for v in block):
        return [nearest_code(0.0, fmt)] * len(block), 0xFF
    largest = max(abs(v) for v in block)
    if largest == 0:
        return [nearest_code(v, fmt) for v in block], 0
    exponent = math.frexp(largest)[1] - 1
    scale = min(max(exponent - ELEMENTS[fmt][2] + 127, 0), 254)
    return [nearest_code(v / e8m0(scale), fmt) for v in block], scale


def codes_of(codes: np.ndarray, fmt: WeightFormat) -> np.ndarray:
    return split_nibbles(codes) if fmt is WeightFormat.MXFP4 else codes


def assert_quantises_like_the_scalar_rule(values: np.ndarray, fmt: WeightFormat) -> None:
    """``values [n]``, n even: codes and scales bit for bit."""
    codes, scales = quantise_mx(values, fmt)
    assert codes.dtype == scales.dtype == np.uint8
    codes = codes_of(codes, fmt)
    assert codes.shape == values.shape and scales.shape == (-(-len(values) // 32),)
    for b in range(len(scales)):
        part = slice(32 * b, 32 * b + 32)
        want, scale = quantise_scalar([float(v) for v in values[part]], fmt)
        assert scales[b] == scale
        if scale != 0xFF:  # the codes of a NaN block mean nothing
            assert codes[part].tolist() == want


corners = st.sampled_from(
    [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 448.0, 464.0, 480.0, 61440.0, 65504.0]
    + [math.ldexp(1.0, k) for k in (-149, -148, -140, -127, -126, -60, 60, 126, 127)]
    + [math.ldexp(2.0 - 2.0**-23, 127), math.ldexp(17, -13), math.ldexp(3, -10), -math.ldexp(5, -18)]
)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
similar = st.floats(-8, 8, width=32)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.value)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_finite_blocks(fmt, data):
    element = data.draw(st.sampled_from([corners, finite, similar, st.one_of(corners, finite)]))
    values = data.draw(st.lists(element, min_size=1, max_size=48).map(lambda v: v + v[: len(v) % 2]))
    assert_quantises_like_the_scalar_rule(np.array(values, np.float32), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.value)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_block_with_nan_or_inf_gets_scale_ff_and_leaves_its_neighbours(fmt, data, bad):
    values = np.array(data.draw(st.lists(similar, min_size=96, max_size=96)), np.float32)
    values[data.draw(st.integers(32, 63))] = bad
    _, scales = quantise_mx(values, fmt)
    assert scales[1] == 0xFF and scales[0] != 0xFF and scales[2] != 0xFF
    assert_quantises_like_the_scalar_rule(values, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.value)
def test_every_tie_between_neighbouring_codes_goes_to_the_even_one(fmt):
    decoder, count, emax = ELEMENTS[fmt]
    values = [decoder(code) for code in range(count // 2) if math.isfinite(decoder(code))]
    ties = [(low + high) / 2 for low, high in pairwise(values)]
    anchor = math.ldexp(1.0, emax)  # keeps the scale at 1
    for start in range(0, len(ties), 31):
        some = ties[start : start + 31]
        block = np.array([anchor, *some] + [0.0] * (31 - len(some)))
        codes, scales = quantise_mx(block, fmt)
        assert scales.tolist() == [127]
        got = codes_of(codes, fmt)[1 : 1 + len(some)]
        assert not (got & 1).any()
        assert got.tolist() == [nearest_code(tie, fmt) for tie in some]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.value)
def test_every_finite_code_survives_a_round_trip(fmt):
    decoder, count, emax = ELEMENTS[fmt]
    anchor = math.ldexp(1.0, emax)
    for code in range(count):
        value = decoder(code)
        if math.isfinite(value):
            codes, scales = quantise_mx(np.array([anchor, value]), fmt)
            assert (int(codes_of(codes, fmt)[1]), int(scales[0])) == (code, 127)


@pytest.mark.parametrize(
    ("fmt", "value", "code"),
    [
        (WeightFormat.MXFP4, 7.9, 7),  # 7.9 -> 6
        (WeightFormat.MXFP8_E4M3, 511.0, 0x7E),  # 511 -> 448, never the NaN code
        (WeightFormat.MXFP8_E5M2, 65000.0, 0x7B),  # 65000 -> 57344, never infinity
    ],
)
def test_values_between_the_largest_code_and_the_next_power_saturate(fmt, value, code):
    codes, scales = quantise_mx(np.array([value, -value]), fmt)
    half = ELEMENTS[fmt][1] // 2
    assert scales.tolist() == [127]
    assert codes_of(codes, fmt).tolist() == [code, code + half]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.value)
@pytest.mark.parametrize(
    "exponent", [-149, -140, -128, -127, -126, -120, -113, -112, 126, 127, 138, 150, 300]
)
def test_scales_stop_at_the_ends_of_e8m0(fmt, exponent):
    values = np.ldexp([1.0, -1.5, 1.25, 0.375, 1.9, -0.0, 0.06, 1.0], exponent)
    assert_quantises_like_the_scalar_rule(values, fmt)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_input_dtype_does_not_change_the_result(dtype):
    values = np.linspace(-3, 3, 64).astype(np.float16).astype(np.float64)
    values = np.round(values * 32) / 32  # exact in every dtype of the test
    want = quantise_mx(values, WeightFormat.MXFP8_E4M3)
    got = quantise_mx(values.astype(dtype), WeightFormat.MXFP8_E4M3)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_leading_axes_are_independent_blocks():
    values = np.random.default_rng(1).standard_normal((2, 3, 96)) * np.logspace(-3, 3, 3)[:, None]
    codes, scales = quantise_mx(values, WeightFormat.MXFP4)
    assert codes.shape == (2, 3, 48) and scales.shape == (2, 3, 3)
    for i, j in np.ndindex(2, 3):
        row_codes, row_scales = quantise_mx(values[i, j], WeightFormat.MXFP4)
        np.testing.assert_array_equal(codes[i, j], row_codes)
        np.testing.assert_array_equal(scales[i, j], row_scales)


def test_dequantise_is_codes_times_scales_and_nan_where_a_block_is_bad():
    values = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    values[2, 40] = np.inf
    codes, scales = quantise_mx(values, WeightFormat.MXFP8_E4M3)
    want = [[e4m3fn(int(codes[t, k])) * e8m0(int(scales[t, k // 32])) for k in range(64)] for t in range(4)]
    np.testing.assert_array_equal(dequantise_e4m3(values), want)
    assert np.isnan(want[2][32:]).all() and np.isfinite(want[2][:32]).all()
