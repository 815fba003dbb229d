"""Fits a learned rule on finished groups, and calibrates it on groups that its models have not seen.

The groups are cut into folds. The model of members is fitted on all folds but one and tells the chances in that one; from these come its
calibration and, where futile members are to be stopped, the groups as they would have been with that stop. The model of groups is fitted on
those, again on all folds but one, with the chances that the members got out of fold, and tells its scores in the one that was left out.
In the end both are fitted on everything, and keep the calibrations of their out-of-fold scores.

The surprising part: a chance of a member that the model of groups is fitted on comes from a model that has seen the fold that is left out.
It is only one step removed, so that it does not show in a calibration; the measure of all is a held-out half (`docs/gate_beyond.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.errors import ConfigError, GateError
from sluice.gate.boosting import Boosting, fit_trees
from sluice.gate.calibration import CONFIDENCE, Calibration, calibrate
from sluice.gate.learned import LearnedRule, of_chances, threshold
from sluice.gate.played import PlayedGroup, looks
from sluice.gate.traces import GroupTrace, MemberTrace, check_horizon, check_inputs
from sluice.types import EMPTY

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

MEMBERS: Final = Boosting(trees=80, depth=4, rate=0.08, share=0.4)
GROUPS: Final = Boosting(trees=100, depth=3, rate=0.06, share=0.8)

FEWEST: Final = 20
"""Groups of each outcome below which nothing is fitted. A bound near a usual floor needs many more."""

FLOORS: Final = (0.8, 0.9, 0.95, 0.98)
"""Floors for which the provenance of a rule tells what it would have done."""

FIRST_LOOK: Final = 4
"""Environment steps before a group is looked at, unless it is said otherwise: before that nothing is known."""


def fit_learned(
    groups: Sequence[PlayedGroup],
    *,
    horizon: int,
    inputs: Iterable[str],
    steps: Iterable[int] | None = None,
    futility_floor: float | None = None,
    folds: int = 5,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    members: Boosting = MEMBERS,
    of_groups: Boosting = GROUPS,
    provenance: Mapping[str, Any] = EMPTY,
) -> LearnedRule:
    """Fit on finished groups of one size.

    `inputs`: what is known of every step. `steps`: when a group is looked at; None: after every step from 4 on. `futility_floor`: that of
    the `LearnedFutility` beside which the rule will be used; None: without one. Groups that play the same problem may stand in different
    folds: leave doubles out. The same groups, settings and seed give the same rule. Raises `GateError` for groups that cannot teach it: of
    different sizes, longer than the horizon, or too few of one outcome.
    """
    given = check_inputs(inputs)
    check_horizon(horizon)
    wanted = tuple(range(FIRST_LOOK, horizon)) if steps is None else tuple(sorted({*steps}))
    _check(groups, horizon, wanted, folds)
    fold_of = np.empty(len(groups), dtype=np.int64)
    fold_of[np.random.default_rng(seed).permutation(len(groups))] = np.arange(len(groups)) % folds

    table = _members(groups, horizon, given)
    chances = np.empty(len(table.rows))
    for fold in range(folds):
        is_out = fold_of[table.group_of] == fold
        chances[is_out] = fit_trees(table.rows[~is_out], table.earns[~is_out], how=members, seed=seed + fold).chances(table.rows[is_out])
    of_members = calibrate(1.0 - chances, table.unit_of, ~table.earns, table.group_of_unit, confidence)
    all_steps = sum(group.env_steps for group in groups)
    outcomes = _outcomes_of_stops(of_members, table, 1.0 - chances, all_steps)
    if futility_floor is not None:
        groups = _stopped(groups, table, 1.0 - chances, threshold(of_members, futility_floor, "futility_floor"))
        _check(groups, horizon, wanted, folds)

    rows, group_of, at = _looks(groups, horizon, given, wanted, table, chances)
    is_equal = np.array([group.is_equal for group in groups])
    target = is_equal[group_of]
    scores = np.empty(len(rows))
    for fold in range(folds):
        is_out = fold_of[group_of] == fold
        scores[is_out] = fit_trees(rows[~is_out], target[~is_out], how=of_groups, seed=seed + fold).chances(rows[is_out])
    of_group = calibrate(scores, group_of, target, None, confidence)
    outcomes += _outcomes_of_cuts(of_group, groups, scores, group_of, at, all_steps)

    facts = {
        "groups": len(groups),
        "equal_groups": int(is_equal.sum()),
        "looks": len(rows),
        "folds": folds,
        "seed": seed,
        "brier_of_groups": _brier(of_group, scores, target),
        "brier_of_members": _brier(of_members, 1.0 - chances, ~table.earns),
        "highest_bound_of_groups": of_group.most,
        "highest_bound_of_members": of_members.most,
        "cross_fitted": outcomes,
    }
    return LearnedRule(
        inputs=given,
        horizon=horizon,
        group_size=len(groups[0].members),
        steps=wanted,
        futility_floor=futility_floor,
        member_model=fit_trees(table.rows, table.earns, how=members, seed=seed),
        member_calibration=of_members,
        group_model=fit_trees(rows, target, how=of_groups, seed=seed),
        group_calibration=of_group,
        provenance={**provenance, **facts},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Members:
    """All running members after each of their steps."""

    rows: Floats  # [M, F]
    earns: Bools  # [M] whether it earned anything more
    unit_of: Ints  # [M] number of the member
    group_of: Ints  # [M]
    starts: Ints  # [U] the first row of each member
    group_of_unit: Ints  # [U]

    def first(self, scores: Floats, least: float) -> Ints:
        """[U] the step after which each member first has such a score; 0: never."""
        found = np.zeros(len(self.starts), dtype=np.int64)
        hits = np.flatnonzero(scores >= least)[::-1]  # the earliest one is written last
        found[self.unit_of[hits]] = hits - self.starts[self.unit_of[hits]] + 1
        return found


def _members(groups: Sequence[PlayedGroup], horizon: int, inputs: tuple[str, ...]) -> _Members:
    rows: list[tuple[float, ...]] = []
    earns: list[bool] = []
    units: list[int] = []
    starts: list[int] = []
    group_of_unit: list[int] = []
    for number, group in enumerate(groups):
        for member in group.members:
            trace = MemberTrace(horizon, inputs, member.first_observation)
            starts.append(len(rows))
            for t, step in enumerate(member.steps[:-1], 1):  # after the last one it does not run any more
                rows.append(trace.add(step))
                earns.append(member.reward != member.earned_by(t))
                units.append(len(group_of_unit))
            group_of_unit.append(number)
    of_unit = np.array(group_of_unit, dtype=np.int64)
    unit_of = np.array(units, dtype=np.int64)
    return _Members(
        rows=np.array(rows, dtype=np.float64),
        earns=np.array(earns, dtype=np.bool_),
        unit_of=unit_of,
        group_of=of_unit[unit_of],
        starts=np.array(starts, dtype=np.int64),
        group_of_unit=of_unit,
    )


def _stopped(groups: Sequence[PlayedGroup], table: _Members, scores: Floats, least: float) -> list[PlayedGroup]:
    """The groups as they would have been with every member stopped whose score is high enough."""
    stops = iter(table.first(scores, least).tolist())
    return [
        replace(group, members=tuple(member.until(stop) for member, stop in zip(group.members, stops, strict=False))) for group in groups
    ]


def _looks(
    groups: Sequence[PlayedGroup], horizon: int, inputs: tuple[str, ...], steps: Sequence[int], table: _Members, chances: Floats
) -> tuple[Floats, Ints, Ints]:
    """[L, F] what the model of groups reads of every look at an open group, [L] at which, and [L] after which step."""
    rows, group_of, at = [], [], []
    size = len(groups[0].members)
    for number, group in enumerate(groups):
        starts = table.starts[number * size : (number + 1) * size]
        for look in looks(group, GroupTrace(horizon, inputs), steps):
            running = np.array(look.running, dtype=np.int64)  # `looks` names members by their place
            rows.append(np.concatenate([look.of_group, of_chances(chances[starts[running] + look.step - 1])]))
            group_of.append(number)
            at.append(look.step)
    return np.array(rows), np.array(group_of, dtype=np.int64), np.array(at, dtype=np.int64)


def _outcomes_of_stops(calibration: Calibration, table: _Members, scores: Floats, all_steps: int) -> list[dict[str, Any]]:
    """What stops at each floor would have come to: how many, how many rightly, and the share of all steps that they would have saved."""
    told = []
    for floor in FLOORS:
        first = table.first(scores, calibration.threshold(floor))
        stopped = np.flatnonzero(first)
        rows = table.starts[stopped] + first[stopped] - 1
        lengths = np.diff([*table.starts, len(table.rows)])[stopped] + 1  # the last step has no row
        saved = int((lengths - first[stopped]).sum())
        told.append(_outcome("stops", floor, len(stopped), int((~table.earns[rows]).sum()), saved / all_steps))
    return told


def _outcomes_of_cuts(
    calibration: Calibration, groups: Sequence[PlayedGroup], scores: Floats, group_of: Ints, at: Ints, all_steps: int
) -> list[dict[str, Any]]:
    """The same of cuts, on the groups as they are with the stops."""
    told = []
    for floor in FLOORS:
        first: dict[int, int] = {}
        for number, step in zip(group_of[found := scores >= calibration.threshold(floor)].tolist(), at[found].tolist(), strict=True):
            first.setdefault(number, step)
        saved = sum(max(0, len(member.steps) - step) for number, step in first.items() for member in groups[number].members)
        told.append(_outcome("cuts", floor, len(first), sum(groups[number].is_equal for number in first), saved / all_steps))
    return told


def _outcome(what: str, floor: float, decisions: int, right: int, saved: float) -> dict[str, Any]:
    return {"what": what, "floor": floor, "decisions": decisions, "right": right, "saved": saved}


def _brier(calibration: Calibration, scores: Floats, is_right: Bools) -> float:
    """Mean squared distance of the calibrated chance from the outcome."""
    places = np.searchsorted(calibration.scores, scores, side="right") - 1
    return float(np.mean((np.array(calibration.chances)[places] - is_right) ** 2))


def _check(groups: Sequence[PlayedGroup], horizon: int, steps: Sequence[int], folds: int) -> None:
    if folds < 2:
        raise ConfigError(f"folds: expected a whole number >= 2, got {folds!r} - what is calibrated must not have been fitted on")
    if not steps or steps[0] < 1 or steps[-1] >= horizon:
        raise ConfigError(f"steps: expected environment steps from 1 to {horizon - 1}, got {[*steps]} - nothing is left at the horizon")
    sizes = {len(group.members) for group in groups}
    if len(sizes) > 1:
        raise GateError(f"groups: expected groups of one size, got sizes {sorted(sizes)} - fit a rule for each")
    longest = max((len(member.steps) for group in groups for member in group.members), default=0)
    if longest > horizon:
        raise GateError(f"groups: expected trajectories of at most {horizon} steps, got one of {longest} - check the horizon")
    equal = sum(group.is_equal for group in groups)
    if min(equal, len(groups) - equal) < FEWEST:
        found = f"{equal} and {len(groups) - equal}"
        raise GateError(f"groups: expected at least {FEWEST} with equal rewards and {FEWEST} without, got {found} - record more")
