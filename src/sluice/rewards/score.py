"""Makes a `Score` of whatever a verifier answered, and counts scores. A bad answer is a counted failure: never an exception, never a 0."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from time import perf_counter
from typing import Any, cast

from sluice.config.models import LARGEST_REWARD
from sluice.errors import cut, describe
from sluice.rewards.base import Score, Verifier
from sluice.types import EMPTY, Failure, FailureCause, Task


def failed(reason: str, detail: str = "", *, cause: FailureCause = "infrastructure", seconds: float = 0.0) -> Score:
    """A score without a reward, and why."""
    return Score(reward=None, failure=Failure(cause=cause, reason=reason, detail=cut(detail)), seconds=seconds)


def make_score(answer: object, *, reward_key: str | None = None, seconds: float = 0.0) -> Score:
    """Read what a verifier answered as a reward, or say why it is none.

    A number is a reward: bool, int, float, Fraction, Decimal, numpy scalars, arrays and tensors without dimensions. Of a mapping the entry
    `reward_key` is the reward and every finite number is a metric. A number is taken as it is when a `reward_key` is set, so that a
    verifier may answer 0.0 where it has nothing to take apart.

    Reasons of failure: `reward_missing` (None), `reward_not_finite` (NaN, infinite, or beyond `LARGEST_REWARD`), `reward_key_missing`,
    `reward_type` (anything else: text, lists, arrays with dimensions, complex numbers).
    """
    try:
        if isinstance(answer, Mapping):
            return _of_mapping(answer, reward_key, seconds)
        value = _reward(answer)
        if isinstance(value, Failure):
            return Score(reward=None, failure=value, seconds=seconds)
        return Score(reward=value, seconds=seconds)
    except BaseException as err:  # noqa: BLE001 - the answer is an object of foreign code: looking at it may run anything
        return failed("reward_type", f"the verifier answered something that cannot be read: {describe(err)}", seconds=seconds)


def run_verifier(verifier: Verifier, task: Task, response: str, reward_key: str | None) -> Score:
    """Call a verifier and make its answer a score. Never raises.

    A `SystemExit` or `KeyboardInterrupt` is the verifier's own as well: signals are delivered to the main thread, which scores nothing.
    """
    started = perf_counter()
    try:
        answer: object = verifier(task, response)
    except BaseException as err:  # noqa: BLE001 - also SystemExit: a verifier that calls sys.exit() ends its call, not the run
        return failed("reward_error", describe(err), seconds=perf_counter() - started)
    return make_score(answer, reward_key=reward_key, seconds=perf_counter() - started)


class ScoreCounts:
    """Counts what became of every call. `jobs` = `scored` + all errors + `cancelled` + those still open."""

    def __init__(self) -> None:
        self.jobs = 0
        self.scored = 0
        self.cancelled = 0
        self.errors: Counter[str] = Counter()  # by reason, time-outs and lost workers among them
        self.score_seconds = 0.0  # inside verifiers, over all answered calls
        self.queue_seconds = 0.0  # waiting for a worker, over all calls that got one
        self.started = 0  # calls that got a worker

    def answered(self, score: Score) -> None:
        """One call was answered."""
        self.score_seconds += score.seconds
        if score.failure is None:
            self.scored += 1
        else:
            self.errors[score.failure.reason] += 1

    def metrics(self) -> dict[str, float]:
        """Totals since the start. Means are left out while there is nothing to average."""
        answered = self.scored + self.errors.total()
        result: dict[str, float] = {
            "rewards/jobs": self.jobs,
            "rewards/scored": self.scored,
            "rewards/cancelled": self.cancelled,
            "rewards/timeouts": self.errors["reward_timeout"],
        }
        for reason, count in sorted(self.errors.items()):
            result[f"rewards/errors/{reason}"] = count
        if answered:
            result["rewards/score_seconds/mean"] = self.score_seconds / answered
        if self.started:
            result["rewards/queue_seconds/mean"] = self.queue_seconds / self.started
        return result


def _of_mapping(answer: Mapping[object, object], reward_key: str | None, seconds: float) -> Score:
    fields = ", ".join(reprlib.repr(key) for key in answer) or "none"
    if reward_key is None:
        detail = f"the verifier answered a mapping with the fields {fields} - name the one that is the reward: rewards.<domain>.reward_key"
        return failed("reward_key_missing", detail, seconds=seconds)
    if reward_key not in answer:
        detail = f"rewards.<domain>.reward_key is {reward_key!r}, the verifier answered a mapping with the fields {fields}"
        return failed("reward_key_missing", detail, seconds=seconds)
    metrics: dict[str, float] = {}
    for key, entry in answer.items():
        if not isinstance(number := _number(entry), Failure):
            metrics[str(key)] = number
    value = _reward(answer[reward_key])
    if isinstance(value, Failure):
        failure = Failure(cause=value.cause, reason=value.reason, detail=cut(f"field {reward_key!r}: {value.detail}"))
        return Score(reward=None, metrics=metrics or EMPTY, failure=failure, seconds=seconds)
    return Score(reward=value, metrics=metrics or EMPTY, seconds=seconds)


def _reward(value: object) -> float | Failure:
    """A number that can be trained on, or why it is none."""
    number = _number(value)
    if isinstance(number, float) and abs(number) > LARGEST_REWARD:
        detail = f"the verifier answered {number}, training is done in float32, which ends at {LARGEST_REWARD:.8g} - scale the rewards down"
        return _failure("reward_not_finite", detail)
    return number


def _number(value: object) -> float | Failure:
    """A finite float, or why it is none."""
    if type(value) is float and math.isfinite(value):
        return value
    if value is None:
        return _failure("reward_missing", "the verifier answered None - a response that is wrong earns 0.0, say so")
    shape = None
    if not isinstance(value, (numbers.Real, Decimal)):
        shape = getattr(value, "shape", None)
        if shape == ():
            value = cast(Any, value).item()  # a numpy scalar, or an array or tensor without dimensions
    if not isinstance(value, (numbers.Real, Decimal)):
        shown = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
        return _failure("reward_type", f"expected one number, the verifier answered {type(value).__name__}{shown} {reprlib.repr(value)}")
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return _failure("reward_not_finite", f"the verifier answered {type(value).__name__} {reprlib.repr(value)}, too large for a float")
    if not math.isfinite(number):
        return _failure("reward_not_finite", f"the verifier answered {number}")
    return number


def _failure(reason: str, detail: str) -> Failure:
    return Failure(cause="infrastructure", reason=reason, detail=cut(detail))
