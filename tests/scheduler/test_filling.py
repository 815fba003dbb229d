"""Filling a batch: refill or shrink, first finished or first launched, surplus, every bound, the end of the data, in all combinations."""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import SchedulerBug
from sluice.scheduler import GroupRecord, Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.tasks.task_list import TaskList
from tests.fakes import NO_FILTER, ListSource, MachinePlayer, make_filters, make_rollout, make_task

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]
MODES = [
    {"fill": fill, "collect": collect, "async_generation_ratio": ratio}
    for fill, collect, ratio in itertools.product(["refill", "shrink"], ["as_finished", "in_order"], [0.0, 1.0, 1.5])
]


def pair(**settings: object) -> MachinePlayer:
    return MachinePlayer.make(**{"group_size": 2, **settings})


def fill(player: MachinePlayer, outcomes: Sequence[bool]) -> None:
    """Finish groups in the order of their launch, kept or dropped as told, until nothing is wanted or nothing is told."""
    for is_kept in outcomes:
        if player.scheduler.filling is None:
            return
        player.finish_group(player.open_group_ids()[0], MIXED if is_kept else SAME)


def poor(player: MachinePlayer) -> MachinePlayer:
    """Hardly anything has been accepted so far: groups are launched ahead of their need."""
    player.scheduler._judged, player.scheduler._kept = 1000, 10
    return player


# ---------------------------------------------------------------- refill and shrink


def test_case_31_of_eight_with_three_rejected_refill_gives_eight_and_shrink_five() -> None:
    outcomes = [True, False, True, True, False, True, False, True]
    refill, shrink = pair(), pair(fill="shrink")
    refill.want(8)
    fill(refill, [*outcomes, True, True, True])
    shrink.want(8)
    fill(shrink, outcomes)
    assert refill.trained() == [[0, 2, 3, 5, 7, 8, 9, 10]]
    assert shrink.trained() == [[0, 2, 3, 5, 7]]
    assert (refill.metrics[0]["scheduler/collect_query_count"], shrink.metrics[0]["scheduler/collect_query_count"]) == (8, 5)
    assert shrink.batches[0].requested == 8


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_case_43_filter_only_draws_exactly_the_batch_each_step(ratio: float) -> None:
    player = pair(fill="shrink", async_generation_ratio=ratio)
    for step in range(3):
        player.want(4)
        fill(player, [True, False, True, False])
        assert len(player.batches[-1].groups) == 2
        assert len(player.source.drawn) == 4 * (step + 1) + math.ceil(ratio * 4)
        player.step()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_shrink_trains_on_the_groups_of_its_own_draw_and_not_on_those_that_finish_first(ratio: float) -> None:
    player = pair(fill="shrink", async_generation_ratio=ratio)
    player.want(2)
    for group_id in reversed(player.open_group_ids()):
        player.finish_group(group_id, MIXED)
    assert player.trained() == [[0, 1]]


def test_shrink_replaces_nothing_that_is_lost_or_timed_out() -> None:
    player = pair(fill="shrink", max_response_rounds=1, group_timeout_s=50.0)
    player.want(3)
    player.fail(0)
    player.finish_group(1, MIXED)
    player.sleep(60.0)
    assert player.trained() == [[1]]
    assert player.scheduler.ledger.groups_launched == 3


def test_shrink_of_which_nothing_is_left_draws_the_next_ones_and_ends_after_three_such_tries() -> None:
    player = pair(fill="shrink")
    player.want(2)
    fill(player, [False] * 4 + [True, False])
    assert player.trained() == [[4]]
    assert player.metrics[0]["scheduler/empty_batches"] == 2
    player.step()
    player.want(2)
    fill(player, [False] * 6)
    assert "3 batches in a row kept nothing" in player.failures[0]


# ---------------------------------------------------------------- bounds, both ends


@pytest.mark.parametrize("rounds", [1, 2, 3, 10])
@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
def test_case_29_the_last_permitted_round_still_fills_and_one_more_is_never_launched(rounds: int, collect: str) -> None:
    in_time, late = (pair(max_resample_rounds=rounds, collect=collect) for _ in range(2))
    in_time.want(1)
    fill(in_time, [False] * (rounds - 1) + [True])
    assert in_time.trained() == [[rounds - 1]]
    assert in_time.metrics[0]["scheduler/resample_rounds"] == rounds
    late.want(1)
    fill(late, [False] * rounds)
    assert f"max_resample_rounds ({rounds}) is reached" in late.failures[0]
    assert late.scheduler.ledger.groups_launched == rounds


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kept_per_round", "failed", "trained"), [((0, 0, 0), True, 0), ((1, 1, 1), True, 3), ((1, 1, 2), False, 4), ((4,), False, 4)]
)
def test_case_29_need_four_in_three_rounds(kept_per_round: tuple[int, ...], failed: bool, trained: int, ratio: float) -> None:
    player = pair(max_resample_rounds=3, async_generation_ratio=ratio, collect="in_order")
    player.want(4)
    window = [0, 1, 2, 3]
    for kept in kept_per_round:
        for number, group_id in enumerate(window):
            player.finish_group(group_id, MIXED if number < kept else SAME)
        window = [g for g in player.open_group_ids() if player.scheduler._groups[g].slot.ticket < 4]
    assert bool(player.failures) == failed
    if failed:
        assert f"kept {trained} of" in player.failures[0]
    else:
        assert len(player.batches[0].groups) == trained


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize(("limit", "is_enough"), [(3, False), (4, True)])
def test_max_groups_per_batch_is_exact_and_counts_what_is_launched_for_the_batch(limit: int, is_enough: bool, ratio: float) -> None:
    player = pair(max_groups_per_batch=limit, async_generation_ratio=ratio, collect="in_order")
    ahead = 2 if ratio else 0
    player.want(2)
    player.finish_group(0, SAME)
    player.finish_group(2 + ahead, MIXED)
    player.finish_group(1, SAME)
    assert player.scheduler.ledger.groups_launched == limit + ahead
    if is_enough:
        player.finish_group(3 + ahead, MIXED)
        assert len(player.batches[0].groups) == 2
    else:
        assert f"resampling.max_groups_per_batch ({limit}) is reached" in player.failures[0]
        assert "kept 1 of 3" in player.failures[0]


def test_max_groups_per_batch_counts_anew_for_every_batch() -> None:
    player = pair(max_groups_per_batch=3)
    for _ in range(3):
        player.want(2)
        fill(player, [False, True, True])
        assert len(player.batches[-1].groups) == 2
        player.step()
    assert player.scheduler.ledger.groups_launched == 9


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize(("policy", "trained"), [("raise", None), ("shrink", 1), ("keep_low_information", 2)])
def test_at_the_bound_the_policy_decides_and_good_groups_are_never_thrown_away(
    policy: str, trained: int | None, ratio: float, collect: str
) -> None:
    player = pair(on_exhausted=policy, max_resample_rounds=1, async_generation_ratio=ratio, collect=collect)
    player.want(2)
    player.finish_group(1, MIXED)
    for group_id in player.open_group_ids():
        player.finish_group(group_id, SAME)
    if trained is None:
        assert "kept 1 of" in player.failures[0]
        assert player.scheduler.buffer.committed == 1
        assert not [record for record in player.records if record.group_id == 1]
    else:
        assert not player.failures
        assert len(player.batches[0].groups) == trained
        assert 1 in player.trained()[0]
        assert player.batches[0].requested == 2


@pytest.mark.parametrize(("spares", "trained"), [(0, 1), (1, 2), (2, 3), (5, 3)])
def test_low_information_groups_top_up_to_the_batch_and_no_further(spares: int, trained: int) -> None:
    player = pair(on_exhausted="keep_low_information", max_resample_rounds=3, max_response_rounds=1)
    player.want(3)
    player.finish_group(0, MIXED)
    for _ in range(spares):
        player.finish_group(player.open_group_ids()[0], SAME)
    while player.scheduler.filling is not None:
        player.fail(next(iter(player.pending)))
    assert len(player.batches[0].groups) == trained
    assert player.metrics[0]["scheduler/topped_up_count"] == trained - 1
    player.step()
    assert player.scheduler.open_groups == 0
    assert player.scheduler.ledger.groups["trained"] == trained
    assert sum(record.source == "on_exhausted" for record in player.records) == trained - 1


def test_broken_groups_never_top_up_a_batch() -> None:
    player = pair(on_exhausted="keep_low_information", max_resample_rounds=1, on_member_failure="judge")
    player.want(2)
    player.finish_group(0, [1.0, None])
    player.finish_group(1, SAME)
    assert player.trained() == [[1]]


def test_a_group_of_survivors_that_tops_a_batch_up_counts_only_those_that_have_a_reward() -> None:
    player = pair(on_exhausted="keep_low_information", max_resample_rounds=1, on_member_failure="judge", min_members=1)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(1, [1.0, None])
    assert player.trained() == [[0, 1]]
    assert player.batches[0].groups[1].counted == (True, False)


def test_a_batch_that_is_full_uses_no_spare() -> None:
    player = pair(on_exhausted="keep_low_information", max_resample_rounds=5)
    player.want(2)
    fill(player, [False, False, False, True, True])
    assert player.trained() == [[3, 4]]
    assert [(record.group_id, record.reason) for record in player.records] == [(0, "no_spread"), (1, "no_spread"), (2, "no_spread")]


@pytest.mark.parametrize("policy", ["shrink", "keep_low_information"])
def test_a_batch_of_which_nothing_can_be_used_is_tried_three_times_whatever_the_policy(policy: str) -> None:
    player = pair(on_exhausted=policy, max_resample_rounds=2, max_response_rounds=1, quarantine_after=None)
    player.want(2)
    while player.pending:
        player.fail(next(iter(player.pending)))
    assert player.scheduler.ledger.groups_launched == 12
    assert sum("no optimiser step" in warning for warning in player.warnings) == 2
    assert "3 batches in a row" in player.failures[0]
    assert not player.batches


def test_an_empty_try_is_forgotten_once_something_is_kept() -> None:
    player = pair(on_exhausted="shrink", max_resample_rounds=1)
    for _ in range(4):
        player.want(2)
        fill(player, [False, False, False, False, True, False])
        assert len(player.batches[-1].groups) == 1
        player.step()
    assert not player.failures


def test_case_27_failed_refills_end_in_an_error_and_the_good_group_stays() -> None:
    player = pair(max_response_rounds=1, max_resample_rounds=4)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish(2, 1.0)
    player.fail(3)
    for _ in range(3):
        player.lose_group(player.open_group_ids()[0])
    assert player.scheduler.ledger.groups_launched == 5
    assert "kept 1 of 1 judged" in player.failures[0]
    assert [group.group_id for group in player.scheduler.buffer.groups()] == [0]


def test_the_message_tells_kept_and_needed_the_acceptance_rate_and_the_top_reasons() -> None:
    player = pair(max_resample_rounds=2, max_response_rounds=1)
    player.want(4)
    fill(player, [True, False, False])
    player.lose_group(3)
    fill(player, [False, False, False])
    (message,) = player.failures
    for part in (
        "batch of 4 groups",
        "kept 1 of 6 judged",
        "16.7%",
        "low_information/no_spread 5",
        "invalid/response_retries 1",
        "engine_error 1",
    ):
        assert part in message


# ---------------------------------------------------------------- waiters and cancels


def test_the_replacement_of_a_dropped_group_runs_with_all_its_members_at_once() -> None:
    player = MachinePlayer.make(group_size=4, redundancy=1)
    player.want(1)
    for attempt_id in range(4):
        player.finish(attempt_id, 1.0)
    assert len(player.members(1)) == 5


def test_a_full_batch_cancels_everything_that_runs_and_gives_the_prompts_back() -> None:
    player = poor(pair(max_additional_running_prompts=3))
    player.want(2)
    assert player.open_group_ids() == [0, 1, 2, 3, 4]
    player.finish(player.members(4)[0], 1.0)  # half of a group: it finished, and is discarded with it
    player.finish_group(1, MIXED)
    player.finish_group(3, MIXED)
    assert not player.pending
    assert player.source.returned == ["t0", "t2", "t4"]
    assert player.scheduler.ledger.attempts["discarded"] == 1
    assert player.scheduler.ledger.attempts["cancelled"] == 5
    assert [reason for _, _, reason in player.left()] == ["batch_full"] * 3


def test_slow_cancels_do_not_hold_the_next_batch_up() -> None:
    player = poor(pair(max_additional_running_prompts=1))
    player.hold_acks = True
    player.want(1)
    player.finish_group(0, MIXED)
    assert len(player.batches) == 1
    player.step()
    player.want(1)
    assert player.source.drawn == ["t0", "t1", "t1", "t2"]  # first the prompt of the cancelled group
    player.acknowledge_all()
    assert player.record_of(1).outcome == "cancelled"


def test_case_35_a_fully_valid_round_fills_the_batch_and_the_surplus_goes_by_policy() -> None:
    player = pair(max_additional_running_prompts=2)
    player.want(4)
    fill(player, [True, True])
    player.scheduler._judged, player.scheduler._kept = 1000, 10
    fill(player, [False, False])  # of round 1, two were accepted; round 2 launches four
    assert player.open_group_ids() == [4, 5, 6, 7]
    fill(player, [True, True])
    assert player.trained() == [[0, 1, 4, 5]]
    assert [(record.group_id, record.outcome) for record in player.records if record.group_id > 5] == [(6, "cancelled"), (7, "cancelled")]
    assert not player.warnings


def test_case_35_while_the_trainer_steps_the_surplus_is_carried() -> None:
    player = pair(async_generation_ratio=1.0)
    player.want(4)
    for group_id in (2, 3):
        player.finish_group(group_id, SAME)
    for group_id in (0, 1, 4, 5):
        player.finish_group(group_id, MIXED)
    assert player.trained() == [[0, 1, 4, 5]]
    for group_id in (6, 7):
        player.finish_group(group_id, MIXED)
    assert player.scheduler.buffer.committed == 2
    assert not player.warnings


# ---------------------------------------------------------------- launching ahead


@pytest.mark.parametrize("additional", [1, 3, 16])
def test_groups_beyond_the_quota_never_exceed_what_is_permitted(additional: int) -> None:
    player = poor(pair(max_additional_running_prompts=additional, max_resample_rounds=1000))
    player.want(4)
    for _ in range(60):
        buffer = player.scheduler.buffer
        assert buffer.running + buffer.committed <= 4 + additional
        player.finish_group(player.open_group_ids()[-1], SAME)
    assert len(player.open_group_ids()) == 4 + additional


def test_nothing_is_launched_ahead_before_anything_is_measured_or_when_all_is_accepted() -> None:
    player = pair(max_additional_running_prompts=16)
    for _ in range(5):
        player.want(4)
        assert len(player.open_group_ids()) == 4
        fill(player, [True] * 4)
        player.step()


def test_how_many_are_launched_follows_the_measured_acceptance() -> None:
    player = pair(max_additional_running_prompts=64)
    player.scheduler._judged, player.scheduler._kept = 800, 400
    player.want(10)
    assert 18 <= len(player.open_group_ids()) <= 21


# ---------------------------------------------------------------- collect


def test_case_72_the_first_finished_are_biased_and_the_first_launched_are_not() -> None:
    """Sixteen of length 10 and reward 1, or length 100 and reward 0, by the toss of a coin; eight are kept."""

    def kept_mean(collect: str, short: int) -> float:
        player = MachinePlayer.make(group_size=1, query=NO_FILTER, collect=collect, async_generation_ratio=1.0)
        player.want(8)
        assert len(player.pending) == 16
        short_ones = list(range(0, 2 * short, 2)) if short <= 8 else [*range(0, 16, 2), *range(1, 2 * (short - 8), 2)]
        order = short_ones + [group_id for group_id in range(16) if group_id not in short_ones]
        for attempt_id in order:
            player.finish(attempt_id, 1.0 if attempt_id in short_ones else 0.0, tokens=10 if attempt_id in short_ones else 100)
        batch = player.batches[0]
        assert batch.groups == tuple(sorted(batch.groups, key=lambda group: group.group_id))
        if collect == "in_order":
            assert [group.group_id for group in batch.groups] == list(range(8))
        return float(np.mean([group.rewards[0] for group in batch.groups]))

    expected = sum(math.comb(16, short) / 2**16 * kept_mean("as_finished", short) for short in range(17))
    assert expected == pytest.approx(0.902, abs=5e-4)
    assert kept_mean("in_order", 8) == 0.5


def test_case_72_the_report_has_reward_and_length_of_what_ran_beside_what_is_kept() -> None:
    player = MachinePlayer.make(group_size=1, query=NO_FILTER, collect="in_order", async_generation_ratio=1.0)
    player.want(8)
    for attempt_id in (*range(8, 16), *range(1, 8), 0):
        is_short = attempt_id % 2 == 0
        player.finish(attempt_id, float(is_short), tokens=10 if is_short else 100)
    metrics = player.metrics[0]
    assert metrics["reward/launched_mean"] == 0.5
    assert metrics["length/launched_mean"] == 55.0
    assert (metrics["reward/kept_mean"], metrics["length/kept_mean"]) == (0.5, 55.0)


def test_in_order_waits_for_the_groups_launched_first_and_their_replacements() -> None:
    player = pair(collect="in_order", async_generation_ratio=1.0)
    player.want(2)
    player.finish_group(3, MIXED)
    player.finish_group(2, MIXED)
    assert not player.batches
    player.finish_group(1, MIXED)
    player.finish_group(0, SAME)
    assert not player.batches
    assert player.open_group_ids() == [4]
    player.finish_group(4, MIXED)
    assert player.trained() == [[1, 4]]
    player.step()
    player.want(2)
    assert player.trained()[-1] == [2, 3]


def test_in_order_launches_nothing_ahead_of_a_drop() -> None:
    player = poor(pair(collect="in_order", max_additional_running_prompts=4))
    player.want(2)
    assert player.open_group_ids() == [0, 1]


@given(seed=st.integers(0, 1_000_000), ratio=st.sampled_from([0.0, 1.0, 2.0]))
def test_in_order_what_is_trained_does_not_depend_on_what_finishes_first(seed: int, ratio: float) -> None:
    def prompts(seed: int) -> list[list[str]]:
        chance = random.Random(seed)
        player = pair(collect="in_order", async_generation_ratio=ratio, max_staleness=9, max_resample_rounds=50)
        for _ in range(3):
            player.want(3)
            while player.scheduler.filling is not None:
                group_id = chance.choice(player.open_group_ids())
                is_kept = int(player.pending[player.members(group_id)[0]].task.task_id[1:]) % 3 != 1
                player.finish_group(group_id, MIXED if is_kept else SAME)
            player.step()
        return [
            sorted(player.scheduler._groups[g].slot.ticket if g in player.scheduler._groups else -1 for g in b) for b in player.trained()
        ]

    assert [len(batch) for batch in prompts(seed)] == [3, 3, 3]


# ---------------------------------------------------------------- surplus


def surplus_player(**settings: object) -> MachinePlayer:
    """Three groups are accepted in a fill that fails, so that a later, smaller batch leaves some over."""
    player = pair(max_resample_rounds=1, **settings)
    player.want(4)
    for group_id, rewards in enumerate([MIXED, MIXED, MIXED, SAME]):
        player.finish_group(group_id, rewards)
    assert player.failures
    return player


def test_case_37_surplus_is_discarded_in_synchronous_training_and_counted_with_its_tokens() -> None:
    player = surplus_player()
    player.want(1)
    assert player.trained() == [[0]]
    assert player.left()[1:] == [(1, "surplus", "kept"), (2, "surplus", "kept")]
    assert player.scheduler.ledger.tokens["surplus"] == 8
    assert player.source.returned == []  # judged and consumed


def test_case_37_carried_surplus_serves_the_next_batches_oldest_first_with_its_version() -> None:
    player = surplus_player(surplus="carry", max_staleness=2)
    player.want(1)
    player.step()
    player.want(1)
    player.step()
    player.want(1)
    assert player.trained() == [[0], [1], [2]]
    assert [batch.groups[0].policy_version for batch in player.batches] == [0, 0, 0]
    assert [metrics["scheduler/off_policy_ratio"] for metrics in player.metrics] == [0.0, 1.0, 2.0]
    assert player.scheduler.ledger.groups_launched == 4


def test_carried_surplus_expires_by_its_age_and_its_prompt_comes_back() -> None:
    player = surplus_player(surplus="carry", max_staleness=1)
    player.want(1)
    player.step()
    player.want(1)
    player.step()
    assert player.left()[-1] == (2, "expired", "stale")
    assert player.source.returned == ["t2"]
    player.want(1)
    assert player.source.drawn[-1] == "t2"


def test_case_37_ten_ready_four_asked_twice_leaves_two() -> None:
    player = pair(max_resample_rounds=1, surplus="carry", max_staleness=5)
    player.want(11)
    for group_id in (3, 1, 4, 0, 9, 2, 6, 5, 8, 7):
        player.finish_group(group_id, MIXED)
    player.finish_group(10, SAME)
    assert "kept 10 of 11" in player.failures[0]
    player.want(4)
    player.step()
    player.want(4)
    assert player.trained() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [group.group_id for group in player.scheduler.buffer.groups()] == [8, 9]


# ---------------------------------------------------------------- the end of the data


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 9])
def test_case_33_the_end_of_the_data_trains_every_accepted_group_and_then_tells_it(mode: dict[str, object], size: int) -> None:
    player = pair(source=ListSource(make_task(f"t{i}") for i in range(size)), **mode)
    for _ in range(size + 2):
        player.want(4)
        while player.scheduler.filling is not None:
            group_id = player.open_group_ids()[0]
            player.finish_group(group_id, SAME if group_id % 3 == 1 else MIXED)
        player.step()
        if player.batches[-1].is_last:
            break
    assert player.batches[-1].is_last
    assert not player.failures
    assert sorted(g for batch in player.trained() for g in batch) == [g for g in range(size) if g % 3 != 1]
    assert all(batch.groups for batch in player.batches[:-1])
    player.want(4)  # and again: an empty last batch
    assert player.batches[-1].is_last
    assert player.trained()[-1] == []


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_in_order_a_place_that_the_ended_data_leave_empty_is_taken_by_the_next_group(ratio: float) -> None:
    player = pair(collect="in_order", async_generation_ratio=ratio, source=ListSource(make_task(f"t{i}") for i in range(4)))
    player.want(2)
    player.finish_group(0, SAME)
    player.finish_group(1, MIXED)
    assert not player.batches
    player.finish_group(3, MIXED)
    player.finish_group(2, MIXED)
    assert player.trained() == [[1, 2]]
    player.step()
    player.want(2)
    assert player.batches[-1].is_last
    assert sorted(group_id for batch in player.trained() for group_id in batch) == [1, 2, 3]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_with_a_slow_source_the_last_batch_waits_until_it_is_known_to_be_the_last(mode: dict[str, object]) -> None:
    player = pair(source=ListSource(make_task(f"t{i}") for i in range(3)), **mode)
    player.hold_draws = True
    player.want(2)
    while player.scheduler.filling is not None or not player.batches[-1].is_last:
        if player.scheduler.filling is None:
            player.step()
            player.want(2)
        elif player.pending:
            player.finish_group(player.open_group_ids()[0], MIXED)
        else:
            player.answer_draw()
    assert player.trained() in ([[0, 1], [2]], [[0, 1], [2], []])
    assert all(batch.groups or batch.is_last for batch in player.batches)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_at_the_end_of_the_data_every_batch_but_the_last_is_full_where_it_is_refilled(mode: dict[str, object]) -> None:
    player = pair(source=ListSource(make_task(f"t{i}") for i in range(13)), **mode)
    while not (player.batches and player.batches[-1].is_last):
        player.want(3)
        while player.scheduler.filling is not None:
            group_id = player.open_group_ids()[-1]
            player.finish_group(group_id, SAME if group_id % 3 == 1 else MIXED)
        player.step()
    sizes = [len(batch.groups) for batch in player.batches if batch.groups]
    if mode["fill"] == "refill":
        assert all(size == 3 for size in sizes[:-1])
        assert sum(sizes) >= 8


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_at_the_end_of_the_data_nothing_accepted_is_no_batch_but_the_end(mode: dict[str, object]) -> None:
    player = pair(source=ListSource(make_task(f"t{i}") for i in range(5)), on_exhausted="shrink", **mode)
    while not player.batches:
        if player.scheduler.filling is None:
            player.want(4)
        while player.scheduler.filling is not None:
            player.finish_group(player.open_group_ids()[0], SAME)
    assert player.trained() == [[]]
    assert player.batches[0].is_last


@pytest.mark.parametrize("policy", ["raise", "shrink", "keep_low_information"])
def test_the_end_of_the_data_is_no_bound_whatever_the_policy(policy: str) -> None:
    player = pair(source=ListSource(make_task(f"t{i}") for i in range(3)), on_exhausted=policy)
    player.want(3)
    fill(player, [True, False, True])
    assert player.trained() == [[0, 2]]
    assert player.batches[0].is_last


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_prompt_is_drawn_exactly_once_per_epoch_in_every_mode(mode: dict[str, object]) -> None:
    tasks = TaskList([make_task(f"t{i}") for i in range(7)], seed=3, epochs=3)
    player = pair(**mode)
    player.source = tasks  # type: ignore[assignment]
    judged: list[str] = []
    for _ in range(20):
        player.want(2)
        while player.scheduler.filling is not None:
            group_id = player.open_group_ids()[0]
            judged.append(player.pending[player.members(group_id)[0]].task.task_id)
            player.finish_group(group_id, SAME if group_id % 4 == 1 else MIXED)
        player.step()
        if player.batches[-1].is_last:
            break
    assert sorted(judged) == sorted(f"t{i}" for i in range(7) for _ in range(3))
    assert player.scheduler.ledger.groups["expired"] == 0


def test_prompts_given_back_at_a_full_batch_reopen_a_source_that_had_ended() -> None:
    player = poor(pair(max_additional_running_prompts=2, source=ListSource(make_task(f"t{i}") for i in range(2))))
    player.want(1)
    player.finish_group(1, MIXED)
    assert player.source.returned == ["t0"]
    assert not player.batches[0].is_last
    player.step()
    player.want(1)
    player.finish_group(2, MIXED)
    assert player.trained() == [[1], [2]]
    player.step()
    player.want(1)
    assert player.batches[-1].is_last


# ---------------------------------------------------------------- payloads and transactions


@pytest.mark.parametrize(("policy", "in_reserve"), [("raise", 0), ("keep_low_information", 2)])
def test_case_78_the_data_of_a_thousand_rejected_groups_is_freed_and_each_is_written_down_once(policy: str, in_reserve: int) -> None:
    config = SchedulerConfig(group_size=2, on_exhausted=policy, max_resample_rounds=10_000, group_timeout_s=1e9)  # type: ignore[arg-type]
    machine = Scheduler(config, make_filters(group_size=2))
    payloads: list[weakref.ref[object]] = []
    records: list[GroupRecord] = []
    running: list[ev.LaunchMember] = []
    drawn = 0
    todo = machine.handle(ev.BatchWanted(groups=2), 0.0)
    while len(records) < 1000:
        for instruction in todo:
            match instruction:
                case ev.DrawTask():
                    drawn += 1
                    todo += machine.handle(ev.TaskDrawn(task=make_task(f"t{drawn}"), epoch=0), 0.0)
                case ev.LaunchMember():
                    running.append(instruction)
                case ev.RecordGroup():
                    records.append(instruction.record)
        rollout = make_rollout(running.pop(0), 1.0)
        payloads.append(weakref.ref(rollout.turns[0].token_ids))
        todo = machine.handle(ev.MemberFinished(rollout=rollout), 0.0)
        del rollout
        if len(payloads) % 500 == 0:
            gc.collect()
            assert sum(payload() is not None for payload in payloads) <= 4 + 2 * in_reserve
    assert {(record.outcome, record.category, record.reason) for record in records} == {("dropped", "low_information", "no_spread")}
    assert [record.group_id for record in records] == list(range(1000))
    assert machine.open_groups <= 2 + in_reserve + 1
    assert len(machine._running) <= 4
    assert len(machine._deadlines) <= 4 + in_reserve


def test_case_88_a_place_is_free_again_when_its_group_is_lost_before_it_began() -> None:
    player = pair(max_response_rounds=1)
    player.want(2)
    player.lose_worker(player.members(1))
    assert player.scheduler.running_groups == 2
    assert player.open_group_ids() == [0, 2]


@pytest.mark.parametrize("fill_mode", ["refill", "shrink"])
def test_a_batch_that_is_wanted_while_one_is_being_filled_or_trained_cannot_be(fill_mode: str) -> None:
    player = pair(fill=fill_mode)
    with pytest.raises(SchedulerBug, match="at least 1"):
        player.scheduler.handle(ev.BatchWanted(groups=0), 0.0)
    player.want(1)
    with pytest.raises(SchedulerBug, match="still being filled"):
        player.scheduler.handle(ev.BatchWanted(groups=1), 1.0)
    player.finish_group(0, MIXED)
    with pytest.raises(SchedulerBug, match="before StepAdvanced"):
        player.scheduler.handle(ev.BatchWanted(groups=1), 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"max_resample_rounds": 0}, "max_resample_rounds must be at least 1"),
        ({"max_response_rounds": 0}, "max_response_rounds must be at least 1"),
        ({"absent_after_batches": 0}, "absent_after_batches must be at least 1"),
        ({"max_groups_per_batch": 0}, "max_groups_per_batch must be at least 1"),
        ({"quarantine_after": 0}, "quarantine_after must be at least 1"),
        ({"redundancy": -1}, "redundancy must be at least 0"),
        ({"min_members": 0}, "min_members must lie between 1 and group_size"),
        ({"min_members": 5}, "min_members must lie between 1 and group_size"),
        ({"group_timeout_s": 0.0}, "group_timeout_s must be above 0"),
        ({"group_timeout_s": math.nan}, "group_timeout_s must be above 0"),
        ({"stall_warning_s": -1.0}, "stall_warning_s must be above 0"),
    ],
)
def test_settings_out_of_their_bounds_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"group_size": 4, **settings})  # type: ignore[arg-type]


@given(
    mode=st.sampled_from(MODES),
    policy=st.sampled_from(["raise", "shrink", "keep_low_information"]),
    rounds=st.integers(1, 4),
    limit=st.none() | st.integers(3, 8),
    size=st.none() | st.integers(0, 20),
    additional=st.integers(0, 3),
    seed=st.integers(0, 1_000_000),
)
def test_in_every_combination_a_batch_arrives_or_the_reason_is_told(
    mode: dict[str, object], policy: str, rounds: int, limit: int | None, size: int | None, additional: int, seed: int
) -> None:
    chance = random.Random(seed)
    source = ListSource(make=lambda i: make_task(f"t{i}")) if size is None else ListSource(make_task(f"t{i}") for i in range(size))
    player = pair(
        source=source,
        on_exhausted=policy,
        max_resample_rounds=rounds,
        max_groups_per_batch=limit,
        max_additional_running_prompts=additional,
        **mode,
    )
    for step in range(4):
        player.want(3)
        while player.scheduler.filling is not None:
            player.finish_group(chance.choice(player.open_group_ids()), MIXED if chance.random() < 0.5 else SAME)
        if player.failures:
            assert "kept" in player.failures[0]
            break
        assert len(player.batches) == step + 1
        if len(player.batches[-1].groups) < 3 and not player.batches[-1].is_last:
            assert mode["fill"] == "shrink" or policy != "raise"
        player.step()
        if player.batches[-1].is_last:
            break
    player.tell(ev.Shutdown())
    assert player.scheduler.open_groups == 0
    assert len(player.records) == player.scheduler.ledger.groups_launched
