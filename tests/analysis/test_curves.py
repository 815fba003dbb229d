"""Every threshold at once is every threshold one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.analysis.curves import Curve, Figures, Point, curves, round_between
from sluice.gate.offline import evaluate
from tests.analysis.recordings import recordeds, some_recorded

FIGURES = ("cut", "true_cuts", "false_cuts", "precision", "recall", "safe_saving", "raw_saving", "safe_step_saving", "raw_step_saving")


def assert_same(point: Point, other: object) -> None:
    for name in (*FIGURES, "advantage_kept"):
        assert getattr(point, name) == pytest.approx(getattr(other, name), abs=1e-9), name


@given(recordeds())
@settings(max_examples=40)
def test_its_thresholds_make_every_cut_that_a_threshold_can_make(recorded) -> None:
    for curve in curves(recorded):
        k, running = curve.figures.k, curve.figures.running
        values = sorted({*curve.values[running].tolist()} - {1.0})
        assert len(curve) == len(values)
        sets = [recorded.cuts(curve.signal, k, curve.threshold(i)) for i in range(len(curve))]
        assert [frozenset(np.flatnonzero(cut)) for cut in sets] == [
            frozenset(np.flatnonzero((curve.values <= value) & running)) for value in values
        ]


@given(recordeds())
@settings(max_examples=40)
def test_its_figures_are_those_of_one_rule_at_a_time(recorded) -> None:
    for curve in curves(recorded):
        groups = recorded.at(curve.figures.k)
        columns = curve.columns()
        for i in range(len(curve)):
            cut = recorded.cuts(curve.signal, curve.figures.k, curve.threshold(i))
            expected = evaluate(groups, cut)
            assert_same(curve.point(i), expected)
            assert (curve.cut[i], curve.true[i]) == (expected.cut, expected.true_cuts)
            assert curve.saving[i] == pytest.approx(expected.safe_step_saving)
            for name in FIGURES:
                assert columns[name][i] == pytest.approx(getattr(expected, name)), name
            below = groups.signals[curve.signal] < curve.threshold(i)
            assert columns["left_alone"][i] == curve.point(i).left_alone == int((below & ~cut).sum())


@given(recordeds(), st.floats(0, 1), st.integers(1, 4))
@settings(max_examples=40)
def test_the_best_threshold_is_the_best_of_all(recorded, floor: float, least: int) -> None:
    for curve in curves(recorded):
        allowed = [point for point in map(curve.point, range(len(curve))) if point.cut >= least and point.true_cuts >= floor * point.cut]
        index = curve.best(floor, least)
        if not allowed:
            assert index is None
        else:
            assert index is not None
            best = curve.point(index)
            assert best.saving == pytest.approx(max(point.saving for point in allowed))
            equal = [point for point in allowed if point.saving > best.saving - 1e-12]
            assert best.precision == max(point.precision for point in equal)


@given(recordeds(least=2))
@settings(max_examples=40)
def test_the_order_of_groups_changes_nothing(recorded) -> None:
    other = recorded.take(np.arange(len(recorded))[::-1])
    for one, two in zip(curves(recorded), curves(other), strict=True):
        for (name, column), other_column in zip(one.columns().items(), two.columns().values(), strict=True):
            assert column == pytest.approx(other_column), name


def test_a_curve_by_hand() -> None:
    """Values 0.1, 0.1, 0.4, 1.0; the third is not decided on."""
    figures = Figures(
        k=2,
        horizon=4,
        zero=np.array([True, False, True, True]),
        running=np.array([True, True, False, True]),
        remaining=np.array([3.0, 1.0, 4.0, 2.0]),
        steps=np.array([5.0, 5.0, 6.0, 4.0]),
        weight=np.array([0.0, 1.0, 0.0, 0.0]),
    )
    curve = Curve.of("action_entropy", np.array([0.1, 0.1, 0.4, 1.0]), figures)
    assert curve.columns() == {
        "threshold": [pytest.approx(0.6)],  # the roundest in the middle of 0.1 and 1; what lies at 1 is never cut
        "cut": [2],
        "left_alone": [1],
        "true_cuts": [1],
        "false_cuts": [1],
        "precision": [0.5],
        "recall": [pytest.approx(1 / 3)],
        "safe_saving": [1 * 2 / 16],
        "raw_saving": [2 * 2 / 16],
        "safe_step_saving": [3 / 20],
        "raw_step_saving": [4 / 20],
        "advantage_kept": [0.0],
    }
    assert curve.at(0.1).cut == 0  # strictly below
    assert curve.at(0.1).precision is None


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_round_threshold_lies_between_its_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    if low < high:
        assert low < round_between(low, high) <= high


def test_thresholds_are_as_round_as_they_can_be() -> None:
    assert round_between(0.1179, 0.1312) == 0.12
    assert round_between(0.05, 1.0) == 0.5
    assert round_between(0.123, 0.124) == 0.1235


def test_the_order_of_signals_and_steps_is_kept() -> None:
    recorded = some_recorded(ks=(5, 2))
    assert [(curve.figures.k, curve.signal) for curve in curves(recorded)] == [(k, name) for k in (2, 5) for name in recorded.signals]
