"""Views: indexing, patterns, reshapes and reinterpretation against NumPy, and every rule they enforce."""

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.machine import Buffer, ConstraintViolation, Tensor
from moedecode.neuron.machine import language as nl
from moedecode.neuron.machine.memory import allocate, wrap
from moedecode.neuron.machine.registers import Register
from moedecode.neuron.machine.views import reshape_strides


def hbm(array):
    return Tensor(wrap(array, "x"))


def sbuf(array):
    storage = allocate(Buffer.sbuf, array.shape, array.dtype, name="s", core=0)
    tensor = Tensor(storage)
    tensor.array()[...] = array
    return tensor


CUBE = np.arange(6 * 4 * 10, dtype=np.int32).reshape(6, 4, 10)


@pytest.mark.parametrize(
    "key",
    [
        np.s_[2],
        np.s_[:, 1],
        np.s_[1:5, :, 3],
        np.s_[...],
        np.s_[..., 2:9:3],
        np.s_[-1],
        np.s_[:, None, 2:3],
        np.s_[0:6:2, 1:, 4:5],
    ],
    ids=str,
)
def test_indexing_is_numpys(key):
    np.testing.assert_array_equal(hbm(CUBE)[key].array(), CUBE[key])


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (np.s_[2], (1, 4, 10)),
        (np.s_[2, 1], (1, 10)),
        (np.s_[:, 1, 3], (6, 1)),
        (np.s_[0, 0, 0], (1, 1)),
        (np.s_[1:3, :, 4], (2, 4)),
    ],
    ids=str,
)
def test_on_chip_the_partition_dimension_stays(key, shape):
    view = sbuf(CUBE)[key]
    assert view.shape == shape
    np.testing.assert_array_equal(view.array().ravel(), CUBE[key].ravel())


def test_ds_is_a_start_and_a_size():
    np.testing.assert_array_equal(hbm(CUBE)[nl.ds(2, 3)].array(), CUBE[2:5])


@pytest.mark.parametrize(
    "key",
    [np.s_[6], np.s_[-7], np.s_[:7], np.s_[3:3], np.s_[4:2], np.s_[0, 0, 0, 0], np.s_[..., ...]],
    ids=str,
)
def test_indexing_out_of_range_is_an_error(key):
    with pytest.raises(ConstraintViolation, match="indexing"):
        hbm(CUBE)[key]


def test_all_elements_of_an_hbm_tensor_by_ints_keep_one_dimension():
    assert hbm(CUBE)[1, 2, 3].shape == (1,)


def test_pattern_counts_elements_of_the_flat_tensor():
    tensor = sbuf(CUBE)  # 40 elements per partition
    view = tensor.ap([[40, 3], [1, 2], [10, 4]], offset=40 + 5)
    expected = CUBE.ravel()[45 + 40 * np.arange(3)[:, None, None] + np.arange(2)[:, None] + 10 * np.arange(4)]
    np.testing.assert_array_equal(view.array(), expected)


def test_stride_zero_repeats():
    np.testing.assert_array_equal(
        sbuf(CUBE).ap([[40, 6], [0, 3]], offset=7).array(), np.repeat(CUBE[:, 0, 7:8], 3, 1)
    )


def test_pattern_of_a_slice_starts_at_the_slice():
    np.testing.assert_array_equal(
        sbuf(CUBE)[2:4, 1:, :].ap([[40, 2], [1, 3]], offset=2).array(), CUBE[2:4, 1, 2:5]
    )


def test_pattern_with_a_dtype_counts_in_that_dtype():
    floats = np.arange(24, dtype=np.float32).reshape(2, 12)
    view = sbuf(floats).ap([[48, 2], [1, 8]], offset=4, dtype=nl.uint8)
    np.testing.assert_array_equal(view.array(), floats.view(np.uint8)[:, 4:12])


@pytest.mark.parametrize(
    ("pattern", "offset", "rule"),
    [
        ([[40, 6], [1, 41]], 0, "holds 240 elements|partition holds 40"),
        ([[40, 7], [1, 1]], 0, "holds 240 elements"),
        ([[20, 2], [1, 4]], 0, "partition holds 40"),
        ([[80, 2], [1, 4]], 0, "partition holds 40"),
        ([[0, 2], [1, 4]], 0, "partition holds 40"),
        ([[40, 2], [1, 8]], 36, "partition holds 40"),
        ([[40, 2], [-1, 8]], 36, "strides at least 0"),
        ([[40, 0], [1, 8]], 0, "at least 1"),
    ],
)
def test_pattern_rules(pattern, offset, rule):
    with pytest.raises(ConstraintViolation, match=rule):
        sbuf(CUBE).ap(pattern, offset=offset)


def test_dynamic_offset_counts_the_indirect_dimension():
    view = hbm(CUBE).ap([[10, 2], [1, 3]], scalar_offset=Register(2), indirect_dim=1)
    assert view.index.step == 10 and view.index.limit == 4 and not view.index.per_partition
    assert hbm(CUBE).ap([[1, 2]], scalar_offset=Register(2)).index.step == 40
    rows = hbm(CUBE).ap([[99, 6], [1, 3]], vector_offset=sbuf(np.zeros((6, 1), np.int32)), indirect_dim=0)
    assert rows.index.per_partition and rows.strides == (0, 1)


def test_dynamic_offset_rules():
    index, base = sbuf(np.zeros((6, 1), np.int32)), hbm(CUBE)
    cases = {
        "integer tensor": {"vector_offset": sbuf(np.zeros((6, 1), np.float32))},
        "must be in SBUF": {"vector_offset": hbm(np.zeros((6, 1), np.int32))},
        "exactly 5 elements": {"vector_offset": index},
        "exactly 1 elements": {"scalar_offset": index},
        "at most one": {"scalar_offset": Register(1), "vector_offset": index},
        "has 3 dimensions": {"scalar_offset": Register(1), "indirect_dim": 3},
    }
    for rule, arguments in cases.items():
        with pytest.raises(ConstraintViolation, match=rule):
            base.ap([[10, 5], [1, 3]], **arguments)
    with pytest.raises(ConstraintViolation, match="second one"):
        base.ap([[1, 3]], scalar_offset=Register(1)).ap([[1, 3]], scalar_offset=Register(1))
    with pytest.raises(ConstraintViolation, match="has not been resolved"):
        base.ap([[1, 3]], scalar_offset=Register(1)).array()


def test_reshape():
    np.testing.assert_array_equal(hbm(CUBE).reshape((24, 10)).array(), CUBE.reshape(24, 10))
    np.testing.assert_array_equal(hbm(CUBE)[:, 1:3].reshape(6, -1).array(), CUBE[:, 1:3].reshape(6, 20))
    np.testing.assert_array_equal(sbuf(CUBE).reshape((6, 2, 20)).array(), CUBE.reshape(6, 2, 20))
    np.testing.assert_array_equal(sbuf(CUBE)[2:5].reshape((3, 5, 8)).array(), CUBE[2:5].reshape(3, 5, 8))
    with pytest.raises(ConstraintViolation, match="partition dimension"):
        sbuf(CUBE).reshape((24, 10))
    with pytest.raises(ConstraintViolation, match="need a copy"):
        hbm(CUBE)[:, :, :5].reshape((6, 2, 10))
    with pytest.raises(ConstraintViolation, match="do not fill"):
        hbm(CUBE).reshape((6, 41))


def test_reshape_strides_agrees_with_numpy_on_many_views():
    random = np.random.default_rng(0)
    base = np.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    seen = 0
    for _ in range(300):
        view = base.transpose(random.permutation(4)) if random.random() < 0.3 else base
        view = view[tuple(slice(None) if random.random() < 0.7 else slice(0, n, 2) for n in view.shape)]
        factors = [n for n in (2, 3, 2, 3, 2, 2, 1) if view.size % n == 0]
        split = int(random.choice(factors))
        shape = (split, view.size // split) if random.random() < 0.5 else (view.size // split, split, 1)
        strides = reshape_strides(view.shape, [s // 8 for s in view.strides], shape)
        expected = view.reshape(shape)
        if strides is None:
            assert not np.shares_memory(expected, base) or view.size <= 1
        else:
            seen += 1
            flat = base.ravel()
            grid = sum(np.arange(n).reshape([-1 if i == d else 1 for i in range(len(shape))]) * s
                       for d, (n, s) in enumerate(zip(shape, strides, strict=True)))  # fmt: skip
            np.testing.assert_array_equal(flat[grid], expected)
    assert seen > 50


def test_view_reinterprets_the_last_dimension():
    bytes_ = np.arange(64, dtype=np.uint8).reshape(2, 32)
    assert hbm(bytes_).view(nl.float8_e4m3fn_x4).shape == (2, 8)
    np.testing.assert_array_equal(
        hbm(bytes_)[:, 4:12].view(nl.uint32).array(), np.ascontiguousarray(bytes_[:, 4:12]).view(np.uint32)
    )
    np.testing.assert_array_equal(hbm(bytes_).view(nl.uint32).view(nl.uint8).array(), bytes_)
    with pytest.raises(ConstraintViolation, match="multiple of 4 bytes"):
        hbm(bytes_)[:, 1:4].view(nl.uint32)
    with pytest.raises(ConstraintViolation, match=r"not a multiple|multiple of 4 bytes"):
        hbm(bytes_)[:, 2:10].view(nl.uint32)


def test_permute_broadcast_expand():
    tensor = hbm(CUBE)
    np.testing.assert_array_equal(tensor.permute(2, 0, 1).array(), CUBE.transpose(2, 0, 1))
    np.testing.assert_array_equal(
        tensor[:, 0:1].broadcast_to((6, 5, 10)).array(), np.broadcast_to(CUBE[:, :1], (6, 5, 10))
    )
    assert tensor.expand_dim(1).shape == (6, 1, 4, 10)
    with pytest.raises(ConstraintViolation, match="partition dimension first"):
        sbuf(CUBE).permute(1, 0, 2)
    with pytest.raises(ConstraintViolation, match="size 1"):
        tensor.broadcast_to((6, 8, 10))


def test_inputs_are_not_copied_and_stay_read_only():
    array = np.ones((4, 4), ml_dtypes.bfloat16)
    array.flags.writeable = False
    view = hbm(array).array()
    assert np.shares_memory(view, array) and not view.flags.writeable


def test_on_maps_a_view_onto_flags_of_the_storage():
    flags = np.zeros(CUBE.size, bool)
    sbuf(CUBE)[1:3, :, 4].on(flags)[...] = True
    expected = np.zeros(CUBE.shape, bool)
    expected[1:3, :, 4] = True
    np.testing.assert_array_equal(flags.reshape(CUBE.shape), expected)


def test_allocation_rules():
    for shape, rule in [
        ((129, 1), "128 partitions"),
        ((128,), "partition and a free"),
        ((0, 4), "at least 1"),
        ((128, 70000), "bytes per partition"),
    ]:
        with pytest.raises(ConstraintViolation, match=rule):
            allocate(Buffer.sbuf, shape, nl.float32, name="t", core=0, limit=256 * 1024)
    assert np.isnan(Tensor(allocate(Buffer.sbuf, (2, 3), nl.float32, name="t", core=0)).array()).all()
