"""Environments of whole tiny runs: found by import path, also in worker processes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

LETTERS = "abcdefghij"


class SayA:
    """Three letters are told; an answer that begins with `a` earns its turn's share. Two turns."""

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns
        self._turn = 0
        self._random = random.Random(0)
        self._seed = 0

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        self._random = random.Random(seed)
        self._seed, self._turn = seed, 0
        return self._told(), self._info(None)

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        self._turn += 1
        is_right = action.startswith("a")
        return self._told(), is_right / self._turns, self._turn >= self._turns, False, self._info(is_right)

    def close(self) -> None: ...

    def _told(self) -> str:
        return "".join(self._random.choices(LETTERS, k=3))

    def _info(self, is_right: bool | None) -> dict[str, Any]:
        info: dict[str, Any] = {"env_id": f"say-{self._seed}", "task_type": "letters"}
        return info if is_right is None else info | {"success": is_right}


class SayAOrBreak(SayA):
    """The same, and of all answers in one process every 24th breaks it: about half of the groups of six with two turns are spared."""

    steps: ClassVar[int] = 0

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        SayAOrBreak.steps += 1
        if SayAOrBreak.steps % 24 == 0:
            raise RuntimeError("the door is stuck")
        return super().step(action)


class SayAOrTimeOut(SayA):
    """The same, and one problem in four says of each member whose first letter is a vowel that it timed out."""

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        told, reward, terminated, truncated, info = super().step(action)
        timed_out = self._seed % 4 == 0 and action[:1] in ("a", "e", "i")
        return told, reward, terminated, truncated, {**info, "env_timeout": True} if timed_out else info


class SayAInOnePlace(SayA):
    """The same, and what is told never changes."""

    def _told(self) -> str:
        return "abc"
