"""`gymnasium`: an environment of the gymnasium library, by id or as an object, played in text.

Observations become text as they print; actions are names or numbers: "left", "2". A text that is no action costs a step of ours, changes
nothing and says what would be one: the policy's mistake is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Protocol

from pydantic import Field

from sluice.config.problems import KeyPath
from sluice.environments.base import Environment
from sluice.environments.boundary import INFO_KEYS
from sluice.environments.settings import EnvironmentSettings
from sluice.errors import EnvError

GYM_SEEDS: Final = 2**32  # seeds of gymnasium that every environment takes
MOST_ACTIONS: Final = 10_000


class GymnasiumLike(Protocol):
    """As much of gymnasium.Env as is used here."""

    action_space: Any

    def reset(self, *, seed: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Begin."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
        """Act."""

    def close(self) -> None:
        """End."""


class GymnasiumEnvironment:
    """Plays a gymnasium environment with discrete actions as text."""

    def __init__(
        self,
        env: GymnasiumLike,
        *,
        env_id: str | None = None,
        action_names: list[str] | None = None,
        describe_observation: Callable[[Any], str] = str,
    ) -> None:
        """Wrap it.

        Args:
            env: the environment; it is closed with this one.
            env_id: its name; None: the class, or what it was registered as.
            action_names: a name for every action, in order; None: only numbers are understood.
            describe_observation: makes the text of an observation.

        Raises:
            EnvError: its actions are not discrete, or the names do not fit.
        """
        self._env = env
        self._name = env_id or str(getattr(getattr(env, "spec", None), "id", None) or type(env).__name__)
        space = env.action_space
        count = getattr(space, "n", None)
        if count is None or not 0 < int(count) <= MOST_ACTIONS:
            raise EnvError(
                f"environment {self._name}: expected discrete actions (gymnasium.spaces.Discrete), got {space} - "
                f"wrap it so that its actions are numbers"
            )
        first = int(getattr(space, "start", 0))
        self._actions = {str(first + index): first + index for index in range(int(count))}
        self._commands = list(self._actions)
        if action_names is not None:
            names = [_key(name) for name in action_names]
            if len(names) != int(count) or len(set(names)) != len(names):
                raise EnvError(
                    f"environment {self._name}: expected {int(count)} different action_names, got {action_names} - name every action once"
                )
            self._actions |= {name: first + index for index, name in enumerate(names)}
            self._commands = names
        self._describe = describe_observation
        self._seed = 0

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin the episode of the seed."""
        self._seed = seed
        observation, info = self._env.reset(seed=seed % GYM_SEEDS)
        return self._describe(observation), self._info(info)

    def step(self, action: str) -> tuple[str, Any, Any, Any, Mapping[str, Any]]:
        """Act; the reward and the ends are passed on as they come."""
        number = self._actions.get(_key(action))
        if number is None:
            return f"Nothing happens. Actions are: {', '.join(self._commands)}.", 0.0, False, False, self._info({})
        observation, reward, terminated, truncated, info = self._env.step(number)
        return self._describe(observation), reward, terminated, truncated, self._info(info)

    def close(self) -> None:
        """Close the wrapped environment."""
        self._env.close()

    def _info(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        theirs = {key: value for key, value in info.items() if key not in INFO_KEYS}  # what we call progress need not be theirs
        return {**theirs, "env_id": f"{self._name}/{self._seed}", "admissible_commands": self._commands}


class GymnasiumSettings(EnvironmentSettings):
    """A registered gymnasium environment."""

    packages: ClassVar[tuple[str, ...]] = ("gymnasium",)

    id: str = Field(min_length=1)  # as for gymnasium.make; "module:Name-v0" imports the module first
    kwargs: dict[str, Any] = Field(default_factory=dict)  # for gymnasium.make
    action_names: list[str] | None = None  # a name for every action, in order; None: actions are numbers

    def build(self) -> Environment:
        """Make it."""
        import gymnasium

        return GymnasiumEnvironment(gymnasium.make(self.id, **self.kwargs), env_id=self.id, action_names=self.action_names)

    def preload(self) -> None:
        """Import gymnasium."""
        import gymnasium  # noqa: F401

    def check(self) -> tuple[KeyPath, str] | None:
        """Names must differ."""
        names = [_key(name) for name in self.action_names or []]
        if len(set(names)) != len(names):
            return ("action_names",), f"expected different names, got {', '.join(names)} - each action needs its own"
        return None


def _key(text: str) -> str:
    return " ".join(text.lower().split())
