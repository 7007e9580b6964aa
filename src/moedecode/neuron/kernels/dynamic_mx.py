"""The all-expert MX leaf, dynamic form: each local expert sees blocks of the tokens routed to it, as many as
there are.

Owns the lists of routed tokens and the loop over blocks. Tokens are gathered and their outputs scattered by
matmuls with selection matrices: nothing leaves the chip. Knows no layouts.
Letters: T tokens, n of one tile of 128, L local experts, B tokens of a block; slot s of an expert is its s-th
token.
"""

from __future__ import annotations

from dataclasses import replace

from .down_bias import add_local_biases
from .expert_loads_mx import ExpertLoader, ExpertTiles
from .expert_mx import KnownExpert, Unit, units
from .nki_names import nisa, nl
from .norm import quantize_hidden
from .partial_sum import PartialSum
from .projections_mx import Quantised, down_token_major, hidden_activations
from .tiles import (
    MOVING,
    MX_TILE,
    PARTITIONS,
    ExpertOptions,
    ExpertTensors,
    Tensor,
    ceil_div,
    core,
    tiles,
    token_tile,
    token_tiles,
)

RESIDENT_BYTES = 160 * 1024
"""Of one expert's codes and scales per partition; a larger expert is split over the cores."""


def all_expert_mx_dynamic(
    r_sb: Tensor,
    affinities: Tensor | None,
    weights: ExpertTensors,
    out: Tensor,
    options: ExpertOptions,
    block_size: int,
    partial: Tensor | None = None,
    routed: Tensor | None = None,
) -> None:
    """The sum of :func:`~.all_expert_mx.all_expert_mx`, computing only routed tokens, B of them at a time.

    ``r_sb [128, H/128, T]`` in the io dtype (not quantised), ``affinities [T, L]`` as there. A token is
    routed where ``routed [T, L]`` (default: the affinities) is not 0; to every expert under "no_scale".
    ``block_size`` B: even, 2 to 128. An expert is read once and stays in SBUF for its blocks. ``partial [T
    or 128, ceil(T/128), H]``.

    Raises:
        ValueError: a block size out of range.
    """
    if block_size % 2 or not 2 <= block_size <= PARTITIONS:
        raise ValueError(f"block_size={block_size}: must be even, from 2 to {PARTITIONS}")
    tokens, hidden = r_sb.shape[2], weights.down.shape[-1]
    experts = weights.gate_up.shape[0]
    total = PartialSum(tokens, hidden, False, partial)
    total.zero()
    mask = routed if routed is not None and affinities is not None else affinities
    lists = _RoutedTokens(mask, tokens, experts, block_size, r_sb.dtype)
    rows = _token_rows(r_sb)  # [n, tiles, H]
    unbiased = replace(weights, down_bias=None)  # the biases of all experts are added at once
    for unit in _resident_units(weights):
        loader = ExpertLoader(unbiased, unit.half, options.up_offset, hidden_major=False, resident=True)
        if not loader.pieces:
            continue
        expert = loader.load(KnownExpert(unit.index))
        weight = None if affinities is None else _column(affinities, unit.index, tokens)
        more = lists.start(unit.index)
        while more:
            picked = lists.pick()
            block = Quantised(*quantize_hidden(_gather(rows, picked, tokens)))
            _scatter(total, hidden_activations(block, expert, options), expert, picked, weight)
            lists.advance(more)
    if weights.down_bias is not None:
        add_local_biases(total, weights.down_bias, affinities)
    total.finish(out)


def _resident_units(weights: ExpertTensors) -> list[Unit]:
    experts, _, _, h_tiles, intermediate = weights.gate_up.shape
    columns = 2 * h_tiles * intermediate + ceil_div(intermediate, MX_TILE) * weights.down.shape[-1]
    this, cores = core()
    if cores > 1 and columns * (weights.gate_up.dtype.itemsize + 1) > RESIDENT_BYTES:
        return [Unit(e, this) for e in range(experts)]
    return units(experts)


def _column(per_token: Tensor, e: int, tokens: int) -> list[Tensor]:
    return [token_tile(per_token, i, n)[:, nl.ds(e, 1)] for i, (_, n) in enumerate(tiles(tokens))]


def _token_rows(r_sb: Tensor) -> Tensor:
    """``r_sb [128, H/128, T]`` with tokens on partitions, ``[T or 128, tiles, H]``: a gather contracts it."""
    _, blocks, tokens = r_sb.shape
    shape = (min(tokens, PARTITIONS), token_tiles(tokens), blocks * PARTITIONS)
    rows = nl.ndarray(shape, dtype=r_sb.dtype, buffer=nl.sbuf, name="hidden_rows")
    for number, (first, n) in enumerate(tiles(tokens)):
        for start, count in tiles(blocks, 2 * MOVING // PARTITIONS):  # 1024 16-bit elements to a PSUM bank
            turned = nl.ndarray(
                (n, count * PARTITIONS), dtype=r_sb.dtype, buffer=nl.psum, name="turned_hidden"
            )
            for j in range(count):
                nisa.nc_transpose(
                    dst=turned[:, nl.ds(j * PARTITIONS, PARTITIONS)],
                    data=r_sb[:, start + j, nl.ds(first, n)],
                )
            place = rows[0:n, number, nl.ds(start * PARTITIONS, count * PARTITIONS)]
            nisa.tensor_copy(dst=place, src=turned)
    return rows


class _RoutedTokens:
    """Which tokens an expert has, and the block of them that is being worked on.

    ``slots`` per tile ``[n, L]`` float32: the number of tokens before this one that the expert has, -1 for a
    token it does not have; ``counts [1, L]`` int32. The block takes slots [0, B); advancing subtracts B from
    all.
    """

    def __init__(self, affinities: Tensor | None, tokens: int, experts: int, block: int, io: object) -> None:
        self.block = block
        self.io = io
        self.spans = tiles(tokens)
        self.current: list[Tensor] = []
        self.left = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf, name="tokens_left")
        self.places = nl.ndarray((PARTITIONS, block), dtype=io, buffer=nl.sbuf, name="block_places")
        nisa.iota(dst=self.places, pattern=[[1, block]], offset=0)
        routed = []
        for number, (_, n) in enumerate(self.spans):
            mask = nl.ndarray((n, experts), dtype=nl.bfloat16, buffer=nl.sbuf, name="routed_mask")
            if affinities is None:
                nisa.memset(dst=mask, value=1.0)
            else:
                values = token_tile(affinities, number, n)
                nisa.tensor_scalar(dst=mask, data=values, op0=nl.not_equal, operand0=0.0)
            routed.append(mask)
        self.slots, self.counts = _slots(routed, experts)

    def start(self, e: int) -> Tensor:
        """Begin with the tokens of expert ``e``; returns the register that holds how many are left."""
        self.current = []
        for slots, (_, n) in zip(self.slots, self.spans, strict=True):
            column = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf, name="expert_slots")
            nisa.tensor_copy(dst=column, src=slots[:, nl.ds(e, 1)])
            self.current.append(column)
        nisa.tensor_copy(dst=self.left, src=self.counts[:, nl.ds(e, 1)])
        return nisa.register_alloc(self.left)

    def pick(self) -> list[Tensor]:
        """Selection matrices ``[n, B]``, one per tile of tokens: 1 where the token has that place in the
        block.
        """
        picked = []
        for column, (_, n) in zip(self.current, self.spans, strict=True):
            matrix = nl.ndarray((n, self.block), dtype=self.io, buffer=nl.sbuf, name="picked_tokens")
            nisa.tensor_scalar(dst=matrix, data=self.places[0:n, :], op0=nl.equal, operand0=column)
            picked.append(matrix)
        return picked

    def advance(self, more: Tensor) -> None:
        """Go on to the next block; ``more`` becomes the number of tokens left."""
        for column in self.current:
            nisa.tensor_scalar(dst=column, data=column, op0=nl.subtract, operand0=float(self.block))
        nisa.tensor_scalar(
            dst=self.left,
            data=self.left,
            op0=nl.subtract,
            operand0=float(self.block),
            op1=nl.maximum,
            operand1=0.0,
        )
        nisa.register_load(dst=more, src=self.left)


def _slots(routed: list[Tensor], experts: int) -> tuple[list[Tensor], Tensor]:
    """Slots ``[n, L]`` per tile and counts ``[1, L]`` of the 0/1 masks ``[n, L]``: prefix sums by matmuls."""
    ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf, name="ones")
    earlier = nl.ndarray(
        (PARTITIONS, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf, name="earlier_tokens"
    )  # [t', t]: t' < t
    distance = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf, name="token_distance")
    nisa.memset(dst=ones, value=1.0)
    nisa.iota(dst=distance, pattern=[[1, PARTITIONS]], offset=0, channel_multiplier=-1)
    nisa.tensor_scalar(dst=earlier, data=distance, op0=nl.greater, operand0=0.0)
    slots = []
    for i, mask in enumerate(routed):
        n = mask.shape[0]
        before = nl.ndarray((n, experts), dtype=nl.float32, buffer=nl.psum, name="tokens_before")
        for other in routed[:i]:
            nisa.nc_matmul(dst=before, stationary=ones[0 : other.shape[0], 0:n], moving=other)
        nisa.nc_matmul(dst=before, stationary=earlier[0:n, 0:n], moving=mask)
        slot = nl.ndarray((n, experts), dtype=nl.float32, buffer=nl.sbuf, name="slots")
        # (before + 1) * routed - 1
        nisa.scalar_tensor_tensor(
            dst=slot, data=before, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=mask
        )
        nisa.tensor_scalar(dst=slot, data=slot, op0=nl.subtract, operand0=1.0)
        slots.append(slot)
    sums = nl.ndarray((1, experts), dtype=nl.float32, buffer=nl.psum, name="token_sums")
    counts = nl.ndarray((1, experts), dtype=nl.int32, buffer=nl.sbuf, name="token_counts")
    for mask in routed:
        nisa.nc_matmul(dst=sums, stationary=ones[0 : mask.shape[0], 0:1], moving=mask)
    nisa.tensor_copy(dst=counts, src=sums)
    return slots, counts


def _gather(rows: Tensor, picked: list[Tensor], tokens: int) -> Tensor:
    """The picked tokens of ``rows``, hidden-major ``[128, H/128, B]``; places without a token are zeros."""
    blocks, b = rows.shape[2] // PARTITIONS, picked[0].shape[1]
    result = nl.ndarray((PARTITIONS, blocks, b), dtype=rows.dtype, buffer=nl.sbuf, name="gathered_hidden")
    for start, count in tiles(blocks, MOVING // b):
        gathered = nl.ndarray(
            (PARTITIONS, count, b), dtype=nl.float32, buffer=nl.psum, name="gathered_hidden"
        )
        for j in range(count):
            at = nl.ds((start + j) * PARTITIONS, PARTITIONS)
            for number, (_, n) in enumerate(tiles(tokens)):
                nisa.nc_matmul(dst=gathered[:, j, :], stationary=rows[0:n, number, at], moving=picked[number])
        nisa.tensor_copy(dst=result[:, nl.ds(start, count), :], src=gathered)
    return result


def _scatter(
    total: PartialSum,
    h: Quantised,
    expert: ExpertTiles,
    picked: list[Tensor],
    weight: list[Tensor] | None,
) -> None:
    """Add y of the block to its tokens' sums, times their affinities ``[n, 1]`` per tile."""
    b = picked[0].shape[1]
    places = [_turned(matrix) for matrix in picked]  # [B, n]
    for _, _, column, y in down_token_major(h, b, expert):
        block = nl.ndarray(tuple(y.shape), dtype=nl.float32, buffer=nl.sbuf, name="y_block")
        nisa.tensor_copy(dst=block, src=y)
        for number, place in enumerate(places):
            n = place.shape[1]
            rows = nl.ndarray((n, y.shape[1]), dtype=nl.float32, buffer=nl.psum, name="y_rows")
            nisa.nc_matmul(dst=rows, stationary=place, moving=block, is_stationary_onezero=True)
            factor = None if weight is None else weight[number]
            total.add_token_major(rows, number * PARTITIONS, n, column, factor, fresh=False)


def _turned(matrix: Tensor) -> Tensor:
    n, b = matrix.shape
    turned = nl.ndarray((b, n), dtype=matrix.dtype, buffer=nl.psum, name="turned_picks")
    result = nl.ndarray((b, n), dtype=nl.float32, buffer=nl.sbuf, name="turned_picks")  # the type of y
    nisa.nc_transpose(dst=turned, data=matrix)
    nisa.tensor_copy(dst=result, src=turned)
    return result
