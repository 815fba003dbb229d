"""Whole tiny agentic runs, for real: environments, trajectories, engine, machine, trainer, records."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from sluice.config import load_config
from sluice.errors import ConfigError
from sluice.pipeline.dry_run_agentic import dry_run_agentic
from sluice.pipeline.train import RunResult, resume, train
from sluice.records import read_rollouts, read_summary
from tests.pipeline.test_resume import ask, change_facts
from tests.pipeline.test_rlvr import Recorder


def write_recipe(folder: Path, model: Path, **changes: Any) -> Path:
    recipe: dict[str, Any] = {
        "pipeline": "agentic",
        "exp_name": "letters",
        "seed": 3,
        "model": {"path": str(model)},
        "environment": {"type": "tests.pipeline.environments.SayA", "run_in": "inline"},
        "dialogue": {"turn_template": "{observation}j", "max_tokens_per_turn": 3},
        "train_env_manager": {"num_env_groups": 4, "group_size": 6, "group_filter_config": {"type": "std_filter"}},
        "val_env_manager": {"num_env_groups": 12, "group_size": 2},
        "rollout_batch_size": 24,
        "sequence_length": 24,
        "resampling": {"max_resample_rounds": 30},
        "engine": {"torch_threads": 1},
        "trainer": {
            "max_steps": 8,
            "learning_rate": 6e-3,
            "lr_scheduler_type": "constant",
            "torch_threads": 1,
            "save_every_steps": 3,
        },
        "validation": {"temperature": 1.0},
        "records": {"root": str(folder / "runs"), "tensorboard": False, "rollouts": True},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = recipe
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def play(folder: Path, model: Path, display: Recorder | None = None, **changes: Any) -> RunResult:
    file = write_recipe(folder, model, **changes)
    return train(load_config(file), config_path=file, display=display or Recorder())


def check_accounts(folder: Path) -> None:
    """The ledger is the engine's count, every group left once, and what was trained is whole."""
    summary = read_summary(folder / "run.db")
    assert summary.tokens == summary.engine_tokens
    rows = ask(folder, "SELECT task_id, outcome, env_steps, task_type, rewards FROM groups")
    assert len(rows) == len({row[0] for row in rows}) or any(row[1] in ("expired", "cancelled") for row in rows)
    assert all(row[2] >= 1 and row[3] == "letters" for row in rows if row[1] == "trained")


def test_a_whole_run_learns_and_accounts_for_every_token(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    folder = play(tmp_path, model, display).folder
    check_accounts(folder)
    first, last = (results["SayA"].mean for results in (display.validations[0], display.validations[-1]))
    assert first is not None
    assert last is not None
    assert last > first + 0.2
    assert all(metrics["batch/groups"] == 4.0 and metrics["batch/rollouts"] == 24.0 for metrics in display.steps)
    assert all(metrics["scheduler/off_policy_ratio"] == 0.0 for metrics in display.steps)
    assert all(metrics["actor/logprob_gap_max"] <= 1e-4 for metrics in display.steps)
    assert display.steps[-1]["rollout/idle_env_share"] == 0.0
    shares = [value for name, value in display.steps[-1].items() if name.startswith("rollout/time_share/")]
    assert sum(shares) == pytest.approx(1.0)


def test_the_recording_holds_what_was_sampled_and_done(tmp_path: Path, model: Path) -> None:
    folder = play(tmp_path, model, trainer__max_steps=2).folder
    groups = [group for group in read_rollouts(folder) if group.outcome == "trained"]
    assert len(groups) == 8
    for group in groups:
        assert len(group.members) == 6
        assert len({member.env_id for member in group.members}) == 1
        for member in group.members:
            assert len(member.turns) == member.env_steps == 2
            assert member.reward == pytest.approx(sum(turn.reward or 0.0 for turn in member.turns))
            assert all(len(turn.token_ids) == len(turn.inference_logprobs) > 0 for turn in member.turns)
            assert [turn.reward for turn in member.turns] == [0.5 * (turn.action or "").startswith("a") for turn in member.turns]


@pytest.mark.parametrize("on_weight_update", ["finish", "restart", "continue"])
def test_an_asynchronous_run_expires_what_is_too_old_and_says_how_old_its_batches_are(
    on_weight_update: str, tmp_path: Path, model: Path
) -> None:
    display = Recorder()
    folder = play(tmp_path, model, display, async_generation_ratio=1, on_weight_update=on_weight_update, trainer__max_steps=5).folder
    check_accounts(folder)
    ages = [metrics["scheduler/off_policy_max"] for metrics in display.steps]
    assert max(ages) <= 1.0
    assert len(display.steps) == 5


def test_redundant_members_are_stopped_and_their_tokens_counted(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    folder = play(tmp_path, model, display, train_env_manager__group_size_redundancy=2, trainer__max_steps=3).folder
    check_accounts(folder)
    assert all(metrics["batch/rollouts"] == 24.0 for metrics in display.steps)


@pytest.mark.parametrize("policy", ["replace", "judge"])
@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_environments_that_break_cost_members_or_groups_and_never_the_run(run_in: str, policy: str, tmp_path: Path, model: Path) -> None:
    display = Recorder()
    filters = {"type": "all", "filter_args": {"filters": [{"type": "env_failed"}, {"type": "std_filter"}]}}
    folder = play(
        tmp_path,
        model,
        display,
        environment={"type": "tests.pipeline.environments.SayAOrBreak", "run_in": run_in},
        train_env_manager__group_filter_config=filters,
        resampling__on_member_failure=policy,
        resampling__max_resample_rounds=200,
        trainer__max_steps=2,
    ).folder
    check_accounts(folder)
    assert display.steps[-1]["env/faults/env_failed"] > 0
    reasons = {row[0] for row in ask(folder, "SELECT reason FROM groups WHERE outcome = 'dropped'")}
    if policy == "judge":
        assert "env_failed" in reasons
    else:
        assert "env_failed" not in reasons


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_killed_run_goes_on_with_the_episodes_that_come_next(ratio: float, tmp_path: Path, model: Path) -> None:
    whole = play(tmp_path, model, async_generation_ratio=ratio, trainer__max_steps=6).folder
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "checkpoint-6")
    shutil.rmtree(killed / "model")
    change_facts(killed, status="running")
    resume(killed, display=Recorder())
    check_accounts(killed)
    batches = {folder: ask(folder, "SELECT step, group_ids FROM batches ORDER BY step") for folder in (whole, killed)}
    assert [step for step, _ in batches[killed]] == list(range(1, 7))
    if ratio == 0.0:
        assert batches[killed] == batches[whole]
        same = "SELECT group_id, task_id, rewards FROM groups WHERE outcome = 'trained' ORDER BY group_id"
        assert ask(killed, same) == ask(whole, same)


def test_a_group_filter_of_ones_own_judges_groups_in_both_modes(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    own = "tests.pipeline.test_agentic.OnlySpread"
    folder = play(
        tmp_path,
        model,
        display,
        train_env_manager={"num_env_groups": 4, "group_size": 6, "group_filter_cls": own},
        val_env_manager__group_filter_cls=own,
        trainer__max_steps=2,
    ).folder
    check_accounts(folder)
    assert set(OnlySpread.modes) == {"train", "val"}
    found = display.validations[0]["SayA"]
    assert found.items == found.scored == 24
    assert found.rejected == 0
    assert sum(found.would_reject.values()) % 2 == 0
    assert found.would_reject


class OnlySpread:
    """Keeps groups whose rewards differ."""

    modes: ClassVar[list[str]] = []

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        self.modes.append(mode)

    def judge(self, group: Any) -> bool:
        return len(set(group.rewards.tolist())) > 1


def test_a_dry_run_plays_and_judges_one_group(tmp_path: Path, model: Path) -> None:
    group = dry_run_agentic(load_config(write_recipe(tmp_path, model)))  # type: ignore[arg-type]
    assert len(group.responses) == len(group.rewards) == 6
    assert group.domain == "SayA"


def test_an_environment_that_does_not_exist_is_told_before_anything_is_written(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="environment"):
        play(tmp_path, model, environment={"type": "houshold", "run_in": "inline"})
    assert not (tmp_path / "runs").exists()
