"""The table of verifiers, and how one is checked and built from its configuration."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sluice.config.models import RewardConfig, VerifierConfig
from sluice.config.problems import KeyPath, Problem, dotted, suggestion, told
from sluice.errors import ConfigError
from sluice.rewards import custom
from sluice.rewards.base import BuiltinVerifier, Verifier
from sluice.rewards.exact import Exact
from sluice.rewards.math_verify import MathVerify
from sluice.rewards.numeric import Numeric
from sluice.rewards.reasoning_gym import ReasoningGym
from sluice.rewards.regex import Regex

VERIFIERS: Final[Mapping[str, type[BuiltinVerifier]]] = {
    "exact": Exact,
    "numeric": Numeric,
    "math_verify": MathVerify,
    "reasoning_gym": ReasoningGym,
    "regex": Regex,
}
"""`type` in the configuration -> class. A new verifier is one file and one line here."""


def build_verifier(config: VerifierConfig) -> Verifier:
    """Build a verifier. Raises `ConfigError` for a wrong setting, and whatever a class of the user raises when it is built."""
    builtin = VERIFIERS.get(config.type)
    if builtin is None:
        check_verifier(config, "verifier")
        return custom.load(config)
    problems = _builtin_problems(builtin, config, ())
    if problems:
        raise ConfigError(_told_at("verifier", problems))
    return builtin(**config.args)


def check_verifier(config: VerifierConfig, where: str) -> None:
    """Raise `ConfigError` when the verifier cannot be built; `where` is its key, e.g. "rewards.math.verifier".

    Imports the module of an import path, and of the built-in verifiers' packages only what the arguments make necessary.
    """
    problems = verifier_problems(config, ())
    if problems:
        raise ConfigError(_told_at(where, problems))


def verifier_problems(config: VerifierConfig, path: KeyPath) -> list[Problem]:
    """All that is wrong with a verifier's settings; `path` is where they stand."""
    builtin = VERIFIERS.get(config.type)
    if builtin is not None:
        return _builtin_problems(builtin, config, path)
    if "." not in config.type or not all(part.isidentifier() for part in config.type.split(".")):
        near = suggestion(config.type, VERIFIERS, what="valid")
        message = f"expected the name of a verifier or an import path 'package.module.name', got {told(config.type)}{near}"
        return [Problem(path=(*path, "type"), message=message)]
    problem = custom.problem_with(config)
    return [Problem(path=(*path, problem[0]), message=problem[1])] if problem else []


def reward_problems(config: RewardConfig, path: KeyPath) -> list[Problem]:
    """All that is wrong with what one domain, at `rewards.<domain>`, says about its verifier."""
    problems = verifier_problems(config.verifier, (*path, "verifier"))
    if config.reward_key is not None and config.verifier.type in VERIFIERS:
        message = f"has no effect: the verifier '{config.verifier.type}' answers with one number - delete it"
        problems.append(Problem(path=(*path, "reward_key"), message=message))
    return problems


def check_rewards(rewards: Mapping[str, RewardConfig]) -> None:
    """Raise `ConfigError` with everything that is wrong with the verifiers of a run."""
    problems = [problem for domain, config in rewards.items() for problem in reward_problems(config, ("rewards", domain))]
    if problems:
        raise ConfigError(_told_at("", problems))


def preload(config: VerifierConfig) -> None:
    """Import, in the process from which workers are forked, what the verifier needs; nothing of the user's is built there."""
    builtin = VERIFIERS.get(config.type)
    if builtin is None:
        importlib.import_module(custom.module_of(config.type))
    else:
        builtin(**config.args).preload()


def _builtin_problems(builtin: type[BuiltinVerifier], config: VerifierConfig, path: KeyPath) -> list[Problem]:
    at = (*path, "args")
    try:
        verifier = builtin(**config.args)
    except ValidationError as err:
        return [_args_problem(builtin, config.type, at, error) for error in err.errors()]
    if builtin.package is not None and importlib.util.find_spec(builtin.package) is None:
        message = f"the verifier '{config.type}' needs the package {builtin.package.replace('_', '-')} - install sluice-rl[train]"
        return [Problem(path=(*path, "type"), message=message)]
    problem = verifier.check()
    return [Problem(path=(*at, *problem[0]), message=problem[1])] if problem else []


def _args_problem(builtin: type[BuiltinVerifier], name: str, at: KeyPath, error: ErrorDetails) -> Problem:
    where = (*at, *error["loc"])
    if error["type"] == "extra_forbidden":
        near = suggestion(str(error["loc"][0]), builtin.model_fields, what="valid")
        return Problem(path=where, message=f"the verifier '{name}' has no such argument{near}")
    if error["type"] == "missing":
        return Problem(path=where, message=f"the verifier '{name}' needs this argument, it is not given")
    return Problem(path=where, message=f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {told(error['input'])}")


def _told_at(where: str, problems: list[Problem]) -> str:
    lines = []
    for problem in problems:
        key = ".".join(part for part in (where, dotted(problem.path)) if part)
        lines.append(f"{key}: {problem.message}")
    return "\n".join(lines)
