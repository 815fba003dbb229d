"""Where an environment's answers are read: wrong types stop here, and whatever it does becomes data.

`call_reset` and `call_step` make records of answers and raise `EnvError` for what is none; a `HeldEnvironment` never raises and answers
with an `EnvFault`. Texts are bounded on both sides, so that no policy and no environment can fill the memory with one of them, and every
text that comes through can be written as UTF-8: tokenizers and files take no other.
"""

from __future__ import annotations

import logging
import math
import numbers
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from sluice.config.models import LARGEST_REWARD
from sluice.environments.base import Call, EnvFault, EnvInfo, Environment, EnvReset, EnvStep
from sluice.errors import EnvError, cut, describe

INFO_KEYS: Final = frozenset({"admissible_commands", "progress", "success", "task_type", "env_id"})  # those with a meaning
LONGEST_ACTION: Final = 8_192  # characters that reach the environment: far beyond any command, so that cutting makes no valid one
LONGEST_OBSERVATION: Final = 1_000_000  # characters, of the admissible commands together as well: more than any policy can read
LONGEST_WORD: Final = 1_000  # characters of task_type and env_id: they are names, and stand in every record of their group
SEPARATOR_CHARS: Final = 2  # that every admissible command costs besides its text, where a template lists them
LARGEST_INTEGER: Final = 2**63 - 1  # that is kept of what else an environment says: what a file or another process can take

_ARRAYS: Final = frozenset({"numpy", "torch"})  # packages whose scalars stand for Python's

Answer: TypeAlias = EnvReset | EnvStep | EnvFault

_log = logging.getLogger(__name__)


def call_reset(environment: Environment, seed: int, name: str) -> EnvReset:
    """Reset it and read the answer. Raises `EnvError` for a wrong answer, and whatever the environment raises."""
    started = perf_counter()
    answer: object = environment.reset(seed)
    seconds = perf_counter() - started
    observation, info = _parts(answer, ("observation", "info"), name, "reset")
    return EnvReset(observation=_observation(observation, name, "reset"), info=_info(info, name, "reset"), seconds=seconds)


def call_step(environment: Environment, action: str, name: str) -> EnvStep:
    """Act and read the answer; of an action longer than `LONGEST_ACTION` the rest is cut off. Raises like `call_reset`."""
    started = perf_counter()
    answer: object = environment.step(action[:LONGEST_ACTION])
    seconds = perf_counter() - started
    observation, reward, terminated, truncated, info = _parts(
        answer, ("observation", "reward", "terminated", "truncated", "info"), name, "step"
    )
    return EnvStep(
        observation=_observation(observation, name, "step"),
        reward=_reward(reward, name),
        terminated=_truth(terminated, "terminated", name, "step"),
        truncated=_truth(truncated, "truncated", name, "step"),
        info=_info(info, name, "step"),
        seconds=seconds,
    )


class HeldEnvironment:
    """An environment with whoever runs it: built at the first reset, and built anew after it failed."""

    def __init__(self, name: str, build: Callable[[], Environment]) -> None:
        """Nothing is built yet."""
        self._name = name
        self._build = build
        self._environment: Environment | None = None

    def build(self) -> None:
        """Build it now. Raises whatever its class raises."""
        self._environment = self._build()

    def perform(self, call: Call, argument: int | str) -> Answer:
        """Make the call and read the answer; whatever the environment does becomes data.

        A `SystemExit`, or a cancel that nobody asked for, is the environment's own; so is a `KeyboardInterrupt`, except in the main thread,
        where Ctrl-C arrives.
        """
        started = perf_counter()
        try:
            if self._environment is None:
                self.build()
            assert self._environment is not None, "a builder answered with None"
            if call == "reset":
                return call_reset(self._environment, cast(int, argument), self._name)
            return call_step(self._environment, cast(str, argument), self._name)
        except BaseException as err:  # foreign code: it ends its episode, not the run
            if _is_ctrl_c(err):
                raise
            detail = str(err) if isinstance(err, EnvError) else f"environment {self._name}, {call}: {describe(err)}"
        self.drop()
        return EnvFault(kind="env_failed", detail=cut(detail), call=call, seconds=perf_counter() - started)

    def drop(self) -> None:
        """Close it, if there is one."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            environment.close()
        except BaseException as err:  # it is wanted no more
            if _is_ctrl_c(err):
                raise
            _log.warning("environment %s, close: %s", self._name, describe(err))


def _is_ctrl_c(err: BaseException) -> bool:
    """Whether it is the user's and not the environment's: signals reach the main thread alone."""
    return isinstance(err, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _wrong(expected: str, came: object, name: str, call: Call) -> EnvError:
    try:
        told = reprlib.repr(came)
    except ValueError:  # an int of too many digits to be written
        told = "a number beyond all bounds"
    return EnvError(
        f"environment {name}, {call}: expected {expected}, got {cut(told, 100)} ({type(came).__name__}) - "
        f"answer as sluice.environments.Environment says"
    )


def _parts(answer: object, parts: tuple[str, ...], name: str, call: Call) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or len(answer) != len(parts):
        raise _wrong(f"a tuple ({', '.join(parts)})", answer, name, call)
    return answer


def _observation(value: object, name: str, call: Call) -> str:
    if not isinstance(value, str):
        raise _wrong("text as observation", value, name, call)
    if len(value) > LONGEST_OBSERVATION:
        raise EnvError(
            f"environment {name}, {call}: expected an observation of at most {LONGEST_OBSERVATION} characters, got {len(value)} - "
            f"shorten it in the environment"
        )
    _check_encodable(value, "the observation", name, call)
    return str(value)


def _check_encodable(text: str, what: str, name: str, call: Call) -> None:
    """Raise `EnvError` for half a surrogate pair, which no tokenizer and no file takes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise EnvError(
            f"environment {name}, {call}: expected text that can be written as UTF-8 in {what}, got {text[err.start]!r} at character "
            f"{err.start} - decode bytes with errors='replace' where the environment reads them"
        ) from err


def _reward(value: object, name: str) -> float:
    number = _number(value, "a finite number as reward", name, "step")
    if abs(number) > LARGEST_REWARD:
        raise EnvError(
            f"environment {name}, step: expected a reward that can be trained on, got {number:.8g}, beyond {LARGEST_REWARD:.8g}, where "
            f"float32 ends - scale the rewards down"
        )
    return number


def _number(value: object, expected: str, name: str, call: Call) -> float:
    plain = _plain(value)
    if not isinstance(plain, bool) and isinstance(plain, numbers.Real):
        try:
            number = float(plain)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _wrong(f"{expected} (float(...) makes one of a truth value)" if isinstance(plain, bool) else expected, value, name, call)


def _truth(value: object, what: str, name: str, call: Call) -> bool:
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise _wrong(f"True or False as {what}", value, name, call)
    return plain


def _info(info: object, name: str, call: Call) -> EnvInfo:
    if not isinstance(info, Mapping):
        raise _wrong("a mapping as info", info, name, call)
    progress = info.get("progress")
    if progress is not None:
        expected = "a number from 0 to 1 as info['progress']"
        progress = _number(progress, expected, name, call)
        if not 0 <= progress <= 1:
            raise _wrong(expected, progress, name, call)
    success = info.get("success")
    return EnvInfo(
        admissible_commands=_commands(info, name, call),
        progress=progress,
        success=None if success is None else _truth(success, "info['success']", name, call),
        task_type=_word(info, "task_type", name, call),
        env_id=_word(info, "env_id", name, call),
        extra=_extra(info),
    )


def _commands(info: Mapping[Any, Any], name: str, call: Call) -> tuple[str, ...] | None:
    what = "info['admissible_commands']"
    commands = info.get("admissible_commands")
    if commands is None:
        return None
    if isinstance(commands, str) or not isinstance(commands, Sequence) or not all(isinstance(command, str) for command in commands):
        raise _wrong(f"a list of texts as {what}", commands, name, call)
    if sum(map(len, commands)) + SEPARATOR_CHARS * len(commands) > LONGEST_OBSERVATION:
        raise _wrong(f"at most {LONGEST_OBSERVATION} characters in {what}, {SEPARATOR_CHARS} for each included", commands, name, call)
    for command in commands:
        _check_encodable(command, what, name, call)
    return tuple(map(str, commands))


def _word(info: Mapping[Any, Any], key: str, name: str, call: Call) -> str | None:
    value = info.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(f"text as info[{key!r}]", value, name, call)
    if len(value) > LONGEST_WORD:
        raise _wrong(f"at most {LONGEST_WORD} characters as info[{key!r}]", value, name, call)
    _check_encodable(value, f"info[{key!r}]", name, call)
    return str(value)


def _extra(info: Mapping[Any, Any]) -> Mapping[str, str | float | bool]:
    """What else it says, as far as it is a text, a finite number or a truth value, all texts together within a bound; objects stay with
    the environment.
    """
    kept: dict[str, str | float | bool] = {}
    room = LONGEST_OBSERVATION
    for key, value in info.items():
        if not isinstance(key, str) or key in INFO_KEYS:
            continue
        plain = _plain(value)
        if isinstance(plain, str):
            is_kept, size = True, len(plain)
        elif isinstance(plain, int):  # truth values as well
            is_kept, size = abs(plain) <= LARGEST_INTEGER, 0
        else:
            is_kept, size = isinstance(plain, float) and math.isfinite(plain), 0
        if is_kept and len(key) + size <= room:
            room -= len(key) + size
            kept[key] = plain  # type: ignore[assignment]  # told by the lines above
    return MappingProxyType(kept)


def _plain(value: object) -> object:
    """A scalar of numpy, or an array or tensor without dimensions, as the Python value it stands for; everything else as it is."""
    if type(value).__module__.partition(".")[0] in _ARRAYS and getattr(value, "shape", None) == ():
        return value.item()  # type: ignore[attr-defined]  # told by its shape
    return value
