"""The house: imports go down only, every module says what it owns, no file is too long to enjoy."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "moedecode"
LONGEST = 500

# A room may import from its own floor's package and from any floor below. Rooms beside each other stay apart.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"integrations", "parallel", "conformance", "benchmark", "peers", "neuron.conformance"},
    {"models"},
    {"tkg"},
    {"block", "presets", "synthetic"},
    {"flat", "checks"},
    {"backends"},
    {"neuron", "machine"},
    {"plan"},
    {"weights"},
    {"layouts"},
    {"spec", "formats"},
    {"arrays"},
    {"gates"},
    {"_native"},
]
LEVEL = {room: level for level, floor in enumerate(reversed(FLOORS)) for room in floor}
# The door hands out backends by name; a backend never opens the door to another one.
BACKENDS = ("cpu", "reference", "neuron", "triton")
# Kernels see the machine through one file alone, the seam where the real toolchain fits in.
SEAM = ("neuron", "kernels", "nki_names")

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    path
    for folder in ("src", "tests", "native", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp", ".h"}
]


def module_name(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """(line, module below moedecode) of every import of the package's own modules, wherever it stands."""
    here = module_name(path)
    package = here if path.name == "__init__.py" else here[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "moedecode":
                    found.append((node.lineno, tuple(parts[1:])))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif (node.module or "").split(".")[0] == "moedecode":
                base = ()
            else:
                continue
            module = tuple((node.module or "").split(".")) if node.module else ()
            target = base + (module[1:] if not node.level else module)
            # `from . import x` names a module, `from .m import x` (mostly) a thing in it
            found += [(node.lineno, target if target else (alias.name,)) for alias in node.names]
    return found


def room(module: tuple[str, ...]) -> str:
    """The folder or file below moedecode, or one inside it that has a floor of its own."""
    inner = ".".join(module[:2])
    return inner if inner in LEVEL else module[0]


def inside_neuron(here: tuple[str, ...], target: tuple[str, ...]) -> str | None:
    """What is wrong with an import between the machine and the kernels, if anything."""
    if here[:2] == ("neuron", "machine") and target[:2] == ("neuron", "kernels"):
        return "the machine imports a kernel"
    kernel = here[:2] == ("neuron", "kernels") and target[:2] == ("neuron", "machine")
    return "a kernel imports the machine past the seam" if kernel and here != SEAM else None


def upward(path: Path) -> list[str]:
    """The imports of one module that do not go down."""
    here = module_name(path)
    if not here:  # the front door shows every floor
        return []
    faults = []
    for line, target in imports_of(path):
        if not target:
            faults.append(f"line {line}: imports the front door")
        elif fault := inside_neuron(here, target):
            faults.append(f"line {line}: {fault}")
        elif room(target) == room(here):
            if here[0] == "backends" and len(here) > 1 and len(target) > 1 and target[1] != here[1]:
                faults.append(f"line {line}: backend {here[1]} imports backend {target[1]}")
        elif room(target) not in LEVEL:
            faults.append(f"line {line}: {target[0]} stands on no floor")
        elif LEVEL[room(target)] >= LEVEL[room(here)]:
            faults.append(f"line {line}: {room(here)} imports {room(target)}, which is not below it")
    return faults


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    here = module_name(path)
    assert not here or here[0] in LEVEL, f"{here[0]} stands on no floor: give it one"
    assert upward(path) == []


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("spec.py", "from .plan import Plan", "spec imports plan"),
        ("formats/mx.py", "from ..weights import ExpertWeights", "formats imports weights"),
        ("formats/mx.py", "def f():\n    from moedecode.spec import BlockSpec", "formats imports spec"),
        ("plan.py", "import moedecode.block", "plan imports block"),
        ("block.py", "from .cli.app import app", "block imports cli"),
        ("block.py", "from . import InvalidInput", "stands on no floor"),
        ("block.py", "from moedecode import tkg", "block imports tkg"),
        ("backends/cpu/pack.py", "from ..reference import maths", "backend cpu imports backend reference"),
        ("backends/cpu/pack.py", "from ...block import MoEBlock", "backends imports block"),
        ("neuron/machine/dma.py", "from ..kernels import norm", "the machine imports a kernel"),
        ("neuron/kernels/norm.py", "from ..machine import isa", "past the seam"),
        ("neuron/kernels/norm.py", "from ..conformance import run", "imports neuron.conformance"),
        ("neuron/kernels/norm.py", "from ...backends import Numerics", "neuron imports backends"),
        (
            "backends/neuron/launch.py",
            "from ...neuron.conformance.run import f",
            "imports neuron.conformance",
        ),
    ],
)
def test_the_check_sees_an_arrow_that_points_up(tmp_path, monkeypatch, file, source, fault):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert any(fault in found for found in upward(path)), upward(path)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "weights.py",
            "from .arrays import Array\nfrom .formats.mx import quantise_mx\nfrom .gates import require",
        ),
        ("cli/plan.py", "from .app import app\nfrom ..presets import presets\nfrom .. import _native"),
        (
            "backends/cpu/pack.py",
            "from .. import Backend\nfrom . import layout\nfrom ...weights import ExpertWeights",
        ),
        ("plan.py", "import numpy as np\nfrom os import path"),
        ("neuron/kernels/nki_names.py", "from ..machine import isa, language"),
        ("neuron/conformance/run.py", "from ..machine import Machine\nfrom ...tkg import moe_block_tkg"),
        ("backends/neuron/launch.py", "from ...neuron.machine import Machine"),
    ],
)
def test_the_check_lets_arrows_that_point_down_pass(tmp_path, monkeypatch, file, source):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert upward(path) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_what_it_owns(path):
    assert ast.get_docstring(ast.parse(path.read_text())), (
        "a module starts with what it owns and must not know"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= LONGEST, f"look for the seam: over {LONGEST} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_say_what_a_file_is(path):
    assert path.stem not in {"utils", "util", "helpers", "helper", "common", "misc", "manager"}


def test_the_core_imports_nothing_but_numpy_and_ml_dtypes():
    """What ``import moedecode`` loads at module level; extras are imported where they are used."""
    allowed = {"numpy", "ml_dtypes", "moedecode", "__future__"}
    extras = {"torch", "typer", "rich", "transformers", "safetensors", "matplotlib", "scipy"}
    for path in MODULES:
        if module_name(path)[:1] in (("cli",), ("integrations",), ("parallel",), ("models",)):
            continue
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [(node.module or "").split(".")[0]]
            assert not extras & set(names) - allowed, f"{path}: {names}"
