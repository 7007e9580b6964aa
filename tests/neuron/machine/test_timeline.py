"""Costs, engine sums, the in-order schedule with its dependences, and the trace file."""

import json

import pytest

from moedecode.neuron.machine import cost
from moedecode.neuron.machine.chip import CHIPS
from moedecode.neuron.machine.cost import Cost
from moedecode.neuron.machine.timeline import Timeline

TRN3 = CHIPS["trn3"]


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(TRN3)


def test_engine_sums_are_of_the_slower_core(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(1.0))
    timeline.add(0, "b", "vector", Cost(2.0))
    timeline.add(1, "c", "vector", Cost(2.5))
    timeline.add(1, "d", "dma", Cost(4.0, busy=9.0))
    assert timeline.bounds() == {"vector": 3.0, "dma": 4.0}
    assert timeline.bounds(core=1) == {"vector": 2.5, "dma": 4.0}
    assert timeline.bottleneck() == ("dma", 4.0)
    assert timeline.counts() == {"vector": 3, "dma": 1}


def test_independent_engines_overlap(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(2.0), reads=["x"], writes=["y"])
    timeline.add(0, "b", "scalar", Cost(3.0), reads=["x"], writes=["z"])
    assert timeline.makespan() == 3.0


def test_read_waits_for_the_write_and_its_latency(timeline: Timeline) -> None:
    timeline.add(0, "a", "dma", Cost(2.0, latency=0.5), writes=["x"])
    assert timeline.add(0, "b", "vector", Cost(1.0), reads=["x"]).start == 2.5


def test_latency_does_not_hold_the_engine(timeline: Timeline) -> None:
    timeline.add(0, "a", "dma", Cost(2.0, latency=0.5), writes=["x"])
    assert timeline.add(0, "b", "dma", Cost(2.0), writes=["y"]).start == 2.0


def test_write_waits_for_readers(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(5.0), reads=["x"])
    assert timeline.add(0, "b", "dma", Cost(1.0), writes=["x"]).start == 5.0


def test_write_waits_for_the_write_before(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(5.0), writes=["x"])
    assert timeline.add(0, "b", "scalar", Cost(1.0), writes=["x"]).start == 5.0


def test_readers_run_side_by_side_and_writers_in_turn(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(5.0), reads=["x"])
    assert timeline.add(0, "b", "scalar", Cost(1.0), reads=["x"]).start == 0.0
    timeline.add(0, "c", "dma", Cost(1.0), writes=["x"])  # 5..6
    assert timeline.add(0, "d", "tensor", Cost(1.0), writes=["x"]).start == 6.0


def test_cores_do_not_share_on_chip_memory(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(5.0), writes=["x"])
    assert timeline.add(1, "b", "vector", Cost(1.0), reads=["x"]).start == 0.0


def test_rendezvous_starts_when_both_are_ready(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(5.0), writes=["x"])
    met = timeline.rendezvous("sendrecv", "dma", {0: (Cost(1.0), ["x"], ["y"]), 1: (Cost(1.0), ["x"], ["y"])})
    assert [met[core].start for core in (0, 1)] == [5.0, 5.0]
    assert timeline.add(1, "b", "vector", Cost(1.0), reads=["y"]).start == 6.0


def test_unknown_engine_is_refused(timeline: Timeline) -> None:
    with pytest.raises(ValueError, match="engine='warp'"):
        timeline.add(0, "a", "warp", Cost(1.0))


def test_an_empty_timeline(timeline: Timeline) -> None:
    assert (timeline.bounds(), timeline.bottleneck(), timeline.makespan()) == ({}, ("none", 0.0), 0.0)


def test_trace_is_what_perfetto_reads(timeline: Timeline) -> None:
    timeline.add(0, "a", "vector", Cost(2e-6), writes=["x"])
    timeline.add(1, "b", "dma", Cost(1e-6, busy=3e-6), writes=["x"])
    trace = json.loads(json.dumps(timeline.trace()))["traceEvents"]
    named = {(e["pid"], e.get("tid"), e["args"]["name"]) for e in trace if e["ph"] == "M"}
    assert (0, None, "core 0 (trn3)") in named
    slices = {e["name"]: e for e in trace if e["ph"] == "X"}
    assert slices["a"]["dur"] == pytest.approx(2.0)
    assert slices["b"]["dur"] == pytest.approx(3.0)
    assert (slices["b"]["pid"], slices["b"]["tid"], "dma") in named


def test_a_full_dma_moves_at_the_hbm_path() -> None:
    made = cost.dma(TRN3, 128 * 65536)
    assert made.bound == pytest.approx(128 * 65536 / 528e9)
    assert made.bound < made.busy < 1.01 * made.bound  # 64 KiB runs waste almost nothing
    assert made.latency == TRN3.dma_start_seconds


def test_few_partitions_use_few_dma_engines() -> None:
    full, one = cost.dma(TRN3, 1 << 20), cost.dma(TRN3, 1 << 20, partitions=8, run_bytes=8192)
    assert one.bound == full.bound
    assert one.busy > 15 * full.bound


def test_short_runs_waste_dma() -> None:
    assert cost.dma(TRN3, 1 << 20, run_bytes=64).busy > 4 * cost.dma(TRN3, 1 << 20, run_bytes=4096).busy


@pytest.mark.parametrize(
    ("stationary", "moving", "passes", "cycles"),
    [(128, 512, 1, 512), (128, 1, 1, 64), (16, 1, 1, 16), (128, 512, 4, 2048)],
)
def test_matmul_cycles(stationary: int, moving: int, passes: float, cycles: float) -> None:
    made = cost.matmul(TRN3, stationary, moving, passes)
    assert made.bound * TRN3.clock_hz["tensor"] == pytest.approx(cycles)


def test_small_vector_work_costs_the_initiation_interval() -> None:
    assert cost.compute(TRN3, "vector", 3).bound == cost.compute(TRN3, "vector", 64).bound
