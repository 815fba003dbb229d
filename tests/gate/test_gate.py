"""`Gate`: one decision on one group."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import Gate, OrTermination, SingleAxis, signals
from tests.gate.strategies import groups

CASE_140 = ["ABCD", "ABCD", "ABCE", "ABCD"]
SAME = ["AAAA"] * 4
APART = ["ABCD", "EFGH", "IJKL", "MNOP"]


def test_the_threshold_is_strict_and_in_units_of_k() -> None:
    """Case 140: the distance divided by K = 4 is 0.125: it runs on at 0.125 and is cut at 0.1275."""
    assert Gate(k=4, threshold=0.125).decide(CASE_140).keep
    cut = Gate(k=4, threshold=0.1275).decide(CASE_140)
    assert not cut.keep
    assert (cut.reason, cut.category, cut.source) == ("converged_prefix", "low_information", "gate")
    assert cut.evidence["prefix_edit_distance_mean"] == 0.125
    assert cut.evidence["threshold"] == 0.1275
    assert (cut.evidence["k"], cut.evidence["n"]) == (4, 4)


def test_the_published_point_is_the_default() -> None:
    gate = Gate()
    assert (gate.k, gate.threshold, gate.signal) == (10, 0.12, "prefix_edit_distance_mean")
    assert not gate.decide(["x" * 10] * 8).keep
    assert gate.decide([chr(65 + i) * 10 for i in range(8)]).keep


@given(groups())
def test_a_group_is_cut_exactly_when_its_signal_is_below_the_threshold(group) -> None:
    actions, observations, k = group
    if all(len(member) < k for member in actions):
        actions[0], observations[0] = ["look"] * k, ["x"] * k
        actions = [[str(action) for action in member] for member in actions]
    for threshold in (0.0, 0.2, 0.5, 1.0):
        verdict = Gate(k=k, threshold=threshold).decide(actions, observations)
        assert verdict.keep == (signals(actions, k)["prefix_edit_distance_mean"] >= threshold)
        assert signals(actions, k, observations).items() <= verdict.evidence.items()


def test_members_of_different_progress() -> None:
    """Case 142: of 4 members at K = 3 one ended after 2 actions, two have 3, one is dead: three are compared."""
    verdict = Gate(k=3, threshold=1.0).decide(["AB", "ABC", "ABC", None])
    assert verdict.evidence["n"] == 3
    assert verdict.evidence["prefix_edit_distance_mean"] == pytest.approx((1 + 1 + 0) / 3 / 3)
    assert not any(math.isnan(value) for value in verdict.evidence.values())


@pytest.mark.parametrize("actions", [[], ["ABC"], ["ABC", None, None], [None, None]], ids=str)
def test_less_than_two_comparable_members_are_no_decision(actions) -> None:
    """Case 142: the group runs on."""
    assert Gate(k=3, threshold=1.0).decide(actions) is None


def test_a_group_that_has_ended_is_left_to_the_filters() -> None:
    gate = Gate(k=3, rule=OrTermination(threshold=1.0))
    assert gate.decide(["AB", "AB", "", None]) is None
    assert gate.decide(["AB", "ABC", None]) is not None
    # Who has a reward has finished, however far it went.
    assert gate.decide(["AB", "ABCDE", "ABC"], rewards=[1.0, 1.0, 1.0]) is None
    assert not gate.decide(["AB", "ABCDE", "ABC"], rewards=[1.0, 1.0, None]).keep


@given(st.lists(st.sampled_from([None, 0.0, 1.0, 0.5]), min_size=4, max_size=4))
def test_finished_members_with_different_rewards_are_never_cut(rewards) -> None:
    verdict = Gate(k=4, threshold=1.0).decide(SAME, rewards=rewards)
    known = {reward for reward in rewards if reward is not None}
    if len(known) > 1 or None not in rewards:
        assert verdict is None
    else:
        assert not verdict.keep


def test_rewards_are_compared_by_value() -> None:
    gate = Gate(k=4, threshold=1.0)
    assert not gate.decide(SAME, rewards=[1, 1.0, True, None]).keep
    assert not gate.decide(SAME, rewards=[np.float32(0.1), np.float32(0.1), None, None]).keep
    assert gate.decide(SAME, rewards=[0.1, np.nextafter(0.1, 1), None, None]) is None


def test_task_types_have_their_thresholds() -> None:
    from sluice.gate import build_rule

    gate = Gate(k=4, rule=build_rule({"type": "by_task_type", "rules": {"look": 0.2}, "default": 0.1}))
    assert not gate.decide(CASE_140, task_type="look").keep
    kept = gate.decide(CASE_140, task_type="put")
    assert kept.keep
    assert kept.evidence["threshold"] == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "gate.k: expected a whole number >= 1, got 0"),
        ({"k": 2.5}, "gate.k: expected a whole number >= 1, got 2.5"),
        ({"k": 31, "horizon": 30}, "gate.k: expected a step below the horizon 30, got 31"),
        ({"k": 30, "horizon": 30}, "gate.k: expected a step below the horizon 30, got 30 - nothing is left to save"),
        ({"horizon": 0}, "gate.horizon: expected a whole number >= 1, got 0"),
        ({"threshold": 1.01}, "gate.threshold: expected a number >= 0 and <= 1, got 1.01"),
        ({"threshold": -0.01}, "gate.threshold: .* got -0.01"),
        ({"threshold": math.nan}, "gate.threshold: .* got nan"),
        ({"threshold": math.inf}, "gate.threshold: .* got inf"),
        ({"threshold": None}, "gate.threshold: .* got None"),
        ({"signal": "bigram_jaccard"}, "gate.signal: expected one of .*did you mean"),
        ({"rule": SingleAxis(), "threshold": 0.3}, "gate.rule: expected a rule alone, got also threshold 0.3"),
        ({"rule": 0.1}, "gate.rule: expected an object with reads, margin and limits, got 0.1 - .*build_rule"),
        ({"rule": {"type": "single_axis"}}, "gate.rule: expected an object with reads, .* got {'type'"),
        ({"rule": SingleAxis}, "gate.rule: expected an object with reads, .* got <class"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_say_what_to_change(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gate(**settings)


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", [1], 10**400, Fraction(10**400), Decimal("sNaN")], ids=type)
def test_a_reward_that_is_no_number_is_refused(reward) -> None:
    with pytest.raises(GateError, match="rewards: expected a finite number for member 1, got .* - give None"):
        Gate(k=4).decide(APART, rewards=[1.0, reward, None, None])


def test_one_entry_per_member() -> None:
    with pytest.raises(GateError, match="rewards: expected one per member, that is 4, got 2"):
        Gate(k=4).decide(APART, rewards=[1.0, 0.0])
    with pytest.raises(GateError, match="observations: expected one sequence per member, that is 4, got 1"):
        Gate(k=4).decide(APART, [["x"] * 4])
    with pytest.raises(GateError, match="rewards: expected one per member, got 'abcd'"):
        Gate(k=4).decide(APART, rewards="abcd")
    with pytest.raises(GateError, match="actions: expected one sequence of actions per member, got 'abcd'"):
        Gate(k=4).decide("abcd")
    with pytest.raises(GateError, match="actions of one type"):
        Gate(k=1).decide([["a"], [1]])


@pytest.mark.parametrize("rows", [{("a",), ("b",)}, iter("ab"), 3, {0: "a", 1: "b"}, "ab"], ids=type)
def test_what_has_no_order_names_no_members(rows) -> None:
    gate = Gate(k=1, threshold=1.0)
    with pytest.raises(GateError, match="actions: expected one sequence of actions per member, got"):
        gate.decide(rows)
    with pytest.raises(GateError, match="observations: expected one sequence per member"):
        gate.decide(["a", "b"], rows)
    with pytest.raises(GateError, match="rewards: expected one per member, got"):
        gate.decide(["a", "b"], rewards={1.0, None} if isinstance(rows, set) else rows)


@pytest.mark.parametrize("member", [3, iter("ab"), {"a"}, {"a": 1}], ids=type)
def test_a_member_that_has_no_order_is_named(member) -> None:
    with pytest.raises(GateError, match="actions of member 1: expected a sequence, got"):
        Gate(k=1).decide([None, member, "a"])


@pytest.mark.parametrize("task_type", [3, ["look"]], ids=repr)
def test_a_task_type_is_a_text(task_type) -> None:
    with pytest.raises(GateError, match="task_type: expected a text, or None where it is not known, got"):
        Gate(k=4).decide(SAME, task_type=task_type)
