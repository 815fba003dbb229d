"""Scores in the caller's own thread: for tests and for verifiers that certainly end. Nothing here can stop one that does not."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.config.models import RewardConfig
from sluice.errors import ConfigError, RewardError, describe
from sluice.rewards.base import Score, Verifier
from sluice.rewards.build import build_verifier
from sluice.rewards.score import ScoreCounts, failed, run_verifier
from sluice.types import Task


class InlineScorer:
    """A `Scorer` without workers and without time limits (`reward_pool.workers: 0`)."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        """Build all verifiers. Raises `ConfigError` for a wrong setting and `RewardError` when one cannot be built."""
        self._verifiers: dict[str, Verifier] = {}
        for domain, config in rewards.items():
            try:
                self._verifiers[domain] = build_verifier(config.verifier)
            except ConfigError:
                raise
            except (Exception, SystemExit) as err:
                raise RewardError(f"the verifier of rewards.{domain} cannot be built: {describe(err)}") from err
        self._reward_keys = {domain: config.reward_key for domain, config in rewards.items()}
        self._counts = ScoreCounts()
        self._closed = False

    async def score(self, task: Task, response: str) -> Score:
        """Score one response, at once."""
        if task.domain not in self._verifiers:
            raise RewardError(unknown_domain(task, self._verifiers))
        self._counts.jobs += 1
        if self._closed:
            score = failed("pool_closed", "the run is ending")
        else:
            score = run_verifier(self._verifiers[task.domain], task, response, self._reward_keys[task.domain])
        self._counts.answered(score)
        return score

    async def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def metrics(self) -> dict[str, float]:
        """Totals since the start."""
        return {**self._counts.metrics(), "rewards/worker_losses": 0.0, "rewards/workers_alive": 0.0}


def unknown_domain(task: Task, known: Mapping[str, object]) -> str:
    """The message for a task whose domain has no reward settings."""
    return (
        f"task {task.task_id!r} belongs to the domain {task.domain!r}, `rewards` has {', '.join(sorted(known))} - "
        f"add it there, or map its label with tag_included"
    )
