"""Says in the words of the configuration what a model refused: the schema's own description of a key, and the nearest valid name."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sluice.config.problems import KeyPath, Problem, dotted, suggestion, told

_TRUTH_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # booleans in YAML 1.1


def explain(model: type[BaseModel], refused: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """Every fault that pydantic found in these data, as a problem a user can act on."""
    return [_problem(model, fault, data) for fault in refused.errors(include_url=False)]


def describe(annotation: Any, constraints: Sequence[Any] = (), description: str | None = None) -> str:
    """What a key takes: "a whole number >= 1", "one of raise, shrink", "a section", "... or null"."""
    inner, more, optional = _unwrap(annotation)
    bounds = [*constraints, *more]
    text = _describe_kind(inner, bounds)
    if description:
        text += f" of {description}"
    return f"{text} or null" if optional else text


def _describe_kind(kind: Any, constraints: Sequence[Any]) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        values = get_args(kind)
        return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return " and ".join(["a whole number" if kind is int else "a number", *_bounds(constraints)]).replace("number and", "number", 1)
    if kind is str:
        return "text" if not _least(constraints) else "text that is not empty"
    if kind is Path:
        return "a path"
    if _is_model(kind):
        return f"a section with the keys {', '.join(kind.model_fields)}"
    at_least = ", at least one" if _least(constraints) else ""
    if origin is list:
        return f"a list{at_least}"
    if origin is dict:
        return f"a mapping{at_least}"
    return "a value"


def _problem(model: type[BaseModel], fault: ErrorDetails, data: Mapping[str, Any]) -> Problem:
    path = tuple(part for part in fault["loc"] if part != "[key]")
    came = fault["input"]
    if fault["type"] == "extra_forbidden":
        return Problem(path=path, message=f"unknown key{_instead(model, path)}")
    if fault["type"] == "value_error":
        return Problem(path=path, message=str(fault["ctx"]["error"]))
    field = _field_at(model, path)
    expected = describe(*field) if field else "another value"
    if fault["type"] == "missing":
        return Problem(path=path, message=f"expected {expected}, the key is missing{_misspelt_domain(path, data)}")
    return Problem(path=path, message=f"expected {expected}, got {told(came)}{_hint(field, came)}")


def _hint(field: tuple[Any, Sequence[Any], str | None] | None, came: Any) -> str:
    kind = _unwrap(field[0])[0] if field else None
    if get_origin(kind) is Literal and isinstance(came, str):
        valid = [str(value) for value in get_args(kind)]
        return suggestion(came, valid, what="valid values") if len(valid) > 1 else ""
    if kind is bool and isinstance(came, str) and came.lower() in _TRUTH_WORDS:
        return f" - write {_TRUTH_WORDS[came.lower()]}"
    if kind is bool and isinstance(came, str) and came.lower() in ("true", "false"):
        return " - write it without quotes"
    if kind is int and isinstance(came, float) and came.is_integer():
        return f" - write {int(came)}"
    if kind in (int, float) and isinstance(came, str):
        try:
            float(came.replace("_", ""))
        except ValueError:
            return ""
        return f" - write {came.replace('_', '')} without quotes"
    if kind is str and isinstance(came, (int, float)):
        return " - put it in quotes"
    return ""


def _misspelt_domain(path: KeyPath, data: Mapping[str, Any]) -> str:
    """A domain without a verifier was most likely meant to be another one: an override may name a new domain."""
    if len(path) != 3 or path[0] != "rewards" or path[2] != "verifier":
        return ""
    others = [domain for domain in data["rewards"] if domain != path[1]]
    near = difflib.get_close_matches(str(path[1]), others, n=1)
    return f" - or did you mean rewards.{near[0]}?" if near else ""


def _instead(model: type[BaseModel], path: KeyPath) -> str:
    """The nearest valid name: among the siblings, else the same name in another section."""
    name = str(path[-1])
    owner = _field_at(model, path[:-1]) if len(path) > 1 else (model, (), None)
    kind = _unwrap(owner[0])[0] if owner else None
    siblings = list(kind.model_fields) if kind is not None and _is_model(kind) else []
    near = suggestion(name, siblings, what="valid keys")
    if " - did you mean" not in near:
        elsewhere = [dotted(found) for found in _everywhere(model) if found[-1] == name]
        if elsewhere:
            return f" here - did you mean {' or '.join(elsewhere)}?"
    return near


def _field_at(model: type[BaseModel], path: KeyPath) -> tuple[Any, Sequence[Any], str | None] | None:
    """Type, constraints and description of the key at a path; None where the schema ends."""
    current: tuple[Any, Sequence[Any], str | None] = (model, (), None)
    for part in path:
        kind = _unwrap(current[0])[0]
        arguments = get_args(kind)
        if _is_model(kind):
            field: FieldInfo | None = kind.model_fields.get(str(part))
            if field is None:
                return None
            current = (field.annotation, field.metadata, field.description)
        elif get_origin(kind) in (list, dict):
            current = (arguments[-1], (), None)
        else:
            return None
    return current


def _everywhere(model: type[BaseModel], above: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all keys of the schema; <domain> and <n> stand for names and positions."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        kind = _unwrap(field.annotation)[0]
        inner = _unwrap(get_args(kind)[-1])[0] if get_origin(kind) in (list, dict) else kind
        if _is_model(inner):
            step: KeyPath = () if inner is kind else ("<n>",) if get_origin(kind) is list else ("<domain>",)
            yield from _everywhere(inner, (*above, name, *step))


def _unwrap(annotation: Any) -> tuple[Any, list[Any], bool]:
    """The type without `Annotated` and `| None`, the constraints found on the way, and whether None is allowed."""
    constraints: list[Any] = []
    optional = False
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *found = get_args(annotation)
            constraints += found
        elif origin in (Union, types.UnionType):
            optional = True
            (annotation,) = (member for member in get_args(annotation) if member is not type(None))
        else:
            return annotation, constraints, optional


def _bounds(constraints: Sequence[Any]) -> list[str]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return [f"{sign} {getattr(c, name)}" for c in constraints for name, sign in signs.items() if getattr(c, name, None) is not None]


def _least(constraints: Sequence[Any]) -> int:
    return max((getattr(c, "min_length", None) or 0 for c in constraints), default=0)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
