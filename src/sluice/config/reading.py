"""Reads a YAML file into plain data and remembers the line of every key.

Scalars follow YAML 1.2's core schema, not PyYAML's 1.1: `1e-3` is a number, `on`, `off`, `yes` and `no` are text (never a silent
boolean), `010` is ten, `1:30` and `2024-01-01` are text. A key that stands twice, a tag and a key that is not text are refused. Anchors,
aliases and merge keys (`<<`) work, within bounds: an alias is written out where it stands, and a few lines of aliases to aliases would
otherwise fill the memory. Environment variables are not expanded.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any, Final

import yaml

from sluice.config.problems import KeyPath, Place, Places, Problem, told
from sluice.errors import ConfigError

MOST_NODES: Final = 100_000  # values of one document, aliases written out: a hundred times a large recipe
DEEPEST: Final = 50  # sections inside sections; a recipe has about six

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR, _MERGE, _MAP, _SEQ = (
    _TAG + name for name in ("null", "bool", "int", "float", "str", "merge", "map", "seq")
)

_TOO_DEEP = f"it is nested more than {DEEPEST} levels deep - flatten it"

_CORE_SCHEMA: list[tuple[str, str, str]] = [  # tag, pattern, first characters
    (_NULL, r"~|null|Null|NULL|", "~nN\0"),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+0123456789."),
    (_MERGE, r"<<", "<"),
]


class CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with YAML 1.2's scalars and a bound on nesting, which keeps its recursion off Python's stack limit."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node, with all below it."""
        self._depth += 1
        if self._depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class CoreDumper(yaml.SafeDumper):
    """PyYAML's writer, which quotes exactly what `CoreLoader` would otherwise take for something else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out: a resolved configuration has no anchors."""
        return True


CoreDumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))

for _tag, _pattern, _first in _CORE_SCHEMA:
    for _side in (CoreLoader, CoreDumper):
        _side.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first])


def read_text(path: Path) -> str:
    """The text of a configuration file. Raises `ConfigError` when there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: expected a YAML file, there is none{_neighbours(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a YAML file, this is a folder{_neighbours(path / 'recipe.yaml')}") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: expected UTF-8 text, byte {err.start} is none - save the file as UTF-8") from None
    except OSError as err:
        raise ConfigError(f"{path}: expected a readable YAML file: {err.strerror or err}") from None


def parse_document(text: str, source: str) -> tuple[dict[str, Any], Places, list[Problem]]:
    """One YAML document as plain data, the place of every key, and what is wrong with single keys.

    Raises `ConfigError` when it is no YAML, or no mapping, or beyond `MOST_NODES` or `DEEPEST`.
    """
    node = _compose(text, source)
    builder = _Builder(Places(source=source))
    if node is None:
        raise ConfigError(f"{source}: expected a mapping of settings, the file is empty")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: expected a mapping of settings, got {told(builder.build(node, ()))}")
    data = builder.build(node, ())
    return data, builder.places, builder.problems


def parse_value(text: str) -> Any:
    """The value of an override, as it would be read in a file. Raises `ConfigError` with the reason alone."""
    node = _compose(text, "")
    if node is None:
        return None
    builder = _Builder(Places(source=""))
    value = builder.build(node, ())
    if builder.problems:
        raise ConfigError("; ".join(problem.message for problem in builder.problems))
    return value


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=CoreLoader)
    except yaml.MarkedYAMLError as err:
        line = f":{err.problem_mark.line + 1}" if err.problem_mark and source else ""
        reason = ", ".join(part for part in (err.context, err.problem) if part)
    except yaml.YAMLError as err:
        line, reason = "", " ".join(str(err).split())
    raise ConfigError(f"{source}{line}: expected valid YAML: {reason}".removeprefix(": "))


class _Builder:
    """Turns parsed nodes into plain data. Faults of single keys are gathered, not raised."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.problems: list[Problem] = []
        self._open: set[int] = set()  # nodes that are being built: an alias to one of them would never end
        self._built = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._built += 1
        if self._built > MOST_NODES:
            raise self._beyond(node, f"it holds more than {MOST_NODES:,} values - use fewer aliases, or put data into a file of their own")
        if len(self._open) > DEEPEST:
            raise self._beyond(node, _TOO_DEEP)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._refuse(path, "expected a value, got an alias to the section around it")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return self._sequence(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._check_tag(node, _MAP, path)
        merged: dict[str, Any] = {}
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged = {**self._merge(value_node, path), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _STR:
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self._refuse(path, f"expected keys that are text, got {shown} in line {line} - put it in quotes")
                continue
            key = key_node.value
            below = (*path, key)
            if key in lines:
                self._refuse(below, f"expected each key once, it stands in line {lines[key]} and in line {line} - delete one")
                continue
            lines[key] = line
            self.places.of[below] = Place(text=f"{self.places.source}:{line}", order=line)
            result[key] = self.build(value_node, below)
        return {**merged, **result}

    def _merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                self._refuse(path, "expected << to name a mapping or a list of mappings")
                continue
            built = self.build(part, path)
            result = {**(built or {}), **result}
        return result

    def _sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        self._check_tag(node, _SEQ, path)
        result = []
        for index, item in enumerate(node.value):
            line = item.start_mark.line + 1
            self.places.of[*path, index] = Place(text=f"{self.places.source}:{line}", order=line)
            result.append(self.build(item, (*path, index)))
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text: str = node.value
        try:
            if node.tag == _NULL:
                return None
            if node.tag == _BOOL:
                return {"true": True, "false": False}[text.lower()]
            if node.tag == _INT:
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if node.tag == _FLOAT:
                return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            self._refuse(path, f"expected {node.tag.removeprefix(_TAG)}, as its tag says, got {told(text)}")
            return None
        self._check_tag(node, _STR, path)
        return text

    def _check_tag(self, node: yaml.Node, expected: str, path: KeyPath) -> None:
        if node.tag not in (expected, "!") and not (expected == _STR and node.tag == _MERGE):
            tag = node.tag.replace(_TAG, "!!")
            self._refuse(path, f"expected plain YAML, got the tag {tag} - delete it")

    def _beyond(self, node: yaml.Node, reason: str) -> ConfigError:
        place = f"{self.places.source}:{node.start_mark.line + 1}: " if self.places.source else ""
        return ConfigError(f"{place}expected a document of a size that can be read: {reason}")

    def _refuse(self, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(path=path, message=message))


def _neighbours(path: Path) -> str:
    """The YAML files that stand where one was looked for: most often the name is misspelt."""
    try:
        names = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        return f" - the folder {path.parent} cannot be read"
    return f" - {path.parent} holds {', '.join(names[:5])}" if names else ""
