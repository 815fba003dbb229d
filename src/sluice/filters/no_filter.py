"""Keep every whole group."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.filters.base import RewardFilter
from sluice.filters.group_rewards import RewardStats
from sluice.types import Verdict


@dataclass(frozen=True, kw_only=True)
class NoFilter(RewardFilter):
    """Keeps every group that is whole; a group with a missing reward, or without any member that counts, is still dropped as invalid."""

    name = "no_filter"

    def rule(self, stats: RewardStats) -> Verdict:
        """Keep."""
        return self.keep({"mean": stats.mean, "std": stats.std, "n": stats.n})
