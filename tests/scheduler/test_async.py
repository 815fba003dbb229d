"""Generating while the trainer steps: how far ahead, how old, and what new weights do to responses under way.

Small enough for pencil and paper: groups are numbered in the order of their launch, and `step()` is publish and step of a trainer.
"""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import SchedulerBug
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import Group
from tests.fakes import NO_FILTER, ListSource, MachinePlayer, make_filters, make_task

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]


def player_of(ratio: float, **settings: object) -> MachinePlayer:
    return MachinePlayer.make(**{"group_size": 2, "async_generation_ratio": ratio, **settings})


# ---------------------------------------------------------------- how far ahead


@pytest.mark.parametrize(
    ("ratio", "groups", "first"),
    [(0.0, 8, 8), (1.0, 8, 16), (3.0, 8, 32), (0.5, 8, 12), (0.25, 8, 10), (1.5, 3, 8), (0.5, 1, 2), (2.0, 1, 3), (1.1, 10, 21)],
)
def test_case_90_the_first_batch_launches_itself_and_the_steps_ahead(ratio: float, groups: int, first: int) -> None:
    player = player_of(ratio)
    player.want(groups)
    assert player.scheduler.ledger.groups_launched == first


def test_generation_goes_on_while_the_trainer_steps_and_every_step_launches_one_batch() -> None:
    player = player_of(1.0)
    player.want(2)
    assert player.open_group_ids() == [0, 1, 2, 3]
    player.finish_group(0, MIXED)
    player.finish_group(1, MIXED)
    assert player.trained() == [[0, 1]]
    assert player.open_group_ids() == [2, 3]  # not cancelled
    player.finish_group(2, MIXED)  # while the trainer steps
    player.step()
    assert player.open_group_ids() == [3]
    player.want(2)
    assert player.open_group_ids() == [3, 4, 5]
    player.finish_group(4, MIXED)
    assert player.trained() == [[0, 1], [2, 4]]
    assert player.open_group_ids() == [3, 5]


def test_in_synchronous_training_nothing_runs_between_two_batches() -> None:
    player = player_of(0.0)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(1, MIXED)
    assert not player.pending
    player.step()
    assert not player.pending
    player.want(2)
    assert player.open_group_ids() == [2, 3]


def test_a_group_that_is_dropped_while_the_trainer_steps_is_replaced_at_once() -> None:
    player = player_of(1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    assert player.open_group_ids() == [2]
    assert player.scheduler._groups[2].round == 2
    player.step()
    player.want(1)
    assert player.open_group_ids() == [2, 3]
    assert player.scheduler._groups[3].round == 1


@pytest.mark.parametrize(("batches_left", "launched"), [(0, 2), (1, 4), (2, 6), (5, 6), (None, 6)])
def test_nothing_is_prepared_beyond_the_batches_that_will_be_asked_for(batches_left: int | None, launched: int) -> None:
    player = player_of(2.0)
    player.want(2, batches_left)
    assert player.scheduler.ledger.groups_launched == launched


def test_a_run_of_three_batches_launches_exactly_three_batches() -> None:
    player = player_of(2.0)
    for left in (2, 1, 0):
        player.want(2, left)
        for group_id in player.open_group_ids()[:2]:
            player.finish_group(group_id, MIXED)
        player.step()
    assert player.scheduler.ledger.groups_launched == 6
    assert player.trained() == [[0, 1], [2, 3], [4, 5]]
    assert not player.pending


def test_a_last_batch_that_is_tried_anew_prepares_nothing_either() -> None:
    player = player_of(2.0, on_exhausted="shrink", max_resample_rounds=1)
    player.want(1, 0)
    player.finish_group(0, SAME)
    assert player.open_group_ids() == [1]


def test_the_last_batch_leaves_nothing_behind_that_is_replaced_for_nobody() -> None:
    player = player_of(1.0, max_additional_running_prompts=2)
    player.scheduler._judged, player.scheduler._kept = 100, 10  # a poor acceptance: groups run ahead of their need
    player.want(1, 0)
    ahead = player.open_group_ids()[1:]
    assert ahead
    player.finish_group(0, MIXED)
    launched = player.scheduler.ledger.groups_launched
    for group_id in ahead:
        player.finish_group(group_id, SAME)
    assert player.scheduler.ledger.groups_launched == launched


@given(ratio=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]), groups=st.integers(1, 6), seed=st.integers(0, 1_000_000))
def test_groups_under_way_and_waiting_never_exceed_the_batch_and_the_steps_ahead(ratio: float, groups: int, seed: int) -> None:
    chance = random.Random(seed)
    player = player_of(ratio, max_resample_rounds=1000)
    ahead = math.ceil(Fraction(ratio) * groups)
    for step in range(4):
        player.want(groups)
        while len(player.batches) == step:
            buffer = player.scheduler.buffer
            assert buffer.running + buffer.committed == groups + ahead
            player.finish_group(chance.choice(player.open_group_ids()), MIXED if chance.random() < 0.6 else SAME)
        assert player.scheduler.buffer.running + player.scheduler.buffer.committed <= ahead
        player.step()
    assert [len(batch.groups) for batch in player.batches] == [groups] * 4
    assert len({group_id for batch in player.trained() for group_id in batch}) == 4 * groups


# ---------------------------------------------------------------- how old


def old_groups(player: MachinePlayer, steps: int) -> None:
    """Groups 0 and 1 are launched at step 0; then this many steps are trained without group 1."""
    player.want(1)
    for _ in range(steps):
        player.finish_group(next(g for g in player.open_group_ids() if g != 1), MIXED)
        player.step()
        player.want(1)


@pytest.mark.parametrize(("ratio", "staleness"), [(1.0, None), (2.0, None), (1.0, 1), (1.0, 2), (1.0, 5), (2.0, 3)])
def test_a_group_is_trained_at_its_oldest_permitted_age_and_not_a_step_later(ratio: float, staleness: int | None) -> None:
    oldest = math.ceil(ratio) if staleness is None else staleness
    in_time = player_of(ratio, max_staleness=staleness)
    old_groups(in_time, oldest)
    assert 1 in in_time.open_group_ids()
    in_time.finish_group(1, MIXED, version=0)
    assert in_time.trained()[-1] == [1]
    late = player_of(ratio, max_staleness=staleness)
    old_groups(late, oldest + 1)
    assert late.record_of(1).outcome == "expired"
    assert late.record_of(1).reason == "stale"
    assert late.record_of(1).category is None
    assert 1 not in late.open_group_ids()


@pytest.mark.parametrize("oldest", [1, 2])
def test_a_committed_group_waits_until_its_last_step_and_expires_after_it(oldest: int) -> None:
    player = player_of(1.0, max_staleness=oldest, collect="in_order")
    player.want(1)
    player.finish_group(1, MIXED)  # of the next batch
    player.finish_group(0, MIXED)
    for _ in range(oldest):
        player.step()
    assert player.scheduler.buffer.committed == 1
    player.step()
    assert player.scheduler.buffer.committed == 0
    assert player.left()[-1] == (1, "expired", "stale")


def test_the_prompt_of_an_expired_group_is_put_back_once_and_drawn_before_new_ones() -> None:
    player = player_of(1.0)
    old_groups(player, 2)
    assert player.source.returned == ["t1"]
    assert player.source.drawn.count("t1") == 2
    again = next(launch.group_id for launch in reversed(player.launches) if launch.task.task_id == "t1")
    for _ in range(2):  # it is left to grow too old once more
        player.finish_group(next(g for g in player.open_group_ids() if g != again), MIXED)
        player.step()
        player.want(1)
    assert player.record_of(again).outcome == "expired"
    assert player.source.returned == ["t1"]
    assert player.source.drawn.count("t1") == 2


def test_without_requeue_the_prompt_of_an_expired_group_is_consumed() -> None:
    player = player_of(1.0, requeue=False)
    old_groups(player, 2)
    assert player.record_of(1).outcome == "expired"
    assert player.source.returned == []


def test_the_age_counts_from_the_oldest_weights_that_took_part_and_not_only_from_the_launch() -> None:
    player = player_of(1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    player.step()
    player.want(1)
    assert player.open_group_ids() == [1, 2]
    player.finish_group(1, MIXED)
    player.step()
    player.want(1)  # step 2
    fresh, lagging = player.open_group_ids()
    player.finish(player.members(fresh)[0], 1.0, version=0)  # launched at step 1, but its weights are two steps old by now
    player.finish(player.members(fresh)[0], 0.0, version=1)
    assert player.left()[-1] == (fresh, "expired", "stale")
    assert player.scheduler.ledger.tokens["expired"] == 4
    player.finish(player.members(lagging)[0], 1.0, version=1)
    player.finish(player.members(lagging)[0], 0.0, version=2)
    assert player.trained()[-1] == [lagging]


def test_a_group_that_is_too_old_when_it_is_judged_is_replaced_in_the_next_round_so_that_the_bound_ends_it() -> None:
    player = player_of(1.0, max_resample_rounds=3, max_staleness=1)
    player.want(1)
    player.finish_group(0, MIXED)
    player.step()
    player.want(1)
    player.finish_group(1, MIXED)
    player.step()
    player.want(1)
    while not player.failures:
        player.finish_group(player.open_group_ids()[0], MIXED, version=0)  # an engine that never takes the new weights
    assert "expired/stale 6" in player.failures[0]
    assert "max_staleness" in player.failures[0]


def test_low_information_groups_that_are_too_old_do_not_top_up_a_batch() -> None:
    player = player_of(1.0, on_exhausted="keep_low_information", max_resample_rounds=1)
    player.want(1)
    player.finish_group(0, MIXED)
    player.step()
    player.want(1)
    player.finish_group(1, MIXED)
    player.step()
    player.want(1)  # step 2: weights may be of step 1 or 2
    old, fresh = player.open_group_ids()
    player.finish_group(fresh, SAME, version=1)
    player.finish_group(old, SAME, version=0)
    assert player.trained()[-1] == [fresh]


@pytest.mark.parametrize(("ratio", "groups", "oldest"), [(0.5, 4, 2), (0.25, 4, 1), (0.75, 4, 3), (0.5, 3, 1), (2.3, 10, 3)])
def test_with_a_fractional_ratio_at_most_that_share_of_a_batch_is_of_the_oldest_permitted_step(
    ratio: float, groups: int, oldest: int
) -> None:
    player = player_of(ratio, max_resample_rounds=1000)
    steps = math.ceil(ratio)
    seen = 0
    for _ in range(3 * steps + 3):
        player.want(groups)
        while player.scheduler.filling is not None:
            player.finish_group(player.open_group_ids()[-1], MIXED)  # the youngest first: the old ones pile up
        batch = player.batches[-1]
        of_oldest = sum(group.start_step == batch.step - steps for group in batch.groups)
        assert of_oldest <= oldest
        assert len(batch.groups) == groups
        for group_id in player.open_group_ids():
            player.finish_group(group_id, MIXED)
        seen = max(seen, of_oldest)
        player.step()
    assert seen == oldest


def test_a_wider_staleness_lifts_the_share_of_the_oldest_step() -> None:
    player = player_of(0.5, max_staleness=2)
    player.want(4)
    for group_id in player.open_group_ids():
        player.finish_group(group_id, MIXED)
    player.step()
    player.want(2)
    assert player.trained()[-1] == [4, 5]


def test_off_policy_ratio_is_the_mean_age_of_a_batch() -> None:
    player = player_of(1.0)
    player.want(2)
    for group_id in range(4):
        player.finish_group(group_id, MIXED)
    player.step()
    player.want(2)
    assert player.trained() == [[0, 1], [2, 3]]
    assert [metrics["scheduler/off_policy_ratio"] for metrics in player.metrics] == [0.0, 1.0]
    player.step()
    player.want(2)
    first, second = player.open_group_ids()[:2]
    player.finish_group(first, MIXED, version=1)
    player.finish_group(second, MIXED, version=2)
    assert player.metrics[-1]["scheduler/off_policy_ratio"] == 0.5
    assert player.metrics[-1]["scheduler/off_policy_max"] == 1.0


# ---------------------------------------------------------------- batches


def test_batches_are_made_of_the_oldest_groups_first() -> None:
    player = player_of(1.0)
    player.want(2)
    player.finish_group(3, MIXED)
    player.finish_group(0, MIXED)
    assert player.trained() == [[0, 3]]
    player.finish_group(1, MIXED)
    player.step()
    player.want(2)
    assert player.open_group_ids() == [2, 4, 5]
    player.finish_group(4, MIXED)
    assert player.trained()[-1] == [1, 4]
    player.finish_group(5, MIXED)
    player.step()
    player.want(2)
    player.finish_group(player.open_group_ids()[0], MIXED)
    assert player.trained()[-1] == [5, 6]  # group 2 had become too old


def test_case_37_ten_ready_groups_serve_two_batches_of_four_and_two_wait() -> None:
    player = player_of(1.5)
    player.want(4)
    for group_id in (3, 1, 4, 0):
        player.finish_group(group_id, MIXED)
    player.advance()
    for group_id in (9, 2, 6, 5, 8, 7):
        player.finish_group(group_id, MIXED, version=0)
    assert player.scheduler.buffer.committed == 6
    player.want(4)
    assert player.trained() == [[0, 1, 3, 4], [2, 5, 6, 7]]
    assert [group.group_id for group in player.scheduler.buffer.groups()] == [8, 9]
    assert player.records == [record for record in player.records if record.outcome == "trained"]
    assert not player.source.returned


def test_case_130_a_batch_holds_whole_groups_only() -> None:
    player = player_of(0.5, group_size=4)
    for _ in range(3):
        player.want(3)
        while player.scheduler.filling is not None:
            player.finish(next(iter(player.pending)), float(len(player.pending) % 2))
        assert sum(len(group.rollouts) for group in player.batches[-1].groups) == 12
        assert all(len(group.rollouts) == 4 for group in player.batches[-1].groups)
        player.step()


def test_case_86_a_hole_in_the_batch_that_is_due_is_filled_with_another_prompt_though_later_batches_are_ready() -> None:
    player = player_of(1.0, collect="in_order", max_response_rounds=3)
    player.publish(5)
    player.tell(ev.StepAdvanced(step=5))
    player.want(2)
    for group_id in (0, 2, 3):
        player.finish_group(group_id, MIXED)
    for _ in range(3):  # the prompt of group 1 fails three times
        assert not player.batches
        player.fail(player.members(1)[-1])
    assert player.left() == [(1, "dropped", "response_retries")]
    assert player.open_group_ids() == [4]
    assert player.pending[player.members(4)[0]].task.task_id == "t4"
    assert player.scheduler._groups[4].slot.ticket == 1
    player.finish_group(4, MIXED)
    assert player.trained() == [[0, 4]]
    player.step()
    player.want(2)
    assert player.trained()[-1] == [2, 3]


def test_the_end_of_the_data_trains_what_was_prepared_batch_by_batch_and_tells_the_last_one() -> None:
    player = player_of(1.0, source=ListSource(make_task(f"t{i}") for i in range(5)))
    player.want(2)
    for group_id in range(4):
        player.finish_group(group_id, MIXED)
    player.step()
    player.want(2)
    assert [batch.is_last for batch in player.batches] == [False, False]
    player.finish_group(4, MIXED)
    player.step()
    player.want(2)
    assert player.trained() == [[0, 1], [2, 3], [4]]
    assert player.batches[-1].is_last


def test_a_batch_that_was_full_at_the_very_end_is_told_as_the_last_one_or_an_empty_one_follows() -> None:
    player = player_of(1.0, source=ListSource(make_task(f"t{i}") for i in range(4)))
    player.want(2)
    for group_id in range(4):
        player.finish_group(group_id, MIXED)
    player.step()
    player.want(2)
    while not player.batches[-1].is_last:
        player.step()
        player.want(2)
    assert [g for batch in player.trained() for g in batch] == [0, 1, 2, 3]


def test_the_end_of_the_run_cancels_what_was_prepared_and_discards_what_waited() -> None:
    player = player_of(1.0)
    player.want(2)
    for group_id in (0, 1, 2):
        player.finish_group(group_id, MIXED)
    player.step()
    player.tell(ev.Shutdown())
    assert sorted(player.left()) == [
        (0, "trained", "kept"),
        (1, "trained", "kept"),
        (2, "discarded", "shutdown"),
        (3, "cancelled", "shutdown"),
    ]
    assert player.source.returned == ["t3"]
    assert player.scheduler.open_groups == 0


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 2.0])
def test_no_group_is_wasted_when_every_group_is_kept_and_all_finish_in_order(ratio: float) -> None:
    player = player_of(ratio)
    for _ in range(8):
        player.want(4)
        while player.scheduler.filling is not None:
            player.finish_group(player.open_group_ids()[0], MIXED)
        player.step()
    assert player.scheduler.ledger.groups["expired"] == 0
    assert [group_id for batch in player.trained() for group_id in batch] == list(range(32))


@pytest.mark.parametrize(("ratio", "groups"), [(0.5, 1), (0.5, 3), (0.25, 2), (1.5, 1), (0.3, 5), (1.1, 10), (0.07, 100)])
def test_where_the_share_is_no_whole_number_of_groups_at_most_one_group_a_step_is_launched_in_vain(ratio: float, groups: int) -> None:
    player = player_of(ratio, query=NO_FILTER, group_size=1)
    steps = 6
    for _ in range(steps):
        player.want(groups)
        while player.scheduler.filling is not None:
            player.finish_group(player.open_group_ids()[0], [1.0])
        for group_id in player.open_group_ids():
            player.finish_group(group_id, [1.0])
        player.step()
    ahead = Fraction(repr(ratio)) * groups
    assert player.scheduler.ledger.groups["expired"] <= steps * (math.ceil(ahead) - math.floor(ahead))


# ---------------------------------------------------------------- versions and publishing


def test_case_80_a_draw_that_waits_for_new_weights_is_told_and_goes_on_when_they_come() -> None:
    player = MachinePlayer.make(group_size=2, query=NO_FILTER, stall_warning_s=60.0)
    player.publish(12)
    player.tell(ev.StepAdvanced(step=13))
    player.want(1)
    assert not player.pending
    assert "weights: the trainer is at step 13, the engine samples with version 12" in player.scheduler.waiting_for(player.now)
    player.sleep(100.0)
    assert len(player.warnings) == 1
    assert "Waiting for weights: the trainer is at step 13, the engine samples with version 12" in player.warnings[0]
    player.publish(13)
    assert player.open_group_ids() == [0]
    player.finish_group(0, MIXED, version=13)
    assert player.trained() == [[0]]
    assert player.batches[0].groups[0].policy_version == 13


def test_case_80_what_old_weights_sampled_is_no_batch_at_limit_zero_and_no_silent_loop() -> None:
    player = MachinePlayer.make(group_size=2, query=NO_FILTER, max_resample_rounds=2)
    player.publish(13)
    player.tell(ev.StepAdvanced(step=13))
    player.want(2)
    for _ in range(2):
        for group_id in player.open_group_ids():
            player.finish_group(group_id, MIXED, version=12)
    assert player.scheduler.ledger.groups["expired"] == 4
    assert "expired/stale 4" in player.failures[0]


@pytest.mark.parametrize(("staleness", "version", "draws"), [(1, 12, True), (1, 11, False), (2, 11, True), (2, 10, False)])
def test_case_80_with_a_permitted_age_the_draw_waits_only_for_weights_that_are_too_old(staleness: int, version: int, draws: bool) -> None:
    player = player_of(1.0, max_staleness=staleness)
    player.publish(version)
    player.tell(ev.StepAdvanced(step=13))
    player.want(1)
    assert bool(player.pending) == draws


def test_versions_only_go_forward() -> None:
    player = player_of(1.0)
    player.publish(2)
    player.publish(2)
    with pytest.raises(SchedulerBug, match="only go forward"):
        player.publish(1)


@pytest.mark.parametrize("policy", ["finish", "continue"])
def test_new_weights_leave_running_members_alone(policy: str) -> None:
    player = player_of(1.0, on_weight_update=policy)
    player.want(1)
    player.finish_group(0, MIXED)
    running = dict(player.pending)
    player.publish(1, running)
    player.advance()
    assert player.pending == running


def test_restart_begins_generating_members_anew_with_their_seed_and_uses_up_no_round() -> None:
    player = player_of(1.0, on_weight_update="restart", max_response_rounds=1)
    player.want(1)
    player.finish_group(0, MIXED)
    first, second = player.members(1)
    seeds = [player.pending[first].seed, player.pending[second].seed]
    for version in (1, 2, 3):
        player.publish(version, player.members(1))
    player.tell(ev.StepAdvanced(step=1))
    again = player.members(1)
    assert set(again).isdisjoint({first, second})
    assert [player.pending[attempt_id].seed for attempt_id in again] == seeds
    assert [player.pending[attempt_id].member_index for attempt_id in again] == [0, 1]
    assert player.scheduler.ledger.attempts["cancelled"] == 6
    assert player.scheduler.ledger.tokens["cancelled"] == 6
    player.want(1)
    player.finish_group(1, MIXED)
    assert player.trained()[-1] == [1]
    player.advance()
    assert player.record_of(1).attempts == 8
    assert player.record_of(1).sampled_tokens == 6 + 4


@pytest.mark.parametrize("restarts", [0, 1, 5])
def test_a_restarted_member_has_all_its_rounds_left(restarts: int) -> None:
    player = player_of(1.0, on_weight_update="restart", max_response_rounds=2, query=NO_FILTER)
    player.want(1)
    player.finish_group(0, MIXED)
    for version in range(1, restarts + 1):
        player.publish(version, player.members(1))
    player.fail(player.members(1)[0])
    assert len(player.members(1)) == 2
    player.fail(player.members(1)[-1])
    assert player.record_of(1).reason == "response_retries"


def test_restart_touches_only_the_members_named_and_none_that_has_ended() -> None:
    player = player_of(1.0, on_weight_update="restart")
    player.want(1)
    player.finish_group(0, MIXED)
    first, second = player.members(1)
    player.finish(first, 1.0)
    player.publish(1, [0, first])  # ended, and being scored no more
    assert player.members(1) == [second]
    player.publish(2, [second])
    assert player.members(1) == [second + 1]


def test_restarted_members_whose_cancels_are_slow_are_counted_when_they_settle() -> None:
    player = player_of(1.0, on_weight_update="restart", query=NO_FILTER)
    player.hold_acks = True
    player.want(1)
    player.finish_group(0, MIXED)
    old = player.members(1)
    player.publish(1, old)
    player.advance()
    player.want(1)
    new = [attempt_id for attempt_id in player.members(1) if attempt_id not in old]
    assert len(new) == 2
    player.finish(old[0], 0.5)  # it finished while the cancel was on its way: the new attempt counts
    player.finish(new[0], 1.0)
    player.finish(new[1], 0.0)
    assert list(player.batches[-1].groups[0].rewards) == [1.0, 0.0]
    player.step()
    assert not any(record.group_id == 1 for record in player.records)  # one cancel is not settled
    player.acknowledge_all()
    assert player.record_of(1).sampled_tokens == 2 + 4 + 1


def test_a_restarted_group_keeps_its_start_and_expires_by_it() -> None:
    player = player_of(1.0, on_weight_update="restart")
    old_groups(player, 1)
    player.publish(player.scheduler.step, player.members(1))
    assert 1 in player.open_group_ids()
    player.finish_group(next(g for g in player.open_group_ids() if g != 1), MIXED)
    player.step()
    assert player.record_of(1).outcome == "expired"


def test_tokens_of_several_versions_make_a_group_as_old_as_its_oldest_token() -> None:
    player = player_of(1.0, on_weight_update="continue", query=NO_FILTER)
    player.want(1)
    player.finish_group(0, MIXED)
    player.step()
    player.want(1)
    player.finish(player.members(1)[0], 1.0, version=1)
    player.finish(player.members(1)[0], 0.0, version=0)  # began under version 0 and went on under version 1
    assert player.trained()[-1] == [1]
    assert player.batches[-1].groups[0].policy_version == 0


# ---------------------------------------------------------------- slow sources


def test_draws_that_come_after_their_batch_was_filled_serve_the_next_one() -> None:
    player = player_of(1.0)
    player.hold_draws = True
    player.want(1)
    assert len(player.draws) == 2
    player.answer_draw()
    player.finish_group(0, MIXED)
    assert player.trained() == [[0]]
    player.answer_draw()
    assert player.open_group_ids() == [1]
    player.step()
    player.want(1)
    assert len(player.draws) == 1
    assert not player.source.returned


def test_a_slow_source_that_is_exhausted_late_ends_the_run_with_what_there_is() -> None:
    player = player_of(1.0, source=ListSource([make_task("t0")]))
    player.hold_draws = True
    player.want(1)
    player.answer_draw()
    player.finish_group(0, MIXED)
    player.answer_draw()  # nothing left
    player.step()
    player.want(1)
    while player.draws:
        player.answer_draw()
    assert player.batches[-1].is_last
    assert player.trained() == [[0], []]


def test_waiting_names_the_prompts_that_are_being_drawn() -> None:
    player = player_of(0.0)
    player.hold_draws = True
    player.want(2)
    assert player.scheduler.waiting_for(player.now) == "2 prompts from the task source"
    player.answer_draw()
    assert player.scheduler.waiting_for(player.now).startswith("1 prompt from the task source; and for 2 members of 1 groups")


# ---------------------------------------------------------------- settings and impossible events


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_generation_ratio": -0.5}, "async_generation_ratio"),
        ({"async_generation_ratio": math.inf}, "async_generation_ratio|infinity"),
        ({"async_generation_ratio": 2.0, "max_staleness": 1}, "max_staleness must be at least"),
        ({"async_generation_ratio": 0.5, "max_staleness": 0}, "max_staleness must be at least"),
        ({"async_generation_ratio": 2.0, "domain_staleness": {"math": 1}}, "domain_staleness"),
        ({"surplus": "carry"}, "needs a max_staleness of at least 1"),
        ({"async_generation_ratio": 1.0, "surplus": "discard"}, "needs async_generation_ratio 0"),
    ],
)
def test_case_80_impossible_settings_are_refused_at_the_start(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, OverflowError), match=message):
        Scheduler(SchedulerConfig(group_size=2, **settings), make_filters(group_size=2))  # type: ignore[arg-type]


def test_a_step_in_the_middle_of_a_fill_cannot_be() -> None:
    player = player_of(1.0)
    player.want(2)
    with pytest.raises(SchedulerBug, match="StepAdvanced"):
        player.scheduler.handle(ev.StepAdvanced(step=1), 2.0)


def test_the_batch_and_the_step_it_was_filled_for_are_told() -> None:
    player = player_of(1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    player.step()
    player.want(1)
    player.finish_group(1, MIXED)
    assert [(batch.step, batch.requested) for batch in player.batches] == [(0, 1), (1, 1)]
    group: Group = player.batches[1].groups[0]
    assert dataclasses.replace(group) == group
    assert group.start_step == 0
