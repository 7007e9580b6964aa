"""MoEBlock: a spec and weights become one call. Checks inputs, plans, and hands over to a backend.

Knows specs, weights, plans and the backend door; knows no layouts, no kernels and no commands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .arrays import as_numpy, check_single, io_dtype, like_input
from .backends import Request
from .backends import backend as find_backend
from .checks import (
    check_backend,
    check_kinds,
    check_mask,
    check_numerics,
    check_out,
    check_rank,
    check_same,
    check_threads,
    check_whole,
    checked_weights,
)
from .gates import invalid
from .plan import CostTable, Plan, choose_strategy, make_plan
from .spec import BlockSpec
from .weights import BlockWeights

__all__ = ["BlockResult", "MoEBlock"]


@dataclass(frozen=True, eq=False)
class BlockResult:
    """What a call returns when more than ``out`` was asked for; absent parts are None.

    ``out`` and ``residual`` have the shape of the input; ``router_logits [T, E]`` the io dtype,
    ``expert_index`` int32 ``[T, K]``, ``affinities`` float32 ``[T, E]``.
    """

    out: Any
    residual: Any = None
    router_logits: Any = None
    expert_index: Any = None
    affinities: Any = None


class MoEBlock:
    """The fused block of one decoder layer.

    - ``backend``: "cpu", "reference" or "neuron".
    - ``strategy``: "auto", "selective", "grouped" or "all_expert".
    - ``precision``: "a16", "a8" or "mxfp8": how activations enter the expert products. ``h_rounding``: "io"
      rounds the intermediate to the io dtype before the "mxfp8" quantisation, None does not.
    - ``rank_id``: this rank owns experts ``[rank_id*E_L, (rank_id+1)*E_L)``, E_L =
      ``weights.experts.num_experts``. Needed when E_L < E.
    - ``threads``: 0 means all cores this process may use.
    - ``gates`` ("spec", "extended") and ``chip`` ("trn1", "trn2", "trn3"): of "neuron", see
      ``docs/neuron.md``.

    Weights are packed once, here, expert by expert. Raises :class:`~moedecode.gates.InvalidInput` for
    malformed weights and :class:`~moedecode.gates.UnsupportedConfig` for what the backend does not do.
    """

    def __init__(
        self,
        spec: BlockSpec,
        weights: BlockWeights,
        *,
        backend: str = "cpu",
        strategy: str = "auto",
        precision: str = "a16",
        h_rounding: str | None = None,
        rank_id: int | None = None,
        threads: int = 0,
        gates: str | None = None,
        chip: str | None = None,
    ) -> None:
        check_kinds(spec, weights)
        self.spec = spec
        check_single(
            backend=backend, strategy=strategy, precision=precision, h_rounding=h_rounding, gates=gates,
            chip=chip,
        )  # fmt: skip
        self._backend = find_backend(backend, gates=gates, chip=chip)
        self._format = weights.experts.fmt
        self._local = weights.experts.num_experts
        numerics = check_numerics(precision, h_rounding)
        threads = check_threads(threads)
        weights = checked_weights(spec, weights)
        self._first = check_rank(rank_id, self._local, spec.router.num_experts) * self._local
        check_backend(self._backend, spec, weights.experts, numerics)
        self._precision = numerics.precision
        self.strategy = strategy
        asked = None if strategy == "auto" else strategy
        self._backend.refuse(Request(spec, self._format, numerics, self._local, asked, threads=threads))
        experts = self._backend.pack(weights.experts)
        shared = None if weights.shared is None else self._backend.pack(weights.shared)
        self._prepared = self._backend.block(spec, weights, experts, shared, numerics, threads)

    @property
    def strategy(self) -> str:
        """The strategy that was asked for; it may be changed between calls."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str) -> None:
        first = self._decide(strategy, tokens=1)
        self._strategy = strategy
        self._chosen = {1: first}  # by number of tokens

    @property
    def report(self) -> Any:
        """What the machine model saw in the last call with "neuron"; None before it and elsewhere."""
        return getattr(self._prepared, "report", None)

    def plan(self, tokens: int) -> Plan:
        """What a call with ``tokens`` tokens will do and why; print it."""
        tokens = check_whole(tokens, "tokens", "count the new tokens of the call")
        return make_plan(
            self.spec,
            tokens,
            self._format,
            self._backend.capabilities,
            self._costs,
            strategy=self._strategy,
            local_experts=self._local,
        )

    def profile(self, hidden: Any) -> dict[str, list[float]]:
        """Seconds of one call on ``hidden [T, H]`` by stage, one number per thread.

        The stages of the cpu backend: norm, router, group, quantise, gate/up, activation, down, combine and
        waiting (at barriers). The reference backend measures nothing and returns an empty dict; the neuron
        backend models: its stages are engines and their lower bounds, one number per core.
        """
        x = as_numpy(hidden, "hidden")
        if x.ndim != 2 or x.shape[1] != self.spec.hidden:
            raise invalid("hidden", f"shape {x.shape}", f"must be [T, {self.spec.hidden}]", "check H")
        io_dtype(x, "hidden")
        return self._prepared.profile(x, strategy=self._choose(len(x)), first_expert=self._first)

    def __call__(
        self,
        hidden: Any,
        *,
        residual: Any = None,
        token_mask: Any = None,
        return_router: bool = False,
        out: Any = None,
    ) -> Any:
        """Run the block on ``hidden [T, H]`` or ``[B, S, H]`` (float32, float16 or bfloat16).

        - ``residual``: same shape and dtype, added before the norm; the sum is returned, ``out`` does not
          contain it.
        - ``token_mask``: bool ``[T]`` or ``[B, S]``; False marks padding, which loads no expert and yields
          zeros.
        - ``out``: a contiguous array to write into, same shape and dtype, not overlapping the inputs.

        Returns ``out``, or a :class:`BlockResult` when ``residual`` or ``return_router`` is given. NumPy in,
        NumPy out; torch in, torch out. Raises :class:`~moedecode.gates.InvalidInput` before any work.
        """
        x = as_numpy(hidden, "hidden")
        shape = x.shape
        if x.ndim not in (2, 3) or shape[-1] != self.spec.hidden:
            raise invalid(
                "hidden",
                f"shape {shape}",
                f"must be [T, {self.spec.hidden}] or [B, S, {self.spec.hidden}]",
                "check H",
            )
        dtype = io_dtype(x, "hidden")
        tokens = x.size // self.spec.hidden
        flat = (tokens, self.spec.hidden)
        added = None if residual is None else check_same(residual, "residual", shape, dtype)
        mask = None if token_mask is None else check_mask(token_mask, shape[:-1])
        target = None if out is None else check_out(out, shape, dtype, [x, added, mask])
        result = self._prepared.run(
            x.reshape(flat),
            strategy=self._choose(tokens),
            first_expert=self._first,
            residual=None if added is None else added.reshape(flat),
            token_mask=mask,
            return_router=return_router,
            out=None if target is None else target.reshape(flat),
        )
        final = out if out is not None else like_input(result.out.reshape(shape), hidden)
        if residual is None and not return_router:
            return final
        routing = result.routing
        return BlockResult(
            out=final,
            residual=None if result.residual is None else like_input(result.residual.reshape(shape), hidden),
            router_logits=None if routing is None else like_input(routing.logits, hidden),
            expert_index=None if routing is None else like_input(routing.index, hidden),
            affinities=None if routing is None else like_input(routing.affinities, hidden),
        )

    def _choose(self, tokens: int) -> str:
        chosen = self._chosen.get(tokens)
        if chosen is None:
            chosen = self._chosen[tokens] = self._decide(self._strategy, tokens)
        return chosen

    @functools.cached_property
    def _costs(self) -> CostTable:
        return self._backend.costs(self._format, self._precision)

    def _decide(self, strategy: str, tokens: int) -> str:
        able = self._backend.capabilities
        costs = self._costs if strategy == "auto" else None
        return choose_strategy(strategy, self.spec, tokens, self._local, self._format, able, costs)[0]
