"""Runs an environment in a thread of its own: for environments that wait and give the interpreter free, such as those behind a network.

A thread cannot be killed. One that passes its limit is abandoned: it is counted, its environment is built anew in another thread, and it
ends by itself when its call returns. The threads are daemons, so that a stuck one does not keep the program from ending.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import cast

from sluice.environments.base import Call, EnvFault, Environment, EnvReset, EnvStep
from sluice.environments.boundary import Answer, HeldEnvironment
from sluice.environments.runners import CLOSE_LIMIT_S, EpisodeState, RunnerCounts, RunningCall, closed, late, no_episode
from sluice.environments.settings import EnvironmentConfig
from sluice.errors import EnvError

_log = logging.getLogger(__name__)


class ThreadRunner:
    """A `Runner` whose calls are made in a thread."""

    def __init__(self, config: EnvironmentConfig, build: Callable[[], Environment], counts: RunnerCounts | None = None) -> None:
        """Nothing is started before the first `reset`; the environment is built in the thread."""
        self.name = config.type
        self.running: RunningCall | None = None
        self.counts = RunnerCounts() if counts is None else counts
        self._config = config
        self._build = self.counts.building(build)
        self._episode = EpisodeState(config.type, config.max_steps)
        self._player: _Player | None = None
        self._answer: asyncio.Future[Answer] | None = None  # of the call that is under way
        self._closed = False

    async def reset(self, seed: int) -> EnvReset | EnvFault:
        """Begin the episode of the seed.

        Raises:
            EnvError: it cannot be built.
        """
        self._episode.begin(seed)
        if self._closed:
            return cast(EnvReset | EnvFault, self._ended(closed("reset", self.name)))
        return cast(EnvReset | EnvFault, await self._call("reset", seed))

    async def step(self, action: str) -> EnvStep | EnvFault:
        """Act."""
        if self._closed or self._player is None or not self._episode.is_open:
            return cast(EnvStep | EnvFault, self._ended((closed if self._closed else no_episode)("step", self.name)))
        return cast(EnvStep | EnvFault, await self._call("step", action))

    def leave(self) -> None:
        """End the episode."""
        self._episode.is_open = False

    async def close(self) -> None:
        """End the thread; one that is in a call is abandoned at once, one that does not close its environment after `CLOSE_LIMIT_S`."""
        self._closed = True
        player = self._player
        if self.running is not None:
            self._end_call(closed(self.running.call, self.name, self._episode.env_id))
        elif player is not None:
            self._player = None
            player.stop()
            deadline = time.monotonic() + CLOSE_LIMIT_S
            while player.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread that ends sets no event
                await asyncio.sleep(0.002)
            if player.is_alive():
                self._abandoned()

    def interrupt(self, why: str) -> None:
        """End the call that is under way."""
        if self.running is not None:
            call = self.running.call
            detail = f"environment {self.name}, {call}: {why}"
            seconds = time.monotonic() - self.running.since
            self._end_call(EnvFault(kind="env_timeout", detail=detail, call=call, env_id=self._episode.env_id, seconds=seconds))

    async def _call(self, call: Call, argument: int | str) -> Answer:
        """Have the thread make the call. Waits for its answer; unblocked by it, by the limit, by `interrupt` and `close`."""
        if self.running is not None:
            raise EnvError(
                f"environment {self.name}, {call}: expected one call at a time, it is in a {self.running.call} - await that first"
            )
        loop = asyncio.get_running_loop()
        if self._player is None or not self._player.is_alive():
            self._player = _Player(HeldEnvironment(self.name, self._build), self.name)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._answer = answer
        self.running = RunningCall(call=call, since=time.monotonic(), env_id=self._episode.env_id, seed=self._episode.seed)
        self._player.ask(call, argument, lambda came: loop.call_soon_threadsafe(self._on_answer, answer, came))
        limit_s = self._config.limit_s(call)
        timer = None if limit_s is None else loop.call_later(limit_s, self._on_limit, answer, call, limit_s)
        try:
            came = await answer
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            self._episode.is_open = False
            if self._answer is answer:
                self._leave()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if limit_s is not None and came.seconds > limit_s and not isinstance(came, EnvFault):
            self._stop_player()  # it came late, before this loop had the time to look at the clock
            came = late(call, self.name, limit_s, self._episode.env_id, came.seconds)
        return self._ended(came)

    def _on_answer(self, answer: asyncio.Future[Answer], came: Answer) -> None:
        if self._answer is answer and not answer.done():
            self._answer, self.running = None, None
            answer.set_result(came)

    def _on_limit(self, answer: asyncio.Future[Answer], call: Call, limit_s: float) -> None:
        if self._answer is answer and not answer.done():
            self._end_call(late(call, self.name, limit_s, self._episode.env_id, limit_s))

    def _end_call(self, fault: EnvFault) -> None:
        """The call ends with this fault, and its thread is left to itself."""
        answer = self._answer
        self._leave()
        if answer is not None and not answer.done():
            answer.set_result(fault)

    def _leave(self) -> None:
        self._answer, self.running = None, None
        self._stop_player()
        self._abandoned()

    def _stop_player(self) -> None:
        if self._player is not None:
            self._player.stop()
            self._player = None

    def _abandoned(self) -> None:
        self.counts.abandoned += 1
        count = self.counts.abandoned
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th
            _log.warning(
                "environment %s: a thread was left in a call (%d so far) - `run_in: process` can kill and replace it", self.name, count
            )

    def _ended(self, answer: Answer) -> Answer:
        answer = self._episode.after(answer)
        self.counts.answered(answer)
        self.counts.give_up_unbuilt(answer, self.name)
        return answer


class _Player:
    """A thread and its environment: makes one call after another until it is told to stop, then closes the environment."""

    def __init__(self, held: HeldEnvironment, name: str) -> None:
        self._held = held
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Call, int | str, Callable[[Answer], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"environment {name}", daemon=True)
        self._thread.start()

    def ask(self, call: Call, argument: int | str, answered: Callable[[Answer], object]) -> None:
        """Make a call; `answered` is called in the thread."""
        self._calls.put((call, argument, answered))

    def stop(self) -> None:
        """End after the call that is under way."""
        self._calls.put(None)

    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, argument, answered = asked
            answer = self._held.perform(call, argument)
            try:
                answered(answer)
            except RuntimeError:
                break  # the event loop has ended
        self._held.drop()
