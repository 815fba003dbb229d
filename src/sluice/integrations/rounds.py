"""A player of the scheduler for those who generate whole batches at a time: it plays the machine's instructions in rounds, in lockstep.

What the machine wants launched is collected; when nothing else is left to do the whole of it is one round, which is sampled and scored in
one call, and then told to the machine member by member. So every bound, every filter, guard and count is the machine's own. Nothing here
waits or looks at a clock: the same machine, prompts and rewards give the same batch in every process that plays them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.errors import ResampleError, SchedulerBug
from sluice.scheduler import GroupRecord, Scheduler
from sluice.scheduler import events as ev
from sluice.types import Batch, Rollout, Task


class Prompts(Protocol):
    """Where tasks come from."""

    def draw(self) -> tuple[Task, int] | None:
        """The next task and its epoch; None: nothing is left."""

    def put_back(self, task: Task, epoch: int) -> None:
        """A drawn task was not judged: it comes again before new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A batch and what its filling took."""

    batch: Batch
    metrics: dict[str, float]
    rounds: int  # calls of `sample`
    records: tuple[GroupRecord, ...]  # of the groups that left meanwhile


Sample = Callable[[Sequence[ev.LaunchMember]], Sequence[Rollout]]
"""Samples and scores one round: one rollout per launch, in any order. Members of a new group stand side by side."""


class RoundPlayer:
    """Fills batches: see the top of this file.

    Args:
        machine: a synchronous one; its step goes on by one with every batch.
        prompts: where tasks come from.
        sample: called once per round.
        warn: gets the machine's warnings.
    """

    def __init__(self, machine: Scheduler, prompts: Prompts, sample: Sample, warn: Callable[[str], None]) -> None:
        if machine.config.is_async:
            raise SchedulerBug("rounds in lockstep need async_generation_ratio 0: nothing runs while the trainer steps")
        self.machine = machine
        self._prompts = prompts
        self._sample = sample
        self._warn = warn
        self._pending: dict[int, ev.LaunchMember] = {}  # wanted, not sampled
        self._sampling: dict[int, ev.LaunchMember] = {}  # being sampled
        self._cut: set[int] = set()  # of these, what the machine has cancelled
        self._untold: dict[int, Rollout] = {}  # sampled, and the machine has not been told
        self._delivered: list[ev.DeliverBatch] = []
        self._failures: list[str] = []
        self._records: list[GroupRecord] = []
        self._now = 0.0  # of the machine's clock: the number of rounds

    def fill(self, groups: int) -> Filled:
        """Sample until a batch of `groups` groups is full, or a bound says how it ends otherwise.

        Raises `ResampleError` when it cannot be filled, and whatever `sample` raises.
        """
        self._delivered, self._failures, self._records = [], [], []
        rounds = 0
        self._tell(ev.BatchWanted(groups=groups))
        while not self._delivered:
            if self._failures:
                raise ResampleError(self._failures[0])
            if not self._pending:
                raise SchedulerBug(f"nothing is left to sample, but the batch waits for {self.machine.waiting_for(self._now)}")
            self._sampling, self._pending = self._pending, {}
            rounds += 1
            self._now += 1.0
            self._play(self._sample(tuple(self._sampling.values())))
        delivered = self._delivered[0]
        return Filled(batch=delivered.batch, metrics=dict(delivered.metrics), rounds=rounds, records=tuple(self._records))

    def stepped(self, attempt_id: int, env_step: int, action: str, observation: str) -> None:
        """While a round is sampled: the environment of one of its attempts took a step."""
        self._tell(ev.MemberStepped(attempt_id, env_step, action, observation))

    def ended(self, attempt_id: int) -> None:
        """While a round is sampled: an attempt of it ended by itself. What it earned is told with the others, at the end of the round."""
        self._tell(ev.MemberEnded(attempt_id=attempt_id))

    def is_cut(self, attempt_id: int) -> bool:
        """While a round is sampled: whether nobody waits for an attempt of it any more."""
        return attempt_id in self._cut

    def trained(self, useful_groups: int, useful_tokens: int) -> None:
        """The last batch has gone to the trainer, with so many groups, and sampled tokens, of which some advantage is not 0."""
        self._tell(ev.StepAdvanced(step=self.machine.step + 1, useful_groups=useful_groups, useful_tokens=useful_tokens))

    def _play(self, rollouts: Sequence[Rollout]) -> None:
        """Tell the machine how the attempts of a round ended."""
        self._untold = {rollout.attempt_id: rollout for rollout in rollouts}
        if self._untold.keys() != self._sampling.keys():
            raise SchedulerBug(f"expected one rollout for each of {len(self._sampling)} launches, got {len(self._untold)}")
        cut, self._sampling, self._cut = self._cut, {}, set()
        for attempt_id in sorted(cut):
            self._tell(ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=self._untold.pop(attempt_id).sampled_tokens))
        while self._untold:
            attempt_id = next(iter(self._untold))
            self._tell(ev.MemberFinished(rollout=self._untold.pop(attempt_id)))

    def _tell(self, event: ev.Event) -> None:
        """Tell the machine, and carry out what it answers; draws are answered in their order."""
        events: deque[ev.Event] = deque([event])
        while events:
            for instruction in self.machine.handle(events.popleft(), self._now):
                match instruction:
                    case ev.LaunchMember():
                        self._pending[instruction.attempt_id] = instruction
                    case ev.DrawTask():
                        drawn = self._prompts.draw()
                        events.append(ev.TasksExhausted() if drawn is None else ev.TaskDrawn(task=drawn[0], epoch=drawn[1]))
                    case ev.ReturnTask():
                        self._prompts.put_back(instruction.task, instruction.epoch)
                    case ev.CancelMember(attempt_id=attempt_id):
                        if attempt_id in self._sampling:
                            self._cut.add(attempt_id)  # acknowledged with its tokens when the round has been sampled
                        else:
                            self._pending.pop(attempt_id, None)
                            rollout = self._untold.pop(attempt_id, None)
                            tokens = 0 if rollout is None else rollout.sampled_tokens
                            events.append(ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=tokens))
                    case ev.DeliverBatch():
                        self._delivered.append(instruction)
                    case ev.RecordGroup():
                        self._records.append(instruction.record)
                    case ev.Warn():
                        self._warn(instruction.message)
                    case ev.Fail():
                        self._failures.append(instruction.message)
                    case _:  # WakeAt: no setting of a lockstep player has a deadline; loops: there are none
                        pass
