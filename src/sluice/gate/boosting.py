"""Boosted symmetric trees in plain numpy: small, quick to ask, and saved as plain numbers.

Every level of a tree asks one question of all rows (feature > threshold), so that a tree of depth d is d questions and 2^d answers, and a
row is answered by looking up d bits (the kind of tree of CatBoost: A. Dorogush et al., arXiv 1810.11363). Fitted is the log-odds of a truth
value: each tree takes a Newton step on the logistic loss with L2-regularised answers (J. Friedman, Greedy function approximation, 2001; T.
Chen and C. Guestrin, arXiv 1603.02754).

The same rows, targets and seed give the same trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.errors import GateError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NOBODY: Final = 1e300  # above every feature

_ROWS_AT_ONCE: Final = 2048  # their answers stay in the processor's cache

BINS: Final = 32  # thresholds are looked for between so many quantiles of a feature


@dataclass(frozen=True, slots=True, kw_only=True)
class Boosting:
    """How trees are fitted. The defaults are for some hundred to some thousand groups."""

    trees: int = 120
    depth: int = 4
    rate: float = 0.08  # share of each Newton step that is taken
    penalty: float = 5.0  # L2 of the answers, in rows of weight 1 / 4; above 0
    share: float = 0.8  # of the rows that each tree sees
    columns: float = 0.6  # of the features that each tree may ask


@dataclass(frozen=True, kw_only=True, eq=False)
class Trees:
    """A fitted model: N trees of depth D over F features."""

    features: Ints  # [N, D] which feature a level asks about
    thresholds: Floats  # [N, D] whether it is above this
    answers: Floats  # [N, 2^D] added to the log-odds
    base: float  # log-odds without any tree
    columns: int  # F

    def log_odds(self, rows: Floats) -> Floats:
        """[M] for rows [M, F]."""
        if rows.ndim != 2 or rows.shape[1] != self.columns:
            raise GateError(f"expected rows of {self.columns} features, got shape {rows.shape} - give those that it was fitted on")
        total = np.empty(len(rows))
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            chunk = rows[start : start + _ROWS_AT_ONCE]
            places = np.zeros((len(chunk), len(self.answers)), dtype=np.intp)
            for level, (feature, threshold) in enumerate(zip(self.features.T, self.thresholds.T, strict=True)):
                places |= (chunk[:, feature] > threshold).astype(np.intp) << level
            total[start : start + _ROWS_AT_ONCE] = self.base + self.answers[np.arange(len(self.answers)), places].sum(axis=1)
        return total

    def chances(self, rows: Floats) -> Floats:
        """[M] chances for rows [M, F], within (0, 1)."""
        return sigmoid(self.log_odds(rows))

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "features": self.features.tolist(),
            "thresholds": self.thresholds.tolist(),
            "answers": self.answers.tolist(),
            "base": self.base,
            "columns": self.columns,
        }

    @classmethod
    def from_data(cls, data: Any) -> Trees:
        """Back again. Raises `GateError` for what is no such data."""
        try:
            trees = cls(
                features=np.asarray(data["features"], dtype=np.int64),
                thresholds=np.asarray(data["thresholds"], dtype=np.float64),
                answers=np.asarray(data["answers"], dtype=np.float64),
                base=float(data["base"]),
                columns=int(data["columns"]),
            )
            n, depth = trees.features.shape
            is_whole = trees.thresholds.shape == (n, depth) and trees.answers.shape == (n, 2**depth)
            is_known = bool(n) and trees.features.min() >= 0 and trees.features.max() < trees.columns
            if (
                not is_whole
                or not is_known
                or not np.isfinite(trees.answers).all()
                or not np.isfinite(trees.thresholds).all()
                or not math.isfinite(trees.base)
            ):
                raise ValueError(f"shapes {trees.features.shape}, {trees.thresholds.shape}, {trees.answers.shape}")
        except (KeyError, TypeError, ValueError) as error:
            raise GateError(f"expected trees as they were saved, got what cannot be read ({error}) - fit and save them again") from error
        return trees


def fit_trees(
    rows: Floats, is_true: npt.NDArray[np.bool_], weights: Floats | None = None, *, how: Boosting | None = None, seed: int = 0
) -> Trees:
    """Trees for the chance of `is_true` [M] given rows [M, F]. `weights` [M]: of the rows; None: all alike. Raises `GateError` for no
    rows.
    """
    how = Boosting() if how is None else how
    if rows.ndim != 2 or len(rows) != len(is_true) or not len(rows):
        raise GateError(f"expected rows [M, F] and one truth value each, got {rows.shape} and {len(is_true)} - give at least one row")
    if not np.isfinite(rows).all():
        raise GateError("expected finite features, got NaN or infinity - correct or leave out these rows")
    rng = np.random.default_rng(seed)
    target = is_true.astype(np.float64)
    weight = np.ones(len(rows)) if weights is None else weights / weights.mean()
    share = float(np.clip((weight @ target) / weight.sum(), 1e-3, 1 - 1e-3))
    base = math.log(share / (1 - share))
    edges = [_edges(column) for column in rows.T]
    bins = np.stack([np.searchsorted(edge, column, side="left") for edge, column in zip(edges, rows.T, strict=True)], axis=1)
    usable = np.array([len(edge) > 0 for edge in edges]).nonzero()[0]
    odds = np.full(len(rows), base)
    found: list[tuple[list[int], list[float], Floats]] = []
    for _ in range(how.trees if len(usable) else 0):
        chance = sigmoid(odds)
        slope, bend = weight * (target - chance), weight * chance * (1 - chance)
        asked = rng.choice(usable, max(1, round(how.columns * len(usable))), replace=False)
        seen = rng.random(len(rows)) < how.share
        features, cuts, places = _grow(bins[seen][:, asked], slope[seen], bend[seen], how)
        features = [int(asked[one]) for one in features]
        whole = np.zeros(len(rows), dtype=np.int64)
        for level, (feature, cut) in enumerate(zip(features, cuts, strict=True)):
            whole |= (bins[:, feature] > cut).astype(np.int64) << level
        leaves = 1 << how.depth
        answers = how.rate * np.bincount(places, slope[seen], leaves) / (np.bincount(places, bend[seen], leaves) + how.penalty / 4)
        odds += answers[whole]
        thresholds = [_threshold(edges[feature], cut) for feature, cut in zip(features, cuts, strict=True)]
        found.append((features, thresholds, answers))
    if not found:  # nothing tells the rows apart
        found = [([0] * how.depth, [_NOBODY] * how.depth, np.zeros(1 << how.depth))]
    return Trees(
        features=np.array([one[0] for one in found], dtype=np.int64),
        thresholds=np.array([one[1] for one in found]),
        answers=np.array([one[2] for one in found]),
        base=base,
        columns=rows.shape[1],
    )


def sigmoid(odds: Floats) -> Floats:
    """Chances of log-odds, within (0, 1) and without overflow."""
    chances: Floats = 1 / (1 + np.exp(-np.clip(odds, -35.0, 35.0)))
    return chances


def _threshold(edges: Floats, cut: int) -> float:
    """Of a cut between bins. A level that no question helps asks one that nobody answers with yes."""
    return float(edges[cut]) if cut < len(edges) else _NOBODY


def _edges(column: Floats) -> Floats:
    """Where thresholds may lie: halfway between neighbouring values, at most `BINS` - 1 of them, at even shares of the rows."""
    values = np.unique(column)
    if len(values) > BINS:
        values = np.unique(np.quantile(column, np.linspace(0, 1, BINS), method="nearest"))
    edges: Floats = (values[:-1] + values[1:]) / 2
    return edges


def _grow(bins: Ints, slope: Floats, bend: Floats, how: Boosting) -> tuple[list[int], list[int], Ints]:
    """One tree: the feature and the cut of each level (bin > cut), and where the rows end."""
    rows, columns = bins.shape
    places = np.zeros(rows, dtype=np.int64)
    features, cuts = [], []
    offsets = np.arange(columns) * BINS
    flat = bins + offsets  # [M, C]
    penalty = how.penalty / 4
    slopes, bends = np.repeat(slope, columns), np.repeat(bend, columns)
    for level in range(how.depth):
        leaves = 1 << level
        cells = (flat + (places * columns * BINS)[:, None]).ravel()
        size = leaves * columns * BINS
        left_slope = np.bincount(cells, slopes, size).reshape(leaves, columns, BINS).cumsum(axis=2)
        left_bend = np.bincount(cells, bends, size).reshape(leaves, columns, BINS).cumsum(axis=2)
        whole_slope, whole_bend = left_slope[:, :, -1:], left_bend[:, :, -1:]
        gain = left_slope**2 / (left_bend + penalty) + (whole_slope - left_slope) ** 2 / (whole_bend - left_bend + penalty)
        best = int(gain.sum(axis=0).argmax())
        feature, cut = divmod(best, BINS)
        features.append(feature)
        cuts.append(cut)
        places |= (bins[:, feature] > cut).astype(np.int64) << level
    return features, cuts, places
