"""`textworld`: a game file of the TextWorld library (.ulx, .z8, .json beside it), as made by `tw-make`.

The game is the problem; a seed only picks one of the files. A game whose process hangs is killed with its worker (`run_in: process`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from sluice.config.problems import KeyPath
from sluice.environments.base import Environment
from sluice.environments.settings import EnvironmentSettings


class TextWorldGame:
    """Plays TextWorld game files. The reward of a step is the growth of the score; at `max_steps` the episode is truncated."""

    def __init__(self, files: list[Path], *, max_steps: int) -> None:
        """Play these files; each is loaded when its turn comes."""
        self._files = files
        self._max_steps = max_steps
        self._env: Any = None
        self._loaded: Path | None = None
        self._score = 0.0
        self._steps = 0

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin the game that the seed picks."""
        import textworld

        file = self._files[seed % len(self._files)]
        if file != self._loaded:
            self.close()
            infos = textworld.EnvInfos(admissible_commands=True, won=True, lost=True, score=True, max_score=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the interpreter, that it does not know the game: TextWorld itself keeps the score
                self._env = textworld.start(str(file), infos)
            self._loaded = file
        state = self._env.reset()
        self._score, self._steps = 0.0, 0
        return str(state.feedback), self._info(state)

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Act. A game reads one line: what follows a line break in the action is left out."""
        line = " ".join(action.split("\n", 1)[0].split()) or "look"
        state, score, done = self._env.step(line)
        self._steps += 1
        reward, self._score = float(score) - self._score, float(score)
        ended = bool(done)
        return str(state.feedback), reward, ended, not ended and self._steps >= self._max_steps, self._info(state)

    def close(self) -> None:
        """Unload the game."""
        if self._env is not None:
            self._env.close()
        self._env = self._loaded = None

    def _info(self, state: Any) -> Mapping[str, Any]:
        most = float(state.get("max_score") or 0)
        won = bool(state.get("won"))
        return {
            "admissible_commands": list(state.get("admissible_commands") or ()),
            "success": won,
            "progress": 1.0 if won else min(max(self._score / most, 0.0), 1.0) if most else 0.0,
            "task_type": "textworld",
            "env_id": f"textworld/{self._loaded.stem if self._loaded else ''}",
        }


class TextWorldSettings(EnvironmentSettings):
    """Game files."""

    packages: ClassVar[tuple[str, ...]] = ("textworld",)

    files: list[str] = Field(min_length=1)  # paths of game files
    max_steps: int = Field(default=50, ge=1)  # environment steps of an episode

    def build(self) -> Environment:
        """Make it."""
        return TextWorldGame([Path(file) for file in self.files], max_steps=self.max_steps)

    def step_limit(self) -> int | None:
        """`max_steps`."""
        return self.max_steps

    def preload(self) -> None:
        """Import textworld."""
        import textworld  # noqa: F401

    def check(self) -> tuple[KeyPath, str] | None:
        """The files must be there."""
        missing = [file for file in self.files if not Path(file).is_file()]
        if missing:
            return ("files",), f"expected game files, there is no {missing[0]!r} - make one with tw-make, or check the path"
        return None
