"""Drop groups of which a member is flagged by its environment, and bound how many of them go."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.filters.base import MemberFilter, Stateful
from sluice.filters.group_rewards import GroupRewards
from sluice.filters.guard import KEPT_BY_GUARD, RatioGuard
from sluice.types import Group, Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class DropFlag(MemberFilter):
    """Drops a group with a member that has the flag `drop_flag`, as long as not too many groups go that way.

    A ratio guard of its own counts every group that comes by, kept ones too, over the whole run. A candidate is dropped only if, with it,
    at most `max_filter_ratio` of the counted groups are dropped: with a limit below 1 the very first group is always kept. What is kept
    against the flag has the reason `kept_by_guard`. An evaluation has nothing to refill: there the flag alone decides.
    """

    name = "drop_flag"

    max_filter_ratio: float | None = 0.5  # share of the counted groups that may be dropped; None: any
    _guard: RatioGuard | None = field(init=False, repr=False, compare=False)  # None: without a limit

    def __post_init__(self) -> None:
        limit = self.max_filter_ratio
        if limit is not None and not 0 <= limit <= 1:
            advice = "0.5 lets half of the groups go, null all"
            raise self.context.wrong("max_filter_ratio", "a share from 0 to 1, or null", limit, advice)
        object.__setattr__(self, "_guard", None if limit is None or self.context.mode == "val" else RatioGuard(limit))

    @property
    def is_opaque(self) -> bool:
        """With a limit: nobody can tell what the guard will say."""
        return self._guard is not None

    @property
    def memory(self) -> Stateful | None:
        """The counts of its guard."""
        return self._guard

    @property
    def can_disqualify(self) -> bool:
        """Only without a limit is one member enough."""
        return self._guard is None

    def disqualifies(self, rollout: Rollout, /) -> Verdict | None:
        """The drop for a flagged member, where the flag alone decides."""
        return super().disqualifies(rollout) if self._guard is None else None

    def is_faulty(self, rollout: Rollout) -> bool:
        """Whether it is flagged."""
        return "drop_flag" in rollout.flags

    def judge(self, group: GroupRewards, /) -> Verdict:
        """Drop a group with a flagged member, unless that would be one too many."""
        verdict = super().judge(group)
        guard = self._guard
        if guard is None:
            return verdict
        ticket = guard.count()
        if verdict.keep:
            return verdict
        evidence = {**verdict.evidence, **guard.evidence("invalid")}
        if guard.may_drop("invalid"):
            guard.filter_counted(ticket, "invalid")
            return self.drop(self.name, evidence)
        guard.keep_counted("invalid")
        return Verdict.kept(self.name, KEPT_BY_GUARD, evidence)

    def count(self, group: GroupRewards, /) -> None:
        """Count a group that another filter has decided on, as if it had been asked: its place in a composition makes no difference."""
        if self._guard is not None and isinstance(group, Group):
            self.judge(group)
