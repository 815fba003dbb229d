"""Reads the recorded rollouts of runs (`sluice train --record`) as trajectories: only the columns that the gate looks at.

A group that the gate cut is left out: its rewards are those of stopped trajectories, and say nothing of how it would have ended. What
remains of such a run is no plain sample of its groups, which is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sluice.analysis.collecting import GroupRows, LeftOut, MemberRow
from sluice.analysis.tables import load_pyarrow
from sluice.analysis.trajectories import Member
from sluice.errors import AnalysisError, RecordError
from sluice.records.rollout_reader import FOLDER
from sluice.records.rollouts import load_parts
from sluice.records.rundb import open_for_reading

CUT: Final = "cut"
"""`outcome` of a group that the gate cut."""

RUN_DB: Final = "run.db"

STOPPED: Final = "stopped_futile"
"""`finish_reason` of a trajectory that a futility stop ended."""

_COLUMNS: Final = (
    *("group_id", "member_index", "attempt_id", "is_in_group", "is_counted", "outcome", "reward", "task_type", "finish_reason"),
    *("actions", "observations"),
)


def run_parts(path: Path) -> list[Path]:
    """The part files of a run folder, of the folder of its parts, or the one part that this is; empty: it is nothing of a run."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" and _is_part(path) else []
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    try:
        return [part for _, part in load_parts().part_files(folder)]
    except OSError as error:
        raise AnalysisError(f"{path}: expected a file or a run folder, got: {error.strerror or error} - check the path") from error


def read_run(path: Path, parts: list[Path], left_out: LeftOut) -> tuple[dict[str, GroupRows], Mapping[str, Any]]:
    """The groups of one run by their key, and the facts about it (`identity`, `group_size`, ...).

    Raises:
        AnalysisError: a part is damaged, of another run, or holds a group that came before, or nothing was done in an environment.
    """
    groups: dict[str, GroupRows] = {}
    facts: Mapping[str, Any] = {}
    known: set[int] = set()  # group ids of earlier parts
    cut: set[int] = set()  # those that the gate had cut
    try:
        for part in parts:
            file, of_part = load_parts().open_part(part)
            with file:
                if facts and of_part.get("identity") != facts.get("identity"):
                    raise AnalysisError(
                        f"{part}: expected the run {facts.get('identity')}, as in {parts[0]}, got {of_part.get('identity')} - keep the "
                        "parts of each run in a folder of their own"
                    )
                facts = facts or of_part
                with load_parts().reading(part):
                    columns = {
                        name: column.to_pylist() for name, column in zip(_COLUMNS, file.read([*_COLUMNS]).select(_COLUMNS), strict=True)
                    }
            ids, cut_here = _add(groups, known, columns, part, facts, left_out)
            known |= ids
            cut |= cut_here
    except RecordError as error:
        raise AnalysisError(str(error)) from error
    if number := max(len(cut), _cut_in_database(path)):
        left_out.add("groups that the gate had cut: the others are no plain sample of the run, so record with gate.shadow: true", number)
    if groups and not any(row.member.actions for group in groups.values() for row in group.rows):
        raise AnalysisError(f"{path}: expected trajectories with environment steps, got a run without any - the gate is for agentic runs")
    return groups, facts


def _add(
    groups: dict[str, GroupRows], known: set[int], columns: Mapping[str, Any], part: Path, facts: Mapping[str, Any], left_out: LeftOut
) -> tuple[set[int], set[int]]:
    """Put the rows of one part to their groups; the group ids in it, and those that the gate had cut."""
    ids: set[int] = set()
    cut: set[int] = set()
    for number, row in enumerate(zip(*(columns[name] for name in _COLUMNS), strict=True), 1):
        one = dict(zip(_COLUMNS, row, strict=True))
        group_id = one["group_id"]
        if group_id in known:
            raise AnalysisError(f"{part}: expected groups that no other part holds, got group {group_id} again - take the copy out")
        ids.add(group_id)
        if not one["is_in_group"]:
            left_out.add("members that were taken out of their group before it was judged")
            continue
        if one["outcome"] == CUT:
            cut.add(group_id)
            continue
        if one["finish_reason"] == STOPPED:
            left_out.add_note("members that a futility stop had ended: they count with what they had earned by then")
        key = f"{facts.get('identity')}/{group_id:09}"
        group = groups.setdefault(key, GroupRows(source=str(part), task_type=one["task_type"]))
        # What was read from a turn that the environment never answered is no step.
        actions = [action for action in one["actions"] if action is not None]
        group.rows.append(
            MemberRow(
                place=f"{part}, row {number}",
                name=str(one["member_index"]),
                member=Member(
                    actions=actions,
                    observations=one["observations"][: len(actions)],
                    reward=one["reward"] if one["is_counted"] else None,
                ),
                has_reward=one["reward"] is not None,
            )
        )
    return ids, cut


def _cut_in_database(path: Path) -> int:
    """How many groups the gate had cut, as run.db has it: of those cut before a member had ended there are no rows. 0: nobody says."""
    try:
        with open_for_reading(path / RUN_DB) as db:
            return int(db.execute("SELECT count(*) FROM groups WHERE outcome = ?", (CUT,)).fetchone()[0])
    except RecordError:
        return 0


def _is_part(path: Path) -> bool:
    """Whether a Parquet file is a part of a run, and not another program's."""
    parquet = load_pyarrow("pyarrow.parquet")
    try:
        return load_parts().FACTS_KEY in (parquet.read_schema(path).metadata or {})
    except (load_pyarrow("pyarrow").ArrowException, OSError, EOFError):
        return False  # whoever reads it as a table says what is wrong
