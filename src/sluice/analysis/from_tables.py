"""Reads tables of action sequences: one row per trajectory, in CSV, JSONL or Parquet.

group       which group it belongs to (also `group_id`, `task_id`)
actions     a list, or JSON that is one: one entry per environment step, all of one type
reward      what it earned; empty: nobody knows
member      optional: its name within the group (also `member_index`)
observations  optional: what it saw before each action, a list like `actions`
task_type   optional
run         optional: tells groups of one id apart
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from sluice.analysis.collecting import GroupRows, LeftOut, MemberRow
from sluice.analysis.tables import Table
from sluice.analysis.trajectories import Member
from sluice.errors import AnalysisError

GROUP: Final = ("group", "group_id", "task_id")
"""Names of the column that names the group, the first that is there."""


def read_trajectories(tables: Sequence[Table], ids_per_file: bool, left_out: LeftOut) -> dict[str, GroupRows]:
    """The groups of some files by their key. `ids_per_file`: groups of one id in different files are different groups.

    Raises:
        AnalysisError: a column is missing, a cell is not what it should be, or one id stands in several files.
    """
    groups: dict[str, GroupRows] = {}
    for table in tables:
        _read(table, groups, ids_per_file and len(tables) > 1, left_out)
    return groups


def _read(table: Table, groups: dict[str, GroupRows], is_id_per_file: bool, left_out: LeftOut) -> None:
    by = table.need(*GROUP, why="which group a trajectory belongs to")
    action_column = table.need("actions", why="a list of actions per trajectory")
    reward_column = table.need("reward", why="what each trajectory earned")
    name_column, type_column, run_column = table.find("member", "member_index"), table.find("task_type"), table.find("run")
    seen_column = table.find("observations")
    kinds: dict[type, int] = {}  # of actions, and the row in which each came first
    for row in range(len(table)):
        group_name = table.text(by, row)
        if group_name is None:
            table.refuse(row, by, "the name of a group", None, "fill it in")
        actions = table.sequence(action_column, row)
        if actions is None:
            left_out.add("rows without actions")
            continue
        reward = table.number(reward_column, row)
        observations = _observations(table, seen_column, row, len(actions))
        parts = [str(table.path)] if is_id_per_file else []
        parts += [table.text(run_column, row) or ""] if run_column else []
        key = "/".join([*parts, group_name])
        group = groups.setdefault(key, GroupRows(source=str(table.path), task_type=table.text(type_column, row) if type_column else None))
        if group.source != str(table.path):
            raise AnalysisError(
                f"{table.where(row)}, column {by}: expected ids that are unique over all files, got group {group_name} also in "
                f"{group.source} - if they are different groups give --ids-per-file or a column run; if it is one group, put its "
                "rows into one file"
            )
        if type_column and table.text(type_column, row) != group.task_type:
            table.refuse(
                row,
                type_column,
                f"{group.task_type!r} as in the other rows of group {group_name}",
                table.text(type_column, row),
                "correct it",
            )
        group.rows.append(
            MemberRow(
                place=table.where(row),
                name=table.text(name_column, row) if name_column else None,
                member=Member(
                    actions=_values(table, action_column, row, actions, kinds),
                    observations=observations,
                    reward=reward,
                ),
                has_reward=reward is not None,
            )
        )


def _observations(table: Table, column: str | None, row: int, steps: int) -> Sequence[Hashable] | None:
    seen = table.sequence(column, row) if column else None
    if column is None or seen is None:
        return None
    if len(seen) < steps:
        table.refuse(
            row,
            column,
            f"at least {steps} entries, one before each action",
            f"{len(seen)}",
            "give the first observation too, or none at all",
        )
    return _values(table, column, row, seen[:steps], None)


def _values(table: Table, column: str, row: int, values: list[Any], kinds: dict[type, int] | None) -> Sequence[Hashable]:
    """Checked entries; `kinds`: of the rows before, to be held against."""
    for value in values:
        kind = type(value)
        if value is None or value != value:  # noqa: PLR0124 - NaN
            table.refuse(row, column, "a value for every step", value, "give an entry that could not be read a text of its own")
        if kind not in (str, int, float, bool):
            table.refuse(row, column, "texts or numbers", value, "write each entry as one text")
        if kinds is not None and kind not in kinds:
            if kinds:
                (other, first), *_ = kinds.items()
                table.refuse(
                    row,
                    column,
                    f"actions of one type, {other.__name__} as in {table.unit} {table.lines[first]}",
                    value,
                    "write all as text",
                )
            kinds[kind] = row
    return values
