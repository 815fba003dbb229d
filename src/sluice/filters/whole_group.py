"""The outermost part of a group filter: no composition, and no code of a user, keeps a group that could not train."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.filters.base import Filter
from sluice.filters.group_rewards import GroupRewards, read_group, read_sequence
from sluice.types import Group, Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class WholeGroup(Filter[GroupRewards]):
    """Asks a filter, and drops what it keeps without being whole: a member has no reward (`incomplete`), or none counts (`truncated`).

    The filter is asked first, so that it may say in its own words what is wrong with such a group.
    """

    name = "whole_group"
    drop_category = "invalid"

    filter: Filter[GroupRewards]

    @property
    def parts(self) -> tuple[Filter[GroupRewards], ...]:
        """The filter."""
        return (self.filter,)

    @property
    def label(self) -> str:
        """That of the filter."""
        return self.filter.label

    @property
    def can_disqualify(self) -> bool:
        """As the filter says."""
        return self.filter.can_disqualify

    def disqualifies(self, rollout: Rollout, /) -> Verdict | None:
        """As the filter says."""
        return self.filter.disqualifies(rollout)

    def judge(self, rewards: GroupRewards, /) -> Verdict:
        """Keep or drop, see above."""
        verdict = self.filter.judge(rewards)
        if not verdict.keep:
            return verdict
        stats = read_group(rewards, self.context) if isinstance(rewards, Group) else read_sequence(rewards, self.context)
        return self.drop(stats.fault, {"n": stats.n, "size": stats.size}) if stats.fault else verdict
