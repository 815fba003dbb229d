"""A fast player of the bare machine: one heap of events instead of an event loop, so that millions of group lives can be looked at.

The engine has `workers` places and a queue; generations take lognormal times; scoring, draws, steps and publishes take theirs. What a
response is worth follows from the attempt's own seed, what goes wrong from the run's random numbers. Nothing here decides for the machine.

The engine's count of tokens is kept apart from everything the machine is told: it grows when a generation ends, whatever became of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from sluice.generation.base import Span, versions_of
from sluice.scheduler import Scheduler
from sluice.scheduler import events as ev
from sluice.scheduler.groups import mix
from sluice.sim import world
from sluice.sim.faults import Injector
from sluice.sim.invariants import Invariants, Violation
from sluice.sim.loops import SimulatedLoop
from sluice.sim.scenario import Scenario
from sluice.types import Failure, Rollout, Task, Turn

MOST_EVENTS: Final = 100_000  # of one run; the largest scenario needs a tenth
CRASHED_AT_ONCE: Final = 3  # generations that die with one worker
LONG: Final = 20.0  # a slow step, publish or draw, in units of a generation's median
_RUN: Final = 21  # a word that keeps these random numbers apart from those that drew the scenario

Codec = Callable[[Any], Any]
"""Writes a state down and reads it again, as a checkpoint does."""


class Attempt:
    """One generation in the simulated engine, and its scoring."""

    __slots__ = ("fate", "index", "is_acknowledged", "is_ended", "is_leaving", "latency_s", "launch", "loop", "sampled", "spans",
                 "started_at", "tokens", "told", "version")  # fmt: skip

    def __init__(self, launch: ev.LaunchMember, latency_s: float, tokens: int, fate: str, loop: SimulatedLoop | None) -> None:
        self.launch = launch
        self.latency_s = latency_s
        self.tokens = tokens  # that it will have when nobody stops it
        self.fate = fate
        self.loop = loop
        self.started_at = -1.0  # < 0: it waits for a place
        self.version = -1
        self.spans: list[Span] = []  # of earlier weights
        self.is_leaving = False  # its cancel is on its way
        self.is_acknowledged = False  # cancelled, and the machine knows
        self.told = 0  # tokens told with that
        self.is_ended = False  # the engine is done with it
        self.sampled = 0  # tokens in all, once it has ended

    def sampled_at(self, now: float) -> int:
        """Tokens so far."""
        if self.is_ended:
            return self.sampled
        if self.started_at < 0:
            return 0
        elapsed = now - self.started_at
        return self.tokens if elapsed >= self.latency_s else int(self.tokens * elapsed / self.latency_s)


class Player:
    """Plays one scenario from its beginning to its end, and checks what must hold after every event."""

    def __init__(
        self, scenario: Scenario, *, codec: Codec, trace: list[str] | None = None, most_events: int = MOST_EVENTS
    ) -> None:
        """codec: what a checkpoint's state goes through. trace: where every event and instruction is told, for a failure's story."""
        self.scenario = scenario
        self.now = 0.0
        self.events = 0  # told to the machine, by all processes
        self._trace = trace
        self._codec = codec
        self._most_events = most_events
        self._random = Random(mix(scenario.seed, _RUN)).random
        self.faults = Injector(scenario.faults, self._random)
        self._latencies = world.latencies(scenario.latency_s, scenario.latency_sigma)
        self._filters = world.make_filters(scenario)
        self._tasks = {task.task_id: task for task in world.make_tasks(scenario.tasks, scenario.domains)}
        self.source = world.make_source(scenario)
        self.machine = Scheduler(scenario.config, self._filters, guard=world.make_guard(scenario))
        self.engine_tokens = 0  # of generations that have ended: the independent count
        self.check = Invariants(self.machine, scenario)
        self._asked_again = 0
        self._kills = list(scenario.faults.kills)
        self._is_shut_down = False
        self._start_process()

    def _start_process(self) -> None:
        """What a fresh process has: nothing under way."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._process_events = 0
        self._seated: dict[int, Attempt] = {}
        self._queue: deque[Attempt] = deque()
        self._free = self.scenario.workers
        self._unsettled: dict[int, Attempt] = {}  # the machine has not been told how they ended
        self._leaving = 0  # of these, the ones whose cancel is on its way
        self._untold = 0  # tokens of ended generations that the machine has not been told of
        self._told_early = 0  # tokens of cancelled generations, told before the engine had ended them
        self._loops: dict[int, SimulatedLoop] = {}
        self._draws = 0  # asked for, not answered
        self._asked: deque[str | None] = deque()  # of these, the ones that are answered before anything else happens
        self._last_draw_at = self._last_publish_at = 0.0
        self._publishes = 0  # under way
        self._wake_at = math.inf
        self.version = self.machine.step
        self._is_wanting = False
        self._saved: _Checkpoint | None = None
        self._saves_at_step = False

    # ------------------------------------------------------------ the run

    def run(self) -> Invariants:
        """Play to the end. Raises `Violation`, or whatever the machine raises."""
        if self.scenario.faults.worker_crash_s:
            self._push(self._gap(self.scenario.faults.worker_crash_s), self._crash, None)
        if self.scenario.faults.false_tick_s:
            self._push(self._gap(self.scenario.faults.false_tick_s), self._false_tick, None)
        self._want(None)
        heap = self._heap
        while heap:
            self.now, _, act, argument = heappop(heap)
            act(argument)
            if self._kills or self._saved is not None:
                heap = self._save_or_die()
        if not self._is_shut_down:
            cause = self.machine.waiting_for(self.now)
            raise Violation(f"nothing will ever happen again, but the run has not ended; the machine waits for {cause or 'no batch'}")
        self.check.end(self)
        return self.check

    def _push(self, after_s: float, act: Callable[[Any], None], argument: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (self.now + after_s, self._sequence, act, argument))

    def _gap(self, mean_s: float) -> float:
        return -mean_s * math.log(1.0 - self._random())

    def _tell(self, event: ev.Event) -> None:
        """Tell the machine, carry out what it answers, and look at what must hold."""
        self.events += 1
        self._process_events += 1
        if self.events > self._most_events:
            raise Violation(f"the run has not ended after {self._most_events} events: it would go on for ever")
        self._carry_out_all(self._handle(event))
        self.check.after_event(self)
        if self._process_events == self.scenario.faults.stop_at and not self._is_shut_down:
            self.faults.counts["stop"] += 1
            self._shut_down()

    def _handle(self, event: ev.Event) -> list[ev.Instruction]:
        if self._trace is None:
            return self.machine.handle(event, self.now)
        self._trace.append(f"{self.now:.3f} > {told(event)}")
        out = self.machine.handle(event, self.now)
        self._trace.extend([f"{self.now:.3f}   < {told(instruction)}" for instruction in out])
        return out

    def _carry_out_all(self, instructions: list[ev.Instruction]) -> None:
        """Also what follows from tasks that are drawn at once. Their answers come in the order of the draws."""
        self._carry_out(instructions)
        asked = self._asked
        while asked:
            self._carry_out(self._handle(self._drawn(asked.popleft())))

    def _carry_out(self, instructions: list[ev.Instruction]) -> None:
        for instruction in instructions:
            kind = type(instruction)
            if kind is ev.LaunchMember:
                self._launch(instruction)  # type: ignore[arg-type]
            elif kind is ev.RecordGroup:
                self.check.record(instruction.record, self.now)  # type: ignore[union-attr]
            elif kind is ev.DrawTask:
                self._draw(instruction.domain)  # type: ignore[union-attr]
            elif kind is ev.CancelMember:
                self._cancel(instruction.attempt_id)  # type: ignore[union-attr]
            else:
                self._carry_out_rare(instruction)

    def _carry_out_rare(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.ReturnTask():
                self.source.put_back(instruction.task.task_id, instruction.epoch)
                self.check.returned(instruction.task.task_id, instruction.epoch)
            case ev.DeliverBatch():
                self._is_wanting = False
                self.check.batch(instruction.batch, instruction.metrics)
                if instruction.batch.groups:
                    is_slow = self.faults.happens("slow_consumer", self.scenario.faults.slow_consumer)
                    self._push(self.scenario.step_s + is_slow * LONG * self.scenario.latency_s, self._step, instruction.batch)
                else:
                    self._push(0.0, self._end, None)
            case ev.WakeAt():
                self._wake_at = instruction.when
                self._push(max(0.0, instruction.when - self.now), self._wake, instruction.when)
            case ev.RunLoop():
                self._run_loop(instruction)
            case ev.CancelLoop():
                loop = self._loops.pop(instruction.group_id)
                loop.on_cancelled(self.faults.happens("late_result", self.scenario.faults.late_result))
            case ev.AttemptRefused():
                if (refused := self._loops.get(instruction.group_id)) is not None:
                    refused.on_refused(instruction.reason)
            case ev.MemberJudged():
                pass  # the loop is told by `_finish`, which has the rollout
            case ev.Fail():
                self.check.failed(instruction.message)
                again = self._asked_again < self.scenario.asks_again
                if self._is_wanting or not again:  # else the trainer is busy, and asks when it is done
                    self._is_wanting = False
                    self._asked_again += again
                    self._push(0.0, self._want if again else self._end, None)
            case ev.Warn():
                self.check.warned(instruction.key)
            case _:
                raise Violation(f"no player knows the instruction {instruction!r}")

    # ------------------------------------------------------------ the trainer

    def _want(self, _: None) -> None:
        if self._is_shut_down:
            return
        batches = self.scenario.batches
        step = self.machine.step
        if step >= batches:
            self._shut_down()
            return
        self._is_wanting = True
        self.check.wanted(self.scenario.batch)
        left = batches - step - 1 if self.scenario.tells_batches_left else None
        self._tell(ev.BatchWanted(groups=self.scenario.batch, batches_left=left))

    def _step(self, batch: Any) -> None:
        """The optimiser step on a batch is done."""
        if self._is_shut_down:
            return
        step = batch.step + 1
        if self.scenario.publishes_first:
            self._publish(step)
        self._tell(
            ev.StepAdvanced(step=step, useful_groups=len(batch.groups), useful_tokens=sum(group.sampled_tokens for group in batch.groups))
        )
        self.check.stepped(step)
        if not self.scenario.publishes_first:
            is_slow = self.faults.happens("slow_publish", self.scenario.faults.slow_publish)
            delay = self.scenario.publish_s + is_slow * LONG * self.scenario.latency_s
            at = max(self.now + delay, self._last_publish_at)
            self._last_publish_at = at
            self._publishes += 1
            if at > self.now:
                self._push(at - self.now, self._published, step)
            else:
                self._published(step)
        if self._saves_at_step:
            self._save()
        if batch.is_last:
            self._push(0.0, self._end, None)
        else:
            self._push(self.scenario.pause_s, self._want, None)

    def _published(self, version: int) -> None:
        self._publishes -= 1
        self._publish(version)

    def _publish(self, version: int) -> None:
        if self._is_shut_down:
            return
        self.version = version
        generating = tuple(self._seated)
        mode = self.scenario.config.on_weight_update
        if mode == "continue":
            for attempt in self._seated.values():
                attempt.spans.append(Span(attempt.version, attempt.sampled_at(self.now)))
                attempt.version = version
        if generating:
            self.faults.counts["update_while_generating"] += 1
        self._tell(ev.WeightsUpdated(version=version, generating=generating))

    def _end(self, _: None) -> None:
        if not self._is_shut_down:
            self._shut_down()

    def _shut_down(self) -> None:
        self._is_shut_down = self.check.is_shut_down = True
        self._is_wanting = False
        self._tell(ev.Shutdown())

    # ------------------------------------------------------------ tasks

    def _draw(self, domain: str | None) -> None:
        self._draws += 1
        delay = self.scenario.draw_s
        if self.scenario.faults.slow_draw and self.faults.happens("slow_draw", self.scenario.faults.slow_draw):
            delay += LONG * self.scenario.latency_s
        self.check.asked += 1
        if delay or self._draws > len(self._asked) + 1:  # answers come in the order of the draws
            self._last_draw_at = at = max(self.now + delay, self._last_draw_at)
            self._push(at - self.now, self._answer_draw, domain)
        else:
            self._asked.append(domain)

    def _answer_draw(self, domain: str | None) -> None:
        self._tell(self._drawn(domain))

    def _drawn(self, domain: str | None) -> ev.Event:
        self._draws -= 1
        drawn = self.source.draw(domain)
        if drawn is None:
            self.check.nothing_left(domain)
            return ev.TasksExhausted()
        task, epoch = drawn
        self.check.drawn(task, epoch)
        return ev.TaskDrawn(task=task, epoch=epoch)

    # ------------------------------------------------------------ the engine

    def latency_of(self, launch: ev.LaunchMember) -> float:
        """Seconds that this generation takes. The seed of an attempt is a random number: each draw takes bits of its own."""
        return self._latencies[launch.seed & 1023]

    def reward_of(self, launch: ev.LaunchMember) -> float:
        """What the response is worth."""
        scenario, seed = self.scenario, launch.seed
        if (seed >> 40 & 1023) < 1024 * scenario.odd_share:
            return 7.0
        return 1.0 if (seed >> 20 & 1023) < 1024 * (launch.task.difficulty + scenario.solve_shift) else 0.0  # type: ignore[operator]

    def _launch(self, launch: ev.LaunchMember) -> None:
        loop = self._loops[launch.group_id] if self.scenario.config.has_user_loop else None
        if loop is not None:
            loop.on_launch(launch)
        tokens = 1 + ((launch.seed >> 10 & 1023) * self.scenario.max_tokens >> 10)
        attempt = Attempt(launch, self.latency_of(launch), tokens, self.faults.fate(), loop)
        self._unsettled[launch.attempt_id] = attempt
        self.check.launched(launch)
        if self._free:
            self._free -= 1
            self._seat(attempt)
        else:
            self._queue.append(attempt)

    def _seat(self, attempt: Attempt) -> None:
        attempt.started_at = self.now
        attempt.version = self.version
        self._seated[attempt.launch.attempt_id] = attempt
        if attempt.fate == "hang":
            self.faults.counts["hang"] += 1
            return
        self._sequence += 1
        heappush(self._heap, (self.now + attempt.latency_s, self._sequence, self._generated, attempt))

    def _leave_engine(self, attempt: Attempt, tokens: int) -> None:
        """A generation has ended, by itself or not: the next one gets its place."""
        attempt.is_ended = True
        attempt.sampled = tokens
        del self._seated[attempt.launch.attempt_id]
        self.engine_tokens += tokens
        if attempt.is_acknowledged:
            self._told_early -= attempt.told
            self._untold += tokens - attempt.told
        else:
            self._untold += tokens
        queue = self._queue
        while queue:
            following = queue.popleft()
            if not following.is_ended:
                self._seat(following)
                return
        self._free += 1

    def _generated(self, attempt: Attempt) -> None:
        if attempt.is_ended:  # it was stopped, or its worker died
            return
        self._leave_engine(attempt, attempt.tokens)
        if attempt.is_acknowledged:
            self._tell_late(attempt)
        elif attempt.fate == "engine_error":
            self.faults.counts["engine_error"] += 1
            self._settle(attempt)
            failure = Failure(cause="infrastructure", reason="engine_error", detail="simulated")
            self._failed(ev.MemberFailed(attempt_id=attempt.launch.attempt_id, failure=failure, sampled_tokens=attempt.sampled), attempt)
        elif self.scenario.score_s:
            self._push(self.scenario.score_s, self._finish, attempt)
        else:
            self._finish(attempt)

    def _settle(self, attempt: Attempt) -> None:
        """The machine is about to be told how an attempt ended."""
        del self._unsettled[attempt.launch.attempt_id]
        self._leaving -= attempt.is_leaving
        self._untold -= attempt.sampled

    def _failed(self, event: ev.Event, *attempts: Attempt) -> None:
        for attempt in attempts:
            if attempt.loop is not None and not attempt.is_leaving:
                attempt.loop.on_failed(attempt.launch.attempt_id)
        self._tell(event)

    def _finish(self, attempt: Attempt) -> None:
        """A response has its score."""
        if attempt.is_acknowledged:  # cancelled while it was scored
            return
        self._settle(attempt)
        rollout = self._rollout(attempt)
        event = ev.MemberFinished(rollout=rollout)
        loop = attempt.loop
        if loop is None:
            self._tell(event)
        else:
            self._tell_with_loop(event, loop)
        if self.scenario.faults.duplicate and self.faults.happens("duplicate", self.scenario.faults.duplicate):
            self._push(self.scenario.latency_s * self._random(), self._told_again, event)

    def _tell_with_loop(self, event: ev.MemberFinished, loop: SimulatedLoop) -> None:
        """As `_tell`; the loop hears of the verdict before anything else happens."""
        self.events += 1
        self._process_events += 1
        out = self._handle(event)
        for instruction in out:
            if type(instruction) is ev.MemberJudged:
                loop.on_judged(event.rollout, instruction.verdict)
        self._carry_out_all(out)
        self.check.after_event(self)

    def _told_again(self, event: ev.MemberFinished) -> None:
        self.check.late_results += 1
        self._tell(event)

    def _rollout(self, attempt: Attempt) -> Rollout:
        launch, tokens = attempt.launch, attempt.sampled
        is_truncated = (launch.seed >> 30 & 1023) < 1024 * self.scenario.truncated_share
        turns: tuple[Turn, ...]
        version, token_versions = attempt.version, None
        if attempt.spans:
            version, token_versions = versions_of([*attempt.spans, Span(version, tokens)])
        if token_versions is None:
            turns = world.turns_of(tokens, version, is_truncated)
        else:
            turns = world.mixed_turns_of(tokens, version, token_versions, is_truncated)
        reward: float | None = None
        failure = None
        fate = attempt.fate
        if not fate:
            reward = self.reward_of(launch)
        else:
            self.faults.counts[fate] += 1
            if fate == "reward_nan":
                reward = math.nan
            else:
                failure = Failure(cause="policy" if fate == "reward_timeout" else "infrastructure", reason=fate, detail="simulated")
        return Rollout(
            attempt_id=launch.attempt_id,
            group_id=launch.group_id,
            member_index=launch.member_index,
            task_id=launch.task.task_id,
            turns=turns,
            finish_reason="length" if is_truncated else "stop",
            reward=reward,
            failure=failure,
        )

    # ------------------------------------------------------------ cancels

    def _cancel(self, attempt_id: int) -> None:
        attempt = self._unsettled.get(attempt_id)
        if attempt is None or attempt.is_leaving:
            raise Violation(f"attempt {attempt_id} is cancelled, but it has ended or was cancelled before")
        attempt.is_leaving = True
        self._leaving += 1
        if self.scenario.faults.slow_ack and self.faults.happens("slow_ack", self.scenario.faults.slow_ack):
            self._push(self.scenario.latency_s * 2.0 * self._random(), self._acknowledge_late, attempt)
        else:
            self._carry_out(self._handle(self._acknowledged(attempt)))

    def _acknowledge_late(self, attempt: Attempt) -> None:
        if attempt.launch.attempt_id in self._unsettled:
            self._tell(self._acknowledged(attempt))
        else:  # its result was faster
            self._tell(ev.MemberCancelled(attempt_id=attempt.launch.attempt_id, sampled_tokens=attempt.sampled))

    def _acknowledged(self, attempt: Attempt) -> ev.MemberCancelled:
        """Let go of an attempt; what the engine still samples for it is told as late tokens."""
        attempt.is_acknowledged = True
        del self._unsettled[attempt.launch.attempt_id]
        self._leaving -= 1
        attempt.told = attempt.sampled_at(self.now)
        if attempt.is_ended:  # it was being scored
            self._untold -= attempt.told
        elif attempt.started_at < 0:
            attempt.is_ended = True
        else:
            self._told_early += attempt.told
            goes_on = self.scenario.faults.late_result and attempt.fate != "hang"
            if goes_on and self.faults.happens("late_result", self.scenario.faults.late_result):
                pass  # the engine does not hear of it: `_generated` tells the rest
            elif self.scenario.cancel_latency_s:
                self._push(self.scenario.cancel_latency_s, self._stopped, attempt)
            else:
                self._leave_engine(attempt, attempt.told)
        return ev.MemberCancelled(attempt_id=attempt.launch.attempt_id, sampled_tokens=attempt.told)

    def _stopped(self, attempt: Attempt) -> None:
        if not attempt.is_ended:
            self._leave_engine(attempt, attempt.sampled_at(self.now))
            self._tell_late(attempt)

    def _tell_late(self, attempt: Attempt) -> None:
        """What an attempt sampled after its cancel, and now and then its whole result."""
        if attempt.sampled > attempt.told:
            late = attempt.sampled - attempt.told
            self._untold -= late
            self.check.late_tokens += late
            self._tell(ev.LateTokens(attempt_id=attempt.launch.attempt_id, sampled_tokens=late))
        if self.scenario.faults.late_result and attempt.sampled == attempt.tokens and not attempt.fate:
            self.check.late_results += 1
            self._tell(ev.MemberFinished(rollout=self._rollout(attempt)))

    # ------------------------------------------------------------ what goes wrong by itself

    def _crash(self, _: None) -> None:
        """A worker dies with what it is generating, and is replaced."""
        if self._is_shut_down:
            return
        self._push(self._gap(self.scenario.faults.worker_crash_s), self._crash, None)
        dying = list(self._seated.values())[:CRASHED_AT_ONCE]
        if not dying:
            return
        self.faults.counts["worker_crash"] += 1
        known = [attempt for attempt in dying if not attempt.is_acknowledged]
        for attempt in dying:
            self._leave_engine(attempt, attempt.sampled_at(self.now))
        for attempt in known:
            self._settle(attempt)
        if known:
            lost = {attempt.launch.attempt_id: attempt.sampled for attempt in known}
            self._failed(ev.WorkerLost(attempts=lost, detail="simulated"), *known)
        for attempt in dying:
            if attempt.is_acknowledged:
                self._tell_late(attempt)

    def _false_tick(self, _: None) -> None:
        if not self._is_shut_down:
            self._push(self._gap(self.scenario.faults.false_tick_s), self._false_tick, None)
            self.faults.counts["false_tick"] += 1
            self._tell(ev.ClockTick())

    def _wake(self, when: float) -> None:
        if when == self._wake_at:
            self._tell(ev.ClockTick())

    # ------------------------------------------------------------ user-defined loops

    def _run_loop(self, run: ev.RunLoop) -> None:
        config = self.scenario.config
        members = config.group_size
        loop = SimulatedLoop(run, members, self.scenario.seed, self._tell_soon)
        self._loops[run.group_id] = loop
        self.check.launched_loop(run)
        if self.scenario.faults.hang and self.faults.happens("hang", self.scenario.faults.hang):
            return
        loop.start()

    def _tell_soon(self, event: ev.Event) -> None:
        self._push(0.0, self._tell_of_loop, event)

    def _tell_of_loop(self, event: ev.LoopAttempt | ev.GroupReturned) -> None:
        loop = self._loops.get(event.group_id)
        if type(event) is ev.GroupReturned:
            if loop is None:
                self.check.late_results += 1
            else:
                del self._loops[event.group_id]
        self._tell(event)

    # ------------------------------------------------------------ kill and resume

    def _save_or_die(self) -> list[tuple[float, int, Callable[[Any], None], Any]]:
        """The process takes its checkpoint, or dies and is followed by another one. Returns the heap that counts from now on."""
        kill = self._kills[0] if self._kills else None
        if kill is None or self._is_shut_down:
            self._kills, self._saved = [], None
            return self._heap
        if self._saved is None:
            if self._process_events >= kill.saved_at:
                if kill.at_step:
                    self._saves_at_step = True
                else:
                    self._save()
        elif self._process_events >= kill.killed_at:
            self._die()
        return self._heap

    def _save(self) -> None:
        self._saves_at_step = False
        in_flight = {attempt_id: attempt.sampled_at(self.now) for attempt_id, attempt in self._unsettled.items()}
        before = self.check.fingerprint()
        machine = self.machine.state_dict(in_flight)
        if self.check.fingerprint() != before:
            raise Violation("state_dict has changed the machine")
        outstanding = [(task_id, epoch) for task_id, epoch in machine["outstanding"]]
        self._saved = _Checkpoint(self._codec(machine), self._codec(self.source.state_dict(outstanding)), self.check.copy())

    def _die(self) -> None:
        saved = self._saved
        assert saved is not None
        self.faults.counts["kill"] += 1
        if self._trace is not None:
            self._trace.append(f"{self.now:.3f} the process dies; the next one goes on from its checkpoint")
        self.engine_tokens += sum(attempt.sampled_at(self.now) for attempt in self._seated.values())
        self._kills.pop(0)
        self.machine = Scheduler(self.scenario.config, self._filters, guard=world.make_guard(self.scenario))
        self.source = world.make_source(self.scenario)
        self.source.load_state_dict(saved.source)
        records = self.machine.load_state_dict(saved.machine, self._tasks)
        lost = self.engine_tokens - self.machine.ledger.total_tokens
        if lost < 0:
            raise Violation(f"the saved ledger accounts for {-lost} tokens that the engine never sampled")
        self.machine.ledger.tokens_were_lost(lost)
        self.check = saved.check
        self.check.resumed(self.machine, saved.machine, lost)
        self._start_process()
        self._carry_out_all(records)
        if self.scenario.faults.worker_crash_s:
            self._push(self._gap(self.scenario.faults.worker_crash_s), self._crash, None)
        self._tell(ev.WeightsUpdated(version=self.version))
        self._push(0.0, self._want, None)


class _Checkpoint:
    """What is on disk."""

    __slots__ = ("check", "machine", "source")

    def __init__(self, machine: Any, source: Any, check: Invariants) -> None:
        self.machine = machine
        self.source = source
        self.check = check


def told(what: ev.Event | ev.Instruction) -> str:
    """An event or instruction in one short line."""
    match what:
        case ev.MemberFinished():
            rollout = what.rollout
            outcome = rollout.reward if rollout.failure is None else rollout.failure.reason
            return (
                f"MemberFinished attempt {rollout.attempt_id} (group {rollout.group_id}, member {rollout.member_index}): {outcome}, "
                f"{rollout.sampled_tokens} tokens, {rollout.finish_reason}, version {rollout.policy_version}"
            )
        case ev.LaunchMember():
            return f"LaunchMember attempt {what.attempt_id} (group {what.group_id}, member {what.member_index}), task {what.task.task_id}"
        case ev.TaskDrawn() | ev.ReturnTask():
            return f"{type(what).__name__} {what.task.task_id} of epoch {what.epoch}"
        case ev.RunLoop():
            return f"RunLoop (group {what.group_id}), task {what.task.task_id}"
        case ev.CancelLoop():
            return f"CancelLoop (group {what.group_id})"
        case ev.LoopAttempt():
            return f"LoopAttempt (group {what.group_id}, member {what.member_index})"
        case ev.AttemptRefused():
            return f"AttemptRefused (group {what.group_id}, member {what.member_index}): {what.reason}"
        case ev.MemberJudged():
            return f"MemberJudged attempt {what.attempt_id}: {what.verdict.reason}"
        case ev.GroupReturned():
            count = None if what.rollouts is None else len(what.rollouts)
            return f"GroupReturned (group {what.group_id}): {count} rollouts, judged {None if what.judged is None else what.judged.reason}"
        case ev.RecordGroup():
            record = what.record
            return (
                f"RecordGroup (group {record.group_id}): {record.outcome}, {record.category}/{record.reason}, round {record.round}, "
                f"steps {record.start_step} to {record.end_step}, {record.attempts} attempts, {record.sampled_tokens} tokens"
            )
        case ev.DeliverBatch():
            batch = what.batch
            ids = [group.group_id for group in batch.groups]
            return f"DeliverBatch of step {batch.step}: groups {ids} of {batch.requested} wanted, is_last {batch.is_last}"
        case ev.MemberFailed():
            return f"MemberFailed attempt {what.attempt_id}: {what.failure.reason}, {what.sampled_tokens} tokens"
        case ev.Warn() | ev.Fail():
            return f"{type(what).__name__}: {what.message}"
        case _:
            return repr(what)
