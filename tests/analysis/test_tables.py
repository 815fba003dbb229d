"""The same rows are the same table in every format, and what is wrong with a cell names its place."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import pytest

from sluice.analysis.tables import read_table
from sluice.errors import AnalysisError
from tests.analysis.recordings import write

ROWS = [
    {"group": "a", "actions": ["x, y", 'say "z"'], "reward": 1.5},
    {"group": "b", "actions": [], "reward": None},
    {"group": "é", "actions": ["line\nbreak"], "reward": 0.0},
]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_same_rows_are_the_same_table_in_every_format(tmp_path: Path, suffix: str) -> None:
    table = read_table(write(tmp_path / f"rows{suffix}", ROWS))
    assert len(table) == 3
    assert [table.text("group", row) for row in range(3)] == ["a", "b", "é"]
    assert [table.sequence("actions", row) for row in range(3)] == [row["actions"] for row in ROWS]
    assert [table.number("reward", row) for row in range(3)] == [1.5, None, 0.0]


def test_cells_longer_than_csv_allows_by_default_are_read(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    table = read_table(write(tmp_path / "long.csv", [{"group": "a", "actions": ["x" * 200_000]}]))
    assert len(table.sequence("actions", 0)[0]) == 200_000
    assert csv.field_size_limit() == before


def test_numbers_and_names_may_be_written_either_way(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "rows.jsonl", [{"a": 7, "b": 7.0, "c": "7", "yes": True, "one": "1"}]))
    assert [table.text(name, 0) for name in "abc"] == ["7", "7", "7"]
    assert [table.whole(name, 0) for name in "abc"] == [7, 7, 7]
    assert [table.truth(name, 0) for name in ("yes", "one")] == [True, True]


@pytest.mark.parametrize(
    ("method", "cell", "message"),
    [
        ("number", "much", r"rows.csv, line 3, column value: expected a number, got 'much' - correct it, or leave the cell empty"),
        ("number", "nan", r"line 3, column value: expected a finite number, got 'nan'"),
        ("number", "inf", r"line 3, column value: expected a finite number, got 'inf'"),
        ("whole", "1.5", r"line 3, column value: expected a whole number >= 0, got '1.5'"),
        ("truth", "maybe", r"line 3, column value: expected true or false, got 'maybe'"),
        ("sequence", "[1, 2", r"line 3, column value: expected a list in JSON, got '\[1, 2'"),
        ("sequence", '{"a": 1}', r"line 3, column value: expected a list, got {'a': 1}"),
    ],
)
def test_a_wrong_cell_names_file_line_and_column(tmp_path: Path, method: str, cell: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'value,other\n1,x\n"{cell.replace(chr(34), chr(34) * 2)}",y\n')
    with pytest.raises(AnalysisError, match=message):
        getattr(read_table(path), method)("value", 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "", "rows.csv: expected at least one row, got none - record some groups"),
        ("rows.csv", "a,b\n", "rows.csv: expected at least one row, got none"),
        ("rows.csv", "a,b\n1,2\n1\n", "rows.csv, line 3: expected 2 cells as in the header, got 1"),
        ("rows.csv", "a,a\n1,2\n", "rows.csv: expected every column once, got a again"),
        ("rows.csv", "a,\n1,2\n", "rows.csv: expected a name for every column, got an empty one as column 2"),
        ("rows.csv", 'a,b\n1,"2"3\n', "rows.csv, line 2: expected CSV, got: "),
        ("rows.jsonl", '{"a": 1}\n{"a": \n', "rows.jsonl, line 2: expected one JSON object, got: "),
        ("rows.jsonl", "[1]\n", r"rows.jsonl, line 1: expected one JSON object, got \[1\]"),
        ("rows.jsonl", "[" * 100_000, r"rows.jsonl, line 1: expected one JSON object, got: .*nested"),
        ("rows.parquet", "no Parquet", "rows.parquet: expected a whole Parquet file, got: "),
        ("rows.txt", "a", r"rows.txt: expected a file ending in .csv, .jsonl, .parquet, got .txt - convert it"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(AnalysisError, match=message):
        read_table(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"gone.csv: expected a file that can be read, got: No such file or directory"):
        read_table(tmp_path / "gone.csv")
    (tmp_path / "latin.csv").write_bytes("a\né\n".encode("latin-1"))
    with pytest.raises(AnalysisError, match=r"latin.csv: expected a file that can be read, .* - check path and encoding \(UTF-8\)"):
        read_table(tmp_path / "latin.csv")


def test_a_missing_column_names_the_nearest_one(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "rows.csv", [{"grup": 1, "rewards": 2}]))
    with pytest.raises(AnalysisError, match=r"expected a column reward \(what it earned\), got grup, rewards - rename 'rewards'"):
        table.need("reward", why="what it earned")
    with pytest.raises(AnalysisError, match=r"expected a column K \(the step\), got grup, rewards - add it"):
        table.need("K", why="the step")


BIG = 10**400


@pytest.mark.parametrize(
    ("method", "cell", "message"),
    [
        ("number", BIG, "line 1, column value: expected a number that a float can hold, got 1000"),
        ("whole", BIG, "line 1, column value: expected a number that a float can hold, got 1000"),
        ("whole", True, "line 1, column value: expected a whole number >= 0, got True"),
        ("sequence", "[" * 100_000, r"line 1, column value: expected a list in JSON, got '\[\[\["),
        ("text", "half \ud800 a pair", "line 1, column value: expected text in Unicode, got 'half"),
        ("text", 1.5, "line 1, column value: expected a name or a whole number, got 1.5"),
    ],
    ids=["big number", "big whole", "truth", "nested", "surrogate", "fraction"],
)
def test_a_cell_that_nothing_can_be_made_of_names_its_place(tmp_path: Path, method: str, cell: object, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"value": cell}))
    with pytest.raises(AnalysisError, match=message):
        getattr(read_table(path), method)("value", 0)


@pytest.mark.parametrize("cell", [b"name", dt.date(2024, 1, 2), {"a": 1}, Decimal("1.5")], ids=repr)
def test_a_name_in_parquet_is_text_or_a_whole_number(tmp_path: Path, cell: object) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"value": [cell]}), tmp_path / "rows.parquet")
    with pytest.raises(AnalysisError, match="row 1, column value: expected a name or a whole number, got"):
        read_table(tmp_path / "rows.parquet").text("value", 0)
