"""nc_matmul and nc_transpose: values, the accumulation rule of PSUM, tile and dtype limits, cycles."""

import ml_dtypes
import numpy as np
import pytest
from one_instruction import bench

from moedecode.neuron.machine.errors import ConstraintViolation
from moedecode.neuron.machine.isa.constants import engine, matmul_perf_mode
from moedecode.neuron.machine.isa.elementwise import memset
from moedecode.neuron.machine.isa.matmul import nc_matmul, nc_transpose

BF16, E4M3FN = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def normal(*shape: int, seed: int = 0, dtype: object = BF16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def product(stationary: np.ndarray, moving: np.ndarray) -> np.ndarray:
    return stationary.astype(np.float64).T @ moving.astype(np.float64)


W, X = normal(128, 64), normal(128, 96, seed=1)
W2, X2 = normal(128, 64, seed=2), normal(128, 96, seed=3)


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-6) -> bool:
    return bool(np.abs(got - want).max() <= tolerance * np.abs(want).max())


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, E4M3FN, ml_dtypes.float8_e5m2])
def test_contracts_partitions(dtype: object) -> None:
    w, x = W.astype(dtype), X.astype(dtype)
    with bench() as on:
        dst = on.empty_psum((64, 96))
        nc_matmul(dst=dst, stationary=on.sbuf(w), moving=on.sbuf(x))
        assert close(dst.array(), product(w, x))


def test_free_axes_of_operands_are_flattened() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 2, 48))
        nc_matmul(dst, on.sbuf(W.reshape(128, 8, 8)), on.sbuf(X.reshape(128, 12, 8)))
        assert close(dst.array().reshape(64, 96), product(W, X))


def test_first_write_overwrites_poison_and_later_ones_add() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 96))
        assert np.isnan(dst.array()).all()
        nc_matmul(dst, on.sbuf(W), on.sbuf(X))
        nc_matmul(dst, on.sbuf(W2), on.sbuf(X2))
        assert close(dst.array(), product(W, X) + product(W2, X2))


def test_the_rule_holds_per_location() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 2, 96))
        nc_matmul(dst[:, 0], on.sbuf(W), on.sbuf(X))
        nc_matmul(dst[:, 1], on.sbuf(W2), on.sbuf(X2))  # another slice of the same tile: its first write
        nc_matmul(dst[:, 0], on.sbuf(W2), on.sbuf(X2))
        assert close(dst.array()[:, 1], product(W2, X2))
        assert close(dst.array()[:, 0], product(W, X) + product(W2, X2))


def test_a_partly_written_tile_adds_where_it_was_written() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 96))
        nc_matmul(dst[:, :32], on.sbuf(W), on.sbuf(X[:, :32]))
        nc_matmul(dst, on.sbuf(W), on.sbuf(X))
        want = product(W, X)
        want[:, :32] *= 2
        assert close(dst.array(), want)


def test_a_new_allocation_starts_a_new_group() -> None:
    with bench() as on:
        for _ in range(2):
            dst = on.empty_psum((64, 96))
            nc_matmul(dst, on.sbuf(W), on.sbuf(X))
            assert close(dst.array(), product(W, X))


def test_a_memset_is_a_write() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 96))
        memset(dst, 3.0)
        nc_matmul(dst, on.sbuf(W), on.sbuf(X))
        assert close(dst.array(), product(W, X) + 3)


def test_accumulate_can_be_forced() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 96))
        nc_matmul(dst, on.sbuf(W), on.sbuf(X))
        nc_matmul(dst, on.sbuf(W2), on.sbuf(X2), accumulate=False)
        assert close(dst.array(), product(W2, X2))
        fresh = on.empty_psum((64, 96))
        nc_matmul(fresh, on.sbuf(W), on.sbuf(X), accumulate=True)
        assert np.isnan(fresh.array()).all()  # adds to memory that nobody wrote


def test_bfloat16_psum_rounds_at_each_write() -> None:
    with bench() as on:
        dst = on.empty_psum((64, 96), BF16)
        nc_matmul(dst, on.sbuf(W), on.sbuf(X))
        nc_matmul(dst, on.sbuf(W2), on.sbuf(X2))
        once = product(W, X).astype(np.float32).astype(BF16).astype(np.float64)
        want = (once + product(W2, X2)).astype(np.float32)
        near = np.abs(dst.array().astype(np.float32) - want.astype(BF16).astype(np.float32))
        assert (near <= np.abs(want) * 2**-8).all()
        assert (near == 0).mean() > 0.99


def test_double_row_contracts_two_rows_at_once() -> None:
    w, x = normal(128, 2, 64, dtype=E4M3FN), normal(128, 2, 96, seed=1, dtype=E4M3FN)
    with bench() as on:
        dst = on.empty_psum((64, 96))
        nc_matmul(dst, on.sbuf(w), on.sbuf(x), perf_mode=matmul_perf_mode.double_row)
        want = product(w[:, 0], x[:, 0]) + product(w[:, 1], x[:, 1])
        assert close(dst.array(), want)


@pytest.mark.parametrize(("chip", "clean"), [("trn1", False), ("trn2", True)])
def test_transpose_mode_passes_nan_from_trn2_on(chip: str, clean: bool) -> None:
    x = normal(128, 128, dtype=np.float32)
    x[3, 5] = np.nan
    with bench(chip) as on:
        dst = on.empty_psum((128, 128))
        nc_matmul(dst, on.sbuf(x), on.sbuf(np.eye(128, dtype=np.float32)), is_transpose=True)
        assert (np.isnan(dst.array()).sum() == 1) == clean
        if clean:
            np.testing.assert_array_equal(dst.array(), x.T)


# ---- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stationary", "moving", "message"),
    [
        ((128, 129), (128, 96), "stationary=.*129 columns: at most 128"),
        ((128, 64), (128, 513), "moving=.*513 columns: at most 512 for float32"),
        ((64, 64), (128, 96), "moving=.*contracts partitions: must have 64"),
    ],
)
def test_tile_limits(stationary: tuple[int, ...], moving: tuple[int, ...], message: str) -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match=message):
        nc_matmul(on.empty_psum((64, 96)), on.sbuf(normal(*stationary)), on.sbuf(normal(*moving)))


def test_result_must_fit_one_bank() -> None:
    with bench() as on:
        wide = on.empty_psum((64, 1024))  # two banks
        nc_matmul(wide[:, 512:1024], on.sbuf(W), on.sbuf(normal(128, 512)))
        with pytest.raises(
            ConstraintViolation, match=r"bytes 1024..3071 of a partition, across PSUM banks of 2048"
        ):
            nc_matmul(wide[:, 256:768], on.sbuf(W), on.sbuf(normal(128, 512)))
    with bench() as on:  # a bfloat16 bank holds twice as many
        nc_matmul(on.empty_psum((64, 1024), BF16), on.sbuf(W), on.sbuf(normal(128, 1024)))


def test_memories_of_operands() -> None:
    with bench() as on:
        with pytest.raises(ConstraintViolation, match=r"dst=.*must lie in psum"):
            nc_matmul(on.empty((64, 96)), on.sbuf(W), on.sbuf(X))
        with pytest.raises(ConstraintViolation, match=r"moving=.*must lie in sbuf"):
            nc_matmul(on.empty_psum((64, 96)), on.sbuf(W), on.psum(X))


def test_dtype_rules() -> None:
    with bench("trn2") as on:
        dst = on.empty_psum((64, 96))
        with pytest.raises(ConstraintViolation, match=r"float32 goes with float32 only"):
            nc_matmul(dst, on.sbuf(W), on.sbuf(X, np.float32))
        with pytest.raises(ConstraintViolation, match="must be a float type"):
            nc_matmul(dst, on.sbuf(W), on.sbuf(X, np.int32))
        with pytest.raises(ConstraintViolation, match="float8_e4m3fn needs trn3"):
            nc_matmul(dst, on.sbuf(W), on.sbuf(X, E4M3FN))
        with pytest.raises(ConstraintViolation, match="must be float32 on trn2"):
            nc_matmul(on.empty_psum((64, 96), BF16), on.sbuf(W), on.sbuf(X))
        nc_matmul(dst, on.sbuf(W, ml_dtypes.float8_e4m3), on.sbuf(X))  # mixed widths below float32 are fine
    with bench() as on, pytest.raises(ConstraintViolation, match="float8_e4m3 and float8_e4m3fn do not mix"):
        nc_matmul(on.empty_psum((64, 96)), on.sbuf(W, ml_dtypes.float8_e4m3), on.sbuf(X, E4M3FN))


@pytest.mark.parametrize(
    ("position", "size", "message"),
    [
        ((0, 32), (128, 32), None),
        ((0, 32), (), "must be given together"),
        ((0, 16), (128, 32), "tile columns: 32 from 16"),
        ((0, 128), (128, 32), "tile columns: 32 from 128"),
        ((0, 0), (64, 32), "stationary uses 128 of a tile of 64"),
    ],
)
def test_pe_tiling(position: tuple[int, ...], size: tuple[int, ...], message: str | None) -> None:
    with bench() as on:
        dst = on.empty_psum((128, 96))[32:64]

        def run() -> None:
            nc_matmul(dst, on.sbuf(W[:, :32]), on.sbuf(X), tile_position=position, tile_size=size)

        if message is None:
            run()
            assert close(dst.array(), product(W[:, :32], X))
        else:
            with pytest.raises(ConstraintViolation, match=message):
                run()


# ---- transposes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.uint16])
def test_tensor_engine_transposes_into_psum(dtype: object) -> None:
    x = (100 * normal(128, 2, 16, dtype=np.float32)).astype(np.int16).astype(dtype)
    with bench() as on:
        dst = on.empty_psum((32, 128), dtype)
        nc_transpose(dst=dst, data=on.sbuf(x))
        np.testing.assert_array_equal(dst.array(), x.reshape(128, 32).T)
        assert on.seconds("tensor") > 0
        nc_transpose(dst, on.sbuf(x))  # overwrites, never adds
        np.testing.assert_array_equal(dst.array(), x.reshape(128, 32).T)


def test_vector_engine_transposes_small_blocks() -> None:
    x = np.arange(16 * 32, dtype=np.uint16).reshape(16, 32)
    with bench() as on:
        dst = on.empty((32, 16), np.uint16)
        nc_transpose(dst=dst, data=on.sbuf(x), engine=engine.vector)
        np.testing.assert_array_equal(dst.array(), x.T)
        assert on.seconds("vector") > 0
        with pytest.raises(ConstraintViolation, match=r"at most \[32, 32\]"):
            nc_transpose(on.empty((33, 16), np.uint16), on.sbuf(np.zeros((16, 33), np.uint16)))


def test_transpose_keeps_the_dtype() -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match="must be bfloat16 like data"):
        nc_transpose(on.empty_psum((64, 128)), on.sbuf(W))


# ---- cycles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options", "cycles"),
    [
        (BF16, {}, 96),
        (np.float32, {}, 4 * 96),
        (np.float32, {"is_stationary_onezero": True}, 2 * 96),
        (np.float32, {"is_moving_onezero": True}, 2 * 96),
    ],
)
def test_matmul_cycles(dtype: object, options: dict[str, bool], cycles: int) -> None:
    with bench() as on:
        nc_matmul(on.empty_psum((64, 96)), on.sbuf(W, dtype), on.sbuf(X, dtype), **options)
        assert on.seconds("tensor") * 2.4e9 == pytest.approx(cycles)
