"""The commands as a shell sees them: exit codes, one-line errors, text that fits 80 columns."""

import json
import subprocess
import sys

import pytest

from moedecode import conformance, machine
from moedecode.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture
def moedecode(monkeypatch, capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moedecode", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return 0 if code is None else code, out, err

    return run


def assert_fits(text: str) -> None:
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "\x1b" not in text


def test_plan_prints_one_plan_for_each_token_count(moedecode):
    code, out, _ = moedecode(
        "plan", "--preset", "qwen3-30b-a3b", "--tokens", "1,16", "--format", "mxfp8_e4m3"
    )
    assert code == 0
    assert_fits(out)
    assert "1 token, strategy selective, leaf selective_mx" in out and "16 tokens" in out
    assert "expert weights" in out and "mxfp8_e4m3" in out


def test_plan_of_a_rank_and_a_forced_strategy(moedecode):
    code, out, _ = moedecode("plan", "--tokens", "4", "--local-experts", "8", "--strategy", "all_expert")
    assert code == 0 and "asked for" in out and "8 x 3 x [2880, 2880]" in out


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("plan", "--preset", "gpt-oss"), ("preset='gpt-oss'", "did you mean gpt-oss-20b")),
        (("plan", "--tokens", "many"), ("tokens='many'", "whole numbers")),
        (("plan", "--tokens", "-3"), ("tokens=-3", "negative")),
        (("plan", "--format", "int4"), ("format='int4'", "mxfp4")),
        (("plan", "--strategy", "fast"), ("strategy='fast'", "grouped")),
        (("plan", "--backend", "gpu"), ("backend='gpu'", "cpu, reference")),
        (("plan", "--local-experts", "99"), ("local_experts=99", "1..32")),
        (("demo", "--tokens", "0"), ("tokens=0", "at least 1")),
        (("demo", "--format", "fp32", "--preset", "llama-4-maverick"), ("GB of memory", "smaller model")),
        (("check", "--backend", "gpu"), ("backend='gpu'", "cpu, reference")),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(moedecode, arguments, fragments):
    code, out, err = moedecode(*arguments)
    assert code == 2
    assert "Traceback" not in out + err
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1
    for fragment in fragments:
        assert fragment in err


def test_an_unknown_option_is_exit_code_2(moedecode):
    assert moedecode("plan", "--speed", "11")[0] == 2


@pytest.mark.parametrize("command", ["doctor", "plan", "check", "demo"])
def test_every_command_has_help(moedecode, command):
    code, out, _ = moedecode(command, "--help")
    assert code == 0 and "Usage" in out


def test_doctor_names_isa_cores_bandwidth_and_packages(moedecode, monkeypatch):
    monkeypatch.setattr(machine, "STREAM_MEGABYTES", 64)
    monkeypatch.setattr(machine, "stream_read_gbps", lambda threads: 10.0 + threads)
    code, out, _ = moedecode("doctor")
    assert code == 0
    assert_fits(out)
    for fragment in (
        "moedecode",
        machine.isa(),
        "cores",
        "11.0 GB/s with 1 thread",
        "torch",
        "numpy",
        "caches",
    ):
        assert fragment in out


def test_doctor_without_the_native_core_says_so(moedecode, monkeypatch):
    monkeypatch.setitem(sys.modules, "moedecode._native", None)
    code, out, _ = moedecode("doctor")
    assert code == 0 and "native core is not installed" in out


def test_the_cpu_backend_without_the_native_core_is_one_line(moedecode, monkeypatch):
    monkeypatch.setitem(sys.modules, "moedecode._native", None)
    for module in [name for name in sys.modules if name.startswith("moedecode.backends.cpu")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("moedecode._native", raising=False)
    code, out, err = moedecode("plan")
    assert code == 2 and out == "" and "native core is not installed" in err and "Traceback" not in err


FEW = [
    case
    for case in conformance.CASES
    if case.fmt.value in ("mxfp4", "bf16") and case.dtype == "float32" and case.shape.label == "one token"
]


def test_check_prints_the_worst_of_each_kind_and_writes_json(moedecode, monkeypatch, tmp_path):
    monkeypatch.setattr(conformance, "CASES", FEW)
    monkeypatch.setattr("moedecode.cli.check.PRECISIONS", ("a16",))
    report = tmp_path / "check.json"
    code, out, _ = moedecode("check", "--json", str(report))
    assert code == 0, out
    assert_fits(out)
    assert "a16 float32 out, whole" in out and "threads: 3" in out and "within their bounds" in out
    written = json.loads(report.read_text())
    assert written["passed"] and written["isa"] == machine.isa() and written["figures"] > 0
    assert {"kind", "value", "bound", "where", "passed"} == set(written["worst"][0])


def test_check_fails_loudly(moedecode, monkeypatch):
    monkeypatch.setattr(conformance, "CASES", FEW[:1])
    monkeypatch.setattr("moedecode.cli.check.PRECISIONS", ("a16",))
    monkeypatch.setitem(conformance.BOUNDS, ("a16", "float32"), 1e-30)
    code, out, _ = moedecode("check")
    assert code == 1 and "FAILED" in out and "failed: a16 float32 out" in out and "one token" in out


def test_check_says_when_its_report_cannot_be_written(moedecode, monkeypatch, tmp_path):
    monkeypatch.setattr(conformance, "CASES", FEW[:1])
    monkeypatch.setattr("moedecode.cli.check.PRECISIONS", ())
    code, _, err = moedecode("check", "--json", str(tmp_path / "absent" / "check.json"))
    assert code == 2 and "cannot be written" in err


def test_demo_shows_plan_speed_and_error(moedecode, monkeypatch):
    monkeypatch.setattr("moedecode.cli.demo.ROUNDS", 2)
    monkeypatch.setattr(machine, "stream_read_gbps", lambda threads: 25.0)
    monkeypatch.setattr("moedecode.cli.demo.presets", {"small": FEW[0].spec})
    code, out, _ = moedecode("demo", "--preset", "small", "--tokens", "3,1")
    assert code == 0, out
    assert_fits(out)
    for fragment in ("strategy", "expert weights", "of stream read", "25.0 GB/s", "worst row", "peak memory"):
        assert fragment in out
    assert "TOO LARGE" not in out


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_one_kind_sentence(missing):
    program = f"import sys; sys.modules[{missing!r}] = None; from moedecode.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == 'The commands need the extra: pip install "moedecode[cli]"\n'
