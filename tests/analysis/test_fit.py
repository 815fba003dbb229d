"""What is chosen is the best there is, and what is told of it was not seen when it was chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.analysis import fit
from sluice.analysis.curves import curves
from sluice.analysis.fit import LEAST_CUTS, STRICTER, best_point, split
from sluice.analysis.recorded import Recorded
from sluice.errors import AnalysisError
from sluice.gate.offline import RecordedGroups
from tests.analysis.recordings import DISTANCE, some_recorded


def with_outcomes(recorded: Recorded, chosen: np.ndarray, zero: bool) -> Recorded:
    """The same groups, some of which end otherwise."""

    def changed(groups: RecordedGroups) -> RecordedGroups:
        flags, variance = groups.zero_variance.copy(), np.array(groups.reward_var)
        flags[chosen], variance[chosen] = zero, 0.0 if zero else 0.25
        return replace(groups, zero_variance=flags, reward_var=variance)

    return replace(recorded, steps={k: changed(groups) for k, groups in recorded.steps.items()})


@given(st.integers(0, 50), st.sampled_from([0.5, 0.7, 0.9]))
@settings(max_examples=15)
def test_the_chosen_rule_saves_most_of_all_rules_above_the_floor(seed: int, floor: float) -> None:
    recorded = some_recorded(n=25, seed=seed)
    found = curves(recorded)
    allowed = [
        point
        for curve in found
        for point in map(curve.point, range(len(curve)))
        if point.cut >= LEAST_CUTS and point.true_cuts >= floor * point.cut
    ]
    best = best_point(found, floor)
    if not allowed:
        assert best is None
    else:
        assert best is not None
        assert best.saving == pytest.approx(max(point.saving for point in allowed))
        assert best.precision >= floor


def test_cross_validation_never_sees_its_fold() -> None:
    """Whatever becomes of the groups of a fold, the rule that is judged on it stays the same."""
    recorded = some_recorded(n=80)
    before = fit(recorded, 0.7, folds=4, seed=5)
    parts = split(80, 4, np.random.default_rng(5))  # the first thing that the seed is used for
    assert any(rule is not None for rule in before.held_out.rules)
    is_changed = False
    for number, held in enumerate(parts):
        for zero in (True, False):
            after = fit(with_outcomes(recorded, held, zero), 0.7, folds=4, seed=5)
            assert after.held_out.rules[number] == before.held_out.rules[number]
            for mine, other in zip(before.choice.ladder, after.choice.ladder, strict=True):
                assert mine.held_out.rules[number] == other.held_out.rules[number]
            is_changed |= after.held_out.rules != before.held_out.rules
    assert is_changed  # of the other folds


def test_held_out_figures_are_those_of_each_rule_on_its_fold() -> None:
    recorded = some_recorded(n=80, seed=3)
    found = fit(recorded, 0.7, folds=4, seed=1)
    cut = true = 0
    saved = 0.0
    lengths = recorded.first.lengths
    for rule, held in zip(found.held_out.rules, split(80, 4, np.random.default_rng(1)), strict=True):
        if rule is None:
            continue
        chosen = np.intersect1d(np.flatnonzero(recorded.cuts(rule.signal, rule.k, rule.threshold)), held)
        right = chosen[recorded.zero_variance[chosen]]
        cut, true = cut + len(chosen), true + len(right)
        saved += np.maximum(lengths[right] - rule.k, 0).sum()
    assert (found.held_out.cut, found.held_out.true_cuts, found.held_out.groups) == (cut, true, 80)
    assert found.held_out.saving == pytest.approx(saved / lengths.sum())
    assert found.held_out.low <= found.held_out.precision <= found.held_out.high


def test_a_stricter_floor_is_taken_where_the_wanted_one_does_not_hold() -> None:
    recorded = some_recorded(n=150, seed=11)
    found = fit(recorded, 0.7, seed=2)
    choice = found.choice
    assert [rung.floor for rung in choice.ladder] == pytest.approx([0.7 + share * 0.3 for share in STRICTER])
    holding = [rung for rung in choice.ladder if rung.held_out.precision is not None and rung.held_out.precision >= 0.7]
    assert choice.holds == bool(holding)
    if holding:
        assert choice.point == next(rung.point for rung in choice.ladder if rung.floor == choice.floor)
        chosen = next(rung for rung in choice.ladder if rung.floor == choice.floor)
        assert chosen.held_out.saving == max(rung.held_out.saving for rung in holding)


def test_the_same_seed_chooses_the_same_and_the_order_of_recording_does_not_matter() -> None:
    recorded = some_recorded(n=40)
    assert fit(recorded, 0.6, seed=4) == fit(recorded, 0.6, seed=4)
    only = fit(recorded, 0.6, seed=4, signals=[DISTANCE])
    assert all(rule is None or rule.signal == DISTANCE for rule in (only.choice.point, *only.held_out.rules))


def test_where_no_rule_reaches_the_floor_none_is_chosen() -> None:
    recorded = some_recorded(n=40)
    mixed = with_outcomes(recorded, np.arange(40), zero=False)
    found = fit(mixed, 0.9)
    assert found.choice.point is None
    assert found.precision_low is None
    assert (found.held_out.cut, found.held_out.precision, found.held_out.recall, found.held_out.folds_without) == (0, None, None, 5)


def test_on_noise_the_fitted_precision_is_too_good_and_the_held_out_one_is_not() -> None:
    """Outcomes by lot, half of them equal: no rule can be right in more than half of its cuts."""
    fitted, right, cut = [], 0, 0
    for seed in range(6):
        recorded = some_recorded(n=60, seed=seed)
        chosen = np.random.default_rng(100 + seed).permutation(60)[:30]
        noise = with_outcomes(with_outcomes(recorded, np.arange(60), zero=False), chosen, zero=True)
        found = fit(noise, 0.7, seed=seed)
        if found.choice.point is not None:
            fitted.append(found.choice.point.precision)
        right, cut = right + found.held_out.true_cuts, cut + found.held_out.cut
    assert fitted
    assert min(fitted) >= 0.7
    assert cut > 30
    assert right / cut < 0.65


def test_every_group_is_in_one_fold() -> None:
    parts = split(23, 5, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == [*range(23)]
    assert {len(part) for part in parts} == {4, 5}


@pytest.mark.parametrize(
    ("floor", "changes", "message"),
    [
        (0.0, {}, "precision floor: expected a number > 0 and <= 1, got 0.0"),
        (1.5, {}, "precision floor: expected a number > 0 and <= 1, got 1.5"),
        (0.8, {"folds": 1}, "folds: expected at least 2, got 1"),
        (0.8, {"confidence": 1.0}, "confidence: expected a number > 0 and < 1, got 1.0"),
        (0.8, {"folds": 9}, "groups: expected at least two per fold, that is 18, got 12"),
    ],
)
def test_settings_that_cannot_work_are_refused(floor: float, changes: dict[str, float], message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        fit(some_recorded(n=12), floor, **changes)
