"""Runs with and without a gate: by hand, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.analysis import compare_side_by_side, compare_trainings
from sluice.analysis.experiments import mean_and_deviation
from sluice.errors import AnalysisError
from tests.analysis.recordings import write


def arm(label: str, *rows: tuple[float, int, float, int]) -> list[dict[str, Any]]:
    names = ("wall_time_sec", "step_tokens", "rewards_var", "gate_cut")
    return [{"task_id": f"t{i}", "label": label, **dict(zip(names, row, strict=True))} for i, row in enumerate(rows)]


BASELINE = arm("baseline", (10.0, 60, 0.0, 0), (20.0, 80, 0.25, 0), (10.0, 60, 0.0, 0))
GATED = arm("gated", (5.0, 20, 0.0, 1), (5.0, 20, 0.0, 1), (10.0, 60, 0.1, 0))


def test_a_cut_is_scored_by_the_other_arm_and_never_by_its_own_rewards(tmp_path: Path) -> None:
    found = compare_side_by_side(write(tmp_path / "ab.csv", BASELINE + GATED))
    assert (found.groups, found.zero_variance, found.cut, found.true_cuts, found.equal_own_rewards) == (3, 2, 2, 1, 2)
    assert (found.precision, found.agreeing) == (0.5, 0)
    assert (found.seconds, found.env_steps) == ((40.0, 20.0), (200, 100))
    assert (found.seconds_saved, found.env_steps_saved) == (0.5, 0.5)
    assert found.precision_interval == pytest.approx((0.0126, 0.9874), abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (BASELINE + GATED[:2], "expected every task in both arms, got t2 in one"),
        (BASELINE + BASELINE, "column task_id: expected every task once in the arm baseline, got 't0'"),
        (BASELINE + arm("treated", (1.0, 1, 0.0, 0)), "column label: expected baseline or gated, got 'treated'"),
        ([{"task_id": "a"}], "expected a column wall_time_sec"),
        ([*BASELINE, GATED[0] | {"rewards_var": None}], "line 5, column rewards_var: expected a number, got None"),
    ],
)
def test_arms_that_do_not_match_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        compare_side_by_side(write(tmp_path / "ab.csv", rows))


def iterations(seed: str, *rows: tuple[float, int, int, float]) -> list[dict[str, Any]]:
    """Seconds, cuts, zero-variance groups (cut ones among them), gradient norm; 10 groups each."""
    return [
        {
            "seed": seed,
            "iter_secs": seconds,
            "rollout_secs": seconds / 2,
            "n_groups": 10,
            "n_groups_cut": cut,
            "n_zero_variance": zero,
            "grad_norm": norm,
        }
        for seconds, cut, zero, norm in rows
    ]


def test_trainings_are_compared_seed_by_seed(tmp_path: Path) -> None:
    without = write(tmp_path / "without.csv", iterations("10", (9.0, 0, 5, 1.0)) + iterations("7", (10.0, 0, 4, 1.0), (10.0, 0, 6, 3.0)))
    gated = write(tmp_path / "with.csv", iterations("7", (8.0, 2, 4, 2.0), (8.0, 0, 6, 4.0)) + iterations("10", (9.0, 0, 5, 1.0)))
    seven, ten = compare_trainings(without, gated)
    assert (seven.seed, seven.iterations, seven.groups, seven.cut) == ("7", 2, 20, 2)
    assert (seven.seconds, seven.rollout_seconds) == ((20.0, 16.0), (10.0, 8.0))
    assert seven.seconds_saved == pytest.approx(0.2)
    # 10 of 20 groups without; with, 10 - 2 of the 18 that were trained on.
    assert seven.zero_variance_share == (0.5, pytest.approx(8 / 18))
    assert seven.grad_norm_ratio == pytest.approx(1.5)
    assert seven.predicted_ratio == pytest.approx((10 / 18) / 0.5)
    assert seven.most_recall == pytest.approx(0.2)
    assert (ten.seed, ten.seconds_saved, ten.predicted_ratio) == ("10", 0.0, 1.0)


def test_trainings_of_other_seeds_or_lengths_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one.csv", iterations("7", (1.0, 0, 1, 1.0)))
    for rows in (iterations("8", (1.0, 0, 1, 1.0)), iterations("7", *[(1.0, 0, 1, 1.0)] * 2)):
        other = write(tmp_path / "other.csv", rows)
        with pytest.raises(AnalysisError, match=r"other.csv: expected the seeds and iterations of .*one.csv, 7 \(1\), got"):
            compare_trainings(one, other)


def test_one_seed_has_no_deviation() -> None:
    assert mean_and_deviation([2.0]) == (2.0, None)
    assert mean_and_deviation([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
