"""Owns the configurations: which block of which model, which shard of it, and how many HBM bytes it cannot do
without.

Must not know the library, the machine or arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...formats import WeightFormat
from ..floor import BlockSize, expert_floor, floor

__all__ = ["MODELS", "BlockConfig", "hbm_floor"]

_IO_BYTES = {"fp16": 2, "bf16": 2}
_FORMATS = {
    "bf16": WeightFormat.BF16,
    "fp16": WeightFormat.FP16,
    "fp8_row": WeightFormat.FP8_E4M3,
    "mxfp8": WeightFormat.MXFP8_E4M3,
    "mxfp4": WeightFormat.MXFP4,
}
_TILE = 512  # rows of H or I that one MX tile holds: 128 partitions times 4


@dataclass(frozen=True)
class BlockConfig:
    """One call of the fused block.

    Attributes:
        model: whose dimensions these are.
        tokens: T.
        hidden: H as stored; `hidden_actual` of it are real, the rest is padding.
        intermediate: this rank's shard of I.
        full_intermediate: I of the model, padded where the shard pads it; the shard is 1/tp of it.
        experts, local_experts: E and E_L (equal in selective mode).
        top_k: K.
        weights: "bf16", "fp16", "fp8_row", "mxfp8" or "mxfp4".
        io: "bf16" or "fp16", of activations, router and biases.
        all_expert: the expert-major form; `rank` then names the slice of experts, None lets the inputs pick a
            busy one.
        score, pre_norm, norm_topk: the router.
        activation: "silu" or "swish".
        bias, clamp, residual: whether there are any.
        scaling: "POST_SCALE", "NO_SCALE" or "PRE_SCALE".
    """

    model: str
    tokens: int
    hidden: int
    intermediate: int
    full_intermediate: int
    experts: int
    local_experts: int
    top_k: int
    weights: str
    io: str = "bf16"
    all_expert: bool = False
    hidden_actual: int | None = None
    score: str = "softmax"
    pre_norm: bool = True
    norm_topk: bool = True
    activation: str = "silu"
    bias: bool = False
    clamp: bool = False
    residual: bool = False
    scaling: str = "POST_SCALE"
    rank: int | None = None

    @property
    def is_mx(self) -> bool:
        """Whether the weights are in an MX format."""
        return self.weights in ("mxfp4", "mxfp8")

    @property
    def name(self) -> str:
        """Model, mode, weights, tokens, the shard of I, and the experts, of which so many are local."""
        mode = "all_expert" if self.all_expert else "selective"
        io = "" if self.io in ("bf16", self.weights) else f"+{self.io}"
        shard = "" if self.intermediate == self.full_intermediate else f"of{self.full_intermediate}"
        local = f"/E_L{self.local_experts}" if self.all_expert else ""
        sizes = f"T{self.tokens}/I{self.intermediate}{shard}/E{self.experts}{local}"
        return f"{self.model}/{mode}/{self.weights}{io}/{sizes}"

    @property
    def lanes(self) -> int:
        """P_I: partitions of a stored tile of I in the MX layouts."""
        return 128 if self.intermediate >= _TILE else 8 * math.ceil(self.intermediate / 32)

    def with_(self, **changes: object) -> BlockConfig:
        """A copy with some fields changed; what is derived from them follows."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _dimensions(config: BlockConfig) -> BlockSize:
    """The dimensions in the words of the floor."""
    io = _IO_BYTES[config.io]
    return BlockSize(
        hidden=config.hidden,
        intermediate=config.intermediate,
        experts=config.experts,
        top_k=config.top_k,
        fmt=_FORMATS[config.weights],
        local_experts=config.local_experts,
        io_bytes=io,
        router_bytes=io,
        bias_bytes=io if config.bias else 0,
        router_bias=config.bias,
    )


def hbm_floor(config: BlockConfig, *, distinct: int | None = None, block: bool = True) -> int:
    """Bytes the block must move between HBM and the chip (see :mod:`moedecode.neuron.floor`).

    Args:
        config: the call.
        distinct: read each of this many distinct experts once instead (selective only).
        block: the fused block; False: the expert MLPs alone, whose routing (float32 affinities, int32 ids)
            is an input.
    """
    size, t = _dimensions(config), config.tokens
    leaf = "all_expert" if config.all_expert else "selective"
    parts = dict(floor(size, leaf, t, residual=config.residual))
    if distinct is not None:
        parts["experts"] = distinct * expert_floor(size)
    if not block:
        columns = config.local_experts if config.all_expert else config.top_k
        kept = {
            name: nbytes for name, nbytes in parts.items() if name in ("inp", "experts", "out", "rank_id")
        }
        parts = kept | {"routing": 4 * t * (columns + config.top_k)}
    return sum(parts.values())


_GPT_OSS = BlockConfig(
    "gpt-oss-120b",
    tokens=1,
    hidden=3072,
    intermediate=384,
    full_intermediate=3072,
    experts=128,
    local_experts=128,
    top_k=4,
    weights="mxfp4",
    hidden_actual=2880,
    pre_norm=False,
    norm_topk=False,
    activation="swish",
    bias=True,
    clamp=True,
)
_QWEN = BlockConfig("qwen3-235b", 1, 4096, 192, 1536, 128, 128, 8, "bf16")
_DEEPSEEK = BlockConfig("deepseek-v3", 1, 7168, 256, 2048, 256, 256, 8, "mxfp8", score="sigmoid")

MODELS = {config.model: config for config in (_GPT_OSS, _QWEN, _DEEPSEEK)}
"""One token of each model in selective mode; other configurations are copies with changes.

Outside the interface of the kernel are the selection bias and the expert groups of DeepSeek-V3's router (its
experts are chosen by their logits here) and the up offset of gpt-oss.
"""
