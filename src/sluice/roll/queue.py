"""A GroupQueue whose members are DataProto, for environment managers written for ROLL.

Members that nobody trains on are freed by their `drop()`: those that come too late, those of a group that the filter drops, that expires,
fails or is still there at the end. Members of a batch are the trainer's to free, once it has read them.
"""

from __future__ import annotations

from typing import Any

from sluice.filters import sum_steps
from sluice.roll.data import DataProto
from sluice.roll.filters import reward_of
from sluice.roll.group_filter import GroupFilter, drops, filter_of, told_of
from sluice.scheduler import GroupQueue
from sluice.types import Group


class _Judge:
    """A filter with `.filter` as the queue asks it: with the members as they were put."""

    def __init__(self, theirs: Any) -> None:
        self._filter = filter_of(theirs)
        self._told = told_of(theirs)
        self.queue: GroupQueue | None = None
        for name in ("state_dict", "load_state_dict"):
            if callable(getattr(theirs, name, None)):
                setattr(self, name, getattr(theirs, name))

    def judge(self, group: Group, /) -> bool:
        assert self.queue is not None
        entry = group.task.entry
        return not drops(self._filter, self._told, entry["env_group"], entry["episode"], self.queue.members_of(group))


def build_group_queue(
    num_env_groups: int, group_size: int, group_size_redundancy: int = 0, *, group_filter: Any = None, **more: Any
) -> GroupQueue:
    """A queue of members as environment managers of ROLL make them: one trajectory each, `response_level_rewards` in its batch.

    group_filter: an object with `.filter(group_id, episode_id, group)`, True drops; None: nothing is dropped. more: see
    `sluice.scheduler.GroupQueue`. The reward of a member is the sum of its response_level_rewards, one for each of its rows; NaN is none.
    """
    judge = _Judge(GroupFilter(None, None, "train") if group_filter is None else group_filter)
    queue = GroupQueue(
        num_env_groups,
        group_size,
        group_size_redundancy,
        group_filter=judge,
        reward_of=_reward_of,
        release=_release,
        **more,
    )
    judge.queue = queue
    return queue


def _reward_of(member: DataProto) -> float | None:
    """The outcome of a trajectory: of several rows, of steps say, the sum."""
    return sum_steps([[reward_of(member[index]) for index in range(len(member))]])[0]


def _release(member: DataProto) -> None:
    member.drop()
