"""Steps per second of the household twin, against ALFWorld's engine, stock and remembering, on the same games and commands in one run.

    python benchmarks/twin.py [--size small] [--games 4] [--seconds 5] [--engine-steps 10] [--no-engine]

The twin is measured three times: alone (a step and its admissible commands), as an environment, and through the boundary that checks every
answer. The engine plays the first commands of each game once. It needs `sluice-rl[agentic]`; loading is told apart from stepping.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from time import perf_counter

from sluice.environments import build_environment
from sluice.environments.boundary import call_reset, call_step
from sluice.environments.household.engine import AlfworldEngine
from sluice.environments.household.environment import HouseholdEnvironment, HouseholdSettings
from sluice.environments.household.expert import Expert
from sluice.environments.household.game import Game
from sluice.environments.household.generator import seeded_game
from sluice.environments.household.twin import House

STEPS = 30


def scripts(size: str, games: int) -> list[tuple[Game, list[str]]]:
    """Games with commands: half of them the expert's, half of them drawn among the admissible ones."""
    made = []
    rng = random.Random(0)
    for seed in range(games):
        game = seeded_game(seed, size=size)  # type: ignore[arg-type]  # argparse has checked it
        house = House(game)
        expert = Expert(house)
        commands = []
        for _ in range(STEPS):
            commands.append(expert.act() if seed % 2 else rng.choice(house.admissible()))
            house.step(commands[-1])
        made.append((game, commands))
    return made


def rate(play: Callable[[Game, list[str]], tuple[int, float, float]], games: list[tuple[Game, list[str]]], seconds: float) -> str:
    """Play all games, again and again while there is time: steps per second, and milliseconds until a game can be played."""
    steps, stepping, starting, played = 0, 0.0, 0.0, 0
    begun = perf_counter()
    while not played or perf_counter() - begun < seconds:
        for game, commands in games:
            count, step_s, start_s = play(game, commands)
            steps, stepping, starting, played = steps + count, stepping + step_s, starting + start_s, played + 1
    return f"{steps / stepping:10.1f} steps/s   {starting / played * 1e3:8.2f} ms to begin a game   ({played} games, {steps} steps)"


def twin(game: Game, commands: list[str]) -> tuple[int, float, float]:
    """The twin alone."""
    begun = perf_counter()
    house = House(game)
    ready = perf_counter()
    for command in commands:
        house.step(command)
        house.admissible()
    return len(commands), perf_counter() - ready, ready - begun


def environment(game: Game, commands: list[str]) -> tuple[int, float, float]:
    """The twin as an environment: admissible commands, progress and all."""
    played = HouseholdEnvironment(HouseholdSettings())
    begun = perf_counter()
    played.play(game)
    ready = perf_counter()
    for command in commands:
        played.step(command)
    return len(commands), perf_counter() - ready, ready - begun


def checked(game: Game, commands: list[str]) -> tuple[int, float, float]:
    """The same through the boundary, as every runner calls it; begins with drawing a game."""
    played = build_environment({"type": "household"})
    begun = perf_counter()
    call_reset(played, random.getrandbits(60), "household")
    ready = perf_counter()
    for command in commands:
        call_step(played, command, "household")
    return len(commands), perf_counter() - ready, ready - begun


def engine(remember: bool) -> Callable[[Game, list[str]], tuple[int, float, float]]:
    """ALFWorld's own engine."""
    made = AlfworldEngine(remember=remember)

    def play(game: Game, commands: list[str]) -> tuple[int, float, float]:
        begun = perf_counter()
        made.reset(game)
        ready = perf_counter()
        for command in commands:
            made.step(command)
            made.admissible()
        return len(commands), perf_counter() - ready, ready - begun

    return play


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=["tiny", "small", "full"])
    parser.add_argument("--games", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row of the twin")
    parser.add_argument("--engine-steps", type=int, default=10, help="commands of each game that the engine plays")
    parser.add_argument("--no-engine", action="store_true")
    options = parser.parse_args()
    played = scripts(options.size, options.games)
    print(f"size {options.size}, {options.games} games of {STEPS} steps")
    print(f"twin              {rate(twin, played, options.seconds)}")
    print(f"twin, environment {rate(environment, played, options.seconds)}")
    print(f"twin, checked     {rate(checked, played, options.seconds)}")
    if not options.no_engine:
        shortened = [(game, commands[: options.engine_steps]) for game, commands in played]
        print(f"engine, stock     {rate(engine(False), shortened, 0)}")
        print(f"engine, remembers {rate(engine(True), shortened, 0)}")
