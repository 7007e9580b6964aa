"""The conformance cases on the cpu backend, and the judge itself: it must see faults it has been given."""

import numpy as np
import pytest

from moedecode import MoEBlock, WeightFormat
from moedecode.conformance import CASES, Measure, errors, invariants, relative_errors, worst
from moedecode.spec import PRECISIONS

GROUPS = sorted({(case.fmt.value, case.precision, case.dtype) for case in CASES})


def assert_all_passed(measures):
    failed = [f"{m.kind}: {m.value:.2e} > {m.bound:.2e} ({m.where})" for m in measures if not m.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("fmt", "precision", "dtype"), GROUPS)
def test_errors_are_within_their_bounds(fmt, precision, dtype):
    cases = [c for c in CASES if (c.fmt.value, c.precision, c.dtype) == (fmt, precision, dtype)]
    assert_all_passed([m for case in cases for m in errors(case)])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fmt", list(WeightFormat), ids=lambda f: f.value)
def test_bitwise_promises_hold(fmt, precision):
    assert_all_passed(invariants(fmt, precision))


def test_every_format_precision_and_shape_is_covered():
    assert {c.fmt for c in CASES} == set(WeightFormat) and {c.precision for c in CASES} == set(PRECISIONS)
    assert {c.fp8_scale for c in CASES if c.fmt.is_fp8} == {"tensor", "row", "block"}
    labels = [c.shape.label for c in CASES]
    assert all(labels.count(label) >= len(WeightFormat) for label in labels)


# ------------------------------------------------------------------ the judge

ONE = next(c for c in CASES if c.fmt is WeightFormat.MXFP4 and c.dtype == "float32" and c.shape.tokens == 7)
FAULTS = {
    "one row is off by a thousandth": lambda out: (
        out * np.where(np.arange(len(out)) == 3, 1.001, 1.0)[:, None]
    ),
    "one row is zero": lambda out: out * (np.arange(len(out)) != 3)[:, None],
    "rows are swapped": lambda out: out[::-1],
    "one NaN": lambda out: np.where(np.arange(out.size).reshape(out.shape) == 5, np.nan, out),
    "one output channel is missing": lambda out: out * (np.arange(out.shape[1]) != 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_error_is_seen(monkeypatch, fault):
    call = MoEBlock.__call__

    def faulty(self, hidden, **options):
        result = call(self, hidden, **options)
        object.__setattr__(result, "out", FAULTS[fault](result.out).astype(np.float32))
        return result

    monkeypatch.setattr(MoEBlock, "__call__", faulty)
    assert not all(m.passed for m in errors(ONE))


def test_output_that_depends_on_the_batch_is_seen(monkeypatch):
    call = MoEBlock.__call__

    def faulty(self, hidden, **options):
        out = call(self, hidden, **options)
        return out if len(hidden) < 100 else np.nextafter(out, np.float32(np.inf))

    monkeypatch.setattr(MoEBlock, "__call__", faulty)
    failed = {m.kind for m in invariants(WeightFormat.MXFP4, "a16") if not m.passed}
    assert {"batch: a token alone", "batch: seven tokens"} <= failed


def test_relative_errors_see_a_wrong_small_row():
    want = np.ones((10, 8))
    want[4] *= 0.1
    got = want.copy()
    got[4] *= -1
    whole, rows = relative_errors(got, want)
    assert whole < 0.1 and rows[4] == pytest.approx(2.0) and rows.argmax() == 4


def test_relative_errors_of_nothing_and_of_nan():
    zero = np.zeros((2, 4))
    assert relative_errors(zero, zero)[0] == 0
    assert relative_errors(zero + 1, zero)[0] > 0
    whole, rows = relative_errors(np.full((2, 4), np.nan), np.ones((2, 4)))
    assert not Measure("nan", whole, 1.0, "").passed and not (rows <= 1).any()


def test_the_worst_of_a_kind_is_what_failed():
    small, failed, nan = Measure("k", 1, 2, "a"), Measure("k", 0.5, 0.1, "b"), Measure("k", np.nan, 1, "c")
    assert worst([small, failed])["k"] is failed
    assert worst([small, nan])["k"] is nan
    assert worst([Measure("k", 1, 9, "a"), Measure("k", 3, 9, "b")])["k"].value == 3
