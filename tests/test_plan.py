"""Plans: the strategy and its reason, leaf names, bytes, and a text that fits a terminal."""

from dataclasses import replace

import pytest

from moedecode import (
    BlockSpec,
    ExpertAffinityScaleMode,
    ExpertSpec,
    InvalidInput,
    RouterSpec,
    UnsupportedConfig,
    presets,
)
from moedecode.formats import WeightFormat
from moedecode.plan import (
    Capabilities,
    CostTable,
    choose_strategy,
    expected_distinct,
    expert_bytes,
    leaf_name,
    make_plan,
)

ABLE = Capabilities(
    backend="test",
    formats=frozenset(WeightFormat),
    strategies=frozenset({"selective", "grouped", "all_expert"}),
    precisions=frozenset({"a16"}),
    shared_expert=True,
    scale_modes=frozenset(ExpertAffinityScaleMode),
    resident="cache",
)
COSTS = CostTable(bytes_per_second=29e9, macs_per_second=3e11, decodes_per_second=4e10, seconds_per_call=2e-5)
GPT_OSS = presets["gpt-oss-20b"]
MXFP4 = WeightFormat.MXFP4


def chosen(spec=GPT_OSS, tokens=4, able=ABLE, costs=COSTS, requested="auto", local=None):
    return choose_strategy(requested, spec, tokens, local or spec.router.num_experts, MXFP4, able, costs)


# ------------------------------------------------------------------ strategies


def test_one_token_is_selective_and_many_are_grouped():
    assert chosen(tokens=1)[0] == "selective"  # no expert is shared: the simplest of equals
    assert {chosen(tokens=t)[0] for t in (4, 16, 64, 2048)} == {"grouped"}


def test_all_expert_wins_where_every_expert_is_used_anyway():
    every = replace(GPT_OSS, router=replace(GPT_OSS.router, top_k=32))
    able = replace(ABLE, strategies=frozenset({"selective", "all_expert"}))
    assert chosen(every, tokens=16, able=able)[0] == "all_expert"


@pytest.mark.parametrize("tokens", [0, 1, 16, 2048])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "mixtral-8x7b", "llama-4-scout"])
def test_no_scale_never_becomes_all_expert_unasked(name, tokens):
    spec = replace(presets[name], affinity_scale=ExpertAffinityScaleMode.NO_SCALE)
    spec = replace(spec, router=replace(spec.router, top_k=spec.router.num_experts))
    free = CostTable(
        bytes_per_second=1.0, macs_per_second=1e30, decodes_per_second=1e30, seconds_per_call=0.0
    )
    assert chosen(spec, tokens, costs=free)[0] != "all_expert"
    assert chosen(spec, tokens, requested="all_expert")[0] == "all_expert"


def test_no_scale_on_a_backend_with_all_expert_alone_must_be_asked_for():
    spec = replace(GPT_OSS, affinity_scale=ExpertAffinityScaleMode.NO_SCALE)
    able = replace(ABLE, strategies=frozenset({"all_expert"}))
    with pytest.raises(UnsupportedConfig, match=r"strategy='auto'.*all_expert.*NO_SCALE.*by name"):
        chosen(spec, able=able)


def test_the_reason_names_every_alternative_and_the_traffic():
    strategy, why = chosen(tokens=4)
    assert strategy == "grouped"
    for fragment in ("13.2 distinct experts in 16 pairs", "selective", "all_expert", " ms"):
        assert fragment in why
    assert chosen(requested="selective") == ("selective", "asked for")


def test_a_rank_counts_its_own_experts_only():
    assert "1.66 distinct experts in 2 pairs" in chosen(tokens=4, local=4)[1]


def test_strategies_a_backend_lacks_and_names_nobody_knows():
    able = replace(ABLE, strategies=frozenset({"selective"}))
    assert chosen(tokens=64, able=able)[0] == "selective"
    with pytest.raises(
        UnsupportedConfig, match=r"strategy='grouped': the test backend has selective; use one"
    ):
        chosen(able=able, requested="grouped")
    with pytest.raises(InvalidInput, match=r"strategy='fast': is not known; choose one of auto, selective"):
        chosen(requested="fast")


# ------------------------------------------------------------------ leaves and bytes


@pytest.mark.parametrize(
    ("strategy", "fmt", "leaf"),
    [
        ("selective", WeightFormat.BF16, "selective"),
        ("selective", WeightFormat.MXFP4, "selective_mx"),
        ("all_expert", WeightFormat.FP8_E4M3, "all_expert"),
        ("all_expert", WeightFormat.MXFP8_E5M2, "all_expert_mx"),
        ("grouped", WeightFormat.FP32, "grouped"),
        ("grouped", WeightFormat.MXFP8_E4M3, "grouped_mx"),
    ],
)
def test_leaf_names(strategy, fmt, leaf):
    assert leaf_name(strategy, fmt) == leaf
    assert make_plan(GPT_OSS, 4, fmt, ABLE, COSTS, strategy=strategy).leaf == leaf


def test_bytes_of_a_gpt_oss_expert():
    elements = 3 * 2880 * 2880
    biases = 4 * (2880 + 2880 + 2880)
    assert expert_bytes(GPT_OSS.experts, 2880, MXFP4) == elements // 2 + elements // 32 + biases
    assert expert_bytes(GPT_OSS.experts, 2880, WeightFormat.BF16) == 2 * elements + biases


def test_expected_distinct_experts():
    assert expected_distinct(0, 32, 32, 4) == 0
    assert expected_distinct(1, 32, 32, 4) == pytest.approx(4)
    assert expected_distinct(1, 8, 32, 4) == pytest.approx(1)
    assert expected_distinct(10**6, 32, 32, 4) == pytest.approx(32)


@pytest.mark.parametrize(
    ("strategy", "reads", "experts"),
    [("selective", 16, 13.24), ("grouped", 13.24, 13.24), ("all_expert", 32, 32)],
)
def test_bytes_floor_is_distinct_experts_router_input_and_output(strategy, reads, experts):
    plan = make_plan(GPT_OSS, 4, MXFP4, ABLE, COSTS, strategy=strategy)
    assert plan.expert_reads == pytest.approx(reads, rel=1e-3)
    want = experts * expert_bytes(GPT_OSS.experts, 2880, MXFP4) + 2 * 32 * 2880 + 2 * 2 * 4 * 2880
    assert plan.bytes_floor == pytest.approx(want, rel=1e-3)
    assert plan.bytes_floor == sum(row.bytes for row in plan.residency if row.where == "memory")


def test_a_shared_expert_is_read_once_and_counted():
    spec = presets["glm-4.5-air"]
    plan = make_plan(spec, 4, MXFP4, ABLE, COSTS)
    bare = make_plan(replace(spec, shared=None), 4, MXFP4, ABLE, COSTS)
    assert plan.bytes_floor - bare.bytes_floor == expert_bytes(spec.shared, spec.hidden, MXFP4)


def test_no_tokens_move_nothing():
    plan = make_plan(GPT_OSS, 0, MXFP4, ABLE, COSTS)
    assert (plan.bytes_floor, plan.expert_reads, plan.residency) == (0, 0, ())
    assert "0 tokens" in str(plan)


def test_negative_tokens_are_refused():
    with pytest.raises(InvalidInput, match="tokens=-1: must not be negative"):
        make_plan(GPT_OSS, -1, MXFP4, ABLE, COSTS)


# ------------------------------------------------------------------ text


@pytest.mark.parametrize("resident", ["cache", "SBUF", "process memory"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 128, 2048])
@pytest.mark.parametrize("name", presets)
def test_the_text_fits_80_columns(name, tokens, resident):
    able = replace(ABLE, resident=resident, backend="reference")
    for fmt in WeightFormat:
        for strategy in ("auto", "all_expert"):
            text = str(make_plan(presets[name], tokens, fmt, able, COSTS, strategy=strategy))
            assert max(map(len, text.splitlines())) <= 80, text
            assert all(line == line.rstrip() for line in text.splitlines())


def test_the_text_reads_like_this():
    spec = BlockSpec(64, RouterSpec(8, 2), ExpertSpec(32))
    costs = CostTable(
        bytes_per_second=1e6, macs_per_second=1e9, decodes_per_second=1e9, seconds_per_call=1e-3
    )
    assert (
        str(make_plan(spec, 1, WeightFormat.BF16, ABLE, costs))
        == """\
test: 1 token, strategy selective, leaf selective
why      25.6 ms for 2 distinct experts in 2 pairs
         grouped 25.6 ms; all_expert 99.3 ms
moves    25.9 kB through memory, 584 B stays in cache
expects  2 expert reads, 25.6 ms

tensor          shape             lives in    bytes  note
inp             [1, 64]           memory      128 B  read once
normed hidden   [1, 64]           cache       256 B
router weights  [8, 64]           memory    1.02 kB  read once
router logits   [1, 8]            cache        32 B  on request
expert index    [1, 2]            cache         8 B
affinities      [1, 8]            cache        32 B  on request
expert weights  2 x 3 x [64, 32]  memory    24.6 kB  bf16
intermediate h  [2, 32]           cache       256 B
out             [1, 64]           memory      128 B  written once"""
    )
