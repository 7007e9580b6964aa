"""The chip table agrees with the rates its sources state, and refuses names it has not."""

import dataclasses

import pytest

from moedecode.neuron.machine.chip import CHIPS, ENGINES, chip_named

MATMUL_FLOPS = 2 * 128 * 128  # per cycle of the PE array


@pytest.mark.parametrize(("name", "teraflops"), [("trn1", 92), ("trn2", 79), ("trn3", 79)])
def test_tensor_clock_gives_the_published_bf16_rate(name: str, teraflops: float) -> None:
    assert MATMUL_FLOPS * CHIPS[name].clock_hz["tensor"] / 1e12 == pytest.approx(teraflops, rel=0.01)


def test_mx_rate_of_trn3() -> None:
    assert 4 * MATMUL_FLOPS * CHIPS["trn3"].clock_hz["tensor"] / 1e12 == pytest.approx(315, rel=0.01)


@pytest.mark.parametrize(("name", "mebibytes"), [("trn1", 24), ("trn2", 28), ("trn3", 32)])
def test_sbuf_size(name: str, mebibytes: int) -> None:
    chip = CHIPS[name]
    assert chip.sbuf_partition_bytes * chip.partitions == mebibytes * 2**20
    assert chip.psum_partition_bytes == 8 * chip.psum_bank_bytes


@pytest.mark.parametrize(("name", "gigabytes"), [("trn1", 272), ("trn2", 362.5), ("trn3", 528)])
def test_hbm_path_is_the_smaller_of_memory_and_dma(name: str, gigabytes: float) -> None:
    assert CHIPS[name].hbm_path_bytes_per_second / 1e9 == pytest.approx(gigabytes)


def test_every_compute_engine_has_a_clock() -> None:
    for chip in CHIPS.values():
        assert set(chip.clock_hz) == set(ENGINES) - {"dma", "sync"}
        assert chip.seconds("vector", chip.clock_hz["vector"]) == 1.0


def test_only_trn3_has_mx() -> None:
    assert [name for name, chip in CHIPS.items() if chip.has_mx] == ["trn3"]


def test_unknown_chip_names_the_known() -> None:
    with pytest.raises(ValueError, match="trn1, trn2, trn3"):
        chip_named("trn9")


def test_a_figure_can_be_replaced() -> None:
    slow = dataclasses.replace(CHIPS["trn2"], dma_engine_bytes_per_second=1e9)
    assert slow.hbm_path_bytes_per_second == 16e9
