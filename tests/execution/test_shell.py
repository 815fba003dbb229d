"""The shell on a virtual clock: batches arrive whole, cancels return at once, nothing is lost, failures are told where they are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.errors import FilterError, GenerationError, RecordError, ResampleError
from sluice.execution import LocalShell
from sluice.execution.clock import run
from sluice.generation import Answer, GenerationRequest, NullEngine, answers
from sluice.rewards.base import Score
from sluice.scheduler import GroupRecord, Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import EMPTY, Batch, Failure, Task
from tests.fakes import NO_FILTER, STD_FILTER, ListSource, make_filters, make_task


class ListJournal:
    def __init__(self) -> None:
        self.records: list[GroupRecord] = []
        self.events: list[tuple[str, str]] = []

    def group(self, record: GroupRecord) -> None:
        self.records.append(record)

    def event(self, level: str, message: str) -> None:
        self.events.append((level, message))


class FunctionScorer:
    """Scores by a function of the number of the call; an awaitable is awaited."""

    def __init__(self, answer: Callable[[int], Score | Awaitable[Score]]) -> None:
        self.answer = answer
        self.calls = 0
        self.cancelled = 0

    async def score(self, task: Task, response: str) -> Score:
        self.calls += 1
        answer = self.answer(self.calls - 1)
        if isinstance(answer, Score):
            return answer
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def close(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


def reward(value: float | None) -> Score:
    failure = None if value is not None else Failure(cause="infrastructure", reason="reward_timeout")
    return Score(reward=value, metrics=EMPTY, failure=failure)


def alternating(call: int) -> Score:
    return reward(float(call % 2))


def timed_answers(seed: int, tokens: int = 4) -> Callable[[GenerationRequest], Answer]:
    rng = np.random.default_rng(seed)

    def answer(request: GenerationRequest) -> Answer:
        n = int(rng.integers(1, tokens + 1))
        return Answer(
            token_ids=np.arange(n), inference_logprobs=np.full(n, -1.0, dtype=np.float32), latency_s=float(rng.lognormal(0.0, 1.0))
        )

    return answer


def make_shell(
    *,
    engine: NullEngine | None = None,
    scorer: FunctionScorer | None = None,
    query: FilterConfig = STD_FILTER,
    source: ListSource | None = None,
    **machine: object,
) -> LocalShell:
    config = SchedulerConfig(**{"group_size": 4, **machine})  # type: ignore[arg-type]
    return LocalShell(
        scheduler=Scheduler(config, make_filters(query, group_size=config.group_size)),
        source=source or ListSource(make=lambda i: make_task(f"t{i}")),
        engine=engine or NullEngine(answers(lengths=(1, 8))),
        scorer=scorer or FunctionScorer(alternating),
        journal=ListJournal(),
        decode=lambda token_ids: f"{len(token_ids)} tokens",
        response_length=8,
        temperature=1.0,
    )


def advance(shell: LocalShell, step: int, **useful: int) -> None:
    shell.engine.publish({}, step)
    shell.step_advanced(step, **useful)


def accounted(shell: LocalShell) -> bool:
    return shell.scheduler.ledger.total_tokens == shell.engine.sampled_tokens("train")


def everything_left(shell: LocalShell) -> None:
    ledger = shell.scheduler.ledger
    assert accounted(shell)
    assert ledger.tokens["open"] == 0
    assert shell.scheduler.open_groups == 0
    assert shell.scheduler.running_attempts == 0
    records = shell.journal.records  # type: ignore[attr-defined]
    assert len(records) == ledger.groups_launched
    assert sum(record.sampled_tokens for record in records) + ledger.tokens["late"] == ledger.total_tokens


def test_a_batch_arrives_whole_with_the_metrics_of_its_filling() -> None:
    async def main() -> None:
        shell = make_shell()
        batch, metrics = await shell.next_batch(3)
        assert len(batch.groups) == 3
        assert metrics["scheduler/collect_query_count"] == 3
        assert [rollout.turns[0].text for rollout in batch.groups[0].rollouts] == [
            f"{rollout.sampled_tokens} tokens" for rollout in batch.groups[0].rollouts
        ]
        advance(shell, 1, useful_groups=3, useful_tokens=10)
        await shell.close()
        assert accounted(shell)
        assert {record.outcome for record in shell.journal.records} == {"trained"}  # type: ignore[attr-defined]

    run(main())


def test_what_a_filter_is_shown_of_a_response_cannot_be_written_to() -> None:
    async def main() -> None:
        shell = make_shell(scorer=FunctionScorer(lambda call: Score(reward=float(call % 2), metrics={"length": 3.0})))
        batch, _ = await shell.next_batch(1)
        for rollout in batch.groups[0].rollouts:
            with pytest.raises(TypeError, match="does not support item assignment"):
                rollout.metrics["length"] = 0.0  # type: ignore[index]
            (turn,) = rollout.turns
            for array in (turn.prompt_ids, turn.token_ids, turn.inference_logprobs):
                with pytest.raises(ValueError, match="read-only"):
                    array[:] = 0
        await shell.close()

    run(main())


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), additional=st.integers(0, 3), good=st.integers(1, 3), cancel_latency=st.sampled_from([0.0, 0.3]))
def test_under_any_latencies_batches_are_exact_and_the_ledger_equals_the_engine(
    seed: int, additional: int, good: int, cancel_latency: float
) -> None:
    async def main() -> list[Batch]:
        rng = np.random.default_rng(seed)

        def answer(call: int) -> Score | Awaitable[Score]:
            kind = rng.integers(0, 10)
            if kind == 0:
                return reward(None)
            score = reward(float(rng.integers(0, good + 1) == 0))
            return score if kind < 5 else asyncio.sleep(float(rng.uniform(0, 3)), score)

        engine = NullEngine(timed_answers(seed), cancel_latency_s=cancel_latency)
        shell = make_shell(
            engine=engine,
            scorer=FunctionScorer(answer),
            max_additional_running_prompts=additional,
            max_resample_rounds=100,
            max_response_rounds=5,
        )
        batches = []
        for step in range(2):
            batch, _ = await shell.next_batch(3)
            batches.append(batch)
            advance(shell, step + 1)
        await shell.close()
        assert accounted(shell)
        assert engine.open_requests == 0
        assert shell.scheduler.open_groups == 0
        return batches

    batches = run(main())
    assert all(len(batch.groups) == 3 for batch in batches)
    assert all(len(set(group.rewards)) == 2 for batch in batches for group in batch.groups)
    ids = [group.group_id for batch in batches for group in batch.groups]
    assert len(set(ids)) == 6


def test_case_62_the_stop_does_not_wait_for_a_slow_judge_and_cancels_it() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def answer(request: GenerationRequest) -> Answer:
            # the groups launched ahead are generated first, and judged slowly
            latency = 0.5 + 0.01 * request.request_id if request.request_id < 4 else 0.1
            return Answer(token_ids=np.arange(4), inference_logprobs=np.zeros(4, dtype=np.float32), latency_s=latency)

        scorer = FunctionScorer(lambda call: alternating(call) if loop.time() >= 0.5 else asyncio.sleep(60.0, reward(1.0)))
        shell = make_shell(group_size=2, engine=NullEngine(answer), scorer=scorer, max_additional_running_prompts=4)
        shell.scheduler._judged, shell.scheduler._kept = 30, 5  # a poor acceptance rate so far: groups are launched ahead
        batch, _ = await shell.next_batch(2)
        assert len(batch.groups) == 2
        advance(shell, 1)
        await shell.close()
        assert loop.time() < 1.0
        assert scorer.cancelled == scorer.calls - 4 == 8
        assert accounted(shell)

    run(main())


def test_case_66_cancelled_members_free_their_engine_slots_before_the_next_step() -> None:
    async def main() -> None:
        def answer(request: GenerationRequest) -> Answer:
            slow = request.request_id >= 8
            return Answer(token_ids=np.arange(4), inference_logprobs=np.zeros(4, dtype=np.float32), latency_s=1e6 if slow else 1.0)

        engine = NullEngine(answer)
        shell = make_shell(engine=engine, max_additional_running_prompts=4)
        shell.scheduler._judged, shell.scheduler._kept = 30, 15
        await shell.next_batch(2)
        await asyncio.sleep(0)
        assert engine.open_requests == 0
        await shell.close()
        assert accounted(shell)

    run(main())


def test_tokens_sampled_after_the_cancel_was_acknowledged_are_late_and_the_sum_still_holds() -> None:
    async def main() -> None:
        engine = NullEngine(
            lambda request: Answer(
                token_ids=np.arange(8),
                inference_logprobs=np.zeros(8, dtype=np.float32),
                latency_s=1.0 if request.request_id < 4 else 10.0,
            ),
            cancel_latency_s=1.5,
        )
        shell = make_shell(engine=engine, max_additional_running_prompts=4)
        shell.scheduler._judged, shell.scheduler._kept = 30, 1
        await shell.next_batch(1)
        advance(shell, 1)
        await shell.close()
        assert shell.scheduler.ledger.tokens["late"] > 0
        assert accounted(shell)

    run(main())


def test_a_bound_that_is_reached_raises_where_the_batch_is_awaited_and_at_every_later_call() -> None:
    async def main() -> None:
        shell = make_shell(scorer=FunctionScorer(lambda call: reward(1.0)), max_resample_rounds=2)
        with pytest.raises(ResampleError, match="kept 0 of 4"):
            await shell.next_batch(2)
        with pytest.raises(ResampleError, match="kept 0 of 4"):
            await shell.next_batch(2)
        await shell.close()
        everything_left(shell)

    run(main())


def test_groups_kept_by_a_fill_that_failed_leave_with_a_record() -> None:
    async def main() -> None:
        shell = make_shell(scorer=FunctionScorer(lambda call: reward(float(call < 4 and call % 2))), max_resample_rounds=2)
        with pytest.raises(ResampleError, match="kept 1 of 3"):
            await shell.next_batch(2)
        await shell.close()
        everything_left(shell)
        assert {record.outcome for record in shell.journal.records} == {"dropped", "discarded"}  # type: ignore[attr-defined]

    run(main())


class RaisingFilter:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def judge(self, given: object) -> object:
        raise self.error


@pytest.mark.parametrize("which", ["query", "response"])
@pytest.mark.parametrize("error", [ZeroDivisionError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_filter_that_breaks_in_any_way_ends_the_run_and_every_token_is_accounted_for(which: str, error: BaseException) -> None:
    async def main() -> None:
        engine = NullEngine(timed_answers(1), cancel_latency_s=0.1)
        shell = make_shell(engine=engine)
        object.__setattr__(shell.scheduler.filters["math"], which, RaisingFilter(error))
        with pytest.raises((FilterError, type(error))):
            await shell.next_batch(3)
        await shell.close()
        everything_left(shell)

    run(main())


def test_the_first_failure_of_each_kind_is_told_in_words_and_the_rest_are_counted() -> None:
    async def main() -> None:
        failure = Failure(cause="infrastructure", reason="reward_error", detail="ValueError: no digits (verifier.py:12)")
        shell = make_shell(scorer=FunctionScorer(lambda call: Score(reward=None, failure=failure)), max_resample_rounds=2)
        with pytest.raises(ResampleError, match=r"reward_error \d+; first reward_error in domain 'math': ValueError: no digits"):
            await shell.next_batch(1)
        await shell.close()
        warnings = [message for _, message in shell.journal.events]  # type: ignore[attr-defined]
        assert len(warnings) == 1
        assert "ValueError: no digits (verifier.py:12)" in warnings[0]
        everything_left(shell)

    run(main())


def test_a_member_whose_generation_fails_is_replaced_and_counted() -> None:
    async def main() -> None:
        def answer(request: GenerationRequest) -> Answer:
            error = "out of memory" if request.request_id == 1 else None
            return Answer(token_ids=np.arange(2), inference_logprobs=np.zeros(2, dtype=np.float32), latency_s=1.0, error=error)

        shell = make_shell(engine=NullEngine(answer))
        batch, _ = await shell.next_batch(1)
        assert sorted(rollout.attempt_id for rollout in batch.groups[0].rollouts) == [0, 2, 3, 4]
        assert shell.scheduler.ledger.attempts["failed"] == 1
        advance(shell, 1)
        await shell.close()
        assert accounted(shell)

    run(main())


def test_an_engine_that_has_stopped_ends_the_run_with_its_reason() -> None:
    async def main() -> None:
        engine = NullEngine(timed_answers(0))
        shell = make_shell(engine=engine)
        waiting = asyncio.ensure_future(shell.next_batch(2))
        await asyncio.sleep(0.01)
        engine.break_down(MemoryError("no slot left"))
        with pytest.raises(GenerationError, match="no slot left"):
            await waiting
        await shell.close()

    run(main())


def test_a_scorer_with_a_bug_ends_the_run_with_its_error() -> None:
    async def main() -> None:
        def answer(call: int) -> Score:
            raise ZeroDivisionError("scorer bug")

        shell = make_shell(scorer=FunctionScorer(answer))
        with pytest.raises(ZeroDivisionError, match="scorer bug"):
            await shell.next_batch(1)
        await shell.close()

    run(main())


def test_a_filter_that_raises_ends_the_run_with_the_story_of_the_group() -> None:
    async def main() -> None:
        shell = make_shell(query=FilterConfig(type="std_filter", metric="accuracy"))
        with pytest.raises(FilterError, match=r"accuracy[\s\S]*group 0, task 't0'"):
            await shell.next_batch(3)
        await shell.close()
        everything_left(shell)

    run(main())


def test_closing_in_the_middle_cancels_everything_and_returns_the_tasks() -> None:
    async def main() -> None:
        source = ListSource(make=lambda i: make_task(f"t{i}"))
        shell = make_shell(engine=NullEngine(timed_answers(3)), source=source)
        waiting = asyncio.ensure_future(shell.next_batch(4))
        await asyncio.sleep(0.2)
        await shell.close()
        await shell.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert sorted(source.returned) == sorted(source.drawn)
        assert accounted(shell)

    run(main())


def test_the_end_of_the_data_gives_the_rest_and_then_nothing() -> None:
    async def main() -> None:
        shell = make_shell(source=ListSource(make_task(f"t{i}") for i in range(3)))
        batch, _ = await shell.next_batch(2)
        advance(shell, 1)
        rest, _ = await shell.next_batch(2)
        assert (len(batch.groups), len(rest.groups), rest.is_last) == (2, 1, True)
        await shell.close()

    run(main())


def test_what_breaks_after_the_last_batch_is_raised_when_the_shell_is_closed_and_only_once() -> None:
    class FullJournal(ListJournal):
        def group(self, record: GroupRecord) -> None:
            raise RecordError("the disk is full")

    async def main() -> None:
        shell = make_shell()
        await shell.next_batch(2)
        shell.journal = FullJournal()
        advance(shell, 1)
        with pytest.raises(RecordError, match="the disk is full"):
            await shell.close()
        await shell.close()

    run(main())


def test_groups_of_one_without_a_filter_fill_a_batch() -> None:
    async def main() -> None:
        shell = make_shell(group_size=1, query=NO_FILTER)
        batch, _ = await shell.next_batch(5)
        assert len(batch.groups) == 5
        await shell.close()

    run(main())


def test_with_restart_a_response_that_ends_between_the_update_and_its_news_is_begun_anew() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = NullEngine(answers(lengths=(8, 8), latency_s=(2.0, 2.0)), on_weight_update="restart")
        shell = make_shell(group_size=2, engine=engine, query=NO_FILTER, async_generation_ratio=1.0, on_weight_update="restart")
        loop.call_later(1.0, engine.publish, {}, 1)  # in the middle of the first responses, and the shell is not told
        batch, _ = await shell.next_batch(1)
        assert all(rollout.turns[0].token_versions is None for group in batch.groups for rollout in group.rollouts)
        assert batch.groups[0].policy_version == 1
        assert loop.time() == 4.0
        assert shell.scheduler.ledger.tokens["cancelled"] == 4 * 8
        shell.tell(ev.StepAdvanced(step=1))
        await shell.close()
        everything_left(shell)

    run(main())
