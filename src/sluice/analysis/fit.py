"""Chooses a rule under a precision floor, and says how it does on groups that it was not chosen on.

On any groups the rule that saves most among those whose precision reaches a floor lies just above that floor, partly by luck: on other
groups it falls below it. So some stricter floors are tried as well, each by cross-validation: a rule is chosen on all folds but one
and judged on that one, for every fold. The floor whose rules together reach the wanted precision on the groups that they were not chosen
on, and save most, is taken, and the final rule is chosen with it on all groups.

That choice is made with held-out groups too. So all of it is cross-validated once more (`Fit.held_out`): each outer fold is judged by
the rule that the whole procedure, with folds of its own, chose on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sluice.analysis.curves import Curve, Figures, Point, curves
from sluice.analysis.recorded import Recorded
from sluice.errors import AnalysisError
from sluice.gate.audit import clopper_pearson

LEAST_CUTS: Final = 5
"""A rule that cuts fewer groups than this is never chosen: its precision says next to nothing."""

STRICTER: Final = (0.0, 0.2, 0.4, 0.6, 0.8)
"""The floors that are tried, as shares of the way from the wanted one to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rules judged on groups that they were not chosen on, added up over the folds."""

    rules: tuple[
        Point | None, ...
    ]  # chosen for each fold, with its figures on the groups that it was chosen on; None: none reached the floor
    groups: int
    zero_variance: int
    cut: int
    true_cuts: int
    saving: float  # safe, share of all held-out environment steps (by the horizon where lengths are not known)
    precision: float | None  # None: nothing was cut
    low: float  # of the precision: exact interval
    high: float

    @property
    def recall(self) -> float | None:
        """Share of the groups with equal rewards that were cut."""
        return self.true_cuts / self.zero_variance if self.zero_variance else None

    @property
    def folds_without(self) -> int:
        """Folds for which no rule reached the floor."""
        return sum(rule is None for rule in self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One of the floors that were tried."""

    floor: float
    point: Point | None  # chosen with it on all groups
    held_out: HeldOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen on some groups."""

    point: Point | None  # None: no rule reached the wanted floor
    floor: float  # the one that it was chosen with: the wanted one or a stricter one
    holds: bool  # whether rules chosen so reached the wanted floor on held-out groups
    ladder: tuple[Rung, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The chosen rule, and an honest account of it."""

    wanted: float  # the precision floor that was asked for
    choice: Choice
    held_out: HeldOut  # of the whole procedure
    precision_low: float | None  # lower end of the exact interval of the precision of the chosen rule, on the groups it was chosen on
    folds: int
    confidence: float


def fit(
    recorded: Recorded, floor: float, *, folds: int = 5, seed: int = 0, confidence: float = 0.95, signals: Sequence[str] | None = None
) -> Fit:
    """Choose K, threshold and signal. `signals`: those to choose from; all that are known when None.

    Raises `AnalysisError` for a floor outside (0, 1], and for fewer groups than folds.
    """
    check_settings(floor, confidence)
    check_folds(len(recorded), folds)
    rng = np.random.default_rng(seed)
    columns = _Columns.of(recorded, signals)
    parts = split(len(recorded), folds, rng)
    everything = np.arange(len(recorded))
    choice = _choose(columns, everything, floor, parts, confidence)
    rules = []
    for held in parts:
        others = np.setdiff1d(everything, held)
        inner = [others[part] for part in split(len(others), folds, rng)]
        rules.append(_choose(columns, others, floor, inner, confidence).point)
    point = choice.point
    return Fit(
        wanted=floor,
        choice=choice,
        held_out=_judge(columns, rules, parts, confidence),
        precision_low=None if point is None else clopper_pearson(point.true_cuts, point.cut, confidence)[0],
        folds=folds,
        confidence=confidence,
    )


def split(n: int, folds: int, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Positions of n groups, each in one of the folds, by lot."""
    return [np.sort(part) for part in np.array_split(rng.permutation(n), folds)]


def best_point(found: Sequence[Curve], floor: float) -> Point | None:
    """The rule that saves most among those that reach the floor; of equal ones the most precise, then the earliest, then the first."""
    best: Point | None = None
    for curve in found:
        index = curve.best(floor, LEAST_CUTS)
        if index is None or (best is not None and curve.saving[index] < best.saving - 1e-12):
            continue
        point = curve.point(index)
        if best is None or _worth(point) > _worth(best):
            best = point
    return best


def check_settings(floor: float, confidence: float) -> None:
    """Raises `AnalysisError` for shares that cannot be."""
    if not 0 < floor <= 1:
        raise AnalysisError(f"precision floor: expected a number > 0 and <= 1, got {floor} - 0.8 is the published one")
    if not 0 < confidence < 1:
        raise AnalysisError(f"confidence: expected a number > 0 and < 1, got {confidence} - 0.95 is usual")


def check_folds(n: int, folds: int) -> None:
    """Raises `AnalysisError` for folds that cannot be made of n groups."""
    if folds < 2:
        raise AnalysisError(f"folds: expected at least 2, got {folds} - with one fold nothing is held out")
    if n < 2 * folds:
        raise AnalysisError(f"groups: expected at least two per fold, that is {2 * folds}, got {n} - record more, or lower --cv")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """What curves of any part of the groups are made of, so that nothing is taken apart twice."""

    recorded: Recorded
    all_curves: list[Curve]

    @classmethod
    def of(cls, recorded: Recorded, signals: Sequence[str] | None) -> _Columns:
        return cls(recorded=recorded, all_curves=curves(recorded, signals))

    def on(self, index: npt.NDArray[np.int64]) -> list[Curve]:
        """The curves of some of the groups alone."""
        figures: dict[int, Figures] = {}
        found = []
        for curve in self.all_curves:
            k = curve.figures.k
            if k not in figures:
                figures[k] = curve.figures.take(index)
            found.append(Curve.of(curve.signal, curve.values[index], figures[k]))
        return found

    def judge(self, rule: Point, index: npt.NDArray[np.int64]) -> Point:
        """A rule on some groups."""
        figures = Figures.of(self.recorded, rule.k).take(index)
        values = self.recorded.steps[rule.k].signals[rule.signal][index]
        return figures.point(rule.signal, rule.threshold, values < rule.threshold)


def _choose(
    columns: _Columns, index: npt.NDArray[np.int64], floor: float, parts: Sequence[npt.NDArray[np.int64]], confidence: float
) -> Choice:
    """Choose on the groups at `index` alone; `parts` are its folds."""
    of_all = columns.on(index)
    of_folds = [columns.on(np.setdiff1d(index, held)) for held in parts]
    floors = [floor + share * (1 - floor) for share in STRICTER] if floor < 1 else [1.0]
    ladder = []
    for tried in floors:
        rules = [best_point(found, tried) for found in of_folds]
        ladder.append(Rung(floor=tried, point=best_point(of_all, tried), held_out=_judge(columns, rules, parts, confidence)))
    held = [rung for rung in ladder if rung.point is not None and rung.held_out.precision is not None and rung.held_out.precision >= floor]
    if held:
        rung = max(held, key=lambda one: (one.held_out.saving, -one.floor))
        return Choice(point=rung.point, floor=rung.floor, holds=True, ladder=tuple(ladder))
    return Choice(point=ladder[0].point, floor=floor, holds=False, ladder=tuple(ladder))


def _judge(columns: _Columns, rules: Sequence[Point | None], parts: Sequence[npt.NDArray[np.int64]], confidence: float) -> HeldOut:
    """Each rule on its fold, added up."""
    zero = columns.recorded.zero_variance
    lengths = columns.recorded.first.lengths
    cut = true = 0
    saved = 0.0
    for rule, held in zip(rules, parts, strict=True):
        if rule is None:
            continue
        point = columns.judge(rule, held)
        cut, true = cut + point.cut, true + point.true_cuts
        saved += point.saving * (len(held) if lengths is None else float(lengths[held].sum()))
    everyone = np.concatenate(parts)
    total = len(everyone) if lengths is None else float(lengths[everyone].sum())
    low, high = clopper_pearson(true, cut, confidence)
    return HeldOut(
        rules=tuple(rules),
        groups=len(everyone),
        zero_variance=int(zero[everyone].sum()),
        cut=cut,
        true_cuts=true,
        saving=saved / total if total else 0.0,
        precision=true / cut if cut else None,
        low=low,
        high=high,
    )


def _worth(point: Point) -> tuple[float, float, int]:
    return (point.saving, point.precision or 0.0, -point.k)
