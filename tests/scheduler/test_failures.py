"""Members and groups that do not come through: failed, missing, truncated, timed out, lost again and again. Failures are data, and end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.scheduler import events as ev
from sluice.trainer import samples_from_batch
from sluice.types import Failure
from tests.fakes import NO_FILTER, STD_FILTER, DomainSource, ListSource, MachinePlayer, make_rollout, make_task

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]
NAN = math.nan
RANGE = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})


def pair(**settings: object) -> MachinePlayer:
    return MachinePlayer.make(**{"group_size": 2, **settings})


# ---------------------------------------------------------------- members without a reward


@pytest.mark.parametrize("query", [NO_FILTER, STD_FILTER])
@pytest.mark.parametrize("missing", [None, NAN, math.inf])
def test_case_21_judged_groups_with_a_missing_reward_are_incomplete_and_counted(query: FilterConfig, missing: float | None) -> None:
    player = MachinePlayer.make(query=query, on_member_failure="judge", max_resample_rounds=1, on_exhausted="raise")
    player.want(2)
    player.finish_group(0, [1.0, 0.0, missing, 1.0])
    player.finish_group(1, [missing] * 4)
    assert [(record.reason, record.category) for record in player.records] == [("incomplete", "invalid")] * 2
    assert player.scheduler.ledger.rejected_groups == {("invalid", "incomplete"): 2}
    assert player.scheduler.ledger.metrics()["scheduler/rejected/invalid/incomplete"] == 2
    assert "invalid/incomplete 2" in player.failures[0]
    assert len(player.launches) == 8  # delivered without a reward: nothing is tried again


@pytest.mark.parametrize("missing", [None, NAN, -math.inf])
def test_case_21_survivors_train_where_enough_are_allowed_and_the_others_have_no_part_in_it(missing: float | None) -> None:
    player = MachinePlayer.make(on_member_failure="judge", min_members=3)
    player.want(1)
    player.finish_group(0, [1.0, 0.0, missing, 1.0])
    (group,) = player.batches[0].groups
    assert group.counted == (True, True, False, True)
    assert group.rollouts[2].reward is None
    samples = samples_from_batch(player.batches[0])
    assert [sample.is_counted for sample in samples] == [True, True, False, True]
    assert not samples[2].loss_mask.any()
    assert player.metrics[0]["reward/kept_mean"] == pytest.approx(2 / 3)
    assert player.metrics[0]["reward/launched_mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("rewards", "kept"), [([1.0, 0.0, 1.0, None], True), ([1.0, 0.0, None, None], False), ([None] * 4, False)])
def test_case_21_fewer_survivors_than_allowed_make_no_group(rewards: list[float | None], kept: bool) -> None:
    player = MachinePlayer.make(on_member_failure="judge", min_members=3, query=NO_FILTER)
    player.want(1)
    player.finish_group(0, rewards)
    assert bool(player.batches) == kept
    if not kept:
        assert player.record_of(0).reason == "incomplete"


def test_case_25_a_placeholder_has_no_part_in_the_statistics_and_counts_of_a_batch() -> None:
    player = MachinePlayer.make(on_member_failure="judge", min_members=3)
    player.want(1)
    for attempt_id, reward in zip(range(3), [1.0, 0.0, 1.0], strict=True):
        player.finish(attempt_id, reward)
    player.finish(3, None, tokens=1)  # one pad token
    (group,) = player.batches[0].groups
    assert group.counted == (True, True, True, False)
    samples = samples_from_batch(player.batches[0])
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == 6
    assert player.metrics[0]["reward/kept_mean"] == pytest.approx(0.667, abs=1e-3)


def test_a_reward_that_is_no_number_is_told_in_words_once() -> None:
    player = pair(max_response_rounds=3)
    player.want(1)
    player.finish(0, NAN)
    player.finish(2, NAN)
    assert len(player.warnings) == 1
    assert "nan" in player.warnings[0]
    assert player.members(0) == [1, 3]


def test_case_122_early_ends_caused_by_the_policy_count_as_failures_in_the_mean() -> None:
    player = MachinePlayer.make(group_size=1, query=NO_FILTER)
    player.want(100)
    ended_early = Failure(cause="policy", reason="ended_early", detail="no action")
    for group_id in range(100):
        if group_id < 20:
            player.finish(group_id, 0.0, failure=ended_early, tokens=1)
        else:
            player.finish(group_id, 1.0 if group_id < 60 else 0.0)
    assert len(player.batches[0].groups) == 100
    assert player.metrics[0]["reward/launched_mean"] == 0.40
    assert player.metrics[0]["reward/kept_mean"] == 0.40
    assert player.scheduler.acceptance_rate == 1.0
    early = [r for group in player.batches[0].groups for r in group.rollouts if r.failure is not None]
    assert len(early) / 100 == 0.20


def test_wrong_answers_that_a_response_filter_takes_out_stay_in_the_launched_mean() -> None:
    """rllm-org/rllm#798: seen: what a filter had taken out was in no mean, which then read higher than the policy was."""
    right = FilterConfig(type="reward_range", filter_args={"low": 0.5})
    player = MachinePlayer.make(group_size=2, query=NO_FILTER, response=right)
    player.want(1)
    player.finish(0, 0.0, tokens=8)
    player.finish(1, 1.0)
    player.finish(2, 1.0)
    assert player.metrics[0]["reward/launched_mean"] == pytest.approx(2 / 3)
    assert player.metrics[0]["reward/kept_mean"] == 1.0
    assert (player.metrics[0]["length/launched_mean"], player.metrics[0]["length/kept_mean"]) == (4.0, 2.0)
    given_up = MachinePlayer.make(group_size=2, query=NO_FILTER, response=right, max_response_rounds=1, fill="shrink")
    given_up.want(2)
    for attempt_id, reward in enumerate([0.0, 0.0, 1.0, 1.0]):
        if attempt_id in given_up.pending:  # the first wrong answer ends its group
            given_up.finish(attempt_id, reward)
    assert given_up.left()[0] == (0, "dropped", "response_retries")
    assert given_up.metrics[0]["reward/launched_mean"] == pytest.approx(2 / 3)


def test_what_infrastructure_lost_is_outside_the_mean_and_counted_by_cause() -> None:
    player = MachinePlayer.make(group_size=1, query=NO_FILTER, max_response_rounds=1, fill="shrink")
    player.want(4)
    player.finish(0, 1.0)
    player.finish(1, 0.0)
    player.fail(2, reason="engine_error")
    player.finish(3, None)
    assert player.metrics[0]["reward/launched_mean"] == 0.5
    assert player.scheduler.ledger.rejected_members == {"engine_error": 1, "reward_missing": 1}


@pytest.mark.parametrize("reward", [0.0, -1.0])
def test_a_low_reward_with_a_failure_of_the_policy_is_real_under_both_settings(reward: float) -> None:
    for policy in ("replace", "judge"):
        player = pair(on_member_failure=policy)
        player.want(1)
        player.finish(0, reward, failure=Failure(cause="policy", reason="sandbox_broken"))
        player.finish(1, 1.0)
        assert list(player.batches[0].groups[0].rewards) == [reward, 1.0]
        assert player.batches[0].groups[0].counted == (True, True)


def test_judge_replaces_a_member_that_never_delivered_but_not_one_without_a_reward() -> None:
    player = pair(on_member_failure="judge", min_members=1, query=NO_FILTER)
    player.want(1)
    player.fail(0)
    assert sorted(player.pending) == [1, 2]
    assert player.pending[2].seed == player.launches[0].seed
    player.finish(1, None)
    assert sorted(player.pending) == [2]
    player.finish(2, 1.0)
    assert player.batches[0].groups[0].counted == (True, False)


def test_judge_asks_no_response_filter_about_a_member_without_a_reward() -> None:
    player = pair(on_member_failure="judge", response=RANGE, min_members=1, query=NO_FILTER)
    player.want(1)
    player.finish(0, None)
    player.finish(1, 9.0)  # rejected: it has a reward, out of range
    assert sorted(player.pending) == [2]
    assert player.scheduler.ledger.rejected_members == {"reward_too_high": 1}


def test_judge_counts_members_without_a_reward_among_the_first_to_deliver() -> None:
    player = MachinePlayer.make(group_size=2, redundancy=1, on_member_failure="judge", query=STD_FILTER)
    player.want(1)
    player.finish(0, None)
    player.finish(1, 1.0)
    assert player.record_of(0).reason == "incomplete"
    assert 2 not in player.pending


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("how", ["failed", "rejected", "missing"])
def test_a_member_is_tried_exactly_as_many_rounds_as_the_limit_says(rounds: int, how: str) -> None:
    player = pair(max_response_rounds=rounds, response=RANGE)
    player.want(1)
    member = 0
    for round_number in range(rounds):
        assert not player.records
        attempt_id = next(a for a, launch in player.pending.items() if launch.group_id == 0 and launch.member_index == member)
        if how == "failed":
            player.fail(attempt_id)
        else:
            player.finish(attempt_id, 9.0 if how == "rejected" else None)
        assert len(player.records) == (round_number == rounds - 1)
    (record,) = player.records
    assert (record.outcome, record.category, record.reason) == ("dropped", "invalid", "response_retries")
    assert record.attempts == 1 + rounds
    assert record.evidence == {"rounds": float(rounds), "lost": 1.0}


def test_the_last_permitted_round_still_saves_the_group() -> None:
    player = pair(max_response_rounds=3)
    player.want(1)
    player.fail(0)
    player.fail(2)
    player.finish(3, 1.0)
    player.finish(1, 0.0)
    assert player.trained() == [[0]]


@pytest.mark.parametrize(
    ("min_members", "lost", "trained"), [(4, 1, False), (3, 1, True), (3, 2, False), (2, 2, True), (1, 3, True), (1, 4, False)]
)
def test_min_members_at_both_sides_of_its_bound(min_members: int, lost: int, trained: bool) -> None:
    player = MachinePlayer.make(query=NO_FILTER, min_members=min_members, max_response_rounds=1)
    player.want(1)
    for attempt_id in range(4):
        if attempt_id not in player.pending:
            break
        if attempt_id < lost:
            player.fail(attempt_id)
        else:
            player.finish(attempt_id, 1.0)
    assert bool(player.batches) == trained
    if trained:
        assert len(player.batches[0].groups[0].rollouts) == 4 - lost
    else:
        assert player.record_of(0).reason == "response_retries"


def test_case_39_a_wait_for_four_ends_with_two_accepted_one_rejected_and_one_failed() -> None:
    player = pair(fill="shrink", max_response_rounds=1)
    player.want(4)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    player.fail(player.members(2)[0])
    assert not player.batches
    player.finish_group(3, MIXED)
    assert player.trained() == [[0, 3]]
    assert player.scheduler.ledger.rejected_groups == {("low_information", "no_spread"): 1, ("invalid", "response_retries"): 1}


def test_case_39_with_refill_the_wait_goes_on_with_new_groups() -> None:
    player = pair(max_response_rounds=1)
    player.want(4)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    player.fail(player.members(2)[0])
    player.finish_group(3, MIXED)
    assert player.open_group_ids() == [4, 5]
    player.finish_group(4, MIXED)
    player.finish_group(5, MIXED)
    assert player.trained() == [[0, 3, 4, 5]]


def test_case_70_only_the_attempt_in_question_is_accepted_and_the_late_one_is_counted() -> None:
    player = pair(query=NO_FILTER)
    player.want(1)
    first = player.launches[0]
    player.fail(0, reason="timeout")
    player.finish(2, 1.0)
    late = make_rollout(first, 0.0)
    player.tell(ev.MemberFinished(rollout=late))
    assert player.scheduler.ledger.late_results == 1
    player.finish(1, 1.0)
    assert list(player.batches[0].groups[0].rewards) == [1.0, 1.0]
    player.step()
    player.want(1)
    player.tell(ev.MemberFinished(rollout=late))  # of the batch before
    player.tell(ev.MemberFailed(attempt_id=0, failure=Failure(cause="infrastructure", reason="timeout"), sampled_tokens=0))
    assert player.scheduler.ledger.late_results == 3
    assert player.scheduler.metrics()["scheduler/late_results"] == 3
    assert len(player.pending) == 2


def test_case_126_of_ten_launched_groups_each_ends_in_one_outcome_and_the_shares_sum_to_one() -> None:
    player = pair(async_generation_ratio=1.0, max_response_rounds=1, max_resample_rounds=1, requeue=False)
    player.publish(5)
    player.tell(ev.StepAdvanced(step=5))
    player.want(5)
    player.finish_group(5, SAME)
    player.finish_group(6, SAME)
    player.fail(player.members(7)[0])
    player.finish_group(8, MIXED, version=3)
    for group_id in range(5):
        player.finish_group(group_id, MIXED)
    player.advance()
    player.tell(ev.Shutdown())
    ledger = player.scheduler.ledger
    assert {outcome: count for outcome, count in ledger.groups.items() if count} == {
        "trained": 5,
        "dropped": 3,
        "expired": 1,
        "cancelled": 1,
    }
    assert ledger.rejected_groups == {("low_information", "no_spread"): 2, ("invalid", "response_retries"): 1}
    assert len(player.records) == ledger.groups_launched == 10
    shares = [value for name, value in ledger.metrics().items() if name.startswith("ledger/group_share/")]
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-12)
    reasons = [value for name, value in ledger.metrics().items() if name.startswith("scheduler/rejected_rate/")]
    assert math.fsum(reasons) == pytest.approx(0.3)


def test_case_126_no_rate_is_above_one_however_often_a_member_fails() -> None:
    player = MachinePlayer.make(group_size=10, query=NO_FILTER, max_response_rounds=4)
    player.want(1)
    for _ in range(3):
        player.fail(next(a for a, launch in player.pending.items() if launch.member_index == 0), reason="sandbox_failed")
    for attempt_id in list(player.pending):
        player.finish(attempt_id)
    metrics = player.scheduler.ledger.metrics()
    assert metrics["ledger/rejected_members/sandbox_failed"] == 3
    assert metrics["ledger/rejected_member_rate/sandbox_failed"] == pytest.approx(3 / 13)
    shares = [value for name, value in metrics.items() if name.startswith("ledger/attempt_share/")]
    assert all(0 <= share <= 1 for share in shares)


# ---------------------------------------------------------------- truncated members


@pytest.mark.parametrize(("policy", "counted"), [("mask", (True, True, True, False)), ("keep", (True, True, True, True))])
def test_case_45_a_truncated_member_is_masked_or_kept_and_the_group_keeps_its_size(policy: str, counted: tuple[bool, ...]) -> None:
    player = MachinePlayer.make(truncated=policy)
    player.want(1)
    for attempt_id, reward in zip(range(3), [1.0, 0.0, 1.0], strict=True):
        player.finish(attempt_id, reward)
    player.finish(3, 0.0, finish_reason="length")
    (group,) = player.batches[0].groups
    assert len(group.rollouts) == 4
    assert group.counted == counted


def test_case_45_with_invalid_a_truncated_member_is_replaced_within_its_group() -> None:
    player = pair(truncated="invalid", max_response_rounds=2)
    player.want(1)
    player.finish(0, 1.0, finish_reason="length")
    assert player.pending[2].member_index == 0
    assert player.pending[2].seed != player.launches[0].seed
    player.finish(2, 1.0)
    player.finish(1, 0.0)
    assert player.trained() == [[0]]
    assert player.scheduler.ledger.rejected_members == {"truncated": 1}


def test_with_drop_group_a_truncated_member_stops_its_group_at_once() -> None:
    player = MachinePlayer.make(truncated="drop_group", query=NO_FILTER)
    player.want(1)
    player.finish(0, 1.0)
    player.finish(1, 0.0, finish_reason="length")
    assert player.left() == [(0, "dropped", "truncated")]
    assert player.record_of(0).category == "invalid"
    assert player.scheduler.ledger.attempts["cancelled"] == 2
    assert player.scheduler.acceptance_rate == 0.0
    assert player.open_group_ids() == [1]


def test_with_drop_group_a_truncated_member_that_the_response_filter_rejects_stops_its_group_too() -> None:
    too_high = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})
    player = MachinePlayer.make(truncated="drop_group", query=NO_FILTER, response=too_high)
    player.want(1)
    player.finish(0, 7.0, finish_reason="length")
    assert player.left() == [(0, "dropped", "truncated")]
    assert {launch.group_id for launch in player.pending.values()} == {1}


def test_with_drop_group_the_last_member_drops_it_too_and_as_truncated() -> None:
    player = pair(truncated="drop_group")
    player.want(1)
    player.finish(0, 1.0)
    player.finish(1, 1.0, finish_reason="length")
    assert player.left() == [(0, "dropped", "truncated")]


def test_with_drop_group_a_custom_filter_sees_the_whole_group_first() -> None:
    player = pair(truncated="drop_group", query=FilterConfig(type="tests.filters.filters_for_tests.keep_all"))
    player.want(1)
    player.finish(0, 1.0, finish_reason="length")
    assert not player.records
    assert sorted(player.pending) == [1]
    player.finish(1, 0.0)
    assert player.left() == [(0, "dropped", "truncated")]


def test_a_group_dropped_early_counts_in_the_acceptance_of_its_domain() -> None:
    player = pair(truncated="drop_group", domains=("math", "code"), source=ListSource([make_task("a"), make_task("b", "code")]))
    player.want(2)
    player.finish(0, 1.0, finish_reason="length")
    player.finish_group(1, MIXED)
    assert player.metrics[0]["scheduler/acceptance_rate"] == 0.5
    assert player.metrics[0]["scheduler/acceptance_rate/math"] == 0.0
    assert player.metrics[0]["scheduler/acceptance_rate/code"] == 1.0


def test_a_group_whose_members_are_all_truncated_and_masked_is_no_group() -> None:
    player = pair(query=NO_FILTER)
    player.want(1)
    player.finish(0, 1.0, finish_reason="length")
    player.finish(1, 0.0, finish_reason="length")
    assert (player.record_of(0).reason, player.record_of(0).category) == ("truncated", "invalid")


# ---------------------------------------------------------------- deadlines


def test_case_84_a_member_that_never_returns_costs_its_group_and_a_new_prompt_completes_the_step() -> None:
    player = pair(group_timeout_s=100.0)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish(2, 1.0)  # member 1 of group 1 never returns
    player.sleep(96.9)
    assert not player.records
    player.sleep(0.1)
    assert player.left() == [(1, "dropped", "group_timeout")]
    assert player.record_of(1).category == "invalid"
    assert player.record_of(1).evidence["missing"] == 1.0
    assert player.open_group_ids() == [2]
    assert player.source.drawn == ["t0", "t1", "t2"]
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 2]]
    assert player.source.returned == ["t1"]


def test_the_deadline_counts_from_the_launch_of_each_group_and_is_exact() -> None:
    player = pair(group_timeout_s=10.0)
    player.want(1)  # launched at 1.0
    assert player.wake_at == 11.0
    player.sleep(9.9)
    assert not player.records
    player.sleep(0.1)
    assert player.left() == [(0, "dropped", "group_timeout")]
    assert player.record_of(0).seconds == 10.0
    assert player.wake_at == 21.0


def test_retries_do_not_extend_the_deadline() -> None:
    player = pair(group_timeout_s=50.0, max_response_rounds=100)
    player.want(1)
    for _ in range(30):
        player.sleep(2.0)
        if 0 not in player.open_group_ids():
            break
        player.fail(player.members(0)[0])
    assert player.record_of(0).reason == "group_timeout"
    assert player.record_of(0).seconds == 50.0


def test_a_group_that_was_judged_in_time_is_left_alone_by_its_deadline() -> None:
    player = pair(group_timeout_s=10.0, async_generation_ratio=1.0)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(2, MIXED)
    player.step()
    player.finish_group(1, MIXED)
    player.tell(ev.ClockTick(), 100.0)
    assert [record.group_id for record in player.records if record.reason == "group_timeout"] == [3]
    player.want(1)
    assert player.trained()[-1] == [1]


def test_a_tick_too_many_does_no_harm() -> None:
    player = pair(group_timeout_s=10.0)
    player.tell(ev.ClockTick())
    player.want(1)
    for _ in range(3):
        player.tell(ev.ClockTick())
    assert not player.records
    player.finish_group(0, MIXED)
    assert player.trained() == [[0]]


def test_a_late_tick_ends_all_groups_that_are_due_at_once() -> None:
    player = pair(group_timeout_s=10.0, max_resample_rounds=2)
    player.want(3)
    player.tell(ev.ClockTick(), 100.0)
    assert [reason for _, _, reason in player.left()] == ["group_timeout"] * 3
    assert player.open_group_ids() == [3, 4, 5]
    player.tell(ev.ClockTick(), 100.0)
    assert "invalid/group_timeout 6" in player.failures[0]
    assert "group_timeout_s" in player.failures[0]


def test_case_78_deadlines_of_groups_that_have_left_are_forgotten() -> None:
    player = pair(group_timeout_s=1e6, max_resample_rounds=10_000)
    player.want(2)
    for _ in range(300):
        player.finish_group(player.open_group_ids()[1], SAME)
        player.finish_group(player.open_group_ids()[0], SAME)
    assert len(player.scheduler._deadlines) <= 4


def test_a_stall_is_told_once_for_each_batch_and_says_what_is_waited_for() -> None:
    player = pair(stall_warning_s=60.0)
    player.want(1)
    player.sleep(59.0)
    assert not player.warnings
    player.sleep(1000.0)
    assert len(player.warnings) == 1
    assert "no group has come or gone for 60 s" in player.warnings[0]
    assert "2 members of 1 groups; the oldest is group 0 (task 't0'), since 60.0 s" in player.warnings[0]
    assert "sluice status" in player.warnings[0]
    player.finish_group(0, MIXED)
    player.step()
    player.want(1)
    player.sleep(1000.0)
    assert len(player.warnings) == 2


def test_progress_puts_the_stall_off() -> None:
    player = pair(stall_warning_s=60.0, max_resample_rounds=100)
    player.want(1)
    for _ in range(5):
        player.sleep(50.0)
        player.finish_group(player.open_group_ids()[0], SAME)
    assert not any("come or gone" in warning for warning in player.warnings)
    player.sleep(61.0)
    assert any("come or gone" in warning for warning in player.warnings)


# ---------------------------------------------------------------- prompts that come back, or never again


def test_the_prompt_of_a_judged_group_is_consumed() -> None:
    player = pair(source=ListSource([make_task("a"), make_task("b")]))
    player.want(1)
    player.finish_group(0, SAME)
    player.finish_group(1, MIXED)
    assert player.source.drawn == ["a", "b"]
    assert player.source.returned == []


@pytest.mark.parametrize("requeue", [True, False])
def test_case_74_the_prompt_of_a_lost_group_comes_back_once_after_the_batch_by_setting(requeue: bool) -> None:
    player = pair(max_response_rounds=1, requeue=requeue)
    player.want(1)
    player.fail(0)
    assert player.source.returned == []
    player.finish_group(1, MIXED)
    assert player.source.returned == (["t0"] if requeue else [])
    player.step()
    player.want(1)
    if not requeue:
        assert player.source.drawn == ["t0", "t1", "t2"]
        return
    assert player.source.drawn == ["t0", "t1", "t0"]
    player.fail(player.members(2)[0])  # lost once more: it is consumed now
    player.finish_group(3, MIXED)
    player.step()
    player.want(1)
    assert player.source.returned == ["t0"]
    assert player.source.drawn == ["t0", "t1", "t0", "t2", "t3"]
    assert player.scheduler.metrics()["scheduler/requeued_prompts"] == 1


@pytest.mark.parametrize(("cause", "returned"), [("infrastructure", ["t0"]), ("policy", [])])
def test_the_prompt_of_a_group_lost_for_want_of_rewards_comes_back_when_machinery_was_to_blame(cause: str, returned: list[str]) -> None:
    player = pair(max_response_rounds=1)
    player.want(1)
    player.finish(0, None, failure=Failure(cause=cause, reason="reward_timeout"))  # type: ignore[arg-type]
    assert player.record_of(0).reason == "response_retries"
    player.finish_group(1, MIXED)
    assert player.source.returned == returned


def test_a_group_that_the_policy_lost_is_consumed_and_not_put_back() -> None:
    player = pair(max_response_rounds=1, response=RANGE)
    player.want(1)
    player.finish(0, 9.0)
    player.finish_group(1, MIXED)
    assert player.source.returned == []


def test_case_86_a_prompt_that_fails_again_and_again_is_replaced_by_another_one_in_the_same_batch() -> None:
    player = pair(max_response_rounds=3)
    player.want(2)
    player.finish_group(0, MIXED)
    for _ in range(3):
        player.fail(player.members(1)[-1])
    assert player.record_of(1).reason == "response_retries"
    assert player.open_group_ids() == [2]
    assert player.pending[player.members(2)[0]].task.task_id == "t2"
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 2]]


def test_case_86_at_the_end_of_the_data_a_lost_prompt_is_tried_once_more_and_the_run_ends() -> None:
    player = pair(max_response_rounds=1, source=ListSource([make_task("a"), make_task("x")]))
    player.want(2)
    player.finish_group(0, MIXED)
    player.fail(player.members(1)[0])
    assert player.source.drawn == ["a", "x", "x"]
    player.fail(player.members(2)[0])
    assert player.trained() == [[0]]
    assert player.batches[0].is_last


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_prompt_is_in_quarantine_after_so_many_lost_groups_in_a_row_and_not_drawn_again(after: int) -> None:
    tasks = [make_task("x"), make_task("good")]
    player = pair(max_response_rounds=1, quarantine_after=after, requeue=False, source=ListSource(make=lambda i: tasks[i % 2]))
    for lost in range(1, after + 1):
        player.want(1)
        assert player.source.drawn[-1] == "x"
        player.fail(next(iter(player.pending)))
        player.finish_group(player.open_group_ids()[0], MIXED)
        player.step()
        assert len(player.scheduler.prompts.quarantined) == (lost == after)
    assert sum("task 'x'" in warning and "quarantine" in warning for warning in player.warnings) == 1
    assert player.scheduler.snapshot(player.now)["quarantined"] == 1
    assert player.scheduler.metrics()["scheduler/quarantined_prompts"] == 1
    launched = player.scheduler.ledger.groups_launched
    player.want(1)
    assert player.source.drawn[-2:] == ["x", "good"]
    assert player.scheduler.ledger.groups_launched == launched + 1
    assert player.scheduler.prompts.skipped == 1


def test_a_judged_group_clears_what_its_prompt_had_lost() -> None:
    player = pair(max_response_rounds=1, quarantine_after=2, requeue=False, source=ListSource(make=lambda i: make_task("x")))
    for _ in range(4):
        player.want(1)
        player.fail(next(iter(player.pending)))  # lost
        player.finish_group(player.open_group_ids()[0], MIXED)  # judged
        player.step()
    assert not player.scheduler.prompts.quarantined


def test_when_all_prompts_that_are_left_are_in_quarantine_the_run_says_so() -> None:
    player = pair(
        max_response_rounds=1,
        quarantine_after=1,
        requeue=False,
        max_resample_rounds=50,
        source=ListSource(make=lambda i: make_task(f"x{i % 3}")),
    )
    player.want(1)
    while player.pending:
        player.fail(next(iter(player.pending)))
    assert len(player.failures) == 1
    assert "all that are left (3) are in quarantine" in player.failures[0]
    assert player.scheduler.prompts.skipped == 7  # one permutation may end with the three, and the next one begin with them
    assert "response_retries 3" in player.failures[0]
    assert "resampling.quarantine_after" in player.failures[0]


def test_good_groups_under_way_are_trained_before_quarantine_ends_the_run() -> None:
    tasks = [make_task("good"), make_task("x"), make_task("x"), make_task("x"), make_task("x"), make_task("x")]
    player = pair(max_response_rounds=1, quarantine_after=1, requeue=False, source=ListSource(make=lambda i: tasks[min(i, 5)]))
    player.want(2)
    player.fail(next(attempt_id for attempt_id, launch in player.pending.items() if launch.task.task_id == "x"))
    assert not player.failures  # only "x" is left to draw, and the good group still runs
    player.finish_group(0, MIXED)
    assert [group.task.task_id for group in player.batches[0].groups] == ["good"]
    assert not player.batches[0].is_last
    player.step()
    player.want(2)
    assert "are in quarantine" in player.failures[0]


def test_a_domain_of_which_all_prompts_are_in_quarantine_gives_its_share_to_the_others() -> None:
    player = pair(
        max_response_rounds=1,
        quarantine_after=1,
        requeue=False,
        domains=("math", "code"),
        domain_shares={"math": 1.0, "code": 1.0},
        source=DomainSource(("math", "code"), {"code": 1}),
    )
    for _ in range(2):
        player.want(2)
        while player.pending:
            attempt_id, launch = next(iter(player.pending.items()))
            if launch.task.domain == "code":
                player.fail(attempt_id)
            else:
                player.finish_group(launch.group_id, MIXED)
        assert [group.task.domain for group in player.batches[-1].groups] == ["math", "math"]
        player.step()
    assert not player.failures


def test_without_a_limit_nothing_is_put_into_quarantine() -> None:
    player = pair(
        max_response_rounds=1,
        quarantine_after=None,
        requeue=False,
        max_resample_rounds=10,
        source=ListSource(make=lambda i: make_task("x")),
    )
    player.want(1)
    while player.pending:
        player.fail(next(iter(player.pending)))
    assert "max_resample_rounds (10)" in player.failures[0]


# ---------------------------------------------------------------- lost workers


def test_a_lost_worker_fails_each_of_its_attempts_and_frees_their_places() -> None:
    player = pair()
    player.want(2)
    player.lose_worker([0, 3])
    assert [(launch.group_id, launch.member_index) for launch in player.pending.values()] == [(0, 1), (1, 0), (0, 0), (1, 1)]
    assert player.scheduler.ledger.attempts["failed"] == 2
    assert len(player.warnings) == 1
    assert "worker_lost" in player.warnings[0]
    assert "exit code 9" in player.warnings[0]


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_worker_that_dies_with_a_whole_group_is_one_loss_of_its_prompt(rounds: int) -> None:
    player = MachinePlayer.make(max_response_rounds=rounds, quarantine_after=2)
    player.want(1)
    for _ in range(rounds):
        player.lose_worker(player.members(0))
    assert player.left() == [(0, "dropped", "response_retries")]
    assert not player.scheduler.prompts.quarantined
    assert player.scheduler.ledger.attempts["failed"] == 4 * rounds
    assert player.record_of(0).sampled_tokens == 4 * rounds
    player.finish_group(1, [1.0, 0.0, 1.0, 0.0])
    assert player.source.returned == ["t0"]


def test_a_worker_may_die_with_attempts_that_had_been_let_go() -> None:
    player = MachinePlayer.make(max_response_rounds=1)
    player.hold_acks = True
    player.want(1)
    player.fail(0)  # drops group 0, the others are told to stop
    assert player.acks == [1, 2, 3]
    player.lose_worker([1, 2])
    player.acknowledge_all()
    assert player.record_of(0).sampled_tokens == 1 + 2 + 1
    assert player.scheduler.ledger.attempts["cancelled"] == 3


@given(data=st.data(), truncated=st.sampled_from(["mask", "keep", "invalid", "drop_group"]), failure=st.sampled_from(["replace", "judge"]))
def test_whatever_fails_every_batch_ends_and_every_group_leaves_once(data: st.DataObject, truncated: str, failure: str) -> None:
    player = MachinePlayer.make(
        group_size=2,
        redundancy=data.draw(st.integers(0, 1)),
        truncated=truncated,
        on_member_failure=failure,
        min_members=data.draw(st.integers(1, 2)),
        max_response_rounds=data.draw(st.integers(1, 3)),
        async_generation_ratio=data.draw(st.sampled_from([0.0, 1.0])),
        group_timeout_s=30.0,
        quarantine_after=data.draw(st.sampled_from([None, 1, 2])),
        requeue=data.draw(st.booleans()),
        on_exhausted="shrink",
        max_resample_rounds=data.draw(st.integers(1, 4)),
    )
    for _ in range(2):
        player.want(2)
        while player.scheduler.filling is not None:
            how = data.draw(st.sampled_from(["good", "good", "bad", "none", "nan", "truncated", "failed", "worker", "sleep"]))
            attempt_id = data.draw(st.sampled_from(sorted(player.pending)))
            if how == "sleep":
                player.sleep(20.0)
            elif how == "failed":
                player.fail(attempt_id)
            elif how == "worker":
                player.lose_worker(data.draw(st.sets(st.sampled_from(sorted(player.pending)), min_size=1)))
            else:
                reward = {"good": 1.0, "bad": 0.0, "none": None, "nan": NAN, "truncated": 0.5}[how]
                player.finish(attempt_id, reward, finish_reason="length" if how == "truncated" else "stop")
        if player.failures:
            break
        samples_from_batch(player.batches[-1])
        player.step()
    player.tell(ev.Shutdown())
    assert len(player.records) == player.scheduler.ledger.groups_launched
    assert sum(record.sampled_tokens for record in player.records) == player.engine_tokens
