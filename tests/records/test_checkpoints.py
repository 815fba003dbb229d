"""A checkpoint is whole or refused, whatever happened to the disk or the process, and what comes back is exactly what was told."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import struct
import tempfile
import tracemalloc
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.errors import RecordError
from sluice.records import Checkpoints, RunFolder
from sluice.records.checkpoints import MANIFEST_FILE, complete_steps, decode, encode

DTYPES = [f"{order}{kind}" for order in "<>" for kind in ("b1", "i1", "i2", "i4", "i8", "u1", "u8", "f2", "f4", "f8", "c8", "c16")]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape)
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    made = np.frombuffer(raw, dtype=dtype).reshape(shape)
    return draw(st.sampled_from([made, made.T, np.asfortranarray(made), made[..., ::-1] if shape else made]))


keys = st.text(max_size=4) | st.sampled_from(["$int", "$float", "$dict", "$array", "$"])
leaves = st.none() | st.booleans() | st.integers() | st.integers(-(2**130), 2**130) | st.floats() | st.text(max_size=5) | arrays()
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)  # type: ignore[arg-type]
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """The value in a form in which only the same one is equal: types told apart, floats by their bits (any NaN is NaN)."""
    if isinstance(value, list | tuple):
        return [exact(entry) for entry in value]
    if isinstance(value, dict):
        return {key: exact(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("<d", value))
    return (type(value).__name__, value)


# ---------------------------------------------------------------- the codec


@settings(max_examples=150)
@given(states)
@example([math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, True, 1, 1.0, 10**5000])
@example({"$array": ["<f8", [1], ""], "$int": "0x1"})
@example("\ud800 \x00 é")
@example(np.array(math.nan, dtype=">f4"))
def test_a_state_comes_back_exactly(state: Any) -> None:
    text = encode(state)
    assert exact(decode(text)) == exact(state)
    json.loads(text, parse_constant=pytest.fail)  # no words that JSON does not have
    assert text.isascii()


def test_a_decoded_array_can_be_written_to() -> None:
    back = decode(encode({"position": np.arange(3)}))["position"]
    back += 1
    assert back.tolist() == [1, 2, 3]


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("odd", "came"),
    [
        (object(), "object"),
        (np.float64(1.0), "float64 '1.0'"),
        (np.int64(1), "int64 '1'"),
        ({1, 2}, "set"),
        (b"raw", "bytes"),
        (Path("x"), "PosixPath"),
        (Counter("aab"), "Counter"),
        (Point(1), "Point"),
        (np.array([object()]), "an array of object"),
        (np.array(["text"]), "an array of <U4"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
    ],
)
def test_anything_else_is_refused_and_its_place_is_named(odd: object, came: str) -> None:
    with pytest.raises(RecordError, match=r"state\.scheduler\.committed\[1\]\.tokens: a checkpoint's state must be") as caught:
        encode({"tasks": 1, "scheduler": {"committed": [{}, {"tokens": odd}]}})
    assert f"got {came}" in str(caught.value)


def test_keys_must_be_text_and_no_state_may_hold_itself() -> None:
    with pytest.raises(RecordError, match=r"state\.by_id: the keys .* must be text, got int 7"):
        encode({"by_id": {7: "seven"}})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(RecordError, match="holds itself or is nested too deeply"):
        encode(loop)


@pytest.mark.parametrize(
    "text", ["", "{", '{"$array":["<f8",[2],"AAAA"]}', '{"$array":["|O",[1],"AAAA"]}', '{"$what":1}', '{"$int":"x"}', "[" * 100_000]
)
def test_text_that_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match="must be what Sluice wrote"):
        decode(text)


# ---------------------------------------------------------------- whole or refused


def trainer_writes(checkpoints: Checkpoints, step: int) -> None:
    """What the trainer leaves in the folder of a step."""
    folder = checkpoints.path(step)
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(f"weights of step {step}".encode())
    (folder / "optimizer.pt").write_bytes(bytes(range(20)))
    (folder / "parts" / "rng.pth").write_bytes(b"")


def state_of(step: int, told: int = 0) -> dict[str, Any]:
    return {"scheduler": {"step": step, "told": told}, "tokens": np.arange(step)}


def write(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        trainer_writes(checkpoints, step)
        assert checkpoints.write_state(step, state_of(step)) == []


def newest_step(checkpoints: Checkpoints) -> int | None:
    """The step of the newest whole checkpoint; what comes with it must belong to it."""
    found = checkpoints.newest()
    if found is None:
        return None
    step, folder, state = found
    assert folder == checkpoints.path(step)
    assert state["scheduler"]["step"] == step
    assert (folder / "model.safetensors").read_bytes() == f"weights of step {step}".encode()
    return step


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", "us", 2)


def test_the_newest_checkpoint_comes_back_with_its_state_and_nothing_to_say(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None
    write(checkpoints, 9, 10)
    found = checkpoints.newest()
    assert found is not None
    assert (found[0], found[1]) == (10, checkpoints.path(10))
    assert exact(found[2]) == exact(state_of(10))
    assert checkpoints.passed_over == []


def test_a_folder_is_made_when_the_trainer_wrote_none(checkpoints: Checkpoints) -> None:
    checkpoints.write_state(1, {"a": 1})
    assert sorted(path.name for path in checkpoints.path(1).iterdir()) == [MANIFEST_FILE, "sluice_state.json"]
    assert checkpoints.newest() == (1, checkpoints.path(1), {"a": 1})


FILES = ("model.safetensors", "optimizer.pt", "parts/rng.pth", "sluice_state.json", MANIFEST_FILE)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole checkpoints, of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("two")
    write(Checkpoints(folder, "us", 2), 5, 10)
    return folder


@settings(max_examples=100)
@given(name=st.sampled_from(FILES), how=st.sampled_from(["truncate", "flip", "append", "delete", "rename"]), data=st.data())
def test_a_checkpoint_that_is_damaged_in_any_file_at_any_byte_is_refused_and_the_one_before_is_used(
    two: Path, name: str, how: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        checkpoints = Checkpoints(Path(shutil.copytree(two, Path(temporary) / "copy")), "us", 2)
        file = checkpoints.path(10) / name
        content = file.read_bytes()
        if how == "delete":
            file.unlink()
        elif how == "rename":
            file.rename(file.with_name(data.draw(st.sampled_from(["other", Path(name).name.upper()]))))
        elif how == "append" or not content:
            file.write_bytes(content + data.draw(st.binary(min_size=1, max_size=3)))
        else:
            at = data.draw(st.integers(0, len(content) - 1))
            flipped = bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))])
            file.write_bytes(content[:at] if how == "truncate" else content[:at] + flipped + content[at + 1 :])
        assert newest_step(checkpoints) == 5
        (why,) = checkpoints.passed_over
        assert str(checkpoints.path(10)) in why
        assert "is torn" in why
        assert name in why
        if data.draw(st.booleans()):  # and so it is when the one before is damaged as well
            (checkpoints.path(5) / "optimizer.pt").unlink()
            assert checkpoints.newest() is None
            assert len(checkpoints.passed_over) == 2


def test_why_a_checkpoint_is_passed_over_is_said(checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder
    write(Checkpoints(folder, "us", 9), 1, 2, 3, 4, 5, 6)
    write(Checkpoints(folder, "them", 9), 7)
    (checkpoints.path(2) / "optimizer.pt").write_bytes(b"short")
    (checkpoints.path(3) / "optimizer.pt").write_bytes(bytes(20))
    (checkpoints.path(4) / "parts" / "rng.pth").unlink()
    (checkpoints.path(5) / MANIFEST_FILE).unlink()
    checkpoints.path(6).rename(checkpoints.path(8))
    checkpoints.path(9).write_text("a file")
    (folder / "checkpoint-010").mkdir()  # nobody's
    assert newest_step(checkpoints) == 1
    assert [why.removeprefix(str(folder)) for why in checkpoints.passed_over] == [
        "/checkpoint-9 cannot be resumed from: it is no folder",
        "/checkpoint-8 cannot be resumed from: it is foreign: its folder was renamed, it is of step 6",
        "/checkpoint-7 cannot be resumed from: it is foreign: it belongs to run them, this is run us",
        "/checkpoint-5 cannot be resumed from: it is torn: sluice_manifest.json, which is written last, is missing",
        "/checkpoint-4 cannot be resumed from: it is torn: parts/rng.pth is missing",
        "/checkpoint-3 cannot be resumed from: it is torn: the content of optimizer.pt is not what was written (its digest differs)",
        "/checkpoint-2 cannot be resumed from: it is torn: optimizer.pt has 5 bytes instead of 20",
    ]


def test_another_format_is_foreign(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    write(checkpoints, 1)
    monkeypatch.setattr("sluice.records.checkpoints.FORMAT_VERSION", 2)
    write(checkpoints, 2)
    monkeypatch.undo()
    assert newest_step(checkpoints) == 1
    assert "it is foreign: it has format 2, this version of Sluice reads 1" in checkpoints.passed_over[0]


def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_a_folder_that_cannot_be_read_is_an_error(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(checkpoints, 1, 2)
    path_open = Path.open

    def broken(self: Path, *how: Any, **more: Any) -> Any:
        if self == checkpoints.path(2) / "optimizer.pt":
            raise OSError(errno.EIO, "Input/output error")
        return path_open(self, *how, **more)

    monkeypatch.setattr(Path, "open", broken)
    assert newest_step(checkpoints) == 1
    assert checkpoints.passed_over == [f"{checkpoints.path(2)} cannot be resumed from: it is unreadable (Input/output error)"]
    shutil.rmtree(checkpoints.folder)
    checkpoints.folder.write_text("")
    with pytest.raises(RecordError, match="must be a readable folder, got: Not a directory"):
        checkpoints.newest()


def test_files_that_came_later_do_no_harm(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    (checkpoints.path(1) / ".DS_Store").write_bytes(b"x")
    assert newest_step(checkpoints) == 1


def test_large_files_are_digested_piece_by_piece(checkpoints: Checkpoints) -> None:
    checkpoints.path(1).mkdir(parents=True)
    with (checkpoints.path(1) / "model.safetensors").open("wb") as file:
        file.truncate(48 << 20)
    tracemalloc.start()
    checkpoints.write_state(1, {})
    assert checkpoints.newest() is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


# ---------------------------------------------------------------- killed


class Killed(BaseException):
    """The process is no more."""


@contextmanager
def killed(at: int | None, *, after: bool, share: float = 0.5) -> Iterator[list[tuple[str, str]]]:
    """Let the process die at its at-th change to the disk, just before or just after it. Yields the changes, with what they were done to.

    A file that was being written then holds a part of its content only. Nothing is really synced: a test machine does not lose its power.
    """
    done: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:

        def change(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def changing(what: Any, *rest: Any, **more: Any) -> Any:
                path = os.readlink(f"/proc/self/fd/{what}") if name == "fsync" else str(what)
                done.append((name, path))
                dies = len(done) == at
                if dies and not after:
                    if name == "fsync" and fcntl.fcntl(what, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                        os.ftruncate(what, int(os.fstat(what).st_size * share))
                    raise Killed
                try:
                    return None if name == "fsync" else original(what, *rest, **more)
                finally:
                    if dies:
                        raise Killed

            return changing

        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, change(name, getattr(os, name)))
        yield done


def prepare(checkpoints: Checkpoints, before: str) -> tuple[int, list[tuple[int, int] | None]]:
    """Bring the folder into a state. Returns the step to be written and what may be found when that is killed: (step, told)."""
    if before == "nothing":
        trainer_writes(checkpoints, 10)
        return 10, [None, (10, 1)]
    if before == "older ones, one of them to be deleted":
        write(checkpoints, 5, 6)
        trainer_writes(checkpoints, 10)
        return 10, [(6, 0), (10, 1)]
    if before == "a torn one of this step":
        write(checkpoints, 6, 10)
        (checkpoints.path(10) / MANIFEST_FILE).unlink()
        return 10, [(6, 0), (10, 1)]
    write(checkpoints, 10)
    return 10, [(10, 0), (10, 1)]


BEFORE = ("nothing", "older ones, one of them to be deleted", "a torn one of this step", "a whole one of this step")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("before", BEFORE)
def test_killed_at_any_change_to_the_disk_the_old_or_the_new_checkpoint_is_found_and_the_run_goes_on(
    tmp_path: Path, before: str, after: bool
) -> None:
    at = 0
    seen = set()
    while True:
        at += 1
        checkpoints = Checkpoints(tmp_path / str(at) / "checkpoints", "us", 2)
        with killed(None, after=False):
            step, possible = prepare(checkpoints, before)
        try:
            with killed(at, after=after, share=at % 5 / 4):
                checkpoints.write_state(step, state_of(step, told=1))
            break
        except Killed:
            pass
        again = Checkpoints(checkpoints.folder, "us", 2)
        found = again.newest()
        answer = None if found is None else (found[0], found[2]["scheduler"]["told"])
        assert answer in possible
        seen.add(answer)
        with killed(None, after=False):  # the next process goes on
            again.discard_after(0 if found is None else found[0])
            write(again, step + 1, step + 2)
        assert newest_step(again) == step + 2
        assert again.passed_over == []
        assert sorted(path.name for path in again.folder.iterdir()) == ["checkpoint-11", "checkpoint-12"]
    assert at > 12
    assert seen == set(possible)


def test_everything_is_on_disk_before_the_manifest_counts_and_the_new_one_before_an_old_one_goes(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1, 2)
    trainer_writes(checkpoints, 3)
    with killed(None, after=False) as changes:
        checkpoints.write_state(3, state_of(3))
    folder = str(checkpoints.path(3))
    renamed = changes.index(("replace", f"{folder}/{MANIFEST_FILE}.unfinished"))
    synced = {path for name, path in changes[:renamed] if name == "fsync"}
    assert {f"{folder}/{name}" for name in FILES if name != MANIFEST_FILE} <= synced
    assert {f"{folder}/{MANIFEST_FILE}.unfinished", f"{folder}/parts", folder, str(checkpoints.folder)} <= synced
    assert changes[renamed + 1] == ("fsync", folder)
    assert changes[renamed + 2 : renamed + 4] == [("unlink", f"{checkpoints.path(1)}/{MANIFEST_FILE}"), ("fsync", str(checkpoints.path(1)))]


# ---------------------------------------------------------------- how many stay


@settings(max_examples=30)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=7))
def test_the_newest_whole_ones_stay_and_everything_else_goes(keep: int, saves: list[tuple[int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as temporary, killed(None, after=False):
        checkpoints = Checkpoints(Path(temporary), "us", keep)
        whole: list[int] = []
        step = 0
        for more, is_damaged in saves:
            step += more
            write(checkpoints, step)
            whole = [*whole, step][-keep:]
            assert complete_steps(checkpoints.folder) == whole
            assert len(list(checkpoints.folder.iterdir())) == len(whole)
            if is_damaged:
                (checkpoints.path(step) / "optimizer.pt").unlink()
                whole.remove(step)
            assert newest_step(checkpoints) == (whole[-1] if whole else None)


def test_a_checkpoint_of_another_run_is_not_deleted_unless_it_was_refused_for_a_resume(checkpoints: Checkpoints) -> None:
    write(Checkpoints(checkpoints.folder, "them", 1), 1, 9)
    write(checkpoints, 2, 3, 4)
    assert complete_steps(checkpoints.folder) == [3, 4, 9]
    assert newest_step(checkpoints) == 4
    checkpoints.discard_after(4)
    assert complete_steps(checkpoints.folder) == [3, 4]


def test_what_cannot_be_deleted_is_said_does_not_end_the_run_and_is_tried_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(checkpoints, 1, 2)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    trainer_writes(checkpoints, 3)
    monkeypatch.setattr(shutil, "rmtree", busy)
    (problem,) = checkpoints.write_state(3, state_of(3))
    assert problem == f"{checkpoints.path(1)} is not needed any more but cannot be deleted: Device or resource busy"
    assert newest_step(checkpoints) == 3
    monkeypatch.undo()
    write(checkpoints, 4)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_of_a_step_written_twice_the_last_state_holds(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    for told in (1, 2, 3):
        checkpoints.write_state(1, state_of(1, told))
        found = checkpoints.newest()
        assert found is not None
        assert found[2]["scheduler"]["told"] == told
        assert len(list(checkpoints.path(1).glob("sluice_state*"))) == 1


def test_a_resume_discards_later_checkpoints_the_refused_ones_among_them_and_nothing_else(checkpoints: Checkpoints) -> None:
    write(Checkpoints(checkpoints.folder, "us", 9), 1, 2, 3, 4)
    (checkpoints.path(4) / "optimizer.pt").unlink()
    (checkpoints.folder / "notes.txt").write_text("mine")
    assert newest_step(checkpoints) == 3
    checkpoints.discard_after(3)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "notes.txt"]
    checkpoints.discard_after(1)
    assert newest_step(checkpoints) == 1
    assert checkpoints.passed_over == []
    checkpoints.discard_after(0)
    assert checkpoints.newest() is None
    assert [path.name for path in checkpoints.folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_while_it_discards_a_resume_finds_the_chosen_checkpoint_or_a_whole_later_one(tmp_path: Path, after: bool) -> None:
    at = 0
    while True:
        at += 1
        checkpoints = Checkpoints(tmp_path / str(at), "us", 9)
        with killed(None, after=False):
            write(checkpoints, 1, 2, 3)
        try:
            with killed(at, after=after):
                checkpoints.discard_after(1)
            break
        except Killed:
            assert newest_step(Checkpoints(checkpoints.folder, "us", 9)) in (1, 2, 3)
    assert newest_step(checkpoints) == 1
    assert at > 8


# ---------------------------------------------------------------- when the disk refuses


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "check the disk and the permissions")])
def test_a_disk_that_refuses_is_named_and_the_checkpoint_before_stays(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    write(checkpoints, 1)
    trainer_writes(checkpoints, 2)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RecordError, match=rf"checkpoint-2 must be writable .* got: {os.strerror(number)} - {advice}.* then resume the run"):
        checkpoints.write_state(2, state_of(2))
    assert newest_step(checkpoints) == 1
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(RecordError, match=f"checkpoint-2 .* got: {os.strerror(number)}"):
        checkpoints.discard_after(1)


def test_a_state_that_cannot_be_written_leaves_the_disk_as_it_was(checkpoints: Checkpoints) -> None:
    with pytest.raises(RecordError, match="state.a: "):
        checkpoints.write_state(1, {"a": object()})
    assert not checkpoints.folder.exists()


def test_to_keep_none_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, "us", 0)


def test_runs_have_identities_of_their_own_which_copies_share(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "a", 0, "") as one, RunFolder.create(tmp_path, "a", 0, "") as other:
        assert one.identity == RunFolder.open(one.path).identity != other.identity
        assert RunFolder.open(shutil.copytree(one.path, tmp_path / "copy")).identity == one.identity
