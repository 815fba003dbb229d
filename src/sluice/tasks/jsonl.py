"""Rows of a JSON Lines file: one JSON object a line, UTF-8. Blank lines are skipped; everything else that is no object is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluice.config.models import TaskSourceConfig
from sluice.config.problems import KeyPath, Problem, told
from sluice.errors import TaskError
from sluice.tasks.base import Row


class JsonlSource:
    """One file. The task's index counts objects from 0, messages count lines from 1, blank ones included."""

    def __init__(self, settings: TaskSourceConfig, path: KeyPath, *, default_seed: int) -> None:
        self._path = path
        self._settings = settings
        self._file = settings.path or Path()

    def problems(self) -> Iterator[Problem]:
        """A file that is missing, a folder, or anything else that is no regular file."""
        if not self._file.exists():
            message = f"expected a file with one JSON object a line, but {self._file.absolute()} does not exist"
            yield Problem(path=(*self._path, "path"), message=message)
        elif self._file.is_dir():
            message = (
                f"expected a file with one JSON object a line, but {self._file} is a folder - name the file in it, "
                f"or use type: huggingface for a folder of data files"
            )
            yield Problem(path=(*self._path, "path"), message=message)
        elif not self._file.is_file():
            yield Problem(path=(*self._path, "path"), message=not_regular(self._file))

    def rows(self) -> Iterator[Row]:
        """One row per object. Raises `TaskError` with the line."""
        for index, (line, entry) in enumerate(read_objects(self._file)):
            yield Row.of_fields(entry, self._settings, index=index, where=f"{self._file} line {line}")


def read_objects(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every JSON object of a JSON Lines file with its line number. Raises `TaskError` with the line, for the first thing that is none."""
    require_regular(file)
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                line = _decoded(raw, file, number).strip()
                if line:
                    yield number, _parsed(line, file, number)
    except OSError as err:
        raise TaskError(f"{file} cannot be read: {err.strerror or err}") from err


def not_regular(file: Path) -> str:
    """The message for a path that is neither a file on a disk nor a folder."""
    return (
        f"expected a regular file, which can be read again in every run, but {file} is a named pipe, a device or a socket - "
        f"write the data to a file first"
    )


def require_regular(file: Path) -> None:
    """Raise `TaskError` for named pipes, devices and sockets: opening one may wait for ever, reading one may never end."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise TaskError(f"{file} cannot be read: {not_regular(file)}")


def one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dict. Raises `ValueError` for a key that stands twice: readers do not agree on which one counts."""
    entry = dict(pairs)
    if len(entry) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {told(twice)} stands twice in one object - delete one")
    return entry


def _decoded(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as err:
        raise TaskError(
            f"{file} line {number}: expected UTF-8 text, but byte {err.start + 1} of the line is 0x{raw[err.start]:02x} - "
            f"save the file as UTF-8, not packed"
        ) from err


def _parsed(line: str, file: Path, number: int) -> dict[str, Any]:
    where = f"{file} line {number}: expected a JSON object"
    try:
        value = json.loads(line, object_pairs_hook=one_of_each)
    except json.JSONDecodeError as err:
        hint = " - write every object on one line of its own" if line[0] in "[{" else ""
        raise TaskError(f"{where}, got {told(line)}: {err.msg} at column {err.colno}{hint}") from err
    except (RecursionError, ValueError) as err:  # nested too deeply, a key that stands twice, an integer of more digits than Python reads
        raise TaskError(f"{where} that can be read, got {told(line)}: {err}") from err
    if not isinstance(value, dict):
        hint = " - write its elements on lines of their own, without brackets and commas" if isinstance(value, list) else ""
        raise TaskError(f"{where}, got {told(value)}{hint}")
    return value
