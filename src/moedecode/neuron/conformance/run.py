"""Owns the running of one row: inputs, the kernel on the model, its PyTorch reference, the right answer, the
verdict and the figures.

Must not know the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine import ConstraintViolation, Machine, MachineError, Report, Result
from . import calls, truth
from .checkout import CheckoutError, PublicLibrary
from .compare import Difference, Verdict, compared, judged
from .configs import BlockConfig, hbm_floor
from .figures import Figures, figures_of, short_reason
from .inputs import block_inputs, expert_inputs, zero_gate_up_bias
from .parts import run_rmsnorm, run_rmsnorm_mx, run_router
from .rows import Row

__all__ = ["Outcome", "run_row"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """One line of the table, run.

    Attributes:
        name: of the row.
        verdict: what it says.
        kernel_to_reference, kernel_to_truth, reference_to_truth: how far the three are apart; None if the
            kernel did not run.
        figures: cost on the model, None where the row has none.
        detail: why it was refused or fails, or a remark.
        seconds: it took.
    """

    name: str
    verdict: Verdict
    kernel_to_reference: Difference | None = None
    kernel_to_truth: Difference | None = None
    reference_to_truth: Difference | None = None
    figures: Figures | None = None
    detail: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())


def run_row(library: PublicLibrary, row: Row, chip: str = "trn3") -> Outcome:
    """Run one row; whatever the library's code raises is an outcome.

    Raises:
        CheckoutError: the library's interface is not the one the rows were written for.
    """
    start = time.perf_counter()
    try:
        outcome = _RUNNERS[row.kind](library, row, chip)
    except CheckoutError:
        raise
    except AssertionError as error:
        outcome = Outcome(row.name, Verdict.refused, detail=short_reason(error))
    except MachineError as error:
        outcome = Outcome(row.name, Verdict.machine, detail=short_reason(error))
    except Exception as error:
        outcome = Outcome(row.name, Verdict.fails, detail=short_reason(error))
    return replace(outcome, seconds=time.perf_counter() - start)


def _run_block(library: PublicLibrary, row: Row, chip: str) -> Outcome:
    config = row.config
    arrays: dict[str, Any] = dict(block_inputs(config))
    options = calls.block_options(library, config)
    given = zero_gate_up_bias(config, arrays) if row.zero_bias else arrays

    def kernel(machine: Machine) -> Result:
        return machine.run(calls.block_kernel(library), **given, **options, **dict(row.options))

    def reference() -> Array:
        return calls.called(library.moe_block_reference, arrays, options)["out"]

    return _three(
        row, chip, kernel, lambda out: out[0], reference, lambda: truth.block_truth(config, arrays)[0]
    )


def _run_moe(library: PublicLibrary, row: Row, chip: str) -> Outcome:
    config = row.config
    arrays: dict[str, Any] = dict(expert_inputs(config, dense=row.mask))
    options: dict[str, Any] = {
        "is_all_expert": config.all_expert,
        "expert_affinities_scaling_mode": library.scale_modes[config.scaling],
        "activation_fn": calls.block_options(library, config)["hidden_act_fn"],
        **{k: v for k, v in calls.block_options(library, config).items() if "clamp" in k},
    }
    placed = options | {"mask_unselected_experts": row.mask}
    if row.block_size is not None:
        placed |= {"is_all_expert_dynamic": True, "block_size": row.block_size}

    def kernel(machine: Machine) -> Result:
        return machine.run(calls.moe_kernel(library), **arrays, **placed)

    def reference() -> Array:
        # It takes this rank's slice of the affinities, masked.
        local = (
            arrays | {"expert_affinities": _local_affinities(config, arrays)} if config.all_expert else arrays
        )
        return calls.called(library.moe_reference, local, options)["out"]

    return _three(
        row, chip, kernel, lambda out: out, reference, lambda: truth.moe_truth(config, arrays, mask=row.mask)
    )


def _local_affinities(config: BlockConfig, arrays: dict[str, Any]) -> Array:
    first = int(arrays["rank_id"][0, 0]) * config.local_experts
    ids = np.arange(first, first + config.local_experts)
    chosen = (arrays["expert_index"][:, :, None] == ids).any(1)  # [T, E_L]
    local: Array = arrays["expert_affinities"][:, ids] * chosen.astype(np.float32)
    return local


def _three(
    row: Row,
    chip: str,
    kernel: Callable[[Machine], Result],
    out: Callable[[Any], Array],
    reference: Callable[[], Array],
    right: Callable[[], Array],
) -> Outcome:
    """Kernel, reference and truth of an expert sum, and what they say about each other."""
    kind = "mx" if row.config.is_mx else "plain"
    broken = ""
    try:
        result = kernel(_machine(chip))
    except ConstraintViolation as error:
        if error.instruction != "core_barrier":
            raise
        broken = "core_barrier on a tensor in SBUF, documented for shared HBM"
        result = kernel(_machine(chip, barrier_on_chip=True))
    report, got, want, true = result.report, np.array(out(result.outputs)), reference(), right()
    unwritten = bool(np.isnan(got.astype(np.float32)).any())
    if unwritten:
        clean = _machine(chip, poison=False, barrier_on_chip=bool(broken))
        got = np.array(out(kernel(clean).outputs))
    differences = compared(got, want, kind), compared(got, true, kind), compared(want, true, kind)
    verdict = judged(*differences, kind)
    details = [broken] if broken else []
    if unwritten:
        details += ["NaN where fresh memory holds NaN", f"where it holds zeros: {verdict.value}"]
    elif broken:
        details.append(f"otherwise: {verdict.value}")
    if verdict is not Verdict.agrees and differences[1].rows:
        details.append(f"{_wrong(differences[1].rows)} of {len(got)}")
    if broken or unwritten:
        verdict = Verdict.machine if broken else Verdict.unwritten
    figures = _figures(row, report)
    return Outcome(row.name, verdict, *differences, figures, "; ".join(details), notes=figures.notes)


def _wrong(rows: tuple[int, ...]) -> str:
    first, last = min(rows), max(rows)
    return f"wrong: row {first}" if first == last else f"wrong: {len(rows)} rows within {first}..{last}"


def _figures(row: Row, report: Report) -> Figures:
    notes = (
        ("given a gate/up bias of zeros, without which its selective MX kernel fails",)
        if row.zero_bias
        else ()
    )
    return figures_of(report, hbm_floor(row.config, block=row.kind == "block"), notes)


def _machine(chip: str, *, poison: bool = True, barrier_on_chip: bool = False) -> Machine:
    """One that notes races and an overfull SBUF instead of stopping at them."""
    return Machine(
        chip, poison=poison, on_race="record", check_capacity=False, barrier_on_chip=barrier_on_chip
    )


def _run_part(
    runner: Callable[..., tuple[Verdict, Difference, Difference, Difference, str]],
) -> Callable[..., Outcome]:
    def run(library: PublicLibrary, row: Row, chip: str) -> Outcome:
        verdict, first, second, third, detail = runner(library, row.config, _machine(chip))
        return Outcome(row.name, verdict, first, second, third, detail=detail)

    return run


_RUNNERS: dict[str, Callable[[PublicLibrary, Row, str], Outcome]] = {
    "block": _run_block,
    "moe": _run_moe,
    "router": _run_part(run_router),
    "rmsnorm": _run_part(run_rmsnorm),
    "rmsnorm_mx": _run_part(run_rmsnorm_mx),
}
