"""How often the gate is right, and how far its threshold may go: from groups that would have been cut and ran to their end.

An audited group is drawn by seed, before anything is known of it, so that the audited would-be cuts are a plain random sample of all of
them. Each leaves its margin (`rules.py`) and whether its rewards were all equal at the end.

The interval of the precision is that of Clopper and Pearson (exact binomial): its lower end is what a floor is held against, and there
it must never promise too much. Wilson's interval is shorter, but its lower end covers less than it says just where the gate works, at
shares near 1 (T. Cai, One-sided confidence intervals in discrete distributions, 2005): of 20 right ones out of 20 it makes 0.839, the
exact one 0.832.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist
from typing import Final

STEPS_OF_SCALE: Final = 20
"""How finely a threshold is moved: in twentieths of the configured one."""

HALVINGS: Final = 50  # of an interval of length 1: below the digits that anyone reads


def drawn(text: str, share: float) -> bool:
    """A lot: True with the chance `share`, and always the same for the same text, in any process."""
    if share in (0, 1):
        return bool(share)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") < share * 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How many would-be cuts were right: groups with equal rewards."""

    right: int
    n: int
    value: float | None  # None: there were none
    low: float
    high: float


class AuditLog:
    """The last `window` audited groups: margin, and whether all rewards were equal. Older ones are forgotten, since the policy learns."""

    def __init__(self, window: int, confidence: float) -> None:
        self.window: Final = window
        self.confidence: Final = confidence
        self._records: deque[tuple[float, bool]] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> tuple[tuple[float, bool], ...]:
        """Margin and outcome of each, oldest first."""
        return tuple(self._records)

    def add(self, margin: float, is_right: bool) -> None:
        """One more group that ran to its end."""
        self._records.append((margin, is_right))

    def replace(self, records: Iterable[tuple[float, bool]]) -> None:
        """Other records, from a state."""
        self._records = deque(records, maxlen=self.window)

    def precision(self, scale: float) -> Precision:
        """That of cuts below `scale`."""
        outcomes = [is_right for margin, is_right in self._records if margin < scale]
        right, n = sum(outcomes), len(outcomes)
        low, high = clopper_pearson(right, n, self.confidence)
        return Precision(right=right, n=n, value=right / n if n else None, low=low, high=high)

    def largest_scale(self, floor: float, most: float) -> float | None:
        """The largest factor on the threshold, up to `most`, whose cuts have a lower bound of at least `floor`. None: there is none."""
        return largest_scale(self.records, floor, self.confidence, most)


def largest_scale(records: Sequence[tuple[float, bool]], floor: float, confidence: float, most: float) -> float | None:
    """The largest factor in steps of 1 / 20, up to `most`, whose cuts have a precision with a lower bound of at least `floor`."""
    ordered = sorted(records)
    margins = [margin for margin, _ in ordered]
    right = [0]
    for _, is_right in ordered:
        right.append(right[-1] + is_right)
    for step in range(math.floor(most * STEPS_OF_SCALE + 1e-9), 0, -1):
        scale = step / STEPS_OF_SCALE
        n = bisect_left(margins, scale)
        if lower_bound_clears(right[n], n, floor, confidence):
            return scale
    return None


@lru_cache(maxsize=4096)
def clopper_pearson(right: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share of which `right` of `n` were seen. (0, 1) when nothing was seen."""
    if not 0 <= right <= n:
        raise ValueError(f"expected 0 <= right <= n, got {right} of {n}")
    tail = (1 - confidence) / 2
    # Chances of at least `right`, and of more than `right`, grow with the share.
    low = 0.0 if right == 0 else _share_at(lambda share: _at_least(right, n, share), tail)
    high = 1.0 if right == n else _share_at(lambda share: _at_least(right + 1, n, share), 1 - tail)
    return low, high


def lower_bound_clears(right: int, n: int, floor: float, confidence: float) -> bool:
    """Whether the lower end of that interval is at least `floor` (0 < floor < 1): without looking for it."""
    return right > floor * n and _at_least(right, n, floor) <= (1 - confidence) / 2


def audits_needed(floor: float, confidence: float) -> int:
    """How many audited decisions, all of them right, have a lower bound of `floor` (0 < floor < 1)."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(floor))


def _share_at(chance: Callable[[float], float], wanted: float) -> float:
    """The share at which a growing chance reaches what is wanted."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if chance(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_least(right: int, n: int, share: float) -> float:
    """The chance of at least `right` successes in `n` trials; 0 < share < 1. Sums the shorter tail."""
    if right <= n - right:
        return 1.0 - _sum_of_chances(0, right, n, share)
    return _sum_of_chances(right, n + 1, n, share)


def _sum_of_chances(first: int, end: int, n: int, share: float) -> float:
    log_yes, log_no, whole = math.log(share), math.log1p(-share), math.lgamma(n + 1)
    chances = [whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_yes + (n - i) * log_no for i in range(first, end)]
    return math.fsum(map(math.exp, chances))


@dataclass(slots=True, kw_only=True)
class Moments:
    """Number, mean and spread of what came so far (Welford)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, value: float) -> None:
        """One more value."""
        self.n += 1
        before = value - self.mean
        self.mean += before / self.n
        self.squares += before * (value - self.mean)

    def total_of_others(self, others: int, confidence: float) -> tuple[float, float, float] | None:
        """The sum of `others` more values of the same kind that nobody saw, with its prediction interval. None: less than two were seen.

        The interval holds the spread of the unseen values themselves and the uncertainty of the mean: t x s x sqrt(others + others^2 / n).
        Sums of non-negative values: it does not go below 0.
        """
        if self.n < 2:
            return None
        spread = math.sqrt(self.squares / (self.n - 1))
        half = student_t((1 + confidence) / 2, self.n - 1) * spread * math.sqrt(others + others**2 / self.n)
        total = others * self.mean
        return total, max(0.0, total - half), total + half


def saved_steps(remaining: Moments, decisions: int, bound: int | None, confidence: float) -> dict[str, float]:
    """What decisions have saved, by name: the estimate from what audited ones still took, and the bound that it cannot exceed (None: not
    known). Names without a value yet are left out.
    """
    estimate = remaining.total_of_others(decisions, confidence)
    saved: dict[str, float] = {}
    if estimate is not None:
        most = math.inf if bound is None else bound
        saved = {name: min(value, most) for name, value in zip(("estimate", "estimate_low", "estimate_high"), estimate, strict=True)}
    return saved if bound is None else saved | {"bound": bound}


def student_t(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution: exact for 1 and 2 degrees of freedom, else within 1 % for shares up to 0.995.

    The series is formula 26.7.5 of Abramowitz and Stegun.
    """
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) / math.sqrt(2 * share * (1 - share))
    z = NormalDist().inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4)
    )
