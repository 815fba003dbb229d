"""The folder in which a run writes everything it leaves behind, and the lock that keeps a second process out of it.

<root>/<exp_name>-s<seed>-<UTC time>/
    config.yaml      the resolved configuration
    run.db           decisions, ledger, metrics (SQLite)
    run.lock         held while a process writes; says which one
    metrics.jsonl    one object per step, when configured
    tensorboard/     event files, when configured
    rollouts/        judged groups with all their members (Parquet), when configured
    correction/      log-probs of trainer and engine (NumPy), when configured
    checkpoints/     what the run can be resumed from
    model/           the trained policy
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sluice.errors import RecordError
from sluice.records.rundb import IDENTITY, check_run_db, create_run_db, read_facts

CONFIG_FILE = "config.yaml"
RUN_DB_FILE = "run.db"
LOCK_FILE = "run.lock"

_EXP_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MAX_SAME_SECOND = 1000  # runs of one name, seed and second; more can only be a loop gone wrong

_ASKED_S = 0.05  # longer than `is_locked` holds the lock while it asks

_ADVICE = {
    errno.EACCES: "change its permissions or choose another folder with records.root",
    errno.EPERM: "change its permissions or choose another folder with records.root",
    errno.EROFS: "choose a folder on a writable disk with records.root",
    errno.ENOSPC: "free some space or choose a folder on another disk with records.root",
    errno.EDQUOT: "free some space within your quota or choose another folder with records.root",
    errno.EEXIST: "a file stands where a folder is needed: move it or choose another folder with records.root",
    errno.ENOTDIR: "a file stands where a folder is needed: move it or choose another folder with records.root",
    errno.ENAMETOOLONG: "choose a shorter exp_name or records.root",
}


class RunFolder:
    """One run on disk: knows where its parts are, and whether this process may write to them.

    `create` makes a new folder and holds its lock; `open` finds an existing one and takes no lock (readers need none); `lock` takes it
    for writing. The lock belongs to the open file, so the system frees it when the process dies, however it dies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    @property
    def config(self) -> Path:
        """The resolved configuration, as it was given to `create`."""
        return self.path / CONFIG_FILE

    @property
    def run_db(self) -> Path:
        """Decisions, ledger and metrics: see `sluice.records.rundb`."""
        return self.path / RUN_DB_FILE

    @property
    def metrics_jsonl(self) -> Path:
        """One object per step. Absent unless that sink is on."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files. Absent unless that sink is on."""
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        """Folder of recorded rollouts: see `sluice.records.rollouts`. Absent unless they are recorded."""
        return self.path / "rollouts"

    @property
    def correction(self) -> Path:
        """Folder of saved log-probs: see `sluice.correction.saved`. Absent unless they are saved."""
        return self.path / "correction"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints: see `sluice.records.checkpoints`. Absent until the first one."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Folder of the trained policy. Absent until the run has saved it."""
        return self.path / "model"

    @property
    def identity(self) -> str:
        """What tells this run from every other one.

        Raises:
            RecordError: run.db is missing or not ours, or from a version of Sluice without checkpoints to resume from.
        """
        facts = read_facts(self.run_db)
        if IDENTITY not in facts:
            raise RecordError(
                f"{self.run_db} must say which run it is, but has no fact {IDENTITY!r} - an older Sluice wrote it: start a new run"
            )
        return str(facts[IDENTITY])

    @classmethod
    def create(
        cls,
        root: Path | str,
        exp_name: str,
        seed: int,
        resolved_config: str,
        *,
        facts: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Self:
        """Make a folder that did not exist before, with the configuration and an empty run.db in it, and lock it.

        Args:
            root: folder of runs; made when missing.
            exp_name: first part of the name; letters, digits, `.`, `_` and `-`.
            seed: second part of the name.
            resolved_config: text of config.yaml.
            facts: further entries of run.db's `run` table; values must fit into JSON.
            now: time in the name; default the current time.

        Raises:
            RecordError: the folder cannot be made or written; nothing is left behind then.
        """
        if not _EXP_NAME.fullmatch(exp_name):
            raise RecordError(f"exp_name must be made of letters, digits, '.', '_' and '-', got {exp_name!r} - it becomes a folder name")
        root = Path(root)
        stamp = (now or datetime.now(UTC)).astimezone(UTC)
        path = _make_unique(root, f"{exp_name}-s{seed}-{stamp:%Y%m%d-%H%M%S}")
        folder = cls(path)
        try:
            folder.lock()
            folder.config.write_text(resolved_config, encoding="utf-8")
            create_run_db(folder.run_db, {"exp_name": exp_name, "seed": seed, "created": stamp.timestamp(), **(facts or {})})
        except BaseException as error:
            folder.release()
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, OSError):
                raise _cannot_write(path, error) from error
            raise
        return folder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Find the folder of an earlier run, finished or not.

        Raises:
            RecordError: it is missing, or not a run folder of ours, or written by another version of the format.
        """
        path = Path(path)
        if not path.is_dir():
            came = "a file" if path.exists() else "nothing"
            raise RecordError(f"{path} must be a run folder, found {came} there - give the folder that 'sluice train' printed")
        folder = cls(path)
        missing = [file.name for file in (folder.config, folder.run_db) if not file.is_file()]
        if missing:
            runs = sorted((p.parent for p in path.glob(f"*/{RUN_DB_FILE}")), key=lambda p: p.stat().st_mtime)
            advice = f"it holds {len(runs)} runs, the newest is {runs[-1]}" if runs else "give the folder that 'sluice train' printed"
            raise RecordError(f"{path} must be a run folder, but it has no {' and no '.join(missing)} - {advice}")
        check_run_db(folder.run_db)
        return folder

    def lock(self) -> None:
        """Claim the folder for writing; again by the holder is fine. A lock whose process died is free.

        Raises:
            RecordError: another process, or another `RunFolder` of this one, holds it.
        """
        if self._lock_fd is not None:
            return
        file = self.path / LOCK_FILE
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _cannot_write(file, error) from error
        try:
            _take(fd)
            os.ftruncate(fd, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}
            os.pwrite(fd, json.dumps(holder).encode(), 0)
        except BlockingIOError:
            holder_text = _describe_holder(os.pread(fd, 4096, 0))
            os.close(fd)
            raise RecordError(f"{self.path} must be free for writing, but {holder_text} writes to it - wait for it or stop it") from None
        except OSError as error:
            os.close(fd)
            raise _cannot_write(file, error) from error
        self._lock_fd = fd

    def is_locked(self) -> bool | None:
        """Whether some process holds the lock, which is to say that it lives and writes. None: the system does not say."""
        if self._lock_fd is not None:
            return True
        try:
            fd = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # a copy
            return False
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        """Give the lock back; again is fine."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        self.lock()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def _make_unique(root: Path, name: str) -> Path:
    """A new folder in root. mkdir either makes it or fails, so that two runs in the same second never share one."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(root, error) from error
    for count in range(1, _MAX_SAME_SECOND + 1):
        path = root / (name if count == 1 else f"{name}-{count}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(path, error) from error
        return path
    raise RecordError(f"{root / name} and {_MAX_SAME_SECOND - 1} numbered ones exist already - are runs started in a loop?")


def _cannot_write(path: Path, error: OSError) -> RecordError:
    """The system's refusal, with what a user can do about it."""
    advice = _ADVICE.get(error.errno or 0, "check the disk or choose another folder with records.root")
    return RecordError(f"{path} must be writable, got: {error.strerror or error} - {advice}")


def _take(fd: int) -> None:
    """Lock the file for writing, or raise BlockingIOError: not at once, since somebody may just be asking whether it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_ASKED_S)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _describe_holder(content: bytes) -> str:
    """Who wrote this lock file."""
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (ValueError, KeyError, TypeError):  # seen between its lock and its note
        return "another process"
