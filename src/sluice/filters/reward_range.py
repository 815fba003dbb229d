"""Keep responses whose reward lies within a range."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.errors import FilterError
from sluice.filters.base import RolloutFilter
from sluice.filters.group_rewards import INCOMPLETE
from sluice.types import Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class RewardRange(RolloutFilter):
    """Keeps a response when low <= reward <= high; a missing bound leaves that side open. A response without a reward is `incomplete`."""

    name = "reward_range"
    reads_metric = True

    low: float | None = None  # inclusive
    high: float | None = None  # inclusive

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise self.context.wrong("low or high", "given", "neither", "set at least one bound")
        if self.low is not None and self.high is not None and self.high < self.low:
            raise self.context.wrong("high", f"at least low ({self.low})", self.high, "swap them or drop one")

    def rule(self, rollout: Rollout) -> Verdict:
        """Drop outside the range."""
        metric = self.context.metric
        if metric is None or rollout.reward is None:
            reward = rollout.reward
        elif metric in rollout.metrics or rollout.failure is not None:  # timed out, with a reward by setting: it has no metrics
            reward = rollout.metrics.get(metric)
        else:
            raise FilterError(
                f"{self.context.where}.metric is {metric!r}, but attempt {rollout.attempt_id} (task {rollout.task_id!r}) has only the "
                f"fields {sorted(rollout.metrics)} - name one of these, or have the verifier return {metric!r}; "
                "the reward is never read in its place"
            )
        if reward is None or not math.isfinite(reward):
            return self.drop(INCOMPLETE)
        if self.low is not None and reward < self.low:
            return self.drop("reward_too_low", {"reward": reward})
        if self.high is not None and reward > self.high:
            return self.drop("reward_too_high", {"reward": reward})
        return self.keep({"reward": reward})
