"""What a rule is held against: no gate, as many cuts at random, the best cuts there are, and a filter after the rollouts.

All arms are of the same groups at the same K, and may cut the groups that a running gate decides on. What is not cut runs to its end; the
post-hoc filter then drops what has equal rewards, which saves no rollouts. `dropped_share` is what does not reach the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from sluice.analysis.curves import Figures, Point
from sluice.analysis.intervals import Interval
from sluice.analysis.prefixes import Floats
from sluice.gate.offline import Bools

RANDOM_DRAWS: Final = 1000
"""Random choices of cuts that the interval and the advantages of the random arm come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to treat the groups. The counts of the random arm are expectations."""

    name: str
    cut: float
    true_cuts: float
    false_cuts: float
    missed: float  # groups with equal rewards that were not cut
    precision: float | None
    recall: float | None
    safe_saving: float
    raw_saving: float
    safe_step_saving: float | None
    raw_step_saving: float | None
    dropped_share: float  # of the groups: not trained on
    advantage_kept: float | None
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # of the random arm: where 95 % of its draws lie


def arms(figures: Figures, below: Bools, rng: np.random.Generator) -> tuple[Arm, ...]:
    """The arms at one K. `below`: [N] what the rule would cut; of these the gate cuts the groups that it decides on."""
    nothing = np.zeros(len(below), dtype=np.bool_)
    ungated, gate = _arm("no gate", figures.point("", 0.0, nothing)), _arm("gate", figures.point("", 0.0, below))
    return (
        ungated,
        random_arm(figures, int(gate.cut), rng),
        _arm("oracle", figures.point("", 0.0, figures.zero)),
        replace(ungated, name="post-hoc filter", dropped_share=float(figures.zero.mean())),
        gate,
        replace(gate, name="gate, then post-hoc filter", dropped_share=(gate.cut + gate.missed) / len(below)),
    )


def random_arm(figures: Figures, cuts: int, rng: np.random.Generator) -> Arm:
    """So many cuts at random among the groups that are decided on: expected figures; the advantages kept are a mean over draws."""
    n, decided = len(figures.zero), int(figures.running.sum())
    share = cuts / decided if decided else 0.0
    expected = figures.sums(figures.running.astype(np.float64) * share)  # linear in the cuts: the mean of the sums is the sum of the means
    true = float(expected["true"] if expected["true"] is not None else 0.0)
    zero = int(figures.zero.sum())
    span = (figures.horizon - figures.k) / (n * figures.horizon)
    drawn = _drawn(figures.running, cuts, rng)
    sums = figures.sums(drawn)
    total = None if figures.steps is None else float(figures.steps.sum()) or None
    spread: dict[str, Floats] = {"safe_saving": _of(sums["true"]) * span}
    if cuts:
        spread["precision"] = _of(sums["true"]) / cuts
    kept = None
    if total is not None:
        spread["safe_step_saving"] = _of(sums["safe_steps"]) / total
        spread["raw_step_saving"] = _of(sums["raw_steps"]) / total
    if figures.weight is not None and (whole := float(np.ones(n) @ figures.weight)):
        kept_in_draws = np.sqrt(_of(sums["kept"]) / whole)
        kept = float(kept_in_draws.mean())
        spread["advantage_kept"] = kept_in_draws
    return Arm(
        name=f"random, {cuts} cuts",
        cut=float(cuts if decided else 0),
        true_cuts=true,
        false_cuts=cuts - true if decided else 0.0,
        missed=zero - true,
        precision=true / cuts if cuts and decided else None,
        recall=true / zero if zero else None,
        safe_saving=true * span,
        raw_saving=cuts * span,
        safe_step_saving=None if total is None else float(_of(expected["safe_steps"])) / total,
        raw_step_saving=None if total is None else float(_of(expected["raw_steps"])) / total,
        dropped_share=cuts / n,
        advantage_kept=kept,
        intervals={name: tuple(np.quantile(values, [0.025, 0.975]).tolist()) for name, values in spread.items()},
    )


def _drawn(running: Bools, cuts: int, rng: np.random.Generator) -> Floats:
    """[draws, N] choices of so many groups."""
    places = np.flatnonzero(running)
    chosen = np.zeros((RANDOM_DRAWS, len(running)))
    if cuts:
        order = rng.random((RANDOM_DRAWS, len(places))).argsort(axis=1)[:, :cuts]
        np.put_along_axis(chosen, places[order], 1.0, axis=1)
    return chosen


def _arm(name: str, point: Point) -> Arm:
    return Arm(
        name=name,
        cut=point.cut,
        true_cuts=point.true_cuts,
        false_cuts=point.false_cuts,
        missed=point.zero_variance - point.true_cuts,
        precision=point.precision,
        recall=point.recall,
        safe_saving=point.safe_saving,
        raw_saving=point.raw_saving,
        safe_step_saving=point.safe_step_saving,
        raw_step_saving=point.raw_step_saving,
        dropped_share=point.cut / point.groups,
        advantage_kept=point.advantage_kept,
    )


def _of(values: Floats | None) -> Floats:
    assert values is not None
    return values
