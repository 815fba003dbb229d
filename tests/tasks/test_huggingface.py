from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sluice.config.models import TaskSourceConfig
from sluice.errors import TaskError
from sluice.tasks.huggingface import HuggingFaceSource
from tests.tasks.fakes import jsonl, sums


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("nothing may ask the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def source(path: Path, split: str | None = None) -> HuggingFaceSource:
    return HuggingFaceSource(TaskSourceConfig(type="huggingface", path=path, split=split), ("tasks", "train", 0), default_seed=0)


def prompts(path: Path, split: str | None = None) -> list[object]:
    one = source(path, split)
    assert list(one.problems()) == []
    return [row.prompt for row in one.rows()]


def problem(path: Path, split: str | None = None) -> str:
    (found,) = source(path, split).problems()
    return f"{found.path[-1]}: {found.message}"


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_folder_of_save_to_disk_is_read_in_its_order(tmp_path: Path):
    import datasets

    data = datasets.Dataset.from_list([{**row, "difficulty": 2} for row in sums(3)]).select([2, 0, 1])
    data.save_to_disk(str(tmp_path / "sums"))
    rows = list(source(tmp_path / "sums").rows())
    assert [row.prompt for row in rows] == ["2+1=", "0+1=", "1+1="]
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[1].where == f"{tmp_path / 'sums'} row 1"
    assert rows[0].entry == {"prompt": "2+1=", "answer": "3", "difficulty": 2}
    assert rows[0].difficulty == 2.0


def test_a_saved_dictionary_of_splits_needs_the_name_of_one(tmp_path: Path):
    import datasets

    splits = {name: datasets.Dataset.from_list(sums(1, start)) for name, start in (("train", 0), ("held_out", 5))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path))
    assert prompts(tmp_path, "held_out") == ["5+1="]
    assert problem(tmp_path) == f"split: is needed to say which split of {tmp_path} to read - there are held_out, train"
    assert "expected a split of" in problem(tmp_path, "hold_out")
    assert "did you mean held_out?" in problem(tmp_path, "hold_out")


def test_chat_messages_come_out_as_lists_of_mappings(tmp_path: Path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompts(parquet(tmp_path / "chat.parquet", [{"prompt": messages}])) == [messages]


def test_single_files_are_read_by_their_kind(tmp_path: Path):
    expected = ["0+1=", "1+1="]
    assert prompts(parquet(tmp_path / "a.parquet", sums(2))) == expected
    assert prompts(jsonl(tmp_path / "b.jsonl", sums(2))) == expected
    assert prompts(jsonl(tmp_path / "lines.json", sums(2))) == expected
    array = tmp_path / "array.json"
    array.write_text(" \n" + json.dumps(sums(2), indent=1))
    assert prompts(array) == expected


def test_shards_of_one_split_are_read_in_order_and_hidden_files_are_not(tmp_path: Path):
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", sums(1, 1))
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", sums(1, 0))
    parquet(tmp_path / "data" / "test_sft-00000-of-00001.parquet", sums(1, 7))
    parquet(tmp_path / ".cache" / "x.parquet", sums(1, 9))
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("about")
    assert prompts(tmp_path, "train") == ["0+1=", "1+1="]
    assert prompts(tmp_path, "test_sft") == ["7+1="]


@pytest.mark.parametrize(
    "layout", ["train/part.jsonl test/part.jsonl", "my-train.jsonl my-test.jsonl", "sums.train.v2.jsonl sums.test.v2.jsonl"]
)
def test_splits_are_read_off_folders_and_file_names(tmp_path: Path, layout: str):
    for start, name in enumerate(layout.split()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        jsonl(tmp_path / name, sums(1, start))
    assert prompts(tmp_path, "test") == ["1+1="]


def test_a_folder_whose_names_say_nothing_is_one_split(tmp_path: Path):
    jsonl(tmp_path / "b.jsonl", sums(1, 1))
    jsonl(tmp_path / "a.jsonl", sums(1, 0))
    assert prompts(tmp_path) == ["0+1=", "1+1="]
    assert problem(tmp_path, "train") == f"split: has no effect: {tmp_path} is one split without a name - delete it"


def test_a_split_for_a_single_file_has_no_effect(tmp_path: Path):
    assert "has no effect" in problem(jsonl(tmp_path / "train.jsonl", sums(1)), "train")


def test_what_is_no_local_data_set_is_a_problem_of_the_path(tmp_path: Path):
    assert problem(tmp_path / "gone").startswith("path: expected a local data set (nothing is downloaded), but ")
    assert "holds neither" in problem(tmp_path)
    (tmp_path / "data.csv").write_text("a,b")
    assert f"got the file {tmp_path / 'data.csv'}" in problem(tmp_path / "data.csv")
    jsonl(tmp_path / "a.jsonl", sums(1))
    parquet(tmp_path / "b.parquet", sums(1))
    assert "holds parquet and JSON files" in problem(tmp_path)
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("[]")
    assert "dataset_dict.json: expected a JSON object, got a list of 0" in problem(folder)
    (folder / "dataset_dict.json").write_text('{"splits": 3}')
    assert "expected the names of splits" in problem(folder)


def test_what_is_no_regular_file_is_refused_without_being_opened(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for name in ("pipe.parquet", "pipe.jsonl", "pipe.json", "folder/pipe.parquet"):
        os.mkfifo(tmp_path / name)
    for name in ("pipe.parquet", "pipe.jsonl", "pipe.json", "folder"):
        assert "is a named pipe, a device or a socket - write the data to a file first" in problem(tmp_path / name)
        with pytest.raises(TaskError, match="expected a regular file"):
            list(source(tmp_path / name).rows())


def test_a_key_that_stands_twice_in_an_array_of_json_is_refused(tmp_path: Path):
    (tmp_path / "data.json").write_text('[{"prompt": "a", "prompt": "b"}]')
    with pytest.raises(TaskError, match="the key 'prompt' .text. stands twice in one object"):
        list(source(tmp_path / "data.json").rows())


def test_broken_data_are_refused_with_the_file(tmp_path: Path):
    garbage = tmp_path / "a.parquet"
    garbage.write_bytes(bytes(range(256)) * 10)
    with pytest.raises(TaskError, match=r"a\.parquet cannot be read as parquet: ArrowInvalid"):
        list(source(garbage).rows())
    cut = parquet(tmp_path / "cut.parquet", sums(100))
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.raises(TaskError, match=r"cut\.parquet cannot be read as parquet"):
        list(source(cut).rows())
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}], "_split": null}')
    (saved / "dataset_info.json").write_text("{}")
    with pytest.raises(TaskError, match="saved cannot be read as a data set of save_to_disk"):
        list(source(saved).rows())
    array = tmp_path / "array.json"
    array.write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(TaskError, match=r"array\.json element 1: expected a JSON object, got 3"):
        list(source(array).rows())
    array.write_text('[{"prompt": "a"}')
    with pytest.raises(TaskError, match=r"array\.json: expected JSON in UTF-8"):
        list(source(array).rows())
    array.write_text('{"data": [1]}\nx')
    with pytest.raises(TaskError, match=r"array\.json line 2: expected a JSON object"):
        list(source(array).rows())
