"""The configurations and their inputs: shapes, padding, byte counts, a selection that no rounding changes."""

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.conformance import MODELS, ROWS, BlockConfig, chosen_rows, hbm_floor
from moedecode.neuron.conformance.inputs import block_inputs, block_shapes, expert_inputs, margins, used_lanes
from moedecode.neuron.machine.dtypes import is_x4, unpack_x4

SMALL = BlockConfig("small", 3, 512, 64, 256, 16, 16, 4, "bf16", bias=True)

CONFIGS = [
    SMALL,
    SMALL.with_(weights="fp8_row", io="fp16"),
    SMALL.with_(weights="mxfp4"),
    SMALL.with_(weights="mxfp8", intermediate=640, full_intermediate=640, all_expert=True, local_experts=2),
    SMALL.with_(weights="mxfp4", intermediate=360, full_intermediate=360, residual=True, hidden_actual=448),
    SMALL.with_(bias=False, score="sigmoid", all_expert=True, local_experts=4, tokens=40),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_inputs_have_the_shapes_of_the_runs_without_data(config):
    arrays, shapes = block_inputs(config), block_shapes(config)
    assert arrays.keys() == shapes.keys()
    for name, array in arrays.items():
        assert (None if array is None else (array.shape, array.dtype)) == shapes[name], name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_the_floor_of_an_expert_is_the_bytes_of_its_arrays_without_padding_lanes(config):
    arrays = block_inputs(config)
    total = sum(a.nbytes for name, a in arrays.items() if name.startswith("expert_") and a is not None)
    stored = total // config.local_experts
    floor = hbm_floor(config, distinct=1) - hbm_floor(config, distinct=0)
    padded = config.is_mx and not used_lanes(config).all()
    assert (floor < stored) if padded else (floor == stored)
    assert floor > 0.8 * stored


def test_the_floor_counts_everything_once():
    c = BlockConfig("tiny", tokens=2, hidden=256, intermediate=4, full_intermediate=4, experts=8,
                    local_experts=8, top_k=3, weights="bf16")  # fmt: skip
    expert = 3 * 256 * 4 * 2
    shared = (2 * 256 + 256 + 256 * 8) * 2 + (2 * 256 + 2 * 8) * 2
    assert hbm_floor(c) == 6 * expert + shared
    assert hbm_floor(c, distinct=4) == 4 * expert + shared
    every = c.with_(all_expert=True, local_experts=2)
    assert hbm_floor(every) == 2 * expert + shared + 4
    assert hbm_floor(every.with_(residual=True)) == 2 * expert + shared + 4 + 2 * (2 * 256 * 2)
    assert hbm_floor(c, block=False) == 6 * expert + 2 * 2 * 256 * 2 + 4 * 2 * (3 + 3)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_no_two_experts_nearly_tie(config):
    a = block_inputs(config)
    s = a["inp"][0].astype(float) + (0 if a["residual"] is None else a["residual"][0].astype(float))
    r = s / np.sqrt((s**2).sum(-1, keepdims=True) / (config.hidden_actual or config.hidden) + 1e-6)
    logits = (r * a["gamma"].astype(float)) @ a["router_weights"].astype(float)
    logits += 0 if a["router_bias"] is None else a["router_bias"].astype(float)
    assert margins(logits, config.top_k).min() > 0.07
    if config.all_expert:
        first = int(a["rank_id"][0, 0]) * config.local_experts
        ids = np.argsort(-logits, axis=-1)[:, : config.top_k]
        assert ((ids >= first) & (ids < first + config.local_experts)).any(), "no token on this rank"


def test_tokens_visit_a_rank_that_few_would_meet_by_chance():
    config = SMALL.with_(experts=128, local_experts=1, all_expert=True, tokens=8, bias=False)
    a = block_inputs(config)
    r = a["inp"][0].astype(float) * a["gamma"].astype(float)
    ids = np.argsort(-(r @ a["router_weights"].astype(float)), axis=-1)[:, :4]
    assert (ids == int(a["rank_id"][0, 0])).any(1).sum() >= 3  # one in 32 by chance


def test_margins_see_a_tie():
    logits = np.array([[3.0, 1.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    assert margins(logits, 2).tolist() == [0.0, 1.0]
    assert np.isinf(margins(logits, 4)).all()


@pytest.mark.parametrize("intermediate", [64, 360, 640])
def test_the_padding_lanes_of_mx_weights_hold_zeros(intermediate):
    config = SMALL.with_(weights="mxfp4", intermediate=intermediate, full_intermediate=intermediate)
    down = unpack_x4(block_inputs(config)["expert_down_weights"])  # [E, P, tiles, H, 4]
    used = 2 * -(-(intermediate % 512) // 8)
    assert np.any(down[:, used - 1, -1])
    assert not np.any(down[:, used:, -1])


@pytest.mark.parametrize("weights", ["mxfp4", "mxfp8"])
def test_mx_codes_are_finite(weights):
    arrays = block_inputs(SMALL.with_(weights=weights))
    for name in ("expert_gate_up_weights", "expert_down_weights"):
        assert is_x4(arrays[name].dtype)
        assert np.isfinite(unpack_x4(arrays[name])).all()
    assert arrays["expert_gate_up_weights_scale"].max() < 0xFF


def test_fp8_codes_stay_below_the_largest_value():
    codes = block_inputs(SMALL.with_(weights="fp8_row"))["expert_gate_up_weights"]
    assert codes.dtype == ml_dtypes.float8_e4m3
    assert np.isfinite(codes.astype(np.float32)).all()


def test_expert_inputs_route_tokens_to_the_rank_and_mask_what_is_not_selected():
    config = SMALL.with_(all_expert=True, local_experts=2, experts=16, tokens=12, rank=3)
    sparse, dense = expert_inputs(config, dense=False), expert_inputs(config, dense=True)
    index = sparse["expert_index"]
    assert all(len(set(row)) == config.top_k for row in index.tolist())
    assert np.isin(index, [6, 7]).any(1)[::3].all()
    assert (np.count_nonzero(sparse["expert_affinities"], axis=1) == config.top_k).all()
    assert dense["expert_affinities"].all()
    assert int(sparse["rank_id"][0, 0]) == 3


def test_names_of_rows_are_unique_and_only_picks_by_them():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert [row.name for row in chosen_rows(["T = 128"])] == [n for n in names if "T = 128" in n]
    assert 10 < len(chosen_rows(quick=True)) < len(ROWS) // 2
    assert not chosen_rows(["no such row"])


def test_the_rows_cover_what_they_promise():
    kinds = {row.kind for row in ROWS}
    assert kinds == {"block", "moe", "router", "rmsnorm", "rmsnorm_mx"}
    blocks = [row.config for row in ROWS if row.kind == "block"]
    for model in MODELS:
        for every in (False, True):
            found = {c.weights for c in blocks if c.model == model and c.all_expert == every}
            assert len(found) >= 3, (model, every, found)
    assert {c.weights for c in blocks} == {"bf16", "fp16", "fp8_row", "mxfp4", "mxfp8"}
