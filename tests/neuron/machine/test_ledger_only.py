"""Ledger-only mode: instructions and addresses of a run, without its data; what a run returns."""

import numpy as np
import pytest

from moedecode.neuron.machine import Machine, StandIn
from moedecode.neuron.machine import isa as nisa
from moedecode.neuron.machine import language as nl


def gather_kernel(table, ids):
    """Rows of a table, chosen by ids that are computed on (doubled) before they become addresses."""
    count = ids.shape[0]
    index = nl.ndarray((count, 1), nl.int32)
    nisa.dma_copy(index, ids)
    as_float = nl.ndarray((count, 1), nl.float32)
    nisa.tensor_scalar(dst=as_float, data=index, op0=nl.multiply, operand0=2.0)
    nisa.tensor_copy(dst=index, src=as_float)
    rows = nl.ndarray((count, table.shape[1]), table.dtype)
    nisa.memset(rows, 0.0)
    nisa.dma_copy(rows, table.ap([[1, count], [1, table.shape[1]]], vector_offset=index, indirect_dim=0))
    out = nl.ndarray((2, count, table.shape[1]), table.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(out[nl.program_id(0)], rows)
    return out


IDS = np.array([[3], [0], [3], [7]], np.int32)


def traffic(report):
    return [(r.name, r.read, r.written, r.distinct_read_chip) for r in report.rows]


def test_traffic_is_that_of_a_run_with_data():
    table = np.arange(16 * 6000, dtype=np.float32).reshape(16, 6000)
    full = Machine("trn2").run(gather_kernel, table, IDS)
    np.testing.assert_array_equal(full.outputs[1], table[2 * IDS[:, 0]])
    dry = Machine("trn2", compute=False).run(gather_kernel, StandIn(table.shape, table.dtype), IDS)
    assert traffic(dry.report) == traffic(full.report)
    assert dry.report.instructions == full.report.instructions
    assert dry.report.timeline.bounds() == full.report.timeline.bounds()
    assert dry.report.sbuf_peak == full.report.sbuf_peak
    assert not dry.outputs.any()  # reads as zeros, and takes no memory


def test_realness_follows_the_data():
    seen = {}

    def kernel(x):
        constant, loaded, mixed = (nl.ndarray((4, 8), nl.float32) for _ in range(3))
        nisa.memset(constant, 3.0)
        nisa.dma_copy(loaded, x)
        nisa.tensor_tensor(dst=mixed, data1=constant, data2=loaded, op=nl.add)
        ids = nl.ndarray((4, 8), nl.int32)
        nisa.tensor_copy(dst=ids, src=mixed)
        seen.update(
            constant=constant.storage.real,
            loaded=loaded.storage.real,
            mixed=mixed.storage.real,
            ids=ids.numpy().max(),
        )
        nisa.memset(loaded[:2], 1.0)
        seen["part"] = loaded.storage.real
        nisa.memset(loaded, 1.0)
        seen["whole"] = loaded.storage.real, loaded.numpy().min()

    Machine("trn2", compute=False).run(kernel, StandIn((4, 8), nl.float32), n_programs=1)
    assert seen == {
        "constant": True,
        "loaded": False,
        "mixed": False,
        "ids": 0,
        "part": False,
        "whole": (True, 1.0),
    }


def test_what_the_other_core_sends_is_as_real_as_it_was_there():
    seen = []

    def kernel(x):
        core = nl.program_id(0)
        mine, theirs = nl.ndarray((2, 4), nl.float32), nl.ndarray((2, 4), nl.float32)
        if core == 0:
            nisa.memset(mine, 5.0)
        else:
            nisa.dma_copy(mine, x)
        nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        seen.append((core, theirs.storage.real, float(theirs.numpy().max())))

    Machine("trn2", compute=False).run(kernel, StandIn((2, 4), nl.float32))
    assert sorted(seen) == [(0, False, 0.0), (1, True, 5.0)]


def test_a_stand_in_needs_the_mode():
    with pytest.raises(ValueError, match="StandIn has no data"):
        Machine("trn2").run(lambda x: None, StandIn((2, 2), nl.float32))


def test_gigabytes_of_weights_take_no_memory():
    def kernel(w):
        tile = nl.ndarray((128, 8, 2880), w.dtype)
        for expert in range(w.shape[0]):
            nisa.dma_copy(tile, w[expert])

    row = (
        Machine("trn3", compute=False)
        .run(kernel, StandIn((2000, 128, 8, 2880), nl.bfloat16), n_programs=1)
        .report.rows[0]
    )
    assert row.read == (2000 * 128 * 8 * 2880 * 2,) and row.reread == 0


def test_outputs_keep_the_structure_and_arguments_their_names():
    def kernel(a, pair, *, options):
        out = nl.ndarray((1, 2), nl.float32, buffer=nl.private_hbm)
        tile = nl.ndarray((1, 2), nl.float32)
        nisa.dma_copy(tile, pair[1])
        nisa.dma_copy(out, tile)
        return {"out": out, "rest": [a, None, (3, options["scale"])]}

    one, two = np.ones((1, 2), np.float32), np.full((1, 2), 2, np.float32)
    result = Machine("trn2").run(kernel, one, (one, two), options={"scale": two})
    np.testing.assert_array_equal(result.outputs["out"], two)
    assert result.outputs["rest"][0] is not None and result.outputs["rest"][1] is None
    assert np.shares_memory(result.outputs["rest"][2][1], two)
    assert [r.name for r in result.report.rows if r.kind == "input"] == ["pair[1]"]


def test_an_array_given_twice_is_one_tensor():
    array = np.ones((1, 2), np.float32)
    assert Machine("trn2").run(lambda a, b: a.storage is b.storage, array, array).outputs


def test_constants_are_made_once_and_free_of_traffic():
    def kernel():
        first = nl.shared_identity_matrix(4, dtype=nl.bfloat16)
        return (first.storage is nl.shared_identity_matrix(4, dtype=nl.bfloat16).storage, first)

    same, matrix = Machine("trn2", compute=False).run(kernel).outputs
    assert same and np.array_equal(matrix.astype(np.float32), np.eye(4))


def test_fresh_memory_is_poisoned_unless_asked_otherwise():
    def kernel():
        return nl.ndarray((2, 2), nl.bfloat16, buffer=nl.private_hbm), nl.zeros((2, 2), nl.int32)

    poisoned, zeros = Machine("trn2").run(kernel).outputs
    assert np.isnan(poisoned.astype(np.float32)).all() and not zeros.any()
    assert not Machine("trn2", poison=False).run(kernel).outputs[0].astype(np.float32).any()


def test_mapped_read_only_weights_are_used_in_place(tmp_path):
    path = tmp_path / "weights"
    np.arange(4096, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, np.float32, mode="r", shape=(64, 64))
    seen = []

    def kernel(w):
        seen.append(w.array().base is not None and np.shares_memory(w.array(), mapped))
        tile = nl.ndarray((64, 64), nl.float32)
        nisa.dma_copy(tile, w)
        return tile

    np.testing.assert_array_equal(Machine("trn2").run(kernel, mapped).outputs, mapped)
    assert seen == [True, True]


def test_strided_arguments_are_read_correctly():
    def kernel(x):
        tile = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(tile, x)
        return tile

    strided = np.arange(48, dtype=np.float32).reshape(6, 8)[::2, 1::3]
    np.testing.assert_array_equal(Machine("trn2").run(kernel, strided).outputs, strided)
