"""What simulated runs have found, each as small as it can be told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from sluice.config.models import FilterConfig
from sluice.errors import ResampleError
from sluice.execution import LocalShell
from sluice.execution.clock import run
from sluice.execution.loops import LoopContext, RolloutLoop
from sluice.filters import RatioGuard
from sluice.generation import NullEngine, answers
from sluice.rewards.base import Score
from sluice.scheduler import GroupRecord, Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.scheduler.prompts import Prompts
from sluice.types import Rollout, Task
from tests.fakes import NO_FILTER, STD_FILTER, DomainSource, ListSource, MachinePlayer, make_filters, make_task

MIXED = [1.0, 0.0]
SAME = [1.0, 1.0]


def pairs(**settings: object) -> MachinePlayer:
    return MachinePlayer.make(**{"group_size": 2, "max_resample_rounds": 50, **settings})  # type: ignore[arg-type]


# ---------------------------------------------------------------- batches


def test_a_batch_that_is_topped_up_is_in_the_order_of_launch() -> None:
    player = pairs(max_resample_rounds=1, on_exhausted="keep_low_information")
    player.want(2)
    player.finish_group(0, SAME)
    player.finish_group(1, MIXED)
    assert player.trained() == [[0, 1]]


def test_a_batch_is_not_topped_up_with_groups_that_are_too_old() -> None:
    player = pairs(max_resample_rounds=1, on_exhausted="keep_low_information")
    player.want(1)
    player.finish_group(0, MIXED)
    player.advance()  # the weights come late
    player.want(2)
    player.finish_group(1, SAME, version=0)
    player.finish_group(2, SAME, version=1)
    assert player.trained()[1] == [2]
    assert (1, "dropped", "no_spread") in player.left()


def test_a_reward_that_is_no_number_is_none_when_filters_judge_members_without_one() -> None:
    player = pairs(on_member_failure="judge", min_members=1, query=NO_FILTER)
    player.want(1)
    player.finish(0, math.nan)
    player.finish(1, 1.0)
    (group,) = player.batches[0].groups
    assert [rollout.reward for rollout in group.rollouts] == [None, 1.0]
    assert group.counted == (False, True)
    assert all(map(math.isfinite, player.metrics[0].values()))


def test_the_end_of_the_data_is_told_once_all_draws_are_answered_and_not_by_an_empty_batch_before() -> None:
    player = pairs(source=ListSource(), collect="in_order", async_generation_ratio=1.0)
    player.hold_draws = True
    player.want(1)
    player.answer_draw()  # nothing for this batch; the next one's draw is under way
    assert not player.batches
    player.answer_draw()
    assert [(len(batch.groups), batch.is_last) for batch in player.batches] == [(0, True)]


def test_a_guard_that_shrinks_the_batch_never_shrinks_it_to_nothing() -> None:
    player = pairs(guard=RatioGuard(0.0, policy="shrink"), async_generation_ratio=1.0)
    player.want(1)
    player.finish_group(0, SAME)
    player.finish_group(1, MIXED)
    assert player.trained() == [[1]]


def test_shares_of_domains_are_kept_where_ready_groups_of_one_fill_the_batch_and_more_may_run() -> None:
    player = pairs(
        source=DomainSource(["math", "code"]),
        domains=("math", "code"),
        domain_shares={"math": 1.0, "code": 1.0},
        max_additional_running_prompts=2,
        query=FilterConfig(type="mean_filter", filter_args={"threshold_down": 0.0}),
    )
    player.want(2)
    for _ in range(8):  # one domain fails again and again, so that more are launched ahead, which are of the other one
        of_domain = {launch.task.domain: launch.group_id for launch in player.pending.values()}
        if "code" in of_domain:
            player.finish_group(of_domain["code"], MIXED)
        player.finish_group(of_domain["math"], [0.0, 0.0])
        assert not player.batches
        assert not player.failures
    player.finish_group(next(launch.group_id for launch in player.pending.values() if launch.task.domain == "math"), MIXED)
    assert sorted(group.task.domain for group in player.batches[0].groups) == ["code", "math"]


def test_the_bound_on_groups_of_a_batch_is_not_used_up_by_those_of_later_batches() -> None:
    player = pairs(async_generation_ratio=1.0, max_groups_per_batch=2, collect="in_order")
    player.want(1)
    player.finish_group(1, SAME)  # of the next batch, and its replacements
    player.finish_group(0, MIXED)
    player.advance()
    while player.open_group_ids():
        player.finish_group(player.open_group_ids()[0], SAME)
    player.want(1)
    launched = player.scheduler.ledger.groups_launched
    player.finish_group(player.open_group_ids()[0], SAME)
    assert not player.failures
    assert player.scheduler.ledger.groups_launched > launched


# ---------------------------------------------------------------- runs that cannot fill their batch


def test_what_runs_when_the_guard_gives_up_stays_within_the_quota() -> None:
    player = pairs(guard=RatioGuard(0.0, policy="raise"))
    player.want(3)
    player.finish_group(0, SAME)
    assert player.failures
    buffer = player.scheduler.buffer
    assert buffer.running == 2
    assert buffer.running + buffer.committed <= buffer.quota
    player.finish_group(1, MIXED)
    player.want(3)
    assert buffer.quota == 3
    for group_id in (2, 3):
        player.finish_group(group_id, MIXED)
    assert player.trained() == [[1, 2, 3]]


def test_groups_held_to_top_a_batch_up_leave_when_the_run_gives_up() -> None:
    player = pairs(
        on_exhausted="keep_low_information", max_resample_rounds=3, quarantine_after=1, source=ListSource(make=lambda i: make_task("same"))
    )
    player.want(2)
    player.finish_group(0, SAME)  # held in reserve; its replacement is drawn
    player.lose_group(1)  # the only prompt goes into quarantine
    player.finish_group(2, SAME)
    assert player.failures
    assert [outcome for _, outcome, _ in player.left()][:1] == ["dropped"]
    assert not player.scheduler._spare


def test_a_batch_asked_for_again_after_a_resume_has_the_quota_of_one_batch() -> None:
    player = pairs(async_generation_ratio=1.0)
    player.want(2)
    fresh = Scheduler(player.scheduler.config, player.scheduler.filters)
    fresh.load_state_dict(player.scheduler.state_dict(), {f"t{i}": make_task(f"t{i}") for i in range(9)})
    fresh.handle(ev.BatchWanted(groups=2), 0.0)
    assert fresh.buffer.quota == 4


# ---------------------------------------------------------------- members, prompts and time


def test_attempts_of_a_lost_worker_have_failed_and_are_not_cancelled_as_well() -> None:
    player = MachinePlayer.make(group_size=3, max_response_rounds=1)
    player.want(1)
    player.lose_worker([0, 1], tokens=5)
    ledger = player.scheduler.ledger
    assert (ledger.attempts["failed"], ledger.attempts["cancelled"]) == (2, 1)
    assert ledger.tokens["failed"] == 10


def test_two_redundant_members_lost_at_once_are_never_launched_in_the_same_place() -> None:
    player = MachinePlayer.make(group_size=2, redundancy=1, max_response_rounds=3)
    player.want(1)
    for _ in range(3):
        player.lose_worker(list(player.pending)[:2])
        places = [launch.member_index for launch in player.pending.values() if launch.group_id == 0]
        assert len(places) == len(set(places))


def test_a_prompt_comes_back_once_in_each_epoch_also_when_epochs_overlap() -> None:
    prompts, task = Prompts(requeue=True, quarantine_after=None), make_task()
    assert [prompts.may_come_back(task, epoch) for epoch in (0, 1, 0, 1)] == [True, True, False, False]


def test_prompts_in_quarantine_that_come_back_do_not_count_as_all_that_is_left() -> None:
    scheduler = Scheduler(SchedulerConfig(group_size=2, quarantine_after=1), make_filters(group_size=2))
    bad, good = make_task("bad"), make_task("good")
    scheduler.prompts.quarantined["bad"] = "group_timeout"
    scheduler.prompts.back.update({("bad", 0), ("bad", 1), ("bad", 2)})  # of groups that were cancelled when it was not there yet
    scheduler.handle(ev.BatchWanted(groups=1), 0.0)
    for epoch in range(3):
        assert scheduler.handle(ev.TaskDrawn(task=bad, epoch=epoch), 0.0) == [ev.DrawTask()]
    assert len(scheduler.handle(ev.TaskDrawn(task=good, epoch=2), 0.0)) == 2


def test_that_nothing_was_left_before_prompts_came_back_does_not_end_the_data() -> None:
    player = pairs(source=ListSource([make_task("t0"), make_task("t1")]), max_response_rounds=1)
    player.want(2)
    player.hold_draws = True
    player.lose_group(0)
    player.lose_group(1)
    assert len(player.draws) == 2
    player.draws.clear()
    handle = player.scheduler.handle
    first = handle(ev.TasksExhausted(), 9.0)  # both prompts are put back, and drawn for again
    assert [type(one) for one in first] == [ev.ReturnTask, ev.ReturnTask, ev.DrawTask]
    second = handle(ev.TasksExhausted(), 9.0)  # was asked for before that
    assert [type(one) for one in second] == [ev.DrawTask]
    for task_id in ("t0", "t1"):
        assert len(handle(ev.TaskDrawn(task=make_task(task_id), epoch=0), 9.0)) == 2


@pytest.mark.parametrize("since", [2.904078757487, 30.336851093292, 1.0])
def test_a_stall_is_told_when_its_time_has_come_whatever_the_digits_of_the_clock(since: float) -> None:
    scheduler = Scheduler(SchedulerConfig(group_size=2, stall_warning_s=2.0), make_filters(group_size=2))
    wake = next(one for one in scheduler.handle(ev.BatchWanted(groups=1), since) if isinstance(one, ev.WakeAt))
    scheduler.handle(ev.TaskDrawn(task=make_task(), epoch=0), since)
    told = scheduler.handle(ev.ClockTick(), wake.when)
    assert [type(one) for one in told] == [ev.Warn], "asked to be woken again at the same time, for ever"


def test_a_launch_is_progress_after_which_no_stall_is_told() -> None:
    player = pairs(stall_warning_s=5.0)
    player.hold_draws = True
    player.want(1)
    player.now += 4.0
    player.answer_draw()  # the source was slow
    player.tell(ev.ClockTick(), 0.5)
    assert not player.warnings
    player.sleep(5.0)
    assert "since 5" in player.warnings[0]


# ---------------------------------------------------------------- the shell


class Journal:
    def __init__(self) -> None:
        self.records: list[GroupRecord] = []
        self.warnings: list[str] = []

    def group(self, record: GroupRecord) -> None:
        self.records.append(record)

    def event(self, level: str, message: str) -> None:
        self.warnings.append(message)


class Scorer:
    async def score(self, task: Task, response: str) -> Score:
        return Score(reward=1.0)

    async def close(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


def shell_of(engine: NullEngine, loop: RolloutLoop | None = None, query: FilterConfig = STD_FILTER, **settings: object) -> LocalShell:
    config = SchedulerConfig(**{"group_size": 2, "has_user_loop": loop is not None, **settings})  # type: ignore[arg-type]
    return LocalShell(
        scheduler=Scheduler(config, make_filters(query, group_size=2)),
        source=ListSource(make=lambda i: make_task(f"t{i}")),
        engine=engine,
        scorer=Scorer(),
        journal=Journal(),
        decode=lambda token_ids: "",
        response_length=8,
        temperature=1.0,
        user_loop=loop,
    )


def test_tokens_of_members_whose_cancel_was_under_way_when_the_run_gave_up_are_accounted_for() -> None:
    """One tick ends two groups by their deadline: with the first the run gives up, and the cancels of the second are still to be done."""

    async def main() -> None:
        engine = NullEngine(answers(lengths=(8, 8), latency_s=(100.0, 100.0)))
        shell = shell_of(engine, group_timeout_s=50.0, max_resample_rounds=1, collect="in_order", async_generation_ratio=1.0)
        with pytest.raises(ResampleError, match="max_resample_rounds"):
            await shell.next_batch(1)
        await shell.close()
        assert shell.scheduler.ledger.tokens["cancelled"] == 16
        assert shell.scheduler.ledger.total_tokens == engine.sampled_tokens("train")

    run(main())


def test_a_batch_that_comes_in_the_moment_of_a_cancel_is_there_for_the_next_call() -> None:
    async def main() -> None:
        shell = shell_of(NullEngine(answers(latency_s=(1.0, 1.0))), fill="shrink", query=NO_FILTER)
        waiting = asyncio.ensure_future(shell.next_batch(1))
        shell._on_change = lambda: None if shell.scheduler.filling is not None else waiting.cancel()  # the batch is there, nobody has it
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        batch, _ = await shell.next_batch(1)
        assert len(batch.groups) == 1
        await shell.close()

    run(main())


def test_a_loop_that_is_cancelled_before_it_began_has_ended() -> None:
    class Idle(RolloutLoop):
        async def run(self, context: LoopContext) -> Sequence[Rollout] | None:
            await asyncio.sleep(1000.0)
            return None

    async def main() -> None:
        shell = shell_of(NullEngine(), Idle())
        waiting = asyncio.ensure_future(shell.next_batch(2))
        await asyncio.sleep(0)  # the batch is asked for and its loops are made; none has begun
        await shell.close()
        await asyncio.wait([waiting])
        assert shell.loop_metrics()["loops/running"] == 0
        assert not [text for text in shell.journal.warnings if "did not end" in text]  # type: ignore[attr-defined]

    run(main())
