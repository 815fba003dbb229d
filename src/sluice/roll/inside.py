"""Our filters inside ROLL: one object with the two calls that ROLL makes, on ROLL's own data.

    from sluice.filters import RatioGuard
    from sluice.roll import FilterForRoll

    chosen = FilterForRoll({"type": "std_filter"}, guard=RatioGuard(max_filter_ratio=0.5))

    class MyGroupFilter:                                 # train_env_manager.group_filter_cls of ROLL
        def __init__(self, config, env_manager_config, mode):
            self.mode = mode

        def filter(self, group_id, episode_id, group):   # True drops
            return self.mode == "train" and chosen.filter(group_id, episode_id, group)

It reads `batch`, `non_tensor_batch` and `meta_info` by their names and imports neither ROLL nor torch, so that it takes DataProto of ROLL,
of verl's form, and ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from sluice.config import EnvManagerConfig, FilterConfig
from sluice.config.explain import explain
from sluice.config.problems import Places, error
from sluice.errors import FilterError
from sluice.filters import QueryFilter, RatioGuard, build_group_filter, number_of, sum_steps
from sluice.filters.base import Filter
from sluice.filters.scores import named_metrics, scores_of
from sluice.roll.notes import metrics_of_row
from sluice.types import Failure, Flag, Group, Rollout, Task, Turn, Verdict

FLAGS: Final[tuple[Flag, ...]] = ("env_timeout", "env_failed", "drop_flag")

FEWEST: Final = 2  # members of a group that can be compared

REWARDS: Final = "response_level_rewards"

_NOTHING: Final = np.zeros(0, dtype=np.int64)


class FilterForRoll:
    """A filter of ours as ROLL asks: `filter` for trajectory groups (True drops), `query_filter` for responses (True keeps)."""

    def __init__(self, given: QueryFilter | Mapping[str, Any], *, group_size: int | None = None, guard: RatioGuard | None = None) -> None:
        """given: a filter, or the configuration of a group filter. group_size: of a whole group, for `missing_member`; None: as many as
        come, and two at least. guard: bounds the share of judged groups that are dropped.

        Raises `ConfigError` for a configuration that cannot be.
        """
        if isinstance(given, Filter):
            self._filter: QueryFilter = given
        else:
            manager = EnvManagerConfig(group_size=group_size or FEWEST, group_filter_config=_config(given))
            self._filter = build_group_filter(manager, mode="train", where="FilterForRoll", min_members=None)
        self._metrics = named_metrics(self._filter)
        self._guard = guard

    def filter(self, group_id: int, episode_id: int, group: Sequence[Any]) -> bool:
        """Whether to drop the trajectories of a group, one item each, of one row or one for each step; None: missing. True drops."""
        return not self.verdict_on(group, name=f"g{group_id}/e{episode_id}").keep

    def query_filter(self, data_list: Sequence[Any], config: object = None) -> bool:
        """Whether to keep the responses to one prompt, of any number of rows an item. True keeps. A single response is kept unseen."""
        rollouts: list[Rollout] = []
        idle: set[int] = set()  # places of responses of which no token trains
        for item in data_list:
            if item is None:
                rollouts.append(_rollout(len(rollouts), None, None, {}))
                continue
            if not _has(item, REWARDS):
                raise FilterError(f"expected {REWARDS} in the responses, got {_names(item)} - judge after the rewards have been computed")
            rewards = _flat(item, REWARDS)
            trains = _rows_that_train(item, len(rewards))
            for place, reward in enumerate(rewards):
                rollouts.append(_rollout(len(rollouts), reward, None, self._scores(item, place, len(rewards))))
                idle |= set() if trains[place] else {len(rollouts) - 1}
        if len(rollouts) == 1:
            return True
        return self._judged(rollouts, "query", idle).keep

    def verdict_on(self, group: Sequence[Any], *, name: str = "group") -> Verdict:
        """The verdict on trajectories, with its reason and category."""
        members = [
            _rollout(index, None, None, {}) if item is None else _rollout(index, _reward_of(item), item, self._scores(item, 0, 1))
            for index, item in enumerate(group)
        ]
        idle = {index for index, item in enumerate(group) if item is not None and not any(_rows_that_train(item))}
        return self._judged(members, name, idle)

    def _scores(self, item: Any, place: int, rows: int) -> dict[str, Any]:
        return scores_of(metrics_of_row(item.meta_info.get("metrics"), place, rows), self._metrics)

    def _judged(self, rollouts: list[Rollout], name: str, idle: Set[int]) -> Verdict:
        """idle: places of members of which no token trains: they have no vote."""
        if not rollouts:
            raise FilterError("expected the members of a group, got none - a group has at least one")
        group = Group(
            group_id=0,
            task=Task(task_id=name, domain="roll", prompt="", prompt_ids=_NOTHING),
            rollouts=tuple(rollouts),
            start_step=0,
            round=1,
            epoch=0,
            counted=tuple([index not in idle or rollout.reward is None for index, rollout in enumerate(rollouts)]),
        )
        verdict = self._filter.judge(group)
        return verdict if self._guard is None else self._guard.admit(verdict)


def _config(given: Any) -> FilterConfig:
    try:
        return FilterConfig.model_validate(given)
    except ValidationError as refused:
        raise error(explain(FilterConfig, refused, given if isinstance(given, Mapping) else {}), Places(source="FilterForRoll")) from None


def _rollout(index: int, reward: float | None, item: Any, metrics: Mapping[str, Any]) -> Rollout:
    """A member as filters know it. item None: nothing is known but its reward and scores, or it is missing."""
    notes: Mapping[str, Any] = {} if item is None else item.meta_info
    value = reward if reward is not None and math.isfinite(reward) else None
    sampled = 0 if item is None or not _has(item, "response_mask") else int(sum(_flat(item, "response_mask")))
    tokens = np.zeros(sampled, dtype=np.int64)
    turn = Turn(
        prompt_ids=_NOTHING,
        token_ids=tokens,
        inference_logprobs=np.zeros(sampled, dtype=np.float32),
        text="",
        finish_reason="stop",
        policy_version=0,
    )
    return Rollout(
        attempt_id=index,
        group_id=0,
        member_index=index,
        task_id="",
        turns=() if item is None and reward is None else (turn,),
        finish_reason="stop",
        reward=value,
        metrics=metrics,
        failure=None if value is not None else Failure(cause="infrastructure", reason="reward_missing"),
        flags=frozenset(flag for flag in FLAGS if notes.get(flag)),
    )


def _rows_that_train(item: Any, rows: int | None = None) -> list[bool]:
    """Whether any token of each row does, by `response_mask`; True where there is none. rows: how many there must be; None: any."""
    if not _has(item, "response_mask"):
        return [True] * (rows or 1)
    mask = item.batch["response_mask"]
    trains: list[bool] = (mask.reshape(len(mask), -1) != 0).any(1).tolist()
    if rows is not None and len(trains) != rows:
        raise FilterError(f"response_mask: expected one row for each of {rows} rewards, got {len(trains)} - one row is one response")
    return trains


def _reward_of(item: Any) -> float | None:
    """The outcome of a trajectory: what stands in `response_level_rewards`, else in `episode_scores`, else the sum of `scores`."""
    if _has(item, REWARDS):
        return sum_steps([_flat(item, REWARDS)])[0]
    episode = item.non_tensor_batch.get("episode_scores")
    if episode is not None:
        outcome: float | None = number_of(episode[0], "a trajectory (episode_scores)", "FilterForRoll")
        return outcome
    if _has(item, "scores"):
        return sum_steps([_flat(item, "scores")])[0]
    raise FilterError(f"expected {REWARDS}, episode_scores or scores in a trajectory, got {_names(item)} - say what it earned")


def _names(item: Any) -> list[str]:
    return [] if item.batch is None else sorted(map(str, item.batch.keys()))


def _has(item: Any, name: str) -> bool:
    return item.batch is not None and name in set(item.batch.keys())


def _flat(item: Any, name: str) -> list[float]:
    """All values of a tensor of the batch, as numbers of Python's own."""
    values: list[float] = item.batch[name].reshape(-1).tolist()
    return values
