"""The transactional replay buffer: a group is begun, then committed or aborted, then taken into a batch. Nothing partial is ever in it.

A commit or abort of a group that is not running (it expired, it was aborted before) is a counted no-op, never an error.
Quota: each `advance_step` opens one batch; the first one adds ceil(r x batch) for an async_generation_ratio r. r = 0 is synchronous.
Age: a group may be trained while step <= min(start step, oldest policy_version) + max_staleness, which is ceil(r) unless given; then it
expires, running or committed. For a non-integer r at most floor(frac(r) x batch) groups of a batch come from the oldest permitted step,
those apart that may become older than that. r is taken for the decimal number that it is written as: 1.1 x 10 is 11.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from fractions import Fraction

from sluice.types import Group, Verdict


class ReplayBuffer:
    """Capacity, running groups and committed groups. Counted in groups."""

    __slots__ = (
        "_additional",
        "_batch_size",
        "_committed",
        "_last_step",
        "_max_age",
        "_oldest_share",
        "_opened",
        "_quota",
        "_ratio",
        "_running",
        "_shared",
        "_taken_of_oldest",
        "expired",
        "late_transactions",
        "lookahead",
        "step",
    )

    def __init__(
        self, *, async_generation_ratio: float = 0.0, max_additional_running_prompts: int = 0, max_staleness: int | None = None
    ) -> None:
        """max_staleness: None for ceil(async_generation_ratio)."""
        if not async_generation_ratio >= 0 or math.isinf(async_generation_ratio):
            raise ValueError(f"async_generation_ratio must be a finite number >= 0, got {async_generation_ratio} - 0 is synchronous")
        if max_additional_running_prompts < 0:
            raise ValueError(f"max_additional_running_prompts must be >= 0, got {max_additional_running_prompts}")
        if max_staleness is not None and max_staleness < math.ceil(async_generation_ratio):
            raise ValueError(
                f"max_staleness must be at least ceil(async_generation_ratio) ({math.ceil(async_generation_ratio)}), got {max_staleness} - "
                "groups that start that far ahead would all expire"
            )
        self._ratio = Fraction(repr(float(async_generation_ratio)))
        self._max_age = math.ceil(async_generation_ratio) if max_staleness is None else max_staleness
        # Of a batch, that may come from the oldest permitted step; 0: no limit. A wider max_staleness lifts it.
        self._oldest_share = self._ratio % 1 if self._max_age == math.ceil(self._ratio) else Fraction(0)
        self._additional = max_additional_running_prompts
        self._running: dict[int, int] = {}  # group_id -> start step
        self._committed: dict[int, Group] = {}  # in order of commit
        self._last_step: dict[int, int] = {}  # group_id -> last step at which it may be trained, running or committed
        self._shared: set[int] = set()  # of these, the ones that share in the oldest permitted step; empty where it has no limit
        self._quota = 0
        self._opened = False
        self._batch_size = 0
        self.lookahead = 0  # groups that may be prepared beyond the batch that is wanted: ceil(r x batch)
        self._taken_of_oldest = 0  # groups of the oldest permitted step that this step's batches took
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

    def groups(self) -> list[Group]:
        """The committed groups, oldest launch first."""
        return sorted(self._committed.values(), key=_launch_order)

    def poll(self) -> int:
        """How many groups may begin now."""
        return max(0, self._quota + self._additional - len(self._running) - len(self._committed))

    def begin(self, group_id: int, max_staleness: int | None = None) -> int:
        """Open a transaction, bound to the current step, which is returned. max_staleness: of this group; None: the buffer's."""
        if group_id in self._running or group_id in self._committed:
            raise ValueError(f"group {group_id} has already begun - every group needs an id of its own")
        self._running[group_id] = self.step
        self._may_be_trained_until(group_id, self.step + (self._max_age if max_staleness is None else max_staleness), max_staleness)
        return self.step

    def commit(self, group: Group) -> bool:
        """The group is accepted and waits for a batch. False: it had expired, is too old now, or was not running; counted."""
        group_id = group.group_id
        start = self._running.pop(group_id, None)
        if start is None:
            self.late_transactions += 1
            return False
        behind = start - group.policy_version
        if behind > 0:  # the weights that sampled it are older than its launch
            self._last_step[group_id] -= behind
        waiting = 0
        if group_id in self._shared:
            waiting = sum([other.start_step == start and other.group_id in self._shared for other in self._committed.values()])
        if self._last_step[group_id] < self.step or self._share_is_used_up(group_id, start, waiting):
            self._forget(group_id)
            self.expired += 1
            return False
        self._committed[group_id] = group
        return True

    def abort(self, group_id: int, verdict: Verdict) -> bool:
        """The group leaves without being committed; its capacity returns. False: it was not running; counted."""
        if verdict.keep:
            raise ValueError(f"group {group_id}: an abort needs a verdict that drops, got a keep ({verdict.reason}) - commit it instead")
        if self._running.pop(group_id, None) is None:
            self.late_transactions += 1
            return False
        self._forget(group_id)
        return True

    def restore(self, group: Group, last_step: int, max_staleness: int | None = None) -> None:
        """Put a group back that was committed in an earlier process. max_staleness: as in `begin`."""
        if group.group_id in self._running or group.group_id in self._committed:
            raise ValueError(f"group {group.group_id} is in the buffer already - restore into a fresh one")
        self._committed[group.group_id] = group
        self._may_be_trained_until(group.group_id, last_step, max_staleness)

    def last_step(self, group_id: int) -> int:
        """The last step at which a running or committed group may be trained."""
        return self._last_step[group_id]

    def advance_step(self, step: int, batch_size: int) -> None:
        """The run is at `step` and wants `batch_size` more groups; what has become too old is removed by `gc`."""
        self.step_to(step)
        self._take_size(batch_size)
        self._quota += batch_size if self._opened else batch_size + self.lookahead
        self._opened = True

    def _take_size(self, batch_size: int) -> None:
        if batch_size != self._batch_size:  # an exact ratio is slow to multiply
            self._batch_size, self.lookahead = batch_size, math.ceil(self._ratio * batch_size)

    def step_to(self, step: int) -> None:
        """The run is at `step`; nothing is asked for yet."""
        if step < self.step:
            raise ValueError(f"steps only go forward: at {self.step}, got {step}")
        if step > self.step:
            self._taken_of_oldest = 0
        self.step = step

    def get_batch(self, n: int) -> list[Group]:
        """Take up to n groups, oldest launch first, and close their quota."""
        return self.take([group.group_id for group in self.groups()], n)

    def take(self, group_ids: Collection[int], n: int) -> list[Group]:
        """Take up to n of these committed groups, in this order, and close their quota. Those that are too old stay for `gc`."""
        taken: list[Group] = []
        for group_id in group_ids:
            if len(taken) == n:
                break
            group = self._committed[group_id]
            if self._last_step[group_id] < self.step or self._share_is_used_up(group_id, group.start_step, 0):
                continue
            self._taken_of_oldest += group_id in self._shared and group.start_step == self.step - self._max_age
            taken.append(group)
            self._remove(group_id)
        self._quota = max(0, self._quota - len(taken))
        return taken

    def close_batch(self, missing: int) -> None:
        """Give up `missing` groups of the open quota: a batch was delivered short."""
        self._quota = max(0, self._quota - missing)

    def evict(self, capacity: int, among: Collection[int] | None = None) -> list[Group]:
        """Remove committed groups until at most `capacity` are left (of `among`, when given): first the one with the oldest member,
        then the one with the larger summed age, then the earlier arrival.
        """
        arrived = [group for group in self._committed.values() if among is None or group.group_id in among]
        arrived.sort(key=lambda group: (group.policy_version, sum([rollout.policy_version for rollout in group.rollouts])))
        gone = arrived[: max(0, len(arrived) - capacity)]
        for group in gone:
            self._remove(group.group_id)
        return gone

    def take_all(self) -> list[Group]:
        """Remove every committed group, oldest launch first: surplus, or the end of the run."""
        taken = self.groups()
        for group in taken:
            self._remove(group.group_id)
        return taken

    def gc(self) -> tuple[list[int], list[Group]]:
        """Remove what is too old: ids of running groups, and committed groups."""
        stale_committed = [group for group_id, group in self._committed.items() if self._last_step[group_id] < self.step]
        stale_running = [group_id for group_id in self._running if self._last_step[group_id] < self.step]
        if self._oldest_share:  # more of the oldest step than a batch may hold can never be trained: at the next step they are too old
            oldest = self.step - self._max_age
            here = {group_id for group_id in self._shared if self._last_step[group_id] >= self.step}
            waiting = [group for group in self.groups() if group.start_step == oldest and group.group_id in here]
            allowed = max(0, math.floor(self._oldest_share * self._batch_size) - self._taken_of_oldest)
            stale_committed += waiting[allowed:]
            if len(waiting) >= allowed:
                stale_running += [group_id for group_id, start in self._running.items() if start == oldest and group_id in here]
        for group_id in stale_running:
            del self._running[group_id]
            self._forget(group_id)
        for group in stale_committed:
            self._remove(group.group_id)
        self.expired += len(stale_running) + len(stale_committed)
        return stale_running, stale_committed

    def state_dict(self) -> dict[str, int | bool]:
        """Step, quota and counts, as plain data; groups are saved by whoever owns them, and come back by `restore`."""
        return {
            "step": self.step,
            "quota": self._quota,
            "opened": self._opened,
            "batch_size": self._batch_size,
            "taken_of_oldest": self._taken_of_oldest,
            "expired": self.expired,
            "late_transactions": self.late_transactions,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue where `state` was saved."""
        self.step = int(state["step"])
        self._quota = int(state["quota"])
        self._opened = bool(state["opened"])
        self._take_size(int(state["batch_size"]))
        self._taken_of_oldest = int(state["taken_of_oldest"])
        self.expired = int(state["expired"])
        self.late_transactions = int(state["late_transactions"])

    def _remove(self, group_id: int) -> None:
        del self._committed[group_id]
        self._forget(group_id)

    def _may_be_trained_until(self, group_id: int, last_step: int, max_staleness: int | None) -> None:
        self._last_step[group_id] = last_step
        if self._oldest_share and (max_staleness is None or max_staleness == self._max_age):
            self._shared.add(group_id)

    def _forget(self, group_id: int) -> None:
        del self._last_step[group_id]
        self._shared.discard(group_id)

    def _share_is_used_up(self, group_id: int, start: int, waiting: int) -> bool:
        """Whether a further group of that start step is one too many of the oldest permitted step, `waiting` of which are committed."""
        if group_id not in self._shared or start != self.step - self._max_age:
            return False
        return self._taken_of_oldest + waiting >= math.floor(self._oldest_share * self._batch_size)


def _launch_order(group: Group) -> tuple[int, int]:
    return group.start_step, group.group_id
