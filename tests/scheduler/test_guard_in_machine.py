"""The ratio guard inside the machine: what becomes of a group that filters would drop and the guard does not let go."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.filters import RatioGuard
from sluice.scheduler import events as ev
from tests.fakes import NO_FILTER, ListSource, MachinePlayer, make_task

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]
POLICIES = ["keep", "wait", "shrink", "raise"]


def guarded(
    policy: str = "keep", limit: float | Mapping[str, float] = 0.5, *, scope: str = "cumulative", window: int = 100, **settings: object
):
    guard = RatioGuard(limit, scope, window, policy)  # type: ignore[arg-type]
    return MachinePlayer.make(**{"group_size": 2, "guard": guard, **settings})


# ---------------------------------------------------------------- keep


def test_a_candidate_that_is_the_very_first_group_is_kept_and_the_second_may_be_dropped() -> None:
    player = guarded("keep")
    player.want(2)
    player.finish_group(0, SAME)
    player.finish_group(1, SAME)
    assert player.left() == [(1, "dropped", "no_spread")]
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 2]]
    player.step()
    assert (player.record_of(0).reason, player.record_of(0).source) == ("kept_by_guard", "ratio_guard")
    assert player.record_of(0).evidence == {"total": 1.0, "filtered": 0.0, "limit": 0.5}
    assert player.metrics[0]["scheduler/kept_by_guard"] == 1
    assert player.scheduler.metrics()["guard/filter_ratio"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("limit", "kept_of_ten"), [(0.0, 10), (0.1, 9), (0.3, 7), (0.5, 5), (1.0, 0)])
def test_of_ten_groups_without_signal_the_limit_is_kept_exactly(limit: float, kept_of_ten: int) -> None:
    player = guarded("keep", limit, fill="shrink")
    player.want(10)
    for group_id in range(10):
        player.finish_group(group_id, SAME)
    assert player.scheduler.guard is not None
    assert sum(player.scheduler.guard.filtered.values()) == 10 - kept_of_ten if limit < 1 else True
    if kept_of_ten:
        assert len(player.batches[0].groups) == kept_of_ten
    else:
        assert not player.batches


@given(limit=st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 0.9]), outcomes=st.lists(st.booleans(), min_size=1, max_size=20))
def test_never_more_groups_are_dropped_than_the_limit_allows(limit: float, outcomes: list[bool]) -> None:
    player = guarded("keep", limit, fill="shrink", on_exhausted="shrink")
    player.want(len(outcomes))
    dropped = 0
    for judged, (group_id, is_good) in enumerate(enumerate(outcomes), start=1):
        may_go = not is_good and dropped + 1 <= limit * judged + 1e-9
        player.finish_group(group_id, MIXED if is_good else SAME)
        assert player.scheduler.ledger.groups["dropped"] == dropped + may_go
        dropped += may_go
    assert len(player.batches[0].groups) == len(outcomes) - dropped


def test_every_judged_group_is_counted_and_groups_that_were_lost_or_stopped_are_not() -> None:
    player = guarded("keep", max_response_rounds=1, max_additional_running_prompts=2)
    player.scheduler._judged, player.scheduler._kept = 100, 10
    player.want(1)
    player.fail(0)
    player.finish_group(1, MIXED)
    assert player.scheduler.guard is not None
    assert player.scheduler.guard.total == 1


def test_each_category_has_its_own_limit_on_the_common_total() -> None:
    player = guarded("keep", {"low_information": 0.5}, fill="shrink", on_member_failure="judge")
    player.want(4)
    player.finish_group(0, [1.0, None])  # invalid: without limit
    assert player.left() == [(0, "dropped", "incomplete")]
    player.finish_group(1, SAME)  # 1 of 2: allowed
    assert player.left()[-1] == (1, "dropped", "no_spread")
    player.finish_group(2, SAME)  # 2 of 3
    assert len(player.left()) == 2
    player.finish_group(3, MIXED)
    assert player.trained() == [[2, 3]]


def test_a_window_forgets_what_was_dropped_before() -> None:
    player = guarded("keep", 0.5, scope="window", window=2, fill="shrink")
    player.want(6)
    for group_id in range(6):
        player.finish_group(group_id, SAME)
    assert [group_id for group_id, _, _ in player.left()] == [1, 3, 5]
    assert player.trained() == [[0, 2, 4]]


def test_a_group_of_which_nothing_can_train_is_dropped_whatever_the_guard_says() -> None:
    player = guarded("keep", 0.0, on_member_failure="judge", max_resample_rounds=2)
    player.want(1)
    player.finish_group(0, [None, None])
    assert player.left() == [(0, "dropped", "incomplete")]
    assert player.scheduler.guard is not None
    assert player.scheduler.guard.filtered["invalid"] == 1


def test_of_a_group_that_the_guard_keeps_only_members_with_a_reward_count() -> None:
    player = guarded("keep", 0.0, on_member_failure="judge")
    player.want(1)
    player.finish_group(0, [1.0, None])
    assert player.batches[0].groups[0].counted == (True, False)


# ---------------------------------------------------------------- wait


def test_waiting_groups_are_held_and_dropped_when_the_ratio_allows_it() -> None:
    player = guarded("wait", 0.5, max_resample_rounds=20)
    player.want(3)
    player.finish_group(0, SAME)  # 1 of 1: held
    assert player.scheduler.snapshot(player.now)["held_by_guard"] == 1
    assert not player.records
    player.finish_group(1, MIXED)  # 1 of 2 is allowed now
    assert player.left() == [(0, "dropped", "no_spread")]
    assert player.open_group_ids() == [2, 3]
    player.finish_group(2, MIXED)
    player.finish_group(3, MIXED)
    assert player.trained() == [[1, 2, 3]]
    assert player.metrics[0].get("scheduler/kept_by_guard", 0) == 0


def test_when_nothing_else_can_fill_the_batch_the_oldest_held_group_is_kept() -> None:
    player = guarded("wait", 0.0)
    player.want(3)
    player.finish_group(1, SAME)
    player.finish_group(0, SAME)
    assert not player.batches
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 1, 2]]
    assert player.metrics[0]["scheduler/kept_by_guard"] == 2


def test_held_groups_of_a_batch_that_was_filled_without_them_are_discarded_in_synchronous_training() -> None:
    player = guarded("wait", 0.2, max_additional_running_prompts=2)
    player.scheduler._judged, player.scheduler._kept = 100, 10
    player.want(1)
    assert player.open_group_ids() == [0, 1, 2]
    player.finish_group(1, SAME)
    player.finish_group(0, MIXED)
    assert player.trained() == [[0]]
    assert sorted(player.left()) == [(1, "discarded", "held_by_guard"), (2, "cancelled", "batch_full")]
    assert player.source.returned == ["t2"]
    player.step()
    player.want(1)
    assert player.scheduler.running_groups == 3


def test_held_groups_wait_over_the_step_and_expire_like_others() -> None:
    player = guarded("wait", 0.1, async_generation_ratio=1.0)
    player.want(1)
    player.finish_group(1, SAME)
    player.finish_group(0, MIXED)
    assert player.trained() == [[0]]
    assert player.scheduler.running_groups == 1
    player.step()
    player.want(1)
    assert player.open_group_ids() == [2]
    player.finish_group(2, MIXED)
    player.step()
    assert player.record_of(1).outcome == "expired"
    player.want(1)
    assert player.scheduler.filling is not None
    player.finish_group(player.open_group_ids()[0], MIXED)
    assert len(player.trained()) == 3


def test_held_groups_never_time_out_and_never_run() -> None:
    player = guarded("wait", 0.0, group_timeout_s=10.0)
    player.want(2)
    player.finish_group(0, SAME)
    player.tell(ev.ClockTick(), 9.0)  # due for both: group 0 was judged in time
    assert [(group_id, reason) for group_id, _, reason in player.left()] == [(1, "group_timeout")]
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 2]]


def test_at_the_end_of_the_data_held_groups_are_kept_rather_than_lost() -> None:
    player = guarded("wait", 0.0, source=ListSource(make_task(f"t{i}") for i in range(3)))
    player.want(4)
    for group_id, rewards in enumerate([SAME, MIXED, SAME]):
        player.finish_group(group_id, rewards)
    assert player.trained() == [[0, 1, 2]]
    assert player.batches[0].is_last


def test_the_end_of_the_run_discards_what_the_guard_holds() -> None:
    player = guarded("wait", 0.0)
    player.want(2)
    player.finish_group(0, SAME)
    player.tell(ev.Shutdown())
    assert sorted(player.left()) == [(0, "discarded", "held_by_guard"), (1, "cancelled", "shutdown")]


# ---------------------------------------------------------------- shrink


def test_shrink_leaves_the_place_of_a_group_that_may_not_be_dropped_empty() -> None:
    player = guarded("shrink", 0.3)
    player.want(4)
    player.finish_group(0, SAME)  # 1 of 1 is too much: it leaves, and nothing replaces it
    assert player.left() == [(0, "dropped", "no_spread")]
    assert player.open_group_ids() == [1, 2, 3]
    for group_id in (1, 2):
        player.finish_group(group_id, MIXED)
    player.finish_group(3, MIXED)
    assert player.trained() == [[1, 2, 3]]
    assert player.batches[0].requested == 4
    assert player.metrics[0]["scheduler/shrunk_by_guard"] == 1


def test_shrink_replaces_what_may_be_dropped() -> None:
    player = guarded("shrink", 0.5)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)  # 1 of 2
    assert player.open_group_ids() == [2]
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 2]]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_batch_that_was_shrunk_to_nothing_is_tried_anew_and_never_delivered_empty(ratio: float, groups: int) -> None:
    player = guarded("shrink", 0.0, async_generation_ratio=ratio, max_resample_rounds=5)
    player.want(groups)
    for group_id in range(groups):
        player.finish_group(group_id, SAME)
    while player.scheduler.filling is not None:
        player.finish_group(player.open_group_ids()[0], MIXED)
    assert not player.failures
    assert 1 <= len(player.batches[0].groups) <= groups
    player.step()
    player.want(groups)
    while player.scheduler.filling is not None:
        player.finish_group(player.open_group_ids()[0], MIXED)
    assert len(player.batches[1].groups) == groups


def test_three_tries_shrunk_to_nothing_are_an_error() -> None:
    player = guarded("shrink", 0.0)
    player.want(2)
    launched = 0
    while player.pending:
        launched += 1
        player.finish_group(player.open_group_ids()[0], SAME)
    assert launched == 6
    assert "3 batches in a row kept nothing" in player.failures[0]


def test_shrink_never_throws_a_good_group_away() -> None:
    player = guarded("shrink", 0.0, async_generation_ratio=1.0)
    player.want(2)
    player.finish_group(2, MIXED)
    player.finish_group(0, SAME)
    assert player.trained() == [[2]]
    player.finish_group(1, MIXED)
    player.step()
    player.want(2)
    player.finish_group(3, MIXED)
    assert player.trained() == [[2], [1, 3]]


# ---------------------------------------------------------------- raise


def test_raise_ends_the_fill_with_the_numbers_and_keeps_good_groups_for_whoever_asks_again() -> None:
    player = guarded("raise", 0.5)
    player.want(3)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)  # 1 of 2
    assert not player.failures
    player.finish_group(2, SAME)  # 2 of 3
    (message,) = player.failures
    for part in ("guard.max_filter_ratio", "low_information/no_spread", "guard/filter_ratio 0.333333", "guard.policy"):
        assert part in message
    assert player.left() == [(1, "dropped", "no_spread"), (2, "dropped", "no_spread")]
    assert player.scheduler.buffer.committed == 1
    running = player.open_group_ids()
    assert running == [3]
    player.want(2)
    player.finish_group(3, MIXED)
    assert player.trained() == [[0, 3]]


def test_raise_is_told_also_while_the_trainer_steps() -> None:
    player = guarded("raise", 0.0, async_generation_ratio=1.0)
    player.want(1)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    assert len(player.failures) == 1


# ---------------------------------------------------------------- members that make a group worthless


def test_a_truncated_member_stops_its_group_only_when_the_guard_agrees() -> None:
    player = guarded("keep", 0.5, truncated="drop_group", query=NO_FILTER)
    player.want(2)
    player.finish(0, 1.0, finish_reason="length")  # the first group of all: it runs on
    assert sorted(player.pending) == [1, 2, 3]
    player.finish(2, 1.0, finish_reason="length")  # 1 of 2 may go
    assert player.left() == [(1, "dropped", "truncated")]
    player.finish(1, 0.0)
    player.finish_group(2, MIXED)
    assert player.trained() == [[0, 2]]
    assert player.metrics[0]["scheduler/kept_by_guard"] == 1
    player.step()
    assert player.record_of(0).source == "ratio_guard"
    assert player.scheduler.guard is not None
    assert player.scheduler.guard.total == 3  # counted once each, also the one that was asked for early


def test_a_group_that_the_guard_let_run_on_is_judged_by_its_filter_in_the_end() -> None:
    player = guarded("keep", 0.5, truncated="drop_group")
    player.want(2)
    player.finish(0, 1.0, finish_reason="length")
    player.finish_group(1, MIXED)
    player.finish(1, 1.0)  # no spread, and one of two may go now
    assert player.left() == [(0, "dropped", "no_spread")]
    assert player.scheduler.guard is not None
    assert player.scheduler.guard.total == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_behind_a_custom_filter_the_guard_is_asked_when_the_group_is_whole(policy: str) -> None:
    player = guarded(policy, 0.0, truncated="drop_group", query=FilterConfig(type="tests.filters.filters_for_tests.keep_all"))
    player.want(1)
    player.finish(0, 1.0, finish_reason="length")
    assert sorted(player.pending) == [1]
    player.finish(1, 0.0)
    if policy in ("keep", "wait"):
        assert player.trained() == [[0]]
    elif policy == "raise":
        assert "invalid/truncated" in player.failures[0]
    else:
        assert player.left() == [(0, "dropped", "truncated")]


# ---------------------------------------------------------------- with other bounds


def test_what_the_guard_lets_go_may_still_top_up_a_batch() -> None:
    player = guarded("keep", 0.5, on_exhausted="keep_low_information", max_resample_rounds=1)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    assert player.trained() == [[0, 1]]
    assert player.metrics[0]["scheduler/topped_up_count"] == 1


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("fill", ["refill", "shrink"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["keep", "wait", "shrink"])
def test_in_every_mode_batches_come_and_the_limit_holds(policy: str, ratio: float, fill: str, collect: str) -> None:
    player = guarded(policy, 0.5, async_generation_ratio=ratio, fill=fill, collect=collect, max_resample_rounds=100)
    judged = 0
    for step in range(4):
        player.want(3)
        while len(player.batches) == step:
            assert not player.failures
            player.finish_group(player.open_group_ids()[0], SAME if judged % 3 else MIXED)
            judged += 1
        player.step()
    guard = player.scheduler.guard
    assert guard is not None
    assert sum(guard.filtered.values()) <= 0.5 * guard.total
    shrunk = sum(metrics.get("scheduler/shrunk_by_guard", 0) for metrics in player.metrics)
    if fill == "refill":
        assert sum(len(batch.groups) for batch in player.batches) >= 12 - shrunk
    player.tell(ev.Shutdown())
    assert player.scheduler.open_groups == 0
