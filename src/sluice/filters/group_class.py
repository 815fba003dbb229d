"""The class of `group_filter_cls`: how it is built, and that it can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from sluice.config.agentic import EnvManagerConfig
from sluice.errors import ConfigError
from sluice.filters.base import Stateful
from sluice.filters.context import Mode
from sluice.filters.custom import build, check_call, contract_of, find, judge_of, memory_of, signature_of

ARGUMENTS: Final = ("config", "env_manager_config", "mode")
"""What a class is built with that takes all three, by these names or by position."""


def load_class(
    path: str,
    manager: EnvManagerConfig,
    config: object,
    mode: Mode,
    key: str,
    adapt: Callable[[object], object] | None,
) -> tuple[Callable[[Any], object], Stateful | None]:
    """Find and build the user's class: the function that judges, and the object whose state is kept. Raises `ConfigError`.

    It is built with (config, env_manager_config, mode) if it takes these, else with mode alone if it takes that, else with nothing. `key`
    is the path of the setting. For `adapt` see `build_group_filter`.
    """
    cls = find(path, key, "an import path package.module.Class")
    if not inspect.isclass(cls):
        raise ConfigError(f"{key} must name a class, got {path} = {cls!r} - name a function as a type in group_filter_config")
    contract = contract_of(cls)
    if contract == "neither":
        raise ConfigError(f"{key} must name a class with .judge(group) (True keeps), got {path} without it - add it")
    if contract == "both":
        raise ConfigError(
            f"{key} must name a class with .judge (True keeps) or with .filter (True drops), got {path} with both, which contradict each "
            "other - take one out"
        )
    if contract == "filter" and adapt is None:
        raise ConfigError(
            f"{key} must name a class with .judge(group) (True keeps), got {path} with .filter(group_id, episode_id, group) (True drops) - "
            "rename the method, take the group alone, and return the opposite"
        )
    instance = build(_constructor(cls, path, (config, manager, mode), key), path, key, "correct the class")
    if contract == "filter":
        assert adapt is not None
        adapted = build(lambda: adapt(instance), path, key, "correct the class")
        return judge_of(adapted, path, key), memory_of(adapted, path, key)
    return judge_of(instance, path, key), memory_of(instance, path, key)


def _constructor(cls: type, path: str, values: tuple[object, object, object], key: str) -> Callable[[], object]:
    """How the class is built, by what its signature takes."""
    signature = signature_of(cls)
    if signature is None:
        return cls
    by_name, by_mode = dict(zip(ARGUMENTS, values, strict=True)), {"mode": values[2]}
    if _takes(signature, (), by_name):
        return lambda: cls(**by_name)
    if _takes(signature, values, {}) and _wants_all_three(signature):
        return lambda: cls(*values)
    if _takes(signature, (), by_mode):
        return lambda: cls(**by_mode)
    how = f"{path} is built with (config, env_manager_config, mode), with mode alone, or with nothing"
    check_call(cls, (), {}, how, key, "change the signature")
    return cls


def _takes(signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _wants_all_three(signature: inspect.Signature) -> bool:
    """Whether three values by position reach what they are meant for, and are no settings of its own that have defaults."""
    parameters = list(signature.parameters.values())
    if any(one.name in ARGUMENTS and ARGUMENTS.index(one.name) != place for place, one in enumerate(parameters)):
        return False
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return takes_any or not (_takes(signature, (), {}) or _takes(signature, (), {"mode": None}))
