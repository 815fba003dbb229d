"""The one door to recorded data: folders of runs, files of action sequences, files of group features, one or several of them.

What a path holds is seen from its columns: `actions` make action sequences, one of the seven signals makes features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.analysis.collecting import GroupRows, LeftOut, collect
from sluice.analysis.features import read_features
from sluice.analysis.from_runs import RUN_DB, read_run, run_parts
from sluice.analysis.from_tables import read_trajectories
from sluice.analysis.recorded import Recorded
from sluice.analysis.tables import FORMATS, Table, read_table
from sluice.analysis.trajectories import Trajectories
from sluice.errors import AnalysisError
from sluice.gate.divergence import SIGNALS

MOST_KS: Final = 30
"""How many K are looked at when none are given: all up to the horizon, or as many evenly over it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """What was read."""

    recorded: Recorded
    trajectories: Trajectories | None  # None: files of features
    sources: tuple[str, ...]  # the paths, as given


def read_recording(
    paths: Sequence[Path],
    *,
    ks: Sequence[int] | None = None,
    horizon: int | None = None,
    ids_per_file: bool = False,
) -> Recording:
    """Read recorded groups.

    Args:
        paths: run folders, folders of files, or files; all of action sequences (runs among them), or all of features.
        ks: environment steps to look at; None: all that a file of features has, else up to `MOST_KS` of those below the horizon.
        horizon: most environment steps of a trajectory; None: the longest one that was recorded.
        ids_per_file: groups of one id in different files are different groups.

    Raises:
        AnalysisError: with file, row and column.
    """
    if not paths:
        raise AnalysisError("expected at least one recording, got none - give a run folder, or a file of action sequences or features")
    left_out = LeftOut()
    groups: dict[str, GroupRows] = {}
    tables: list[Table] = []
    sizes: set[int] = set()
    seen: dict[Any, Path] = {}
    for path in paths:
        parts = run_parts(path) if path.is_dir() or path.is_file() else []
        if not parts:
            tables += _tables(path)
            continue
        found, facts = read_run(path, parts, left_out)
        identity = facts.get("identity")
        if identity in seen:
            raise AnalysisError(f"{path}: expected every run once, got that of {seen[identity]} again - drop one of the two")
        seen[identity] = path
        groups |= found
        sizes |= {facts["group_size"]} if facts.get("group_size") else set()
    are_features = [table for table in tables if "actions" not in table.columns and table.find(*SIGNALS)]
    if are_features and (groups or len(are_features) < len(tables)):
        raise AnalysisError(f"{are_features[0].path}: expected action sequences like the other paths, got features - analyse them apart")
    if are_features:
        return _of_features(are_features, paths, ks, horizon, ids_per_file, left_out)
    if tables:
        groups |= read_trajectories(_checked(tables), ids_per_file, left_out)
    if len(sizes) > 1:
        raise AnalysisError(f"expected runs of one group size, got {sorted(sizes)} - analyse each apart: thresholds do not carry over")
    trajectories = Trajectories.of_groups(collect(groups, next(iter(sizes), None), left_out))
    most = horizon if horizon is not None else int(trajectories.lengths.max())
    chosen = _checked_ks(ks, most) if ks is not None else default_ks(most)
    notes = [*left_out.lines]
    if horizon is None:
        notes.append(f"horizon {most}: the longest trajectory; give --horizon where trajectories may be longer")
    if trajectories.observations is None:
        notes.append("obs_unique_ratio is not there: not all trajectories have observations")
    recorded = trajectories.recorded(chosen, most, notes)
    return Recording(recorded=recorded, trajectories=trajectories, sources=tuple(map(str, paths)))


def default_ks(horizon: int) -> tuple[int, ...]:
    """The K to look at below a horizon."""
    if horizon < 2:
        raise AnalysisError(f"horizon: expected at least 2 environment steps, got {horizon} - there is no K below it")
    if horizon - 1 <= MOST_KS:
        return tuple(range(1, horizon))
    return tuple(sorted({round(1 + i * (horizon - 2) / (MOST_KS - 1)) for i in range(MOST_KS)}))


def _of_features(
    tables: Sequence[Table], paths: Sequence[Path], ks: Sequence[int] | None, horizon: int | None, ids_per_file: bool, left_out: LeftOut
) -> Recording:
    recorded = read_features(tables, ks, horizon, ids_per_file, left_out)
    return Recording(recorded=recorded, trajectories=None, sources=tuple(map(str, paths)))


def _checked_ks(ks: Sequence[int], horizon: int) -> Sequence[int]:
    for k in ks:
        if not 1 <= k < horizon:
            raise AnalysisError(f"k: expected steps from 1 to {horizon - 1}, below the horizon, got {k} - nothing is left to save there")
    return ks


def _tables(path: Path) -> list[Table]:
    if not path.is_dir():
        if not path.exists() and path.suffix.lower() not in FORMATS:
            raise AnalysisError(f"{path}: expected a run folder or a file of recorded groups, got nothing of that name - check the path")
        return [read_table(path)]
    if (path / RUN_DB).exists():
        raise AnalysisError(f"{path}: expected recorded rollouts in this run, got none - record them with 'sluice train --record'")
    files = sorted(one for one in path.iterdir() if one.suffix.lower() in FORMATS)
    if not files:
        raise AnalysisError(
            f"{path}: expected recorded rollouts or files ending in {', '.join(FORMATS)}, got neither - record a run with "
            "'sluice train --record'"
        )
    return [read_table(one) for one in files]


def _checked(tables: Sequence[Table]) -> Sequence[Table]:
    for table in tables:
        if "actions" not in table.columns:
            table.need("actions", *SIGNALS, why="a list of actions per trajectory, or a signal per group")
    return tables
