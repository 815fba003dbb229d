"""A queue of DataProto: a filter written for ROLL sees members as they were put, and no remote data outlives its use."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import FilterError, QueueError, ResampleError
from sluice.roll import DataProto, InProcessStore, build_group_queue
from tests.roll.test_remote import fresh_store


@pytest.fixture
def store() -> Iterator[InProcessStore]:
    with fresh_store() as store:
        yield store


def member(reward: float, *, steps: int = 1, **meta_info: Any) -> DataProto:
    """One trajectory, of one row for each step."""
    rewards = torch.full((steps,), reward / steps)
    return DataProto.from_dict(
        {"response_level_rewards": rewards, "input_ids": torch.zeros(steps, 4)}, meta_info={"env_timeout": False} | meta_info
    )


class NoTimeouts:
    """As in ROLL's guide."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> Any:
        self.asked.append((group_id, episode_id))
        if any(item.meta_info["env_timeout"] for item in group):
            return True
        rewards = torch.cat([item["response_level_rewards"].sum().reshape(1) for item in group])
        return rewards.numel() > 1 and rewards.std() <= 0.01


def played(queue: Any, group_id: int, *members: DataProto) -> list[bool]:
    """Every environment of a group asks, and puts one member."""
    episodes = [queue.get_episode_id(group_id, env) for env in range(len(members))]
    return [queue.put(group_id, episode, 0, one) for episode, one in zip(episodes, members, strict=True)]


def test_members_come_back_as_they_were_put_and_the_filter_decides_as_in_roll(store: InProcessStore) -> None:
    chosen = NoTimeouts()
    queue = build_group_queue(1, 2, group_filter=chosen, rollout_batch_size=2)
    played(queue, 0, member(1.0), member(1.0))
    assert queue.get_batch() is None
    played(queue, 0, member(1.0), member(0.0, env_timeout=True))
    assert queue.get_batch() is None
    first, second = member(1.0, steps=2), member(0.0)
    played(queue, 0, first, second)
    assert queue.get_batch() == [[first, second]]
    assert chosen.asked == [(0, 0), (0, 1), (0, 2)]
    assert queue.metrics()["scheduler/group_filter_count"] == 2.0


def test_remote_members_of_a_dropped_group_and_late_ones_are_freed_and_those_of_a_batch_are_not(store: InProcessStore) -> None:
    queue = build_group_queue(1, 2, 1, group_filter=NoTimeouts(), rollout_batch_size=2)
    assert played(queue, 0, member(1.0).to_remote(), member(1.0).to_remote(), member(1.0).to_remote()) == [True, True, False]
    assert not store.rows
    kept = [member(1.0).to_remote(), member(0.0).to_remote()]
    assert played(queue, 0, *kept, member(0.5).to_remote()) == [True, True, False]
    assert queue.get_batch() == [kept]
    assert len(store.rows) == 2
    queue.advance_step(1)
    queue.close()
    assert [float(one["response_level_rewards"][0]) for one in kept] == [1.0, 0.0]
    for one in kept:
        one.drop()
    assert not store.rows


def test_members_that_expire_or_are_there_at_the_end_are_freed(store: InProcessStore) -> None:
    outcomes: list[str] = []
    more = {"async_generation_ratio": 1.0, "on_left": lambda record: outcomes.append(record.outcome)}
    queue = build_group_queue(2, 2, rollout_batch_size=2, **more)
    assert [queue.get_episode_id(0, env) for env in (0, 1)] == [0, 0]
    queue.put(0, 0, 0, member(1.0).to_remote())  # its sibling, which environment 1 plays, never comes
    for step in range(3):
        batch = None
        for _ in range(4):
            for group_id in (0, 1):
                for env in (0, 0) if group_id == 0 else (0, 1):
                    if (episode := queue.get_episode_id(group_id, env)) is not None:
                        queue.put(group_id, episode, queue.start_step(group_id, episode), member(float(env)).to_remote())
            batch = batch or queue.get_batch()
        assert batch is not None
        for one in batch[0]:
            one.drop()
        queue.advance_step(step + 1)
    assert "expired" in outcomes
    queue.close()
    queue.close()
    assert {"trained", "expired", "discarded"} <= set(outcomes)
    assert not store.rows
    assert store.deleted_rows == store.put_rows


def test_a_batch_that_nobody_took_is_freed_at_the_end(store: InProcessStore) -> None:
    queue = build_group_queue(2, 1, rollout_batch_size=2)
    for group_id in (0, 1):
        queue.put(group_id, queue.get_episode_id(group_id, 0), 0, member(1.0).to_remote())
    batch = queue.get_batch(1)
    assert batch is not None
    queue.close()
    assert len(store.rows) == 1
    batch[0][0].drop()
    assert not store.rows


def test_a_filter_that_breaks_breaks_the_queue_and_leaves_nothing(store: InProcessStore) -> None:
    class Breaks:
        def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> str:
            return "yes"

    queue = build_group_queue(1, 2, group_filter=Breaks(), rollout_batch_size=2)
    with pytest.raises(FilterError, match=r"Breaks\.filter must answer True \(drop\) or False \(keep\), got 'yes'"):
        played(queue, 0, member(1.0).to_remote(), member(0.0).to_remote())
    with pytest.raises(FilterError):
        queue.get_batch()
    queue.close()
    assert not store.rows


def test_a_put_that_is_refused_took_nothing(store: InProcessStore) -> None:
    queue = build_group_queue(1, 2, rollout_batch_size=2)
    mine = member(1.0).to_remote()
    with pytest.raises(QueueError):
        queue.put(0, 5, 0, mine)
    assert store.rows
    mine.drop()
    queue.close()


def test_a_reward_that_is_not_a_number_is_missing(store: InProcessStore) -> None:
    queue = build_group_queue(1, 2, rollout_batch_size=2)
    played(queue, 0, member(float("nan")).to_remote(), member(1.0).to_remote())
    assert queue.get_batch() is None
    assert not store.rows


def test_steps_whose_rewards_are_no_sum_make_a_member_without_one(store: InProcessStore) -> None:
    queue = build_group_queue(1, 2, rollout_batch_size=2)
    bad = DataProto.from_dict({"response_level_rewards": torch.tensor([math.inf, -math.inf])}, meta_info={"env_timeout": False})
    played(queue, 0, bad.to_remote(), member(1.0).to_remote())
    assert queue.get_batch() is None
    assert not store.rows


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), redundancy=st.integers(0, 2), ratio=st.sampled_from([0.0, 0.5, 1.0]), ahead=st.booleans())
def test_whatever_environments_do_every_remote_row_is_freed_once(seed: int, redundancy: int, ratio: float, ahead: bool) -> None:
    rng = random.Random(seed)
    with fresh_store() as store:
        more = {"max_traj_per_env": 3 if ahead else -1, "async_generation_ratio": ratio, "max_resample_rounds": 20}
        queue = build_group_queue(2, 2, redundancy, group_filter=NoTimeouts(), rollout_batch_size=4, **more)
        playing: list[tuple[int, int, int]] = []
        step = 0
        try:
            for _ in range(rng.randint(5, 120)):
                group_id, env = rng.randrange(2), rng.randrange(2 + redundancy)
                if (episode := queue.get_episode_id(group_id, env)) is not None:
                    playing.append((group_id, episode, queue.start_step(group_id, episode)))
                if playing and rng.random() < 0.8:
                    one = None if rng.random() < 0.1 else member(float(rng.random() < 0.5), env_timeout=rng.random() < 0.1).to_remote()
                    queue.put(*playing.pop(rng.randrange(len(playing))), one)
                if rng.random() < 0.7 and (batch := queue.get_batch()) is not None:
                    for group in batch:
                        for trained in group:
                            trained["response_level_rewards"]
                            trained.drop()
                    step += 1
                    queue.advance_step(step)
        except ResampleError:
            pass
        queue.close()
        assert not store.rows
        assert store.deleted_rows == store.put_rows
