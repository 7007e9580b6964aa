"""The names of nki.language, and the seam through which kernels get them."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.machine import Machine
from moedecode.neuron.machine import isa as nisa
from moedecode.neuron.machine import language as nl


def inside(function, chip="trn2", **options):
    return Machine(chip, **options).run(function, n_programs=options.pop("n_programs", 1)).outputs


@pytest.mark.parametrize(("chip", "sbuf", "version"), [("trn1", 192, 2), ("trn2", 224, 3), ("trn3", 256, 4)])
def test_limits_are_those_of_the_chip(chip, sbuf, version):
    def kernel():
        size = nl.tile_size
        return (
            size.pmax,
            size.psum_fmax,
            size.gemm_moving_fmax,
            size.total_available_sbuf_size,
            nisa.get_nc_version(),
        )

    assert inside(kernel, chip) == (128, 512, 512, sbuf * 1024, version)


def test_dtypes_compare_hash_and_print_as_kernels_expect():
    assert nl.bfloat16 == np.dtype(ml_dtypes.bfloat16) and str(nl.bfloat16) == "bfloat16"
    assert {nl.float8_e4m3: 240.0, nl.float8_e4m3fn: 448.0}[np.dtype(ml_dtypes.float8_e4m3)] == 240.0
    assert nl.bool == nl.bool_ == np.dtype(bool)
    tensor_dtype = inside(lambda: nl.ndarray((1, 1), nl.float4_e2m1fn_x4).dtype)
    assert tensor_dtype == nl.float4_e2m1fn_x4 and str(tensor_dtype) == str(nl.float4_e2m1fn_x4)


def test_buffers_compare_by_identity():
    def kernel():
        return [
            nl.ndarray((1, 1), nl.float32, buffer=b).buffer is b
            for b in (nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm)
        ]

    assert all(inside(kernel))
    assert inside(lambda: nl.ndarray((1, 1), nl.float32).buffer == nl.sbuf)


def test_loops_are_ranges():
    for loop in (nl.affine_range, nl.sequential_range, nl.static_range):
        assert list(loop(2, 9, 3)) == [2, 5, 8] and list(loop(3)) == [0, 1, 2]


def test_zeros_and_names():
    def kernel():
        first, second = nl.zeros((2, 3), nl.bfloat16, name="w"), nl.zeros((2, 3), nl.bfloat16, name="w")
        return first.name, second.name, first

    first, second, values = inside(kernel)
    assert first == "w" and second == "w#1" and not values.astype(np.float32).any()


def names_of(choice, program):
    environment = {**os.environ, "MOEDECODE_NKI": choice}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


FAKE = """
import sys, types
for name in ("nki", "nki.language", "nki.isa"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["nki"].jit = lambda kernel: ("compiled", kernel)
"""


def test_the_seam_takes_the_model_unless_told_otherwise():
    program = "from moedecode.neuron.kernels.nki_names import *; print(nl.__name__, nisa.__name__, jit(3))"
    machine = "moedecode.neuron.machine"
    assert names_of("model", FAKE + program) == f"{machine}.language {machine}.isa 3"
    assert names_of("toolchain", FAKE + program) == "nki.language nki.isa ('compiled', 3)"
    assert "MOEDECODE_NKI='hardware': is not known" in names_of("hardware", program)
    without = "import sys; sys.modules['nki'] = None\n"
    assert "whose `nki` is not installed" in names_of("toolchain", without + program)
