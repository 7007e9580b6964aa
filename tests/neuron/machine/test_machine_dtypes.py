"""Number formats of the model: every code of the packed types, poison that shows, what is an address."""

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.machine import dtypes as dt

X4 = [dt.float4_e2m1fn_x4, dt.float8_e4m3fn_x4, dt.float8_e5m2_x4]


@pytest.mark.parametrize("dtype", X4[1:], ids=str)
def test_every_8_bit_code_decodes(dtype):
    codes = np.arange(256, dtype=np.uint8)
    decoded = dt.unpack_x4(codes.view(dtype))
    assert decoded.shape == (64, 4)
    np.testing.assert_array_equal(decoded.ravel(), codes.view(dt.x4_element(dtype)).astype(np.float32))


def test_every_4_bit_word_decodes_lowest_nibble_first():
    words = np.arange(1 << 16, dtype=np.uint16)
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = np.stack([values[(words >> shift) & 15] for shift in (0, 4, 8, 12)], -1)
    np.testing.assert_array_equal(dt.unpack_x4(words.view(dt.float4_e2m1fn_x4)), expected)


@pytest.mark.parametrize("dtype", X4, ids=str)
def test_packing_is_the_inverse_on_all_finite_codes(dtype):
    codes = np.arange(
        1 << 8 * dtype.itemsize if dtype.itemsize == 2 else 256,
        dtype=np.uint16 if dtype.itemsize == 2 else np.uint8,
    )
    packed = codes.view(dtype)
    values = dt.unpack_x4(packed)
    keep = np.isfinite(values).all(-1)
    assert keep.sum() > keep.size // 2
    again = dt.pack_x4(values[keep], dtype)
    assert again.dtype == dtype
    np.testing.assert_array_equal(again, packed[keep])


@pytest.mark.parametrize(("dtype", "largest"), list(zip(X4, (6.0, 448.0, 57344.0), strict=True)), ids=str)
def test_packing_saturates_and_rounds_to_nearest_even(dtype, largest):
    values = np.array([[1e6, -1e6, 0.0, 1.0]], np.float32)
    np.testing.assert_array_equal(dt.unpack_x4(dt.pack_x4(values, dtype)), [[largest, -largest, 0.0, 1.0]])
    if dtype == dt.float4_e2m1fn_x4:
        tie = np.array([[2.5, 3.5, 5.0, -0.25]], np.float32)
        np.testing.assert_array_equal(dt.unpack_x4(dt.pack_x4(tie, dtype)), [[2.0, 4.0, 4.0, 0.0]])


@pytest.mark.parametrize("name", list(dt.DTYPES))
def test_poison_shows(name):
    dtype = dt.DTYPES[name]
    value = np.full(dtype.itemsize, dt.poison_byte(dtype), np.uint8).view(dtype)
    if dt.is_float(dtype):
        assert np.isnan(value.astype(np.float32)).all()
    elif dtype in (dt.float8_e4m3fn_x4, dt.float8_e5m2_x4):
        assert np.isnan(dt.unpack_x4(value)).all()
    elif dtype.kind in "iu":
        assert (
            int(value[0]) > 100
        )  # never a small index and never -1, which an indirect DMA would skip in silence


def test_x4_types_are_no_plain_integers():
    assert dt.float4_e2m1fn_x4 != dt.uint16 and dt.float8_e4m3fn_x4 != dt.uint32 != dt.float8_e5m2_x4
    assert not any(dt.is_float(d) or dt.is_integer(d) or dt.holds_addresses(d) for d in X4)
    assert [d.itemsize for d in X4] == [2, 4, 4]
    assert dt.holds_addresses(dt.uint16) and not dt.holds_addresses(dt.uint8)
