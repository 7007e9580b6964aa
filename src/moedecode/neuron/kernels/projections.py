"""The two matmuls of an expert without block scales: gate and up to h, and down into the partial sum.

Owns the arithmetic between loaded weights and that sum. Knows neither where weights lie nor routing.
Letters: T tokens, n of them in one tile; H hidden, J = H/128; I-tile m of a piece holds 128 of its columns,
one to a partition. Weights are stationary in both matmuls: half the PE time of the other order for few
tokens, and h lies as down contracts it.
"""

from __future__ import annotations

from typing import Any

from .nki_names import nisa, nl
from .partial_sum import PartialSum
from .plain_expert import Piece, PlainExpert, rows_of
from .projections_mx import activate
from .tiles import MOVING, PARTITIONS, ExpertOptions, Tensor, ceil_div, tiles

QUADRANT = 32
"""Tiles start on multiples of so many partitions."""
Steps = list[tuple[Any, Any]]
"""(operator, operand) pairs; the operand is a number, or ``[128, I-tiles]`` or ``[128, 1]`` float32."""


def add_expert(
    total: PartialSum,
    r: Tensor,
    expert: PlainExpert,
    piece: Piece,
    weight: Tensor | None,
    options: ExpertOptions,
    first: int = 0,
    fold: bool = False,
) -> None:
    """Add y of ``piece``, without its bias, for the n tokens of ``r [128, J, n]``, the sum's from ``first``.

    ``weight``: affinities ``[128, n]``, the same on every partition, or None. They multiply h, which costs
    less than multiplying y. Not so in float16, where a small product would lose its bits, but for ``fold``.
    """
    n = r.shape[2]
    late = options.io_dtype == nl.float16 and not fold
    h = hidden_activations(r, expert, piece, None if late else weight, options)
    scale = expert.down_scale(piece)
    fresh = total.begin(first, n)
    for column, columns in tiles(expert.hidden, expert.down_columns(piece)):
        d = expert.down(piece, column, columns)
        pairs = []
        for tile, count, rows in rows_of(piece.columns):
            place = (slice(0, rows), nl.ds(tile, count), slice(None))
            left, right = same_kind(d[place], h[place])
            pairs += [(left[:, i, :], right[:, i, :]) for i in range(count)]
        add_product(total, pairs, column, first, fresh, scale, weight if late else None)


def hidden_activations(
    r: Tensor, expert: PlainExpert, piece: Piece, weight: Tensor | None, options: ExpertOptions
) -> Tensor:
    """h = act(gate) * (up + up_offset) [* weight] of ``piece``: ``[128, I-tiles, n]`` in the io dtype.

    ``r [128, J, n]``; ``weight [128, n]`` or None. Lanes past the last column stay unwritten.
    """
    n = r.shape[2]
    shape = (PARTITIONS, ceil_div(piece.columns, PARTITIONS), n)
    h = nl.ndarray(shape, dtype=options.io_dtype, buffer=nl.sbuf, name="h")
    gate_steps, up_steps = _steps(expert, piece, options)
    for start, columns in tiles(piece.columns, expert.gate_up_columns):
        w = expert.gate_up(piece.start + start, columns)
        w, x = same_kind(w, r)
        for token, some in tiles(n, MOVING):
            for at, width in tiles(columns, MOVING // some * PARTITIONS):
                for tile, count, rows in rows_of(width):
                    number = (start + at) // PARTITIONS + tile
                    gate, up = _project(w, x, at + tile * PARTITIONS, count, rows, token, some)
                    _adjust(gate, gate_steps, number)
                    _adjust(up, up_steps, number)
                    shape = (rows, count, some)
                    activated = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf, name="activated_gate")
                    activate(activated, gate, options)
                    target = h[0:rows, nl.ds(number, count), nl.ds(token, some)]
                    _multiply(target, up, activated, weight, token)
    return h


def _project(
    w: Tensor, r: Tensor, at: int, count: int, rows: int, token: int, some: int
) -> tuple[Tensor, Tensor]:
    """Gate and up, ``[rows, count, some]`` in PSUM, of ``count`` I-tiles of ``rows`` columns from ``at``.

    A ragged tile whose gate and up columns fit the PE together goes through it once.
    """
    blocks, tokens = range(r.shape[1]), nl.ds(token, some)
    if count == 1 and 2 * rows <= PARTITIONS and rows % QUADRANT == 0:
        both = nl.ndarray((2 * rows, 1, some), dtype=nl.float32, buffer=nl.psum, name="gate")
        for j in blocks:
            nisa.nc_matmul(dst=both[:, 0, :], stationary=w[:, j, :, nl.ds(at, rows)], moving=r[:, j, tokens])
        up = nl.ndarray((rows, 1, some), dtype=nl.float32, buffer=nl.psum, name="up")
        nisa.tensor_copy(dst=up, src=both[nl.ds(rows, rows)])
        return both[0:rows], up
    found = []
    for g, name in enumerate(("gate", "up")):
        result = nl.ndarray((rows, count, some), dtype=nl.float32, buffer=nl.psum, name=name)
        for i in range(count):
            columns = nl.ds(at + i * PARTITIONS, rows)
            for j in blocks:
                nisa.nc_matmul(dst=result[:, i, :], stationary=w[:, j, g, columns], moving=r[:, j, tokens])
        found.append(result)
    return found[0], found[1]


def _steps(expert: PlainExpert, piece: Piece, options: ExpertOptions) -> tuple[Steps, Steps]:
    """What gate and up go through before the activation: scale, bias, clamp, and for up the offset."""
    both: list[Steps] = []
    clamps = (options.gate_clamp, options.up_clamp)
    for scale, bias, (low, high), offset in zip(
        expert.gate_up_scale(piece), expert.gate_up_bias(piece), clamps, (0.0, options.up_offset), strict=True
    ):
        steps = [
            (nl.multiply, scale),
            (nl.add, bias),
            (nl.minimum, high),
            (nl.maximum, low),
            (nl.add, offset or None),
        ]
        both.append([(op, operand) for op, operand in steps if operand is not None])
    return both[0], both[1]


def _adjust(values: Tensor, steps: Steps, number: int) -> None:
    """``values [rows, count, n]`` in place through ``steps``, two to an instruction."""
    rows, count, _ = values.shape
    for start in range(0, len(steps), 2):
        some = steps[start : start + 2]
        whole = all(isinstance(operand, int | float) for _, operand in some)
        for i in range(1 if whole else count):
            operands = [_operand(operand, rows, number + i) for _, operand in some]
            second = {"op1": some[1][0], "operand1": operands[1]} if len(some) > 1 else {}
            view = values if whole else values[:, nl.ds(i, 1), :]
            nisa.tensor_scalar(dst=view, data=view, op0=some[0][0], operand0=operands[0], **second)


def _operand(operand: Any, rows: int, tile: int) -> Any:
    if isinstance(operand, int | float):
        return operand
    return operand[0:rows, nl.ds(tile if operand.shape[1] > 1 else 0, 1)]


def _multiply(dst: Tensor, up: Tensor, activated: Tensor, weight: Tensor | None, token: int) -> None:
    """``dst`` = ``up`` (PSUM) * ``activated`` (SBUF) [* weight], all ``[rows, count, n]``."""
    rows, count, n = up.shape
    if weight is not None and weight.shape[1] == 1:
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=up,
            op0=nl.multiply,
            operand0=weight[0:rows, :],
            op1=nl.multiply,
            operand1=activated,
        )
        return
    if weight is not None:
        each = weight.ap([[weight.shape[1], rows], [0, count], [1, n]], offset=token)
        nisa.tensor_tensor(dst=up, data1=up, data2=each, op=nl.multiply)
    nisa.tensor_tensor(dst=dst, data1=up, data2=activated, op=nl.multiply)


def add_product(
    total: PartialSum,
    pairs: list[tuple[Tensor, Tensor]],
    column: int,
    first: int,
    fresh: bool,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
) -> None:
    """Add the sum over (left ``[k, columns]``, right ``[k, n]``) pairs in SBUF of left^T right.

    It belongs to the columns of H from ``column`` (a multiple of 128) and the tokens from ``first``; ``scale
    [128, J]`` or ``[128, 1]`` multiplies it by column, ``weight [128, n]`` by token, of a hidden-major sum.
    """
    columns, n = pairs[0][0].shape[1], pairs[0][1].shape[1]
    if not total.hidden_major:
        for token, some in tiles(n):
            for at, width in tiles(columns, MOVING):
                y = nl.ndarray((some, width), dtype=nl.float32, buffer=nl.psum, name="y")
                for left, right in pairs:
                    nisa.nc_matmul(
                        dst=y, stationary=right[:, nl.ds(token, some)], moving=left[:, nl.ds(at, width)]
                    )
                total.add_token_major(y, first + token, some, column + at, None, fresh)
        return
    for token, some in tiles(n, MOVING):
        for j, count in tiles(columns // PARTITIONS, MOVING // some):
            y = nl.ndarray((PARTITIONS, count, some), dtype=nl.float32, buffer=nl.psum, name="y")
            for i in range(count):
                at = nl.ds((j + i) * PARTITIONS, PARTITIONS)
                for left, right in pairs:
                    nisa.nc_matmul(
                        dst=y[:, i, :], stationary=left[:, at], moving=right[:, nl.ds(token, some)]
                    )
            block = column // PARTITIONS + j
            if scale is not None:
                _scale_columns(y, scale, block)
            total.add_hidden_major(y, block, first + token, _some(weight, token, some), fresh)


def _some(weight: Tensor | None, token: int, some: int) -> Tensor | None:
    """``weight [128, n]`` of a tile of tokens, as a tensor of its own where the tile is not all of them."""
    if weight is None or weight.shape[1] == some:
        return weight
    part = nl.ndarray((PARTITIONS, some), dtype=nl.float32, buffer=nl.sbuf, name="tile_affinities")
    nisa.tensor_copy(dst=part, src=weight[:, nl.ds(token, some)])
    return part


def _scale_columns(y: Tensor, scale: Tensor, block: int) -> None:
    """``y [128, count, n]`` (PSUM) *= ``scale`` of its columns."""
    _, count, n = y.shape
    if scale.shape[1] == 1:
        nisa.tensor_scalar(dst=y, data=y, op0=nl.multiply, operand0=scale)
    elif n < PARTITIONS // 2:
        stride = scale.shape[1]
        each = scale.ap([[stride, PARTITIONS], [1, count], [0, n]], offset=block)
        nisa.tensor_tensor(dst=y, data1=y, data2=each, op=nl.multiply)
    else:  # enough tokens to fill an instruction per block, which two engines can share
        for i in range(count):
            at = y[:, nl.ds(i, 1), :]
            nisa.tensor_scalar(dst=at, data=at, op0=nl.multiply, operand0=scale[:, nl.ds(block + i, 1)])


def same_kind(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float32 if one of them is: the PE multiplies float32 with nothing else."""
    if a.dtype == b.dtype or nl.float32 not in (a.dtype, b.dtype):
        return a, b
    return _widened(a), _widened(b)


def _widened(tensor: Tensor) -> Tensor:
    if tensor.dtype == nl.float32:
        return tensor
    wide = nl.ndarray(tuple(tensor.shape), dtype=nl.float32, buffer=nl.sbuf, name="widened")
    nisa.tensor_copy(dst=wide, src=tensor)
    return wide
