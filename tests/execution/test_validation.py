"""Held-out evaluation on a virtual clock: every item and repeat has exactly one result, whatever fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import GenerationError, RewardError
from sluice.execution import ValidationResult, validate
from sluice.execution.clock import run
from sluice.execution.validation import MOST_OPEN
from sluice.generation import Answer, GenerationRequest, NullEngine
from sluice.rewards.base import Score
from sluice.types import Failure, FinishReason, Task
from tests.fakes import make_task

LENGTH = 8  # longest response
Rewarding = Callable[[str], Score]  # from a task_id


def scored(reward: float | None, reason: str = "reward_error") -> Score:
    return Score(
        reward=reward, failure=None if reward is not None else Failure(cause="infrastructure", reason=reason, detail="it fell over")
    )


class TaskScorer:
    """Scores by the task; knows how often each was scored."""

    def __init__(self, score: Rewarding) -> None:
        self._score = score
        self.calls: Counter[str] = Counter()

    async def score(self, task: Task, response: str) -> Score:
        score = self._score(task.task_id)
        self.calls[task.task_id] += 1
        await asyncio.sleep(0.5)
        return score

    async def close(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


def answer(tokens: int = 3, *, latency_s: float = 1.0, error: str | None = None, finish_reason: FinishReason = "stop") -> Answer:
    logprobs = np.full(tokens, -1.0, dtype=np.float32)
    return Answer(token_ids=np.arange(tokens), inference_logprobs=logprobs, latency_s=latency_s, error=error, finish_reason=finish_reason)


class Tries:
    """Answers by request_id: the first so many tries at it fail."""

    def __init__(self, failing: Mapping[int, int] | None = None, *, otherwise: int = 0) -> None:
        self._failing = failing or {}
        self._otherwise = otherwise
        self.of: Counter[int] = Counter()

    def __call__(self, request: GenerationRequest) -> Answer:
        self.of[request.request_id] += 1
        fails = self.of[request.request_id] <= self._failing.get(request.request_id, self._otherwise)
        return answer(1 + request.request_id % 4, latency_s=1.0 + request.request_id % 3, error="out of memory" if fails else None)


def items(count: int, domains: Sequence[str] = ("math",)) -> list[Task]:
    return [make_task(f"v{k}", domains[k % len(domains)]) for k in range(count)]


def evaluate(tasks: Sequence[Task], engine: NullEngine, scorer: TaskScorer, **more: Any) -> dict[str, ValidationResult]:
    settings: dict[str, Any] = {"decode": str, "response_length": LENGTH, "temperature": 1.0, **more}
    return run(validate(tasks, engine=engine, scorer=scorer, **settings))


@given(
    count=st.integers(1, 12),
    repeats=st.integers(1, 3),
    domains=st.integers(1, 3),
    failing=st.dictionaries(st.integers(0, 35), st.integers(0, 3)),
    unscored=st.sets(st.integers(0, 11)),
)
def test_every_item_and_repeat_has_one_result_whatever_fails(
    count: int, repeats: int, domains: int, failing: dict[int, int], unscored: set[int]
) -> None:
    """One failure of the engine is made up for, two are an unscored item; nothing is generated for anything else; all tokens are told."""
    tries = Tries(failing)
    engine = NullEngine(tries)
    scorer = TaskScorer(lambda task_id: scored(None if int(task_id[1:]) in unscored else 0.5))
    lost = {request_id for request_id in range(count * repeats) if failing.get(request_id, 0) >= 2}
    tasks = items(count, ["math", "code", "law"][:domains])
    told: list[tuple[int, int]] = []
    if len(lost) == count * repeats:
        with pytest.raises(GenerationError, match="out of memory"):
            evaluate(tasks, engine, scorer, repeats=repeats)
        return
    results = evaluate(tasks, engine, scorer, repeats=repeats, on_result=lambda done, total: told.append((done, total)))
    expected = Counter(
        (tasks[k].domain, "engine_error" if repeat * count + k in lost else "reward_error" if k in unscored else "scored")
        for repeat in range(repeats)
        for k in range(count)
    )
    for domain, result in results.items():
        found = {**result.unscored, **({"scored": result.scored} if result.scored else {})}
        assert found == {why: number for (of, why), number in expected.items() if of == domain}
        assert result.items == result.scored + sum(result.unscored.values())
        assert result.mean == (0.5 if result.scored else None)
    assert sum(result.items for result in results.values()) == count * repeats
    assert told == [(done, count * repeats) for done in range(1, count * repeats + 1)]
    assert tries.of == {request_id: 2 if failing.get(request_id, 0) else 1 for request_id in range(count * repeats)}
    assert scorer.calls == +Counter(tasks[k].task_id for k in range(count) for r in range(repeats) if r * count + k not in lost)
    assert engine.sampled_tokens("validation") == sum(result.sampled_tokens for result in results.values())
    assert (engine.open_requests, engine.sampled_tokens("train")) == (0, 0)


def test_case_138_validation_has_one_result_per_item_and_repeat_and_refills_nothing() -> None:
    """Outcomes [1, 1], [0, 0], [1, 0] and failed: no group is dropped for its lack of spread, and the failed one is not sampled anew."""
    outcomes: dict[str, list[float | None]] = {"v0": [1.0, 1.0], "v1": [0.0, 0.0], "v2": [1.0, 0.0], "v3": [None, None]}
    scorer = TaskScorer(lambda task_id: scored(outcomes[task_id][scorer.calls[task_id] % 2]))
    tries = Tries()
    result = evaluate(items(4), NullEngine(tries), scorer, repeats=2)["math"]
    assert (result.items, result.scored, result.reward_sum, result.mean) == (8, 6, 3.0, 0.5)
    assert result.unscored == {"reward_error": 2}
    assert tries.of.total() == 8


def test_case_122_items_that_end_at_once_stay_in_the_denominator() -> None:
    """100 items, 20 end with their first token, 40 are right: 0.40, not 0.50."""
    engine = NullEngine(lambda request: answer(1 if request.request_id < 20 else 5))
    result = evaluate(items(100), engine, TaskScorer(lambda task_id: scored(float(int(task_id[1:]) >= 60))))["math"]
    assert (result.items, result.scored, result.mean) == (100, 100, 0.40)


def test_case_124_what_could_not_be_scored_is_no_wrong_answer() -> None:
    right_wrong_error = TaskScorer(lambda task_id: scored({"v0": 1.0, "v1": 0.0, "v2": None}[task_id], "judge_error"))
    result = evaluate(items(3), NullEngine(), right_wrong_error)["math"]
    assert (result.mean, result.scored, result.unscored, result.details) == (0.5, 2, {"judge_error": 1}, {"judge_error": "it fell over"})
    nothing = evaluate(items(3), NullEngine(), TaskScorer(lambda task_id: scored(None)))["math"]
    assert (nothing.mean, nothing.items, nothing.unscored) == (None, 3, {"reward_error": 3})


def test_an_item_on_which_the_engine_fails_twice_is_unscored_with_its_reason_and_the_others_go_on() -> None:
    result = evaluate(items(4), NullEngine(Tries({2: 9})), TaskScorer(lambda task_id: scored(1.0)))["math"]
    assert (result.items, result.scored, result.mean) == (4, 3, 1.0)
    assert result.unscored == {"engine_error": 1}
    assert result.details == {"engine_error": "GenerationError: out of memory"}


def test_a_request_that_the_engine_itself_cancels_counts_as_its_failure() -> None:
    engine = NullEngine(lambda request: answer(latency_s=5.0))
    submit = engine.submit

    def submit_and_lose(request: GenerationRequest) -> Any:
        handle = submit(request)
        if request.request_id == 1:
            asyncio.get_running_loop().call_later(1.0, handle.future.cancel)
        return handle

    engine.submit = submit_and_lose  # type: ignore[method-assign]
    result = evaluate(items(3), engine, TaskScorer(lambda task_id: scored(1.0)))["math"]
    assert (result.scored, result.unscored) == (2, {"engine_error": 1})
    assert result.details == {"engine_error": "GenerationError: the engine cancelled it"}


@pytest.mark.parametrize("count", [3, MOST_OPEN + 1])
def test_an_engine_that_breaks_ends_the_evaluation_with_its_reason_and_cause(count: int) -> None:
    """Some items are done by then; whether others still have to be asked for or not, the engine refuses the second try."""
    engine = NullEngine(lambda request: answer(latency_s=1.0 if request.request_id == 0 else 9.0))

    async def main() -> None:
        asyncio.get_running_loop().call_later(5.0, engine.break_down, MemoryError("no memory"))
        scorer = TaskScorer(lambda task_id: scored(1.0))
        await validate(items(count), engine=engine, scorer=scorer, decode=str, response_length=LENGTH, temperature=0.0)

    with pytest.raises(GenerationError, match="the engine stopped after MemoryError: no memory") as raised:
        run(main())
    assert isinstance(raised.value.__cause__, MemoryError)
    assert engine.open_requests == 0


def test_an_engine_that_fails_on_every_item_ends_the_evaluation_though_it_takes_requests() -> None:
    for count, most_tried in ((1, 1), (20, 20), (3 * MOST_OPEN, 2 * MOST_OPEN)):
        tries = Tries(otherwise=9)
        with pytest.raises(GenerationError, match="out of memory"):
            evaluate(items(count), NullEngine(tries), TaskScorer(lambda task_id: scored(1.0)))
        assert len(tries.of) <= most_tried


def test_a_scorer_that_breaks_ends_the_evaluation_with_its_one_reason_and_nothing_goes_on() -> None:
    def broken(task_id: str) -> Score:
        raise RewardError("no worker can be started")

    engine = NullEngine(lambda request: answer(latency_s=1.0 + request.request_id))
    with pytest.raises(RewardError, match="no worker can be started"):
        evaluate(items(20), engine, TaskScorer(broken))
    assert engine.sampled_tokens("validation") < 20 * 3


def test_an_evaluation_that_is_cancelled_cancels_what_is_open() -> None:
    engine = NullEngine(lambda request: answer(latency_s=60.0))

    async def main() -> None:
        scorer = TaskScorer(lambda task_id: scored(1.0))
        evaluation = validate(items(5), engine=engine, scorer=scorer, decode=str, response_length=LENGTH, temperature=0.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(evaluation, timeout=20.0)
        await asyncio.sleep(0.0)
        assert engine.open_requests == 0
        assert engine.sampled_tokens("validation") == 5  # a third of each

    run(main())


def test_a_large_evaluation_keeps_a_bounded_number_of_items_open() -> None:
    open_requests: list[int] = []
    open_tasks: list[int] = []

    def slowly(request: GenerationRequest) -> Answer:
        open_requests.append(engine.open_requests)
        open_tasks.append(len(asyncio.all_tasks()))
        return answer(latency_s=1.0 + request.request_id % 7)

    engine = NullEngine(slowly)
    result = evaluate(items(MOST_OPEN), engine, TaskScorer(lambda task_id: scored(1.0)), repeats=2)["math"]
    assert (result.items, result.scored) == (2 * MOST_OPEN, 2 * MOST_OPEN)
    assert max(open_requests) == MOST_OPEN - 1  # beside the one that is just asked for
    assert max(open_tasks) <= MOST_OPEN + 1


def test_repeats_of_an_item_are_asked_for_together_and_each_with_a_seed_of_its_own() -> None:
    asked: list[GenerationRequest] = []

    def noted(request: GenerationRequest) -> Answer:
        asked.append(request)
        return answer()

    evaluate(items(3), NullEngine(noted), TaskScorer(lambda task_id: scored(1.0)), repeats=2, seed=7)
    assert [request.request_id for request in asked] == [0, 3, 1, 4, 2, 5]
    assert len({request.seed for request in asked}) == 6


def test_what_an_evaluation_finds_does_not_depend_on_what_finishes_first() -> None:
    rewards = {f"v{k}": 0.1 * k + 1e-9 for k in range(50)}

    def found(latencies: Sequence[float]) -> dict[str, ValidationResult]:
        engine = NullEngine(lambda request: answer(latency_s=latencies[request.request_id]))
        return evaluate(items(50), engine, TaskScorer(lambda task_id: scored(rewards[task_id])))

    assert found([1.0 + k for k in range(50)]) == found([51.0 - k for k in range(50)])


def test_a_response_that_its_limit_cut_is_scored_and_counted() -> None:
    engine = NullEngine(lambda request: answer(LENGTH + 5 if request.request_id == 0 else 2))
    result = evaluate(items(2), engine, TaskScorer(lambda task_id: scored(1.0)))["math"]
    assert (result.scored, result.truncated, result.sampled_tokens) == (2, 1, LENGTH + 2)


def test_nothing_to_evaluate_has_no_result() -> None:
    assert evaluate([], NullEngine(), TaskScorer(lambda task_id: scored(1.0))) == {}
