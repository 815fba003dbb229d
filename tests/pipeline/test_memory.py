"""What filters of the user remember is a part of checkpoints, in training and in evaluation; what cannot be is said at load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from sluice.config import load_config
from sluice.errors import ConfigError
from sluice.pipeline.train import resume, train
from tests.pipeline.test_agentic import write_recipe
from tests.pipeline.test_resume import change_facts
from tests.pipeline.test_rlvr import Recorder
from tests.trainer.tiny import save_tiny_model


class Counts:
    """Keeps everything, and counts what it has seen."""

    built: ClassVar[list[Self]] = []

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        self.mode = mode
        self.seen: list[str] = []
        self.built.append(self)

    def judge(self, group: Any) -> bool:
        self.seen.append(group.task.task_id)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Keeps(Counts):
    """Has a memory that no file can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": object()}


class Breaks(Counts):
    """Cannot say what it remembers."""

    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def recipe(folder: Path, model: Path, train_filter: type, val_filter: type) -> Path:
    return write_recipe(
        folder,
        model,
        train_env_manager={"num_env_groups": 4, "group_size": 6, "group_filter_cls": f"{__name__}.{train_filter.__name__}"},
        val_env_manager={"num_env_groups": 3, "group_size": 2, "group_filter_cls": f"{__name__}.{val_filter.__name__}"},
        validation__every_steps=2,
        trainer__max_steps=4,
        trainer__save_every_steps=2,
    )


def newest(mode: str) -> Counts:
    return [one for one in Counts.built if one.mode == mode][-1]


def test_a_resumed_run_remembers_what_training_and_evaluation_had_seen(tmp_path: Path, model: Path) -> None:
    file = recipe(tmp_path, model, Counts, Counts)
    whole = train(load_config(file), config_path=file, display=Recorder()).folder
    seen = {mode: newest(mode).seen for mode in ("train", "val")}
    assert len(seen["train"]) == 4 * 4
    assert len(seen["val"]) == 3 * 3  # before the run, after step 2, and after it
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "checkpoint-4")
    shutil.rmtree(killed / "model")
    change_facts(killed, status="running")
    resume(killed, display=Recorder())
    assert {mode: newest(mode).seen for mode in ("train", "val")} == seen


@pytest.mark.parametrize("wrong", [Keeps, Breaks])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_a_memory_that_no_checkpoint_can_hold_is_said_before_anything_is_written(
    mode: str, wrong: type, tmp_path: Path, model: Path
) -> None:
    file = recipe(tmp_path, model, *((wrong, Counts) if mode == "train" else (Counts, wrong)))
    with pytest.raises(ConfigError, match=f"{mode}_env_manager.group_filter_cls.*(state_dict raised|got object)"):
        train(load_config(file), config_path=file, display=Recorder())
    assert not (tmp_path / "runs").exists()


class Meddles(Counts):
    """Writes into the task that it is shown, and remembers which problems it has seen."""

    problems: ClassVar[list[str]] = []

    def judge(self, group: Any) -> bool:
        self.problems.append(group.rollouts[0].env_id)
        group.task.entry["env_group"] = group.task.entry["episode"] = 99
        return True


def test_a_filter_that_writes_into_a_task_changes_no_later_evaluation(tmp_path: Path, model: Path) -> None:
    file = recipe(tmp_path, model, Counts, Meddles)
    train(load_config(file, ["trainer.max_steps=1"]), config_path=file, display=Recorder())
    before, after = Meddles.problems[:3], Meddles.problems[3:]
    assert sorted(before) == sorted(after)
    assert len(set(before)) == 3
