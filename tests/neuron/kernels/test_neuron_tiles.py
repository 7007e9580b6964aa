"""Shares, folds and exchanges between the two cores."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_probe import assert_read_once, per_core, run, token_major

from moedecode.neuron.kernels import rows, tiles
from moedecode.neuron.kernels.nki_names import nisa, nl
from numeric import assert_bits_equal


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 128])
def test_shares_cover_everything_once(n, cores):
    seen = {}

    def kernel(x):
        seen[nl.program_id(0)] = [tiles.share(n), *(tiles.share(n, i) for i in range(cores))]
        return x

    run(kernel, np.zeros((1, 1), np.float32), cores=cores)
    own = [seen[i][0] for i in range(cores)]
    assert all(seen[i][1:] == own for i in range(cores))  # each knows the other's
    assert [t for start, count in own for t in range(start, start + count)] == list(range(n))
    assert max(count for _, count in own) - min(count for _, count in own) <= 1


def test_folds():
    assert tiles.tiles(300) == [(0, 128), (128, 128), (256, 44)]
    assert tiles.tiles(0) == []
    assert tiles.token_shape(128, 5) == (128, 5)
    assert tiles.token_shape(129, 5) == (128, 2, 5)
    assert tiles.token_tiles(129) == 2


def _own(x):
    """This core's row of ``x [2, n]`` as ``[1, n]`` in SBUF."""
    sb = nl.ndarray((1, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
    core = nl.program_id(0)
    nisa.dma_copy(dst=sb, src=x[core : core + 1, :])
    return sb


def test_exchanges():
    """exchange swaps, exchange_and_add adds with equal bits, from_core_0 spreads what core 0 has."""
    x = np.random.default_rng(0).standard_normal((2, 9)).astype(np.float32)

    def kernel(x):
        mine, other, total, first = _own(x), _own(x), _own(x), _own(x)
        tiles.exchange(other, mine)
        tiles.exchange_and_add(total, pipe=1)
        tiles.from_core_0(first)
        return per_core(other, total, first)

    (other, total, first), _ = run(kernel, x)
    assert_bits_equal("exchanged", other[:, 0], x[::-1])
    assert_bits_equal("sum", total[:, 0], np.stack([x[0] + x[1]] * 2))
    assert_bits_equal("from core 0", first[:, 0], np.stack([x[0]] * 2))


def test_one_core_has_nobody_to_ask():
    x = np.arange(6, dtype=np.float32).reshape(1, 6)

    def kernel(x):
        total, first = _own(x), _own(x)
        tiles.exchange_and_add(total)
        tiles.from_core_0(first)
        shared = nl.ndarray((1, 6), dtype=nl.float32, buffer=nl.shared_hbm)
        tiles.barrier(shared)
        return per_core(total, first)

    outputs, _ = run(kernel, x, cores=1)
    for out in outputs:
        assert_bits_equal("unchanged", out[0], x)


@pytest.mark.parametrize(("t", "h"), [(1, 512), (3, 384), (6, 384), (7, 1024), (130, 256)])
def test_load_hidden_major(t, h):
    """Whole on both cores, read once: halves of T, halves of H, or core 0 alone."""
    x = np.random.default_rng(t).standard_normal((t, h)).astype(np.float16)
    (copies,), report = run(lambda x: per_core(rows.load_hidden_major(x)), x)
    for core in copies:
        assert_bits_equal("hidden", token_major(core), x)
    assert_read_once(report, "x")
