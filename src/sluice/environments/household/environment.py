"""`household`: the household games as an environment, by the twin or by ALFWorld's own engine.

Both tell the same. With the engine the twin follows along, for `progress`, and the texts, commands and the win are the engine's.
The reward is 1 for the step that reaches the goal, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from sluice.config.problems import KeyPath
from sluice.environments.base import Environment
from sluice.environments.household.engine import AlfworldEngine, choose_data_folder
from sluice.environments.household.facts import TASK_TYPES, TaskType
from sluice.environments.household.game import Game
from sluice.environments.household.generator import SizeName, Split, floor_plans, seeded_game
from sluice.environments.household.goals import progress
from sluice.environments.household.twin import House
from sluice.environments.settings import EnvironmentSettings


class HouseholdEnvironment:
    """Plays the games of the seeds."""

    def __init__(self, settings: HouseholdSettings) -> None:
        """Play with these settings; an engine is made with the first game."""
        self._settings = settings
        self._engine: AlfworldEngine | None = None
        self._house: House | None = None
        self._steps = 0

    @property
    def house(self) -> House:
        """The house being played, for an expert."""
        assert self._house is not None, "reset the environment first"
        return self._house

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin the game of the seed."""
        settings = self._settings
        return self.play(seeded_game(seed, settings.split, settings.size, tuple(settings.task_types)))

    def play(self, game: Game) -> tuple[str, Mapping[str, Any]]:
        """Begin this game."""
        self._house = House(game)
        self._steps = 0
        observation = game.intro
        if self._settings.engine == "alfworld":
            if self._engine is None:
                self._engine = AlfworldEngine()
            observation = self._engine.reset(game)
        return observation, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Carry out a command; anything that is no admissible one changes nothing."""
        observation = self.house.step(action)
        is_won = self.house.is_won
        if self._engine is not None:
            observation, is_won = self._engine.step(action), self._engine.is_won
        self._steps += 1
        is_late = not is_won and self._steps >= self._settings.max_steps
        return observation, float(is_won), is_won, is_late, self._info()

    def close(self) -> None:
        """End the engine."""
        engine, self._engine, self._house = self._engine, None, None
        if engine is not None:
            engine.close()

    def _info(self) -> Mapping[str, Any]:
        player = self._engine if self._engine is not None else self.house
        return {
            "admissible_commands": player.admissible(),
            "success": player.is_won,
            "progress": progress(self.house),
            "task_type": self.house.game.goal.task_type,
            "env_id": self.house.game.env_id,
        }


class HouseholdSettings(EnvironmentSettings):
    """Which games, and who plays them."""

    engine: Literal["twin", "alfworld"] = "twin"  # the twin is some hundred times as fast and tells the same
    split: Split = "train"  # train, or seen (other games in the same rooms), or unseen (other rooms)
    size: SizeName = "small"  # tiny: few things and places; small: one thing of each class; full: up to three
    task_types: list[TaskType] = Field(default=list(TASK_TYPES), min_length=1)
    max_steps: int = Field(default=30, ge=1)  # environment steps of an episode

    needs_engine: ClassVar[tuple[str, ...]] = ("textworld", "alfworld", "fast_downward")

    def build(self) -> Environment:
        """Make it."""
        return HouseholdEnvironment(self)

    def step_limit(self) -> int | None:
        """`max_steps`."""
        return self.max_steps

    def needed(self) -> tuple[str, ...]:
        """The twin needs nothing."""
        return self.needs_engine if self.engine == "alfworld" else ()

    def preload(self) -> None:
        """Import the engine."""
        if self.engine == "alfworld":
            choose_data_folder()
            import alfworld.agents.environment.alfred_tw_env  # noqa: F401
            import textworld.envs.pddl.logic  # noqa: F401

    def check(self) -> tuple[KeyPath, str] | None:
        """Each type once, and each with a room."""
        if len(set(self.task_types)) != len(self.task_types):
            return ("task_types",), f"expected each task type once, got {', '.join(self.task_types)} - delete the second one"
        assert all(floor_plans(task_type, self.split) for task_type in self.task_types), "every type has rooms in every split"
        return None
