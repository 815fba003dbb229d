"""Plays a scenario with the real shell on a virtual clock: null engine, simulated scores, loops of its own, cancels at any await.

A process is one event loop. Killing it is leaving that loop in the middle; the next process has a new loop, machine, source and engine, and
goes on from what the last checkpoint held.

| part | consumes | waits for | unblocked by |
|---|---|---|---|
| the process | nothing | the trainer, or its death | the last batch, an error, a kill |
| the trainer | batches | `next_batch`, its own step | the shell, the clock, a cancel, `close` |
| the closer | nothing | the event at which the run is stopped | the count of events |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import numpy as np

from sluice.errors import ResampleError
from sluice.execution import LocalShell
from sluice.execution.clock import run as run_on_virtual_clock
from sluice.execution.loops import Attempt, Judged, LoopContext, RolloutLoop
from sluice.generation import Answer, GenerationRequest, NullEngine
from sluice.rewards.base import Score
from sluice.scheduler import GroupRecord, Scheduler
from sluice.scheduler import events as ev
from sluice.scheduler.groups import mix
from sluice.sim import world
from sluice.sim.faults import Injector, Kill
from sluice.sim.invariants import Invariants
from sluice.sim.scenario import Scenario
from sluice.sim.story import told
from sluice.sim.violation import Violation
from sluice.types import EMPTY, Batch, Failure, Rollout, Task, Verdict

CRASHED_AT_ONCE: Final = 3  # generations that die with one worker
MOST_CRASHES: Final = 10_000  # far more than a run has; a run that hangs is then seen to hang
LONG: Final = 20.0  # a slow step, in units of a generation's median
_RUN: Final = 31  # a word that keeps these random numbers apart from those that drew the scenario


class ShellPlayer:
    """One scenario, from its beginning to its end, in one process after the other."""

    def __init__(self, scenario: Scenario, *, codec: Callable[[Any], Any], trace: list[str] | None = None) -> None:
        """codec: what a checkpoint's state goes through. trace: where every event and instruction is told, for a failure's story."""
        self.scenario = scenario
        self.events = 0
        self.trace = trace
        self._codec = codec
        self.random = Random(mix(scenario.seed, _RUN)).random
        self.faults = Injector(scenario.faults, self.random)
        self.machine = _make_machine(scenario)
        self.check = Invariants(self.machine, scenario)
        self.is_wanting = self.is_shut_down = False
        self._kills = list(scenario.faults.kills)
        self._cancels = list(scenario.faults.cancel_at)
        self._sampled_before = 0  # by the engines of processes that have died
        self.publishes = self.draws = 0  # both are done at once
        self.leaving = 0  # cancels are acknowledged at once

    def run(self) -> None:
        """Play to the end. Raises `Violation`, or whatever broke."""
        saved: _Checkpoint | None = None
        while True:
            process = _Process(self, saved)
            run_on_virtual_clock(process.live())
            if process.problem is not None:
                raise process.problem
            if not process.is_killed:
                self.check.end(self)
                return
            self._sampled_before += process.engine.sampled_tokens("train")
            saved = process.saved
            assert saved is not None
            del self._kills[0]
            self.faults.counts["kill"] += 1
            if self.trace is not None:
                self.trace.append("the process dies; the next one goes on from its checkpoint")

    # ------------------------------------------------------------ what the invariants look at

    @property
    def engine_tokens(self) -> int:
        """All tokens that the engines have counted."""
        return self._sampled_before + self.process.engine.sampled_tokens("train")

    @property
    def untold(self) -> int:
        """Of these, the ones of which the machine has not been told."""
        shell = self.process.shell
        return sum(shell.in_flight().values()) + shell.late.untold

    @property
    def unsettled(self) -> Sequence[int]:
        """Attempts of which the machine does not know yet how they end."""
        shell = self.process.shell
        return [*shell.in_flight(), *shell._refused, *shell.granted]

    @property
    def loops(self) -> Sequence[int]:
        """Groups whose loop is under way."""
        return [group_id for group_id, task in self.process.shell._loop_tasks.items() if not task.done()]

    @property
    def now(self) -> float:
        """The time of the process."""
        return self.process.time()

    # ------------------------------------------------------------ for the process

    process: _Process

    def next_kill(self) -> Kill | None:
        """How this process is going to die."""
        return self._kills[0] if self._kills else None

    def next_cancel_s(self) -> float:
        """After which time the next wait for a batch is cancelled; inf: not."""
        return self._cancels.pop(0) if self._cancels else math.inf

    def through_file(self, state: Any) -> Any:
        """A state as it comes back."""
        return self._codec(state)


class _Checkpoint:
    """What is on disk."""

    __slots__ = ("check", "state")

    def __init__(self, state: Any, check: Invariants) -> None:
        self.state = state
        self.check = check


class _Process:
    """One life on one event loop."""

    def __init__(self, player: ShellPlayer, saved: _Checkpoint | None) -> None:
        self.player = player
        self.saved: _Checkpoint | None = None  # by this process
        self.is_killed = False
        self.problem: Exception | None = None
        self._before = saved
        self._saves_at_step = False
        self._first_event = player.events
        player.process = self
        player.is_wanting = False

    async def live(self) -> None:
        """From birth to the end of the run, or to death."""
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self._over = asyncio.Event()
        self._stopping = asyncio.Event()
        scenario = self.player.scenario
        self.engine = NullEngine(
            self._answer,
            cancel_latency_s=scenario.cancel_latency_s,
            max_slots=scenario.workers,
            on_weight_update=scenario.config.on_weight_update,
        )
        if self._before is not None:
            self.player.machine = _make_machine(scenario)
        self.source = _Source(self.player)
        self.shell = _WatchedShell(self)
        if self._before is not None:
            self._resume(self._before)
        parts: list[Coroutine[Any, Any, None]] = [self._train(), self._close_in_the_middle()]
        if scenario.faults.worker_crash_s:
            parts.append(self._crash())
        tasks = [self._loop.create_task(part) for part in parts]
        await self._over.wait()  # whoever sets it has ended, broken or killed the run
        if not self.is_killed and self.problem is None:
            for task in tasks[1:]:
                task.cancel()
            await self._shut_down()

    def end(self, problem: Exception | None = None) -> None:
        """The process is over."""
        if self.problem is None and not self.is_killed:
            self.problem = problem
        self._over.set()

    def after_event(self) -> None:
        """Look at what must hold, save and die when it is time."""
        player = self.player
        if self._over.is_set():
            return
        try:
            player.check.after_event(player)
            kill, lived = player.next_kill(), player.events - self._first_event
            if kill is not None and not player.is_shut_down:
                if self.saved is None and lived >= kill.saved_at and not self._saves_at_step:
                    self._saves_at_step = kill.at_step
                    if not kill.at_step:
                        self._save()
                if self.saved is not None and lived >= kill.killed_at:
                    self.is_killed = True
                    self._over.set()
            stop_at = player.scenario.faults.stop_at
            if stop_at is not None and player.events >= stop_at:
                self._stopping.set()
        except Exception as error:  # noqa: BLE001 - raised by whoever started the process: here it would only be logged
            self.end(error)

    # ------------------------------------------------------------ the trainer

    async def _train(self) -> None:
        player, shell, scenario = self.player, self.shell, self.player.scenario
        try:
            step = player.machine.step
            self.engine.publish({}, step)
            while step < scenario.batches:
                left = scenario.batches - step - 1 if scenario.tells_batches_left else None
                batch = await self._next_batch(left)
                if batch is None or not batch.groups:
                    break
                is_slow = player.faults.happens("slow_consumer", scenario.faults.slow_consumer)
                await asyncio.sleep(scenario.step_s + is_slow * LONG * scenario.latency_s)
                if player.is_shut_down:
                    break
                step += 1
                self.engine.publish({}, step)
                shell.step_advanced(step, useful_groups=len(batch.groups), useful_tokens=len(batch.groups))
                player.check.stepped(step)
                if self._saves_at_step and self.saved is None:
                    self._save()
                if batch.is_last:
                    break
                await asyncio.sleep(scenario.pause_s)
        except ResampleError:
            pass  # a bound: the run is over, as it should be
        except Exception as error:  # noqa: BLE001 - raised by whoever started the process
            self.end(error)
        self.end()

    async def _next_batch(self, batches_left: int | None) -> Batch | None:
        """The next batch, however often the wait for it is cancelled. None: the shell was closed meanwhile."""
        while not self.player.is_shut_down:
            waiting = self._loop.create_task(self.shell.next_batch(self.player.scenario.batch, batches_left), name="wait for a batch")
            after_s = self.player.next_cancel_s()
            await asyncio.wait([waiting], timeout=None if after_s == math.inf else after_s)
            if not waiting.done():
                self.player.faults.counts["cancel"] += 1
                waiting.cancel()
                await asyncio.wait([waiting])
            if not waiting.cancelled():
                return waiting.result()[0]
        return None

    async def _close_in_the_middle(self) -> None:
        await self._stopping.wait()
        self.player.faults.counts["stop"] += 1
        await self._shut_down()
        self.end()

    async def _shut_down(self) -> None:
        try:
            self.player.is_shut_down = self.player.check.is_shut_down = True
            await self.shell.close()
        except ResampleError:
            pass
        except Exception as error:  # noqa: BLE001 - raised by whoever started the process
            self.end(error)
            self.problem = self.problem or error

    # ------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        self._saves_at_step = False
        player = self.player
        before = player.check.fingerprint()
        state = player.through_file(self.shell.state_dict())
        if player.check.fingerprint() != before:
            raise Violation("state_dict has changed the machine")
        books = player.check.copy()
        books.late_tokens = int(state["scheduler"]["ledger"]["tokens"]["late"])
        self.saved = _Checkpoint(state, books)

    def _resume(self, saved: _Checkpoint) -> None:
        player = self.player
        tasks = {task.task_id: task for task in self.source.tasks}
        self.shell.held_records = []
        self.shell.load_state_dict(saved.state, tasks)
        records, self.shell.held_records = self.shell.held_records, None
        ledger = player.machine.ledger
        lost = player.engine_tokens - ledger.total_tokens
        if lost < 0:
            raise Violation(f"the saved ledger accounts for {-lost} tokens that the engine never sampled")
        ledger.tokens_were_lost(lost)
        player.check = saved.check
        player.check.resumed(player.machine, saved.state["scheduler"], lost)
        for record in records:
            player.check.record(record, 0.0)

    # ------------------------------------------------------------ engine and scorer

    def _answer(self, request: GenerationRequest) -> Answer:
        """What a request samples and when follows from its seed; what goes wrong with it from the run's random numbers."""
        scenario, seed = self.player.scenario, request.seed
        fate = self.player.faults.fate()
        if fate in ("engine_error", "hang"):
            self.player.faults.counts[fate] += 1
        length = 1 + ((seed >> 10 & 1023) * scenario.max_tokens >> 10)
        latencies = world.latencies(scenario.latency_s, scenario.latency_sigma)
        return Answer(
            token_ids=np.full(length, seed % 1000, dtype=np.int64),
            inference_logprobs=np.full(length, -0.5, dtype=np.float32),
            finish_reason="length" if (seed >> 30 & 1023) < 1024 * scenario.truncated_share else "stop",
            latency_s=math.inf if fate == "hang" else latencies[seed & 1023],
            error="simulated" if fate == "engine_error" else None,
        )

    async def score(self, task: Task, response: str) -> Score:
        """The reward of a response, or why it has none."""
        player, scenario = self.player, self.player.scenario
        if scenario.score_s:
            await asyncio.sleep(scenario.score_s)
        for kind in ("reward_error", "reward_timeout"):
            if player.faults.happens(kind, getattr(scenario.faults, kind)):
                return Score(reward=None, failure=Failure(cause="infrastructure", reason=kind, detail="simulated"))
        if not scenario.config.has_user_loop and player.faults.happens("reward_nan", scenario.faults.reward_nan):
            return Score(reward=math.nan)
        drawn = player.random()
        if drawn < scenario.odd_share:
            return Score(reward=7.0)
        assert task.difficulty is not None
        return Score(reward=float(player.random() < task.difficulty + scenario.solve_shift), metrics=EMPTY)

    async def close(self) -> None:
        """Nothing to end."""

    def metrics(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}

    async def _crash(self) -> None:
        """Now and then a worker dies with what it is generating."""
        player = self.player
        for _ in range(MOST_CRASHES):
            await asyncio.sleep(-player.scenario.faults.worker_crash_s * math.log(1.0 - player.random()))
            if self.engine.fail_running(CRASHED_AT_ONCE, "simulated crash"):
                player.faults.counts["worker_crash"] += 1

    # ------------------------------------------------------------ the journal

    def group(self, record: GroupRecord) -> None:
        """A group left."""
        if self.shell.held_records is not None:
            self.shell.held_records.append(record)
        elif not self.is_killed:
            self.player.check.record(record, self.time())

    def event(self, level: str, message: str) -> None:
        """For a person."""


class _WatchedShell(LocalShell):
    """The shell, with every event and instruction told to the books of the run."""

    def __init__(self, process: _Process) -> None:
        player, scenario = process.player, process.player.scenario
        self.process = process
        self.held_records: list[GroupRecord] | None = None  # while a state is loaded
        self.granted: set[int] = set()  # attempts that a loop may begin, and has not begun yet
        self._depth = 0
        super().__init__(
            scheduler=player.machine,
            source=process.source,
            engine=process.engine,
            scorer=process,
            journal=process,
            decode=lambda token_ids: "",
            response_length=scenario.max_tokens,
            temperature=1.0,
            user_loop=_Loop(player) if scenario.config.has_user_loop else None,
        )

    def tell(self, event: ev.Event) -> None:
        player = self.process.player
        if self.process.is_killed:  # what its tasks do while its event loop is torn down, nobody sees
            return
        player.events += 1
        if type(event) is ev.BatchWanted:
            player.is_wanting = True
            player.check.wanted(event.groups)
        elif type(event) is ev.LateTokens:
            player.check.late_tokens += event.sampled_tokens
        elif type(event) is ev.Shutdown:
            player.is_shut_down = player.check.is_shut_down = True
            player.is_wanting = False
        self._depth += 1
        super().tell(event)
        self._depth -= 1
        if not self._depth:
            self.process.after_event()

    def _handle(self, event: ev.Event) -> list[ev.Instruction]:
        trace, now = self.process.player.trace, self.process.time()
        if trace is not None:
            trace.append(f"{now:.3f} > {told(event)}")
        out = super()._handle(event)
        for instruction in out:
            if type(instruction) is ev.RecordGroup:  # it may be carried out after the batch that it explains
                self.process.player.check.has_left(instruction.record)
        if trace is not None:
            trace.extend([f"{now:.3f}   < {told(instruction)}" for instruction in out])
        return out

    def _carry_out(self, instruction: ev.Instruction) -> list[ev.Instruction]:
        check = self.process.player.check
        match instruction:
            case ev.DrawTask():
                check.asks(instruction.domain)
            case ev.RunLoop():
                check.group_launched(instruction.group_id, instruction.task)
            case ev.DeliverBatch():
                self.process.player.is_wanting = False
                check.batch(instruction.batch, instruction.metrics)
            case ev.Fail():
                self.process.player.is_wanting = False
                check.failed(instruction.message)
        return super()._carry_out(instruction)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Violation):
            self.process.end(error)
        super()._fail(error)

    def _launch(self, launch: ev.LaunchMember) -> None:
        check = self.process.player.check
        check.attempts += 1
        if launch.group_id not in check.prompts.of:
            check.group_launched(launch.group_id, launch.task)
        if self.process.player.scenario.config.has_user_loop:
            self.granted.add(launch.attempt_id)
        super()._launch(launch)

    def attempt_started(self, attempt: Attempt) -> None:
        self.granted.discard(attempt.attempt_id)
        super().attempt_started(attempt)


class _Source:
    """The real source, with every draw told to the books."""

    def __init__(self, player: ShellPlayer) -> None:
        self._player = player
        self._inner = world.make_source(player.scenario)
        self.tasks = self._inner.tasks
        self.state_dict = self._inner.state_dict
        self.load_state_dict = self._inner.load_state_dict

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next task."""
        drawn = self._inner.draw(domain)
        if drawn is None:
            self._player.check.nothing_left(domain)
        else:
            self._player.check.prompts.drawn(*drawn)
        return drawn

    def put_back(self, task_id: str, epoch: int) -> None:
        """It is drawn again."""
        self._inner.put_back(task_id, epoch)
        self._player.check.put_back(task_id, epoch)


class _Loop(RolloutLoop):
    """User-defined loops of several manners, drawn by group."""

    def __init__(self, player: ShellPlayer) -> None:
        self._player = player

    async def run(self, context: LoopContext) -> Sequence[Rollout] | Judged | None:
        """Make one group."""
        faults = self._player.faults
        if faults.happens("hang", faults.plan.hang):
            await asyncio.Event().wait()
        manner = mix(self._player.scenario.seed, context.group_id) % 10
        if manner == 0:
            return None
        if manner == 1:
            raise ArithmeticError("simulated: a bug in somebody's loop")
        rollouts = await context.members()
        if rollouts is None or manner > 4:
            return rollouts
        if manner == 2:
            return rollouts[:-1]
        if manner == 3:
            is_good = any(rollout.reward for rollout in rollouts)
            verdict = Verdict.kept("loop") if is_good else Verdict.dropped("loop_says_no", "low_information", "loop")
            return Judged(rollouts=rollouts, verdict=verdict)
        return [replace(rollout, reward=None if rollout.reward is None else 0.5 * rollout.reward) for rollout in rollouts]


def _make_machine(scenario: Scenario) -> Scheduler:
    return Scheduler(scenario.config, world.make_filters(scenario), guard=world.make_guard(scenario))
