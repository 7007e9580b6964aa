"""What three outputs say about each other, and how it is printed."""

import json
import math

import numpy as np
import pytest

from moedecode.neuron.conformance import Difference, Figures, Outcome, Verdict
from moedecode.neuron.conformance.compare import BOUNDS, compared, judged
from moedecode.neuron.conformance.table import HEADER, as_json, figures_line, remarks, summary

RNG = np.random.default_rng(0)
RIGHT = RNG.standard_normal((6, 64))


def with_noise(relative):
    return RIGHT * (1 + relative * RNG.standard_normal(RIGHT.shape))


def wrong_row(row):
    made = RIGHT.copy()
    made[row] *= -1
    return made


def verdict(kernel, reference, kind="plain"):
    return judged(compared(kernel, reference, kind), compared(kernel, RIGHT, kind),
                  compared(reference, RIGHT, kind), kind)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "reference", "want"),
    [
        (with_noise(5e-3), with_noise(1e-3), Verdict.agrees),
        (wrong_row(2), RIGHT, Verdict.kernel_wrong),
        (RIGHT, wrong_row(2), Verdict.reference_wrong),
        (wrong_row(2), wrong_row(3), Verdict.both_wrong),
        (wrong_row(2), wrong_row(2), Verdict.both_wrong),
        (np.full_like(RIGHT, np.nan), RIGHT, Verdict.kernel_wrong),
        (np.zeros_like(RIGHT), RIGHT, Verdict.kernel_wrong),
        (with_noise(0.05), RIGHT, Verdict.kernel_wrong),
    ],
)
def test_the_verdict(kernel, reference, want):
    assert verdict(kernel, reference) is want


def test_opposite_sides_of_the_truth_agree():
    assert verdict(RIGHT * 1.012, RIGHT * 0.988) is Verdict.agrees


def test_mx_may_be_further_off_than_plain():
    kernel = with_noise(0.04)
    assert verdict(kernel, RIGHT, "mx") is Verdict.agrees
    assert verdict(kernel, RIGHT, "plain") is Verdict.kernel_wrong


def test_one_wrong_row_does_not_hide_among_many():
    want = np.tile(RIGHT, (200, 1))
    got = want.copy()
    got[700] += 0.2 * np.linalg.norm(want[700]) / 8 * np.ones(64)
    difference = compared(got, want)
    assert difference.l2 < BOUNDS["plain"][0]
    assert difference.row == pytest.approx(0.2)
    assert difference.rows == (700,)
    assert not difference.within("plain")


def test_a_tiny_row_is_measured_against_the_others():
    want = RIGHT.copy()
    want[1] *= 1e-6
    got = want.copy()
    got[1] = 0
    assert compared(got, want).row < 1e-3


def test_nan_is_never_within_a_bound():
    got = RIGHT.copy()
    got[4, 3] = np.nan
    difference = compared(got, RIGHT)
    assert math.isnan(difference.l2)
    assert math.isnan(difference.row)
    assert difference.rows == (4,)
    assert not difference.within("mx")


def test_other_shapes_are_an_error():
    with pytest.raises(ValueError, match="cannot be compared"):
        compared(RIGHT, RIGHT[:2])


FIGURES = Figures(
    hbm_bytes=10_753_024,
    hbm_floor_bytes=8_356_352,
    hbm_ratio=1.2868,
    engines_us={"dma": 10.2, "tensor": 6.0},
    bottleneck="dma",
    bound_us=10.2,
    races=2,
)
OUTCOMES = [
    Outcome("block/a", Verdict.agrees, Difference(3.34e-2, 4e-2), Difference(1.2e-2, 1e-2),
            Difference(0.0, 0.0), FIGURES, notes=("a note",)),
    Outcome("block/b", Verdict.refused, detail="T is odd"),
    Outcome("block/c", Verdict.kernel_wrong, Difference(math.nan, math.nan), Difference(0.7, 1.0),
            Difference(1e-3, 1e-3)),
    Outcome("block/d", Verdict.agrees),
]  # fmt: skip


def test_figures_stand_under_their_names():
    line = figures_line(OUTCOMES[0])
    for name, value in [("L2", "3.3e-02"), ("worst row", "4.0e-02"), ("L2 to ours", "1.2e-02"),
                        ("HBM MB", "10.75"), ("x floor", "1.287"), ("bound us", "10.2")]:  # fmt: skip
        end = HEADER.index(name) + len(name)
        assert line[:end].endswith(value), (name, line)
    assert line[HEADER.index("by") :].startswith("dma")
    assert line[HEADER.index("verdict") :] == "agrees"
    assert len(HEADER) <= 80


def test_a_row_without_figures_has_dashes():
    assert figures_line(OUTCOMES[1]).split() == ["-"] * 7 + ["refused"]
    assert "NaN" in figures_line(OUTCOMES[2])


def test_remarks_and_summary():
    assert remarks(OUTCOMES[0])[0] == "a note"
    assert remarks(OUTCOMES[0])[1].endswith("between: 2")
    assert remarks(OUTCOMES[1]) == ["T is odd"]
    assert remarks(OUTCOMES[3]) == []
    assert summary(OUTCOMES) == "4 rows; agrees: 2, kernel wrong: 1, refused: 1"


def test_json_has_no_nan():
    text = json.dumps(as_json(OUTCOMES, "0.1", "trn3"), allow_nan=False)
    back = json.loads(text)
    assert back["nki_library"] == "0.1"
    assert [row["verdict"] for row in back["rows"]] == ["agrees", "refused", "kernel_wrong", "agrees"]
    assert back["rows"][0]["figures"]["hbm_bytes"] == 10_753_024
    assert back["rows"][2]["kernel_to_reference"] == {"rel_l2": None, "max_row": None}
