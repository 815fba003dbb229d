"""Named scores beside a reward: which of them a filter reads, and which are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from sluice.errors import FilterError
from sluice.filters.base import Filter


def named_metrics(given: Filter[Any]) -> tuple[str, ...]:
    """The metrics that a filter and its parts read by name, each once; none: it reads the reward."""
    own = () if given.context.metric is None else (given.context.metric,)
    return tuple(dict.fromkeys([*own, *[name for part in given.parts for name in named_metrics(part)]]))


def scores_of(entries: Mapping[Any, Any], named: Sequence[str]) -> dict[str, Any]:
    """Of all that a framework notes beside a reward the numbers, and whatever stands under a name that a filter reads: it is told there
    when that is none."""
    return {str(name): value for name, value in entries.items() if str(name) in named or _is_number(value)}


def require_named(named: Sequence[str], noted: Iterable[Mapping[Any, Any]], *, where: str, advice: str) -> None:
    """Raise `FilterError` for a name that is not among the notes of any member: one of a few that lacks it is data, all are a mistake."""
    fields: dict[str, None] = {}
    for entries in noted:
        fields.update(dict.fromkeys(map(str, entries)))
    for name in named:
        if fields and name not in fields:
            raise FilterError(f"{where} is {name!r}, but its reward has only {sorted(fields)} - {advice}")


def _is_number(value: Any) -> bool:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy scalars, 0-dim arrays and tensors
        value = value.item()
    return isinstance(value, Real)
