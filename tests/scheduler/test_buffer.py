"""The replay buffer: transactions, quota, expiry."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduler import ReplayBuffer
from sluice.types import Group, Verdict
from tests.fakes import make_group

DROP = Verdict.dropped("no_spread", "low_information")


def committed(buffer: ReplayBuffer, group_id: int) -> Group:
    step = buffer.begin(group_id)
    group = dataclasses.replace(make_group([1.0, 0.0], group_id=group_id), start_step=step)
    assert buffer.commit(group)
    return group


@given(
    ratio=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    batch=st.integers(1, 5),
    additional=st.integers(0, 3),
    moves=st.lists(st.tuples(st.sampled_from(["begin", "commit", "abort", "step", "take"]), st.integers(0, 30)), max_size=60),
)
def test_running_and_committed_groups_never_exceed_the_quota_and_nothing_is_taken_twice(
    ratio: float, batch: int, additional: int, moves: list[tuple[str, int]]
) -> None:
    buffer = ReplayBuffer(async_generation_ratio=ratio, max_additional_running_prompts=additional)
    buffer.advance_step(0, batch)
    begun: list[int] = []
    taken: list[int] = []
    for move, number in moves:
        if move == "begin" and buffer.poll() > 0:
            begun.append(len(begun))
            buffer.begin(begun[-1])
        elif move == "commit" and begun:
            group_id = begun[number % len(begun)]
            buffer.commit(dataclasses.replace(make_group([1.0], group_id=group_id), start_step=buffer._running.get(group_id, 0)))
        elif move == "abort" and begun:
            buffer.abort(begun[number % len(begun)], DROP)
        elif move == "step":
            buffer.advance_step(buffer.step + 1, batch)
            buffer.gc()
        elif move == "take":
            taken += [group.group_id for group in buffer.get_batch(number % (batch + 1))]
        assert 0 <= buffer.running + buffer.committed <= buffer.quota + additional
        assert len(taken) == len(set(taken))


def test_case_37_what_is_ready_is_taken_oldest_first_and_the_rest_waits() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(0, 10)
    for group_id in (3, 1, 4, 0, 9, 2, 6, 5, 8, 7):
        committed(buffer, group_id)
    assert [group.group_id for group in buffer.get_batch(4)] == [0, 1, 2, 3]
    assert [group.group_id for group in buffer.get_batch(4)] == [4, 5, 6, 7]
    assert buffer.committed == 2


@pytest.mark.parametrize(("ratio", "first", "later"), [(0.0, 8, 8), (0.5, 12, 8), (1.0, 16, 8), (3.0, 32, 8)])
def test_case_90_the_first_step_opens_the_batch_and_the_steps_ahead(ratio: float, first: int, later: int) -> None:
    buffer = ReplayBuffer(async_generation_ratio=ratio)
    buffer.advance_step(0, 8)
    assert buffer.poll() == first
    buffer.advance_step(1, 8)
    assert buffer.poll() == first + later


def test_a_group_older_than_the_ratio_allows_expires_running_or_committed() -> None:
    buffer = ReplayBuffer(async_generation_ratio=1.0)
    buffer.advance_step(0, 2)
    buffer.begin(0)
    old = committed(buffer, 1)
    buffer.advance_step(1, 2)
    assert buffer.gc() == ([], [])
    buffer.advance_step(2, 2)
    assert buffer.gc() == ([0], [old])
    assert buffer.expired == 2
    assert not buffer.commit(make_group([1.0], group_id=0))
    assert not buffer.abort(0, DROP)
    assert buffer.late_transactions == 2


def test_a_stale_group_is_never_taken_even_before_it_is_collected() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(0, 1)
    committed(buffer, 0)
    buffer.advance_step(1, 1)
    assert buffer.get_batch(1) == []


def test_with_a_fractional_ratio_only_that_share_comes_from_the_oldest_permitted_step() -> None:
    buffer = ReplayBuffer(async_generation_ratio=0.5)
    buffer.advance_step(0, 4)
    for group_id in range(4):
        committed(buffer, group_id)
    buffer.advance_step(1, 4)
    for group_id in range(4, 6):
        committed(buffer, group_id)
    assert [group.group_id for group in buffer.get_batch(4)] == [0, 1, 4, 5]


def test_case_88_an_aborted_reservation_returns_its_capacity() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(0, 1)
    buffer.begin(0)
    assert buffer.poll() == 0
    assert buffer.abort(0, DROP)
    assert buffer.poll() == 1


def test_misuse_is_refused() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(1, 1)
    buffer.begin(0)
    with pytest.raises(ValueError, match="already begun"):
        buffer.begin(0)
    with pytest.raises(ValueError, match="needs a verdict that drops"):
        buffer.abort(0, Verdict.kept())
    with pytest.raises(ValueError, match="only go forward"):
        buffer.advance_step(0, 1)
    with pytest.raises(ValueError, match="async_generation_ratio"):
        ReplayBuffer(async_generation_ratio=-1.0)
