"""ONNX Runtime's QMoE against the float64 reference on its own dequantised weights."""

from dataclasses import replace

import numpy as np
import pytest

from moedecode import ExpertAffinityScaleMode, ExpertSpec, WeightFormat, presets
from moedecode.peers.onnxruntime import PEER, _codes, _int4_weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_it_computes_the_block(check, spec):
    [engine] = check(PEER, spec, WeightFormat.MXFP4)
    assert engine.name == "onnxruntime int4" and engine.dtype == "float32"


def test_the_weights_of_the_check_are_the_dequantised_codes(spec):
    matrices = _int4_weights(spec).experts.expert(1)
    codes, scale = _codes(spec, 1)["up"]
    low, high = codes & 15, codes >> 4
    values = matrices.up.values()
    assert values[5, 64] == pytest.approx((int(low[5, 32]) - 8) * scale[5, 2])
    assert values[5, 65] == pytest.approx((int(high[5, 32]) - 8) * scale[5, 2])
    assert 0.5 < np.sqrt((values**2).mean() * spec.hidden) < 2, "products stay near one"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shared": ExpertSpec(32)}, "shared"),
        ({"affinity_scale": ExpertAffinityScaleMode.PRE_SCALE}, "outputs only"),
        ({"hidden": 80}, "multiples of 32"),
        ({"experts": ExpertSpec(64, activation="gelu")}, "gelu"),
        ({"experts": ExpertSpec(64, gate_clamp=(-1.0, 1.0))}, "clamps"),
    ],
)
def test_what_it_does_not_compute_is_refused(change, reason):
    spec = replace(presets["qwen3-30b-a3b"], **change)
    assert reason in PEER.refuses(spec, WeightFormat.MXFP4)


def test_it_stands_beside_four_bits_only(spec):
    assert PEER.refuses(spec, WeightFormat.MXFP4) is None
    assert "bf16" in PEER.refuses(spec, WeightFormat.BF16)
    assert "do not fit" in PEER.refuses(presets["gpt-oss-120b"], WeightFormat.MXFP4)
