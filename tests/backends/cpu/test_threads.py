"""The cpu backend among threads and processes: callers take turns, forks in mid-work, MOEDECODE_ISA."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import moedecode as md
from blocks import Stored, spec_of
from moedecode import _native
from moedecode.formats import WeightFormat
from moedecode.synthetic import tokens
from numeric import assert_bits_equal

TESTS = Path(__file__).parents[2]

SETUP = """
import os, threading
import numpy as np
import moedecode as md
from blocks import Stored, spec_of
from moedecode.formats import WeightFormat
from moedecode.synthetic import tokens

spec = spec_of(128, 64)
block = md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=3)
x = tokens(20, 128, "float32")
"""


def _script(body, **environment):
    """Run a script in a fresh interpreter; returns the finished process."""
    package = Path(md.__file__).parents[1]
    paths = os.pathsep.join(map(str, (package, TESTS)))
    return subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(body)],
        env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_eight_threads_on_two_blocks():
    """Callers take turns; every result has the bits of a call on its own."""
    spec = spec_of(160, 72)
    blocks = [
        md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=2),
        md.MoEBlock(spec, Stored(WeightFormat.BF16).weights(spec, seed=1), threads=3),
    ]
    inputs = [tokens(count, 160, "float32", seed=count) for count in (1, 2, 7, 33)]
    alone = [[block(x) for x in inputs] for block in blocks]

    def work(seed):
        for step in np.random.default_rng(seed).integers(0, 8, 40):
            which, n = divmod(int(step), 4)
            assert_bits_equal(f"block {which}, input {n}", blocks[which](inputs[n]), alone[which][n])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_packing_beside_running():
    """A block is built while another one runs."""
    spec = spec_of(160, 72)
    weights = Stored(WeightFormat.MXFP4).weights(spec)
    first, x = md.MoEBlock(spec, weights), tokens(5, 160, "float32")
    want = first(x)

    def build(_):
        return md.MoEBlock(spec, weights)(x)

    def run(_):
        return first(x)

    with ThreadPoolExecutor(4) as pool:
        for got in [*pool.map(build, range(6)), *pool.map(run, range(30))]:
            assert_bits_equal("out", got, want)


def test_fork_in_the_middle_of_work():
    """Children forked while another thread computes start workers of their own and get the same bits."""
    done = _script(
        """
        want = block(x)
        stop = threading.Event()

        def work():
            while not stop.is_set():
                assert (block(x) == want).all()

        thread = threading.Thread(target=work)
        thread.start()
        codes = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                got = block(x)
                again = os.fork() if _ == 9 else 1  # and a grandchild
                if again == 0:
                    os._exit(0 if (block(x) == want).all() else 3)
                fine = (got == want).all() and (again == 1 or os.waitpid(again, 0)[1] == 0)
                os._exit(0 if fine else 2)
            codes.append(os.waitpid(child, 0)[1])
        stop.set()
        thread.join()
        assert (block(x) == want).all()
        print(codes)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([0] * 10)


def test_more_threads_than_the_system_allows():
    """Where no thread can be started the caller works alone."""
    done = _script(
        """
        import resource
        want = md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=1)(x)
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 40, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        many = md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=900)
        assert (many(x) == want).all()
        print("fine")
        """
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


PLACES = """
    def cores():  # of the caller and of every other thread of the core: OpenBLAS has one thread here, so none
        mine = threading.get_native_id()
        others = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task") if int(t) != mine]
        return os.sched_getaffinity(mine), others

    block = md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=2)
    everywhere = os.sched_getaffinity(0)
    for core in sorted(everywhere):
        for attempt in range(20):  # the system may move the caller on before the call
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(0, everywhere)
            block(x)
            mine, others = cores()
            if not any(core in other for other in others): break
        met = any(core in other for other in others)
        print(len(others), mine == everywhere, met, all(other <= everywhere for other in others))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nowhere to go")
@pytest.mark.parametrize("placement", ["on", "off"])
def test_workers_keep_off_the_core_of_the_caller(placement):
    """Wherever that is; it is left alone itself. MOEDECODE_PLACEMENT=off leaves everyone alone."""
    done = _script(PLACES, MOEDECODE_PLACEMENT=placement)
    assert done.returncode == 0, done.stderr
    seen = done.stdout.splitlines()
    assert len(seen) == len(os.sched_getaffinity(0))
    assert set(seen) == {f"1 True {placement == 'off'} True"}


def test_more_threads_than_cores_share_them():
    """Nobody is confined where there are fewer cores than threads, also after a call that confined them."""
    done = _script(
        """
        everywhere = os.sched_getaffinity(0)
        md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=min(2, len(everywhere)))(x)
        md.MoEBlock(spec, Stored(WeightFormat.MXFP4).weights(spec), threads=len(everywhere) + 1)(x)
        assert all(os.sched_getaffinity(int(t)) == everywhere for t in os.listdir("/proc/self/task"))
        print("fine")
        """
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


@pytest.mark.parametrize("isa", _native.available_isas())
def test_the_environment_chooses_the_instruction_set(isa):
    done = _script("from moedecode import _native; block(x); print(_native.isa())", MOEDECODE_ISA=isa)
    assert (done.returncode, done.stdout.strip()) == (0, isa), done.stderr


def test_an_unknown_instruction_set_is_an_error():
    """Named in the environment: every use of the cpu backend says so; the reference does not care."""
    done = _script(
        """
        """,
        MOEDECODE_ISA="sse9",
    )
    assert done.returncode == 1, done
    last = done.stderr.strip().splitlines()[-1]
    for part in ("InvalidInput", "MOEDECODE_ISA", "sse9", "choose one of", *_native.available_isas()):
        assert part in last, last


@pytest.mark.parametrize(
    "call",
    [
        "md.rmsnorm_tkg(x, None)",
        "md.router_topk(x, np.ones((4, 3), np.float32), None, 'SOFTMAX', 1)",
        "md.pack(np.ones((2, 4, 2, 3), np.float32), np.ones((2, 3, 4), np.float32))",
    ],
)
def test_an_unknown_instruction_set_in_the_flat_functions(call):
    body = f"import numpy as np, moedecode as md; x = np.ones((2, 4), np.float32); {call}"
    package = Path(md.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(package), "MOEDECODE_ISA": "sse9"}
    done = subprocess.run(
        [sys.executable, "-c", body], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done
    assert "InvalidInput: MOEDECODE_ISA" in done.stderr


def test_switching_to_an_unknown_instruction_set_changes_nothing():
    before = _native.isa()
    with pytest.raises(ValueError, match="sse9"):
        _native.use_isa("sse9")
    assert _native.isa() == before
