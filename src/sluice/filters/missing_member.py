"""Drop groups that lack a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.filters.base import MemberFilter
from sluice.filters.group_rewards import GroupRewards
from sluice.types import Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class MissingMember(MemberFilter):
    """Drops a group with fewer members than configured, or with a member without a single turn: nothing of it was ever sampled."""

    name = "missing_member"

    def is_faulty(self, rollout: Rollout) -> bool:
        """Whether it never began."""
        return not rollout.turns

    def judge(self, group: GroupRewards, /) -> Verdict:
        """Drop a group that is not complete."""
        rollouts = self.members_of(group)
        size = len(rollouts) if self.context.group_size is None else self.context.group_size
        present = sum([not self.is_faulty(rollout) for rollout in rollouts])
        evidence = {"members": present, "size": size}
        return self.drop(self.name, evidence) if present < max(size, len(rollouts)) else self.keep(evidence)
