"""Filters made of filters: `all`, `any`, `not`. They work on query filters and on response filters alike.

Each inner filter keeps its own reason: what `all` and `any` drop carries the verdict of the filter that decided, source included.

`all` and `any` ask no further than the answer. The filters behind it are told of the item all the same (`Filter.count`), so that one that
counts what is judged, as a guarded `drop_flag` does, counts each item once, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from sluice.filters.base import Filter
from sluice.filters.group_rewards import INCOMPLETE, TRUNCATED
from sluice.filters.guard import KEPT_BY_GUARD
from sluice.types import EMPTY, Category, Rollout, Verdict

T = TypeVar("T")

NOT_JUDGED: Final = frozenset({INCOMPLETE, TRUNCATED})
"""Reasons that say that there was nothing to judge. `not` never turns these into a keep."""


@dataclass(frozen=True, kw_only=True)
class AllOf(Filter[T]):
    """Keeps when every inner filter keeps, with the evidence of the last; the first drop is the answer and later ones are not asked.

    What one of them would have dropped, had its guard let it, is kept in the name of that one.
    """

    name = "all"

    filters: tuple[Filter[T], ...]  # at least one

    @property
    def parts(self) -> tuple[Filter[T], ...]:
        """The inner filters."""
        return self.filters

    def judge(self, item: T, /) -> Verdict:
        """Keep or drop, see above."""
        evidence: Mapping[str, float] = EMPTY
        kept_by_guard: Verdict | None = None
        for index, inner in enumerate(self.filters):
            verdict = inner.judge(item)
            if not verdict.keep:
                for later in self.filters[index + 1 :]:
                    later.count(item)
                return verdict
            if verdict.reason == KEPT_BY_GUARD:
                kept_by_guard = verdict
            evidence = verdict.evidence
        return self.keep(evidence) if kept_by_guard is None else kept_by_guard

    @property
    def can_disqualify(self) -> bool:
        """Where an inner filter can."""
        return any(inner.can_disqualify for inner in self.filters)

    def disqualifies(self, rollout: Rollout, /) -> Verdict | None:
        """The drop of the first inner filter that has one."""
        for inner in self.filters:
            verdict = inner.disqualifies(rollout)
            if verdict is not None:
                return verdict
        return None


@dataclass(frozen=True, kw_only=True)
class AnyOf(Filter[T]):
    """Keeps when an inner filter keeps; when all drop, the answer is the first drop for broken data, else the first drop."""

    name = "any"

    filters: tuple[Filter[T], ...]  # at least one

    @property
    def parts(self) -> tuple[Filter[T], ...]:
        """The inner filters."""
        return self.filters

    def judge(self, item: T, /) -> Verdict:
        """Keep or drop, see above."""
        answer: Verdict | None = None
        for index, inner in enumerate(self.filters):
            verdict = inner.judge(item)
            if verdict.keep:
                for later in self.filters[index + 1 :]:
                    later.count(item)
                return verdict
            if answer is None or (verdict.category == "invalid" and answer.category != "invalid"):
                answer = verdict
        assert answer is not None
        return answer


@dataclass(frozen=True, kw_only=True)
class Not(Filter[T]):
    """Keeps what the inner filter drops and drops what it keeps; what could not be judged (`incomplete`, `truncated`) stays dropped."""

    name = "not"

    filter: Filter[T]
    category: Category  # of its drops

    @property
    def parts(self) -> tuple[Filter[T], ...]:
        """The inner filter."""
        return (self.filter,)

    def judge(self, item: T, /) -> Verdict:
        """Keep or drop, see above."""
        verdict = self.filter.judge(item)
        if verdict.keep:
            return self.drop(f"not_{self.filter.label}", verdict.evidence, self.category)
        return verdict if verdict.reason in NOT_JUDGED else self.keep(verdict.evidence)
