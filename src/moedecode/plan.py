"""Deciding before doing: which leaf and strategy a call takes, why, what it moves, how long it should take.

Pure: reads a spec, a backend's Capabilities and CostTable, and numbers. Touches no arrays, runs nothing.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from .formats import WeightFormat
from .gates import require, unsupported
from .spec import STRATEGIES, BlockSpec, ExpertAffinityScaleMode, ExpertSpec

__all__ = ["Capabilities", "CostTable", "Plan", "Residency", "choose_strategy", "leaf_name", "make_plan"]

TEXT_WIDTH = 80
REASON_INDENT = " " * 9
IO_BYTES = 2  # the plan counts 16-bit activations; a float32 caller moves twice that for inputs and outputs


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; what is not listed is refused before any work."""

    backend: str
    formats: frozenset[WeightFormat]
    strategies: frozenset[str]
    precisions: frozenset[str]
    shared_expert: bool
    scale_modes: frozenset[ExpertAffinityScaleMode]
    resident: str
    """Where intermediates live between the stages: "cache", "SBUF", "process memory"."""
    grouped_formats: frozenset[WeightFormat] | None = None
    """Formats that the "grouped" strategy takes; None: all of them."""

    def strategies_for(self, fmt: WeightFormat) -> frozenset[str]:
        """The strategies that weights of ``fmt`` can take."""
        grouped = self.grouped_formats is None or fmt in self.grouped_formats
        return self.strategies if grouped else self.strategies - {"grouped"}


@dataclass(frozen=True)
class CostTable:
    """Rates of a machine. Seconds = max(bytes / bandwidth, multiply-adds / rate) + fixed."""

    bytes_per_second: float
    macs_per_second: float
    decodes_per_second: float
    """Weights decoded per second; an expert is decoded once per group of tokens that shares it."""
    seconds_per_call: float


@dataclass(frozen=True)
class Residency:
    """One row of the residency table."""

    tensor: str
    shape: str
    where: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What a call will do. ``str(plan)`` explains it in at most 80 columns."""

    backend: str
    tokens: int
    leaf: str
    strategy: str
    why: str
    expert_reads: float
    """Expected expert decodes of one call (an expert read for two tokens apart counts twice)."""
    bytes_floor: int
    """Expected bytes that cross memory once: distinct experts, router, shared expert, inputs and outputs."""
    predicted_seconds: float
    residency: tuple[Residency, ...]

    def __str__(self) -> str:
        return "\n".join([self.summary(), "", *self._table()] if self.residency else [self.summary()])

    def summary(self) -> str:
        """The text without the residency table."""
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        lines = [
            f"{self.backend}: {tokens}, strategy {self.strategy}, leaf {self.leaf}",
            *self._reason(),
            f"moves    {self._traffic()}",
            f"expects  {_number(self.expert_reads)} expert reads, {_time(self.predicted_seconds)}",
        ]
        return "\n".join(lines)

    def _reason(self) -> list[str]:
        first, *rest = self.why.split("; ", 1)
        lines = textwrap.wrap(f"why      {first}", TEXT_WIDTH, subsequent_indent=REASON_INDENT)
        for clause in rest:
            lines += textwrap.wrap(REASON_INDENT + clause, TEXT_WIDTH, subsequent_indent=REASON_INDENT)
        return lines

    def _table(self) -> list[str]:
        """The residency table; columns as wide as their cells, bytes to the right."""
        cells = [("tensor", "shape", "lives in", "bytes", "note")]
        cells += [(r.tensor, r.shape, r.where, _bytes(r.bytes), r.note) for r in self.residency]
        widths = [max(len(row[column]) for row in cells) for column in range(5)]
        line = "  ".join(f"{{:{'>' if column == 3 else '<'}{width}}}" for column, width in enumerate(widths))
        return [line.format(*row).rstrip() for row in cells]

    def _traffic(self) -> str:
        places = dict.fromkeys(r.where for r in self.residency)
        sums = {place: sum(r.bytes for r in self.residency if r.where == place) for place in places}
        sums.pop("memory", None)
        kept = "".join(f", {_bytes(count)} stays in {place}" for place, count in sums.items())
        return f"{_bytes(self.bytes_floor)} through memory{kept}"


def leaf_name(strategy: str, fmt: WeightFormat) -> str:
    """The leaf of the 2x2 dispatch (strategy x MX or not); "grouped" is the third row."""
    return f"{strategy}_mx" if fmt.is_mx else strategy


def expert_bytes(spec: ExpertSpec, hidden: int, fmt: WeightFormat) -> int:
    """Stored bytes of one expert: three projections with their scales, and its biases in float32."""
    bias = 4 * (2 * spec.intermediate + hidden) if spec.bias else 0
    return int(3 * hidden * spec.intermediate * fmt.bits_with_scale / 8) + bias


def expected_distinct(tokens: int, local: int, experts: int, top_k: int) -> float:
    """Expected distinct local experts touched by ``tokens`` tokens under uniform routing."""
    return local * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True)
class _Estimate:
    reads: float
    seconds: float


def _estimate(
    strategy: str, spec: BlockSpec, tokens: int, local: int, fmt: WeightFormat, costs: CostTable
) -> _Estimate:
    experts, k = spec.router.num_experts, spec.router.top_k
    distinct = expected_distinct(tokens, local, experts, k)
    pairs = tokens * k * local / experts
    reads, seen = {
        "selective": (pairs, pairs),
        "grouped": (distinct, pairs),
        "all_expert": (float(local), float(tokens * local)),
    }[strategy]
    if tokens == 0:
        return _Estimate(0.0, costs.seconds_per_call)
    weights = 3 * spec.hidden * spec.experts.intermediate
    memory = reads * expert_bytes(spec.experts, spec.hidden, fmt) / costs.bytes_per_second
    arithmetic = seen * weights / costs.macs_per_second + reads * weights / costs.decodes_per_second
    return _Estimate(reads, max(memory, arithmetic) + costs.seconds_per_call)


def choose_strategy(
    requested: str,
    spec: BlockSpec,
    tokens: int,
    local: int,
    fmt: WeightFormat,
    able: Capabilities,
    costs: CostTable | None,
) -> tuple[str, str]:
    """The strategy a call takes and the reason, as one sentence. ``costs`` are read only for "auto"."""
    known = f"choose one of {', '.join(STRATEGIES)}"
    require(requested in STRATEGIES, "strategy", repr(requested), "is not known", known)
    strategies = able.strategies_for(fmt)
    some = "" if strategies == able.strategies else f" for {fmt.value}"
    has = f"the {able.backend} backend has {', '.join(sorted(strategies))}{some}"
    if requested != "auto":
        if requested not in strategies:
            raise unsupported("strategy", repr(requested), has, "use one of those")
        return requested, "asked for"
    if costs is None:
        raise TypeError("strategy 'auto' needs costs")
    candidates = [s for s in ("selective", "grouped", "all_expert") if s in strategies]
    if spec.affinity_scale is ExpertAffinityScaleMode.NO_SCALE:
        # there all_expert is another sum, not another way to the same one
        candidates = [s for s in candidates if s != "all_expert"]
    if not candidates:
        rule = f"{has}, which NO_SCALE never takes unasked"
        raise unsupported("strategy", "'auto'", rule, "ask for it by name")
    seconds = {s: _estimate(s, spec, tokens, local, fmt, costs).seconds for s in candidates}
    best = min(candidates, key=lambda s: seconds[s])  # the first of equals: the simplest
    others = "".join(f"; {s} {_time(seconds[s])}" for s in candidates if s != best)
    distinct = expected_distinct(tokens, local, spec.router.num_experts, spec.router.top_k)
    pairs = tokens * spec.router.top_k * local / spec.router.num_experts
    expected = f"{_time(seconds[best])} for {_number(distinct)} distinct experts in {_number(pairs)} pairs"
    return best, expected + others


def make_plan(
    spec: BlockSpec,
    tokens: int,
    fmt: WeightFormat,
    able: Capabilities,
    costs: CostTable,
    *,
    strategy: str = "auto",
    local_experts: int | None = None,
) -> Plan:
    """Plan one call of ``tokens`` tokens on a backend described by ``able`` and ``costs``.

    ``local_experts`` is E_L, the experts on this rank (None: all). Raises
    :class:`~moedecode.gates.UnsupportedConfig` when the backend lacks the strategy.
    """
    require(tokens >= 0, "tokens", tokens, "must not be negative", "count the new tokens of the call")
    local = spec.router.num_experts if local_experts is None else local_experts
    chosen, why = choose_strategy(strategy, spec, tokens, local, fmt, able, costs)
    estimate = _estimate(chosen, spec, tokens, local, fmt, costs)
    rows = _residency(spec, tokens, fmt, able.resident, chosen, local)
    return Plan(
        backend=able.backend,
        tokens=tokens,
        leaf=leaf_name(chosen, fmt),
        strategy=chosen,
        why=why,
        expert_reads=estimate.reads,
        bytes_floor=sum(r.bytes for r in rows if r.where == "memory"),
        predicted_seconds=estimate.seconds,
        residency=rows,
    )


def _residency(
    spec: BlockSpec, t: int, fmt: WeightFormat, chip: str, strategy: str, local: int
) -> tuple[Residency, ...]:
    h, i, e, k = spec.hidden, spec.experts.intermediate, spec.router.num_experts, spec.router.top_k
    touched = local if strategy == "all_expert" else expected_distinct(t, local, e, k)
    pairs = t * (local if strategy == "all_expert" else k)
    rows = [
        Residency("inp", f"[{t}, {h}]", "memory", t * h * IO_BYTES, "read once"),
        Residency("normed hidden", f"[{t}, {h}]", chip, t * h * 4),
        Residency("router weights", f"[{e}, {h}]", "memory", e * h * 2, "read once"),
        Residency("router logits", f"[{t}, {e}]", chip, t * e * 4, "on request"),
        Residency("expert index", f"[{t}, {k}]", chip, t * k * 4),
        Residency("affinities", f"[{t}, {e}]", chip, t * e * 4, "on request"),
        Residency("expert weights", f"{_number(touched)} x 3 x [{h}, {i}]", "memory",
                  int(touched * expert_bytes(spec.experts, h, fmt)), fmt.value),
        Residency("intermediate h", f"[{pairs}, {i}]", chip, pairs * i * 4),
    ]  # fmt: skip
    if spec.shared is not None:
        s = spec.shared
        shape = f"3 x [{h}, {s.intermediate}]"
        rows.append(Residency("shared expert", shape, "memory", expert_bytes(s, h, fmt), "read once"))
    rows.append(Residency("out", f"[{t}, {h}]", "memory", t * h * IO_BYTES, "written once"))
    return tuple(rows) if t else ()


def _number(value: float) -> str:
    """Three digits at least, never an exponent."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{_three_digits(seconds)} s" if seconds >= 1 else f"{_three_digits(seconds * 1e3)} ms"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count} B"


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}"
