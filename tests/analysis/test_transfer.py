"""A rule on smaller groups: each is made of members of a recorded one, and judged by their rewards."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from sluice.analysis import Member, Trajectories, TrajectoryGroup
from sluice.analysis.curves import Figures
from sluice.analysis.transfer import transfer
from sluice.errors import AnalysisError
from tests.analysis.recordings import DISTANCE, some_groups


def data(n: int = 40, g: int = 6) -> Trajectories:
    return Trajectories.of_groups(some_groups(n=n, g=g))


def rule(trajectories: Trajectories, threshold: float = 0.5):
    recorded = trajectories.recorded([3], 8)
    return Figures.of(recorded, 3).point(DISTANCE, threshold, recorded.at(3).signals[DISTANCE] < threshold)


def test_smaller_groups_have_the_members_that_were_taken() -> None:
    whole = data(n=3, g=4)
    chosen = np.array([[0, 2], [1, 3], [2, 3]])
    smaller = whole.take_members(chosen)
    for i, places in enumerate(chosen.tolist()):
        assert np.array_equal(smaller.rewards[i], whole.rewards[i][places])
        assert np.array_equal(smaller.lengths[i], whole.lengths[i][places])
        assert np.array_equal(smaller.actions[i], whole.actions[i][places])


def test_groups_in_which_too_few_rewards_would_count_are_left_out() -> None:
    members = [Member(actions=["a"], observations=None, reward=reward) for reward in (1.0, None, 0.0, 1.0)]
    whole = Trajectories.of_groups([TrajectoryGroup(key=key, members=members) for key in ("a", "b")])
    smaller = whole.take_members(np.array([[0, 1], [0, 2]]))
    assert smaller.keys == ("b",)


def test_one_different_reward_is_missed_by_small_groups_as_often_as_it_should_be() -> None:
    """One success among 6 members is outside a group of 3 in half of the draws."""
    members = [Member(actions=["a"] * 5, observations=None, reward=float(i == 0)) for i in range(6)]
    whole = Trajectories.of_groups([TrajectoryGroup(key=str(i), members=members) for i in range(200)])
    found = transfer(whole, 8, rule(whole), 3, 0.8, np.random.default_rng(0))
    assert found.zero_variance_share == pytest.approx(comb(5, 3) / comb(6, 3), abs=0.03)
    # All do the same: every group is cut, rightly where the success was left away.
    assert found.cut_rate == 1.0
    assert found.precision == pytest.approx(found.zero_variance_share)
    assert (found.spearman, found.refitted_threshold) == (None, None)


def test_the_mean_distance_of_pairs_does_not_depend_on_the_size_of_the_group() -> None:
    whole = data(n=300, g=6)
    rng = np.random.default_rng(0)
    distances = []
    for _ in range(5):
        chosen = np.sort(rng.random((300, 6)).argsort(axis=1)[:, :3], axis=1)
        distances.append(whole.take_members(chosen).recorded([3], 8).at(3).signals[DISTANCE].mean())
    assert np.mean(distances) == pytest.approx(whole.recorded([3], 8).at(3).signals[DISTANCE].mean(), abs=0.01)


def test_the_same_seed_leaves_the_same_members_away() -> None:
    whole = data()
    one, other = (transfer(whole, 8, rule(whole), 3, 0.6, np.random.default_rng(7)) for _ in range(2))
    assert one == other
    assert one.group_size == 3
    assert 0 < one.refitted_share <= 1
    assert one.precision_interval[0] <= one.precision <= one.precision_interval[1]


@pytest.mark.parametrize("size", [1, 6, 8])
def test_groups_cannot_be_made_larger_or_of_one(size: int) -> None:
    whole = data()
    with pytest.raises(AnalysisError, match=f"group size: expected from 2 to 5, below the recorded one, got {size}"):
        transfer(whole, 8, rule(whole), size, 0.8, np.random.default_rng(0))
