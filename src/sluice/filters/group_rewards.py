"""From whatever holds the rewards of a group to the few numbers that filters decide on.

Whether a group has spread is decided by comparing the rewards exactly, by value, as they came and before any rounding: 1/3 as a Fraction
differs from 1/3 as a float, 1 as a bool equals 1.0. `sluice.advantage` has the same rule, so that `std_filter` drops exactly the groups of
which `no_signal` says that they teach nothing.

Each member has one vote. A reward is missing when it is None, NaN or infinite; a missing reward is never counted as 0. Text, mappings
without a metric and rows of step rewards are the caller's mistake: `FilterError`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import compress
from numbers import Real
from typing import Any, Final, NamedTuple, TypeAlias

from sluice.errors import FilterError
from sluice.filters.context import FilterContext
from sluice.types import Group

GroupRewards: TypeAlias = Group | Collection[Any]
"""A group, or one reward per member: numbers, booleans, None, 0-dim arrays, mappings (with a metric), or a 1-dim array of any library."""

INCOMPLETE: Final = "incomplete"
"""Reason: a member has no finite reward, so that the group (or the response) cannot be judged."""

TRUNCATED: Final = "truncated"
"""Reason: no member enters statistics, and at least one of them was scored but masked as truncated."""

PLAIN_NUMBERS: Final = frozenset({float, int, bool})
NEGLIGIBLE: Final = 1e-6  # a spread below this share of the mean is computed with care: ten digits of a float64 are left for it
LARGEST: Final = Fraction(sys.float_info.max)


class RewardStats(NamedTuple):
    """What a filter decides on. A named tuple, since one is made for every group."""

    size: int  # members of the group
    n: int  # members in the statistics: counted, with a finite reward
    mean: float  # NaN with `fault`
    std: float  # sample standard deviation (ddof = 1); 0 exactly when all n rewards are equal, or n is 1; NaN with `fault`
    fault: str = ""  # reason why there is nothing to decide on; "" when there is


def read_group(group: Group, context: FilterContext) -> RewardStats:
    """Statistics over the counted members of a group. One without a finite reward is a fault, unless `min_members` have one."""
    if context.metric is None:
        values: list[Any] = [rollout.reward for rollout in group.rollouts]
    else:
        metric = context.metric
        members = [rollout for rollout, counted in zip(group.rollouts, group.counted, strict=True) if counted]
        scored = [rollout for rollout in members if rollout.failure is None]
        if scored and not any(metric in rollout.metrics for rollout in members):  # else it is missing for single members: no evidence
            _entry(scored[0].metrics, f"no member of group {group.group_id} (task {group.task.task_id!r}) has it: the first one", context)
        values = [rollout.metrics.get(metric) for rollout in group.rollouts]
    size = len(values)
    if False in group.counted:
        values = list(compress(values, group.counted))
    elif not PLAIN_NUMBERS.issuperset(map(type, values)):
        values = [number_of(value, index, context.where) for index, value in enumerate(values)]
    if not values:
        is_scored = any(rollout.reward is not None for rollout in group.rollouts)
        return RewardStats(size, 0, math.nan, math.nan, TRUNCATED if is_scored else INCOMPLETE)
    return _stats(values, size, context)


def read_sequence(rewards: Any, context: FilterContext) -> RewardStats:
    """The same for rewards given as a plain sequence, where every member counts."""
    values = list(rewards) if type(rewards) is list or type(rewards) is tuple else _as_list(rewards, context.where)
    if not values:
        raise FilterError(
            f"{context.where}: expected one reward per member, got none ({type(rewards).__name__}) - a group has at least one member"
        )
    if context.metric is not None:
        values = [None if value is None else _entry(value, f"member {index}", context) for index, value in enumerate(values)]
    if not PLAIN_NUMBERS.issuperset(map(type, values)):
        values = [number_of(value, index, context.where) for index, value in enumerate(values)]
    return _stats(values, len(values), context)


def sum_steps(step_rewards: Iterable[Iterable[Any]]) -> list[float | None]:
    """Make one outcome per rollout from the rewards of its steps (or tokens): their sum, as a filter wants it.

    `step_rewards` holds one row per rollout, of any length. A rollout with a missing step (None, NaN, infinite) has the outcome None; one
    without steps has 0.0.
    """
    outcomes: list[float | None] = []
    for index, row in enumerate(step_rewards):
        if isinstance(row, str | bytes | Mapping) or not isinstance(row, Iterable):
            raise FilterError(
                f"sum_steps: expected a row of step rewards for rollout {index}, got {_short(row)} - give one list per rollout"
            )
        steps = [number_of(step, index, "sum_steps") for step in row]
        try:
            outcomes.append(None if None in steps else math.fsum(steps))
        except OverflowError:  # beyond the range of a float: as good as infinite
            outcomes.append(None)
    return outcomes


def _stats(values: list[Any], size: int, context: FilterContext) -> RewardStats:
    """Mean and spread of numbers of Python's own. Equality is tested on the values as they came, before anything is made a float."""
    n = len(values)
    try:
        total = math.fsum(values)  # correctly rounded: the order of the members never matters
        if total - total != 0.0:  # NaN or infinite
            return _stats_of_present(values, size, context)
        first = values[0]
        if values.count(first) == n:
            return RewardStats(size, n, float(first), 0.0)
        mean = total / n
        std = math.dist(values, [mean] * n) / math.sqrt(n - 1)
    except (TypeError, ValueError, OverflowError):  # None; infinities of both signs; a sum beyond the range of a float
        return _stats_of_present(values, size, context)
    if not NEGLIGIBLE * abs(mean) < std < math.inf:
        std = _careful_std(values)
    return RewardStats(size, n, mean, std)


def _stats_of_present(values: list[Any], size: int, context: FilterContext) -> RewardStats:
    """The same when some reward is missing or the formulas overflow."""
    present = [number for index, value in enumerate(values) if (number := number_of(value, index, context.where)) is not None]
    n = len(present)
    if n < len(values):
        if context.min_members is None or n < context.min_members:
            return RewardStats(size, n, math.nan, math.nan, INCOMPLETE)
        return _stats(present, size, context)
    low, high = float(min(present)), float(max(present))
    mean = 2.0 * math.fsum(float(value) / (2 * n) for value in present)
    return RewardStats(size, n, min(max(mean, low), high), 0.0 if present.count(present[0]) == n else _careful_std(present))


def _careful_std(values: list[Any]) -> float:
    """Spread of rewards that differ by so little (against the digits of a float) or so much (against its range) that the formula fails."""
    exact, n = [Fraction(value) for value in values], len(values)
    low = min(exact)
    span = max(exact) - low
    units = [float((value - low) / span) for value in exact]  # 0 to 1
    std = span * Fraction(math.dist(units, [math.fsum(units) / n] * n) / math.sqrt(n - 1))
    return max(float(min(std, LARGEST)), math.ulp(0.0))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (OverflowError, ValueError):  # an integer beyond the range of a float; a signalling NaN
        return False


def number_of(value: Any, who: int | str, where: str) -> Any:
    """One reward as a plain number or a fraction of unchanged value, or None when it is missing (None, NaN, infinite).

    who: the member's place, or what messages call it. where: path of the configuration, for messages. Raises `FilterError` for what is no
    number: text, a mapping, a row of steps.
    """
    if value is None:
        return None
    if type(value) not in PLAIN_NUMBERS:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy scalars, 0-dim arrays and tensors
            item = value.item()
            value = value if type(item) is type(value) else item  # long doubles have no plain counterpart and stay what they are
        if value is None:
            return None
        if not isinstance(value, Real | Decimal):
            raise FilterError(f"{where}: {_not_a_number(value, f'member {who}' if isinstance(who, int) else who, where)}")
    if not _is_finite(value):
        return None
    if isinstance(value, int | float):
        return value
    return Fraction(*value.as_integer_ratio()) if hasattr(value, "as_integer_ratio") else float(value)


def _not_a_number(value: Any, who: str, where: str) -> str:
    expected = f"expected one number as the reward of {who}, got"
    if isinstance(value, Mapping):
        fields = sorted(map(str, value))
        return f"{expected} a mapping with the fields {fields} - set {where}.metric to the field that the filter shall read"
    if isinstance(value, str | bytes):
        return f"{expected} the text {value!r} - convert it where the reward is made"
    if hasattr(value, "__len__") or hasattr(value, "shape"):
        return (
            f"{expected} {type(value).__name__} {_short(value)} - each member has one vote, however many rows or steps it has: "
            "reduce step rewards to outcomes with sluice.filters.sum_steps"
        )
    return f"{expected} {_short(value)} ({type(value).__name__}) - convert it where the reward is made"


def _entry(scores: Any, who: str, context: FilterContext) -> Any:
    """The named metric of one member. Never a substitute: what is not there is an error."""
    where, metric = context.where, context.metric
    if not isinstance(scores, Mapping):
        raise FilterError(
            f"{where}.metric is {metric!r}, so that a mapping with this field was expected for {who}, got {_short(scores)} - "
            "give mappings, or leave the metric out to judge plain rewards"
        )
    if metric not in scores:
        fields = sorted(map(str, scores))
        raise FilterError(
            f"{where}.metric is {metric!r}, but {who} has only the fields {fields} - name one of these, or have the verifier return "
            f"{metric!r}; the reward is never read in its place"
        )
    return scores[metric]


def _as_list(rewards: Any, where: str) -> list[Any]:
    """The members of anything that is a row of rewards."""
    expected = f"{where}: expected one reward per member (a group, or a list of numbers), got"
    if isinstance(rewards, str | bytes | Mapping | set | frozenset):
        raise FilterError(f"{expected} {type(rewards).__name__} {_short(rewards)} - give a list with one entry per member")
    if hasattr(rewards, "ndim") and hasattr(rewards, "tolist"):  # arrays, tensors, series: recognised by what they offer
        if rewards.ndim != 1:
            raise FilterError(
                f"{expected} {type(rewards).__name__} of shape {tuple(rewards.shape)} - one dimension is needed, one vote per member: "
                "reduce step rewards to outcomes with sluice.filters.sum_steps"
            )
        return list(rewards.tolist())
    if not isinstance(rewards, Iterable) or not hasattr(rewards, "__len__"):
        raise FilterError(f"{expected} {_short(rewards)} ({type(rewards).__name__}) - give a list with one entry per member")
    return list(rewards)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
