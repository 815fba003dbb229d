"""Fakes that several rooms share: tasks, rollouts, and a player that plays the machine's score step by step, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sluice.config.models import FilterConfig, RewardConfig, VerifierConfig
from sluice.filters import DomainFilters, build_domain_filters
from sluice.scheduler import GroupRecord, Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import Batch, Failure, FinishReason, Group, Rollout, Task, Turn

NO_FILTER = FilterConfig(type="no_filter")
STD_FILTER = FilterConfig(type="std_filter")


def make_task(task_id: str = "t0", domain: str = "math") -> Task:
    return Task(task_id=task_id, domain=domain, prompt=f"prompt of {task_id}", prompt_ids=np.array([5, 6, 7], dtype=np.int64), answer="1")


def make_turn(tokens: int = 2, version: int = 0, finish_reason: FinishReason = "stop", text: str = "1") -> Turn:
    return Turn(
        prompt_ids=np.array([5, 6, 7], dtype=np.int64),
        token_ids=np.arange(tokens, dtype=np.int64),
        inference_logprobs=np.full(tokens, -0.5, dtype=np.float32),
        text=text,
        finish_reason=finish_reason,
        policy_version=version,
    )


def make_rollout(
    launch: ev.LaunchMember | None = None,
    reward: float | None = 1.0,
    *,
    tokens: int = 2,
    finish_reason: FinishReason = "stop",
    version: int = 0,
    metrics: Mapping[str, float] | None = None,
    attempt_id: int = 0,
    group_id: int = 0,
    member_index: int = 0,
    task_id: str = "t0",
    text: str = "1",
) -> Rollout:
    return Rollout(
        attempt_id=attempt_id if launch is None else launch.attempt_id,
        group_id=group_id if launch is None else launch.group_id,
        member_index=member_index if launch is None else launch.member_index,
        task_id=task_id if launch is None else launch.task.task_id,
        turns=(make_turn(tokens, version, finish_reason, text),),
        finish_reason=finish_reason,
        reward=reward,
        metrics=metrics or {},
        failure=None if reward is not None else Failure(cause="infrastructure", reason="reward_missing"),
    )


def make_group(rewards: Iterable[float | None], *, task: Task | None = None, group_id: int = 0, tokens: int = 2) -> Group:
    task = task or make_task()
    rollouts = tuple(
        make_rollout(reward=reward, member_index=i, attempt_id=group_id * 100 + i, group_id=group_id, task_id=task.task_id, tokens=tokens)
        for i, reward in enumerate(rewards)
    )
    return Group(
        group_id=group_id,
        task=task,
        rollouts=rollouts,
        start_step=0,
        round=1,
        epoch=0,
        counted=tuple(rollout.reward is not None for rollout in rollouts),
    )


def make_filters(
    query: FilterConfig = STD_FILTER, response: FilterConfig | None = None, *, group_size: int = 4, domains: Iterable[str] = ("math",)
) -> Mapping[str, DomainFilters]:
    reward = RewardConfig(verifier=VerifierConfig(type="exact"), query_filter_config=query, response_filter_config=response)
    return build_domain_filters(dict.fromkeys(domains, reward), group_size)


class ListSource:
    """Tasks from a list, once, returned ones first. Endless when `make` is given."""

    def __init__(self, tasks: Iterable[Task] = (), make: Callable[[int], Task] | None = None) -> None:
        self.tasks = list(tasks)
        self.make = make
        self.drawn: list[str] = []
        self.returned: list[str] = []
        self._position = 0
        self._back: list[Task] = []
        self._by_id: dict[str, Task] = {}

    def draw(self) -> tuple[Task, int] | None:
        if self._back:
            task = self._back.pop(0)
        elif self.make is not None:
            task = self.make(self._position)
            self._position += 1
        elif self._position < len(self.tasks):
            task = self.tasks[self._position]
            self._position += 1
        else:
            return None
        self._by_id[task.task_id] = task
        self.drawn.append(task.task_id)
        return task, 0

    def put_back(self, task_id: str, epoch: int) -> None:
        self.returned.append(task_id)
        self._back.append(self._by_id[task_id])


@dataclass
class MachinePlayer:
    """Plays one machine by hand: draws at once, keeps launched members until told how they end, checks the invariants after every event."""

    scheduler: Scheduler
    source: ListSource
    pending: dict[int, ev.LaunchMember] = field(default_factory=dict)
    acks: list[int] = field(default_factory=list)  # cancels not acknowledged yet, with `hold_acks`
    hold_acks: bool = False
    records: list[GroupRecord] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    instructions: list[ev.Instruction] = field(default_factory=list)  # all, in the order in which they were carried out
    launches: list[ev.LaunchMember] = field(default_factory=list)
    engine_tokens: int = 0  # the independent count
    now: float = 0.0
    wake_at: float | None = None
    loops: list[ev.Instruction] = field(default_factory=list)  # what was said to user-defined loops

    @classmethod
    def make(
        cls,
        *,
        query: FilterConfig = STD_FILTER,
        response: FilterConfig | None = None,
        source: ListSource | None = None,
        domains: Iterable[str] = ("math",),
        **settings: object,
    ) -> MachinePlayer:
        config = SchedulerConfig(**{"group_size": 4, **settings})  # type: ignore[arg-type]
        filters = make_filters(query, response, group_size=config.group_size, domains=domains)
        return cls(Scheduler(config, filters), source or ListSource(make=lambda i: make_task(f"t{i}")))

    def tell(self, event: ev.Event) -> None:
        self.now += 1.0
        todo = list(self.scheduler.handle(event, self.now))
        while todo:
            instruction = todo.pop(0)
            self.instructions.append(instruction)
            match instruction:
                case ev.DrawTask():
                    drawn = self.source.draw()
                    answer = ev.TasksExhausted() if drawn is None else ev.TaskDrawn(task=drawn[0], epoch=drawn[1])
                    todo = list(self.scheduler.handle(answer, self.now)) + todo
                case ev.LaunchMember():
                    self.pending[instruction.attempt_id] = instruction
                    self.launches.append(instruction)
                case ev.CancelMember():
                    if self.hold_acks:
                        self.acks.append(instruction.attempt_id)
                    else:
                        todo = self.acknowledge(instruction.attempt_id) + todo
                case ev.ReturnTask():
                    self.source.put_back(instruction.task.task_id, instruction.epoch)
                case ev.RecordGroup():
                    self.records.append(instruction.record)
                case ev.DeliverBatch():
                    self.batches.append(instruction.batch)
                    self.metrics.append(instruction.metrics)
                case ev.Warn():
                    self.warnings.append(instruction.message)
                case ev.Fail():
                    self.failures.append(instruction.message)
                case ev.WakeAt():
                    self.wake_at = instruction.when
                case ev.RunLoop() | ev.CancelLoop() | ev.MemberJudged() | ev.AttemptRefused():
                    self.loops.append(instruction)
                case _:
                    raise AssertionError(instruction)
        self.check()

    def acknowledge(self, attempt_id: int, tokens: int = 1) -> list[ev.Instruction]:
        if self.pending.pop(attempt_id, None) is None:
            tokens = 0
        self.engine_tokens += tokens
        return list(self.scheduler.handle(ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=tokens), self.now))

    def want(self, groups: int) -> None:
        self.tell(ev.BatchWanted(groups=groups))

    def finish(self, attempt_id: int, reward: float | None = 1.0, *, tokens: int = 2, finish_reason: FinishReason = "stop") -> None:
        launch = self.pending.pop(attempt_id)
        self.engine_tokens += tokens
        rollout = make_rollout(launch, reward, tokens=tokens, finish_reason=finish_reason, version=self.scheduler.step)
        self.tell(ev.MemberFinished(rollout=rollout))

    def fail(self, attempt_id: int, tokens: int = 1) -> None:
        self.pending.pop(attempt_id)
        self.engine_tokens += tokens
        failure = Failure(cause="infrastructure", reason="engine_error")
        self.tell(ev.MemberFailed(attempt_id=attempt_id, failure=failure, sampled_tokens=tokens))

    def finish_group(self, group_id: int, rewards: Iterable[float | None]) -> None:
        """Finish the pending members of one group, in order of launch."""
        members = [launch.attempt_id for launch in self.pending.values() if launch.group_id == group_id]
        for attempt_id, reward in zip(members, rewards, strict=True):
            self.finish(attempt_id, reward)

    def open_group_ids(self) -> list[int]:
        return sorted({launch.group_id for launch in self.pending.values()})

    def advance(self) -> None:
        self.tell(ev.StepAdvanced(step=self.scheduler.step + 1))

    # ------------------------------------------------------------ what must hold after every event

    def check(self) -> None:
        machine, ledger = self.scheduler, self.scheduler.ledger
        assert ledger.attempts_launched == len(self.launches)
        assert ledger.attempts_launched == sum(ledger.attempts.values()) + ledger.open_attempts + machine.running_attempts
        assert ledger.running_attempts == machine.running_attempts
        left_without_record = [g for g in machine._groups.values() if g.outcome is not None]
        assert ledger.groups_launched == sum(ledger.groups.values()) + machine.open_groups - len(left_without_record)
        assert len(self.records) == ledger.groups_launched - machine.open_groups
        assert max(Counter(record.group_id for record in self.records).values(), default=1) == 1
        assert ledger.total_tokens == self.engine_tokens
        counts = (*ledger.attempts.values(), *ledger.tokens.values(), *ledger.groups.values(), ledger.open_attempts)
        assert all(count >= 0 for count in counts)
        buffer = machine.buffer
        assert buffer.running + buffer.committed <= buffer.quota + machine.config.max_additional_running_prompts
        for batch in self.batches[-1:]:
            assert len(batch.groups) <= batch.requested
            for group in batch.groups:
                members = [rollout.member_index for rollout in group.rollouts]
                assert members == sorted(set(members))
                assert {rollout.group_id for rollout in group.rollouts} == {group.group_id}
                assert {rollout.task_id for rollout in group.rollouts} == {group.task.task_id}
                assert len(members) >= (machine.config.min_members or machine.config.group_size)
            assert len({group.group_id for group in batch.groups}) == len(batch.groups)
