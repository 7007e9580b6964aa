"""The machine under the names of the kernel language: a kernel in a file of its own imports them and runs.

Covers: every module name, jit outside and inside a run, a grid, dataclasses with fields left out, static_cast
and that nothing is left behind (or a real toolchain put back).
"""

import importlib
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.machine import Machine
from moedecode.neuron.machine.dtypes import float4_e2m1fn_x4, float8_e4m3fn_x4, unpack_x4
from moedecode.neuron.machine.modules import as_nki_modules, static_cast

KERNEL = '''
from dataclasses import dataclass
from typing import Optional

import neuron_dtypes as dt
import neuronxcc.nki.typing as nt
import nki
import nki.isa as nisa
import nki.language as nl
from nki.isa import dge_mode
from nki.isa.constants import oob_mode
from nki.language import NKIObject


@dataclass
class Sizes(NKIObject):
    rows: int
    columns: int
    left_out: int
    named: Optional[str] = "x"


@nki.jit
def doubled(x, dtype: nki.dtype = nl.float32):
    sizes = Sizes(x.shape[0], columns=x.shape[1])
    assert sizes.left_out is None and sizes.named == "x"
    assert x, "a tensor that was given is true"
    tile = nl.ndarray((sizes.rows, sizes.columns), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    return tile


@nki.jit(mode="whatever")
def by_core(x: nt.mutable_tensor):
    """Each core doubles its half of the rows."""
    half = x.shape[0] // nl.num_programs(0)
    rows = nl.ds(nl.program_id(0) * half, half)
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[rows, :], src=doubled(x[rows, :]), dge_mode=dge_mode.none, oob_mode=oob_mode.error)
    return out
'''


@pytest.fixture
def kernel_folder(tmp_path, monkeypatch):
    (tmp_path / "a_users_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("a_users_kernels", None)


X = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_jitted_kernel_runs_on_the_machine_and_calls_through_inside(kernel_folder, cores):
    with as_nki_modules(Machine("trn2"), forget=["a_users_kernels"]):
        kernels = importlib.import_module("a_users_kernels")
        out = kernels.by_core[cores](X)
    assert np.array_equal(out, 2 * X)


def test_without_a_grid_the_block_says_how_many_cores(kernel_folder):
    machine = Machine("trn2")
    with as_nki_modules(machine, programs=2, forget=["a_users_kernels"]):
        importlib.import_module("a_users_kernels").by_core(X)
    assert len(machine.report.instructions) == 2


def test_machine_run_takes_the_jitted_function(kernel_folder):
    with as_nki_modules(forget=["a_users_kernels"]):
        kernels = importlib.import_module("a_users_kernels")
        result = Machine("trn2").run(kernels.by_core, X)
    assert np.array_equal(result.outputs, 2 * X)
    assert result.report.ledger.named("x").nbytes == X.nbytes, "the argument keeps its name"


def test_nothing_is_left_behind(kernel_folder):
    before = set(sys.modules)
    with as_nki_modules(forget=["a_users_kernels"]):
        importlib.import_module("a_users_kernels")
        assert "nki.isa.constants" in sys.modules
    left = {name for name in set(sys.modules) - before if name.partition(".")[0] != "moedecode"}
    assert not left


def test_it_is_put_back_after_an_error(kernel_folder):
    with pytest.raises(RuntimeError, match="inside"), as_nki_modules():
        raise RuntimeError("inside")
    assert not any(name.partition(".")[0] in ("nki", "neuronxcc", "neuron_dtypes") for name in sys.modules)


def test_an_installed_toolchain_comes_back(monkeypatch):
    real, language = types.ModuleType("nki"), types.ModuleType("nki.language")
    monkeypatch.setitem(sys.modules, "nki", real)
    monkeypatch.setitem(sys.modules, "nki.language", language)
    with as_nki_modules() as model:
        assert sys.modules["nki"] is model is not real
        assert sys.modules["nki.language"] is not language
    assert sys.modules["nki"] is real
    assert sys.modules["nki.language"] is language


@pytest.mark.parametrize("root", ["nki", "neuronxcc.nki"])
@pytest.mark.parametrize("name", ["language", "isa", "isa.constants", "typing"])
def test_both_roots_offer_the_same_names(root, name):
    with as_nki_modules():
        module = importlib.import_module(f"{root}.{name}")
        assert module is not None
        assert importlib.import_module(root).isa.get_nc_version is not None


@pytest.mark.parametrize("dtype", [float4_e2m1fn_x4, float8_e4m3fn_x4])
def test_static_cast_packs_four_and_unpacks_them(dtype):
    values = np.array([[0.5, -1.0, 6.0, 0.0, 100.0, 1.5, -0.25, 2.4]], np.float32)
    packed = static_cast(values, dtype)
    assert packed.shape == (1, 2)
    assert packed.dtype == dtype
    unpacked = static_cast(packed, np.float32)
    assert unpacked.shape == values.shape
    assert np.array_equal(unpacked, unpack_x4(packed).reshape(1, 8))
    largest = 6.0 if dtype == float4_e2m1fn_x4 else 448.0
    assert np.abs(unpacked - np.clip(values, -largest, largest)).max() <= 4.0  # one step of E4M3 at 100


def test_static_cast_rounds_to_nearest_even_and_takes_names():
    assert static_cast(np.float32([1 + 2**-8, 1 + 3 * 2**-8]), "bfloat16").astype(float).tolist() == [
        1.0,
        1.015625,
    ]
    given = np.ones(3, ml_dtypes.bfloat16)
    copied = static_cast(given, ml_dtypes.bfloat16)
    assert copied.dtype == given.dtype
    assert copied is not given
