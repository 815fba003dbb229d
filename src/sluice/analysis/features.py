"""Reads tables of group features: one row per group and K, in CSV, JSONL or Parquet. The published files read as they are.

    the seven signals       at least one of them, each in [0, 1]
    reward_var              population variance of the rewards of the group, or
    zero_variance           whether they were all equal (or both)
    K                       the environment step of the row (also `k`); may be left out when the K is given from outside
    group                   which group it is (also `group_id`, `task_id`); may be left out when there is one K
    lengths                 optional: environment steps of each member, a list
    task_type, label        optional; `label` says how the group ended
    run                     optional: tells groups of one id apart

A file of features knows little of single members: a group counts as decided on unless all its members had ended by then, which is seen from
`lengths` or from `termination_fraction`; that finished members differed is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sluice.analysis.collecting import LeftOut
from sluice.analysis.from_tables import GROUP
from sluice.analysis.recorded import Recorded
from sluice.analysis.tables import Table
from sluice.errors import AnalysisError
from sluice.gate.divergence import SIGNALS
from sluice.gate.offline import RecordedGroups
from sluice.gate.values import is_finite_number

_OUTCOMES: Final = {"all_fail": "all fail", "all_succeed": "all succeed", "mixed": "mixed"}
"""Published labels, and what they are called here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One group at one K."""

    place: str
    signals: Mapping[str, float]
    zero_variance: bool
    reward_var: float | None
    lengths: tuple[int, ...] | None
    task_type: str | None
    outcome: str

    @property
    def said(self) -> tuple[object, ...]:
        """Everything but the place."""
        return (self.signals, *self.lasting)

    @property
    def lasting(self) -> tuple[object, ...]:
        """What is the same at every K."""
        return (self.zero_variance, self.reward_var, self.lengths, self.task_type)


def read_features(
    tables: Sequence[Table], ks: Sequence[int] | None, horizon: int | None, ids_per_file: bool, left_out: LeftOut
) -> Recorded:
    """The groups of some files of features. `ks`: those to look at, all when None; a single one is that of a file without a column K.

    Groups that are not there at every K are left out and counted, so that all K are measured on the same groups.

    Raises:
        AnalysisError: a column is missing, a cell is not what it should be, one group has two different rows at one K, or is in two files.
    """
    steps: dict[int, dict[str, _Row]] = {}
    sources: dict[str, Table] = {}
    for table in tables:
        _read(table, steps, sources, ks, ids_per_file and len(tables) > 1, left_out)
    if missing := sorted({*(ks or ())} - {*steps}):
        there = sorted({*steps}) or "none of the given ones"
        raise AnalysisError(f"k: expected steps that the file has, got {missing} where it has {there} - choose others, or leave --k out")
    if horizon is None:
        longest = max((max(row.lengths or (0,)) for rows in steps.values() for row in rows.values()), default=0)
        if not longest:
            raise AnalysisError("expected the most environment steps of a trajectory, got a file without lengths - give --horizon")
        horizon = longest
    _check_horizon(steps, horizon)
    keys = sorted(set.intersection(*({*rows} for rows in steps.values())))
    partial = len(set.union(*({*rows} for rows in steps.values()))) - len(keys)
    left_out.add(f"groups that are not there at every K ({', '.join(map(str, sorted(steps)))})", partial)
    if not keys:
        raise AnalysisError("expected groups that are there at every K, got none - give one K with --k, or write all of them")
    ordered = {k: [rows[key] for key in keys] for k, rows in sorted(steps.items())}
    _check_lasting(ordered)
    first = next(iter(ordered.values()))
    sizes = Counter(len(row.lengths) for row in first if row.lengths is not None)
    if len(sizes) > 1:
        raise AnalysisError(f"lengths: expected groups of one size, got sizes {sorted(sizes)} - analyse groups of each size apart")
    return Recorded(
        keys=tuple(keys),
        steps={k: _groups(rows, k, horizon) for k, rows in ordered.items()},
        is_running={k: np.array([_is_running(row, k) for row in rows], dtype=np.bool_) for k, rows in ordered.items()},
        outcomes=tuple(row.outcome for row in first),
        horizon=horizon,
        group_size=next(iter(sizes), None),
        notes=left_out.lines,
    )


def _is_running(row: _Row, k: int) -> bool:
    """Whether a member goes on beyond K, as far as is known."""
    return max(row.lengths) > k if row.lengths else row.signals.get("termination_fraction", 0.0) < 1


def _groups(rows: Sequence[_Row], k: int, horizon: int) -> RecordedGroups:
    names = [name for name in SIGNALS if all(name in row.signals for row in rows)]
    if not names:
        raise AnalysisError(f"signals: expected one that every group has at K = {k}, got none - leave the groups without one out")
    return RecordedGroups(
        signals={name: np.array([row.signals[name] for row in rows]) for name in names},
        zero_variance=np.array([row.zero_variance for row in rows], dtype=np.bool_),
        k=k,
        horizon=horizon,
        reward_var=None if any(row.reward_var is None for row in rows) else np.array([row.reward_var for row in rows], dtype=np.float64),
        lengths=None if any(row.lengths is None for row in rows) else np.array([row.lengths for row in rows], dtype=np.int64),
        task_types=[row.task_type for row in rows] if any(row.task_type for row in rows) else None,
    )


def _read(
    table: Table,
    steps: dict[int, dict[str, _Row]],
    sources: dict[str, Table],
    ks: Sequence[int] | None,
    is_id_per_file: bool,
    left_out: LeftOut,
) -> None:
    if not table.find(*SIGNALS):
        table.need(*SIGNALS, why="a signal at K")
    if not table.find("zero_variance", "reward_var"):
        table.need("reward_var", "zero_variance", why="whether a group had equal rewards")
    k_column = table.find("K", "k")
    given_k = ks[0] if ks is not None and len(ks) == 1 else None
    if k_column is None and given_k is None:
        table.need("K", why="the environment step of the signals; or give one --k")
    by, run_column = table.find(*GROUP), table.find("run")
    for row in range(len(table)):
        k = table.whole(k_column, row, least=1) if k_column else given_k
        if k is None:
            assert k_column is not None
            table.refuse(row, k_column, "an environment step", None, "fill it in")
        if ks is not None and k not in ks:
            continue
        name = table.text(by, row) if by else f"{table.unit} {table.lines[row]:09}"
        if name is None:
            assert by is not None
            table.refuse(row, by, "the name of a group", None, "fill it in")
        parts = [str(table.path)] if is_id_per_file else []
        parts += [table.text(run_column, row) or ""] if run_column else []
        key = "/".join([*parts, name])
        if sources.setdefault(key, table) is not table:
            raise AnalysisError(
                f"{table.where(row)}, column {by or 'K'}: expected ids that are unique over all files, got group {name} also in "
                f"{sources[key].path} - if they are different groups give --ids-per-file or a column run, else drop one"
            )
        one = _row(table, row)
        first = steps.setdefault(k, {}).setdefault(key, one)
        if first is one:
            continue
        if first.said != one.said:
            raise AnalysisError(
                f"{one.place}: expected group {name} once at K = {k}, got it again, and different from {first.place} - give every group a "
                "name of its own"
            )
        left_out.add("duplicated rows")
    if by is None and len(steps) > 1:
        table.need(*GROUP, why="which rows are of one group, where there are several K")


def _row(table: Table, row: int) -> _Row:
    signals = {}
    for name in SIGNALS:
        value = table.number(name, row) if name in table.columns else None
        if value is not None:
            if not 0 <= value <= 1:
                table.refuse(row, name, "a number >= 0 and <= 1", value, "every signal lies between 0 and 1: correct it")
            signals[name] = value
    variance = table.number("reward_var", row) if "reward_var" in table.columns else None
    if variance is not None and variance < 0:
        table.refuse(row, "reward_var", "a variance >= 0", variance, "correct it")
    zero = table.truth("zero_variance", row) if "zero_variance" in table.columns else None
    if zero is None and variance is None:
        table.refuse(row, "reward_var", "a number", None, "leave this group out: without an outcome no cut can be judged")
    is_zero = variance == 0 if zero is None else zero
    if variance is not None and (variance == 0) != is_zero:
        table.refuse(row, "reward_var", "0 exactly where zero_variance is true", variance, "correct one of the two")
    label = table.text("label", row) if "label" in table.columns else None
    return _Row(
        place=table.where(row),
        signals=signals,
        zero_variance=is_zero,
        reward_var=variance,
        lengths=_lengths(table, row),
        task_type=table.text("task_type", row) if "task_type" in table.columns else None,
        outcome=_OUTCOMES.get(label or "", "all equal" if is_zero else "mixed"),
    )


def _lengths(table: Table, row: int) -> tuple[int, ...] | None:
    values = table.sequence("lengths", row) if "lengths" in table.columns else None
    if values is None:
        return None
    if len(values) < 2:
        table.refuse(row, "lengths", "one entry for each of at least two members", values, "leave the group out, or the cell empty")
    for value in values:
        is_number = is_finite_number(value)
        if not is_number or value < 0 or value != int(value):
            table.refuse(row, "lengths", "whole numbers >= 0", value, "count the environment steps of each member")
    return tuple(int(value) for value in values)


def _check_horizon(steps: Mapping[int, Mapping[str, _Row]], horizon: int) -> None:
    for k, rows in sorted(steps.items(), reverse=True):
        for row in rows.values():
            if k >= horizon:
                raise AnalysisError(
                    f"{row.place}: expected K below the horizon {horizon}, got {k} - nothing is left to save there: raise --horizon, or "
                    "choose smaller ones with --k"
                )
            if max(row.lengths or (0,)) > horizon:
                raise AnalysisError(
                    f"{row.place}, column lengths: expected at most the horizon {horizon}, got {row.lengths} - raise --horizon"
                )


def _check_lasting(ordered: Mapping[int, Sequence[_Row]]) -> None:
    (_, first), *others = ordered.items()
    for k, rows in others:
        for one, other in zip(first, rows, strict=True):
            if one.lasting != other.lasting:
                raise AnalysisError(
                    f"{other.place}: expected the outcome, lengths and task type of this group as at the other K ({one.place}), got "
                    f"others at K = {k} - how a group ended does not depend on K: correct it"
                )
