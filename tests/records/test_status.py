"""What a run is doing can be read while it goes on, after its end and after its death, and says in which of these it is."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import RecordError
from sluice.records import MAX_STEPS, SCHEDULER, BatchRecord, Checkpoints, Journal, RunFolder, RunStatusReport, read_status, status_lines
from sluice.records.rundb import _json, create_run_db
from sluice.records.status import Trouble
from sluice.scheduler.events import GroupRecord

MakeRecord = Callable[..., GroupRecord]

BEGUN = 1_000_000.0

SNAPSHOT: dict[str, Any] = {
    "time": BEGUN + 95.0,
    "step": 2,
    "policy_version": 2,
    "wanted": 8,
    "kept": 3,
    "running_groups": 5,
    "running_attempts": 1_038,
    "committed": 1,
    "held_by_guard": 0,
    "draws": 14,
    "waiting_for": "1038 members of 5 groups",
    "waiting_since_s": 12.0,
    "acceptance_rate": 0.625,
    "oldest_group": {"group_id": 112, "task_id": "add\x1b[2J-12", "age_s": 45.0},
    "rejected": {"low_information/no_spread": 2},
    "quarantined": 2,
}


@pytest.fixture
def journal(folder: RunFolder, record: MakeRecord) -> Iterator[Journal]:
    """A run that goes on: 2 of 20 steps are done after 98 s."""
    folder.run_db.unlink()
    create_run_db(folder.run_db, {"created": BEGUN, MAX_STEPS: 20})
    made = Journal(folder.run_db, clock=lambda: BEGUN + 98.0, flush_every_s=3600.0)
    made._db.execute("UPDATE run SET value = '0.0' WHERE key = 'seconds_away'")  # the file was made just now, not at BEGUN
    for i in range(5):
        made.group(record(i))
    for i in range(5, 7):
        made.group(record(i, outcome="dropped", reason="no_spread", category="low_information"))
    made.group(record(7, outcome="dropped", reason="reward_timeout", category="invalid"))
    made.group(record(8, outcome="expired", reason="stale"))
    made.group(record(9, outcome="cancelled", reason="batch_full"))
    for step in (1, 2):
        made.batch(BatchRecord(step=step, requested=2, group_ids=(1, 2), tokens=20, useful_groups=1, useful_tokens=9, fill_s=0.5))
        made.metrics(step, {"scheduler/acceptance_rate": step / 4, "a/b": 1.0})
    for text in ("first", "second", "third\n  and\x07 last", "fourth"):
        made.event("warning", text, step=None if text == "second" else 1)
    made.event("info", "resumed from step 1", step=1)
    yield made
    made.close("failed")


@pytest.fixture
def told(journal: Journal) -> Journal:
    """The same, with a snapshot of its scheduler."""
    journal.fact(SCHEDULER, SNAPSHOT)
    journal.flush()
    return journal


def lines_of(report: RunStatusReport) -> list[str]:
    return [line.replace(str(report.folder), "RUN").replace(report.folder.name, "NAME") for line in status_lines(report)]


# ---------------------------------------------------------------- what a person reads


def test_a_run_that_goes_on_tells_what_it_does_now(folder: RunFolder, told: Journal) -> None:
    assert lines_of(read_status(folder.run_db, BEGUN + 100.0)) == [
        "Run NAME: running, 2 of 20 steps done in 1:40",
        "",
        "Now",
        "  batch           3 of 8 groups are there",
        "  waiting         0:17 for 1038 members of 5 groups",
        "  in flight       5 groups, 1,038 attempts, 1 accepted group waiting",
        "  oldest group    0:50 old: group 112 of task add [2J-12",
        "  policy version  2",
        "  quarantined     2 prompts",
        "  accepted        62% of the judged groups",
        "",
        "Groups that have left                   10",
        "  low_information/no_spread              2   20.0%",
        "  expired/stale                          1   10.0%",
        "  invalid/reward_timeout                 1   10.0%",
        "",
        "Last warnings",
        "  0:02 ago, step 1: warning: fourth",
        "  0:02 ago, step 1: warning: third and last",
        "  0:02 ago: warning: second",
        "",
        "Checkpoints       none",
    ]


def test_a_killed_run_tells_what_it_did_at_its_death_and_how_to_go_on(folder: RunFolder, told: Journal) -> None:
    folder.release()
    for step in (1, 2):
        Checkpoints(folder.checkpoints, folder.identity, 2).write_state(step, {})
    (folder.checkpoints / "checkpoint-3").mkdir()  # the trainer was writing it
    assert lines_of(read_status(folder.run_db, BEGUN + 98.0 + 3_600.0)) == [
        "Run NAME: killed, 2 of 20 steps done in 1:38",
        "  its process gave its last sign of life 1:00:00 ago and wrote down no end",
        "",
        "At the time of its death",
        "  batch           3 of 8 groups are there",
        "  waiting         0:15 for 1038 members of 5 groups",
        "  in flight       5 groups, 1,038 attempts, 1 accepted group waiting",
        "  oldest group    0:48 old: group 112 of task add [2J-12",
        "  policy version  2",
        "  quarantined     2 prompts",
        "  accepted        62% of the judged groups",
        "",
        "Groups that have left                   10",
        "  low_information/no_spread              2   20.0%",
        "  expired/stale                          1   10.0%",
        "  invalid/reward_timeout                 1   10.0%",
        "",
        "Last warnings",
        "  0:00 before its death, step 1: warning: fourth",
        "  0:00 before its death, step 1: warning: third and last",
        "  0:00 before its death: warning: second",
        "",
        "Checkpoints       after step 1, 2",
        "To go on          sluice train --resume RUN",
    ]


def test_a_run_killed_before_its_scheduler_told_anything_has_a_status(folder: RunFolder, journal: Journal) -> None:
    journal.flush()
    running = lines_of(read_status(folder.run_db, BEGUN + 98.0))
    assert running[2:5] == ["Now", "  its scheduler has told nothing yet", "  accepted        50% of the judged groups"]
    folder.release()
    killed = lines_of(read_status(folder.run_db, BEGUN + 98.0))
    assert killed[3:6] == [
        "At the time of its death",
        "  its scheduler had told nothing yet",
        "  accepted        50% of the judged groups",
    ]
    assert killed[-1] == "To go on          sluice train --resume RUN   (from its beginning)"
    assert "  low_information/no_spread              2   20.0%" in killed


def test_a_run_that_was_only_made_has_a_status(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x", 0, "")
    assert lines_of(read_status(folder.run_db, 0.0)) == [
        "Run NAME: running, 0 steps done in 0:00",
        "",
        "Now",
        "  its scheduler has told nothing yet",
        "",
        "Checkpoints       none",
    ]
    folder.release()


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_ended_tells_of_nothing_in_flight(folder: RunFolder, told: Journal, status: Any) -> None:
    told.event("error", "ResampleError: nothing kept")
    told.close(status)
    folder.release()
    report = read_status(folder.run_db, BEGUN + 98.0 + 60.0)
    lines = lines_of(report)
    assert lines[:5] == [
        f"Run NAME: {status}, 2 of 20 steps done in 1:38",
        "  ended 1:00 ago",
        "",
        "At its end",
        "  accepted        50% of the judged groups",
    ]
    assert "  0:00 before its end: error: ResampleError: nothing kept" in lines
    assert (report.running_groups, report.waiting_for, report.oldest_group, report.snapshot_age_s) == (None, None, None, None)
    assert report.can_be_resumed == (status != "finished") == any("--resume" in line for line in lines)


def test_a_path_with_blanks_can_be_pasted(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "my runs", "x", 0, "")
    folder.release()
    assert status_lines(read_status(folder.run_db, 0.0))[-1].startswith(f"To go on          sluice train --resume '{folder.path}'")


# ---------------------------------------------------------------- alive or dead


def test_who_holds_the_lock_lives_even_when_it_gives_no_sign_of_life(folder: RunFolder, told: Journal) -> None:
    report = read_status(folder.run_db, BEGUN + 98.0 + 120.0)
    assert report.state == "running"
    assert lines_of(report)[1] == "  no sign of life for 2:00, but its process is there: stopped, or waiting for a disk"


def test_a_heartbeat_without_news_of_the_scheduler_is_said(folder: RunFolder, journal: Journal) -> None:
    journal.fact(SCHEDULER, {**SNAPSHOT, "time": BEGUN + 50.0})
    journal.flush()
    report = read_status(folder.run_db, BEGUN + 100.0)
    assert lines_of(report)[1] == "  its scheduler has told nothing for 0:50: its event loop is busy or stuck"
    assert report.waiting_s == 62.0


def test_where_the_system_does_not_tell_of_locks_the_heartbeat_decides(
    folder: RunFolder, told: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError

    folder.release()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert read_status(folder.run_db, BEGUN + 98.0 + 30.0).state == "running"
    assert read_status(folder.run_db, BEGUN + 98.0 + 30.1).state == "killed"


LIVE = """
import sys, time
from sluice.records import SCHEDULER, Journal, RunFolder
with RunFolder.open(sys.argv[1]) as folder:
    journal = Journal(folder.run_db)
    journal.fact(SCHEDULER, {"time": time.time(), "step": 0, "running_groups": 3, "waiting_for": "the first batch", "waiting_since_s": 0.5})
    journal.flush()
    print("told", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_running_until_its_process_is_killed(folder: RunFolder) -> None:
    folder.release()
    run = subprocess.Popen([sys.executable, "-c", LIVE, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "told\n"
    now = RunFolder.open(folder.path).run_db.stat().st_mtime
    alive = read_status(folder.run_db, now)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=30)
    dead = read_status(folder.run_db, now)
    assert (alive.state, dead.state) == ("running", "killed")
    assert (alive.running_groups, dead.running_groups) == (3, 3)
    assert (alive.waiting_for, dead.waiting_for) == ("the first batch", "the first batch")
    assert dead.can_be_resumed


# ---------------------------------------------------------------- whatever was told

numbers = st.none() | st.integers(0, 2**60) | st.floats()
changed = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("step", "wanted", "kept", "running_groups", "committed", "quarantined"), st.none() | st.integers(0, 10**9)),
        **dict.fromkeys(("time", "waiting_since_s", "acceptance_rate"), numbers),
        "waiting_for": st.none() | st.text(),
        "oldest_group": st.none() | st.fixed_dictionaries({"group_id": st.integers(0), "task_id": st.text(), "age_s": numbers}),
    },
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.db"
    create_run_db(path, {})
    return path


@given(changes=changed, text=st.text(), now=st.floats(0, 4e9))
def test_no_value_of_a_snapshot_and_no_text_breaks_the_status(run: Path, changes: dict[str, Any], text: str, now: float) -> None:
    with closing(sqlite3.connect(run)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (SCHEDULER, _json({**SNAPSHOT, **changes})))
        db.commit()
    report = read_status(run, now)
    noisy = replace(report, troubles=(Trouble(time=0.0, step=None, level="warning", message=text),))
    for line in status_lines(noisy):
        assert line.isprintable()
    for field in fields(RunStatusReport):
        value = getattr(report, field.name)
        assert not isinstance(value, float) or math.isfinite(value)


def test_while_no_batch_is_wanted_it_is_said_who_is_at_work(folder: RunFolder, journal: Journal) -> None:
    journal.fact(SCHEDULER, {**SNAPSHOT, "waiting_for": "", "waiting_since_s": None, "wanted": None, "kept": None, "held_by_guard": 4})
    journal.flush()
    lines = lines_of(read_status(folder.run_db, BEGUN + 98.0))
    assert lines[3] == "  waiting         for no group: the trainer or an evaluation is at work"
    assert lines[4] == "  in flight       5 groups, 1,038 attempts, 1 accepted group waiting, 4 groups held by the guard"


def test_a_long_run_is_read_without_taking_it_into_memory(folder: RunFolder, record: MakeRecord) -> None:
    with Journal(folder.run_db) as journal:
        for i in range(20_000):
            journal.group(record(i, outcome="dropped", reason=f"reason-{i % 3}", category="invalid"))
    tracemalloc.start()
    report = read_status(folder.run_db, 0.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert math.isclose(sum(entry.rate for entry in report.rejections), 1.0)
    assert sum(entry.groups for entry in report.rejections) == report.groups_left == 20_000


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="found nothing there"):
        read_status(tmp_path / "run.db", 0.0)
