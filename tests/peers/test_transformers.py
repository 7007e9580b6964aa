"""Transformers' modules against the float64 reference, with every expert implementation."""

import pytest

from moedecode import WeightFormat, machine, presets
from moedecode.peers import transformers
from moedecode.peers.transformers import PEER

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_implementation_computes_the_block(check, spec):
    engines = check(PEER, spec, WeightFormat.BF16)
    names = [f"transformers {name}" for name in ("eager", "batched_mm", "grouped_mm")]
    assert [engine.name for engine in engines] == names


def test_batched_mm_sits_out_what_would_not_fit(check, spec, monkeypatch):
    reason = PEER.available()
    if reason is not None:
        pytest.skip(reason)
    gathered = spec.router.top_k * 2 * spec.experts.intermediate * spec.hidden * 2
    monkeypatch.setattr(machine, "memory_available", lambda: int(5.5 * gathered / transformers.GATHER_SHARE))
    limits = {e.name: e.most_tokens for e in PEER.build(spec, WeightFormat.BF16, 1, 1)}
    assert limits["transformers batched_mm"] == 5
    assert limits["transformers eager"] is limits["transformers grouped_mm"] is None


def test_what_it_does_not_compute_is_refused(spec):
    assert "mxfp4" in PEER.refuses(spec, WeightFormat.MXFP4)
    assert "module" in PEER.refuses(presets["llama-4-scout"], WeightFormat.BF16)
