"""Expert MLPs in every format and precision, without norm and router. Bytes: each distinct expert, once.

Eight experts of OLMoE's width: formats are to be compared, in seconds; `moedecode bench` is for whole layers.
"""

from functools import cache

import numpy as np
import pytest

from moedecode import ExpertAffinityScaleMode, ExpertSpec, WeightFormat
from moedecode.backends import Numerics, backend
from moedecode.plan import expert_bytes
from moedecode.spec import PRECISIONS
from moedecode.synthetic import expert_weights, tokens
from sizes import DTYPE

HIDDEN, EXPERTS, TOP_K = 2048, 64, 8
SPEC = ExpertSpec(1024)


@cache
def packed(fmt):
    """The last few formats stay packed between tests."""
    return backend("cpu").pack(expert_weights(SPEC, HIDDEN, EXPERTS, fmt))


def distinct_bytes(fmt):
    return lambda x, index, affinities, out: len(np.unique(index)) * expert_bytes(SPEC, HIDDEN, fmt)


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fmt", list(WeightFormat), ids=lambda fmt: fmt.value)
def test_experts(rate, fmt, precision, count):
    cpu, weights, numerics = backend("cpu"), packed(fmt), Numerics(precision)
    strategy = "selective" if count == 1 else "grouped"

    def arguments(number):
        rng = np.random.default_rng(number)
        index = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(count)]).astype(np.int32)
        affinities = rng.random((count, TOP_K), np.float32)
        x = tokens(count, HIDDEN, DTYPE, seed=number)
        return x, index, affinities, np.empty_like(x)

    def run(x, index, affinities, out):
        mode = ExpertAffinityScaleMode.POST_SCALE
        cpu.experts(x, weights, SPEC, mode, strategy, index, affinities, 0, numerics, out)

    rate(run, arguments, distinct_bytes(fmt))
