"""The two matmuls of an MX expert: gate and up with what follows them up to quantised h, and down.

Owns the arithmetic between loaded weights and PSUM tiles of y. Knows neither where weights lie nor what
becomes of y.
Letters: T tokens, n of them in one tile; I-tile pieces as in expert_mx; h is the product act(gate) * up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .expert_loads_mx import ExpertTiles, Slab
from .expert_mx import Piece
from .nki_names import nisa, nl
from .tiles import MOVING, PARTITIONS, QUAD, ExpertOptions, Tensor, tiles

SWISH_ALPHA = 1.702


@dataclass(frozen=True)
class Quantised:
    """E4M3 codes ``[128, tiles, T]`` (x4) and their E8M0 scales, uint8 in the on-chip form of that shape."""

    codes: Tensor
    scales: Tensor

    def token(self, t: int) -> Quantised:
        """Token ``t`` alone, ``[128, tiles, 1]``."""
        return Quantised(self.codes[:, :, nl.ds(t, 1)], self.scales[:, :, nl.ds(t, 1)])

    def operand(self, name: str, rows: int, tile: int, start: int, n: int) -> dict[str, Tensor]:
        """Columns ``[start, start + n)`` of a tile as the ``name`` operand of an MX matmul."""
        at = nl.ds(start, n)
        return {name: self.codes[0:rows, tile, at], f"{name}_scale": self.scales[0:rows, tile, at]}


def hidden_activations(
    r: Quantised, expert: ExpertTiles, options: ExpertOptions, even: bool = False
) -> Quantised:
    """h = act(gate) * (up + up_offset) of the expert's pieces, rounded to the io dtype and quantised.

    Returns ``[128, pieces, T]``; ``even`` adds a column of zeros to an odd T: h can then be stationary.
    """
    tokens = r.codes.shape[2]
    extra = tokens % 2 if even else 0
    shape = (PARTITIONS, len(expert.pieces), tokens + extra)
    h = Quantised(
        nl.ndarray(shape, dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf, name="h_codes"),
        nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name="h_scales"),
    )
    if extra:
        for part in (h.codes, h.scales):
            nisa.memset(dst=part[:, :, nl.ds(tokens, 1)], value=0)
    for slab in expert.slabs:
        for i, piece in enumerate(slab.pieces):
            for start, n in tiles(tokens):
                product = _gate_times_up(r, slab, i, start, n, expert.gate_up_bias, options)  # [rows, n, 4]
                at = nl.ds(start, n)
                nisa.quantize_mx(
                    dst=h.codes[0 : piece.rows, slab.first + i, at],
                    src=product,
                    dst_scale=h.scales[0 : piece.rows, slab.first + i, at],
                )
    return h


def _gate_times_up(
    r: Quantised, slab: Slab, i: int, start: int, n: int, bias: Tensor | None, options: ExpertOptions
) -> Tensor:
    """Piece ``i`` of h for n tokens from ``start``: ``[rows, n, 4]`` in the io dtype, zero on padding."""
    piece = slab.pieces[i]
    gate, up = (_project(r, slab, i, g, start, n) for g in (0, 1))  # [lanes, 4, n] in PSUM
    activated = nl.ndarray((piece.lanes, QUAD, n), dtype=nl.float32, buffer=nl.sbuf, name="activated_gate")
    h = nl.ndarray((piece.rows, n, QUAD), dtype=options.io_dtype, buffer=nl.sbuf, name="h")
    if piece.padded:
        nisa.memset(dst=h, value=0.0)
    for first, quads, lanes in _quad_runs(piece, single=bias is not None):
        place = (slice(0, lanes), nl.ds(first, quads), slice(None))
        gate_bias, up_bias = (
            (None, None)
            if bias is None
            else (bias[0:lanes, g, slab.first + i, nl.ds(first, 1)] for g in (0, 1))
        )
        _adjust(gate[place], gate_bias, 0.0, options.gate_clamp)
        _adjust(up[place], up_bias, options.up_offset, options.up_clamp)
        activate(activated[place], gate[place], options)
        target = h.ap([[n * QUAD, lanes], [1, quads], [QUAD, n]], offset=first)  # [lanes, quads, n]
        nisa.tensor_tensor(dst=target, data1=up[place], data2=activated[place], op=nl.multiply)
    return h


def _project(r: Quantised, slab: Slab, i: int, g: int, start: int, n: int) -> Tensor:
    """Gate (g = 0) or up of a piece, ``[lanes, 4, n]``: as h must lie for down, hence weights stationary."""
    piece = slab.pieces[i]
    shape = (piece.lanes, QUAD, n)
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum, name=("gate", "up")[g])
    for q, (offset, lanes) in enumerate(zip(slab.offsets[i], piece.columns, strict=True)):
        for tile in range(r.codes.shape[1] if lanes else 0):
            nisa.nc_matmul_mx(
                dst=result[0:lanes, q, :],
                stationary=slab.codes[:, g, tile, nl.ds(offset, lanes)],
                stationary_scale=slab.scales[:, g, tile, nl.ds(offset, lanes)],
                **r.operand("moving", PARTITIONS, tile, start, n),
            )
    return result


def _quad_runs(piece: Piece, single: bool) -> Iterator[tuple[int, int, int]]:
    """(first quad, quads, lanes) that one elementwise instruction can take; ``single``: one quad each."""
    first = 0
    for q in range(1, QUAD + 1):
        if q == QUAD or single or piece.columns[q] != piece.columns[first]:
            if piece.columns[first]:
                yield first, q - first, piece.columns[first]
            first = q


def _adjust(
    values: Tensor, bias: Tensor | None, offset: float, clamp: tuple[float | None, float | None]
) -> None:
    """clamp(values + bias) + offset in place; ``bias`` holds the offset already, the limits move with it.

    Two steps per instruction.
    """
    low, high = clamp
    steps: list[tuple[Any, Any]] = []
    if bias is not None or offset:
        steps.append((nl.add, offset if bias is None else bias))
    steps += [
        (op, limit + offset) for op, limit in ((nl.minimum, high), (nl.maximum, low)) if limit is not None
    ]
    for at in range(0, len(steps), 2):
        second = {"op1": steps[at + 1][0], "operand1": steps[at + 1][1]} if at + 1 < len(steps) else {}
        nisa.tensor_scalar(dst=values, data=values, op0=steps[at][0], operand0=steps[at][1], **second)


def activate(dst: Tensor, src: Tensor, options: ExpertOptions) -> None:
    """The activation function of the gate, on the Scalar engine; Swish is x * sigmoid(alpha * x)."""
    functions = {
        "silu": nl.silu,
        "gelu": nl.gelu,
        "gelu_tanh": nl.gelu_apprx_tanh,
        "relu": nl.relu,
        "relu2": nl.relu,
    }
    alpha = SWISH_ALPHA if options.alpha is None else options.alpha
    if options.activation in functions:
        nisa.activation(dst=dst, op=functions[options.activation], data=src)
        if options.activation == "relu2":
            nisa.activation(dst=dst, op=nl.square, data=dst)
    elif options.activation != "swish":
        raise ValueError(
            f"activation={options.activation!r}: the kernels know swish, {', '.join(functions)}; "
            "take the cpu backend"
        )
    elif alpha == SWISH_ALPHA:
        nisa.activation(dst=dst, op=nl.gelu_apprx_sigmoid, data=src)
    else:  # silu(alpha * x) / alpha
        nisa.activation(dst=dst, op=nl.silu, data=src, scale=float(alpha))
        nisa.tensor_scalar(dst=dst, data=dst, op0=nl.multiply, operand0=1.0 / alpha)


def down_hidden_major(h: Quantised, tokens: int, expert: ExpertTiles) -> Iterator[tuple[int, Tensor]]:
    """(first j, ``[128, some j, T]`` in PSUM) of y, h = 128*j + p: weights stationary, half the PE time for
    few tokens.
    """
    group = MOVING // tokens
    bias = expert.down_bias
    for chunk in expert.chunks:
        first = chunk.start // PARTITIONS
        for start, n in tiles(chunk.columns // PARTITIONS, group):
            y = nl.ndarray((PARTITIONS, n, tokens), dtype=nl.float32, buffer=nl.psum, name="y")
            for j in range(n):
                at = nl.ds((start + j) * PARTITIONS, PARTITIONS)
                for i, piece in enumerate(expert.pieces):
                    nisa.nc_matmul_mx(
                        dst=y[:, j, :],
                        stationary=chunk.codes[0 : piece.rows, i, at],
                        stationary_scale=chunk.scales[0 : piece.rows, i, at],
                        **h.operand("moving", piece.rows, i, 0, tokens),
                    )
            if bias is not None:
                # The transpose of the bias rows adds them to every token's column.
                rows = bias.shape[0]
                identity = nl.shared_identity_matrix(PARTITIONS, dtype=bias.dtype)
                columns = identity.ap([[PARTITIONS, rows], [1, n], [0, tokens]], offset=first + start)
                nisa.nc_matmul(dst=y, stationary=bias, moving=columns)
            yield first + start, y


def down_token_major(
    h: Quantised, tokens: int, expert: ExpertTiles
) -> Iterator[tuple[int, int, int, Tensor]]:
    """(first token, tokens n, first column, ``[n or more, 512]`` in PSUM) of y: h stationary, for many
    tokens.
    """
    bias = expert.down_bias
    for chunk in expert.chunks:
        for start, n in tiles(tokens):
            even = n + n % 2
            for column, width in tiles(chunk.columns, MOVING):
                at = nl.ds(column, width)
                y = nl.ndarray((even, width), dtype=nl.float32, buffer=nl.psum, name="y")
                for i, piece in enumerate(expert.pieces):
                    nisa.nc_matmul_mx(
                        dst=y,
                        moving=chunk.codes[0 : piece.rows, i, at],
                        moving_scale=chunk.scales[0 : piece.rows, i, at],
                        **h.operand("stationary", piece.rows, i, start, even),
                    )
                if bias is not None:
                    ones = nl.shared_identity_matrix(PARTITIONS, dtype=bias.dtype).ap(
                        [[PARTITIONS, 1], [0, even]]
                    )
                    row = bias[:, nl.ds(chunk.start + column, width)]
                    nisa.nc_matmul(dst=y, stationary=ones, moving=row)
                yield start, n, chunk.start + column, y
