"""Reports about stopping, deadlines and full queues, on the whole shell: engine, scorer and machine on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from sluice.config.models import FilterConfig
from sluice.errors import ResampleError
from sluice.execution import LocalShell
from sluice.execution.clock import run
from sluice.generation import Answer, GenerationRequest, NullEngine
from sluice.rewards.base import Score
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.tasks.domain_tasks import DomainTasks
from sluice.tasks.task_list import TaskList
from sluice.types import EMPTY, Failure, Task
from tests.execution.test_shell import FunctionScorer, ListJournal, advance, everything_left, make_shell, reward
from tests.fakes import NO_FILTER, STD_FILTER, make_filters, make_task


def answer(latency_s: float = 0.1, tokens: int = 4, error: str | None = None) -> Answer:
    return Answer(token_ids=np.arange(tokens), inference_logprobs=np.zeros(tokens, dtype=np.float32), latency_s=latency_s, error=error)


def latencies(*of_requests: float, then: float = 0.1) -> NullEngine:
    """An engine whose first requests take these seconds each."""
    return NullEngine(lambda request: answer(of_requests[request.request_id] if request.request_id < len(of_requests) else then))


def reasons(shell: LocalShell) -> list[tuple[int, str, str]]:
    return [(record.group_id, record.outcome, record.reason) for record in shell.journal.records]  # type: ignore[attr-defined]


class ByTask(FunctionScorer):
    """Scores the responses to each task 0, 1, 0, 1, ...; by the task and the number of the call after so many seconds, or otherwise."""

    def __init__(self, by_task: Callable[[str, int], Score | float] = lambda task_id, call: 0.0) -> None:
        super().__init__(lambda call: reward(0.0))
        self.by_task = by_task
        self.of_task: Counter[str] = Counter()

    async def score(self, task: Task, response: str) -> Score:
        self.calls += 1
        number = self.of_task[task.task_id]
        self.of_task[task.task_id] += 1
        found = self.by_task(task.task_id, self.calls - 1)
        if isinstance(found, Score):
            return found
        try:
            await asyncio.sleep(found)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return reward(float(number % 2))


# ---------------------------------------------------------------- stopping


def test_case_62_while_the_trainer_steps_the_stop_does_not_wait_for_a_judge_that_takes_a_minute() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        scorer = ByTask(lambda task_id, call: 0.0 if task_id in ("t0", "t1") else 60.0)
        shell = make_shell(group_size=2, engine=latencies(), scorer=scorer, async_generation_ratio=1.0)
        batch, _ = await shell.next_batch(2)
        assert [group.task.task_id for group in batch.groups] == ["t0", "t1"]
        await asyncio.sleep(0.2)  # the next groups are generated, their judge sits
        assert scorer.calls == 8
        advance(shell, 1)
        before = loop.time()
        await shell.close()
        assert loop.time() - before < 1.0
        assert scorer.cancelled == 4
        everything_left(shell)

    run(main())


def test_case_62_a_redundant_member_with_a_slow_judge_does_not_hold_its_group_up() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        scorer = ByTask(lambda task_id, call: 60.0 if call == 0 else 0.0)
        shell = make_shell(group_size=2, redundancy=1, engine=latencies(), scorer=scorer)
        batch, _ = await shell.next_batch(1)
        assert loop.time() < 1.0
        assert [rollout.member_index for rollout in batch.groups[0].rollouts] == [1, 2]
        await asyncio.sleep(0)
        assert scorer.cancelled == 1
        advance(shell, 1)
        await shell.close()
        assert shell.scheduler.ledger.attempts["cancelled"] == 1
        everything_left(shell)

    run(main())


@pytest.mark.parametrize("cancel_latency", [0.0, 0.3, 1.5])
def test_case_66_of_six_launched_for_four_two_are_cancelled_and_the_next_step_uses_all_six_places(cancel_latency: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        slow = (1.0, 1e6, 1.0, 1.0, 1e6, 1.0)
        engine = NullEngine(
            lambda request: answer(slow[request.request_id] if request.request_id < 6 else 1.0),
            max_slots=6,
            cancel_latency_s=cancel_latency,
        )
        shell = make_shell(group_size=4, redundancy=2, query=NO_FILTER, engine=engine)
        batch, _ = await shell.next_batch(1)
        assert loop.time() == pytest.approx(1.0)
        assert [rollout.member_index for rollout in batch.groups[0].rollouts] == [0, 2, 3, 5]
        advance(shell, 1)
        await asyncio.sleep(cancel_latency + 0.01)
        assert engine.open_requests == 0
        before = loop.time()
        await shell.next_batch(1)
        assert loop.time() - before == pytest.approx(1.0)  # nobody waited for a place
        advance(shell, 2)
        await shell.close()
        everything_left(shell)

    run(main())


# ---------------------------------------------------------------- time limits


def test_case_74_with_one_task_that_hangs_and_one_that_raises_two_of_four_prompts_make_the_batch() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def by_request(request: GenerationRequest) -> Answer:
            return answer(math.inf) if request.request_id == 0 else answer(0.05, error="boom" if request.request_id == 1 else None)

        shell = make_shell(
            group_size=1,
            query=NO_FILTER,
            engine=NullEngine(by_request, max_slots=2),
            source=TaskList([make_task(f"t{i}") for i in range(4)], seed=0, epochs=1, shuffle=False),  # type: ignore[arg-type]
            group_timeout_s=0.2,
            max_response_rounds=1,
            requeue=False,
        )
        batch, _ = await shell.next_batch(2)
        assert [group.task.task_id for group in batch.groups] == ["t2", "t3"]
        assert loop.time() < 0.5
        assert shell.scheduler.ledger.rejected_groups == {("invalid", "group_timeout"): 1, ("invalid", "response_retries"): 1}
        assert shell.scheduler.ledger.rejected_members == {"engine_error": 1}
        advance(shell, 1)
        await shell.close()
        everything_left(shell)

    run(main())


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_case_76_one_deadline_holds_for_generation_scoring_and_retries_together(retries: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended: list[float] = []

        class Journal(ListJournal):
            def group(self, record: object) -> None:
                super().group(record)  # type: ignore[arg-type]
                ended.append(loop.time())

        failing = 0.1 * retries
        engine = NullEngine(lambda request: answer(0.1, error="boom") if request.request_id < retries else answer(0.9 - failing))
        shell = make_shell(
            group_size=1,
            query=NO_FILTER,
            engine=engine,
            scorer=ByTask(lambda task_id, call: 0.9),
            group_timeout_s=1.0,
            max_resample_rounds=1,
        )
        shell.journal = Journal()
        with pytest.raises(ResampleError, match="group_timeout 1"):
            await shell.next_batch(1)
        assert ended == [pytest.approx(1.0)]
        await shell.close()
        everything_left(shell)

    run(main())


@pytest.mark.parametrize(("limit", "in_time"), [(1.79, False), (1.81, True)])
def test_case_76_a_group_that_needs_just_less_than_the_limit_is_left_alone(limit: float, in_time: bool) -> None:
    async def main() -> None:
        shell = make_shell(
            group_size=1, query=NO_FILTER, engine=latencies(then=0.9), scorer=ByTask(lambda task_id, call: 0.9), group_timeout_s=limit,
            max_resample_rounds=1,
        )  # fmt: skip
        if in_time:
            batch, _ = await shell.next_batch(1)
            assert len(batch.groups) == 1
        else:
            with pytest.raises(ResampleError, match="group_timeout"):
                await shell.next_batch(1)
        await shell.close()
        everything_left(shell)

    run(main())


def test_case_84_a_member_that_never_returns_is_stopped_and_the_step_completes_with_another_prompt() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        shell = make_shell(group_size=2, engine=latencies(0.1, 0.1, 0.1, math.inf), scorer=ByTask(), group_timeout_s=5.0)
        batch, _ = await shell.next_batch(2)
        assert [group.task.task_id for group in batch.groups] == ["t0", "t2"]
        assert loop.time() == pytest.approx(5.1)
        assert reasons(shell) == [(1, "dropped", "group_timeout")]
        advance(shell, 1)
        await shell.close()
        everything_left(shell)

    run(main())


def test_a_stall_is_told_while_it_lasts() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        told: list[tuple[float, str]] = []
        shell = make_shell(group_size=2, engine=latencies(100.0, 100.0), scorer=ByTask(), stall_warning_s=30.0)
        shell._on_warning = lambda text: told.append((loop.time(), text))
        await shell.next_batch(1)
        ((when, text),) = told
        assert when == pytest.approx(30.0)
        assert "Waiting for 2 members of 1 groups" in text
        await shell.close()

    run(main())


# ---------------------------------------------------------------- nobody takes what is ready


def test_case_92_with_nobody_to_take_the_batch_members_finish_the_loop_stays_free_and_the_stop_returns() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        beats: list[float] = []

        async def heart() -> None:
            while True:
                beats.append(loop.time())
                await asyncio.sleep(0.05)

        beating = asyncio.ensure_future(heart())
        shell = make_shell(group_size=1, query=NO_FILTER, engine=latencies(0.3, 0.6, 0.7, 0.8), async_generation_ratio=1.0)
        waiting = asyncio.ensure_future(shell.next_batch(1))
        await asyncio.sleep(0.1)
        waiting.cancel()  # the consumer is gone; a batch becomes ready for nobody, then further groups
        await asyncio.sleep(1.0)
        assert shell.scheduler.buffer.committed == 1
        before = loop.time()
        await shell.close()
        assert loop.time() - before < 1.0
        assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 0.1
        beating.cancel()
        everything_left(shell)

    run(main())


def test_case_92_a_batch_that_became_ready_for_nobody_is_there_for_whoever_asks_next() -> None:
    async def main() -> None:
        shell = make_shell(group_size=1, query=NO_FILTER, engine=latencies(0.3))
        waiting = asyncio.ensure_future(shell.next_batch(1))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.sleep(1.0)
        batch, _ = await shell.next_batch(1)
        assert [group.group_id for group in batch.groups] == [0]
        advance(shell, 1)
        await shell.close()
        everything_left(shell)

    run(main())


# ---------------------------------------------------------------- sources by domain


@pytest.mark.parametrize("mix_on", ["kept", "drawn"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("sizes", [(1, 9), (9, 1), (2, 6), (5, 5)])
def test_domains_that_end_at_different_times_are_trained_to_their_last_prompt(sizes: tuple[int, int], ratio: float, mix_on: str) -> None:
    async def main() -> list[str]:
        shares = {"math": 0.5, "code": 0.5}
        tasks = [make_task(f"{domain}{i}", domain) for domain, size in zip(shares, sizes, strict=True) for i in range(size)]
        config = SchedulerConfig(group_size=2, domain_shares=shares, async_generation_ratio=ratio, mix_on=mix_on)  # type: ignore[arg-type]
        shell = LocalShell(
            scheduler=Scheduler(config, make_filters(STD_FILTER, group_size=2, domains=shares)),
            source=DomainTasks(tasks, shares, seed=0, epochs=1),
            engine=latencies(),
            scorer=ByTask(),
            journal=ListJournal(),
            decode=str,
            response_length=8,
            temperature=1.0,
        )
        trained: list[str] = []
        for step in range(1, 12):
            batch, _ = await shell.next_batch(4)
            trained += [group.task.task_id for group in batch.groups]
            advance(shell, step)
            if batch.is_last:
                break
        await shell.close()
        everything_left(shell)
        assert len(trained) == len(tasks)
        return trained

    assert len(set(run(main()))) == sum(sizes)


def test_prompts_in_quarantine_are_passed_over_in_every_domain() -> None:
    async def main() -> None:
        shares = {"math": 0.5, "code": 0.5}
        tasks = [make_task(f"{domain}{i}", domain) for domain in shares for i in range(3)]
        config = SchedulerConfig(group_size=2, domain_shares=shares, max_response_rounds=1, quarantine_after=1, requeue=False)
        broken = Score(reward=None, failure=Failure(cause="infrastructure", reason="reward_error", detail="no"), metrics=EMPTY)
        shell = LocalShell(
            scheduler=Scheduler(config, make_filters(STD_FILTER, group_size=2, domains=shares)),
            source=DomainTasks(tasks, shares, seed=0, shuffle=False),
            engine=latencies(),
            scorer=ByTask(lambda task_id, call: broken if task_id in ("math0", "code1") else 0.0),
            journal=ListJournal(),
            decode=str,
            response_length=8,
            temperature=1.0,
        )
        trained: list[str] = []
        for step in range(1, 7):
            batch, _ = await shell.next_batch(4)
            trained += [group.task.task_id for group in batch.groups]
            advance(shell, step)
        await shell.close()
        everything_left(shell)
        assert set(trained) == {"math1", "math2", "code0", "code2"}
        assert shell.scheduler.prompts.quarantined.keys() == {"math0", "code1"}
        assert shell.scheduler.prompts.skipped > 0

    run(main())


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("policy", ["finish", "restart", "continue"])
def test_whatever_new_weights_do_to_responses_the_ledger_equals_the_engine_and_ages_hold(policy: str) -> None:
    async def main() -> None:
        rng = np.random.default_rng(0)
        engine = NullEngine(
            lambda request: answer(float(rng.uniform(0.1, 2.0))),
            on_weight_update="continue" if policy == "continue" else "finish",
            cancel_latency_s=0.05,
        )
        shell = make_shell(
            group_size=2, query=NO_FILTER, engine=engine, async_generation_ratio=1.0, on_weight_update=policy, max_resample_rounds=50
        )
        for step in range(6):
            batch, metrics = await shell.next_batch(3)
            assert len(batch.groups) == 3
            assert all(step - min(group.start_step, group.policy_version) <= 1 for group in batch.groups)
            if policy == "restart":
                assert all(len({turn.policy_version for r in group.rollouts for turn in r.turns}) <= 2 for group in batch.groups)
            assert metrics["scheduler/off_policy_max"] <= 1
            await asyncio.sleep(0.5)  # the trainer steps
            advance(shell, step + 1)
        await shell.close()
        everything_left(shell)
        assert (shell.scheduler.ledger.attempts["cancelled"] > 6) == (policy == "restart")

    run(main())


def test_filters_of_the_configuration_are_those_of_the_shell() -> None:
    async def main() -> None:
        response = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})
        scorer = FunctionScorer(lambda call: reward(9.0) if call == 0 else reward(float(call % 2)))
        shell = make_shell(group_size=2, engine=latencies(), scorer=scorer)
        shell.scheduler.filters = make_filters(STD_FILTER, response, group_size=2)
        batch, _ = await shell.next_batch(1)
        assert len(batch.groups[0].rollouts) == 2
        assert shell.scheduler.ledger.attempts["rejected"] == 1
        await shell.close()

    run(main())
