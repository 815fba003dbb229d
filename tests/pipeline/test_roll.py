"""Whole tiny runs with code written for ROLL, named in the recipe: only its import lines were changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.agentic import AgenticQuestions
from sluice.config import AgenticConfig, load_config
from sluice.errors import ConfigError
from sluice.pipeline.dry_run_agentic import dry_run_agentic
from sluice.pipeline.train import dry_run
from sluice.records import read_rollouts, read_summary
from sluice.roll import InProcessStore, use_remote_store
from tests.pipeline import test_agentic, test_rlvr
from tests.pipeline.test_resume import ask
from tests.pipeline.test_rlvr import Recorder
from tests.roll import code_for_roll
from tests.trainer.tiny import save_tiny_model

CODE = "tests.roll.code_for_roll"
MANAGER = {"num_env_groups": 4, "group_size": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store() -> Iterator[InProcessStore]:
    own = InProcessStore()
    before = use_remote_store(own)
    yield own
    use_remote_store(before)
    assert not own.rows


# ---------------------------------------------------------------- agentic: group_filter_cls


def play_agentic(folder: Path, model: Path, display: Recorder, **changes: Any) -> Path:
    changes = {"environment": {"type": "tests.pipeline.environments.SayAOrTimeOut", "run_in": "inline"}, "trainer__max_steps": 3, **changes}
    return test_agentic.play(folder, model, display, **changes).folder


def test_a_group_filter_written_for_roll_decides_a_run_and_is_asked_in_both_modes(tmp_path: Path, model: Path) -> None:
    code_for_roll.MyGroupFilter.asked.clear()
    display = Recorder()
    name = f"{CODE}.MyGroupFilter"
    folder = play_agentic(
        tmp_path, model, display, train_env_manager={**MANAGER, "group_filter_cls": name}, val_env_manager__group_filter_cls=name
    )
    test_agentic.check_accounts(folder)
    dropped = ask(folder, "SELECT rewards, category, source FROM groups WHERE outcome = 'dropped' AND reason = 'MyGroupFilter'")
    assert dropped
    assert {(category, source) for _, category, source in dropped} == {("invalid", name)}
    trained = ask(folder, "SELECT rewards FROM groups WHERE outcome = 'trained'")
    assert len(trained) == 12
    assert all(len(set(json.loads(row[0]))) > 1 for row in trained)
    groups = list(read_rollouts(folder))
    flagged = {group.group_id for group in groups if any("env_timeout" in member.flags for member in group.members)}
    same = {group.group_id for group in groups if len({member.reward for member in group.members}) == 1}
    assert {group.group_id for group in groups if group.outcome == "dropped"} == flagged | same
    assert flagged - same
    train, val = ([call for call in code_for_roll.MyGroupFilter.asked if call[0] == mode] for mode in ("train", "val"))
    assert {(group_id, size) for _, group_id, _, size in train} == {(group_id, 6) for group_id in range(4)}
    assert len({(group_id, episode) for _, group_id, episode, _ in train}) == len(train) == len(groups)
    assert {(group_id, episode, size) for _, group_id, episode, size in val} == {(group_id, 0, 2) for group_id in range(12)}
    found = display.validations[0]["SayAOrTimeOut"]
    assert (found.items, found.rejected, found.would_reject) == (24, 0, {})


@pytest.mark.parametrize("name", ["sluice.roll.GroupFilter", f"{CODE}.DropsByName"])
def test_filters_derived_from_the_default_one_run_and_drop_what_they_say(name: str, tmp_path: Path, model: Path) -> None:
    folder = play_agentic(tmp_path, model, Recorder(), train_env_manager={**MANAGER, "group_filter_cls": name}, trainer__max_steps=1)
    test_agentic.check_accounts(folder)
    assert not ask(folder, "SELECT 1 FROM groups WHERE outcome = 'dropped'")


def test_a_group_filter_that_makes_its_members_remote_leaves_nothing(tmp_path: Path, model: Path, store: InProcessStore) -> None:
    code_for_roll.RemoteFilter.most = 0
    manager = {**MANAGER, "group_filter_cls": f"{CODE}.RemoteFilter"}
    folder = play_agentic(tmp_path, model, Recorder(), train_env_manager=manager, resampling__max_resample_rounds=100)
    assert ask(folder, "SELECT 1 FROM groups WHERE outcome = 'dropped'")
    assert store.deleted_rows == store.put_rows > 0
    assert code_for_roll.RemoteFilter.most == 6


# ---------------------------------------------------------------- RLVR: user_defined_rollout_loop_cls

SCORED = {
    "rewards__letters__verifier": {"type": "tests.pipeline.verifiers.begins_with_a_and_is_short"},
    "rewards__letters__reward_key": "reward",
}


def play_rlvr(folder: Path, model: Path, **changes: Any) -> tuple[Path, Recorder]:
    result, display, _ = test_rlvr.play(folder, model, **{"trainer__max_steps": 3, **changes})
    summary = read_summary(result.folder / "run.db")
    assert summary.engine_tokens == summary.tokens > 0
    assert all(metrics["actor/logprob_gap_max"] <= 1e-4 for metrics in display.steps)
    return result.folder, display


def test_a_loop_that_drops_bad_formats_trains_on_the_rest_with_additional_prompts(tmp_path: Path, model: Path) -> None:
    folder, display = play_rlvr(
        tmp_path,
        model,
        user_defined_rollout_loop_cls=f"{CODE}.MyRolloutLoop",
        is_use_additional_prompts=True,
        max_additional_running_prompts=2,
        resampling={"truncated": "keep", "max_resample_rounds": 30, "min_members": 2},
        records__rollouts=True,
        tasks__validation=[],
        **SCORED,
    )
    trained = [group for group in read_rollouts(folder) if group.outcome == "trained"]
    assert len(trained) == 12
    sizes = {len(group.members) for group in trained}
    assert min(sizes) >= 2
    assert len(sizes) > 1
    for group in trained:
        assert len({member.reward for member in group.members}) == 2
        assert all(member.metrics["invalid_format"] == 0.0 for member in group.members)
        assert all(member.turns[0].text[-1:] not in "hij" for member in group.members if member.turns[0].text)
    assert [metrics["batch/rollouts"] for metrics in display.steps] == [
        float(sum(len(group.members) for group in trained if group.group_id in ids)) for ids in batches_of(folder)
    ]
    assert all(metrics["batch/zero_advantage_share"] == 0.0 for metrics in display.steps)
    reasons = ask(folder, "SELECT DISTINCT reason, category, source FROM groups WHERE outcome = 'dropped'")
    assert ("no_spread", "low_information", "std_filter") in reasons


def batches_of(folder: Path) -> list[set[int]]:
    return [set(json.loads(row[0])) for row in ask(folder, "SELECT group_ids FROM batches ORDER BY step")]


def test_without_additional_prompts_a_short_group_is_dropped_with_one_clear_message(tmp_path: Path, model: Path) -> None:
    folder, display = play_rlvr(
        tmp_path,
        model,
        user_defined_rollout_loop_cls=f"{CODE}.MyRolloutLoop",
        resampling__max_resample_rounds=200,
        trainer__max_steps=1,
        tasks__validation=[],
        **SCORED,
    )
    reasons = set(ask(folder, "SELECT DISTINCT reason, category FROM groups WHERE outcome = 'dropped'"))
    assert ("response_count", "invalid") in reasons
    trained = ask(folder, "SELECT rewards FROM groups WHERE outcome = 'trained'")
    assert all(len(json.loads(row[0])) == 6 for row in trained)
    (message,) = [text for level, text in display.messages if "response_count" in text]
    assert "where 6 were expected" in message


@pytest.mark.parametrize(("expand", "ratio"), [(False, 0.0), (True, 1.0)])
def test_remote_responses_of_a_run_leave_nothing(expand: bool, ratio: float, tmp_path: Path, model: Path, store: InProcessStore) -> None:
    play_rlvr(
        tmp_path,
        model,
        user_defined_rollout_loop_cls=f"{CODE}.RemoteLoop",
        is_num_return_sequences_expand=expand,
        async_generation_ratio=ratio,
        tasks__validation=[],
        trainer__max_steps=2,
    )
    assert store.deleted_rows == store.put_rows > 0


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"user_defined_rollout_loop_cls": f"{CODE}.SpeaksBoth"}, "has both run .* and process_new_prompt"),
        ({"user_defined_rollout_loop_cls": f"{CODE}.MyGroupFilter"}, "needs `async def run"),
        (
            {"user_defined_rollout_loop_cls": f"{CODE}.Native", "is_num_return_sequences_expand": True},
            "is_num_return_sequences_expand has no effect because .*Native has run",
        ),
        (
            {"user_defined_rollout_loop_cls": f"{CODE}.MyRolloutLoop", "group_size_redundancy": 1},
            "group_size_redundancy has no effect because .*MyRolloutLoop has process_new_prompt",
        ),
        ({"is_num_return_sequences_expand": True}, "is_num_return_sequences_expand: has no effect because user_defined_rollout_loop_cls"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sampled(changes: dict[str, Any], says: str, tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        test_rlvr.play(tmp_path, model, **changes)
    assert not (tmp_path / "runs").exists()


def test_the_doctor_looks_at_both(tmp_path: Path, model: Path) -> None:
    rlvr = tmp_path / "rlvr"
    rlvr.mkdir()
    (shown,) = dry_run(load_config(test_rlvr.write_recipe(rlvr, model, user_defined_rollout_loop_cls=f"{CODE}.MyRolloutLoop")))  # type: ignore[arg-type]
    assert len(shown.responses) == 6
    recipe = test_agentic.write_recipe(tmp_path, model, train_env_manager={**MANAGER, "group_filter_cls": f"{CODE}.MyGroupFilter"})
    config = load_config(recipe)
    assert isinstance(config, AgenticConfig)
    training, _ = AgenticQuestions(config).group_filters()
    assert (training.status, training.detail) == ("ok", f"training: {CODE}.MyGroupFilter")
    assert dry_run_agentic(config).verdict.source in (f"{CODE}.MyGroupFilter", "whole_group")
