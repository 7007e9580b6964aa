"""Which elements of an activation form a block of 32: the order in which weights store their columns.

A :class:`BlockOrder` lists, for every stored column position, the natural index that sits there (-1 = padding
that counts as 0). Consecutive runs of 32 positions are the blocks. "contiguous" is the order of checkpoints
and of OCP MX; "trainium" is the order of the packed layouts of the Trainium kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..gates import require
from .numbers import MX_BLOCK

BLOCK_ORDERS = ("contiguous", "trainium")
TILE = 512  # natural indices per tile of the Trainium layouts: 128 partitions of 4 quads


@dataclass(frozen=True, eq=False)
class BlockOrder:
    """Column order of a contraction axis of natural length ``size``; ``gather`` is int32 ``[positions]``."""

    name: str
    size: int
    gather: Array

    @property
    def positions(self) -> int:
        """Stored columns, a multiple of 32."""
        return len(self.gather)

    def apply(self, values: Array) -> Array:
        """``values [..., size]`` brought into stored order, ``[..., positions]``, zeros in the padding."""
        taken: Array = np.where(self.gather >= 0, values[..., np.maximum(self.gather, 0)], 0)
        return taken


def contiguous(size: int) -> BlockOrder:
    """Natural order, padded to a multiple of 32."""
    gather = np.full(-(-size // MX_BLOCK) * MX_BLOCK, -1, np.int32)
    gather[:size] = np.arange(size)
    return BlockOrder("contiguous", size, gather)


def trainium_hidden(hidden: int) -> BlockOrder:
    """The hidden axis in the Trainium layouts: position ``512t + 4p + q`` holds ``q*(H/4) + 128t + p``."""
    require(
        hidden % TILE == 0,
        "hidden",
        hidden,
        f"must be a multiple of {TILE} in the Trainium layout",
        "pad the hidden axis",
    )
    t, p, q = np.meshgrid(np.arange(hidden // TILE), np.arange(128), np.arange(4), indexing="ij")
    return BlockOrder("trainium", hidden, (q * (hidden // 4) + 128 * t + p).astype(np.int32).ravel())


def intermediate_lanes(intermediate: int) -> int:
    """P_I, the partitions of the Trainium down layout: 128 if I >= 512, else 8*ceil(I/32)."""
    return 128 if intermediate >= TILE else 8 * -(-intermediate // 32)


def trainium_intermediate(intermediate: int) -> BlockOrder:
    """Order of the intermediate axis in the Trainium layouts.

    Tile t holds R = min(512, I-512t) columns on L = 2*ceil(R/8) lanes; position ``4*P_I*t + 4p + q`` holds
    ``512t + q*L + p``. Lanes p >= L and indices past R are padding.
    """
    lanes = intermediate_lanes(intermediate)
    tiles = []
    for start in range(0, intermediate, TILE):
        columns = min(TILE, intermediate - start)
        used = 2 * -(-columns // 8)
        p, q = np.meshgrid(np.arange(lanes), np.arange(4), indexing="ij")
        within = q * used + p
        tiles.append(np.where((p < used) & (within < columns), start + within, -1).ravel())
    return BlockOrder("trainium", intermediate, np.concatenate(tiles).astype(np.int32))


def hidden_order(name: str, hidden: int) -> BlockOrder:
    """The order called ``name`` of the hidden axis."""
    _check(name)
    return trainium_hidden(hidden) if name == "trainium" else contiguous(hidden)


def intermediate_order(name: str, intermediate: int) -> BlockOrder:
    """The order called ``name`` of the intermediate axis."""
    _check(name)
    return trainium_intermediate(intermediate) if name == "trainium" else contiguous(intermediate)


def _check(name: str) -> None:
    require(
        name in BLOCK_ORDERS,
        "block_order",
        repr(name),
        "is not known",
        f"choose one of {', '.join(BLOCK_ORDERS)}",
    )
