"""The public nki-library itself, where a checkout is given: MOEDECODE_NKI_LIBRARY=/path/to/nki-library.

Its kernels agree with its references in most rows, and the table shows what is known to be wrong in the
library of 2026-04-13 (a later one may have mended it: then the row says "agrees", and this test says so).
"""

import os

import numpy as np
import pytest

from moedecode.neuron.conformance import MODELS, ROWS, Verdict, block_figures, open_checkout, run_row

PATH = os.environ.get("MOEDECODE_NKI_LIBRARY")

pytestmark = pytest.mark.skipif(
    not PATH, reason="set MOEDECODE_NKI_LIBRARY to a checkout of the public nki-library"
)


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("torch", reason="the references of the library need PyTorch")
    with open_checkout(PATH) as opened:
        yield opened


def rows(*words):
    return [row for row in ROWS if any(word in row.name for word in words)]


def ids(row):
    return row.name


AGREE = [
    *rows("block/qwen3-235b/selective/bf16/T8/", "block/qwen3-235b/selective/fp8_row/T1/"),
    *rows("gpt-oss-120b/selective/fp16/T1/", "mxfp4/T1/I1536of3072/E32/whole", "mxfp4/T4/I3072/E128/E_L2"),
    *rows("all_expert/bf16/T32/I768", "all_expert/mxfp8/T4/I1536", "rmsnorm", "router/"),
    *rows("moe/qwen3-235b/selective/bf16", "dynamic loop, E = E_L = 1"),
]


@pytest.mark.parametrize("row", AGREE, ids=ids)
def test_kernel_and_reference_agree(library, row):
    outcome = run_row(library, row)
    assert outcome.verdict is Verdict.agrees, outcome


@pytest.mark.parametrize(
    ("words", "verdict", "detail"),
    [
        ("T320/I384of3072", Verdict.unwritten, "kernel wrong; wrong: "),
        ("T640/I512of3072", Verdict.kernel_wrong, " within 3"),
        ("/residual", None, ""),
        ("mxfp4/T32/I768of3072", Verdict.unwritten, "where it holds zeros: agrees"),
        ("pre-norm, no normalisation", Verdict.machine, "where it holds zeros: kernel wrong"),
        ("bf16/T1/I192of1536/E32/dense affinities", Verdict.machine, "otherwise: agrees"),
        ("no bias", Verdict.fails, "NoneType"),
        ("dynamic loop, E > E_L", Verdict.unwritten, "kernel wrong"),
        ("dynamic loop, one tile", Verdict.kernel_wrong, ""),
        ("T > 128", Verdict.refused, "T <= 128"),
        ("T % 4", Verdict.refused, "divisible by 4"),
        ("dynamic loop, E_L > 1", Verdict.refused, "E_L>1"),
    ],
)
def test_the_table_shows_what_is_known(library, words, verdict, detail):
    row = next(row for row in ROWS if words in row.name and row.kind in ("block", "moe"))
    outcome = run_row(library, row)
    if words == "/residual":
        assert outcome.verdict is Verdict.reference_wrong, "its reference leaves the residual out"
        return
    if outcome.verdict is Verdict.agrees:
        pytest.fail(f"mended in this checkout: {row.name}; tell docs/neuron.md and this test")
    assert outcome.verdict is verdict, outcome
    assert detail in outcome.detail


@pytest.mark.parametrize("every", [False, True])
def test_the_ledger_without_data_counts_the_same_bytes(library, every):
    config = MODELS["qwen3-235b"].with_(experts=16, local_experts=16, tokens=4)
    if every:
        config = config.with_(all_expert=True, local_experts=2, tokens=16)
    row = next(row for row in ROWS if row.kind == "block")
    with_data = run_row(library, type(row)("block", config))
    without = block_figures(library, config)
    assert with_data.figures is not None
    assert with_data.figures.hbm_bytes == without.hbm_bytes
    assert with_data.figures.engines_us == pytest.approx(without.engines_us)
    assert with_data.figures.sbuf_peak_bytes == without.sbuf_peak_bytes


def test_full_size_figures_read_what_the_notes_say(library):
    """gpt-oss-120b, one token: the whole [E, H] down bias is read by both cores."""
    figures = block_figures(library, MODELS["gpt-oss-120b"])
    extra = figures.hbm_bytes - figures.hbm_floor_bytes
    bias = 2 * 128 * 3072 * 2 - 4 * 3072 * 2
    assert extra >= bias
    assert np.isclose(figures.hbm_ratio, figures.hbm_bytes / figures.hbm_floor_bytes)
    assert figures.refused is None
