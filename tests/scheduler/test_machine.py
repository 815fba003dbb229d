"""The machine under every order of events: counts conserve, batches are exact, nothing partial, nothing twice, every bound ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.errors import FilterError, SchedulerBug
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.trainer import samples_from_batch
from tests.fakes import NO_FILTER, ListSource, MachinePlayer, make_filters, make_rollout, make_task

MIXED = [1.0, 0.0, 1.0, 0.0]
SAME = [1.0, 1.0, 1.0, 1.0]


# ---------------------------------------------------------------- properties


@st.composite
def settings_of_the_machine(draw: st.DrawFn) -> dict[str, object]:
    size = draw(st.integers(1, 4))
    return {
        "group_size": size,
        "fill": draw(st.sampled_from(["refill", "shrink"])),
        "max_resample_rounds": draw(st.integers(1, 4)),
        "max_groups_per_batch": draw(st.none() | st.integers(1, 12)),
        "max_response_rounds": draw(st.integers(1, 3)),
        "on_exhausted": draw(st.sampled_from(["raise", "shrink", "keep_low_information"])),
        "min_members": draw(st.none() | st.integers(1, size)),
        "truncated": draw(st.sampled_from(["mask", "keep", "invalid", "drop_group"])),
        "max_additional_running_prompts": draw(st.integers(0, 4)),
        "query": NO_FILTER if size == 1 else FilterConfig(type="std_filter"),
        "response": draw(st.none() | st.just(FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0}))),
    }


@given(settings=settings_of_the_machine(), tasks=st.integers(0, 30) | st.none(), wanted=st.integers(1, 4), data=st.data())
def test_every_order_of_events_conserves_attempts_groups_and_tokens(
    settings: dict[str, object], tasks: int | None, wanted: int, data: st.DataObject
) -> None:
    source = ListSource(make=lambda i: make_task(f"t{i}")) if tasks is None else ListSource(make_task(f"t{i}") for i in range(tasks))
    player = MachinePlayer.make(source=source, **settings)
    player.hold_acks = data.draw(st.booleans())
    let_go: list[int] = []
    before: set[int] = set()  # groups launched for earlier batches
    ended = False
    for _ in range(data.draw(st.integers(1, 3))):
        player.want(wanted)
        while player.scheduler.filling is not None:
            choices = [*player.pending, *[-1 - i for i in range(len(player.acks))]]
            assert choices, "a batch is wanted, but nothing is under way: this would wait for ever"
            pick = data.draw(st.sampled_from(choices))
            if pick < 0:
                attempt_id = player.acks.pop(-1 - pick)
                let_go.append(attempt_id)
                _play_rest(player, player.acknowledge(attempt_id))
                continue
            how = data.draw(st.sampled_from(["good", "good", "bad", "odd", "truncated", "missing", "fails"]))
            if how == "fails":
                player.fail(pick)
            else:
                reward = {"good": 1.0, "bad": 0.0, "odd": 7.0, "truncated": 0.5, "missing": None}[how]
                player.finish(pick, reward, tokens=data.draw(st.integers(0, 5)), finish_reason="length" if how == "truncated" else "stop")
        if player.failures:
            assert settings["on_exhausted"] == "raise" or "in a row" in player.failures[-1]
            break
        batch = player.batches[-1]
        if len(batch.groups) < wanted and not batch.is_last and settings["fill"] == "refill":  # only at a bound that was really reached
            assert settings["on_exhausted"] != "raise"
            launched = [launch.group_id for launch in player.launches if launch.group_id not in before]
            deepest = max((record.round for record in player.records if record.group_id not in before), default=0)
            assert deepest == settings["max_resample_rounds"] or len(set(launched)) >= (settings["max_groups_per_batch"] or 10**9)
        before |= {launch.group_id for launch in player.launches}
        assert len(samples_from_batch(batch)) == sum(len(group.rollouts) for group in batch.groups)
        assert batch.groups or batch.is_last
        player.advance()
        ended = batch.is_last
        if ended:
            break
    player.tell(ev.Shutdown())
    for attempt_id in list(player.acks):
        _play_rest(player, player.acknowledge(attempt_id))
    assert not player.pending
    assert player.scheduler.open_groups == 0
    assert player.scheduler.running_attempts == 0
    assert player.scheduler.ledger.tokens["open"] == 0
    assert sum(player.scheduler.ledger.groups.values()) == player.scheduler.ledger.groups_launched == len(player.records)
    assert sum(record.sampled_tokens for record in player.records) == player.engine_tokens
    # every drawn task was judged, trained or given back
    assert (
        len(source.drawn)
        == player.scheduler.ledger.groups_launched
        + player.source.returned.__len__()
        - sum(record.outcome == "cancelled" for record in player.records)
        - player.scheduler.prompts.requeued
    )


def _play_rest(player: MachinePlayer, instructions: list[ev.Instruction]) -> None:
    for instruction in instructions:
        assert isinstance(instruction, ev.RecordGroup)
        player.records.append(instruction.record)


@given(data=st.data())
def test_a_refilled_batch_holds_exactly_the_groups_asked_for_and_all_have_spread(data: st.DataObject) -> None:
    player = MachinePlayer.make(max_resample_rounds=1000)
    wanted = data.draw(st.integers(1, 5))
    player.want(wanted)
    for _ in range(400):
        if player.batches:
            break
        attempt_id = data.draw(st.sampled_from(sorted(player.pending)))
        player.finish(attempt_id, 1.0 if data.draw(st.integers(0, 3)) else 0.0)
    for attempt_id in list(player.pending):
        if attempt_id in player.pending:
            player.finish(attempt_id, float(attempt_id % 2))
    while not player.batches:
        player.finish(next(iter(player.pending)), float(next(iter(player.pending)) % 2))
    (batch,) = player.batches
    assert len(batch.groups) == batch.requested == wanted
    assert all(len(group.rollouts) == 4 and len(set(group.rewards)) > 1 for group in batch.groups)
    assert [group.group_id for group in batch.groups] == sorted(group.group_id for group in batch.groups)


@given(seed=st.integers(0, 1000))
def test_the_same_events_give_the_same_instructions(seed: int) -> None:
    def play() -> list[str]:
        order = random.Random(seed)
        player = MachinePlayer.make(seed=7, max_resample_rounds=1000, max_additional_running_prompts=2)
        player.want(3)
        while not player.batches:
            player.finish(order.choice(sorted(player.pending)), float(order.random() < 0.3))
        return [repr(instruction) for instruction in player.instructions]

    assert play() == play()


def test_every_attempt_has_a_seed_of_its_own_that_depends_on_the_task_and_not_on_the_order_of_launch() -> None:
    first, second = MachinePlayer.make(seed=1), MachinePlayer.make(seed=1, source=ListSource([make_task("t1"), make_task("t0")]))
    first.want(2)
    second.want(2)

    def seeds(player: MachinePlayer) -> dict[tuple[str, int], int]:
        return {(launch.task.task_id, launch.member_index): launch.seed for launch in player.launches}

    assert seeds(first) == seeds(second)
    assert len(set(seeds(first).values())) == 8


# ---------------------------------------------------------------- filling


def test_a_dropped_group_is_replaced_at_once_by_one_group_of_the_next_round() -> None:
    player = MachinePlayer.make()
    player.want(2)
    assert player.open_group_ids() == [0, 1]
    player.finish_group(0, SAME)
    assert player.open_group_ids() == [1, 2]
    assert player.scheduler._groups[2].round == 2
    assert [(r.group_id, r.outcome, r.category, r.reason) for r in player.records] == [(0, "dropped", "low_information", "no_spread")]


def test_case_29_the_limit_of_rounds_is_enforced_exactly_and_the_message_tells_why() -> None:
    player = MachinePlayer.make(max_resample_rounds=3)
    player.want(4)
    for _ in range(3):
        assert not player.failures
        for group_id in player.open_group_ids():
            player.finish_group(group_id, SAME)
    assert player.scheduler.ledger.groups_launched == 12
    (message,) = player.failures
    parts = (
        "expected a batch of 4 groups",
        "kept 0 of 12",
        "0.0%",
        "max_resample_rounds (3)",
        "low_information/no_spread 12",
        "on_exhausted",
    )
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("kept_per_round", "on_exhausted", "trained"),
    [((1, 1, 1), "shrink", 3), ((1, 1, 2), "raise", 4), ((1, 1, 1), "keep_low_information", 4), ((0, 0, 0), "keep_low_information", 4)],
)
def test_case_29_rounds_that_keep_too_few_end_by_the_policy(kept_per_round: tuple[int, ...], on_exhausted: str, trained: int) -> None:
    player = MachinePlayer.make(max_resample_rounds=3, on_exhausted=on_exhausted)
    player.want(4)
    for kept in kept_per_round:
        for number, group_id in enumerate(player.open_group_ids()):
            player.finish_group(group_id, MIXED if number < kept else SAME)
    assert not player.failures
    assert len(player.batches[0].groups) == trained
    player.advance()
    assert player.scheduler.ledger.groups["trained"] == trained
    assert player.scheduler.open_groups == 0


def test_a_failed_fill_throws_no_good_group_away() -> None:
    player = MachinePlayer.make(max_resample_rounds=1)
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    assert "kept 1 of 2" in player.failures[0]
    player.want(2)
    player.finish_group(2, MIXED)
    assert [group.group_id for group in player.batches[0].groups] == [0, 2]


def test_case_31_and_43_shrink_draws_exactly_the_batch_and_trains_on_what_is_kept() -> None:
    outcomes = [MIXED, SAME, MIXED, SAME, MIXED, MIXED]
    player = MachinePlayer.make(fill="shrink")
    player.want(4)
    for group_id in range(4):
        player.finish_group(group_id, outcomes[group_id])
    assert len(player.source.drawn) == 4
    assert len(player.batches[0].groups) == 2
    assert player.batches[0].requested == 4


def test_case_43_refill_draws_until_the_batch_is_kept() -> None:
    outcomes = [MIXED, SAME, MIXED, SAME, MIXED, MIXED]
    player = MachinePlayer.make()
    player.want(4)
    for group_id in range(6):
        player.finish_group(group_id, outcomes[group_id])
    assert len(player.source.drawn) == 6
    assert len(player.batches[0].groups) == 4


def test_case_33_the_last_partial_batch_is_trained_and_then_the_end_is_told() -> None:
    player = MachinePlayer.make(source=ListSource(make_task(f"t{i}") for i in range(3)))
    player.want(4)
    for group_id in range(3):
        player.finish_group(group_id, MIXED)
    (batch,) = player.batches
    assert len(batch.groups) == 3
    assert batch.is_last
    player.advance()
    player.want(4)
    assert player.batches[-1].is_last
    assert not player.batches[-1].groups


def test_case_35_a_fully_valid_round_is_used_and_completes_the_batch() -> None:
    player = MachinePlayer.make()
    player.want(4)
    for number, group_id in enumerate(player.open_group_ids()):
        player.finish_group(group_id, MIXED if number < 2 else SAME)
    for group_id in player.open_group_ids():
        player.finish_group(group_id, MIXED)
    assert [group.group_id for group in player.batches[0].groups] == [0, 1, 4, 5]
    assert not player.warnings


def test_case_3_groups_of_one_pass_a_filter_without_spread_rule_and_never_loop() -> None:
    player = MachinePlayer.make(group_size=1, query=NO_FILTER, max_resample_rounds=3)
    player.want(3)
    for reward, group_id in zip([5.0, 0.0, 1.0], range(3), strict=True):
        player.finish_group(group_id, [reward])
    assert len(player.batches[0].groups) == 3


def test_max_groups_per_batch_bounds_what_is_launched() -> None:
    player = MachinePlayer.make(max_groups_per_batch=3)
    player.want(2)
    while player.pending:
        player.finish_group(player.open_group_ids()[0], SAME)
    assert player.scheduler.ledger.groups_launched == 3
    assert "max_groups_per_batch (3)" in player.failures[0]


def test_three_batches_in_a_row_of_which_nothing_is_kept_are_an_error_whatever_the_policy() -> None:
    player = MachinePlayer.make(max_resample_rounds=1, on_exhausted="shrink")
    player.want(2)
    while player.pending:
        player.finish_group(player.open_group_ids()[0], SAME)
    assert player.scheduler.ledger.groups_launched == 6
    assert not player.batches
    assert sum("no optimiser step" in warning for warning in player.warnings) == 2
    assert "3 batches in a row" in player.failures[0]


def test_additional_prompts_run_ahead_within_their_bound_and_are_cancelled_when_the_batch_is_full() -> None:
    player = MachinePlayer.make(max_additional_running_prompts=2, max_resample_rounds=50)
    player.want(4)
    for _ in range(20):  # a low acceptance rate is measured
        player.finish_group(player.open_group_ids()[0], SAME)
    assert len(player.open_group_ids()) == 6
    full = player.open_group_ids()[:4]
    rest = player.open_group_ids()[4:]
    for group_id in full:
        player.finish_group(group_id, MIXED)
    assert [group.group_id for group in player.batches[0].groups] == full
    assert not player.pending
    assert [record.group_id for record in player.records if record.outcome == "cancelled"] == rest
    assert len(player.source.returned) == 2
    player.advance()
    player.want(1)
    assert player.source.drawn[-3:-1] == player.source.returned


def test_accepted_groups_beyond_the_batch_leave_as_surplus_with_their_tokens() -> None:
    player = MachinePlayer.make(max_resample_rounds=1)
    player.want(3)
    for group_id, rewards in enumerate([MIXED, MIXED, SAME]):
        player.finish_group(group_id, rewards)
    assert player.failures
    player.want(1)
    assert [group.group_id for group in player.batches[0].groups] == [0]
    assert [(record.group_id, record.outcome, record.sampled_tokens) for record in player.records] == [(2, "dropped", 8), (1, "surplus", 8)]
    assert player.scheduler.ledger.tokens["surplus"] == 8


# ---------------------------------------------------------------- members


RANGE = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})


def test_a_rejected_response_is_replaced_one_for_one_in_the_same_group() -> None:
    player = MachinePlayer.make(response=RANGE)
    player.want(1)
    player.finish(0, 9.0)
    assert sorted(player.pending) == [1, 2, 3, 4]
    assert (player.pending[4].group_id, player.pending[4].member_index) == (0, 0)
    assert player.pending[4].seed != player.launches[0].seed
    for attempt_id, reward in zip([4, 1, 2, 3], MIXED, strict=True):
        player.finish(attempt_id, reward)
    (group,) = player.batches[0].groups
    assert [rollout.attempt_id for rollout in group.rollouts] == [4, 1, 2, 3]
    assert player.scheduler.ledger.attempts["rejected"] == 1


def test_case_68_the_limit_of_response_rounds_counts_rounds_and_not_members() -> None:
    player = MachinePlayer.make(group_size=8, max_response_rounds=3, response=RANGE)
    player.want(1)
    for _ in range(2):
        for attempt_id in list(player.pending):
            player.finish(attempt_id, 9.0)
    for number, attempt_id in enumerate(list(player.pending)):
        player.finish(attempt_id, float(number % 2))
    assert len(player.batches[0].groups[0].rollouts) == 8
    assert player.scheduler.ledger.attempts["rejected"] == 16


def test_a_member_that_is_rejected_in_every_round_drops_its_group_as_response_retries() -> None:
    player = MachinePlayer.make(max_response_rounds=5, response=RANGE)
    player.want(1)
    for attempt_id in (0, 4, 5, 6, 7):
        player.finish(attempt_id, 9.0)
    (record,) = player.records
    assert (record.category, record.reason, record.attempts) == ("invalid", "response_retries", 8)
    assert player.open_group_ids() == [1]


@pytest.mark.parametrize(("min_members", "trained"), [(3, True), (4, False)])
def test_min_members_decides_between_the_survivors_and_dropping_the_group(min_members: int, trained: bool) -> None:
    player = MachinePlayer.make(max_response_rounds=1, min_members=min_members)
    player.want(1)
    player.fail(0)
    if trained:
        for attempt_id, reward in zip((1, 2, 3), (1.0, 0.0, 1.0), strict=True):
            player.finish(attempt_id, reward)
        assert [rollout.member_index for rollout in player.batches[0].groups[0].rollouts] == [1, 2, 3]
    else:
        assert player.records[0].reason == "response_retries"


def test_case_21_a_member_without_reward_is_never_zero_and_never_in_a_group() -> None:
    player = MachinePlayer.make(max_response_rounds=2)
    player.want(1)
    player.finish(0, None)
    player.finish(4, float("nan"))
    assert player.records[0].reason == "response_retries"
    assert player.scheduler.ledger.rejected_members == {"reward_missing": 2}


def test_case_27_a_failed_group_is_evicted_whole_and_exactly_one_group_refilled() -> None:
    player = MachinePlayer.make(group_size=2, max_response_rounds=1, max_resample_rounds=4)
    player.want(2)
    player.finish_group(0, [1.0, 0.0])
    player.finish(2, 1.0)
    player.fail(3)
    assert player.open_group_ids() == [2]
    player.finish_group(2, [0.0, 1.0])
    assert [group.group_id for group in player.batches[0].groups] == [0, 2]
    assert player.scheduler.open_groups == 2  # the two that are being trained: no row of group 1 is kept


def test_case_27_failed_refills_end_by_the_bound() -> None:
    player = MachinePlayer.make(group_size=2, max_response_rounds=1, max_resample_rounds=4)
    player.want(1)
    while player.pending:
        player.fail(next(iter(player.pending)))
    assert player.scheduler.ledger.groups_launched == 4
    assert "invalid/response_retries 4" in player.failures[0]


def test_case_45_a_truncated_member_stays_in_the_group_but_out_of_its_statistics() -> None:
    player = MachinePlayer.make()
    player.want(1)
    for attempt_id, reward in zip((0, 1, 2), (1.0, 0.0, 1.0), strict=True):
        player.finish(attempt_id, reward)
    player.finish(3, 0.0, finish_reason="length")
    (group,) = player.batches[0].groups
    assert group.counted == (True, True, True, False)


def test_a_truncated_member_alone_gives_a_group_no_spread() -> None:
    player = MachinePlayer.make()
    player.want(1)
    for attempt_id in (0, 1, 2):
        player.finish(attempt_id, 1.0)
    player.finish(3, 0.0, finish_reason="length")
    assert player.records[0].reason == "no_spread"


@pytest.mark.parametrize(("policy", "reason"), [("invalid", "response_retries"), ("drop_group", "truncated")])
def test_truncated_members_are_replaced_or_drop_the_group_by_setting(policy: str, reason: str) -> None:
    player = MachinePlayer.make(truncated=policy, max_response_rounds=1)
    player.want(1)
    player.finish(0, 1.0, finish_reason="length")
    assert [(record.reason, record.category) for record in player.records] == [(reason, "invalid")]


# ---------------------------------------------------------------- cancelling, late results, impossible events


def test_case_70_a_late_result_of_an_ended_attempt_is_counted_and_dropped() -> None:
    player = MachinePlayer.make(response=RANGE, max_response_rounds=1)
    player.want(1)
    launch = player.launches[1]
    player.finish(0, 9.0)  # drops the group, cancels the others
    player.tell(ev.MemberFinished(rollout=make_rollout(launch, 1.0)))
    assert player.scheduler.ledger.late_results == 1
    assert player.records[0].attempts == 4


def test_case_126_every_launched_attempt_has_one_outcome_and_the_shares_sum_to_one() -> None:
    player = MachinePlayer.make(response=RANGE, max_response_rounds=2)
    player.want(2)
    player.finish(0, 9.0)
    player.fail(1)
    player.finish_group(1, SAME)
    player.finish_group(2, MIXED)
    player.finish_group(0, MIXED)
    player.advance()
    player.tell(ev.Shutdown())
    metrics = player.scheduler.ledger.metrics()
    shares = [value for name, value in metrics.items() if name.startswith("ledger/token_share/")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-12)
    assert sum(player.scheduler.ledger.attempts.values()) == len(player.launches)


def test_tokens_sampled_after_a_cancel_are_late() -> None:
    player = MachinePlayer.make(response=RANGE, max_response_rounds=1)
    player.want(1)
    player.finish(0, 9.0)
    player.engine_tokens += 3
    player.tell(ev.LateTokens(attempt_id=1, sampled_tokens=3))
    assert player.scheduler.ledger.tokens["late"] == 3


def test_case_53_a_rollout_of_another_task_is_refused_with_the_story_of_the_group() -> None:
    player = MachinePlayer.make()
    player.want(1)
    with pytest.raises(SchedulerBug, match=r"task 't0'.*its rollout says.*'other'[\s\S]*group 0, task 't0'"):
        player.scheduler.handle(ev.MemberFinished(rollout=make_rollout(attempt_id=0, group_id=0, member_index=0, task_id="other")), 0.0)


def test_impossible_events_are_refused() -> None:
    player = MachinePlayer.make()
    player.want(1)
    handle = player.scheduler.handle
    with pytest.raises(SchedulerBug, match="never launched"):
        handle(ev.MemberFinished(rollout=make_rollout(attempt_id=99)), 0.0)
    with pytest.raises(SchedulerBug, match="still being filled"):
        handle(ev.BatchWanted(groups=1), 0.0)
    with pytest.raises(SchedulerBug, match="without a CancelMember"):
        handle(ev.MemberCancelled(attempt_id=0, sampled_tokens=0), 0.0)
    with pytest.raises(SchedulerBug, match="only go forward"):
        handle(ev.StepAdvanced(step=0), 0.0)
    with pytest.raises(SchedulerBug, match="without a DrawTask"):
        handle(ev.TaskDrawn(task=make_task(), epoch=0), 0.0)
    with pytest.raises(SchedulerBug, match="expected one of the events"):
        handle("hello", 0.0)  # type: ignore[arg-type]


def test_a_filter_that_raises_names_the_group_and_its_story() -> None:
    class Raises:
        can_disqualify = False

        def judge(self, group: object) -> object:
            raise ZeroDivisionError("no")

    filters = make_filters()
    object.__setattr__(filters["math"], "query", Raises())
    player = MachinePlayer(Scheduler(SchedulerConfig(group_size=2), filters), ListSource(make=lambda i: make_task(f"t{i}")))
    player.want(1)
    player.finish(0, 1.0)
    with pytest.raises(FilterError, match=r"filter of groups of domain 'math' failed: no\ngroup 0, task 't0'"):
        player.finish(1, 0.0)


def test_a_draw_that_is_answered_after_the_end_gives_its_task_back() -> None:
    scheduler = Scheduler(SchedulerConfig(group_size=2), make_filters(group_size=2))
    assert scheduler.handle(ev.BatchWanted(groups=2), 0.0) == [ev.DrawTask(), ev.DrawTask()]
    assert len(scheduler.handle(ev.TaskDrawn(task=make_task("a"), epoch=0), 0.0)) == 2
    scheduler.handle(ev.Shutdown(), 0.0)
    task = make_task("b")
    assert scheduler.handle(ev.TaskDrawn(task=task, epoch=3), 0.0) == [ev.ReturnTask(task=task, epoch=3)]
    with pytest.raises(SchedulerBug, match="after Shutdown"):
        scheduler.handle(ev.BatchWanted(groups=1), 0.0)


def test_a_draw_that_is_answered_after_its_batch_was_filled_gives_its_task_back_and_the_next_batch_draws_anew() -> None:
    scheduler = Scheduler(SchedulerConfig(group_size=2, max_additional_running_prompts=2), make_filters(group_size=2))
    scheduler._judged, scheduler._kept = 30, 5  # a poor acceptance rate so far: more groups are drawn than the one wanted
    draws = scheduler.handle(ev.BatchWanted(groups=1), 0.0)
    assert len(draws) == 3
    launches = scheduler.handle(ev.TaskDrawn(task=make_task("a"), epoch=0), 0.0)
    delivered = [
        instruction
        for launch, reward in zip(launches, (1.0, 0.0), strict=True)
        for instruction in scheduler.handle(ev.MemberFinished(rollout=make_rollout(launch, reward)), 0.0)  # type: ignore[arg-type]
    ]
    assert any(isinstance(instruction, ev.DeliverBatch) for instruction in delivered)
    late = make_task("late")
    assert scheduler.handle(ev.TaskDrawn(task=late, epoch=0), 0.0) == [ev.ReturnTask(task=late, epoch=0)]
    assert scheduler.handle(ev.TasksExhausted(), 0.0) == []
    scheduler.handle(ev.StepAdvanced(step=1), 0.0)
    assert ev.DrawTask() in scheduler.handle(ev.BatchWanted(groups=1), 0.0)


def test_shrink_never_draws_more_than_the_batch_even_with_additional_prompts() -> None:
    player = MachinePlayer.make(fill="shrink", max_additional_running_prompts=3)
    player.want(3)
    player.finish_group(0, SAME)
    player.finish_group(1, MIXED)
    player.finish_group(2, MIXED)
    assert player.scheduler.ledger.groups_launched == 3
    assert len(player.batches[0].groups) == 2


def test_tries_of_which_nothing_was_kept_stay_in_the_metrics_of_the_batch() -> None:
    player = MachinePlayer.make(max_resample_rounds=1, on_exhausted="shrink")
    player.want(2)
    for group_id, rewards in enumerate([SAME, SAME, MIXED, SAME]):
        player.finish_group(group_id, rewards)
    metrics = player.metrics[0]
    assert metrics["scheduler/empty_batches"] == 1
    assert metrics["scheduler/query_use_count"] == 4
    assert metrics["scheduler/query_filter_count"] == 3
    assert metrics["scheduler/acceptance_rate"] == 0.25


def test_a_group_that_tops_the_batch_up_counts_as_kept() -> None:
    player = MachinePlayer.make(max_resample_rounds=1, on_exhausted="keep_low_information")
    player.want(2)
    player.finish_group(0, MIXED)
    player.finish_group(1, SAME)
    metrics = player.metrics[0]
    assert metrics["scheduler/topped_up_count"] == 1
    assert metrics["scheduler/query_filter_count"] == 0
    assert metrics["batch/rejected/low_information/no_spread"] == 0
    assert metrics["reward/kept_mean"] == 0.75


def test_a_member_that_never_delivered_is_tried_again_with_its_seed_and_a_rejected_one_with_another() -> None:
    player = MachinePlayer.make(response=RANGE)
    player.want(1)
    player.fail(0)
    player.finish(1, 9.0)
    again, other = player.pending[4], player.pending[5]
    assert (again.member_index, again.seed) == (0, player.launches[0].seed)
    assert other.member_index == 1
    assert other.seed != player.launches[1].seed


def test_a_filter_that_keeps_nothing_says_so_before_the_bound() -> None:
    player = MachinePlayer.make(max_resample_rounds=50)
    player.want(2)
    for group_id in range(6):
        assert not player.warnings
        player.finish_group(group_id, SAME)
    assert "6 groups were dropped for this batch and none has been kept so far" in player.warnings[0]
    assert "low_information/no_spread 6" in player.warnings[0]


def test_survivors_of_a_group_train_with_their_own_place_in_the_statistics() -> None:
    player = MachinePlayer.make(max_response_rounds=1, min_members=2)
    player.want(1)
    player.fail(0)
    player.finish(1, 1.0)
    player.finish(2, 0.0)
    player.finish(3, 0.5, finish_reason="length")
    samples = samples_from_batch(player.batches[0])
    assert [(sample.attempt_id, sample.is_counted) for sample in samples] == [(1, True), (2, True), (3, False)]


def test_memory_holds_only_open_groups() -> None:
    player = MachinePlayer.make(max_resample_rounds=10_000)
    player.want(2)
    for _ in range(300):
        player.finish_group(player.open_group_ids()[0], SAME)
    assert player.scheduler.open_groups == 2
    assert len(player.scheduler._running) == 8
