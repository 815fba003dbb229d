"""What an environment offers, and what a reset, a step and a fault are.

An environment speaks text: the policy reads observations and writes actions. The calls are those of gymnasium. What it answers is checked
at the boundary (boundary.py) and becomes one of the records below; whatever goes wrong becomes an `EnvFault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sluice.types import EMPTY

Call = Literal["reset", "step"]

FaultKind = Literal["env_timeout", "env_failed", "env_died", "env_closed"]
"""Past its time limit; an exception or a wrong answer; its process ended; the run or the runner is being closed."""


class Environment(Protocol):
    """One problem after another, each played in turns of text. Used by one caller at a time.

    `info` may carry `admissible_commands`, `progress`, `success`, `task_type` and `env_id` (see `EnvInfo`); further entries are kept
    where they are plain data. After a step that ended the episode the next call is `reset`.
    """

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin the episode that belongs to the seed: the same seed is the same problem, in every process. Answers (observation, info)."""

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Act. Answers (observation, reward of this step, terminated, truncated by the step limit, info).

        An action that makes no sense is no error.
        """

    def close(self) -> None:
        """Give back what it holds. Called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvInfo:
    """What an environment says beside its observation. None: it does not say."""

    admissible_commands: tuple[str, ...] | None = None  # actions that would do something now
    progress: float | None = None  # 0 .. 1, how much of the problem is solved
    success: bool | None = None  # whether the problem is solved
    task_type: str | None = None  # kind of problem
    env_id: str | None = None  # names the problem: the same for all members of an episode
    extra: Mapping[str, str | float | bool] = field(default_factory=lambda: EMPTY)  # further entries that are plain data


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReset:
    """An episode has begun."""

    observation: str
    info: EnvInfo
    seconds: float = 0.0  # inside the environment; waiting for a worker is not in it


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """The environment's reply to one action."""

    observation: str
    reward: float  # of this step, finite; the trajectory's is their sum
    terminated: bool  # the problem ended by itself
    truncated: bool  # the environment's step limit was reached: an ordinary end
    info: EnvInfo
    seconds: float = 0.0  # inside the environment

    @property
    def is_last(self) -> bool:
        """Whether the episode ended."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFault:
    """Why a call brought no reply. The episode is over; the next `reset` finds a working environment."""

    kind: FaultKind
    detail: str  # for a person: the environment, the call and what happened
    call: Call
    env_id: str | None = None  # the problem being played; None: none was
    seconds: float = 0.0  # from the call to the fault
