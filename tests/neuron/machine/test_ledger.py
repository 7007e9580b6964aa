"""The ledger counts every byte that DMA moves and what was read twice; liveness, capacity."""

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.machine import Buffer, CapacityError, Machine, StandIn, Tensor
from moedecode.neuron.machine import isa as nisa
from moedecode.neuron.machine import language as nl
from moedecode.neuron.machine.coverage import Coverage, read_bit, region_of
from moedecode.neuron.machine.memory import wrap

X = np.zeros((16, 8), ml_dtypes.bfloat16)  # 256 bytes


def read(view):
    nisa.dma_copy(nl.ndarray((view.shape[0], view.size // view.shape[0]), view.dtype), view)


def row_of(kernel, *args, name="x", **options):
    return Machine("trn2", **options).run(kernel, *args).report.ledger.named(name)


def test_halves_are_read_once_per_chip():
    row = row_of(lambda x: read(x[nl.ds(8 * nl.program_id(0), 8)]), X)
    assert row.read == (128, 128) and row.distinct_read == (128, 128)
    assert row.distinct_read_chip == 256 and row.reread == 0 and row.times_read == 1.0


def test_reading_on_both_cores_counts_twice():
    row = row_of(read, X, name="view")
    assert (
        row.read == (256, 256)
        and row.distinct_read_chip == 256
        and row.reread == 256
        and row.times_read == 2.0
    )


def test_reading_twice_on_one_core_counts_twice():
    def kernel(x):
        if nl.program_id(0) == 0:
            read(x[:, :4])
            read(x[:, 2:6])

    row = row_of(kernel, X)
    assert row.read == (256, 0) and row.distinct_read == (16 * 6 * 2, 0) and row.reread == 64


def test_a_broadcast_read_costs_what_it_moves():
    row = row_of(lambda x: read(x.ap([[0, 32], [1, 8]])), X)
    assert row.read == (512, 512) and row.distinct_read_chip == 16


def test_skipped_rows_move_nothing():
    def kernel(x, ids):
        index = nl.ndarray((3, 1), nl.int32)
        nisa.dma_copy(index, ids)
        tile = nl.ndarray((3, 8), x.dtype)
        nisa.dma_copy(
            tile, x.ap([[8, 3], [1, 8]], vector_offset=index, indirect_dim=0), oob_mode=nisa.oob_mode.skip
        )

    row = row_of(kernel, X, np.array([[3], [-1], [3]], np.int32))
    assert row.read == (32, 32) and row.distinct_read == (16, 16)


def test_writes_private_memory_and_totals():
    def kernel(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm, name="out")
        spill = nl.ndarray((8, 8), x.dtype, buffer=nl.private_hbm, name="spill")
        part = nl.ds(8 * nl.program_id(0), 8)
        tile = nl.ndarray((8, 8), x.dtype)
        nisa.dma_copy(tile, x[part])
        nisa.dma_copy(spill, tile)
        nisa.dma_copy(tile, spill)
        nisa.dma_copy(out[part], tile)
        return out

    report = Machine("trn2").run(kernel, X).report
    assert (
        report.ledger.named("out").written == (128, 128)
        and report.ledger.named("out").distinct_written_chip == 256
    )
    spills = [r for r in report.rows if r.kind == "private"]
    assert len(spills) == 2 and all(sum(r.read) == sum(r.written) == 128 for r in spills)
    assert (report.ledger.bytes_read, report.ledger.bytes_written, report.hbm_bytes) == (512, 512, 1024)
    assert [r.kind for r in report.rows if r.name in ("x", "out")] == ["input", "shared"]
    with pytest.raises(KeyError, match="no HBM tensor called"):
        report.ledger.named("nothing")


def test_on_chip_exchange_is_not_hbm_traffic():
    def kernel():
        core = nl.program_id(0)
        a, b = nl.ndarray((4, 4), nl.float32), nl.ndarray((4, 4), nl.float32)
        nisa.memset(a, 0.0)
        nisa.sendrecv(src=a, dst=b, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)

    assert Machine("trn2").run(kernel).report.hbm_bytes == 0


def test_the_coverage_map_is_exact_for_random_views():
    random = np.random.default_rng(3)
    base = Tensor(wrap(np.zeros((12, 10, 14), np.uint8), "x"))
    coverage, expected = Coverage(base.storage.nbytes), np.zeros((12, 10, 14), bool)
    for _ in range(40):
        starts = [int(random.integers(0, n - 1)) for n in base.shape]
        key = tuple(
            slice(start, int(random.integers(start + 1, n + 1)), int(random.integers(1, 4)))
            for start, n in zip(starts, base.shape, strict=True)
        )
        view = base[key].permute(*random.permutation(3))
        coverage.mark(region_of(view), read_bit(1))
        expected[key] = True
        assert coverage.touched(read_bit(1)) == expected.sum()
    assert coverage.touched(read_bit(0)) == 0


def test_long_runs_keep_the_map_small():
    weights = Tensor(wrap(StandIn((128, 2880, 2880), nl.bfloat16), "w"))
    coverage = Coverage(weights.storage.nbytes)
    for expert in range(0, 128, 3):
        coverage.mark(region_of(weights[expert]), read_bit(0))
    assert coverage.ever.size < 2_000_000 and coverage.touched(read_bit(0)) == 43 * 2880 * 2880 * 2


def test_peaks_count_what_is_alive_together():
    def kernel():
        first = nl.ndarray((128, 1500), nl.float32, name="first")
        nisa.memset(first, 0.0)
        second = nl.ndarray((128, 500), nl.float32, name="second")
        nisa.tensor_copy(dst=second, src=first[:, :500])  # both alive
        third = nl.ndarray((128, 1200), nl.float32, name="third")
        nisa.memset(third, 0.0)  # second is still needed, first is not
        nisa.tensor_copy(dst=third[:, :500], src=second)
        never = nl.ndarray((128, 9000), nl.float32, name="never")
        return never

    report = Machine("trn2").run(kernel, n_programs=1).report
    assert report.sbuf_peak == 4 * 2000 and report.psum_peak == 0
    lives = {life.name: (life.first, life.last) for life in report.residency}
    assert lives == {"first": (1, 2), "second": (2, 4), "third": (3, 4)}
    assert report.liveness.peak(Buffer.sbuf, core=0) == 4 * 2000


def test_too_much_alive_at_once_names_the_tensors():
    def kernel():
        tiles = [nl.ndarray((128, 30_000), nl.float32, name=f"tile{i}") for i in range(2)]
        for tile in tiles:
            nisa.memset(tile, 0.0)
        nisa.tensor_copy(dst=tiles[1], src=tiles[0])

    with pytest.raises(CapacityError, match=r"sbuf of core 0: 240000 bytes .* 229376; .*tile0"):
        Machine("trn2").run(kernel, n_programs=1)
    Machine("trn3").run(kernel, n_programs=1)
    Machine("trn2", check_capacity=False).run(kernel, n_programs=1)
