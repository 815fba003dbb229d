"""Part files of recorded rollouts: what a row is made of, and how parts are written, opened and taken back.

    rollouts/part-000001.parquet    one row per member; all rows of a group stand together in one part

A part appears whole or not at all. This is the one file of the room that imports pyarrow: load it only where it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.errors import RecordError
from sluice.scheduler.events import GroupRecord
from sluice.types import Failure, Rollout, Turn

SCHEMA_VERSION: Final = 1
FACTS_KEY: Final = b"sluice"  # in the metadata of a part: JSON with `schema_version`, `identity` and the other facts about the run

_NAME: Final = re.compile(r"part-([0-9]{6,})\.parquet")
_UNFINISHED: Final = ".unfinished"  # ending of a part until it counts


class Row(NamedTuple):
    """One member: the rollout of one attempt that delivered, and the group that it was sampled for."""

    record: GroupRecord
    rollout: Rollout
    is_in_group: bool  # False: it was taken out of its group, and another attempt took its place
    is_counted: bool  # whether it entered the statistics of its group


# ---------------------------------------------------------------- columns

_TEXTS: Final = pa.list_(pa.string())
_NUMBERS: Final = pa.map_(pa.string(), pa.float64())

_ROW_COLUMNS: Final[Sequence[tuple[str, pa.DataType, Callable[[Row], Any]]]] = (
    # the group, the same in all its rows
    ("group_id", pa.int64(), attrgetter("record.group_id")),
    ("task_id", pa.string(), attrgetter("record.task_id")),
    ("domain", pa.string(), attrgetter("record.domain")),
    ("epoch", pa.int32(), attrgetter("record.epoch")),
    ("round", pa.int32(), attrgetter("record.round")),
    ("start_step", pa.int64(), attrgetter("record.start_step")),
    ("end_step", pa.int64(), attrgetter("record.end_step")),
    ("outcome", pa.string(), attrgetter("record.outcome")),
    ("reason", pa.string(), attrgetter("record.reason")),
    ("category", pa.string(), attrgetter("record.category")),
    ("source", pa.string(), attrgetter("record.source")),
    ("group_attempts", pa.int32(), attrgetter("record.attempts")),
    ("group_sampled_tokens", pa.int64(), attrgetter("record.sampled_tokens")),
    ("group_env_steps", pa.int64(), attrgetter("record.env_steps")),
    ("group_seconds", pa.float64(), attrgetter("record.seconds")),
    # the member
    ("attempt_id", pa.int64(), attrgetter("rollout.attempt_id")),
    ("member_index", pa.int32(), attrgetter("rollout.member_index")),
    ("is_in_group", pa.bool_(), attrgetter("is_in_group")),
    ("is_counted", pa.bool_(), attrgetter("is_counted")),
    ("env_id", pa.string(), attrgetter("rollout.env_id")),
    ("task_type", pa.string(), attrgetter("rollout.task_type")),
    ("reward", pa.float64(), attrgetter("rollout.reward")),
    ("finish_reason", pa.string(), attrgetter("rollout.finish_reason")),
    ("failure_cause", pa.string(), lambda row: _of(row.rollout.failure, "cause")),
    ("failure_reason", pa.string(), lambda row: _of(row.rollout.failure, "reason")),
    ("failure_detail", pa.string(), lambda row: _of(row.rollout.failure, "detail")),
    ("flags", _TEXTS, lambda row: sorted(row.rollout.flags)),
    ("metrics", _NUMBERS, lambda row: _numbers(row.rollout.metrics)),
    ("seconds", pa.float64(), attrgetter("rollout.seconds")),
    ("policy_version", pa.int64(), attrgetter("rollout.policy_version")),
    ("sampled_tokens", pa.int64(), attrgetter("rollout.sampled_tokens")),
    ("env_steps", pa.int32(), attrgetter("rollout.env_steps")),
)

# The turns of the member, as parallel lists.
_TURN_COLUMNS: Final[Sequence[tuple[str, pa.DataType, Callable[[Turn], Any]]]] = (
    ("observations", pa.string(), attrgetter("observation")),
    ("texts", pa.string(), attrgetter("text")),
    ("actions", pa.string(), attrgetter("action")),
    ("is_admissible", pa.bool_(), attrgetter("is_admissible")),
    ("step_rewards", pa.float64(), attrgetter("reward")),
    ("progress", pa.float64(), attrgetter("progress")),
    ("turn_finish_reasons", pa.string(), attrgetter("finish_reason")),
    ("turn_policy_versions", pa.int64(), attrgetter("policy_version")),
)
_TOKEN_COLUMNS: Final[Sequence[tuple[str, pa.DataType, Callable[[Turn], Any]]]] = (
    ("prompt_ids", pa.int32(), attrgetter("prompt_ids")),
    ("token_ids", pa.int32(), attrgetter("token_ids")),
    ("inference_logprobs", pa.float32(), attrgetter("inference_logprobs")),
    ("token_versions", pa.int64(), attrgetter("token_versions")),
)


def _leaf(entry: pa.Field) -> str:
    """The name that Parquet gives to a column where its values are."""
    name, kind = entry.name, entry.type
    while pa.types.is_list(kind):
        name, kind = f"{name}.list.element", kind.value_type
    return f"{name}.key_value.key" if pa.types.is_map(kind) else name


SCHEMA: Final = pa.schema(
    [
        *((name, kind) for name, kind, _ in _ROW_COLUMNS),
        *((name, pa.list_(kind)) for name, kind, _ in _TURN_COLUMNS),
        *((name, pa.list_(pa.list_(kind))) for name, kind, _ in _TOKEN_COLUMNS),
    ]
)

LATER: Final = ("progress",)
"""Columns that recordings of earlier versions lack, and that readers do without."""

_WITHOUT_LATER: Final = pa.schema([entry for entry in SCHEMA if entry.name not in LATER])

_STORED: Final[Mapping[str, Any]] = {  # how the columns are stored, which no reader has to know
    "compression": "zstd",
    "compression_level": 3,  # 9 takes twice the time for a tenth less
    # Texts and tokens come again and again. Log-probs do not, and are most of a part: as planes of bytes they take a fifth less.
    "use_dictionary": [_leaf(entry) for entry in SCHEMA if entry.name != "inference_logprobs"],
    "use_byte_stream_split": [_leaf(SCHEMA.field("inference_logprobs"))],
}


def schema_with(facts: Mapping[str, Any]) -> pa.Schema:
    """The schema of the parts of one run. facts: what fits into JSON."""
    return SCHEMA.with_metadata({FACTS_KEY: json.dumps({"schema_version": SCHEMA_VERSION, **facts})})


def to_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as columns."""
    turns = [turn for row in rows for turn in row.rollout.turns]
    of_rows = _offsets([len(row.rollout.turns) for row in rows])
    columns = [_array(list(map(read, rows)), kind) for _, kind, read in _ROW_COLUMNS]
    for _, kind, read in _TURN_COLUMNS:
        columns.append(pa.ListArray.from_arrays(of_rows, _array(list(map(read, turns)), kind)))
    for _, kind, read in _TOKEN_COLUMNS:
        columns.append(pa.ListArray.from_arrays(of_rows, _token_lists(list(map(read, turns)), kind)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # half a character, as only a program writes it: no file can hold it
        return pa.array([_spelled(value) for value in values], kind)


def _spelled(value: Any) -> Any:
    """The same text with a question mark in place of what is no character."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return [(_spelled(name), number) for name, number in value] if isinstance(value, list) else value


def _token_lists(lists: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """[N] arrays of turns as one array of lists; an overflow of the kind raises."""
    filled = [entry for entry in lists if entry is not None]
    offsets = _offsets([0 if entry is None else len(entry) for entry in lists])
    values = pa.array(np.concatenate(filled) if filled else np.zeros(0, dtype=np.int64)).cast(kind)
    mask = pa.array([entry is None for entry in lists], pa.bool_()) if len(filled) < len(lists) else None
    return pa.ListArray.from_arrays(offsets, values, mask=mask)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.array(offsets).cast(pa.int32())


def _of(failure: Failure | None, part: str) -> str | None:
    return None if failure is None else str(getattr(failure, part))


def _numbers(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What user code calls a metric, as far as it is a number: another one is not worth a run."""
    numbers = []
    for name, value in metrics.items():
        with suppress(TypeError, ValueError):
            numbers.append((str(name), float(value)))
    return numbers


# ---------------------------------------------------------------- files


def part_files(folder: Path) -> list[tuple[int, Path]]:
    """Number and path of every part, in the order of writing. Raises `OSError`."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def part_path(folder: Path, number: int) -> Path:
    """Where a part stands."""
    return folder / f"part-{number:06}.parquet"


def write_part(path: Path, batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> None:
    """Put a part on disk, whole or not at all; one of that name is replaced. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}{_UNFINISHED}")  # neither `*.parquet` nor a reader of the whole folder finds it
    try:
        with temporary.open("wb") as file:
            pq.write_table(pa.Table.from_batches(batches, schema), file, **_STORED)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def prepare_folder(folder: Path) -> int:
    """Make the folder, take out what a kill left unfinished, see that it can be written; the number of the next part. Raises `OSError`."""
    folder.mkdir(exist_ok=True)
    _remove_unfinished(folder)
    probe = folder / f".probe{_UNFINISHED}"
    probe.touch()
    probe.unlink()
    return max((number for number, _ in part_files(folder)), default=0) + 1


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_part(path: Path) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """A part and the facts in it, checked; close it after use.

    Raises:
        RecordError: it cannot be read, is not ours, or of another schema version.
    """
    with reading(path):
        file = pq.ParquetFile(path)
    try:
        return file, _facts_of(file, path)
    except BaseException:
        file.close()
        raise


def _facts_of(file: pq.ParquetFile, path: Path) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(FACTS_KEY)
    facts = None
    with suppress(ValueError):
        facts = None if text is None else json.loads(text)
    if not isinstance(facts, dict):
        raise RecordError(f"{path} must be recorded by Sluice, got another program's Parquet file - move it out of the folder")
    version = facts.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{path} must have schema version {SCHEMA_VERSION}, got {version} - read it with the version of Sluice that wrote it"
        )
    if not any(file.schema_arrow.equals(schema) for schema in (SCHEMA, _WITHOUT_LATER)):
        raise RecordError(f"{path} must have the columns that Sluice records, got others - the file was edited: record the run again")
    return facts


class reading:  # noqa: N801 - used as `with reading(path):`
    """What goes wrong with a part, as a `RecordError` that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise RecordError(
                f"{self.path} must stay where it is while it is read, but it has gone - was the run resumed? Read again"
            ) from error
        if isinstance(error, pa.ArrowException | OSError | EOFError):
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RecordError(
                f"{self.path} must be a whole Parquet file, got: {text} - it was damaged after it was written: move it away, its groups "
                "are lost"
            ) from error


def roll_back(folder: Path, *, next_group: int, open_groups: Collection[int]) -> int:
    """Take groups out that the resumed run makes again: only parts that hold some are written anew. How many rows went.

    All parts are looked at before one is changed. Killed in the middle, it may be done again.

    Raises:
        RecordError: a part cannot be read.
        OSError: one cannot be written.
    """
    gone = np.array(sorted(open_groups), dtype=np.int64)
    plan = []
    for _, path in part_files(folder):
        file, _ = open_part(path)
        with file, reading(path):
            ids = file.read(["group_id"]).column(0).to_numpy()
        stays = (ids < next_group) & ~np.isin(ids, gone)
        if not stays.all():
            plan.append((path, stays))
    for path, stays in plan:
        if stays.any():
            with reading(path):
                table = pq.read_table(path, partitioning=None)
            write_part(path, table.filter(pa.array(stays)).to_batches(), table.schema)
        else:
            path.unlink()
    _remove_unfinished(folder)
    sync_folder(folder)
    return sum(int((~stays).sum()) for _, stays in plan)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"*{_UNFINISHED}"):
        path.unlink(missing_ok=True)
