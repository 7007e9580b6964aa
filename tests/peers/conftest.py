"""What the tests of the peers share: small blocks of the families that peers compute, and the check."""

from dataclasses import replace

import pytest

from moedecode import presets
from moedecode.benchmark import error_of
from moedecode.synthetic import tokens

TOKENS = (1, 3, 17)


def small(preset, hidden=128, intermediate=96, experts=8):
    """The preset's block with small dimensions."""
    spec = presets[preset]
    return replace(
        spec,
        hidden=hidden,
        router=replace(spec.router, num_experts=experts, top_k=min(spec.router.top_k, 4)),
        experts=replace(spec.experts, intermediate=intermediate),
    )


@pytest.fixture(params=["gpt-oss-20b", "olmoe-1b-7b", "qwen3-30b-a3b"])
def spec(request):
    """gpt-oss (biases, clamps), a softmax that is not normalised, one that is."""
    return small(request.param)


@pytest.fixture
def check():
    """Hold every engine of a peer against the float64 reference; skip, visibly, where it is not installed."""

    def run(peer, spec, fmt, copies=2):
        reason = peer.available()
        if reason is not None:
            pytest.skip(reason)
        assert peer.refuses(spec, fmt) is None
        engines = peer.build(spec, fmt, threads=2, copies=copies)
        for engine in engines:
            off = error_of(engine.calls, engine.dtype, spec, engine.weights)
            assert off <= engine.bound, f"{engine.name}: {off:.1e}"
            for count in TOKENS:
                x = tokens(count, spec.hidden, engine.dtype, seed=count)
                first = [call(x).copy() for call in engine.calls]
                assert all((out == first[0]).all() for out in first), "copies differ"
                assert first[0].shape == x.shape
        return engines

    return run
