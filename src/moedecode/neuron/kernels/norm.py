"""RMSNorm of the block's input, with an optional fused residual, and the MX quantisation of its result.

Owns stage 1: HBM rows in, the normed hidden in SBUF on both cores out. Knows no router and no experts.
Letters: T tokens, H hidden; a row is (t, j), token t and segment j of J (see rows.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from .nki_names import nisa, nl
from .rows import RowTiling, complete, part_of
from .tiles import MOVING, PARTITIONS, QUAD, Tensor, core, exchange, exchange_and_add, share, tiles


def rmsnorm(
    inp: Tensor,
    gamma: Tensor | None,
    eps: float,
    hidden_actual: int | None = None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor:
    """r = s * rsqrt(sum(s^2)/hidden_actual + eps) * gamma, s = inp [+ residual] in float32, rounded once.

    ``inp [B, S, H]`` or ``[T, H]`` and ``residual`` likewise, ``gamma [1, H]`` or None, ``residual_out [T,
    H]`` (s in its dtype), all in HBM, H a multiple of 128; each is read once per chip. Returns ``[128,
    H/128, T]`` in ``inp``'s dtype, h = 128*k + p, whole on both cores.
    """
    h = inp.shape[-1]
    t = _tokens(inp)
    part = part_of(h, t)
    shape = (PARTITIONS, h // PARTITIONS, t)
    normed = nl.ndarray(shape, dtype=inp.dtype, buffer=nl.sbuf, name="normed_hidden")
    for first, count, rows in normed_rows(inp, gamma, eps, hidden_actual, residual, residual_out, part):
        part.turn(rows, normed, first, count)
    complete(normed, part)
    return normed


def normed_rows(
    inp: Tensor,
    gamma: Tensor | None,
    eps: float,
    hidden_actual: int | None,
    residual: Tensor | None,
    residual_out: Tensor | None,
    part: RowTiling,
) -> Iterator[tuple[int, int, Tensor]]:
    """(first token, tokens, normed rows ``[tokens * J, width]``) of this core's tiles, as :func:`rmsnorm`."""
    h, t = inp.shape[-1], _tokens(inp)
    inp = inp.reshape((t, h))
    j, width = part.segments, part.width
    largest = max((n for _, n in part.token_tiles()), default=0)
    weights = _Gamma(gamma, part, largest)
    same_token = _same_token(largest, j) if j > 1 and largest else None  # [largest * J, largest * J]
    for first, count in part.token_tiles():
        used = count * j
        s = part.load(inp, first, count)  # [used, width]
        if residual is not None:
            total = nl.ndarray((used, width), dtype=nl.float32, buffer=nl.sbuf, name="residual_sum")
            addend = part.load(residual.reshape((t, h)), first, count)
            nisa.tensor_tensor(dst=total, data1=s, data2=addend, op=nl.add)
            s = total
            if residual_out is not None:
                part.store(residual_out, s, first, count)
        scale = _inverse_rms(s, part, same_token, eps, hidden_actual or h)  # [used, 1]
        rows = nl.ndarray((used, width), dtype=inp.dtype, buffer=nl.sbuf, name="normed_rows")
        weights.scale_rows(rows, s, scale)
        yield first, count, rows


def _tokens(x: Tensor) -> int:
    t = 1
    for size in x.shape[:-1]:
        t *= size
    return t


def _same_token(count: int, j: int) -> Tensor:
    """``[count * J, count * J]`` float32, 1 where two rows belong to one token."""
    used = count * j
    same = nl.ndarray((used, used), dtype=nl.float32, buffer=nl.sbuf, name="same_token")
    if count == 1:
        nisa.memset(dst=same, value=1.0)
        return same
    identity = nl.shared_identity_matrix(PARTITIONS, dtype=nl.float32)
    token_of = nl.ndarray((count, count, j), dtype=nl.float32, buffer=nl.sbuf, name="token_of_row")
    nisa.tensor_copy(dst=token_of, src=identity.ap([[PARTITIONS, count], [1, count], [0, j]]))
    token_of = token_of.reshape((count, used))  # [token, row]: 1 where the row is the token's
    product = nl.ndarray((used, used), dtype=nl.float32, buffer=nl.psum, name="same_token")
    nisa.nc_matmul(dst=product, stationary=token_of, moving=token_of, is_stationary_onezero=True)
    nisa.tensor_copy(dst=same, src=product)
    return same


def _inverse_rms(s: Tensor, part: RowTiling, same_token: Tensor | None, eps: float, width: int) -> Tensor:
    """rsqrt(sum over the token of s^2 / ``width`` + eps) on every row of ``s [used, n]``: ``[used, 1]``."""
    used = s.shape[0]
    squares = nl.ndarray(tuple(s.shape), dtype=nl.float32, buffer=nl.sbuf, name="squares")
    total = nl.ndarray((used, 1), dtype=nl.float32, buffer=nl.sbuf, name="sum_of_squares")
    nisa.activation(
        dst=squares,
        op=nl.square,
        data=s,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    if not part.whole_rows:
        exchange_and_add(total)
    if same_token is not None:
        summed = nl.ndarray((used, 1), dtype=nl.float32, buffer=nl.psum, name="sum_of_squares")
        nisa.nc_matmul(
            dst=summed, stationary=same_token[0:used, 0:used], moving=total, is_stationary_onezero=True
        )
        total = summed
    offset = nl.ndarray((used, 1), dtype=nl.float32, buffer=nl.sbuf, name="norm_eps")
    nisa.memset(dst=offset, value=eps)
    inverse = nl.ndarray((used, 1), dtype=nl.float32, buffer=nl.sbuf, name="inverse_rms")
    nisa.activation(dst=inverse, op=nl.rsqrt, data=total, scale=1.0 / width, bias=offset)
    return inverse


class _Gamma:
    """gamma as rows: segment j of the columns on every row (t, j), spread over tokens by the PE, in PSUM."""

    def __init__(self, gamma: Tensor | None, part: RowTiling, largest: int) -> None:
        self.segments: Tensor = None if gamma is None else self._load(gamma, part)  # [J, width]
        self.spread: Tensor = None  # [J, largest * J]
        if self.segments is not None and largest > 1:
            self.spread = self._spreader(part.segments, largest)

    @staticmethod
    def _load(gamma: Tensor, part: RowTiling) -> Tensor:
        """This core's columns; when both cores need them all, each reads half and they exchange."""
        j, n = part.segments, part.width
        segments = nl.ndarray((j, n), dtype=gamma.dtype, buffer=nl.sbuf, name="gamma")
        this, cores = core()
        both = part.whole_rows and cores > 1
        start, length = share(n) if both else (0, n)
        source = gamma.reshape((part.hidden,)).ap(
            [[n, j], [1, length]], offset=part.column * PARTITIONS + start
        )
        nisa.dma_copy(dst=segments[:, nl.ds(start, length)], src=source)
        if both:
            exchange(segments[:, nl.ds(*share(n, 1 - this))], segments[:, nl.ds(start, length)])
        return segments

    def _spreader(self, j: int, count: int) -> Tensor:
        """``[J, count * J]``, 1 where row (t, j) has that segment."""
        spread = nl.ndarray((j, count, j), dtype=self.segments.dtype, buffer=nl.sbuf, name="gamma_spreader")
        if j == 1:
            nisa.memset(dst=spread, value=1.0)
        else:
            identity = nl.shared_identity_matrix(PARTITIONS, dtype=spread.dtype)
            nisa.tensor_copy(dst=spread, src=identity.ap([[PARTITIONS, j], [0, count], [1, j]]))
        return spread.reshape((j, count * j))

    def scale_rows(self, dst: Tensor, s: Tensor, scale: Tensor) -> None:
        """``dst`` = ``s`` * ``scale [used, 1]`` * gamma, rounded once."""
        used, width = s.shape
        if self.segments is None:
            nisa.tensor_scalar(dst=dst, data=s, op0=nl.multiply, operand0=scale)
            return
        if self.spread is None:  # one token: the segments are its rows
            nisa.scalar_tensor_tensor(
                dst=dst, data=s, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=self.segments
            )
            return
        scaled = nl.ndarray((used, width), dtype=nl.float32, buffer=nl.sbuf, name="scaled_rows")
        nisa.activation(dst=scaled, op=nl.copy, data=s, scale=scale)  # leaves the Vector engine one pass
        for start, n in tiles(width, MOVING):
            at = nl.ds(start, n)
            factor = nl.ndarray((used, n), dtype=nl.float32, buffer=nl.psum, name="gamma_rows")
            nisa.nc_matmul(
                dst=factor,
                stationary=self.spread[:, 0:used],
                moving=self.segments[:, at],
                is_stationary_onezero=True,
            )
            nisa.tensor_tensor(dst=dst[:, at], data1=scaled[:, at], data2=factor, op=nl.multiply)


def quantize_hidden(normed: Tensor) -> tuple[Tensor, Tensor]:
    """The E4M3 codes and E8M0 scales of ``normed [128, H/128, T]``, H a multiple of 512, 16-bit dtype.

    Returns ``[128, H/512, T]`` float8_e4m3fn_x4, element q of (p, i, t) is h = q*(H/4) + 128*i + p, and
    ``[128, H/512, T]`` uint8, the scale of partitions 8b..8b+7 on partition 32*(b div 4) + (b mod 4). Both
    cores quantise everything: four elements a cycle cost less than sending half of the codes across.
    """
    _, k, t = normed.shape
    mx_tiles = k // QUAD
    shape = (PARTITIONS, mx_tiles, t)
    codes = nl.ndarray(shape, dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf, name="hidden_codes")
    scales = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf, name="hidden_scales")
    quads = normed.ap([[k * t, PARTITIONS], [t, mx_tiles], [1, t], [mx_tiles * t, QUAD]])
    nisa.quantize_mx(dst=codes, src=quads, dst_scale=scales)  # [128, H/512, T, 4] -> [128, H/512, T]
    return codes, scales
