"""A fast player of the bare machine: one heap of events instead of an event loop, so that millions of group lives can be looked at.

The engine has `workers` places and a queue; generations take lognormal times; scoring, draws, steps and publishes take theirs. What a
response is worth follows from the attempt's own seed, what goes wrong from the run's random numbers. Nothing here decides for the machine.

The engine's count of tokens is kept apart from everything the machine is told: it grows when a generation ends, whatever became of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from random import Random
from typing import Any, ClassVar, Final

from sluice.generation.base import Span, versions_of
from sluice.scheduler import Scheduler
from sluice.scheduler import events as ev
from sluice.scheduler.groups import mix
from sluice.sim import world
from sluice.sim.faults import Injector
from sluice.sim.gate import make_gate, step_of
from sluice.sim.invariants import Invariants
from sluice.sim.loops import SimulatedLoop
from sluice.sim.records import make_drawn, make_finished, make_rollout
from sluice.sim.scenario import Scenario
from sluice.sim.story import told
from sluice.sim.violation import Violation
from sluice.types import Batch, Failure, Rollout, RolloutFinish

CRASHED_AT_ONCE: Final = 3  # generations that die with one worker
LONG: Final = 20.0  # a slow step, publish or draw, in units of a generation's median
MOST_MOMENTS: Final = 300_000  # at which something happens, told to the machine or not; the longest run has a tenth
_RUN: Final = 21  # a word that keeps these random numbers apart from those that drew the scenario
_NEVER: Final = 1 << 60  # events

Codec = Callable[[Any], Any]
"""Writes a state down and reads it again, as a checkpoint does."""


class Attempt:
    """One generation in the simulated engine, and its scoring. What is the same for most of them stands in the class."""

    spans: ClassVar[list[Span]] = []  # of earlier weights; an attempt under which they changed has a list of its own
    is_leaving = False  # its cancel is on its way
    is_acknowledged = False  # it was cancelled, and the machine knows
    told = 0  # tokens told with that
    is_ended = False  # the engine is done with it
    sampled = 0  # tokens in all, once it has ended
    started_at = -1.0  # < 0: it waits for a place
    steps = 0  # taken by its environment, where there is a gate
    held_at = -1.0  # since when it is kept from its next step; < 0: it is not
    is_stopped = False  # as futile
    version = -1  # of the weights that it is under

    def __init__(self, launch: ev.LaunchMember, latency_s: float, tokens: int, fate: str) -> None:
        self.launch = launch
        self.latency_s = latency_s
        self.tokens = tokens  # that it will have when nobody stops it
        self.fate = fate

    def sampled_at(self, now: float) -> int:
        """Tokens so far."""
        if self.is_ended:
            return self.sampled
        if self.started_at < 0:
            return 0
        elapsed = (now if self.held_at < 0 else self.held_at) - self.started_at
        return self.tokens if elapsed >= self.latency_s else int(self.tokens * elapsed / self.latency_s)


class Player:
    """Plays one scenario from its beginning to its end, and checks what must hold after every event."""

    def __init__(self, scenario: Scenario, *, codec: Codec, trace: list[str] | None = None) -> None:
        """codec: what a checkpoint's state goes through. trace: where every event and instruction is told, for a failure's story."""
        self.scenario = scenario
        self.now = 0.0
        self.events = 0  # told to the machine, by all processes
        self._trace = trace
        self._codec = codec
        self._random = Random(mix(scenario.seed, _RUN)).random
        self.faults = Injector(scenario.faults, self._random)
        self._latencies = world.latencies(scenario.latency_s, scenario.latency_sigma)
        self._filters = world.make_filters(scenario)
        self._has_loops = scenario.config.has_user_loop
        self._max_tokens, self._score_s, self._duplicate = scenario.max_tokens, scenario.score_s, scenario.faults.duplicate
        # Shares of the 1024 values of ten bits.
        self._truncated, self._odd, self._shift = (
            1024 * share for share in (scenario.truncated_share, scenario.odd_share, scenario.solve_shift)
        )
        self._has_fates = bool(self.faults.fate_share)
        self._asked_again = 0
        self._kills = list(scenario.faults.kills)
        self._is_shut_down = False
        self.source = world.make_source(scenario)
        self.machine = Scheduler(scenario.config, self._filters, guard=world.make_guard(scenario), gate=make_gate(scenario))
        self.fills_s: list[float] = []  # how long each batch took, from the request to its delivery
        self._wanted_at = 0.0
        self.engine_tokens = 0  # of generations that have ended: the independent count
        self.check = Invariants(self.machine, scenario)
        self._start_process()

    def _start_process(self) -> None:
        """What a fresh process has: nothing under way."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._seated: dict[int, Attempt] = {}
        self._queue: deque[Attempt] = deque()
        self._free = self.scenario.workers
        self.unsettled: dict[int, Attempt] = {}  # the machine has not been told how they ended
        self.leaving = 0  # of these, the ones whose cancel is on its way
        self.untold = 0  # tokens that the engine has counted and the machine has not been told of; the other way round they are negative
        self.loops: dict[int, SimulatedLoop] = {}
        self._loop_of: dict[int, SimulatedLoop] = {}  # attempts of loops
        self.draws = 0  # asked for, not answered
        self._asked: deque[str | None] = deque()  # of these, the ones that are answered before anything else happens
        self._last_draw_at = self._last_publish_at = 0.0
        self.publishes = 0  # under way
        self._wake_at = math.inf
        self.version = self.machine.step
        self.is_wanting = False
        self._saved: _Checkpoint | None = None
        self._saves_at_step = False
        self._first_event = self.events
        self._handle = self.machine.handle if self._trace is None else self._handle_and_tell
        self._plan_interrupt()
        if self.scenario.faults.worker_crash_s:
            self._push(self._gap(self.scenario.faults.worker_crash_s), self._crash, None)
        if self.scenario.faults.false_tick_s:
            self._push(self._gap(self.scenario.faults.false_tick_s), self._false_tick, None)
        self._push(0.0, self._want, None)

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Play to the end. Raises `Violation`, or whatever the machine raises."""
        heap = self._heap
        while heap:
            self.now, _, act, argument = heappop(heap)
            act(argument)
            if self.events >= self._interrupt_at:
                self._interrupt()
                heap = self._heap
        if not self._is_shut_down:
            raise Violation(f"nothing will ever happen again, but the run has not ended; the machine waits for {self._cause()}")
        self.check.end(self)

    def _cause(self) -> str:
        return self.machine.waiting_for(self.now) or "no batch"

    def _push(self, after_s: float, act: Callable[[Any], None], argument: Any) -> None:
        self._push_at(self.now + after_s, act, argument)

    def _push_at(self, when: float, act: Callable[[Any], None], argument: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (when, self._sequence, act, argument))

    def _gap(self, mean_s: float) -> float:
        return -mean_s * math.log(1.0 - self._random())

    def _tell(self, event: ev.Event) -> None:
        """Tell the machine, carry out what it answers, and look at what must hold."""
        self.events += 1
        out = self._handle(event, self.now)
        if out:
            self._carry_out(out)
            if self._asked:
                self._answer_asked()
        self.check.after_event(self)

    def _handle_and_tell(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        assert self._trace is not None
        self._trace.append(f"{now:.3f} > {told(event)}")
        out = self.machine.handle(event, now)
        self._trace.extend([f"{now:.3f}   < {told(instruction)}" for instruction in out])
        return out

    def _answer_asked(self) -> None:
        """Tasks that are drawn at once. Their answers come in the order of the draws, when all else has been carried out."""
        asked = self._asked
        while asked:
            self._carry_out(self._handle(self._drawn(asked.popleft()), self.now))

    def _carry_out(self, instructions: Iterable[Any]) -> None:
        for instruction in instructions:
            kind = type(instruction)
            if kind is ev.LaunchMember:
                self._launch(instruction)
            elif kind is ev.RecordGroup:
                self.check.record(instruction.record, self.now)
            elif kind is ev.DrawTask:
                self._draw(instruction.domain)
            elif kind is ev.CancelMember:
                self._cancel(instruction.attempt_id)
            else:
                self._carry_out_rare(instruction)

    def _carry_out_rare(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.ReturnTask():
                self.source.put_back(instruction.task.task_id, instruction.epoch)
                self.check.put_back(instruction.task.task_id, instruction.epoch)
            case ev.DeliverBatch():
                self.is_wanting = False
                self.fills_s.append(self.now - self._wanted_at)
                self.check.batch(instruction.batch, instruction.metrics)
                if instruction.batch.groups:
                    is_slow = self.faults.happens("slow_consumer", self.scenario.faults.slow_consumer)
                    self._push(self.scenario.step_s + is_slow * LONG * self.scenario.latency_s, self._step, instruction.batch)
                else:
                    self._push(0.0, self._end, None)
            case ev.WakeAt():
                self._wake_at = instruction.when
                self._push_at(max(self.now, instruction.when), self._wake, instruction.when)
            case ev.RunLoop():
                self._run_loop(instruction)
            case ev.CancelLoop():
                loop = self.loops.pop(instruction.group_id)
                loop.on_cancelled(self.faults.happens("late_result", self.scenario.faults.late_result))
            case ev.HoldMember():
                self._playing(instruction.attempt_id).held_at = self.now
            case ev.ReleaseMember():
                self._release(self._playing(instruction.attempt_id))
            case ev.StopMember():
                self._push(0.0, self._stop, self._playing(instruction.attempt_id))
            case ev.AttemptRefused():
                if (refused := self.loops.get(instruction.group_id)) is not None:
                    refused.on_refused(instruction.reason)
            case ev.Fail():
                self.check.failed(instruction.message)
                again = self._asked_again < self.scenario.asks_again
                if self.is_wanting or not again:  # else the trainer is busy, and asks when it is done
                    self.is_wanting = False
                    self._asked_again += again
                    self._push(0.0, self._want if again else self._end, None)
            case ev.Warn() | ev.MemberJudged():
                pass  # for a person; told to the loop by `_finish_in_loop`, which has the rollout
            case _:
                raise Violation(f"no player knows the instruction {instruction!r}")

    # ------------------------------------------------------------ the trainer

    def _want(self, _: None) -> None:
        if self._is_shut_down:
            return
        scenario, step = self.scenario, self.machine.step
        if step >= scenario.batches:
            self._shut_down()
            return
        self.is_wanting = True
        self._wanted_at = self.now
        self.check.wanted(scenario.batch)
        left = scenario.batches - step - 1 if scenario.tells_batches_left else None
        self._tell(ev.BatchWanted(groups=scenario.batch, batches_left=left))

    def _step(self, batch: Batch) -> None:
        """The optimiser step on a batch is done."""
        if self._is_shut_down:
            return
        scenario, step = self.scenario, batch.step + 1
        if scenario.publishes_first:
            self._publish(step)
        self._tell(ev.StepAdvanced(step=step, useful_groups=len(batch.groups), useful_tokens=len(batch.groups)))
        self.check.stepped(step)
        if not scenario.publishes_first:
            delay = scenario.publish_s
            if self.faults.happens("slow_publish", scenario.faults.slow_publish):
                delay += LONG * scenario.latency_s
            at = self._last_publish_at = max(self.now + delay, self._last_publish_at)
            self.publishes += 1
            self._push_at(at, self._publish_late, step)
        if self._saves_at_step:
            self._save()
        if batch.is_last:
            self._push(0.0, self._end, None)
        else:
            self._push(scenario.pause_s, self._want, None)

    def _publish_late(self, version: int) -> None:
        self.publishes -= 1
        self._publish(version)

    def _publish(self, version: int) -> None:
        if self._is_shut_down:
            return
        self.version = version
        seated = self._seated
        if seated:
            self.faults.counts["update_while_generating"] += 1
            if self.scenario.config.on_weight_update == "continue":
                for attempt in seated.values():
                    attempt.spans = [*attempt.spans, Span(attempt.version, attempt.sampled_at(self.now))]  # type: ignore[misc]
                    attempt.version = version
        self._tell(ev.WeightsUpdated(version=version, generating=tuple(seated)))

    def _end(self, _: None) -> None:
        if not self._is_shut_down:
            self._shut_down()

    def _shut_down(self) -> None:
        self._is_shut_down = self.check.is_shut_down = True
        self.is_wanting = False
        self._interrupt_at = _NEVER
        self._tell(ev.Shutdown())

    # ------------------------------------------------------------ tasks

    def _draw(self, domain: str | None) -> None:
        self.draws += 1
        self.check.asks(domain)
        delay = self.scenario.draw_s
        if self.faults.happens("slow_draw", self.scenario.faults.slow_draw):
            delay += LONG * self.scenario.latency_s
        if delay or self.draws > len(self._asked) + 1:  # answers come in the order of the draws
            self._last_draw_at = at = max(self.now + delay, self._last_draw_at)
            self._push_at(at, self._answer_draw, domain)
        else:
            self._asked.append(domain)

    def _answer_draw(self, domain: str | None) -> None:
        self._tell(self._drawn(domain))

    def _drawn(self, domain: str | None) -> ev.Event:
        self.draws -= 1
        drawn = self.source.draw(domain)
        if drawn is None:
            self.check.nothing_left(domain)
            return ev.TasksExhausted()
        task, epoch = drawn
        self.check.prompts.drawn(task, epoch)
        return make_drawn(task, epoch)

    # ------------------------------------------------------------ the engine

    def latency_of(self, launch: ev.LaunchMember) -> float:
        """Seconds that this generation takes. The seed of an attempt is a random number: each draw takes bits of its own."""
        return self._latencies[launch.seed & 1023]

    def reward_of(self, launch: ev.LaunchMember) -> float:
        """What the response is worth."""
        seed = launch.seed
        if (seed >> 40 & 1023) < self._odd:
            return 7.0
        return 1.0 if (seed >> 20 & 1023) < 1024 * launch.task.difficulty + self._shift else 0.0  # type: ignore[operator]

    def _launch(self, launch: ev.LaunchMember) -> None:
        attempt_id, group_id, _, _, seed = launch
        if self._has_loops:
            self._loop_of[attempt_id] = self.loops[group_id]
            self.loops[group_id].on_launch(launch)
        check = self.check
        check.attempts += 1
        if group_id not in check.prompts.of:
            check.group_launched(group_id, launch.task)
        tokens = 1 + ((seed >> 10 & 1023) * self._max_tokens >> 10)
        fate = self.faults.fate() if self._has_fates else ""
        attempt = self.unsettled[attempt_id] = Attempt(launch, self.latency_of(launch), tokens, fate)
        if self._free:
            self._free -= 1
            self._seat(attempt)
        else:
            self._queue.append(attempt)

    def _seat(self, attempt: Attempt) -> None:
        now = attempt.started_at = self.now
        attempt.version = self.version
        self._seated[attempt.launch.attempt_id] = attempt
        if attempt.fate == "hang":
            self.faults.counts["hang"] += 1
        elif self.scenario.gate is not None:
            self._plan_step(attempt, self.scenario.gate.steps)
        else:
            self._sequence += 1
            heappush(self._heap, (now + attempt.latency_s, self._sequence, self._generated, attempt))

    def _plan_step(self, attempt: Attempt, steps: int) -> None:
        """Its next environment step, or, after the last one, its end. Steps divide its time evenly."""
        act = self._stepped if attempt.steps < steps else self._generated
        self._push(attempt.latency_s / (steps + 1), act, attempt)

    def _stepped(self, attempt: Attempt) -> None:
        """Its environment took a step, also when nobody wants to know any more."""
        gate = self.scenario.gate
        assert gate is not None
        if attempt.is_ended:
            return
        attempt.steps += 1
        ends_with_it = attempt.steps == gate.steps and bool(attempt.launch.seed >> 32 & 1)
        if attempt.is_acknowledged:
            self.check.late_results += 1
        self._tell(step_of(self.scenario, attempt.launch, attempt.steps, is_last=ends_with_it))
        if ends_with_it:
            self._generated(attempt)
        elif attempt.held_at < 0:
            self._plan_step(attempt, gate.steps)

    def _playing(self, attempt_id: int) -> Attempt:
        attempt = self.unsettled.get(attempt_id)
        if attempt is None or attempt.is_leaving:
            raise Violation(f"attempt {attempt_id} is to be steered, but it has ended or was cancelled")
        return attempt

    def _release(self, attempt: Attempt) -> None:
        """A member that was held goes on where it stood."""
        assert self.scenario.gate is not None
        if attempt.held_at < 0:
            raise Violation(f"attempt {attempt.launch.attempt_id} is released, but nobody holds it")
        attempt.started_at += self.now - attempt.held_at
        attempt.held_at = -1.0
        self._plan_step(attempt, self.scenario.gate.steps)

    def _stop(self, attempt: Attempt) -> None:
        """A member ends as futile, unless it has ended, or was cancelled, in the same moment."""
        if attempt.is_ended or attempt.is_leaving:
            return
        attempt.is_stopped = True
        attempt.fate = ""
        self._leave_engine(attempt, attempt.sampled_at(self.now))
        self._finish(attempt)

    def _leave_engine(self, attempt: Attempt, tokens: int) -> None:
        """A generation has ended, by itself or not: the next one gets its place."""
        attempt.is_ended = True
        attempt.sampled = tokens
        del self._seated[attempt.launch.attempt_id]
        self.engine_tokens += tokens
        self.untold += tokens
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
            self._failed(ev.MemberFailed(attempt_id=attempt.launch.attempt_id, failure=failure, sampled_tokens=attempt.sampled), [attempt])
        elif self._score_s:
            self._push(self._score_s, self._finish, attempt)
        else:
            self._finish(attempt)

    def _settle(self, attempt: Attempt) -> None:
        """The machine is about to be told how an attempt ended."""
        del self.unsettled[attempt.launch.attempt_id]
        self.untold -= attempt.sampled
        if attempt.is_leaving:
            self.leaving -= 1

    def _failed(self, event: ev.Event, attempts: list[Attempt]) -> None:
        if self._has_loops:
            for attempt in attempts:
                if not attempt.is_leaving:
                    self._loop_of.pop(attempt.launch.attempt_id).on_failed(attempt.launch.attempt_id)
        self._tell(event)

    def _finish(self, attempt: Attempt) -> None:
        """A response has its score."""
        if attempt.is_acknowledged:  # it was cancelled while it was scored
            return
        self._settle(attempt)
        event = make_finished(self._rollout(attempt))
        if self._has_loops:
            self._finish_in_loop(event)
        else:
            self._tell(event)
        if self._duplicate and self.faults.happens("duplicate", self._duplicate):
            self._push(self.scenario.latency_s * self._random(), self._tell_again, event)

    def _finish_in_loop(self, event: ev.MemberFinished) -> None:
        """As `_tell`; the loop hears of the verdict before anything else happens."""
        self.events += 1
        out = self._handle(event, self.now)
        loop = self._loop_of.pop(event.rollout.attempt_id)
        for instruction in out:
            if type(instruction) is ev.MemberJudged:
                loop.on_judged(event.rollout, instruction.verdict)
        self._carry_out(out)
        self._answer_asked()
        self.check.after_event(self)

    def _tell_again(self, event: ev.MemberFinished) -> None:
        self.check.late_results += 1
        self._tell(event)

    def _rollout(self, attempt: Attempt) -> Rollout:
        attempt_id, group_id, member_index, task, seed = launch = attempt.launch
        is_truncated = (seed >> 30 & 1023) < self._truncated and not attempt.is_stopped
        version, token_versions = attempt.version, None
        if attempt.spans:
            version, token_versions = versions_of([*attempt.spans, Span(version, attempt.sampled)])
        if token_versions is None:
            turns = world.turns_of(attempt.sampled, version, is_truncated)
        else:
            turns = world.mixed_turns_of(attempt.sampled, version, token_versions, is_truncated)
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
        finish_reason: RolloutFinish = "stopped_futile" if attempt.is_stopped else "length" if is_truncated else "stop"
        return make_rollout(attempt_id, group_id, member_index, task.task_id, turns, finish_reason, reward, failure)

    # ------------------------------------------------------------ cancels

    def _cancel(self, attempt_id: int) -> None:
        attempt = self.unsettled.get(attempt_id)
        if attempt is None or attempt.is_leaving:
            raise Violation(f"attempt {attempt_id} is cancelled, but it has ended or was cancelled before")
        attempt.is_leaving = True
        self.leaving += 1
        if self.faults.happens("slow_ack", self.scenario.faults.slow_ack):
            self._push(self.scenario.latency_s * 2.0 * self._random(), self._acknowledge_late, attempt)
        else:
            self._carry_out(self._handle(self._acknowledged(attempt), self.now))

    def _acknowledge_late(self, attempt: Attempt) -> None:
        if attempt.launch.attempt_id in self.unsettled:
            self._tell(self._acknowledged(attempt))
        else:  # its result was faster
            self._tell(ev.MemberCancelled(attempt_id=attempt.launch.attempt_id, sampled_tokens=attempt.sampled))

    def _acknowledged(self, attempt: Attempt) -> ev.MemberCancelled:
        """Let go of an attempt; what the engine still samples for it is told as late tokens."""
        attempt_id = attempt.launch.attempt_id
        attempt.is_acknowledged = True
        del self.unsettled[attempt_id]
        self.leaving -= 1
        told = attempt.told = attempt.sampled_at(self.now)
        self.untold -= told
        if attempt.started_at < 0:
            attempt.is_ended = True
        elif not attempt.is_ended:  # else it was being scored
            if attempt.fate != "hang" and attempt.held_at < 0 and self.faults.happens("late_result", self.scenario.faults.late_result):
                pass  # the engine does not hear of it: `_generated` tells the rest
            elif self.scenario.cancel_latency_s:
                self._push(self.scenario.cancel_latency_s, self._stopped, attempt)
            else:
                self._leave_engine(attempt, told)
        return ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=told)

    def _stopped(self, attempt: Attempt) -> None:
        if not attempt.is_ended:
            self._leave_engine(attempt, attempt.sampled_at(self.now))
            self._tell_late(attempt)

    def _tell_late(self, attempt: Attempt) -> None:
        """What an attempt sampled after its cancel, and now and then its whole result."""
        late = attempt.sampled - attempt.told
        if late:
            self.untold -= late
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
        if self._sequence > MOST_MOMENTS:
            raise Violation(f"the run has not ended, and nothing is told to the machine any more: it waits for {self._cause()}")
        dying = list(self._seated.values())[:CRASHED_AT_ONCE]
        if not dying:
            return
        self.faults.counts["worker_crash"] += 1
        for attempt in dying:
            self._leave_engine(attempt, attempt.sampled_at(self.now))
        known = [attempt for attempt in dying if not attempt.is_acknowledged]
        for attempt in known:
            self._settle(attempt)
        if known:
            lost = {attempt.launch.attempt_id: attempt.sampled for attempt in known}
            self._failed(ev.WorkerLost(attempts=lost, detail="simulated"), known)
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
        loop = SimulatedLoop(run, self.scenario.config.group_size, self.scenario.seed, self._tell_soon)
        self.loops[run.group_id] = loop
        self.check.group_launched(run.group_id, run.task)
        if not self.faults.happens("hang", self.scenario.faults.hang):
            loop.start()

    def _tell_soon(self, event: ev.Event) -> None:
        self._push(0.0, self._tell_of_loop, event)

    def _tell_of_loop(self, event: ev.LoopAttempt | ev.GroupReturned) -> None:
        if type(event) is ev.GroupReturned and self.loops.pop(event.group_id, None) is None:
            self.check.late_results += 1
        self._tell(event)

    # ------------------------------------------------------------ stop, kill and resume

    def _plan_interrupt(self) -> None:
        """When the process is next to be stopped, to save its state, or to die; in events since the start of the run."""
        stop_at = self.scenario.faults.stop_at
        at = _NEVER if stop_at is None else stop_at
        if self._kills:
            kill = self._kills[0]
            if self._saved is not None:
                at = min(at, self._first_event + kill.killed_at)
            elif not self._saves_at_step:
                at = min(at, self._first_event + kill.saved_at)
        self._interrupt_at = at

    def _interrupt(self) -> None:
        if self.events >= (self.scenario.faults.stop_at or _NEVER):
            self.faults.counts["stop"] += 1
            self._shut_down()
            return
        if self._saved is not None:
            self._die(self._saved)
            return
        if self._kills[0].at_step:
            self._saves_at_step = True
        else:
            self._save()
        self._plan_interrupt()

    def _save(self) -> None:
        self._saves_at_step = False
        in_flight = {attempt_id: attempt.sampled_at(self.now) for attempt_id, attempt in self.unsettled.items()}
        before = self.check.fingerprint()
        machine = self.machine.state_dict(in_flight)
        if self.check.fingerprint() != before:
            raise Violation("state_dict has changed the machine")
        outstanding = [(task_id, epoch) for task_id, epoch in machine["outstanding"]]
        self._saved = _Checkpoint(self._codec(machine), self._codec(self.source.state_dict(outstanding)), self.check.copy())
        self._plan_interrupt()

    def _die(self, saved: _Checkpoint) -> None:
        """The process ends in the middle of everything, and another one goes on from the checkpoint."""
        self.faults.counts["kill"] += 1
        if self._trace is not None:
            self._trace.append(f"{self.now:.3f} the process dies; the next one goes on from its checkpoint")
        self.engine_tokens += sum([attempt.sampled_at(self.now) for attempt in self._seated.values()])
        del self._kills[0]
        scenario = self.scenario
        self.machine = Scheduler(scenario.config, self._filters, guard=world.make_guard(scenario), gate=make_gate(scenario))
        self.source = world.make_source(self.scenario)
        self.source.load_state_dict(saved.source)
        records = self.machine.load_state_dict(saved.machine, {task.task_id: task for task in self.source.tasks})
        lost = self.engine_tokens - self.machine.ledger.total_tokens
        if lost < 0:
            raise Violation(f"the saved ledger accounts for {-lost} tokens that the engine never sampled")
        self.machine.ledger.tokens_were_lost(lost)
        self.check = saved.check
        self.check.resumed(self.machine, saved.machine, lost)
        self._start_process()
        self._carry_out(records)
        self._tell(ev.WeightsUpdated(version=self.version))


class _Checkpoint:
    """What is on disk."""

    __slots__ = ("check", "machine", "source")

    def __init__(self, machine: Any, source: Any, check: Invariants) -> None:
        self.machine = machine
        self.source = source
        self.check = check
