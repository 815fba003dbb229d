"""What a filter is, its two kinds, and the filters of one reward domain.

A filter is a frozen dataclass: its fields are its `filter_args`, with `float`, `int`, `bool`, `str` or `list[str]` (and `| None`) as types,
so that the builder can check a configuration against them. Of the built-in ones `drop_flag` alone decides by what it saw before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar, get_args

from sluice.errors import FilterError
from sluice.filters.context import FilterContext
from sluice.filters.group_rewards import GroupRewards, RewardStats, read_group, read_sequence
from sluice.types import EMPTY, Category, Group, Rollout, Verdict

T = TypeVar("T")

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


class Stateful(Protocol):
    """A memory: what decides by what it saw before."""

    def state_dict(self) -> Any:
        """All of it, as plain data."""

    def load_state_dict(self, state: Any, /) -> object:
        """Take it back."""


@dataclass(frozen=True, kw_only=True)
class Filter(ABC, Generic[T]):
    """Judges one thing: a response, or a group."""

    name: ClassVar[str]  # its `type` in a configuration, and the source of its verdicts
    reads_metric: ClassVar[bool] = False  # whether `metric` has an effect on it
    drop_category: ClassVar[Category]  # of its drops, where it does not say otherwise

    context: FilterContext

    @abstractmethod
    def judge(self, item: T, /) -> Verdict:
        """Keep or drop, with the reason. Raises `FilterError` for what cannot be judged because the caller is wrong."""

    @property
    def label(self) -> str:
        """A short name for it, fit for a reason."""
        return self.name

    @property
    def parts(self) -> tuple[Filter[T], ...]:
        """The filters that it is composed of."""
        return ()

    @property
    def is_opaque(self) -> bool:
        """Whether nobody can tell its verdict before the group is whole: user code has a say in it, or the groups that came before."""
        return any(part.is_opaque for part in self.parts)

    @property
    def memory(self) -> Stateful | None:
        """What it remembers of the groups that it saw, for checkpoints; None: nothing."""
        return None

    @property
    def can_disqualify(self) -> bool:
        """Whether there are members that decide about their group alone."""
        return False

    def disqualifies(self, rollout: Rollout, /) -> Verdict | None:
        """The drop of any group that has this member, whatever its siblings do; None: it depends on them."""
        return None

    def count(self, item: T, /) -> None:
        """Take note of an item on which another filter has decided: for those that count what is judged. Answers with nothing."""
        for part in self.parts:
            part.count(item)

    def keep(self, evidence: Mapping[str, float] = EMPTY) -> Verdict:
        """A keep in the name of this filter."""
        return _verdict(True, "kept", None, self.name, evidence)

    def drop(self, reason: str, evidence: Mapping[str, float] = EMPTY, category: Category | None = None) -> Verdict:
        """A drop in the name of this filter; `category` None: the usual one of its kind."""
        return _verdict(False, reason, category or self.drop_category, self.name, evidence)


QueryFilter: TypeAlias = Filter[GroupRewards]
"""Judges a finished group, or its rewards alone."""

ResponseFilter: TypeAlias = Filter[Rollout]
"""Judges one finished response. What it drops is replaced one for one."""


@dataclass(frozen=True, kw_only=True)
class RewardFilter(Filter[GroupRewards]):
    """A query filter that decides on the statistics of the rewards: subclasses write `rule`. What it drops teaches nothing.

    Groups that are not whole never reach the rule: a counted member without a finite reward makes the group `incomplete`, a group without
    any counted member is `truncated`; both are invalid.
    """

    reads_metric = True
    drop_category = "low_information"

    def judge(self, rewards: GroupRewards, /) -> Verdict:
        """Keep or drop a group, or one reward per member. See `GroupRewards` for what is understood."""
        stats = read_group(rewards, self.context) if isinstance(rewards, Group) else read_sequence(rewards, self.context)
        if stats.fault:
            return self.drop(stats.fault, {"n": stats.n, "size": stats.size}, "invalid")
        return self.rule(stats)

    @abstractmethod
    def rule(self, stats: RewardStats) -> Verdict:
        """The decision on a whole group."""


@dataclass(frozen=True, kw_only=True)
class MemberFilter(Filter[GroupRewards]):
    """A group filter that drops a group for a single member that is no evidence: subclasses write `is_faulty`.

    What it drops is broken data, and its reason is its name. It looks at members, so that rewards alone are not enough for it.
    """

    drop_category = "invalid"

    def judge(self, group: GroupRewards, /) -> Verdict:
        """Drop a group with a faulty member."""
        rollouts = self.members_of(group)
        faulty = sum([self.is_faulty(rollout) for rollout in rollouts])
        evidence = {"members": faulty, "size": len(rollouts)}
        return self.drop(self.name, evidence) if faulty else self.keep(evidence)

    @property
    def can_disqualify(self) -> bool:
        """One faulty member is enough."""
        return True

    def disqualifies(self, rollout: Rollout, /) -> Verdict | None:
        """The drop for a faulty member."""
        return self.drop(self.name, {"member": rollout.member_index}) if self.is_faulty(rollout) else None

    def members_of(self, group: GroupRewards) -> tuple[Rollout, ...]:
        """The members of a whole group."""
        if not isinstance(group, Group):
            raise FilterError(
                f"{self.context.where}: {self.name} looks at the members of a group and expects a Group, got {type(group).__name__} - "
                "give the Group; rewards alone do not say what befell a member"
            )
        return group.rollouts

    @abstractmethod
    def is_faulty(self, rollout: Rollout) -> bool:
        """Whether this member makes its group worthless."""


@dataclass(frozen=True, kw_only=True)
class RolloutFilter(Filter[Rollout]):
    """A response filter: subclasses write `rule`. What it drops is broken data."""

    drop_category = "invalid"

    def judge(self, rollout: Rollout, /) -> Verdict:
        """Keep or drop one finished response."""
        if not isinstance(rollout, Rollout):
            raise FilterError(
                f"{self.context.where}: expected a Rollout, got {type(rollout).__name__} - a response filter judges single responses"
            )
        return self.rule(rollout)

    @abstractmethod
    def rule(self, rollout: Rollout) -> Verdict:
        """The decision on one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainFilters:
    """The filters of one reward domain."""

    query: QueryFilter
    response: ResponseFilter | None  # None: every response is kept


def _fast_verdict() -> Callable[[bool, str, Category | None, str, Mapping[str, float]], Verdict]:
    """Make verdicts without the checks that their constructor does for strangers: three times faster, and one is made per group.

    `keep` and `drop` above are the only callers, and they cannot confuse the two.
    """
    new = object.__new__
    fields: Mapping[str, Any] = Verdict.__dict__
    set_keep, set_reason, set_category = fields["keep"].__set__, fields["reason"].__set__, fields["category"].__set__
    set_source, set_evidence = fields["source"].__set__, fields["evidence"].__set__

    def make(keep: bool, reason: str, category: Category | None, source: str, evidence: Mapping[str, float]) -> Verdict:
        verdict = new(Verdict)
        set_keep(verdict, keep)
        set_reason(verdict, reason)
        set_category(verdict, category)
        set_source(verdict, source)
        set_evidence(verdict, evidence)
        return verdict

    return make


_verdict = _fast_verdict()
