"""A run folder is new, whole, ours, and written by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sluice.errors import RecordError
from sluice.records import RunFolder

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)

HOLD_LOCK = """
import sys
from sluice.records import RunFolder
folder = RunFolder.open(sys.argv[1])
folder.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_named_after_experiment_seed_and_time_and_holds_the_configuration_as_given(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "sums", 7, "a: 1  # as given\n", now=NOON) as folder:
        assert folder.path == tmp_path / "sums-s7-20260102-120000"
        assert folder.config.read_text() == "a: 1  # as given\n"
        assert sorted(p.name for p in folder.path.iterdir() if "-" not in p.name) == ["config.yaml", "run.db", "run.lock"]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path, "sums", 7, f"run: {i}\n", now=NOON) for i in range(3)]
    assert [f.path.name for f in folders] == ["sums-s7-20260102-120000", "sums-s7-20260102-120000-2", "sums-s7-20260102-120000-3"]
    assert [f.config.read_text() for f in folders] == ["run: 0\n", "run: 1\n", "run: 2\n"]
    for folder in folders:
        folder.release()


def test_processes_that_start_together_never_share_a_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from datetime import UTC, datetime; from sluice.records import RunFolder\n"
        "for i in range(5): print(RunFolder.create(sys.argv[1], 'x', 0, 'a: 1', now=datetime(2026, 1, 1, tzinfo=UTC)).path)"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [line for process in started for line in process.communicate(timeout=60)[0].split()]
    assert len(paths) == len(set(paths)) == 10


def test_an_existing_run_is_opened_without_its_lock(folder: RunFolder) -> None:
    assert RunFolder.open(str(folder.path)).path == folder.path


def test_open_says_what_it_found_instead_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for path, came in ((tmp_path / "nowhere", "found nothing"), (tmp_path / "file", "found a file"), (tmp_path / "empty", "no run.db")):
        with pytest.raises(RecordError, match=came):
            RunFolder.open(path)


def test_open_on_the_folder_of_runs_names_the_newest_run(folder: RunFolder) -> None:
    with pytest.raises(RecordError, match=rf"1 runs, the newest is {folder.path}"):
        RunFolder.open(folder.path.parent)


def test_a_foreign_database_is_refused(folder: RunFolder, rows: Callable[..., object]) -> None:
    folder.run_db.unlink()
    rows(folder.run_db, "CREATE TABLE other (x)")
    with pytest.raises(RecordError, match="another program's database"):
        RunFolder.open(folder.path)
    folder.run_db.write_text("this is no database, but it is long enough to be taken for a page of one" * 20)
    with pytest.raises(RecordError, match="no database"):
        RunFolder.open(folder.path)


def test_a_second_writer_is_refused_and_told_who_writes(folder: RunFolder) -> None:
    import os

    second = RunFolder.open(folder.path)
    with pytest.raises(RecordError, match=f"process {os.getpid()} on .* writes to it"):
        second.lock()
    folder.lock()  # the holder may ask again
    folder.release()
    second.lock()
    second.release()
    second.release()


def test_the_lock_of_a_killed_process_is_free(folder: RunFolder) -> None:
    folder.release()
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    assert folder.is_locked() is True
    with pytest.raises(RecordError, match=f"process {holder.pid} "):
        folder.lock()
    holder.kill()
    holder.communicate(timeout=30)
    assert folder.is_locked() is False
    folder.lock()
    assert folder.is_locked() is True


def test_who_asks_whether_a_folder_is_locked_keeps_nobody_out(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.release()
    asking = (folder.path / "run.lock").open("rb")
    fcntl.flock(asking, fcntl.LOCK_SH)  # as `is_locked` does, for a moment
    assert folder.is_locked() is False  # two may ask at once
    monkeypatch.setattr("time.sleep", lambda seconds: asking.close())
    folder.lock()
    assert folder.is_locked() is True


def test_a_folder_copied_without_its_lock_is_free_and_a_system_without_locks_does_not_say(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.release()

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert folder.is_locked() is None
    (folder.path / "run.lock").unlink()
    assert folder.is_locked() is False


def test_a_run_of_an_older_version_has_no_identity(folder: RunFolder) -> None:
    with closing(sqlite3.connect(folder.run_db)) as db:
        db.execute("DELETE FROM run WHERE key = 'identity'")
        db.commit()
    with pytest.raises(RecordError, match="must say which run it is, but has no fact 'identity' .* start a new run"):
        _ = folder.identity


@pytest.mark.parametrize("name", ["a/b", "", "a b", "é"])
def test_a_name_that_makes_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError, match="exp_name must be made of letters"):
        RunFolder.create(tmp_path, name, 0, "")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.write_text("")
    with pytest.raises(RecordError, match=r"a file stands where a folder is needed.*records.root"):
        RunFolder.create(root, "x", 0, "")
    with pytest.raises(RecordError, match=r"a file stands where a folder is needed.*records.root"):
        RunFolder.create(root / "below", "x", 0, "")


def test_a_name_too_long_for_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="choose a shorter exp_name"):
        RunFolder.create(tmp_path, "x" * 300, 0, "")


def test_a_root_without_permission_is_refused(unprivileged: Callable[[], AbstractContextManager[None]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o555)
        with (
            unprivileged(),
            pytest.raises(RecordError, match=r"Permission denied - change its permissions or choose another .*records.root"),
        ):
            RunFolder.create(root, "x", 0, "")


def test_a_full_disk_is_named_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecordError, match="No space left on device - free some space"):
        RunFolder.create(tmp_path, "x", 0, "a: 1\n")
    assert list(tmp_path.iterdir()) == []
