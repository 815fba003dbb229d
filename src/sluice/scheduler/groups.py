"""A group on its way: which member has delivered, which attempt is under way, and the story so far."""

from __future__ import annotations

import math
import zlib
from typing import Final

from sluice.scheduler.events import GroupRecord
from sluice.scheduler.slots import Slot
from sluice.types import Category, Rollout, Task, Verdict

# splitmix64 (Steele et al., 2014)
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # splitmix64's increment: consecutive inputs give unrelated outputs


def scramble(value: int) -> int:
    """A 63-bit number from any integer, by splitmix64: the same on every machine, unrelated for neighbouring inputs."""
    state = value + _GOLDEN & _MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return (state ^ (state >> 31)) >> 1


def mix(*values: int) -> int:
    """One 63-bit number from several, in order."""
    state = 0
    for value in values:
        state = scramble(state ^ value)
    return state


class OpenGroup:
    """A launched group that has not left. Mutable, owned by the machine alone."""

    __slots__ = (
        "attempts",
        "category",
        "closed",
        "counted",
        "deadline",
        "delivered",
        "detached",
        "disqualified",
        "end_step",
        "env_steps",
        "epoch",
        "evidence",
        "gate_evidence",
        "group_id",
        "guard_ticket",
        "had_fault",
        "has_loop",
        "held",
        "lost",
        "missing",
        "open_tokens",
        "outcome",
        "reason",
        "rejections",
        "restored_s",
        "round",
        "running",
        "seed",
        "slot",
        "slots",
        "source",
        "start_step",
        "started_at",
        "story",
        "task",
        "task_type",
        "tokens",
        "tries",
    )

    def __init__(
        self, *, group_id: int, task: Task, epoch: int, slot: Slot, start_step: int, size: int, redundancy: int, seed: int, now: float
    ) -> None:
        places = size + redundancy
        self.group_id = group_id
        self.task = task
        self.epoch = epoch
        self.slot = slot
        self.round = slot.round
        self.start_step = start_step
        self.started_at = now
        self.seed = mix(seed, epoch, zlib.crc32(task.task_id.encode()))
        self.delivered: list[Rollout | None] = [None] * places  # by member_index
        self.counted = [False] * places  # whether the delivered member enters statistics
        self.tries = [0] * places  # attempts launched per member
        self.rejections = [0] * places  # delivered responses that were taken out, per member
        self.missing = size  # members that must still deliver, lost ones left out
        self.lost = 0  # members whose rounds are used up, where no other place could deliver in their stead
        self.running = 0  # attempts under way, detached ones included
        self.detached = 0  # attempts that were let go while the group lives on, and are not settled yet
        self.closed = False  # judged, or on its way out: no member is waited for any more
        self.deadline = math.inf  # by when it must be judged
        self.guard_ticket: int | None = None  # the ratio guard has counted it
        self.disqualified: Verdict | None = None  # a member made it worthless; it leaves when it has been judged
        self.restored_s: float | None = None  # seconds of its life in an earlier process, where it was committed
        self.has_loop = False  # a user-defined loop owns it and is under way
        self.had_fault = False  # some member was lost to broken machinery
        self.task_type: str | None = None  # kind of problem, as a member that stepped says; known only where there is a gate
        self.gate_evidence: dict[str, float] = {}  # what the gate saw, where it looked and did not cut
        self.held: list[int] = []  # attempts that wait for the gate's decision
        self.slots = [-1] * places  # id of the attempt under way for each member; -1: none
        self.attempts = 0
        self.tokens = 0  # sampled by settled attempts and delivered members
        self.env_steps = 0  # taken by the environments of its attempts
        self.open_tokens = 0  # of these, by delivered members
        self.outcome: str | None = None  # set once, when the group is on its way out
        self.reason = ""
        self.category: Category | None = None
        self.source = ""
        self.evidence: dict[str, float] = {}
        self.end_step = start_step
        self.story: list[tuple[float, str, int]] = [(now, "launched in round", slot.round)]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Raw task reward per member; None: none delivered, or delivered without one."""
        return tuple(None if rollout is None else rollout.reward for rollout in self.delivered)

    def record(self, now: float) -> GroupRecord:
        """How it left, for the journal."""
        versions = [rollout.policy_version for rollout in self.delivered if rollout is not None and rollout.turns]
        return GroupRecord(
            group_id=self.group_id,
            task_id=self.task.task_id,
            domain=self.task.domain,
            epoch=self.epoch,
            round=self.round,
            start_step=self.start_step,
            end_step=self.end_step,
            outcome=str(self.outcome),
            reason=self.reason,
            category=self.category,
            source=self.source,
            attempts=self.attempts,
            sampled_tokens=self.tokens,
            seconds=now - self.started_at if self.restored_s is None else self.restored_s,
            policy_version=min(versions, default=-1),
            rewards=self.rewards,
            env_steps=self.env_steps,
            task_type=self.task_type or next((rollout.task_type for rollout in self.delivered if rollout is not None), None),
            evidence=self.evidence | self.gate_evidence if self.gate_evidence else self.evidence,
        )

    def tell(self) -> str:
        """The whole story of the group, one line an event, for error messages."""
        start = self.story[0][0]
        lines = [f"group {self.group_id}, task {self.task.task_id!r}, domain {self.task.domain!r}, epoch {self.epoch}, round {self.round}:"]
        lines += [f"  +{when - start:.3f}s {what} {number}" for when, what, number in self.story]
        delivered = [index for index, rollout in enumerate(self.delivered) if rollout is not None]
        lines.append(f"  members delivered {delivered}, attempts running {[attempt_id for attempt_id in self.slots if attempt_id >= 0]}")
        return "\n".join(lines)
