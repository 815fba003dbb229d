"""The table of environments, and how one is checked and built from its configuration."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from sluice.config.problems import KeyPath, Problem, dotted, suggestion, told
from sluice.environments import custom
from sluice.environments.base import Environment
from sluice.environments.frozen_lake import FrozenLakeSettings
from sluice.environments.gymnasium_adapter import GymnasiumSettings
from sluice.environments.household.environment import HouseholdSettings
from sluice.environments.settings import EnvironmentConfig, EnvironmentSettings
from sluice.environments.textworld_game import TextWorldSettings
from sluice.errors import ConfigError, EnvError, describe

ENVIRONMENTS: Final[Mapping[str, type[EnvironmentSettings]]] = {
    "household": HouseholdSettings,
    "frozen_lake": FrozenLakeSettings,
    "gymnasium": GymnasiumSettings,
    "textworld": TextWorldSettings,
}
"""`type` in the configuration -> settings, which build the environment. A new environment is one file and one line here."""


def read_config(config: EnvironmentConfig | Mapping[str, Any]) -> EnvironmentConfig:
    """The configuration; a mapping is read as one. Raises `ConfigError`."""
    if isinstance(config, EnvironmentConfig):
        return config
    try:
        return EnvironmentConfig(**config)
    except (ValidationError, TypeError) as err:
        raise ConfigError(f"environment: {err}") from err


def build_environment(config: EnvironmentConfig | Mapping[str, Any]) -> Environment:
    """Build an environment in this process.

    Raises:
        ConfigError: a setting is wrong.
        EnvError: it cannot be built.
    """
    config = read_config(config)
    check_environment(config)
    settings = ENVIRONMENTS.get(config.type)
    try:
        return custom.load(config) if settings is None else settings(**config.args).build()
    except (EnvError, KeyboardInterrupt):
        raise
    except BaseException as err:
        raise EnvError(f"environment {config.type} cannot be built: {describe(err)}") from err


def check_environment(config: EnvironmentConfig, where: str = "environment") -> None:
    """Raise `ConfigError` when the environment cannot be built; `where` is its key in the configuration."""
    problems = environment_problems(config, ())
    if problems:
        lines = [f"{'.'.join(part for part in (where, dotted(problem.path)) if part)}: {problem.message}" for problem in problems]
        raise ConfigError("\n".join(lines))


def environment_problems(config: EnvironmentConfig, path: KeyPath) -> list[Problem]:
    """All that is wrong with an environment's settings; `path` is where they stand. Builds nothing, but imports the module of a path."""
    settings = ENVIRONMENTS.get(config.type)
    if settings is not None:
        return _builtin_problems(settings, config, path)
    if "." not in config.type or not all(part.isidentifier() for part in config.type.split(".")):
        near = suggestion(config.type, ENVIRONMENTS, what="valid")
        message = f"expected the name of an environment or an import path 'package.module.Class', got {told(config.type)}{near}"
        return [Problem(path=(*path, "type"), message=message)]
    problem = custom.problem_with(config)
    return [Problem(path=(*path, problem[0]), message=problem[1])] if problem else []


def step_limit(config: EnvironmentConfig) -> int | None:
    """Environment steps after which its episodes end, where that is known: by `max_steps`, or by the settings of a kind with a name."""
    settings = ENVIRONMENTS.get(config.type)
    own = None if settings is None else settings(**config.args).step_limit()
    return min([limit for limit in (own, config.max_steps) if limit is not None], default=None)


def preload(config: EnvironmentConfig) -> None:
    """Import, in the process from which workers are forked, what the environment needs; nothing is built there."""
    settings = ENVIRONMENTS.get(config.type)
    if settings is None:
        importlib.import_module(custom.module_of(config.type))
    else:
        settings(**config.args).preload()


def _builtin_problems(settings: type[EnvironmentSettings], config: EnvironmentConfig, path: KeyPath) -> list[Problem]:
    at = (*path, "args")
    try:
        built = settings(**config.args)
    except ValidationError as err:
        problems = []
        for error in err.errors():
            where = (*at, *error["loc"])
            if error["type"] == "extra_forbidden":
                near = suggestion(str(error["loc"][0]), settings.model_fields, what="valid")
                message = f"the environment '{config.type}' has no such argument{near}"
            elif error["type"] == "missing":
                message = f"the environment '{config.type}' needs this argument, it is not given"
            else:
                message = f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {told(error['input'])}"
            problems.append(Problem(path=where, message=message))
        return problems
    problem = built.check()
    if problem:
        return [Problem(path=(*at, *problem[0]), message=problem[1])]
    missing = [name for name in built.needed() if importlib.util.find_spec(name) is None]
    if missing:
        message = f"the environment '{config.type}' needs the package {missing[0]} - install sluice-rl[agentic]"
        return [Problem(path=(*path, "type"), message=message)]
    return []
