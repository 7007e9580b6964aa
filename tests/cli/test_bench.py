"""`moedecode bench` on a tiny block: options, tables for 80 columns, the report, the picture, extras."""

import json
import sys

import numpy as np
import pytest

from moedecode import BlockSpec, ExpertSpec, RouterSpec, WeightFormat, benchmark, machine
from moedecode.cli import main
from moedecode.peers import Engine
from moedecode.synthetic import block_weights

pytest.importorskip("typer")
pytest.importorskip("rich")

SPEC = BlockSpec(64, RouterSpec(8, 2), ExpertSpec(32))


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run `moedecode bench` on a tiny preset: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("moedecode.cli.bench.presets", {"tiny": SPEC})
    monkeypatch.setattr(machine, "stream_read_gbps", lambda threads: 20.0)
    monkeypatch.setattr(benchmark, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(benchmark, "ROTATION_BYTES", 1)
    monkeypatch.setattr("moedecode.cli.bench.peers", list)

    def run(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["moedecode", "bench", "--preset", "tiny", "--rounds", "2", *arguments]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return 0 if code is None else code, out, err

    return run


class Peer:
    """A peer that is our reference weights times ``factor``, or whatever a test makes of it."""

    def __init__(self, name, reason=None, refusal=None, factor=1.0, error=None):
        self.name, self._reason, self._refusal, self._factor, self._error = (
            name,
            reason,
            refusal,
            factor,
            error,
        )

    def available(self):
        return self._reason

    def refuses(self, spec, fmt):
        return self._refusal

    def build(self, spec, fmt, threads, copies):
        if self._error is not None:
            raise self._error
        weights = block_weights(spec, fmt)
        [own] = benchmark.own_contenders(benchmark.Setting("tiny", spec, fmt), ["grouped"], copies)
        calls = [lambda x, call=call: self._factor * call(x).astype(np.float32) for call in own.calls]
        return [Engine(f"{self.name} engine", calls, "bfloat16", weights, 1e-2)]


def assert_fits(text):
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "\x1b" not in text


def test_rows_are_printed_and_written(bench, tmp_path):
    report = tmp_path / "bench.json"
    code, out, err = bench("--tokens", "4,1", "--json", str(report), "--threads", "1")
    assert code == 0, err
    assert_fits(out)
    for fragment in ("One MoE block of tiny", "2 copies of the weights", "of stream", "GFLOP/s", "20.0 GB/s"):
        assert fragment in out
    rows = json.loads(report.read_text())
    assert [(r["preset"], r["format"], r["precision"], r["tokens"], r["threads"]) for r in rows] == [
        ("tiny", "mxfp4", "a16", 1, 1),
        ("tiny", "mxfp4", "a16", 4, 1),
    ]
    assert all(r["strategy"] in benchmark.FIXED_STRATEGIES and r["peers"] == {} for r in rows)
    assert all(r["stream_ratio"] == pytest.approx(r["gbps"] / 20.0) for r in rows)


def test_all_strategies_are_set_beside_auto(bench, tmp_path):
    report = tmp_path / "bench.json"
    code, out, err = bench("--tokens", "2", "--strategy", "all", "--json", str(report))
    assert code == 0, err
    assert_fits(out)
    assert "what strategy=auto takes" in out and "T = 2: auto reaches" in out
    assert [r["strategy"] for r in json.loads(report.read_text())] == list(benchmark.FIXED_STRATEGIES)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8_e4m3"])
def test_formats_and_precisions(bench, fmt):
    code, out, err = bench("--tokens", "1", "--format", fmt, "--precision", "a8")
    assert code == 0, err
    assert f"{fmt} experts, precision a8" in out


def test_peers_are_measured_checked_or_skipped_with_a_reason(bench, monkeypatch, tmp_path):
    chosen = [
        Peer("sound"),
        Peer("absent", reason="absent is not installed"),
        Peer("unfit", refusal="it has no such activation"),
        Peer("wrong", factor=1.5),
        Peer("broken", error=RuntimeError("no kernel\nand a second line")),
    ]
    monkeypatch.setattr("moedecode.cli.bench.peers", lambda: chosen)
    report = tmp_path / "bench.json"
    code, out, err = bench("--tokens", "1,3", "--peers", "--json", str(report))
    assert code == 0, err
    assert_fits(out)
    for fragment in (
        "peer sound engine: measured, 2 in turn",
        "peer absent: skipped, absent is not installed",
        "peer unfit: skipped, it has no such activation",
        "peer wrong engine: skipped, its output is off by",
        "peer broken: skipped, failed: RuntimeError: no kernel",
        "Beside peers",
    ):
        assert fragment in out
    assert "second line" not in out
    for row in json.loads(report.read_text()):
        assert list(row["peers"]) == ["sound engine"]
        assert set(row["peers"]["sound engine"]) == {"ms", "speedup"}


def test_without_peers_none_is_asked(bench, monkeypatch):
    monkeypatch.setattr("moedecode.cli.bench.peers", lambda: pytest.fail("peers were asked for"))
    code, out, _ = bench("--tokens", "1")
    assert code == 0 and "peer" not in out


@pytest.mark.parametrize(("threads", "columns"), [("2", "thread 1"), ("6", "slowest")])
def test_a_profile_shows_every_stage_with_its_share(bench, threads, columns):
    code, out, err = bench("--tokens", "1,2", "--profile", "--threads", threads)
    assert code == 0, err
    assert_fits(out)
    assert columns in out
    for stage in ("norm", "router", "gate/up", "activation", "down", "combine", "waiting"):
        assert f" {stage} " in out


def test_the_picture_is_a_png(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("moedecode.cli.bench.peers", lambda: [Peer("sound")])
    picture = tmp_path / "bench.png"
    code, _, err = bench("--tokens", "1,2,8", "--strategy", "all", "--peers", "--plot", str(picture))
    assert code == 0, err
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_missing_matplotlib_is_one_line_before_any_work(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(benchmark, "own_contenders", lambda *_: pytest.fail("work was done"))
    code, out, err = bench("--plot", str(tmp_path / "bench.png"))
    assert code == 2 and out == ""
    assert err.startswith("error: --plot needs matplotlib") and 'pip install "moedecode[plot]"' in err


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--tokens", "0"), "tokens=0"),
        (("--strategy", "fast"), "strategy='fast'"),
        (("--precision", "a4"), "precision='a4'"),
        (("--threads", "-1"), "threads=-1"),
        (("--rounds", "0"), "rounds=0"),
        (("--format", "int4"), "format='int4'"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(bench, arguments, fragment):
    code, _, err = bench(*arguments)
    assert code == 2 and err.startswith("error: ") and fragment in err and len(err.splitlines()) == 1


def test_what_does_not_fit_in_memory_is_refused(bench, monkeypatch):
    monkeypatch.setattr(machine, "memory_available", lambda: 1000)
    code, _, err = bench("--tokens", "1")
    assert code == 2 and "fewer contenders" in err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_one_line(bench, tmp_path, option):
    if option == "--plot":
        pytest.importorskip("matplotlib")
    code, _, err = bench("--tokens", "1", option, str(tmp_path / "absent" / "file"))
    assert code == 2 and "cannot be written" in err


def test_the_peers_there_are_answer_for_themselves():
    from moedecode.peers import peers

    for peer in peers():
        assert peer.name and isinstance(peer.available(), (str, type(None)))
        assert peer.refuses(SPEC, WeightFormat.FP32), "no peer has float32 experts"
