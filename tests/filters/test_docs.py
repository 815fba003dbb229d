"""The guide to group filters says what is so: its code and its recipes work."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from sluice.config import EnvManagerConfig
from sluice.filters import QueryFilter, build_group_filter
from sluice.filters.build import GROUP_FILTERS
from tests.filters.test_group_filters import candidate, group_of

DOCS = (Path(__file__).parents[2] / "docs" / "group_filters.md").read_text(encoding="utf-8")


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the guide's code defines, importable as its recipes name them."""
    module = ModuleType("my_package.filters")
    for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(block, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.filters", module)
    return module.__dict__


def build(manager: dict[str, Any], mode: Any = "train") -> QueryFilter:
    settings = EnvManagerConfig.model_validate(manager)
    return build_group_filter(settings, mode=mode, where="train_env_manager", min_members=None)


def test_the_recipes_of_the_guide_build(documented: dict[str, Any]) -> None:
    recipes = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)]
    chain, custom = [build({**recipe["train_env_manager"], "group_size": 4}) for recipe in recipes]
    for fate, reason in (("lost", "missing_member"), ("hung", "env_timeout"), ("died", "env_failed"), ("drop_flag", "drop_flag")):
        assert chain.judge(group_of(["right", "wrong", "right", fate])).reason == reason
    assert chain.judge(group_of(["right"] * 4)).reason == "no_spread"
    assert custom.judge(group_of(["right", "wrong", "right", "flag_failed"])).reason == "broken_environment"


def test_the_guard_of_the_guide_keeps_every_other_flagged_group(documented: dict[str, Any]) -> None:
    assert documented["what_becomes_of"]([candidate(True)] * 4) == ["kept_by_guard", "drop_flag", "kept_by_guard", "drop_flag"]


def test_the_function_of_the_guide_counts_steps(documented: dict[str, Any]) -> None:
    config = {"type": "my_package.filters.short_enough", "filter_args": {"most_steps": 1}}
    short = build({"group_size": 2, "group_filter_config": config})
    group = group_of(["right", "wrong"])
    assert short.judge(group).keep
    turns = tuple(replace(turn, reward=0.0) for turn in group.rollouts[0].turns)
    longer = replace(group, rollouts=(replace(group.rollouts[0], turns=turns), group.rollouts[1]))
    assert short.judge(longer).reason == "short_enough"


def test_the_class_of_the_guide_remembers_and_spares_the_evaluation(documented: dict[str, Any]) -> None:
    manager = {"group_size": 2, "group_filter_cls": "my_package.filters.CalmGroups"}
    solved = build(manager).judge(group_of(["right", "right"]))
    assert (solved.reason, solved.category) == ("solved_by_all", "low_information")
    assert build(manager).judge(group_of(["right", "hung"])).reason == "broken_environment"
    assert build(manager).judge(group_of(["right", "unscored"])).reason == "incomplete"
    assert build(manager, "val").judge(group_of(["right", "right"])).keep
    (custom,) = build(manager).parts
    assert custom.memory is not None


def test_every_built_in_filter_is_in_the_table_of_the_guide() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| ", DOCS, re.MULTILINE)) == set(GROUP_FILTERS)
