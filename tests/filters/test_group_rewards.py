from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import FilterError
from sluice.filters import build_query_filter, sum_steps
from tests.fakes import make_group

finite = st.floats(allow_nan=False, allow_infinity=False)
ANY = build_query_filter({"type": "no_filter"})
ACC = build_query_filter({"type": "no_filter", "metric": "acc"})
STD = build_query_filter({"type": "std_filter"})


def group_with_metrics(metrics, rewards):
    group = make_group(rewards)
    return replace(group, rollouts=tuple(replace(r, metrics=m) for r, m in zip(group.rollouts, metrics, strict=True)))


@given(st.lists(finite, min_size=1, max_size=12))
def test_mean_and_std_are_those_of_numpy(rewards):
    evidence = ANY.judge(rewards).evidence
    assert evidence["n"] == len(rewards)
    assert min(rewards) - 1e-12 * abs(min(rewards)) <= evidence["mean"] <= max(rewards) + 1e-12 * abs(max(rewards))
    if max(map(abs, rewards)) < 1e100:
        longs = np.array(rewards, dtype=np.longdouble)
        assert evidence["mean"] == pytest.approx(float(longs.mean()), rel=1e-12, abs=1e-12 * max(map(abs, rewards)))
        if len(rewards) > 1 and max(rewards) > min(rewards):
            assert evidence["std"] == pytest.approx(float(longs.std(ddof=1)), rel=1e-9, abs=1e-300)
    assert math.isfinite(evidence["std"])
    assert (evidence["std"] == 0.0) == (max(rewards) == min(rewards))


@given(st.lists(st.one_of(finite, st.booleans(), st.integers(), st.none()), min_size=1, max_size=10), st.randoms())
def test_permuting_siblings_changes_nothing(rewards, random):
    shuffled = random.sample(rewards, len(rewards))
    for query in (ANY, STD):
        assert query.judge(rewards).keep == query.judge(shuffled).keep
        assert query.judge(rewards).reason == query.judge(shuffled).reason
        assert query.judge(rewards).evidence == pytest.approx(dict(query.judge(shuffled).evidence), rel=1e-9)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_every_way_to_hand_over_rewards_gives_the_same_verdict(rewards):
    expected = STD.judge(rewards)
    for given_as in (
        tuple(rewards),
        deque(rewards),
        np.array(rewards),
        np.array(rewards, dtype=np.float32),
        np.array(rewards, dtype=object),
        [np.float32(reward) for reward in rewards],
        [np.array(reward) for reward in rewards],
        make_group(rewards),
    ):
        assert STD.judge(given_as) == expected


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.longdouble, object]
)
def test_arrays_of_every_number_type_are_understood(dtype):
    verdict = STD.judge(np.array([1, 0, 1, 0], dtype=dtype))
    assert verdict.keep
    assert verdict.evidence == {"mean": 0.5, "std": pytest.approx(0.57735, abs=1e-5), "n": 4}
    assert not STD.judge(np.ones(4, dtype=dtype)).keep


def test_tensors_are_understood_without_importing_their_library():
    torch = pytest.importorskip("torch")
    assert STD.judge(torch.tensor([1.0, 0.0], dtype=torch.bfloat16)).keep
    assert STD.judge([torch.tensor(1.0), torch.tensor(0)]).keep
    assert not STD.judge([torch.tensor(0.1), torch.tensor(0.1)]).keep
    with pytest.raises(FilterError, match=r"shape \(2, 2\)"):
        STD.judge(torch.zeros(2, 2))
    with pytest.raises(FilterError, match="one number as the reward of member 0"):
        STD.judge([torch.zeros(1)])


def test_rewards_are_never_narrowed():
    assert STD.judge([2**24, 2**24 + 1]).keep  # equal in float32
    assert STD.judge([2**53, 2**53 + 1]).keep  # equal in float64
    assert STD.judge(np.array([2**53, 2**53 + 1])).keep
    assert STD.judge([Fraction(1, 3), Fraction(1, 3) + Fraction(1, 10**30)]).keep
    assert STD.judge([0.0, 5e-324]).keep
    assert STD.judge([Fraction(1, 3), 1 / 3]).keep
    assert STD.judge([10**300, 10**300 + 1]).keep
    assert STD.judge([Fraction(1, 10**400), 0]).keep
    assert STD.judge([np.float32(0.1), 0.1]).keep
    assert STD.judge(make_group([np.float32(0.1), 0.1])).keep


def test_equal_values_of_different_types_have_no_spread():
    assert not STD.judge([Decimal("0.5"), Fraction(1, 2), 0.5, np.float32(0.5), np.longdouble(0.5)]).keep
    assert not STD.judge([True, 1, 1.0, Decimal(1), np.int8(1)]).keep
    assert STD.judge([Decimal("0.25"), 0.5]).evidence == {"mean": 0.375, "std": pytest.approx(0.1767767), "n": 2}
    for missing in (Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal("1e400")):
        assert STD.judge([missing, 1.0]).reason == "incomplete"


def test_extreme_rewards_have_a_finite_mean_and_spread():
    evidence = ANY.judge([1.7e308] * 4 + [-1.7e308] * 4).evidence
    assert evidence["mean"] == 0.0
    assert evidence["std"] == pytest.approx(1.7e308, rel=0.1)
    assert ANY.judge([1.7e308, 1.6e308]).evidence["mean"] == pytest.approx(1.65e308)
    assert ANY.judge([1e9, 1e9, 1e9 + 2**-22]).evidence["std"] == pytest.approx(2**-22 / math.sqrt(3), rel=1e-9)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, np.float32("nan"), np.array(np.nan), 10**400])
def test_a_missing_or_unbounded_reward_makes_the_group_incomplete(bad):
    for query in (ANY, STD):
        for rewards in ([1.0, 0.0, bad], [bad], [bad, bad]):
            verdict = query.judge(rewards)
            assert (verdict.keep, verdict.reason, verdict.category) == (False, "incomplete", "invalid")
    assert STD.judge([math.inf, -math.inf]).reason == "incomplete"


def test_case_21_an_aborted_sample_makes_the_group_incomplete():
    survivors = build_query_filter({"type": "std_filter"}, min_members=3)
    counts: dict[str, int] = {}
    for rewards in ([1, 0, None, 1], [None] * 4):
        verdict = STD.judge(rewards)
        counts[verdict.reason] = counts.get(verdict.reason, 0) + 1
        assert not verdict.keep
        assert "mean" not in verdict.evidence
    assert counts == {"incomplete": 2}
    kept = survivors.judge([1, 0, None, 1])
    assert kept.keep
    assert kept.evidence == {"mean": pytest.approx(2 / 3), "std": pytest.approx(0.57735, abs=1e-5), "n": 3}
    assert survivors.judge([1, 0, None, None]).reason == "incomplete"
    assert survivors.judge([None] * 4).reason == "incomplete"


def test_case_25_a_placeholder_is_outside_the_statistics():
    group = make_group([1.0, 0.0, 1.0, None])  # its last member has no reward and is not counted
    verdict = STD.judge(group)
    assert verdict.keep
    assert verdict.evidence["n"] == 3
    assert verdict.evidence["mean"] == pytest.approx(2 / 3)


def test_case_45_a_truncated_member_leaves_the_statistics_but_not_the_group():
    group = replace(make_group([1.0, 0.0, 1.0, 0.0]), counted=(True, True, True, False))
    assert STD.judge(group).keep
    assert STD.judge(group).evidence["n"] == 3
    assert STD.judge(replace(make_group([1.0, 1.0, 1.0, 0.0]), counted=(True, True, True, False))).reason == "no_spread"


def test_a_group_without_any_counted_member_is_truncated_or_incomplete():
    cut = replace(make_group([1.0, 0.0]), counted=(False, False))
    assert (ANY.judge(cut).reason, ANY.judge(cut).category) == ("truncated", "invalid")
    assert ANY.judge(make_group([None, None])).reason == "incomplete"
    assert ANY.judge(make_group([])).reason == "incomplete"


def test_a_counted_member_without_a_reward_makes_the_group_incomplete():
    group = replace(make_group([1.0, None, 0.0]), counted=(True, True, True))
    assert STD.judge(group).reason == "incomplete"
    assert build_query_filter({"type": "std_filter"}, min_members=2).judge(group).keep


def test_case_27_a_partly_failed_group_is_not_kept():
    assert STD.judge(make_group([1.0, 0.0])).keep
    assert not STD.judge([1, None]).keep
    assert not STD.judge(make_group([1.0, None])).keep  # one counted member of two
    of_two = build_query_filter({"type": "std_filter"}, group_size=2)
    assert not of_two.judge(make_group([1.0])).keep  # the other member is lost


def test_case_11_one_value_per_rollout_enters_the_statistic():
    assert not STD.judge(sum_steps([[0, 0, 1], [1]])).keep
    assert STD.judge(sum_steps([[0, 0, 1], [0, 0, 0]])).keep
    with pytest.raises(FilterError, match="sum_steps"):
        STD.judge([[0, 0, 1], [1]])
    with pytest.raises(FilterError, match="sum_steps"):
        STD.judge(np.array([[0, 0, 1], [0, 0, 0]]))


def test_steps_are_summed_and_missing_ones_stay_missing():
    assert sum_steps([[0.1] * 10, [], [1.0, None], [math.nan], [True, np.float32(0.5)], [1.7e308] * 3]) == [1.0, 0.0, None, None, 1.5, None]
    for bad in ([1.0], ["12"], [["1"]]):
        with pytest.raises(FilterError, match="rollout 0|member 0"):
            sum_steps(bad)


def test_case_13_mappings_need_a_metric():
    rewards = [{"acc": 1, "fmt": 0}, {"acc": 0, "fmt": 1}]
    for metric in ("acc", "fmt"):
        assert build_query_filter({"type": "std_filter", "metric": metric}).judge(rewards).keep
    with pytest.raises(FilterError, match=r"rewards.math.query_filter_config.metric.*") as error:
        build_query_filter({"type": "std_filter"}, where="rewards.math.query_filter_config").judge(rewards)
    assert "['acc', 'fmt']" in str(error.value)
    assert STD.judge([True, np.float32(0), np.int64(1), 0.0]).keep


def test_case_15_the_filter_reads_the_named_metric_and_not_the_shaped_reward():
    shaped = [0.0, 0.0, -0.5, -1.0]
    metrics = [{"acc": 0.0, "shaped": reward} for reward in shaped]
    group = group_with_metrics(metrics, shaped)
    for rewards in (metrics, group):
        acc = build_query_filter({"type": "std_filter", "metric": "acc"}).judge(rewards)
        assert (acc.keep, acc.reason) == (False, "no_spread")
        kept = build_query_filter({"type": "std_filter", "metric": "shaped"}).judge(rewards)
        assert kept.keep
        assert kept.evidence["std"] == pytest.approx(0.479, abs=1e-3)


def test_case_17_a_missing_metric_is_never_replaced_by_the_reward():
    rewards = [1.125, 1.125, -0.25, -0.25]
    with pytest.raises(FilterError, match="'acc'.*only the fields.*'fmt'.*never read in its place"):
        ACC.judge(group_with_metrics([{"fmt": 1.0}] * 4, rewards))
    with pytest.raises(FilterError, match="'acc'.*only the fields"):
        ACC.judge([{"fmt": reward} for reward in rewards])
    with pytest.raises(FilterError, match="'acc'.*a mapping.*was expected for member 0, got 1.125"):
        ACC.judge(rewards)


def test_a_metric_is_asked_only_of_members_that_count():
    group = group_with_metrics([{"acc": 1.0}, {"acc": 0.0}, {}], [1.0, 0.0, None])
    assert ACC.judge(group).evidence["n"] == 2
    assert ACC.judge([{"acc": 1.0}, None]).reason == "incomplete"
    assert ACC.judge([{"acc": 1.0}, {"acc": None}]).reason == "incomplete"


@pytest.mark.parametrize(
    "bad",
    [
        "1010",
        b"10",
        {"acc": [1, 0]},
        {1.0, 0.0},
        3.0,
        None,
        iter([1.0]),
        [],
        np.zeros(0),
        np.zeros((2, 1)),
        np.array(1.0),
        np.array(["1", "0"]),
        ["1", "0"],
        [1.0, "0"],
        [1.0, [0.0]],
        [np.zeros(1)],
        [1 + 2j],
        [object()],
        np.array(["2026-01-01"], dtype="datetime64[D]"),
    ],
)
def test_what_is_no_row_of_rewards_is_refused_with_what_was_expected(bad):
    with pytest.raises(FilterError, match="expected one (reward per member|number as the reward)") as error:
        build_query_filter({"type": "no_filter"}, where="rewards.math.query_filter_config").judge(bad)
    assert str(error.value).startswith("rewards.math.query_filter_config: ")
