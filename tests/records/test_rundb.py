"""run.db holds what was told, in the order in which it was told, whatever happens to the process or the disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import RecordError
from sluice.execution.validation import ValidationResult
from sluice.records import SCHEDULER, BatchRecord, Journal, RunFolder, open_for_reading, read_facts, read_summary, rollback
from sluice.records.rundb import SCHEMA_VERSION, _json, create_run_db
from sluice.scheduler.events import GroupRecord
from tests.records.conftest import make_record

MakeRecord = Callable[..., GroupRecord]
Query = Callable[[Path, str], list[tuple[object, ...]]]

WRITE_UNTIL_KILLED = """
import itertools, sys
from pathlib import Path
from sluice.records import Journal
from sluice.scheduler.events import GroupRecord
journal = Journal(Path(sys.argv[1]), flush_every_s=0.02)
for i in itertools.count():
    journal.group(GroupRecord(group_id=i, task_id="t", domain="d", epoch=0, round=1, start_step=0, end_step=0, outcome="trained",
        reason="kept", category=None, source="s", attempts=1, sampled_tokens=1, seconds=0.0, policy_version=0, rewards=(1.0,)))
    if i % 1000 == 999:
        journal.flush()
        print(i + 1, flush=True)
"""


@pytest.fixture
def slow_disk(folder: RunFolder) -> sqlite3.Connection:
    """Another program that holds run.db for writing until it is closed."""
    return sqlite3.connect(folder.run_db, isolation_level=None, check_same_thread=False)


# ---------------------------------------------------------------- what goes in comes out


def test_every_field_of_a_group_record_is_kept(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    told = record(
        3,
        outcome="dropped",
        reason="no_spread",
        category="low_information",
        rewards=(1.0, None, 0.5),
        evidence={"spread": 0.0, "mean": np.float32(0.5), "ratio": math.nan, "bound": -math.inf},
    )
    with Journal(folder.run_db) as journal:
        journal.group(told)
    with open_for_reading(folder.run_db) as db:
        cursor = db.execute("SELECT * FROM groups")
        row = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
    assert list(row) == [field.name for field in fields(GroupRecord)]
    assert json.loads(row.pop("rewards")) == [1.0, None, 0.5]
    assert json.loads(row.pop("evidence")) == {"spread": 0.0, "mean": 0.5, "ratio": "nan", "bound": "-inf"}
    assert row == {name: getattr(told, name) for name in row}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(),
        lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
        max_leaves=12,
    )
)
def test_json_columns_are_strict_json_for_every_value(value: object) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = _json(value)
    decoded = json.loads(text, parse_constant=refuse)
    if "nan" not in repr(value) and "inf" not in repr(value):
        assert decoded == value


def test_everything_else_that_is_told_is_kept(folder: RunFolder, rows: Query) -> None:
    result = ValidationResult(items=4, scored=3, reward_sum=2.0, unscored={"reward_timeout": 1}, truncated=1, sampled_tokens=40)
    with Journal(folder.run_db, clock=lambda: 12.0) as journal:
        journal.ledger(1, {"trained": 100, "late": 3}, {"trained": 8})
        journal.batch(BatchRecord(step=1, requested=2, group_ids=(4, 9), tokens=100, useful_groups=1, useful_tokens=90, fill_s=0.25))
        journal.metrics(1, {"a/b": 0.5, "a/nan": math.nan, "a/inf": math.inf})
        journal.validation(0, {"add": result})
        journal.event("warning", "look at this", step=1)
        journal.event("warning", "and at this")
        journal.fact("engine_tokens", 103)
    db = folder.run_db
    assert rows(db, "SELECT * FROM ledger") == [(1, "trained", 100, 8), (1, "late", 3, 0)]
    assert rows(db, "SELECT * FROM batches") == [(1, 2, 2, "[4,9]", 100, 1, 90, 0.25, 12.0)]
    assert rows(db, "SELECT * FROM metrics") == [(1, "a/b", 0.5, 12.0), (1, "a/nan", None, 12.0), (1, "a/inf", math.inf, 12.0)]
    assert rows(db, "SELECT * FROM validation") == [(1, 0, "add", 4, 3, 2 / 3, 2.0, '{"reward_timeout":1}', 1, 40, 12.0)]
    assert rows(db, "SELECT * FROM events") == [(12.0, 1, "warning", "look at this"), (12.0, None, "warning", "and at this")]
    assert rows(db, "SELECT value FROM run WHERE key = 'engine_tokens'") == [("103",)]


def test_numpy_counts_are_stored_as_numbers_not_as_bytes(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    with Journal(folder.run_db) as journal:
        journal.group(record(0, sampled_tokens=np.int64(7), seconds=np.float32(0.5), policy_version=np.int64(2)))
        journal.ledger(1, {"trained": np.int64(7)}, {"trained": np.int64(1)})  # type: ignore[dict-item]
    assert rows(folder.run_db, "SELECT sampled_tokens, seconds, policy_version FROM groups") == [(7, 0.5, 2)]
    assert rows(folder.run_db, "SELECT tokens, attempts FROM ledger") == [(7, 1)]


def test_rows_come_from_several_threads_and_none_is_lost(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    with Journal(folder.run_db, flush_every_rows=100) as journal:
        threads = [
            threading.Thread(target=lambda part=part: [journal.group(record(part * 2_000 + i)) for i in range(2_000)]) for part in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert rows(folder.run_db, "SELECT count(*), min(group_id), max(group_id) FROM groups") == [(8_000, 0, 7_999)]


def test_flush_returns_when_all_that_was_told_can_be_read(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    with Journal(folder.run_db, flush_every_s=3600.0) as journal:
        for i in range(10):
            journal.group(record(i))
        journal.flush()
        assert rows(folder.run_db, "SELECT count(*) FROM groups") == [(10,)]


def test_the_heartbeat_moves_while_nothing_is_told(folder: RunFolder, rows: Query) -> None:
    now = iter(range(1_000, 2_000))
    journal = Journal(folder.run_db, clock=lambda: float(next(now)), flush_every_s=0.01)
    journal.flush()
    (beat,) = rows(folder.run_db, "SELECT value FROM run WHERE key = 'heartbeat'")[0]
    assert float(str(beat)) >= 1_000.0
    journal.close("finished")


# ---------------------------------------------------------------- how a run ends


def test_the_status_tells_how_the_run_ended(tmp_path: Path, rows: Query) -> None:
    def status_after(error: BaseException | None) -> object:
        path = tmp_path / f"{type(error).__name__}.db"
        create_run_db(path, {})
        with contextlib.suppress(RuntimeError, KeyboardInterrupt, asyncio.CancelledError), Journal(path):
            assert rows(path, "SELECT value FROM run WHERE key = 'status'") == [('"running"',)]
            if error is not None:
                raise error
        return json.loads(str(rows(path, "SELECT value FROM run WHERE key = 'status'")[0][0]))

    assert status_after(None) == "finished"
    assert status_after(RuntimeError("broken")) == "failed"
    assert status_after(KeyboardInterrupt()) == "stopped"
    assert status_after(asyncio.CancelledError()) == "stopped"


def test_an_ended_run_is_one_file(folder: RunFolder, record: MakeRecord) -> None:
    with Journal(folder.run_db) as journal:
        journal.group(record(0))
    read_summary(folder.run_db)
    assert [p.name for p in folder.path.iterdir() if p.name.startswith("run.db")] == ["run.db"]


def test_an_ended_run_can_be_read_without_write_permission(folder: RunFolder, unprivileged: Callable[[], object]) -> None:
    with Journal(folder.run_db) as journal:
        journal.event("warning", "x")
    parents = [p for p in folder.path.parents if p.is_relative_to("/tmp") and p != Path("/tmp")]
    modes = [(p, p.stat().st_mode) for p in parents]
    for p in parents:
        p.chmod(0o755)
    folder.path.chmod(0o555)
    folder.run_db.chmod(0o444)
    try:
        with unprivileged():  # type: ignore[attr-defined]
            assert read_summary(folder.run_db).warnings == 1
    finally:
        folder.path.chmod(0o755)
        for p, mode in modes:
            p.chmod(mode)


def test_a_run_killed_while_its_file_was_rolled_into_one_can_be_read_and_goes_on(
    folder: RunFolder, record: MakeRecord, tmp_path: Path
) -> None:
    """Outside WAL mode SQLite undoes what was half written when it is opened next, which a reader alone may not do."""
    with Journal(folder.run_db) as journal:
        journal.group(record(group_id=1))
    with closing(sqlite3.connect(folder.run_db, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")  # so that the file is written to before the commit
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO events VALUES (0, 0, 'info', ?)", [("x" * 4096,)] * 100)
        killed = RunFolder(shutil.copytree(folder.path, tmp_path / "killed"))
    assert (killed.path / "run.db-journal").stat().st_size > 0
    assert read_summary(killed.run_db).status == "finished"
    assert not (killed.path / "run.db-journal").exists()
    with Journal(killed.run_db) as journal:
        journal.group(record(group_id=2))
    with open_for_reading(killed.run_db) as db:
        assert db.execute("SELECT group_id FROM groups").fetchall() == [(1,), (2,)]
        assert db.execute("SELECT count(*) FROM events").fetchone() == (0,)


def test_a_journal_continues_where_an_earlier_one_ended(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    result = {"add": ValidationResult(items=1, scored=1, reward_sum=1.0, unscored={}, truncated=0, sampled_tokens=1)}
    for group_id in (0, 1):
        with Journal(folder.run_db) as journal:
            assert rows(folder.run_db, "SELECT count(*) FROM run WHERE key = 'ended'") == [(0,)]
            journal.group(record(group_id))
            journal.validation(0, result)
    assert rows(folder.run_db, "SELECT group_id FROM groups") == [(0,), (1,)]
    assert rows(folder.run_db, "SELECT evaluation FROM validation") == [(1,), (2,)]


@given(told=st.lists(st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from("abc"), st.integers(0, 99), min_size=1)), max_size=12))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_a_ledger_told_again_for_a_step_the_last_one_holds(tmp_path: Path, rows: Query, told: list[tuple[int, dict[str, int]]]) -> None:
    with RunFolder.create(tmp_path, "x", 0, "") as folder, Journal(folder.run_db) as journal:
        for step, tokens in told:
            journal.ledger(step, tokens, tokens)
    last = {(step, outcome): count for step, tokens in told for outcome, count in tokens.items()}
    assert {(row[0], row[1]): row[2] for row in rows(folder.run_db, "SELECT step, outcome, tokens FROM ledger")} == last
    assert rows(folder.run_db, "SELECT count(*) FROM ledger") == [(len(last),)]
    latest = {outcome: count for _, tokens in told for outcome, count in tokens.items()}
    assert {total.outcome: total.tokens for total in read_summary(folder.run_db).ledger} == latest


def test_close_is_idempotent_and_a_call_after_it_is_refused(folder: RunFolder, record: MakeRecord) -> None:
    journal = Journal(folder.run_db)
    journal.close("finished")
    journal.close("failed")
    assert read_summary(folder.run_db).status == "finished"
    with pytest.raises(RecordError, match="before the journal is closed"):
        journal.group(record(0))
    with pytest.raises(RecordError, match="before the journal is closed"):
        journal.flush()


def test_after_a_kill_all_that_was_flushed_is_there_and_what_is_there_is_a_prefix(folder: RunFolder, rows: Query) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITE_UNTIL_KILLED, str(folder.run_db)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    flushed = [int(writer.stdout.readline()) for _ in range(3)]
    while_it_runs = read_summary(folder.run_db)
    os.kill(writer.pid, signal.SIGKILL)
    output, _ = writer.communicate(timeout=30)
    flushed += [int(line) for line in output.split("\n")[:-1]]
    assert while_it_runs.launched >= 3_000
    after = read_summary(folder.run_db)
    assert after.status == "running"
    assert after.launched >= flushed[-1]
    assert rows(folder.run_db, "SELECT count(*) - 1 = max(group_id) AND min(group_id) = 0 FROM groups") == [(1,)]
    assert rows(folder.run_db, "PRAGMA integrity_check") == [("ok",)]
    with Journal(folder.run_db) as journal:  # and it can be written on
        journal.event("warning", "resumed")
    assert read_summary(folder.run_db).status == "finished"


def test_a_fact_told_again_and_again_takes_no_more_room(folder: RunFolder, rows: Query) -> None:
    with Journal(folder.run_db) as journal:
        journal.fact(SCHEDULER, {"waiting_for": "x" * 1_000})
        journal.flush()
        sizes = []
        for second in range(3_000):  # what a run writes in 50 minutes
            journal.fact(SCHEDULER, {"waiting_for": "x" * 1_000, "time": second})
            if second % 100 == 99:
                journal.flush()
                sizes.append(folder.run_db.stat().st_size)
        assert max(sizes) - min(sizes) <= 2 * 4_096
        assert sum(path.stat().st_size for path in folder.path.glob("run.db*")) < 5 << 20
    assert read_facts(folder.run_db)[SCHEDULER]["time"] == 2_999
    assert rows(folder.run_db, "SELECT count(*) FROM run WHERE key = 'scheduler'") == [(1,)]


# ---------------------------------------------------------------- back to a checkpoint

TABLES = ("groups", "ledger", "batches", "metrics", "validation")


def play(journal: Journal, record: MakeRecord, steps: range) -> None:
    """A run that does the same whenever it does a step: three groups leave, one of them launched a step before, and one stays open."""
    for step in steps:
        for group_id in (step * 3 - 2, step * 3 - 1, step * 3 - 3):
            journal.group(record(group_id, start_step=group_id // 3, end_step=step))
        journal.batch(BatchRecord(step=step, requested=2, group_ids=(1, 2), tokens=20, useful_groups=1, useful_tokens=9, fill_s=0.5))
        journal.metrics(step, {"a/b": float(step), "a/nan": math.nan})
        if step % 2 == 0:
            journal.validation(
                step, {"add": ValidationResult(items=1, scored=1, reward_sum=1.0, unscored={}, truncated=0, sampled_tokens=1)}
            )
        journal.ledger(step, {"trained": 20 * step, "lost": 3}, {"trained": step})


def content(run_db: Path) -> dict[str, list[tuple[object, ...]]]:
    with open_for_reading(run_db) as db:
        return {table: sorted(db.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in TABLES}


@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 4), st.booleans())
@settings(max_examples=15)  # each is a few databases
def test_a_run_that_went_back_to_a_checkpoint_and_on_has_the_rows_of_one_that_was_never_killed(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: int, lost: int, more: int, twice: bool
) -> None:
    never, killed = (tmp_path_factory.mktemp("run") / "run.db" for _ in range(2))
    end = checkpoint + more
    for path, steps in ((never, range(1, end + 1)), (killed, range(1, checkpoint + lost + 1))):
        create_run_db(path, {})
        with Journal(path, clock=lambda: 1.0) as journal:
            play(journal, make_record, steps)
    # At the checkpoint the first group of the next step is open: its row, written by the killed run, must go.
    for _ in range(1 + twice):  # killed in the middle of a resume: again is fine
        rollback(killed, step=checkpoint, next_group=checkpoint * 3 + 1, open_groups=[checkpoint * 3])
    with Journal(killed, clock=lambda: 1.0) as journal:
        play(journal, make_record, range(checkpoint + 1, end + 1))
    assert content(killed) == content(never)


def test_a_rollback_keeps_what_was_known_at_the_checkpoint_says_so_and_forgets_what_the_scheduler_did(
    folder: RunFolder, record: MakeRecord, rows: Query
) -> None:
    with Journal(folder.run_db, clock=lambda: 5.0) as journal:
        journal.event("warning", "of step 9", step=9)
        journal.fact(SCHEDULER, {"time": 5.0})
        journal.fact("engine_tokens", 77)
        for group_id in range(5_000):
            journal.group(record(group_id))
    rollback(folder.run_db, step=3, next_group=4_000, open_groups=range(0, 4_000, 2), clock=lambda: 6.0)
    assert rows(folder.run_db, "SELECT count(*), min(group_id), max(group_id), sum(group_id % 2) FROM groups") == [(2_000, 1, 3_999, 2_000)]
    assert rows(folder.run_db, "SELECT * FROM events") == [(5.0, 9, "warning", "of step 9"), (6.0, 3, "info", "resumed from step 3")]
    facts = read_facts(folder.run_db)
    assert SCHEDULER not in facts
    assert facts["engine_tokens"] == 77
    summary = read_summary(folder.run_db)
    assert (summary.warnings, summary.errors) == (1, 0)


def test_a_run_that_begins_anew_keeps_no_row_not_even_of_its_first_evaluation(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    result = {"add": ValidationResult(items=1, scored=1, reward_sum=1.0, unscored={}, truncated=0, sampled_tokens=1)}
    with Journal(folder.run_db) as journal:
        journal.validation(0, result)
        journal.metrics(0, {"a/b": 1.0})
        journal.ledger(0, {"cancelled": 3}, {"cancelled": 1})
        play(journal, record, range(1, 3))
    rollback(folder.run_db, step=0, next_group=0, open_groups=())
    assert not any(content(folder.run_db).values())
    assert rows(folder.run_db, "SELECT level, message FROM events") == [("info", "begun anew: there was no checkpoint to resume from")]
    with Journal(folder.run_db) as journal:
        journal.validation(0, result)
    assert rows(folder.run_db, "SELECT evaluation FROM validation") == [(1,)]


def test_a_rollback_that_fails_changes_nothing(folder: RunFolder, record: MakeRecord, slow_disk: sqlite3.Connection) -> None:
    with Journal(folder.run_db) as journal:
        play(journal, record, range(1, 5))
    before = content(folder.run_db)
    slow_disk.execute(
        "CREATE TRIGGER no BEFORE INSERT ON events BEGIN SELECT raise(ABORT, 'disk I/O error'); END"
    )  # the last thing it does
    with pytest.raises(RecordError, match="disk I/O error"):
        rollback(folder.run_db, step=1, next_group=3, open_groups=())
    assert content(folder.run_db) == before
    with pytest.raises(RecordError, match="found nothing there"):
        rollback(folder.path / "nowhere.db", step=1, next_group=3, open_groups=())


WRITE_STEPS_UNTIL_KILLED = """
import sys
from pathlib import Path
from sluice.records import Journal, RunFolder
from tests.records.conftest import make_record
from tests.records.test_rundb import play
with RunFolder.open(sys.argv[1]) as folder:
    journal = Journal(folder.run_db, flush_every_s=0.01)
    for step in range(1, 1_000_000):
        play(journal, make_record, range(step, step + 1))
        if step == 20:
            journal.flush()
            print("checkpoint", flush=True)
        if step == 200:
            print("go", flush=True)
"""


def test_a_run_killed_while_it_writes_is_locked_again_rolled_back_and_goes_on(folder: RunFolder, record: MakeRecord, rows: Query) -> None:
    folder.release()
    command = [sys.executable, "-c", WRITE_STEPS_UNTIL_KILLED, str(folder.path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert writer.stdout is not None
    assert [writer.stdout.readline() for _ in range(2)] == ["checkpoint\n", "go\n"]
    with pytest.raises(RecordError, match=f"process {writer.pid} .* writes to it - wait for it or stop it"):
        RunFolder.open(folder.path).lock()
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=30)
    with RunFolder.open(folder.path) as again:
        rollback(again.run_db, step=20, next_group=61, open_groups=[60])
        assert rows(again.run_db, "SELECT max(step), count(*) FROM batches") == [(20, 20)]
        assert rows(again.run_db, "SELECT max(group_id), count(*) FROM groups") == [(59, 60)]
        with Journal(again.run_db) as journal:
            play(journal, record, range(21, 23))
    assert rows(folder.run_db, "SELECT max(group_id), count(*) FROM groups") == [(65, 66)]
    assert rows(folder.run_db, "SELECT max(evaluation), count(*) FROM validation") == [(11, 11)]
    assert rows(folder.run_db, "PRAGMA integrity_check") == [("ok",)]
    assert read_summary(folder.run_db).status == "finished"


def test_what_was_flushed_is_on_disk_and_not_in_the_memory_of_the_system_alone(
    folder: RunFolder, record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    with Journal(folder.run_db) as journal:
        journal.group(record(0))
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
        journal.flush()
    assert synced == [f"{folder.run_db}-wal"]


def test_the_time_a_run_lay_dead_is_no_part_of_it(folder: RunFolder) -> None:
    created = read_facts(folder.run_db)["created"]
    for begin, end in ((0.0, 100.0), (5_000.0, 5_020.0), (9_000.0, 9_003.0)):
        times = chain([created + begin], repeat(created + end))
        with Journal(folder.run_db, clock=partial(next, times), flush_every_s=3600.0):
            pass
    assert read_summary(folder.run_db).seconds == pytest.approx(123.0)


# ---------------------------------------------------------------- when the disk fails


def test_a_disk_that_falls_behind_is_an_error_at_the_bound_and_no_accepted_row_is_lost(
    folder: RunFolder, record: MakeRecord, rows: Query, slow_disk: sqlite3.Connection
) -> None:
    journal = Journal(folder.run_db, max_waiting_rows=50, flush_every_s=3600.0)
    journal.flush()
    slow_disk.execute("BEGIN IMMEDIATE")
    accepted = 0
    with pytest.raises(RecordError, match=r"must keep up with the run, but \d+ rows wait .* records.root"):  # noqa: PT012 - one of many calls
        while accepted < 10_000:
            journal.group(record(accepted))
            accepted += 1
    assert 50 <= accepted <= 50 + 4_096
    slow_disk.execute("ROLLBACK")
    slow_disk.close()
    journal.close("failed")
    assert rows(folder.run_db, "SELECT count(*), max(group_id) FROM groups") == [(accepted, accepted - 1)]
    assert read_summary(folder.run_db).status == "failed"


def test_a_file_locked_for_a_while_costs_nothing(folder: RunFolder, record: MakeRecord, slow_disk: sqlite3.Connection) -> None:
    with Journal(folder.run_db, flush_every_s=0.01) as journal:
        journal.flush()
        slow_disk.execute("BEGIN IMMEDIATE")
        journal.group(record(0))
        release = threading.Timer(0.3, lambda: slow_disk.execute("ROLLBACK"))
        release.start()
        journal.flush()
        release.join()
    slow_disk.close()
    assert read_summary(folder.run_db).launched == 1


def fill_disk(journal: Journal, *, full: bool) -> None:
    """Let SQLite itself say that the disk is full."""
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0] if full else 1_000_000
    journal._db.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_an_error_at_the_next_call_and_at_close(folder: RunFolder, record: MakeRecord) -> None:
    journal = Journal(folder.run_db, flush_every_s=3600.0)
    journal.group(record(0))
    journal.flush()
    fill_disk(journal, full=True)
    for i in range(1, 1_000):
        journal.group(record(i))
    with pytest.raises(RecordError, match=r"1000 rows could not be written \(2 are\), got: database or disk is full - check"):
        journal.flush()
    with pytest.raises(RecordError, match="999|1000"):
        journal.group(record(1_000))
    with pytest.raises(RecordError, match="disk is full"):
        journal.close("failed")
    journal.close("failed")  # told once
    assert read_summary(folder.run_db).launched == 1


def test_a_disk_that_has_space_again_at_close_gets_all_rows(folder: RunFolder, record: MakeRecord) -> None:
    journal = Journal(folder.run_db, flush_every_s=3600.0)
    journal.flush()
    fill_disk(journal, full=True)
    for i in range(1_000):
        journal.group(record(i))
    with pytest.raises(RecordError, match="disk is full"):
        journal.flush()
    fill_disk(journal, full=False)
    journal.close("failed")
    summary = read_summary(folder.run_db)
    assert (summary.launched, summary.status) == (1_000, "failed")


def test_a_group_that_leaves_twice_is_an_error_not_a_second_row(folder: RunFolder, record: MakeRecord) -> None:
    journal = Journal(folder.run_db)
    journal.group(record(5))
    journal.flush()
    journal.group(record(5))
    with pytest.raises(RecordError, match=r"UNIQUE constraint failed: groups.group_id - .* please report it"):
        journal.flush()
    with pytest.raises(RecordError, match="UNIQUE"):
        journal.close("failed")
    assert read_summary(folder.run_db).status == "failed"


def test_an_error_in_flight_is_not_covered_up_by_one_of_the_journal(folder: RunFolder, record: MakeRecord) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Journal(folder.run_db) as journal:  # noqa: PT012 - a run that breaks
        journal.group(record(1))
        journal.group(record(1))
        raise ZeroDivisionError
    assert "could not be closed" in caught.value.__notes__[0]


# ---------------------------------------------------------------- foreign files


def test_another_schema_version_is_refused_by_reader_and_writer(folder: RunFolder, rows: Query) -> None:
    rows(folder.run_db, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for action in (read_summary, Journal, RunFolder.open):
        with pytest.raises(RecordError, match=f"schema version {SCHEMA_VERSION}, got {SCHEMA_VERSION + 1}"):
            action(folder.path if action == RunFolder.open else folder.run_db)  # type: ignore[operator]


def test_a_reader_can_not_write(folder: RunFolder) -> None:
    with pytest.raises(RecordError, match="readonly"), open_for_reading(folder.run_db) as db:
        db.execute("DELETE FROM run")


def test_a_missing_file_and_an_existing_one_are_refused(tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(RecordError, match="found nothing there"):
        read_summary(tmp_path / "run.db")
    with pytest.raises(RecordError, match="must not exist yet"):
        create_run_db(folder.run_db, {})
    with pytest.raises(RecordError, match="unable to open database file"):
        create_run_db(tmp_path / "nowhere" / "run.db", {})


def test_case_78_memory_holds_no_record_once_it_is_written(folder: RunFolder, record: MakeRecord) -> None:
    import gc

    def records() -> int:
        gc.collect()
        return sum(type(o) is GroupRecord for o in gc.get_objects())

    before = records()  # other tests may have left some
    with Journal(folder.run_db) as journal:
        for i in range(5_000):
            journal.group(record(i))
        journal.flush()
        assert records() <= before + 1
        with closing(sqlite3.connect(folder.run_db)) as db:
            assert db.execute("SELECT count(*) FROM groups").fetchone() == (5_000,)


def test_whatever_user_code_says_can_be_told_as_an_event(folder: RunFolder, rows: Query) -> None:
    """Exceptions of the user's may hold halves of surrogate pairs, which SQLite does not take: the rows beside them must not be lost."""
    said = ["caf\udce9", "\ud800", "ünïcode \U0001f600", "", "nul \0 and\nline"]
    with Journal(folder.run_db) as journal:
        for message in said:
            journal.event("error", message)
    told = [message for (message,) in rows(folder.run_db, "SELECT message FROM events")]
    assert told == [r"caf\udce9", r"\ud800", *said[2:]]
