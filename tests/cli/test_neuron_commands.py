"""`moedecode neuron` as a shell sees it: tables for 80 columns, JSON, traces, pictures, refusals."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from moedecode.cli import main

SMALL = ("--hidden", "512", "--intermediate", "128", "--experts", "8", "--top-k", "2", "--shard", "2")
KEYS = {
    "error_rel_l2",
    "hbm_bytes",
    "hbm_floor_bytes",
    "hbm_ratio",
    "engines_us",
    "bottleneck",
    "sbuf_peak_bytes",
    "psum_peak_bytes",
    "races",
}


@pytest.fixture
def neuron(monkeypatch, capsys):
    """Run `moedecode neuron ...` in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["moedecode", "neuron", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def assert_fits(text):
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "options",
    [
        ("--tokens", "3"),
        ("--tokens", "4", "--all-expert", "--rank", "1", "--local-experts", "2"),
        ("--tokens", "9", "--distinct"),
        ("--tokens", "2", "--format", "bf16", "--chip", "trn2"),
        ("--tokens", "2", "--format", "fp8_e4m3", "--chip", "trn2"),
    ],
    ids=["selective", "all-expert", "distinct", "bf16 on trn2", "fp8 on trn2"],
)
def test_a_run_prints_what_the_machine_saw(neuron, tmp_path, options):
    report = tmp_path / "run.json"
    code, out, err = neuron("run", *SMALL, *options, "--json", str(report))
    assert code == 0, out + err
    assert_fits(out)
    for fragment in (
        "relative L2", "ok", "floor", "ratio", "HBM, bytes per tensor and core", "gate_up", "times",
        "Residency, core 0", "from", "SBUF", "PSUM", "limit", "Lower bound per engine", "PE", "bottleneck",
        "races",
    ):  # fmt: skip
        assert fragment in out, fragment
    written = json.loads(report.read_text())
    assert set(written) >= KEYS
    assert 0 < written["error_rel_l2"] < 2e-2 and written["races"] == 0
    assert written["hbm_ratio"] == pytest.approx(written["hbm_bytes"] / written["hbm_floor_bytes"])
    assert written["engines_us"][written["bottleneck"]] == max(written["engines_us"].values())
    assert 0 < written["sbuf_peak_bytes"] <= written["sbuf_limit_bytes"]
    assert written["intermediate"] == 64 and written["shard"] == 2


@pytest.mark.parametrize("options", [("--all-expert",), (), ("--distinct",)])
def test_a_rank_always_has_a_token_to_compute(neuron, tmp_path, options):
    """One token, 2 of 64 experts: nothing but zeros would come out where the router were left as it is."""
    report = tmp_path / "run.json"
    many = ("--experts", "64", "--rank", "9", "--local-experts", "2", "--json", str(report))
    code, out, _ = neuron("run", *SMALL, *many, *options)
    assert code == 0, out
    assert 1e-4 < json.loads(report.read_text())["error_rel_l2"] < 2e-2


def test_an_error_past_its_bound_is_exit_code_1(neuron, monkeypatch):
    from moedecode.cli import neuron_run

    monkeypatch.setattr(neuron_run, "BOUNDS", {True: (1e-9, 1e-1), False: (1e-9, 1e-1)})
    code, out, _ = neuron("run", *SMALL)
    assert code == 1 and "TOO LARGE" in out
    monkeypatch.setattr(neuron_run, "BOUNDS", {True: (1e-1, 1e-9), False: (1e-1, 1e-9)})
    code, out, _ = neuron("run", *SMALL)
    assert code == 1 and "TOO LARGE" in out


def test_the_ledger_alone_computes_no_error(neuron, tmp_path):
    report = tmp_path / "run.json"
    code, out, _ = neuron("run", *SMALL, "--ledger-only", "--json", str(report))
    assert code == 0 and "not computed" in out
    written = json.loads(report.read_text())
    assert written["error_rel_l2"] is None and written["hbm_bytes"] > 0


def test_full_size_without_data_takes_seconds(neuron):
    code, out, _ = neuron("run", "--ledger-only", "--shard", "8")
    assert code == 0 and "gpt-oss-120b" in out and "I 360 (1 of 8 shards), 128 of 128 experts" in out


def test_a_trace_opens_in_perfetto(neuron, tmp_path):
    trace = tmp_path / "trace.json"
    code, _, _ = neuron("run", *SMALL, "--ledger-only", "--timeline", str(trace))
    assert code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert slices and all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert {event["pid"] for event in slices} == {0, 1}


def test_a_picture_is_drawn(neuron, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    code, _, _ = neuron("run", *SMALL, "--ledger-only", "--plot", str(picture))
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_is_a_line_for_each_count_and_leaf(neuron, tmp_path):
    report = tmp_path / "sweep.json"
    code, out, _ = neuron(
        "sweep",
        *SMALL,
        "--selective",
        "1,16",
        "--all-expert",
        "4",
        "--local-experts",
        "4",
        "--json",
        str(report),
    )
    assert code == 0
    assert_fits(out)
    rows = json.loads(report.read_text())
    assert [(row["strategy"], row["tokens"], row["experts"]) for row in rows] == [
        ("selective", 1, 8),
        ("selective", 16, 8),
        ("all_expert", 4, 4),
        ("grouped", 16, 8),
    ]
    assert all(row["hbm_ratio"] >= 0.99 and row["public"] is None for row in rows)


def test_a_sweep_sets_the_public_kernel_beside(neuron, monkeypatch, tmp_path):
    from moedecode.cli import neuron_sweep

    theirs = neuron_sweep.run_once  # its figures have every field that is shown
    shown = iter(["it has no such leaf", None])

    def public(path, setting):
        assert path.name == "nki-library"
        return next(shown) or theirs(setting).figures

    monkeypatch.setattr(neuron_sweep, "_public", public)
    report = tmp_path / "sweep.json"
    arguments = ("--selective", "1", "--all-expert", "4", "--public", "nki-library", "--json", str(report))
    code, out, _ = neuron("sweep", *SMALL, *arguments)
    assert (
        code == 0
        and "public nki-library in brackets" in out
        and "refuses selective at T = 1: it has no such leaf" in out
    )
    first, second = json.loads(report.read_text())
    assert first["public"] == {"refused": "it has no such leaf"}
    assert second["public"]["hbm_bytes"] == second["hbm_bytes"]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("sweep", *SMALL, "--public", "/nowhere"), ("public=/nowhere", "no usable checkout", "nki-library")),
        (("run", "--chip", "trn2"), ("chip='trn2'", "no MX instructions", "trn3")),
        (("run", "--chip", "tpu"), ("chip='tpu'", "trn1, trn2, trn3")),
        (("run", "--tokens", "0"), ("tokens=0", "at least 1")),
        (("run", "--shard", "7"), ("shard=7", "must divide I = 2880")),
        (("run", "--preset", "qwen3"), ("preset='qwen3'", "did you mean")),
        (("run", "--preset", "llama-4-scout"), ("affinity_scale", "PRE_SCALE")),
        (("run", "--experts", "0"), ("num_experts=0",)),
        (("run", "--top-k", "0"), ("top_k=0",)),
        (("run", "--format", "fp8"), ("format='fp8'", "mxfp4")),
        (("run", "--all-expert", "--rank", "9", "--local-experts", "16"), ("rank=9", "end at rank 7")),
        (("run", "--local-experts", "500"), ("local_experts=500", "1..128")),
        (("run", "--all-expert", "--distinct"), ("distinct=True", "selective")),
        (("run", "--distinct", "--format", "bf16"), ("strategy='grouped'", "selective")),
        (
            ("run", *SMALL, "--ledger-only", "--json", "/nowhere/x.json"),
            ("--json /nowhere", "cannot be written"),
        ),
        (("sweep", "--selective", "0"), ("tokens=0", "at least 1")),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(neuron, arguments, fragments):
    code, out, err = neuron(*arguments)
    assert code == 2
    assert "Traceback" not in out + err
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1
    for fragment in fragments:
        assert fragment in err


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_help(neuron, command):
    code, out, _ = neuron(command, "--help")
    assert code == 0 and "Usage" in out
