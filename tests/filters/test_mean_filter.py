from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.filters import build_query_filter


def band(**bounds):
    return build_query_filter({"type": "mean_filter", "filter_args": bounds}, where="rewards.math.query_filter_config")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(0, 3), st.integers(1, 4))
def test_a_group_is_kept_only_strictly_within_the_band(rewards, down, width):
    up = down + width
    total, n = sum(rewards), len(rewards)
    both = band(threshold_down=down, threshold_up=up).judge(rewards)
    assert both.keep == (down * n < total < up * n)
    assert band(threshold_down=down).judge(rewards).keep == (down * n < total)
    assert band(threshold_up=up).judge(rewards).keep == (total < up * n)
    if not both.keep:
        assert both.reason == ("too_hard" if total <= down * n else "too_easy")
        assert (both.category, both.source) == ("low_information", "mean_filter")


def test_the_bounds_are_outside_the_band():
    query = band(threshold_down=0.1, threshold_up=0.9)
    assert query.judge([0.1] * 3).reason == "too_hard"  # in floats the sum of three tenths is more than 0.3
    assert query.judge([0.9] * 7).reason == "too_easy"
    assert query.judge([0, 1, 1, 0]).keep


def test_a_group_of_one_is_judged_by_the_band_like_any_other():
    assert not band(threshold_down=0, threshold_up=1).judge([1.0]).keep
    assert band(threshold_down=0, threshold_up=1).judge([0.5]).keep


def test_the_two_surprises_are_told_once_each_with_the_numbers(caplog):
    query = band(threshold_down=0.0, threshold_up=1.0)
    with caplog.at_level(logging.WARNING, logger="sluice.filters"):
        for _ in range(3):
            assert not query.judge([2, 0, 1, 1]).keep
            assert not query.judge([-1, 1, -1, 1]).keep
            assert query.judge([0.5] * 4).keep
        query.judge([0, 1])
        query.judge([1, 1])
        query.judge([0.5])
    assert len(caplog.messages) == 2
    dropped, kept = caplog.messages
    assert "rewards.math.query_filter_config" in dropped
    assert "dropped a group with spread (mean 1, std 0.816497, n 4)" in dropped
    assert "kept a group without spread (mean 0.5, std 0, n 4)" in kept
    with caplog.at_level(logging.WARNING, logger="sluice.filters"):
        band(threshold_up=1.0).judge([2, 0, 1, 1])  # another filter tells for itself
    assert len(caplog.messages) == 3


def test_case_05_a_band_wider_than_the_rewards_with_the_no_signal_rule_keeps_what_differs():
    query = build_query_filter(
        {
            "type": "all",
            "filter_args": {
                "filters": [
                    {"type": "mean_filter", "filter_args": {"threshold_down": -1, "threshold_up": 2}},
                    {"type": "std_filter"},
                ]
            },
        }
    )
    assert query.judge([2, 0, 1, 1]).keep
    assert query.judge([-1, 1, -1, 1]).keep
    for constant in ([0.5] * 4, [1.125] * 4):
        verdict = query.judge(constant)
        assert (verdict.keep, verdict.reason, verdict.source) == (False, "no_spread", "std_filter")


def test_case_47_each_group_is_judged_by_its_own_mean_whatever_its_size():
    query = band(threshold_down=2)
    assert query.judge([1, 3, 5]).keep
    assert not query.judge([1, 3]).keep


def test_verdicts_carry_the_numbers():
    verdict = band(threshold_up=2).judge([0, 1])
    assert dict(verdict.evidence) == {"mean": 0.5, "std": pytest.approx(0.70711, abs=1e-5), "n": 2}
