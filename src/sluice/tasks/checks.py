"""What can be refused before a tokenizer or a row is there: paths, splits, data set names and parameters, and keys that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.checks import contradictions, is_written, without_effect
from sluice.config.models import RlvrConfig, TaskSourceConfig
from sluice.config.problems import KeyPath, Places, Problem, error, suggestion, told
from sluice.tasks.sources import Part, build_source, name_of
from sluice.tasks.templates import reads_question


def check_task_settings(config: RlvrConfig) -> None:
    """Raise `ConfigError` with everything that is wrong with `tasks`, `dataset_filter` and `tag_included`, each with its key."""
    problems = task_problems(config)
    if problems:
        raise error(problems, Places(source="config"))


def task_problems(config: RlvrConfig) -> list[Problem]:
    """All that is wrong with the settings of the data: the rules across keys that concern them, then what only the sources can tell.

    Reads no data. A reasoning-gym source imports that package (about 2 s), which checks its parameters.
    """
    findings = [*contradictions(config), *(idle for idle in without_effect(config) if is_written(config, idle.path))]
    problems = [Problem(path=finding.path, message=finding.message) for finding in findings if _concerns_data(finding.path)]
    faulty = {problem.path[:3] for problem in problems}
    try:
        uses_prompt = reads_question(config.tasks.prompt_template)
    except ValueError:
        uses_prompt = True  # no template at all: among the problems already
    parts: tuple[tuple[Part, list[TaskSourceConfig]], ...] = (("train", config.tasks.train), ("validation", config.tasks.validation))
    for part, sources in parts:
        for index, settings in enumerate(sources):
            path: KeyPath = ("tasks", part, index)
            problems += _key_problems(path, settings, uses_prompt=uses_prompt)
            if path not in faulty:
                problems += build_source(settings, part, index).problems()
    told_already = {problem.path for problem in problems}
    names = {name_of(settings) for settings in config.tasks.train}
    for index, name in enumerate(config.dataset_filter.source):
        at = ("dataset_filter", "source", index)
        if name not in names and at not in told_already:
            problems.append(
                Problem(path=at, message=f"expected a source of tasks.train, got '{name}'{suggestion(name, names, what='there are')}")
            )
    return problems


def is_changed(settings: TaskSourceConfig, key: str) -> bool:
    """Whether a key has another value than its default, which a resolved configuration writes out as well."""
    return bool(getattr(settings, key) != type(settings).model_fields[key].default)


def _key_problems(path: KeyPath, settings: TaskSourceConfig, *, uses_prompt: bool) -> Iterator[Problem]:
    name = settings.source_name
    if name is not None and (not name.strip() or "/" in name):
        message = f"expected a name without '/', since task ids read source/row, got {told(name)}"
        yield Problem(path=(*path, "source_name"), message=message)
    if is_changed(settings, "prompt_field") and settings.type != "reasoning_gym" and not uses_prompt:
        message = "has no effect because tasks.prompt_template does not use {question} - delete it, or use {question} there"
        yield Problem(path=(*path, "prompt_field"), message=message)


def _concerns_data(path: KeyPath) -> bool:
    return path[0] in ("tasks", "dataset_filter") or path[-1] == "tag_included"
