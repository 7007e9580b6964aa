"""Shuffles, gathers, iota and nonzero_with_count: layouts by quadrant and GpSimd processor, rules."""

import ml_dtypes
import numpy as np
import pytest
from one_instruction import bench

from moedecode.neuron.machine.errors import ConstraintViolation
from moedecode.neuron.machine.isa.move import (
    iota,
    local_gather,
    nc_n_gather,
    nc_stream_shuffle,
    nonzero_with_count,
)

KEEP = 255


def numbered(partitions: int, columns: int = 3, dtype: object = np.float32) -> np.ndarray:
    return (np.arange(partitions)[:, None] * 10 + np.arange(columns)).astype(dtype)


# ---- nc_stream_shuffle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
def test_shuffle_within_each_quadrant(dtype: object) -> None:
    mask = list(reversed(range(32)))
    x = numbered(128).astype(np.uint8).astype(dtype)
    with bench() as on:
        dst = on.empty((128, 3), dtype)
        nc_stream_shuffle(src=on.sbuf(x), dst=dst, shuffle_mask=mask)
        np.testing.assert_array_equal(dst.array(), x.reshape(4, 32, 3)[:, ::-1].reshape(128, 3))


def test_255_keeps_the_partition() -> None:
    mask = [KEEP] * 32
    mask[5] = 1
    with bench() as on:
        old = -numbered(64)
        dst = on.sbuf(old)
        nc_stream_shuffle(dst=dst, src=on.sbuf(numbered(64)), shuffle_mask=mask)
        want = old.copy()
        want[5], want[37] = numbered(64)[1], numbered(64)[33]
        np.testing.assert_array_equal(dst.array(), want)


def test_one_partition_is_broadcast() -> None:
    with bench() as on:
        dst = on.empty((32, 3))
        nc_stream_shuffle(dst=dst, src=on.sbuf(numbered(64))[32:33], shuffle_mask=[0] * 32)
        np.testing.assert_array_equal(dst.array(), np.tile(numbered(64)[32], (32, 1)))


def test_a_source_of_one_quadrant_serves_all() -> None:
    with bench() as on:
        dst = on.empty((128, 3))
        nc_stream_shuffle(dst=dst, src=on.sbuf(numbered(4)), shuffle_mask=[2] * 32)
        np.testing.assert_array_equal(dst.array(), np.tile(numbered(4)[2], (128, 1)))


def test_in_place() -> None:
    with bench() as on:
        tile = on.sbuf(numbered(32))
        nc_stream_shuffle(tile, tile, [(i + 1) % 32 for i in range(32)])
        np.testing.assert_array_equal(tile.array(), np.roll(numbered(32), -1, axis=0))


@pytest.mark.parametrize("mask", [[0] * 31, [32] + [0] * 31, [-1] + [0] * 31])
def test_mask_rules(mask: list[int]) -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match=r"shuffle_mask=.*must be 32 entries"):
        nc_stream_shuffle(on.empty((32, 3)), on.sbuf(numbered(32)), mask)


def test_shuffle_operand_rules() -> None:
    with bench() as on:
        with pytest.raises(ConstraintViolation, match="the mask asks for partition 9"):
            nc_stream_shuffle(on.empty((32, 3)), on.sbuf(numbered(8)), [9] * 32)
        with pytest.raises(ConstraintViolation, match="must be float32 like dst"):
            nc_stream_shuffle(on.empty((32, 3)), on.sbuf(numbered(32, dtype=np.int32)), [0] * 32)
        with pytest.raises(ConstraintViolation, match="must have 3 elements per partition"):
            nc_stream_shuffle(on.empty((32, 3)), on.sbuf(numbered(32, 4)), [0] * 32)


# ---- iota --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint16, ml_dtypes.bfloat16])
def test_iota(dtype: object) -> None:
    with bench() as on:
        dst = on.empty((4, 2, 3), dtype)
        iota(dst=dst, pattern=[[16, 2], [1, 3]], offset=2, channel_multiplier=32)
        want = 2 + 32 * np.arange(4)[:, None, None] + 16 * np.arange(2)[:, None] + np.arange(3)
        np.testing.assert_array_equal(dst.array().astype(np.int64), want)


def test_iota_defaults_to_offset_0_on_every_partition() -> None:
    with bench() as on:
        dst = on.empty((4, 6), np.int32)
        iota(dst, [[-1, 6]])
        assert dst.array().tolist() == [[0, -1, -2, -3, -4, -5]] * 4


def test_iota_must_fill_the_tile() -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match="makes 6 elements per partition"):
        iota(on.empty((4, 5), np.int32), [[1, 6]])


# ---- gathers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per", "valid"), [(1, None), (1, 20), (4, 7)])
def test_local_gather(per: int, valid: int | None) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 64)).astype(np.float32)
    index = rng.integers(0, 64 - per + 1, (48, 2), dtype=np.uint16)
    count = 32 if valid is None else valid
    with bench() as on:
        dst = on.empty((48, count * per))
        local_gather(
            dst=dst,
            src_buffer=on.sbuf(x),
            index=on.sbuf(index),
            num_elem_per_idx=per,
            num_valid_indices=valid,
        )
        for group in range(3):
            rows = slice(16 * group, 16 * group + 16)
            flat = index[rows].T.reshape(-1)[:count].astype(int)  # partition first
            want = np.concatenate([x[rows, i : i + per] for i in flat], axis=1)
            np.testing.assert_array_equal(dst.array()[rows], want)


def test_local_gather_rules() -> None:
    with bench() as on:
        x, index = on.sbuf(numbered(16, 8)), on.sbuf(np.zeros((16, 1), np.uint16))
        with pytest.raises(ConstraintViolation, match=r"index=.*must be uint16"):
            local_gather(on.empty((16, 16)), x, on.sbuf(np.zeros((16, 1), np.uint32)))
        with pytest.raises(ConstraintViolation, match="same multiple of 16 partitions"):
            local_gather(on.empty((15, 16)), x[:15], index[:15])
        with pytest.raises(ConstraintViolation, match="num_elem_per_idx=3"):
            local_gather(on.empty((16, 48)), x, index, 3)
        with pytest.raises(ConstraintViolation, match=r"num_valid_indices=17: must be 1..16"):
            local_gather(on.empty((16, 17)), x, index, num_valid_indices=17)
        with pytest.raises(ConstraintViolation, match="reads element 8 of 8"):
            local_gather(on.empty((16, 16)), x, on.sbuf(np.full((16, 1), 8, np.uint16)))


def test_nc_n_gather() -> None:
    rng = np.random.default_rng(0)
    x, index = rng.normal(size=(8, 4, 5)).astype(np.float32), rng.integers(0, 20, (8, 6), dtype=np.uint32)
    with bench() as on:
        dst = on.empty((8, 6))
        nc_n_gather(dst, on.sbuf(x), on.sbuf(index))
        np.testing.assert_array_equal(dst.array(), np.take_along_axis(x.reshape(8, 20), index.astype(int), 1))
        with pytest.raises(ConstraintViolation, match="holds 20, data has 20"):
            nc_n_gather(dst, on.sbuf(x), on.sbuf(np.full((8, 6), 20, np.uint32)))


# ---- nonzero_with_count ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_nonzero_with_count(dtype: object) -> None:
    x = np.zeros((33, 8), dtype)
    x[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    x[16] = 1
    x[17] = 1  # not a partition it looks at
    with bench() as on:
        dst = on.sbuf(np.full((33, 9), 7, np.int32))
        nonzero_with_count(dst=dst, src=on.sbuf(x), index_offset=16, padding_val=-1)
        got = dst.array()
        assert got[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
        assert got[16].tolist() == [16, 17, 18, 19, 20, 21, 22, 23, 8]
        assert got[32].tolist() == [-1] * 8 + [0]
        assert (np.delete(got, [0, 16, 32], axis=0) == 7).all()


def test_nonzero_with_count_rules() -> None:
    with bench() as on:
        x = on.sbuf(np.zeros((16, 8), np.float32))
        with pytest.raises(ConstraintViolation, match=r"must be \[16, 9\]"):
            nonzero_with_count(on.empty((16, 8), np.int32), x)
        with pytest.raises(ConstraintViolation, match=r"dst=.*must be int32"):
            nonzero_with_count(on.empty((16, 9), np.uint32), x)
        with pytest.raises(ConstraintViolation, match=r"src=.*must be float32 or int32"):
            nonzero_with_count(on.empty((16, 9), np.int32), on.sbuf(np.zeros((16, 8)), ml_dtypes.bfloat16))
    with bench("trn1") as on, pytest.raises(ConstraintViolation, match="needs trn2"):
        nonzero_with_count(on.empty((16, 9), np.int32), on.sbuf(np.zeros((16, 8), np.float32)))


# ---- cycles ------------------------------------------------------------------------------------------------


def test_gpsimd_instructions_pay_their_start() -> None:
    with bench() as on:
        iota(on.empty((128, 50), np.int32), [[1, 50]])
        assert on.seconds("gpsimd") * 1.2e9 == pytest.approx(200)


def test_local_gather_cycles() -> None:
    with bench() as on:
        local_gather(on.empty((16, 256)), on.sbuf(numbered(16, 8)), on.sbuf(np.zeros((16, 16), np.uint16)))
        assert on.seconds("gpsimd") * 1.2e9 == pytest.approx(150 + 256 / (32 / 4))
