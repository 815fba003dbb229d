"""The page for ROLL users: what it shows runs, what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import sluice.roll
from sluice.config import AgenticConfig, RlvrConfig, load_config, parse_config
from sluice.execution.clock import run
from sluice.rewards.base import Score
from sluice.roll import adapt_group_filter, members_of
from tests.config.recipes import smallest
from tests.execution.test_loops import fill
from tests.execution.test_shell import FunctionScorer
from tests.fakes import NO_FILTER
from tests.roll.test_group_filter import group_of, trajectory, turn, two
from tests.roll.test_loop import shell_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "roll.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
IMPORTS, _, REST = PAGE.partition("## A group filter")
KEYS = REST.partition("## Keys")[2].partition("## On purpose")[0]


def written(name: str) -> Any:
    """The class of this name, made of the page's own text."""
    (source,) = [block for block in CODE if f"class {name}" in block]
    made: dict[str, Any] = {}
    exec(source, made)
    return made[name]


def test_every_name_of_the_imports_table_is_there() -> None:
    names: set[str] = set()
    for theirs, ours in re.findall(
        r"^\| `from roll\.[\w.]+ import ([\w, ]+)` \| `from sluice\.roll import ([\w, .]+)`", IMPORTS, flags=re.MULTILINE
    ):
        assert ours in (theirs, "...")
        names |= set(theirs.split(", "))
    assert {
        "DataProto",
        "GroupFilter",
        "UserDefinedRolloutLoop",
        "RolloutContext",
        "query_filter",
        "expand_responses",
        "RLVRConfig",
    } <= names
    assert all(hasattr(sluice.roll, name) for name in names)


def test_the_group_filter_of_the_page_works_as_written() -> None:
    manager, config = SimpleNamespace(group_size=2), SimpleNamespace(seed=1)
    train = adapt_group_filter(written("MyGroupFilter")(config, manager, "train"))
    assert train.judge(two())
    assert not train.judge(two((1.0, 1.0)))
    hung = two().rollouts[0], trajectory(1, turn([5], [7], 0.0), flags=frozenset({"env_timeout"}))
    assert not train.judge(group_of(*hung))
    assert adapt_group_filter(written("MyGroupFilter")(config, manager, "val")).judge(group_of(*hung))


def test_our_filter_inside_roll_works_as_written() -> None:
    inside = written("InsideRoll")(None, None, "train")
    members = [members_of(two(rewards)) for rewards in ((1.0, 0.0), (1.0, 1.0))]
    assert [inside.filter(0, 0, group) for group in members] == [False, True]
    assert written("InsideRoll")(None, None, "val").filter(0, 0, members[1]) is False


@pytest.mark.parametrize("name", ["MyRolloutLoop", "OnlyShort"])
def test_the_loops_of_the_page_work_as_written(name: str) -> None:
    async def main() -> None:
        scorer = FunctionScorer(lambda call: Score(reward=float(call % 2), metrics={"invalid_format": float(call % 5 == 4)}, failure=None))
        shell = shell_of(written(name)(), additional=2, min_members=2, scorer=scorer, query=NO_FILTER)
        (batch,) = await fill(shell)
        assert all(2 <= len(group.rollouts) <= 4 for group in batch.groups)
        if name == "MyRolloutLoop":
            assert not any(rollout.metrics["invalid_format"] for group in batch.groups for rollout in group.rollouts)

    run(main())


def test_the_settings_of_the_page_load() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]
    (loop,) = [block for block in blocks if "user_defined_rollout_loop_cls" in block]
    config = parse_config(smallest(**loop))
    assert isinstance(config, RlvrConfig)
    assert config.resampling.min_members == 2
    (manager,) = [block["train_env_manager"] for block in blocks if "train_env_manager" in block]
    assert AgenticConfig.model_fields["train_env_manager"].annotation.model_validate(manager).group_filter_cls.endswith("MyGroupFilter")  # type: ignore[union-attr]


def keys_of(model: Any) -> set[str]:
    """Every key below a section."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        found.add(name)
        for part in re.findall(r"sluice\.config\.\w+\.(\w+)", str(field.annotation)):
            for module in ("models", "agentic", "correction"):
                inner = getattr(__import__(f"sluice.config.{module}", fromlist=[part]), part, None)
                found |= keys_of(inner) if hasattr(inner, "model_fields") else set()
    return found


def test_every_key_that_the_page_says_is_ours_exists() -> None:
    known = keys_of(RlvrConfig) | keys_of(AgenticConfig) | {"<domain>", "gate"}
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", KEYS, flags=re.MULTILINE)
    assert len(rows) > 25
    for theirs, ours in rows[2:]:
        column = theirs if ours.startswith("the same") else ours
        for name in re.findall(r"`([\w.<>]+)(?::[^`]*)?`", column):
            assert set(name.split(".")) <= known, (name, theirs)


@pytest.mark.parametrize("name", ["agentic", "rlvr"])
def test_the_examples_load_and_name_what_is_beside_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples" / "roll"
    config = load_config(folder / f"{name}.yaml")
    path = config.user_defined_rollout_loop_cls if isinstance(config, RlvrConfig) else config.train_env_manager.group_filter_cls
    assert path is not None
    module, _, cls = path.rpartition(".")
    source = (folder / f"{module}.py").read_text(encoding="utf-8")
    made: dict[str, Any] = {}
    exec(source, made)
    assert isinstance(made[cls], type)
    assert f"examples/roll/{name}.yaml" in PAGE
    assert Path(config.model.path).is_dir()
