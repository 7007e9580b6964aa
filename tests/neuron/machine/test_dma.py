"""DMA: copies with casts, gathers, scatters, skips, transposes and sums against NumPy, and their rules."""

import ml_dtypes
import numpy as np
import pytest
from one_instruction import bench

from moedecode.neuron.machine import Buffer, ConstraintViolation, Machine, Tensor
from moedecode.neuron.machine import isa as nisa
from moedecode.neuron.machine import language as nl
from moedecode.neuron.machine.memory import wrap

SKIP = nisa.oob_mode.skip
RNG = np.random.default_rng(5)


def hbm(array, name="x"):
    return Tensor(wrap(np.array(array), name))


def test_copy_takes_elements_in_order_whatever_the_shapes():
    with bench() as b:
        source = RNG.standard_normal((4, 6)).astype(np.float32)
        dst = b.empty((4, 2, 3))
        nisa.dma_copy(dst, hbm(source))
        np.testing.assert_array_equal(dst.numpy(), source.reshape(4, 2, 3))
        row = b.empty((1, 24))
        nisa.dma_copy(dst=row, src=hbm(source))
        np.testing.assert_array_equal(row.numpy()[0], source.ravel())


@pytest.mark.parametrize(
    "dtype", [nl.bfloat16, nl.float16, nl.float8_e4m3, nl.float8_e5m2, nl.float8_e4m3fn], ids=str
)
def test_copy_casts_to_nearest_even(dtype):
    source = (RNG.standard_normal((8, 64)) * 3).astype(np.float32)
    with bench() as b:
        dst, back = b.empty(source.shape, dtype), b.empty(source.shape)
        nisa.dma_copy(dst, hbm(source))
        nisa.dma_copy(back, dst)
        np.testing.assert_array_equal(back.numpy(), source.astype(dtype).astype(np.float32))


def test_float_to_integer_rounds_and_saturates():
    with bench() as b:
        dst = b.empty((1, 6), nl.uint8)
        nisa.dma_copy(dst, hbm(np.array([[0.5, 1.5, -3.0, 255.4, 300.0, np.nan]], np.float32)))
        assert dst.numpy().tolist() == [[0, 2, 0, 255, 255, 0]]


def test_scalar_offset_is_read_when_the_instruction_runs():
    table = np.arange(5 * 12, dtype=np.float32).reshape(5, 3, 4)
    with bench() as b:
        index = b.sbuf(np.array([[1]], np.int32))
        view = hbm(table).ap([[4, 3], [1, 4]], scalar_offset=index, indirect_dim=0)
        for expert in (1, 4, 0):
            index.array()[...] = expert
            dst = b.empty((3, 4))
            nisa.dma_copy(dst, view)
            np.testing.assert_array_equal(dst.numpy(), table[expert])
        columns = hbm(table).ap(
            [[12, 5], [1, 4]], scalar_offset=b.sbuf(np.array([[2]], np.uint32)), indirect_dim=1
        )
        dst = b.empty((5, 4))
        nisa.dma_copy(dst, columns)
        np.testing.assert_array_equal(dst.numpy(), table[:, 2])


def test_gather_replaces_the_first_stride_and_skips_what_is_out_of_bounds():
    table = np.arange(70, dtype=np.float32).reshape(7, 10)
    ids = np.array([[6], [-1], [0], [7], [6]], np.int32)
    with bench() as b:
        dst = b.sbuf(np.full((5, 4), -5, np.float32))
        view = hbm(table).ap([[10, 5], [1, 4]], offset=3, vector_offset=b.sbuf(ids), indirect_dim=0)
        nisa.dma_copy(dst, view, oob_mode=SKIP)
        np.testing.assert_array_equal(
            dst.numpy(), [table[6, 3:7], [-5] * 4, table[0, 3:7], [-5] * 4, table[6, 3:7]]
        )
        with pytest.raises(ConstraintViolation, match=r"index -1 .* out of bounds"):
            nisa.dma_copy(dst, view)


def test_unsigned_minus_one_is_out_of_bounds_too():
    with bench() as b:
        dst = b.sbuf(np.zeros((2, 3), np.float32))
        ids = b.sbuf(np.array([[0xFFFFFFFF], [1]], np.uint32))
        nisa.dma_copy(
            dst,
            hbm(np.ones((2, 3), np.float32)).ap([[3, 2], [1, 3]], vector_offset=ids, indirect_dim=0),
            oob_mode=SKIP,
        )
        assert dst.numpy().tolist() == [[0, 0, 0], [1, 1, 1]]


def test_scatter_and_scatter_add():
    with bench() as b:
        out = hbm(np.zeros((6, 4), np.float32))
        rows = RNG.standard_normal((3, 2)).astype(np.float32)
        view = out.ap(
            [[4, 3], [1, 2]],
            offset=2,
            vector_offset=b.sbuf(np.array([[5], [-1], [2]], np.int32)),
            indirect_dim=0,
        )
        nisa.dma_copy(view, b.sbuf(rows), oob_mode=SKIP)
        expected = np.zeros((6, 4), np.float32)
        expected[5, 2:], expected[2, 2:] = rows[0], rows[2]
        np.testing.assert_array_equal(out.array(), expected)
        nisa.dma_copy(view, b.sbuf(rows), oob_mode=SKIP, dst_rmw_op=nl.add)
        np.testing.assert_array_equal(out.array(), 2 * expected)


def test_an_index_is_out_of_bounds_by_its_dimension_not_by_the_memory_it_would_hit():
    table = np.arange(3 * 4 * 10, dtype=np.float32).reshape(3, 4, 10)
    with bench() as b:
        for value in (-1, 4):  # offset 40: both would land inside the tensor
            view = hbm(table).ap(
                [[10, 1], [1, 3]],
                offset=40,
                scalar_offset=b.sbuf(np.array([[value]], np.int32)),
                indirect_dim=1,
            )
            dst = b.sbuf(np.full((1, 3), -5, np.float32))
            nisa.dma_copy(dst, view, oob_mode=SKIP)
            assert (dst.numpy() == -5).all()
            with pytest.raises(ConstraintViolation, match="out of bounds"):
                nisa.dma_copy(dst, view)


def test_an_unwritten_index_is_reported_even_where_others_are_skipped():
    with bench() as b:
        view = hbm(np.ones((4, 3), np.float32)).ap([[3, 1], [1, 3]], scalar_offset=b.empty((1, 1), nl.int32))
        with pytest.raises(ConstraintViolation, match="never written"):
            nisa.dma_copy(b.empty((1, 3)), view, oob_mode=SKIP)


@pytest.mark.parametrize(
    ("shape", "axes"), [((5, 7), (1, 0)), ((5, 3, 7), (2, 1, 0)), ((5, 2, 3, 7), (3, 1, 2, 0))], ids=str
)
def test_transpose(shape, axes):
    source = RNG.standard_normal(shape).astype(np.float32)
    expected = source.transpose(axes)
    with bench() as b:
        for given in (None, axes):
            dst = b.empty(expected.shape, nl.bfloat16)
            nisa.dma_transpose(dst=dst, src=hbm(source), axes=given)
            np.testing.assert_array_equal(dst.numpy(), expected.astype(ml_dtypes.bfloat16))
        with pytest.raises(ConstraintViolation, match="supported"):
            nisa.dma_transpose(dst=dst, src=hbm(source), axes=tuple(range(len(shape))))


def test_transposing_gather_keeps_skipped_columns():
    table = np.arange(24, dtype=np.float32).reshape(6, 4)
    with bench() as b:
        view = hbm(table).ap(
            [[4, 3], [1, 4]], vector_offset=b.sbuf(np.array([[2], [9], [0]], np.int32)), indirect_dim=0
        )
        dst = b.sbuf(np.full((4, 3), -1, np.float32))
        nisa.dma_transpose(dst=dst, src=view, oob_mode=SKIP)
        np.testing.assert_array_equal(dst.numpy(), np.stack([table[2], np.full(4, -1), table[0]], 1))


def test_compute_adds_in_float32_and_rounds_once():
    parts = [(RNG.standard_normal((3, 8)) * 100).astype(ml_dtypes.bfloat16) for _ in range(3)]
    with bench() as b:
        dst = b.empty((3, 8), nl.bfloat16)
        nisa.dma_compute(dst=dst, srcs=[hbm(p) for p in parts], scales=[1.0] * 3, reduce_op=nl.add)
        expected = sum(p.astype(np.float32) for p in parts[1:]) + parts[0].astype(np.float32)
        np.testing.assert_allclose(
            dst.numpy().astype(np.float32), expected.astype(ml_dtypes.bfloat16).astype(np.float32), rtol=0
        )
        for bad in ({"scales": [1.0, 2.0, 1.0], "reduce_op": nl.add}, {"reduce_op": nl.multiply}):
            with pytest.raises(ConstraintViolation):
                nisa.dma_compute(dst=dst, srcs=[hbm(p) for p in parts], **bad)


def test_rules():
    with bench() as b:
        x = hbm(np.ones((4, 6), np.float32))
        fp4 = hbm(np.zeros((4, 6), nl.float4_e2m1fn_x4))
        cases = [
            (b.empty((4, 5)), x, "same number of elements"),
            (b.empty((4, 6), buffer=Buffer.psum), x, "DMA reads and writes SBUF and HBM"),
            (b.empty((4, 6), nl.uint16), fp4, "x4 type is moved as it is"),
            (
                b.empty((3, 8)),
                x.ap([[6, 4], [1, 6]], vector_offset=b.sbuf(np.zeros((4, 1), np.int32))),
                "dimension 0 must agree",
            ),
            (np.zeros((4, 6)), x, "must be a tensor"),
        ]
        for dst, src, rule in cases:
            with pytest.raises(ConstraintViolation, match=rule):
                nisa.dma_copy(dst, src)
        frozen = np.ones((4, 6), np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ConstraintViolation, match="read-only input"):
            nisa.dma_copy(Tensor(wrap(frozen, "w")), x)
        with pytest.raises(ConstraintViolation, match="sbuf or psum"):
            nisa.tensor_copy(dst=b.empty((4, 6)), src=x)


def test_x4_bytes_arrive_as_they_are():
    packed = RNG.integers(0, 1 << 16, (8, 5), dtype=np.uint16).view(nl.float4_e2m1fn_x4)
    with bench() as b:
        dst = b.empty(packed.shape, packed.dtype)
        nisa.dma_copy(dst, hbm(packed))
        np.testing.assert_array_equal(dst.numpy(), packed)


def test_private_memory_of_the_other_core_cannot_be_touched():
    leaked = []

    def kernel(x):
        mine = nl.ndarray((2, 4), nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(mine, x)
        leaked.append(mine)
        nisa.core_barrier(x, (0, 1))
        nisa.dma_copy(nl.ndarray((2, 4), nl.float32), leaked[1 - nl.program_id(0)])

    with pytest.raises(ConstraintViolation, match="belongs to core"):
        Machine("trn2").run(kernel, np.ones((2, 4), np.float32))
