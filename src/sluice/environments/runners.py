"""Where an environment runs: the asynchronous face that inline, thread and process share, and what is counted.

A runner plays one episode at a time, for one caller. `reset` and `step` answer with what happened, or with an `EnvFault`; after a fault,
or when the episode ended, the next call is `reset`, which finds a working environment. The same behaviour of an environment has the same
outcome wherever it runs, but for what cannot be undone there: an inline call that never returns stops the run, and a thread that never
returns is abandoned and counted.

Backpressure:

| who | waits for | unblocked by |
|---|---|---|
| `reset`, `step` | the environment's answer | the answer, the time limit, its process's death, `interrupt`, `close`, a cancel |
| `reset` in a pool | a free worker first | an episode that ends, a replaced worker, `close` |
| `close` | a thread's last words, at most `CLOSE_LIMIT_S` | its end, or the limit |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from sluice.config.models import LARGEST_REWARD
from sluice.environments.base import Call, EnvFault, Environment, EnvReset, EnvStep
from sluice.environments.boundary import Answer
from sluice.errors import EnvError
from sluice.workers import START_TRIES

CLOSE_LIMIT_S: Final = 1.0  # how long `close` waits for an environment that runs in a thread

NO_EPISODE: Final = "there is no episode: it ended, failed or was closed - call reset first"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A call that an environment is in, as the monitor sees it."""

    call: Call
    since: float  # time.monotonic() when it began
    env_id: str | None  # the problem being played; None: none yet
    seed: int  # of the episode


class Runner(Protocol):
    """Plays one episode at a time."""

    name: str  # of the environment, for messages
    running: RunningCall | None  # the call that is under way; read by the monitor from another thread

    async def reset(self, seed: int) -> EnvReset | EnvFault:
        """Begin the episode of the seed, within `reset_timeout_s`."""

    async def step(self, action: str) -> EnvStep | EnvFault:
        """Act, within `step_timeout_s`."""

    def leave(self) -> None:
        """The episode is wanted no more: give back what is held for it. Nothing happens when none is open."""

    async def close(self) -> None:
        """Give everything back. Bounded in time, idempotent; a call that is under way ends as `env_closed`."""

    def interrupt(self, why: str) -> None:
        """End the call that is under way as `env_timeout` with this reason, and replace the environment. For the loop's own thread.

        Nothing happens when no call is under way.
        """


class RunnerCounts:
    """Counts what became of every call."""

    def __init__(self) -> None:
        self.episodes = 0  # begun
        self.env_steps = 0  # answered
        self.faults: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"reset": 0.0, "step": 0.0}
        self.cancelled = 0  # calls whose caller was cancelled
        self.abandoned = 0  # threads left to themselves in a call
        self.failed_builds = 0  # in a row, of all runners together; a pool counts for each of its places

    def answered(self, answer: Answer) -> None:
        """One call ended."""
        if isinstance(answer, EnvFault):
            self.faults[answer.kind] += 1
            self.seconds[answer.call] += answer.seconds
        elif isinstance(answer, EnvReset):
            self.episodes += 1
            self.seconds["reset"] += answer.seconds
        else:
            self.env_steps += 1
            self.seconds["step"] += answer.seconds

    def building(self, build: Callable[[], Environment]) -> Callable[[], Environment]:
        """The same builder, with its failures counted."""

        def counted() -> Environment:
            try:
                environment = build()
            except BaseException:
                self.failed_builds += 1
                raise
            self.failed_builds = 0
            return environment

        return counted

    def give_up_unbuilt(self, answer: Answer, name: str) -> None:
        """Raise `EnvError` when this answer is one failed build too many: data of single episodes would go on for ever."""
        if isinstance(answer, EnvFault) and answer.call == "reset" and answer.kind == "env_failed" and self.failed_builds >= START_TRIES:
            raise EnvError(f"environment {name}: it cannot be built, {START_TRIES} tries failed, the last one because {answer.detail}")

    def metrics(self) -> dict[str, float]:
        """Totals since the start."""
        faults = {f"env/faults/{kind}": float(count) for kind, count in sorted(self.faults.items())}
        return {
            "env/episodes": float(self.episodes),
            "env/env_steps": float(self.env_steps),
            "env/reset_seconds": float(self.seconds["reset"]),
            "env/step_seconds": float(self.seconds["step"]),
            "env/cancelled": float(self.cancelled),
            "env/abandoned_threads": float(self.abandoned),
            **faults,
        }


def late(call: Call, name: str, limit_s: float, env_id: str | None, seconds: float) -> EnvFault:
    """The fault of a call that passed its limit."""
    detail = f"environment {name}, {call}: no answer within {call}_timeout_s = {limit_s:g} s"
    return EnvFault(kind="env_timeout", detail=detail, call=call, env_id=env_id, seconds=seconds)


def no_episode(call: Call, name: str) -> EnvFault:
    """The fault of a step without an episode."""
    return EnvFault(kind="env_failed", detail=f"environment {name}, {call}: {NO_EPISODE}", call=call)


def closed(call: Call, name: str, env_id: str | None = None) -> EnvFault:
    """The fault of a call on something that is closed."""
    return EnvFault(kind="env_closed", detail=f"environment {name}, {call}: it is closed", call=call, env_id=env_id)


class EpisodeState:
    """What every runner remembers of the episode it plays."""

    def __init__(self, name: str, max_steps: int | None) -> None:
        """No episode yet; one is truncated after `max_steps` steps (None: whenever the environment says). name: of the environment."""
        self.is_open = False  # whether a step may follow
        self.env_id: str | None = None
        self.seed = 0
        self._name = name
        self._max_steps = max_steps
        self._steps = 0
        self._reward = 0.0  # of its steps together

    def begin(self, seed: int) -> None:
        """A reset was asked for."""
        self.is_open, self.env_id, self.seed, self._steps, self._reward = False, None, seed, 0, 0.0

    def after(self, answer: Answer) -> Answer:
        """A call was answered: the answer as the caller gets it, with the problem's name on a fault and the end at the limit on a step.

        A step with which the rewards add up to more than can be trained on is a fault.
        """
        if isinstance(answer, EnvReset):
            self.is_open, self.env_id = True, answer.info.env_id
            return answer
        if isinstance(answer, EnvFault):
            self.is_open = False
            return replace(answer, env_id=self.env_id)
        self._steps += 1
        self._reward += answer.reward
        if abs(self._reward) > LARGEST_REWARD:
            self.is_open = False
            detail = (
                f"environment {self._name}, step: expected rewards that can be trained on, those of its {self._steps} steps add up to "
                f"{self._reward:.8g}, beyond {LARGEST_REWARD:.8g}, where float32 ends - scale the rewards down"
            )
            return EnvFault(kind="env_failed", detail=detail, call="step", env_id=self.env_id, seconds=answer.seconds)
        if self._max_steps is not None and self._steps >= self._max_steps and not answer.terminated:
            answer = replace(answer, truncated=True)
        self.is_open = not answer.is_last
        return answer
