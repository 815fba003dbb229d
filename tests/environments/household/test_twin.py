"""The twin keeps its own rules, whatever it is told. That they are the engine's rules is shown in test_engine.py."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.environments.household.game import Game, Goal
from sluice.environments.household.generator import seeded_game
from sluice.environments.household.goals import progress
from sluice.environments.household.twin import NOTHING, House

SEEDS = st.integers(0, 10_000)


def kitchen(task_type: str = "pick_and_place_simple", **changes) -> Game:
    """An apple and a knife in a drawer, an egg in the fridge; goals want the apple on the counter."""
    goal = {"task_type": task_type, "object_class": "Apple", "receptacle_class": "CounterTop", "lamp_class": None, "text": "do it"}
    return Game(
        env_id="kitchen",
        floor_plan=1,
        goal=Goal(**{**goal, **changes}),
        receptacle_ids=("CounterTop|1", "Drawer|1", "Fridge|1", "Microwave|1", "Sink|1|SinkBasin", "SideTable|1", "SideTable|2"),
        placement={
            "Apple|1": "SideTable|1",
            "Apple|2": "Fridge|1",
            "Knife|1": "Drawer|1",
            "DeskLamp|1": "SideTable|2",
        },
    )


def play(house: House, *commands: str) -> list[str]:
    return [house.step(command) for command in commands]


@settings(max_examples=100)
@given(SEEDS, st.randoms(use_true_random=False))
def test_things_are_never_lost_and_admissible_commands_do_something(seed: int, rng: random.Random) -> None:
    house = House(seeded_game(seed, size="tiny"))
    for _ in range(40):
        command = rng.choice(house.admissible())
        assert house.step(command) != NOTHING
        lying = [thing for things in house.inside.values() for thing in things]
        held = [] if house.held is None else [house.held]
        assert sorted(lying + held) == sorted(house.game.things)
        assert all(house.where[thing] == receptacle for receptacle, things in house.inside.items() for thing in things)
        assert 0 <= progress(house) <= 1
        assert (progress(house) == 1) == house.is_won
        assert list(house.admissible()) == sorted(set(house.admissible()))


@given(
    SEEDS,
    st.text() | st.sampled_from(["", "go to", "go to ", "go to nowhere 1", "take", "open", "use", "go  to fridge 1", "look at", "LOOK"]),
)
def test_what_is_not_admissible_changes_nothing(seed: int, command: str) -> None:
    house = House(seeded_game(seed, size="tiny"))
    before = house.admissible()
    if command.strip() not in before:
        assert house.step(command) == NOTHING
        assert house.admissible() == before


@given(SEEDS, st.randoms(use_true_random=False))
def test_the_same_commands_tell_the_same(seed: int, rng: random.Random) -> None:
    first, second = House(seeded_game(seed, size="tiny")), House(seeded_game(seed, size="tiny"))
    for _ in range(20):
        command = rng.choice(first.admissible())
        assert first.step(command) == second.step(command)


def test_an_enormous_action_is_no_command() -> None:
    house = House(kitchen())
    assert house.step("go to " + "x" * 1_000_000) == NOTHING


def test_pick_and_place_by_hand() -> None:
    house = House(kitchen())
    told = play(house, "go to sidetable 2", "take apple 2 from sidetable 2", "go to countertop 1", "move apple 2 to countertop 1")
    assert told == [
        "You arrive at sidetable 2. On the sidetable 2, you see a apple 2.",
        "You pick up the apple 2 from the sidetable 2.",
        "You arrive at countertop 1. On the countertop 1, you see nothing.",
        "You move the apple 2 to the countertop 1.",
    ]
    assert house.is_won


def test_a_closed_receptacle_hides_what_is_in_it() -> None:
    house = House(kitchen())
    assert house.step("go to fridge 1") == "You arrive at fridge 1. The fridge 1 is closed."
    assert "take apple 1 from fridge 1" not in house.admissible()
    assert house.step("open fridge 1") == "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."
    assert "take apple 1 from fridge 1" in house.admissible()
    assert house.step("close fridge 1") == "You close the fridge 1."


def test_a_treated_thing_must_be_treated_and_placed() -> None:
    house = House(kitchen("pick_heat_then_place_in_recep"))
    play(house, "go to sidetable 2", "take apple 2 from sidetable 2", "go to countertop 1", "move apple 2 to countertop 1")
    assert not house.is_won
    told = play(house, "take apple 2 from countertop 1", "go to microwave 1", "heat apple 2 with microwave 1", "examine apple 2")
    assert told[2:] == ["You heat the apple 2 using the microwave 1.", "This is a hot apple 2."]
    play(house, "go to fridge 1", "cool apple 2 with fridge 1")
    assert house.step("examine apple 2") == "This is a cold apple 2."
    play(house, "go to countertop 1", "move apple 2 to countertop 1")
    assert not house.is_won, "it was cooled again"
    play(house, "take apple 2 from countertop 1", "go to microwave 1", "heat apple 2 with microwave 1", "go to countertop 1")
    assert progress(house) == 2 / 3
    house.step("move apple 2 to countertop 1")
    assert house.is_won


def test_two_things_must_lie_in_the_same_receptacle() -> None:
    house = House(kitchen("pick_two_obj_and_place"))
    play(house, "go to sidetable 2", "take apple 2 from sidetable 2", "go to countertop 1", "move apple 2 to countertop 1")
    assert (house.is_won, progress(house)) == (False, 0.5)
    play(house, "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to countertop 1", "move apple 1 to countertop 1")
    assert house.is_won


def test_looking_needs_the_thing_and_the_lamp_at_once() -> None:
    house = House(kitchen("look_at_obj_in_light", receptacle_class=None, lamp_class="DeskLamp"))
    told = play(house, "go to sidetable 1", "use desklamp 1")
    assert told[1] == "You turn on the desklamp 1."
    assert (house.is_won, progress(house)) == (False, 0.5)
    play(house, "go to sidetable 2", "take apple 2 from sidetable 2")
    assert not house.is_won
    house.step("go to sidetable 1")
    assert house.is_won


def test_only_a_knife_slices_and_a_lamp_stays_where_it_is() -> None:
    house = House(kitchen())
    play(house, "go to drawer 1", "open drawer 1", "take knife 1 from drawer 1", "go to sidetable 2")
    assert house.step("slice apple 2 with knife 1") == "You sliced the apple 2 with the knife 1."
    play(house, "go to countertop 1", "move knife 1 to countertop 1", "go to sidetable 2", "take apple 2 from sidetable 2")
    assert house.step("examine apple 2") == "This is a sliced apple 2."
    house.step("go to sinkbasin 1")
    house.step("clean apple 2 with sinkbasin 1")
    assert house.step("examine apple 2") == "This is a clean sliced apple 2."
    house.step("go to sidetable 1")
    assert not any(command.startswith("take desklamp") for command in house.admissible())
