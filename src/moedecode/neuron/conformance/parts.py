"""Owns the comparison of the library's router and norms: kernel on the model, its PyTorch reference, the
right answer.

Must not know tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine import Machine, dtypes
from . import calls, truth
from .checkout import PublicLibrary
from .compare import Difference, Verdict, compared, judged
from .configs import BlockConfig
from .inputs import IO_DTYPES, router_inputs

__all__ = ["run_rmsnorm", "run_rmsnorm_mx", "run_router"]

Array = npt.NDArray[Any]
Judgement = tuple[Verdict, Difference, Difference, Difference, str]


def run_router(library: PublicLibrary, config: BlockConfig, machine: Machine) -> Judgement:
    """`router_topk`: the affinities are judged, logits and expert ids must be right as well."""
    x, w, bias = router_inputs(config)
    options: dict[str, Any] = {
        "act_fn": library.router_activations[config.score.upper()],
        "k": config.top_k,
        "x_hbm_layout": 1,  # [T, H]
        "x_sb_layout": 0,
        "router_pre_norm": config.pre_norm,
        "norm_topk_prob": config.norm_topk,
    }
    # Of the two ways it scatters affinities only the DMA one knows every combination.
    scatter = {"use_indirect_dma_scatter": config.tokens <= 128 or config.tokens % 128 == 0}
    kernel = calls.router_kernel(library, config.tokens, config.experts, config.top_k, IO_DTYPES[config.io])
    logits, index, affinities = machine.run(kernel, x=x, w=w, w_bias=bias, **options, **scatter).outputs
    unused = {"router_logits": None, "expert_affinities": None, "expert_index": None}
    reference = calls.called(library.router_reference, {"x": x, "w": w, "w_bias": bias}, options | unused)
    right = truth.router_truth(config, x, w, bias)
    differences = (
        compared(affinities, reference["expert_affinities"], "router"),
        compared(affinities, right[2], "router"),
        compared(reference["expert_affinities"], right[2], "router"),
    )
    verdict, detail = judged(*differences, "router"), ""
    wrong_ids = int((index.astype(np.int64) != right[1]).any(-1).sum())
    logit_error = compared(logits, right[0], "router").l2
    if wrong_ids or not logit_error <= 1e-2:
        verdict, detail = (
            Verdict.kernel_wrong,
            f"{wrong_ids} rows with other experts, logits off by {logit_error:.1e}",
        )
    return verdict, *differences, detail


def _norm_differences(
    library: PublicLibrary, config: BlockConfig, hidden: Any, gamma: Any, right: Any, normed: Any
) -> tuple[Difference, Difference, Difference]:
    """Kernel to its reference, kernel to the right value, reference to it; ``normed`` as on chip."""
    reference = calls.called(
        _as_dict(library.rmsnorm_reference),
        {"hidden": hidden, "gamma": gamma},
        {"hidden_actual": config.hidden_actual},
    )["out"]
    got = _token_major(normed)
    return (
        compared(got, reference, "norm"),
        compared(got, right, "norm"),
        compared(reference, right, "norm"),
    )


def run_rmsnorm(library: PublicLibrary, config: BlockConfig, machine: Machine) -> Judgement:
    """`rmsnorm_tkg` in the layout that the MX paths use."""
    inp, gamma, _ = _norm_inputs(config)
    out = machine.run(calls.rmsnorm_kernel(library), inp[None], gamma, config.hidden_actual).outputs
    right, _ = truth.rmsnorm_truth(inp, gamma, config.hidden_actual, None)
    differences = _norm_differences(library, config, inp, gamma, right, out)
    return judged(*differences, "norm"), *differences, ""


def run_rmsnorm_mx(library: PublicLibrary, config: BlockConfig, machine: Machine) -> Judgement:
    """`rmsnorm_mx_quantize_tkg`: the normed values are judged; codes and scales must be those of its own
    normed values.
    """
    inp, gamma, residual = _norm_inputs(config)
    extra = None if residual is None else residual[None]
    outputs = machine.run(
        calls.rmsnorm_mx_kernel(library), inp[None], gamma, config.hidden_actual, extra
    ).outputs
    normed, codes, scales = outputs[:3]
    total = inp.astype(np.float32) + (0.0 if residual is None else residual.astype(np.float32))
    right, right_sum = truth.rmsnorm_truth(inp, gamma, config.hidden_actual, residual)
    differences = _norm_differences(library, config, total, gamma, right, normed)
    verdict, faults = judged(*differences, "norm"), []
    want_codes, want_scales = _quantised(library, normed)
    if (share := float((codes.view(np.uint32) != want_codes.view(np.uint32)).mean())) > 0:
        faults.append(f"{100 * share:.2g}% of the codes differ from its reference quantiser")
    rows = [32 * quadrant + lane for quadrant in range(4) for lane in range(4)]
    if (share := float((scales[rows] != want_scales).mean())) > 0:
        faults.append(f"{100 * share:.2g}% of the scales differ")
    if right_sum is not None and not compared(outputs[3], right_sum, "norm").within("norm"):
        faults.append("the residual sum is wrong")
    return (Verdict.kernel_wrong if faults else verdict), *differences, "; ".join(faults)


def _norm_inputs(config: BlockConfig) -> tuple[Array, Array, Array | None]:
    rng, io, t, h = np.random.default_rng(config.tokens), IO_DTYPES[config.io], config.tokens, config.hidden
    real = np.arange(h) < (config.hidden_actual or h)
    inp = (3.0 * rng.standard_normal((t, h)) * real).astype(io)
    gamma = (1.0 + 0.1 * rng.standard_normal((1, h))).astype(io)
    return inp, gamma, (rng.standard_normal((t, h)) * real).astype(io) if config.residual else None


def _as_dict(function: Any) -> Any:
    return lambda **arguments: {"out": function(**arguments)}


def _token_major(tiles: Array) -> Array:
    """`[128, T, H/128]` with hidden index h = 128 k + p as `[T, H]`."""
    return np.ascontiguousarray(tiles.transpose(1, 2, 0)).reshape(tiles.shape[1], -1)


def _quantised(library: PublicLibrary, normed: Array) -> tuple[Array, Array]:
    """(codes [128, H/512, T], scales [16, H/512, T]) that the library's quantiser makes of `normed [128, T,
    H/128]`.
    """
    tokens, width = normed.shape[1], normed.shape[2]
    blocks = normed.reshape(128, tokens, 4, width // 4).transpose(0, 3, 1, 2)  # [128, H/512, T, 4]
    codes, scales = library.quantise_reference(
        np.ascontiguousarray(blocks).reshape(128, -1), dtypes.float8_e4m3fn_x4
    )
    return codes.reshape(128, width // 4, tokens), scales.reshape(16, width // 4, tokens)
