"""Compares runs with and without a gate: the same tasks and seeds side by side, or whole trainings seed by seed.

Files are CSV, JSONL or Parquet with the columns of the published ones (arXiv 2605.05802), which read as they are.

What a cut group would have become is never read from its own rewards: those of stopped trajectories are equal because they were stopped.
Side by side the other arm tells; in a training nobody does, so that figures which need it are bounds, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sluice.analysis.intervals import Interval
from sluice.analysis.tables import Table, read_table
from sluice.errors import AnalysisError
from sluice.gate.audit import clopper_pearson


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The same groups once without and once with the gate."""

    groups: int
    zero_variance: int  # in the arm without
    cut: int
    true_cuts: int  # that ended with equal rewards in the arm without
    precision: float | None  # None: nothing was cut
    precision_interval: Interval  # exact, 95 %
    equal_own_rewards: int  # cuts whose own, truncated rewards are equal: says nothing of the gate
    seconds: tuple[float, float]  # without, with
    env_steps: tuple[int, int]  # of all members
    agreeing: int  # groups that were not cut and have equal rewards in both arms or in neither

    @property
    def seconds_saved(self) -> float:
        """Share of the seconds."""
        return 1 - self.seconds[1] / self.seconds[0]

    @property
    def env_steps_saved(self) -> float:
        """Share of the environment steps."""
        return 1 - self.env_steps[1] / self.env_steps[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One seed, once without and once with the gate. Shares are of whole trainings: sums over iterations, not means of shares."""

    seed: str
    iterations: int
    seconds: tuple[float, float]  # without, with
    rollout_seconds: tuple[float, float]
    groups: int  # launched, in each arm
    cut: int
    zero_variance_share: tuple[float, float]  # of the groups that were trained on
    grad_norm: tuple[float, float]  # mean over iterations
    most_recall: float  # cuts / (cuts + zero-variance groups that were not cut): what it would be if every cut was right

    @property
    def seconds_saved(self) -> float:
        """Share of the seconds."""
        return 1 - self.seconds[1] / self.seconds[0]

    @property
    def grad_norm_ratio(self) -> float:
        """With the gate / without."""
        return self.grad_norm[1] / self.grad_norm[0]

    @property
    def predicted_ratio(self) -> float:
        """That of the gradients if groups with equal rewards did nothing but thin out the mean: (1 - z with) / (1 - z without)."""
        return (1 - self.zero_variance_share[1]) / (1 - self.zero_variance_share[0])


def compare_side_by_side(path: Path) -> SideBySide:
    """Read the rollouts of the same tasks with and without the gate.

    Columns: task_id, label (baseline or gated), wall_time_sec, step_tokens (environment steps of all members), rewards_var, gate_cut (0 or
    1).
    Raises `AnalysisError` for missing columns and cells, and for tasks that are not there once in each arm.
    """
    table = read_table(path)
    arms: Mapping[str, dict[str, tuple[float, float, float, bool]]] = {"baseline": {}, "gated": {}}
    columns = [table.need(name, why="one row per group and arm") for name in ("wall_time_sec", "step_tokens", "rewards_var", "gate_cut")]
    for row in range(len(table)):
        arm, task = _given(table, "label", row), _given(table, "task_id", row)
        if arm not in arms:
            table.refuse(row, "label", "baseline or gated", arm, "name the arm")
        if task in arms[arm]:
            table.refuse(row, "task_id", f"every task once in the arm {arm}", task, "drop one of the rows")
        seconds, steps, variance, is_cut = (_number(table, name, row) for name in columns)
        arms[arm][task] = (seconds, steps, variance, bool(is_cut))
    without, gated = arms["baseline"], arms["gated"]
    if without.keys() != gated.keys():
        alone = sorted(without.keys() ^ gated.keys())
        raise AnalysisError(f"{path}: expected every task in both arms, got {alone[0]} in one ({len(alone)} such tasks) - leave them out")
    cut = [task for task, row in gated.items() if row[3]]
    true = sum(without[task][2] == 0 for task in cut)
    return SideBySide(
        groups=len(without),
        zero_variance=sum(row[2] == 0 for row in without.values()),
        cut=len(cut),
        true_cuts=true,
        precision=true / len(cut) if cut else None,
        precision_interval=clopper_pearson(true, len(cut)),
        equal_own_rewards=sum(gated[task][2] == 0 for task in cut),
        seconds=(sum(row[0] for row in without.values()), sum(row[0] for row in gated.values())),
        env_steps=(round(sum(row[1] for row in without.values())), round(sum(row[1] for row in gated.values()))),
        agreeing=sum((without[task][2] == 0) == (gated[task][2] == 0) for task in without if not gated[task][3]),
    )


def compare_trainings(without: Path, gated: Path) -> tuple[Training, ...]:
    """Read the iterations of whole trainings, and compare them seed by seed, in the order of the seeds.

    Columns: seed, iter_secs, rollout_secs, n_groups, n_groups_cut, n_zero_variance (cut groups among them), grad_norm.
    Raises `AnalysisError` for missing columns and cells, and for seeds that are not in both files with the same number of iterations.
    """
    arms = [_by_seed(read_table(path)) for path in (without, gated)]
    if {seed: len(rows) for seed, rows in arms[0].items()} != {seed: len(rows) for seed, rows in arms[1].items()}:
        told = [", ".join(f"{seed} ({len(rows)})" for seed, rows in arm.items()) for arm in arms]
        raise AnalysisError(f"{gated}: expected the seeds and iterations of {without}, {told[0]}, got {told[1]} - leave the others out")
    return tuple(_training(seed, arms[0][seed], arms[1][seed]) for seed in sorted(arms[0], key=lambda one: (len(one), one)))


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Over seeds; the sample deviation is None for one."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _training(seed: str, without: Sequence[Mapping[str, float]], gated: Sequence[Mapping[str, float]]) -> Training:
    def both(column: str) -> tuple[float, float]:
        return sum(row[column] for row in without), sum(row[column] for row in gated)

    (groups, _), zero, cut = both("n_groups"), both("n_zero_variance"), both("n_groups_cut")
    norms = both("grad_norm")
    return Training(
        seed=seed,
        iterations=len(without),
        seconds=both("iter_secs"),
        rollout_seconds=both("rollout_secs"),
        groups=round(groups),
        cut=round(cut[1]),
        zero_variance_share=((zero[0] - cut[0]) / (groups - cut[0]), (zero[1] - cut[1]) / (groups - cut[1])),
        grad_norm=(norms[0] / len(without), norms[1] / len(gated)),
        most_recall=cut[1] / zero[1] if zero[1] else 0.0,
    )


def _by_seed(table: Table) -> dict[str, list[dict[str, float]]]:
    names = ("iter_secs", "rollout_secs", "n_groups", "n_groups_cut", "n_zero_variance", "grad_norm")
    for name in ("seed", *names):
        table.need(name, why="one row per iteration")
    found: dict[str, list[dict[str, float]]] = {}
    for row in range(len(table)):
        found.setdefault(_given(table, "seed", row), []).append({name: _number(table, name, row) for name in names})
    return found


def _given(table: Table, column: str, row: int) -> str:
    table.need(column, why="it names the row")
    value = table.text(column, row)
    if value is None:
        table.refuse(row, column, "a name", None, "fill it in")
    return value


def _number(table: Table, column: str, row: int) -> float:
    value = table.number(column, row)
    if value is None:
        table.refuse(row, column, "a number", None, "fill it in")
    return value
