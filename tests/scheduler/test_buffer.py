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


# ---------------------------------------------------------------- ages


def group_of(group_id: int, *versions: int, start_step: int = 0) -> Group:
    group = make_group([1.0] * len(versions), group_id=group_id)
    rollouts = [
        dataclasses.replace(rollout, turns=(dataclasses.replace(rollout.turns[0], policy_version=version),))
        for rollout, version in zip(group.rollouts, versions, strict=True)
    ]
    return dataclasses.replace(group, rollouts=tuple(rollouts), start_step=start_step)


@pytest.mark.parametrize(
    ("ratio", "staleness", "last"), [(0.0, None, 0), (1.0, None, 1), (0.5, None, 1), (2.0, None, 2), (1.0, 3, 3), (0.0, 2, 2)]
)
def test_the_last_step_of_a_group_follows_from_its_start_and_the_permitted_age(ratio: float, staleness: int | None, last: int) -> None:
    buffer = ReplayBuffer(async_generation_ratio=ratio, max_staleness=staleness)
    buffer.advance_step(4, 9)
    buffer.begin(0)
    assert buffer.last_step(0) == 4 + last
    assert buffer.commit(group_of(0, 4, 4, start_step=4))
    buffer.step_to(4 + last)
    assert buffer.gc() == ([], [])
    buffer.step_to(5 + last)
    assert [group.group_id for group in buffer.gc()[1]] == [0]


@pytest.mark.parametrize(("oldest", "last"), [(5, 6), (4, 6), (3, 5), (2, 4)])
def test_weights_older_than_the_launch_shorten_the_life_of_a_group_and_newer_ones_do_not_lengthen_it(oldest: int, last: int) -> None:
    buffer = ReplayBuffer(async_generation_ratio=2.0)
    buffer.advance_step(4, 9)
    buffer.begin(0)
    assert buffer.commit(group_of(0, 5, oldest, start_step=4))
    assert buffer.last_step(0) == last


def test_a_group_that_is_too_old_when_it_is_committed_is_no_part_of_the_buffer_and_its_capacity_returns() -> None:
    buffer = ReplayBuffer(async_generation_ratio=1.0)
    buffer.advance_step(5, 1)
    room = buffer.poll()
    buffer.begin(0)
    assert not buffer.commit(group_of(0, 5, 3, start_step=5))
    assert (buffer.poll(), buffer.running, buffer.committed, buffer.expired) == (room, 0, 0, 1)
    assert not buffer.commit(group_of(0, 5, 5, start_step=5))
    assert buffer.late_transactions == 1


def test_case_80_at_limit_zero_what_older_weights_sampled_is_never_taken() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(13, 2)
    buffer.begin(0)
    assert not buffer.commit(group_of(0, 12, 12, start_step=13))
    buffer.begin(1)
    assert buffer.commit(group_of(1, 13, 13, start_step=13))
    assert [group.group_id for group in buffer.get_batch(2)] == [1]


@pytest.mark.parametrize(
    ("ratio", "batch", "share"), [(0.5, 4, 2), (0.5, 3, 1), (0.5, 1, 0), (0.25, 7, 1), (1.5, 4, 2), (2.3, 10, 3), (0.29, 100, 29)]
)
def test_at_most_the_floor_of_the_share_is_of_the_oldest_permitted_step(ratio: float, batch: int, share: int) -> None:
    buffer = ReplayBuffer(async_generation_ratio=ratio)
    buffer.advance_step(0, batch)
    for group_id in range(batch):
        committed(buffer, group_id)
    steps = int(-(-ratio // 1))
    buffer.advance_step(steps, batch)
    for group_id in range(batch, 2 * batch):
        buffer.begin(group_id)
        assert buffer.commit(group_of(group_id, steps, start_step=steps))
    taken = buffer.get_batch(batch)
    assert len(taken) == batch
    assert sum(group.start_step == 0 for group in taken) == share
    left, gone = buffer.gc()
    assert (left, len(gone)) == ([], batch - share)


@pytest.mark.parametrize(("ratio", "batch", "ahead"), [(1.1, 10, 11), (0.07, 100, 7), (0.1, 30, 3), (0.5, 3, 2), (1 / 3, 3, 1)])
def test_the_steps_ahead_are_counted_in_the_number_that_was_written(ratio: float, batch: int, ahead: int) -> None:
    buffer = ReplayBuffer(async_generation_ratio=ratio)
    buffer.advance_step(0, batch)
    assert (buffer.lookahead, buffer.quota) == (ahead, batch + ahead)


def test_groups_with_an_age_of_their_own_are_outside_the_share_of_the_others() -> None:
    buffer = ReplayBuffer(async_generation_ratio=0.5)
    buffer.advance_step(0, 4)
    for group_id in range(6):
        buffer.begin(group_id, max_staleness=None if group_id < 3 else 4)
        assert buffer.commit(group_of(group_id, 0))
    buffer.advance_step(1, 4)
    running, gone = buffer.gc()
    assert (running, [group.group_id for group in gone]) == ([], [2])
    assert [group.group_id for group in buffer.get_batch(4)] == [0, 1, 3, 4]


# ---------------------------------------------------------------- overflow


def test_case_82_the_group_with_the_oldest_member_goes_first_then_the_larger_summed_age() -> None:
    buffer = ReplayBuffer(max_staleness=9)
    buffer.advance_step(5, 9)
    for group_id, versions in enumerate([(3, 5), (3, 3), (4, 4)]):
        buffer.begin(group_id)
        assert buffer.commit(group_of(group_id, *versions, start_step=5))
    assert [group.group_id for group in buffer.evict(2)] == [1]
    assert [group.group_id for group in buffer.groups()] == [0, 2]
    assert [group.group_id for group in buffer.evict(0)] == [0, 2]


@pytest.mark.parametrize("capacity", [3, 4, 100])
def test_nothing_goes_while_there_is_room(capacity: int) -> None:
    buffer = ReplayBuffer(max_staleness=9)
    buffer.advance_step(0, 9)
    for group_id in range(3):
        committed(buffer, group_id)
    assert buffer.evict(capacity) == []


def test_of_equally_old_groups_the_earlier_arrival_goes() -> None:
    buffer = ReplayBuffer(max_staleness=9)
    buffer.advance_step(0, 9)
    for group_id in (2, 0, 1):
        committed(buffer, group_id)
    assert [group.group_id for group in buffer.evict(1)] == [2, 0]
    assert [group.group_id for group in buffer.evict(0, among={5})] == []


# ---------------------------------------------------------------- quota and state


@pytest.mark.parametrize("additional", [0, 2])
def test_the_quota_is_opened_by_a_step_and_closed_by_what_is_taken(additional: int) -> None:
    buffer = ReplayBuffer(async_generation_ratio=1.0, max_additional_running_prompts=additional)
    assert buffer.poll() == additional
    buffer.advance_step(0, 3)
    assert (buffer.quota, buffer.poll()) == (6, 6 + additional)
    for group_id in range(4):
        committed(buffer, group_id)
    assert buffer.poll() == 2 + additional
    assert len(buffer.get_batch(3)) == 3
    assert (buffer.quota, buffer.poll()) == (3, 2 + additional)
    buffer.advance_step(1, 3)
    assert (buffer.quota, buffer.poll()) == (6, 5 + additional)


def test_asking_for_more_than_there_is_takes_what_there_is_and_closes_only_that() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(0, 5)
    committed(buffer, 0)
    assert len(buffer.get_batch(5)) == 1
    assert buffer.quota == 4
    buffer.close_batch(4)
    assert (buffer.quota, buffer.poll()) == (0, 0)
    assert buffer.get_batch(5) == []


def test_case_88_done_advances_on_consumption_and_not_on_the_first_group() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(3, 2)
    buffer.begin(0)
    assert buffer.commit(group_of(0, 3, 3, start_step=3))
    saved = buffer.state_dict()
    later = ReplayBuffer()
    later.load_state_dict(saved)
    later.restore(buffer.groups()[0], buffer.last_step(0))
    assert later.poll() == 1
    assert later.state_dict() == saved
    assert [group.group_id for group in later.groups()] == [0]
    with pytest.raises(ValueError, match="is in the buffer already"):
        later.restore(buffer.groups()[0], 3)


def test_everything_that_waits_can_be_taken_at_the_end() -> None:
    buffer = ReplayBuffer()
    buffer.advance_step(0, 3)
    for group_id in (2, 0):
        committed(buffer, group_id)
    buffer.begin(1)
    assert [group.group_id for group in buffer.take_all()] == [0, 2]
    assert (buffer.committed, buffer.running) == (0, 1)
    assert buffer.abort(1, DROP)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_generation_ratio": float("nan")}, "async_generation_ratio"),
        ({"async_generation_ratio": float("inf")}, "async_generation_ratio"),
        ({"max_additional_running_prompts": -1}, "max_additional_running_prompts"),
        ({"async_generation_ratio": 1.5, "max_staleness": 1}, "max_staleness must be at least"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(**settings)  # type: ignore[arg-type]
