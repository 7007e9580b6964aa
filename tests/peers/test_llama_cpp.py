"""llama.cpp's graph against the float64 reference, in each of its formats."""

from dataclasses import replace

import numpy as np
import pytest

from moedecode import WeightFormat, presets
from moedecode.formats import StoredMatrix
from moedecode.peers.llama_cpp import PEER, _rows


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [
        (WeightFormat.MXFP4, "mxfp4"),
        (WeightFormat.BF16, "bf16"),
        (WeightFormat.MXFP8_E4M3, "q8_0"),
        (WeightFormat.FP8_E4M3, "q8_0"),
    ],
    ids=lambda value: getattr(value, "value", value),
)
def test_it_computes_the_block(check, spec, fmt, kind):
    [engine] = check(PEER, spec, fmt)
    assert engine.name.startswith(f"llama.cpp {kind}") and engine.dtype == "float32"


def test_a_block_of_mxfp4_is_a_scale_and_sixteen_bytes():
    codes = np.arange(16, dtype=np.uint8)[None]  # byte j holds elements 2j (low) and 2j + 1
    matrix = StoredMatrix(WeightFormat.MXFP4, codes * 17, np.array([[200]], np.uint8))
    rows = _rows(matrix, "mxfp4")
    assert rows.shape == (1, 17) and rows[0, 0] == 200
    # ggml's byte j holds elements j and j + 16, whose codes here are j // 2 and (j + 16) // 2
    assert rows[0, 1:].tolist() == [j // 2 | (8 + j // 2) << 4 for j in range(16)]


def test_a_block_of_q8_0_is_a_half_and_thirty_two_bytes():
    codes, scale = np.arange(-32, 32, dtype=np.int8)[None], np.array([[0.5, 2.0]], np.float16)
    rows = _rows((codes, scale), "q8_0")
    assert rows.shape == (1, 68)
    assert rows[0, :2].view(np.float16) == 0.5 and rows[0, 34:36].view(np.float16) == 2.0
    assert rows[0, 2:34].view(np.int8).tolist() == list(range(-32, 0))


def test_what_it_does_not_compute_is_refused(spec):
    assert "fp32" in PEER.refuses(spec, WeightFormat.FP32)
    assert "graph" in PEER.refuses(presets["glm-4.5"], WeightFormat.MXFP4)
    assert "32" in PEER.refuses(replace(spec, hidden=80), WeightFormat.MXFP4)
