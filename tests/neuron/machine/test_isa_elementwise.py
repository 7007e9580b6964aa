"""Elementwise instructions: float32 inside, cast on write, the operand rules, and what they cost."""

import ml_dtypes
import numpy as np
import pytest
from one_instruction import bench

from moedecode.neuron.machine import isa
from moedecode.neuron.machine.errors import ConstraintViolation
from moedecode.neuron.machine.isa.constants import engine, reduce_cmd
from moedecode.neuron.machine.memory import Buffer
from moedecode.neuron.machine.ops import OPS

BF16 = ml_dtypes.bfloat16
X4 = np.dtype([("float8_e4m3fn_x4", "<u4")])
add, multiply, subtract, maximum, minimum = (
    OPS[name] for name in ("add", "multiply", "subtract", "maximum", "minimum")
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x.astype(np.float64)))


def test_tensor_tensor_adds_in_float32_and_rounds_once() -> None:
    a, b = np.float32([[1 + 2**-7]]), np.float32([[2**-9]])
    with bench() as on:
        dst = on.empty((1, 1), BF16)
        isa.tensor_tensor(dst, on.sbuf(a, BF16), on.sbuf(b, BF16), add)
        assert dst.array()[0, 0] == np.float32(a + b).astype(BF16)[0, 0]


def test_tensor_tensor_takes_other_free_shapes_of_as_many_elements() -> None:
    x, y = normal(4, 6), normal(4, 2, 3, seed=1)
    with bench() as on:
        dst = on.empty((4, 3, 2))
        isa.tensor_tensor(dst=dst, data1=on.sbuf(x), data2=on.sbuf(y), op=multiply)
        np.testing.assert_array_equal(dst.array(), (x * y.reshape(4, 6)).reshape(4, 3, 2))


def test_tensor_tensor_of_32_bit_integers_is_exact_on_gpsimd() -> None:
    a, b = np.int32([[2**24 + 1]]), np.int32([[2]])
    with bench() as on:
        exact, rounded = on.empty((1, 1), np.int32), on.empty((1, 1), np.int32)
        isa.tensor_tensor(exact, on.sbuf(a), on.sbuf(b), add)
        isa.tensor_tensor(rounded, on.sbuf(a), on.sbuf(b), add, engine=engine.vector)
        assert exact.array()[0, 0] == 2**24 + 3
        assert rounded.array()[0, 0] == 2**24 + 2  # 2^24 + 1 is no float32
        assert on.seconds("gpsimd") > 0


def test_tensor_tensor_bitwise_keeps_bits() -> None:
    a, b = np.uint32([[0xF0F0F0F1]]), np.uint32([[0xFF00FF01]])
    with bench() as on:
        dst = on.empty((1, 1), np.uint32)
        isa.tensor_tensor(dst, on.sbuf(a), on.sbuf(b), OPS["bitwise_and"])
        assert dst.array()[0, 0] == 0xF000F001


@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_scalar_orders_operands(reverse: bool) -> None:
    x = normal(8, 5)
    with bench() as on:
        dst = on.empty((8, 5))
        isa.tensor_scalar(
            dst, on.sbuf(x), op0=subtract, operand0=3.0, reverse0=reverse, op1=multiply, operand1=0.5
        )
        np.testing.assert_array_equal(dst.array(), ((3 - x) if reverse else (x - 3)) * np.float32(0.5))


def test_tensor_scalar_takes_one_value_per_partition() -> None:
    x, v = normal(8, 5), normal(8, 1, seed=1)
    with bench() as on:
        dst = on.empty((8, 5))
        isa.tensor_scalar(
            dst=dst, data=on.sbuf(x), op0=minimum, operand0=on.sbuf(v), op1=maximum, operand1=-0.25
        )
        np.testing.assert_array_equal(dst.array(), np.maximum(np.minimum(x, v), np.float32(-0.25)))


@pytest.mark.parametrize("first", [True, False])
def test_tensor_scalar_skips_an_absent_operator(first: bool) -> None:
    x = normal(8, 5)
    with bench() as on:
        dst = on.empty((8, 5))
        given = {"op0": minimum, "operand0": 0.5, "op1": None, "operand1": None}
        absent = {"op0": None, "operand0": None, "op1": minimum, "operand1": 0.5}
        isa.tensor_scalar(dst=dst, data=on.sbuf(x), **(given if first else absent))
        np.testing.assert_array_equal(dst.array(), np.minimum(x, np.float32(0.5)))


def test_tensor_scalar_shifts_integers() -> None:
    with bench() as on:
        dst = on.empty((1, 2), np.uint32)
        isa.tensor_scalar(
            dst, on.sbuf(np.uint32([[1, 3]])), OPS["left_shift"], 4, op1=OPS["bitwise_or"], operand1=1
        )
        assert dst.array().tolist() == [[17, 49]]


def test_scalar_tensor_tensor() -> None:
    x, v, y = normal(8, 5), normal(8, 1, seed=1), normal(8, 5, seed=2)
    with bench() as on:
        dst = on.empty((8, 5))
        isa.scalar_tensor_tensor(
            dst=dst, data=on.sbuf(x), op0=multiply, operand0=on.sbuf(v), op1=add, operand1=on.sbuf(y)
        )
        np.testing.assert_array_equal(dst.array(), x * v + y)
        isa.scalar_tensor_tensor(dst, on.sbuf(x), subtract, 1.0, subtract, on.sbuf(y), reverse1=True)
        np.testing.assert_array_equal(dst.array(), y - (x - 1))


def test_activation_scales_then_adds_then_applies() -> None:
    x, scale, bias = normal(8, 5), normal(8, 1, seed=1), normal(8, 1, seed=2)
    with bench() as on:
        dst = on.empty((8, 5))
        isa.activation(
            dst=dst, op=OPS["silu"], data=on.sbuf(x), scale=on.sbuf(scale), bias=on.sbuf(bias, BF16)
        )
        want = silu(x * scale + bias.astype(BF16).astype(np.float32))
        np.testing.assert_allclose(dst.array(), want, rtol=2e-6, atol=1e-7)


def test_activation_sums_rows_across_calls() -> None:
    x, y = normal(8, 5), normal(8, 5, seed=1)
    with bench() as on:
        dst, total = on.empty((8, 5)), on.empty((8, 1))
        square = OPS["square"]
        isa.activation(dst, square, on.sbuf(y), reduce_op=add, reduce_cmd=reduce_cmd.reset_reduce)
        isa.activation(dst, square, on.sbuf(x), reduce_op=add, reduce_cmd=reduce_cmd.reset_reduce)
        isa.activation(dst, square, on.sbuf(y), reduce_op=add, reduce_cmd=reduce_cmd.reduce, reduce_res=total)
        want = (x**2).sum(1, keepdims=True) + (y**2).sum(1, keepdims=True)  # the first call was reset away
        np.testing.assert_allclose(total.array(), want, rtol=1e-6)


def test_activation_reduce_is_one_call() -> None:
    x = normal(8, 2, 5)
    with bench() as on:
        dst, total = on.empty((8, 10), BF16), on.empty((8, 1))
        isa.activation_reduce(dst, OPS["copy"], on.sbuf(x), add, total, scale=2.0)
        np.testing.assert_allclose(total.array()[:, 0], 2 * x.sum((1, 2)), rtol=1e-6)


@pytest.mark.parametrize("axis", [2, (1, 2), -1, [2]])
def test_tensor_reduce_reduces_the_last_axes(axis: int | tuple[int, ...] | list[int]) -> None:
    x = normal(8, 3, 5)
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else axis
    with bench() as on:
        want = -x.sum(axes).reshape(8, -1)
        dst = on.empty(want.shape)
        isa.tensor_reduce(dst=dst, op=add, data=on.sbuf(x), axis=axis, negate=True)
        np.testing.assert_allclose(dst.array(), want, rtol=1e-6)


def test_tensor_reduce_maximum_of_a_strided_view() -> None:
    x = normal(8, 6)
    with bench() as on:
        dst = on.empty((8, 1))
        isa.tensor_reduce(dst, maximum, on.sbuf(x)[:, 0:6:2], axis=1, keepdims=True)
        np.testing.assert_array_equal(dst.array(), x[:, ::2].max(1, keepdims=True))


def test_reciprocal() -> None:
    x = normal(8, 5)
    with bench() as on:
        dst = on.empty((8, 5))
        isa.reciprocal(dst=dst, data=on.sbuf(x))
        np.testing.assert_array_equal(dst.array(), np.float32(1) / x)


def test_tensor_copy_keeps_bits_of_equal_types() -> None:
    words = np.arange(8, dtype=np.uint32).reshape(4, 2).view(X4)
    with bench() as on:
        dst = on.empty((4, 2), X4)
        isa.tensor_copy(dst=dst, src=on.sbuf(words))
        assert (dst.array() == words).all()
        big = on.empty((1, 1), np.uint32)
        isa.tensor_copy(big, on.sbuf(np.uint32([[2**31 + 1]])))
        assert big.array()[0, 0] == 2**31 + 1


def test_tensor_copy_casts_through_float32() -> None:
    with bench() as on:
        dst = on.empty((1, 1), np.uint32)
        isa.tensor_copy(dst, on.sbuf(np.int32([[2**24 + 1]])))
        assert dst.array()[0, 0] == 2**24


def test_memset() -> None:
    with bench() as on:
        floats, ints, packed = on.empty((2, 3), BF16), on.empty((2, 3), np.uint16), on.empty((2, 3), X4)
        isa.memset(floats, 1.5)
        isa.memset(dst=ints, value=-1, engine=engine.gpsimd)
        isa.memset(packed, 0)
        assert (floats.array() == np.float32(1.5)).all()
        assert (ints.array() == 0xFFFF).all()
        assert (packed.array()["float8_e4m3fn_x4"] == 0).all()
        with pytest.raises(ConstraintViolation, match="0 only"):
            isa.memset(packed, 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_copy_predicated(reverse: bool) -> None:
    x, old, mask = normal(4, 3), normal(4, 3, seed=1), np.arange(12, dtype=np.uint8).reshape(4, 3) % 2
    with bench() as on:
        dst = on.sbuf(old)
        isa.tensor_copy_predicated(dst=dst, src=on.sbuf(x), predicate=on.sbuf(mask), reverse_pred=reverse)
        np.testing.assert_array_equal(dst.array(), np.where((mask != 0) ^ reverse, x, old))


def test_poison_reaches_the_result() -> None:
    with bench() as on:
        dst = on.empty((4, 3))
        isa.tensor_scalar(dst, on.empty((4, 3)), maximum, 0.0)
        assert np.isnan(dst.array()).all()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_hbm_is_no_operand() -> None:
    with (
        bench() as on,
        pytest.raises(ConstraintViolation, match=r"tensor_copy: src=.*must lie in sbuf or psum"),
    ):
        isa.tensor_copy(on.empty((4, 3)), on.empty((4, 3), buffer=Buffer.shared_hbm))


def test_shapes_must_agree() -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match="tensor_tensor: data2: shape"):
        isa.tensor_tensor(on.empty((4, 3)), on.empty((4, 3)), on.empty((4, 4)), add)


def test_two_psum_operands_are_refused() -> None:
    with bench() as on:
        a, b = on.psum(normal(4, 3)), on.psum(normal(4, 3))
        isa.tensor_tensor(on.empty((4, 3)), a, on.sbuf(normal(4, 3)), add)
        with pytest.raises(ConstraintViolation, match="tensor_tensor: data2: lies in PSUM like data1"):
            isa.tensor_tensor(on.empty((4, 3)), a, b, add)
        with pytest.raises(ConstraintViolation, match="scalar_tensor_tensor: operand1"):
            isa.scalar_tensor_tensor(on.empty((4, 3)), a, multiply, 1.0, add, b)


def test_gpsimd_has_no_path_to_psum() -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match="GpSimd cannot access PSUM"):
        isa.tensor_copy(on.empty((4, 3)), on.psum(normal(4, 3)), engine=engine.gpsimd)


def test_scalar_engine_does_not_do_tensor_tensor() -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match="runs on vector or gpsimd"):
        isa.tensor_tensor(
            on.empty((4, 3)), on.sbuf(normal(4, 3)), on.sbuf(normal(4, 3)), add, engine=engine.scalar
        )


def test_scalar_engine_before_trn3_does_multiply_and_add_only() -> None:
    for chip, allowed in (("trn2", False), ("trn3", True)):
        with bench(chip) as on:
            x = on.sbuf(normal(4, 3))
            isa.tensor_scalar(on.empty((4, 3)), x, multiply, 2.0, op1=add, operand1=1.0, engine=engine.scalar)
            if allowed:
                isa.tensor_scalar(on.empty((4, 3)), x, minimum, 2.0, engine=engine.scalar)
            else:
                with pytest.raises(ConstraintViolation, match="minimum on the Scalar engine of trn2"):
                    isa.tensor_scalar(on.empty((4, 3)), x, minimum, 2.0, engine=engine.scalar)


def test_operand_per_partition_must_be_float32_and_one_element() -> None:
    with bench() as on:
        x = on.sbuf(normal(4, 3))
        with pytest.raises(ConstraintViolation, match="tensor_scalar: operand0: is bfloat16"):
            isa.tensor_scalar(on.empty((4, 3)), x, multiply, on.sbuf(normal(4, 1), BF16))
        with pytest.raises(ConstraintViolation, match=r"operand0: shape \(4, 2\): must be \(4, 1\)"):
            isa.tensor_scalar(on.empty((4, 3)), x, multiply, on.sbuf(normal(4, 2)))
        with pytest.raises(ConstraintViolation, match=r"operand0: must be a number or a tensor"):
            isa.tensor_scalar(on.empty((4, 3)), x, multiply, None)


def test_gpsimd_does_rsqrt_only_and_bits_need_the_vector_engine() -> None:
    with bench() as on:
        x = on.sbuf(np.abs(normal(4, 3)))
        isa.tensor_scalar(on.empty((4, 3)), x, OPS["rsqrt"], 0.0, engine=engine.gpsimd)
        with pytest.raises(ConstraintViolation, match="add on GpSimd: it does rsqrt only"):
            isa.tensor_scalar(on.empty((4, 3)), x, add, 1.0, engine=engine.gpsimd)
        with pytest.raises(ConstraintViolation, match="is scalar; the instruction runs on vector"):
            bits = on.sbuf(np.uint32([[1]]))
            isa.tensor_scalar(on.empty((1, 1), np.uint32), bits, OPS["bitwise_or"], 2, engine=engine.scalar)


def test_trn1_copies_on_the_scalar_engine_with_activation_only() -> None:
    with bench("trn1") as on, pytest.raises(ConstraintViolation, match="runs on vector or gpsimd"):
        isa.tensor_copy(on.empty((4, 3)), on.sbuf(normal(4, 3)), engine=engine.scalar)


def test_an_open_engine_goes_to_the_less_loaded() -> None:
    with bench() as on:
        x = on.sbuf(normal(128, 1024))
        for _ in range(4):
            isa.tensor_copy(on.empty((128, 1024)), x)
        assert on.seconds("vector") == pytest.approx(on.seconds("scalar"))
        before = on.seconds("scalar")
        isa.tensor_copy(on.empty((128, 1024)), x, engine=engine.vector)
        isa.tensor_scalar(on.empty((128, 1024)), x, multiply, 2.0)
        assert on.seconds("scalar") > before
        isa.memset(on.empty((128, 1024)), 0.0)
        assert on.seconds("gpsimd") > 0


def test_bitwise_and_arithmetic_do_not_mix() -> None:
    with (
        bench() as on,
        pytest.raises(ConstraintViolation, match="both operators must be bitwise, or neither"),
    ):
        x = on.sbuf(np.uint32([[1]]))
        isa.tensor_scalar(on.empty((1, 1), np.uint32), x, OPS["bitwise_and"], 1, op1=add, operand1=1)


def test_activation_takes_activation_functions_and_sums_only() -> None:
    with bench() as on:
        x, dst, total = on.sbuf(normal(4, 3)), on.empty((4, 3)), on.empty((4, 1))
        with pytest.raises(ConstraintViolation, match=r"activation: op: is nl.add"):
            isa.activation(dst, add, x)
        with pytest.raises(ConstraintViolation, match=r"reduce_op: is nl.maximum"):
            isa.activation_reduce(dst, OPS["exp"], x, maximum, total)


def test_constant_bias_needs_trn2() -> None:
    with bench("trn1") as on, pytest.raises(ConstraintViolation, match=r"bias: is the constant 1.5: trn1"):
        isa.activation(on.empty((4, 3)), OPS["copy"], on.sbuf(normal(4, 3)), bias=1.5)


@pytest.mark.parametrize("axis", [0, 1, (0, 2), ()])
def test_tensor_reduce_refuses_other_axes(axis: int | tuple[int, ...]) -> None:
    with bench() as on, pytest.raises(ConstraintViolation, match="tensor_reduce: axis"):
        isa.tensor_reduce(on.empty((4, 3)), add, on.sbuf(normal(4, 3, 5)), axis=axis)


def test_packed_types_have_no_arithmetic() -> None:
    with bench() as on:
        words = on.sbuf(np.zeros((4, 3), X4))
        with pytest.raises(ConstraintViolation, match="packed MX types have no arithmetic"):
            isa.tensor_tensor(on.empty((4, 3)), words, words, add)
        with pytest.raises(ConstraintViolation, match="copied to their own type only"):
            isa.tensor_copy(on.empty((4, 3)), words)


@pytest.mark.parametrize(
    ("partitions", "start", "fits"), [(32, 32, True), (32, 16, False), (64, 64, True), (33, 32, False)]
)
def test_start_partitions(partitions: int, start: int, fits: bool) -> None:
    with bench() as on:
        tile = on.sbuf(normal(128, 3))[start : start + partitions]
        if fits:
            isa.tensor_copy(on.empty((partitions, 3)), tile)
        else:
            with pytest.raises(ConstraintViolation, match=f"{partitions} partitions start at {start}"):
                isa.tensor_copy(on.empty((partitions, 3)), tile)


# ---- what it costs, in cycles ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "dtype", "cycles"),
    [("trn1", BF16, 1024), ("trn2", BF16, 256), ("trn3", BF16, 256), ("trn3", np.float32, 1024)],
)
def test_copy_cycles(chip: str, dtype: object, cycles: int) -> None:
    with bench(chip) as on:
        isa.tensor_copy(on.empty((128, 1024), dtype), on.sbuf(normal(128, 1024), dtype))
        assert on.seconds("vector") * on.prog.chip.clock_hz["vector"] == pytest.approx(cycles)


def test_strided_and_psum_copies_are_half_as_fast() -> None:
    with bench() as on:
        x = on.sbuf(normal(128, 1024), BF16)
        isa.tensor_copy(on.empty((128, 512), BF16), x[:, 0:1024:2])
        assert on.seconds("vector") * 1.2e9 == pytest.approx(256)
    with bench() as on:
        isa.tensor_copy(on.empty((128, 512), BF16), on.psum(normal(128, 512), BF16))
        assert on.seconds("vector") * 1.2e9 == pytest.approx(256)


@pytest.mark.parametrize(
    ("dtype", "in_psum", "cycles"), [(np.float32, False, 1024), (np.float32, True, 512), (BF16, False, 512)]
)
def test_tensor_tensor_cycles(dtype: object, in_psum: bool, cycles: int) -> None:
    with bench() as on:
        x = normal(128, 512)
        first = on.psum(x, dtype) if in_psum else on.sbuf(x, dtype)
        isa.tensor_tensor(on.empty((128, 512), dtype), first, on.sbuf(x, dtype), add)
        assert on.seconds("vector") * 1.2e9 == pytest.approx(cycles)


def test_activation_and_reciprocal_cycles() -> None:
    with bench() as on:
        x, y = on.sbuf(normal(128, 512)), on.empty((128, 512))
        isa.activation(y, OPS["silu"], x)
        isa.reciprocal(y, x)
        assert on.seconds("scalar") * 1.2e9 == pytest.approx(512)
        assert on.seconds("vector") * 1.2e9 == pytest.approx(8 * 512)
