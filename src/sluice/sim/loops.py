"""A simulated user-defined loop: it owns one group, starts tries at its members, and returns what it made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from sluice.scheduler import events as ev
from sluice.scheduler.groups import mix
from sluice.types import Rollout, Task, Verdict

Style = Literal["plain", "one_by_one", "judges", "picky", "leaves_out", "gives_up", "reshapes", "takes_survivors"]

STYLES: Final[tuple[Style, ...]] = (
    "plain",
    "plain",
    "plain",
    "one_by_one",
    "judges",
    "picky",
    "leaves_out",
    "gives_up",
    "reshapes",
    "takes_survivors",
)


class SimulatedLoop:
    """One loop under way. `tell` hands an event to the machine, later in the same moment; the machine's answers come by the `on_...` calls.

    Consumes LaunchMember, MemberJudged, AttemptRefused, failures and CancelLoop of its group; tells LoopAttempt and GroupReturned.
    """

    __slots__ = ("_delivered", "_has_picked", "_is_over", "_members", "_tell", "_under_way", "group_id", "style", "task")

    def __init__(self, run: ev.RunLoop, members: int, seed: int, tell: Callable[[ev.Event], None]) -> None:
        """members: how many it starts, of which it returns at most the group size."""
        self.group_id = run.group_id
        self.task: Task = run.task
        self.style: Style = STYLES[mix(seed, run.group_id) % len(STYLES)]
        self._members = members
        self._tell = tell
        self._under_way: dict[int, int] = {}  # attempt_id -> member_index
        self._delivered: dict[int, Rollout] = {}  # member_index -> what was kept of it
        self._is_over = False
        self._has_picked = False

    def start(self) -> None:
        """Begin."""
        for index in range(1 if self.style == "one_by_one" else self._members):
            self._try(index)

    def on_launch(self, launch: ev.LaunchMember) -> None:
        """The machine has launched a try."""
        self._under_way[launch.attempt_id] = launch.member_index

    def on_judged(self, rollout: Rollout, verdict: Verdict) -> None:
        """A try delivered, and stays in the group or not."""
        index = self._under_way.pop(rollout.attempt_id)
        if self._is_over:
            return
        if not verdict.keep:
            self._try(index)
            return
        has_number = rollout.reward is None or math.isfinite(rollout.reward)
        self._delivered[index] = rollout if has_number else replace(rollout, reward=None)
        if self.style == "gives_up":
            self._give_back(None)
        elif self.style == "one_by_one" and len(self._delivered) < self._members:
            self._try(index + 1)
        elif len(self._delivered) == self._members:
            self._all_there()

    def on_failed(self, attempt_id: int) -> None:
        """A try never delivered."""
        index = self._under_way.pop(attempt_id)
        if not self._is_over:
            self._try(index)

    def on_refused(self, reason: str) -> None:
        """No further try at a member."""
        if self._is_over:
            return
        if self.style == "takes_survivors" and reason != "group_closed":
            self._give_back([self._delivered[index] for index in sorted(self._delivered)])
        else:
            self._give_back(None, reason="no_more_tries")

    def on_cancelled(self, returns_all_the_same: bool) -> None:
        """Stop. returns_all_the_same: it does not notice, and tries and returns once more."""
        if self._is_over:
            return
        self._is_over = True
        if returns_all_the_same:
            self._try(0)
            self._tell(ev.GroupReturned(group_id=self.group_id, rollouts=tuple(self._delivered.values())))

    def _try(self, index: int) -> None:
        self._tell(ev.LoopAttempt(group_id=self.group_id, member_index=index))

    def _all_there(self) -> None:
        if self.style == "picky" and not self._has_picked:
            self._has_picked = True
            del self._delivered[0]
            self._try(0)
            return
        rollouts = [self._delivered[index] for index in sorted(self._delivered)]
        if self.style == "leaves_out":
            rollouts.pop()
        elif self.style == "reshapes":
            rollouts = [replace(rollout, reward=None if rollout.reward is None else 0.5 * rollout.reward) for rollout in rollouts]
        self._give_back(rollouts)

    def _give_back(self, rollouts: list[Rollout] | None, reason: str = "") -> None:
        self._is_over = True
        judged = None
        if rollouts is not None and self.style == "judges":
            is_good = any(rollout.reward for rollout in rollouts)
            judged = Verdict.kept("loop") if is_good else Verdict.dropped("loop_says_no", "low_information", "loop")
        returned = None if rollouts is None else tuple(rollouts)
        self._tell(ev.GroupReturned(group_id=self.group_id, rollouts=returned, reason=reason, judged=judged))
