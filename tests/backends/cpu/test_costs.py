"""The calibration of the cpu backend: sensible rates, kept in a file, measured again when it is of no use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moedecode.backends.cpu import costs
from moedecode.formats import WeightFormat

KEYS = (WeightFormat.MXFP4, "a16", "portable", 1)
USELESS = ["", "[]", "not json", '{"x": [1, 2]}', '{"x": "abc"}', '{"x": [0, 1, 1]}', '{"x": 3}']


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEDECODE_CACHE_DIR", str(tmp_path / "cache"))
    costs.machine_costs.cache_clear()
    monkeypatch.setattr(costs, "STREAM_MEGABYTES", 16)
    return tmp_path / "cache"


def test_rates_are_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = costs.machine_costs(*KEYS)
    assert 1e8 < first.bytes_per_second < 1e13
    assert 1e7 < first.macs_per_second < 1e14
    assert first.decodes_per_second > 1e7
    assert len(json.loads((folder / "costs.json").read_text())) == 1

    costs.machine_costs.cache_clear()
    monkeypatch.setattr(costs, "_measured", lambda *_: pytest.fail("measured again"))
    assert costs.machine_costs(*KEYS) == first


@pytest.mark.parametrize("text", USELESS)
def test_a_file_of_no_use_is_replaced(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "costs.json").write_text(text)
    assert costs.machine_costs(*KEYS).bytes_per_second > 0
    assert len(json.loads((folder / "costs.json").read_text())) == 1


def test_a_folder_that_cannot_be_made_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert costs.machine_costs(*KEYS).bytes_per_second > 0
