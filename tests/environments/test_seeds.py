"""The seed of an episode depends on the run's seed, the group and the episode, and on nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.environments import episode_seed

IDS = st.integers(0, 10**9)


@given(IDS, IDS, IDS)
def test_the_same_ids_give_the_same_seed_within_its_range(run_seed, group_id, episode_id) -> None:
    seed = episode_seed(run_seed, group_id, episode_id)
    assert seed == episode_seed(run_seed, group_id, episode_id)
    assert 0 <= seed < 2**63


def test_no_two_of_many_episodes_share_a_seed() -> None:
    seeds = {episode_seed(run, group, episode) for run in range(5) for group in range(50) for episode in range(40)}
    assert len(seeds) == 5 * 50 * 40


def test_ids_do_not_run_into_each_other() -> None:
    assert episode_seed(1, 11, 1) != episode_seed(1, 1, 11) != episode_seed(11, 1, 1)


def test_seeds_stay_the_same_between_releases() -> None:
    assert episode_seed(0, 0, 0) == 759540517790923586
    assert episode_seed(42, 7, 3) == 5188072401973009685
