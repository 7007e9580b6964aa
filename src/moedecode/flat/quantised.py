"""Hidden states of ``moe_tkg``: plain, or already quantised in the packed x4 form of the Trainium kernel.

Owns that one layout. Quantised values are handed on as float32; an "mxfp8" call quantises them again, which
changes nothing for codes that follow the quantisation rule, and codes that do not are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, as_numpy, io_dtype
from ..backends import Numerics
from ..formats import MX_BLOCK, WeightFormat, dequantise_e4m3, hidden_order
from ..formats.block_order import TILE
from ..formats.dtypes import is_e8m0
from ..formats.numbers import e8m0_values, element_values
from ..gates import invalid, require
from ..weights import ExpertWeights


def moe_hidden(hidden: Any, scale: Any, weights: ExpertWeights, numerics: Numerics) -> Array:
    """``hidden_input`` as ``[T, H]`` in an io dtype; H is that of ``weights``."""
    if scale is None:
        x = as_numpy(hidden, "hidden_input")
        plain = x.dtype != np.uint32
        require(
            plain,
            "hidden_input_scale",
            None,
            "packed hidden states need their scales",
            "give the E8M0 tensor",
        )
        io_dtype(x, "hidden_input")
    else:
        rounds = numerics.h_rounding is not None
        require(not rounds, "h_rounding", "'io'", "quantised hidden states have no io dtype", "leave it None")
        stored = _stored_values(hidden, scale)
        if numerics.precision == "mxfp8":
            _check_requantises(stored, weights.block_order)
        x = np.empty(stored.shape, np.float32)
        with np.errstate(over="ignore"):
            x[:, hidden_order("trainium", stored.shape[1]).gather] = stored
    fits = x.ndim == 2 and x.shape[1] == weights.hidden
    rule = f"must be [T, {weights.hidden}] like the weights"
    require(fits, "hidden_input", f"shape {x.shape}", rule, "check H")
    return x


def _stored_values(hidden: Any, scale: Any) -> Array:
    """Float64 ``[T, H]`` in stored order, from uint32 ``[128, H/512, T]`` and E8M0 ``[16, H/512, T]``."""
    codes, scales = as_numpy(hidden, "hidden_input"), as_numpy(scale, "hidden_input_scale")
    packed = codes.ndim == 3 and codes.shape[0] == 128 and codes.shape[1] > 0 and codes.dtype == np.uint32
    what, rule = f"{codes.dtype} array of shape {codes.shape}", "with a scale must be uint32 [128, H/512, T]"
    require(packed, "hidden_input", what, rule, "leave hidden_input_scale out for plain hidden states")
    tiles, tokens = codes.shape[1:]
    fits = is_e8m0(scales) and scales.shape == (16, tiles, tokens)
    what, rule = f"{scales.dtype} array of shape {scales.shape}", f"must be E8M0 uint8 {(16, tiles, tokens)}"
    require(fits, "hidden_input_scale", what, rule, "give the whole scale tensor")
    lanes = np.ascontiguousarray(codes.T).astype("<u4", copy=False)  # [T, H/512, 128], four codes each
    elements = element_values(WeightFormat.MXFP8_E4M3, lanes.view(np.uint8).reshape(tokens, tiles * TILE))
    blocks = np.ascontiguousarray(scales.T).view(np.uint8).reshape(tokens, tiles * TILE // MX_BLOCK)
    values: Array = elements * np.repeat(e8m0_values(blocks), MX_BLOCK, axis=-1)
    return values


def _check_requantises(stored: Array, block_order: str) -> None:
    """Quantising ``stored [T, H]`` again must give it back: same blocks, and scales that follow the rule."""
    order = block_order == "trainium"
    rule = "quantised hidden states have Trainium blocks"
    require(order, "block_order", repr(block_order), rule, "use weights of that order or plain hidden states")
    blocks = stored.reshape(len(stored), -1, MX_BLOCK)
    again = dequantise_e4m3(stored).reshape(blocks.shape)
    moved = np.argwhere(((again != blocks) & np.isfinite(blocks).all(-1, keepdims=True)).any(-1))
    if len(moved):
        t, block = map(int, moved[0])
        where = f"hidden_input_scale[{block % 16}, {block // 16}, {t}]"
        rule = "quantising this block again would move its values (its largest code is below 256)"
        raise invalid(
            where, "scale", rule, "scale blocks by the quantisation rule, or pass plain hidden states"
        )
