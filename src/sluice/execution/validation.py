"""Held-out evaluation: exactly one result per item and repeat, with no filter, no refill, no early stop.

An item whose score is missing (its verifier failed) is unscored: counted apart, never a zero. An engine that breaks ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sluice.generation.base import Engine, Generation, GenerationRequest
from sluice.rewards.base import Scorer
from sluice.scheduler.groups import mix
from sluice.types import Failure, Task, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """What a held-out evaluation found, over all domains or for one."""

    items: int  # results asked for: tasks x repeats
    scored: int
    reward_sum: float
    unscored: Mapping[str, int]  # reason -> results without a reward
    truncated: int  # responses cut by the token limit; they are scored like any other
    sampled_tokens: int
    details: Mapping[str, str] = field(default_factory=dict)  # reason -> the first failure of it, in words

    @property
    def mean(self) -> float | None:
        """Mean raw reward over the scored results (accuracy when rewards are 0 or 1); None: nothing was scored."""
        return self.reward_sum / self.scored if self.scored else None


_Row: TypeAlias = tuple[float | None, Failure | None, Generation]  # reward, why there is none, what was generated


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

    Raises what broke first when engine or scorer break as a whole.
    """
    done = 0

    async def one(request_id: int, task: Task, repeat: int) -> tuple[str, _Row]:
        nonlocal done
        handle = engine.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_ids=task.prompt_ids,
                max_new_tokens=response_length,
                temperature=temperature,
                seed=mix(seed, request_id, repeat),
                purpose="validation",
            )
        )
        try:
            generation = await handle.future
        except asyncio.CancelledError:
            handle.cancel()
            raise
        score = await scorer.score(task, decode(generation.token_ids))
        done += 1
        if on_result is not None:
            on_result(done, len(tasks) * repeats)
        return task.domain, (score.reward, score.failure, generation)

    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(one(repeat * len(tasks) + index, task, repeat), name=f"validate {task.task_id} #{repeat}")
                for repeat in range(repeats)
                for index, task in enumerate(tasks)
            ]
    except BaseExceptionGroup as broken:  # a thousand items break for the one reason
        raise broken.exceptions[0] from None
    results: dict[str, list[_Row]] = {}
    for task in running:
        domain, row = task.result()
        results.setdefault(domain, []).append(row)
    return {domain: _summarise(rows) for domain, rows in sorted(results.items())}


def _summarise(rows: Sequence[_Row]) -> ValidationResult:
    unscored: dict[str, int] = {}
    details: dict[str, str] = {}
    for reward, failure, _ in rows:
        if reward is None:
            reason = "reward_missing" if failure is None else failure.reason
            unscored[reason] = unscored.get(reason, 0) + 1
            details.setdefault(reason, "" if failure is None else failure.detail)
    return ValidationResult(
        items=len(rows),
        scored=len(rows) - sum(unscored.values()),
        reward_sum=float(sum(reward for reward, _, _ in rows if reward is not None)),
        unscored=unscored,
        truncated=sum(generation.finish_reason == "length" for _, _, generation in rows),
        sampled_tokens=sum(len(generation.token_ids) for _, _, generation in rows),
        details=details,
    )
