"""What the benchmarks share: fresh inputs for every call, at the end a table of GB/s beside the stream."""

from __future__ import annotations

import pytest

from moedecode import machine
from sizes import ROUNDS

_rates: list[tuple[str, float, float]] = []


@pytest.fixture
def rate(benchmark, request):
    """``rate(function, arguments, moved)``: time ``function`` and note its GB/s.

    ``arguments(round)`` makes the arguments of a round outside of the clock; ``moved`` counts the bytes of
    one call, or maps the arguments to them.
    """

    def run(function, arguments, moved, rounds=ROUNDS):
        rounds_made = iter(range(rounds + 1))
        counted = []

        def setup():
            made = arguments(next(rounds_made))
            counted.append(moved(*made) if callable(moved) else moved)
            return made, {}

        benchmark.pedantic(function, setup=setup, rounds=rounds, warmup_rounds=1)  # the warm-up sets up too
        seconds = benchmark.stats.stats.median
        gbps = sorted(counted)[len(counted) // 2] / seconds / 1e9
        benchmark.extra_info["gbps"] = gbps
        _rates.append((request.node.name.removeprefix("test_"), 1e3 * seconds, gbps))

    return run


def pytest_terminal_summary(terminalreporter):
    """The figures this project goes by."""
    if not _rates:
        return
    stream = machine.stream_read_gbps()
    terminalreporter.section(f"GB/s (stream read {stream:.1f})")
    for name, ms, gbps in _rates:
        terminalreporter.line(f"{name:<48} {ms:>10.3f} ms {gbps:>8.2f} GB/s {100 * gbps / stream:>6.0f} %")
