from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sluice.config.models import TaskSourceConfig
from sluice.errors import TaskError
from sluice.tasks.base import MISSING, Row
from sluice.tasks.jsonl import JsonlSource


def source(path: Path, **more: str) -> JsonlSource:
    return JsonlSource(TaskSourceConfig(type="jsonl", path=path, **more), ("tasks", "train", 0), default_seed=0)


def read(path: Path, content: bytes) -> list[Row]:
    path.write_bytes(content)
    return list(source(path).rows())


def test_every_object_becomes_a_row_and_blank_lines_are_skipped(tmp_path: Path):
    file = tmp_path / "sums.jsonl"
    content = '{"prompt": "1+1=", "answer": 2, "tag": "easy", "difficulty": 1}\n\n  \r\n{"prompt": "é", "domain": "math", "x": [1]}'
    first, second = read(file, content.encode())
    assert (first.index, first.prompt, first.answer, first.domain, first.tag, first.difficulty) == (0, "1+1=", 2, None, "easy", 1.0)
    assert (second.index, second.prompt, second.answer, second.domain, second.tag, second.difficulty) == (
        1,
        "é",
        MISSING,
        "math",
        None,
        None,
    )
    assert second.where == f"{file} line 4"
    assert second.entry == {"prompt": "é", "domain": "math", "x": [1]}


def test_other_fields_can_hold_prompt_and_answer(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"q": "why", "prompt": "not this", "a": "so"}')
    (row,) = source(file, prompt_field="q", answer_field="a").rows()
    assert (row.prompt, row.answer) == ("why", "so")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path):
    (row,) = read(tmp_path / "data.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert row.prompt == "a"


@pytest.mark.parametrize("difficulty", ["hard", True, None, float("nan"), [1]])
def test_a_difficulty_that_is_no_number_is_none(tmp_path: Path, difficulty: object):
    import json

    (row,) = read(tmp_path / "data.jsonl", json.dumps({"prompt": "a", "difficulty": difficulty}).encode())
    assert row.difficulty is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"\n', r"line 2: expected a JSON object, got .*Expecting ',' delimiter at column 15"),
        (
            b'[{"prompt": "a"}, {"prompt": "b"}]',
            "line 1: expected a JSON object, got a list of 2 - write its elements on lines of their own",
        ),
        (b'{\n  "prompt": "a"\n}', "line 1: .* - write every object on one line of its own"),
        (b'{"prompt": "a"}\n"b"\n', r"line 2: expected a JSON object, got 'b' \(text\)"),
        (b"null", "line 1: expected a JSON object, got null"),
        (b"prompt,answer\n1+1=,2\n", "line 1: expected a JSON object, got 'prompt,answer'"),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}', "line 2: expected UTF-8 text, but byte 16 of the line is 0xe9"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1: expected UTF-8 text, but byte 1 of the line is 0xff"),
        (bytes(range(256)) * 4, "expected"),
        (b"\x1f\x8b\x08\x00rest of an archive", "line 1: expected UTF-8 text, .* - save the file as UTF-8, not packed"),
        (b'{"prompt": "a"}\n{"prompt": "b", "answer": 1, "answer": 2}', r"line 2: .*the key 'answer' .text. stands twice in one object"),
        (b'{"prompt": "a", "meta": {"x": [{"y": 1, "y": 1}]}}', r"line 1: .*the key 'y' .text. stands twice .* - delete one"),
        (b"[" * 100_000, "line 1: expected a JSON object that can be read"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "line 1: expected a JSON object that can be read"),
    ],
)
def test_what_is_no_line_of_json_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "data.jsonl"
    with pytest.raises(TaskError, match=message) as raised:
        read(file, content)
    assert str(raised.value).startswith(str(file))
    assert len(str(raised.value)) < 400


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path):
    with pytest.raises(TaskError, match="cannot be read: Is a directory"):
        list(source(tmp_path).rows())
    with pytest.raises(TaskError, match="cannot be read: No such file"):
        list(source(tmp_path / "gone").rows())


def test_a_pipe_a_device_and_a_socket_are_refused_without_being_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.jsonl"))
        for path in (tmp_path / "pipe.jsonl", tmp_path / "socket.jsonl", Path("/dev/zero")):
            (problem,) = source(path).problems()
            assert problem.path == ("tasks", "train", 0, "path")
            assert f"{path} is a named pipe, a device or a socket - write the data to a file first" in problem.message
            with pytest.raises(TaskError, match="cannot be read: expected a regular file"):
                list(source(path).rows())


def test_a_missing_file_and_a_folder_are_problems_of_the_path(tmp_path: Path):
    (gone,) = source(tmp_path / "gone.jsonl").problems()
    assert gone.path == ("tasks", "train", 0, "path")
    assert f"{tmp_path / 'gone.jsonl'} does not exist" in gone.message
    (folder,) = source(tmp_path).problems()
    assert "is a folder - name the file in it, or use type: huggingface" in folder.message
