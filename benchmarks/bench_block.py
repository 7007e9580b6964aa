"""The whole block of known models in MXFP4, by token count. Bytes: each distinct expert, once."""

from functools import lru_cache

import numpy as np
import pytest

from moedecode import MoEBlock, WeightFormat, presets
from moedecode.plan import expert_bytes
from moedecode.synthetic import block_weights, tokens
from sizes import DTYPE, ROUNDS, TOKENS


@lru_cache(maxsize=1)
def block_of(preset, precision):
    """One block at a time stays in memory."""
    spec = presets[preset]
    return MoEBlock(spec, block_weights(spec, WeightFormat.MXFP4), precision=precision)


@pytest.mark.parametrize("count", TOKENS)
@pytest.mark.parametrize("precision", ["a16", "a8"])
@pytest.mark.parametrize("preset", ["gpt-oss-20b", "qwen3-30b-a3b", "olmoe-1b-7b"])
def test_block(rate, preset, precision, count):
    spec, block = presets[preset], block_of(preset, precision)
    size = expert_bytes(spec.experts, spec.hidden, WeightFormat.MXFP4)

    # counting distinct experts takes a call of its own, all of them before the timed ones
    inputs = [tokens(count, spec.hidden, DTYPE, seed=number) for number in range(ROUNDS + 1)]
    distinct = [len(np.unique(block(x, return_router=True).expert_index)) for x in inputs]
    out = np.empty_like(inputs[0])
    rate(lambda x: block(x, out=out), lambda number: (inputs[number],), size * int(np.median(distinct)))
