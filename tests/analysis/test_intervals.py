"""A bootstrap of all draws at once is one of each draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.analysis.curves import Figures
from sluice.analysis.intervals import Draws
from sluice.gate.offline import auroc, evaluate, spearman
from tests.analysis.recordings import DISTANCE, some_recorded

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.25])), min_size=1, max_size=15)


@given(ROWS, st.integers(0, 5))
def test_ranks_of_a_draw_are_those_of_the_groups_that_came(rows, seed: int) -> None:
    first, second, variance = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    draws = Draws.of(len(rows), 7, 0.95, np.random.default_rng(seed))
    for column, (rho, area) in zip((first, second), draws.rank_figures([first, second], variance, variance > 0), strict=True):
        for b, counts in enumerate(draws.counts.astype(int)):
            came = np.repeat(np.arange(len(rows)), counts)
            expected = spearman(column[came], variance[came]), auroc(column[came], variance[came] > 0)
            found = (None if np.isnan(value) else value for value in (rho[b], area[b]))
            assert [*found] == [None if one is None else pytest.approx(one, abs=1e-9) for one in expected]


def test_figures_of_a_draw_are_those_of_the_groups_that_came() -> None:
    recorded = some_recorded(n=30)
    cut = recorded.cuts(DISTANCE, 3, 0.6)
    draws = Draws.of(30, 40, 0.9, np.random.default_rng(3))
    found = draws.point_figures(Figures.of(recorded, 3), cut)
    one_by_one = []
    for counts in draws.counts.astype(int):
        came = np.repeat(np.arange(30), counts)
        one_by_one.append(evaluate(recorded.at(3).take(came), cut[came]))
    assert found.keys() == {"precision", "recall", "safe_saving", "raw_saving", "safe_step_saving", "raw_step_saving", "advantage_kept"}
    for name, interval in found.items():
        values = [getattr(point, name) for point in one_by_one]
        assert interval == pytest.approx(tuple(np.quantile([value for value in values if value is not None], [0.05, 0.95])), abs=1e-9)


def test_every_draw_has_as_many_groups_as_there_are() -> None:
    draws = Draws.of(50, 20, 0.95, np.random.default_rng(0))
    assert (draws.counts.sum(axis=1) == 50).all()
    assert np.array_equal(draws.counts, Draws.of(50, 20, 0.95, np.random.default_rng(0)).counts)


def test_a_figure_that_never_exists_has_no_interval() -> None:
    draws = Draws.of(5, 10, 0.95, np.random.default_rng(0))
    assert draws.interval(np.full(10, np.nan)) is None
    assert draws.interval(np.array([np.nan, 1.0, 1.0])) == (1.0, 1.0)
    ((rho, area),) = draws.rank_figures([np.arange(5.0)], None, np.ones(5, dtype=bool))
    assert np.isnan(rho).all()
    assert np.isnan(area).all()
