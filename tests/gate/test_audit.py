"""How often the gate is right: intervals, the threshold that a floor allows, what cuts save."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.gate import clopper_pearson
from sluice.gate.audit import AuditLog, Moments, largest_scale, lower_bound_clears, student_t


def tail(right: int, n: int, share: float) -> float:
    """The chance of at least `right` of `n`, straight from its definition."""
    return sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(right, n + 1))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_interval_ends_where_what_was_seen_becomes_unlikely(seen, confidence: float) -> None:
    right, n = seen
    low, high = clopper_pearson(right, n, confidence)
    assert 0 <= low <= right / n <= high <= 1
    if right:
        assert tail(right, n, low) == pytest.approx((1 - confidence) / 2, abs=1e-9)
    if right < n:
        assert 1 - tail(right + 1, n, high) == pytest.approx((1 - confidence) / 2, abs=1e-9)


def test_intervals_of_the_books() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    assert clopper_pearson(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert clopper_pearson(20, 20) == pytest.approx((0.8316, 1.0), abs=1e-4)
    assert clopper_pearson(17, 21) == pytest.approx((0.5809, 0.9455), abs=1e-4)
    with pytest.raises(ValueError, match="expected 0 <= right <= n, got 3 of 2"):
        clopper_pearson(3, 2)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("n", [5, 20, 100])
def test_the_lower_end_never_promises_too_much(share: float, n: int) -> None:
    """Exact, not simulated: it lies above the true share with a chance of at most 2.5 %."""
    chance = sum(
        math.comb(n, right) * share**right * (1 - share) ** (n - right)
        for right in range(n + 1)
        if clopper_pearson(right, n, 0.95)[0] > share
    )
    assert chance <= 0.025


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.01, 0.99))
def test_a_floor_is_cleared_exactly_when_the_lower_end_reaches_it(seen, floor: float) -> None:
    right, n = seen
    low, _ = clopper_pearson(right, n)
    if abs(low - floor) > 1e-9:
        assert lower_bound_clears(right, n, floor, 0.95) == (low >= floor)


RECORDS = st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=60)


@given(RECORDS, st.floats(0.05, 0.9), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_largest_scale_clears_the_floor_and_none_above_it_does(records, floor: float, most: float) -> None:
    def low(scale: float) -> float:
        outcomes = [is_right for margin, is_right in records if margin < scale]
        return clopper_pearson(sum(outcomes), len(outcomes), 0.95)[0]

    scale = largest_scale(records, floor, 0.95, most)
    steps = [step / 20 for step in range(1, round(most * 20) + 1)]
    assert scale is None or scale in steps
    for step in steps:
        if scale is None or step > scale:
            assert low(step) < floor + 1e-9
    if scale is not None:
        assert low(scale) >= floor - 1e-9


def test_the_log_forgets_what_is_old() -> None:
    log = AuditLog(window=3, confidence=0.95)
    for margin, is_right in ((0.1, False), (0.5, True), (0.9, True), (1.5, False)):
        log.add(margin, is_right)
    assert log.records == ((0.5, True), (0.9, True), (1.5, False))
    assert (log.precision(1.0).right, log.precision(1.0).n, log.precision(1.0).value) == (2, 2, 1.0)
    assert (log.precision(2.0).right, log.precision(2.0).n) == (2, 3)
    assert log.precision(0.5).value is None
    assert (log.precision(0.5).low, log.precision(0.5).high) == (0.0, 1.0)


@given(st.lists(st.integers(0, 200), min_size=2, max_size=30))
def test_moments_are_those_of_the_values(values) -> None:
    moments = Moments()
    for value in values:
        moments.add(value)
    assert moments.n == len(values)
    assert moments.mean == pytest.approx(statistics.fmean(values))
    assert moments.squares / (moments.n - 1) == pytest.approx(statistics.variance(values), abs=1e-9)


def test_quantiles_of_student() -> None:
    """From the usual tables: 0.975 and 0.995."""
    table = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 5: (2.571, 4.032), 10: (2.228, 3.169), 30: (2.042, 2.750)}
    for freedom, expected in table.items():
        assert (student_t(0.975, freedom), student_t(0.995, freedom)) == pytest.approx(expected, rel=0.01)


def test_what_cuts_saved_lies_in_its_interval_as_often_as_promised() -> None:
    """40 cuts, 10 audited groups, remaining steps of a skew distribution: the truth is inside in about 95 of 100 cases."""
    source = random.Random(5)
    inside = 0
    for _ in range(1000):
        draw = [source.choice([20, 60, 100, 160]) for _ in range(50)]
        moments = Moments()
        for value in draw[:10]:
            moments.add(value)
        total, low, high = moments.total_of_others(40, 0.95)
        assert low <= total <= high
        inside += low <= sum(draw[10:]) <= high
    assert 920 <= inside <= 980


def test_one_audited_group_alone_tells_no_interval() -> None:
    moments = Moments()
    moments.add(100)
    assert moments.total_of_others(3, 0.95) is None
    moments.add(100)
    assert moments.total_of_others(3, 0.95) == (300.0, 300.0, 300.0)
