"""What the machine is told (events) and what it answers (instructions): the score that every player plays.

Players are the local shell, the simulator and, for a cluster, Ray. All records are frozen; the machine never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.types import EMPTY, Batch, Category, Failure, Rollout, Task, Verdict

# ---------------------------------------------------------------- events: something happened


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWanted:
    """The trainer asks for its next batch. At most one request is open at a time."""

    groups: int  # >= 1
    batches_left: int | None = None  # batches that will be asked for after this one: nothing is prepared beyond them; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDrawn:
    """The task source answered the oldest open `DrawTask`: answers come in the order of the draws."""

    task: Task
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksExhausted:
    """The task source answered the oldest open `DrawTask`: nothing (of its domain) is left, until a task is returned to it."""


class MemberStepped(NamedTuple):
    """The environment of an attempt took a step. A named tuple, as `LaunchMember` is: one comes for every turn of every trajectory."""

    attempt_id: int
    env_step: int  # 1 for the first
    action: str
    observation: str  # what the policy saw before it
    reply: str = ""  # what the environment answered
    reward: float = 0.0  # of the trajectory so far
    is_admissible: bool | None = None  # whether the action was among the commands that would do something; None: nobody says
    progress: float | None = None  # as the environment says, and
    progress_before: float | None = None  # before the action; None: it does not say
    logprob: float | None = None  # mean log-prob of the tokens with which the policy chose the action
    task_type: str | None = None  # kind of problem; None: it does not say
    is_last: bool = False  # the trajectory ends with it: how is told next


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnded:
    """The trajectory of an attempt ended by itself, and what it earned is told later, by `MemberFinished`: for players that score whole
    rounds. The gate need not wait for it any more. Where an end is told with its reward there is no need of this."""

    attempt_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFinished:
    """An attempt delivered a rollout, scored (`reward`) or with the reason why it has no reward (`failure`)."""

    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFailed:
    """An attempt never delivered: crash, lost worker, engine error."""

    attempt_id: int
    failure: Failure
    sampled_tokens: int  # what it had sampled by then
    is_final: bool = False  # the engine can never serve it: no other try of the member helps, nor does drawing its prompt once more


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCancelled:
    """The shell carried out a `CancelMember`, or a user-defined loop stopped an attempt of its own. Sent at once, never awaited."""

    attempt_id: int
    sampled_tokens: int  # what it had sampled when the shell let go of it


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTokens:
    """The engine sampled further tokens for an attempt that had already ended (a forward pass under way at its cancel)."""

    attempt_id: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvanced:
    """The optimiser step on the last delivered batch is done; the run is now at `step`."""

    step: int
    useful_groups: int = 0  # groups of that batch with some non-zero advantage
    useful_tokens: int = 0  # sampled tokens of its rollouts with non-zero advantage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker died with everything it was doing: each of its attempts failed, for the same reason."""

    attempts: Mapping[int, int]  # attempt_id -> tokens it had sampled
    detail: str = ""  # for a person: which worker, how it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdated:
    """The engine samples with the weights of `version` from now on."""

    version: int
    generating: tuple[int, ...] = ()  # attempts that began under older weights and are still generating


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTick:
    """Time has passed: the answer to `WakeAt`. A tick too many does no harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopAttempt:
    """A user-defined loop starts one try at one member of the group it owns. Answered by `LaunchMember`, or `AttemptRefused`."""

    group_id: int
    member_index: int  # 0 .. group_size + redundancy - 1, or the next one behind: a further member to choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReturned:
    """A user-defined loop is done with its group: with rollouts, or without any, or with its own verdict on them."""

    group_id: int
    rollouts: tuple[Rollout, ...] | None  # each of an attempt that was delivered and not rejected; None: it gives the group up
    reason: str = ""  # why it gives up; "": loop_returned_none
    detail: str = ""  # of that, for a person; the first one of each reason is told
    judged: Verdict | None = None  # the loop's own verdict, which is final; None: the query filter judges


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """The run ends: everything running is cancelled, everything waiting is discarded and counted."""


Event = (
    BatchWanted
    | TaskDrawn
    | TasksExhausted
    | MemberStepped
    | MemberEnded
    | MemberFinished
    | MemberFailed
    | MemberCancelled
    | LateTokens
    | WorkerLost
    | StepAdvanced
    | WeightsUpdated
    | ClockTick
    | LoopAttempt
    | GroupReturned
    | Shutdown
)

# ---------------------------------------------------------------- instructions: do something


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTask:
    """Draw one task and answer with `TaskDrawn` or `TasksExhausted`."""

    domain: str | None = None  # which domain it must be of; None: whatever comes next


class LaunchMember(NamedTuple):
    """Start one attempt at one member. A named tuple, since one is made for every attempt and this is three times faster."""

    attempt_id: int
    group_id: int
    member_index: int
    task: Task
    seed: int  # of this attempt alone: the same seed, prompt and weights sample the same tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMember:
    """Stop one attempt, generation or reward call, and answer with `MemberCancelled` at once."""

    attempt_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMember:
    """End a trajectory at once, as `stopped_futile` with the reward so far: its `MemberFinished` is the answer.

    One that has ended meanwhile is left alone.
    """

    attempt_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldMember:
    """Do not give a trajectory its next turn before `ReleaseMember`, or its cancel."""

    attempt_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseMember:
    """A trajectory that was held goes on."""

    attempt_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnTask:
    """A drawn task was never judged (its group was cancelled or not needed): draw it again before new ones."""

    task: Task
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoop:
    """Start the user-defined loop for one group; it ends with `GroupReturned`."""

    group_id: int
    task: Task
    epoch: int
    start_step: int
    round: int = 1  # 1 for the groups first asked for, n + 1 for the replacement of a group of round n


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelLoop:
    """Stop the loop of one group. Nothing has to be answered; attempts under way get a `CancelMember` each."""

    group_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRefused:
    """Answer to `LoopAttempt`: the rounds of this member are used up, or the group is closed."""

    group_id: int
    member_index: int
    reason: str  # "response_retries", "group_closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJudged:
    """Answer to `MemberFinished` of a group that a loop owns: whether the response stays in the group."""

    attempt_id: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a `ClockTick` at this time (seconds of the machine's clock) or soon after. A later WakeAt replaces an earlier one."""

    when: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverBatch:
    """Hand this batch to the trainer."""

    batch: Batch
    metrics: Mapping[str, float]  # of its filling


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordGroup:
    """A group left: write its record down."""

    record: GroupRecord
    members: tuple[tuple[Rollout, bool], ...] = ()  # that it had then, and whether each counts; () where an earlier process had them
    is_whole: bool = False  # every member had delivered, or was lost for good: it was judged, or about to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Tell the user; each `key` once per run unless the machine repeats it on purpose."""

    key: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot go on as configured: raise `ResampleError(message)` where the batch is awaited."""

    message: str


Instruction = (
    DrawTask
    | LaunchMember
    | CancelMember
    | StopMember
    | HoldMember
    | ReleaseMember
    | ReturnTask
    | RunLoop
    | CancelLoop
    | AttemptRefused
    | MemberJudged
    | WakeAt
    | DeliverBatch
    | RecordGroup
    | Warn
    | Fail
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """How one launched group left: exactly one of these per group, written once, never recomputed."""

    group_id: int
    task_id: str
    domain: str
    epoch: int
    round: int
    start_step: int  # global_step at launch
    end_step: int  # global_step at exit
    outcome: str  # "trained", "dropped", "cut", "expired", "surplus", "cancelled", "discarded"
    reason: str  # "kept", or the verdict's reason, or why it was cancelled
    category: Category | None  # None unless dropped or cut
    source: str  # the filter or the part of the machine that decided
    attempts: int  # attempts launched for it, replacements included
    sampled_tokens: int  # by all its attempts
    seconds: float  # from launch to exit
    policy_version: int  # oldest among its rollouts; -1: none delivered
    rewards: tuple[float | None, ...]  # raw task reward per member; None: no reward
    env_steps: int = 0  # taken by the environments of all its attempts
    task_type: str | None = None  # kind of problem, as the environment of the first member that stepped or delivered says
    evidence: Mapping[str, float] = field(default_factory=lambda: EMPTY)  # decided on; `gate/...`: what the gate saw and kept
