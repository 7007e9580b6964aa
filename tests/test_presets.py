"""Presets: the numbers of known models and the error for an unknown one."""

import pytest

from moedecode import BlockSpec, ExpertAffinityScaleMode, ExpertSpec, InvalidInput, RouterSpec, presets

# name: H, I, E, K of the public configurations
DIMENSIONS = {
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "qwen3-next-80b-a3b": (2048, 512, 512, 10),
    "qwen1.5-moe-a2.7b": (2048, 1408, 60, 4),
    "qwen2-57b-a14b": (3584, 2560, 64, 8),
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "mixtral-8x22b": (6144, 16384, 8, 2),
    "jamba-v0.1": (4096, 14336, 16, 2),
    "glm-4.5": (5120, 1536, 160, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "llama-4-scout": (5120, 8192, 16, 1),
    "llama-4-maverick": (5120, 8192, 128, 1),
}


def test_dimensions_of_every_preset():
    found = {
        name: (s.hidden, s.experts.intermediate, s.router.num_experts, s.router.top_k)
        for name, s in presets.items()
    }
    assert found == DIMENSIONS


def test_gpt_oss_in_full():
    assert presets["gpt-oss-20b"] == BlockSpec(
        hidden=2880,
        eps=1e-5,
        router=RouterSpec(
            num_experts=32, top_k=4, score="softmax", pre_norm=False, bias=True, matmul_dtype="bfloat16"
        ),
        experts=ExpertSpec(
            intermediate=2880,
            activation="swish",
            alpha=1.702,
            up_offset=1.0,
            gate_clamp=(None, 7.0),
            up_clamp=(-7.0, 7.0),
            bias=True,
        ),
    )


@pytest.mark.parametrize(
    ("name", "normalised"),
    [("qwen3-30b-a3b", True), ("mixtral-8x7b", True), ("olmoe-1b-7b", False), ("qwen2-57b-a14b", False)],
)
def test_which_models_renormalise(name, normalised):
    router = presets[name].router
    assert (router.score, router.pre_norm, router.norm_topk_prob) == ("softmax", True, normalised)


def test_shared_experts_and_scale_modes():
    assert presets["qwen2-57b-a14b"].shared_gate and presets["qwen2-57b-a14b"].shared.intermediate == 20480
    assert presets["glm-4.5-air"].shared.intermediate == 1408 and not presets["glm-4.5-air"].shared_gate
    assert presets["glm-4.5"].router.selection_bias and presets["glm-4.5"].router.scale == 2.5
    assert presets["llama-4-scout"].affinity_scale is ExpertAffinityScaleMode.PRE_SCALE


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("gpt-oss", ("preset='gpt-oss'", "did you mean gpt-oss-20b")),
        ("GPT-OSS-20B", ("did you mean gpt-oss-20b",)),
        ("qwen3-30b", ("did you mean qwen3-30b-a3b",)),
        ("zzz", ("choose one of gpt-oss-20b", "mixtral-8x7b")),
        (7, ("preset=7", "choose one of")),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(name, fragments):
    for kind in (KeyError, InvalidInput):
        with pytest.raises(kind) as error:
            presets[name]
        for fragment in fragments:
            assert fragment in str(error.value)
        assert str(error.value).startswith("preset=")


def test_models_the_spec_cannot_express_are_absent():
    assert "deepseek-v3" not in presets and presets.get("deepseek-v3") is None


def test_presets_are_read_only():
    with pytest.raises(TypeError):
        presets["mine"] = presets["gpt-oss-20b"]
