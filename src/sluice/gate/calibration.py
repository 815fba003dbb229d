"""From the scores of a model to chances, and to a lower bound of how often it is right when it acts on them.

Both are fitted on scores that the model gave to what it was not fitted on. The chance is an isotonic regression of the outcome on the score
(R. Barlow and H. Brunk, The isotonic regression problem and its dual, 1972). The bound is of acting at a threshold, and holds for looking
again and again: whoever acts at the first score that is high enough acts on just those whose highest score is that high, and of those the
share that was right is bounded from below. So looking often is paid for, and no correction for it is needed.

Of independent ones the bound is exact (Clopper and Pearson). Where several come from one group they are not, and the bound is the lower one
of that and of the normal one with the variance between groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.errors import GateError
from sluice.gate.audit import clopper_pearson

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

CONFIDENCE: Final = 0.9
"""Of the two-sided intervals: their lower end is a bound of 95 %."""

_MOST_BOUNDS: Final = 1000  # that are worked out: more of them are nearer to each other than anyone reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Step functions of the score: what holds at a score holds up to the next one."""

    scores: tuple[float, ...]  # ascending
    chances: tuple[float, ...]  # of being right; ascending
    reached: tuple[float, ...]  # highest scores, ascending
    bounds: tuple[float, ...]  # lower bound of the share that is right of those whose highest score is at least that; ascending
    confidence: float

    def chance(self, score: float) -> float:
        """The calibrated chance of being right."""
        return self.chances[max(0, int(np.searchsorted(self.scores, score, side="right")) - 1)]

    def bound(self, score: float) -> float:
        """The lower bound. 0 below everything that was seen."""
        place = int(np.searchsorted(self.reached, score, side="right")) - 1
        return self.bounds[place] if place >= 0 else 0.0

    def threshold(self, floor: float) -> float:
        """The score from which on the bound is at least the floor; infinity: there is none."""
        place = next((place for place, bound in enumerate(self.bounds) if bound >= floor), None)
        if place is None:
            return math.inf
        return self.reached[place]

    @property
    def most(self) -> float:
        """The highest bound that any score has."""
        return max(self.bounds, default=0.0)

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: [*value] if isinstance(value := getattr(self, name), tuple) else value for name in self.__dataclass_fields__}

    @classmethod
    def from_data(cls, data: Any) -> Calibration:
        """Back again. Raises `GateError` for what is no such data."""
        try:
            columns = {name: tuple(map(float, data[name])) for name in ("scores", "chances", "reached", "bounds")}
            calibration = cls(**columns, confidence=float(data["confidence"]))
            for values, heights in ((calibration.scores, calibration.chances), (calibration.reached, calibration.bounds)):
                is_ascending = all(a <= b for row in (values, heights) for a, b in pairwise(row))
                if not values or len(values) != len(heights) or not is_ascending or not all(0 <= height <= 1 for height in heights):
                    raise ValueError("steps that do not ascend")
        except (KeyError, TypeError, ValueError) as error:
            raise GateError(f"expected a calibration as it was saved, got what cannot be read ({error}) - fit and save it again") from error
        return calibration


def calibrate(scores: Floats, units: Ints, is_right: Bools, groups: Ints | None = None, confidence: float = CONFIDENCE) -> Calibration:
    """From the scores of looks [L], each unit's in the order of time, which unit each looks at, and whether acting then would have been
    right.

    Units (groups, or members) are numbered from 0; `groups` [N]: from which group each of them comes, None: each from another. Scores lie
    within 0 and 1.
    """
    knots, chances = isotonic(scores, is_right)
    clusters = range(int(units.max()) + 1) if groups is None else groups.tolist()
    # Whoever acts at a threshold acts on a unit at its first score that high: at one that is higher than all before it.
    highest: dict[int, float] = {}
    events = []
    for score, unit, right in zip(scores.tolist(), units.tolist(), is_right.tolist(), strict=True):
        if score > highest.get(unit, -math.inf):
            highest[unit] = score
            events.append((score, unit, right))
    events.sort(key=lambda event: -event[0])
    tail = _Tail(confidence)
    acted: dict[int, bool] = {}
    reached: list[float] = []
    bounds: list[float] = []
    stride = 1 + len(events) // _MOST_BOUNDS
    for place, (score, unit, right) in enumerate(events):
        if unit not in acted:
            tail.add(clusters[unit], right, 1)
        elif right != acted[unit]:
            tail.add(clusters[unit], 1 if right else -1, 0)
        acted[unit] = right
        is_last = place + 1 == len(events)
        if is_last or (place % stride == 0 and events[place + 1][0] < score):  # those with one score are acted on together
            reached.append(score)
            bounds.append(tail.bound())
    # Whoever acts at a lower score that clears a floor acts at this one too. Only where the bound rises is there something to know.
    ascending = np.maximum.accumulate(np.array(bounds[::-1])).tolist()
    steps = [(score, bound) for score, bound, before in zip(reached[::-1], ascending, [-1.0, *ascending], strict=False) if bound > before]
    return Calibration(
        scores=knots,
        chances=chances,
        reached=tuple(score for score, _ in steps),
        bounds=tuple(bound for _, bound in steps),
        confidence=confidence,
    )


def isotonic(scores: Floats, is_right: Bools) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The step function that never falls and is nearest to the outcomes, by pooling neighbours: where its steps begin, and their
    heights.
    """
    order = np.argsort(scores, kind="stable")
    values, first = np.unique(scores[order], return_index=True)
    sums = np.add.reduceat(is_right[order].astype(np.float64), first)
    sizes = np.diff([*first, len(scores)]).astype(np.float64)
    pools: list[list[float]] = []  # [start, sum, size]
    for value, total, size in zip(values.tolist(), sums.tolist(), sizes.tolist(), strict=True):
        pools.append([value, total, size])
        while len(pools) > 1 and pools[-2][1] * pools[-1][2] >= pools[-1][1] * pools[-2][2]:
            _, more, much = pools.pop()
            pools[-1][1] += more
            pools[-1][2] += much
    return tuple(pool[0] for pool in pools), tuple(pool[1] / pool[2] for pool in pools)


class _Tail:
    """Those with the highest scores: how many were right, by group."""

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence
        self._z = NormalDist().inv_cdf((1 + confidence) / 2)
        self._groups: dict[int, tuple[int, int]] = {}  # group -> how many of it were right, and how many there are
        self._n = self._right = 0
        self._squares = [0, 0, 0]  # sums over groups of right^2, right x size, size^2

    def add(self, group: int, right: int, size: int) -> None:
        """More right ones, and more altogether."""
        was_right, was_size = self._groups.get(group, (0, 0))
        now_right, now_size = was_right + right, was_size + size
        self._groups[group] = (now_right, now_size)
        self._n += size
        self._right += right
        self._squares[0] += now_right**2 - was_right**2
        self._squares[1] += now_right * now_size - was_right * was_size
        self._squares[2] += now_size**2 - was_size**2

    def bound(self) -> float:
        """The lower bound of the share that is right."""
        exact = clopper_pearson(self._right, self._n, self._confidence)[0]
        groups = len(self._groups)
        if groups == self._n:  # one from each
            return exact
        if groups < 2:
            return 0.0
        share = self._right / self._n
        spread = self._squares[0] - 2 * share * self._squares[1] + share**2 * self._squares[2]
        deviation = math.sqrt(max(0.0, spread) * groups / (groups - 1)) / self._n
        return max(0.0, min(exact, share - self._z * deviation))
