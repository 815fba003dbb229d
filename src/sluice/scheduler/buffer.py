"""The transactional replay buffer: a group is begun, then committed or aborted, then taken into a batch. Nothing partial is ever in it.

A commit or abort of a group that is not running (it expired, it was aborted before) is a counted no-op, never an error.
Quota: each `advance_step` opens one batch; the first one adds ceil(r x batch) for an async_generation_ratio r. A group whose start step
is older than step - ceil(r) expires, running or committed. r = 0 is synchronous.
"""

from __future__ import annotations

import math

from sluice.types import Group, Verdict


class ReplayBuffer:
    """Capacity, running groups and committed groups. Counted in groups."""

    __slots__ = (
        "_additional",
        "_batch_size",
        "_committed",
        "_max_age",
        "_oldest_share",
        "_opened",
        "_quota",
        "_ratio",
        "_running",
        "expired",
        "late_transactions",
        "step",
    )

    def __init__(self, *, async_generation_ratio: float = 0.0, max_additional_running_prompts: int = 0) -> None:
        if not async_generation_ratio >= 0 or math.isinf(async_generation_ratio):
            raise ValueError(f"async_generation_ratio must be a finite number >= 0, got {async_generation_ratio} - 0 is synchronous")
        if max_additional_running_prompts < 0:
            raise ValueError(f"max_additional_running_prompts must be >= 0, got {max_additional_running_prompts}")
        self._ratio = async_generation_ratio
        self._max_age = math.ceil(async_generation_ratio)
        self._oldest_share = async_generation_ratio % 1.0  # of a batch, that may come from the oldest permitted step; 0: no limit
        self._additional = max_additional_running_prompts
        self._running: dict[int, int] = {}  # group_id -> start step
        self._committed: dict[int, Group] = {}  # in order of commit
        self._quota = 0
        self._opened = False
        self._batch_size = 0
        self.step = 0
        self.expired = 0  # groups that were too old, running or committed
        self.late_transactions = 0  # commits and aborts of groups that were no longer running

    @property
    def running(self) -> int:
        """Groups begun and not yet committed or aborted."""
        return len(self._running)

    @property
    def committed(self) -> int:
        """Groups that wait to be taken."""
        return len(self._committed)

    @property
    def quota(self) -> int:
        """Groups that the open batches still need, running and committed ones included."""
        return self._quota

    def poll(self) -> int:
        """How many groups may begin now."""
        return max(0, self._quota + self._additional - len(self._running) - len(self._committed))

    def begin(self, group_id: int) -> int:
        """Open a transaction, bound to the current step, which is returned."""
        if group_id in self._running or group_id in self._committed:
            raise ValueError(f"group {group_id} has already begun - every group needs an id of its own")
        self._running[group_id] = self.step
        return self.step

    def commit(self, group: Group) -> bool:
        """The group is accepted and waits for a batch. False: it had expired or was not running; counted."""
        if self._running.pop(group.group_id, None) is None:
            self.late_transactions += 1
            return False
        self._committed[group.group_id] = group
        return True

    def abort(self, group_id: int, verdict: Verdict) -> bool:
        """The group leaves without being committed; its capacity returns. False: it was not running; counted."""
        if verdict.keep:
            raise ValueError(f"group {group_id}: an abort needs a verdict that drops, got a keep ({verdict.reason}) - commit it instead")
        if self._running.pop(group_id, None) is None:
            self.late_transactions += 1
            return False
        return True

    def advance_step(self, step: int, batch_size: int) -> None:
        """The run is at `step` and wants `batch_size` more groups; what has become too old is removed by `gc`."""
        if step < self.step:
            raise ValueError(f"steps only go forward: at {self.step}, got {step}")
        self.step = step
        self._batch_size = batch_size
        self._quota += batch_size if self._opened else batch_size + math.ceil(self._ratio * batch_size)
        self._opened = True

    def get_batch(self, n: int) -> list[Group]:
        """Take up to n groups, oldest launch first, and close their quota."""
        oldest = self.step - self._max_age
        allowed = math.floor(self._oldest_share * self._batch_size) if self._oldest_share else n
        taken: list[Group] = []
        for group in sorted(self._committed.values(), key=lambda g: (g.start_step, g.group_id)):
            if len(taken) == n:
                break
            if group.start_step < oldest:
                continue  # expired, gc has not run yet
            if group.start_step == oldest and self._oldest_share:
                if allowed == 0:
                    continue
                allowed -= 1
            taken.append(group)
        for group in taken:
            del self._committed[group.group_id]
        self._quota = max(0, self._quota - len(taken))
        return taken

    def close_batch(self, missing: int) -> None:
        """Give up `missing` groups of the open quota: a batch was delivered short."""
        self._quota = max(0, self._quota - missing)

    def take_all(self) -> list[Group]:
        """Remove every committed group, oldest launch first: surplus, or the end of the run."""
        taken = sorted(self._committed.values(), key=lambda g: (g.start_step, g.group_id))
        self._committed.clear()
        return taken

    def gc(self) -> tuple[list[int], list[Group]]:
        """Remove what is too old: ids of running groups, and committed groups."""
        oldest = self.step - self._max_age
        stale_running = [group_id for group_id, start in self._running.items() if start < oldest]
        stale_committed = [group for group in self._committed.values() if group.start_step < oldest]
        for group_id in stale_running:
            del self._running[group_id]
        for group in stale_committed:
            del self._committed[group.group_id]
        self.expired += len(stale_running) + len(stale_committed)
        return stale_running, stale_committed
