"""Benchmark: contenders that compute the same block, timed in turn on fresh tokens.

Owns the protocol (interleaved rounds, paired ratios, distinct experts, rotated weights) and the figures.
Prints nothing; knows blocks by their public face, and other packages only as something to call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import machine
from .arrays import IO_DTYPES, Array
from .backends import Numerics
from .backends.reference import ReferenceBackend, maths
from .block import MoEBlock
from .formats import WeightFormat
from .plan import expert_bytes
from .spec import BlockSpec
from .synthetic import block_weights
from .synthetic import tokens as random_tokens
from .weights import BlockWeights

__all__ = [
    "FIXED_STRATEGIES",
    "Contender",
    "Figures",
    "Lap",
    "Laps",
    "Setting",
    "error_of",
    "figures",
    "layer_bytes",
    "measure",
    "own_block",
    "own_contenders",
    "paired_ratio",
    "profile",
    "weight_copies",
]

FIXED_STRATEGIES = ("selective", "grouped", "all_expert")
DTYPE = "bfloat16"
ROUNDS = 21
MIN_ROUNDS = 3
SECONDS_PER_CELL = 4.0  # a contender stops at a token count after this long, but not before MIN_ROUNDS
CHECKED_TOKENS = 3
SETTLE_SECONDS = 0.02  # threads of the contender before stop spinning within this time
# A call follows others for this long, as a layer follows layers in a decoder. One call is not enough: a
# virtual core that slept takes milliseconds to come back, and the caller does its work meanwhile.
WAKE_SECONDS = 0.02
# Weights walked between two uses of the same copy. The last-level cache that a virtual machine reports is
# shared with neighbours whose share is unknown: a fixed distance says more than a multiple of the report.
ROTATION_BYTES = 1_000_000_000
MEMORY_SHARE = 0.6  # of the available memory that copies of weights may take


@dataclass(frozen=True)
class Setting:
    """What every contender computes, and what is asked of ours."""

    preset: str
    spec: BlockSpec
    fmt: WeightFormat
    precision: str = "a16"
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Contender:
    """Someone who computes the block.

    Each of ``calls`` takes hidden states ``[T, H]`` of ``dtype`` and does the same work on its own copy of
    the weights; they are used in turn, so that no copy stays in a cache.
    """

    name: str
    calls: Sequence[Callable[[Array], object]]
    dtype: str = DTYPE
    most_tokens: int | None = None
    """It sits out calls with more tokens than this."""

    def takes(self, count: int) -> bool:
        """Whether it takes part at this token count."""
        return self.most_tokens is None or count <= self.most_tokens


@dataclass
class Lap:
    """The times of one contender at one token count: seconds of each round it took part in."""

    seconds: dict[int, float] = field(default_factory=dict)


@dataclass
class Laps:
    """All times of one run, and what holds for whole rounds."""

    names: tuple[str, ...]
    tokens: tuple[int, ...]
    cells: dict[tuple[str, int], Lap]
    stream_gbps: list[float] = field(default_factory=list)
    """Stream-read bandwidth, measured at the start of each round."""
    distinct: dict[tuple[int, int], int] = field(default_factory=dict)
    """Distinct experts that (token count, round) touches; the same for every contender."""


@dataclass(frozen=True)
class Figures:
    """One row: a contender of ours at one token count. ``peers``: name -> (ms, their time over ours)."""

    tokens: int
    strategy: str
    rounds: int
    ms_median: float
    ms_p10: float
    ms_p90: float
    gbps: float
    stream_gbps: float
    gflops: float
    peers: dict[str, tuple[float, float]]

    @property
    def stream_ratio(self) -> float:
        """Bandwidth of distinct expert bytes over that of reading memory in order."""
        return self.gbps / self.stream_gbps

    @property
    def floor_ms(self) -> float:
        """What reading the distinct experts alone takes at the bandwidth of the stream."""
        return self.ms_median * self.stream_ratio

    def as_json(self, setting: Setting) -> dict[str, object]:
        """The row of a report."""
        return {
            "preset": setting.preset,
            "format": setting.fmt.value,
            "precision": setting.precision,
            "tokens": self.tokens,
            "strategy": self.strategy,
            "threads": setting.threads,
            "ms_median": self.ms_median,
            "ms_p90": self.ms_p90,
            "gbps": self.gbps,
            "stream_gbps": self.stream_gbps,
            "stream_ratio": self.stream_ratio,
            "peers": {name: {"ms": ms, "speedup": speedup} for name, (ms, speedup) in self.peers.items()},
        }


# ------------------------------------------------------------------ what is run


def layer_bytes(spec: BlockSpec, fmt: WeightFormat) -> int:
    """Stored bytes of all experts of one block."""
    return spec.router.num_experts * expert_bytes(spec.experts, spec.hidden, fmt) + _shared_bytes(spec, fmt)


def weight_copies(size: int, contenders: int, available: int | None) -> int:
    """How many copies of ``size`` bytes each of ``contenders`` rotates through.

    Enough that ``ROTATION_BYTES`` lie between two uses of a copy, and two, so that the call that wakes
    threads warms no weights of the timed one; as far as memory allows, but one at least.
    """
    wanted = max(-(-ROTATION_BYTES // size), 2)
    if available is not None:
        wanted = min(wanted, int(MEMORY_SHARE * available) // (size * contenders))
    return max(wanted, 1)


def own_contenders(
    setting: Setting,
    strategies: Sequence[str],
    copies: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Contender]:
    """Our block once for each strategy, every one with ``copies`` packings of the same random weights."""
    made = []
    for strategy in strategies:
        calls = []
        for _ in range(copies):
            calls.append(_call(own_block(setting, strategy)))
            advance()
        made.append(Contender(strategy, calls))
    return made


def own_block(setting: Setting, strategy: str) -> MoEBlock:
    """The block of a setting with the random weights that every contender has."""
    return MoEBlock(
        setting.spec,
        block_weights(setting.spec, setting.fmt, dtype=DTYPE),
        strategy=strategy,
        precision=setting.precision,
        threads=setting.threads,
    )


def _call(block: MoEBlock) -> Callable[[Array], object]:
    """The block writing into an output that is there already, as a decoder would call it."""
    outputs: dict[int, Array] = {}

    def run(hidden: Array) -> object:
        out = outputs.setdefault(len(hidden), np.empty_like(hidden))
        return block(hidden, out=out)

    return run


def measure(
    setting: Setting,
    contenders: Sequence[Contender],
    tokens: Sequence[int],
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    settle: Callable[[], None] = lambda: time.sleep(SETTLE_SECONDS),
    wake_seconds: float = WAKE_SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> Laps:
    """Time every contender at every token count, in turn, on the same fresh tokens.

    A round reads memory in order, then visits the token counts; at each of them every contender runs once, in
    an order that rotates. Before its timed call a contender's threads are woken by calls with one token on
    its previous copy of the weights, for ``wake_seconds`` and at least one. A contender that uses up
    ``SECONDS_PER_CELL`` leaves out later rounds.
    """
    laps = Laps(
        tuple(c.name for c in contenders),
        tuple(tokens),
        {(c.name, count): Lap() for c in contenders for count in tokens},
    )
    router = block_weights(setting.spec, setting.fmt, dtype=DTYPE)
    turns = {c.name: 0 for c in contenders}
    for contender in contenders:
        _warm(contender, setting.spec, tokens)
    for number in range(rounds):
        laps.stream_gbps.append(machine.stream_read_gbps(setting.threads))
        for count in tokens:
            hidden = random_tokens(count, setting.spec.hidden, DTYPE, seed=1000 * (number + 1) + count)
            wake = random_tokens(1, setting.spec.hidden, DTYPE, seed=1_000_000 + 1000 * number + count)
            laps.distinct[count, number] = len(np.unique(_routed(hidden, router, setting.spec)[1]))
            for place in range(len(contenders)):
                contender = contenders[(number + place) % len(contenders)]
                lap = laps.cells[contender.name, count]
                early = len(lap.seconds) < MIN_ROUNDS or sum(lap.seconds.values()) < SECONDS_PER_CELL
                if early and contender.takes(count):
                    settle()
                    turns[contender.name] += 1
                    turn = turns[contender.name]
                    lap.seconds[number] = _timed(contender, turn, hidden, wake, clock, wake_seconds)
                advance()
    return laps


def _warm(contender: Contender, spec: BlockSpec, tokens: Sequence[int]) -> None:
    """Every copy and every token count once, uncounted."""
    for call in contender.calls:
        call(random_tokens(1, spec.hidden, DTYPE, seed=999_999).astype(IO_DTYPES[contender.dtype]))
    for count in filter(contender.takes, tokens):
        hidden = random_tokens(count, spec.hidden, DTYPE, seed=999_998)
        contender.calls[0](hidden.astype(IO_DTYPES[contender.dtype]))


def _timed(
    contender: Contender,
    turn: int,
    hidden: Array,
    wake: Array,
    clock: Callable[[], float],
    wake_seconds: float,
) -> float:
    """Seconds of one call that follows others, as it does in a decoder."""
    calls, dtype = contender.calls, IO_DTYPES[contender.dtype]
    hidden, wake = hidden.astype(dtype), wake.astype(dtype)
    previous, call = calls[(turn - 1) % len(calls)], calls[turn % len(calls)]
    awake_at = clock() + wake_seconds
    previous(wake)
    while clock() < awake_at:
        previous(wake)
    start = clock()
    call(hidden)
    return clock() - start


def _routed(hidden: Array, weights: BlockWeights, spec: BlockSpec) -> tuple[Array, Array]:
    """Logits ``[T, E]`` and expert ids ``[T, K]`` of hidden states, in float64."""
    normed = maths.rmsnorm(hidden.astype(np.float32), weights.gamma, spec.eps, spec.norm_width)
    r = maths.rounded(normed, hidden.dtype)
    logits, index, _ = maths.route(
        r, weights.router, weights.router_bias, weights.selection_bias, spec.router
    )
    return logits, index


# ------------------------------------------------------------------ what it means


def figures(laps: Laps, setting: Setting, ours: Sequence[str], taken: dict[int, str]) -> list[Figures]:
    """A row for each contender of ours and token count; ``taken`` names the strategy "auto" took at each."""
    spec, fmt = setting.spec, setting.fmt
    size, shared = expert_bytes(spec.experts, spec.hidden, fmt), _shared_bytes(spec, fmt)
    stream = float(np.median(laps.stream_gbps))
    rows = []
    for count in laps.tokens:
        for name in ours:
            lap = laps.cells[name, count]
            seconds = np.array(list(lap.seconds.values()))
            moved = [laps.distinct[count, number] * size + shared for number in lap.seconds]
            peers = {
                peer: (
                    1e3 * float(np.median(list(laps.cells[peer, count].seconds.values()))),
                    paired_ratio(laps.cells[peer, count], lap),
                )
                for peer in laps.names
                if peer not in ours and laps.cells[peer, count].seconds
            }
            rows.append(
                Figures(
                    tokens=count,
                    strategy=taken[count] if name == "auto" else name,
                    rounds=len(seconds),
                    ms_median=1e3 * float(np.median(seconds)),
                    ms_p10=1e3 * float(np.percentile(seconds, 10)),
                    ms_p90=1e3 * float(np.percentile(seconds, 90)),
                    gbps=float(np.median(np.array(moved) / seconds)) / 1e9,
                    stream_gbps=stream,
                    gflops=float(np.median(_flops(spec, count) / seconds)) / 1e9,
                    peers=peers,
                )
            )
    return rows


def paired_ratio(numerator: Lap, denominator: Lap) -> float:
    """Median of the ratios of two contenders' times over the rounds that both took part in."""
    both = sorted(numerator.seconds.keys() & denominator.seconds.keys())
    return float(np.median([numerator.seconds[number] / denominator.seconds[number] for number in both]))


def _flops(spec: BlockSpec, tokens: int) -> float:
    """Two for each multiply-add that the result needs."""
    shared = 0 if spec.shared is None else spec.shared.intermediate
    widths = spec.router.top_k * spec.experts.intermediate + shared
    return 2.0 * tokens * spec.hidden * (3 * widths + spec.router.num_experts)


def _shared_bytes(spec: BlockSpec, fmt: WeightFormat) -> int:
    return 0 if spec.shared is None else expert_bytes(spec.shared, spec.hidden, fmt)


# ------------------------------------------------------------------ the job is the same, and where time goes


def error_of(
    calls: Sequence[Callable[[Array], object]], dtype: str, spec: BlockSpec, weights: BlockWeights
) -> float:
    """Worst relative L2 between what ``calls`` give and the float64 reference on the weights that they hold.

    Few tokens, as every expert they touch costs a float64 pass, and such as no rounding sends elsewhere.
    """
    hidden = _clear_tokens(weights, spec).astype(IO_DTYPES[dtype])
    reference = ReferenceBackend().block(
        spec, weights, weights.experts, weights.shared, Numerics("a16", None), 1
    )
    want = reference.values(hidden, None, "grouped", 0).out
    size = float(np.linalg.norm(want))
    outputs = [np.asarray(call(hidden)).astype(np.float64) for call in calls]
    # NaN must not pass for the smallest error
    return float(np.max([np.linalg.norm(got - want) / size for got in outputs]))


def _clear_tokens(weights: BlockWeights, spec: BlockSpec) -> Array:
    """The tokens of many whose chosen and refused logits lie furthest apart."""
    hidden = random_tokens(8 * CHECKED_TOKENS, spec.hidden, DTYPE, seed=7)
    logits, _ = _routed(hidden, weights, spec)
    ordered = np.sort(np.pad(logits, ((0, 0), (1, 0)), constant_values=-np.inf), axis=-1)
    gap = ordered[:, -spec.router.top_k] - ordered[:, -spec.router.top_k - 1]
    return hidden[np.argsort(-gap, kind="stable")[:CHECKED_TOKENS]]


def profile(block: MoEBlock, hidden_size: int, tokens: int, calls: int = 15) -> dict[str, list[float]]:
    """Seconds of one call with ``tokens`` tokens by stage and thread: the median over ``calls``."""
    found: dict[str, list[list[float]]] = {}
    for number in range(-1, calls):  # the first call warms up
        stages = block.profile(random_tokens(tokens, hidden_size, DTYPE, seed=2_000_000 + number))
        if number >= 0:
            for stage, seconds in stages.items():
                found.setdefault(stage, []).append(seconds)
    return {stage: np.median(np.array(each), axis=0).tolist() for stage, each in found.items()}
