"""Owns how one configuration is put to the library: the kernel inside a run, its PyTorch reference outside,
and the options both take.

Must not know verdicts, figures or tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine import dtypes, isa, language
from ..machine.tensor import Tensor
from .checkout import PublicLibrary
from .configs import BlockConfig
from .inputs import IO_DTYPES

__all__ = [
    "block_kernel",
    "block_options",
    "called",
    "moe_kernel",
    "rmsnorm_kernel",
    "rmsnorm_mx_kernel",
    "router_kernel",
]

Array = npt.NDArray[Any]
Kernel = Callable[..., Any]

_ACTIVATIONS = {"silu": "SiLU", "swish": "Swish", "gelu": "GELU", "gelu_tanh": "GELU_Tanh_Approx"}
CLAMP = 7.0


def block_options(library: PublicLibrary, config: BlockConfig) -> dict[str, Any]:
    """The arguments of the fused block that are not arrays."""
    limit = CLAMP if config.clamp else None
    return {
        "top_k": config.top_k,
        "router_act_fn": library.router_activations[config.score.upper()],
        "router_pre_norm": config.pre_norm,
        "norm_topk_prob": config.norm_topk,
        "expert_affinities_scaling_mode": library.scale_modes[config.scaling],
        "hidden_act_fn": library.activations[_ACTIVATIONS[config.activation]],
        "gate_clamp_upper_limit": limit,
        "up_clamp_upper_limit": limit,
        "up_clamp_lower_limit": None if limit is None else -limit,
        "router_mm_dtype": IO_DTYPES[config.io],
        "hidden_actual": config.hidden_actual,
        "is_all_expert": config.all_expert,
    }


def called(function: Kernel, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Array]:
    """The outputs of a PyTorch reference as float64 arrays.

    Called as the library's own tests call it: everything that is not an integer or a packed x4 array is
    widened to float32.
    """
    import torch

    with torch.no_grad():
        outputs = function(**{name: _widened(value) for name, value in arrays.items()}, **options)
    return {name: np.asarray(value, np.float64) for name, value in outputs.items()}


def _widened(value: Any) -> Any:
    import torch

    if not isinstance(value, np.ndarray) or dtypes.is_x4(value.dtype):
        return value
    if value.dtype == np.uint32:
        value = value.astype(np.int32)
    elif dtypes.is_float(value.dtype):
        value = value.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(value))


def block_kernel(library: PublicLibrary) -> Kernel:
    """`moe_block_tkg` as a kernel for `Machine.run`; packed MX weights reach it as its own views."""

    def moe_block_tkg(**arguments: Any) -> Any:
        return library.moe_block(**library.arguments(library.moe_block, _as_views(library, arguments)))

    return moe_block_tkg


def moe_kernel(library: PublicLibrary) -> Kernel:
    """`moe_tkg` (expert MLPs alone) with everything in HBM; expert ids to mask with it wants in SBUF."""

    def moe_tkg(**arguments: Any) -> Any:
        if arguments["mask_unselected_experts"]:
            in_hbm = arguments["expert_index"]
            arguments["expert_index"] = language.ndarray(
                in_hbm.shape, dtype=in_hbm.dtype, buffer=language.sbuf
            )
            isa.dma_copy(dst=arguments["expert_index"], src=in_hbm)
        return library.moe(**library.arguments(library.moe, _as_views(library, arguments)))

    return moe_tkg


def _as_views(library: PublicLibrary, arguments: dict[str, Any]) -> dict[str, Any]:
    """Packed weights as the library's TensorView, which is how its MX kernels expect them."""
    made = dict(arguments)
    for name in ("expert_gate_up_weights", "expert_down_weights"):
        if isinstance(made[name], Tensor) and dtypes.is_x4(made[name].dtype):
            made[name] = library.tensor_view(made[name])
    return made


def router_kernel(library: PublicLibrary, tokens: int, experts: int, top_k: int, io: Any) -> Kernel:
    """`router_topk` with outputs in shared HBM: (logits [T, E], index [T, K], affinities [T, E])."""

    def router_topk(**arguments: Any) -> Any:
        outputs = {
            "router_logits": language.ndarray((tokens, experts), dtype=io, buffer=language.shared_hbm),
            "expert_index": language.ndarray(
                (tokens, top_k), dtype=language.uint32, buffer=language.shared_hbm
            ),
            "expert_affinities": language.ndarray((tokens, experts), dtype=io, buffer=language.shared_hbm),
        }
        library.router(**library.arguments(library.router, arguments | outputs))
        return tuple(outputs.values())

    return router_topk


def rmsnorm_kernel(library: PublicLibrary) -> Kernel:
    """`rmsnorm_tkg`, its SBUF result written out by core 0.

    Returns `[128, T, H/128]`, hidden index h = 128 k + p at `[p, :, k]`.
    """

    def rmsnorm_tkg(inp: Tensor, gamma: Tensor, hidden_actual: int | None) -> Tensor:
        batch, tokens, hidden = inp.shape
        shape = (128, batch * tokens, hidden // 128)
        out = language.ndarray(shape, dtype=inp.dtype, buffer=language.sbuf)
        result = language.ndarray(shape, dtype=inp.dtype, buffer=language.shared_hbm)
        arguments = {
            "input": inp,
            "gamma": gamma,
            "output": out,
            "hidden_actual": hidden_actual,
            "hidden_dim_tp": True,
        }
        library.rmsnorm(**library.arguments(library.rmsnorm, arguments))
        if language.program_id(0) == 0:
            isa.dma_copy(dst=result, src=out)
        return result

    return rmsnorm_tkg


def rmsnorm_mx_kernel(library: PublicLibrary) -> Kernel:
    """`rmsnorm_mx_quantize_tkg`, written out by core 0.

    Returns normed `[128, T, H/128]`, codes and scales `[128, H/512, T]`, and residual_out `[T, H]` if any.
    """

    def rmsnorm_mx_quantize_tkg(
        inp: Tensor, gamma: Tensor, hidden_actual: int | None, residual: Tensor | None
    ) -> Any:
        batch, tokens, hidden = inp.shape
        t = batch * tokens
        wide, packed = (128, t, hidden // 128), (128, hidden // 512, t)
        on_chip = [
            language.ndarray(wide, dtype=inp.dtype, buffer=language.sbuf),
            language.ndarray(packed, dtype=language.float8_e4m3fn_x4, buffer=language.sbuf),
            language.ndarray(packed, dtype=language.uint8, buffer=language.sbuf),
        ]
        results = [language.ndarray(x.shape, dtype=x.dtype, buffer=language.shared_hbm) for x in on_chip]
        added = (
            None
            if residual is None
            else language.ndarray((t, hidden), dtype=inp.dtype, buffer=language.shared_hbm)
        )
        arguments = {
            "input": inp,
            "gamma": gamma,
            "output": on_chip[0],
            "output_quant": on_chip[1],
            "output_scale": on_chip[2],
            "residual": residual,
            "output_residual": added,
            "hidden_actual": hidden_actual,
        }
        library.rmsnorm_mx(**library.arguments(library.rmsnorm_mx, arguments))
        if language.program_id(0) == 0:
            isa.dma_copy(dst=results[0], src=on_chip[0])
            isa.dma_copy(dst=results[1], src=on_chip[1])
            for quadrant in range(0, 128, 32):  # the other partitions hold nothing
                rows = slice(quadrant, quadrant + 4)
                isa.dma_copy(dst=results[2][rows], src=on_chip[2][rows])
        return (*results, added) if added is not None else tuple(results)

    return rmsnorm_mx_quantize_tkg
