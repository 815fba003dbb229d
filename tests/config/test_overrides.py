"""Settings from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import load_config, parse_config
from sluice.errors import ConfigError
from tests.config.recipes import problems_of, smallest, write

SETTINGS = {  # path with __ -> values, all of them valid in the smallest configuration
    "seed": [0, 7],
    "trainer__max_steps": [1, 500],
    "trainer__learning_rate": [0.5, 1],
    "trainer__bf16": [True],
    "tasks__train__0__size": [1, 9],
    "tasks__train__0__params": [{"min_terms": 2}, {}],
    "rewards__math__tag_included": [["algebra", "on"], []],
    "rewards__math__query_filter_config__type": ["std_filter", "package.module"],
    "rewards__math__query_filter_config__filter_args": [{"a": None}, {"a": [1, {"b": "1e-3"}]}],
    "resampling__max_groups_per_batch": [None, 8],
    "exp_name": ["x", "n0"],
}


@given(chosen=st.dictionaries(st.sampled_from(sorted(SETTINGS)), st.integers(0, 1), max_size=6), shuffled=st.randoms())
def test_an_override_is_the_same_as_the_setting_in_the_file(chosen: dict[str, int], shuffled: Any) -> None:
    changes = {name: SETTINGS[name][index % len(SETTINGS[name])] for name, index in chosen.items()}
    if "rewards__math__query_filter_config__filter_args" in changes:
        changes["rewards__math__query_filter_config__type"] = "std_filter"
    overrides = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()]
    shuffled.shuffle(overrides)
    assert parse_config(smallest(), overrides) == parse_config(smallest(**changes))


def test_the_example_of_the_documentation() -> None:
    config = parse_config(smallest(), ["rewards.math.query_filter_config.type=std_filter", "tasks.train.0.size=10"])
    assert config.rewards["math"].query_filter_config.type == "std_filter"
    assert config.tasks.train[0].size == 10


def test_values_are_read_as_yaml() -> None:
    config = parse_config(smallest(), ["trainer.learning_rate=1e-3", "model.lora={r: 4}", "tasks.epochs=", "exp_name=on"])
    assert config.trainer.learning_rate == 0.001
    assert config.model.lora is not None
    assert config.model.lora.r == 4
    assert config.tasks.epochs is None
    assert config.exp_name == "on"


def test_a_value_may_hold_an_equals_sign() -> None:
    assert parse_config(smallest(), ["tasks.prompt_template='{question}='"]).tasks.prompt_template == "{question}="


def test_an_override_may_name_a_new_reward_domain() -> None:
    config = parse_config(
        smallest(), ["rewards.logic.verifier.type=numeric", "tasks.validation=[{type: reasoning_gym, name: x, size: 1, domain: logic}]"]
    )
    assert config.rewards["logic"].verifier.type == "numeric"


def test_a_misspelt_domain_is_found_by_its_missing_verifier() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(), ["rewards.maths.query_filter_config.type=std_filter"])
    assert problems_of(raised.value) == [
        "override 'rewards.maths.query_filter_config.type=std_filter': rewards.maths.verifier: expected a section with the keys type, "
        "args, the key is missing - or did you mean rewards.math?"
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_step=3", "trainer.max_step: unknown key - did you mean max_steps?"),
        ("trainer.max_steps=many", "trainer.max_steps: expected a whole number >= 1 and <= 10000000, got 'many' (text)"),
        ("seed", "expected key.path=value, for instance trainer.max_steps=10"),
        ("=3", "expected key.path=value, for instance trainer.max_steps=10"),
        ("trainer..beta=3", "expected key.path=value, for instance trainer.max_steps=10"),
        (
            "tasks.train.1.size=3",
            "tasks.train is a list with entries 0 to 0, got 1 - to add entries, give the whole list: tasks.train=[...]",
        ),
        (
            "tasks.train.first.size=3",
            "tasks.train is a list with entries 0 to 0, got first - to add entries, give the whole list: tasks.train=[...]",
        ),
        ("trainer.max_steps.x=3", "trainer.max_steps is 10 (a number), expected a section to find x in"),
        ("seed=[1", "expected valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        ("seed={1: 2}", "expected keys that are text, got 1 in line 1 - put it in quotes"),
        ("trainer.bogus.deep=1", "trainer.bogus: unknown key - valid keys: "),
    ],
)
def test_an_override_that_cannot_be_applied_says_why(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(), [override])
    (problem,) = problems_of(raised.value)
    assert problem.startswith(f"override '{override}': {message}")


@given(st.lists(st.sampled_from(["trainer.max_steps", "seed"]), max_size=6), st.data())
def test_of_an_override_given_more_than_once_the_last_one_holds(keys: list[str], data: st.DataObject) -> None:
    overrides = [f"{key}={data.draw(st.integers(1, 9))}" for key in keys]
    last = {override.partition("=")[0]: override for override in overrides}
    assert parse_config(smallest(), overrides) == parse_config(smallest(), list(last.values()))


def test_a_section_that_comes_after_its_keys_holds_as_a_whole() -> None:
    section = "trainer={max_steps: 1, learning_rate: 1}"
    assert parse_config(smallest(), ["trainer.beta=1", section]).trainer.beta == 0
    assert parse_config(smallest(), [section, "trainer.beta=1"]).trainer.beta == 1
    assert parse_config(smallest(), ["seed=-1", "seed=2"]).seed == 2


def test_a_key_that_the_sections_new_value_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"override 'trainer.beta=1': trainer is 5 .a number., expected a section to find beta in"):
        parse_config(smallest(), ["trainer=5", "trainer.beta=1"])
    with pytest.raises(ConfigError, match=r"override 'tasks.train.0.size=3': tasks.train is a list with no entries, got 0"):
        parse_config(smallest(), ["tasks.train=[]", "tasks.train.0.size=3"])


def test_problems_of_the_file_come_first_and_overrides_last(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("max_steps: 10", "max_steps: 0"))
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["zzz=1", "seed=-1"])
    assert [problem.split(": ")[0] for problem in problems_of(raised.value)] == [f"{path}:15", "override 'zzz=1'", "override 'seed=-1'"]
