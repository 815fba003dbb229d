"""Held-out evaluation by trajectories: exactly one result per episode and repeat, with no refill and no early stop.

A result whose environment or engine failed twice is unscored: counted apart, never a zero. A group filter judges the repeats of an
episode; what it would drop is counted, and taken out of the mean only where that is asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from sluice.errors import FilterError, GenerationError
from sluice.execution.trajectories import TrajectoryPlayer, rollout_of
from sluice.execution.trajectory import Trajectory
from sluice.execution.validation import ValidationResult
from sluice.generation.base import GenerationHandle
from sluice.scheduler.groups import mix
from sluice.types import Group, Rollout, Task, Verdict

TRIES = 2  # of one result: a fault of the machinery may pass


class GroupJudge(Protocol):
    """A query filter."""

    def judge(self, group: Group, /) -> Verdict:
        """Keep or drop."""


@dataclass(slots=True)
class _Episode:
    """One held-out episode and what its repeats came to."""

    task: Task
    rollouts: list[Rollout | None]  # by repeat
    tokens: int = 0  # of all tries
    verdict: Verdict | None = None  # None: nobody judges
    left: int = field(init=False)  # repeats to be played

    def __post_init__(self) -> None:
        self.left = len(self.rollouts)


async def validate_trajectories(
    tasks: Sequence[Task],
    player: TrajectoryPlayer,
    *,
    repeats: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    group_filter: GroupJudge | None = None,
    filtering: Literal["record", "apply"] = "record",
    on_result: Callable[[int, int], None] | None = None,
) -> dict[str, ValidationResult]:
    """Play every episode `repeats` times, as many at once as the player has seats; results by domain. temperature 0 is greedy.

    Raises what is broken as a whole: the engine (also when it failed every result), the environments, or the filter (`FilterError`).
    """
    episodes = [_Episode(task, [None] * repeats) for task in tasks]
    total = len(tasks) * repeats
    todo = ((index, repeat) for index in range(len(tasks)) for repeat in range(repeats))  # repeats together: engines share their prompt
    numbers = count()
    done = 0

    async def work() -> None:
        """Consumes results to be played until none is left. Waits for a seat, the engine and the environment, which answer or break."""
        nonlocal done
        for index, repeat in todo:
            episode = episodes[index]
            rollout = None
            for _ in range(TRIES):
                trajectory = Trajectory(
                    player.table,
                    number=next(numbers),
                    seed=mix(seed, index, repeat),
                    env_seed=player.env_seed(episode.task),
                    temperature=temperature,
                    purpose="validation",
                    let_go=_forget,
                )
                await trajectory.play()
                episode.tokens += trajectory.sampled_tokens
                rollout = rollout_of(
                    trajectory, attempt_id=trajectory.number, group_id=index, member_index=repeat, task_id=episode.task.task_id
                )
                if trajectory.failure is None or trajectory.is_final:
                    break
            episode.rollouts[repeat] = rollout
            episode.left -= 1
            if group_filter is not None and not episode.left:
                episode.verdict = _judged(group_filter, index, episode)
            done += 1
            if on_result is not None:
                on_result(done, total)

    try:
        async with asyncio.TaskGroup() as group:
            for worker in range(min(total, player.table.seats.count)):
                group.create_task(work(), name=f"validate #{worker}")
    except BaseExceptionGroup as broken:  # many results break for the one reason
        first = broken.exceptions[0]
        raise first from first.__cause__
    by_domain: dict[str, list[_Episode]] = {}
    for episode in episodes:
        by_domain.setdefault(episode.task.domain, []).append(episode)
    results = {domain: _summarise(of_domain, filtering) for domain, of_domain in sorted(by_domain.items())}
    if total and sum(result.unscored.get("engine_error", 0) for result in results.values()) == total:
        detail = next(iter(results.values())).details["engine_error"]
        raise GenerationError(f"the engine failed every trajectory of an evaluation: {detail}")
    return results


def _forget(trajectory: Trajectory, handle: GenerationHandle, counted: int) -> None:
    """What an evaluation samples late is in no ledger; an error of it is nobody's."""
    handle.future.add_done_callback(lambda future: future.cancelled() or future.exception())


def _judged(group_filter: GroupJudge, index: int, episode: _Episode) -> Verdict:
    rollouts = tuple(_played(episode))
    group = Group(
        group_id=index,
        task=episode.task,
        rollouts=rollouts,
        start_step=0,
        round=1,
        epoch=0,
        counted=tuple([rollout.reward is not None for rollout in rollouts]),
    )
    try:
        return group_filter.judge(group)
    except Exception as error:
        raise FilterError(f"the group filter failed on the held-out episode {episode.task.task_id!r}: {error}") from error


def _played(episode: _Episode) -> Iterable[Rollout]:
    for rollout in episode.rollouts:
        assert rollout is not None
        yield rollout


def _summarise(episodes: Sequence[_Episode], filtering: Literal["record", "apply"]) -> ValidationResult:
    would_reject: Counter[str] = Counter()
    unscored: Counter[str] = Counter()
    details: dict[str, str] = {}
    scored: list[Rollout] = []
    rejected = truncated = 0
    for episode in episodes:
        if episode.verdict is not None and not episode.verdict.keep:
            would_reject[episode.verdict.reason] += len(episode.rollouts)
            if filtering == "apply":
                rejected += len(episode.rollouts)
                continue
        for rollout in _played(episode):
            truncated += rollout.is_truncated
            if rollout.failure is None:
                scored.append(rollout)
            else:
                unscored[rollout.failure.reason] += 1
                details.setdefault(rollout.failure.reason, rollout.failure.detail)
    return ValidationResult(
        items=sum(len(episode.rollouts) for episode in episodes),
        scored=len(scored),
        reward_sum=float(sum(rollout.reward for rollout in scored if rollout.reward is not None)),
        unscored=dict(unscored),
        truncated=truncated,
        sampled_tokens=sum(episode.tokens for episode in episodes),
        details=details,
        metrics=_means(scored),
        would_reject=dict(would_reject),
        rejected=rejected,
    )


def _means(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Mean of every metric over the rollouts that have it."""
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] += 1
    return {name: sums[name] / counts[name] for name in sorted(sums)}
