"""Your own filter, by import path: a function, or a class with `.judge`.

A function is called with the group (or, for a response filter, the rollout) and the `filter_args`; a class is built once, with the
`filter_args`, and its `.judge` is called with the group or rollout. Answers: True keeps, False drops, or a whole `Verdict`; `numpy.bool_`
and 0-dim arrays or tensors that hold a truth value count as booleans. Anything else is a `FilterError` at the first call.

A class that decides by what it saw before gives its memory away with `state_dict()` and takes it back with `load_state_dict(state)`: plain
data (mappings, lists, text, numbers, truth values, null, numpy arrays), which then is part of every checkpoint.

On groups of trajectories, a function or class that names a parameter `mode` is given "train" or "val" there.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Real
from typing import Any, Final, Literal, TypeVar

import numpy as np

from sluice.errors import ConfigError, FilterError
from sluice.filters.base import CATEGORIES, Filter, Stateful
from sluice.filters.context import FilterContext
from sluice.filters.group_rewards import read_group
from sluice.filters.naming import nearest
from sluice.types import Category, Group, Rollout, Verdict

T = TypeVar("T")

LONGEST_REASON: Final = 100  # characters of a verdict's reason, by which it is counted, and of its source

Contract = Literal["judge", "filter", "both", "neither"]
"""What a class of a user offers: `.judge(group)`, where True keeps, or `.filter(group_id, episode_id, group)`, where True drops."""


@dataclass(frozen=True, kw_only=True)
class Custom(Filter[T]):
    """Calls user code and makes a verdict of its answer.

    A group that is not whole is dropped before user code sees it, as by the built-in filters, unless `sees_all`.
    """

    name = "custom"

    path: str
    function: Callable[[T], object]
    category: Category  # of a drop that came as a plain False
    memory: Stateful | None = None  # the user's object, where it has state; None: it has none
    sees_all: bool = False  # also groups that are not whole: what it keeps of them is for others to drop

    @property
    def is_opaque(self) -> bool:
        """It is user code."""
        return True

    @property
    def label(self) -> str:
        """The name of the function or class, without its module."""
        return self.path.rpartition(".")[2]

    def judge(self, item: T, /) -> Verdict:
        """Ask the user's code."""
        if isinstance(item, Group) and not self.sees_all:
            stats = read_group(item, self.context)
            if stats.fault:
                return Verdict.dropped(stats.fault, "invalid", self.path, {"n": stats.n, "size": stats.size})
        try:
            answer = self.function(item)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: user code that exits ends its own call, not the loop
            raise FilterError(
                f"{self.context.where}: {self.path} raised {type(error).__name__} on {_told(item)}: {error} - correct the filter"
            ) from error
        if isinstance(answer, Verdict):
            fault = _fault_of(answer)
            if fault:
                raise FilterError(f"{self.context.where}: {self.path} must answer with {fault}")
            return answer if answer.source else replace(answer, source=self.path)
        try:
            is_kept = _truth(answer, self.path, self.context.where)
        except FilterError:
            raise
        except BaseException as error:
            raise FilterError(
                f"{self.context.where}: {self.path} must answer True (keep), False (drop) or a Verdict, got {type(answer).__name__}, which "
                f"raised {type(error).__name__} when it was read: {error} - return a bool"
            ) from error
        if is_kept:
            return Verdict.kept(self.path)
        return Verdict.dropped(self.label, self.category, self.path)


def load(path: str, filter_args: Mapping[str, Any], context: FilterContext) -> tuple[Callable[[Any], object], Stateful | None]:
    """Find the user's filter and check, without calling it on anything, that it can be called as it will be. Raises `ConfigError`.

    Answers with the function that judges, and with the object whose state is kept.
    """
    where, key = context.where, f"{context.where}.type"
    found = find(path, key, "a built-in filter or an import path package.module.name")
    arguments: Mapping[str, Any] = dict(filter_args)
    if context.mode is not None and "mode" not in filter_args and _names_mode(found):
        arguments = {**filter_args, "mode": context.mode}
    advice = f"change the signature or {where}.filter_args"
    if inspect.isclass(found):
        if contract_of(found) in ("filter", "both"):
            raise ConfigError(
                f"{key} must name a class with .judge (True keeps) and without .filter (True drops), got {path} with .filter - "
                "rename the method and return the opposite"
            )
        if contract_of(found) == "neither":
            raise ConfigError(f"{key} must name a function or a class with .judge, got the class {path} without it - add it")
        check_call(found, (), arguments, f"{path} is built with filter_args {sorted(filter_args)}", key, advice)
        instance = build(lambda: found(**arguments), path, where, "correct its filter_args or the class")
        return judge_of(instance, path, key), memory_of(instance, path, key)
    if not callable(found):
        raise ConfigError(f"{key} must name a function or a class, got {path} = {found!r} - name something that can be called")
    _refuse_coroutine(found, path, key)
    check_call(found, (None,), arguments, f"{path} is called with the group or rollout and filter_args {sorted(filter_args)}", key, advice)
    return (lambda item: found(item, **arguments)) if arguments else found, None


def contract_of(cls: type) -> Contract:
    """Which of the two contracts a class of a user keeps: the one place that tells them apart."""
    judges, filters = callable(getattr(cls, "judge", None)), callable(getattr(cls, "filter", None))
    if judges and filters:
        return "both"
    return "judge" if judges else "filter" if filters else "neither"


def find(path: str, key: str, expected: str) -> Any:
    """What an import path names. key: the setting it stands in; expected: what may stand there. Raises `ConfigError`."""
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} must be {expected}, got {path!r}, and importing {module_name!r} "
            f"raised {type(error).__name__}: {error} - check the path, and that the package is installed or on PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [known for known in dir(module) if not known.startswith("_")]
        raise ConfigError(f"{key}: module {module_name!r} has no {name!r} - {nearest(name, public)}") from None


def build(construct: Callable[[], Any], path: str, where: str, advice: str) -> Any:
    """Make the user's object. Raises `ConfigError` when its constructor does not work."""
    try:
        return construct()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: building {path} raised {type(error).__name__}: {error} - {advice}") from error


def judge_of(instance: Any, path: str, key: str) -> Callable[[Any], object]:
    """The `.judge` of the user's object, which must take the group or rollout."""
    judge: Callable[[Any], object] = instance.judge
    _refuse_coroutine(judge, path, key)
    check_call(judge, (None,), {}, f"{path}.judge is called with the group or rollout", key, "change the signature")
    return judge


def memory_of(instance: Any, path: str, key: str) -> Stateful | None:
    """The object itself when it has both methods of state; one alone would lose the state without a word."""
    has = {name: callable(getattr(instance, name, None)) for name in ("state_dict", "load_state_dict")}
    if not any(has.values()):
        return None
    if not all(has.values()):
        given, missing = sorted(has, key=lambda name: not has[name])
        raise ConfigError(
            f"{key} must name a class with state_dict and load_state_dict, or with neither, got {path} with {given} alone - add {missing}"
        )
    check_call(instance.state_dict, (), {}, f"{path}.state_dict is called without arguments", key, "change the signature")
    check_call(instance.load_state_dict, (None,), {}, f"{path}.load_state_dict is called with the state", key, "change the signature")
    memory: Stateful = instance
    return memory


def check_call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any], how: str, key: str, advice: str
) -> None:
    """Raise `ConfigError` when a function does not take these arguments."""
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{key}: {how}, which its signature {signature} does not take ({error}) - {advice}") from error


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """How it is called; None for what is written in C and does not say: the first call will tell."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _names_mode(found: Any) -> bool:
    signature = signature_of(found) if callable(found) else None
    return signature is not None and "mode" in list(signature.parameters)[not inspect.isclass(found) :]


def _refuse_coroutine(function: Callable[..., object], path: str, key: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key} must name a plain function, got the coroutine function {path} - filters decide without waiting")


def _truth(answer: object, path: str, where: str) -> bool:
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if not isinstance(answer, np.generic) and getattr(answer, "shape", None) == () and hasattr(answer, "item"):  # a 0-dim array or tensor
        value = answer.item()
        if value in (True, False):
            return bool(value)
    cls = f"{type(answer).__module__}.{type(answer).__qualname__}"
    raise FilterError(f"{where}: {path} must answer True (keep), False (drop) or a Verdict, got {answer!r} ({cls}) - return a bool")


def _fault_of(verdict: Verdict) -> str:
    """What keeps a user's verdict from being counted and written down, with what to do; "" when it is sound."""
    if verdict.category not in (None, *CATEGORIES):
        return f"a category out of {list(CATEGORIES)}, got {verdict.category!r} - {nearest(str(verdict.category), CATEGORIES)}"
    texts: tuple[tuple[str, object, int], ...] = (("reason", verdict.reason, 1), ("source", verdict.source, 0))
    for name, text, fewest in texts:
        if not isinstance(text, str) or not fewest <= len(text) <= LONGEST_REASON or not text.isprintable():
            return (
                f"a {name} of {fewest} to {LONGEST_REASON} printable characters, got {reprlib.repr(text)} ({type(text).__name__}) - "
                "groups are counted by it: put what differs from group to group into the evidence"
            )
    evidence: object = verdict.evidence
    if not isinstance(evidence, Mapping):
        return f"a mapping of names to numbers as evidence, got {reprlib.repr(evidence)} ({type(evidence).__name__}) - give a dict"
    for key, value in evidence.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(key, str) or not key.isprintable() or not isinstance(plain, Real):
            shown = f"{reprlib.repr(key)}: {reprlib.repr(value)} ({type(value).__name__})"
            return f"names and numbers as evidence, got {shown} - convert it, or leave it out"
    return ""


def _told(item: object) -> str:
    if isinstance(item, Group):
        return f"group {item.group_id} (task {item.task.task_id!r})"
    if isinstance(item, Rollout):
        return f"attempt {item.attempt_id} of group {item.group_id} (task {item.task_id!r})"
    return "the given rewards"
