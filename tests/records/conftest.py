"""What the tests of this room share: a run folder, a group record, ways to make a disk fail."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from sluice.records import RunFolder
from sluice.scheduler.events import GroupRecord


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "runs", "exp", 42, "exp_name: exp\n") as made:
        yield made


def make_record(group_id: int, **changes: object) -> GroupRecord:
    """A group record; what is not given is plain."""
    values: dict[str, object] = {
        "group_id": group_id,
        "task_id": f"task-{group_id}",
        "domain": "add",
        "epoch": 0,
        "round": 1,
        "start_step": 0,
        "end_step": 0,
        "outcome": "trained",
        "reason": "kept",
        "category": None,
        "source": "std_filter",
        "attempts": 2,
        "sampled_tokens": 10,
        "seconds": 0.5,
        "policy_version": 0,
        "rewards": (1.0, 0.0),
    }
    return GroupRecord(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def record() -> Callable[..., GroupRecord]:
    return make_record


@pytest.fixture
def rows() -> Callable[[Path, str], list[tuple[object, ...]]]:
    """Runs a query on a run.db as any SQLite reader would."""

    def query(run_db: Path, sql: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(run_db)) as db:
            return db.execute(sql).fetchall()

    return query


@contextmanager
def no_privileges() -> Iterator[None]:
    """Root ignores permissions: be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def unprivileged() -> Callable[[], object]:
    return no_privileges
