"""Group filters written for ROLL: built with (config, env_manager_config, mode), `.filter(group_id, episode_id, group)`, True drops.

`GroupFilter` is the one that drops nothing, to be named or derived from. `adapt_group_filter` turns any object of that form into one with
`.judge(group)`, True keeps, as group filters are asked here: its group becomes one DataProto per member, and what it makes remote is
freed when it has answered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from sluice.errors import FilterError
from sluice.filters.custom import signature_of
from sluice.roll.data import DataProto
from sluice.roll.members import members_of
from sluice.roll.remote import holding
from sluice.types import Group

ARGUMENTS: Final = ("group_id", "episode_id", "group")


class GroupFilter:
    """Drops nothing: the default, and a base for others."""

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        """config: of the whole run. env_manager_config: the section that names the filter. mode: "train" or "val"."""
        self.config = config
        self.env_manager_config = env_manager_config
        self.mode = mode

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        """Whether to drop the group: True drops."""
        return False


class AdaptedGroupFilter:
    """An object with `.filter` (True drops) as one with `.judge` (True keeps). It has state methods where the object has them."""

    def __init__(self, theirs: Any, *, sequence_length: int | None = None, pad_token_id: int = 0) -> None:
        """For the settings see `members_of`. Raises `TypeError` when `.filter` does not take a group_id, an episode_id and a group."""
        self._filter = filter_of(theirs)
        self._told = told_of(theirs)
        self._sequence_length = sequence_length
        self._pad_token_id = pad_token_id
        for name in ("state_dict", "load_state_dict"):
            if callable(getattr(theirs, name, None)):
                setattr(self, name, getattr(theirs, name))

    def judge(self, group: Group) -> bool:
        """Whether to keep the group."""
        entry = group.task.entry
        members = members_of(group, sequence_length=self._sequence_length, pad_token_id=self._pad_token_id)
        return not drops(self._filter, self._told, entry.get("env_group", group.group_id), entry.get("episode", 0), members)


def adapt_group_filter(theirs: object, *, sequence_length: int | None = None, pad_token_id: int = 0) -> AdaptedGroupFilter:
    """Make an object with `.filter` one that a run can ask. For the settings see `members_of`.

    Raises `TypeError` when it cannot be called as it will be.
    """
    return AdaptedGroupFilter(theirs, sequence_length=sequence_length, pad_token_id=pad_token_id)


def filter_of(theirs: Any) -> Callable[[int, int, list[DataProto]], object]:
    """The `.filter` of an object, to be called by position. Raises `TypeError` when it cannot be."""
    ask: Callable[[int, int, list[DataProto]], object] = theirs.filter
    if inspect.iscoroutinefunction(ask):
        raise TypeError(f"{told_of(theirs)} must be a plain function, got a coroutine function - filters decide without waiting")
    signature = signature_of(ask)
    if signature is not None:
        try:
            signature.bind(*ARGUMENTS)
        except TypeError as error:
            raise TypeError(f"{told_of(theirs)} is called with ({', '.join(ARGUMENTS)}), which it does not take: {error}") from error
    return ask


def told_of(theirs: Any) -> str:
    """What a message calls it."""
    return f"{type(theirs).__qualname__}.filter"


def drops(ask: Callable[[int, int, list[DataProto]], object], told: str, group_id: int, episode_id: int, members: list[DataProto]) -> bool:
    """What a filter answers; remote data that it made is freed. Raises `FilterError` for an answer that is no truth value."""
    with holding() as held:
        try:
            answer = ask(group_id, episode_id, members)
        finally:
            held.free()
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if not isinstance(answer, np.generic) and getattr(answer, "shape", None) == () and hasattr(answer, "item"):  # a 0-dim array or tensor
        value = answer.item()
        if value in (True, False):
            return bool(value)
    cls = f"{type(answer).__module__}.{type(answer).__qualname__}"
    raise FilterError(f"{told} must answer True (drop) or False (keep), got {answer!r} ({cls}) - return a bool")
