"""What every verifier offers, and what a score is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from sluice.config.models import Section
from sluice.config.problems import KeyPath
from sluice.types import EMPTY, Failure, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one response earned: a finite reward, or the reason why there is none."""

    reward: float | None  # None exactly when `failure` is set, but for a time-out with `on_reward_timeout: value` (both set)
    metrics: Mapping[str, float] = field(default_factory=lambda: EMPTY)  # further named scores, all finite
    failure: Failure | None = None
    seconds: float = 0.0  # inside the verifier; waiting for a worker is not in it


class Verifier(Protocol):
    """Turns a response into a number or a mapping of numbers. Runs in a worker process: must be picklable by its config."""

    def __call__(self, task: Task, response: str) -> float | Mapping[str, float]:
        """Score one response. May raise or never return: the pool makes that a `Failure`."""


class Scorer(Protocol):
    """What the shell asks for scores: the worker pool, or a null scorer in tests."""

    async def score(self, task: Task, response: str) -> Score:
        """Score one response within the domain's time limit. Never raises for a bad verifier; cancel-safe."""

    async def close(self) -> None:
        """End all workers; bounded in time, idempotent."""

    def metrics(self) -> dict[str, float]:
        """Counts and mean times since the start, under names that begin with `rewards/`."""


class BuiltinVerifier(Section):
    """Base of the verifiers that have a name: the fields of the class are the `args` of the configuration, checked while loading."""

    package: ClassVar[str | None] = None  # module that must be installed; found out without importing it

    def __call__(self, task: Task, response: str) -> float:
        """Score one response."""
        raise AssertionError(f"{type(self).__name__} does not say how it scores")

    def preload(self) -> None:
        """Import and warm up what scoring needs. Called once, in the process from which workers are forked."""

    def check(self) -> tuple[KeyPath, str] | None:
        """What is wrong with the arguments beyond their types, as (path of the argument, message); None: nothing."""
        return None


def reference_answer(task: Task, verifier: str) -> str:
    """The answer that a response is compared with. Raises `ValueError` when the data give none: that is no wrong response."""
    if task.answer is None:
        raise ValueError(
            f"verifier '{verifier}' compares with the reference answer, task {task.task_id!r} has none - "
            f"name the field that holds it (answer_field) or leave such rows out"
        )
    return task.answer
