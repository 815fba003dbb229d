"""One rule that a configuration breaks, and what rules share to say so."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sluice.config.models import Section
from sluice.config.problems import KeyPath, dotted


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that a configuration breaks."""

    path: KeyPath  # the key to change
    reads: tuple[KeyPath, ...] = ()  # the keys it was weighed against
    message: str


class Reason(NamedTuple):
    """Why a key does nothing."""

    cause: KeyPath  # the key that makes it idle
    state: str  # what that key is
    remedy: str  # what would give the idle key its effect


def idle(path: KeyPath, reason: Reason) -> Finding:
    """A key that does nothing because of another one."""
    message = f"has no effect because {dotted(reason.cause)} is {reason.state} - delete it, or {reason.remedy}"
    return Finding(path=path, reads=(reason.cause,), message=message)


def is_written(config: Section, path: KeyPath) -> bool:
    """Whether the user gave this key a value (null is none)."""
    current: Any = config
    for part in path[:-1]:
        current = getattr(current, str(part)) if isinstance(current, Section) else current[part]
    name = str(path[-1])
    return name in current.model_fields_set and getattr(current, name) is not None


def template_fields(template: str) -> list[str]:
    """The fields of a str.format template as written, also those inside format specifications. Raises `ValueError` when it is none."""
    found = []
    for _, field, specification, _ in string.Formatter().parse(template):
        if field is not None:
            found += [field, *template_fields(specification or "")]
    return found


def no_template(err: ValueError) -> str:
    """What is wrong with a text that is no template."""
    return f"expected a template for str.format: {err} - write {{{{ and }}}} for braces that stand for themselves"


def types_in(value: Any) -> set[str]:
    """Every `type` inside a filter's configuration: its own and those of the filters it is composed of."""
    if isinstance(value, Mapping):
        own = {value["type"]} if isinstance(value.get("type"), str) else set()
        return own.union(*map(types_in, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(types_in, value))
    return set()
