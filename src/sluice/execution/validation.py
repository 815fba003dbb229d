"""Held-out evaluation: exactly one result per item and repeat, with no filter, no refill, no early stop.

An item whose score is missing (its verifier failed, or the engine failed on it twice) is unscored: counted apart, never a zero. An engine
that breaks as a whole ends the run: it refuses the second try of what it failed on, or it delivers nothing at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluice.errors import GenerationError, RequestRefused
from sluice.generation.base import Engine, Generation, GenerationRequest
from sluice.rewards.base import Scorer
from sluice.scheduler.groups import mix
from sluice.types import Failure, Task, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """What a held-out evaluation found, over all domains or for one."""

    items: int  # results asked for: tasks x repeats; scored, unscored and rejected ones together
    scored: int
    reward_sum: float
    unscored: Mapping[str, int]  # reason -> results without a reward
    truncated: int  # responses cut by the token limit; they are scored like any other
    sampled_tokens: int  # those of failed tries included
    details: Mapping[str, str] = field(default_factory=dict)  # reason -> the first failure of it, in words
    metrics: Mapping[str, float] = field(default_factory=dict)  # further scores: means over the scored results that have them
    would_reject: Mapping[str, int] = field(default_factory=dict)  # reason -> results of groups that the group filter drops
    rejected: int = 0  # results that were taken out for it, and are in nothing else; 0 where drops are only counted

    @property
    def accepted(self) -> int:
        """Results that were not rejected."""
        return self.items - self.rejected

    @property
    def mean(self) -> float | None:
        """Mean raw reward over the scored results that are accepted (accuracy when rewards are 0 or 1); None: there are none."""
        return self.reward_sum / self.scored if self.scored else None


MOST_OPEN: Final = 1024
"""Items generated or scored at a time: far more than engines have slots, far fewer than large data sets have items."""


class _Result(NamedTuple):
    """What became of one item in one repeat."""

    domain: str
    reward: float | None
    failure: Failure | None  # why there is no reward
    is_truncated: bool
    sampled_tokens: int  # of all tries


async def validate(
    tasks: Sequence[Task],
    *,
    engine: Engine,
    scorer: Scorer,
    decode: Callable[[TokenIds], str],
    response_length: int,
    temperature: float,
    repeats: int = 1,
    seed: int = 0,
    on_result: Callable[[int, int], None] | None = None,
) -> dict[str, ValidationResult]:
    """Generate and score every task `repeats` times; results by domain. temperature 0 is greedy.

    Raises what broke first when engine or scorer break as a whole: the engine takes no request any more, or it failed on every item, or on
    the first `MOST_OPEN` of them.
    """
    total = len(tasks) * repeats
    todo = ((index, repeat) for index in range(len(tasks)) for repeat in range(repeats))  # repeats together: engines share their prompt
    results: dict[int, _Result] = {}  # by request_id
    delivered = 0  # generations

    async def generate(request: GenerationRequest) -> tuple[Generation | GenerationError, int]:
        """What the engine delivers, or why it failed; and the tokens that it sampled."""
        nonlocal delivered
        try:
            handle = engine.submit(request)
        except RequestRefused as error:
            return error, 0
        try:
            generation = await handle.future
        except GenerationError as error:
            return error, handle.sampled_tokens
        except asyncio.CancelledError:
            worker = asyncio.current_task()
            if worker is None or worker.cancelling():
                handle.cancel()
                raise
            return GenerationError("the engine cancelled it"), handle.sampled_tokens
        delivered += 1
        return generation, len(generation.token_ids)

    async def evaluate(task: Task, request: GenerationRequest) -> _Result:
        generation, sampled = await generate(request)
        if isinstance(generation, GenerationError) and not isinstance(generation, RequestRefused):
            # Once more: an engine that broke as a whole takes nothing any more.
            generation, again = await generate(request)
            sampled += again
        if isinstance(generation, GenerationError):
            if not delivered and len(results) + 1 == min(total, MOST_OPEN):
                raise generation
            reason = "request_refused" if isinstance(generation, RequestRefused) else "engine_error"
            failure = Failure(cause="infrastructure", reason=reason, detail=f"{type(generation).__name__}: {generation}")
            return _Result(task.domain, None, failure, False, sampled)
        score = await scorer.score(task, decode(generation.token_ids))
        return _Result(task.domain, score.reward, score.failure, generation.finish_reason == "length", sampled)

    async def work() -> None:
        """Consumes items until none is left. Waits for the engine, then for the scorer; both answer, or break."""
        for index, repeat in todo:
            request_id = repeat * len(tasks) + index
            request = GenerationRequest(
                request_id=request_id,
                prompt_ids=tasks[index].prompt_ids,
                max_new_tokens=response_length,
                temperature=temperature,
                seed=mix(seed, request_id, repeat),
                purpose="validation",
            )
            results[request_id] = await evaluate(tasks[index], request)
            if on_result is not None:
                on_result(len(results), total)

    try:
        async with asyncio.TaskGroup() as group:
            for worker in range(min(total, MOST_OPEN)):
                group.create_task(work(), name=f"validate #{worker}")
    except BaseExceptionGroup as broken:  # a thousand items break for the one reason
        first = broken.exceptions[0]
        raise first from first.__cause__
    by_domain: dict[str, list[_Result]] = {}
    for _, result in sorted(results.items()):  # the same sums, to the last bit, whatever finished first
        by_domain.setdefault(result.domain, []).append(result)
    return {domain: _summarise(of_domain) for domain, of_domain in sorted(by_domain.items())}


def _summarise(results: Sequence[_Result]) -> ValidationResult:
    unscored: dict[str, int] = {}
    details: dict[str, str] = {}
    for result in results:
        if result.reward is None:
            reason = "reward_missing" if result.failure is None else result.failure.reason
            unscored[reason] = unscored.get(reason, 0) + 1
            details.setdefault(reason, "" if result.failure is None else result.failure.detail)
    return ValidationResult(
        items=len(results),
        scored=len(results) - sum(unscored.values()),
        reward_sum=float(sum(result.reward for result in results if result.reward is not None)),
        unscored=unscored,
        truncated=sum(result.is_truncated for result in results),
        sampled_tokens=sum(result.sampled_tokens for result in results),
        details=details,
    )
