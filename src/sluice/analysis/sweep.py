"""Puts it all together: what every signal knows at every K, what a rule would have cut and saved, and what to hold that against.

`analyse` makes a `GateReport`: plain figures, which `cli/gate_tables.py` prints, `page.py` plots and `report_files.py` writes. Every part
that needs chance has a generator of its own, made of the seed, so that leaving one out does not change another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from sluice.analysis.curves import Curve, Figures, Point, curves, evenly
from sluice.analysis.doubts import doubts_of_data, doubts_of_fit, doubts_of_point
from sluice.analysis.fit import Fit, best_point, check_settings, fit
from sluice.analysis.intervals import Draws, Interval
from sluice.analysis.reading import Recording
from sluice.analysis.recorded import Recorded
from sluice.analysis.references import Arm, arms
from sluice.analysis.transfer import Transfer, transfer
from sluice.errors import AnalysisError
from sluice.gate.audit import clopper_pearson
from sluice.gate.offline import auroc, spearman
from sluice.gate.rules import check_share

Decide = Literal["running", "all"]

SHOWN_THRESHOLDS: Final = 12
"""Of the thresholds of one signal at one K, so many are shown, evenly over what they cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to look at."""

    signals: tuple[str, ...] | None = None  # None: all that are known
    thresholds: tuple[float, ...] = ()  # to be told of every signal and K, beside those that are found
    precision_floor: float = 0.8
    decide: Decide = "running"  # "all": also on groups that a running gate leaves alone, as in the published figures
    group_sizes: tuple[int, ...] | None = None  # to try the rule on; None: half the recorded one
    folds: int = 5
    seed: int = 0
    confidence: float = 0.95
    draws: int = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """What a signal knows at one K, over all groups."""

    signal: str
    k: int
    groups: int
    spearman: float | None  # with the variance of the rewards; None: not known, or one side is constant
    spearman_interval: Interval | None
    auroc: float | None  # for groups whose rewards differ; None: there is only one kind
    auroc_interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfTaskType:
    """The rule on the groups of one task type."""

    task_type: str
    point: Point
    precision_interval: Interval  # exact
    spearman: float | None
    auroc: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GateReport:
    """Everything that was found."""

    sources: tuple[str, ...]
    settings: Settings
    recorded: Recorded  # as decided on
    outcomes: Mapping[str, int]  # groups by how they ended
    notes: tuple[str, ...]  # what was left out and assumed
    warnings: tuple[str, ...]
    correlations: tuple[Correlation, ...]  # by K, then signal
    curves: tuple[Curve, ...]  # in the same order
    best: tuple[Point | None, ...]  # of each curve: what saves most under the floor
    asked: tuple[Point, ...]  # the given thresholds
    point: Point | None  # the rule that the rest is about: chosen, given, or the best of all
    point_intervals: Mapping[str, Interval] = field(default_factory=dict)  # by bootstrap
    precision_exact: Interval | None = None  # of the precision of `point`
    thresholds: tuple[Point, ...] = ()  # of the same signal and K
    arms: tuple[Arm, ...] = ()
    task_types: tuple[OfTaskType, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    fit: Fit | None = None  # None: a sweep


def analyse(recording: Recording, settings: Settings, *, choose: bool) -> GateReport:
    """Sweep over signals, K and thresholds; with `choose` also fit a rule. Raises `AnalysisError` for settings that cannot work."""
    recorded = recording.recorded
    check_settings(settings.precision_floor, settings.confidence)
    for threshold in settings.thresholds:
        check_share("threshold", threshold, "every signal lies between 0 and 1")
    names = _names(recorded, settings.signals)
    if settings.decide == "all":
        recorded = recorded.deciding_on_all()
    found = curves(recorded, names)
    correlations = _correlations(recorded, names, settings)
    fitted = (
        fit(recorded, settings.precision_floor, folds=settings.folds, seed=settings.seed, confidence=settings.confidence, signals=names)
        if choose
        else None
    )
    asked = tuple(curve.at(threshold) for curve in found for threshold in settings.thresholds)
    if fitted is not None:
        point = fitted.choice.point
    else:
        point = asked[0] if asked else best_point(found, settings.precision_floor)
    report = GateReport(
        sources=recording.sources,
        settings=settings,
        recorded=recorded,
        outcomes=dict(sorted(Counter(recorded.outcomes).items())),
        notes=(*recorded.notes, *_left_alone(recorded, settings.decide, point)),
        warnings=(),
        correlations=correlations,
        curves=tuple(found),
        best=tuple(_best(curve, settings.precision_floor) for curve in found),
        asked=asked,
        point=point,
        fit=fitted,
    )
    return _about_point(report, recording)


def _about_point(report: GateReport, recording: Recording) -> GateReport:
    """Everything that is about one rule, and the warnings."""
    settings, recorded, point = report.settings, report.recorded, report.point
    warnings = doubts_of_data(len(recorded), int(recorded.zero_variance.sum()))
    if point is None:
        return replace(report, warnings=(*warnings, *doubts_of_point(None, settings.precision_floor, settings.confidence, 0.0, 0.0)))
    curve = next(one for one in report.curves if (one.signal, one.figures.k) == (point.signal, point.k))
    figures = curve.figures
    draws = Draws.of(len(recorded), settings.draws, settings.confidence, _rng(settings, 1))
    references = arms(figures, curve.values < point.threshold, _rng(settings, 2))
    oracle = next(arm for arm in references if arm.name == "oracle")
    chance = float(figures.zero[figures.running].mean()) if figures.running.any() else 0.0
    best = oracle.safe_saving if oracle.safe_step_saving is None else oracle.safe_step_saving
    warnings += doubts_of_point(point, settings.precision_floor, settings.confidence, chance, best)
    return replace(
        report,
        warnings=(*warnings, *(doubts_of_fit(report.fit) if report.fit is not None else ())),
        point_intervals=draws.point_figures(figures, recorded.cuts(point.signal, point.k, point.threshold)),
        precision_exact=clopper_pearson(point.true_cuts, point.cut, settings.confidence),
        thresholds=_thresholds(curve, point),
        arms=references,
        task_types=_task_types(recorded, point, settings.confidence),
        transfers=_transfers(recording, settings, point),
    )


def _names(recorded: Recorded, wanted: Sequence[str] | None) -> tuple[str, ...]:
    for name in wanted or ():
        if name not in recorded.signals:
            raise AnalysisError(f"signal: expected some of {', '.join(recorded.signals)}, got {name!r} - the recording has no other")
    return tuple(dict.fromkeys(wanted)) if wanted else recorded.signals


def _correlations(recorded: Recorded, names: Sequence[str], settings: Settings) -> tuple[Correlation, ...]:
    draws = Draws.of(len(recorded), settings.draws, settings.confidence, _rng(settings, 0))
    variance, positive = recorded.first.reward_var, ~recorded.zero_variance
    columns = [(k, name, recorded.steps[k].signals[name]) for k in recorded.ks for name in names]
    intervals = draws.rank_figures([values for _, _, values in columns], variance, positive)
    return tuple(
        Correlation(
            signal=name,
            k=k,
            groups=len(recorded),
            spearman=None if variance is None else spearman(values, variance),
            spearman_interval=draws.interval(rho),
            auroc=auroc(values, positive),
            auroc_interval=draws.interval(area),
        )
        for (k, name, values), (rho, area) in zip(columns, intervals, strict=True)
    )


def _best(curve: Curve, floor: float) -> Point | None:
    return best_point([curve], floor)


def _thresholds(curve: Curve, point: Point) -> tuple[Point, ...]:
    """Some thresholds of the curve of a rule, and its own among them."""
    shown = [curve.point(index) for index in evenly(len(curve), SHOWN_THRESHOLDS).tolist()]
    return tuple(sorted([*(one for one in shown if one.cut != point.cut), point], key=lambda one: (one.cut, one.threshold)))


def _task_types(recorded: Recorded, point: Point, confidence: float) -> tuple[OfTaskType, ...]:
    groups = recorded.at(point.k)
    types = groups.task_types
    if types is None:
        return ()
    found = []
    for kind in sorted({one for one in types if one is not None}):
        chosen = np.array([one == kind for one in types])
        part = recorded.take(chosen)
        values = part.at(point.k).signals[point.signal]
        here = Figures.of(part, point.k).point(point.signal, point.threshold, values < point.threshold)
        variance = part.at(point.k).reward_var
        found.append(
            OfTaskType(
                task_type=kind,
                point=here,
                precision_interval=clopper_pearson(here.true_cuts, here.cut, confidence),
                spearman=None if variance is None else spearman(values, variance),
                auroc=auroc(values, ~part.zero_variance),
            )
        )
    return tuple(found)


def _transfers(recording: Recording, settings: Settings, point: Point) -> tuple[Transfer, ...]:
    trajectories = recording.trajectories
    if trajectories is None:
        if settings.group_sizes:
            raise AnalysisError("group size: expected a recording of action sequences, got features - members cannot be taken out of them")
        return ()
    sizes = settings.group_sizes
    if sizes is None:
        sizes = (trajectories.group_size // 2,) if trajectories.group_size >= 4 else ()
    rng = _rng(settings, 3)
    return tuple(
        transfer(
            trajectories,
            recording.recorded.horizon,
            point,
            size,
            settings.precision_floor,
            rng,
            decide_on_all=settings.decide == "all",
        )
        for size in sizes
    )


def _left_alone(recorded: Recorded, decide: Decide, point: Point | None) -> list[str]:
    """A word on groups that are not decided on."""
    if decide == "all":
        return ["every group is decided on (--decide all), also one that a running gate leaves alone"]
    k = recorded.ks[-1] if point is None else point.k
    left = len(recorded) - int(recorded.is_running[k].sum())
    if not left:
        return []
    return [
        f"at K = {k}, {left} of {len(recorded)} groups are not decided on: all their members had ended, or finished ones had different "
        "rewards (--decide all counts them, as the published figures do)"
    ]


def _rng(settings: Settings, part: int) -> np.random.Generator:
    return np.random.default_rng([settings.seed, part])
