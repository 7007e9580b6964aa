"""Races on shared HBM: planted ones are found from either side, barriers silence them."""

import numpy as np
import pytest

from moedecode.neuron.machine import Machine, RaceError
from moedecode.neuron.machine import isa as nisa
from moedecode.neuron.machine import language as nl

X = np.zeros((1, 8), np.float32)


def kernel_of(core0, core1, *, barriers=()):
    """Two programs run the given steps on one shared tensor [8, 8], meeting before those in `barriers`."""

    def kernel(x):
        shared = nl.ndarray((8, 8), nl.float32, buffer=nl.shared_hbm, name="shared")
        other = nl.ndarray((8, 8), nl.float32, buffer=nl.shared_hbm, name="other")
        tile = nl.ndarray((8, 8), nl.float32)
        nisa.memset(tile, 1.0)
        steps = (core0, core1)[nl.program_id(0)]
        for number, step in enumerate(steps):
            if number in barriers:
                nisa.core_barrier(shared, (0, 1))
            if step is not None:
                action, view = step
                region = view(shared)
                part = tile[: region.shape[0], : region.shape[-1]]
                if action == "read":
                    nisa.dma_copy(part, region)
                else:
                    nisa.dma_copy(region, part)
        return other

    return kernel


def rows(start, stop):
    return lambda t: t[start:stop]


def columns(start, stop):
    return lambda t: t[:, start:stop]


PLANTED = {
    "write then read": ([("write", rows(0, 4))], [("read", rows(3, 8))]),
    "read then write": ([("read", rows(0, 8))], [("write", rows(7, 8))]),
    "write then write": ([("write", columns(0, 5))], [("write", columns(4, 8))]),
    "one element": ([("write", lambda t: t[3:4, 3:4])], [("read", lambda t: t[3:4, 3:4])]),
}


@pytest.mark.parametrize("steps", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("swap", [False, True])
def test_a_planted_race_is_found_whichever_core_comes_first(steps, swap):
    first, second = reversed(steps) if swap else steps
    with pytest.raises(RaceError, match=r"'shared' .* core_barrier"):
        Machine("trn2").run(kernel_of(first, second), X)


@pytest.mark.parametrize("steps", PLANTED.values(), ids=PLANTED)
def test_a_barrier_between_orders_it(steps):
    first, second = steps
    Machine("trn2").run(kernel_of([*first, None], [None, *second], barriers=(1,)), X)


def test_a_race_after_a_barrier_is_found():
    step = [("write", rows(0, 2))]
    with pytest.raises(RaceError, match=r"writes bytes .* wrote"):
        Machine("trn2").run(kernel_of([*step, None, *step], [None, None, *step], barriers=(1,)), X)


@pytest.mark.parametrize(
    "steps",
    [
        ([("write", rows(0, 4))], [("write", rows(4, 8))]),
        ([("write", columns(0, 3))], [("write", columns(3, 8))]),
        (
            [("write", lambda t: t.ap([[8, 8], [2, 4]]))],
            [("write", lambda t: t.ap([[8, 8], [2, 4]], offset=1))],
        ),
        ([("read", rows(0, 8))], [("read", rows(0, 8))]),
        ([("write", rows(0, 8)), ("read", rows(0, 8)), ("write", rows(0, 8))], [None]),
    ],
    ids=["rows", "columns", "interleaved", "two readers", "one core alone"],
)
def test_disjoint_or_harmless_accesses_are_not_accused(steps):
    Machine("trn2").run(kernel_of(*steps), X)


def test_a_barrier_on_another_tensor_orders_nothing_unless_asked():
    def kernel():
        core = nl.program_id(0)
        shared, other = (nl.ndarray((2, 2), nl.float32, buffer=nl.shared_hbm) for _ in range(2))
        tile = nl.ndarray((2, 2), nl.float32)
        nisa.memset(tile, 0.0)
        if core == 0:
            nisa.dma_copy(shared, tile)
        nisa.core_barrier(other, (0, 1))
        if core == 1:
            nisa.dma_copy(tile, shared)

    with pytest.raises(RaceError):
        Machine("trn2").run(kernel)
    Machine("trn2", barrier_scope="all").run(kernel)


def test_an_exchange_orders_no_hbm_traffic():
    def kernel():
        core = nl.program_id(0)
        shared = nl.ndarray((2, 2), nl.float32, buffer=nl.shared_hbm)
        tile, got = nl.ndarray((2, 2), nl.float32), nl.ndarray((2, 2), nl.float32)
        nisa.memset(tile, 0.0)
        if core == 0:
            nisa.dma_copy(shared, tile)
        nisa.sendrecv(src=tile, dst=got, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        if core == 1:
            nisa.dma_copy(tile, shared)

    with pytest.raises(RaceError):
        Machine("trn2").run(kernel)


def test_an_indirect_write_is_watched_row_by_row():
    def kernel(ids):
        core = nl.program_id(0)
        shared = nl.ndarray((8, 4), nl.float32, buffer=nl.shared_hbm, name="shared")
        tile, index = nl.ndarray((3, 4), nl.float32), nl.ndarray((3, 1), nl.int32)
        nisa.memset(tile, 0.0)
        nisa.dma_copy(index, ids[core])
        target = shared.ap([[4, 3], [1, 4]], vector_offset=index, indirect_dim=0)
        nisa.dma_copy(target, tile, oob_mode=nisa.oob_mode.skip)

    Machine("trn2").run(kernel, np.array([[[0], [2], [-1]], [[1], [3], [-1]]], np.int32))
    with pytest.raises(RaceError):
        Machine("trn2").run(kernel, np.array([[[0], [2], [-1]], [[1], [2], [-1]]], np.int32))


def test_inputs_that_both_cores_write_are_watched_too():
    def kernel(x):
        tile = nl.ndarray((1, 8), nl.float32)
        nisa.memset(tile, 0.0)
        nisa.dma_copy(x, tile)

    with pytest.raises(RaceError):
        Machine("trn2").run(kernel, X.copy())


def test_recording_collects_instead_of_raising():
    result = Machine("trn2", on_race="record").run(kernel_of(*PLANTED["write then read"]), X)
    assert len(result.report.races) == 1
    race = result.report.races[0]
    assert (race.core, race.access, race.other_core, race.other_access) == (1, "reads", 0, "wrote")
    assert Machine("trn2", on_race="record").run(kernel_of([None], [None]), X).report.races == ()
