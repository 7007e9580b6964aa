"""Owns the rows of the table: which kernels of the library are run with which configurations, and why each
row is there.

Must not know how a row is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .configs import MODELS, BlockConfig

__all__ = ["ROWS", "Row", "chosen_rows"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        kind: "block" (moe_block_tkg), "moe" (moe_tkg), "router", "rmsnorm" or "rmsnorm_mx".
        config: the dimensions and options.
        label: what distinguishes the row from others of the same configuration, "" if nothing does.
        quick: whether --quick runs it.
        mask: moe only: dense affinities, masked by the expert index.
        block_size: moe only: the dynamic loop over blocks of that many tokens, None for the static form.
        options: arguments of the block that its configuration does not have, given to the kernel as they are.
        zero_bias: give the kernel a gate/up bias of zeros (its selective MX form fails without one).
    """

    kind: str
    config: BlockConfig
    label: str = ""
    quick: bool = False
    mask: bool = False
    block_size: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    zero_bias: bool = False

    @property
    def name(self) -> str:
        """What --only matches."""
        c = self.config
        if self.kind in ("rmsnorm", "rmsnorm_mx"):
            name = f"{self.kind}/{c.model}/{c.io}/T{c.tokens}"
        elif self.kind == "router":
            form = f"{c.score}{'/pre_norm' if c.pre_norm else '/post_norm'}{'/norm' if c.norm_topk else ''}"
            name = f"router/{c.model}/{form}/T{c.tokens}"
        else:
            name = f"{self.kind}/{c.name}"
        return f"{name}/{self.label}" if self.label else name


_GPT, _QWEN, _DEEPSEEK = (MODELS[name] for name in ("gpt-oss-120b", "qwen3-235b", "deepseek-v3"))
_OSS32 = _GPT.with_(
    experts=32, local_experts=32
)  # selective 16-bit rows hold few experts: their weights would need 600 MB and more
_QWEN32 = _QWEN.with_(experts=32, local_experts=32)
_DEEP32 = _DEEPSEEK.with_(experts=32, local_experts=32)


def _block(config: BlockConfig, label: str = "", *, quick: bool = False, **options: object) -> Row:
    zero = config.is_mx and not config.all_expert and not config.bias
    return Row("block", config, label, quick, options=tuple(options.items()), zero_bias=zero)


def _every(config: BlockConfig, **changes: object) -> BlockConfig:
    """The all-expert form with two local experts."""
    return config.with_(**({"all_expert": True, "local_experts": 2} | changes))


_SELECTIVE = [
    _block(_GPT, quick=True),
    _block(_GPT.with_(io="fp16")),
    _block(_GPT.with_(weights="mxfp8", io="fp16", experts=32, local_experts=32)),
    _block(_GPT.with_(tokens=4, intermediate=192)),
    _block(_OSS32.with_(tokens=8, intermediate=768), "more than one tile of I"),
    _block(_OSS32.with_(intermediate=1536), "whole tiles of I", quick=True),
    _block(_OSS32.with_(tokens=4, weights="mxfp8", intermediate=1536), "whole tiles of I"),
    _block(_OSS32.with_(weights="fp16", io="fp16")),
    _block(_OSS32.with_(tokens=5, weights="bf16", intermediate=192), "prime T"),
    _block(_OSS32.with_(tokens=4, weights="bf16")),
    _block(_OSS32.with_(tokens=128, weights="bf16", intermediate=128), "T = 128"),
    _block(_QWEN32, quick=True),
    _block(_QWEN32.with_(tokens=8)),
    _block(_QWEN32.with_(tokens=4, weights="fp16", io="fp16", intermediate=384)),
    _block(_QWEN32.with_(weights="fp8_row"), quick=True),
    _block(_QWEN32.with_(tokens=8, weights="fp8_row")),
    _block(_QWEN32.with_(weights="mxfp8", experts=64, local_experts=64)),
    _block(_QWEN32.with_(tokens=4, weights="mxfp4", intermediate=1536), "whole tiles of I"),
    _block(_DEEP32.with_(tokens=1, intermediate=512), quick=True),
    _block(_DEEP32.with_(tokens=4, weights="mxfp4", intermediate=512)),
    _block(_DEEP32.with_(weights="bf16", experts=16, local_experts=16)),
    _block(_DEEP32.with_(tokens=2, weights="fp8_row")),
    _block(_OSS32.with_(weights="bf16", scaling="NO_SCALE"), "no scaling"),
    _block(_QWEN32.with_(norm_topk=False), "dense affinities"),
]

_ALL_EXPERT = [
    _block(_every(_GPT, tokens=4, intermediate=3072), quick=True),
    _block(_every(_GPT, tokens=32, intermediate=3072, io="fp16")),
    _block(_every(_GPT, tokens=128, intermediate=3072, local_experts=1)),
    _block(_every(_GPT, tokens=128, intermediate=1536, weights="mxfp8", local_experts=1)),
    _block(_every(_GPT, tokens=256, intermediate=512)),
    _block(_every(_GPT, tokens=256, intermediate=512, residual=True), "residual"),
    _block(_every(_GPT, tokens=4, intermediate=512), "weights read by both cores"),
    _block(_every(_GPT, tokens=32, weights="bf16", intermediate=768, local_experts=4)),
    _block(_every(_GPT, tokens=19, weights="fp16", io="fp16", intermediate=128), "prime T"),
    _block(_every(_GPT, tokens=32, weights="fp16", io="fp16", intermediate=3072, local_experts=1)),
    _block(_every(_QWEN, tokens=16, weights="bf16", intermediate=1536), quick=True),
    _block(_every(_QWEN, tokens=16, weights="fp8_row", intermediate=384, local_experts=8)),
    _block(_every(_QWEN, tokens=4, weights="mxfp8", intermediate=1536)),
    _block(_every(_QWEN, tokens=32, weights="mxfp4", intermediate=1536, norm_topk=False), "dense affinities"),
    _block(_every(_QWEN, tokens=128, weights="bf16", intermediate=192)),
    _block(_every(_QWEN, tokens=256, weights="bf16", intermediate=192), "T = 256"),
    _block(_every(_DEEPSEEK, tokens=4, intermediate=2048)),
    _block(_every(_DEEPSEEK, tokens=32, weights="mxfp4", intermediate=1024)),
    _block(_every(_DEEPSEEK, tokens=32, weights="bf16", intermediate=256)),
    _block(_every(_DEEPSEEK, tokens=8, weights="fp8_row", intermediate=512)),
]

_KNOWN = [  # what the library of 2026-04-13 gets wrong
    _block(_every(_GPT, tokens=320), "T/2 not a multiple of 128", quick=True),
    _block(_every(_GPT, tokens=640, intermediate=512), "T/2 not a multiple of 128"),
    _block(_every(_GPT, tokens=32, intermediate=768), "part of a tile of I"),
    _block(_every(_GPT, tokens=4, intermediate=2880, full_intermediate=2880), "I of the checkpoint"),
    _block(
        _GPT.with_(experts=32, local_experts=32, intermediate=1536, pre_norm=True),
        "pre-norm, no normalisation",
        quick=True,
    ),
    Row("block", _QWEN32.with_(weights="mxfp8", intermediate=512), "no bias", quick=True),
    Row(
        "moe",
        _every(_GPT, tokens=64, intermediate=3072, local_experts=1),
        "dynamic loop, E > E_L",
        quick=True,
        block_size=16,
    ),
    Row(
        "moe",
        _every(_GPT, tokens=64, intermediate=512, local_experts=1, experts=1, top_k=1),
        "dynamic loop, one tile",
        block_size=16,
    ),
]

_REFUSED = [  # its own asserts
    _block(_OSS32.with_(tokens=130, weights="bf16", intermediate=128), "T > 128", quick=True),
    _block(_every(_GPT, tokens=6, intermediate=512), "T % 4", quick=True),
    _block(_OSS32.with_(weights="bf16", intermediate=128, scaling="PRE_SCALE"), "pre-scale"),
    _block(_OSS32.with_(weights="bf16", intermediate=128), "act scale", hidden_act_scale_factor=1.702),
    _block(_OSS32.with_(weights="bf16", intermediate=128), "act bias", hidden_act_bias=1.0),
    _block(_every(_QWEN, tokens=4, weights="bf16", residual=True), "residual"),
    _block(_DEEPSEEK.with_(bias=True), "E > 128 with bias"),
    Row("moe", _every(_GPT, tokens=64, intermediate=512), "dynamic loop, E_L > 1", block_size=16),
    Row("moe", _every(_GPT, tokens=32, intermediate=1536, scaling="NO_SCALE"), "no scaling"),
]

_MOE = [
    Row("moe", _QWEN32.with_(tokens=4), quick=True),
    Row("moe", _QWEN32.with_(tokens=4, weights="fp8_row")),
    Row("moe", _OSS32.with_(intermediate=1536)),
    Row("moe", _every(_QWEN, tokens=32, intermediate=384)),
    Row("moe", _every(_QWEN, tokens=32, weights="fp8_row", intermediate=384), "masked", mask=True),
    Row("moe", _every(_GPT, tokens=32, intermediate=1536), quick=True),
    Row(
        "moe",
        _every(_GPT, tokens=64, intermediate=3072, local_experts=1, experts=1, top_k=1),
        "dynamic loop, E = E_L = 1",
        block_size=16,
    ),
    Row("moe", _every(_QWEN, tokens=32, intermediate=384, scaling="NO_SCALE"), "no scaling"),
]


def _router(
    config: BlockConfig, tokens: int, score: str, pre_norm: bool, norm: bool, *, quick: bool = False
) -> Row:
    return Row(
        "router", config.with_(tokens=tokens, score=score, pre_norm=pre_norm, norm_topk=norm), quick=quick
    )


_PARTS = [
    _router(_GPT, 4, "softmax", False, False, quick=True),
    _router(_GPT, 128, "softmax", False, False),
    _router(_GPT, 640, "softmax", False, False),
    _router(_GPT, 4, "sigmoid", False, False),
    _router(_QWEN, 8, "softmax", True, True),
    _router(_QWEN, 8, "softmax", True, False),
    _router(_DEEPSEEK, 8, "sigmoid", True, True, quick=True),
    _router(_DEEPSEEK, 8, "sigmoid", True, False),
    Row("rmsnorm", _GPT, quick=True),
    Row("rmsnorm", _QWEN.with_(tokens=16, io="fp16")),
    Row("rmsnorm", _DEEPSEEK.with_(tokens=128)),
    Row("rmsnorm_mx", _GPT.with_(tokens=32), quick=True),
    Row("rmsnorm_mx", _QWEN.with_(tokens=128, io="fp16")),
    Row("rmsnorm_mx", _GPT.with_(tokens=256, residual=True), "residual"),
]

ROWS: tuple[Row, ...] = (*_SELECTIVE, *_ALL_EXPERT, *_KNOWN, *_REFUSED, *_MOE, *_PARTS)


def chosen_rows(only: Sequence[str] = (), *, quick: bool = False, rows: Sequence[Row] = ROWS) -> list[Row]:
    """The rows whose name contains one of the words of `only` (all, without any), of those that --quick runs
    if `quick`.
    """
    return [
        row
        for row in rows
        if (not quick or row.quick) and (not only or any(word in row.name for word in only))
    ]
