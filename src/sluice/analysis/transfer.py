"""How a rule does on smaller groups: members are left away by lot, and the smaller groups are judged by the rewards that remain.

A distance of pairs has the same mean in smaller groups and a wider spread, and smaller groups have equal rewards more often: a threshold
does not carry over. Larger groups than the recorded ones cannot be made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sluice.analysis.curves import Curve, Figures, Point
from sluice.analysis.fit import LEAST_CUTS
from sluice.analysis.intervals import Interval
from sluice.analysis.trajectories import Trajectories
from sluice.errors import AnalysisError
from sluice.gate.offline import auroc, spearman

REPEATS: Final = 20
"""How often members are left away anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One rule on groups of another size: means over the repeats, and between which values 95 % of them lie."""

    group_size: int
    zero_variance_share: float
    spearman: float | None
    auroc: float | None
    cut_rate: float
    precision: float | None  # None: nothing was cut in any repeat
    precision_interval: Interval | None
    saving: float  # safe, share of all environment steps
    refitted_threshold: float | None  # of the same signal at the same K, for the same floor; None: in no repeat one reached it
    refitted_saving: float | None
    refitted_share: float  # of the repeats in which a threshold reached the floor


def transfer(
    trajectories: Trajectories,
    horizon: int,
    point: Point,
    size: int,
    floor: float,
    rng: np.random.Generator,
    *,
    decide_on_all: bool = False,
) -> Transfer:
    """The rule of `point` on groups of `size`. Raises `AnalysisError` for a size that cannot be made."""
    g = trajectories.group_size
    if not 2 <= size < g:
        raise AnalysisError(
            f"group size: expected from 2 to {g - 1}, below the recorded one, got {size} - larger groups must be recorded: thresholds do "
            "not carry over"
        )
    points: list[Point] = []
    refitted: list[Point] = []
    rhos, areas = [], []
    for _ in range(REPEATS):
        chosen = np.sort(rng.random(trajectories.rewards.shape).argsort(axis=1)[:, :size], axis=1)
        smaller = trajectories.take_members(chosen).recorded([point.k], horizon)
        if decide_on_all:
            smaller = smaller.deciding_on_all()
        groups = smaller.at(point.k)
        values = groups.signals[point.signal]
        curve = Curve.of(point.signal, values, Figures.of(smaller, point.k))
        points.append(curve.at(point.threshold))
        if (index := curve.best(floor, LEAST_CUTS)) is not None:
            refitted.append(curve.point(index))
        assert groups.reward_var is not None
        rhos.append(spearman(values, groups.reward_var))
        areas.append(auroc(values, ~groups.zero_variance))
    precisions = [one.precision for one in points if one.precision is not None]
    return Transfer(
        group_size=size,
        zero_variance_share=float(np.mean([one.zero_variance / one.groups for one in points])),
        spearman=_mean([rho for rho in rhos if rho is not None]),
        auroc=_mean([area for area in areas if area is not None]),
        cut_rate=float(np.mean([one.cut / one.groups for one in points])),
        precision=_mean(precisions),
        precision_interval=tuple(np.quantile(precisions, [0.025, 0.975]).tolist()) if precisions else None,
        saving=float(np.mean([one.saving for one in points])),
        refitted_threshold=_mean([one.threshold for one in refitted]),
        refitted_saving=_mean([one.saving for one in refitted]),
        refitted_share=len(refitted) / REPEATS,
    )


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
