"""Rows of local Hugging Face data: a folder written by `save_to_disk`, or parquet and JSON files. The network is never asked.

Files are read as they lie, without the cache that `datasets.load_dataset` would fill. In a folder of files the split is read off the
names: what stands before `-00000-of-00001`, else the first usual word (train, validation, test, ...) in the name of a folder or the file,
else the file's stem; a folder in which no name says anything is one split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sluice.config.models import TaskSourceConfig
from sluice.config.problems import KeyPath, Problem, dotted, suggestion, told
from sluice.errors import TaskError
from sluice.tasks.base import Row, import_package, listed
from sluice.tasks.jsonl import not_regular, one_of_each, read_objects, require_regular

_SUFFIXES: Final = (".parquet", ".jsonl", ".json")
_NOT_DATA: Final = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}")
_SPLIT_WORD: Final = re.compile(r"(?:^|[^a-z0-9])(training|train|validation|valid|val|dev|testing|test|eval)(?=$|[^a-z0-9])", re.IGNORECASE)
_BATCH_ROWS: Final = 4096  # rows turned into Python objects at a time: large enough to be fast, small enough for long prompts


class HuggingFaceSource:
    """One split of a local data set."""

    def __init__(self, settings: TaskSourceConfig, path: KeyPath, *, default_seed: int) -> None:
        self._path = path
        self._settings = settings
        self._data = settings.path or Path()

    def problems(self) -> Iterator[Problem]:
        """A path that is missing or holds no data, a split that is not there or not chosen."""
        data, split = self._data, self._settings.split
        if not data.exists():
            message = f"expected a local data set (nothing is downloaded), but {data.absolute()} does not exist"
            yield Problem(path=(*self._path, "path"), message=message)
            return
        try:
            splits = _splits(data)
        except TaskError as err:
            yield Problem(path=(*self._path, "path"), message=str(err))
            return
        at = (*self._path, "split")
        if split is None and len(splits) > 1:
            yield Problem(path=at, message=f"is needed to say which split of {data} to read - there are {listed(splits)}")
        elif split is not None and splits == [""]:
            yield Problem(path=at, message=f"has no effect: {data} is one split without a name - delete it")
        elif split is not None and split not in splits:
            message = f"expected a split of {data}, got '{split}'{suggestion(split, splits, what='there are')}"
            yield Problem(path=at, message=message)

    def rows(self) -> Iterator[Row]:
        """Rows in the order of the data, files by name. Raises `TaskError` with file and row."""
        for index, (where, entry) in enumerate(self._entries()):
            yield Row.of_fields(entry, self._settings, index=index, where=where)

    def _entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        data, split, key = self._data, self._settings.split, dotted(self._path)
        if (data / "dataset_dict.json").is_file():
            yield from _saved(data / (split or _splits(data)[0]), key)
        elif (data / "state.json").is_file():
            yield from _saved(data, key)
        else:
            for file_split, file in _data_files(data):
                if split in (None, file_split):
                    yield from _parquet(file, key) if file.suffix.lower() == ".parquet" else _json(file)


def _splits(data: Path) -> list[str]:
    """Names of the splits; [""] for data that are one split without a name."""
    if (data / "dataset_dict.json").is_file():
        splits = _read_object(data / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise TaskError(f"{data / 'dataset_dict.json'}: expected the names of splits, got {told(splits)}")
        return [str(split) for split in splits]
    if (data / "state.json").is_file():
        return [str(_read_object(data / "state.json").get("_split") or "")]
    return sorted({split for split, _ in _data_files(data)})


def _data_files(data: Path) -> list[tuple[str, Path]]:
    """(split, file) of every data file, by name. Raises `TaskError` when there is none, one is no regular file, or there are two kinds."""
    expected = f"expected a folder of save_to_disk, or {', '.join(_SUFFIXES)} files"
    if not data.is_dir():
        if data.suffix.lower() not in _SUFFIXES:
            raise TaskError(f"{expected}, got the file {data}")
        if not data.is_file():
            raise TaskError(not_regular(data))
        return [("", data)]
    files = [
        file
        for file in sorted(data.rglob("*"))
        if file.suffix.lower() in _SUFFIXES
        and file.name not in _NOT_DATA
        and not any(part.startswith(".") for part in file.relative_to(data).parts)
        and file.exists()
        and not file.is_dir()
    ]
    for file in files:
        if not file.is_file():
            raise TaskError(not_regular(file))
    if not files:
        raise TaskError(f"{expected}, but {data} holds neither")
    if len({file.suffix.lower() == ".parquet" for file in files}) > 1:
        raise TaskError(f"expected one kind of data, but {data} holds parquet and JSON files - name one file, or keep them apart")
    named = [_split_of(file.relative_to(data)) for file in files]
    if not any(named):
        return [("", file) for file in files]
    return [(split or file.stem, file) for split, file in zip(named, files, strict=True)]


def _split_of(file: Path) -> str:
    """The split that a file's name or its folders tell; "" when they tell none."""
    if shard := _SHARD.fullmatch(file.stem):
        return shard[1]
    for part in (*file.parts[:-1], file.stem):
        if word := _SPLIT_WORD.search(part):
            return word[1]
    return ""


def _saved(folder: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of one data set written by `save_to_disk`."""
    datasets = import_package("datasets", "datasets", key)
    try:
        data = datasets.load_from_disk(str(folder)).with_format("arrow")
        start = 0
        for table in data.iter(batch_size=_BATCH_ROWS):
            for number, entry in enumerate(table.to_pylist(), start=start):
                yield f"{folder} row {number}", entry
            start += table.num_rows
    except Exception as err:  # pyarrow and datasets raise many kinds
        raise TaskError(f"{folder} cannot be read as a data set of save_to_disk: {type(err).__name__}: {err}") from err


def _parquet(file: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    require_regular(file)
    parquet = import_package("pyarrow.parquet", "pyarrow", key)
    try:
        with parquet.ParquetFile(file) as data:
            start = 0
            for batch in data.iter_batches(batch_size=_BATCH_ROWS):
                for number, entry in enumerate(batch.to_pylist(), start=start):
                    yield f"{file} row {number}", entry
                start += batch.num_rows
    except Exception as err:  # pyarrow raises many kinds
        raise TaskError(f"{file} cannot be read as parquet: {type(err).__name__}: {err}") from err


def _json(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a JSON Lines file, or of one JSON array of objects."""
    if not _begins_with_bracket(file):
        for line, entry in read_objects(file):
            yield f"{file} line {line}", entry
        return
    for number, entry in enumerate(_read_json(file)):
        if not isinstance(entry, dict):
            raise TaskError(f"{file} element {number}: expected a JSON object, got {told(entry)}")
        yield f"{file} element {number}", entry


def _begins_with_bracket(file: Path) -> bool:
    require_regular(file)
    try:
        with file.open("rb") as opened:
            return opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except OSError as err:
        raise TaskError(f"{file} cannot be read: {err.strerror or err}") from err


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=one_of_each)
    except OSError as err:
        raise TaskError(f"{file} cannot be read: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:  # also a decoding error, and a key that stands twice
        raise TaskError(f"{file}: expected JSON in UTF-8, got something else: {err}") from err


def _read_object(file: Path) -> dict[str, Any]:
    value = _read_json(file)
    if not isinstance(value, dict):
        raise TaskError(f"{file}: expected a JSON object, got {told(value)}")
    return value
