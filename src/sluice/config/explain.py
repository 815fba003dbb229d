"""Says in the words of the configuration what a model refused: the schema's own description of a key, and the nearest valid name.

A key may take values of several kinds (a number, or a mapping of numbers). Of such a key pydantic tells one fault for each kind; here it is
one problem, which names all kinds, or, for an entry of a mapping, the problem of that entry alone.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sluice.config.problems import KeyPath, Problem, dotted, suggestion, told

_Declared: TypeAlias = tuple[Any, Sequence[Any], str | None]
"""How a key is declared: its type, its constraints, its description."""

_NOT_EMPTY = ", at least one"

_NO_OTHERS: Mapping[str, type[BaseModel]] = types.MappingProxyType({})

_BENDING = frozenset(("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"))
"""Settings of other samplers that are not offered: by them other probabilities would be sampled from than the trainer computes."""

_TRUTH_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # booleans in YAML 1.1


def explain(
    model: type[BaseModel], refused: ValidationError, data: Mapping[str, Any], pipelines: Mapping[str, type[BaseModel]] = _NO_OTHERS
) -> list[Problem]:
    """Every fault that pydantic found in these data, as a problem a user can act on.

    `pipelines`: other kinds of runs, by name, to which an unknown key may belong.
    """
    faults = [(fault, *_locate(model, fault)) for fault in refused.errors(include_url=False)]
    return [
        _problem(model, fault, path, data, pipelines)
        for fault, path, is_of_one_kind in faults
        if not (is_of_one_kind and any(len(other) > len(path) and other[: len(path)] == path for _, other, _ in faults))
    ]


def refused_keys(model: type[BaseModel], refused: ValidationError) -> list[KeyPath]:
    """The keys that pydantic refused."""
    return [_locate(model, fault)[0] for fault in refused.errors(include_url=False)]


def describe(annotation: Any, constraints: Sequence[Any] = (), description: str | None = None) -> str:
    """What a key takes: "a whole number >= 1", "one of raise, shrink", "a section", "... or null"."""
    kinds, optional = _kinds(annotation)
    text = ", or ".join(_describe_kind(kind, [*constraints, *own]) for kind, own in kinds)
    if description:
        text += f" of {description}"
    return f"{text}{',' if len(kinds) > 1 or text.endswith(_NOT_EMPTY) else ''} or null" if optional else text


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
    at_least = _NOT_EMPTY if _least(constraints) else ""
    if origin is list:
        return f"a list{at_least}"
    if origin is dict:
        names = ", ".join(_literals(get_args(kind)[0]))
        return f"a mapping{' with the keys ' if names else ''}{names}{at_least}"
    return "a value"


def _locate(model: type[BaseModel], fault: ErrorDetails) -> tuple[KeyPath, bool]:
    """The key that a fault is about, and whether it only says that the value is not of one of several kinds.

    Pydantic's location has, besides, a mark behind a key that is itself wrong, and the name of the kind where there are several.
    """
    path: KeyPath = ()
    at: _Declared | None = (model, (), None)
    in_a_kind = False
    for part in fault["loc"][:-1] if fault["loc"][-1:] == ("[key]",) else fault["loc"]:
        if at is not None and not in_a_kind and len(_kinds(at[0])[0]) > 1:
            in_a_kind = True
            continue
        path = (*path, part)
        at = None if at is None else _below(at[0], part)
        in_a_kind = False
    return path, in_a_kind


def _problem(
    model: type[BaseModel], fault: ErrorDetails, path: KeyPath, data: Mapping[str, Any], pipelines: Mapping[str, type[BaseModel]]
) -> Problem:
    came = fault["input"]
    if fault["type"] == "extra_forbidden" and path[-1] in _BENDING:
        return Problem(
            path=path,
            message="unknown key - tokens are sampled from the whole vocabulary: log-probs of a distribution that is cut or bent are not "
            "those that the trainer computes; delete it",
        )
    if fault["type"] == "extra_forbidden":
        owner = next((name for name, other in pipelines.items() if _field_at(other, path) is not None), None)
        return Problem(path=path, message=f"unknown key{_instead(model, path)}" if owner is None else _foreign(model, path, owner))
    if fault["type"] == "invalid_key" or fault["loc"][-1:] == ("[key]",):
        names = _names_within(model, path[:-1])
        if isinstance(came, str):
            return Problem(path=path, message=f"unknown key{suggestion(came, names, what='valid keys')}")
        return Problem(path=path[:-1], message=f"expected keys that are text, got {told(came)} - put it in quotes")
    if fault["type"] == "value_error":
        return Problem(path=path, message=str(fault["ctx"]["error"]))
    field = _field_at(model, path)
    expected = describe(*field) if field else "another value"
    if fault["type"] == "missing":
        return Problem(path=path, message=f"expected {expected}, the key is missing{_misspelt_domain(path, data)}")
    return Problem(path=path, message=f"expected {expected}, got {told(came)}{_hint(field, came)}")


def _hint(field: _Declared | None, came: Any) -> str:
    return next(filter(None, (_hint_for(kind, came) for kind, _ in (_kinds(field[0])[0] if field else ()))), "")


def _hint_for(kind: Any, came: Any) -> str:
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
            number = float(came.replace("_", ""))
        except ValueError:
            return ""
        if not math.isfinite(number):
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


def _foreign(model: type[BaseModel], path: KeyPath, owner: str) -> str:
    """A key of another kind of run: to which it belongs, and the same name here, if there is one."""
    (own,) = get_args(model.model_fields["pipeline"].annotation)
    elsewhere = [dotted(found) for found in _everywhere(model) if found[-1] == path[-1]]
    advice = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else f"delete it, or set pipeline to {owner}"
    return f"belongs to pipeline {owner}, this recipe is of pipeline {own} - {advice}"


def _instead(model: type[BaseModel], path: KeyPath) -> str:
    """The nearest valid name: among the siblings, else the same name in another section."""
    name = str(path[-1])
    near = suggestion(name, _names_within(model, path[:-1]), what="valid keys")
    if " - did you mean" not in near:
        elsewhere = [dotted(found) for found in _everywhere(model) if found[-1] == name]
        if elsewhere:
            return f" here - did you mean {' or '.join(elsewhere)}?"
    return near


def _names_within(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys that the section or mapping at a path may have; empty where any will do."""
    owner = _field_at(model, path)
    names: list[str] = []
    for kind, _ in _kinds(owner[0])[0] if owner else ():
        if _is_model(kind):
            names += kind.model_fields
        elif get_origin(kind) is dict:
            names += _literals(get_args(kind)[0])
    return names


def _field_at(model: type[BaseModel], path: KeyPath) -> _Declared | None:
    """How the key at a path is declared; None where the schema ends."""
    current: _Declared | None = (model, (), None)
    for part in path:
        current = None if current is None else _below(current[0], part)
    return current


def _below(annotation: Any, part: str | int) -> _Declared | None:
    """How one key, or one entry, of a value of this type is declared; None where the schema ends."""
    for kind, _ in _kinds(annotation)[0]:
        if _is_model(kind):
            field: FieldInfo | None = kind.model_fields.get(str(part))
            return None if field is None else (field.annotation, field.metadata, field.description)
        if get_origin(kind) in (list, dict):
            return (get_args(kind)[-1], (), None)
    return None


def _everywhere(model: type[BaseModel], above: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all keys of the schema; <domain> and <n> stand for names and positions."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for kind, _ in _kinds(field.annotation)[0]:
            step: KeyPath = {list: ("<n>",), dict: ("<domain>",)}.get(get_origin(kind), ())
            for inner, _ in _kinds(get_args(kind)[-1])[0] if step else [(kind, ())]:
                if _is_model(inner):
                    yield from _everywhere(inner, (*above, name, *step))


def _kinds(annotation: Any) -> tuple[list[tuple[Any, list[Any]]], bool]:
    """The kinds of value that a type allows, each with its own constraints, and whether None is allowed.

    Looks through `Annotated`, `| None` and other unions.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *found = get_args(annotation)
        constraints = [one for mark in found for one in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        kinds, optional = _kinds(inner)
        return [(kind, [*own, *constraints]) for kind, own in kinds], optional
    if origin in (Union, types.UnionType):
        members = [_kinds(member) for member in get_args(annotation) if member is not type(None)]
        optional = type(None) in get_args(annotation) or any(optional for _, optional in members)
        return [kind for kinds, _ in members for kind in kinds], optional
    return [(annotation, [])], False


def _literals(kind: Any) -> list[str]:
    return list(map(str, get_args(kind))) if get_origin(kind) is Literal else []


def _bounds(constraints: Sequence[Any]) -> list[str]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return [f"{sign} {getattr(c, name)}" for c in constraints for name, sign in signs.items() if getattr(c, name, None) is not None]


def _least(constraints: Sequence[Any]) -> int:
    return max((getattr(c, "min_length", None) or 0 for c in constraints), default=0)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
