"""Games are drawn by seed, can be solved, and are not solved at the start."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments.household.facts import LAMPS, TASK_TYPES, TREATMENTS, facts
from sluice.environments.household.game import Game, class_of, mangle
from sluice.environments.household.generator import SIZES, floor_plans, make_game, seeded_game
from sluice.environments.household.twin import House

SEEDS = st.integers(0, 2**63 - 1)
SPLITS = st.sampled_from(["train", "seen", "unseen"])
SIZE_NAMES = st.sampled_from(list(SIZES))


@given(SEEDS, SPLITS, SIZE_NAMES)
def test_every_game_lays_things_where_they_may_lie_and_begins_unsolved(seed, split, size) -> None:
    game = seeded_game(seed, split, size)
    known = facts()
    plan = known.floor_plans[game.floor_plan]
    assert plan.is_test == (split == "unseen")
    assert plan.kind in known.rooms[game.goal.task_type]
    assert set(game.receptacle_ids) <= set(plan.receptacles)
    for thing, receptacle in game.placement.items():
        assert class_of(thing) in plan.objects
        assert class_of(thing) in LAMPS or class_of(thing) in known.can_hold[class_of(receptacle)]
    assert not House(game).is_won
    assert len(game.wanted_things) >= game.goal.wanted


@given(SEEDS, SPLITS, SIZE_NAMES)
def test_every_game_has_what_its_goal_needs(seed, split, size) -> None:
    game = seeded_game(seed, split, size)
    kinds = set(game.kinds.values())
    goal = game.goal
    assert goal.object_class in kinds
    assert (goal.receptacle_class is None) != (goal.lamp_class is None)
    assert {goal.receptacle_class, goal.lamp_class} - {None} <= kinds
    if goal.task_type in TREATMENTS:
        assert TREATMENTS[goal.task_type][1] in kinds


@given(SEEDS, SPLITS, SIZE_NAMES)
def test_names_are_numbered_from_one_without_gaps(seed, split, size) -> None:
    game = seeded_game(seed, split, size)
    numbers: dict[str, list[int]] = {}
    for name in game.names.values():
        kind, number = name.split(" ")
        numbers.setdefault(kind, []).append(int(number))
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in numbers.values())


@given(SEEDS)
def test_splits_never_share_a_game(seed) -> None:
    assert len({seeded_game(seed, split).env_id for split in ("train", "seen", "unseen")}) == 3


def fingerprint(games: list[Game]) -> str:
    told = [f"{game.env_id}|{game.intro}|{sorted(game.place.items())}" for game in games]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def test_a_seed_gives_the_same_game_in_every_process_and_release() -> None:
    assert fingerprint([seeded_game(seed, "train", size) for seed in range(20) for size in SIZES]) == "e8338ec680c8772a"


def test_all_task_types_and_many_rooms_are_drawn() -> None:
    games = [seeded_game(seed) for seed in range(300)]
    assert {game.goal.task_type for game in games} == set(TASK_TYPES)
    assert len({game.floor_plan for game in games}) > 60


def test_only_the_task_types_asked_for_are_drawn() -> None:
    wanted = ("pick_heat_then_place_in_recep",)
    assert {seeded_game(seed, task_types=wanted).goal.task_type for seed in range(30)} == set(wanted)


@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_every_type_has_rooms_in_every_split(task_type, split) -> None:
    plans = floor_plans(task_type, split)
    assert plans
    if split == "unseen":
        assert not set(plans) & set(floor_plans(task_type, "train"))
    else:
        assert plans == floor_plans(task_type, "train")


def test_sizes_grow() -> None:
    counts = [sum(len(seeded_game(seed, size=size).placement) for seed in range(40)) for size in ("tiny", "small", "full")]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2]


def test_a_goal_that_a_room_does_not_allow_makes_no_game() -> None:
    bathroom = next(number for number, plan in facts().floor_plans.items() if plan.kind == "Bathroom")
    assert make_game("pick_heat_then_place_in_recep", bathroom, 1) is None


def test_ids_are_mangled_as_in_alfworld() -> None:
    assert mangle("Cabinet|+00.68|-02.20") == "Cabinet_bar__plus_00_dot_68_bar__minus_02_dot_20"
