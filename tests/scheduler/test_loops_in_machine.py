"""User-defined loops as the machine sees them: it counts their attempts and rounds, judges what they return, and stops them in time."""

from __future__ import annotations

import dataclasses

import pytest

from sluice.config.models import FilterConfig
from sluice.errors import LoopError, SchedulerBug
from sluice.filters import RatioGuard
from sluice.scheduler import events as ev
from sluice.types import Verdict
from tests.fakes import NO_FILTER, STD_FILTER, MachinePlayer, make_rollout

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]
RANGE = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})


def looping(**settings: object) -> MachinePlayer:
    return MachinePlayer.make(**{"group_size": 2, "has_user_loop": True, **settings})


def finish_loop(player: MachinePlayer, group_id: int, rewards: list[float]) -> None:
    player.give_back(group_id, player.deliver(group_id, rewards))


# ---------------------------------------------------------------- the ordinary way


def test_a_loop_is_started_for_every_group_and_nothing_is_launched_for_it() -> None:
    player = looping()
    player.want(2)
    assert [order.group_id for order in player.open_loops.values()] == [0, 1]
    assert [order.task.task_id for order in player.open_loops.values()] == ["t0", "t1"]
    assert not player.pending
    assert player.scheduler.running_groups == 2


def test_every_try_is_an_attempt_and_what_is_returned_is_judged() -> None:
    player = looping()
    player.want(1)
    finish_loop(player, 0, MIXED)
    assert player.trained() == [[0]]
    assert [rollout.attempt_id for rollout in player.batches[0].groups[0].rollouts] == [0, 1]
    player.step()
    assert player.record_of(0).sampled_tokens == 4


def test_a_returned_group_without_spread_is_dropped_and_replaced_by_another_loop() -> None:
    player = looping()
    player.want(1)
    finish_loop(player, 0, SAME)
    assert player.left() == [(0, "dropped", "no_spread")]
    assert list(player.open_loops) == [1]
    assert player.scheduler._groups[1].round == 2


def test_the_order_in_which_a_loop_tries_its_members_is_its_own() -> None:
    player = looping(query=NO_FILTER)
    player.want(1)
    one = player.start_attempt(0, 1)
    zero = player.start_attempt(0, 0)
    assert one is not None
    assert zero is not None
    first, second = player.finish(zero, 1.0), player.finish(one, 0.0)
    player.give_back(0, [second, first])
    assert [rollout.member_index for rollout in player.batches[0].groups[0].rollouts] == [0, 1]


def test_seeds_of_loops_are_those_of_the_machine() -> None:
    plain, loops = MachinePlayer.make(group_size=2), looping()
    plain.want(1)
    loops.want(1)
    for index in (0, 1):
        loops.start_attempt(0, index)
    assert [launch.seed for launch in loops.launches] == [launch.seed for launch in plain.launches]


# ---------------------------------------------------------------- rounds and members


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds_of_a_member_are_counted_and_refused_beyond_the_limit(rounds: int) -> None:
    player = looping(max_response_rounds=rounds, response=RANGE)
    player.want(1)
    for _ in range(rounds):
        attempt_id = player.start_attempt(0, 0)
        assert attempt_id is not None
        player.finish(attempt_id, 9.0)
        judged = player.loops[-1]
        assert isinstance(judged, ev.MemberJudged)
        assert judged.verdict.reason == "reward_too_high"
    assert player.start_attempt(0, 0) is None
    assert player.loops[-1] == ev.AttemptRefused(group_id=0, member_index=0, reason="response_retries")
    assert player.start_attempt(0, 1) is not None  # rounds are counted for each member
    assert player.scheduler.ledger.attempts["rejected"] == rounds


def test_a_loop_that_does_not_want_what_it_got_tries_again_with_another_seed() -> None:
    player = looping(query=NO_FILTER)
    player.want(1)
    player.deliver(0, MIXED)
    again = player.start_attempt(0, 0)
    assert again is not None
    assert player.launches[2].seed != player.launches[0].seed
    assert player.scheduler.ledger.rejected_members == {"loop_rejected": 1}
    assert player.scheduler.ledger.tokens["rejected"] == 2
    rollouts = [player.finish(again, 0.5)]
    assert player.scheduler.ledger.open_attempts == 2
    player.give_back(0, [*rollouts, _delivered(player, 0, 1)])
    assert list(player.batches[0].groups[0].rewards) == [0.5, 0.0]


def _delivered(player: MachinePlayer, group_id: int, index: int):
    rollout = player.scheduler._groups[group_id].delivered[index]
    assert rollout is not None
    return rollout


def test_a_failed_attempt_uses_up_a_round_and_nothing_is_launched_in_its_stead() -> None:
    player = looping(max_response_rounds=2)
    player.want(1)
    attempt_id = player.start_attempt(0, 0)
    assert attempt_id is not None
    player.fail(attempt_id)
    assert not player.pending
    again = player.start_attempt(0, 0)
    assert again is not None
    assert player.launches[1].seed == player.launches[0].seed
    player.fail(again)
    assert player.start_attempt(0, 0) is None


def test_members_that_a_loop_does_not_return_leave_the_group_and_are_counted() -> None:
    player = looping(redundancy=2, query=NO_FILTER)
    player.want(1)
    rollouts = player.deliver(0, [1.0, 0.0, 0.5, 0.25])
    player.give_back(0, [rollouts[3], rollouts[1]])
    assert list(player.batches[0].groups[0].rewards) == [0.0, 0.25]
    assert player.scheduler.ledger.rejected_members == {"loop_left_out": 2}
    player.step()
    assert player.record_of(0).sampled_tokens == 8
    assert player.scheduler.ledger.tokens["rejected"] == 4


def test_attempts_that_still_run_when_a_loop_returns_are_cancelled() -> None:
    player = looping(redundancy=1, query=NO_FILTER)
    player.want(1)
    rollouts = player.deliver(0, MIXED)
    player.start_attempt(0, 2)
    player.give_back(0, rollouts)
    assert not player.pending
    assert player.scheduler.ledger.attempts["cancelled"] == 1
    assert player.trained() == [[0]]


@pytest.mark.parametrize(("index", "error"), [(-1, LoopError), (3, LoopError)])
def test_a_member_that_does_not_exist_is_the_mistake_of_the_loop(index: int, error: type[Exception]) -> None:
    player = looping()
    player.want(1)
    with pytest.raises(error, match="expected a member_index from 0 to 1"):
        player.scheduler.handle(ev.LoopAttempt(group_id=0, member_index=index), 1.0)


def test_a_loop_may_begin_further_members_to_choose_from_and_what_it_leaves_out_is_rejected() -> None:
    player = looping()
    player.want(1)
    rollouts = player.deliver(0, [1.0, 1.0, 0.0])
    assert [rollout.member_index for rollout in rollouts] == [0, 1, 2]
    player.give_back(0, [rollouts[0], rollouts[2]])
    assert player.trained() == [[0]]
    assert player.scheduler.ledger.attempts["rejected"] == 1
    player.step()
    assert player.record_of(0).rewards == (1.0, None, 0.0)


def test_further_members_are_as_many_as_all_rounds_together_have() -> None:
    player = looping(max_response_rounds=3)
    player.want(1)
    assert [player.start_attempt(0, index) for index in range(7)] == [0, 1, 2, 3, 4, 5, None]
    answers = player.scheduler.handle(ev.LoopAttempt(group_id=0, member_index=6), 1.0)
    assert answers == [ev.AttemptRefused(group_id=0, member_index=6, reason="response_retries")]


def test_seeds_of_further_members_are_their_own() -> None:
    player = looping(max_response_rounds=5)
    player.want(1)
    for index in range(10):
        player.start_attempt(0, index)
    assert len({launch.seed for launch in player.launches}) == 10


def test_a_member_that_is_being_generated_cannot_be_tried_at_the_same_time() -> None:
    player = looping()
    player.want(1)
    player.start_attempt(0, 0)
    with pytest.raises(LoopError, match=r"member 0 is being generated[\s\S]*group 0, task 't0'"):
        player.scheduler.handle(ev.LoopAttempt(group_id=0, member_index=0), 1.0)


# ---------------------------------------------------------------- giving up, wrong counts


@pytest.mark.parametrize(("reason", "told"), [("", "loop_returned_none"), ("no_tools", "no_tools")])
def test_case_39_a_loop_that_returns_none_fails_its_group_with_its_reason_and_is_replaced(reason: str, told: str) -> None:
    player = looping()
    player.want(1)
    player.deliver(0, [1.0])
    player.start_attempt(0, 1)
    player.give_back(0, None, reason=reason)
    assert player.left() == [(0, "dropped", told)]
    assert player.record_of(0).category == "invalid"
    assert player.record_of(0).source == "loop"
    assert player.record_of(0).sampled_tokens == 3
    assert list(player.open_loops) == [1]
    assert not player.pending


def test_case_39_accept_reject_none_accept_ends_a_wait_for_four() -> None:
    player = looping(fill="shrink")
    player.want(4)
    finish_loop(player, 0, MIXED)
    finish_loop(player, 1, SAME)
    player.give_back(2, None)
    assert not player.batches
    finish_loop(player, 3, MIXED)
    assert player.trained() == [[0, 3]]
    assert player.scheduler.ledger.rejected_groups == {("low_information", "no_spread"): 1, ("invalid", "loop_returned_none"): 1}


def test_the_prompt_of_a_loop_that_gave_up_is_consumed_unless_machinery_failed_it() -> None:
    player = looping(query=NO_FILTER)
    player.want(1)
    player.give_back(0, None)
    attempt_id = player.start_attempt(1, 0)
    assert attempt_id is not None
    player.fail(attempt_id)
    player.give_back(1, None, reason="engine_error")
    finish_loop(player, 2, MIXED)
    assert player.source.returned == ["t1"]


def test_a_prompt_that_its_loop_gives_up_again_and_again_goes_into_quarantine() -> None:
    player = looping(quarantine_after=2, query=NO_FILTER)
    player.source.make = lambda i: make_task_x()  # type: ignore[union-attr]
    player.want(1)
    player.give_back(0, None)
    assert not player.scheduler.prompts.quarantined
    player.give_back(1, None, reason="no_tools")
    assert player.scheduler.prompts.quarantined == {"x": "no_tools"}
    assert "quarantine" in player.failures[0]


def make_task_x():
    from tests.fakes import make_task

    return make_task("x")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_responses_without_additional_prompts_is_no_group_and_is_told_once(count: int) -> None:
    player = looping(redundancy=1, query=NO_FILTER)
    player.want(1)
    for group_id in (0, 1):
        finish_loop(player, group_id, [1.0] * count)
        assert player.left()[-1] == (group_id, "dropped", "response_count")
    assert player.record_of(0).category == "invalid"
    assert player.record_of(0).evidence == {"returned": float(count), "expected": 2.0}
    assert len(player.warnings) == 1
    assert f"{count} rollouts where 2 were expected" in player.warnings[0]


@pytest.mark.parametrize(("count", "is_whole"), [(1, False), (2, True), (3, True), (4, True), (5, True)])
def test_with_additional_prompts_any_number_from_min_members_on_is_a_whole_group(count: int, is_whole: bool) -> None:
    player = looping(group_size=4, redundancy=1, min_members=2, max_additional_running_prompts=1, query=NO_FILTER)
    player.want(1)
    rewards = [float(number) for number in range(count)]
    finish_loop(player, 0, rewards)
    if is_whole:
        assert list(player.batches[0].groups[0].rewards) == rewards
    else:
        assert player.left()[0] == (0, "dropped", "response_count")


@pytest.mark.parametrize(("tries", "is_whole"), [(1, False), (2, True)])
def test_survivors_are_a_group_where_the_rounds_of_the_lost_members_are_used_up(tries: int, is_whole: bool) -> None:
    player = looping(group_size=3, min_members=2, max_response_rounds=2, query=NO_FILTER)
    player.want(1)
    rollouts = player.deliver(0, MIXED)
    for _ in range(tries):
        attempt_id = player.start_attempt(0, 2)
        assert attempt_id is not None
        player.fail(attempt_id)
    player.give_back(0, rollouts)
    assert bool(player.batches) == is_whole


# ---------------------------------------------------------------- whose verdict counts


@pytest.mark.parametrize("query", [STD_FILTER, NO_FILTER])
def test_a_verdict_of_the_loop_is_final_and_the_filter_is_not_asked(query: FilterConfig) -> None:
    player = looping(query=query)
    player.want(1)
    drop = Verdict.dropped("boring", "low_information", "my_loop")
    player.give_back(0, player.deliver(0, MIXED), judged=drop)
    assert player.left() == [(0, "dropped", "boring")]
    assert player.record_of(0).source == "my_loop"
    player.give_back(1, player.deliver(1, SAME), judged=Verdict.kept("my_loop", "liked"))
    assert player.trained() == [[1]]
    player.step()
    assert player.record_of(1).reason == "liked"
    assert player.scheduler._judged == 2


def test_with_drop_group_a_truncated_member_stops_its_loop_at_once() -> None:
    player = looping(truncated="drop_group")
    player.want(1)
    first = player.start_attempt(0, 0)
    player.start_attempt(0, 1)
    assert first is not None
    player.finish(first, 1.0, finish_reason="length")
    assert player.left() == [(0, "dropped", "truncated")]
    assert list(player.open_loops) == [1]
    assert not player.pending


def test_a_loop_may_change_rewards_but_not_what_was_sampled() -> None:
    player = looping()
    player.want(2)
    rollouts = player.deliver(0, SAME)
    player.give_back(0, [rollouts[0], dataclasses.replace(rollouts[1], reward=0.25)])
    assert player.scheduler.buffer.committed == 1
    rollouts = player.deliver(1, MIXED)
    other = make_rollout(player.launches[3], 0.0, tokens=7)
    with pytest.raises(LoopError, match=r"may change rewards[\s\S]*group 1, task 't1'"):
        player.scheduler.handle(ev.GroupReturned(group_id=1, rollouts=(rollouts[0], other)), 9.0)


@pytest.mark.parametrize("which", ["foreign", "twice", "rejected"])
def test_only_own_members_that_were_delivered_can_be_returned_each_once(which: str) -> None:
    player = looping(response=RANGE)
    player.want(2)
    rollouts = player.deliver(0, MIXED)
    foreign = player.deliver(1, [1.0, 9.0])
    wrong = {"foreign": (0, [rollouts[0], foreign[0]]), "twice": (0, [rollouts[0], rollouts[0]]), "rejected": (1, foreign)}
    group_id, returned = wrong[which]
    with pytest.raises(LoopError, match="must return rollouts of its own group"):
        player.scheduler.handle(ev.GroupReturned(group_id=group_id, rollouts=tuple(returned)), 9.0)


def test_a_drop_of_the_loop_is_subject_to_the_guard() -> None:
    player = looping(guard=RatioGuard(0.0), query=NO_FILTER)
    player.want(1)
    drop = Verdict.dropped("boring", "low_information", "my_loop")
    player.give_back(0, player.deliver(0, SAME), judged=drop)
    assert player.trained() == [[0]]
    assert player.metrics[0]["scheduler/kept_by_guard"] == 1


def test_a_member_without_a_reward_has_no_part_in_a_group_that_its_loop_keeps() -> None:
    player = looping(on_member_failure="judge")
    player.want(1)
    player.give_back(0, player.deliver(0, [1.0, None]), judged=Verdict.kept("my_loop"))
    assert player.batches[0].groups[0].counted == (True, False)


def test_a_truncated_member_is_masked_in_loops_too() -> None:
    player = looping(query=NO_FILTER)
    player.want(1)
    one, two = player.start_attempt(0, 0), player.start_attempt(0, 1)
    assert one is not None
    assert two is not None
    player.give_back(0, [player.finish(one, 1.0), player.finish(two, 1.0, finish_reason="length")])
    assert player.batches[0].groups[0].counted == (True, False)


# ---------------------------------------------------------------- loops that are stopped


def test_a_full_batch_stops_the_loops_that_still_run_and_gives_their_prompts_back() -> None:
    player = looping(max_additional_running_prompts=1)
    player.scheduler._judged, player.scheduler._kept = 1000, 10
    player.want(1)
    assert list(player.open_loops) == [0, 1]
    player.start_attempt(1, 0)
    finish_loop(player, 0, MIXED)
    assert player.trained() == [[0]]
    assert not player.open_loops
    assert not player.pending
    assert player.left() == [(1, "cancelled", "batch_full")]
    assert player.source.returned == ["t1"]


def test_a_group_that_ran_out_of_time_stops_its_loop_and_its_attempts() -> None:
    player = looping(group_timeout_s=20.0)
    player.want(1)
    player.deliver(0, [1.0])
    player.start_attempt(0, 1)
    player.sleep(30.0)
    assert player.left()[0] == (0, "dropped", "group_timeout")
    assert list(player.open_loops) == [1]
    assert not player.pending
    assert ev.CancelLoop(group_id=0) in player.loops


def test_whatever_a_stopped_loop_still_says_is_refused_or_counted() -> None:
    player = looping(group_timeout_s=20.0, query=NO_FILTER)
    player.want(1)
    rollouts = player.deliver(0, MIXED)
    player.sleep(30.0)
    assert player.start_attempt(0, 0) is None
    assert player.loops[-1] == ev.AttemptRefused(group_id=0, member_index=0, reason="group_closed")
    player.give_back(0, rollouts)
    assert player.scheduler.ledger.late_results == 1
    finish_loop(player, 1, MIXED)
    assert player.trained() == [[1]]


def test_a_response_that_comes_after_its_group_was_stopped_is_counted_as_cancelled() -> None:
    player = looping(group_timeout_s=20.0)
    player.hold_acks = True
    player.want(1)
    attempt_id = player.start_attempt(0, 0)
    assert attempt_id is not None
    player.sleep(30.0)
    before = len(player.loops)
    player.finish(attempt_id, 1.0)
    assert not [answer for answer in player.loops[before:] if isinstance(answer, ev.MemberJudged)]
    assert player.record_of(0).sampled_tokens == 2
    assert player.scheduler.ledger.attempts["cancelled"] == 1


def test_an_expired_group_stops_its_loop() -> None:
    player = looping(async_generation_ratio=1.0)
    player.want(1)
    finish_loop(player, 0, MIXED)
    player.step()
    player.want(1)
    finish_loop(player, 2, MIXED)
    player.step()
    assert player.record_of(1).outcome == "expired"
    assert 1 not in player.open_loops
    assert player.source.returned == ["t1"]


def test_loops_go_on_while_the_trainer_steps_and_new_weights_do_not_restart_them() -> None:
    player = looping(async_generation_ratio=1.0, on_weight_update="restart")
    player.want(1)
    finish_loop(player, 0, MIXED)
    attempt_id = player.start_attempt(1, 0)
    assert attempt_id is not None
    player.publish(1, [attempt_id])
    player.advance()
    assert list(player.pending) == [attempt_id]
    assert list(player.open_loops) == [1]


def test_the_end_of_the_run_stops_all_loops() -> None:
    player = looping()
    player.want(2)
    player.start_attempt(1, 0)
    player.tell(ev.Shutdown())
    assert not player.open_loops
    assert player.scheduler.open_groups == 0
    assert player.source.returned == ["t0", "t1"]


def test_waiting_tells_how_many_loops_are_under_way() -> None:
    player = looping()
    player.want(2)
    player.start_attempt(0, 0)
    assert player.scheduler.waiting_for(player.now).startswith("2 rollout loops with 1 members under way; the oldest is group 0")


def test_events_of_loops_for_groups_of_the_machine_cannot_be() -> None:
    player = MachinePlayer.make(group_size=2)
    player.want(1)
    with pytest.raises(SchedulerBug, match="no loop owns"):
        player.scheduler.handle(ev.LoopAttempt(group_id=0, member_index=0), 1.0)
    with pytest.raises(SchedulerBug, match="no loop owns"):
        player.scheduler.handle(ev.GroupReturned(group_id=0, rollouts=None), 1.0)
