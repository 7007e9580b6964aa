"""Which known models belong to a family that peers have code for."""

from dataclasses import replace

import pytest

from moedecode import presets
from moedecode.peers.families import is_gpt_oss, is_plain_softmax


def test_families_of_the_known_models():
    assert {name for name, spec in presets.items() if is_gpt_oss(spec)} == {"gpt-oss-20b", "gpt-oss-120b"}
    plain = {name for name, spec in presets.items() if is_plain_softmax(spec)}
    assert {"qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b"} <= plain
    assert not plain & {"gpt-oss-20b", "glm-4.5", "llama-4-scout", "qwen3-next-80b-a3b"}


@pytest.mark.parametrize(
    "change",
    [{"gate_clamp": (None, None)}, {"up_clamp": (-6.0, 7.0)}, {"up_offset": 0.0}, {"activation": "silu"}],
)
def test_gpt_oss_is_exact(change):
    spec = presets["gpt-oss-20b"]
    assert not is_gpt_oss(replace(spec, experts=replace(spec.experts, **change)))
