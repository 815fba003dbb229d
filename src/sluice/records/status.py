"""How a run is doing, or how it was doing when it died: read from its run.db at any time, and the lines that tell it to a person.

A process that is killed has no time to write down that it was. So a run counts as killed when it says "running" and nobody holds the lock
of its folder, or, where the system does not tell of locks, when its heartbeat stopped. What it was doing then is in the last snapshot of
its scheduler, which is written about once a second.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sluice.records.checkpoints import complete_steps
from sluice.records.gate_lines import gate_line, gate_of, newest_gate
from sluice.records.run_folder import RunFolder
from sluice.records.rundb import SCHEDULER, facts_in, open_for_reading
from sluice.records.summary import MAX_STEPS, clock_time, count_row, seconds_until
from sluice.types import Category

State = Literal["running", "finished", "stopped", "failed", "killed"]

SILENT_AFTER_S = 30.0  # without a sign of life: six heartbeats
_LAST_EVENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Groups that were judged, or waited, in vain for the same reason."""

    category: Category | Literal["expired"]
    reason: str
    groups: int
    rate: float  # of all groups that left


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestGroup:
    """The group that has been under way for longest."""

    group_id: int
    task_id: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A warning or an error."""

    time: float  # wall-clock seconds
    step: int | None  # None: of no step
    level: str  # "warning" or "error"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatusReport:
    """How a run is doing. Ages are those of `as_of`."""

    folder: Path
    state: State
    as_of: float  # wall-clock seconds: now while it runs, else when it ended or gave its last sign of life
    silent_s: float  # since its last sign of life
    seconds: float  # how long it had gone on, without the time it lay dead
    step: int  # optimiser steps done
    max_steps: int | None  # None: the run did not say
    acceptance_rate: float | None  # kept / judged groups; None: nothing was judged yet
    groups_left: int  # groups that were launched and have left
    rejections: tuple[Rejection, ...]  # most frequent first
    troubles: tuple[Trouble, ...]  # the last ones, latest first
    checkpoints: tuple[int, ...]  # steps that the run can be resumed from
    # From the scheduler's snapshot. None: the run has ended, or died before the first one, or there is no such thing just now.
    snapshot_age_s: float | None
    policy_version: int | None
    wanted: int | None  # groups of the batch that is waited for
    kept: int | None  # of these, groups that are there
    committed: int | None  # accepted groups that wait for a batch
    held_by_guard: int | None  # groups that wait until the guard lets them be dropped
    running_groups: int | None
    running_attempts: int | None
    waiting_for: str | None
    waiting_s: float | None  # for how long
    oldest_group: OldestGroup | None
    quarantined: int | None  # prompts that are not drawn any more
    gate: Mapping[str, float] | None  # its metrics without `gate/`

    @property
    def can_be_resumed(self) -> bool:
        """Whether it ended before its time; after the last step as well: the trained model may not be saved yet."""
        return self.state in ("killed", "stopped", "failed")


def read_status(run_db: Path, now: float) -> RunStatusReport:
    """Look at a run: all figures are of one moment. `now` is in wall-clock seconds.

    Raises:
        RecordError: the file is missing, not ours, or of another schema version.
    """
    with open_for_reading(run_db) as db:
        facts = facts_in(db)
        (step, groups_left) = db.execute("SELECT (SELECT coalesce(max(step), 0) FROM batches), (SELECT count(*) FROM groups)").fetchone()
        dropped = db.execute(
            "SELECT coalesce(category, outcome), reason, count(*) AS n FROM groups "
            "WHERE category IS NOT NULL OR outcome = 'expired' GROUP BY 1, 2 ORDER BY n DESC, 1, 2"
        ).fetchall()
        accepted = db.execute("SELECT value FROM metrics WHERE name = 'scheduler/acceptance_rate' ORDER BY rowid DESC LIMIT 1").fetchone()
        gate = newest_gate(db) if facts["status"] != "running" else {}  # while it runs the snapshot has it
        troubles = db.execute(
            f"SELECT time, step, level, message FROM events WHERE level != 'info' ORDER BY rowid DESC LIMIT {_LAST_EVENTS}"
        ).fetchall()
    snapshot = _snapshot(facts)
    alive_at = max(facts["heartbeat"], snapshot.get("time", 0.0))
    silent_s = max(0.0, now - alive_at)
    folder = RunFolder(run_db.parent)
    state = _state(facts["status"], folder, silent_s)
    as_of = now if state == "running" else alive_at
    if state not in ("running", "killed"):
        snapshot = {}
    aged_s = max(0.0, as_of - snapshot["time"]) if snapshot else 0.0
    rates = (_number(snapshot.get("acceptance_rate")), _number(accepted[0]) if accepted else None)
    return RunStatusReport(
        folder=folder.path,
        state=state,
        as_of=as_of,
        silent_s=silent_s,
        seconds=seconds_until(as_of, facts),
        step=max(step, _count(snapshot.get("step")) or 0),
        max_steps=facts.get(MAX_STEPS),
        acceptance_rate=next((rate for rate in rates if rate is not None), None),
        groups_left=groups_left,
        rejections=tuple(Rejection(category=c, reason=reason, groups=n, rate=n / groups_left) for c, reason, n in dropped),
        troubles=tuple(Trouble(time=time, step=at, level=level, message=message) for time, at, level, message in troubles),
        checkpoints=tuple(complete_steps(folder.checkpoints)),
        snapshot_age_s=aged_s if snapshot else None,
        policy_version=_count(snapshot.get("policy_version")),
        wanted=_count(snapshot.get("wanted")),
        kept=_count(snapshot.get("kept")),
        committed=_count(snapshot.get("committed")),
        held_by_guard=_count(snapshot.get("held_by_guard")),
        running_groups=_count(snapshot.get("running_groups")),
        running_attempts=_count(snapshot.get("running_attempts")),
        waiting_for=snapshot.get("waiting_for") or None,
        waiting_s=_aged(snapshot.get("waiting_since_s"), aged_s),
        oldest_group=_oldest(snapshot.get("oldest_group"), aged_s),
        quarantined=_count(snapshot.get("quarantined")),
        gate=gate_of(snapshot.get("gate")) if snapshot else gate or None,
    )


def _snapshot(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the scheduler said last; empty when it said nothing yet."""
    snapshot = facts.get(SCHEDULER)
    return snapshot if isinstance(snapshot, dict) and _number(snapshot.get("time")) is not None else {}


def _state(status: str, folder: RunFolder, silent_s: float) -> State:
    if status != "running":
        return status  # type: ignore[return-value]  # what `Journal.close` was given
    is_locked = folder.is_locked()
    is_alive = silent_s <= SILENT_AFTER_S if is_locked is None else is_locked
    return "running" if is_alive else "killed"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _aged(age_s: Any, by_s: float) -> float | None:
    number = _number(age_s)
    return None if number is None else number + by_s


def _oldest(group: Any, aged_s: float) -> OldestGroup | None:
    if not isinstance(group, dict) or (age_s := _aged(group.get("age_s"), aged_s)) is None:
        return None
    return OldestGroup(group_id=group["group_id"], task_id=group["task_id"], age_s=age_s)


# ---------------------------------------------------------------- for a terminal

_LABEL = 16  # columns of what a line is about


def status_lines(report: RunStatusReport) -> list[str]:
    """The report for a person: lines without a newline and without control characters."""
    parts = (_headline(report), _doing(report), _rejection_lines(report), _trouble_lines(report), _resume_lines(report))
    lines: list[str] = []
    for part in parts:
        lines += [*([""] if lines and part else []), *part]
    return lines


def _headline(r: RunStatusReport) -> list[str]:
    of = f" of {r.max_steps:,}" if r.max_steps is not None else ""
    lines = [f"Run {_plain(r.folder.name)}: {r.state}, {r.step:,}{of} steps done in {clock_time(r.seconds)}"]
    if r.state == "killed":
        lines.append(f"  its process gave its last sign of life {clock_time(r.silent_s)} ago and wrote down no end")
    elif r.state != "running":
        lines.append(f"  ended {clock_time(r.silent_s)} ago")
    elif r.silent_s > SILENT_AFTER_S:
        lines.append(f"  no sign of life for {clock_time(r.silent_s)}, but its process is there: stopped, or waiting for a disk")
    elif r.snapshot_age_s is not None and r.snapshot_age_s > SILENT_AFTER_S:
        lines.append(f"  its scheduler has told nothing for {clock_time(r.snapshot_age_s)}: its event loop is busy or stuck")
    return lines


def _doing(r: RunStatusReport) -> list[str]:
    rows = [] if r.snapshot_age_s is None else _snapshot_rows(r)
    if r.gate is not None:
        rows.append(("gate", gate_line(r.gate)))
    if r.acceptance_rate is not None:
        rows.append(("accepted", f"{r.acceptance_rate:.0%} of the judged groups"))
    title = {"running": "Now", "killed": "At the time of its death"}.get(r.state, "At its end")
    lines = [f"  {label:<{_LABEL}}{text}" for label, text in rows]
    if r.state in ("running", "killed") and r.snapshot_age_s is None:
        lines.insert(0, f"  its scheduler {'has' if r.state == 'running' else 'had'} told nothing yet")
    return [title, *lines] if lines else []


def _snapshot_rows(r: RunStatusReport) -> list[tuple[str, str]]:
    rows = []
    if r.wanted:
        rows.append(("batch", f"{r.kept or 0:,} of {r.wanted:,} groups are there"))
    if r.waiting_for is None:
        rows.append(("waiting", "for no group: the trainer or an evaluation is at work"))
    else:
        since = "" if r.waiting_s is None else f"{clock_time(r.waiting_s)} "
        rows.append(("waiting", f"{since}for {_plain(r.waiting_for)}"))
    in_flight = [(r.running_groups, "group"), (r.running_attempts, "attempt")]
    counts = [_counted(count, word) for count, word in in_flight if count is not None]
    counts += [f"{_counted(r.committed, 'accepted group')} waiting"] if r.committed else []
    counts += [f"{_counted(r.held_by_guard, 'group')} held by the guard"] if r.held_by_guard else []
    if counts:
        rows.append(("in flight", ", ".join(counts)))
    if (oldest := r.oldest_group) is not None:
        rows.append(("oldest group", f"{clock_time(oldest.age_s)} old: group {oldest.group_id} of task {_plain(oldest.task_id)}"))
    if r.policy_version is not None:
        rows.append(("policy version", str(r.policy_version)))
    if r.quarantined:
        rows.append(("quarantined", _counted(r.quarantined, "prompt")))
    return rows


def _rejection_lines(r: RunStatusReport) -> list[str]:
    if not r.groups_left:
        return []
    rejected = [count_row(f"  {entry.category}/{_plain(entry.reason)}", entry.groups, r.groups_left) for entry in r.rejections]
    return [count_row("Groups that have left", r.groups_left), *(rejected or ["  none was rejected"])]


def _trouble_lines(r: RunStatusReport) -> list[str]:
    if not r.troubles:
        return []
    lines = ["Last warnings"]
    before = {"running": "ago", "killed": "before its death"}.get(r.state, "before its end")
    for trouble in r.troubles:
        at = "" if trouble.step is None else f", step {trouble.step}"
        lines.append(f"  {clock_time(r.as_of - trouble.time)} {before}{at}: {trouble.level}: {_plain(trouble.message)}")
    return lines


def _resume_lines(r: RunStatusReport) -> list[str]:
    steps = ", ".join(f"{step:,}" for step in r.checkpoints)
    lines = [f"{'Checkpoints':<{_LABEL + 2}}{f'after step {steps}' if steps else 'none'}"]
    if r.can_be_resumed:
        note = "" if steps else "   (from its beginning)"
        lines.append(f"{'To go on':<{_LABEL + 2}}sluice train --resume {shlex.quote(str(r.folder))}{note}")
    return lines


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count != 1 else ''}"


def _plain(text: str) -> str:
    """One line that does nothing to a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
