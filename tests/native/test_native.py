"""The native core's own tests, built and run with ctest: plain, sanitized, and for Arm under emulation.

Needs CMake, Ninja and a C++20 compiler; the Arm run also needs a cross compiler and QEMU, else it is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"

VARIANTS = {
    "plain": [],
    "asan-ubsan": ["-DMOEDECODE_SANITIZE=address,undefined"],
    "tsan": ["-DMOEDECODE_SANITIZE=thread"],
    "neon-emulated": [
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={ARM_EMULATOR};-cpu;max",
    ],
}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(not (ROOT / "native").exists(), reason="the native sources are not beside the tests")
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_core(variant: str) -> None:
    for tool in ("cmake", "ninja", "ctest"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if variant == "neon-emulated" and not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip(f"{ARM_COMPILER} or {ARM_EMULATOR} is not installed")
    build = ROOT / "build" / f"native-{variant}"
    options = ["-DMOEDECODE_TESTS=ON", "-DMOEDECODE_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    run("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options, *VARIANTS[variant])
    run("cmake", "--build", str(build))
    printed = run("ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", "--verbose")
    assert "100% tests passed" in printed
    isa = "neon" if variant == "neon-emulated" else "portable"
    assert f"{isa}: ok" in printed
