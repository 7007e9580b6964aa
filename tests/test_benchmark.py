"""The protocol of a benchmark with a clock of our own: who runs when, on what, and what the figures mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moedecode import BlockSpec, ExpertSpec, RouterSpec, WeightFormat, benchmark, machine
from moedecode.benchmark import Contender, Lap, Laps, Setting
from moedecode.plan import expert_bytes
from moedecode.synthetic import block_weights

SPEC = BlockSpec(64, RouterSpec(8, 2), ExpertSpec(32))
SETTING = Setting("tiny", SPEC, WeightFormat.MXFP4)


class Stage:
    """Contenders on a clock that only they move; remembers every call as (name, copy, hidden states)."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def contender(self, name, seconds_per_token, copies=1, **options):
        def copy(number):
            def run(hidden):
                self.calls.append((name, number, hidden))
                self.now += seconds_per_token * len(hidden)
                return np.zeros(hidden.shape, np.float32)

            return run

        return Contender(name, [copy(number) for number in range(copies)], **options)

    def measure(self, contenders, tokens, rounds, wake_seconds=0.0):
        del self.calls[:]
        return benchmark.measure(
            SETTING,
            contenders,
            tokens,
            rounds=rounds,
            clock=lambda: self.now,
            settle=lambda: None,
            wake_seconds=wake_seconds,
        )


@pytest.fixture
def stage(monkeypatch):
    speeds = iter([20.0, 30.0, 10.0, *[25.0] * 100])
    monkeypatch.setattr(machine, "stream_read_gbps", lambda threads: next(speeds))
    return Stage()


def test_figures_follow_from_the_times(stage):
    ours, peer = stage.contender("grouped", 0.001), stage.contender("peer", 0.003)
    laps = stage.measure([ours, peer], [1, 4], rounds=3)
    rows = benchmark.figures(laps, SETTING, ["grouped"], {1: "grouped", 4: "grouped"})
    assert [(row.tokens, row.strategy, row.rounds) for row in rows] == [(1, "grouped", 3), (4, "grouped", 3)]
    for row in rows:
        seconds = 0.001 * row.tokens
        distinct = np.median([laps.distinct[row.tokens, number] for number in range(3)])
        assert row.ms_median == pytest.approx(1e3 * seconds)
        assert row.ms_p10 == pytest.approx(row.ms_p90)
        moved = distinct * expert_bytes(SPEC.experts, 64, WeightFormat.MXFP4)
        assert row.gbps == pytest.approx(moved / seconds / 1e9)
        assert row.stream_gbps == 20.0, "the median of 20, 30 and 10"
        assert row.stream_ratio == pytest.approx(row.gbps / 20.0)
        assert row.floor_ms == pytest.approx(1e3 * moved / 20e9)
        flops = 2 * row.tokens * (2 * 3 * 64 * 32 + 64 * 8)
        assert row.gflops == pytest.approx(flops / seconds / 1e9)
        ms, speedup = row.peers["peer"]
        assert (ms, speedup) == (pytest.approx(3e3 * seconds), pytest.approx(3.0))


def test_a_row_of_a_report_has_exactly_the_promised_keys(stage):
    laps = stage.measure([stage.contender("auto", 0.001), stage.contender("peer", 0.002)], [1], rounds=1)
    [row] = benchmark.figures(laps, SETTING, ["auto"], {1: "selective"})
    report = row.as_json(SETTING)
    assert list(report) == [
        "preset", "format", "precision", "tokens", "strategy", "threads", "ms_median", "ms_p90", "gbps",
        "stream_gbps", "stream_ratio", "peers",
    ]  # fmt: skip
    assert report["strategy"] == "selective", "the one that auto took"
    assert report["peers"] == {"peer": {"ms": pytest.approx(2.0), "speedup": pytest.approx(2.0)}}


def test_ratios_are_paired_by_round():
    # by medians alone the peer would look 2.5 times slower
    ours, peer = Lap({0: 1.0, 1: 10.0, 2: 2.0}), Lap({0: 3.0, 1: 5.0, 2: 6.0, 3: 99.0})
    assert benchmark.paired_ratio(peer, ours) == 3.0
    assert benchmark.paired_ratio(ours, ours) == 1.0


def test_everyone_sees_the_same_fresh_tokens_and_the_order_rotates(stage):
    stage.measure([stage.contender("a", 1e-3), stage.contender("b", 1e-3)], [3], rounds=4)
    timed = [(name, hidden) for name, _, hidden in stage.calls if len(hidden) == 3][2:]  # two warm up
    assert [name for name, _ in timed] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    rounds = [timed[number : number + 2] for number in range(0, 8, 2)]
    for (_, first), (_, second) in rounds:
        assert (first == second).all()
    seen = {hidden.tobytes() for _, hidden in timed}
    assert len(seen) == 4, "new tokens in every round"


def test_copies_take_turns_and_the_call_that_wakes_threads_uses_another_one(stage):
    stage.measure([stage.contender("a", 1e-3, copies=3)], [5], rounds=4)
    warmed, measured = stage.calls[:4], stage.calls[4:]
    assert {number for _, number, _ in warmed} == {0, 1, 2}
    pairs = [measured[number : number + 2] for number in range(0, len(measured), 2)]
    assert [(len(wake), len(timed)) for (*_, wake), (*_, timed) in pairs] == [(1, 5)] * 4
    assert [timed for _, (_, timed, _) in pairs] == [1, 2, 0, 1]
    assert [wake for (_, wake, _), _ in pairs] == [0, 1, 2, 0]


def test_threads_are_woken_for_a_while(stage):
    """Until the time is up, and once where one call takes longer."""
    stage.measure([stage.contender("a", 1e-3, copies=2)], [5], rounds=1, wake_seconds=0.0035)
    assert [(number, len(hidden)) for _, number, hidden in stage.calls[3:]] == [(0, 1)] * 4 + [(1, 5)]
    stage.measure([stage.contender("slow", 1.0, copies=2)], [5], rounds=1, wake_seconds=0.0035)
    assert [(number, len(hidden)) for _, number, hidden in stage.calls[3:]] == [(0, 1), (1, 5)]


def test_a_contender_gets_its_own_dtype(stage):
    stage.measure([stage.contender("a", 1e-3, dtype="float32"), stage.contender("b", 1e-3)], [1], rounds=1)
    assert {(name, hidden.dtype.name) for name, _, hidden in stage.calls} == {
        ("a", "float32"),
        ("b", "bfloat16"),
    }


def test_a_slow_contender_leaves_rounds_out_but_keeps_three(stage):
    laps = stage.measure([stage.contender("fast", 1e-3), stage.contender("slow", 5.0)], [1], rounds=6)
    assert len(laps.cells["fast", 1].seconds) == 6
    assert len(laps.cells["slow", 1].seconds) == benchmark.MIN_ROUNDS == 3
    [row] = benchmark.figures(laps, SETTING, ["fast"], {1: "fast"})
    assert row.peers["slow"][1] == pytest.approx(5000)


def test_a_contender_sits_out_what_it_cannot_take(stage):
    small = stage.contender("small", 1e-3, most_tokens=2)
    laps = stage.measure([stage.contender("ours", 1e-3), small], [1, 4], rounds=2)
    one, four = benchmark.figures(laps, SETTING, ["ours"], {})
    assert set(one.peers) == {"small"} and four.peers == {}
    assert max(len(hidden) for name, _, hidden in stage.calls if name == "small") == 1


def test_distinct_experts_are_those_the_block_touches(stage):
    laps = stage.measure([stage.contender("a", 1e-3)], [1, 64], rounds=2)
    assert [laps.distinct[1, number] for number in range(2)] == [2, 2]
    assert all(2 < laps.distinct[64, number] <= 8 for number in range(2))


def test_a_shared_expert_counts_in_bytes_and_flops(stage):
    spec = replace(SPEC, shared=ExpertSpec(48))
    setting = replace(SETTING, spec=spec)
    laps = Laps(("a",), (1,), {("a", 1): Lap({0: 1.0})}, [1.0], {(1, 0): 2})
    [row] = benchmark.figures(laps, setting, ["a"], {})
    size = 2 * expert_bytes(spec.experts, 64, SETTING.fmt) + expert_bytes(spec.shared, 64, SETTING.fmt)
    assert row.gbps == pytest.approx(size / 1e9)
    assert row.gflops == pytest.approx(2 * 64 * (3 * (2 * 32 + 48) + 8) / 1e9)


@pytest.mark.parametrize(
    ("size", "contenders", "available", "copies"),
    [
        (400_000_000, 2, None, 3),  # 1.2 GB walked
        (400_000_000, 10, 10_000_000_000, 1),  # ten holders share 6 GB
        (2_000_000_000, 1, None, 2),  # one to wake the threads on, one to time
        (10_000, 1, 1_000_000, 60),  # a tiny layer in little memory
        (1_000_000, 3, 0, 1),  # never none
    ],
)
def test_copies_of_the_weights(size, contenders, available, copies):
    assert benchmark.weight_copies(size, contenders, available) == copies


def test_our_contenders_compute_the_block():
    [contender] = benchmark.own_contenders(SETTING, ["auto"], 2)
    weights = block_weights(SPEC, SETTING.fmt)
    assert benchmark.error_of(contender.calls, contender.dtype, SPEC, weights) < 4e-3


@pytest.mark.parametrize("wrong", [lambda out: 1.1 * out, lambda out: out[::-1], lambda out: np.nan * out])
def test_the_check_sees_one_wrong_call_among_right_ones(wrong):
    weights = block_weights(SPEC, SETTING.fmt)
    [contender] = benchmark.own_contenders(SETTING, ["auto"], 1)
    right = contender.calls[0]
    off = benchmark.error_of([right, lambda x: wrong(right(x).astype(np.float32))], "bfloat16", SPEC, weights)
    assert not off < 0.05


def test_a_profile_has_every_stage_for_every_thread():
    block = benchmark.own_block(replace(SETTING, threads=2), "grouped")
    stages = benchmark.profile(block, 64, tokens=4, calls=3)
    assert {"norm", "router", "gate/up", "activation", "down", "combine", "waiting"} <= set(stages)
    assert all(len(seconds) == 2 and min(seconds) >= 0 for seconds in stages.values())
