from __future__ import annotations

import math
import statistics
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.advantage import fold_rows, group_relative, leave_one_out, no_signal, normalise_by_function, to_tokens

finite = st.floats(allow_nan=False, allow_infinity=False)
ordinary = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-100, 100))
NAN, INF = math.nan, math.inf


@st.composite
def batches(draw, values=ordinary, missing=True):
    """Rewards, group ids and mask of up to 20 rollouts in up to four groups, in any order."""
    n = draw(st.integers(0, 20))
    rewards = draw(st.lists(st.one_of(values, st.none()) if missing else values, min_size=n, max_size=n))
    ids = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    mask = [reward is not None and draw(st.booleans()) for reward in rewards]
    return rewards, ids, mask


def slow(rewards, ids, mask, formula):
    """One member after the other, by the definition; `formula(own, all of the group, the others)`."""
    out = []
    for i, own in enumerate(rewards):
        group = [r for r, g, m in zip(rewards, ids, mask, strict=True) if g == ids[i] and m]
        others = [r for j, (r, g, m) in enumerate(zip(rewards, ids, mask, strict=True)) if g == ids[i] and m and j != i]
        out.append(formula(own, group, others) if mask[i] and len(set(group)) > 1 else 0.0)
    return np.array(out)


def exact_mean(values):
    return float(sum(map(Fraction, values)) / len(values))


def standardised(ddof, eps):
    def formula(own, group, others):
        deviation = statistics.stdev(group) if ddof else statistics.pstdev(group)
        return (own - exact_mean(group)) / (deviation + eps)

    return formula


# ---------------------------------------------------------------- properties


@given(batches(), st.sampled_from([0, 1]), st.sampled_from([1e-8, 1e-4, 0.1]))
def test_the_definition_computed_slowly_gives_the_same(batch, ddof, eps):
    rewards, ids, mask = batch
    np.testing.assert_allclose(group_relative(*batch, ddof=ddof, eps=eps), slow(*batch, standardised(ddof, eps)), rtol=1e-6, atol=1e-9)
    centred = slow(*batch, lambda own, group, others: own - exact_mean(group))
    np.testing.assert_allclose(group_relative(*batch, scale="none"), centred, rtol=1e-9, atol=1e-12)
    without = slow(*batch, lambda own, group, others: own - exact_mean(others))
    np.testing.assert_allclose(leave_one_out(*batch), without, rtol=1e-9, atol=1e-12)


@given(batches(finite.filter(lambda x: abs(x) < 1e300)), st.sampled_from(["std", "none"]))
def test_advantages_of_a_group_sum_to_zero_and_are_finite(batch, scale):
    rewards, ids, mask = batch
    for advantages in (group_relative(*batch, scale=scale), leave_one_out(*batch)):
        assert advantages.shape == (len(rewards),)
        assert np.isfinite(advantages).all()
        for group in set(ids):
            members = advantages[np.array(ids) == group]
            assert abs(math.fsum(members)) <= 1e-12 * max(np.abs(members).max(), 1e-300) * len(members) ** 2


@given(batches(finite.filter(lambda x: abs(x) < 1e300)), st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-8]))
def test_standardised_advantages_never_exceed_what_the_group_size_permits(batch, ddof, eps):
    rewards, ids, mask = batch
    advantages = group_relative(*batch, ddof=ddof, eps=eps)
    for group in set(ids):
        counted = [m for g, m in zip(ids, mask, strict=True) if g == group and m]
        if counted:
            bound = (len(counted) - 1) / math.sqrt(len(counted)) if ddof else math.sqrt(len(counted) - 1)
            assert np.abs(advantages[np.array(ids) == group]).max() <= bound * (1 + 1e-9)


extreme = st.one_of(
    finite.filter(lambda x: abs(x) < 1e300),
    st.sampled_from([0.1, 0.1 + 2**-56, 1e-300, 5e-324, -5e-324, 1.0, 1.0 + 2**-52, 1e300, -1e300, 2.0**53, 2.0**53 + 2]),
)


@given(batches(extreme), st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-8, 1.0]))
def test_no_advantage_explodes_under_any_mask(batch, ddof, eps):
    """Standardised ones stay within what the size of the group permits, the others within the spread of its counted rewards."""
    rewards, ids, mask = batch
    standardised = group_relative(*batch, ddof=ddof, eps=eps)
    in_units = (group_relative(*batch, scale="none"), leave_one_out(*batch))
    by_function = normalise_by_function({"f": rewards}, ids, mask, ddof=ddof, eps=eps)["f"]
    np.testing.assert_array_equal(np.nan_to_num(by_function), standardised)
    for group in set(ids):
        counted = [r for r, g, m in zip(rewards, ids, mask, strict=True) if g == group and m]
        here = np.array(ids) == group
        n = max(len(counted), 1)
        assert np.abs(standardised[here]).max() <= ((n - 1) / math.sqrt(n) if ddof else math.sqrt(n - 1)) * (1 + 1e-9)
        spread = max(counted) - min(counted) if counted else 0.0
        for advantages in in_units:
            assert np.abs(advantages[here]).max() <= spread * (1 + 1e-9)


@given(batches(extreme))
def test_under_a_mask_groups_are_silent_by_their_counted_members_alone(batch):
    rewards, ids, mask = batch
    kept = [(r, g) for r, g, m in zip(rewards, ids, mask, strict=True) if m]
    alone = no_signal([r for r, _ in kept], [g for _, g in kept])
    silent = no_signal(*batch)
    assert set(silent) == set(ids)
    assert all(silent[group] == alone.get(group, True) for group in silent)
    advantages = leave_one_out(*batch)
    assert all((advantages[np.array(ids) == group] == 0).all() for group in silent if silent[group])


@given(batches(), st.randoms())
def test_position_never_matters(batch, random):
    rewards, ids, mask = batch
    order = random.sample(range(len(rewards)), len(rewards))
    moved = tuple([column[i] for i in order] for column in batch)
    names = dict(enumerate(("task-7", 3, (1, "x"), "b")))
    renamed = (rewards, [names[i] for i in ids], mask)
    for function in (group_relative, leave_one_out):
        np.testing.assert_allclose(function(*moved), function(*batch)[order], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(function(*renamed), function(*batch))
        np.testing.assert_array_equal(
            function(np.array(rewards, dtype=float), np.array(ids, dtype=int), np.array(mask, dtype=bool)), function(*batch)
        )


@given(batches(st.integers(-8, 8).map(float)), st.sampled_from([0.25, 1.0, 8.0, 1e6]), st.sampled_from([0.0, -1000.0, 2.0**30]))
def test_scale_and_shift_do_not_change_standardised_advantages(batch, factor, shift):
    rewards, ids, mask = batch
    changed = [None if r is None else factor * r + shift for r in rewards]
    np.testing.assert_allclose(group_relative(changed, ids, mask), group_relative(*batch), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(group_relative(changed, ids, mask, eps=0), group_relative(*batch, eps=0), rtol=1e-9, atol=1e-12)


@given(batches(finite.filter(lambda x: abs(x) < 1e300)))
def test_what_does_not_count_has_no_advantage_and_no_influence(batch):
    rewards, ids, mask = batch
    at = np.array(mask, dtype=bool)
    for function in (group_relative, leave_one_out):
        advantages = function(*batch)
        assert (advantages[~at] == 0).all()
        alone = function([r for r, m in zip(rewards, mask, strict=True) if m], [g for g, m in zip(ids, mask, strict=True) if m])
        np.testing.assert_allclose(advantages[at], alone, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(function([r if m else None for r, m in zip(rewards, mask, strict=True)], ids), advantages)


@given(finite, st.integers(1, 30), st.sampled_from(["std", "none"]))
def test_a_constant_group_has_advantage_exactly_zero(value, size, scale):
    assert (group_relative([value] * size, [0] * size, scale=scale) == 0).all()
    assert (leave_one_out([value] * size, [0] * size) == 0).all()
    assert no_signal([value] * size, [0] * size) == {0: True}


# ---------------------------------------------------------------- by hand


def test_two_of_four_right_gives_plus_and_minus():
    np.testing.assert_allclose(group_relative([1, 0, 1, 0], [0] * 4), [0.8660254, -0.8660254, 0.8660254, -0.8660254], rtol=1e-6)
    np.testing.assert_allclose(group_relative([1, 0, 1, 0], [0] * 4, ddof=0), [1, -1, 1, -1], rtol=1e-6)
    np.testing.assert_array_equal(group_relative([1, 0, 1, 0], [0] * 4, scale="none"), [0.5, -0.5, 0.5, -0.5])


@pytest.mark.parametrize(
    "rewards",
    [
        [1e9, 1e9, 1e9 + 2**-23],
        [2**53, 2**53, 2**53 + 1],
        np.array([2**53, 2**53, 2**53 + 1], dtype=np.uint64),
        np.array([-128, -128, 127], dtype=np.int8),
        np.array([1, 1, 1.001], dtype=np.float16),
        [-(2**63), -(2**63), 2**63 - 1],
        [0.0, 0.0, 5e-324],
        [0, 0, 10**300],
        [1.0, 1.0, Fraction(3, 2)],
        [Fraction(1, 3) - Fraction(1, 10**400), Fraction(1, 3) - Fraction(1, 10**400), Fraction(1, 3)],
        [10**300, 10**300, 10**300 + 1],
        [float(2**53), 2**53, 2**53 + 1],
        [Decimal("0.1"), Decimal("0.1"), 0.1],
        np.array([1, 1, 1 + np.finfo(np.longdouble).eps], dtype=np.longdouble),
        np.array([-(2**63), -(2**63), 2**63 - 1], dtype=np.int64),
        [-1.7e308, -1.7e308, 1.7e308],
        np.array([-1e308, -1e308, 1e308]),
        [False, False, True],
    ],
)
def test_only_the_order_matters_for_two_values_whatever_their_size_and_type(rewards):
    np.testing.assert_allclose(group_relative(rewards, [0] * 3, eps=0), [-0.57735, -0.57735, 1.15470], atol=1e-5)
    assert no_signal(rewards, [0] * 3) == {0: False}


def test_large_finite_rewards_have_finite_advantages_or_an_error_that_names_the_group():
    rewards, ids = [1e308, -1e308, 1.0, 0.0], ["big", "big", "small", "small"]
    np.testing.assert_allclose(group_relative(rewards, ids), [0.70710678, -0.70710678] * 2, rtol=1e-6)
    np.testing.assert_allclose(group_relative([Fraction(r) for r in rewards], ids), [0.70710678, -0.70710678] * 2, rtol=1e-6)
    np.testing.assert_array_equal(group_relative(rewards, ids, scale="none"), [1e308, -1e308, 0.5, -0.5])
    assert no_signal(rewards, ids) == {"big": False, "small": False}
    with pytest.raises(ValueError, match=r"distance from the mean of their group fits into a float64.*index 0 .group 'big'."):
        leave_one_out(rewards, ids)
    with pytest.raises(ValueError, match=r"index 2 .group 7. - scale the rewards down"):
        group_relative([-1.7e308, -1.7e308, 1.7e308, 1.0], [7, 7, 7, 0], scale="none")


anything_finite = st.one_of(
    finite,
    st.integers(),
    st.booleans(),
    st.fractions(),
    st.decimals(-1000, 1000, places=3),
    finite.map(np.float64),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(np.float32),
    st.integers(-100, 100).map(np.int16),
    st.floats(-10, 10).map(lambda x: np.longdouble(x) / 3),
    st.sampled_from([Fraction(1, 3), 1 / 3, Decimal("0.1"), 0.1, np.float32(0.1), 10**300, 10**300 + 1, 2**53, 2**53 + 1, float(2**53)]),
)


@given(st.one_of(st.lists(anything_finite, min_size=2, max_size=6), st.builds(lambda x, n: [x] * n, anything_finite, st.integers(2, 6))))
@example([Fraction(1, 3), 1 / 3])
@example([10**300, 10**300 + 1])
@example([1e308, -1e308])
@example([Decimal("0.5"), Fraction(1, 2), 0.5, np.float32(0.5)])
@example([np.float32(0.1), 0.1])
@example([Fraction(1, 10**400), 0])
def test_no_signal_and_the_spread_filter_agree_on_every_group(rewards):
    from sluice.filters import build_query_filter

    (is_silent,) = no_signal(rewards, [0] * len(rewards)).values()
    assert build_query_filter({"type": "std_filter"}).judge(rewards).keep is not is_silent
    is_zero = (group_relative(rewards, [0] * len(rewards), eps=0) == 0).all()
    assert is_zero == is_silent


def test_a_tiny_spread_is_damped_by_eps_and_never_blown_up():
    small = group_relative([0.5, 0.5 + 1e-12], [0, 0])
    assert 0 < small[1] < 1e-3
    assert np.isfinite(group_relative([5e-324, 0], [0, 0])).all()


def test_tensors_and_scalars_of_other_libraries_are_numbers():
    torch = pytest.importorskip("torch")
    ids = torch.tensor([0, 0, 1])
    np.testing.assert_allclose(group_relative(torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16), ids, scale="none"), [0.5, -0.5, 0])
    np.testing.assert_allclose(leave_one_out([torch.tensor(1.0), np.float32(0), np.bool_(True)], [0, 0, 1]), [1, -1, 0])


def test_an_empty_batch_has_no_advantages():
    assert group_relative([], []).shape == (0,)
    assert leave_one_out([], [], []).shape == (0,)
    assert no_signal([], []) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, INF], [0, 0]), "finite reward at index 1 .group 0., got inf"),
        (([1.0, NAN, 0.0], ["a", "b", "b"], [True, True, True]), "finite reward at index 1 .group 'b'., got None or NaN"),
        (([None, 1.0], [0, 0], [1, 1]), "finite reward at index 0"),
        ((np.array([1.0, -INF]), np.array([0, 0])), "finite reward at index 1 .group 0., got -inf"),
        (([10**400, 0], [0, 0]), "finite reward at index 0 .group 0., got inf or a number beyond a float64"),
        (([0, 1, -(10**400)], [0, 0, "b"]), "finite reward at index 2 .group 'b'., got -inf"),
        (([Fraction(10**400), 0], [0, 0]), "finite reward at index 0"),
        (([Decimal("1e400"), Decimal("-Infinity")], [0, 0]), "finite reward at index 0"),
        (({1.0, 0.0}, [0, 0]), "one reward per rollout, in a list or array, got .*set, which has no order"),
        (([1.0, 0.0], {0, 1}), "one group id per rollout, in a list or array, got .*set"),
        (([1.0, 0.0], [0, 0], frozenset([True])), "one mask entry per rollout, in a list or array, got .*frozenset"),
        (([1, 2], [0]), "one group id per reward, got 1 group ids for 2 rewards"),
        (([1, 2], [0, 0], [True]), "one mask entry per reward, got 1 for 2"),
        (([1, 2], [0, 0], [0.5, 1.0]), "a mask of true and false"),
        (([1, 2], [0, 0], ["a", "b"]), "a mask of true and false"),
        (([1, "2"], [0, 0]), "one number as the reward at index 1, got '2'"),
        (([1, {"acc": 1}], [0, 0]), "one number as the reward at index 1"),
        (([[0, 1], [1]], [0, 0]), "one number as the reward at index 0.*sum the rewards of its steps"),
        ((np.zeros((2, 2)), [0, 0]), r"shape \[N\], got shape \(2, 2\)"),
        ((np.array(["1", "2"]), [0, 0]), "one number as the reward"),
        (("12", [0, 0]), "one reward per rollout, in a list or array"),
        ((1.0, [0]), "one reward per rollout, in a list or array"),
        (([1, 2], [[0], [0]]), "group ids that tell one from another"),
        (([1, 2], np.zeros((2, 1), dtype=int)), "one group id per rollout"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected_and_where(arguments, message):
    for function in (group_relative, leave_one_out, no_signal):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


@pytest.mark.parametrize(("setting", "value"), [("scale", "batch"), ("ddof", 2), ("eps", -1.0), ("eps", NAN)])
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(ValueError, match=setting):
        group_relative([1, 0], [0, 0], **{setting: value})


# ---------------------------------------------------------------- cases from public reports


@pytest.mark.parametrize(
    "rewards", [[0.1] * 3, np.full(3, 0.9, np.float32), np.full(7, 0.6, np.float32), [1e9 + 0.1] * 7, [1e12 + 0.3] * 3]
)
def test_case_01_equal_rewards_have_no_advantage_in_spite_of_rounding(rewards):
    ids = [0] * len(rewards)
    assert no_signal(rewards, ids) == {0: True}
    assert (group_relative(rewards, ids) == 0).all()
    assert no_signal([0.1, 0.1, 0.1001], [0] * 3) == {0: False}


def test_case_03_the_advantage_of_a_singleton_is_zero():
    rewards, ids = [5.0, 0.0, 1.0], [0, 1, 2]
    for advantages in (group_relative(rewards, ids), group_relative(rewards, ids, scale="none"), leave_one_out(rewards, ids)):
        np.testing.assert_array_equal(advantages, [0, 0, 0])


def test_case_07_a_lone_success_is_centred_and_does_not_explode():
    np.testing.assert_allclose(leave_one_out([1, 0, 0, 0], [0] * 4), [1, -1 / 3, -1 / 3, -1 / 3])
    assert np.abs(group_relative([1, 0, 0, 0], [0] * 4)).max() < 10


def test_case_09_the_no_signal_flag_is_a_matter_of_each_group_alone():
    assert list(no_signal([1, 1, 0, 1], [7, 7, 3, 3]).values()) == [True, False]
    assert no_signal([1, 1, 0, 0], ["a", "a", "b", "b"]) == {"a": True, "b": True}
    assert no_signal(np.array([1, 1, 0, 1]), np.array([7, 7, 3, 3])) == {7: True, 3: False}


def test_case_15_advantages_of_the_shaped_reward():
    np.testing.assert_allclose(group_relative([0, 0, -0.5, -1.0], [0] * 4), [0.783, 0.783, -0.261, -1.306], atol=1e-3)


def test_case_21_a_missing_reward_is_not_a_zero():
    advantages = group_relative([1, 0, None, 1], [0] * 4, scale="none")
    np.testing.assert_allclose(advantages, [1 / 3, -2 / 3, 0, 1 / 3])
    np.testing.assert_array_equal(group_relative([None] * 4, [0] * 4), [0] * 4)


def test_case_23_a_reward_function_that_returns_nothing_harms_nobody_else():
    normalised = normalise_by_function({"f": [1, 0, 1, 0], "g": [None, 0.5, 1, 0.5]}, [0] * 4)
    np.testing.assert_allclose(normalised["f"], [0.866, -0.866, 0.866, -0.866], atol=1e-3)
    np.testing.assert_allclose(normalised["g"], [NAN, -0.577, 1.155, -0.577], atol=1e-3)
    masked = normalise_by_function({"f": [1, 0, 1, 0], "g": [None, 0.5, 1, 0.5]}, [0] * 4, [True, True, True, False], scale="none")
    np.testing.assert_allclose(masked["g"], [NAN, -0.25, 0.25, 0])
    with pytest.raises(ValueError, match="reward function 'g': expected a finite reward at index 0"):
        normalise_by_function({"f": [1, 0], "g": [INF, 0]}, [0, 0])


def test_case_25_a_placeholder_is_outside_the_baseline():
    advantages = group_relative([1, 0, 1, 0], [0] * 4, mask=[True, True, True, False], scale="none")
    np.testing.assert_allclose(advantages, [1 / 3, -2 / 3, 1 / 3, 0])  # mean 0.667 over 3


def test_case_45_a_truncated_member_has_advantage_zero():
    advantages = group_relative([1, 0, 1, 0], [0] * 4, mask=[True, True, True, False])
    assert advantages[3] == 0
    np.testing.assert_allclose(advantages[:3], group_relative([1, 0, 1], [0] * 3))


def test_case_47_uneven_groups_are_told_apart_by_id():
    np.testing.assert_array_equal(group_relative([1, 3, 5], [0, 0, 1], scale="none"), [-1, 1, 0])
    np.testing.assert_array_equal(group_relative([1, 5, 3], [0, 1, 0], scale="none"), [-1, 0, 1])


def test_case_49_a_rollout_in_several_rows_has_one_vote():
    rows = fold_rows([1, 1, 1, 0], ["A", "A", "A", "B"], [0] * 4)
    advantages = group_relative(rows.rewards, rows.group_ids, scale="none")
    np.testing.assert_array_equal(rows.unfold(advantages), [0.5, 0.5, 0.5, -0.5])


def test_case_49_rows_of_one_rollout_with_different_rewards_need_a_rollout_reward():
    with pytest.raises(ValueError, match="row 2 of rollout 'A' has reward 1, an earlier one 0"):
        fold_rows([0, 0, 1, 0], ["A", "A", "A", "B"], [0] * 4)
    rows = fold_rows([0, 0, 1, 0], ["A", "A", "A", "B"], [0] * 4, rollout_rewards={"A": 1, "B": 0})
    assert (rows.rollout_ids, rows.rewards) == (("A", "B"), (1, 0))
    with pytest.raises(ValueError, match="no reward for rollout 'B'"):
        fold_rows([0, 0], ["A", "B"], [0, 0], rollout_rewards={"A": 1})
    with pytest.raises(ValueError, match="row 1 of rollout 'A' is in group 1, an earlier one in 0"):
        fold_rows([0, 0], ["A", "A"], [0, 1])
    with pytest.raises(ValueError, match="2 rewards, 1 rollout ids and 2 group ids"):
        fold_rows([0, 0], ["A"], [0, 1])
    with pytest.raises(ValueError, match=r"one value per rollout, shape \(2,\), got shape \(4,\)"):
        rows.unfold(np.zeros(4))
    assert fold_rows([None, NAN], ["A", "A"], [0, 0]).rewards == (None,)


def test_case_51_the_group_is_the_task_and_not_the_rollout():
    np.testing.assert_array_equal(group_relative([1, 0, 1, 0], ["t"] * 4, scale="none"), [0.5, -0.5, 0.5, -0.5])
    rows = fold_rows([1, 0, 1, 0], ["r0", "r1", "r2", "r3"], ["t"] * 4)
    np.testing.assert_array_equal(rows.unfold(leave_one_out(rows.rewards, rows.group_ids)), [2 / 3, -2 / 3, 2 / 3, -2 / 3])


def test_case_57_a_rejected_sibling_leaves_the_baseline():
    for advantages in (group_relative([100, 1], [0, 0], [False, True]), leave_one_out([100, 1], [0, 0], [False, True])):
        np.testing.assert_array_equal(advantages, [0, 0])
    np.testing.assert_array_equal(group_relative([100, 1, 3], [0] * 3, [False, True, True], scale="none"), [0, -1, 1])


def test_case_59_a_scalar_advantage_meets_the_mask_of_each_step():
    first, last = to_tokens(0.5, [[1, 1, 0], np.array([False, True, True])])
    np.testing.assert_array_equal(first, [0.5, 0.5, 0])
    np.testing.assert_array_equal(last, [0, 0.5, 0.5])


# ---------------------------------------------------------------- ids


def tensor(value):
    return pytest.importorskip("torch").tensor(value)


@pytest.mark.parametrize(
    "make", [tensor, np.array, np.int64, lambda number: (tensor(number), "role")], ids=["tensor", "array", "int64", "with a role"]
)
def test_case_51_ids_of_other_libraries_are_told_apart_by_value_and_never_make_singletons(make):
    rewards, ids = [1.0, 0.0, 1.0, 0.0], [3, 3, 4, 4]
    expected = group_relative(rewards, ids)
    assert (expected != 0).all()
    made = [make(number) for number in ids]
    np.testing.assert_array_equal(group_relative(rewards, made), expected)
    np.testing.assert_array_equal(leave_one_out(rewards, made), leave_one_out(rewards, ids))
    assert fold_rows(rewards, [make(number) for number in range(4)], made).rewards == tuple(rewards)
    assert len(fold_rows([1.0, 1.0, 0.0, 0.0], made, ["p"] * 4).rewards) == 2


@pytest.mark.parametrize("make", [lambda: None, lambda: NAN, lambda: tensor(NAN), lambda: [1], lambda: np.array([1]), lambda: tensor([1])])
def test_an_id_that_tells_no_group_from_another_is_refused_by_its_place(make):
    """All rollouts without an id would be one group; every NaN, and every array, one of its own."""
    bad = make()
    with pytest.raises(ValueError, match="expected group ids that tell one from another.* at index 1"):
        group_relative([1.0, 0.0], ["a", bad])
    with pytest.raises(ValueError, match="expected group ids that tell one from another.* at index 1"):
        fold_rows([1.0, 0.0], ["a", "b"], ["a", bad])
    with pytest.raises(ValueError, match="expected rollout ids that tell one from another.* at index 1"):
        fold_rows([1.0, 0.0], ["a", bad], ["a", "a"])
    with pytest.raises(ValueError, match="index 0"):
        group_relative(np.array([1.0, 0.0]), np.array([NAN, NAN]))
