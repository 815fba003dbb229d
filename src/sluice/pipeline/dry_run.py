"""One group of one task of each domain, generated, scored and judged as a run would, without a machine: what `sluice doctor` looks at."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice.config import RlvrConfig
from sluice.execution.member import single_turn_rollout
from sluice.filters import DomainFilters
from sluice.generation import Engine, GenerationRequest
from sluice.pipeline.loop_thread import LoopThread
from sluice.pipeline.resume import check_memory
from sluice.pipeline.rlvr import RlvrJob
from sluice.rewards import Scorer, build_scorer
from sluice.types import Group, Rollout, Task, TokenIds, Verdict

CLOSE_S = 15.0  # most seconds for stopping the workers


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """One group, generated, scored and judged, and nothing trained."""

    task_id: str
    domain: str
    prompt: str
    responses: tuple[str, ...]
    rewards: tuple[float | None, ...]
    failures: tuple[str, ...]  # why responses have no reward, each kind once
    verdict: Verdict
    seconds: Mapping[str, float]  # by part


def _verdict(filters: DomainFilters, group: Group) -> Verdict:
    """What a run would make of a group whose rejected members could not be replaced."""
    for rollout in group.rollouts:
        if rollout.reward is None:
            return Verdict.dropped("incomplete", "invalid", "scheduler")
        if filters.response is not None and not (verdict := filters.response.judge(rollout)).keep:
            return verdict
    return filters.query.judge(group)


def dry_run(config: RlvrConfig) -> tuple[DryRun, ...]:
    """Generate, score and judge one group of the first task of each domain, without trainer and without a run folder.

    Raises:
        ConfigError, TaskError, SluiceError: as `train` would.
    """
    started = time.monotonic()
    job = RlvrJob.build(config, lambda text: None)
    load_s = time.monotonic() - started
    first: dict[str, Task] = {}
    for task in job.tasks.train.tasks:
        first.setdefault(task.domain, task)
    try:
        check_memory(job)
        with LoopThread(threading.Event()) as loop:
            scorer = loop.do(lambda: build_scorer(config.rewards, config.reward_pool))
            try:
                return tuple(_dry_run_of(task, config, job, loop, scorer, load_s) for task in first.values())
            finally:
                loop.run(scorer.close(), CLOSE_S)
    finally:
        job.engine.close()


def _dry_run_of(task: Task, config: RlvrConfig, job: RlvrJob, loop: LoopThread, scorer: Scorer, load_s: float) -> DryRun:
    seconds = {"load": load_s}
    rollouts, group = loop.run(
        one_group(config, task, engine=job.engine, scorer=scorer, decode=job.decode, seconds=seconds), timeout_s=600.0
    )
    started = time.monotonic()
    verdict = _verdict(job.filters[task.domain], group)
    seconds["judge"] = time.monotonic() - started
    return DryRun(
        task_id=task.task_id,
        domain=task.domain,
        prompt=task.prompt,
        responses=tuple(rollout.turns[0].text for rollout in rollouts),
        rewards=tuple(rollout.reward for rollout in rollouts),
        failures=tuple({f.reason: f"{f.reason}: {f.detail}" for rollout in rollouts if (f := rollout.failure) is not None}.values()),
        verdict=verdict,
        seconds=seconds,
    )


async def one_group(
    config: RlvrConfig, task: Task, *, engine: Engine, scorer: Scorer, decode: Callable[[TokenIds], str], seconds: dict[str, float]
) -> tuple[tuple[Rollout, ...], Group]:
    """The rollouts of one group and the group they make; adds the seconds of both parts to `seconds`."""
    started = time.monotonic()
    handles = [
        engine.submit(
            GenerationRequest(
                request_id=index,
                prompt_ids=task.prompt_ids,
                max_new_tokens=config.response_length,
                temperature=config.engine.temperature,
                seed=config.seed + index,
            )
        )
        for index in range(config.num_return_sequences_in_group)
    ]
    generations = await asyncio.gather(*(handle.future for handle in handles))
    seconds["generate"] = time.monotonic() - started
    started = time.monotonic()
    texts = [decode(generation.token_ids) for generation in generations]
    scores = await asyncio.gather(*(scorer.score(task, text) for text in texts))
    seconds["score"] = time.monotonic() - started
    rollouts = tuple(
        single_turn_rollout(attempt_id=index, group_id=0, member_index=index, task=task, generation=generation, text=text, score=score)
        for index, (generation, text, score) in enumerate(zip(generations, texts, scores, strict=True))
    )
    masks_truncated = config.resampling.truncated == "mask"
    counted = tuple(rollout.reward is not None and not (rollout.is_truncated and masks_truncated) for rollout in rollouts)
    return rollouts, Group(group_id=0, task=task, rollouts=rollouts, start_step=0, round=1, epoch=0, counted=counted)
