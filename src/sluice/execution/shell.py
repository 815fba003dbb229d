"""LocalShell: carries out the machine's instructions in this process, on one asyncio loop, and tells the machine what happened.

| part | consumes | waits for | unblocked by |
|---|---|---|---|
| `next_batch` | DeliverBatch or Fail | the batch being full | the last member of the last group needed, a bound, or `close` |
| a member | LaunchMember | what its player waits for | see responses.py and trajectories.py; a CancelMember |
| a user-defined loop | RunLoop | its generations and scores | engine and scorer, a CancelLoop |
| the timer | WakeAt | its time | the clock, a later WakeAt, `close` |

Shared state changes only inside `_tell`, which never awaits. A cancel is acknowledged here at once and never awaited from an engine:
what the engine samples for it afterwards is told as late tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol

from sluice.errors import LoopError, RecordError, ResampleError, SluiceError
from sluice.execution.loops import Attempt, LoopContext, RolloutLoop, play
from sluice.execution.players import LateTokens, Player
from sluice.execution.responses import ResponsePlayer
from sluice.generation.base import Engine, GenerationHandle
from sluice.rewards.base import Scorer
from sluice.scheduler import Scheduler
from sluice.scheduler import events as ev
from sluice.types import Batch, Failure, Rollout, Task, TokenIds, Verdict

CLOSE_GRACE_S: Final = 2.0  # how long `close` waits for cancelled generations and scores to settle


class TaskSource(Protocol):
    """Where tasks are drawn from. Both calls are quick and never block."""

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next task (of a domain, when one is given) and its epoch; None when nothing is left."""

    def put_back(self, task_id: str, epoch: int) -> None:
        """The task was drawn in that epoch but never judged: it is drawn again before new ones."""


class Journal(Protocol):
    """Where decisions are written down. Both calls are quick and never block."""

    def group(self, record: ev.GroupRecord) -> None:
        """A group left."""

    def event(self, level: str, message: str) -> None:
        """Something a person should know. level: "warning" or "error"."""


class Recorder(Protocol):
    """Where rollouts are kept. Both calls are quick and never block."""

    def member(self, rollout: Rollout) -> None:
        """An attempt has delivered."""

    def group(self, record: ev.GroupRecord, members: Iterable[tuple[Rollout, bool]], *, is_whole: bool) -> None:
        """A group left, with these members, and whether each counts; is_whole: it could be judged."""


class LocalShell:
    """Owns one machine and plays its instructions. All methods run on the event loop on which it was made."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        source: TaskSource,
        engine: Engine,
        journal: Journal,
        player: Player | None = None,
        scorer: Scorer | None = None,
        decode: Callable[[TokenIds], str] | None = None,
        response_length: int | None = None,
        temperature: float | None = None,
        on_change: Callable[[], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        user_loop: RolloutLoop | None = None,
        encode: Callable[[str], TokenIds] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """player: makes members; None: each is a single response, for which scorer, decode, response_length and temperature are needed.

        user_loop: makes every group of single responses, where the machine's `has_user_loop` says so. encode: text to token ids, for such
        loops. recorder: is shown every member that delivers, and how its group left.
        """
        if player is None:
            if scorer is None or decode is None or response_length is None or temperature is None:
                raise SluiceError("a shell without a player needs scorer, decode, response_length and temperature for single responses")
            self.scorer = scorer
            self.decode = decode
            self.response_length = response_length
            self.temperature = temperature
            player = ResponsePlayer(engine=engine, scorer=scorer, decode=decode, response_length=response_length, temperature=temperature)
        elif user_loop is not None:
            raise SluiceError("expected a player or a user-defined rollout loop, got both - a loop makes groups of single responses")
        self.scheduler = scheduler
        self.source = source
        self.engine = engine
        self.journal = journal
        self._recorder = recorder
        self.encode = encode
        self.late = LateTokens(self.tell)
        self._player = player
        player.bind(self)
        self._on_change = on_change  # called after a group left or a batch was delivered
        self._on_warning = on_warning
        self._loop = asyncio.get_running_loop()
        self._restarts = scheduler.config.on_weight_update == "restart"
        self._user_loop = user_loop
        self._contexts: dict[int, LoopContext] = {}  # group_id -> what its loop works with
        self._loop_tasks: dict[int, asyncio.Task[None]] = {}  # group_id -> its loop
        self._attempts: dict[int, Attempt] = {}  # attempt_id -> attempts of loops
        self._judged: Verdict | None = None  # the machine's word on the response that a loop just handed in
        self._loop_counts = dict.fromkeys(("groups", "attempts", "generating_s", "scoring_s"), 0.0)  # of loops, finished attempts
        self._refused: dict[int, Failure] = {}  # attempt_id -> why the engine will never serve it; the machine is told next
        self._timer: asyncio.TimerHandle | None = None
        self._batch: asyncio.Future[tuple[Batch, Mapping[str, float]]] | None = None
        self._filling = 0  # groups of the batch that the machine is filling; 0: none
        self._ready: tuple[Batch, Mapping[str, float]] | None = None  # filled when nobody waited any more
        self._untold: dict[int, int] = {}  # attempt_id -> tokens of members that were stopped before the machine was told
        self._error: BaseException | None = None
        self._is_error_told = False
        self._is_shut_down = False
        self._warned: set[str] = set()
        self._closed = False
        self.machine_seconds = 0.0  # spent in the machine, its filters and its ledger
        self.journal_seconds = 0.0  # spent handing records to the journal

    # ------------------------------------------------------------ what the trainer's side calls

    async def next_batch(self, groups: int, batches_left: int | None = None) -> tuple[Batch, Mapping[str, float]]:
        """Fill and return the next batch with the metrics of its filling. A call that was cancelled may be repeated: nothing is lost.

        batches_left: batches that will be asked for after this one; None: unknown. Raises ResampleError when a bound is reached under
        `on_exhausted: raise`, and whatever broke the run otherwise.
        """
        if self._error is not None:
            self._is_error_told = True
            raise self._error
        if self._closed:
            raise SluiceError("the shell is closed: no further batch can be filled")
        if self._batch is not None and not self._batch.done():
            raise SluiceError("a batch is being waited for already: one at a time")
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        self._batch = self._loop.create_future()
        if not self._filling:
            self._filling = groups
            self._take_version()
            self.tell(ev.BatchWanted(groups=groups, batches_left=batches_left))
        elif self._filling != groups:
            raise SluiceError(
                f"a batch of {self._filling} groups is being filled since a call that was cancelled, {groups} were asked for now"
            )
        batch = self._batch
        try:
            return await batch
        except asyncio.CancelledError:
            if batch.done() and not batch.cancelled():  # it came in the moment of the cancel, and nobody has it yet
                if batch.exception() is None:
                    self._ready = batch.result()
                else:
                    self._is_error_told = False
            raise

    def step_advanced(self, step: int, *, useful_groups: int = 0, useful_tokens: int = 0) -> None:
        """The optimiser step on the last batch is done, and its weights are published."""
        self._take_version()
        self.tell(ev.StepAdvanced(step=step, useful_groups=useful_groups, useful_tokens=useful_tokens))

    def weights_updated(self, version: int) -> None:
        """The engine samples with these weights from now on."""
        generating = self._player.generating(version) if self._restarts else ()
        self.tell(ev.WeightsUpdated(version=version, generating=generating))

    def _take_version(self) -> None:
        version = self.engine.policy_version
        if version != self.scheduler.version:
            self.weights_updated(version)

    def state_dict(self) -> dict[str, Any]:
        """Scheduler and tasks as plain data and numpy arrays, taken in one moment. See `Scheduler.state_dict`; the source has its own."""
        scheduler = self.scheduler.state_dict(self.in_flight(), self._loop.time())
        scheduler["ledger"]["tokens"]["late"] += self.late.untold
        source: Any = self.source
        outstanding = [(task_id, epoch) for task_id, epoch in scheduler["outstanding"]]
        return {"scheduler": scheduler, "tasks": source.state_dict(outstanding)}

    def in_flight(self) -> dict[int, int]:
        """Attempts under way -> tokens sampled for each so far."""
        return {**self._player.in_flight(), **{attempt_id: attempt.sampled_tokens for attempt_id, attempt in self._attempts.items()}}

    def load_state_dict(self, state: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
        """In a fresh shell with a fresh machine and source: go on where `state` was taken. tasks: by task_id."""
        source: Any = self.source
        source.load_state_dict(state["tasks"])
        for instruction in self.scheduler.load_state_dict(state["scheduler"], tasks):
            assert isinstance(instruction, ev.RecordGroup)
            self._record(instruction)

    async def close(self) -> None:
        """Cancel and account for everything; bounded in time, idempotent. A waiting `next_batch` is cancelled.

        Raises what broke since the last `next_batch`, and was therefore told to nobody.
        """
        if not self._closed:
            self._closed = True
            if self._batch is not None and not self._batch.done():
                self._batch.cancel()
            self._shut_down()
            if self._timer is not None:
                self._timer.cancel()
        pending = [*self.late.pending(), *self._player.pending(), *self._loop_tasks.values()]
        if pending:
            await asyncio.wait(pending, timeout=CLOSE_GRACE_S)
        if self._loop_tasks:
            groups = ", ".join(map(str, sorted(self._loop_tasks)))
            message = f"rollout loops did not end within {CLOSE_GRACE_S:g} s of their cancel (groups {groups})"
            self._warn("loops_left", f"{message} - a loop must let asyncio.CancelledError through")
        if self._error is not None and not self._is_error_told:
            self._is_error_told = True
            raise self._error

    # ------------------------------------------------------------ the machine

    def tell(self, event: ev.Event) -> None:
        """Tell the machine one event and carry out all that follows from it, in order."""
        try:
            instructions = self._handle(event)
            if not instructions:  # most events: a member of a group that is not whole yet
                return
            todo = deque(instructions)
            while todo or self._refused:
                if not todo:  # after the launches of all its siblings, which the answer may cancel
                    attempt_id = next(iter(self._refused))
                    todo.extend(self._handle(_refusal(attempt_id, self._refused.pop(attempt_id))))
                    continue
                instruction = todo.popleft()
                kind = type(instruction)
                if kind is ev.LaunchMember:
                    self._launch(instruction)  # type: ignore[arg-type]
                elif kind is ev.RecordGroup:
                    self._record(instruction)  # type: ignore[arg-type]
                else:
                    todo.extend(self._carry_out(instruction))  # last: draws are answered in the order of asking
        except BaseException as error:  # noqa: BLE001 - whatever broke, also in user code, is raised where the batch is awaited
            if isinstance(event, ev.MemberFinished):
                self._untold[event.rollout.attempt_id] = event.rollout.sampled_tokens
            self._fail(error)

    def _shut_down(self) -> None:
        """Cancel and account for everything, once. Also after an error: then nothing is generated any more that nobody will train on."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.tell(ev.Shutdown())
            # What is left: members whose cancel is still to be carried out, or everything when the machine itself is broken.
            for attempt_id in list(self._player.in_flight()):
                self._untold[attempt_id] = self._player.cancel(attempt_id) or 0
            for attempt_id, attempt in list(self._attempts.items()):
                self._untold[attempt_id] = attempt.let_go()
            self._attempts.clear()
            for group_id in list(self._contexts):
                self._stop_loop(group_id)

    def _handle(self, event: ev.Event) -> list[ev.Instruction]:
        started = perf_counter()
        instructions = self.scheduler.handle(event, self._loop.time())
        self.machine_seconds += perf_counter() - started
        if self._recorder is not None and type(event) is ev.MemberFinished:
            self._recorder.member(event.rollout)
        return instructions

    def _carry_out(self, instruction: ev.Instruction) -> list[ev.Instruction]:
        """Do one instruction other than a launch or a record; returns what the machine answers to its outcome."""
        match instruction:
            case ev.DrawTask():
                drawn = self.source.draw() if instruction.domain is None else self.source.draw(instruction.domain)
                if drawn is None:
                    return self._handle(ev.TasksExhausted())
                return self._handle(ev.TaskDrawn(task=drawn[0], epoch=drawn[1]))
            case ev.ReturnTask():
                self.source.put_back(instruction.task.task_id, instruction.epoch)
            case ev.CancelMember():
                return self._cancel(instruction.attempt_id)
            case ev.StopMember() | ev.HoldMember() | ev.ReleaseMember():
                self._player.steer(instruction)
            case ev.DeliverBatch():
                self._filling = 0
                if self._batch is not None and not self._batch.done():
                    self._batch.set_result((instruction.batch, instruction.metrics))
                else:
                    self._ready = instruction.batch, instruction.metrics
                self._changed()
            case ev.WakeAt():
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(instruction.when, self.tell, ev.ClockTick())
            case ev.RunLoop():
                self._start_loop(instruction)
            case ev.CancelLoop():
                self._stop_loop(instruction.group_id)
            case ev.AttemptRefused():
                if instruction.group_id in self._contexts:
                    self._contexts[instruction.group_id].answered(instruction)
            case ev.MemberJudged():
                self._judged = instruction.verdict
            case ev.Warn():
                self._warn(instruction.key, instruction.message)
            case ev.Fail():
                self._fail(ResampleError(instruction.message))
            case _:
                raise TypeError(f"no way to carry out {instruction!r}")
        return []

    def _record(self, instruction: ev.RecordGroup) -> None:
        started = perf_counter()
        self.journal.group(instruction.record)
        if self._recorder is not None:
            try:
                self._recorder.group(instruction.record, instruction.members, is_whole=instruction.is_whole)
            except RecordError as error:  # ends the run behind this event: what else it brought belongs into the journal
                self._loop.call_soon(self._fail, error)
        self.journal_seconds += perf_counter() - started
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _warn(self, key: str, message: str) -> None:
        self.journal.event("warning", message)
        if key not in self._warned:
            self._warned.add(key)
            if self._on_warning is not None:
                self._on_warning(message)

    def _fail(self, error: BaseException) -> None:
        """The run cannot go on: whoever waits for a batch is told, now or at the next call."""
        if self._error is not None:
            return
        self._error = error
        self._shut_down()
        if self._batch is not None and not self._batch.done():
            self._batch.set_exception(error)
            self._is_error_told = True

    # ------------------------------------------------------------ members

    def _launch(self, launch: ev.LaunchMember) -> None:
        if self._contexts and launch.group_id in self._contexts:
            self._contexts[launch.group_id].answered(launch)  # the loop that asked for it plays it
            return
        failure = self._player.launch(launch)
        if failure is not None:
            self._refused[launch.attempt_id] = failure

    def _cancel(self, attempt_id: int) -> list[ev.Instruction]:
        tokens = self._player.cancel(attempt_id)
        if tokens is None:
            if attempt_id in self._attempts:
                tokens = self._attempts.pop(attempt_id).let_go()
            else:
                self._refused.pop(attempt_id, None)
                tokens = self._untold.pop(attempt_id, 0)
        return self._handle(ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=tokens))

    # ------------------------------------------------------------ user-defined loops

    def loop_metrics(self) -> dict[str, float]:
        """What user-defined loops have done since the start; scoring is from the last generation of an attempt to its `finish`."""
        if self._user_loop is None:
            return {}
        counts = self._loop_counts
        out = {"loops/groups": counts["groups"], "loops/running": float(len(self._loop_tasks)), "loops/attempts": counts["attempts"]}
        if counts["attempts"]:
            for name in ("generating", "scoring"):
                out[f"loops/{name}_seconds/mean"] = counts[f"{name}_s"] / counts["attempts"]
        return out

    def _start_loop(self, order: ev.RunLoop) -> None:
        if self._user_loop is None:
            raise SluiceError("the machine leaves groups to a user-defined loop, but the shell has none - give it user_loop")
        self._loop_counts["groups"] += 1
        context = self._contexts[order.group_id] = LoopContext(self, order)
        task = self._loop.create_task(self._play_loop(self._user_loop, context), name=f"loop of group {order.group_id}")
        self._loop_tasks[order.group_id] = task
        task.add_done_callback(partial(self._loop_ended, context))

    def _loop_ended(self, context: LoopContext, task: asyncio.Task[None]) -> None:
        """Also when it was cancelled before it began."""
        context.close()
        self._contexts.pop(context.group_id, None)
        self._loop_tasks.pop(context.group_id, None)

    async def _play_loop(self, loop: RolloutLoop, context: LoopContext) -> None:
        group_id = context.group_id
        try:
            returned = await play(loop, context)
            if not context.is_closed:
                self.tell(returned)
        except asyncio.CancelledError:
            if not context.is_closed:  # by somebody else, or by what the loop awaited
                detail = "it was cancelled, or awaited something that was, while its group was open"
                self.tell(ev.GroupReturned(group_id=group_id, rollouts=None, reason="loop_error", detail=detail))
            raise
        except LoopError as error:
            if not context.is_closed:
                self._fail(LoopError(f"{error}\n{self.scheduler.story(group_id)}"))

    def _stop_loop(self, group_id: int) -> None:
        context, task = self._contexts.get(group_id), self._loop_tasks.get(group_id)
        if context is None or task is None or context.is_closed:  # cancelled once: a second time would hit its cleaning up
            return
        context.close()
        task.cancel()

    def broken(self, error: BaseException) -> None:
        """An engine, a scorer or the environments are broken as a whole: the run ends with the error."""
        self._fail(error)

    def attempt_started(self, attempt: Attempt) -> None:
        """A loop has begun an attempt."""
        self._attempts[attempt.attempt_id] = attempt

    def attempt_finished(self, rollout: Rollout, generating_s: float, scoring_s: float) -> Verdict | None:
        """A loop hands in a response; whether it stays in its group. None: the group has left meanwhile."""
        self._attempts.pop(rollout.attempt_id, None)
        for name, value in (("attempts", 1.0), ("generating_s", generating_s), ("scoring_s", scoring_s)):
            self._loop_counts[name] += value
        self._judged = None
        self.tell(ev.MemberFinished(rollout=rollout))
        return self._judged

    def attempt_failed(self, attempt_id: int, failure: Failure, sampled_tokens: int) -> None:
        """An attempt of a loop has ended without a response."""
        self._attempts.pop(attempt_id, None)
        self.tell(ev.MemberFailed(attempt_id=attempt_id, failure=failure, sampled_tokens=sampled_tokens))

    def attempt_cancelled(self, attempt_id: int, sampled_tokens: int) -> None:
        """A loop does not want the response of an attempt any more."""
        self._attempts.pop(attempt_id, None)
        self.tell(ev.MemberCancelled(attempt_id=attempt_id, sampled_tokens=sampled_tokens))

    def let_go(self, launch: ev.LaunchMember, handle: GenerationHandle, counted_tokens: int) -> None:
        """Cancel a generation of a loop whose attempt has ended; what is sampled for it beyond `counted_tokens` is told as late."""
        if handle.future.done():
            if not handle.future.cancelled():
                handle.future.exception()  # nobody else looks at it
            return
        self.late.expect(launch.attempt_id, handle, counted_tokens)
        handle.cancel()


def _refusal(attempt_id: int, failure: Failure) -> ev.MemberFailed:
    return ev.MemberFailed(attempt_id=attempt_id, failure=failure, sampled_tokens=0, is_final=True)
