"""The gate of a machine: its keepers are told what happens to running groups, in their own words, and the machine what they decide.

A keeper of groups says which running groups are cut, a keeper of members which single trajectories are stopped; either may be missing.
The machine acts on what they say and asks them in no other way, so that a keeper of another kind needs nothing but these methods.

To a keeper a group is its prompt and epoch, and a member its place in the group, so that the lots it draws do not depend on the order in
which things happen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar

from sluice.errors import RecordError
from sluice.scheduler.events import MemberStepped
from sluice.scheduler.groups import OpenGroup
from sluice.types import Rollout, Verdict

OnCut = Literal["replace", "drop"]
"""What becomes of the place of a group that was cut: another group takes it, or its batch is smaller by it."""

P = ParamSpec("P")
R = TypeVar("R")


class GroupKeeper(Protocol):
    """Decides on running groups: `sluice.gate.GateKeeper`. `group_key` and `member` are as in the top of this file."""

    def group_launched(self, group_key: Hashable, *, task_type: str | None = None) -> None:
        """A group begins."""

    def task_type_known(self, group_key: Hashable, task_type: str | None) -> None:
        """Its environment said what kind of problem it has."""

    def observe(
        self,
        group_key: Hashable,
        member: Hashable,
        env_step: int,
        action: Hashable,
        observation: Any = None,
        *,
        reply: Any = None,
        is_admissible: bool | None = None,
        progress: float | None = None,
        logprob: float | None = None,
    ) -> None:
        """A member took an environment step: 1 for its first; `observation` is what it saw before it, the others as in `MemberStepped`."""

    def member_ended(
        self, group_key: Hashable, member: Hashable, reward: Any = None, comparable: bool = True, *, is_replaced: bool = True
    ) -> None:
        """A member ended; comparable: by itself. Else it is as if it had never been, and is_replaced says whether another one comes."""

    def decision(self, group_key: Hashable) -> Verdict | None:
        """The verdict on a group, once: a drop cuts it. None: there is none to make now."""

    def holds(self, group_key: Hashable, member: Hashable) -> bool:
        """Whether a member has come to where its group is decided on, and the decision is still to be made."""

    def group_ended(self, group_key: Hashable, rewards: Sequence[Any] | None = None) -> str | None:
        """A group left. rewards: those that count, where it ran to its end. Answers with a warning, or None."""

    def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
        """`gate/...` over the whole run."""

    def state_dict(self) -> dict[str, Any]:
        """What it learnt, as plain data."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state, without any running group."""


class MemberKeeper(Protocol):
    """Decides on single trajectories: `sluice.gate.FutilityKeeper`."""

    def observe(
        self,
        group_key: Hashable,
        member: Hashable,
        env_step: int,
        observation: Any,
        is_admissible: bool | None = None,
        progress: float | None = None,
        action: Any = None,
        *,
        reward: Any = 0.0,
        logprob: float | None = None,
    ) -> bool:
        """A member took an environment step, which was answered with `observation`, and goes on: whether it is stopped. 0: the reset."""

    def member_ended(
        self, group_key: Hashable, member: Hashable, reward: Any = None, comparable: bool = True, *, env_steps: int | None = None
    ) -> str | None:
        """A member ended, stopped or not; comparable as for groups; env_steps: all that it took. Answers with a warning, or None."""

    def group_ended(self, group_key: Hashable) -> None:
        """A group left."""

    def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
        """`gate/futile_...` over the whole run."""

    def state_dict(self) -> dict[str, Any]:
        """What it learnt, as plain data."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state, without any running group."""


def _timed(method: Callable[Concatenate[MachineGate, P], R]) -> Callable[Concatenate[MachineGate, P], R]:
    """Its time is the gate's."""

    @wraps(method)
    def timed(self: MachineGate, /, *args: P.args, **kwargs: P.kwargs) -> R:
        started = self._clock()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += self._clock() - started

    return timed


class MachineGate:
    """The keepers of one machine. Made anew for each machine."""

    def __init__(
        self,
        groups: GroupKeeper | None = None,
        members: MemberKeeper | None = None,
        *,
        on_cut: OnCut = "replace",
        barrier: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """barrier: members that have come to where their group is decided on wait for the decision.

        clock: seconds, by which the gate's own cost is measured; None: it is not.
        """
        self.groups: Final = groups
        self.members: Final = members
        self.on_cut: Final[OnCut] = on_cut
        self.barrier: Final = barrier and groups is not None
        self.seconds = 0.0  # that the keepers took since the start of the run
        self._clock = clock or _no_clock

    # ------------------------------------------------------------ what happens

    @_timed
    def launched(self, group: OpenGroup) -> None:
        """A group begins, with all its members."""
        if self.groups is not None:
            self.groups.group_launched(_key(group))

    @_timed
    def task_type_known(self, group: OpenGroup) -> None:
        """The environment of a member said what kind of problem it is."""
        if self.groups is not None:
            self.groups.task_type_known(_key(group), group.task_type)

    @_timed
    def stepped(self, group: OpenGroup, place: int, event: MemberStepped) -> Verdict | None:
        """A member of a group took a step. The verdict on the group, where there is one now."""
        groups = self.groups
        if groups is None:
            return None
        key = _key(group)
        groups.observe(
            key,
            place,
            event.env_step,
            event.action,
            event.observation,
            reply=event.reply,
            is_admissible=event.is_admissible,
            progress=event.progress,
            logprob=event.logprob,
        )
        return None if event.is_last else groups.decision(key)  # how it ends is told next, and may matter

    @_timed
    def is_futile(self, group: OpenGroup, place: int, event: MemberStepped) -> bool:
        """Whether a member that took a step is to be stopped; not told of the last step, after which there is nothing to stop."""
        members = self.members
        if members is None or event.is_last:
            return False
        key = _key(group)
        if event.env_step == 1:
            before = event.progress if event.progress_before is None else event.progress_before
            members.observe(key, place, 0, event.observation, None, before)
        return members.observe(
            key,
            place,
            event.env_step,
            event.reply,
            event.is_admissible,
            event.progress,
            event.action,
            reward=event.reward,
            logprob=event.logprob,
        )

    @_timed
    def delivered(self, group: OpenGroup, place: int, rollout: Rollout, *, is_counted: bool) -> str | None:
        """A member delivered and stays in its group; is_counted: its reward has a part in the statistics. A warning, or None."""
        is_comparable = is_counted and rollout.reward is not None and rollout.failure is None
        reward = rollout.reward if is_comparable else None
        key = _key(group)
        if self.groups is not None:
            self.groups.member_ended(key, place, reward, is_comparable, is_replaced=False)
        if self.members is None:
            return None
        return self.members.member_ended(key, place, reward, is_comparable, env_steps=rollout.env_steps)

    @_timed
    def ended(self, group: OpenGroup, place: int) -> None:
        """A member ended by itself; its reward is told when it has been scored."""
        if self.groups is not None:
            self.groups.member_ended(_key(group), place, None, True, is_replaced=False)

    @_timed
    def lost(self, group: OpenGroup, place: int, *, is_replaced: bool) -> None:
        """A member failed, was rejected or begins anew; is_replaced: another one runs in its stead, here or in another place."""
        key = _key(group)
        if self.groups is not None:
            self.groups.member_ended(key, place, comparable=False, is_replaced=is_replaced)
        if self.members is not None:
            self.members.member_ended(key, place, comparable=False)

    @_timed
    def decision(self, group: OpenGroup) -> Verdict | None:
        """The verdict on a group of which a member has ended, where there is one now."""
        return None if self.groups is None else self.groups.decision(_key(group))

    @_timed
    def left(self, group: OpenGroup, rewards: Sequence[float] | None = None) -> str | None:
        """A group ran to its end, with these rewards that count, or left otherwise. Answers with a warning, or None. Again is fine."""
        key = _key(group)
        if self.members is not None:
            self.members.group_ended(key)
        return None if self.groups is None else self.groups.group_ended(key, rewards)

    def holds(self, group: OpenGroup, place: int) -> bool:
        """Whether a member has to wait for the decision on its group."""
        return self.barrier and self.groups is not None and self.groups.holds(_key(group), place)

    # ------------------------------------------------------------ what it knows

    def metrics(self, tokens_per_env_step: float | None) -> dict[str, float]:
        """`gate/...` since the start of the run."""
        out = {"gate/seconds": self.seconds}
        for keeper in (self.groups, self.members):
            if keeper is not None:
                out |= keeper.metrics(tokens_per_env_step)
        return {name: float(value) for name, value in out.items()}

    def state_dict(self) -> dict[str, Any]:
        """Of both keepers, as plain data."""
        return {
            "groups": None if self.groups is None else self.groups.state_dict(),
            "members": None if self.members is None else self.members.state_dict(),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, without any running group. Raises `RecordError`, or `GateError`, for one of another gate."""
        for name, keeper in (("groups", self.groups), ("members", self.members)):
            saved = state[name]
            if (saved is None) != (keeper is None):
                raise RecordError(
                    f"the saved state of the gate {'has no' if saved is None else 'has a'} keeper of {name}, the configuration "
                    f"{'has none' if keeper is None else 'has one'} - resume with the settings of the saved run"
                )
            if keeper is not None:
                keeper.load_state_dict(saved)
        self.seconds = float(state["seconds"])


def _no_clock() -> float:
    return 0.0


def _key(group: OpenGroup) -> tuple[str, int]:
    return group.task.task_id, group.epoch
