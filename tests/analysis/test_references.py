"""What a rule is held against, by hand and by expectation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from sluice.analysis.curves import Figures
from sluice.analysis.references import arms, random_arm
from tests.analysis.recordings import DISTANCE, some_recorded


def test_cuts_at_random_are_the_mean_over_all_choices_of_cuts() -> None:
    recorded = some_recorded(n=9, seed=4)
    figures = Figures.of(recorded, 3)
    decided = np.flatnonzero(figures.running)
    points = []
    for chosen in combinations(decided.tolist(), 3):
        cut = np.zeros(9, dtype=bool)
        cut[list(chosen)] = True
        points.append(figures.point("", 0.0, cut))
    arm = random_arm(figures, 3, np.random.default_rng(0))
    for name in (
        "cut",
        "true_cuts",
        "false_cuts",
        "precision",
        "recall",
        "safe_saving",
        "raw_saving",
        "safe_step_saving",
        "raw_step_saving",
    ):
        assert getattr(arm, name) == pytest.approx(np.mean([getattr(point, name) for point in points])), name
    # The norm of advantages is no sum: a mean over draws.
    assert arm.advantage_kept == pytest.approx(np.mean([point.advantage_kept for point in points]), abs=0.02)
    assert arm.missed == pytest.approx(figures.zero.sum() - arm.true_cuts)
    for name in ("precision", "safe_saving", "safe_step_saving", "raw_step_saving", "advantage_kept"):
        low, high = arm.intervals[name]
        assert low <= getattr(arm, name) <= high


def test_arms_by_what_they_are_meant_to_be() -> None:
    recorded = some_recorded(n=40)
    figures = Figures.of(recorded, 3)
    below = recorded.at(3).signals[DISTANCE] < 0.5
    found = {arm.name: arm for arm in arms(figures, below, np.random.default_rng(0))}
    nothing, oracle, after, gate, both = (
        found[name] for name in ("no gate", "oracle", "post-hoc filter", "gate", "gate, then post-hoc filter")
    )
    zero, running = int(figures.zero.sum()), int((figures.zero & figures.running).sum())
    assert (nothing.cut, nothing.dropped_share, nothing.advantage_kept, nothing.precision) == (0, 0.0, 1.0, None)
    assert (oracle.cut, oracle.false_cuts, oracle.precision, oracle.advantage_kept) == (running, 0, 1.0, 1.0)
    assert (after.cut, after.safe_saving, after.dropped_share) == (0, 0.0, zero / 40)
    assert gate.cut == (below & figures.running).sum() == found[f"random, {int(gate.cut)} cuts"].cut
    assert gate.dropped_share == gate.cut / 40
    assert both.dropped_share == (gate.false_cuts + zero) / 40
    assert (both.safe_saving, both.advantage_kept) == (gate.safe_saving, gate.advantage_kept)
    assert oracle.safe_step_saving >= gate.safe_step_saving


def test_where_nothing_can_be_cut_random_cuts_are_none() -> None:
    arm = random_arm(Figures.of(some_recorded(n=5), 3), 0, np.random.default_rng(0))
    assert (arm.cut, arm.true_cuts, arm.precision, arm.safe_step_saving, arm.advantage_kept) == (0, 0, None, 0.0, 1.0)
