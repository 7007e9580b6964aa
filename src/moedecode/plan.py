"""Deciding before doing: which leaf and strategy a call takes, why, what it moves and how long it should take.

Pure: reads a spec, a backend's Capabilities and CostTable, and numbers. Touches no arrays, runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from .formats import WeightFormat
from .gates import require, unsupported
from .spec import STRATEGIES, BlockSpec, ExpertAffinityScaleMode, ExpertSpec

__all__ = ["Capabilities", "CostTable", "Plan", "Residency", "choose_strategy", "leaf_name", "make_plan"]

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
    """What a call will do. ``str(plan)`` is a table of at most 80 columns."""

    backend: str
    tokens: int
    leaf: str
    strategy: str
    why: str
    expert_reads: float
    """Expected expert decodes of one call (an expert read for two tokens apart counts twice)."""
    bytes_floor: int
    """Expected bytes that must cross memory once: distinct experts, router, shared expert, inputs and outputs."""
    predicted_seconds: float
    residency: tuple[Residency, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {self.tokens} tokens, leaf {self.leaf}, strategy {self.strategy}",
            f"  why: {self.why}",
            f"  bytes floor {_bytes(self.bytes_floor)}, predicted {self.predicted_seconds * 1e3:.3g} ms",
            f"  {'tensor':<18} {'shape':<22} {'lives in':<14} {'bytes':>10}  note",
        ]
        lines += [f"  {r.tensor:<18} {r.shape:<22} {r.where:<14} {_bytes(r.bytes):>10}  {r.note}".rstrip() for r in self.residency]
        return "\n".join(lines)


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
    touched = local if strategy == "all_expert" else distinct
    memory = touched * expert_bytes(spec.experts, spec.hidden, fmt) / costs.bytes_per_second
    arithmetic = seen * weights / costs.macs_per_second + reads * weights / costs.decodes_per_second
    return _Estimate(reads, max(memory, arithmetic) + costs.seconds_per_call)


def choose_strategy(
    requested: str, spec: BlockSpec, tokens: int, local: int, fmt: WeightFormat, able: Capabilities, costs: CostTable
) -> tuple[str, str]:
    """The strategy a call takes and the reason, as one sentence."""
    require(requested in STRATEGIES, "strategy", repr(requested), "is not known", f"choose one of {', '.join(STRATEGIES)}")
    if requested != "auto":
        if requested not in able.strategies:
            raise unsupported(
                "strategy", repr(requested), f"the {able.backend} backend has {', '.join(sorted(able.strategies))}", "use one of those"
            )
        return requested, "asked for"
    candidates = [s for s in ("selective", "grouped", "all_expert") if s in able.strategies]
    no_scale = spec.affinity_scale is ExpertAffinityScaleMode.NO_SCALE
    if no_scale:  # there all_expert is another sum, not another way to the same one
        candidates.remove("all_expert")
    seconds = {s: _estimate(s, spec, tokens, local, fmt, costs).seconds for s in candidates}
    best = min(candidates, key=lambda s: seconds[s])  # the first of equals: the simplest
    others = ", ".join(f"{s} {seconds[s] * 1e3:.3g} ms" for s in candidates if s != best)
    distinct = expected_distinct(tokens, local, spec.router.num_experts, spec.router.top_k)
    pairs = tokens * spec.router.top_k * local / spec.router.num_experts
    why = f"{seconds[best] * 1e3:.3g} ms expected for ~{distinct:.3g} distinct experts of {pairs:.3g} pairs; {others}"
    return best, why


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


def _residency(spec: BlockSpec, t: int, fmt: WeightFormat, chip: str, strategy: str, local: int) -> tuple[Residency, ...]:
    h, i, e, k = spec.hidden, spec.experts.intermediate, spec.router.num_experts, spec.router.top_k
    touched = local if strategy == "all_expert" else expected_distinct(t, local, e, k)
    pairs = t * (local if strategy == "all_expert" else k)
    rows = [
        Residency("inp", f"[{t}, {h}]", "memory", t * h * IO_BYTES, "read once"),
        Residency("normed hidden", f"[{t}, {h}]", chip, t * h * 4, "router and experts"),
        Residency("router weights", f"[{e}, {h}]", "memory", e * h * 2, "read once"),
        Residency("router logits", f"[{t}, {e}]", chip, t * e * 4, "memory if asked for"),
        Residency("expert index", f"[{t}, {k}]", chip, t * k * 4, ""),
        Residency("affinities", f"[{t}, {e}]", chip, t * e * 4, "memory if asked for"),
        Residency("expert weights", f"{touched:.3g} x 3 x [{h}, {i}]", "memory",
                  int(touched * expert_bytes(spec.experts, h, fmt)), fmt.value),
        Residency("intermediate h", f"[{pairs}, {i}]", chip, pairs * i * 4, ""),
    ]  # fmt: skip
    if spec.shared is not None:
        s = spec.shared
        rows.append(Residency("shared expert", f"3 x [{h}, {s.intermediate}]", "memory", expert_bytes(s, h, fmt), "read once"))
    rows.append(Residency("out", f"[{t}, {h}]", "memory", t * h * IO_BYTES, "written once"))
    return tuple(rows) if t else ()


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
