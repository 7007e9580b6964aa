"""What the machine module reports, on this machine and on made-up ones."""

import os

import pytest

from moedecode import InvalidInput, MissingExtra, machine


def cache_folder(tmp_path, index, level, kind, size, shared):
    folder = tmp_path / f"index{index}"
    folder.mkdir()
    for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(f"{text}\n")


def test_caches_are_read_from_the_kernel_files(tmp_path):
    cache_folder(tmp_path, 0, 1, "Data", "48K", "0")
    cache_folder(tmp_path, 3, 3, "Unified", "32M", "0-3,8-11")
    cache_folder(tmp_path, 2, 2, "Unified", "2048K", "0,8")
    (tmp_path / "index9").mkdir()  # a level the kernel does not describe
    assert machine.caches(tmp_path) == [
        machine.Cache(1, "Data", 48 * 1024, 1),
        machine.Cache(2, "Unified", 2048 * 1024, 2),
        machine.Cache(3, "Unified", 32 * 1024 * 1024, 8),
    ]


def test_no_cache_files_mean_no_caches(tmp_path):
    assert machine.caches(tmp_path / "absent") == []


def test_cores_are_those_this_process_may_use():
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)


def test_the_isa_in_use_is_one_of_the_available_ones():
    assert machine.isa() in machine.available_isas()
    assert "portable" in machine.available_isas()


def test_bandwidth_is_a_rate_of_memory():
    assert 0.1 < machine.stream_read_gbps(1, megabytes=16, repeats=1) < 10_000


def test_negative_threads_are_refused():
    with pytest.raises(InvalidInput, match="threads=-1"):
        machine.stream_read_gbps(-1)


def test_a_missing_native_core_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "moedecode._native", None)
    with pytest.raises(MissingExtra, match="native core is not installed"):
        machine.isa()


def test_memory_figures_are_plausible():
    available = machine.memory_available()
    assert available is None or available > 1 << 20
    assert machine.peak_memory() > 1 << 20
