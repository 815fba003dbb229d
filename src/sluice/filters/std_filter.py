"""Drop groups whose rewards do not differ: the no-signal rule."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.filters.base import RewardFilter
from sluice.filters.group_rewards import RewardStats
from sluice.types import Verdict


@dataclass(frozen=True, kw_only=True)
class StdFilter(RewardFilter):
    """Drops a group when the sample standard deviation of its rewards (ddof = 1) is at most `std_threshold`.

    With the default of 0 it drops exactly the groups whose rewards are all equal, whatever their value, type and number: equality is
    compared exactly, by value, never on a rounded spread. These are the groups of two or more that `sluice.advantage.no_signal` names. A
    group of one member is kept (it has no spread to judge); a group of which fewer than two members are left to compare is dropped.
    Refused for a configured group size of 1.
    """

    name = "std_filter"

    std_threshold: float = 0.0  # in units of the reward, inclusive

    def __post_init__(self) -> None:
        if self.std_threshold < 0:
            raise self.context.wrong("std_threshold", "at least 0", self.std_threshold, "no spread is below 0; leave it out for 0")
        if self.context.group_size == 1:
            raise self.context.refuse_singletons(self.name)

    def rule(self, stats: RewardStats) -> Verdict:
        """Drop without spread."""
        evidence = {"mean": stats.mean, "std": stats.std, "n": stats.n}
        is_group_of_one = stats.size == 1 and self.context.group_size is None  # else one is what is left of a larger group
        if stats.std <= self.std_threshold and not is_group_of_one:
            return self.drop("no_spread", evidence)
        return self.keep(evidence)
