"""A verifier of the user's own, by import path: `package.module.function` or `package.module.Class`.

A function is called as `function(task, response, **args)`; a class is built once per worker as `Class(**args)` and its object called as
`object(task, response)`. Both answer with a number or a mapping of numbers, and are plain functions, not async ones: they run in a process
of their own, where waiting disturbs nobody.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from sluice.config.models import VerifierConfig
from sluice.errors import describe
from sluice.rewards.base import Verifier


def module_of(path: str) -> str:
    """The module in which the import path says the verifier is."""
    return path.rpartition(".")[0]


def load(config: VerifierConfig) -> Verifier:
    """The verifier, built. Raises whatever its module or its class raises."""
    target = getattr(importlib.import_module(module_of(config.type)), config.type.rpartition(".")[2])
    if inspect.isclass(target):
        return cast(Verifier, target(**config.args))
    return cast(Verifier, partial(target, **config.args) if config.args else target)


def problem_with(config: VerifierConfig) -> tuple[str, str] | None:
    """What is wrong with it, as (key below `verifier`, message); None: nothing. Imports its module, builds nothing."""
    module_name, _, name = config.type.rpartition(".")
    if module_name == "__main__":
        return "type", f"expected a module that worker processes can import, got {config.type!r} - put the verifier into a file of its own"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is not None and (module_name == err.name or module_name.startswith(f"{err.name}.")):
            where = f"looked in {', '.join(repr(entry or '.') for entry in sys.path[:4])}, ..."
            return "type", f"expected an import path, there is no module {err.name!r} ({where}) - check the name, or PYTHONPATH"
        return "type", f"the module {module_name!r} cannot be imported: {describe(err)}"
    except BaseException as err:
        if isinstance(err, KeyboardInterrupt):
            raise
        return "type", f"the module {module_name!r} cannot be imported: {describe(err)}"
    target = getattr(module, name, None)
    if target is None:
        return "type", f"the module {module_name!r} has no {name!r}{_near(name, module)}"
    if inspect.isclass(target):
        return _problem_with_class(target, config)
    if not callable(target):
        return "type", f"expected a function or a class, {config.type!r} is {type(target).__name__}"
    return _problem_with_call(target, config.type, config.args)


def _problem_with_class(target: type, config: VerifierConfig) -> tuple[str, str] | None:
    if "__call__" not in dir(target):
        return "type", f"expected a class whose objects are called with (task, response), {config.type!r} has no __call__"
    problem = _does_not_bind(target, (), config.args)
    if problem:
        return "args", f"expected the arguments of {config.type}{_shown(target)}, {problem}"
    return _problem_with_call(target.__call__, config.type, {}, bound=(None,))


def _problem_with_call(target: Callable[..., Any], path: str, args: dict[str, Any], bound: tuple[None, ...] = ()) -> tuple[str, str] | None:
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None)):  # noqa: B004
        return "type", f"expected a plain function, {path!r} is async - it runs in a process of its own and may simply wait"
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        return "type", f"expected a function that returns a number, {path!r} is a generator"
    if args:
        problem = _does_not_bind(target, (*bound, None, None), {})
        if problem is None or "missing" in problem:
            problem = _does_not_bind(target, (*bound, None, None), args)
            return ("args", f"expected the arguments of {path}{_shown(target)}, {problem}") if problem else None
    problem = _does_not_bind(target, (*bound, None, None), args)
    return ("type", f"expected something that is called with (task, response), {path!r} is{_shown(target)}: {problem}") if problem else None


def _does_not_bind(target: Callable[..., Any], positional: tuple[None, ...], args: dict[str, Any]) -> str | None:
    """Why a call with these arguments would fail; None: it would not, or nobody can know (some functions written in C)."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*positional, **args)
    except TypeError as err:
        return str(err)
    return None


def _shown(target: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(target))
    except (TypeError, ValueError):
        return "(...)"


def _near(name: str, module: Any) -> str:
    near = difflib.get_close_matches(name, [other for other in vars(module) if callable(getattr(module, other))], n=1)
    return f" - did you mean {near[0]}?" if near else " - check the name"
