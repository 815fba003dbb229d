"""`frozen_lake`: cross a frozen lake from S to G without falling into a hole, in text. Small, fast, and without any package.

The seed makes the map, which always has a way, and the slips. On slippery ice a move goes where it was meant with probability 1/3 and to
either side with 1/3 each. The reward is 1 for reaching the goal, else 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from sluice.environments.base import Environment
from sluice.environments.settings import EnvironmentSettings

COMMANDS: Final = ("left", "down", "right", "up")  # in turning order: the neighbours in this ring are the sides of a move
_MOVES: Final = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lake:
    """A map with a way from the upper left to the lower right corner."""

    size: int  # fields in a row and in a column
    holes: frozenset[tuple[int, int]]  # (row, column)
    distance: Mapping[tuple[int, int], int]  # moves from a field to the goal, for every field from which there is a way

    @property
    def goal(self) -> tuple[int, int]:
        """The lower right corner."""
        return (self.size - 1, self.size - 1)

    def text(self, at: tuple[int, int]) -> str:
        """The map with the player on it: P player, S start, F frozen, H hole, G goal."""
        return "\n".join("".join(self._field(row, column, at) for column in range(self.size)) for row in range(self.size))

    def _field(self, row: int, column: int, at: tuple[int, int]) -> str:
        place = (row, column)
        if place == at:
            return "P"
        if place in self.holes:
            return "H"
        return "G" if place == self.goal else "S" if place == (0, 0) else "F"


def make_lake(seed: int, size: int, hole_share: float) -> Lake:
    """The map of a seed. Fields are made holes in random order, up to the share, but never one that would close the last way."""
    rng = random.Random(f"frozen_lake/{seed}/{size}/{hole_share}")
    goal = (size - 1, size - 1)
    fields = [(row, column) for row in range(size) for column in range(size) if (row, column) not in ((0, 0), goal)]
    rng.shuffle(fields)
    wanted = round(hole_share * size * size)
    holes: set[tuple[int, int]] = set()
    for field in fields:
        if len(holes) >= wanted:
            break
        holes.add(field)
        if (0, 0) not in _distances(size, holes):
            holes.discard(field)
    return Lake(size=size, holes=frozenset(holes), distance=_distances(size, holes))


def _distances(size: int, holes: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Moves to the goal from every field that has a way, breadth first from the goal."""
    goal = (size - 1, size - 1)
    found = {goal: 0}
    edge = [goal]
    while edge:
        reached = []
        for row, column in edge:
            for down, right in _MOVES.values():
                place = (row + down, column + right)
                if 0 <= place[0] < size and 0 <= place[1] < size and place not in holes and place not in found:
                    found[place] = found[(row, column)] + 1
                    reached.append(place)
        edge = reached
    return found


class FrozenLake:
    """The lake as an environment."""

    def __init__(self, settings: FrozenLakeSettings) -> None:
        """Play with these settings."""
        self._settings = settings
        self._seed = 0
        self._lake = make_lake(0, settings.size, settings.hole_share)
        self._rng = random.Random(0)
        self._at = (0, 0)
        self._steps = 0

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin on the map of the seed."""
        self._seed = seed
        self._lake = make_lake(seed, self._settings.size, self._settings.hole_share)
        self._rng = random.Random(f"frozen_lake/slips/{seed}")
        self._at = (0, 0)
        self._steps = 0
        ice = "The ice is slippery: you may slide to either side." if self._settings.slippery else "The ice is firm."
        text = f"Walk from S to G, avoid the holes H. You are P. {ice} Commands: {', '.join(COMMANDS)}.\n{self._lake.text(self._at)}"
        return text, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Walk. Anything that is no command leaves the player where they are."""
        self._steps += 1
        command = " ".join(action.lower().split())
        if command not in _MOVES:
            return f"Nothing happens. Commands: {', '.join(COMMANDS)}.", 0.0, False, self._is_late, self._info()
        if self._settings.slippery:
            command = COMMANDS[(COMMANDS.index(command) + self._rng.choice((-1, 0, 1))) % len(COMMANDS)]
        down, right = _MOVES[command]
        last = self._lake.size - 1
        self._at = (min(max(self._at[0] + down, 0), last), min(max(self._at[1] + right, 0), last))
        if self._at == self._lake.goal:
            return f"You reach the goal.\n{self._lake.text(self._at)}", 1.0, True, False, self._info()
        if self._at in self._lake.holes:
            return f"You fall into a hole.\n{self._lake.text(self._at)}", 0.0, True, False, self._info()
        return f"You go {command}.\n{self._lake.text(self._at)}", 0.0, False, self._is_late, self._info()

    def close(self) -> None:
        """Nothing to give back."""

    @property
    def _is_late(self) -> bool:
        return self._steps >= self._settings.max_steps

    def _info(self) -> Mapping[str, Any]:
        way = self._lake.distance
        left = way.get(self._at)
        return {
            "admissible_commands": COMMANDS,
            "success": self._at == self._lake.goal,
            "progress": 0.0 if left is None else max(0.0, 1 - left / way[(0, 0)]),
            "task_type": "frozen_lake_slippery" if self._settings.slippery else "frozen_lake",
            "env_id": f"frozen_lake/{self._settings.size}x{self._settings.size}/{self._seed}",
        }


class FrozenLakeSettings(EnvironmentSettings):
    """Size and ice."""

    size: int = Field(default=4, ge=2, le=64)  # fields in a row
    hole_share: float = Field(default=0.25, ge=0, le=1)  # of all fields; fewer where more would leave no way
    slippery: bool = False
    max_steps: int = Field(default=30, ge=1)  # environment steps of an episode

    def build(self) -> Environment:
        """Make it."""
        return FrozenLake(self)

    def step_limit(self) -> int | None:
        """`max_steps`."""
        return self.max_steps
