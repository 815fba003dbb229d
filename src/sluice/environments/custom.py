"""An environment of the user's own, by import path: `package.module.Class`, built as `Class(**args)`.

Anything that is called with the arguments and answers with an environment will do, a function as well.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from sluice.environments.base import Environment
from sluice.environments.settings import EnvironmentConfig
from sluice.errors import EnvError, describe

METHODS = ("reset", "step", "close")


def module_of(path: str) -> str:
    """The module in which the import path says the environment is."""
    return path.rpartition(".")[0]


def load(config: EnvironmentConfig) -> Environment:
    """The environment, built. Raises whatever its module or its class raises, and `EnvError` when it is none."""
    target = getattr(importlib.import_module(module_of(config.type)), config.type.rpartition(".")[2])
    environment = target(**config.args)
    missing = missing_methods(environment)
    if missing:
        raise EnvError(
            f"environment {config.type}: expected an object with the methods {', '.join(METHODS)}, "
            f"got {type(environment).__name__} without {', '.join(missing)} - see sluice.environments.Environment"
        )
    return environment  # type: ignore[no-any-return]  # its methods are there, and its answers are checked


def missing_methods(target: object) -> list[str]:
    """Which of an environment's methods it lacks."""
    return [name for name in METHODS if not callable(getattr(target, name, None))]


def problem_with(config: EnvironmentConfig) -> tuple[str, str] | None:
    """What is wrong with it, as (key, message); None: nothing. Imports its module, builds nothing."""
    module_name, _, name = config.type.rpartition(".")
    if module_name == "__main__" and config.run_in == "process":
        return "type", f"expected a module that worker processes can import, got {config.type!r} - put the class into a file of its own"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is not None and (module_name == err.name or module_name.startswith(f"{err.name}.")):
            return "type", (
                f"expected an import path, there is no module {err.name!r} in this folder or on PYTHONPATH - check the name, or start from "
                "the folder that holds it"
            )
        return "type", f"the module {module_name!r} cannot be imported: {describe(err)}"
    except BaseException as err:
        if isinstance(err, KeyboardInterrupt):
            raise
        return "type", f"the module {module_name!r} cannot be imported: {describe(err)}"
    target: Any = getattr(module, name, None)
    if target is None:
        near = difflib.get_close_matches(name, [other for other in vars(module) if callable(getattr(module, other))], n=1)
        return "type", f"the module {module_name!r} has no {name!r}{f' - did you mean {near[0]}?' if near else ' - check the name'}"
    if not callable(target):
        return "type", f"expected a class, {config.type!r} is {type(target).__name__} - name the class of the environment"
    if inspect.isclass(target) and (missing := missing_methods(target)):
        return "type", f"expected a class with the methods {', '.join(METHODS)}, {config.type!r} lacks {', '.join(missing)} - add them"
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None  # some things written in C do not tell
    try:
        signature.bind(**config.args)
    except TypeError as err:
        return "args", f"expected the arguments of {config.type}{signature}, {err}"
    return None
