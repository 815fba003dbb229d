"""Keep groups whose mean reward lies strictly within a band."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from sluice.filters.base import RewardFilter
from sluice.filters.group_rewards import RewardStats
from sluice.types import Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MeanFilter(RewardFilter):
    """Keeps a group only when threshold_down < mean < threshold_up; a missing bound leaves that side open.

    A band and nothing more, for a group of one as for any other: it may drop a group with spread ([2, 0, 1, 1] under an upper bound of 1)
    or keep a constant one ([0.5, 0.5]). Each of the two is logged once per filter, with the numbers. Where that is not wanted, use
    `std_filter`, alone or with this one in `all`.
    """

    name = "mean_filter"

    threshold_down: float | None = None  # groups with this mean or less are too hard
    threshold_up: float | None = None  # groups with this mean or more are too easy
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # what has been logged

    def __post_init__(self) -> None:
        down, up = self.threshold_down, self.threshold_up
        if down is None and up is None:
            raise self.context.wrong("threshold_down or threshold_up", "given", "neither", "set at least one bound, or use no_filter")
        if down is not None and up is not None and up <= down:
            raise self.context.wrong("threshold_up", f"above threshold_down ({down})", up, "swap them or drop one")

    def rule(self, stats: RewardStats) -> Verdict:
        """Drop outside the band, bounds included."""
        mean = stats.mean
        evidence = {"mean": mean, "std": stats.std, "n": stats.n}
        if self.threshold_down is not None and mean <= self.threshold_down:
            verdict = self.drop("too_hard", evidence)
        elif self.threshold_up is not None and mean >= self.threshold_up:
            verdict = self.drop("too_easy", evidence)
        else:
            if stats.std == 0.0 and stats.size > 1:
                self._tell_once("kept a group without spread", stats, "it has no advantage to learn from")
            return self.keep(evidence)
        if stats.std > 0.0:
            self._tell_once("dropped a group with spread", stats, "there was something to learn from it")
        return verdict

    def _tell_once(self, what: str, stats: RewardStats, consequence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "%s: mean_filter (threshold_down %s, threshold_up %s) %s (mean %.6g, std %.6g, n %d): %s. "
                "It looks at the mean only; std_filter looks at the spread. Told once.",
                self.context.where,
                self.threshold_down,
                self.threshold_up,
                what,
                stats.mean,
                stats.std,
                stats.n,
                consequence,
            )
