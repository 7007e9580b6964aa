"""Tensor engine: nc_matmul with accumulation in PSUM, and transposes.

Owns the accumulation rule, tile limits and dtype rules of plain (not MX) matmuls. Knows nothing of scales.

Accumulation (public reference of nc_matmul): ``accumulate=None`` decides per PSUM location: the first write
to a location since its allocation overwrites, every later one adds; whoever wrote before, a memset included.
``True`` and ``False`` force it. Sums are float32; a bfloat16 destination is rounded at each write.
"""

from __future__ import annotations

import numpy as np

from ....arrays import Array
from ..cost import compute, matmul
from ..dtypes import is_float
from ..errors import ConstraintViolation
from ..memory import Buffer
from ..operands import elements, engines_for, load_float, on_chip
from ..program import Program, current
from ..tensor import Tensor
from .constants import engine as Engine
from .constants import matmul_perf_mode as PerfMode

__all__ = ["accumulate_into_psum", "check_psum_tile", "nc_matmul", "nc_transpose"]

_VECTOR_TRANSPOSE = 32  # the Vector engine transposes blocks of 32 x 32


def check_psum_tile(prog: Program, instruction: str, dst: Tensor) -> None:
    """``dst`` must be float32 (or bfloat16, from trn3) in PSUM, within one bank per partition."""
    on_chip(instruction, {"dst": dst}, (Buffer.psum,))
    allowed = ("float32", "bfloat16") if prog.chip.psum_bf16 else ("float32",)
    if dst.dtype.name not in allowed:
        raise ConstraintViolation(
            instruction, f"dst={dst!r}", f"must be {' or '.join(allowed)} on {prog.chip.name}"
        )
    check_bank(prog, instruction, dst)


def check_bank(prog: Program, instruction: str, dst: Tensor) -> None:
    """The bytes that one instruction writes per partition must lie within one PSUM bank."""
    width, bank = dst.dtype.itemsize, prog.chip.psum_bank_bytes
    first = dst.offset * width % dst.storage.partition_bytes
    last = (
        first
        + sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True)) * width
        + width
        - 1
    )
    # A tensor of at most one bank is placed within one, a larger one starts at a bank.
    if first // bank != last // bank:
        raise ConstraintViolation(
            instruction,
            f"dst={dst!r}",
            f"writes bytes {first}..{last} of a partition, across PSUM banks of {bank} bytes; tile the free "
            "dimension",
        )


def check_contraction(instruction: str, stationary: Tensor, moving: Tensor) -> None:
    """Both operands must lie on as many partitions: these are what is summed over."""
    if stationary.shape[0] != moving.shape[0]:
        raise ConstraintViolation(
            instruction,
            f"moving={moving!r}",
            f"contracts partitions: must have {stationary.shape[0]} like stationary",
        )


def check_product(
    prog: Program, instruction: str, dst: Tensor, moving: Tensor, columns: int, width: int
) -> None:
    """``dst`` is [columns of the stationary tile, ``width`` of the moving one], which fit a PSUM bank."""
    limit = prog.chip.psum_bank_bytes // dst.dtype.itemsize
    if width > limit:
        raise ConstraintViolation(
            instruction, f"moving={moving!r}", f"{width} columns: at most {limit} for {dst.dtype} results"
        )
    if dst.shape[0] != columns or elements(dst) != width:
        raise ConstraintViolation(
            instruction, f"dst={dst!r}", f"must be [{columns}, {width}]: stationary columns x moving columns"
        )


def accumulate_into_psum(prog: Program, dst: Tensor, product: Array, accumulate: bool | None) -> None:
    """Write ``product`` (float32 ``[partitions, elements]``) to ``dst`` by the accumulation rule."""
    value = product.reshape(dst.shape)
    written = dst.storage.written
    if accumulate is not False and written is not None:
        seen = dst.on(written)
        if accumulate or seen.all():
            value = value + prog.load(dst)
        elif seen.any():
            value = np.where(seen, value + prog.load(dst), value)
    prog.store(dst, value)


def _check_operands(
    prog: Program, stationary: Tensor, moving: Tensor, dst: Tensor, double_row: bool
) -> tuple[int, int]:
    """Check shapes and dtypes; returns the columns of the stationary and of the moving tile."""
    instruction = "nc_matmul"
    on_chip(instruction, {"stationary": stationary, "moving": moving}, (Buffer.sbuf,))
    for name, tile in (("stationary", stationary), ("moving", moving)):
        if not is_float(tile.dtype):
            raise ConstraintViolation(
                instruction,
                f"{name}={tile!r}",
                "must be a float type; integers are cast with tensor_copy first, packed MX types go to "
                "nc_matmul_mx",
            )
    types = {stationary.dtype.name, moving.dtype.name}
    if len(types) > 1 and "float32" in types:
        raise ConstraintViolation(
            instruction,
            f"moving={moving!r}",
            f"float32 goes with float32 only, stationary is {stationary.dtype}; cast one of them",
        )
    fp8 = {name for name in types if name.startswith("float8")}
    if "float8_e4m3fn" in fp8 and prog.chip.generation < 4:
        raise ConstraintViolation(
            instruction,
            "stationary or moving is float8_e4m3fn",
            f"{prog.chip.name} multiplies the older float8_e4m3; float8_e4m3fn needs trn3",
        )
    if {"float8_e4m3", "float8_e4m3fn"} <= fp8:
        raise ConstraintViolation(
            instruction,
            f"moving={moving!r}",
            f"float8_e4m3 and float8_e4m3fn do not mix; stationary is {stationary.dtype}",
        )
    check_contraction(instruction, stationary, moving)
    rows = 1
    if double_row:
        if prog.chip.generation < 3:
            raise ConstraintViolation(
                instruction, "perf_mode", f"double_row needs trn2, this is {prog.chip.name}"
            )
        for name, tile in (("stationary", stationary), ("moving", moving)):
            if not (tile.dtype.name.startswith("float8") and len(tile.shape) >= 3 and tile.shape[1] == 2):
                raise ConstraintViolation(
                    instruction, f"{name}={tile!r}", "double_row takes float8 tiles [P, 2, N]"
                )
        rows = 2
    columns, width = elements(stationary) // rows, elements(moving) // rows
    limit = prog.chip.stationary_columns
    if columns > limit:
        raise ConstraintViolation(
            instruction, f"stationary={stationary!r}", f"{columns} columns: at most {limit}"
        )
    check_product(prog, instruction, dst, moving, columns, width)
    return columns, width


def check_pe_tile(
    prog: Program,
    instruction: str,
    tile_position: tuple[int, ...] | None,
    tile_size: tuple[int, ...] | None,
    rows: int,
    columns: int,
    whole_columns: bool = False,
) -> None:
    """Tiling of the PE array: sizes 32, 64 or 128, positions their multiples, operands no larger than it."""
    position, size = tuple(tile_position or ()), tuple(tile_size or ())
    if not (bool(position) == bool(size) and len(position) in (0, 2) and len(position) == len(size)):
        raise ConstraintViolation(
            instruction,
            "tile_position, tile_size",
            "must be given together, as (row, column) and (rows, columns)",
        )
    if not size:
        return
    smallest = 32 if prog.chip.generation >= 3 else 64
    for name, start, extent, used in (
        ("rows", position[0], size[0], rows),
        ("columns", position[1], size[1], columns),
    ):
        if not (
            smallest <= extent <= 128
            and extent in (32, 64, 128)
            and start % extent == 0
            and start + extent <= 128
        ):
            raise ConstraintViolation(
                instruction,
                f"tile {name}",
                f"{extent} from {start}: must be {smallest}..128 in powers of two, from a multiple of the "
                "size, "
                "within 128",
            )
        if used > extent:
            raise ConstraintViolation(
                instruction, f"tile {name}", f"stationary uses {used} of a tile of {extent}"
            )
    if whole_columns and (position[1] != 0 or size[1] != 128):
        raise ConstraintViolation(instruction, "tile columns", "MX tiles take all 128 columns")


def nc_matmul(
    dst: Tensor,
    stationary: Tensor,
    moving: Tensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] | None = (),
    tile_size: tuple[int, ...] | None = (),
    perf_mode: PerfMode = PerfMode.none,
    name: str | None = None,
) -> None:
    """dst = (or +=) stationary^T @ moving, contracting partitions in float32; the module says when it adds.

    Args:
        dst: PSUM [M, N], float32 (bfloat16 from trn3).
        stationary: SBUF [K, M], M <= 128.
        moving: SBUF [K, N], N <= 512 for float32 results, <= 1024 for bfloat16.
        is_stationary_onezero, is_moving_onezero: the operand holds zeros and ones; float32 runs twice as
            fast.
        is_transpose: moving is an identity; bits pass unchanged.
        accumulate: None, True or False.
        tile_position, tile_size: part of the PE array.
        perf_mode: double_row contracts float8 tiles [K, 2, N].
        name: ignored.

    Raises:
        ConstraintViolation: an operand breaks a rule.
    """
    prog = current()
    double_row = perf_mode is PerfMode.double_row
    if is_transpose:
        on_chip("nc_matmul", {"dst": dst}, (Buffer.psum,))
        check_bank(prog, "nc_matmul", dst)
    else:
        check_psum_tile(prog, "nc_matmul", dst)
    columns, width = _check_operands(prog, stationary, moving, dst, double_row)
    check_pe_tile(prog, "nc_matmul", tile_position, tile_size, stationary.shape[0], columns)
    # 4 passes for float32; 2 against zeros and ones, and for the bit-exact transpose of trn2 and newer.
    halved = is_stationary_onezero or is_moving_onezero or (is_transpose and prog.chip.generation >= 3)
    passes = 1 if stationary.dtype != np.float32 else 2 if halved else 4
    cost = matmul(prog.chip, columns, width, passes)
    # The sum reads what is there; the destination is no source, so that an unwritten bank is not a read of
    # poison.
    if not prog.issue("nc_matmul", engine="tensor", dst=dst, sources=(stationary, moving), cost=cost):
        return
    with np.errstate(all="ignore"):
        if double_row:
            left, right = (
                prog.load(tile).astype(np.float32, copy=False).reshape(2 * tile.shape[0], -1)
                for tile in (stationary, moving)
            )
        else:
            left, right = load_float(prog, stationary), load_float(prog, moving)
        # Zeros of an identity would spread a NaN over the whole tile; the transpose mode of newer chips does
        # not.
        exact = is_transpose and prog.chip.generation >= 3 and columns == width == stationary.shape[0]
        product = left.T if exact else np.matmul(left.T, right)
        accumulate_into_psum(prog, dst, product, accumulate)


def nc_transpose(dst: Tensor, data: Tensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst = data^T, partitions against flattened free axes; bits pass unchanged.

    Tensor engine: SBUF up to [128, 128] to PSUM. Vector engine: blocks up to [32, 32], SBUF or PSUM. By
    default the Tensor engine when dst lies in PSUM and data in SBUF, else the Vector engine.

    Raises:
        ConstraintViolation: shapes, dtypes or memories break these rules.
    """
    instruction = "nc_transpose"
    on_chip(instruction, {"dst": dst, "data": data})
    if dst.dtype != data.dtype:
        raise ConstraintViolation(instruction, f"dst={dst!r}", f"must be {data.dtype} like data")
    rows, columns = data.shape[0], elements(data)
    if dst.shape[0] != columns or elements(dst) != rows:
        raise ConstraintViolation(
            instruction, f"dst={dst!r}", f"must hold [{columns}, {rows}], the transpose of data {data.shape}"
        )
    prog = current()
    to_psum = dst.buffer is Buffer.psum and data.buffer is Buffer.sbuf
    (lane,) = engines_for(instruction, engine, ("tensor", "vector"), ("tensor",) if to_psum else ("vector",))
    if lane == "tensor":
        on_chip(instruction, {"dst": dst}, (Buffer.psum,))
        on_chip(instruction, {"data": data}, (Buffer.sbuf,))
        check_bank(prog, instruction, dst)
        limit = prog.chip.stationary_columns
        if max(rows, columns) > limit:
            raise ConstraintViolation(instruction, f"data={data!r}", f"at most [{limit}, {limit}]")
        passes = 1 if data.dtype.itemsize <= 2 else 2 if prog.chip.generation >= 3 else 4
        cost = matmul(prog.chip, columns, rows, passes)
    else:
        limit = _VECTOR_TRANSPOSE
        if max(rows, columns) > limit:
            raise ConstraintViolation(
                instruction,
                f"data={data!r}",
                f"the Vector engine transposes at most [{limit}, {limit}]; larger tiles go from SBUF to PSUM",
            )
        cost = compute(prog.chip, "vector", columns)
    if prog.issue(instruction, engine=lane, dst=dst, sources=(data,), cost=cost):
        prog.store(dst, prog.load(data).reshape(rows, columns).T.reshape(dst.shape))
