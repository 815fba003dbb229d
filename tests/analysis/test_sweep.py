"""A report holds together, repeats with its seed, and says when not to trust it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from sluice.analysis import Settings, Trajectories, TrajectoryGroup, analyse
from sluice.analysis.doubts import cuts_needed, doubts_of_data, doubts_of_point
from sluice.analysis.reading import Recording
from sluice.analysis.report_files import CORRELATIONS, MOST_ROWS, RECIPE, REPORT, THRESHOLDS, as_data, write_files
from sluice.errors import AnalysisError, ConfigError
from sluice.gate import Gate
from sluice.gate.audit import clopper_pearson
from sluice.gate.offline import auroc, spearman
from tests.analysis.recordings import DISTANCE, some_groups

KS = (2, 3, 5)
QUICK = Settings(precision_floor=0.6, draws=60)


def recording(groups: list[TrajectoryGroup] | None = None) -> Recording:
    trajectories = Trajectories.of_groups(some_groups() if groups is None else groups)
    return Recording(recorded=trajectories.recorded(KS, 8), trajectories=trajectories, sources=("here",))


def test_every_signal_is_measured_at_every_step() -> None:
    made = recording()
    report = analyse(made, QUICK, choose=False)
    assert [(one.k, one.signal) for one in report.correlations] == [(k, name) for k in KS for name in made.recorded.signals]
    for one in report.correlations:
        groups = made.recorded.at(one.k)
        assert one.spearman == spearman(groups.signals[one.signal], groups.reward_var)
        assert one.auroc == auroc(groups.signals[one.signal], ~groups.zero_variance)
        assert (one.spearman is None) == (one.spearman_interval is None)
        if one.spearman is not None:
            assert one.spearman_interval[0] <= one.spearman <= one.spearman_interval[1]
    assert sum(report.outcomes.values()) == 60


def test_the_same_seed_makes_the_same_report_and_the_order_of_groups_does_not_matter() -> None:
    groups = some_groups()
    one = as_data(analyse(recording(groups), QUICK, choose=True))
    assert one == as_data(analyse(recording(groups[::-1]), QUICK, choose=True))
    other = as_data(analyse(recording(groups), replace(QUICK, seed=1), choose=True))
    assert one["fit"]["held_out"] != other["fit"]["held_out"]
    assert one["correlations"][0]["spearman"] == other["correlations"][0]["spearman"]


def test_everything_is_about_one_rule() -> None:
    report = analyse(recording(), QUICK, choose=True)
    point = report.point
    assert report.fit is not None
    assert point is not None
    assert point == report.fit.choice.point
    assert point in report.thresholds
    assert {(one.signal, one.k) for one in report.thresholds} == {(point.signal, point.k)}
    gate = next(arm for arm in report.arms if arm.name == "gate")
    assert (gate.cut, gate.true_cuts) == (point.cut, point.true_cuts)
    assert sum(one.point.cut for one in report.task_types) == point.cut
    assert sum(one.point.groups for one in report.task_types) == point.groups
    assert [one.group_size for one in report.transfers] == [2]
    assert report.precision_exact == clopper_pearson(point.true_cuts, point.cut)
    assert report.point_intervals["safe_step_saving"][0] <= point.safe_step_saving <= report.point_intervals["safe_step_saving"][1]


def test_a_sweep_is_about_the_given_threshold_or_the_best_rule() -> None:
    given = analyse(recording(), replace(QUICK, signals=(DISTANCE,), thresholds=(0.5, 0.2)), choose=False)
    assert given.fit is None
    assert (given.point.signal, given.point.k, given.point.threshold) == (DISTANCE, 2, 0.5)
    assert [(one.k, one.threshold) for one in given.asked] == [(k, threshold) for k in KS for threshold in (0.5, 0.2)]
    best = analyse(recording(), QUICK, choose=False)
    assert best.point.saving == max(point.saving for point in best.best if point is not None)


def test_deciding_on_all_counts_groups_that_had_ended() -> None:
    running, everything = (analyse(recording(), replace(QUICK, decide=decide), choose=False) for decide in ("running", "all"))
    k = 5
    left = 60 - int(running.recorded.is_running[k].sum())
    assert left > 0
    assert everything.recorded.is_running[k].all()
    assert any("every group is decided on" in note for note in everything.notes)
    assert any("are not decided on" in note for note in analyse(recording(), replace(QUICK, thresholds=(0.5,)), choose=False).notes) or (
        running.recorded.is_running[2].all()
    )


def test_groups_of_features_have_no_members_to_leave_away() -> None:
    made = replace(recording(), trajectories=None)
    assert analyse(made, QUICK, choose=False).transfers == ()
    with pytest.raises(AnalysisError, match="group size: expected a recording of action sequences, got features"):
        analyse(made, replace(QUICK, group_sizes=(2,)), choose=False)


def test_unknown_signals_and_thresholds_are_refused() -> None:
    with pytest.raises(AnalysisError, match="signal: expected some of prefix_edit_distance_mean.*, got 'distance'"):
        analyse(recording(), replace(QUICK, signals=("distance",)), choose=False)
    with pytest.raises(ConfigError, match="threshold: expected a number >= 0 and <= 1, got 1.2"):
        analyse(recording(), replace(QUICK, thresholds=(1.2,)), choose=False)


# ---------------------------------------------------------------- files


def test_files_hold_what_the_report_says(tmp_path: Path) -> None:
    report = analyse(recording(), QUICK, choose=True)
    folder = tmp_path / "new" / "folder"
    assert [path.name for path in write_files(report, folder)] == [CORRELATIONS, THRESHOLDS, REPORT, RECIPE]
    with (folder / CORRELATIONS).open() as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["auroc"]) for row in rows] == [one.auroc for one in report.correlations]
    assert {"spearman_low", "spearman_high", "auroc_low", "auroc_high"} <= rows[0].keys()
    with (folder / THRESHOLDS).open() as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == sum(min(len(curve), MOST_ROWS) for curve in report.curves)
    mine = next(row for row in rows if (row["signal"], int(row["k"]), float(row["threshold"])) == point_key(report))
    assert int(mine["cut"]) == report.point.cut
    assert float(mine["advantage_kept"]) == pytest.approx(report.point.advantage_kept)
    assert json.loads((folder / REPORT).read_text()) == json.loads(json.dumps(as_data(report)))
    assert "NaN" not in (folder / REPORT).read_text()


def point_key(report):
    return report.point.signal, report.point.k, report.point.threshold


def test_the_lines_for_the_recipe_make_the_gate_that_was_fitted(tmp_path: Path) -> None:
    made = recording()
    report = analyse(made, QUICK, choose=True)
    write_files(report, tmp_path)
    section = yaml.safe_load((tmp_path / RECIPE).read_text())
    assert [*section] == ["gate"]
    gate = Gate(**section["gate"])
    cuts = made.recorded.at(gate.k).cuts(gate.rule_in_force) & made.recorded.is_running[gate.k]
    assert int(cuts.sum()) == report.point.cut


def test_a_fit_that_finds_nothing_leaves_no_recipe_of_an_earlier_one(tmp_path: Path) -> None:
    write_files(analyse(recording(), QUICK, choose=True), tmp_path)
    assert (tmp_path / RECIPE).exists()
    hard = analyse(recording(), replace(QUICK, precision_floor=1.0), choose=True)
    if hard.point is None:
        write_files(hard, tmp_path)
        assert not (tmp_path / RECIPE).exists()
        assert any("no signal, K and threshold reach a precision of 1" in warning for warning in hard.warnings)


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AnalysisError, match=r"file: expected a folder that can be written, got: .* - give another --out"):
        write_files(analyse(recording(), QUICK, choose=False), tmp_path / "file")


# ---------------------------------------------------------------- doubts


def test_few_groups_are_told_with_their_number() -> None:
    assert doubts_of_data(100, 20) == [
        "only 20 of 100 groups have equal rewards: below 30 no threshold can be trusted - record more groups"
    ]
    assert doubts_of_data(100, 90) == [
        "only 10 of 100 groups have different rewards: below 30 no threshold can be trusted - record more groups"
    ]
    assert doubts_of_data(100, 50) == []


def test_a_lower_bound_below_the_floor_is_told_with_what_would_be_enough() -> None:
    report = analyse(recording(), replace(QUICK, signals=(DISTANCE,), thresholds=(0.5,)), choose=False)
    point = replace(report.point, cut=21, true_cuts=17, false_cuts=4, precision=17 / 21, groups=100)
    (told,) = doubts_of_point(point, 0.7, 0.95, 0.39, 0.2)
    assert told.startswith(
        "too few cuts to trust the threshold: 17 of 21 are right (81.0 %), and the lower bound of that precision (95%) is 58.1 %"
    )
    needed = cuts_needed(17 / 21, 0.7, 0.95)
    assert needed is not None
    assert f"it takes about {needed:,} cuts, that is some {int(np.ceil(needed / 21 * 100))} groups" in told
    assert clopper_pearson(int(17 / 21 * needed), needed)[0] >= 0.7
    assert cuts_needed(0.8, 0.8, 0.95) is None
    sure = replace(point, cut=200, true_cuts=190, precision=0.95)
    assert doubts_of_point(sure, 0.7, 0.95, 0.39, 0.2) == []
    for precision, words in ((0.6, "its precision is below the floor"), (0.7, "its precision is no higher than the floor")):
        (told,) = doubts_of_point(replace(point, cut=200, true_cuts=int(200 * precision), precision=precision), 0.7, 0.95, 0.39, 0.2)
        assert f"{words}: no number of groups will do, choose a stricter threshold" in told


def test_a_rule_that_is_no_better_than_lots_and_one_that_saves_nothing_are_told() -> None:
    report = analyse(recording(), replace(QUICK, signals=(DISTANCE,), thresholds=(0.5,)), choose=False)
    point = replace(report.point, cut=200, true_cuts=120, precision=0.6, safe_step_saving=0.004)
    chance, little = doubts_of_point(point, 0.5, 0.95, 0.58, 0.125)
    assert chance.startswith("the rule may know nothing: cuts at random have a precision of 58.0 % at K = 2")
    assert little.startswith("the rule saves 0.4 % of all environment steps; who knew every outcome would save 12.5 % at K = 2")
