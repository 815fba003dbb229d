"""The seven signals: their definitions, their invariances, and what they refuse."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import SIGNALS, PrefixSignals, signals
from tests.gate.naive import naive_signals
from tests.gate.strategies import NOT_BY_VALUE, groups

# ---------------------------------------------------------------- properties


@given(groups())
def test_every_signal_agrees_with_its_definition(group) -> None:
    actions, observations, k = group
    measured = signals(actions, k, observations)
    assert set(measured) == set(SIGNALS)
    assert measured == pytest.approx(naive_signals(actions, k, observations), abs=1e-12)


@given(groups(), st.randoms(use_true_random=False))
def test_the_order_of_members_changes_nothing_not_even_the_last_digit(group, random) -> None:
    actions, observations, k = group
    order = list(range(len(actions)))
    random.shuffle(order)
    assert signals([actions[i] for i in order], k, [observations[i] for i in order]) == signals(actions, k, observations)


@given(groups())
def test_every_signal_lies_between_0_and_1(group) -> None:
    actions, observations, k = group
    assert all(0.0 <= value <= 1.0 for value in signals(actions, k, observations).values())


@given(groups())
def test_actions_are_compared_by_value_alone(group) -> None:
    actions, observations, k = group
    renamed = [[f"action {action!r}" for action in member] for member in actions]
    assert signals(renamed, k, observations) == signals(actions, k, observations)


@given(groups(), st.data())
def test_actions_in_any_interleaving_give_the_same_numbers(group, data) -> None:
    actions, observations, k = group
    incremental = PrefixSignals(k, has_observations=True)
    # A member that will be lost, and comes back under the same name: what it did before leaves no trace.
    lost = data.draw(st.sampled_from(range(len(actions))))
    for step in range(data.draw(st.integers(0, k))):
        incremental.add(lost, actions[lost][0] if actions[lost] else "look", f"lost {step}")
    incremental.forget(lost)
    if not actions[lost]:  # the kind of its actions was made up
        incremental = PrefixSignals(k, has_observations=True)
    todo = {i: [*zip(actions[i], observations[i], strict=False)] for i in range(len(actions))}
    while todo:
        member = data.draw(st.sampled_from(sorted(todo)))
        if todo[member]:
            incremental.add(member, *todo[member].pop(0))
        else:
            if len(actions[member]) < k or data.draw(st.booleans()):
                incremental.end(member)
            del todo[member]
    assert set(incremental.comparable) == set(range(len(actions)))
    assert incremental.signals() == signals(actions, k, observations)


@given(groups(), st.data())
def test_the_incremental_form_answers_for_a_part_of_the_members(group, data) -> None:
    actions, _, k = group
    incremental = PrefixSignals(k)
    for member, row in enumerate(actions):
        for action in row:
            incremental.add(member, action)
        incremental.end(member)
    chosen = data.draw(st.lists(st.sampled_from(range(len(actions))), unique=True, min_size=2))
    assert incremental.signals(chosen) == signals([actions[i] for i in chosen], k)


# ---------------------------------------------------------------- by hand


def test_pairs_are_unordered_and_of_different_members() -> None:
    """Case 140: distances [0, 1, 0, 1, 0, 1], mean 0.5 raw, 0.125 divided by K; with self pairs it would be 0.375 raw."""
    actions = ["ABCD", "ABCD", "ABCE", "ABCD"]
    assert signals(actions, 4)["prefix_edit_distance_mean"] == 0.125
    assert signals([list(member) for member in actions], 4)["prefix_edit_distance_mean"] == 0.125


def test_all_signals_of_a_small_group() -> None:
    actions = [["a", "b", "c"], ["a", "b", "d", "e"], ["a"], ["a", "b", "c"]]
    observations = [["s", "t", "u", "-"], ["s", "t", "v", "w", "-"], ["s", "end"], ["s", "t", "u", "-"]]
    assert signals(actions, 3, observations) == pytest.approx(
        {
            # abc abd 1, abc aEE 2, abc abc 0, abd aEE 2, abd abc 1, aEE abc 2
            "prefix_edit_distance_mean": 8 / 6 / 3,
            # {ab bc} {ab bd} {aE EE} {ab bc}: 2/3, 1, 0, 1, 2/3, 1
            "action_bigram_jaccard_mean": (2 / 3 + 1 + 0 + 1 + 2 / 3 + 1) / 6,
            "unique_prefix_ratio": 3 / 4,
            "unique_action_ratio": 3 / 4,  # c, d, END
            "action_entropy": (0.5 * 1 + 0.25 * 2 + 0.25 * 2) / 2,
            "obs_unique_ratio": 3 / 4,  # u, v, END
            "termination_fraction": 1 / 4,
        },
        abs=1e-15,
    )


def test_a_member_that_ended_at_step_k_has_not_terminated_before_it() -> None:
    measured = signals([["a", "b"], ["a"]], 2, [["s", "t", "done"], ["s", "done"]])
    assert measured["termination_fraction"] == 0.5
    assert measured["obs_unique_ratio"] == 1.0  # t, and END rather than what it saw after its last action


def test_an_end_is_no_action_and_no_observation_that_could_be_given() -> None:
    for like_end in ("\0", "END", "", "<end>"):
        measured = signals([[like_end, like_end], [like_end], []], 2, [[like_end] * 2, [like_end], []])
        assert measured["unique_prefix_ratio"] == 1.0
        assert measured["unique_action_ratio"] == measured["obs_unique_ratio"] == 2 / 3


def test_at_k_1_the_bigram_signal_is_0() -> None:
    measured = signals([["a"], ["b"]], 1)
    assert measured["action_bigram_jaccard_mean"] == 0.0
    assert measured["prefix_edit_distance_mean"] == measured["action_entropy"] == 1.0


def test_without_observations_their_signal_is_absent() -> None:
    assert "obs_unique_ratio" not in signals(["ab", "ab"], 2)
    assert signals([[], []], 2, [[], []])["obs_unique_ratio"] == 0.5


def test_entropy_is_exact_at_its_ends() -> None:
    for n in range(2, 40):
        assert signals([[i] for i in range(n)], 1)["action_entropy"] == 1.0
        assert signals([[0]] * n, 1)["action_entropy"] == 0.0


def test_a_mean_that_equals_a_decimal_is_that_float() -> None:
    """28 pairs x 10 steps: 28 edits are 0.1 exactly, so that `< 0.1` is false."""
    for edits, ratio in ((28, 0.1), (35, 0.125), (56, 0.2), (84, 0.3)):
        # 7 pairs contain the one member that differs in m actions.
        member = ["x"] * 10
        apart = [*member[:-1], "y"]
        if edits % 7 == 0 and edits // 7 <= 10:
            apart = ["y"] * (edits // 7) + member[edits // 7 :]
            assert signals([member] * 7 + [apart], 10)["prefix_edit_distance_mean"] == ratio
        else:
            assert Fraction(edits, 280) == Fraction(str(ratio))


def test_many_different_actions() -> None:
    """More bigrams than there is room for in a dense table, and more actions than one plane of characters."""
    wide = [[f"{i} {t}" for t in range(100)] for i in range(6)]
    assert signals(wide, 100)["action_bigram_jaccard_mean"] == 1.0
    assert signals([*wide, wide[0]], 100) == pytest.approx(naive_signals([*wide, wide[0]], 100))
    huge = [list(range(start, start + 35_000)) for start in (0, 35_000)]
    measured = signals(huge, 35_000)
    assert measured["prefix_edit_distance_mean"] == measured["unique_prefix_ratio"] == measured["action_bigram_jaccard_mean"] == 1.0


def test_arrays_are_read_as_lists() -> None:
    table = np.array([[1, 2, 3], [1, 2, 4]])
    assert signals(table, 3, table) == signals(table.tolist(), 3, table.tolist())
    assert signals([np.array([1, 2, 3]), [1, 2, 4]], 3) == signals(table, 3)
    assert signals([np.array(["a", "b"]), ("a", "b")], 2)["unique_prefix_ratio"] == 0.5


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "3", None, math.nan])
def test_a_k_that_is_no_step_is_refused(k) -> None:
    with pytest.raises(ConfigError, match="k: expected a whole number >= 1"):
        signals(["ab", "ab"], k)
    with pytest.raises(ConfigError, match="k: expected a whole number >= 1"):
        PrefixSignals(k)


@pytest.mark.parametrize("actions", [[], [["a"]], ["abc"]])
def test_less_than_two_members_are_refused(actions) -> None:
    with pytest.raises(GateError, match=f"at least two members, got {len(actions)} - .*group_size to 2"):
        signals(actions, 1)


@pytest.mark.parametrize(
    "mixed", [("a", 1), (1, True), (1, 1.0), ("a", None), ("a", b"a"), (1, np.int64(1)), ("a", np.str_("a")), ((1,), "1")], ids=repr
)
def test_actions_of_mixed_types_are_refused(mixed) -> None:
    """1 equals True and 1.0, and is never equal to "1": neither is what was meant."""
    first, second = mixed
    for actions in ([[first], [second]], [[first, second], [first, first]]):
        with pytest.raises(GateError, match="actions of one type, got .*, .* - convert them all"):
            signals(actions, 2)
    incremental = PrefixSignals(2)
    incremental.add(0, first)
    with pytest.raises(GateError, match="actions of one type, got .*, .* - convert them all"):
        incremental.add(1, second)


def test_nan_is_no_action() -> None:
    with pytest.raises(GateError, match="got nan"):
        signals([[1.0, math.nan], [1.0, 2.0]], 2)
    incremental = PrefixSignals(2)
    incremental.add(0, 1.0)
    with pytest.raises(GateError, match="got nan"):
        incremental.add(0, math.nan)


@pytest.mark.parametrize("value", NOT_BY_VALUE, ids=repr)
def test_what_cannot_be_compared_by_value_is_refused(value) -> None:
    """Two of them that say the same would count as different, or not, by where they lie in memory."""
    with pytest.raises(GateError, match="member 1: expected an action that equals another one of the same value, got"):
        signals([[], [value]], 1)
    with pytest.raises(GateError, match="member 0: expected an observation that equals another one of the same value, got"):
        signals(["ab", "ab"], 2, [["x", value], ["x", "y"]])
    with pytest.raises(GateError, match="member 7: expected an action that equals another"):
        PrefixSignals(2).add(7, value)
    with pytest.raises(GateError, match="member 7: expected an observation that equals another"):
        PrefixSignals(2, has_observations=True).add(7, "a", value)


def test_what_cannot_be_hashed_is_refused_with_its_member() -> None:
    with pytest.raises(GateError, match=r"member 1: expected an action that is hashable, got \['b'\] \(list\)"):
        signals([[], [["b"]]], 1)
    with pytest.raises(GateError, match=r"member 0: expected an observation that is hashable, got \{\} \(dict\)"):
        signals(["a", "b"], 1, [[{}], ["x"]])
    with pytest.raises(GateError, match="member 7: expected an action that is hashable"):
        PrefixSignals(1).add(7, [])
    with pytest.raises(GateError, match="member 7: expected an observation that is hashable"):
        PrefixSignals(1, has_observations=True).add(7, "a", [])


@pytest.mark.parametrize(
    "actions",
    ["abc", {"a": 1}, {"a", "b"}, 3, None, iter([["a"], ["b"]])],
    ids=["text", "mapping", "set", "number", "nothing", "iterator"],
)
def test_what_is_no_group_is_refused(actions) -> None:
    with pytest.raises(GateError, match="expected one sequence of actions per member, got"):
        signals(actions, 1)


def test_a_member_without_order_is_refused() -> None:
    with pytest.raises(GateError, match="actions of member 1: expected a sequence, got {'a'}"):
        signals([["a"], {"a"}], 1)
    with pytest.raises(GateError, match="actions of member 0: expected a sequence, got 5"):
        signals([5, 6], 1)


def test_observations_that_do_not_fit_are_refused() -> None:
    with pytest.raises(GateError, match="one sequence per member, that is 2, got 1"):
        signals(["ab", "ab"], 2, [["x", "y"]])
    with pytest.raises(GateError, match="observations of member 1: expected at least 2, .* got 1"):
        signals(["ab", "ab"], 2, [["x", "y"], ["x"]])
    with pytest.raises(GateError, match="one sequence per member, that is 2, got"):
        signals(["ab", "ab"], 2, 3)


def test_the_incremental_form_refuses_what_it_was_not_built_for() -> None:
    with pytest.raises(GateError, match="expected no observation"):
        PrefixSignals(2).add(0, "a", "seen")
    with pytest.raises(GateError, match="expected an observation"):
        PrefixSignals(2, has_observations=True).add(0, "a")
    incremental = PrefixSignals(2)
    incremental.add(0, "a")
    incremental.end(0)
    with pytest.raises(GateError, match="no action of member 0 after its end"):
        incremental.add(0, "b")
    with pytest.raises(GateError, match="at least two members, got 1"):
        incremental.signals()
    incremental.add(1, "a")
    with pytest.raises(GateError, match="members with 2 actions or ended ones, got 1"):
        incremental.signals([0, 1])
    for action in itertools.repeat("b", 5):
        incremental.add(1, action)
    assert incremental.signals([0, 1]) == signals([["a"], ["a", "b"]], 2)
