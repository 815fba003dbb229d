"""From rewards to advantages: each rollout is compared with the siblings of its own group. NumPy only.

What holds for every function here:

- Groups are told apart by id, never by position; sizes may differ and members may stand anywhere. Ids are compared by value, 0-dim arrays
  and tensors too; one that tells no group from another (None, NaN, an array) is a `ValueError`.
- One entry is one rollout, with one vote. Rollouts that were split into rows are folded first (`fold_rows`) and unfolded afterwards.
- A member that is masked out, or has no reward (None or NaN), is outside every statistic and has advantage 0. An infinite reward, and a
  NaN that an explicit mask calls present, is a `ValueError` that names the entry.
- A group without spread has advantage exactly 0; whether it has is decided by comparing the rewards exactly, by value, as they came and
  before any rounding: 1/3 as a Fraction differs from 1/3 as a float, True equals 1.0. The same holds for a group of which one member is
  left. `sluice.filters` has the same rule, so that `std_filter` drops exactly the groups of two or more that `no_signal` names.
- An advantage is always finite. Where it is in units of the reward and too large for a float64, it is a `ValueError` that names the group.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_PLAIN_IDS: Final = frozenset({int, str, bool, bytes})
_EXACT_INT: Final = 2**53  # integers up to this are the same as floats
_HALF_RANGE: Final = sys.float_info.max / 2  # the difference of two numbers below this is finite


def group_relative(
    rewards: Any, group_ids: Any, mask: Any = None, scale: Literal["std", "none"] = "std", ddof: int = 1, eps: float = 1e-8
) -> Floats:
    """Reward minus the mean of its group, and with scale "std" divided by (standard deviation of its group + eps). [N]

    `rewards`: [N] raw rewards, one per rollout; None or NaN where there is none. `group_ids`: [N] anything hashable. `mask`: [N] True where
    the rollout counts; None: all that have a reward. `ddof`: 1 for the sample deviation, 0 for that of the population. `eps` is in units of
    the reward; with a tiny spread it makes advantages smaller, never larger: no |advantage| exceeds (G - 1) / sqrt(G) with ddof = 1, or
    sqrt(G - 1) with ddof = 0. scale "std" is GRPO (arXiv 2402.03300), "none" only centres (Dr. GRPO, arXiv 2503.20783).
    Raises ValueError for lengths that differ, entries that are no finite numbers, settings out of range, and with scale "none" for
    advantages beyond a float64.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and at least 0, got {eps!r}")
    groups = _Groups.read(rewards, group_ids, mask)
    index, n, span = groups.index, groups.n, groups.span
    mean = groups.sum(groups.unit) / np.maximum(n, 1)
    centred: Floats = np.where(groups.present, groups.unit - mean[index], 0.0)
    if scale == "none":
        return groups.in_units_of_the_reward(centred)
    std = np.sqrt(groups.sum(centred * centred) / np.maximum(n - ddof, 1))
    with np.errstate(over="ignore"):  # a span so small that eps is everything: the quotient is 0, as it should be
        divisor = std + np.divide(eps / groups.shrink, span, out=np.zeros_like(span), where=span > 0)
    advantages = np.zeros_like(centred)
    np.divide(centred, divisor[index], out=advantages, where=span[index] > 0)
    return advantages


def leave_one_out(rewards: Any, group_ids: Any, mask: Any = None) -> Floats:
    """Reward minus the mean reward of the other members of its group (RLOO, arXiv 2402.14740). [N]

    Never divided by a spread, so that a lone success among equal failures has an advantage of the size of its reward. Arguments and errors
    are those of `group_relative`.
    """
    groups = _Groups.read(rewards, group_ids, mask)
    n, total = groups.n[groups.index], groups.sum(groups.unit)[groups.index]
    advantages = np.zeros_like(total)
    np.divide(n * groups.unit - total, n - 1, out=advantages, where=groups.present & (n > 1))
    return groups.in_units_of_the_reward(advantages)


def no_signal(rewards: Any, group_ids: Any, mask: Any = None) -> dict[Hashable, bool]:
    """Which groups teach nothing, by group id in order of first appearance: those whose present rewards are all equal, or fewer than two.

    A property of each group alone: it does not depend on other groups, nor on how advantages are scaled. Arguments and errors are those of
    `group_relative`.
    """
    groups = _Groups.read(rewards, group_ids, mask)
    return dict(zip(groups.ids, (groups.span == 0).tolist(), strict=True))


def normalise_by_function(
    rewards: Mapping[str, Any], group_ids: Any, mask: Any = None, scale: Literal["std", "none"] = "std", ddof: int = 1, eps: float = 1e-8
) -> dict[str, Floats]:
    """`group_relative` of each of several reward functions by itself; NaN where that function gave nothing. Function name -> [N]

    What one function misses touches neither the other functions nor its own values elsewhere. Deal with the NaN before adding them up.
    Arguments and errors are those of `group_relative`; here the mask may cover entries without a reward.
    """
    normalised = {}
    for name, values in rewards.items():
        try:
            has_reward = _read_rewards(values)[1]
            counted = None if mask is None else _read_mask(mask, len(has_reward)) & has_reward
            normalised[name] = np.where(has_reward, group_relative(values, group_ids, counted, scale, ddof, eps), np.nan)
        except ValueError as error:
            raise ValueError(f"reward function {name!r}: {error}") from None
    return normalised


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRows:
    """Rollouts that were split into several rows, as one entry per rollout."""

    rollout_ids: tuple[Hashable, ...]  # [R] in order of first appearance
    group_ids: tuple[Hashable, ...]  # [R]
    rewards: tuple[float | None, ...]  # [R] None: it has none
    rollout_of_row: Indices  # [N] index into the above

    def unfold(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give each row the value of its rollout: [R] -> [N]."""
        if np.shape(values) != (len(self.rollout_ids),):
            raise ValueError(f"unfold: expected one value per rollout, shape ({len(self.rollout_ids)},), got shape {np.shape(values)}")
        return np.asarray(values)[self.rollout_of_row]


def fold_rows(
    row_rewards: Sequence[Any],
    rollout_ids: Sequence[Hashable],
    group_ids: Sequence[Hashable],
    rollout_rewards: Mapping[Any, Any] | None = None,
) -> FoldedRows:
    """Make one entry per rollout out of rows, so that a rollout has one vote however many rows it has.

    `row_rewards`, `rollout_ids`, `group_ids`: [N], one per row. `rollout_rewards`: the reward of each rollout by its id; then `row_rewards`
    is not looked at. Raises ValueError when rows of one rollout name different groups, or different rewards without `rollout_rewards`.
    """
    if not len(row_rewards) == len(rollout_ids) == len(group_ids):
        raise ValueError(
            f"fold_rows: expected one reward, rollout id and group id per row, got {len(row_rewards)} rewards, "
            f"{len(rollout_ids)} rollout ids and {len(group_ids)} group ids"
        )
    position: dict[Hashable, int] = {}
    groups: list[Hashable] = []
    rewards: list[float | None] = []
    rows = np.empty(len(rollout_ids), dtype=np.intp)
    for row, (rollout, group) in enumerate(zip(read_ids(rollout_ids, "rollout id"), read_ids(group_ids, "group id"), strict=True)):
        if rollout_rewards is None:
            reward = _read_number(row_rewards[row], row)
        elif rollout in rollout_rewards:
            reward = _read_number(rollout_rewards[rollout], row)
        else:
            raise ValueError(f"fold_rows: rollout_rewards has no reward for rollout {rollout!r} (row {row}) - give one for every rollout")
        index = position.setdefault(rollout, len(position))
        rows[row] = index
        if index == len(rewards):
            groups.append(group)
            rewards.append(reward)
        elif groups[index] != group:
            raise ValueError(f"fold_rows: row {row} of rollout {rollout!r} is in group {group!r}, an earlier one in {groups[index]!r}")
        elif rewards[index] != reward:
            raise ValueError(
                f"fold_rows: row {row} of rollout {rollout!r} has reward {reward!r}, an earlier one {rewards[index]!r} - a rollout has one "
                "reward: give it in rollout_rewards"
            )
    return FoldedRows(rollout_ids=tuple(position), group_ids=tuple(groups), rewards=tuple(rewards), rollout_of_row=rows)


def to_tokens(advantage: float, masks: Sequence[Any]) -> list[Floats]:
    """Spread the advantage of one rollout over its steps: the scalar times each step's own mask. One [T_i] per step, as the masks are."""
    return [advantage * np.asarray(mask, dtype=np.float64) for mask in masks]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Rewards sorted into groups, each measured in its own unit: 0 is the smallest reward of its group, 1 the largest.

    So neither a large common offset nor a very small or large spread costs digits, and neither a difference nor a square overflows.
    """

    ids: tuple[Hashable, ...]  # [K] in order of first appearance
    index: Indices  # [N] into ids
    present: Bools  # [N] in the statistics
    unit: Floats  # [N] (reward - smallest of its group) / span; 0 where not present or without spread
    span: Floats  # [K] (largest minus smallest) / shrink; 0 exactly when the present rewards are equal, or fewer than two
    shrink: Floats  # [K] 1, or 2 where a reward is so large that the difference might be beyond a float64
    n: Floats  # [K] number of present members, as float

    def sum(self, values: Floats) -> Floats:
        """Sum by group of values that are 0 where not present. [N] -> [K]"""
        return np.bincount(self.index, weights=values, minlength=len(self.ids)).astype(np.float64, copy=False)

    def in_units_of_the_reward(self, values: Floats) -> Floats:
        """Values in units of their group's spread, times that. Raises ValueError beyond a float64. [N] -> [N]"""
        with np.errstate(over="ignore"):
            scaled: Floats = values * self.span[self.index] * self.shrink[self.index]
        bad = np.flatnonzero(~np.isfinite(scaled))
        if len(bad):
            raise ValueError(
                f"expected rewards whose distance from the mean of their group fits into a float64, got a larger one at index {bad[0]} "
                f"(group {self.ids[self.index[bad[0]]]!r}) - scale the rewards down, check the verifier"
            )
        return scaled

    @classmethod
    def read(cls, rewards: Any, group_ids: Any, mask: Any) -> _Groups:
        """Check the arguments of the public functions and measure."""
        values, has_reward = _read_rewards(rewards)
        ids, index = _read_ids(group_ids)
        if len(index) != len(values):
            raise ValueError(f"expected one group id per reward, got {len(index)} group ids for {len(values)} rewards")
        present = has_reward if mask is None else _read_mask(mask, len(values))
        bad = np.flatnonzero(present & ~(has_reward & _is_finite(values)))
        if len(bad):
            came = f"{values[bad[0]]} or a number beyond a float64" if has_reward[bad[0]] else "None or NaN"
            raise ValueError(
                f"expected a finite reward at index {bad[0]} (group {ids[index[bad[0]]]!r}), got {came} - give None or NaN for a "
                "reward that is missing, and mask it out when there is a mask"
            )
        unit, span, shrink = _measure(values, present, index, len(ids))
        return cls(
            ids=ids,
            index=index,
            present=present,
            unit=unit,
            span=span,
            shrink=shrink,
            n=np.bincount(index[present], minlength=len(ids)).astype(np.float64),
        )


def _measure(values: npt.NDArray[Any], present: Bools, index: Indices, k: int) -> tuple[Floats, Floats, Floats]:
    """Unit [N], span [K] and shrink [K] of `_Groups`.

    Differences are taken in the type of the rewards, so that what differs there differs here.
    """
    unit, span, shrink = np.zeros(len(index)), np.zeros(k), np.ones(k)
    at = np.flatnonzero(present)
    order = at[np.argsort(index[at], kind="stable")]
    if not len(order):
        return unit, span, shrink
    starts = np.flatnonzero(np.diff(index[order], prepend=-1))
    group = index[order[starts]]  # of each run in `ordered`
    ordered, members = values[order], np.diff(starts, append=len(order))
    if ordered.dtype == object:
        for start, size, which in zip(starts, members, group, strict=True):
            unit[order[start : start + size]], span[which], shrink[which] = _measure_exactly(ordered[start : start + size])
        return unit, span, shrink
    if ordered.dtype.kind == "f":
        is_large = np.maximum.reduceat(np.abs(ordered), starts) > _HALF_RANGE
        shrink[group] = np.where(is_large, 2.0, 1.0)
        ordered = np.where(np.repeat(is_large, members), ordered / 2, ordered)
    low = np.repeat(np.minimum.reduceat(ordered, starts), members)
    distance = (ordered - low).astype(np.float64)
    span[group] = np.maximum.reduceat(distance, starts)
    np.divide(distance, span[index[order]], out=distance, where=span[index[order]] > 0)
    unit[order] = distance
    return unit, span, shrink


def _measure_exactly(members: npt.NDArray[Any]) -> tuple[list[float], float, float]:
    """Unit, span and shrink of one group of fractions."""
    low = min(members)
    span = max(members) - low
    if not span:
        return [0.0] * len(members), 0.0, 1.0
    shrink = 1 if span <= _HALF_RANGE else 2
    return [float((reward - low) / span) for reward in members], max(float(span / shrink), math.ulp(0.0)), float(shrink)


def _read_rewards(rewards: Any) -> tuple[npt.NDArray[Any], Bools]:
    """Rewards in a type that holds them and their differences exactly (0 where missing), and where there is one. [N], [N]

    The type is float64, int64 or uint64, or fractions as objects where none of them is exact.
    """
    if isinstance(rewards, np.ndarray) and rewards.dtype.kind in "biuf" and rewards.dtype != np.longdouble and rewards.ndim == 1:
        values = rewards
        has_reward = ~np.isnan(values)
    else:
        numbers = [_read_number(item, position) for position, item in enumerate(_listed(rewards, "reward"))]
        has_reward = np.array([number is not None for number in numbers], dtype=np.bool_)
        values = _array([0 if number is None else number for number in numbers])
    if values.dtype in (np.object_, np.uint64):
        return values, has_reward
    if values.dtype.kind in "iu":
        values = values.astype(np.int64)
        is_too_wide = len(values) > 0 and int(values.max()) - int(values.min()) > np.iinfo(np.int64).max
        return (_fractions(values.tolist()) if is_too_wide else values), has_reward
    return values.astype(np.float64), has_reward


def _array(numbers: Sequence[Any]) -> npt.NDArray[Any]:
    """Numbers of Python in the smallest type that holds every one exactly."""
    kinds = set(map(type, numbers))
    if kinds <= {int, bool} and all(-(2**63) <= number < 2**63 for number in numbers):
        return np.array(numbers, dtype=np.int64)
    if kinds <= {float, int, bool} and all(type(number) is float or abs(number) <= _EXACT_INT for number in numbers):
        return np.array(numbers, dtype=np.float64)
    return _fractions(numbers)


def _fractions(numbers: Sequence[Any]) -> npt.NDArray[Any]:
    array = np.empty(len(numbers), dtype=object)
    array[:] = [number if isinstance(number, float) and math.isinf(number) else Fraction(number) for number in numbers]
    return array


def _is_finite(values: npt.NDArray[Any]) -> Bools:
    finite: Bools = np.isfinite(values.astype(np.float64))
    return finite


def _read_number(item: Any, position: int) -> Any:
    """One reward as an int, float or fraction of the same value; None when it is missing, infinite when it is beyond a float64."""
    if getattr(item, "shape", None) == () and hasattr(item, "item") and not isinstance(item, np.longdouble):
        item = item.item()  # numpy scalars, 0-dim arrays and tensors
    if item is None:
        return None
    if not isinstance(item, Real | Decimal):
        raise ValueError(
            f"expected one number as the reward at index {position}, got {item!r} - one entry is one rollout: sum the rewards of its "
            "steps, and fold its rows with fold_rows"
        )
    if isinstance(item, Decimal) and item.is_nan():
        return None
    exact: Any = item
    try:
        number = float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
    if math.isnan(number):
        return None
    if isinstance(exact, float | int):
        return exact
    return Fraction(*exact.as_integer_ratio()) if math.isfinite(number) and hasattr(exact, "as_integer_ratio") else number


def _read_ids(group_ids: Any) -> tuple[tuple[Hashable, ...], Indices]:
    """The different ids in order of first appearance [K], and which of them each entry has [N]."""
    if isinstance(group_ids, np.ndarray) and group_ids.dtype.kind in "iu" and group_ids.ndim == 1:
        ids, first, index = np.unique(group_ids, return_index=True, return_inverse=True)
        by_appearance = np.argsort(first)
        rank = np.empty(len(ids), dtype=np.intp)
        rank[by_appearance] = np.arange(len(ids))
        return tuple(ids[by_appearance].tolist()), rank[index]
    position: dict[Hashable, int] = {}
    indices = [position.setdefault(group_id, len(position)) for group_id in read_ids(group_ids, "group id")]
    return tuple(position), np.array(indices, dtype=np.intp)


def read_ids(ids: Any, what: str) -> list[Hashable]:
    """Ids that are equal exactly when they mean the same: numpy scalars and 0-dim arrays and tensors as the values that they hold. [N]

    what: "group id" or the like, for messages. Raises ValueError for ids that cannot be compared: None, NaN, arrays, whatever has no hash.
    """
    listed = _listed(ids, what)
    if _PLAIN_IDS.issuperset(map(type, listed)):
        return listed
    return [_read_id(item, position, what) for position, item in enumerate(listed)]


def _read_id(item: Any, position: int, what: str) -> Hashable:
    value = _plain_id(item)
    try:
        hash(value)
        tells_nothing = value is None or getattr(value, "shape", ()) != () or bool(value != value)  # noqa: PLR0124 - a NaN
    except (TypeError, ValueError):
        tells_nothing = True
    if tells_nothing:
        raise ValueError(f"expected {what}s that tell one from another, got {item!r} at index {position} - give a number or a text")
    return cast("Hashable", value)


def _plain_id(item: Any) -> Any:
    if getattr(item, "shape", None) == () and hasattr(item, "item"):
        return item.item()
    return tuple([_plain_id(part) for part in item]) if type(item) is tuple else item


def _read_mask(mask: Any, n: int) -> Bools:
    array = np.asarray(_listed(mask, "mask entry"))
    if len(array) != n:
        raise ValueError(f"expected one mask entry per reward, got {len(array)} for {n} rewards")
    if n and (array.ndim != 1 or array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all()):
        raise ValueError(f"expected a mask of true and false, one per rollout, got {array!r}")
    return array.astype(np.bool_)


def _listed(values: Any, what: str) -> list[Any]:
    """The entries of a list, tuple, array or tensor of one dimension."""
    if getattr(values, "ndim", 1) != 1:
        raise ValueError(f"expected one {what} per rollout, shape [N], got shape {tuple(values.shape)} - one entry is one rollout")
    if hasattr(values, "tolist"):
        return list(values.tolist())
    if isinstance(values, str | bytes | Mapping | set | frozenset) or not hasattr(values, "__iter__"):
        hint = ", which has no order and holds equal values once" if isinstance(values, set | frozenset) else ""
        raise ValueError(
            f"expected one {what} per rollout, in a list or array, got {values!r} ({type(values).__name__}{hint}) - give a list"
        )
    return list(values)
