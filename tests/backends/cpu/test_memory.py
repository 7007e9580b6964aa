"""Memory of the cpu backend: a call with out= leaves nothing behind; packing holds one expert at a time."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

import moedecode as md
from blocks import Stored, spec_of
from moedecode.backends.cpu import CpuBackend
from moedecode.formats import WeightFormat
from moedecode.synthetic import expert_weights, tokens


def _resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.BF16])
def test_repeated_calls_do_not_grow(fmt):
    """Neither Python objects nor resident pages, for changing token counts, with everything asked for."""
    spec = spec_of(160, 72)
    block = md.MoEBlock(spec, Stored(fmt).weights(spec))
    x, residual = tokens(64, 160, "bfloat16"), tokens(64, 160, "bfloat16", seed=1)
    out, mask = np.empty_like(x), np.arange(64) % 5 > 0

    def rounds(count):
        for n in range(count):
            t = 1 + n * 7 % 64
            block(x[:t], out=out[:t], token_mask=mask[:t])
            if n % 8 == 0:
                block(x[:t], out=out[:t], residual=residual[:t], return_router=True)

    rounds(128)
    gc.collect()
    tracemalloc.start()
    try:
        before, resident = tracemalloc.get_traced_memory()[0], _resident()
        rounds(1500)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    assert peak - before < 1 << 20
    assert _resident() - resident < 4 << 20


def test_a_call_with_out_allocates_no_arrays():
    """The peak of one call is a few Python objects: less than one row of hidden states."""
    spec = spec_of(2880, 32, 4, 2)
    block = md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec))
    x = tokens(8, 2880, "bfloat16")
    out = np.empty_like(x)
    block(x, out=out)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        block(x, out=out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < x[0].nbytes


def test_packing_holds_one_expert():
    """Peak of packing: the packed weights (outside Python) and about one stored expert inside."""
    spec = md.ExpertSpec(256)
    weights = expert_weights(spec, 512, 24, WeightFormat.BF16)
    one = 3 * 512 * 256 * 2
    backend = CpuBackend()
    backend.pack(weights)
    gc.collect()
    tracemalloc.start()
    try:
        resident = _resident()
        packed = backend.pack(weights)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert packed.nbytes >= 24 * one
    assert peak < 6 * one  # drawing an expert takes float32 beside it
    assert _resident() - resident < packed.nbytes + 8 * one
