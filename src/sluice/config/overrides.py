"""Settings from the command line: `rewards.math.query_filter_config.type=std_filter`, put over what the file says.

The left side is the way to the key (a number picks an entry of a list), the right side is read as YAML. Of several for one key the last
one holds, so that a script may add its own behind those it was given. Whether the key exists is for the models to say: an override may set
any optional key, and name a new reward domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.config.problems import KeyPath, Place, Places, Problem, dotted, told
from sluice.config.reading import parse_value
from sluice.errors import ConfigError


def apply_overrides(data: dict[str, Any], places: Places, overrides: Sequence[str]) -> list[Problem]:
    """Change `data` and `places` in place, in the order given; answers with what could not be applied."""
    problems: list[Problem] = []
    for order, text in enumerate(overrides, start=1):
        place = Place(text=f"override '{text}'", order=order, is_override=True)
        name, equals, right = text.partition("=")
        keys = [part.strip() for part in name.strip().split(".")]
        try:
            if not equals or not all(keys):
                raise ConfigError("expected key.path=value, for instance trainer.max_steps=10")
            path = _locate(data, keys)
            made = _put(data, path, parse_value(right))
        except ConfigError as err:
            problems.append(Problem(path=(), message=str(err), place=place))
            continue
        places.put(made, place)
    return problems


def _locate(data: dict[str, Any], keys: Sequence[str]) -> KeyPath:
    """The path that the keys mean in these data: numbers where they meet a list."""
    path: KeyPath = ()
    current: Any = data
    for key in keys:
        if isinstance(current, list):
            if not key.isdecimal() or int(key) >= len(current):
                entries = f"entries 0 to {len(current) - 1}" if current else "no entries"
                raise ConfigError(
                    f"{dotted(path)} is a list with {entries}, got {key} - to add entries, give the whole list: {dotted(path)}=[...]"
                )
            path = (*path, int(key))
            current = current[int(key)]
        elif isinstance(current, dict) or current is None:
            path = (*path, key)
            current = None if current is None else current.get(key)
        else:
            raise ConfigError(f"{dotted(path)} is {told(current)}, expected a section to find {key} in")
    return path


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> KeyPath:
    """Set the value, making the sections that lead to it; answers with the topmost path that is new."""
    new = path
    current: Any = data
    for length, part in enumerate(path[:-1], start=1):
        if isinstance(current, dict) and current.get(part) is None:
            current[part] = {}
            new = min(new, path[:length], key=len)
        current = current[part]
    current[path[-1]] = value
    return new
