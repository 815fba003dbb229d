"""Intervals by bootstrap: groups are drawn again, with replacement, all figures from the same draws.

`Draws` holds how often each group came in each draw; a figure of a draw is a weighted sum. Ranks of a draw come from running sums of these
numbers, so that a correlation and an area of all draws cost a few passes over one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sluice.analysis.curves import Figures
from sluice.analysis.prefixes import Floats
from sluice.gate.offline import Bools

Interval = tuple[float, float]

_DRAWS_AT_ONCE: Final = 100  # of which the arrays stay in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """How often each of N groups came in each of B draws."""

    counts: Floats  # [B, N]
    confidence: float

    @classmethod
    def of(cls, n: int, draws: int, confidence: float, rng: np.random.Generator) -> Draws:
        """B draws of N groups out of N."""
        counts = np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in range(draws)]) if draws else np.zeros((0, n))
        return cls(counts=counts.astype(np.float64), confidence=confidence)

    def interval(self, values: Floats) -> Interval | None:
        """The percentile interval of a figure; draws in which it does not exist (NaN) are left out. None: it never does."""
        there = values[~np.isnan(values)]
        if not len(there):
            return None
        low, high = np.quantile(there, [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return float(low), float(high)

    def rank_figures(self, values: Sequence[Floats], variance: Floats | None, positive: Bools) -> list[tuple[Floats, Floats]]:
        """[B] Spearman's rho with the variance, and AUROC for `positive`, in every draw, of some columns [N]. NaN: does not exist."""
        b = len(self.counts)
        found = [(np.full(b, np.nan), np.full(b, np.nan)) for _ in values]
        sorted_values = [_Order.of(column) for column in values]
        order_of_variance = None if variance is None else _Order.of(variance)
        for start in range(0, b, _DRAWS_AT_ONCE):
            part = slice(start, start + _DRAWS_AT_ONCE)
            counts = self.counts[part]
            n = counts.sum(axis=1)
            positives = counts * positive
            number = positives.sum(axis=1)
            pairs = number * (n - number)
            mean = (n + 1) / 2
            other = None
            if order_of_variance is not None:
                centred = order_of_variance.ranks(counts) - mean[:, None]
                other = (counts * centred, _sum_of_products(counts, centred, centred))
            for (rho, area), order in zip(found, sorted_values, strict=True):
                ranks = order.ranks(counts)
                with np.errstate(invalid="ignore", divide="ignore"):
                    area[part] = (np.einsum("bn,bn->b", positives, ranks) - number * (number + 1) / 2) / np.where(pairs > 0, pairs, np.nan)
                    if other is not None:
                        ranks -= mean[:, None]
                        spread = _sum_of_products(counts, ranks, ranks) * other[1]
                        rho[part] = np.einsum("bn,bn->b", other[0], ranks) / np.sqrt(np.where(spread > 0, spread, np.nan))
        return found

    def point_figures(self, figures: Figures, cut: Bools) -> dict[str, Interval]:
        """Intervals of what one choice of cuts comes to. The rule is the same in all draws: this is not the spread of fitting it."""
        counts = self.counts
        n = counts.sum(axis=1)
        sums = figures.sums(counts * cut, counts)
        number, true = _known(sums["cut"]), _known(sums["true"])
        zero = counts @ figures.zero
        span = (figures.horizon - figures.k) / figures.horizon
        values: dict[str, Floats] = {
            "precision": _share(true, number),
            "recall": _share(true, zero),
            "safe_saving": true * span / n,
            "raw_saving": number * span / n,
        }
        if figures.steps is not None:
            total = counts @ figures.steps
            values["safe_step_saving"] = _share(_known(sums["safe_steps"]), total)
            values["raw_step_saving"] = _share(_known(sums["raw_steps"]), total)
        if figures.weight is not None:
            values["advantage_kept"] = np.sqrt(_share(_known(sums["kept"]), counts @ figures.weight))
        return {name: interval for name, column in values.items() if (interval := self.interval(column)) is not None}


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """The order of a column, for ranks of any draw of it."""

    order: npt.NDArray[np.int64]  # [N] positions, smallest first
    tie: npt.NDArray[np.int64]  # [N] in the order of the groups: which of the different values each has
    starts: npt.NDArray[np.int64]  # [V] where each different value begins in the order

    @classmethod
    def of(cls, column: Floats) -> _Order:
        order = np.argsort(column, kind="stable")
        _, tie, numbers = np.unique(column, return_inverse=True, return_counts=True)
        return cls(order, tie, np.concatenate([[0], np.cumsum(numbers)[:-1]]))

    def ranks(self, counts: Floats) -> Floats:
        """[B, N] mean rank of each group in each draw; of those that did not come it means nothing."""
        per_value = np.add.reduceat(counts[:, self.order], self.starts, axis=1)  # [B, V] how often each different value came
        last = np.cumsum(per_value, axis=1)
        ranks: Floats = (last - (per_value - 1) / 2)[:, self.tie]
        return ranks


def _sum_of_products(counts: Floats, one: Floats, other: Floats) -> Floats:
    total: Floats = np.einsum("bn,bn,bn->b", counts, one, other)
    return total


def _share(part: Floats, whole: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        share: Floats = part / np.where(whole > 0, whole, np.nan)
    return share


def _known(values: Floats | None) -> Floats:
    assert values is not None
    return values
