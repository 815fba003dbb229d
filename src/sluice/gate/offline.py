"""The gate on recorded groups that ran to their end: what a rule would have cut, how often rightly, and what that would have saved.

One `RecordedGroups` holds N groups as they stood at one K. A cut is right when the group turned out to have equal rewards (zero variance).

- `evaluate`: counts, precision, recall, savings, share of the advantages kept, for a rule or for any choice of cuts
- `oracle`: the same for the best choice there is: every zero-variance group
- `spearman`, `auroc`: how much a signal knows of the outcome, exact with ties
- `bootstrap`: intervals of all figures, by drawing groups again

The surprising part: all groups are decided on here, those too whose members all ended before K (online there is nothing left to save in
them). Their cuts count, and save nothing by real step counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.errors import GateError
from sluice.gate.divergence import SIGNALS, check_k
from sluice.gate.rules import Rule, margin_of

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

ADVANTAGE_EPS: Final = 1e-8
"""Added to the standard deviation that an advantage is divided by, as in `sluice.advantage`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedGroups:
    """N finished groups at one K. Raises `GateError` for columns of different lengths, NaN, and signals outside [0, 1]."""

    signals: Mapping[str, Floats]  # [N] each: what a rule may read
    zero_variance: Bools  # [N] whether all rewards of the group were equal
    k: int  # environment step of the signals
    horizon: int  # most environment steps of a trajectory
    reward_var: Floats | None = None  # [N] population variance of the rewards; None: not known
    lengths: Ints | None = None  # [N, G] environment steps of each member; None: not known
    task_types: Sequence[str | None] | None = None  # [N]; None: not known

    def __post_init__(self) -> None:
        check_k(self.k)
        if self.k >= self.horizon:
            raise GateError(f"k: expected a step below the horizon {self.horizon}, got {self.k} - nothing is left to save there: lower k")
        n = len(self.zero_variance)
        if not n:
            raise GateError("groups: expected at least one, got none - record some")
        columns: dict[str, Any] = {
            **{f"signals.{name}": column for name, column in self.signals.items()},
            **{name: getattr(self, name) for name in ("reward_var", "lengths", "task_types")},
        }
        for name, column in columns.items():
            if column is not None and len(column) != n:
                raise GateError(f"{name}: expected one entry per group, that is {n}, got {len(column)} - every column needs all groups")
        for name, column in self.signals.items():
            _refuse_rows(f"signals.{name}", ~((column >= 0) & (column <= 1)), column, "a number >= 0 and <= 1")
        if self.reward_var is not None:
            _refuse_rows("reward_var", ~(np.isfinite(self.reward_var) & (self.reward_var >= 0)), self.reward_var, "a finite variance >= 0")
            _refuse_rows(
                "reward_var", (self.reward_var == 0) != self.zero_variance, self.reward_var, "0 exactly where zero_variance is true"
            )
        if self.lengths is not None and (self.lengths.ndim != 2 or (self.lengths < 0).any() or (self.lengths > self.horizon).any()):
            raise GateError(
                f"lengths: expected one row of members per group, with 0 to {self.horizon} steps each, got {_told(self.lengths)} - count "
                "environment steps, and check the horizon"
            )

    def __len__(self) -> int:
        return len(self.zero_variance)

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any], *, k: int, horizon: int) -> RecordedGroups:
        """From named columns: some of the seven signals, `zero_variance` or `reward_var` (or both), and `lengths`, `task_type` where known.

        Other columns are not read. Raises `GateError` for columns that are missing.
        """
        found = {name: _numbers(name, columns[name]) for name in SIGNALS if name in columns}
        if not found:
            raise GateError(f"columns: expected at least one of {', '.join(SIGNALS)}, got {', '.join(columns)} - add one, or rename it")
        if "zero_variance" not in columns and "reward_var" not in columns:
            raise GateError(f"columns: expected zero_variance or reward_var, got {', '.join(columns)} - without them no cut can be judged")
        variance = _numbers("reward_var", columns["reward_var"]) if "reward_var" in columns else None
        zero: npt.NDArray[Any]
        if "zero_variance" in columns:
            zero = np.asarray(columns["zero_variance"])
            if zero.dtype != np.bool_ and zero.size:
                raise GateError(f"zero_variance: expected true or false, got {zero.dtype} - convert the column")
        else:
            assert variance is not None
            zero = np.equal(variance, 0)
        return cls(
            signals=found,
            zero_variance=zero,
            k=k,
            horizon=horizon,
            reward_var=variance,
            lengths=_numbers("lengths", columns["lengths"]).astype(np.int64) if "lengths" in columns else None,
            task_types=[*columns["task_type"]] if "task_type" in columns else None,
        )

    def cuts(self, rule: Rule) -> Bools:
        """[N] What a rule cuts."""
        names = [*self.signals]
        rows = zip(*(self.signals[name].tolist() for name in names), strict=True)
        types = self.task_types or [None] * len(self)
        return np.array(
            [margin_of(rule, dict(zip(names, row, strict=True)), kind) < 1 for row, kind in zip(rows, types, strict=True)], dtype=np.bool_
        )

    def take(self, chosen: npt.NDArray[Any]) -> RecordedGroups:
        """Some of the groups, by mask or by index; one may come more than once."""
        index = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        return RecordedGroups(
            signals={name: column[index] for name, column in self.signals.items()},
            zero_variance=self.zero_variance[index],
            k=self.k,
            horizon=self.horizon,
            reward_var=None if self.reward_var is None else self.reward_var[index],
            lengths=None if self.lengths is None else self.lengths[index],
            task_types=None if self.task_types is None else [self.task_types[i] for i in index.tolist()],
        )

    def by_task_type(self) -> dict[str, RecordedGroups]:
        """The groups of each task type, in order of their names. Those without one are left out."""
        types = np.array([kind or "" for kind in self.task_types or ()])
        return {kind: self.take(types == kind) for kind in sorted({*types.tolist()} - {""})}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """What a choice of cuts comes to."""

    groups: int
    cut: int
    true_cuts: int  # TP: with equal rewards
    false_cuts: int  # FP
    missed: int  # FN: equal rewards, not cut
    precision: float | None  # TP / cut; None: nothing was cut
    recall: float | None  # TP / (TP + FN); None: no group has equal rewards
    safe_saving: float  # TP x (horizon - K) / (N x horizon): a share of the steps if every trajectory ran to the horizon
    raw_saving: float  # the same for all cuts
    safe_step_saving: float | None  # the same by real step counts: share of all steps that right cuts save; None: lengths are not known
    raw_step_saving: float | None
    advantage_kept: (
        float | None
    )  # L2 norm of the advantages of groups that are not cut, as a share of all; None: variances are not known, or all 0


def evaluate(groups: RecordedGroups, rule: Rule | Bools, scale: str = "std") -> OperatingPoint:
    """What a rule, or a mask of cuts [N], comes to. `scale`: that of the advantages, "std" (GRPO) or "none" (centred only)."""
    if scale not in ("std", "none"):
        raise GateError(f"scale: expected 'std' or 'none', got {scale!r} - name that of your advantages")
    cuts = rule if isinstance(rule, np.ndarray) else groups.cuts(rule)
    if cuts.shape != (len(groups),) or cuts.dtype != np.bool_:
        raise GateError(f"cuts: expected one truth value per group, [{len(groups)}], got {_told(cuts)} - give a mask, True where cut")
    n, zero = len(groups), groups.zero_variance
    cut, true = int(cuts.sum()), int((cuts & zero).sum())
    missed = int(zero.sum()) - true
    span = (groups.horizon - groups.k) / (n * groups.horizon)
    safe_steps = raw_steps = None
    if groups.lengths is not None and (total := int(groups.lengths.sum())):
        remaining = np.maximum(groups.lengths - groups.k, 0).sum(axis=1)
        safe_steps, raw_steps = float(remaining[cuts & zero].sum()) / total, float(remaining[cuts].sum()) / total
    return OperatingPoint(
        groups=n,
        cut=cut,
        true_cuts=true,
        false_cuts=cut - true,
        missed=missed,
        precision=true / cut if cut else None,
        recall=true / (true + missed) if true + missed else None,
        safe_saving=true * span,
        raw_saving=cut * span,
        safe_step_saving=safe_steps,
        raw_step_saving=raw_steps,
        advantage_kept=_advantage_kept(groups, cuts, scale),
    )


def oracle(groups: RecordedGroups, scale: str = "std") -> OperatingPoint:
    """What the best choice at this K comes to: every group that ends with equal rewards is cut, and no other."""
    return evaluate(groups, groups.zero_variance, scale)


def bootstrap(
    groups: RecordedGroups, rule: Rule, rng: np.random.Generator, draws: int = 1000, confidence: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Percentile intervals of every figure of `evaluate`: groups are drawn again, with replacement, `draws` times.

    Draws in which a figure does not exist (a precision without cuts) are left out of its interval; a figure that never exists is absent.
    The rule is the same in all draws: this is the spread of its figures, not that of fitting it.
    """
    cuts = groups.cuts(rule)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        index = rng.integers(0, len(groups), len(groups))
        point = evaluate(groups.take(index), cuts[index])
        for one in fields(point):
            if (value := getattr(point, one.name)) is not None:
                found.setdefault(one.name, []).append(value)
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    return {name: (float(low), float(high)) for name, values in found.items() for low, high in [np.quantile(values, ends)]}


def spearman(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float | None:
    """Spearman's rank correlation, ties with their mean rank. None: one side is constant, or there are less than two pairs."""
    a, b = _column("x", x), _column("y", y)
    if len(a) != len(b):
        raise GateError(f"spearman: expected columns of one length, got {len(a)} and {len(b)} - give one entry per group in both")
    left, right = (2 * _ranks(column) - len(a) - 1 for column in (a, b))  # whole numbers, with mean 0
    spread = float(left @ left) * float(right @ right)
    return float(left @ right) / math.sqrt(spread) if spread else None


def auroc(signal: Sequence[float] | Floats, is_positive: Sequence[bool] | Bools) -> float | None:
    """The chance that a positive group has the higher signal, a tie counting half. None: one of the two kinds is missing.

    With the published convention the positive groups are those with reward variance.
    """
    values, positive = _column("signal", signal), np.asarray(is_positive, dtype=np.bool_)
    if len(values) != len(positive):
        raise GateError(f"auroc: expected columns of one length, got {len(values)} and {len(positive)} - give one entry per group in both")
    n = int(positive.sum())
    others = len(positive) - n
    if not n or not others:
        return None
    return (float(_ranks(values)[positive].sum()) - n * (n + 1) / 2) / (n * others)


def _advantage_kept(groups: RecordedGroups, cuts: Bools, scale: str) -> float | None:
    """With `std` the squared advantages of a group with spread sum up to G, whatever its rewards, with `none` to G x variance."""
    if groups.reward_var is None:
        return None
    weight = groups.reward_var / (np.sqrt(groups.reward_var) + ADVANTAGE_EPS) ** 2 if scale == "std" else groups.reward_var
    if groups.lengths is not None:
        weight = weight * groups.lengths.shape[1]
    whole = math.fsum(weight.tolist())
    return math.sqrt(math.fsum(weight[~cuts].tolist()) / whole) if whole else None


def _ranks(values: Floats) -> Floats:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, index, number = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(number)
    ranks: Floats = (last - (number - 1) / 2)[index]
    return ranks


def _numbers(name: str, values: Any) -> Floats:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise GateError(f"{name}: expected numbers, got what numpy cannot read ({error}) - correct or leave out these groups") from None


def _column(name: str, values: Any) -> Floats:
    column = _numbers(name, values)
    if column.ndim != 1:
        raise GateError(f"{name}: expected one number per group, got shape {column.shape} - give a flat list")
    _refuse_rows(name, np.isnan(column), column, "a number")
    return column


def _refuse_rows(name: str, bad: Bools, column: npt.NDArray[Any], expected: str) -> None:
    if bad.any():
        rows = np.flatnonzero(bad)
        some = ", ".join(f"{column[row]!r} in row {row}" for row in rows[:3].tolist())
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        raise GateError(f"{name}: expected {expected}, got {some}{more} - correct or leave out these groups")


def _told(array: npt.NDArray[Any]) -> str:
    return f"shape {array.shape} of {array.dtype}" + (f", from {array.min()} to {array.max()}" if array.size else "")
