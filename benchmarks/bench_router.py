"""The router of known models: product, scores, selection. Bytes: the router's weights, once."""

import pytest

from moedecode import WeightFormat, presets
from moedecode.backends import backend
from moedecode.synthetic import block_weights, tokens
from sizes import DTYPE, TOKENS


@pytest.mark.parametrize("count", TOKENS)
@pytest.mark.parametrize("preset", ["gpt-oss-20b", "qwen3-30b-a3b", "olmoe-1b-7b"])
def test_router(rate, preset, count):
    spec, cpu = presets[preset], backend("cpu")
    w = block_weights(spec, WeightFormat.MXFP4)
    rate(
        lambda x: cpu.router(x, w.router, w.router_bias, w.selection_bias, spec.router),
        lambda number: (tokens(count, spec.hidden, DTYPE, seed=number),),
        w.router.nbytes,
    )
