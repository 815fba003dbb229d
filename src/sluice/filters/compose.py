"""Filters made of filters: `all`, `any`, `not`. They work on query filters and on response filters alike.

Each inner filter keeps its own reason: what `all` and `any` drop carries the verdict of the filter that decided, source included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from sluice.filters.base import Filter
from sluice.filters.group_rewards import INCOMPLETE, TRUNCATED
from sluice.types import EMPTY, Category, Verdict

T = TypeVar("T")

NOT_JUDGED: Final = frozenset({INCOMPLETE, TRUNCATED})
"""Reasons that say that there was nothing to judge. `not` never turns these into a keep."""


@dataclass(frozen=True, kw_only=True)
class AllOf(Filter[T]):
    """Keeps when every inner filter keeps, with the evidence of the last; the first drop is the answer and later ones are not asked."""

    name = "all"

    filters: tuple[Filter[T], ...]  # at least one

    @property
    def parts(self) -> tuple[Filter[T], ...]:
        """The inner filters."""
        return self.filters

    def judge(self, item: T, /) -> Verdict:
        """Keep or drop, see above."""
        evidence: Mapping[str, float] = EMPTY
        for inner in self.filters:
            verdict = inner.judge(item)
            if not verdict.keep:
                return verdict
            evidence = verdict.evidence
        return self.keep(evidence)


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
        for inner in self.filters:
            verdict = inner.judge(item)
            if verdict.keep:
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
