"""Recorded rollouts: every judged group with all its members, as Parquet files in the run folder. What the offline tools read.

`RolloutRecorder` takes them while the run goes on, `rollback_rollouts` takes back what a resumed run makes again, and
`sluice.records.rollout_reader` reads them. docs/recorded_rollouts.md is the guide: what is recorded, and what is left out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sluice.errors import RecordError
from sluice.types import Rollout

if TYPE_CHECKING:
    from types import ModuleType

    from sluice.records.rollout_parts import Row
    from sluice.scheduler.events import GroupRecord

ROWS_PER_PART: Final = 2_048  # some megabytes: small enough to hold, large enough to compress well
PART_EVERY_S: Final = 30.0  # what a kill can cost at most, beyond the last checkpoint, which has everything before it
MAX_WAITING_BYTES: Final = 1 << 30  # of members that wait for the disk: one that is so far behind is a fault
_TAKE_EVERY_S: Final = 1.0  # between two looks at what waits
_ROWS_AT_ONCE: Final = 64  # made into columns in one go; each step of that is a millisecond or two in which no other thread runs
_BYTES_PER_PART: Final = 128 << 20
_CLOSE_WITHIN_S: Final = 60.0


class RolloutRecorder:
    """Writes part files from one thread of its own, so that the event loop never waits for a disk.

    `member` and `group` keep references and return. Nothing is lost silently: when the disk fails, or falls behind by
    `max_waiting_bytes`, the next `group` raises, once, so that a run that ends for it can still account for everything; `flush` and
    `close` raise each time. `member` and `group` belong to one thread; `flush` and `close` wait and stay off the event loop.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        rows_per_part: int = ROWS_PER_PART,
        part_every_s: float = PART_EVERY_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Make the folder, or go on behind the parts in it, and start the writer.

        facts: about the run, written into every part: at least `identity`; values must fit into JSON.

        Raises:
            RecordError: pyarrow is missing, or the folder cannot be written.
        """
        self._parts = load_parts()
        self._folder = folder
        self._rows_per_part = rows_per_part
        self._part_every_s = part_every_s
        self._max_waiting_bytes = max_waiting_bytes
        self._schema = self._parts.schema_with(facts)
        try:
            self._next_part: int = self._parts.prepare_folder(folder)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        self._delivered: dict[int, list[Rollout]] = {}  # group_id -> what was delivered for it; of groups that have not left
        self._lock = threading.Lock()  # of the next four; never held while something slow is done
        self._waiting: deque[tuple[list[Row], int] | threading.Event] = deque()  # rows of a group and their bytes, or a flush, oldest first
        self._waiting_bytes = 0
        self._told_rows = 0
        self._closed = False
        self._written_rows = 0
        self._ignored_rows = 0  # of groups that left after the error
        self._batches: list[Any] = []  # made into columns, not on disk yet; the writer's
        self._batched_rows = 0
        self._batched_since = 0.0
        self._error: BaseException | None = None  # why nothing more is taken
        self._is_error_told = False
        self.write_seconds = 0.0
        """Seconds that the writer spent on making columns and writing them, beside whatever the callers did meanwhile."""
        self._ending = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write_until_ending, name="sluice-rollouts", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ what can be told

    def member(self, rollout: Rollout) -> None:
        """An attempt has delivered: to be told before its group leaves."""
        if self._error is None:
            self._delivered.setdefault(rollout.group_id, []).append(rollout)

    def group(self, record: GroupRecord, members: Iterable[tuple[Rollout, bool]], *, is_whole: bool) -> None:
        """A group has left. One that is neither whole nor dropped is forgotten: its members are no evidence of anything.

        members: those that it had then, and whether each counts; what was delivered beside them was taken out of the group before.

        Raises:
            RecordError: something told before could not be written. Only once.
        """
        delivered = self._delivered.pop(record.group_id, ())
        if not is_whole and record.outcome != "dropped":
            return
        make = self._parts.Row
        rows: list[Row] = [make(record, rollout, True, is_counted) for rollout, is_counted in members]
        if len(delivered) > len(rows) or not rows:
            in_group = {row.rollout.attempt_id for row in rows}
            rows += [make(record, rollout, False, False) for rollout in delivered if rollout.attempt_id not in in_group]
        if not rows:
            return
        if self._error is not None:
            self._ignored_rows += len(rows)
            self._raise_once()
            return
        size = sum([_size(row.rollout) for row in rows])
        with self._lock:
            if self._closed:
                raise RecordError(f"{self._folder}: groups must be told before the recorder is closed")
            self._told_rows += len(rows)
            self._waiting.append((rows, size))
            self._waiting_bytes += size
        if self._waiting_bytes > self._max_waiting_bytes:
            self._error = RecordError(
                f"{self._folder}: the disk must keep up with the run, but {self._waiting_bytes / 1e6:,.0f} MB of rollouts wait for it - it "
                "is too slow: choose a local disk with records.root, or do without records.rollouts"
            )
            self._raise_once()

    # ------------------------------------------------------------ waiting for the disk

    def flush(self, timeout_s: float = _CLOSE_WITHIN_S) -> None:
        """Return when every group told so far is on disk. Not for the event loop.

        Raises:
            RecordError: it could not be written, or not within `timeout_s`.
        """
        done = threading.Event()
        with self._lock:
            if self._closed:
                raise RecordError(f"{self._folder}: it must be flushed before the recorder is closed")
            self._waiting.append(done)
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while not done.wait(0.05):
            if self._error is not None:
                raise self._described() from self._error
            if time.monotonic() > deadline:
                raise self._too_slow(timeout_s)
        if self._error is not None:
            raise self._described() from self._error

    def close(self) -> None:
        """Write what waits. Again is fine. Not for the event loop.

        Raises:
            RecordError: some rollouts could not be written; the message says how many.
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
        if isinstance(self._error, OSError):
            self._try_again()
        if self._error is not None:
            raise self._described() from self._error

    # ------------------------------------------------------------ the callers' side

    def _raise_once(self) -> None:
        if not self._is_error_told:
            self._is_error_told = True
            raise self._described() from self._error

    def _described(self) -> RecordError:
        error = self._error
        lost = self._told_rows - self._written_rows + self._ignored_rows
        if isinstance(error, RecordError):
            return RecordError(str(error))
        if isinstance(error, OSError):
            text, advice = error.strerror or str(error), "check that the disk is there and has space, then resume the run"
        else:
            text, advice = f"{type(error).__name__}: {error}", "one of them does not fit, which is a fault of Sluice: please report it"
        return RecordError(
            f"{self._folder}: the rollouts of {lost} members could not be written ({self._written_rows} are), got: {text} - {advice}"
        )

    def _too_slow(self, within_s: float) -> RecordError:
        return RecordError(
            f"{self._folder}: rollouts must be on disk within {within_s:g} s, {self._told_rows - self._written_rows} members still wait "
            "- look for a slow disk"
        )

    def _try_again(self) -> None:
        """The writer has died of the disk: the cause may be gone by now."""
        try:
            self._take_waiting()
            self._write_part()
        except Exception as error:  # noqa: BLE001 - raised by `close`
            self._error = error
        else:
            if not self._ignored_rows:
                self._error = None

    # ------------------------------------------------------------ the writer's side

    def _write_until_ending(self) -> None:
        """Consumes what is told; waits for the time, a flush, or the end; unblocked by `flush` and `close`."""
        while True:
            self._wake.wait(_TAKE_EVERY_S)
            self._wake.clear()
            is_last = self._ending
            try:
                self._take_waiting()
                if is_last or (self._batches and time.monotonic() - self._batched_since >= self._part_every_s):
                    self._write_part()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next caller must hear of it
                self._error = error
                return
            if is_last:
                return

    def _take_waiting(self) -> None:
        """Make columns of what waits, and parts of these where there are enough. Rows leave `_waiting` only then."""
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            if isinstance(first, threading.Event):
                self._write_part()
                waiting.popleft()
                first.set()
                continue
            started = time.perf_counter()
            rows, size, groups = list(first[0]), first[1], 1
            while groups < len(waiting) and len(rows) < _ROWS_AT_ONCE:
                more = waiting[groups]
                if isinstance(more, threading.Event):
                    break
                rows += more[0]
                size += more[1]
                groups += 1
            batch = self._parts.to_batch(rows, self._schema)
            self.write_seconds += time.perf_counter() - started
            with self._lock:
                for _ in range(groups):
                    waiting.popleft()
                self._waiting_bytes -= size
            if not self._batches:
                self._batched_since = time.monotonic()
            self._batches.append(batch)
            self._batched_rows += len(rows)
            if self._batched_rows >= self._rows_per_part or sum([batch.nbytes for batch in self._batches]) >= _BYTES_PER_PART:
                self._write_part()

    def _write_part(self) -> None:
        if not self._batches:
            return
        started = time.perf_counter()
        self._parts.write_part(self._parts.part_path(self._folder, self._next_part), self._batches, self._schema)
        self.write_seconds += time.perf_counter() - started
        self._next_part += 1
        self._written_rows += self._batched_rows
        self._batches, self._batched_rows = [], 0


def rollback_rollouts(folder: Path, *, next_group: int, open_groups: Collection[int]) -> int:
    """Take recorded rollouts back to a checkpoint, by the rule of `sluice.records.rollback`; how many members went.

    To be done before a `RolloutRecorder` is opened. Parts that hold nothing newer stay as they are. Again is fine, also after a kill.

    Args:
        folder: of the parts; nothing is done where there is none.
        next_group: ids from here on were given after the checkpoint: these groups go.
        open_groups: ids of groups that had not left at the checkpoint: their rows go.

    Raises:
        RecordError: a part is damaged (nothing has changed then), or cannot be written.
    """
    if not folder.is_dir():
        return 0
    try:
        return int(load_parts().roll_back(folder, next_group=next_group, open_groups=open_groups))
    except OSError as error:
        raise _cannot_write(folder, error) from error


def load_parts() -> ModuleType:
    """The file that knows parts, and pyarrow with it.

    Raises:
        RecordError: pyarrow is missing.
    """
    try:
        from sluice.records import rollout_parts
    except ImportError as error:
        raise RecordError(
            f"recorded rollouts need the package pyarrow, got: {error} - pip install 'sluice-rl[train]' or set records.rollouts: false"
        ) from error
    return rollout_parts


def _size(rollout: Rollout) -> int:
    """About how many bytes it holds on to."""
    return 500 + sum(
        [
            500 + len(turn.observation) + len(turn.text) + 8 * len(turn.prompt_ids) + 12 * len(turn.token_ids)  # 500: of its objects
            for turn in rollout.turns
        ]
    )


def _cannot_write(folder: Path, error: OSError) -> RecordError:
    return RecordError(
        f"{folder} must be writable, got: {error.strerror or error} - check disk and permissions, or set records.rollouts: false"
    )
