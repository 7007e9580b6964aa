"""Affinity masking of the kernels, on the model: from the router's result, from HBM, the golden vectors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_probe import assert_hbm_is, assert_read_once, per_core, run, unfold

import golden
from moedecode.backends.reference import maths
from moedecode.neuron.kernels import masking, stages
from moedecode.neuron.kernels.nki_names import nisa, nl
from moedecode.neuron.kernels.tiles import PARTITIONS, Routing, tiles, token_shape, token_tile
from numeric import assert_bits_equal

BF16 = np.dtype(ml_dtypes.bfloat16)


def _on_chip(tensor):
    """HBM ``[T, m]`` folded into SBUF, on every core."""
    t, m = tensor.shape
    rows = nl.ndarray(token_shape(t, m), dtype=tensor.dtype, buffer=nl.sbuf)
    for number, (first, n) in enumerate(tiles(t)):
        nisa.dma_copy(dst=token_tile(rows, number, n), src=tensor[nl.ds(first, n), :])
    return rows


def _from_routing(index, eager, rank_id, local_experts, to_hbm=False):
    routing = Routing(_on_chip(index), None, _on_chip(eager), index.shape[0])
    local = masking.local_affinities(routing, rank_id, local_experts)
    if to_hbm:
        return masking.per_token_to_hbm(local, index.shape[0])
    return _copies(local, index.shape[0])


def _copies(local, t):
    """Tiles of 128 rows, the last padded with zeros: rows past T were never written."""
    whole = nl.ndarray((PARTITIONS, len(tiles(t)), local.shape[-1]), dtype=local.dtype, buffer=nl.sbuf)
    nisa.memset(dst=whole, value=0.0)
    for number, (_, n) in enumerate(tiles(t)):
        nisa.tensor_copy(dst=whole[0:n, number, :], src=token_tile(local, number, n))
    return per_core(whole)


def _from_hbm(affinities, index, rank_id, local_experts, mask, index_on_chip):
    chosen = _on_chip(index) if index_on_chip else index
    local = masking.local_affinities(affinities, rank_id, local_experts, mask, chosen)
    return _copies(local, affinities.shape[0])


def _draw(t, e, k, dense, dtype=np.float32):
    rng = np.random.default_rng(t + e + k)
    index = rng.permuted(np.tile(np.arange(e), (t, 1)), axis=1)[:, :k]
    affinities = rng.random((t, e)).astype(dtype)
    if not dense:
        keep = np.zeros((t, e), bool)
        np.put_along_axis(keep, index, True, 1)
        affinities = np.where(keep, affinities, 0).astype(dtype)
    return affinities, index.astype(np.uint32)


SHAPES = [(1, 8, 2, 2), (4, 128, 4, 16), (7, 30, 22, 15), (128, 16, 3, 1), (130, 12, 2, 3), (257, 64, 8, 64)]


@pytest.mark.parametrize(("t", "e", "k", "local"), SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_from_the_router(t, e, k, local, last):
    """Ids and eager affinities alone give the masked slice of either kind of row; HBM sees the rank only."""
    affinities, index = _draw(t, e, k, dense=True)
    eager = np.take_along_axis(affinities, index.astype(np.int64), 1)
    rank = e // local - 1 if last else 0
    rank_id = np.array([[rank]], np.int32)
    outputs, report = run(_from_routing, index, eager, rank_id, local)
    want = maths.local_affinities(affinities, index, rank * local, local, dense=True)
    assert_bits_equal("the two cores", outputs[0][0], outputs[0][1])
    assert_bits_equal("local", unfold(outputs[0][0], t), want)
    assert_read_once(report, "rank_id")
    outputs, _ = run(_from_routing, index, eager, rank_id, local, True)
    assert_bits_equal("in HBM", outputs, want)


@pytest.mark.parametrize("index_on_chip", [False, True])
@pytest.mark.parametrize(("t", "e", "k", "local"), SHAPES)
def test_from_hbm(t, e, k, local, index_on_chip):
    """Rank slices with and without the index mask; affinities and ids read once per chip."""
    for dense, dtype in ((True, np.float32), (False, BF16)):
        affinities, index = _draw(t, e, k, dense, dtype)
        rank_id = np.array([[e // local - 1]], np.int32)
        outputs, report = run(_from_hbm, affinities, index, rank_id, local, dense, index_on_chip)
        first = rank_id[0, 0] * local
        want = maths.local_affinities(affinities, index, first, local, dense).astype(np.float32)
        assert_bits_equal("the two cores", outputs[0][0], outputs[0][1])
        assert_bits_equal("local", unfold(outputs[0][0], t), want)
        row = report.ledger.named("affinities")
        assert row.reread == 0
        assert sum(row.read) == t * local * affinities.dtype.itemsize
        assert_read_once(report, "rank_id", *(["index"] if dense and not index_on_chip else []))


def test_without_a_mask_a_dense_row_stays_dense():
    affinities, index = _draw(5, 16, 2, dense=True)
    outputs, report = run(_from_hbm, affinities, index, np.array([[1]], np.int32), 4, False, False)
    assert_bits_equal("slice", unfold(outputs[0][0], 5), affinities[:, 4:8])
    assert_hbm_is(report, "affinities", "rank_id")


def test_ids_of_no_expert_match_nothing():
    """-1 and ids of other ranks leave zeros; the same id twice counts twice from the router's form."""
    index = np.array([[-1, 4, 4], [0, 1, -1]], np.int32)
    eager = np.array([[0.5, 0.25, 0.125], [1, 1, 1]], np.float32)
    outputs, _ = run(_from_routing, index, eager, np.array([[1]], np.int32), 4)
    assert_bits_equal("local", unfold(outputs[0][0], 2), np.array([[0.375, 0, 0, 0], [0] * 4], np.float32))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("t", [3, 130])
def test_local_choices(t, weighted):
    """Ids count from the rank's first expert; choices of other ranks become expert 0 with weight 0."""
    affinities, index = _draw(t, 12, 5, dense=True)
    eager = np.take_along_axis(affinities, index.astype(np.int64), 1)

    def kernel(index, eager, rank_id):
        routing = Routing(_on_chip(index), None, _on_chip(eager), t)
        local = masking.local_choices(routing, rank_id, 4, weighted)
        return (*_copies(local.expert_index, t), *_copies(local.eager, t))

    (ids, weights), _ = run(kernel, index, eager, np.array([[1]], np.int32))
    mine = (index >= 4) & (index < 8)
    assert_bits_equal("the two cores", ids[0], ids[1])
    assert_bits_equal("ids", unfold(ids[0], t), np.where(mine, index - 4, 0).astype(np.uint32))
    assert_bits_equal(
        "weights", unfold(weights[0], t), np.where(mine, eager if weighted else 1, 0).astype("f4")
    )


def test_refusals():
    affinities, index = _draw(5, 16, 2, dense=True)

    def unmasked(affinities, rank_id):
        return masking.local_affinities(affinities, rank_id, 4, True)

    with pytest.raises(ValueError, match="expert_index=None"):
        run(unmasked, affinities, np.array([[1]], np.int32))

    def folded(index, rank_id):
        rows = nl.ndarray((PARTITIONS, 2, 2), dtype=index.dtype, buffer=nl.sbuf)
        return masking.local_affinities(Routing(rows, None, rows), rank_id, 4)

    with pytest.raises(ValueError, match=r"Routing\.tokens=None"):
        run(folded, index, np.array([[1]], np.int32))


@pytest.mark.parametrize("case", golden.cases("affinity_mask"))
def test_golden(case):
    inputs, o = case.inputs(), case.options
    out, report = run(
        stages.mask_expert_affinities,
        inputs["expert_affinities"],
        inputs["expert_index"],
        np.array([[o["rank_id"]]], np.int32),
        o["E_L"],
        o["mask_unselected_experts"],
    )
    assert_bits_equal("out", out, case.want("out"))
    for row in report.rows:
        assert row.reread == 0, row.name
