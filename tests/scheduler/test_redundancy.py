"""Redundant members: G + R run, the first G to deliver are the group, judged once; the others are cancelled, and losses are absorbed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.scheduler import events as ev
from tests.fakes import NO_FILTER, MachinePlayer, make_rollout

RANGE = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})


def player_of(size: int, redundancy: int, **settings: object) -> MachinePlayer:
    return MachinePlayer.make(**{"group_size": size, "redundancy": redundancy, "query": NO_FILTER, **settings})


@pytest.mark.parametrize(("size", "redundancy"), [(1, 1), (1, 3), (2, 1), (4, 2), (4, 4), (4, 0)])
def test_the_first_to_deliver_are_the_group_and_the_others_are_cancelled(size: int, redundancy: int) -> None:
    player = player_of(size, redundancy)
    player.want(1)
    assert len(player.pending) == size + redundancy
    order = list(reversed(player.members(0)))
    for attempt_id in order[:size]:
        assert not player.batches
        player.finish(attempt_id)
    (group,) = player.batches[0].groups
    assert [rollout.member_index for rollout in group.rollouts] == list(range(redundancy, size + redundancy))
    assert not player.pending
    player.step()
    (record,) = player.records
    assert (record.outcome, record.attempts) == ("trained", size + redundancy)
    assert player.scheduler.ledger.attempts["cancelled"] == redundancy
    assert player.scheduler.ledger.attempts["trained"] == size
    assert record.sampled_tokens == 2 * size + redundancy
    assert len(record.rewards) == size + redundancy
    assert record.rewards.count(None) == redundancy


@given(size=st.integers(1, 5), redundancy=st.integers(0, 4), data=st.data())
def test_in_every_order_exactly_the_group_size_is_returned_and_nothing_is_judged_twice(
    size: int, redundancy: int, data: st.DataObject
) -> None:
    player = player_of(size, redundancy, response=RANGE, max_response_rounds=20)
    player.want(2)
    first: dict[int, list[int]] = {0: [], 1: []}
    while not player.batches:
        attempt_id = data.draw(st.sampled_from(sorted(player.pending)))
        launch = player.pending[attempt_id]
        how = data.draw(st.sampled_from(["good", "good", "rejected", "failed"]))
        if how == "failed":
            player.fail(attempt_id)
        else:
            if how == "good":
                first[launch.group_id].append(attempt_id)
            player.finish(attempt_id, 1.0 if how == "good" else 9.0)
    for group in player.batches[0].groups:
        assert len(group.rollouts) == size
        assert sorted(rollout.attempt_id for rollout in group.rollouts) == sorted(first[group.group_id])
    assert player.scheduler._judged == 2


def test_a_rejected_group_is_judged_once_its_running_members_cancelled_and_a_new_one_launched_in_the_next_round() -> None:
    player = MachinePlayer.make(group_size=2, redundancy=2)
    player.want(1)
    player.finish(0, 1.0)
    player.finish(3, 1.0)
    assert player.left() == [(0, "dropped", "no_spread")]
    assert player.scheduler._judged == 1
    assert player.open_group_ids() == [1]
    assert len(player.members(1)) == 4
    assert player.scheduler._groups[1].round == 2
    assert player.scheduler._groups[1].start_step == 0


def test_the_replacement_of_a_rejected_group_starts_at_the_current_step() -> None:
    player = MachinePlayer.make(group_size=2, redundancy=1, async_generation_ratio=1.0)
    player.want(1)
    player.finish(0, 1.0)
    player.finish(1, 0.0)
    player.step()
    one, two, _ = player.members(1)
    player.finish(one, 1.0)
    player.finish(two, 1.0)
    assert player.record_of(1).reason == "no_spread"
    assert player.record_of(1).start_step == 0
    assert player.scheduler._groups[2].start_step == 1


def test_late_arrivals_of_a_removed_group_are_ignored_and_counted() -> None:
    player = MachinePlayer.make(group_size=2, redundancy=2)
    player.hold_acks = True
    player.want(1)
    player.finish(0, 1.0)
    player.finish(1, 1.0)  # dropped; members 2 and 3 are told to stop
    assert player.acks == [2, 3]
    assert not player.records
    player.finish(2, 0.0, tokens=5)  # it was faster than its cancel
    player.acknowledge_all()
    assert player.record_of(0).reason == "no_spread"
    assert player.record_of(0).rewards == (1.0, 1.0, None, None)
    assert player.record_of(0).sampled_tokens == 4 + 5 + 1
    assert player.scheduler.ledger.attempts["cancelled"] == 2
    launch = player.launches[2]
    player.tell(ev.MemberFinished(rollout=make_rollout(launch, 0.0)))
    assert player.scheduler.ledger.late_results == 1


def test_a_late_arrival_of_a_group_that_was_accepted_does_not_join_it() -> None:
    player = player_of(2, 1)
    player.hold_acks = True
    player.want(1)
    player.finish(2, 1.0)
    player.finish(0, 0.0)
    player.finish(1, 0.5)
    assert [rollout.attempt_id for rollout in player.batches[0].groups[0].rollouts] == [0, 2]
    player.acknowledge_all()
    player.step()
    assert player.record_of(0).sampled_tokens == 6


@pytest.mark.parametrize("loss", ["failed", "rejected", "missing"])
def test_running_redundant_members_absorb_losses_before_anything_is_launched(loss: str) -> None:
    player = player_of(2, 2, response=RANGE)

    def lose(attempt_id: int) -> None:
        if loss == "failed":
            player.fail(attempt_id)
        else:
            player.finish(attempt_id, 9.0 if loss == "rejected" else None)

    player.want(1)
    lose(0)
    lose(1)
    assert sorted(player.pending) == [2, 3]
    lose(2)  # two are missing, one runs
    assert sorted(player.pending) == [3, 4]
    assert player.pending[4].member_index == 2
    player.finish(3, 1.0)
    player.finish(4, 0.0)
    assert len(player.batches[0].groups[0].rollouts) == 2


def test_a_loss_after_some_have_delivered_is_absorbed_too() -> None:
    player = player_of(3, 1)
    player.want(1)
    player.finish(0, 1.0)
    player.finish(1, 0.0)
    player.fail(2)
    assert sorted(player.pending) == [3]
    player.finish(3, 1.0)
    assert [rollout.member_index for rollout in player.batches[0].groups[0].rollouts] == [0, 1, 3]


def test_a_member_that_used_up_its_rounds_is_replaced_in_another_place_that_has_some_left() -> None:
    player = player_of(1, 1, max_response_rounds=2)
    player.want(1)
    player.fail(0)  # absorbed by member 1
    player.fail(1)  # member 1, second try
    player.fail(2)  # member 1 has none left; member 0 has one
    assert [launch.member_index for launch in player.launches] == [0, 1, 1, 0]
    player.fail(3)
    assert player.record_of(0).reason == "response_retries"
    assert player.record_of(0).attempts == 4


@pytest.mark.parametrize(("redundancy", "attempts"), [(0, 3), (1, 6), (2, 9)])
def test_all_rounds_of_all_places_are_used_before_a_group_is_given_up(redundancy: int, attempts: int) -> None:
    player = player_of(1, redundancy, max_response_rounds=3, max_resample_rounds=1, on_exhausted="raise")
    player.want(1)
    while player.pending:
        player.fail(min(player.pending))
    assert player.record_of(0).attempts == attempts
    assert "invalid/response_retries 1" in player.failures[0]


@pytest.mark.parametrize(("min_members", "trained"), [(None, False), (2, False), (1, True)])
def test_survivors_make_a_group_when_no_place_has_rounds_left(min_members: int | None, trained: bool) -> None:
    player = player_of(2, 1, max_response_rounds=1, min_members=min_members)
    player.want(1)
    player.finish(1, 1.0)
    player.fail(0)
    assert sorted(player.pending) == [2]
    player.fail(2)
    if trained:
        assert [rollout.member_index for rollout in player.batches[0].groups[0].rollouts] == [1]
    else:
        assert player.record_of(0).reason == "response_retries"


def test_case_68_the_limit_counts_rounds_also_when_members_never_deliver() -> None:
    player = MachinePlayer.make(group_size=8, max_response_rounds=3)
    player.want(1)
    for _ in range(2):
        for attempt_id in list(player.pending):
            player.fail(attempt_id)
        assert player.open_group_ids() == [0]
    for number, attempt_id in enumerate(list(player.pending)):
        player.finish(attempt_id, float(number % 2))
    assert len(player.batches[0].groups[0].rollouts) == 8
    assert player.scheduler.ledger.attempts["failed"] == 16


def test_case_68_one_round_too_many_drops_the_group() -> None:
    player = MachinePlayer.make(group_size=8, max_response_rounds=3)
    player.want(1)
    for _ in range(2):
        for attempt_id in list(player.pending):
            player.fail(attempt_id)
    player.fail(next(iter(player.pending)))
    assert player.record_of(0).reason == "response_retries"


def test_case_66_of_six_members_for_four_two_are_cancelled_and_the_next_batch_has_all_six_places() -> None:
    player = player_of(4, 2)
    player.want(1)
    assert len(player.pending) == 6
    for attempt_id in (5, 1, 4, 0):
        player.finish(attempt_id)
    assert player.scheduler.ledger.attempts["cancelled"] == 2
    assert player.scheduler.running_attempts == 0
    player.step()
    player.want(1)
    assert len(player.pending) == 6


def test_a_worker_that_dies_with_redundant_members_costs_only_what_is_missing() -> None:
    player = player_of(2, 2)
    player.want(1)
    player.lose_worker([0, 1, 2])
    assert len(player.pending) == 2
    assert player.scheduler.ledger.attempts["failed"] == 3
    assert player.scheduler.ledger.rejected_members == {"worker_lost": 3}
    for attempt_id in list(player.pending):
        player.finish(attempt_id)
    assert len(player.batches[0].groups[0].rollouts) == 2


def test_redundant_members_do_not_change_the_seeds_of_the_others() -> None:
    plain, redundant = player_of(2, 0), player_of(2, 2)
    plain.want(1)
    redundant.want(1)
    assert [launch.seed for launch in plain.launches] == [launch.seed for launch in redundant.launches[:2]]
    assert len({launch.seed for launch in redundant.launches}) == 4


def test_redundancy_works_while_the_trainer_steps() -> None:
    player = player_of(2, 1, async_generation_ratio=1.0)
    player.want(1)
    assert len(player.pending) == 6
    player.finish(0)
    player.finish(2)
    assert len(player.pending) == 3
    player.finish(5)
    player.finish(3)  # the next batch is ready
    assert not player.pending
    player.step()
    player.want(1)
    assert player.trained() == [[0], [1]]
    assert [rollout.member_index for rollout in player.batches[1].groups[0].rollouts] == [0, 2]
    assert len(player.pending) == 3


def test_restarted_members_keep_their_places_beside_redundant_ones() -> None:
    player = player_of(2, 1, async_generation_ratio=1.0, on_weight_update="restart")
    player.want(1)
    player.finish(0)
    player.finish(1)
    player.finish(3)
    player.publish(1, player.members(1))
    player.advance()
    assert [player.pending[attempt_id].member_index for attempt_id in player.members(1)] == [1, 2]
    player.want(1)
    player.finish(player.members(1)[-1])
    assert [rollout.member_index for rollout in player.batches[1].groups[0].rollouts] == [0, 2]
