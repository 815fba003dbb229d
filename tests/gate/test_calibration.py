"""From scores to chances and bounds: against slow models, and what a bound promises."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import GateError
from sluice.gate import clopper_pearson
from sluice.gate.calibration import Calibration, calibrate, isotonic

LOOKS = st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.4, 0.6, 0.8]), st.integers(0, 5), st.booleans()), min_size=1, max_size=40)


def columns(looks):
    scores, units, right = zip(*looks, strict=True)
    numbers = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    return np.array(scores), np.array([numbers[unit] for unit in units]), np.array(right)


@given(LOOKS, st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_isotonic_chances_never_fall_and_nothing_that_never_falls_is_nearer(looks, other) -> None:
    scores, _, right = columns(looks)
    knots, heights = isotonic(scores, right)
    assert list(knots) == sorted(set(knots))
    assert list(heights) == sorted(heights)
    found = np.array(heights)[np.searchsorted(knots, scores, side="right") - 1]
    assert found.mean() == pytest.approx(right.mean())
    rival = np.sort(other)[np.searchsorted([0.1, 0.2, 0.4, 0.6, 0.8], scores)]
    assert ((found - right) ** 2).sum() <= ((rival - right) ** 2).sum() + 1e-9


@given(LOOKS)
def test_a_bound_is_that_of_acting_at_the_first_score_that_is_high_enough(looks) -> None:
    scores, units, right = columns(looks)
    calibration = calibrate(scores, units, right)
    best = {}
    is_record = [s > max((0, *(o for o, u in zip(scores[:i], units[:i], strict=True) if u == units[i]))) for i, s in enumerate(scores)]
    for threshold in sorted(set(scores[is_record].tolist())):
        acted = [
            next((bool(r) for s, u, r in zip(scores, units, right, strict=True) if u == unit and s >= threshold), None)
            for unit in set(units)
        ]
        acted = [one for one in acted if one is not None]
        best[threshold] = clopper_pearson(sum(acted), len(acted), 0.9)[0]
    for threshold in best:
        assert calibration.bound(threshold) == pytest.approx(max(bound for score, bound in best.items() if score <= threshold))
    assert calibration.bound(0.05) == 0
    assert calibration.most == pytest.approx(max(best.values()))


@given(LOOKS, st.sampled_from([0.05, 0.2, 0.5]))
def test_the_threshold_is_the_lowest_score_that_clears_the_floor(looks, floor) -> None:
    calibration = calibrate(*columns(looks))
    threshold = calibration.threshold(floor)
    if math.isinf(threshold):
        assert calibration.most < floor
        return
    assert calibration.bound(threshold) >= floor
    assert calibration.bound(np.nextafter(threshold, 0)) < floor


def test_members_of_one_group_are_not_counted_as_independent() -> None:
    scores = np.full(40, 0.9)
    units = np.arange(40)
    right = np.array([True] * 36 + [False] * 4)
    alone = calibrate(scores, units, right).most
    apart = calibrate(scores, units, right, units % 10).most
    together = calibrate(scores, units, right, units // 4).most  # the four wrong ones are of one group
    assert together < apart <= alone == pytest.approx(clopper_pearson(36, 40, 0.9)[0])
    assert calibrate(scores, units, right, np.zeros(40, dtype=int)).most == 0, "one group says nothing of others"


def test_a_bound_holds_as_often_as_it_says() -> None:
    """Units with a true chance that is their score: the share that is right above a threshold lies under its bound in 5 % of the draws."""
    rng = np.random.default_rng(0)
    broken = 0
    for _ in range(120):
        scores = rng.random(60)
        calibration = calibrate(scores, np.arange(60), rng.random(60) < scores)
        broken += calibration.bound(0.7) > 0.85  # of all with a score of at least 0.7 that is the true share
    assert broken / 120 < 0.1


def test_chances_and_bounds_are_saved() -> None:
    calibration = calibrate(*columns([(0.2, 0, False), (0.8, 0, True), (0.6, 1, True), (0.4, 2, False)]))
    assert Calibration.from_data(json.loads(json.dumps(calibration.as_data(), allow_nan=False))) == calibration
    assert (calibration.chance(0.1), calibration.chance(0.5), calibration.chance(0.99)) == (0.0, 0.0, 1.0)
    whole = calibration.as_data()
    for torn in (
        None,
        {},
        {**whole, "bounds": [0.5]},
        {**whole, "chances": [2.0] * len(whole["scores"])},
        {**whole, "scores": whole["scores"][::-1]},
    ):
        with pytest.raises(GateError, match="calibration as it was saved"):
            Calibration.from_data(torn)
