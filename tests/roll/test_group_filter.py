"""Group filters written for ROLL: what they see of a group, how their answer is read, and that they leave nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import EnvManagerConfig
from sluice.errors import ConfigError, FilterError
from sluice.filters import build_group_filter, filters_state, load_filters_state
from sluice.filters.base import DomainFilters, QueryFilter
from sluice.roll import DataProto, GroupFilter, adapt_group_filter, member_of, members_of
from sluice.types import Failure, Group, Rollout, Task, Turn
from tests.roll.test_remote import fresh_store

HERE = "tests.roll.test_group_filter"
WIDTH = 16
NOTHING = np.zeros(0, dtype=np.int64)


def turn(prompt: list[int], tokens: list[int], reward: float | None) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, dtype=np.int64),
        token_ids=np.array(tokens, dtype=np.int64),
        inference_logprobs=-np.array(tokens, dtype=np.float32) / 100,
        text="",
        finish_reason="stop",
        policy_version=0,
        reward=reward,
    )


def trajectory(index: int = 0, *turns: Turn, **more: Any) -> Rollout:
    steps = [one.reward for one in turns if one.reward is not None]
    return Rollout(
        **{
            "attempt_id": index,
            "group_id": 7,
            "member_index": index,
            "task_id": "say/g3/e2",
            "turns": turns,
            "finish_reason": "completed",
            "reward": math.fsum(steps),
            "metrics": {"turns": float(len(turns))},
            "task_type": "letters",
            **more,
        }
    )


def group_of(*rollouts: Rollout) -> Group:
    return Group(
        group_id=7,
        task=Task(
            task_id="say/g3/e2", domain="say", prompt="", prompt_ids=np.zeros(0, dtype=np.int64), entry={"env_group": 3, "episode": 2}
        ),
        rollouts=rollouts,
        start_step=0,
        round=1,
        epoch=0,
        counted=(True,) * len(rollouts),
    )


def two(rewards: tuple[float, float] = (1.0, 0.0), **more: Any) -> Group:
    return group_of(*(trajectory(index, turn([5, 6], [7], reward), **more) for index, reward in enumerate(rewards)))


# ---------------------------------------------------------------- what a member is


def test_a_member_has_exactly_the_columns_that_roll_code_reads() -> None:
    rollout = trajectory(2, turn([50, 51, 52], [60, 61], 0.25), turn([53], [62], 0.5))
    member = member_of(rollout, domain="say", env_group=3, sequence_length=10, pad_token_id=9)
    assert member.batch is not None
    assert len(member) == 1
    expected: dict[str, tuple[torch.dtype, list[Any]]] = {
        "input_ids": (torch.int64, [[50, 51, 52, 60, 61, 53, 62, 9, 9, 9]]),
        "attention_mask": (torch.int64, [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0]]),
        "position_ids": (torch.int64, [[0, 1, 2, 3, 4, 5, 6, 0, 0, 0]]),
        "prompt_mask": (torch.bool, [[True] * 3 + [False] * 7]),
        "response_mask": (torch.bool, [[False] * 3 + [True, True, False, True] + [False] * 3]),
        "scores": (torch.float32, [[0.0] * 6 + [0.75] + [0.0] * 3]),
        "response_level_rewards": (torch.float32, [0.75]),
    }
    for name, (dtype, values) in expected.items():
        assert member.batch[name].dtype == dtype, name
        assert member.batch[name].tolist() == values, name
    assert torch.equal(member.batch["infer_logprobs"], torch.tensor([[0, 0, -0.6, -0.61, 0, -0.62, 0, 0, 0]]))
    assert set(member.batch.keys()) == {*expected, "infer_logprobs"}
    assert {name: values[0] for name, values in member.non_tensor_batch.items()} == {
        "domain": "say",
        "tags": "letters",
        "env_ids": 2,
        "group_ids": 3,
        "step_scores": [0.25, 0.5],
        "episode_scores": 0.75,
    }
    assert all(values.shape == (1,) and values.dtype == object for values in member.non_tensor_batch.values())
    flags = {"env_timeout": False, "env_failed": False, "drop_flag": False}
    assert member.meta_info == {**flags, "stop_reason": "completed", "metrics": {"turns": 2.0}}


@given(
    lengths=st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), min_size=1, max_size=4),
    width=st.integers(1, 30),
)
def test_members_of_a_group_fit_together_and_tell_every_token_once(lengths: list[list[tuple[int, int]]], width: int) -> None:
    longest = max(sum(map(sum, turns)) for turns in lengths)
    rollouts = [
        trajectory(index, *(turn(list(range(10, 10 + p)), list(range(20, 20 + n)), 0.5) for p, n in turns))
        for index, turns in enumerate(lengths)
    ]
    members = members_of(group_of(*rollouts), sequence_length=max(width, longest))
    assert all(tuple(member["infer_logprobs"].shape) == (1, max(width, longest) - 1) for member in members)
    joined = DataProto.concat(members)
    for index, rollout in enumerate(rollouts):
        mask = joined["response_mask"][index]
        assert joined["input_ids"][index][mask].tolist() == [token for one in rollout.turns for token in one.token_ids.tolist()]
        told = torch.cat([torch.zeros(1), joined["infer_logprobs"][index]])
        assert torch.equal(told[mask], torch.from_numpy(np.concatenate([one.inference_logprobs for one in rollout.turns])))
        assert not told[~mask].any()
        assert int(joined["attention_mask"][index].sum()) == sum(map(sum, lengths[index]))
        assert joined["scores"][index].sum() == joined["response_level_rewards"][index] == rollout.reward


@pytest.mark.parametrize(("steps", "is_dropped"), [(([0.0, 0.0, 1.0], [1.0]), True), (([0.0, 0.0, 1.0], [0.0, 0.0, 0.0]), False)])
def test_case_11_the_reward_of_a_trajectory_is_the_sum_of_its_steps(steps: tuple[list[float], ...], is_dropped: bool) -> None:
    def no_spread(group: list[DataProto]) -> Any:
        rewards = torch.cat([item["response_level_rewards"] for item in group])
        assert [item["scores"].sum() for item in group] == rewards.tolist()
        return rewards.std() <= 0.01

    group = group_of(*(trajectory(index, *(turn([5], [6], reward) for reward in rewards)) for index, rewards in enumerate(steps)))
    assert adapt_group_filter(Asked(no_spread)).judge(group) is not is_dropped


@pytest.mark.parametrize("flag", ["env_timeout", "env_failed", "drop_flag"])
def test_a_flag_of_one_member_is_none_of_its_siblings(flag: Any) -> None:
    first, second = two().rollouts
    members = members_of(group_of(first, replace(second, flags=frozenset({flag}))), sequence_length=WIDTH)
    assert [member.meta_info[flag] for member in members] == [False, True]
    assert sum(member.meta_info[name] for member in members for name in ("env_timeout", "env_failed", "drop_flag")) == 1
    members[0].meta_info["note"] = 1
    assert "note" not in members[1].meta_info


def test_a_member_that_never_spoke_has_no_token_and_no_reward() -> None:
    failure = Failure(cause="infrastructure", reason="env_failed")
    rollout = trajectory(reward=None, failure=failure, flags=frozenset({"env_failed"}), finish_reason="env_failed", task_type=None)
    member = member_of(rollout, domain="say", env_group=3, sequence_length=4)
    assert not member["attention_mask"].any()
    assert math.isnan(member["response_level_rewards"][0])
    assert math.isnan(member["scores"].sum())
    assert member["step_scores"][0] == []
    assert member["tags"][0] == "say"
    assert member.meta_info["stop_reason"] == "env_failed"


# ---------------------------------------------------------------- how it is asked


class Asked:
    """Remembers what it was asked, and answers what it is told to."""

    def __init__(self, answer: Callable[[list[DataProto]], Any]) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, Any, int]] = []

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> Any:
        self.calls.append((group_id, episode_id, len(group)))
        return self.answer(group)


@pytest.mark.parametrize(
    ("answer", "keeps"),
    [
        (True, False),
        (False, True),
        (np.True_, False),
        (np.False_, True),
        (torch.tensor(True), False),
        (torch.tensor(False), True),
        (np.array(True), False),
    ],
)
def test_true_drops(answer: Any, keeps: bool) -> None:
    asked = Asked(lambda group: answer)
    assert adapt_group_filter(asked, sequence_length=WIDTH).judge(two()) is keeps
    assert asked.calls == [(3, 2, 2)]


@pytest.mark.parametrize("answer", [None, 1, 0.5, "yes", torch.tensor([True]), np.float64(1.0), torch.tensor(2)])
def test_any_other_answer_is_an_error_that_names_class_and_value(answer: Any) -> None:
    with pytest.raises(FilterError, match=r"Asked\.filter must answer True \(drop\) or False \(keep\), got .*\("):
        adapt_group_filter(Asked(lambda group: answer), sequence_length=WIDTH).judge(two())


def test_the_default_filter_drops_nothing() -> None:
    keeps = adapt_group_filter(GroupFilter("config", "manager", "train"), sequence_length=WIDTH)
    assert keeps.judge(two((0.0, 0.0)))


def test_what_a_filter_makes_remote_is_freed_when_it_has_answered() -> None:
    def answer(group: list[DataProto]) -> bool:
        remote = [member.to_remote() for member in group]
        assert len(store.rows) == 2
        if remote[0]["response_level_rewards"][0] < 0:
            raise ValueError("negative")
        return bool(remote[0]["response_level_rewards"] == remote[1]["response_level_rewards"])

    adapted = adapt_group_filter(Asked(answer), sequence_length=WIDTH)
    with fresh_store() as store:
        assert adapted.judge(two())
        assert not adapted.judge(two((1.0, 1.0)))
        with pytest.raises(ValueError, match="negative"):
            adapted.judge(two((-1.0, 1.0)))
        assert not store.rows
        assert store.deleted_rows == 6


# ---------------------------------------------------------------- from a configuration


class Remembers:
    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        self.seen: list[int] = []

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        self.seen.append(episode_id)
        return len(self.seen) > 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


class Coroutine:
    async def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        return False


class TakesTwo:
    def filter(self, group_id: int, group: list[DataProto]) -> bool:
        return False


class Both:
    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        return False

    def judge(self, group: Group) -> bool:
        return True


class Neither:
    pass


def build(name: str) -> QueryFilter:
    manager = EnvManagerConfig(group_size=2, group_filter_cls=name if "." in name else f"{HERE}.{name}")
    return build_group_filter(
        manager,
        mode="train",
        where="train_env_manager",
        min_members=None,
        adapt=lambda theirs: adapt_group_filter(theirs, sequence_length=WIDTH),
    )


def test_drops_are_recorded_under_the_name_of_the_class_and_memory_outlives_the_process() -> None:
    first = build("Remembers")
    assert first.judge(two()).keep
    verdict = first.judge(two())
    assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (False, "Remembers", "invalid", f"{HERE}.Remembers")
    later = build("Remembers")
    filters = {"say": DomainFilters(query=later, response=None)}
    load_filters_state(filters, filters_state({"say": DomainFilters(query=first, response=None)}))
    assert not later.judge(two()).keep


def test_what_roll_keeps_must_still_be_whole() -> None:
    broken = replace(two().rollouts[0], reward=None, failure=Failure(cause="infrastructure", reason="env_failed"))
    verdict = build("sluice.roll.GroupFilter").judge(group_of(broken, two().rollouts[1]))
    assert (verdict.reason, verdict.category) == ("incomplete", "invalid")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Coroutine", r"Coroutine\.filter must be a plain function, got a coroutine function"),
        ("TakesTwo", r"TakesTwo\.filter is called with \(group_id, episode_id, group\), which it does not take"),
        ("Both", r"with both, which contradict each other - take one out"),
        ("Neither", r"must name a class with \.judge\(group\) \(True keeps\), got .*Neither without it"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_at_load(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train_env_manager\.group_filter_cls.*{says}"):
        build(name)
