"""Every threshold of a signal at once: groups in the order of their signal, and running sums of what a cut of all below comes to.

The figures are those of `sluice.gate.offline.evaluate`, for all thresholds that make a difference: one between any two values that occur.
Of the thresholds that cut the same groups the roundest one is taken, in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.analysis.prefixes import Floats, Ints
from sluice.analysis.recorded import Recorded
from sluice.gate.offline import ADVANTAGE_EPS, Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One rule, `signal` at K below a threshold, and what it comes to on some groups."""

    signal: str
    k: int
    threshold: float
    groups: int
    zero_variance: int  # groups with equal rewards
    decided: int  # groups that a running gate decides on at K
    cut: int
    left_alone: int  # groups below the threshold that it does not decide on: they had ended, or finished members had different rewards
    true_cuts: int  # TP: with equal rewards
    false_cuts: int  # FP
    precision: float | None  # None: nothing was cut
    recall: float | None  # None: no group has equal rewards
    safe_saving: float  # right cuts x (horizon - K) / (groups x horizon)
    raw_saving: float  # the same for all cuts
    safe_step_saving: float | None  # share of all environment steps that right cuts save; None: lengths are not known
    raw_step_saving: float | None
    advantage_kept: float | None  # share of the L2 norm of the advantages that is not cut

    @property
    def saving(self) -> float:
        """Safe saving, by real steps where they are known."""
        return self.safe_saving if self.safe_step_saving is None else self.safe_step_saving

    @property
    def rule(self) -> str:
        """For a person."""
        return f"{self.signal} < {self.threshold:g} at K = {self.k}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """What a cut of each of N groups at K comes to, whatever the signal."""

    k: int
    horizon: int
    zero: Bools  # [N] equal rewards
    running: Bools  # [N] decided on
    remaining: Floats | None  # [N] environment steps after K, of all members; None: lengths are not known
    steps: Floats | None  # [N] all environment steps
    weight: Floats | None  # [N] squared norm of the advantages; None: variances are not known

    @classmethod
    def of(cls, recorded: Recorded, k: int) -> Figures:
        """Those of recorded groups."""
        groups = recorded.at(k)
        lengths = groups.lengths
        variance = groups.reward_var
        return cls(
            k=k,
            horizon=recorded.horizon,
            zero=groups.zero_variance,
            running=recorded.is_running[k],
            remaining=None if lengths is None else np.maximum(lengths - k, 0).sum(axis=1).astype(np.float64),
            steps=None if lengths is None else lengths.sum(axis=1).astype(np.float64),
            # Squared GRPO advantages of a group add up to G x variance / (deviation + eps)^2; G is the same for all.
            weight=None if variance is None else variance / (np.sqrt(variance) + ADVANTAGE_EPS) ** 2,
        )

    def take(self, index: npt.NDArray[np.int64]) -> Figures:
        """Those of some groups."""
        return Figures(
            k=self.k,
            horizon=self.horizon,
            zero=self.zero[index],
            running=self.running[index],
            remaining=None if self.remaining is None else self.remaining[index],
            steps=None if self.steps is None else self.steps[index],
            weight=None if self.weight is None else self.weight[index],
        )

    def sums(self, cut: Floats, counts: Floats | float = 1.0) -> Mapping[str, Floats | None]:
        """What cuts come to: [..., N] how often each group is cut (0 or 1, or more in a bootstrap), out of how often it is there."""
        right = cut * self.zero
        return {
            "cut": cut.sum(axis=-1),
            "true": right.sum(axis=-1),
            "safe_steps": None if self.remaining is None else right @ self.remaining,
            "raw_steps": None if self.remaining is None else cut @ self.remaining,
            "kept": None if self.weight is None else (counts - cut) @ self.weight,
        }

    def point(self, signal: str, threshold: float, below: Bools) -> Point:
        """What a rule comes to. `below`: [N] groups whose signal is below the threshold."""
        cut = below & self.running
        sums = {name: None if value is None else float(value) for name, value in self.sums(cut.astype(np.float64)).items()}
        n, zero = len(self.zero), int(self.zero.sum())
        number, true = int(sums["cut"] or 0), int(sums["true"] or 0)
        span = (self.horizon - self.k) / (n * self.horizon) if n else 0.0
        total = 0.0 if self.steps is None else float(self.steps.sum())
        whole = 0.0 if self.weight is None else float(np.ones(n) @ self.weight)  # added up as what is kept, so that all of it is exactly 1
        safe, raw, kept = sums["safe_steps"], sums["raw_steps"], sums["kept"]
        return Point(
            signal=signal,
            k=self.k,
            threshold=threshold,
            groups=n,
            zero_variance=zero,
            decided=int(self.running.sum()),
            cut=number,
            left_alone=int(below.sum()) - number,
            true_cuts=true,
            false_cuts=number - true,
            precision=true / number if number else None,
            recall=true / zero if zero else None,
            safe_saving=true * span,
            raw_saving=number * span,
            safe_step_saving=safe / total if safe is not None and total else None,
            raw_step_saving=raw / total if raw is not None and total else None,
            advantage_kept=float(np.sqrt(kept / whole)) if kept is not None and whole else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """All thresholds of one signal at one K, ascending: M that cut one group more, at least, than the one before."""

    signal: str
    figures: Figures
    values: Floats  # [N] the signal
    edges: Floats  # [M] the largest value that each threshold cuts
    cut: Ints  # [M]
    true: Ints  # [M]
    saving: Floats  # [M] safe, by real steps where they are known

    @classmethod
    def of(cls, signal: str, values: Floats, figures: Figures) -> Curve:
        """Of N groups."""
        looked_at = np.flatnonzero(figures.running)
        order = looked_at[np.argsort(values[looked_at], kind="stable")]
        ordered = values[order]
        last = np.flatnonzero(np.append(ordered[1:] > ordered[:-1], True)) if len(ordered) else np.zeros(0, dtype=np.int64)
        edges = ordered[last]
        # A cut is strict, and a threshold at most 1: what lies at 1 is never cut.
        last, edges = last[edges < 1], edges[edges < 1]
        true = np.cumsum(figures.zero[order])[last]
        if figures.remaining is not None and figures.steps is not None and (total := figures.steps.sum()):
            saving = np.cumsum(figures.remaining[order] * figures.zero[order])[last] / total
        else:
            saving = true * ((figures.horizon - figures.k) / (max(1, len(values)) * figures.horizon))
        return cls(
            signal=signal,
            figures=figures,
            values=values,
            edges=edges,
            cut=(last + 1).astype(np.int64),
            true=true.astype(np.int64),
            saving=saving.astype(np.float64),
        )

    def __len__(self) -> int:
        return len(self.edges)

    def threshold(self, index: int) -> float:
        """One of the thresholds, round: above what it cuts, and at most the next value that occurs."""
        following = float(self.edges[index + 1]) if index + 1 < len(self.edges) else 1.0
        return round_between(float(self.edges[index]), following)

    def point(self, index: int) -> Point:
        """The figures of one of the thresholds."""
        return self.at(self.threshold(index))

    def at(self, threshold: float) -> Point:
        """The figures of any threshold."""
        return self.figures.point(self.signal, threshold, self.values < threshold)

    def columns(self) -> dict[str, list[Any]]:
        """The figures of all its thresholds, as columns named like the fields of `Point`; what is the same in all rows is left out."""
        figures = self.figures
        n, zero = len(self.values), int(figures.zero.sum())
        span = (figures.horizon - figures.k) / (max(1, n) * figures.horizon)
        order = np.argsort(self.values, kind="stable")
        ordered = self.values[order]
        thresholds = np.array([self.threshold(index) for index in range(len(self))])
        last = np.searchsorted(ordered, thresholds, side="left") - 1
        cut = figures.running[order].astype(np.float64)
        nothing = np.full(len(self), np.nan)
        safe = raw = kept = nothing
        if figures.remaining is not None and figures.steps is not None and (total := float(figures.steps.sum())):
            raw_steps = cut * figures.remaining[order]
            raw, safe = np.cumsum(raw_steps)[last] / total, np.cumsum(raw_steps * figures.zero[order])[last] / total
        if figures.weight is not None and (whole := float(figures.weight.sum())):
            # From the end, so that nothing is left of a difference of two sums when all is cut.
            weight = figures.weight[order]
            after = np.append(np.cumsum((cut * weight)[::-1])[::-1], 0.0)[last + 1]
            kept = np.sqrt((after + float(((1 - cut) * weight).sum())) / whole)
        found = {
            "threshold": thresholds,
            "cut": self.cut,
            "left_alone": last + 1 - self.cut,
            "true_cuts": self.true,
            "false_cuts": self.cut - self.true,
            "precision": self.true / np.maximum(self.cut, 1),
            "recall": self.true / zero if zero else nothing,
            "safe_saving": self.true * span,
            "raw_saving": self.cut * span,
            "safe_step_saving": safe,
            "raw_step_saving": raw,
            "advantage_kept": kept,
        }
        return {name: [None if value != value else value for value in column.tolist()] for name, column in found.items()}  # noqa: PLR0124 - NaN

    def best(self, floor: float, least_cuts: int) -> int | None:
        """The threshold that saves most among those with a precision of at least `floor` and enough cuts; None: there is none.

        Of equal ones the most precise, then the lowest.
        """
        allowed = np.flatnonzero((self.cut >= least_cuts) & (self.true >= floor * self.cut))
        if not len(allowed):
            return None
        order = np.lexsort((self.cut[allowed], -self.true[allowed] / self.cut[allowed], -self.saving[allowed]))
        return int(allowed[order[0]])


def curves(recorded: Recorded, signals: Sequence[str] | None = None) -> list[Curve]:
    """Those of every signal at every K."""
    found = []
    for k in recorded.ks:
        figures = Figures.of(recorded, k)
        groups = recorded.at(k)
        found += [Curve.of(name, groups.signals[name], figures) for name in signals or recorded.signals]
    return found


def evenly(n: int, most: int) -> Ints:
    """At most so many of n positions, evenly, the first and the last among them."""
    places: Ints = np.unique(np.linspace(0, max(0, n - 1), min(n, most)).round().astype(np.int64))
    return places


def round_between(low: float, high: float) -> float:
    """The roundest number above `low` and at most `high`, as near to their middle as so few digits allow."""
    middle = (low + high) / 2
    for digits in range(1, 17):
        number = round(middle, digits)
        if low < number <= high:
            return number
    return high
