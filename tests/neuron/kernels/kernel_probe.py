"""Running a kernel stage on the model: SBUF results of both cores brought out, inputs held to one read."""

from __future__ import annotations

import numpy as np

from moedecode.neuron.kernels.nki_names import nisa, nl
from moedecode.neuron.machine import Machine


def per_core(*tensors):
    """HBM copies ``[2, ...]`` of SBUF tensors that both cores hold, each core storing its own."""
    cores, core = nl.num_programs(0) or 1, nl.program_id(0)
    outputs = []
    for tensor in tensors:
        out = nl.ndarray((cores, *tensor.shape), dtype=tensor.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[core], src=tensor)
        outputs.append(out)
    return tuple(outputs)


def run(kernel, *args, chip="trn3", cores=2, **options):
    """(outputs, report) of ``kernel`` on ``cores`` cores of ``chip``."""
    result = Machine(chip).run(kernel, *args, n_programs=cores, **options)
    return result.outputs, result.report


def assert_read_once(report, *names):
    """Every element of each named input was read, and by one core only."""
    for name in names:
        row = report.ledger.named(name)
        assert row.distinct_read_chip == row.nbytes, (
            f"{name}: read {row.distinct_read_chip} of {row.nbytes} bytes"
        )
        assert row.reread == 0, f"{name}: {row.reread} bytes read more than once"


def assert_hbm_is(report, *names):
    """The inputs that were touched in HBM are exactly ``names``; outputs of the probe are not inputs."""
    touched = {row.name for row in report.rows if row.kind == "input"}
    assert touched == set(names), f"touched {touched}, expected {set(names)}"


def unfold(tiles, t):
    """``[T, m]`` of a per-token array as the kernels hold it: ``[T, m]``, or ``[128, ceil(T/128), m]``."""
    tiles = np.asarray(tiles)
    if tiles.ndim == 2:
        return tiles
    return tiles.transpose(1, 0, 2).reshape(-1, tiles.shape[-1])[:t]


def hidden_major(x):
    """``[T, H]`` as ``[128, H/128, T]``, h = 128*k + p."""
    t, h = x.shape
    return np.ascontiguousarray(x.reshape(t, h // 128, 128).transpose(2, 1, 0))


def token_major(tile):
    """``[128, H/128, T]`` as ``[T, H]``."""
    p, k, t = tile.shape
    return np.ascontiguousarray(tile.transpose(2, 1, 0)).reshape(t, k * p)
