"""Backend and block: gates first, then one kernel launch on a fresh machine, then the caller's order again.

Owns the way of a call through the door. Knows the machine by `Machine(...).run(...)`; knows no instruction.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import IO_DTYPES, Array
from ...formats import WeightFormat
from ...gates import invalid, unsupported
from ...neuron.kernels import stages
from ...neuron.kernels.moe_block_tkg import moe_block_tkg
from ...neuron.kernels.moe_tkg import moe_tkg
from ...neuron.kernels.nki_names import on_model
from ...neuron.machine import Machine
from ...neuron.machine.chip import Chip
from ...plan import Capabilities, CostTable
from ...spec import BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterSpec
from ...weights import BlockWeights, ExpertWeights
from .. import BlockOutput, Numerics, Placement, Request, Routing
from . import launch
from .gates import CORES, GATES, chip_called, enforce
from .layout import KernelExperts, fold_offset, kernel_experts, permuted, restored
from .traffic import Figures, figures, floor_bytes

__all__ = ["NeuronBackend", "NeuronBlock", "last_report"]

_MX = frozenset(fmt for fmt in WeightFormat if fmt.is_mx)
_LAUNCH_SECONDS = 15e-6  # no public figure: what the Neuron runtime is commonly said to need per kernel

_last: ContextVar[Any] = ContextVar("last_report", default=None)


def last_report() -> Any:
    """The machine's report of the latest kernel that this backend ran in this thread; None before the
    first.
    """
    return _last.get()


def capabilities(gates: str) -> Capabilities:
    """What the backend can do under a set of gates; the rules between arguments are in :mod:`.gates`."""
    strategies = {"selective", "all_expert"} | ({"grouped"} if gates == "extended" else set())
    return Capabilities(
        backend="neuron",
        formats=frozenset(WeightFormat),
        strategies=frozenset(strategies),
        precisions=frozenset({"a16", "mxfp8"}),
        shared_expert=True,
        scale_modes=frozenset({ExpertAffinityScaleMode.NO_SCALE, ExpertAffinityScaleMode.POST_SCALE}),
        resident="SBUF",
        grouped_formats=_MX,
    )


class NeuronBackend:
    """The megakernel behind the protocol; every call runs on a machine of its own.

    ``chip``: "trn1", "trn2" or "trn3". ``gates``: "spec" or "extended". ``compute=False`` executes
    instructions and addresses without data (the ledger-only mode): outputs then mean nothing. Raises
    InvalidInput for unknown names.
    """

    name = "neuron"

    def __init__(self, chip: str = "trn3", gates: str = "extended", *, compute: bool = True) -> None:
        if gates not in GATES:
            raise invalid("gates", repr(gates), "is not known", f"choose one of {', '.join(GATES)}")
        if not on_model:
            raise unsupported(
                "MOEDECODE_NKI", "'toolchain'", "kernels of the toolchain do not run on the model",
                "unset it to use this backend",
            )  # fmt: skip
        self.chip: Chip = chip_called(chip)
        self.gates = gates
        self.compute = compute
        self.capabilities = capabilities(gates)

    def costs(self, fmt: WeightFormat, precision: str) -> CostTable:
        """Rates of the chip's two cores from its table; decoding rides in the matmul."""
        rate = self.chip.clock_hz["tensor"] * self.chip.partitions * self.chip.stationary_columns
        macs = CORES * rate * (4 if fmt.is_mx else 1)
        bandwidth = CORES * self.chip.hbm_path_bytes_per_second
        return CostTable(bandwidth, macs, decodes_per_second=macs, seconds_per_call=_LAUNCH_SECONDS)

    def refuse(self, request: Request) -> None:
        """Raise UnsupportedConfig for the first gate that ``request`` breaks."""
        enforce(request, self.chip, self.gates)

    def pack(self, weights: ExpertWeights) -> KernelExperts:
        """The weights in the kernel's layout; packed Trainium tensors are taken as they are, not copied."""
        return kernel_experts(weights)

    def block(
        self,
        spec: BlockSpec,
        weights: BlockWeights,
        experts: KernelExperts,
        shared: Any,
        numerics: Numerics,
        threads: int,
    ) -> NeuronBlock:
        """A block ready to run; ``shared`` is read from ``weights``."""
        return NeuronBlock(self, spec, weights, experts, numerics, threads)

    def run(self, kernel: Any, **arguments: Any) -> tuple[Any, ...]:
        """Outputs of ``kernel`` on a fresh machine, whose report is kept."""
        machine = Machine(self.chip.name, compute=self.compute)
        result = machine.run(kernel, **arguments)
        _last.set(result.report)
        outputs = result.outputs
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    def rmsnorm(
        self, hidden: Array, gamma: Array | None, eps: float, width: int, residual: Array | None
    ) -> tuple[Array, Array | None]:
        """See :meth:`moedecode.backends.Backend.rmsnorm`; H is padded to a multiple of 256."""
        tokens, natural = hidden.shape
        if not tokens:
            return hidden.copy(), None if residual is None else residual.copy()
        pad = launch.padding(natural)
        outputs = self.run(
            stages.rmsnorm_tkg,
            inp=permuted(hidden, pad),
            gamma=None if gamma is None else permuted(gamma, pad)[None],
            eps=eps,
            hidden_actual=width,
            residual=None if residual is None else permuted(residual, pad),
        )
        normed = outputs[0].reshape(tokens, -1)[:, :natural]
        return normed, None if residual is None else outputs[1].reshape(tokens, -1)[:, :natural]

    def rank_slice(self, affinities: Array, index: Array, first: int, local: int, by_index: bool) -> Array:
        """See :func:`moedecode.backends.rank_slice`; the kernel computes in float32."""
        if not len(affinities):
            return np.empty((0, local), affinities.dtype)
        (sliced,) = self.run(
            stages.mask_expert_affinities,
            expert_affinities=affinities.astype(np.float32),
            expert_index=index.astype(np.int32),
            rank_id=np.array([[first // local]], np.int32),
            E_L=local,
            mask_unselected_experts=by_index,
        )
        return np.asarray(sliced).astype(affinities.dtype)

    def router(
        self, x: Array, weight: Array, bias: Array | None, selection_bias: Array | None, spec: RouterSpec
    ) -> Routing:
        """See :meth:`moedecode.backends.Backend.router`; H is padded to a multiple of 256."""
        tokens, natural = x.shape
        if not tokens:
            return launch.no_routing(spec, x.dtype)
        pad = launch.padding(natural)
        logits, index, affinities = self.run(
            stages.router_topk,
            x=permuted(x, pad),
            w=np.ascontiguousarray(permuted(weight, pad).T),
            w_bias=None if bias is None else bias[None],
            act_fn=launch.score(spec),
            k=spec.top_k,
            router_pre_norm=spec.pre_norm,
            norm_topk_prob=spec.norm_topk_prob,
            router_mm_dtype=IO_DTYPES[spec.matmul_dtype],
        )
        return Routing(logits, index.astype(np.int32), affinities)

    def experts(
        self,
        hidden: Array,
        packed: KernelExperts,
        spec: ExpertSpec,
        scale_mode: ExpertAffinityScaleMode,
        strategy: str,
        index: Array | None,
        affinities: Array,
        first_expert: int,
        numerics: Numerics,
        out: Array,
        placement: Placement | None = None,
    ) -> None:
        """See :meth:`moedecode.backends.Backend.experts`."""
        if not len(hidden):
            return
        arguments = launch.moe_arguments(
            self.gates, self.chip, hidden, packed, spec, scale_mode, strategy, index, affinities,
            first_expert, out.dtype, placement or Placement(),
        )  # fmt: skip
        (values,) = self.run(moe_tkg, **arguments)
        out[...] = restored(values.reshape(len(hidden), -1), packed)


@dataclass(eq=False)
class NeuronBlock:
    """One block: its weights in the kernel's layout, and after a call ``report``, what the machine saw."""

    able: NeuronBackend
    spec: BlockSpec
    weights: BlockWeights
    experts: KernelExperts
    numerics: Numerics
    threads: int
    report: Any = None

    def __post_init__(self) -> None:
        experts, spec = self.experts, self.spec.experts
        if self.able.gates == "spec":
            experts, spec = fold_offset(experts, spec)
        self._launched: tuple[dict[str, Any], int, str, int]
        self._constant = launch.block_constants(self.spec, spec, self.weights, experts, self.able.chip)

    def run(
        self,
        hidden: Array,
        *,
        strategy: str,
        first_expert: int,
        residual: Array | None,
        token_mask: Array | None,
        return_router: bool,
        out: Array | None,
    ) -> BlockOutput:
        """See :meth:`moedecode.backends.PreparedBlock.run`. A masked token is not given to the kernel."""
        real = None if token_mask is None or token_mask.all() else np.flatnonzero(token_mask)
        x, added = (
            (hidden, residual)
            if real is None
            else (hidden[real], None if residual is None else residual[real])
        )
        self.able.refuse(self._request(strategy, x, residual))
        target = np.empty(hidden.shape, hidden.dtype) if out is None else out
        total = None if residual is None else (hidden.astype(np.float32) + residual).astype(hidden.dtype)
        if not len(x):
            target[...] = 0
            return BlockOutput(
                target, total, self._no_rows(len(hidden), hidden.dtype) if return_router else None
            )
        outputs = list(self._launch(x, added, strategy, first_expert, return_router))
        result = restored(outputs.pop(0), self.experts)
        logits = outputs.pop(0) if return_router or self.able.gates == "spec" else None
        if added is not None and total is not None:
            summed = restored(outputs.pop(0), self.experts)
            total[slice(None) if real is None else real] = summed
        routing = None
        if logits is not None and return_router:
            index, affinities = outputs
            routing = Routing(logits, index.astype(np.int32), affinities)
        if real is None:
            target[...] = result
        else:
            target[...] = 0
            target[real] = result
            routing = None if routing is None else launch.spread(routing, real, len(hidden))
        return BlockOutput(target, total, routing)

    def profile(self, hidden: Array, *, strategy: str, first_expert: int) -> dict[str, list[float]]:
        """Modelled seconds of a call by engine, one number per core: a lower bound, not a measurement."""
        self.run(
            hidden, strategy=strategy, first_expert=first_expert, residual=None, token_mask=None,
            return_router=False, out=None,
        )  # fmt: skip
        return launch.engine_seconds(self.report)

    def figures(self) -> Figures:
        """The last call in numbers: HBM bytes beside their floor, engine bounds, peaks. None ran:
        RuntimeError.
        """
        if self.report is None:
            raise RuntimeError("the block has not run yet")
        arguments, outputs, strategy, tokens = self._launched
        visits = {"selective": tokens * self.spec.router.top_k, "all_expert": self.experts.num_experts}.get(
            strategy
        )
        if visits is None:  # what the kernel saw as distinct experts
            row = self.report.ledger.named("expert_gate_up_weights")
            visits = round(row.distinct_read_chip * self.experts.num_experts / row.nbytes)
        return figures(self.report, floor_bytes(arguments, outputs, self.experts, visits))

    def _launch(
        self, x: Array, residual: Array | None, strategy: str, first_expert: int, return_router: bool
    ) -> tuple[Any, ...]:
        order, local = self.experts.hidden_map, self.experts.num_experts
        arguments = self._constant | {
            "inp": permuted(x, order)[None],  # [1, T, padded]
            "residual": None if residual is None else permuted(residual, order)[None],
            "is_all_expert": strategy == "all_expert",
            "rank_id": launch.rank(strategy, first_expert, local, self.spec.router.num_experts),
            "skip_router_logits": not return_router and self.able.gates != "spec",
        }
        if return_router:
            arguments["return_routing"] = True
        if strategy == "grouped":
            arguments["distinct"] = True
        outputs = self.able.run(moe_block_tkg, **arguments)
        self.report = last_report()
        self._launched = arguments, sum(o.nbytes for o in outputs), strategy, len(x)
        return outputs

    def _request(self, strategy: str, x: Array, residual: Array | None) -> Request:
        return Request(
            self.spec, self.experts.fmt, self.numerics, self.experts.num_experts, strategy, len(x),
            x.dtype.name, residual is not None, self.threads,
        )  # fmt: skip

    def _no_rows(self, rows: int, dtype: Any) -> Routing:
        return launch.spread(launch.no_routing(self.spec.router, dtype), np.zeros(0, np.intp), rows)
