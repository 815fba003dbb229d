"""Every lake has a way, and the seed alone decides what happens on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.environments.frozen_lake import COMMANDS, FrozenLakeSettings, make_lake

SEEDS = st.integers(0, 2**63 - 1)


def play(settings: FrozenLakeSettings, seed: int, actions: list[str]) -> list:
    environment = settings.build()
    told = [environment.reset(seed)]
    for action in actions:
        told.append(environment.step(action))
        if told[-1][2] or told[-1][3]:
            break
    return told


def way(lake) -> list[str]:
    """Moves that lead to the goal on firm ice, by going down in distance."""
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    at, moves = (0, 0), []
    while at != lake.goal:
        for name, (down, right) in steps.items():
            place = (at[0] + down, at[1] + right)
            if lake.distance.get(place, lake.size**2) < lake.distance[at]:
                at = place
                moves.append(name)
                break
    return moves


@given(SEEDS, st.integers(2, 12), st.floats(0, 1))
def test_every_map_can_be_solved(seed, size, hole_share) -> None:
    lake = make_lake(seed, size, hole_share)
    moves = way(lake)
    settings = FrozenLakeSettings(size=size, hole_share=hole_share, max_steps=size * size)
    told = play(settings, seed, moves)
    observation, reward, terminated, truncated, info = told[-1]
    assert (reward, terminated, truncated, info["success"], info["progress"]) == (1.0, True, False, True, 1.0)
    assert sum(step[1] for step in told[1:]) == 1.0
    assert len(lake.holes) <= round(hole_share * size * size)


@given(SEEDS, st.lists(st.sampled_from([*COMMANDS, "", "jump", "x" * 100]), max_size=30), st.booleans())
def test_the_same_seed_and_actions_give_the_same_episode(seed, actions, slippery) -> None:
    settings = FrozenLakeSettings(slippery=slippery)
    assert play(settings, seed, actions) == play(settings, seed, actions)


@given(SEEDS, st.lists(st.sampled_from([*COMMANDS, "", "jump"]), min_size=40, max_size=40))
def test_an_episode_ends_within_its_steps(seed, actions) -> None:
    told = play(FrozenLakeSettings(max_steps=20), seed, actions)
    assert len(told) <= 21
    assert told[-1][2] or told[-1][3]
    assert all(0 <= step[4]["progress"] <= 1 for step in told[1:])


def test_slips_go_to_the_sides_and_never_back() -> None:
    settings = FrozenLakeSettings(size=8, hole_share=0.0, slippery=True)
    landed = set()
    for seed in range(60):
        told = play(settings, seed, ["right"])
        landed.add(told[1][0].splitlines()[0])
    assert landed == {"You go right.", "You go up.", "You go down."}


def test_a_small_lake_by_hand() -> None:
    told = play(FrozenLakeSettings(size=2, hole_share=0.0), 5, [" Right ", "down"])
    assert told[0][0].endswith("PF\nFG")
    assert told[0][1]["env_id"] == "frozen_lake/2x2/5"
    assert told[1][0] == "You go right.\nSP\nFG"
    assert told[1][4]["progress"] == 0.5
    assert told[2][:4] == ("You reach the goal.\nSF\nFP", 1.0, True, False)


def test_falling_into_a_hole_ends_with_nothing() -> None:
    lake = make_lake(1, 2, 1.0)
    assert len(lake.holes) == 1
    move = "right" if (0, 1) in lake.holes else "down"
    told = play(FrozenLakeSettings(size=2, hole_share=1.0), 1, [move])
    assert told[-1][1:4] == (0.0, True, False)
    assert told[-1][4]["success"] is False
