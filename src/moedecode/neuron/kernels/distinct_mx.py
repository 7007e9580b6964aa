"""The distinct MX leaf (beyond the spec): each expert that some token chose is read once, for all its tokens.

Owns the list of touched experts and the dynamic loop over it. Knows no layouts.
Letters: T tokens, K experts per token, L experts; n tokens of one tile.
"""

from __future__ import annotations

from .all_expert_mx import add_expert, over_partitions
from .expert_loads_mx import ExpertLoader
from .expert_mx import ChosenExpert, ChosenExperts, ScaleRows
from .nki_names import nisa, nl
from .partial_sum import FEW_TOKENS, PartialSum
from .projections_mx import Quantised, hidden_activations
from .tiles import (
    MOVING,
    PARTITIONS,
    ExpertOptions,
    ExpertTensors,
    Routing,
    Tensor,
    core,
    tiles,
    token_tile,
)


def distinct_mx(
    r_q: Tensor,
    r_scale: Tensor,
    routing: Routing,
    weights: ExpertTensors,
    out: Tensor,
    options: ExpertOptions,
    partial: Tensor | None = None,
    first_expert: int = 0,
) -> None:
    """The sum of :func:`~.selective_mx.selective_mx`, reading each distinct chosen expert once per chip.

    ``weights`` holds experts ``[first_expert, first_expert + L)``; other ids contribute nothing. Cores take
    the touched experts alternately, each for all T tokens. ``partial``: as in all_expert_mx.
    """
    r = Quantised(r_q, r_scale)
    tokens, hidden, experts = r_q.shape[2], weights.down.shape[-1], weights.gate_up.shape[0]
    total = PartialSum(tokens, hidden, tokens <= FEW_TOKENS, partial)
    total.zero()
    weighted = options.scaling != "no_scale"
    choices = _Choices(routing, tokens, first_expert, weighted)
    queue = _Queue(choices, experts)
    loader = ExpertLoader(weights, None, options.up_offset, total.hidden_major)
    scale_rows = ScaleRows().prepare(weights, loader.pieces)
    this, cores = core()
    for _ in range(this + 1):
        queue.pop()
    more = nisa.register_alloc(queue.ticket)
    while more:
        ids = queue.expert()  # [128, 1]
        number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf, name="expert_number")
        nisa.tensor_copy(dst=number, src=ids[0:1, :])
        expert = loader.load(ChosenExpert(ChosenExperts(ids, scale_rows), 0, number))
        h = hidden_activations(r, expert, options, even=not total.hidden_major)
        affinities = choices.of(ids)
        if total.hidden_major:
            affinities = [over_partitions(affinities[0], 0)]
        add_expert(total, h, expert, affinities)
        for _ in range(cores):
            queue.pop()
        nisa.register_load(dst=more, src=queue.ticket)
    total.finish(out)


class _Choices:
    """The ids and affinities of every token, by tiles of 128 tokens: ``[n, K]`` float32 each."""

    def __init__(self, routing: Routing, tokens: int, first_expert: int, weighted: bool) -> None:
        self.ids: list[Tensor] = []
        self.affinities: list[Tensor | None] = []
        for number, (_, n) in enumerate(tiles(tokens)):
            index = token_tile(routing.expert_index, number, n)
            ids = nl.ndarray(tuple(index.shape), dtype=nl.float32, buffer=nl.sbuf, name="chosen_ids")
            nisa.tensor_scalar(dst=ids, data=index, op0=nl.add, operand0=float(-first_expert))
            self.ids.append(ids)
            self.affinities.append(token_tile(routing.eager, number, n) if weighted else None)

    def of(self, expert: Tensor) -> list[Tensor]:
        """What each token adds of ``expert [128, 1]``: ``[n, 1]`` float32 per tile, an id given twice counts
        twice.
        """
        found = []
        for ids, affinities in zip(self.ids, self.affinities, strict=True):
            n, k = ids.shape
            match = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.sbuf, name="matching_choices")
            if affinities is None:
                nisa.tensor_scalar(dst=match, data=ids, op0=nl.equal, operand0=expert[0:n, :])
            else:
                nisa.scalar_tensor_tensor(
                    dst=match,
                    data=ids,
                    op0=nl.equal,
                    operand0=expert[0:n, :],
                    op1=nl.multiply,
                    operand1=affinities,
                )
            weight = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf, name="expert_affinity")
            nisa.tensor_reduce(dst=weight, op=nl.add, data=match, axis=1)
            found.append(weight)
        return found


class _Queue:
    """The touched experts in ascending order, alike on every partition: no address is needed to take the
    next.

    ``remaining [128, L]`` holds L - e where expert e is still to be taken, else 0: its maximum is the next
    one.
    """

    def __init__(self, choices: _Choices, experts: int) -> None:
        self.experts = experts
        self.remaining = nl.ndarray(
            (PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf, name="experts_to_take"
        )
        self.head = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf, name="next_expert")
        self.ticket = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf, name="ticket")
        rank = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf, name="expert_ranks")
        nisa.iota(dst=rank, pattern=[[-1, experts]], offset=experts)
        # 16-bit operands: the fast mode of the Vector engine; float16 holds ids up to 2048 exactly.
        number = nl.ndarray((PARTITIONS, experts), dtype=nl.float16, buffer=nl.sbuf, name="expert_numbers")
        ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float16, buffer=nl.sbuf, name="ones")
        nisa.iota(dst=number, pattern=[[1, experts]], offset=0)
        nisa.memset(dst=ones, value=1.0)
        for start, count in tiles(experts, MOVING):
            at = nl.ds(start, count)
            touched = nl.ndarray(
                (PARTITIONS, count), dtype=nl.float32, buffer=nl.psum, name="touched_experts"
            )
            for ids in choices.ids:
                n, k = ids.shape
                for choice in range(k):
                    equal = nl.ndarray((n, count), dtype=nl.float16, buffer=nl.sbuf, name="equal_ids")
                    nisa.tensor_scalar(
                        dst=equal, data=number[0:n, at], op0=nl.equal, operand0=ids[:, nl.ds(choice, 1)]
                    )
                    nisa.nc_matmul(dst=touched, stationary=ones[0:n, :], moving=equal)
            nisa.scalar_tensor_tensor(
                dst=self.remaining[:, at],
                data=touched,
                op0=nl.greater,
                operand0=0.0,
                op1=nl.multiply,
                operand1=rank[:, at],
            )

    def pop(self) -> None:
        """Take the next expert: ``head`` and ``ticket`` become L - e, or 0 when none is left."""
        nisa.tensor_reduce(dst=self.head, op=nl.maximum, data=self.remaining, axis=1)
        nisa.scalar_tensor_tensor(
            dst=self.remaining,
            data=self.remaining,
            op0=nl.less,
            operand0=self.head,
            op1=nl.multiply,
            operand1=self.remaining,
        )
        nisa.tensor_copy(dst=self.ticket, src=self.head[0:1, :])

    def expert(self) -> Tensor:
        """The id of the expert that was taken last, ``[128, 1]`` float32."""
        ids = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf, name="taken_expert")
        nisa.tensor_scalar(
            dst=ids, data=self.head, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=float(self.experts)
        )
        return ids
