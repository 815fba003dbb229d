"""One group of one episode, played and judged as a run would: what `sluice doctor` looks at in an agentic recipe."""

from __future__ import annotations

import threading
import time
from typing import Final

from sluice.config import AgenticConfig
from sluice.environments import EnvironmentHost
from sluice.execution.trajectory_validation import validate_trajectories
from sluice.filters.base import QueryFilter
from sluice.pipeline.agentic import AgenticJob
from sluice.pipeline.dry_run import CLOSE_S, DryRun
from sluice.pipeline.loop_thread import LoopThread
from sluice.pipeline.resume import check_memory
from sluice.types import Group, Verdict

PLAY_S: Final = 600.0  # most seconds for the group: environments have limits of their own, an engine on a slow machine has none


class _Witness:
    """A group filter that keeps what it was shown."""

    def __init__(self, group_filter: QueryFilter) -> None:
        self._filter = group_filter
        self.group: Group | None = None
        self.verdict: Verdict | None = None

    def judge(self, group: Group, /) -> Verdict:
        """The filter's verdict."""
        self.group, self.verdict = group, self._filter.judge(group)
        return self.verdict


def dry_run_agentic(config: AgenticConfig) -> DryRun:
    """Play and judge one group of the first episode, without trainer and without a run folder.

    Raises:
        ConfigError, SluiceError: as `train` would.
    """
    started = time.monotonic()
    job = AgenticJob.build(config, lambda text: None)
    seconds = {"load": time.monotonic() - started}
    try:
        check_memory(job)
        with LoopThread(threading.Event()) as loop:
            return loop.run(_play(config, job, seconds), PLAY_S + CLOSE_S)
    finally:
        job.engine.close()


async def _play(config: AgenticConfig, job: AgenticJob, seconds: dict[str, float]) -> DryRun:
    started = time.monotonic()
    drawn = job.task_source.draw()
    assert drawn is not None, "episodes have no end"
    task, _ = drawn
    witness = _Witness(job.filters[task.domain].query)
    async with EnvironmentHost(config.environment, config.env_monitor) as host:
        await validate_trajectories(
            [task],
            job.new_player(host, config.seed),
            repeats=config.train_env_manager.group_size,
            temperature=config.engine.temperature,
            seed=config.seed,
            group_filter=witness,
        )
    seconds["play"] = time.monotonic() - started
    group, verdict = witness.group, witness.verdict
    assert group is not None, "every episode that was played is shown to the filter"
    assert verdict is not None
    first = group.rollouts[0].turns
    return DryRun(
        task_id=task.task_id,
        domain=task.domain,
        prompt=first[0].observation if first else "",
        responses=tuple(" | ".join(turn.action or "" for turn in rollout.turns) for rollout in group.rollouts),
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        failures=tuple({f.reason: f"{f.reason}: {f.detail}" for rollout in group.rollouts if (f := rollout.failure) is not None}.values()),
        verdict=verdict,
        seconds=seconds,
    )
