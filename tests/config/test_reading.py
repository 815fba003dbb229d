"""YAML without its traps, and the line of everything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sluice.config import load_config
from sluice.config.reading import parse_document, parse_value
from sluice.errors import ConfigError
from tests.config.recipes import TEXT, problems_of, write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("+3", 3),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("[1, a]", [1, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("$HOME", "$HOME"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT + "rollout_batch_size: 5\nexp_name: other\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert problems_of(raised.value) == [
        f"{path}:1: exp_name: expected each key once, it stands in line 1 and in line 18 - delete one",
        f"{path}:10: rollout_batch_size: expected each key once, it stands in line 10 and in line 17 - delete one",
    ]


def test_anchors_and_merge_keys_work() -> None:
    data, places, problems = parse_document("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: {<<: [{x: 5}, *a]}\n", "f")
    assert data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 5, "y": 2}}
    assert problems == []
    assert places.find(("b", "y")).text == "f:4"
    assert places.find(("b", "nothing", "below")).text == "f:2"


def test_changing_one_alias_leaves_the_other_alone() -> None:
    data, _, _ = parse_document("a: &a {x: {y: 1}}\nb: *a\n", "f")
    data["a"]["x"]["y"] = 2
    assert data["b"] == {"x": {"y": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: expected a mapping of settings, the file is empty"),
        ("# nothing\n", "f: expected a mapping of settings, the file is empty"),
        ("- 1\n", "f:1: expected a mapping of settings, got a list of 1"),
        ("hello\n", "f:1: expected a mapping of settings, got 'hello' (text)"),
        ("a: 1\nb: [1\n", "f:3: expected valid YAML"),
        ("a:\n\t- 1\n", "f:2: expected valid YAML: while scanning for the next token, found character '\\t' that cannot start any token"),
        ("a: b: c\n", "f:1: expected valid YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 1\n", "f:2: expected valid YAML: expected a single document in the stream, but found another document"),
        ("a: *nowhere\n", "f:1: expected valid YAML: found undefined alias 'nowhere'"),
        ("a: \x07\n", "f: expected valid YAML: unacceptable character"),
        ("x: 1\na: " + "[" * 1000, "f:2: expected valid YAML: it is nested more than 50 levels deep - flatten it"),
        ("x: 1\na: " + "{a: " * 100_000, "f:2: expected valid YAML: it is nested more than 50 levels deep"),
        ("x: 1\n" + "".join(" " * i + "a:\n" for i in range(200)), "f:51: expected valid YAML: it is nested more than 50 levels deep"),
    ],
)
def test_what_is_no_mapping_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_document(text, "f")
    assert str(raised.value).startswith(message)


def bomb(levels: int, aliases: int) -> str:
    """A mapping of lists, each of which holds the one before it several times."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * aliases)}]" for level in range(1, levels + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text", [bomb(7, 9), bomb(40, 2), "a0: &a0 {k: x}\n" + "\n".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}" for i in range(1, 30))]
)
def test_aliases_that_multiply_are_refused_at_once_with_file_and_line(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"^f:\d+: expected a document of a size that can be read: it holds more than 100,000 values"):
        parse_document(text, "f")
    with pytest.raises(ConfigError, match=r"more than 100,000 values"):
        parse_value("[" + ", ".join([*("&x [1, 1, 1, 1, 1, 1, 1, 1]",), *["*x"] * 20_000]) + "]")
    assert time.perf_counter() - started < 30


def test_aliases_that_nest_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"^f:\d+: expected a document of a size that can be read: it is nested more than 50 levels deep"):
        parse_document(bomb(200, 1), "f")


def test_a_large_document_within_the_bounds_is_read() -> None:
    data, _, problems = parse_document("a:\n" + "- 1\n" * 5_000 + "b: " + "[" * 48 + "]" * 48, "f")
    assert len(data["a"]) == 5_000
    assert problems == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object:os.system {}\n", "expected plain YAML, got the tag !!python/object:os.system - delete it"),
        ("a: !mine 3\n", "expected plain YAML, got the tag !mine - delete it"),
        ("a: {1: 2}\n", "expected keys that are text, got 1 in line 1 - put it in quotes"),
        ("a: {[x]: 2}\n", "expected keys that are text, got a list or mapping in line 1 - put it in quotes"),
        ("a: !!int x\n", "expected int, as its tag says, got 'x' (text)"),
        ("a: &a {b: *a}\n", "expected a value, got an alias to the section around it"),
        ("a: {<<: 3}\n", "expected << to name a mapping or a list of mappings"),
    ],
)
def test_a_single_bad_key_is_gathered_and_the_rest_is_read(text: str, message: str) -> None:
    data, _, problems = parse_document(text + "z: 1\n", "f")
    assert [problem.message for problem in problems] == [message]
    assert data["z"] == 1


def test_a_file_that_is_not_there_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"recpe.yaml: expected a YAML file, there is none - .* holds recipe.yaml"):
        load_config(tmp_path / "recpe.yaml")
    with pytest.raises(ConfigError, match=r"expected a YAML file, this is a folder - .* holds recipe.yaml"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="the folder .* cannot be read"):
        load_config(tmp_path / "no" / "recipe.yaml")


def test_a_file_that_is_no_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="expected UTF-8 text, byte 3 is none - save the file as UTF-8"):
        load_config(path)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT, encoding="utf-8-sig")
    assert load_config(path).exp_name == "arithmetic"
