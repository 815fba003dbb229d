"""Questions about this machine: Python, packages, processors, and whether a run can write and start its workers here."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from sluice.cli.doctor import Check, ask, ok, problem, warning
from sluice.cli.reporting import DISTRIBUTION, extra_packages

OLDEST_PYTHON: Final = (3, 11)
WORKER_TIMEOUT_S: Final = 30.0  # a worker process starts in well under a second; a machine that needs this long cannot score
LITTLE_SPACE_MB: Final = 500  # a run.db, event files and a few checkpoints of a small model
WAL_BUSY_S: Final = 2.0


def environment_checks(runs: Path) -> Iterator[Check]:
    """Everything that can be asked without a recipe. `runs` is the folder that runs are made in; it need not exist yet."""
    yield from ask("python", _check_python)
    yield from ask("packages", _check_packages)
    yield from ask("processors", _check_processors)
    yield from ask("runs folder", lambda: _check_runs_folder(runs))
    yield from ask("workers", _check_workers)


def missing_packages(extra: str | None) -> list[str]:
    """Packages of an extra that are not installed."""
    return [name for name in extra_packages(extra) if _version(name) is None]


def _check_python() -> Iterator[Check]:
    found = f"{platform.python_version()} ({platform.system()} {platform.machine()}, {sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        yield problem("python", found, f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    else:
        yield ok("python", found)


def _check_packages() -> Iterator[Check]:
    if _version(DISTRIBUTION) is None:
        yield problem("packages", f"{DISTRIBUTION} is not installed, so that its requirements are not known", "pip install -e .")
        return
    yield from package_checks(None, extra_packages(None))
    yield from package_checks("train", extra_packages("train"), purpose=", so that no run of our own is possible", missing=warning)


def package_checks(
    extra: str | None, wanted: Mapping[str, str], *, purpose: str = "", missing: Callable[[str, str, str], Check] = problem
) -> Iterator[Check]:
    """Packages with their version ranges: whether they are installed, and in a version that was tested.

    `extra` brings them (None: they are always needed). `purpose` is what is said behind missing ones, and `missing` how bad that is.
    """
    name, target = ("packages", DISTRIBUTION) if extra is None else (f"[{extra}]", f"'{DISTRIBUTION}[{extra}]'")
    versions = {package: _version(package) for package in wanted}
    absent = [package for package, version in versions.items() if version is None]
    others = {package: version for package, version in versions.items() if version is not None and not _is_within(version, wanted[package])}
    if absent:
        yield missing(name, f"missing: {', '.join(absent)}{purpose}", f"pip install {target}")
    if others:
        told = ", ".join(f"{package} {version} (tested: {wanted[package]})" for package, version in others.items())
        yield warning(name, f"outside the tested versions: {told}", f"pip install {target}")
    if not absent and not others:
        yield ok(name, ", ".join(f"{package} {version}" for package, version in versions.items()))


def _check_processors() -> Iterator[Check]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    cores = f"{usable} usable" + (f", limited to the time of {quota:g}" if quota is not None else "")
    if _version("torch") is None:
        yield ok("processors", cores)
        return
    import torch

    threads = torch.get_num_threads()
    gpu = f"{torch.cuda.device_count()} GPU" if torch.cuda.is_available() else "no GPU"
    told = f"{cores}; torch uses {threads} thread{'' if threads == 1 else 's'} and sees {gpu}"
    if threads > (quota or usable):
        yield warning("processors", told, "more threads than processors slow each other down: set OMP_NUM_THREADS or engine.torch_threads")
    else:
        yield ok("processors", told)


def _check_runs_folder(runs: Path) -> Iterator[Check]:
    base = _existing(runs)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".sluice-doctor-", dir=base))
    except OSError as err:
        yield problem(
            "runs folder", f"{base} cannot be written: {err.strerror}", "change its permissions, or set records.root to another folder"
        )
        return
    try:
        trouble = _wal_trouble(scratch / "probe.db")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    free_mb = shutil.disk_usage(base).free // 2**20
    if trouble:
        yield problem(
            "runs folder",
            f"{base}: SQLite's write-ahead log does not work here ({trouble})",
            "set records.root to a folder on a local disk",
        )
    elif free_mb < LITTLE_SPACE_MB:
        yield warning("runs folder", f"{base}: {free_mb} MB free", "free some space, or set records.root to another disk")
    else:
        yield ok("runs folder", f"{runs.absolute()} can be written, SQLite's write-ahead log works, {free_mb / 1024:.1f} GB free")


def _wal_trouble(file: Path) -> str | None:
    """A run writes and a report reads at the same time: try just that. None when it works, else why not."""
    writer = sqlite3.connect(file, timeout=WAL_BUSY_S)
    try:
        (mode,) = writer.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            return f"journal mode stays {mode}"
        writer.execute("CREATE TABLE probe (n INTEGER)")
        writer.commit()
        writer.execute("INSERT INTO probe VALUES (1)")  # an open transaction, under which the reader must not wait
        reader = sqlite3.connect(file, timeout=WAL_BUSY_S)
        try:
            (count,) = reader.execute("SELECT count(*) FROM probe").fetchone()
        finally:
            reader.close()
        writer.commit()
        return None if count == 0 else "a reader sees what is not committed"
    except sqlite3.Error as err:
        return str(err)
    finally:
        writer.close()


def _check_workers() -> Iterator[Check]:
    """Reward workers are processes of a fork server; some sandboxes forbid them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        yield problem(
            "workers", f"{platform.system()} has no fork server for worker processes", "use Linux or macOS, or reward_pool.workers: 0"
        )
        return
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_answer, args=(theirs,), daemon=True)
    remedy = "allow this user to start processes and to use /dev/shm, or set reward_pool.workers: 0 (without time limits)"
    try:
        worker.start()
        theirs.close()
        if not ours.poll(WORKER_TIMEOUT_S):
            yield problem("workers", f"a worker process did not answer within {WORKER_TIMEOUT_S:g} s", remedy)
        else:
            yield ok("workers", f"a worker process answers (pid {ours.recv()}, started by a fork server)")
    except (OSError, EOFError) as err:
        yield problem("workers", f"a worker process cannot be started: {type(err).__name__}: {err}", remedy)
    finally:
        ours.close()
        if worker.pid is not None:
            worker.kill()
            worker.join(WORKER_TIMEOUT_S)


def _answer(connection: Connection) -> None:
    connection.send(os.getpid())
    connection.close()


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _cpu_quota() -> float | None:
    """Processors' worth of time that a container may use; None: no limit, or not known."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _is_within(version: str, bounds: str) -> bool:
    """Whether a version keeps bounds such as ">=2.0,<3", the only kind that pyproject.toml has."""
    found = _numbers(version)
    for bound in filter(None, bounds.split(",")):
        if bound.startswith(">=") and found < _numbers(bound):
            return False
        if bound.startswith("<") and found >= _numbers(bound):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers: "2.13.0+cpu" is (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
