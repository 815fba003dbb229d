"""Finished groups, step by step: what a rule that looks at a group more than once is fitted on and judged by."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from sluice.errors import GateError
from sluice.gate.decision import differ
from sluice.gate.futility import MemberRule
from sluice.gate.traces import GroupTrace, Look, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedMember:
    """One trajectory that ran to its end."""

    steps: tuple[Step, ...]
    reward: float
    first_observation: Hashable = None  # what the reset answered; None: not known
    first_progress: float | None = None  # what the environment said before the first step
    earned: tuple[float, ...] | None = None  # reward so far after each step; None: nothing before the last
    tokens: tuple[int, ...] | None = None  # sampled for each step; None: not known

    def earned_by(self, step: int) -> float:
        """The reward that it had after so many steps."""
        if step >= len(self.steps):
            return self.reward
        return 0.0 if self.earned is None else self.earned[step - 1]

    def until(self, step: int) -> PlayedMember:
        """The same, stopped after so many steps; 0: not stopped."""
        if not 0 < step < len(self.steps):
            return self
        return replace(self, steps=self.steps[:step], reward=self.earned_by(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """One group whose members all ran to their end."""

    key: Hashable
    members: tuple[PlayedMember, ...]
    task_type: str | None = None

    def __post_init__(self) -> None:
        if len(self.members) < 2 or not all(member.steps for member in self.members):
            raise GateError(f"group {self.key!r}: expected at least two members with at least one step each - leave it out")

    @property
    def is_equal(self) -> bool:
        """Whether all rewards are the same, so that the group teaches nothing."""
        return not differ([member.reward for member in self.members])

    @property
    def env_steps(self) -> int:
        """Of all members."""
        return sum(len(member.steps) for member in self.members)


def looks(group: PlayedGroup, trace: GroupTrace, steps: Sequence[int] | None = None) -> Iterator[Look]:
    """What a group shows after each step (of the given ones) while it is open, as if its members stepped together."""
    wanted = None if steps is None else {*steps}
    for t in range(1, max(len(member.steps) for member in group.members) + 1):
        for name, member in enumerate(group.members):
            if len(member.steps) >= t:
                trace.add(name, member.steps[t - 1], member.first_observation)
                if len(member.steps) == t:
                    trace.end(name, member.reward)
        if wanted is None or t in wanted:
            look = trace.look(t, range(len(group.members)))
            if not look.is_open:
                return
            yield look


def with_futility(group: PlayedGroup, rule: MemberRule) -> PlayedGroup:
    """The group as it would have been with every futile member stopped, at once and without audits."""
    stops = [rule.stop_of(member.steps[:-1], member.first_observation, member.first_progress) for member in group.members]  # not at its end
    return replace(group, members=tuple(member.until(stop or 0) for member, stop in zip(group.members, stops, strict=True)))
