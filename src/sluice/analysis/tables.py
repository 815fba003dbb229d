"""Reads a CSV, JSONL or Parquet file as named columns, and says of every cell where it stands.

A cell that is empty (CSV), null or absent (JSONL, Parquet) is None. What is wrong with a cell is an `AnalysisError` that names file, line
or row, and column.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from sluice.errors import AnalysisError

FORMATS: Final = (".csv", ".jsonl", ".parquet")
"""File names that can be read end in one of these."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """One file as columns of cells."""

    path: Path
    columns: Mapping[str, Sequence[Any]]  # all of one length
    lines: Sequence[int]  # of each row: its line in the file (CSV, JSONL), or its number from 1 (Parquet)
    unit: str = "line"  # what `lines` counts: "line" or "row"

    def __len__(self) -> int:
        return len(self.lines)

    def find(self, *names: str) -> str | None:
        """The first of these names that is a column."""
        return next((name for name in names if name in self.columns), None)

    def need(self, *names: str, why: str) -> str:
        """The same; raises `AnalysisError` when there is none, with the nearest column there is."""
        found = self.find(*names)
        if found is not None:
            return found
        close = [near for name in names for near in difflib.get_close_matches(name, list(self.columns), n=1, cutoff=0.7)]
        advice = f"rename {close[0]!r}" if close else "add it"
        raise AnalysisError(f"{self.path}: expected a column {' or '.join(names)} ({why}), got {', '.join(self.columns)} - {advice}")

    def refuse(self, row: int, column: str, expected: str, got: object, advice: str) -> NoReturn:
        """Raise what is wrong with a cell."""
        raise AnalysisError(f"{self.where(row)}, column {column}: expected {expected}, got {_short(got)} - {advice}")

    def where(self, row: int) -> str:
        """The place of a row, for a person."""
        return f"{self.path}, {self.unit} {self.lines[row]}"

    def text(self, column: str, row: int) -> str | None:
        """A name; numbers are written out."""
        value = self.columns[column][row]
        if value is None:
            return value
        if isinstance(value, str):
            if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
                self.refuse(row, column, "text in Unicode", value, "half of a surrogate pair stands alone in it: write it again")
            return value
        is_whole = (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
        if not is_whole:
            self.refuse(row, column, "a name or a whole number", value, "give text")
        return str(int(value))

    def number(self, column: str, row: int) -> float | None:
        """A finite number. Refused: NaN, infinity, text that is no number."""
        value = self.columns[column][row]
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            self.refuse(row, column, "a number", value, "correct it, or leave the cell empty where there is none")
        except OverflowError:
            self.refuse(row, column, "a number that a float can hold", value, "correct it, or leave the cell empty where there is none")
        if not math.isfinite(number):
            self.refuse(row, column, "a finite number", value, "leave the cell empty where there is none")
        return number

    def whole(self, column: str, row: int, least: int = 0) -> int | None:
        """A whole number of at least `least`."""
        number = self.number(column, row)
        if number is None:
            return None
        if not number.is_integer() or number < least or isinstance(self.columns[column][row], bool):
            self.refuse(row, column, f"a whole number >= {least}", self.columns[column][row], "correct it")
        return int(number)

    def truth(self, column: str, row: int) -> bool | None:
        """True or false; also as 1 and 0, and as text."""
        value = self.columns[column][row]
        if value is None or isinstance(value, bool):
            return value
        known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
        if (found := known.get(str(value).strip().lower())) is None:
            self.refuse(row, column, "true or false", value, "write true or false")
        return found

    def sequence(self, column: str, row: int) -> list[Any] | None:
        """A list, or JSON that is one."""
        value = self.columns[column][row]
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                self.refuse(row, column, "a list in JSON", value, 'write ["go north", "take lamp"]')
        if value is not None and not isinstance(value, list):
            self.refuse(row, column, "a list", value, 'write ["go north", "take lamp"]')
        return value


def read_table(path: Path) -> Table:
    """Read a file by the ending of its name. Raises `AnalysisError` for what cannot be read, and for a file without rows."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".csv":
            table = _read_csv(path)
        elif suffix == ".jsonl":
            table = _read_jsonl(path)
        elif suffix == ".parquet":
            table = _read_parquet(path)
        else:
            raise AnalysisError(f"{path}: expected a file ending in {', '.join(FORMATS)}, got {suffix or 'no ending'} - convert it")
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or error
        raise AnalysisError(f"{path}: expected a file that can be read, got: {told} - check path and encoding (UTF-8)") from error
    if not len(table):
        raise AnalysisError(f"{path}: expected at least one row, got none - record some groups")
    return table


def _read_csv(path: Path) -> Table:
    line = 1
    before = csv.field_size_limit(sys.maxsize)  # trajectories are longer than the 128 kB that a cell may have by default
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _check_header(path, header)
            rows, lines = [], []
            for row in reader:
                line = reader.line_num
                if not row:
                    continue
                if len(row) != len(header):
                    raise AnalysisError(
                        f"{path}, line {line}: expected {len(header)} cells as in the header, got {len(row)} - quote cells that hold commas"
                    )
                rows.append(row)
                lines.append(line)
    except csv.Error as error:
        raise AnalysisError(f"{path}, line {line + 1}: expected CSV, got: {error} - quote cells that hold commas or quotes") from None
    finally:
        csv.field_size_limit(before)
    cells = zip(*rows, strict=True) if rows else ([] for _ in header)
    return Table(
        path=path, columns={name: [cell or None for cell in column] for name, column in zip(header, cells, strict=True)}, lines=lines
    )


def _read_jsonl(path: Path) -> Table:
    rows, lines = [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                told = "lists nested too deep" if isinstance(error, RecursionError) else error
                raise AnalysisError(f"{path}, line {number}: expected one JSON object, got: {told} - correct the line") from None
            if not isinstance(row, dict):
                raise AnalysisError(f"{path}, line {number}: expected one JSON object, got {_short(row)} - write one object per line")
            rows.append(row)
            lines.append(number)
    names = dict.fromkeys(name for row in rows for name in row)
    return Table(path=path, columns={name: [row.get(name) for row in rows] for name in names}, lines=lines)


def _read_parquet(path: Path) -> Table:
    parquet = load_pyarrow("pyarrow.parquet")
    arrow = load_pyarrow("pyarrow")
    try:
        table = parquet.ParquetFile(path).read()
    except (arrow.ArrowException, EOFError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AnalysisError(f"{path}: expected a whole Parquet file, got: {text} - write it again") from error
    _check_header(path, table.column_names)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return Table(path=path, columns=columns, lines=range(1, table.num_rows + 1), unit="row")


def load_pyarrow(module: str) -> Any:
    """pyarrow, or one of its modules, where it is needed. Raises `AnalysisError` when it is missing."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise AnalysisError(f"Parquet files need the package pyarrow, got: {error} - pip install 'sluice-rl[report]'") from error


def _check_header(path: Path, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AnalysisError(f"{path}: expected every column once, got {', '.join(twice)} again - rename or drop one")
    if "" in names:
        raise AnalysisError(f"{path}: expected a name for every column, got an empty one as column {[*names].index('') + 1} - name it")


def told_rows(tables: Sequence[Table], rows: Iterable[tuple[int, int]]) -> str:
    """Places of rows, given as (table, row), for a person."""
    return " and ".join(tables[table].where(row) for table, row in rows)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
