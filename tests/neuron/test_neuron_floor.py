"""The floor of HBM bytes, counted by hand for small blocks and against the arrays of the packed layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moedecode.formats import WeightFormat
from moedecode.neuron.floor import BlockSize, expert_floor, floor, floor_bytes, visits
from trainium_layout import trainium_pack

SMALL = BlockSize(hidden=256, intermediate=96, experts=8, top_k=2, fmt=WeightFormat.BF16)


@pytest.mark.parametrize("fmt, changes, want", [
    (WeightFormat.BF16, {}, 3 * 256 * 96 * 2),
    (WeightFormat.FP32, {}, 3 * 256 * 96 * 4),
    (WeightFormat.BF16, {"bias_bytes": 2}, 3 * 256 * 96 * 2 + (2 * 96 + 256) * 2),
    (WeightFormat.BF16, {"bias_bytes": 2, "down_bias_bytes": 4}, 3 * 256 * 96 * 2 + 2 * 96 * 2 + 256 * 4),
    (WeightFormat.FP8_E4M3, {}, 3 * 256 * 96 + (2 * 96 + 256) * 4),
    (WeightFormat.FP8_E5M2, {"per_tensor_scales": True}, 3 * 256 * 96 + 3 * 4),
    (WeightFormat.MXFP8_E4M3, {"hidden": 512}, 3 * 512 * 96 + 2 * 16 * 96 + 3 * 512),
    (WeightFormat.MXFP4, {"hidden": 512}, 3 * 512 * 96 // 2 + 2 * 16 * 96 + 3 * 512),
], ids=str)  # fmt: skip
def test_expert(fmt, changes, want):
    assert expert_floor(replace(SMALL, fmt=fmt, **changes)) == want


@pytest.mark.parametrize("intermediate", [512, 1024])
def test_whole_tiles_are_what_the_packed_arrays_hold(intermediate):
    arrays, _, _ = trainium_pack(WeightFormat.MXFP4, 1, 512, intermediate, np.random.default_rng(0))
    size = replace(SMALL, hidden=512, intermediate=intermediate, fmt=WeightFormat.MXFP4)
    assert expert_floor(size) == sum(a.nbytes for a in arrays)


def test_padding_lanes_of_a_ragged_tile_are_not_counted():
    arrays, _, _ = trainium_pack(WeightFormat.MXFP4, 1, 512, 520, np.random.default_rng(0))
    size = replace(SMALL, hidden=512, intermediate=520, fmt=WeightFormat.MXFP4)
    # The second tile holds 8 columns on 2 of its 128 lanes, which have one scale row of 16.
    assert expert_floor(size) == sum(a.nbytes for a in arrays) - 126 * 512 * 2 - 15 * 512


def test_visits():
    assert visits("selective", SMALL, 5) == 10
    assert visits("all_expert", SMALL, 5) == 8
    assert visits("all_expert", replace(SMALL, local_experts=3), 5) == 3
    assert visits("distinct", SMALL, 2, [[1, 2], [2, 3]]) == 3


def test_parts():
    size = replace(SMALL, local_experts=2, router_bias=True, shared_intermediate=32)
    parts = floor(size, "all_expert", 3, residual=True, routing=True)
    assert parts == {
        "inp": 3 * 256 * 2, "gamma": 512, "router": 256 * 8 * 2 + 16, "experts": 2 * 3 * 256 * 96 * 2,
        "shared_expert": 3 * 256 * 32 * 2, "rank_id": 4, "residual": 2 * 3 * 256 * 2, "out": 3 * 256 * 2,
        "router_logits": 3 * 8 * 2, "routing": 3 * (2 * 4 + 8 * 4),
    }  # fmt: skip
    assert floor_bytes(size, "all_expert", 3, residual=True, routing=True) == sum(parts.values())


def test_what_is_not_there_has_no_part():
    assert set(floor(SMALL, "selective", 1, logits=False)) == {"inp", "gamma", "router", "experts", "out"}


@pytest.mark.parametrize("leaf, message", [("grouped", "no such leaf"), ("distinct", "index=None")])
def test_errors(leaf, message):
    with pytest.raises(ValueError, match=message):
        visits(leaf, SMALL, 1)
