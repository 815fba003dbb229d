"""The memory of filters, for checkpoints: gathered and given back by the path of their configuration.

Objects of user classes with `state_dict` and `load_state_dict` have one (see `custom.py`), and `drop_flag` with a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sluice.errors import FilterError
from sluice.filters.base import DomainFilters, Filter
from sluice.filters.custom import Custom
from sluice.filters.naming import nearest


def filters_state(filters: Mapping[str, DomainFilters]) -> dict[str, Any]:
    """The state of every filter that has one, by the path of its configuration: copies, since a filter may give its memory itself away."""
    return {where: _copied(_asked(one, "state_dict")) for where, one in _stateful(filters).items()}


def load_filters_state(filters: Mapping[str, DomainFilters], state: Mapping[str, Any]) -> None:
    """Give every filter that has a state its own one back.

    Raises `FilterError` when the state is of other filters than these (then none of them is touched), or when a filter refuses its own.
    """
    stateful = _stateful(filters)
    if not isinstance(state, Mapping):
        raise FilterError(f"filters: expected their state as a mapping, got {type(state).__name__} - give what filters_state answered")
    for where in state:
        if where not in stateful:
            raise FilterError(
                f"{where}: got the state of a filter with a memory, and there is none at this path - {nearest(where, stateful)}"
            )
    for where, one in stateful.items():
        if where not in state:
            raise FilterError(f"{where}: expected the state of {_named(one)}, got none - the state is torn, or of another configuration")
    for where, one in stateful.items():
        _asked(one, "load_state_dict", state[where])


def _stateful(filters: Mapping[str, DomainFilters]) -> dict[str, Filter[Any]]:
    """The filters with a memory, by the path of their configuration, in the order of the configuration."""
    found: dict[str, Filter[Any]] = {}
    for domain in filters.values():
        for one in _every_one_of(domain.query, domain.response):
            if one.memory is not None:
                where = one.context.where
                if where in found:
                    raise FilterError(f"{where}: expected one filter with a memory, got two - build each with its own `where`")
                found[where] = one
    return found


def _every_one_of(*filters: Filter[Any] | None) -> Iterator[Filter[Any]]:
    for one in filters:
        if one is not None:
            yield one
            yield from _every_one_of(*one.parts)


def _copied(value: Any) -> Any:
    """A state that nobody changes any more, its mappings as dictionaries and its sequences as lists."""
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(entry) for entry in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _named(one: Filter[Any]) -> str:
    return one.path if isinstance(one, Custom) else one.name


def _asked(one: Filter[Any], method: str, *arguments: Any) -> Any:
    """Call a method of its memory."""
    try:
        return getattr(one.memory, method)(*arguments)
    except (Exception, SystemExit) as error:
        raise FilterError(
            f"{one.context.where}: {_named(one)}.{method} raised {type(error).__name__}: {error} - correct the filter"
        ) from error
