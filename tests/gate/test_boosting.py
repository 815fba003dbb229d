"""Boosted trees: they learn, the same again from the same seed, and answer as a slow walk through the trees does."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import GateError
from sluice.gate.boosting import Boosting, Trees, fit_trees
from sluice.gate.offline import auroc

SMALL = Boosting(trees=15, depth=2, rate=0.3)


def data(seed: int = 0, n: int = 400):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 4))
    return rows, (rows[:, 0] > 0) ^ (rows[:, 1] > 0.3)


def test_it_learns_what_no_single_threshold_shows() -> None:
    rows, is_true = data()
    unseen, outcome = data(1)
    trees = fit_trees(rows, is_true, how=Boosting(trees=40, depth=2, rate=0.3, columns=1.0))
    assert auroc(trees.chances(unseen), outcome) > 0.95
    assert auroc(unseen[:, 0], outcome) < 0.65


def test_the_same_again_and_saved() -> None:
    rows, is_true = data()
    trees, again = (fit_trees(rows, is_true, how=SMALL, seed=3) for _ in range(2))
    other = fit_trees(rows, is_true, how=SMALL, seed=4)
    loaded = Trees.from_data(json.loads(json.dumps(trees.as_data(), allow_nan=False)))
    assert np.array_equal(trees.log_odds(rows), again.log_odds(rows))
    assert np.array_equal(trees.log_odds(rows), loaded.log_odds(rows))
    assert not np.array_equal(trees.log_odds(rows), other.log_odds(rows))


@given(st.integers(0, 3), st.integers(1, 5))
def test_answers_are_those_of_a_slow_walk_and_do_not_depend_on_company(seed, n) -> None:
    rows, is_true = data(seed, 60)
    trees = fit_trees(rows, is_true, how=SMALL)
    asked = data(seed + 10, n)[0]
    for row, odds in zip(asked, trees.log_odds(asked).tolist(), strict=True):
        total = trees.base
        for features, thresholds, answers in zip(trees.features, trees.thresholds, trees.answers, strict=True):
            total += answers[sum(2**level for level, (f, t) in enumerate(zip(features, thresholds, strict=True)) if row[f] > t)]
        assert odds == pytest.approx(total)
        assert trees.log_odds(row[None])[0] == odds


def test_weights_are_repeated_rows() -> None:
    rows, is_true = data(2, 30)
    how = Boosting(trees=5, depth=2, share=1.0, columns=1.0, penalty=1e-9)
    doubled = fit_trees(np.concatenate([rows, rows[:10]]), np.concatenate([is_true, is_true[:10]]), how=how)
    weighted = fit_trees(rows, is_true, np.where(np.arange(30) < 10, 2.0, 1.0), how=how)
    assert weighted.log_odds(rows) == pytest.approx(doubled.log_odds(rows), rel=1e-6)


def test_rows_that_nothing_tells_apart_get_their_share() -> None:
    trees = fit_trees(np.ones((8, 3)), np.arange(8) < 2)
    assert trees.chances(np.zeros((1, 3)))[0] == pytest.approx(0.25)
    sure = fit_trees(np.ones((8, 3)), np.ones(8, dtype=bool)).chances(np.zeros((1, 3)))[0]
    assert 0.99 < sure < 1, "and never certainty"


def test_where_no_question_helps_none_is_asked() -> None:
    """A feature that says nothing: with such a penalty every cut costs more than it gains."""
    rows = np.arange(16.0)[:, None]
    trees = fit_trees(rows, np.arange(16) % 2 == 0, how=Boosting(trees=3, depth=2, share=1.0, columns=1.0, penalty=1000.0))
    assert trees.chances(rows) == pytest.approx(np.full(16, 0.5), abs=0.01)
    assert Trees.from_data(json.loads(json.dumps(trees.as_data(), allow_nan=False))).log_odds(rows) == pytest.approx(trees.log_odds(rows))


def test_what_is_no_data_is_refused() -> None:
    rows, is_true = data(0, 30)
    trees = fit_trees(rows, is_true, how=SMALL)
    with pytest.raises(GateError, match="rows of 4 features"):
        trees.log_odds(rows[:, :3])
    with pytest.raises(GateError, match="finite features"):
        fit_trees(np.where(rows > 2, np.nan, np.full_like(rows, np.nan)), is_true)
    with pytest.raises(GateError, match="at least one row"):
        fit_trees(rows[:0], is_true[:0])
    whole = trees.as_data()
    for torn in (
        {},
        {**whole, "answers": [[1.0]]},
        {**whole, "features": [[9, 9]] * 15},
        {**whole, "base": math.nan},
        {**whole, "base": "x"},
    ):
        with pytest.raises(GateError, match="trees as they were saved"):
            Trees.from_data(torn)
