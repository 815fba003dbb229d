"""A problem of a configuration: where it stands, what is wrong, what to do. All of them are told at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""The way to one setting: names of keys and positions in lists, from the top."""

LONGEST_QUOTE = 60  # characters of a wrong value that a message repeats; enough to recognise it


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a setting was written."""

    text: str  # "recipe.yaml:12", or "override 'seed=1'"
    order: int = 0  # line or position of the override: problems are told in this order
    is_override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    path: KeyPath  # the setting; empty: the file as a whole
    message: str  # expected, came, what to do
    place: Place | None = None  # None: where the setting was written


@dataclass(slots=True, kw_only=True)
class Places:
    """Where every setting was written; a setting that was not stands where the section around it stands."""

    source: str  # name of the file
    of: dict[KeyPath, Place] = field(default_factory=dict)

    def find(self, path: KeyPath) -> Place:
        """The place of a setting, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            place = self.of.get(path[:length])
            if place is not None:
                return place
        return Place(text=self.source)

    def put(self, path: KeyPath, place: Place) -> None:
        """A setting is written anew, and all that stood below it is gone."""
        for old in [known for known in self.of if known[: len(path)] == path]:
            del self.of[old]
        self.of[path] = place


def dotted(path: KeyPath) -> str:
    """The path as overrides write it: `tasks.train.0.size`."""
    return ".".join(str(part) for part in path)


def suggestion(name: str, valid: Iterable[str], *, what: str) -> str:
    """ " - did you mean ...?", or the list of valid names when none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    if near:
        return f" - did you mean {near[0]}?"
    return f" - {what}: {', '.join(names)}" if names else ""


def told(value: Any) -> str:
    """A value as a message repeats it, in the words of YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{_short(repr(value))} (text)"
    if isinstance(value, (int, float)):
        return f"{value!r} (a number)"
    if isinstance(value, Mapping):
        return f"a mapping {_short('{' + ', '.join(map(str, value)) + '}')}"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"{_short(repr(value))} ({type(value).__name__})"


def error(problems: Sequence[Problem], places: Places) -> ConfigError:
    """All problems as one error, in the order of the file, overrides last."""
    lines: dict[str, tuple[bool, int]] = {}  # told once each
    for problem in problems:
        place = problem.place or places.find(problem.path)
        name = f"{dotted(problem.path)}: " if problem.path else ""
        lines.setdefault(f"{place.text}: {name}{problem.message}", (place.is_override, place.order))
    ordered = sorted(lines, key=lambda line: lines[line])
    if len(ordered) == 1:
        return ConfigError(ordered[0])
    return ConfigError("\n  ".join([f"{places.source}: {len(ordered)} problems", *ordered]))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "..."
