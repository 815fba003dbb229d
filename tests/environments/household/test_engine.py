"""The twin is held to ALFWorld's own engine: the same game and commands tell letter for letter the same."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from sluice.environments import EnvironmentHost, build_environment
from sluice.environments.boundary import call_reset, call_step
from sluice.environments.household.engine import AlfworldEngine, choose_data_folder
from sluice.environments.household.expert import Expert
from sluice.environments.household.facts import FACTS_FILE, TASK_TYPES
from sluice.environments.household.game import Game
from sluice.environments.household.generator import seeded_game
from sluice.environments.household.pddl import write_game
from sluice.environments.household.twin import House

pytest.importorskip("textworld")
pytest.importorskip("alfworld")

STEPS_PER_TYPE = 900
GAMES_PER_TYPE = 3
MOVING = ("go to ", "look", "inventory", "help", "examine ")

compared: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALFWORLD_DATA", str(tmp_path_factory.mktemp("alfworld")))
        yield


def random_command(rng: random.Random, house: House) -> str:
    """Mostly things that are done rather than seen; sometimes nonsense."""
    draw = rng.random()
    if draw < 0.05:
        return rng.choice(
            ["", "go to nowhere 1", "take apple 1", "  look ", f"go to {house.at}", "examine", "LOOK", "open fridge 1", "x" * 5000]
        )
    doing = [command for command in house.admissible() if not command.startswith(MOVING)]
    return rng.choice(doing) if doing and draw < 0.7 else rng.choice(house.admissible())


def compare(engine: AlfworldEngine, game: Game, steps: int, rng: random.Random | None) -> House:
    """Play the game in both, by chance or (None) by the expert, and compare all that is told."""
    house = House(game)
    assert engine.reset(game) == game.intro
    expert = Expert(house)
    for _ in range(steps):
        assert engine.admissible() == house.admissible()
        assert engine.is_won == house.is_won
        command = expert.act() if rng is None else random_command(rng, house)
        assert engine.step(command) == house.step(command), command
        compared[game.goal.task_type] += 1
        if rng is None and house.is_won:
            break
    assert (engine.admissible(), engine.is_won) == (house.admissible(), house.is_won)
    return house


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_twin_tells_what_the_engine_tells(task_type) -> None:
    rng = random.Random(f"twin against engine, {task_type}")
    engine = AlfworldEngine()
    won = 0
    for number in range(1, GAMES_PER_TYPE + 1):  # loading takes longer than playing, so that each game is played several times
        game = seeded_game(rng.getrandbits(60), rng.choice(["train", "unseen"]), "tiny", (task_type,))
        won += compare(engine, game, 60, None).is_won
        while compared[task_type] < STEPS_PER_TYPE * number / GAMES_PER_TYPE:
            compare(engine, game, 60, rng)
    assert won
    engine.close()
    assert compared[task_type] >= STEPS_PER_TYPE


@pytest.mark.parametrize("size", ["small", "full"])
def test_it_does_so_in_whole_rooms_too(size) -> None:
    engine = AlfworldEngine()
    game = seeded_game(3, "train", size, ("pick_clean_then_place_in_recep",))
    assert compare(engine, game, 60, None).is_won
    compare(engine, game, 20, random.Random(size))
    engine.close()


def test_remembering_changes_nothing_that_is_seen() -> None:
    game = seeded_game(5, "train", "tiny", ("pick_two_obj_and_place",))
    stock, remembering = AlfworldEngine(remember=False), AlfworldEngine()
    rng = random.Random("stock against remembering")
    assert stock.reset(game) == remembering.reset(game)
    for _ in range(12):
        assert stock.admissible() == remembering.admissible()
        command = rng.choice(stock.admissible())
        assert stock.step(command) == remembering.step(command)
    stock.close()
    remembering.close()


def test_the_engine_leaves_the_modules_it_uses_as_they_were() -> None:
    import fast_downward
    from textworld.envs.pddl import textgen

    before = (fast_downward.pddl2sas, textgen.copy_context, textgen._parse_and_convert, list(sys.argv))
    engine = AlfworldEngine()
    engine.reset(seeded_game(5, size="tiny"))
    engine.step("look")
    engine.close()
    assert (fast_downward.pddl2sas, textgen.copy_context, textgen._parse_and_convert, list(sys.argv)) == before


def test_the_environment_tells_the_same_with_either_engine() -> None:
    args = {"size": "tiny", "max_steps": 12}
    both = [build_environment({"type": "household", "args": {**args, "engine": engine}}) for engine in ("twin", "alfworld")]
    resets = [call_reset(environment, 11, "household") for environment in both]
    assert (resets[0].observation, resets[0].info) == (resets[1].observation, resets[1].info)
    expert = Expert(both[0].house)
    for _ in range(12):
        command = expert.act()
        twin, engine = (call_step(environment, command, "household") for environment in both)
        assert (twin.observation, twin.reward, twin.terminated, twin.truncated, twin.info) == (
            engine.observation,
            engine.reward,
            engine.terminated,
            engine.truncated,
            engine.info,
        )
        if twin.is_last:
            break
    for environment in both:
        environment.close()


def test_the_engine_plays_in_a_worker_process() -> None:
    async def play() -> None:
        args = {"size": "tiny", "engine": "alfworld"}
        async with asyncio.timeout(100), EnvironmentHost({"type": "household", "args": args, "workers": 1}) as host:
            runner = host.runner()
            told = [await runner.reset(11), await runner.step("look"), await runner.step("x" * 100_000)]
            assert told[0].observation == seeded_game(11, size="tiny").intro
            assert [step.observation for step in told[1:]] == [House(seeded_game(11, size="tiny")).step("look"), "Nothing happens."]

    asyncio.run(play())


def test_a_written_game_is_found_by_alfworlds_own_loader(tmp_path: Path) -> None:
    choose_data_folder()
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    file = write_game(seeded_game(1, size="tiny"), tmp_path)
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {"data_path": str(tmp_path), "num_train_games": -1},
    }
    assert AlfredTWEnv(config, train_eval="train").game_files == [str(file)]


def test_the_facts_are_those_of_the_installed_package() -> None:
    choose_data_folder()
    from sluice.environments.household.make_facts import make_facts, written

    facts = make_facts()
    kept = json.loads(FACTS_FILE.read_text())
    facts["source"] = kept["source"]  # another release may well say the same
    assert json.loads(written(facts)) == kept
