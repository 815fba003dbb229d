"""Fakes that several rooms share: tasks, rollouts, and a player that plays the machine's score step by step, in any order."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from sluice.config.models import FilterConfig, RewardConfig, VerifierConfig
from sluice.environments import EnvFault, Environment, EnvironmentConfig, EnvReset, EnvStep, InlineRunner, RunningCall
from sluice.environments.base import Call, FaultKind
from sluice.filters import DomainFilters, RatioGuard, build_domain_filters
from sluice.scheduler import GroupRecord, Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import Batch, Failure, FailureCause, FinishReason, Group, Rollout, Task, Turn, Verdict

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
    query: FilterConfig = STD_FILTER,
    response: FilterConfig | None = None,
    *,
    group_size: int = 4,
    domains: Iterable[str] = ("math",),
    min_members: int | None = None,
) -> Mapping[str, DomainFilters]:
    reward = RewardConfig(verifier=VerifierConfig(type="exact"), query_filter_config=query, response_filter_config=response)
    return build_domain_filters(dict.fromkeys(domains, reward), group_size, min_members=min_members)


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

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        assert domain is None, "a list does not know domains"
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


class DomainSource:
    """Tasks by domain, named after it: `math0`, `math1`, ... Endless, except for the domains that `sizes` limits."""

    def __init__(self, domains: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        self._lists = {
            domain: ListSource([make_task(f"{domain}{i}", domain) for i in range(sizes[domain])])
            if sizes is not None and domain in sizes
            else ListSource(make=lambda i, domain=domain: make_task(f"{domain}{i}", domain))
            for domain in domains
        }
        self.drawn: list[str] = []
        self.returned: list[str] = []

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        assert domain is not None, "a task of some domain was to be asked for"
        drawn = self._lists[domain].draw()
        if drawn is not None:
            self.drawn.append(drawn[0].task_id)
        return drawn

    def put_back(self, task_id: str, epoch: int) -> None:
        self.returned.append(task_id)
        self._lists[task_id.rstrip("0123456789")].put_back(task_id, epoch)

    def drawn_of(self, domain: str) -> int:
        """Draws of one domain, repeated ones included."""
        return len(self._lists[domain].drawn)


@dataclass
class MachinePlayer:
    """Plays one machine by hand: draws at once, keeps launched members until told how they end, checks the invariants after every event."""

    scheduler: Scheduler
    source: ListSource | DomainSource
    pending: dict[int, ev.LaunchMember] = field(default_factory=dict)
    acks: list[int] = field(default_factory=list)  # cancels not acknowledged yet, with `hold_acks`
    hold_acks: bool = False
    held: set[int] = field(default_factory=set)  # attempts that may not take their next turn
    stops: list[int] = field(default_factory=list)  # attempts that were told to end at once
    draws: list[ev.DrawTask] = field(default_factory=list)  # not answered yet, with `hold_draws`
    hold_draws: bool = False  # a slow source: `answer_draw` answers the oldest
    records: list[GroupRecord] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    warning_keys: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    instructions: list[ev.Instruction] = field(default_factory=list)  # all, in the order in which they were carried out
    launches: list[ev.LaunchMember] = field(default_factory=list)
    engine_tokens: int = 0  # the independent count
    now: float = 0.0
    wake_at: float | None = None
    loops: list[ev.Instruction] = field(default_factory=list)  # what was said to user-defined loops
    open_loops: dict[int, ev.RunLoop] = field(default_factory=dict)  # group_id -> its loop, started and neither returned nor cancelled
    asked: list[tuple[int, int | None]] = field(default_factory=list)  # what `want` was asked for: (groups, batches left)
    inherited_launches: int = 0  # of an earlier process, after `resumed`
    inherited_records: int = 0

    @classmethod
    def make(
        cls,
        *,
        query: FilterConfig = STD_FILTER,
        response: FilterConfig | None = None,
        source: ListSource | DomainSource | None = None,
        domains: Iterable[str] = ("math",),
        guard: RatioGuard | None = None,
        **settings: object,
    ) -> MachinePlayer:
        config = SchedulerConfig(**{"group_size": 4, **settings})  # type: ignore[arg-type]
        filters = make_filters(query, response, group_size=config.group_size, domains=domains, min_members=config.min_members)
        return cls(Scheduler(config, filters, guard=guard), source or ListSource(make=lambda i: make_task(f"t{i}")))

    def tell(self, event: ev.Event, seconds: float = 1.0) -> None:
        """Tell one event, `seconds` after the last one, and carry out what follows in order: draws are answered in the order of draws."""
        self.now += seconds
        self.carry_out(self.scheduler.handle(event, self.now))

    def carry_out(self, instructions: Iterable[ev.Instruction]) -> None:
        self.carry_out_unchecked(instructions)
        self.check()

    def carry_out_unchecked(self, instructions: Iterable[ev.Instruction]) -> None:
        todo = list(instructions)
        while todo:
            instruction = todo.pop(0)
            self.instructions.append(instruction)
            match instruction:
                case ev.DrawTask():
                    if self.hold_draws:
                        self.draws.append(instruction)
                    else:
                        todo += self._drawn(instruction)
                case ev.LaunchMember():
                    self.pending[instruction.attempt_id] = instruction
                    self.launches.append(instruction)
                case ev.StopMember():
                    assert instruction.attempt_id in self.pending
                    self.stops.append(instruction.attempt_id)
                case ev.HoldMember():
                    assert instruction.attempt_id in self.pending
                    assert instruction.attempt_id not in self.held
                    self.held.add(instruction.attempt_id)
                case ev.ReleaseMember():
                    self.held.remove(instruction.attempt_id)
                case ev.CancelMember():
                    self.held.discard(instruction.attempt_id)
                    if self.hold_acks:
                        self.acks.append(instruction.attempt_id)
                    else:
                        todo += self.acknowledge(instruction.attempt_id)
                case ev.ReturnTask():
                    self.source.put_back(instruction.task.task_id, instruction.epoch)
                case ev.RecordGroup():
                    self.records.append(instruction.record)
                case ev.DeliverBatch():
                    self.batches.append(instruction.batch)
                    self.metrics.append(instruction.metrics)
                    self.check_batch(instruction.batch)
                case ev.Warn():
                    self.warnings.append(instruction.message)
                    self.warning_keys.append(instruction.key)
                case ev.Fail():
                    self.failures.append(instruction.message)
                case ev.WakeAt():
                    self.wake_at = instruction.when
                case ev.RunLoop():
                    self.loops.append(instruction)
                    self.open_loops[instruction.group_id] = instruction
                case ev.CancelLoop():
                    self.loops.append(instruction)
                    del self.open_loops[instruction.group_id]
                case ev.MemberJudged() | ev.AttemptRefused():
                    self.loops.append(instruction)
                case _:
                    raise AssertionError(instruction)

    def _drawn(self, draw: ev.DrawTask) -> list[ev.Instruction]:
        drawn = self.source.draw(draw.domain)
        answer = ev.TasksExhausted() if drawn is None else ev.TaskDrawn(task=drawn[0], epoch=drawn[1])
        return list(self.scheduler.handle(answer, self.now))

    def answer_draw(self) -> None:
        """The slow source answers the oldest open draw."""
        self.now += 1.0
        self.carry_out(self._drawn(self.draws.pop(0)))

    def acknowledge(self, attempt_id: int, tokens: int = 1) -> list[ev.Instruction]:
        if self.pending.pop(attempt_id, None) is None:
            tokens = 0
        self.engine_tokens += tokens
        return list(self.scheduler.handle(ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=tokens), self.now))

    def acknowledge_all(self) -> None:
        """The shell gets round to all cancels that were held."""
        while self.acks:
            self.carry_out(self.acknowledge(self.acks.pop(0)))

    # ------------------------------------------------------------ what happens

    def want(self, groups: int, batches_left: int | None = None) -> None:
        self.asked.append((groups, batches_left))
        self.tell(ev.BatchWanted(groups=groups, batches_left=batches_left))

    def finish(
        self,
        attempt_id: int,
        reward: float | None = 1.0,
        *,
        tokens: int = 2,
        finish_reason: FinishReason = "stop",
        version: int | None = None,
        failure: Failure | None = None,
    ) -> Rollout:
        """A member delivers. version: of the weights that sampled it; None: those of the current step."""
        launch = self.pending.pop(attempt_id)
        self.engine_tokens += tokens
        sampled_by = self.scheduler.step if version is None else version
        rollout = make_rollout(launch, reward, tokens=tokens, finish_reason=finish_reason, version=sampled_by)
        if failure is not None:
            rollout = dataclasses.replace(rollout, failure=failure)
        self.tell(ev.MemberFinished(rollout=rollout))
        return rollout

    def fail(self, attempt_id: int, tokens: int = 1, *, cause: FailureCause = "infrastructure", reason: str = "engine_error") -> None:
        self.pending.pop(attempt_id)
        self.engine_tokens += tokens
        failure = Failure(cause=cause, reason=reason)
        self.tell(ev.MemberFailed(attempt_id=attempt_id, failure=failure, sampled_tokens=tokens))

    def lose_worker(self, attempt_ids: Iterable[int], tokens: int = 1) -> None:
        """A worker dies with these attempts."""
        attempts = dict.fromkeys(attempt_ids, tokens)
        for attempt_id in attempts:
            del self.pending[attempt_id]
            self.engine_tokens += tokens
        self.tell(ev.WorkerLost(attempts=attempts, detail="exit code 9"))

    def members(self, group_id: int) -> list[int]:
        """Attempts of one group that are under way, in order of launch."""
        return [launch.attempt_id for launch in self.pending.values() if launch.group_id == group_id]

    def finish_group(self, group_id: int, rewards: Iterable[float | None], *, version: int | None = None) -> None:
        """Finish the pending members of one group, in order of launch."""
        for attempt_id, reward in zip(self.members(group_id), rewards, strict=True):
            self.finish(attempt_id, reward, version=version)

    def lose_group(self, group_id: int) -> None:
        """Everything of a group fails until it is given up."""
        while members := self.members(group_id):
            self.fail(members[0])

    def open_group_ids(self) -> list[int]:
        return sorted({launch.group_id for launch in self.pending.values()})

    def advance(self) -> None:
        self.tell(ev.StepAdvanced(step=self.scheduler.step + 1))

    def publish(self, version: int, generating: Iterable[int] = ()) -> None:
        self.tell(ev.WeightsUpdated(version=version, generating=tuple(generating)))

    def step(self) -> None:
        """What a trainer does after a batch: new weights, then the step."""
        self.publish(self.scheduler.step + 1)
        self.advance()

    def sleep(self, seconds: float) -> None:
        """Time passes; ticks come when they were asked for."""
        until = self.now + seconds
        while self.wake_at is not None and self.wake_at <= until:
            at, self.wake_at = self.wake_at, None
            self.tell(ev.ClockTick(), max(0.0, at - self.now))
        self.now = until

    # ------------------------------------------------------------ user-defined loops

    def start_attempt(self, group_id: int, member_index: int) -> int | None:
        """A loop starts one try; None: it was refused."""
        before = len(self.launches)
        self.tell(ev.LoopAttempt(group_id=group_id, member_index=member_index))
        return self.launches[-1].attempt_id if len(self.launches) > before else None

    def deliver(self, group_id: int, rewards: Iterable[float | None]) -> list[Rollout]:
        """A loop tries each member once and hands its response in; the rollouts, whatever the machine thinks of them."""
        rollouts = []
        for index, reward in enumerate(rewards):
            attempt_id = self.start_attempt(group_id, index)
            assert attempt_id is not None
            rollouts.append(self.finish(attempt_id, reward))
        return rollouts

    def give_back(self, group_id: int, rollouts: Iterable[Rollout] | None, *, reason: str = "", judged: Verdict | None = None) -> None:
        """A loop is done with its group."""
        self.open_loops.pop(group_id, None)
        returned = None if rollouts is None else tuple(rollouts)
        self.tell(ev.GroupReturned(group_id=group_id, rollouts=returned, reason=reason, judged=judged))

    # ------------------------------------------------------------ what came of it

    def trained(self) -> list[list[int]]:
        """Ids of the groups of each batch."""
        return [[group.group_id for group in batch.groups] for batch in self.batches]

    def left(self) -> list[tuple[int, str, str]]:
        """(group, outcome, reason) of all that left, in order."""
        return [(record.group_id, record.outcome, record.reason) for record in self.records]

    def record_of(self, group_id: int) -> GroupRecord:
        return next(record for record in self.records if record.group_id == group_id)

    # ------------------------------------------------------------ what must hold after every event

    def check(self) -> None:
        machine, ledger = self.scheduler, self.scheduler.ledger
        assert set(machine._running) == set(self.pending)
        assert ledger.attempts_launched == len(self.launches) + self.inherited_launches
        assert ledger.attempts_launched == sum(ledger.attempts.values()) + ledger.open_attempts + machine.running_attempts
        assert ledger.running_attempts == machine.running_attempts
        left_without_record = [g for g in machine._groups.values() if g.outcome is not None]
        assert ledger.groups_launched == sum(ledger.groups.values()) + machine.open_groups - len(left_without_record)
        assert len(self.records) + self.inherited_records == ledger.groups_launched - machine.open_groups
        assert max(Counter(record.group_id for record in self.records).values(), default=1) == 1
        assert ledger.total_tokens == self.engine_tokens
        counts = (*ledger.attempts.values(), *ledger.tokens.values(), *ledger.groups.values(), ledger.open_attempts)
        assert all(count >= 0 for count in counts)
        assert {group_id for group_id, group in machine._groups.items() if group.has_loop} == set(self.open_loops)
        assert len(machine.slots.draws) == len(self.draws)
        self.check_quota()
        if machine.filling is not None:
            under_way = self.pending or self.draws or self.open_loops or machine._waits_for_weights()
            assert under_way, "a batch is wanted, but nothing is under way: this would wait for ever"

    def check_quota(self) -> None:
        buffer, config = self.scheduler.buffer, self.scheduler.config
        additional = config.max_additional_running_prompts
        carried = buffer.committed if config.surplus == "carry" and not config.is_async else 0
        if self.asked:  # after a resume, groups wait for the batch that will be asked for
            assert buffer.running + buffer.committed <= max(buffer.quota + additional, carried)
        if self.asked and not self.failures and not self.scheduler._stopped:
            groups, _ = self.asked[-1]
            ahead = math.ceil(Fraction(repr(config.async_generation_ratio)) * groups)
            assert buffer.quota <= ahead + (groups if self.scheduler.filling is not None else 0)

    def check_batch(self, batch: Batch) -> None:
        config = self.scheduler.config
        assert len(batch.groups) <= batch.requested
        assert batch.groups or batch.is_last
        for group in batch.groups:
            members = [rollout.member_index for rollout in group.rollouts]
            assert members == sorted(set(members))
            assert {rollout.group_id for rollout in group.rollouts} == {group.group_id}
            assert {rollout.task_id for rollout in group.rollouts} == {group.task.task_id}
            assert len(members) >= (config.min_members or config.group_size)
            if not (config.has_user_loop and config.max_additional_running_prompts):
                assert len(members) <= config.group_size
            for rollout, counted in zip(group.rollouts, group.counted, strict=True):
                assert not counted or (rollout.reward is not None and math.isfinite(rollout.reward))
            age = batch.step - min(group.start_step, group.policy_version)
            assert age <= config.domain_staleness.get(group.task.domain, config.staleness)
        assert len({group.group_id for group in batch.groups}) == len(batch.groups)


# ---------------------------------------------------------------- trajectories


class LossyTokenizer:
    """One token per character, but with two tokens for every lower-case letter, which both read as that letter.

    Whoever decodes and encodes again gets other tokens: tests see it.
    """

    eos_token_id = 1
    all_special_tokens = ("<pad>", "<end>")
    SECOND = 1_000_000  # this much above a letter's first token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        ids: list[int] = []
        for part in text.split("<end>"):
            ids += [ord(letter) + 2 for letter in part]
            ids.append(self.eos_token_id)
        return ids[:-1]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join(chr(token % self.SECOND - 2) for token in token_ids if token >= 2)

    def written(self, text: str) -> list[int]:
        """A way to write a text that is not how it is encoded."""
        is_letter = {ord(letter) + 2 for letter in "abcdefghijklmnopqrstuvwxyz"}
        return [token + self.SECOND * (token in is_letter) for token in self.encode(text, add_special_tokens=False)]


@dataclass(kw_only=True)
class ScriptedEnvironment:
    """A problem of `length` steps, which the action "win" solves at once. What is to go wrong is said by `faults`, or by an action.

    faults: "reset" or "step" -> what happens there: "raise", "exit", "types" (a wrong answer), "hang" (in a thread).
    """

    length: int = 3
    faults: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] | None = ("go north", "look", "win")
    info: Mapping[str, object] = field(default_factory=dict)  # added to every info
    same_problem: bool = True  # whether the problem depends on the seed alone
    ends: bool = True
    lives: ClassVar[int] = 0
    actions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ScriptedEnvironment.lives += 1
        self.seed = self.steps = 0
        self.number = ScriptedEnvironment.lives

    def reset(self, seed: int) -> tuple[str, Mapping[str, object]]:
        self.seed, self.steps = seed, 0
        self._maybe_fail("reset")
        return f"room {seed % 97}", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, object]]:
        self.actions.append(action)
        self._maybe_fail("step")
        self.steps += 1
        is_won = action == "win"
        is_over = self.ends and self.steps >= self.length
        return f"after {action[:20]}", 1.0 if is_won else 0.25, is_won, is_over and not is_won, self._info()

    def close(self) -> None:
        pass

    def _info(self) -> dict[str, object]:
        problem = self.seed if self.same_problem else self.number
        commands = {} if self.commands is None else {"admissible_commands": list(self.commands)}
        return {"env_id": f"problem {problem}", "task_type": "rooms", **commands, **self.info}

    def _maybe_fail(self, call: str) -> None:
        match self.faults.get(call):
            case "raise":
                raise ValueError(f"broken in {call}")
            case "exit":
                raise SystemExit(3)
            case "types":
                self._info = lambda: {"progress": "much"}  # type: ignore[method-assign]
            case "hang":
                time.sleep(1.0)


class DelayedRunner:
    """A runner whose calls take time on the loop's clock before an inline one makes them, and may fail instead."""

    def __init__(self, inner: InlineRunner, seconds: Callable[[str], float], fault: Callable[[str], FaultKind | None]) -> None:
        self.name = inner.name
        self.running: RunningCall | None = None
        self._inner = inner
        self._seconds = seconds
        self._fault = fault

    async def reset(self, seed: int) -> EnvReset | EnvFault:
        return await self._call("reset", self._inner.reset, seed)

    async def step(self, action: str) -> EnvStep | EnvFault:
        return await self._call("step", self._inner.step, action)

    async def _call(self, call: Call, make: Callable[[Any], Awaitable[Any]], argument: int | str) -> Any:
        assert self.running is None, "one call at a time"
        seed = argument if isinstance(argument, int) else 0
        self.running = RunningCall(call=call, since=time.monotonic(), env_id=None, seed=seed)
        try:
            seconds = self._seconds(call)
            await asyncio.sleep(seconds)
            kind = self._fault(call)
            if kind is not None:
                self._inner.leave()
                return EnvFault(kind=kind, detail=f"{call}: {kind} as it was told", call=call)
            answer = await make(argument)
            return dataclasses.replace(answer, seconds=answer.seconds + seconds)
        finally:
            self.running = None

    def leave(self) -> None:
        assert self.running is None, "left in the middle of a call"
        self._inner.leave()

    async def close(self) -> None:
        await self._inner.close()

    def interrupt(self, why: str) -> None:
        raise AssertionError(why)


class DelayedHost:
    """Makes `DelayedRunner`s."""

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        seconds: Callable[[str], float] = lambda call: 1.0,
        fault: Callable[[str], FaultKind | None] = lambda call: None,
    ) -> None:
        self.runners: list[DelayedRunner] = []
        self._make = make
        self._seconds = seconds
        self._fault = fault

    def runner(self) -> DelayedRunner:
        inner = InlineRunner(EnvironmentConfig(type="rooms", run_in="inline"), self._make)
        self.runners.append(DelayedRunner(inner, self._seconds, self._fault))
        return self.runners[-1]

    async def __aenter__(self) -> DelayedHost:
        return self

    async def __aexit__(self, *_: object) -> None:
        for runner in self.runners:
            await runner.close()
