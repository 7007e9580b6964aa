"""`moedecode neuron run` and `sweep`: the megakernel on the model of the machine, and what the machine saw.

Owns options, the order of work and the JSON; tables and pictures are :mod:`.neuron_tables`'s and
:mod:`.neuron_plot`'s, a run is :mod:`.neuron_run`'s.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..gates import MissingExtra, MoEDecodeError, require
from ..presets import presets
from ..spec import BlockSpec, ExpertSpec
from .plan import FormatOption, PresetOption, parse_format, parse_tokens

__all__ = ["app"]

app = typer.Typer(
    help="The Trainium megakernel on a model of the machine.", no_args_is_help=True, add_completion=False
)

ChipOption = Annotated[str, typer.Option(help="trn2 or trn3; MX needs trn3.")]
ShardOption = Annotated[int, typer.Option(help="Tensor-parallel shards of I; this rank holds one.")]
HiddenOption = Annotated[int | None, typer.Option(help="H, in place of the preset's.")]
IntermediateOption = Annotated[int | None, typer.Option(help="I before sharding, in place of the preset's.")]
ExpertsOption = Annotated[int | None, typer.Option(help="Experts, in place of the preset's.")]
TopKOption = Annotated[int | None, typer.Option(help="Experts per token, in place of the preset's.")]


@app.command()
def run(
    preset: PresetOption = "gpt-oss-120b",
    tokens: Annotated[int, typer.Option(help="New tokens of the call, T.")] = 1,
    fmt: FormatOption = "mxfp4",
    chip: ChipOption = "trn3",
    shard: ShardOption = 1,
    all_expert: Annotated[
        bool, typer.Option("--all-expert", help="Every local expert sees every token.")
    ] = False,
    distinct: Annotated[bool, typer.Option("--distinct", help="Read each touched expert once (MX).")] = False,
    rank: Annotated[int, typer.Option(help="Expert-parallel rank.")] = 0,
    local_experts: Annotated[int | None, typer.Option(help="Experts on this rank (all without it).")] = None,
    hidden: HiddenOption = None,
    intermediate: IntermediateOption = None,
    experts: ExpertsOption = None,
    top_k: TopKOption = None,
    ledger_only: Annotated[bool, typer.Option("--ledger-only", help="Addresses and costs, no data.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures, as PNG.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
) -> None:
    """Run one block on the model and print error, HBM ledger, residency, peaks and engine bounds."""
    from . import neuron_tables  # the machine and its kernels load when they are asked for
    from .neuron_run import Setting, run_once

    if plot is not None:
        _require_matplotlib()
    spec = sharded(shaped(presets[preset], hidden, intermediate, experts, top_k), shard)
    require(tokens >= 1, "tokens", tokens, "there is nothing to run", "use at least 1")
    require(
        not (all_expert and distinct), "distinct", True, "belongs to selective mode", "leave out one of them"
    )
    strategy = "all_expert" if all_expert else "grouped" if distinct else "selective"
    setting = Setting(
        preset, spec, parse_format(fmt), tokens, strategy, chip, rank, local_experts, not ledger_only
    )
    done = run_once(setting)
    if timeline is not None:
        _write(timeline, "timeline", json.dumps(done.report.timeline.trace()))
    if json_file is not None:
        _write(json_file, "json", json.dumps(done.as_json(setting, shard), indent=2) + "\n")
    if plot is not None:
        from .neuron_plot import draw

        draw(plot, setting, done)
    neuron_tables.print_run(setting, shard, done)
    if done.error is not None and not done.passed:
        raise typer.Exit(1)


@app.command()
def sweep(
    preset: PresetOption = "gpt-oss-120b",
    selective: Annotated[str, typer.Option(help="Token counts of selective runs, or none.")] = "1,4,8,128",
    all_expert: Annotated[
        str, typer.Option(help="Token counts of all-expert runs, or none.")
    ] = "4,32,128,256",
    fmt: FormatOption = "mxfp4",
    chip: ChipOption = "trn3",
    shard: ShardOption = 1,
    local_experts: Annotated[int | None, typer.Option(help="Local experts of all-expert runs.")] = None,
    hidden: HiddenOption = None,
    intermediate: IntermediateOption = None,
    experts: ExpertsOption = None,
    top_k: TopKOption = None,
    public: Annotated[Path | None, typer.Option(help="A checkout of nki-library to set beside.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows.")] = None,
) -> None:
    """Print HBM bytes over their floor and the engine bound over token counts, without data
    (docs/neuron.md).
    """
    from . import neuron_tables
    from .neuron_sweep import sweep_rows

    spec = sharded(shaped(presets[preset], hidden, intermediate, experts, top_k), shard)
    counts = {"selective": _counts(selective), "all_expert": _counts(all_expert)}
    rows = sweep_rows(preset, spec, parse_format(fmt), chip, counts, local_experts, public)
    neuron_tables.print_sweep(preset, spec, shard, chip, fmt, rows, beside=public is not None)
    if json_file is not None:
        _write(json_file, "json", json.dumps([row.as_json() for row in rows], indent=2) + "\n")


def shaped(
    spec: BlockSpec, hidden: int | None, intermediate: int | None, experts: int | None, top_k: int | None
) -> BlockSpec:
    """The preset with other sizes where they are named."""
    e = spec.router.num_experts if experts is None else experts
    k = spec.router.top_k if top_k is None else top_k
    router = replace(spec.router, num_experts=e, top_k=k)
    mlp = spec.experts if intermediate is None else replace(spec.experts, intermediate=intermediate)
    return replace(spec, hidden=spec.hidden if hidden is None else hidden, router=router, experts=mlp)


def sharded(spec: BlockSpec, shard: int) -> BlockSpec:
    """One tensor-parallel shard: I / ``shard`` columns of every expert, the shared one too."""
    return replace(
        spec,
        experts=_shard_of(spec.experts, shard),
        shared=None if spec.shared is None else _shard_of(spec.shared, shard),
    )


def _shard_of(expert: ExpertSpec, shard: int) -> ExpertSpec:
    width = expert.intermediate
    fits = shard >= 1 and width % shard == 0
    require(fits, "shard", shard, f"must divide I = {width}", "use 1 for the whole expert")
    return replace(expert, intermediate=width // shard)


def _counts(text: str) -> list[int]:
    if text in ("", "none"):
        return []
    counts = parse_tokens(text)
    require(min(counts) >= 1, "tokens", min(counts), "there is nothing to run", "use at least 1")
    return counts


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        way_out = 'install the extra: pip install "moedecode[plot]"'
        raise MissingExtra(f"--plot needs matplotlib; {way_out}") from error


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MoEDecodeError(
            f"--{option} {path}: cannot be written ({error.strerror}); choose another file"
        ) from error
