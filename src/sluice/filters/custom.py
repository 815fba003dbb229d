"""Your own filter, by import path: a function, or a class with `.judge`.

A function is called with the group (or, for a response filter, the rollout) and the `filter_args`; a class is built once, with the
`filter_args`, and its `.judge` is called with the group or rollout. Answers: True keeps, False drops, or a whole `Verdict`; `numpy.bool_`
and 0-dim arrays or tensors that hold a truth value count as booleans. Anything else is a `FilterError` at the first call.

A class that decides by what it saw before gives its memory away with `state_dict()` and takes it back with `load_state_dict(state)`: plain
data (mappings, lists, text, numbers, truth values, null, numpy arrays), which then is part of every checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, TypeVar

import numpy as np

from sluice.errors import ConfigError, FilterError
from sluice.filters.base import CATEGORIES, Filter
from sluice.filters.context import FilterContext
from sluice.filters.group_rewards import read_group
from sluice.filters.naming import nearest
from sluice.types import Category, Group, Rollout, Verdict

T = TypeVar("T")


class Stateful(Protocol):
    """A user's filter that decides by what it saw before."""

    def state_dict(self) -> Any:
        """Its memory, as plain data."""

    def load_state_dict(self, state: Any, /) -> object:
        """Take the memory back."""


@dataclass(frozen=True, kw_only=True)
class Custom(Filter[T]):
    """Calls user code and makes a verdict of its answer.

    A group that is not whole is dropped before user code sees it, as by the built-in filters.
    """

    name = "custom"

    path: str
    function: Callable[[T], object]
    category: Category  # of a drop that came as a plain False
    memory: Stateful | None = None  # the user's object, where it has state; None: it has none

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
        if isinstance(item, Group):
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
            if answer.category not in (None, *CATEGORIES):
                raise FilterError(
                    f"{self.context.where}: {self.path} must answer with a category out of {list(CATEGORIES)}, got {answer.category!r} - "
                    + nearest(answer.category, CATEGORIES)
                )
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
    found = _find(path, context.where)
    memory: Stateful | None = None
    if inspect.isclass(found):
        instance = _instance_of(found, path, filter_args, context)
        function = instance.judge
        memory = _memory_of(instance, path, context)
        arguments: Mapping[str, Any] = {}
    elif callable(found):
        function, arguments = found, dict(filter_args)
    else:
        raise ConfigError(
            f"{context.where}.type must name a function or a class, got {path} = {found!r} - name something that can be called"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{context.where}.type must name a plain function, got the coroutine function {path} - filters decide without waiting"
        )
    _check_call(function, (None,), arguments, f"{path} is called with the group or rollout and filter_args {sorted(arguments)}", context)
    return (lambda item: function(item, **arguments)) if arguments else function, memory


def _find(path: str, where: str) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}.type must be a built-in filter or an import path package.module.name, got {path!r}, and importing {module_name!r} "
            f"raised {type(error).__name__}: {error} - check the path, and that the package is installed or on PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [known for known in dir(module) if not known.startswith("_")]
        raise ConfigError(f"{where}.type: module {module_name!r} has no {name!r} - {nearest(name, public)}") from None


def _instance_of(cls: type, path: str, filter_args: Mapping[str, Any], context: FilterContext) -> Any:
    """A new object of the user's class, which has a `.judge`."""
    if callable(getattr(cls, "filter", None)):
        raise ConfigError(
            f"{context.where}.type must name a class with .judge (True keeps) and without .filter (True drops), got {path} with .filter - "
            "rename the method and return the opposite"
        )
    if not callable(getattr(cls, "judge", None)):
        raise ConfigError(f"{context.where}.type must name a function or a class with .judge, got the class {path} without it - add it")
    _check_call(cls, (), filter_args, f"{path} is built with filter_args {sorted(filter_args)}", context)
    try:
        return cls(**filter_args)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{context.where}: building {path} raised {type(error).__name__}: {error} - correct its filter_args or the class"
        ) from error


def _memory_of(instance: Any, path: str, context: FilterContext) -> Stateful | None:
    """The object itself when it has both methods of state; one alone would lose the state without a word."""
    has = {name: callable(getattr(instance, name, None)) for name in ("state_dict", "load_state_dict")}
    if not any(has.values()):
        return None
    if not all(has.values()):
        given, missing = sorted(has, key=lambda name: not has[name])
        raise ConfigError(
            f"{context.where}.type must name a class with state_dict and load_state_dict, or with neither, got {path} with {given} alone - "
            f"add {missing}"
        )
    _check_call(instance.state_dict, (), {}, f"{path}.state_dict is called without arguments", context)
    _check_call(instance.load_state_dict, (None,), {}, f"{path}.load_state_dict is called with the state", context)
    memory: Stateful = instance
    return memory


def _check_call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any], how: str, context: FilterContext
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature: the first call will tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{context.where}.type: {how}, which its signature {signature} does not take ({error}) - "
            f"change the signature or {context.where}.filter_args"
        ) from error


def _truth(answer: object, path: str, where: str) -> bool:
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if not isinstance(answer, np.generic) and getattr(answer, "shape", None) == () and hasattr(answer, "item"):  # a 0-dim array or tensor
        value = answer.item()
        if value in (True, False):
            return bool(value)
    cls = f"{type(answer).__module__}.{type(answer).__qualname__}"
    raise FilterError(f"{where}: {path} must answer True (keep), False (drop) or a Verdict, got {answer!r} ({cls}) - return a bool")


def _told(item: object) -> str:
    if isinstance(item, Group):
        return f"group {item.group_id} (task {item.task.task_id!r})"
    if isinstance(item, Rollout):
        return f"attempt {item.attempt_id} of group {item.group_id} (task {item.task_id!r})"
    return "the given rewards"
