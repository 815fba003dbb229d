"""`pipeline` chooses what a recipe holds, and a key of another pipeline says where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.config import AgenticConfig, RlvrConfig, check_config, load_config, parse_config
from sluice.config.pipelines import PIPELINES, choose
from sluice.errors import ConfigError
from tests.config.recipes import AGENTIC_TEXT, TEXT, agentic, problems_of, smallest, write


def refused(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(data)
    return [problem.removeprefix("config: ") for problem in problems_of(raised.value)]


def test_the_pipeline_chooses_what_a_recipe_holds(tmp_path: Path) -> None:
    assert isinstance(load_config(write(tmp_path, AGENTIC_TEXT)), AgenticConfig)
    assert isinstance(load_config(write(tmp_path, f"pipeline: rlvr\n{TEXT}")), RlvrConfig)


def test_a_recipe_without_pipeline_is_one_of_rlvr(tmp_path: Path) -> None:
    assert isinstance(load_config(write(tmp_path)), RlvrConfig)
    assert parse_config(smallest()) == parse_config(smallest(pipeline="rlvr"))


def test_an_override_may_choose_the_pipeline(tmp_path: Path) -> None:
    path = write(tmp_path, AGENTIC_TEXT.replace("pipeline: agentic\n", ""))
    assert isinstance(load_config(path, ["pipeline=agentic"]), AgenticConfig)


@pytest.mark.parametrize("name", ["agents", "Agentic", "", None, 3, ["rlvr"], {"rlvr": 1}])
@pytest.mark.parametrize("data", [smallest(), agentic()])
def test_an_unknown_pipeline_names_the_two_and_nothing_else_is_wrong_for_it(data: dict[str, Any], name: Any) -> None:
    (problem,) = refused({**data, "pipeline": name})
    assert problem.startswith("pipeline: expected one of rlvr, agentic, got ")


def test_a_near_miss_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, AGENTIC_TEXT.replace("pipeline: agentic", "pipeline: agent") + "sequence_lenght: 9\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert problems_of(raised.value) == [
        f"{path}:1: pipeline: expected one of rlvr, agentic, got 'agent' (text) - did you mean agentic?",
        f"{path}:15: sequence_lenght: unknown key - did you mean sequence_length?",
    ]


@pytest.mark.parametrize("name", PIPELINES)
def test_every_configuration_is_taken_for_what_it_is(name: str) -> None:
    data = {"rlvr": smallest(), "agentic": agentic()}[name]
    assert choose(data) == (name, [])
    config = parse_config(data)
    assert type(config) is PIPELINES[name]
    assert config.pipeline == name
    check_config(config)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            agentic(rewards={}),
            "rewards: belongs to pipeline rlvr, this recipe is of pipeline agentic - delete it, or set pipeline to rlvr",
        ),
        (
            agentic(is_use_additional_prompts=True),
            "is_use_additional_prompts: belongs to pipeline rlvr, this recipe is of pipeline agentic - delete it, or set pipeline to rlvr",
        ),
        (
            agentic(group_size_redundancy=2),
            "group_size_redundancy: belongs to pipeline rlvr, this recipe is of pipeline agentic - did you mean "
            "train_env_manager.group_size_redundancy or val_env_manager.group_size_redundancy?",
        ),
        (
            agentic(val_env_manager={}, validation={"repeats": 4}),
            "validation.repeats: belongs to pipeline rlvr, this recipe is of pipeline agentic - delete it, or set pipeline to rlvr",
        ),
        (
            smallest(train_env_manager={"group_size": 8}),
            "train_env_manager: belongs to pipeline agentic, this recipe is of pipeline rlvr - delete it, or set pipeline to agentic",
        ),
        (
            smallest(env_monitor={"enable": False}),
            "env_monitor: belongs to pipeline agentic, this recipe is of pipeline rlvr - delete it, or set pipeline to agentic",
        ),
        (
            smallest(validation={"filtering": "apply"}),
            "validation.filtering: belongs to pipeline agentic, this recipe is of pipeline rlvr - delete it, or set pipeline to agentic",
        ),
    ],
)
def test_a_key_of_another_pipeline_says_where_it_belongs(data: dict[str, Any], problem: str) -> None:
    assert refused(data) == [problem]


def test_a_key_of_no_pipeline_is_just_unknown() -> None:
    assert refused(agentic(sequence_lengths=3)) == ["sequence_lengths: unknown key - did you mean sequence_length?"]
    assert refused(agentic(group_size=3)) == [
        "group_size: unknown key here - did you mean train_env_manager.group_size or val_env_manager.group_size?"
    ]
