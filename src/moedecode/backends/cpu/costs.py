"""The cost table of the cpu backend: what this machine reads and multiplies per second, measured once.

Owns the calibration (about a third of a second per format and precision) and its file in the user's cache
folder. Issues no work after that.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ... import _native
from ...formats import WeightFormat
from ...formats.block_order import contiguous
from ...plan import CostTable

__all__ = ["machine_costs"]

WIDTH = 512  # hidden and intermediate of the expert that is timed: a few hundred kB, which stay in the cache
MANY = 32  # tokens of the long call; the short one has one
REPEATS = 20  # the best counts: what else runs on the machine can only slow a call down
STREAM_MEGABYTES = 256
SECONDS_PER_CALL = 14e-6  # a block of H = I = 256 at T = 1 with `out=`, two threads, measured on two cores
VERSION = 1  # of the file: raise it when the meaning of a rate changes


@functools.cache
def machine_costs(fmt: WeightFormat, precision: str, isa: str, threads: int) -> CostTable:
    """Rates for weights of ``fmt`` under ``precision``: known to this process, to the file, or measured."""
    path, key = cache_file(), f"{fmt.value} {precision} {isa} {threads} {_cpu_name()} v{VERSION}"
    known = _read(path)
    if key not in known:
        known[key] = _measured(fmt, precision, threads)
        _write(path, known)
    bytes_per_second, macs_per_second, decodes_per_second = known[key]
    return CostTable(bytes_per_second, macs_per_second, decodes_per_second, SECONDS_PER_CALL)


def cache_file() -> Path:
    """Where calibrations are kept: under MOEDECODE_CACHE_DIR, else XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("MOEDECODE_CACHE_DIR") or f"{base}/moedecode") / "costs.json"


def _measured(fmt: WeightFormat, precision: str, threads: int) -> list[float]:
    bytes_per_second = 1e9 * _native.stream_read_gbps(STREAM_MEGABYTES, threads, 3)
    weights = 3 * WIDTH * WIDTH
    experts, spec = _expert(fmt), _spec(precision)
    short, long = _best([_call(experts, spec, tokens, threads) for tokens in (1, MANY)])
    per_token = max((long - short) / (MANY - 1), 1e-9)
    once = max(short - per_token, 1e-9)  # what a token does not explain: decoding the weights
    return [bytes_per_second, weights / per_token, weights / once]


def _expert(fmt: WeightFormat) -> _native.PackedExperts:
    order = contiguous(WIDTH).gather
    kind = _native.ScaleKind.e8m0 if fmt.is_mx else _native.ScaleKind.none
    packed = _native.PackedExperts(1, WIDTH, WIDTH, getattr(_native.Format, fmt.value), kind, order, order)
    random = np.random.default_rng(0)
    if fmt is WeightFormat.MXFP4:
        codes = random.integers(0, 256, (WIDTH, WIDTH // 2), np.uint8)
    else:  # values of moderate size in every format: arithmetic on subnormals is another speed
        codes = random.normal(size=(WIDTH, WIDTH)).astype(fmt.element).view(f"u{fmt.element.itemsize}")
    scale = np.full((WIDTH, WIDTH // 32), 122, np.uint8) if fmt.is_mx else None
    for projection in ("gate", "up", "down"):
        packed.set(0, getattr(_native.Projection, projection), codes, scale, None, None, 1)
    return packed


def _spec(precision: str) -> _native.ExpertSpec:
    unbounded = (-np.inf, np.inf, -np.inf, np.inf)
    scale, rounding = _native.AffinityScale.POST_SCALE, getattr(_native.Precision, precision)
    return _native.ExpertSpec(_native.Activation.silu, 1.0, 0.0, *unbounded, scale, rounding, False)


def _call(
    experts: _native.PackedExperts, spec: _native.ExpertSpec, tokens: int, threads: int
) -> Callable[[], None]:
    x = np.random.default_rng(1).normal(size=(tokens, WIDTH)).astype(np.float32)
    index, affinities, out = (
        np.zeros((tokens, 1), np.int32),
        np.ones((tokens, 1), np.float32),
        np.empty_like(x),
    )
    f32, grouped = _native.IoType.float32, _native.Strategy.grouped

    def call() -> None:
        _native.run_experts(experts, spec, f32, x, index, affinities, grouped, 0, f32, out, threads)

    return call


def _best(calls: list[Callable[[], None]]) -> list[float]:
    """The shortest time of each call in seconds; they take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(REPEATS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: Path) -> dict[str, list[float]]:
    """What the file says; nothing if it is absent, unreadable or not ours."""
    try:
        found = json.loads(path.read_text())
        return {str(k): [float(x) for x in v] for k, v in found.items() if len(v) == 3 and min(v) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: dict[str, list[float]]) -> None:
    """All or nothing, so that two processes cannot mix files. What cannot be written is not kept."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(known, file, indent=1)
        os.replace(name, path)
