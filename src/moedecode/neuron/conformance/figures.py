"""Owns what the library's fused block costs on the model: bytes, engine times and memory, without data (the
ledger-only mode).

Must not know verdicts. These figures are what moedecode's own kernels are compared with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..machine import Machine, MachineError, Report, StandIn
from .calls import block_kernel, block_options
from .checkout import CheckoutError, PublicLibrary, open_checkout
from .configs import BlockConfig, hbm_floor
from .inputs import block_shapes, zero_gate_up_bias

__all__ = ["Figures", "block_figures", "figures_of", "public_block"]


@dataclass(frozen=True)
class Figures:
    """What one call costs.

    Attributes:
        hbm_bytes: read and written by both cores.
        hbm_floor_bytes, hbm_ratio: what it cannot do without (`configs.hbm_floor`), and the ratio to it.
        engines_us: lower bound of the busy time of each engine, the fuller core's.
        bottleneck, bound_us: the busiest engine and its time, the lower bound of the whole.
        makespan_us: of the in-order schedule.
        sbuf_peak_bytes, psum_peak_bytes: per partition.
        races: conflicts on shared HBM between the cores.
        refused: why there are no figures, else None.
        notes: what was changed to get them.
    """

    hbm_bytes: int = 0
    hbm_floor_bytes: int = 0
    hbm_ratio: float = 0.0
    engines_us: dict[str, float] = field(default_factory=dict)
    bottleneck: str = ""
    bound_us: float = 0.0
    makespan_us: float = 0.0
    sbuf_peak_bytes: int = 0
    psum_peak_bytes: int = 0
    races: int = 0
    refused: str | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures_of(report: Report, floor: int, notes: tuple[str, ...] = ()) -> Figures:
    """The figures of a finished run."""
    engine, seconds = report.timeline.bottleneck()
    return Figures(
        hbm_bytes=report.hbm_bytes,
        hbm_floor_bytes=floor,
        hbm_ratio=report.hbm_bytes / floor,
        engines_us={name: 1e6 * bound for name, bound in report.timeline.bounds().items()},
        bottleneck=engine,
        bound_us=1e6 * seconds,
        makespan_us=1e6 * report.timeline.makespan(),
        sbuf_peak_bytes=report.sbuf_peak,
        psum_peak_bytes=report.psum_peak,
        races=len(report.races),
        notes=notes,
    )


def public_block(path: str | os.PathLike[str], config: BlockConfig, *, chip: str = "trn3") -> Figures:
    """Figures of the library's `moe_block_tkg` for a configuration, at full size and without memory for the
    weights.

    Args:
        path: the user's checkout.
        config: the call.
        chip: of `moedecode.neuron.machine.CHIPS`.

    Raises:
        CheckoutError: no usable checkout.
    """
    with open_checkout(path) as library:
        return block_figures(library, config, chip=chip)


def block_figures(library: PublicLibrary, config: BlockConfig, *, chip: str = "trn3") -> Figures:
    """As `public_block`, with a library that is open already (for many configurations)."""
    try:
        return figures_of(ledger_run(library, config, chip), hbm_floor(config))
    except CheckoutError:
        raise
    except (AssertionError, AttributeError, MachineError) as error:
        if isinstance(error, AttributeError) and config.is_mx and not config.bias:
            # Its selective MX kernel reads the gate/up bias whether there is one or not.
            return _with_bias(library, config, chip)
        return Figures(refused=short_reason(error), hbm_floor_bytes=hbm_floor(config))


def _with_bias(library: PublicLibrary, config: BlockConfig, chip: str) -> Figures:
    note = "given a gate/up bias of zeros, without which its selective MX kernel fails"
    try:
        return figures_of(ledger_run(library, config, chip, zero_bias=True), hbm_floor(config), (note,))
    except (AssertionError, AttributeError, MachineError) as error:
        return Figures(refused=short_reason(error), hbm_floor_bytes=hbm_floor(config), notes=(note,))


def ledger_run(library: PublicLibrary, config: BlockConfig, chip: str, *, zero_bias: bool = False) -> Report:
    """Run the block without data."""
    arrays: dict[str, Any] = {
        name: None if shape is None else StandIn(*shape) for name, shape in block_shapes(config).items()
    }
    if zero_bias:
        arrays = zero_gate_up_bias(config, arrays)
    if config.all_expert:
        arrays["rank_id"] = np.array([[config.rank or 0]], np.uint32)
    kernel: Callable[..., Any] = block_kernel(library)
    machine = Machine(chip, compute=False, on_race="record", check_capacity=False, barrier_on_chip=True)
    return machine.run(kernel, **arrays, **block_options(library, config)).report


def short_reason(error: BaseException) -> str:
    """The message of an error on one line, without the boilerplate around the library's own asserts."""
    text = " ".join(str(error).split())
    for before in ("Kernel validation exception: ",):
        text = text.rpartition(before)[2]
    text = text.partition(" - Please check")[0]
    return text if isinstance(error, AssertionError | MachineError) else f"{type(error).__name__}: {text}"
