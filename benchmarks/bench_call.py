"""What one call costs beside the work: a block so small that the kernels take next to nothing.

The fixed cost is the median call minus the time its threads spent in stages, which the block's own profile
tells. Bytes: each distinct expert, once (they fit in a cache).
"""

import numpy as np
import pytest

from moedecode import BlockSpec, ExpertSpec, MoEBlock, RouterSpec, WeightFormat
from moedecode.plan import expert_bytes
from moedecode.synthetic import block_weights, tokens
from sizes import DTYPE

SPEC = BlockSpec(256, RouterSpec(8, 2), ExpertSpec(256))
CALLS = 200  # in a row, as a decoder makes them: a pause would put threads to sleep


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_call(rate, benchmark, arrays, threads):
    block = MoEBlock(SPEC, block_weights(SPEC, WeightFormat.MXFP4), threads=threads)
    x = tokens(1, SPEC.hidden, DTYPE)
    profiles = [block.profile(x) for _ in range(CALLS)]
    kernel = np.median([np.sum(list(stages.values()), axis=0).max() for stages in profiles[CALLS // 2 :]])
    out = np.empty_like(x)
    if arrays == "torch":
        torch = pytest.importorskip("torch")
        x, out = (torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (x, out))

    def run(x, out):
        for _ in range(CALLS):
            block(x, out=out)

    moved = CALLS * 2 * expert_bytes(SPEC.experts, SPEC.hidden, WeightFormat.MXFP4)
    rate(run, lambda number: (x, out), moved)
    each = benchmark.stats.stats.median / CALLS
    benchmark.extra_info |= {"us_per_call": 1e6 * each, "us_fixed": 1e6 * (each - kernel)}
    fixed = f"{1e6 * (each - kernel):.1f} us beside the kernel"
    print(f"\n{arrays}, {threads} threads: {1e6 * each:.1f} us a call, {fixed}")
