"""max8, nc_find_index8, nc_match_replace8: ties resolve to ascending indices; ledger-only mode draws."""

import ml_dtypes
import numpy as np
import pytest
from one_instruction import bench

from moedecode.neuron.machine.errors import ConstraintViolation
from moedecode.neuron.machine.isa.select import max8, nc_find_index8, nc_match_replace8
from moedecode.neuron.machine.memory import Buffer


def logits(rows: int, columns: int, distinct: int, seed: int = 0) -> np.ndarray:
    """``distinct`` different values only: many ties."""
    return np.random.default_rng(seed).integers(0, distinct, (rows, columns)).astype(np.float32)


def top(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest, ties to the lowest index: a stable sort of the negated values."""
    return np.argsort(-x, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("columns", [8, 9, 128, 512])
@pytest.mark.parametrize("distinct", [1, 3, 10_000])
def test_top_8_with_ties(columns: int, distinct: int) -> None:
    x = logits(128, columns, distinct)
    with bench() as on:
        data, values, index = on.sbuf(x), on.empty((128, 8)), on.empty((128, 8), np.uint32)
        max8(dst=values, src=data)
        nc_find_index8(dst=index, data=data, vals=values)
        want = top(x, 8)
        np.testing.assert_array_equal(values.array(), np.take_along_axis(x, want, 1))
        np.testing.assert_array_equal(index.array(), want)


def test_rounds_of_8_give_the_top_24() -> None:
    x = logits(16, 64, 7)
    with bench() as on:
        data, values = on.sbuf(x), on.empty((16, 8))
        found = []
        for _ in range(3):
            index = on.empty((16, 8), np.uint16)
            max8(values, data)
            nc_match_replace8(dst=data, data=data, vals=values, imm=-1e30, dst_idx=index)
            found.append(index.numpy())
        np.testing.assert_array_equal(np.concatenate(found, axis=1), top(x, 24))


def test_match_replace_replaces_as_many_as_asked() -> None:
    with bench() as on:
        x = np.float32([[5, 1, 5, 5, 2, 0, 0, 0, 0]])
        dst = on.empty((1, 9))
        values = on.sbuf(np.float32([[5, 5, 2, 1, 9, 9, 9, 9]]))  # 9 occurs nowhere
        nc_match_replace8(dst, on.sbuf(x), values, -7.0)
        assert dst.array().tolist() == [[-7, -7, -7, 5, -7, 0, 0, 0, 0]]


def test_free_axes_are_flattened() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    with bench() as on:
        values, index = on.empty((4, 8)), on.empty((4, 8), np.uint32)
        max8(values, on.sbuf(x))
        nc_find_index8(index, on.sbuf(x), values)
        np.testing.assert_array_equal(index.array(), top(x.reshape(4, 15), 8))


def test_16_bit_logits_are_compared_as_float32() -> None:
    x = np.random.default_rng(0).normal(size=(4, 32)).astype(ml_dtypes.bfloat16)
    with bench() as on:
        values, index = on.empty((4, 8), ml_dtypes.bfloat16), on.empty((4, 8), np.uint32)
        max8(values, on.sbuf(x))
        nc_find_index8(index, on.sbuf(x), values)
        np.testing.assert_array_equal(index.array(), top(x.astype(np.float32), 8))


def test_a_value_that_is_not_there_gets_an_impossible_index() -> None:
    with bench() as on:
        index = on.empty((1, 8), np.uint16)
        nc_find_index8(
            index, on.sbuf(np.arange(8.0, dtype=np.float32)[None]), on.sbuf(np.full((1, 8), 99, np.float32))
        )
        assert (index.array() == 0xFFFF).all()


def test_poison_comes_first_and_keeps_indices_in_range() -> None:
    x = np.arange(16.0, dtype=np.float32)[None]
    x[0, 3] = np.nan
    with bench() as on:
        values, index = on.empty((1, 8)), on.empty((1, 8), np.uint32)
        max8(values, on.sbuf(x))
        nc_find_index8(index, on.sbuf(x), values)
        assert np.isnan(values.array()[0, 0])
        assert index.array().tolist() == [[3, 15, 14, 13, 12, 11, 10, 9]]


def test_ledger_only_mode_draws_distinct_indices() -> None:
    drawn = []
    for seed in (0, 0, 1):
        with bench(compute=False, seed=seed) as on:
            data = on.empty((128, 128))
            data.storage.real = False
            values, rounds = on.empty((128, 8)), []
            for _ in range(2):
                index = on.empty((128, 8), np.uint32)
                max8(values, data)
                nc_find_index8(index, data, values)
                replaced = on.empty((128, 128))
                replaced.storage.real = False
                nc_match_replace8(replaced, data, values, -1.0)
                data = replaced
                rounds.append(index.numpy())
            drawn.append(np.concatenate(rounds, axis=1))
            assert (np.sort(drawn[-1], 1)[:, 1:] != np.sort(drawn[-1], 1)[:, :-1]).all()  # over both rounds
            assert drawn[-1].max() < 128
            assert len(np.unique(drawn[-1])) == 128  # every expert is met
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()


@pytest.mark.parametrize(
    ("columns", "message"), [(7, "7 elements per partition: must be 8..16384"), (16_385, "16385 elements")]
)
def test_length_of_data(columns: int, message: str) -> None:
    with bench() as on:
        data, values = on.empty((2, columns)), on.empty((2, 8))
        with pytest.raises(ConstraintViolation, match=message):
            max8(values, data)
        with pytest.raises(ConstraintViolation, match=message):
            nc_find_index8(on.empty((2, 8), np.uint32), data, values)


def test_operand_rules() -> None:
    with bench() as on:
        data, values = on.sbuf(logits(2, 16, 9)), on.empty((2, 8))
        with pytest.raises(ConstraintViolation, match=r"dst=.*must hold 8 elements on 2 partitions"):
            max8(on.empty((2, 4)), data)
        with pytest.raises(ConstraintViolation, match=r"dst=.*must be uint16 or uint32"):
            nc_find_index8(on.empty((2, 8), np.int32), data, values)
        with pytest.raises(ConstraintViolation, match=r"src=.*must lie in sbuf or psum"):
            max8(values, on.empty((2, 16), buffer=Buffer.hbm))
        with pytest.raises(ConstraintViolation, match=r"dst_idx=.*must be uint16"):
            nc_match_replace8(data, data, values, 0.0, dst_idx=on.empty((2, 8)))


def test_cycles_are_the_elements_of_a_partition() -> None:
    with bench() as on:
        max8(on.empty((128, 8)), on.sbuf(logits(128, 512, 9)))
        assert on.seconds("vector") * 1.2e9 == pytest.approx(512)
