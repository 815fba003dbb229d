"""What can be computed from the released files of arXiv 2605.05802, which read as they are."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from sluice.analysis import Recorded, Settings, analyse, compare_side_by_side, compare_trainings, fit, read_recording
from sluice.analysis.curves import Curve, Figures
from sluice.analysis.experiments import mean_and_deviation
from sluice.analysis.references import arms
from sluice.gate import SIGNALS, OrTermination, SingleAxis
from tests.analysis.recordings import DISTANCE, published


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """100 groups of 8 at K = 10, 15, 20, all decided on, as in the published figures."""
    return read_recording([published("features")], horizon=30).recorded.deciding_on_all()


def test_the_features_read_as_they_are(recorded: Recorded) -> None:
    assert (len(recorded), recorded.ks, recorded.signals) == (100, (10, 15, 20), SIGNALS)
    assert {outcome: recorded.outcomes.count(outcome) for outcome in recorded.outcomes} == {"mixed": 61, "all fail": 25, "all succeed": 14}
    assert recorded.first.task_types is not None
    assert len({*recorded.first.task_types}) == 6


def test_the_published_operating_point(recorded: Recorded) -> None:
    point = Curve.of(DISTANCE, recorded.at(10).signals[DISTANCE], Figures.of(recorded, 10)).at(0.12)
    assert (point.cut, point.true_cuts, point.false_cuts) == (21, 17, 4)
    assert (point.precision, point.recall) == (pytest.approx(0.8095, abs=5e-5), pytest.approx(0.4359, abs=5e-5))
    assert (point.safe_saving, point.raw_saving) == (pytest.approx(0.1133, abs=5e-5), pytest.approx(0.14))
    assert point.advantage_kept == pytest.approx(0.96666, abs=5e-6)


def test_a_running_gate_finds_four_of_its_cuts_ended() -> None:
    """All their members had ended by step 10: there was nothing left to save, and they were all right cuts."""
    running = read_recording([published("features")], horizon=30).recorded
    point = Figures.of(running, 10).point(DISTANCE, 0.12, running.at(10).signals[DISTANCE] < 0.12)
    assert (point.decided, point.cut, point.true_cuts, point.left_alone) == (94, 17, 13, 4)


def test_every_published_correlation(recorded: Recorded) -> None:
    """Of K = 10, 15 and 20; features at K = 5 are not released."""
    report = analyse_all(recorded)
    with published("correlation").open(newline="") as file:
        rows = {(row["metric"], int(row["K"])): row for row in csv.DictReader(file)}
    assert len(report) == 21
    for one in report:
        row = rows[one.signal, one.k]
        assert one.spearman == pytest.approx(float(row["spearman_rho"]), abs=1e-9)
        assert one.auroc == pytest.approx(float(row["auroc_nonzero_var"]), abs=1e-9)
        assert one.spearman_interval[0] < one.spearman < one.spearman_interval[1]
        assert one.auroc_interval[0] < one.auroc < one.auroc_interval[1]


def analyse_all(recorded: Recorded):
    from sluice.analysis.reading import Recording

    recording = Recording(recorded=recorded, trajectories=None, sources=("features",))
    return analyse(recording, Settings(decide="all", draws=200), choose=False).correlations


def test_the_published_table_of_arms(recorded: Recorded) -> None:
    """All but the shares of rollouts saved, which are by the lengths of trajectories: those are not released."""
    groups, figures, rng = recorded.at(10), Figures.of(recorded, 10), np.random.default_rng(0)
    with published("baselines").open(newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    single = {arm.name: arm for arm in arms(figures, groups.cuts(SingleAxis(threshold=0.11)), rng)}
    both = {arm.name: arm for arm in arms(figures, groups.cuts(OrTermination()), rng)}
    ended = {arm.name: arm for arm in arms(figures, groups.signals["termination_fraction"] >= 0.90, rng)}
    mine = {
        "no-gate": single["no gate"],
        "oracle": single["oracle"],
        "DAPO-oracle": single["post-hoc filter"],
        "R1: d<0.11 only": single["gate"],
        "single-τ: τ≥0.90": ended["gate"],
        "OURS R3": both["gate"],
        "OURS+DAPO": both["gate, then post-hoc filter"],
    }
    for name, arm in mine.items():
        row = rows[name]
        assert (arm.cut, arm.true_cuts, arm.false_cuts, arm.missed) == tuple(int(row[key]) for key in ("n_cut", "TP", "FP", "FN")), name
        assert (arm.precision or 0.0, arm.recall) == pytest.approx((float(row["precision"]), float(row["recall"]))), name
        assert 100 * arm.dropped_share == pytest.approx(float(row["items_dropped_pct"])), name
        assert 100 * arm.advantage_kept == pytest.approx(float(row["L2_preserved_pct"])), name
    # The random arm is a mean over draws of theirs; ours is an expectation.
    row, chance = rows["random-cut-23"], both["random, 23 cuts"]
    assert chance.precision == pytest.approx(0.39)
    assert chance.precision == pytest.approx(float(row["precision"]), abs=0.01)
    assert chance.true_cuts == pytest.approx(23 * 0.39)
    assert 100 * chance.advantage_kept == pytest.approx(float(row["L2_preserved_pct"]), abs=0.3)
    low, high = chance.intervals["advantage_kept"]
    assert (100 * low, 100 * high) == pytest.approx((83.96, 91.44), abs=0.7)


def test_the_published_choice_does_not_hold_on_held_out_groups(recorded: Recorded) -> None:
    """With the distance alone and the floor 0.80 the same 21 cuts are chosen on all groups; on held-out ones such rules fall below it."""
    found = fit(recorded, 0.8, signals=[DISTANCE])
    rung = found.choice.ladder[0]
    assert rung.point is not None
    assert (rung.point.k, rung.point.cut, rung.point.true_cuts) == (10, 21, 17)
    assert rung.held_out.precision is not None
    assert rung.held_out.precision < 0.8
    assert found.held_out.low < 0.8


def test_side_by_side_the_matched_arm_finds_eight_of_fifteen_cuts_right() -> None:
    found = compare_side_by_side(published("wallclock_ab"))
    assert (found.groups, found.cut, found.true_cuts, found.equal_own_rewards) == (100, 15, 8, 15)
    assert found.precision == pytest.approx(8 / 15)
    assert found.zero_variance == 45
    assert found.agreeing == 70
    assert found.seconds_saved == pytest.approx(0.1114, abs=5e-5)
    assert found.env_steps_saved == pytest.approx(0.1174, abs=5e-5)


def test_on_policy_seconds_cuts_and_gradients() -> None:
    found = compare_trainings(published("onpolicy_baseline"), published("onpolicy_gated"))
    assert [one.seed for one in found] == ["7", "13", "23", "42"]
    assert {one.iterations for one in found} == {60}
    assert [100 * one.seconds_saved for one in found] == pytest.approx([10.65, 8.95, 9.22, 14.16], abs=0.005)
    assert [100 * value for value in mean_and_deviation([one.seconds_saved for one in found])] == pytest.approx([10.7, 2.4], abs=0.05)
    assert [round(mean_and_deviation([one.seconds[i] for one in found])[0]) for i in (0, 1)] == [17393, 15527]
    assert [one.cut for one in found] == [94, 88, 119, 124]
    assert {one.groups for one in found} == {600}
    assert mean_and_deviation([one.grad_norm_ratio for one in found]) == pytest.approx((1.16, 0.07), abs=0.005)


def test_on_policy_the_batch_is_thinned_out_more_than_the_released_column_says() -> None:
    """That column divides by 12 groups; after the cuts there are 10 less those that were cut."""
    found = compare_trainings(published("onpolicy_baseline"), published("onpolicy_gated"))
    shares = [mean_and_deviation([one.zero_variance_share[i] for one in found])[0] for i in (0, 1)]
    assert shares == pytest.approx([0.406, 0.366], abs=5e-4)
    assert mean_and_deviation([one.predicted_ratio for one in found])[0] == pytest.approx(1.07, abs=0.005)
    with published("onpolicy_gated").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    left = [int(row["n_zero_variance"]) - int(row["n_groups_cut"]) for row in rows]
    assert np.mean([float(row["dilution_pct"]) for row in rows]) == pytest.approx(25.1, abs=0.05)
    by_twelve = [100 * max(0, one) / 12 for one in left]
    assert [float(row["dilution_pct"]) for row in rows] == pytest.approx(by_twelve)
