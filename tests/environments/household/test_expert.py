"""The expert reaches most goals within 30 steps, with admissible commands, and knows no more than a player."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments.household.expert import NO_IDEA, Expert
from sluice.environments.household.facts import TASK_TYPES
from sluice.environments.household.generator import seeded_game
from sluice.environments.household.twin import House

HORIZON = 30


def play(house: House) -> list[str]:
    expert, commands = Expert(house), []
    while not house.is_won and len(commands) < HORIZON:
        commands.append(expert.act())
        house.step(commands[-1])
    return commands


@pytest.mark.parametrize("split", ["train", "unseen"])
@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_it_reaches_most_goals_of_every_type(task_type, split) -> None:
    assert share_won([House(seeded_game(seed, split, "small", (task_type,))) for seed in range(60)]) >= 0.85


def test_it_reaches_nineteen_of_twenty_goals() -> None:
    assert share_won([House(seeded_game(seed)) for seed in range(400)]) >= 0.95


def share_won(houses: list[House]) -> float:
    for house in houses:
        play(house)
    return sum(house.is_won for house in houses) / len(houses)


@given(st.integers(0, 10_000))
def test_all_its_commands_are_admissible(seed: int) -> None:
    house = House(seeded_game(seed, size="tiny"))
    expert = Expert(house)
    for _ in range(HORIZON):
        command = expert.act()
        assert command in house.admissible()
        house.step(command)
        if house.is_won:
            break


@given(st.integers(0, 10_000))
def test_it_takes_only_what_it_has_seen(seed: int) -> None:
    house = House(seeded_game(seed, size="small"))
    expert = Expert(house)
    told = house.game.intro
    for _ in range(HORIZON):
        command = expert.act()
        if command.startswith("take "):
            assert f"a {command[5:].split(' from ')[0]}" in told
        told += house.step(command)
        if house.is_won or command == NO_IDEA:
            break
