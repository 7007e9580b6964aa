"""MX instructions: the block-scaled matmul of the Tensor engine and the quantiser of the Vector engine.

Owns their operand rules and costs; the arithmetic lives in mx_tiles. Both exist from trn3 (NeuronCore-v4) on.
"""

from __future__ import annotations

import numpy as np

from ....arrays import Array
from ..cost import compute, matmul
from ..dtypes import is_x4
from ..errors import ConstraintViolation
from ..memory import Buffer
from ..mx_tiles import BLOCK_PARTITIONS, block_product, quantise_tile, scale_partitions, scale_rows
from ..operands import elements, on_chip
from ..program import Program, current
from ..tensor import Tensor
from .matmul import accumulate_into_psum, check_contraction, check_pe_tile, check_product, check_psum_tile

__all__ = ["nc_matmul_mx", "quantize_mx"]

_QUADRANT = 32


def _needs_mx(prog: Program, instruction: str) -> None:
    if not prog.chip.has_mx:
        raise ConstraintViolation(
            instruction,
            f"chip {prog.chip.name}",
            "has no MX instructions; take trn3, or weights that are not MX",
        )


def _check_partitions(instruction: str, name: str, tile: Tensor) -> None:
    if tile.shape[0] % _QUADRANT or tile.shape[0] > 128:
        raise ConstraintViolation(
            instruction,
            f"{name}={tile!r}",
            f"{tile.shape[0]} partitions: must be 32, 64, 96 or 128; pad with codes of zero",
        )


def _check_scale(instruction: str, name: str, scale: Tensor, data: Tensor) -> None:
    """Scales: uint8 (or E8M0), as many columns as the data, and partitions up to the last block's row."""
    on_chip(instruction, {name: scale}, (Buffer.sbuf,))
    if scale.dtype.name not in ("uint8", "float8_e8m0fnu"):
        raise ConstraintViolation(instruction, f"{name}={scale!r}", "must be uint8, the E8M0 code")
    needed = scale_partitions(data.shape[0])
    if not (needed <= scale.shape[0] <= data.shape[0] and elements(scale) == elements(data)):
        raise ConstraintViolation(
            instruction,
            f"{name}={scale!r}",
            f"data has {data.shape[0]} partitions x {elements(data)}: scales sit on the 4 leading "
            "partitions of "
            "each "
            f"quadrant of 32, so the tile spans {needed}..{data.shape[0]} partitions x {elements(data)}",
        )


def _packed(tile: Tensor) -> str:
    """Name of the packed type; the plain name of any other."""
    return tile.dtype.names[0] if tile.dtype.names else str(tile.dtype)


def _words(prog: Program, tile: Tensor) -> Array:
    """The packed words as plain unsigned integers ``[P, N]``."""
    value = prog.load(tile)
    return value.view(f"u{tile.dtype.itemsize}").reshape(tile.shape[0], -1)


def _scales(prog: Program, tile: Tensor) -> Array:
    return prog.load(tile).view(np.uint8).reshape(tile.shape[0], -1)


def nc_matmul_mx(
    dst: Tensor,
    stationary: Tensor,
    moving: Tensor,
    stationary_scale: Tensor,
    moving_scale: Tensor,
    tile_position: tuple[int, ...] | None = None,
    tile_size: tuple[int, ...] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> None:
    """dst = (or +=) stationary^T @ moving over partitions and the 4 packed elements, scales applied inside.

    Args:
        dst: PSUM [M, N], float32 or bfloat16; accumulates as nc_matmul does.
        stationary: SBUF [P, M] of float4_e2m1fn_x4, float8_e4m3fn_x4 or float8_e5m2_x4; P in 32, 64, 96, 128,
            M even and at most 128.
        moving: SBUF [P, N] of one of these types; N <= 512 for float32, <= 1024 for bfloat16 results.
        stationary_scale, moving_scale: SBUF uint8; the E8M0 code of partitions 8b..8b+7 of a quadrant, one
            per column, lies on partition b of that quadrant.
        tile_position, tile_size: rows of the PE array.
        accumulate: None, True or False.
        name: ignored.

    Raises:
        ConstraintViolation: no MX on this chip, or an operand breaks a rule.
    """
    instruction = "nc_matmul_mx"
    prog = current()
    _needs_mx(prog, instruction)
    check_psum_tile(prog, instruction, dst)
    on_chip(instruction, {"stationary": stationary, "moving": moving}, (Buffer.sbuf,))
    for label, tile in (("stationary", stationary), ("moving", moving)):
        if not is_x4(tile.dtype):
            raise ConstraintViolation(
                instruction, f"{label}={tile!r}", "must be a packed x4 type; quantize_mx makes them"
            )
        _check_partitions(instruction, label, tile)
    check_contraction(instruction, stationary, moving)
    _check_scale(instruction, "stationary_scale", stationary_scale, stationary)
    _check_scale(instruction, "moving_scale", moving_scale, moving)
    columns, width = elements(stationary), elements(moving)
    limit = prog.chip.stationary_columns
    if columns > limit or columns % 2:
        raise ConstraintViolation(
            instruction, f"stationary={stationary!r}", f"{columns} columns: must be even and at most {limit}"
        )
    check_product(prog, instruction, dst, moving, columns, width)
    check_pe_tile(
        prog, instruction, tile_position, tile_size, stationary.shape[0], columns, whole_columns=True
    )
    sources = (stationary, moving, stationary_scale, moving_scale)
    if prog.issue(
        instruction, engine="tensor", dst=dst, sources=sources, cost=matmul(prog.chip, columns, width)
    ):
        with np.errstate(all="ignore"):
            product = block_product(
                _words(prog, stationary),
                _scales(prog, stationary_scale),
                _packed(stationary),
                _words(prog, moving),
                _scales(prog, moving_scale),
                _packed(moving),
            )
            accumulate_into_psum(prog, dst, product, accumulate)


def quantize_mx(dst: Tensor, src: Tensor, dst_scale: Tensor, name: str | None = None) -> None:
    """Quantise ``src`` to MXFP8: 8 partitions x 4 consecutive elements share one E8M0 scale. Vector engine.

    Args:
        dst: SBUF [P, N] of float8_e4m3fn_x4 or float8_e5m2_x4.
        src: SBUF [P, 4 * N] (any free shape) of float16 or bfloat16; P in 32, 64, 96, 128.
        dst_scale: SBUF uint8 with N columns; block b of a quadrant lands on its partition b, other partitions
            keep what they held.
        name: ignored.

    Raises:
        ConstraintViolation: no MX on this chip, or an operand breaks a rule.
    """
    instruction = "quantize_mx"
    prog = current()
    _needs_mx(prog, instruction)
    on_chip(instruction, {"dst": dst, "src": src}, (Buffer.sbuf,))
    if src.dtype.name not in ("float16", "bfloat16"):
        raise ConstraintViolation(
            instruction, f"src={src!r}", "must be float16 or bfloat16; cast with tensor_copy first"
        )
    packed = _packed(dst)
    if packed not in ("float8_e4m3fn_x4", "float8_e5m2_x4"):
        raise ConstraintViolation(instruction, f"dst={dst!r}", "must be float8_e4m3fn_x4 or float8_e5m2_x4")
    _check_partitions(instruction, "src", src)
    if dst.shape[0] != src.shape[0] or 4 * elements(dst) != elements(src):
        raise ConstraintViolation(
            instruction,
            f"dst={dst!r}",
            f"src has {src.shape[0]} partitions x {elements(src)}: dst must have a quarter of the elements",
        )
    _check_scale(instruction, "dst_scale", dst_scale, dst)
    # Four elements per partition and cycle (Trainium3 architecture guide).
    cost = compute(prog.chip, "vector", elements(src) / 4)
    if not prog.issue(instruction, engine="vector", dst=(dst, dst_scale), sources=(src,), cost=cost):
        return
    with np.errstate(all="ignore"):
        values = prog.load(src).reshape(src.shape[0], -1)
        words, scales = quantise_tile(values, packed, prog.chip.mx_scale_headroom)
    prog.store(dst, words.view(dst.dtype).reshape(dst.shape))
    rows = scale_rows(src.shape[0])
    for first in range(0, len(rows), _QUADRANT // BLOCK_PARTITIONS):
        row = int(rows[first])
        tile = dst_scale[row : row + _QUADRANT // BLOCK_PARTITIONS]
        block = scales[first : first + _QUADRANT // BLOCK_PARTITIONS]
        prog.store(tile, block.reshape(tile.shape))
