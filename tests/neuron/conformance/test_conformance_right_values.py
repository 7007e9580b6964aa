"""Where the public library's kernel and its own reference disagree, our kernels hold the right value.

One case for each thing the table finds wrong in the library of 2026-04-13, at small size; the right value is
that of the float64 reference. Bounds: relative L2 of bf16 outputs; one moved E4M3 code shows in its row.
"""

import numpy as np
import pytest

from moedecode.neuron.conformance import BlockConfig
from moedecode.neuron.conformance.inputs import block_inputs, expert_inputs
from moedecode.neuron.conformance.truth import block_truth, moe_truth
from numeric import assert_close

MX = BlockConfig("small", 8, 512, 64, 512, 16, 2, 4, "mxfp4", all_expert=True, hidden_actual=448,
                 pre_norm=False, norm_topk=False, activation="swish", bias=True, clamp=True)  # fmt: skip
SELECTIVE = MX.with_(all_expert=False, local_experts=16, tokens=2)

BLOCKS = {
    "all-expert MX, T/2 not a multiple of 128: the second core's affinities": MX.with_(tokens=320),
    "the same with more than one tile of I": MX.with_(tokens=320, intermediate=640, full_intermediate=640),
    "residual: the library's reference leaves it out": MX.with_(tokens=16, residual=True),
    "part of a tile of I: fresh memory enters the sum": MX.with_(intermediate=360, full_intermediate=360),
    "part of the last tile of I": MX.with_(intermediate=768, full_intermediate=768),
    "selective, part of a tile of I": SELECTIVE.with_(intermediate=96, full_intermediate=96),
    "selective MX, pre-norm without normalisation: affinities nobody wrote": SELECTIVE.with_(
        pre_norm=True, tokens=1
    ),
    "selective MX without biases": SELECTIVE.with_(bias=False),
    "dense affinities in SBUF": SELECTIVE.with_(weights="bf16", pre_norm=True, tokens=1),
}

MOE = {
    "dynamic loop, E > E_L: the second core's affinities": MX.with_(local_experts=1, tokens=64),
    "dynamic loop, E_L > 1": MX.with_(tokens=64),
    "dynamic loop, one tile of I: both cores add the whole": MX.with_(
        local_experts=1, experts=1, top_k=1, tokens=32
    ),
}


def close(name, got, want):
    # 2e-3 is the rounding of the output to bf16; a moved code moves one row by more.
    assert_close(name, got.astype(np.float64), want.astype(np.float64), 4e-3, 1e-1)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_holds_the_right_value(name):
    config = BLOCKS[name]
    arrays = block_inputs(config)
    got, logits = block_truth(config, arrays, backend="neuron")
    want, right_logits = block_truth(config, arrays)
    close(name, got, want)
    close(f"{name}, logits", logits, right_logits)


@pytest.mark.parametrize("name", MOE)
def test_the_dynamic_loop_holds_the_right_value(name):
    config = MOE[name]
    arrays = expert_inputs(config, dense=False)
    got = moe_truth(config, arrays, mask=False, backend="neuron", block_size=16)
    close(name, got, moe_truth(config, arrays, mask=False))
