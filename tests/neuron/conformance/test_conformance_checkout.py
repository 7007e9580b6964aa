"""Opening a checkout and running a row of it: with a stand-in of our own, so that no checkout is needed.

Covers: a missing or changed checkout is said clearly, nothing stays imported, every verdict that a row can
have, and the command with its exit codes.
"""

import importlib
import json
import os
import sys

import numpy as np
import pytest
from stand_in_library import write_checkout

from moedecode.neuron.conformance import (
    BlockConfig,
    CheckoutError,
    Row,
    Verdict,
    block_figures,
    hbm_floor,
    open_checkout,
    public_block,
    run_row,
)
from moedecode.neuron.conformance.inputs import block_inputs
from moedecode.neuron.conformance.truth import block_truth

pytest.importorskip("torch", reason="the references of the library need PyTorch")

CONFIG = BlockConfig("small", 3, 256, 32, 32, 8, 8, 2, "bf16")
ROW = Row("block", CONFIG)


@pytest.fixture
def checkout(tmp_path):
    return write_checkout(tmp_path)


@pytest.fixture(scope="module")
def truth():
    return block_truth(CONFIG, block_inputs(CONFIG))[0].astype(np.float32)


def outcome_of(checkout, kernel, reference):
    """Run the row with these answers of kernel and reference."""
    with open_checkout(checkout) as library:
        answers = importlib.import_module("nkilib_src.nkilib.core.moe_block.moe_block_tkg").ANSWERS
        answers.update(kernel=kernel, reference=reference)
        if isinstance(kernel, np.ndarray):
            from moedecode.neuron.machine import Tensor
            from moedecode.neuron.machine.memory import wrap

            answers["kernel"] = Tensor(wrap(kernel, "answer"))
        return run_row(library, ROW)


def spoiled(answer):
    made = answer.copy()
    made[1] += 1.0
    return made


def test_a_right_kernel_agrees(checkout, truth):
    outcome = outcome_of(checkout, truth, truth)
    assert outcome.verdict is Verdict.agrees, outcome
    assert outcome.kernel_to_reference.l2 == 0
    assert outcome.figures.hbm_bytes == 3 * truth.nbytes  # the answer read by both cores, written by one
    assert outcome.figures.hbm_floor_bytes == hbm_floor(CONFIG)
    assert outcome.seconds > 0


def test_who_is_wrong_is_decided_by_our_own_reference(checkout, truth):
    kernel = outcome_of(checkout, spoiled(truth), truth)
    assert kernel.verdict is Verdict.kernel_wrong
    assert "wrong: row 1 of 3" in kernel.detail
    assert outcome_of(checkout, truth, spoiled(truth)).verdict is Verdict.reference_wrong
    assert outcome_of(checkout, spoiled(truth), spoiled(truth)).verdict is Verdict.both_wrong


def test_an_output_that_nobody_wrote_is_seen(checkout, truth):
    outcome = outcome_of(checkout, None, truth)
    assert outcome.verdict is Verdict.unwritten
    assert "NaN" in outcome.detail
    assert "kernel wrong" in outcome.detail, "zeros in its place would be wrong, too"


@pytest.mark.parametrize(
    ("error", "verdict", "detail"),
    [
        (
            AssertionError("[X] Kernel validation exception: T is odd - Please check it"),
            Verdict.refused,
            "T is odd",
        ),
        (TypeError("None has no dtype"), Verdict.fails, "TypeError: None has no dtype"),
    ],
)
def test_what_the_kernel_raises_is_an_outcome(checkout, truth, error, verdict, detail):
    outcome = outcome_of(checkout, error, truth)
    assert (outcome.verdict, outcome.detail) == (verdict, detail)
    assert outcome.figures is None


def test_figures_need_no_data_and_say_why_there_are_none(checkout):
    with open_checkout(checkout) as library:
        answers = importlib.import_module("nkilib_src.nkilib.core.moe_block.moe_block_tkg").ANSWERS
        answers["kernel"] = AssertionError("no")
        assert block_figures(library, CONFIG).refused == "no"
        answers["kernel"] = None
        full_size = CONFIG.with_(experts=4096, local_experts=4096, hidden=8192, intermediate=8192)
        figures = block_figures(library, full_size)
    assert figures.refused is None
    assert figures.hbm_floor_bytes == hbm_floor(full_size)


# ---- opening -----------------------------------------------------------------------------------------------


def test_nothing_stays_imported(checkout):
    path = list(sys.path)
    with open_checkout(checkout) as library:
        assert library.version == "stand-in"
        assert "nkilib_src.nkilib.core.moe_block.moe_block_tkg" in sys.modules
    assert sys.path == path
    assert not [name for name in sys.modules if name.startswith(("nkilib_src", "nki.", "neuronxcc"))]
    assert "NKILIB_LOG_LEVEL" not in os.environ


def test_the_source_folder_and_the_package_are_paths_too(checkout):
    for path in (checkout / "src", checkout / "src" / "nkilib_src"):
        with open_checkout(path) as library:
            assert library.version == "stand-in"


@pytest.mark.parametrize("name", ["nothing/here", "empty"])
def test_a_path_without_a_checkout_is_said_clearly(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckoutError, match="give the path of a checkout of the public nki-library"):
        public_block(tmp_path / name, CONFIG)


def test_a_missing_name_is_said_clearly(checkout):
    file = checkout / "src/nkilib_src/nkilib/core/moe_block/moe_block_tkg.py"
    file.write_text(file.read_text().replace("def moe_block_tkg(", "def moe_block_renamed("))
    with pytest.raises(CheckoutError, match=r"moe_block_tkg.*2026-04-13"), open_checkout(checkout):
        pass
    assert "nki" not in sys.modules


def test_a_missing_file_is_said_clearly(checkout):
    (checkout / "src/nkilib_src/nkilib/core/utils/tensor_view.py").unlink()
    with pytest.raises(CheckoutError, match="TensorView"), open_checkout(checkout):
        pass


def test_a_changed_interface_is_said_clearly(checkout):
    file = checkout / "src/nkilib_src/nkilib/core/moe_block/moe_block_tkg.py"
    file.write_text(file.read_text().replace("top_k, rank_id", "how_many, rank_id"))
    with (
        pytest.raises(CheckoutError, match=r"does not take top_k: its interface has changed"),
        open_checkout(checkout) as library,
    ):
        run_row(library, ROW)


# ---- the command -------------------------------------------------------------------------------------------


def command(*arguments):
    """(exit code, output) of `python -m moedecode.neuron.conformance`."""
    typer = pytest.importorskip("typer", reason="the command needs the extra [cli]")
    from typer.testing import CliRunner

    from moedecode.neuron.conformance.command import command as made

    app = typer.Typer()
    app.command()(made())
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_the_command_prints_a_table_and_writes_json(checkout, tmp_path, monkeypatch):
    from moedecode.neuron.conformance import command as module

    monkeypatch.setattr(module, "chosen_rows", lambda only, quick: [ROW])
    code, output = command(checkout, "--json", tmp_path / "out.json")
    assert code == 0, output
    assert "stand-in" in output
    assert ROW.name in output
    assert "1 rows; fails: 1" in output, "the stand-in has no answer unless a test gives one"
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["verdict"] == "fails"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder"),
        (["nowhere", "--only", "no such row"], "no row has such a name"),
        (["nowhere", "--chip", "trn9"], "must be one of trn1, trn2, trn3"),
    ],
)
def test_the_command_gives_up_with_a_sentence(arguments, message):
    code, output = command(*arguments)
    assert code == 2
    assert message in output
