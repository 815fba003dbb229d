"""Drop groups of which too few members are left to learn from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice.filters.base import Filter
from sluice.filters.group_rewards import GroupRewards, read_group, read_sequence
from sluice.types import Group, Verdict


@dataclass(frozen=True, kw_only=True)
class MinSurvivors(Filter[GroupRewards]):
    """Drops a group when fewer than `least` of its members have a finite reward and enter statistics (masked, truncated ones do not).

    It takes out groups that others would keep, and never saves one: whether members without a reward are permitted at all is for
    `resampling.min_members`.
    """

    name = "min_survivors"
    drop_category = "invalid"

    least: int  # members

    def __post_init__(self) -> None:
        size = self.context.group_size
        if self.least < 1:
            raise self.context.wrong("least", "at least 1", self.least, "it is a number of members")
        if size is not None and self.least > size:
            raise self.context.wrong("least", f"at most {self.context.group_size_key} ({size})", self.least, "no group has more members")

    def judge(self, rewards: GroupRewards, /) -> Verdict:
        """Drop a group with too few."""
        context = replace(self.context, metric=None)
        stats = read_group(rewards, context) if isinstance(rewards, Group) else read_sequence(rewards, context)
        evidence = {"n": stats.n, "least": self.least}
        return self.drop(self.name, evidence) if stats.n < self.least else self.keep(evidence)
