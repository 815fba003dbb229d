"""run.db: the record of a run. One SQLite file in WAL mode that can be read while the run goes on and after it was killed.

    run         key, value: facts about the run as JSON: version, identity, created, status, heartbeat, ended, ...
    groups      one row per launched group, written when it leaves
    ledger      the ledger after each step, one row per step and outcome: tokens and attempts since the start of the run
    batches     one row per optimiser step
    metrics     step, name, value, time: value is NULL for NaN
    validation  one row per evaluation and domain
    events      warnings, errors, and what else happened to the run as a whole, as that it was resumed

The file names itself: SQLite's `application_id` says that it is ours, `user_version` is the version of this schema.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from sluice.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice.execution.validation import ValidationResult
    from sluice.scheduler.events import GroupRecord

APPLICATION_ID = 0x534C5543  # "SLUC"
SCHEMA_VERSION = 2

RunStatus = Literal["running", "finished", "failed", "stopped"]

SCHEDULER = "scheduler"
"""Fact: what the scheduler is doing, as its `snapshot` says it, and the wall-clock `time` of it."""

IDENTITY = "identity"
"""Fact: what tells this run from every other one, also when its folder is renamed or copied."""

SECONDS_AWAY = "seconds_away"
"""Fact: how long the run lay dead before it was resumed, all times together."""

MAX_WAITING_ROWS = 100_000  # about 100 MB of records and half a minute of the fastest run: a disk slower than that is a fault
FLUSH_EVERY_ROWS = 2_000  # waiting rows that wake the writer before its time
FLUSH_EVERY_S = 1.0  # what a kill of the process can cost at most
HEARTBEAT_EVERY_S = 5.0
_ROWS_PER_TRANSACTION = 4_096
_BUSY_TIMEOUT_S = 5.0  # how long one try waits for another process that writes
_CLOSE_WITHIN_S = 60.0

_COLUMNS: Mapping[str, Sequence[str]] = {
    "groups": (
        "group_id INTEGER PRIMARY KEY",
        "task_id TEXT NOT NULL",
        "domain TEXT NOT NULL",
        "epoch INTEGER NOT NULL",
        "round INTEGER NOT NULL",
        "start_step INTEGER NOT NULL",
        "end_step INTEGER NOT NULL",
        "outcome TEXT NOT NULL",
        "reason TEXT NOT NULL",
        "category TEXT",  # NULL unless dropped or cut
        "source TEXT NOT NULL",
        "attempts INTEGER NOT NULL",
        "sampled_tokens INTEGER NOT NULL",
        "seconds REAL NOT NULL",
        "policy_version INTEGER NOT NULL",
        "rewards TEXT NOT NULL",  # JSON array, null where a member has none
        "env_steps INTEGER NOT NULL",
        "task_type TEXT",  # NULL where no environment says
        "evidence TEXT NOT NULL",  # JSON object
    ),
    "ledger": ("step INTEGER NOT NULL", "outcome TEXT NOT NULL", "tokens INTEGER NOT NULL", "attempts INTEGER NOT NULL"),
    "batches": (
        "step INTEGER NOT NULL",
        "requested INTEGER NOT NULL",
        "kept INTEGER NOT NULL",
        "group_ids TEXT NOT NULL",  # JSON array
        "tokens INTEGER NOT NULL",
        "useful_groups INTEGER NOT NULL",
        "useful_tokens INTEGER NOT NULL",
        "fill_s REAL NOT NULL",
        "time REAL NOT NULL",
    ),
    "metrics": ("step INTEGER NOT NULL", "name TEXT NOT NULL", "value REAL", "time REAL NOT NULL"),
    "validation": (
        "evaluation INTEGER NOT NULL",  # 1 for the first of the run
        "step INTEGER NOT NULL",
        "domain TEXT NOT NULL",
        "items INTEGER NOT NULL",
        "scored INTEGER NOT NULL",
        "mean REAL",  # NULL when nothing was scored
        "reward_sum REAL NOT NULL",
        "unscored TEXT NOT NULL",  # JSON object: reason -> results
        "truncated INTEGER NOT NULL",
        "sampled_tokens INTEGER NOT NULL",
        "time REAL NOT NULL",
    ),
    "events": ("time REAL NOT NULL", "step INTEGER", "level TEXT NOT NULL", "message TEXT NOT NULL"),
}

_UNIQUE: Mapping[str, str] = {"ledger": "UNIQUE (step, outcome)"}  # what is told again replaces what was told before

_SET_FACT = "INSERT INTO run (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_INSERT = {
    "run": _SET_FACT,
    **{
        table: f"INSERT {'OR REPLACE ' if table in _UNIQUE else ''}INTO {table} VALUES ({', '.join('?' * len(columns))})"
        for table, columns in _COLUMNS.items()
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """What one optimiser step consumed. Written once, after the advantages are known."""

    step: int  # global_step after the optimiser step: 1 for the first
    requested: int  # groups asked for
    group_ids: tuple[int, ...]  # the groups that came
    tokens: int  # sampled by the rollouts of these groups
    useful_groups: int  # groups with at least one rollout of non-zero advantage
    useful_tokens: int  # sampled by the rollouts of non-zero advantage
    fill_s: float  # from asking for it to having it

    @property
    def kept(self) -> int:
        """Number of groups that came."""
        return len(self.group_ids)


def create_run_db(path: Path, facts: Mapping[str, Any]) -> None:
    """Make an empty run.db with these facts, an identity, status "running" and this version of Sluice.

    Raises:
        RecordError: a file is there already, or the disk refuses.
    """
    if path.exists():
        raise RecordError(f"{path} must not exist yet - every run has a folder of its own")
    try:
        version = metadata.version("sluice-rl")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "unknown"
    started = time.time()
    all_facts = {"version": version, IDENTITY: uuid.uuid4().hex, "created": started, **facts, "status": "running", "heartbeat": started}
    with _as_record_error(path), closing(_connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        for table, columns in _COLUMNS.items():
            parts = [*columns, _UNIQUE[table]] if table in _UNIQUE else columns
            db.execute(f"CREATE TABLE {table} ({', '.join(parts)})")
        db.executemany(_SET_FACT, [(key, _json(value)) for key, value in all_facts.items()])
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")


def check_run_db(path: Path) -> None:
    """Raise RecordError unless the file is a run.db of ours in this version of the schema."""
    with open_for_reading(path):
        pass


def read_facts(path: Path) -> dict[str, Any]:
    """The facts about the run as a whole.

    Raises:
        RecordError: the file is missing, not ours, of another schema version, or unreadable.
    """
    with open_for_reading(path) as db:
        return facts_in(db)


def facts_in(db: sqlite3.Connection) -> dict[str, Any]:
    """The facts that an open run.db holds."""
    return {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM run")}


def rollback(run_db: Path, *, step: int, next_group: int, open_groups: Sequence[int], clock: Callable[[], float] = time.time) -> None:
    """Take run.db back to a checkpoint, so that what the resumed run does again is recorded once. All or nothing; again is fine.

    To be done before the `Journal` is opened. Events stay, and one says that the run was resumed.

    Args:
        run_db: of a run that nobody writes to (`RunFolder.lock`).
        step: of the checkpoint: rows of later steps go. 0: the run begins anew, and rows of step 0 go as well.
        next_group: ids from here on were given after the checkpoint: these groups go.
        open_groups: ids of groups that had not left at the checkpoint: their rows go, if there are any.

    Raises:
        RecordError: the file is missing, not ours, or the disk refuses; nothing has changed then.
    """
    check_run_db(run_db)
    last_kept = step if step > 0 else -1
    message = f"resumed from step {step}" if step > 0 else "begun anew: there was no checkpoint to resume from"
    with _as_record_error(run_db), closing(_connect(run_db)) as db:
        db.execute("BEGIN IMMEDIATE")
        for table in ("batches", "metrics", "ledger", "validation"):
            db.execute(f"DELETE FROM {table} WHERE step > ?", (last_kept,))
        db.execute("DELETE FROM groups WHERE group_id >= ?", (int(next_group),))
        db.executemany("DELETE FROM groups WHERE group_id = ?", ((int(group_id),) for group_id in open_groups))
        db.execute("DELETE FROM run WHERE key = ?", (SCHEDULER,))  # it tells of groups that are gone
        db.execute(_INSERT["events"], (clock(), step, "info", message))
        db.execute("COMMIT")


@contextmanager
def open_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection that sees one moment of the run, also while it goes on and after a kill.

    Raises:
        RecordError: it is missing, not ours, of another schema version, or unreadable.
    """
    if not path.is_file():
        raise RecordError(f"{path} must be a run.db, found nothing there - give the folder of a run")
    with _as_record_error(path):
        try:
            db = _open_read_only(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            _undo_half_written(path)
            db = _open_read_only(path)
        with closing(db):
            db.execute("BEGIN")
            yield db


def _open_read_only(path: Path) -> sqlite3.Connection:
    db = _connect(f"{path.absolute().as_uri()}?mode=ro")
    try:
        _check(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _undo_half_written(path: Path) -> None:
    """Let SQLite undo the transaction in which a process was killed while the file was not in WAL mode: a reader is not allowed to."""
    with closing(_connect(path)) as db:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raise RecordError unless it says that it is ours and of this version."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise RecordError(f"{path} must be a run.db written by Sluice, got a file that is no database ({error})") from error
    if application == APPLICATION_ID and version == SCHEMA_VERSION:
        return
    if application != APPLICATION_ID:
        raise RecordError(f"{path} must be a run.db written by Sluice, got another program's database - give the folder of a run")
    raise RecordError(f"{path} must have schema version {SCHEMA_VERSION}, got {version} - read it with the version of Sluice that wrote it")


class Journal:
    """Writes run.db from one thread of its own, so that the event loop and the trainer never wait for a disk.

    Each call puts one row on a list and returns; the writer commits them in the order in which they were told, so that what is on
    disk is always a prefix of what was said. Nothing is lost silently: when the disk fails, or falls behind by `max_waiting_rows`,
    the next call raises and so does `close`. Calls may come from any thread; `flush` and `close` wait and stay off the event loop.

    The heartbeat says that the process lives, not that its loop moves.
    """

    def __init__(
        self,
        run_db: Path,
        *,
        max_waiting_rows: int = MAX_WAITING_ROWS,
        flush_every_rows: int = FLUSH_EVERY_ROWS,
        flush_every_s: float = FLUSH_EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file made by `create_run_db` and start the writer.

        Raises:
            RecordError: the file is missing, not ours, or not writable.
        """
        self._path = run_db
        self._max_waiting_rows = max_waiting_rows
        self._flush_every_rows = flush_every_rows
        self._flush_every_s = flush_every_s
        self._clock = clock
        check_run_db(run_db)
        with _as_record_error(run_db):
            self._db = _connect(run_db)
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing committed; a power cut may, but never corrupts
                self._begin()
                (self._evaluations,) = self._db.execute("SELECT coalesce(max(evaluation), 0) FROM validation").fetchone()
            except sqlite3.Error:
                self._db.close()
                raise
        self._waiting: deque[tuple[str, Any]] = deque()  # (table, its rows: all or none are on disk), oldest first
        self._in_hand: list[tuple[str, Any]] = []  # taken by the writer, not committed yet
        self._written = 0
        self.write_seconds = 0.0
        """Seconds that the writer spent on committing, beside whatever the callers did meanwhile."""
        self._problem: BaseException | None = None  # why the writer stopped
        self._lock = threading.Lock()  # between callers, so that no row slips in behind `close`; the writer never takes it
        self._closed = False
        self._ending = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write_until_ending, name="sluice-journal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ what can be told

    def group(self, record: GroupRecord) -> None:
        """A group left."""
        self._tell("groups", record)

    def ledger(self, step: int, tokens: Mapping[str, int], attempts: Mapping[str, int]) -> None:
        """Where tokens and attempts have ended since the start of the run, by outcome; of a step told again, the last counts."""
        self._tell("ledger", [(step, outcome, int(count), int(attempts.get(outcome, 0))) for outcome, count in tokens.items()])

    def batch(self, record: BatchRecord) -> None:
        """An optimiser step consumed a batch."""
        self._tell("batches", [_batch_row(record, self._clock())])

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step. Use `Sinks.write`, which checks them and calls this."""
        now = self._clock()
        self._tell("metrics", [(step, name, float(value), now) for name, value in metrics.items()])

    def validation(self, step: int, results: Mapping[str, ValidationResult]) -> None:
        """A held-out evaluation after `step` optimiser steps, by domain."""
        self._evaluations += 1
        now = self._clock()
        self._tell("validation", [_validation_row(self._evaluations, step, domain, result, now) for domain, result in results.items()])

    def event(self, level: str, message: str, step: int | None = None) -> None:
        """Something a person should know afterwards. level: "info", "warning" or "error".

        message: may repeat what user code said; what of it is no text that can be written as UTF-8 is written as its code.
        """
        self._tell("events", [(self._clock(), step, level, message.encode(errors="backslashreplace").decode())])

    def fact(self, key: str, value: Any) -> None:
        """A fact about the run as a whole; the last one told replaces the one before. The value must fit into JSON."""
        self._tell("run", [(key, _json(value))])

    # ------------------------------------------------------------ waiting for the disk

    def flush(self, timeout_s: float = _CLOSE_WITHIN_S) -> None:
        """Return when everything told so far is committed and on disk, where no power cut takes it. Not for the event loop.

        Raises:
            RecordError: it could not be written, or not within `timeout_s`.
        """
        done = threading.Event()
        self._tell("flush", done)
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while not done.wait(0.05):
            if self._problem is not None:
                self._raise_problem()
            if time.monotonic() > deadline:
                raise self._too_slow(timeout_s)
        self._sync()

    def close(self, status: RunStatus) -> None:
        """Write what waits, mark the run as ended with this status, fold the WAL into the one file. Again is fine. Not for the event loop.

        Raises:
            RecordError: some rows could not be written; the message says how many.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ending = True
        self._wake.set()
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            raise self._too_slow(_CLOSE_WITHIN_S)
        if self._problem is not None:
            self._try(self._write_waiting)  # the cause may be gone by now
        self._try(lambda: self._end(status))
        self._db.close()
        if self._problem is not None:
            self._raise_problem()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close as finished, as stopped (Ctrl-C or a cancel), or as failed; an error in flight is not covered up by one of ours."""
        if exc is None:
            self.close("finished")
            return
        try:
            self.close("stopped" if isinstance(exc, KeyboardInterrupt | asyncio.CancelledError) else "failed")
        except RecordError as error:
            exc.add_note(f"and the journal could not be closed: {error}")

    # ------------------------------------------------------------ the callers' side

    def _begin(self) -> None:
        """Mark the run as running, from now on; the time since its last sign of life was no part of it."""
        now, db = self._clock(), self._db
        db.execute("BEGIN IMMEDIATE")
        facts = facts_in(db)
        away = facts.get(SECONDS_AWAY, 0.0) + max(0.0, now - facts["heartbeat"])
        db.executemany(_SET_FACT, [("status", _json("running")), ("heartbeat", _json(now)), (SECONDS_AWAY, _json(away))])
        db.execute("DELETE FROM run WHERE key = 'ended'")
        db.execute("COMMIT")

    def _sync(self) -> None:
        """Put what is committed on disk: a commit alone survives the death of the process, not that of the machine."""
        try:
            fd = os.open(f"{self._path}-wal", os.O_RDONLY)
        except FileNotFoundError:  # nothing was written since it was folded into run.db
            return
        try:
            os.fsync(fd)
        except OSError as error:
            raise RecordError(f"{self._path} must be on disk, got: {error.strerror or error} - check the disk") from error
        finally:
            os.close(fd)

    def _tell(self, table: str, payload: Any) -> None:
        with self._lock:
            waiting = self._waiting
            count = len(waiting)
            if self._problem is not None or self._closed or count >= self._max_waiting_rows:
                self._refuse()
            waiting.append((table, payload))
        if count >= self._flush_every_rows and not self._wake.is_set():
            self._wake.set()

    def _refuse(self) -> NoReturn:
        if self._problem is not None:
            self._raise_problem()
        if self._closed:
            raise RecordError(f"{self._path}: rows must be told before the journal is closed")
        raise RecordError(
            f"{self._path}: the disk must keep up with the run, but {self._unwritten()} rows wait ({self._written} are written) - "
            "it is too slow or locked by another program: choose a local disk with records.root"
        )

    def _raise_problem(self) -> NoReturn:
        is_disk = isinstance(self._problem, sqlite3.OperationalError)
        advice = (
            "check that the disk is there and has space"
            if is_disk
            else "one of them does not fit, which is a fault of Sluice: please report it"
        )
        raise RecordError(
            f"{self._path}: {self._unwritten()} rows could not be written ({self._written} are), got: {self._problem} - {advice}"
        ) from self._problem

    def _too_slow(self, within_s: float) -> RecordError:
        return RecordError(
            f"{self._path}: rows must be on disk within {within_s:g} s, {self._unwritten()} still wait - "
            "look for a slow disk or a program that locks the file"
        )

    def _unwritten(self) -> int:
        return len(self._waiting) + len(self._in_hand)

    # ------------------------------------------------------------ the writer's side

    def _write_until_ending(self) -> None:
        """Consumes what is told; waits for a full list, the time, or the end; unblocked by `_tell`, `flush` and `close`."""
        next_heartbeat = 0.0
        while True:
            self._wake.wait(self._flush_every_s)
            self._wake.clear()
            is_last = self._ending
            try:
                self._write_waiting()
                if time.monotonic() >= next_heartbeat:
                    self._db.execute(_SET_FACT, ("heartbeat", _json(self._clock())))
                    next_heartbeat = time.monotonic() + HEARTBEAT_EVERY_S
            except Exception as error:  # noqa: BLE001 - whatever it is, the next caller must hear of it
                if not is_last and _is_busy(error):
                    continue  # another process writes: wait on, up to the bound
                self._problem = error
                return
            if is_last:
                return

    def _write_waiting(self) -> None:
        """Commit until nothing waits. Rows leave `_in_hand` only when they are committed."""
        while True:
            while self._waiting and len(self._in_hand) < _ROWS_PER_TRANSACTION:
                self._in_hand.append(self._waiting.popleft())
            if not self._in_hand:
                return
            started = time.perf_counter()
            self._commit(self._in_hand)
            self.write_seconds += time.perf_counter() - started
            self._written += len(self._in_hand)
            for table, payload in self._in_hand:
                if table == "flush":
                    payload.set()
            self._in_hand = []

    def _commit(self, entries: Sequence[tuple[str, Any]]) -> None:
        rows: dict[str, list[Sequence[object]]] = {}
        for table, payload in entries:
            if table == "groups":
                rows.setdefault(table, []).append(_group_row(payload))
            elif table != "flush":
                rows.setdefault(table, []).extend(payload)
        if not rows:
            return
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            for table, table_rows in rows.items():
                db.executemany(_INSERT[table], table_rows)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite ends it itself on some errors
                db.execute("ROLLBACK")
            raise

    def _try(self, action: Callable[[], None]) -> None:
        """Do it; keep the reason if it fails, forget an older one that it cured."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised by `close` when all is done that can be
            self._problem = error
        else:
            if not self._unwritten():
                self._problem = None

    def _end(self, status: RunStatus) -> None:
        ended = _json(self._clock())
        self._db.executemany(_SET_FACT, [("status", _json(status)), ("heartbeat", ended), ("ended", ended)])
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with suppress(sqlite3.OperationalError):  # somebody reads just now: the side files stay, and the next reader copes with them
            self._db.execute("PRAGMA journal_mode = DELETE")  # an ended run is one file, readable from a read-only disk as well


def _connect(database: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(
        database,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,  # transactions are ours
        check_same_thread=False,  # opened by the caller, used by the writer thread, closed by the caller
        uri=isinstance(database, str),
    )


@contextmanager
def _as_record_error(path: Path) -> Iterator[None]:
    """SQLite's refusals, with the file they are about."""
    try:
        yield
    except sqlite3.Error as error:
        raise RecordError(f"{path} must be usable as a SQLite file, got: {error} - check the disk and the permissions") from error


def _is_busy(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _group_row(r: GroupRecord) -> Sequence[object]:
    return (
        r.group_id,
        r.task_id,
        r.domain,
        r.epoch,
        r.round,
        r.start_step,
        r.end_step,
        r.outcome,
        r.reason,
        r.category,
        r.source,
        r.attempts,
        int(r.sampled_tokens),  # a numpy scalar would be stored as bytes
        float(r.seconds),
        int(r.policy_version),
        _json(r.rewards),
        int(r.env_steps),
        r.task_type,
        _json(r.evidence) if r.evidence else "{}",
    )


def _batch_row(r: BatchRecord, now: float) -> Sequence[object]:
    counts = (int(r.tokens), int(r.useful_groups), int(r.useful_tokens))
    return (r.step, r.requested, r.kept, _json(r.group_ids), *counts, float(r.fill_s), now)


def _validation_row(evaluation: int, step: int, domain: str, r: ValidationResult, now: float) -> Sequence[object]:
    unscored = _json(r.unscored)
    return (evaluation, step, domain, r.items, r.scored, r.mean, r.reward_sum, unscored, r.truncated, r.sampled_tokens, now)


def _plain(value: Any) -> Any:
    """What JSON has no word for: numpy scalars, read-only mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a record must hold numbers, text, lists and mappings, got {type(value).__name__} {value!r}")


def _spelled_out(value: Any) -> Any:
    """The same value with NaN and infinities as the texts "nan", "inf" and "-inf", which `float` reads."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: _spelled_out(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(entry) for entry in value]
    return value if value is None or isinstance(value, str | int) else _spelled_out(_plain(value))


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode


def _json(value: Any) -> str:
    """JSON that every reader accepts: JSON itself has no NaN."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(_spelled_out(value))
