"""What every door shares: a filter given as configuration or as an object, and a group made of the members that a framework has.

The group that a filter sees is the same through every door, so that one filter object gives one verdict wherever it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from sluice.config.models import FilterConfig
from sluice.errors import ConfigError, FilterError
from sluice.filters import QueryFilter, ResponseFilter, build_query_filter, build_response_filter, number_of
from sluice.filters.base import Filter
from sluice.types import EMPTY, Category, Failure, Group, Rollout, RolloutFinish, Task, Turn

FilterLike: TypeAlias = Filter[Any] | FilterConfig | Mapping[str, Any]
"""A filter that has been built, or what one is built from: `{"type": "std_filter"}`."""

DOMAIN: Final = "default"
"""Reward domain of tasks that come from a framework without domains."""

MISSING: Final = "reward_missing"
"""Reason: the framework has no finite reward for the member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout as a framework tells it."""

    reward: Any  # raw task reward, a number of any library; None or not finite: it has none
    metrics: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # further named scores
    tokens: int = 0  # that the policy sampled: tool and environment tokens are not among them
    trains: bool = True  # whether any token of it does; what trains nothing (a placeholder, a masked row) has no vote
    text: str = ""
    finish_reason: RolloutFinish = "stop"
    detail: str = ""  # why there is no reward, for a person


def query_filter(given: FilterLike, *, where: str, group_size: int | None = None, min_members: int | None = None) -> QueryFilter:
    """The filter on groups that was given, or that a configuration describes. where: the argument, for messages.

    Raises `ConfigError` for a configuration that cannot be, or something that is no filter.
    """
    if isinstance(given, Filter):
        return given
    if not isinstance(given, FilterConfig | Mapping):
        raise ConfigError(
            f"{where}: expected a configuration such as {{'type': 'std_filter'}} or a filter from sluice.filters.build_query_filter, got "
            f"{given!r} - a function of your own is named by its import path as the type"
        )
    return build_query_filter(given, where=where, group_size=group_size, min_members=min_members)


def response_filter(given: FilterLike | None, *, where: str) -> ResponseFilter | None:
    """The same for a filter on single responses; None: every response is kept."""
    if given is None or isinstance(given, Filter):
        return given
    if not isinstance(given, FilterConfig | Mapping):
        raise ConfigError(f"{where}: expected a configuration such as {{'type': 'length', 'filter_args': {{}}}} or a filter, got {given!r}")
    return build_response_filter(given, where=where)


def group_of(members: Sequence[Member], *, task: Task | None = None, group_id: int = 0, key: str = "") -> Group:
    """A whole group of the members that a framework has. key: its name there, for messages; it becomes the task's id.

    A member without a finite reward leaves the group incomplete, where the filter does not let survivors be enough; one of which nothing
    trains is outside of its statistics. Raises `FilterError` for a group without members, and for a reward that is no number.
    """
    if not members:
        raise FilterError(f"group {key!r}: expected at least one member, got none - a group has at least one")
    if task is None:
        task = Task(task_id=key, domain=DOMAIN, prompt="", prompt_ids=np.zeros(0, dtype=np.int64))
    rollouts = tuple([rollout_of(member, task=task, group_id=group_id, index=index) for index, member in enumerate(members)])
    return Group(
        group_id=group_id,
        task=task,
        rollouts=rollouts,
        start_step=0,
        round=1,
        epoch=0,
        counted=tuple([member.trains or rollout.reward is None for member, rollout in zip(members, rollouts, strict=True)]),
    )


def rollout_of(member: Member, *, task: Task, group_id: int, index: int, attempt_id: int | None = None, version: int = 0) -> Rollout:
    """One member as the record that filters and the scheduler read. Its tokens are counted and not kept."""
    reward = number_of(member.reward, index, "filter")
    tokens = np.zeros(member.tokens, dtype=np.int64)
    turn = Turn(
        prompt_ids=task.prompt_ids,
        token_ids=tokens,
        inference_logprobs=np.zeros(member.tokens, dtype=np.float32),
        text=member.text,
        finish_reason="length" if member.finish_reason == "length" else "stop",
        policy_version=version,
    )
    return Rollout(
        attempt_id=index if attempt_id is None else attempt_id,
        group_id=group_id,
        member_index=index,
        task_id=task.task_id,
        turns=(turn,),
        finish_reason=member.finish_reason,
        reward=reward,
        metrics=member.metrics,
        failure=None if reward is not None else Failure(cause="infrastructure", reason=MISSING, detail=member.detail),
    )


def reason_of(category: Category | None, reason: str) -> str:
    """A verdict's reason with its category before it, for frameworks that count drops by one text."""
    return reason if category is None else f"{category}/{reason}"
