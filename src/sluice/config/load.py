"""From a YAML file and overrides to a configuration that can run, or one error that names everything wrong with it.

Order: read the file, put the overrides over it, choose the models by `pipeline`, resolve paths, validate, then the rules across keys.
Relative paths of models, data and the game files of an environment start at the folder of the file that names them (an override's
at the current folder); `records.root` and what the `args` of an environment of the user's own hold start at the current folder, where its
module is found too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sluice.config.checks import Finding, contradictions, is_written, without_effect
from sluice.config.explain import explain, refused_keys
from sluice.config.overrides import apply_overrides
from sluice.config.pipelines import PIPELINES, AnyConfig, choose
from sluice.config.problems import KeyPath, Places, Problem, error
from sluice.config.reading import CoreDumper, parse_document, read_text

ENVIRONMENT_FILES: Mapping[str, str] = {"textworld": "files"}
"""Environment by name -> the argument of it that lists paths of files."""

_STAND_INS: Mapping[str, Any] = {
    "exp_name": "x",
    "path": "x",
    "rollout_batch_size": 2,
    "num_return_sequences_in_group": 2,
    "prompt_length": 1,
    "response_length": 1,
    "sequence_length": 2,
    "type": "x",
    "max_steps": 1,
    "learning_rate": 1.0,
}
"""For required keys that were refused or are missing, while the rules across the other keys are asked."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> AnyConfig:
    """The configuration in a YAML file, changed by overrides such as `rewards.math.query_filter_config.type=std_filter`.

    Raises `ConfigError` with every problem: its file and line, its key, what was expected, what came, and the nearest valid name.
    """
    file = Path(path)
    data, places, problems = parse_document(read_text(file), str(path))
    return _validate(data, places, problems, overrides, file.resolve().parent)


def parse_config(data: Mapping[str, Any], overrides: Sequence[str] = (), *, folder: str | os.PathLike[str] = ".") -> AnyConfig:
    """The same for a mapping made in Python; relative paths start at `folder`."""
    return _validate(copy.deepcopy(dict(data)), Places(source="config"), [], overrides, Path(folder).resolve())


def check_config(config: AnyConfig) -> None:
    """Raise `ConfigError` when the settings of a configuration built in Python exclude each other or do nothing."""
    problems = _across_keys(config)
    if problems:
        raise error(problems, Places(source="config"))


def to_yaml(config: AnyConfig) -> str:
    """The resolved configuration: every setting that has an effect, defaults included. It loads again to an equal one."""
    data = config.model_dump()
    for finding in without_effect(config):
        if not is_written(config, finding.path):
            _delete(data, finding.path)
    return yaml.dump(data, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def _validate(data: dict[str, Any], places: Places, problems: list[Problem], overrides: Sequence[str], folder: Path) -> AnyConfig:
    problems = [*problems, *apply_overrides(data, places, overrides)]
    pipeline, wrong = choose(data)
    if wrong:
        problems += wrong
        data["pipeline"] = pipeline  # so that the other keys are looked at as well
    model = PIPELINES[pipeline]
    _resolve_paths(data, places, folder)
    try:
        config = model.model_validate(data)
    except ValidationError as refused:
        others = {name: other for name, other in PIPELINES.items() if name != pipeline}
        problems += explain(model, refused, data, others)
        problems += _across_the_sound_keys(model, data, refused)
        raise error(problems, places) from None
    problems += _across_keys(config)
    if problems:
        raise error(problems, places)
    return config


def _across_keys(config: AnyConfig) -> list[Problem]:
    return [Problem(path=finding.path, message=finding.message) for finding in _findings(config)]


def _findings(config: AnyConfig) -> list[Finding]:
    return [*contradictions(config), *(idle for idle in without_effect(config) if is_written(config, idle.path))]


def _across_the_sound_keys(model: type[AnyConfig], data: dict[str, Any], refused: ValidationError) -> list[Problem]:
    """The rules across keys that do not touch a refused key, so that one run tells everything. Nothing when a whole section is missing."""
    sound = copy.deepcopy(data)
    bad: list[KeyPath] = []
    for path in refused_keys(model, refused):
        owner = _delete(sound, path)
        if isinstance(owner, dict) and path[-1] in _STAND_INS:
            owner[path[-1]] = _STAND_INS[str(path[-1])]
        bad.append(path)
    try:
        config = model.model_validate(sound)
    except ValidationError:
        return []
    return [Problem(path=f.path, message=f.message) for f in _findings(config) if not any(_touch(f, path) for path in bad)]


def _touch(finding: Finding, path: KeyPath) -> bool:
    return any(own[: len(path)] == path or path[: len(own)] == own for own in (finding.path, *finding.reads))


def _resolve_paths(data: dict[str, Any], places: Places, folder: Path) -> None:
    for path in _path_keys(data):
        owner: Any = data
        for part in path[:-1]:
            owner = owner[part]
        start = Path.cwd() if places.find(path).is_override else folder
        owner[path[-1]] = os.path.normpath(start / Path(owner[path[-1]]).expanduser())


def _path_keys(data: Mapping[str, Any]) -> Iterable[KeyPath]:
    """Where paths stand in data that nobody has validated yet."""
    model = data.get("model")
    if isinstance(model, dict) and _is_path(model.get("path")):
        yield ("model", "path")
    tasks = data.get("tasks")
    for side in ("train", "validation"):
        sources = tasks.get(side) if isinstance(tasks, dict) else None
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            if isinstance(source, dict) and _is_path(source.get("path")):
                yield ("tasks", side, index, "path")
    gate = data.get("gate")
    futility = gate.get("futility") if isinstance(gate, dict) else None
    for at, section in ((("gate",), gate), (("gate", "futility"), futility)):
        if isinstance(section, dict) and _is_path(section.get("model")):
            yield (*at, "model")
    for key in ("environment", "val_environment"):
        environment = data.get(key)
        if isinstance(environment, dict):
            argument = ENVIRONMENT_FILES.get(str(environment.get("type")))
            if argument is None:
                continue
            args = environment.get("args")
            files = args.get(argument) if isinstance(args, dict) else None
            for index, file in enumerate(files if isinstance(files, list) else []):
                if _is_path(file):
                    yield (key, "args", argument, index)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, Path)) and bool(str(value)) and "\0" not in str(value)


def _delete(data: Any, path: KeyPath) -> Any:
    """Delete a key and answer with the section it stood in, or would have. None when there is no such section."""
    owner = data
    for part in path[:-1]:
        try:
            owner = owner[part]
        except (KeyError, IndexError, TypeError):
            return None
    if isinstance(owner, dict):
        owner.pop(path[-1], None)
    return owner
