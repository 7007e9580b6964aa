"""`moedecode plan`: what a call would do, without weights and without doing it."""

from __future__ import annotations

from typing import Annotated

import typer

from ..backends import backend as find_backend
from ..formats import WeightFormat
from ..gates import InvalidInput, require
from ..plan import make_plan
from ..presets import presets
from ..spec import STRATEGIES
from .console import print_text

__all__ = ["FormatOption", "PresetOption", "parse_format", "parse_tokens", "plan"]

FORMATS = ", ".join(fmt.value for fmt in WeightFormat)
PresetOption = Annotated[str, typer.Option(help=f"The model: {', '.join(presets)}.")]
FormatOption = Annotated[str, typer.Option("--format", help=f"How expert weights are stored: {FORMATS}.")]


def plan(
    preset: PresetOption = "gpt-oss-20b",
    tokens: Annotated[str, typer.Option(help="New tokens of a call, as T or T,T,...")] = "1,4,16",
    fmt: FormatOption = "mxfp4",
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "auto",
    backend: Annotated[str, typer.Option(help="cpu, reference or neuron.")] = "cpu",
    local_experts: Annotated[int | None, typer.Option(help="Experts on this rank (all without it).")] = None,
) -> None:
    """Print the leaf, the strategy and why, and what every tensor moves."""
    spec, weight_format, able = presets[preset], parse_format(fmt), find_backend(backend)
    if local_experts is not None:
        experts = spec.router.num_experts
        fits = 1 <= local_experts <= experts
        require(
            fits, "local_experts", local_experts, f"must lie in 1..{experts}", "leave it out for all experts"
        )
    texts = [
        make_plan(
            spec,
            count,
            weight_format,
            able.capabilities,
            able.costs(weight_format, "a16"),
            strategy=strategy,
            local_experts=local_experts,
        )
        for count in parse_tokens(tokens)
    ]
    print_text("\n\n\n".join(map(str, texts)))


def parse_tokens(text: str) -> list[int]:
    """ "1,4,16" -> [1, 4, 16]."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"tokens={text!r}: must be whole numbers; write T or T,T,...") from None
    for count in counts:
        require(count >= 0, "tokens", count, "must not be negative", "count the new tokens of the call")
    return counts


def parse_format(name: str) -> WeightFormat:
    """ "mxfp4" -> WeightFormat.MXFP4."""
    try:
        return WeightFormat(name.lower())
    except ValueError:
        raise InvalidInput(f"format={name!r}: is not known; choose one of {FORMATS}") from None
