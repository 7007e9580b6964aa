"""Many runs without data: HBM bytes over their floor and the engine bound, for tables.

Owns the rows of `moedecode neuron sweep`. Knows the public library only through
:mod:`moedecode.neuron.conformance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends.neuron.layout import padded_hidden
from ..backends.neuron.traffic import Figures
from ..formats import WeightFormat
from ..gates import invalid
from ..spec import BlockSpec
from .console import progress
from .neuron_run import Setting, run_once

__all__ = ["Row", "sweep_rows"]

DISTINCT_FROM = 8  # tokens above which the leaf that reads each distinct expert once is set beside


@dataclass(frozen=True)
class Row:
    """One run; ``public`` holds the public kernel's figures, or why there are none (None: not asked for)."""

    strategy: str
    tokens: int
    experts: int
    ours: Figures
    public: Any = None

    def as_json(self) -> dict[str, Any]:
        """The row by name."""
        p = self.public
        named: dict[str, Any] | None = {"refused": p} if isinstance(p, str) else None
        if p is not None and named is None:
            named = {
                "hbm_bytes": p.hbm_bytes,
                "hbm_ratio": p.hbm_ratio,
                "engines_us": dict(p.engines_us),
                "bottleneck": p.bottleneck,
                "bound_us": p.bound_us,
            }
        own = {"strategy": self.strategy, "tokens": self.tokens, "experts": self.experts}
        return own | self.ours.as_json() | {"public": named}


def sweep_rows(
    name: str,
    spec: BlockSpec,
    fmt: WeightFormat,
    chip: str,
    counts: Mapping[str, Sequence[int]],
    local_experts: int | None,
    public: Path | None,
) -> list[Row]:
    """Selective runs with all experts, distinct ones past 8 tokens (MX), all-expert ones with
    ``local_experts``.
    """
    runs = [(strategy, tokens) for strategy, several in counts.items() for tokens in several]
    if fmt.is_mx:
        runs += [("grouped", t) for t in counts.get("selective", ()) if t > DISTINCT_FROM]
    rows = []
    with progress() as bar:
        task = bar.add_task("running", total=len(runs))
        for strategy, tokens in runs:
            local = local_experts if strategy == "all_expert" else None
            setting = Setting(name, spec, fmt, tokens, strategy, chip, 0, local, compute=False)
            done = run_once(setting)
            theirs = None if public is None or strategy == "grouped" else _public(public, setting)
            rows.append(Row(strategy, tokens, setting.local, done.figures, theirs))
            bar.advance(task)
    return rows


PUBLIC_FORMATS = {
    WeightFormat.BF16: "bf16",
    WeightFormat.FP16: "fp16",
    WeightFormat.FP8_E4M3: "fp8_row",
    WeightFormat.MXFP8_E4M3: "mxfp8",
    WeightFormat.MXFP4: "mxfp4",
}


def _public(path: Path, setting: Setting) -> Any:
    """The public kernel's figures on the same model, or the reason why it does not run."""
    from ..neuron.conformance import BlockConfig, CheckoutError, public_block

    spec, kind = setting.spec, PUBLIC_FORMATS.get(setting.fmt)
    if kind is None:
        return f"no {setting.fmt.value}"
    e, r, padded = spec.experts, spec.router, padded_hidden(spec.hidden, setting.fmt)
    config = BlockConfig(
        model=setting.name,
        tokens=setting.tokens,
        hidden=padded,
        intermediate=e.intermediate,
        full_intermediate=e.intermediate,
        experts=r.num_experts,
        local_experts=setting.local,
        top_k=r.top_k,
        weights=kind,
        all_expert=setting.strategy == "all_expert",
        hidden_actual=spec.norm_width if padded != spec.hidden else None,
        score=r.score,
        pre_norm=r.pre_norm,
        norm_topk=r.norm_topk_prob,
        activation=e.activation,
        bias=e.bias,
        clamp=e.gate_clamp != (None, None) or e.up_clamp != (None, None),
        rank=0,
    )
    try:
        found = public_block(path, config, chip=setting.chip)
    except CheckoutError as error:
        raise invalid(
            "public", path, f"is no usable checkout ({error})", "name a checkout of nki-library"
        ) from error
    return found.refused or found
