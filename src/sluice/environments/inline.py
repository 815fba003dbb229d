"""Runs an environment in the caller's own thread: for tests, and for what certainly returns. Nothing here can stop one that does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

from sluice.environments.base import Call, EnvFault, Environment, EnvReset, EnvStep
from sluice.environments.boundary import Answer, HeldEnvironment
from sluice.environments.runners import EpisodeState, RunnerCounts, RunningCall, closed, late, no_episode
from sluice.environments.settings import EnvironmentConfig


class InlineRunner:
    """A `Runner` whose calls block the event loop. A call that took longer than its limit is a time-out afterwards, as it is elsewhere."""

    def __init__(self, config: EnvironmentConfig, build: Callable[[], Environment], counts: RunnerCounts | None = None) -> None:
        """Nothing is built before the first `reset`."""
        self.name = config.type
        self.running: RunningCall | None = None
        self.counts = RunnerCounts() if counts is None else counts
        self._config = config
        self._held = HeldEnvironment(config.type, self.counts.building(build))
        self._episode = EpisodeState(config.type, config.max_steps)
        self._closed = False

    async def reset(self, seed: int) -> EnvReset | EnvFault:
        """Begin the episode of the seed.

        Raises:
            EnvError: it cannot be built.
        """
        self._episode.begin(seed)
        return cast(EnvReset | EnvFault, self._ended(closed("reset", self.name) if self._closed else self._call("reset", seed)))

    async def step(self, action: str) -> EnvStep | EnvFault:
        """Act."""
        if self._closed:
            answer: Answer = closed("step", self.name)
        else:
            answer = self._call("step", action) if self._episode.is_open else no_episode("step", self.name)
        return cast(EnvStep | EnvFault, self._ended(answer))

    def leave(self) -> None:
        """End the episode."""
        self._episode.is_open = False

    async def close(self) -> None:
        """Close the environment."""
        self._closed = True
        self._held.drop()

    def interrupt(self, why: str) -> None:
        """Nothing: whoever calls this has the thread in which a call would run."""

    def _call(self, call: Call, argument: int | str) -> Answer:
        self.running = RunningCall(call=call, since=time.monotonic(), env_id=self._episode.env_id, seed=self._episode.seed)
        try:
            answer = self._held.perform(call, argument)
        finally:
            self.running = None
        limit_s = self._config.limit_s(call)
        if limit_s is not None and answer.seconds > limit_s:
            self._held.drop()  # elsewhere it would have been replaced
            return late(call, self.name, limit_s, self._episode.env_id, answer.seconds)
        return answer

    def _ended(self, answer: Answer) -> Answer:
        answer = self._episode.after(answer)
        self.counts.answered(answer)
        self.counts.give_up_unbuilt(answer, self.name)
        return answer
