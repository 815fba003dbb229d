"""When not to trust a figure: plain sentences with the numbers, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from sluice.analysis.curves import Point
from sluice.analysis.fit import LEAST_CUTS, Fit
from sluice.gate.audit import clopper_pearson, lower_bound_clears

FEW: Final = 30
"""Groups of each kind (equal and different rewards) below which shares of them are hardly known: one group is more than three points."""

HARDLY: Final = 0.01
"""A saving below this share of all steps is not worth a false cut."""

_MOST_CUTS: Final = 1_000_000  # beyond it nobody records


def doubts_of_data(groups: int, zero_variance: int) -> list[str]:
    """Of what was recorded."""
    found = []
    for number, what in ((zero_variance, "equal rewards"), (groups - zero_variance, "different rewards")):
        if number < FEW:
            found.append(f"only {number} of {groups} groups have {what}: below {FEW} no threshold can be trusted - record more groups")
    return found


def doubts_of_point(point: Point | None, floor: float, confidence: float, chance: float, best: float) -> list[str]:
    """Of a rule on the groups that it was found on. `chance`: precision of cuts at random; `best`: what the oracle saves at the same K."""
    if point is None:
        return [
            f"no signal, K and threshold reach a precision of {floor:g} with at least {LEAST_CUTS} cuts: this gate would not pay here - "
            "try a lower floor, more groups, or other K"
        ]
    found = []
    low, _ = clopper_pearson(point.true_cuts, point.cut, confidence)
    if low < floor:
        found.append(
            f"too few cuts to trust the threshold: {point.true_cuts} of {point.cut} are right ({_percent(point.precision)}), and the lower "
            f"bound of that precision ({confidence:.0%}) is {_percent(low)}, below the floor of {_percent(floor)} - "
            f"{_more(point, floor, confidence)}"
        )
    if low <= chance:
        found.append(
            f"the rule may know nothing: cuts at random have a precision of {_percent(chance)} at K = {point.k}, and the lower bound of "
            f"its own is {_percent(low)} - what it cuts rightly may be luck"
        )
    if point.saving < HARDLY:
        found.append(
            f"the rule saves {_percent(point.saving)} of all environment steps; who knew every outcome would save {_percent(best)} at "
            f"K = {point.k} - it hardly pays here"
        )
    return found


def doubts_of_fit(fit: Fit) -> list[str]:
    """Of the choice itself."""
    found: list[str] = []
    held, wanted = fit.held_out, fit.wanted
    if fit.choice.point is None:
        return found
    if not fit.choice.holds:
        found.append(
            f"no floor that was tried holds {_percent(wanted)} on held-out groups: the rule is the best one on all of them, and its "
            "precision there is too good - record more groups, or ask for a lower floor"
        )
    if held.precision is not None and held.precision < wanted:
        found.append(
            f"chosen on part of the groups, rules like this one have a precision of {_percent(held.precision)} on the others "
            f"({held.true_cuts} of {held.cut} cuts), below the floor of {_percent(wanted)} - expect that, not the fitted figure"
        )
    elif held.precision is not None and held.low < wanted:
        found.append(
            f"the lower bound of the held-out precision ({fit.confidence:.0%}) is {_percent(held.low)}, below the floor of "
            f"{_percent(wanted)}: {held.cut} held-out cuts are too few to be sure"
        )
    if held.folds_without:
        found.append(f"in {held.folds_without} of {fit.folds} folds no rule reached the floor: the choice hangs on few groups")
    rules = [rule for rule in held.rules if rule is not None]
    if len({rule.signal for rule in rules}) > 1 or _spread([rule.k for rule in rules]) > max(2, fit.choice.point.k // 3):
        told = "; ".join(f"{rule.signal} < {rule.threshold:g} at {rule.k}" for rule in rules)
        found.append(f"the folds chose different rules ({told}): where so many are about as good, the exact one means little")
    return found


def cuts_needed(precision: float, floor: float, confidence: float) -> int | None:
    """How many cuts of this precision make a lower bound of at least `floor`. None: the precision is not above it."""
    if precision <= floor:
        return None
    n = LEAST_CUTS
    while n < _MOST_CUTS:
        if lower_bound_clears(math.floor(precision * n + 1e-9), n, floor, confidence) if floor < 1 else False:
            return n
        n += max(1, n // 50)
    return None


def _more(point: Point, floor: float, confidence: float) -> str:
    needed = cuts_needed(point.precision or 0.0, floor, confidence)
    if needed is None:
        word = "below" if (point.precision or 0.0) < floor else "no higher than"
        return f"its precision is {word} the floor: no number of groups will do, choose a stricter threshold"
    return f"at this precision it takes about {needed:,} cuts, that is some {math.ceil(needed / point.cut * point.groups):,} groups"


def _spread(values: Sequence[int]) -> int:
    return max(values) - min(values) if values else 0


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
