"""Checkpoints that a run can be resumed from: our state beside the trainer's files, and a manifest that proves them whole.

checkpoints/
    checkpoint-50/
        ...                     what the trainer wrote
        sluice_state.json       the state of everything else (`encode`)
        sluice_manifest.json    written last: format, step, identity of the run, size and digest of every other file

The manifest is what makes a folder a checkpoint. It appears by a rename, after everything else is on disk, and it is the first thing that
goes when a checkpoint is deleted. So at every moment each folder is either whole or recognised as torn, wherever the process was killed.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sluice.errors import RecordError

FORMAT_VERSION = 1
MANIFEST_FILE = "sluice_manifest.json"

_UNFINISHED = ".unfinished"  # ending of the manifest until it counts
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_DIGEST_BYTES = 32

# ---------------------------------------------------------------- the codec

_MARK: Final = "$"  # first letter of the keys that say what JSON has no word for
_INT, _FLOAT, _DICT, _ARRAY = "$int", "$float", "$dict", "$array"
_LARGEST_INT: Final = 2**63  # larger ones lose digits in other readers of JSON, and beyond 4300 digits Python itself refuses them
_NUMBER_KINDS: Final = "biufc"  # of arrays: bool, integers, floats, complex numbers


def encode(state: Any) -> str:
    """The state as JSON, from which `decode` makes the same values again.

    Plain data: None, bool, int, float (NaN, infinities and -0.0 too), str, list, dict with str keys, and numpy arrays of numbers, exact in
    dtype, shape and values. A tuple comes back as a list.

    Raises:
        RecordError: something else is in it; the message names the place.
    """
    try:
        return json.dumps(_packed(state, "state"), allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise RecordError(
            "a checkpoint's state must be a tree of plain data, got one that holds itself or is nested too deeply - "
            "this is a fault of the part whose state it is"
        ) from None


def _packed(value: Any, where: str) -> Any:
    kind = type(value)  # the type itself: a subclass would not come back as what it was
    if value is None or kind is str or kind is bool:
        return value
    if kind is int:
        return value if -_LARGEST_INT < value < _LARGEST_INT else {_INT: hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is list or kind is tuple:
        return [_packed(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if kind is dict:
        if (odd := next((key for key in value if type(key) is not str), None)) is not None:
            raise RecordError(f"{where}: the keys of a checkpoint's state must be text, got {type(odd).__name__} {odd!r} - use str(key)")
        packed = {key: _packed(entry, f"{where}.{key}") for key, entry in value.items()}
        return {_DICT: packed} if any(key.startswith(_MARK) for key in packed) else packed
    if kind is np.ndarray and value.dtype.kind in _NUMBER_KINDS:
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return {_ARRAY: [value.dtype.str, list(value.shape), base64.b64encode(little.tobytes()).decode()]}
    came = f"an array of {value.dtype}" if kind is np.ndarray else f"{kind.__name__} {str(value)[:80]!r}"
    raise RecordError(
        f"{where}: a checkpoint's state must be made of None, bool, int, float, str, list, dict and numpy arrays of numbers, got {came} - "
        "turn it into one of these in state_dict()"
    )


def decode(text: str) -> Any:
    """The state that `encode` was given.

    Raises:
        RecordError: the text is none of `encode`.
    """
    try:
        return _unpacked(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RecordError(f"a checkpoint's state must be what Sluice wrote, got {text[:80]!r} ({error})") from error


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (mark := next(iter(value))).startswith(_MARK):
        return {key: _unpacked(entry) for key, entry in value.items()}
    entry = value[mark]
    if mark == _DICT:
        return {key: _unpacked(inner) for key, inner in entry.items()}
    if mark == _INT:
        return int(entry, 16)
    if mark == _FLOAT:
        return float(entry)
    if mark != _ARRAY:
        raise ValueError(f"unknown mark {mark!r}")
    dtype = np.dtype(entry[0])
    if dtype.kind not in _NUMBER_KINDS:
        raise ValueError(f"an array of {dtype}")
    little = np.frombuffer(base64.b64decode(entry[2], validate=True), dtype=dtype.newbyteorder("<"))
    return little.reshape(entry[1]).astype(dtype)  # a copy: what was decoded can be written to


# ---------------------------------------------------------------- the folders


class _Refused(Exception):
    """Why a folder is no whole checkpoint of this run."""


class _Foreign(_Refused):
    """It is none of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """What proves a checkpoint whole."""

    step: int
    identity: str
    state: str  # name of the state file that counts
    files: Mapping[str, tuple[int, str]]  # path inside the folder -> bytes, digest

    def to_json(self) -> str:
        """The file: the manifest and its own digest, so that no byte of it can change unnoticed."""
        content = {"format": FORMAT_VERSION, "step": self.step, "identity": self.identity, "state": self.state, "files": self.files}
        return _sealed(content)


class Checkpoints:
    """The checkpoints of one run: writes our part of them, finds the newest whole one, deletes old ones.

    One process at a time: whoever writes holds the lock of the run folder.
    """

    def __init__(self, folder: Path, identity: str, keep: int) -> None:
        """Args:
        folder: where `checkpoint-<step>` folders are; may be missing yet.
        identity: of the run (`RunFolder.identity`); a checkpoint of another one is never used.
        keep: how many whole ones stay, >= 1.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep} - the checkpoint just written always stays")
        self.folder = folder
        self.passed_over: list[str] = []
        """A sentence for each folder that the last `newest` refused, newest first."""
        self._identity = identity
        self._keep = keep

    def path(self, step: int) -> Path:
        """The folder of a step, whether it exists or not: where the trainer writes its files."""
        return self.folder / f"checkpoint-{step}"

    def write_state(self, step: int, state: Any) -> list[str]:
        """Complete the checkpoint of a step, after the trainer has written its files: our state, then the manifest; delete old ones then.

        Killed anywhere in it, the newest whole checkpoint is the one from before or this one. Of a step written again the last one holds.
        What the state says of run.db must be on disk by then: `Journal.flush` first. Blocks while the disk takes and gives the files.

        Returns:
            A sentence for each old checkpoint that could not be deleted; it is tried again next time.

        Raises:
            RecordError: the state is no plain data (nothing was written then), or the disk refuses.
        """
        text = encode(state)
        folder = self.path(step)
        unfinished = folder / (MANIFEST_FILE + _UNFINISHED)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            old_states = set(folder.glob("sluice_state*.json"))  # of the same step, told before, or torn: one of them may count still
            new_state = _unused(folder, old_states)
            _write(new_state, text)
            no_part = {*old_states, folder / MANIFEST_FILE, unfinished}
            files = {
                path.relative_to(folder).as_posix(): (path.stat().st_size, _digest(path, sync=True))
                for path in sorted(folder.rglob("*"))
                if path.is_file() and path not in no_part
            }
            for part in (*(path for path in folder.rglob("*") if path.is_dir()), folder, self.folder, self.folder.parent):
                _sync(part)
            manifest = _Manifest(step=step, identity=self._identity, state=new_state.name, files=files)
            _write(unfinished, manifest.to_json())
            os.replace(unfinished, folder / MANIFEST_FILE)
            _sync(folder)
            for old in old_states:
                os.unlink(old)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return self._delete_old(step)

    def newest(self) -> tuple[int, Path, Any] | None:
        """Step, folder and state of the newest whole checkpoint; None when there is none. Reads every file of those it looks at.

        Those that are refused on the way are named in `passed_over`: torn (a file is missing, or is not what was written), foreign (of
        another run or format), or unreadable.

        Raises:
            RecordError: the folder of checkpoints cannot be read.
        """
        self.passed_over = []
        for step in self._steps():
            try:
                manifest = self._check(step)
                state = decode((self.path(step) / manifest.state).read_text(encoding="utf-8"))
            except (_Refused, RecordError) as why:
                self.passed_over.append(f"{self.path(step)} cannot be resumed from: {why}")
            except OSError as error:
                self.passed_over.append(f"{self.path(step)} cannot be resumed from: it is unreadable ({error.strerror or error})")
            else:
                return step, self.path(step), state
        return None

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: the run goes on from `step` (0: from its beginning). What `newest` refused is among them.

        To be done before run.db is rolled back: killed in between, the next resume finds the same checkpoint again, or a whole later one
        of which run.db still knows everything.

        Raises:
            RecordError: one cannot be deleted.
        """
        for found in self._steps():  # from the newest: what is left by a kill is whole up to some step
            if found > step:
                try:
                    _delete(self.path(found))
                except OSError as error:
                    raise _cannot_write(self.path(found), error) from error

    def _steps(self) -> list[int]:
        """Steps with a folder, the newest first."""
        try:
            return [step for step, _ in _numbered(self.folder)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(
                f"{self.folder} must be a readable folder, got: {error.strerror or error} - check the disk and the permissions"
            ) from error

    def _check(self, step: int) -> _Manifest:
        """The manifest of a whole checkpoint of this run.

        Raises:
            _Refused, OSError: it is none.
        """
        folder, manifest = self.path(step), self._own_manifest(step)
        for name, (size, _) in manifest.files.items():  # all sizes first: a look costs nothing
            try:
                came = (folder / name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                raise _Refused(f"it is torn: {name} is missing") from None
            if came != size:
                raise _Refused(f"it is torn: {name} has {came} bytes instead of {size}")
        for name, (_, digest) in manifest.files.items():
            if _digest(folder / name) != digest:
                raise _Refused(f"it is torn: the content of {name} is not what was written (its digest differs)")
        return manifest

    def _own_manifest(self, step: int) -> _Manifest:
        """The manifest of a checkpoint of this run, whole or not.

        Raises:
            _Refused, OSError: there is none.
        """
        manifest = _read_manifest(self.path(step))
        if manifest.identity != self._identity:
            raise _Foreign(f"it is foreign: it belongs to run {manifest.identity}, this is run {self._identity}")
        if manifest.step != step:
            raise _Foreign(f"it is foreign: its folder was renamed, it is of step {manifest.step}")
        return manifest

    def _delete_old(self, written: int) -> list[str]:
        """Delete all but the newest `keep` whole ones and foreign ones; the one just written stays. Returns what cannot be deleted."""
        problems = []
        places = self._keep - 1
        for step in self._steps():
            if step == written:
                continue
            try:
                if places:
                    self._check(step)
                    places -= 1
                    continue
                self._own_manifest(step)
            except _Foreign:
                continue
            except (_Refused, OSError):
                pass  # torn
            try:
                _delete(self.path(step))
            except OSError as error:
                problems.append(f"{self.path(step)} is not needed any more but cannot be deleted: {error.strerror or error}")
        return problems


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint in this folder was completed, oldest first: a quick look, the files themselves are not read."""
    try:
        return sorted(step for step, path in _numbered(folder) if (path / MANIFEST_FILE).is_file())
    except OSError:
        return []


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """What is named like a checkpoint, the newest first."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def _unused(folder: Path, used: Collection[Path]) -> Path:
    """A name for a state file that is not in use."""
    names = (folder / (f"sluice_state-{n}.json" if n else "sluice_state.json") for n in range(len(used) + 1))
    return next(path for path in names if path not in used)


def _read_manifest(folder: Path) -> _Manifest:
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _Refused(f"it is torn: {MANIFEST_FILE}, which is written last, is missing") from None
    except NotADirectoryError:
        raise _Refused("it is no folder") from None
    except UnicodeDecodeError:
        text = ""
    content = None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        content = json.loads(text)["manifest"]
    if content is None or _sealed(content) != text:
        raise _Refused(f"it is torn: {MANIFEST_FILE} is damaged")
    if content["format"] != FORMAT_VERSION:
        raise _Foreign(f"it is foreign: it has format {content['format']}, this version of Sluice reads {FORMAT_VERSION}")
    files = {name: (size, digest) for name, (size, digest) in content["files"].items()}
    return _Manifest(step=content["step"], identity=content["identity"], state=content["state"], files=files)


def _sealed(content: Any) -> str:
    body = json.dumps(content, separators=(",", ":"))
    return f'{{"manifest":{body},"digest":"{hashlib.blake2b(body.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"}}'


# ---------------------------------------------------------------- the disk


def _digest(path: Path, *, sync: bool = False) -> str:
    """Digest of a file, read piece by piece. sync: on disk before it is read, so that a power cut cannot take what was digested."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Put the names in a folder on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _delete(path: Path) -> None:
    """Delete a checkpoint; it counts no more before its first other file goes. Deleting what is gone is fine."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    manifest = path / MANIFEST_FILE
    if manifest.exists():
        os.unlink(manifest)
        _sync(path)
    shutil.rmtree(path)


def _cannot_write(path: Path, error: OSError) -> RecordError:
    """The disk's refusal, with what a user can do about it."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = (
        "free some space (trainer.keep_checkpoints says how many are kept)"
        if is_full
        else "check the disk and the permissions of the folder"
    )
    return RecordError(f"{path} must be writable for a checkpoint, got: {error.strerror or error} - {advice}, then resume the run")
