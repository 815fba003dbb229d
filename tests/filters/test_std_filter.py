from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import RewardConfig
from sluice.errors import ConfigError
from sluice.filters import build_domain_filters, build_query_filter
from tests.fakes import make_group

STD = build_query_filter({"type": "std_filter"})
finite = st.floats(allow_nan=False, allow_infinity=False)


@given(finite, st.integers(2, 40), st.sampled_from([float, np.float32, np.float16]))
def test_all_equal_rewards_are_dropped_whatever_their_value_type_and_number(value, size, kind):
    with np.errstate(over="ignore"):
        reward = kind(value)
    if np.isfinite(reward):
        verdict = STD.judge([reward] * size)
        assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (False, "no_spread", "low_information", "std_filter")
        assert verdict.evidence == {"mean": float(reward), "std": 0.0, "n": size}


@given(st.lists(finite, min_size=2, max_size=10), finite)
def test_rewards_that_differ_are_kept(rewards, other):
    assert STD.judge([*rewards, other]).keep == (len({*rewards, other}) > 1)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8), st.floats(0, 2))
def test_the_threshold_is_inclusive(rewards, threshold):
    query = build_query_filter({"type": "std_filter", "filter_args": {"std_threshold": threshold}})
    std = 0.0 if len(set(rewards)) == 1 else float(np.std(rewards, ddof=1))
    if abs(std - threshold) > 1e-9 or std == 0.0:
        assert query.judge(rewards).keep == (std > threshold)


def test_a_group_exactly_at_the_threshold_is_dropped():
    at_two = build_query_filter({"type": "std_filter", "filter_args": {"std_threshold": 2}})
    assert not at_two.judge([0, 2, 4]).keep
    assert at_two.judge([0, 2, 4.001]).keep


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1] * 3,
        np.full(3, 0.9, dtype=np.float32),
        np.full(7, 0.6, dtype=np.float32),
        [1e9 + 0.1] * 7,
        [1e12 + 0.3] * 3,
    ],
)
def test_case_01_equal_rewards_have_no_spread_in_spite_of_rounding(rewards):
    verdict = STD.judge(rewards)
    assert (verdict.keep, verdict.reason) == (False, "no_spread")
    assert not STD.judge(make_group([float(reward) for reward in rewards])).keep


def test_case_01_a_real_difference_is_kept():
    assert STD.judge([0.1, 0.1, 0.1001]).keep


def test_case_03_a_group_of_one_is_kept_and_a_configured_size_of_one_is_refused():
    for reward in (5.0, 0.0, 1.0):
        assert STD.judge([reward]).keep
        assert STD.judge(make_group([reward])).keep
    config = RewardConfig.model_validate({"verifier": {"type": "exact"}, "query_filter_config": {"type": "std_filter"}})
    with pytest.raises(
        ConfigError, match=r"rewards\.math\.query_filter_config\.type is std_filter.*num_return_sequences_in_group >= 2, got 1"
    ):
        build_domain_filters({"math": config}, group_size=1)


def test_case_05_groups_that_differ_are_kept_and_constant_ones_dropped_whatever_their_mean():
    assert STD.judge([2, 0, 1, 1]).keep
    assert STD.judge([-1, 1, -1, 1]).keep
    assert STD.judge([2, 0, 1, 1]).evidence["std"] == pytest.approx(0.816, abs=1e-3)
    assert STD.judge([-1, 1, -1, 1]).evidence["std"] == pytest.approx(1.155, abs=1e-3)
    assert not STD.judge([0.5] * 4).keep
    assert not STD.judge([1.125] * 4).keep


def test_case_09_each_group_is_judged_by_its_own_spread():
    assert [not STD.judge(rewards).keep for rewards in ([1, 1], [0, 1])] == [True, False]
    assert [not STD.judge(rewards).keep for rewards in ([1, 1], [0, 0])] == [True, True]


def test_case_61_step_rewards_are_summed_before_the_spread():
    from sluice.filters import sum_steps

    assert sum_steps([[0, 1], [0, 0]]) == [1, 0]
    assert STD.judge(sum_steps([[0, 1], [0, 0]])).keep


def test_one_left_of_a_larger_group_has_no_spread():
    assert STD.judge(make_group([1.0, None])).reason == "no_spread"
    assert build_query_filter({"type": "std_filter"}, group_size=4).judge([1.0]).reason == "no_spread"
    assert build_query_filter({"type": "std_filter"}, min_members=1).judge([1.0, None]).reason == "no_spread"
