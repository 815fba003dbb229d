"""One trajectory: an environment is reset, then the policy and it take turns until one of them, a limit or a fault ends it.

Nothing sampled is ever encoded again: a turn holds the tokens, log-probs and versions that the engine gave, and the tokens put before them.
Every sampled token is in `sampled_tokens`, or goes to whoever counts what comes late; on every way out the dialogue is ended and the
environment is free.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, get_args

from sluice.environments import EnvFault, EnvInfo, EnvReset, EnvStep, Runner
from sluice.errors import RequestRefused
from sluice.execution.dialogue import DialogueFormat
from sluice.execution.seats import Seats
from sluice.generation.base import Engine, Generation, GenerationHandle, GenerationRequest, Purpose
from sluice.scheduler.groups import mix
from sluice.types import Failure, Flag, RolloutFinish, TokenIds, Turn

FLAGS: Final[tuple[Flag, ...]] = get_args(Flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What all trajectories of a player share."""

    engine: Engine
    dialogue: DialogueFormat
    seats: Seats
    sequence_length: int  # tokens of a whole trajectory
    max_tokens_per_turn: int
    max_turns: int | None  # None: the environment ends it
    timeout_s: float | None  # of one trajectory, from the call that resets its environment; None: no limit


Stepped = Callable[["Trajectory", Turn, EnvStep, float | None], None]
"""Told after every step of the environment: the trajectory, the turn, the environment's reply, and the progress before it.

When the step ended the trajectory, `is_over` says so. Whoever is told may let it go, stop it or hold it before it returns.
"""

LetGo = Callable[["Trajectory", GenerationHandle, int], None]
"""Told of a generation that nobody waits for any more, just cancelled, and how many of its tokens are counted."""


class Trajectory:
    """One try, by one task: `play` it once, then read what became of it.

    `let_go` ends it from outside; whoever calls it also cancels the task. `stop` makes it deliver what it has; `hold` and `release` keep it
    from its next turn.
    """

    __slots__ = (
        "_barrier", "_deadline", "_handle", "_is_expired", "_is_told", "_let_go", "_loop", "_runner", "_step_rewards", "_stepped", "_table",
        "_task", "_temperature", "_timer", "admissible_actions", "env_id", "env_seed", "env_steps", "environment_s", "failure",
        "finish_reason", "flags", "generating_s", "held_s", "is_final", "is_let_go", "judged_actions", "number", "progress", "purpose",
        "reward", "sampled_tokens", "seed", "started_at", "success", "task_type", "total_s", "truncated_turns", "turns", "version",
        "waiting_s",
    )  # fmt: skip

    def __init__(
        self,
        table: Table,
        *,
        number: int,
        seed: int,
        env_seed: int,
        temperature: float,
        purpose: Purpose,
        stepped: Stepped | None = None,
        let_go: LetGo,
    ) -> None:
        """number: names its requests and its dialogue. seed: of what the policy samples. env_seed: of the problem."""
        self._table = table
        self._temperature = temperature
        self._stepped = stepped
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._runner: Runner | None = None
        self._handle: GenerationHandle | None = None  # of the generation under way
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None  # of the loop's clock; None: none yet
        self._is_expired = False
        self._is_told = False  # somebody is being told of its step just now
        self._barrier: asyncio.Future[None] | None = None  # resolves when it may take its next turn; None: it may
        self.number = number
        self.seed = seed
        self.env_seed = env_seed
        self.purpose: Purpose = purpose
        self.turns: list[Turn] = []
        self.sampled_tokens = 0  # counted: of all generations that ended, and of one that was let go
        self.version = -1  # of the weights when it first sampled; -1: it has not
        self.reward = 0.0  # sum over its steps, correctly rounded: their order makes no difference
        self._step_rewards: list[float] = []
        # How it ended:
        self.finish_reason: RolloutFinish | None = None  # None: it has not, or the engine failed it
        self.failure: Failure | None = None
        self.is_final = False  # the failure would come again
        self.is_let_go = False
        # What its environment said:
        self.flags: frozenset[Flag] = frozenset()
        self.env_id: str | None = None
        self.task_type: str | None = None
        self.success: bool | None = None
        self.progress: float | None = None
        # What is counted:
        self.env_steps = 0
        self.truncated_turns = 0  # that reached their token limit
        self.judged_actions = 0  # of which the environment says whether they are admissible
        self.admissible_actions = 0
        self.started_at = 0.0  # when it asked for a seat
        self.waiting_s = 0.0  # for a seat, or for a worker
        self.generating_s = 0.0
        self.environment_s = 0.0
        self.held_s = 0.0  # kept from its next turn
        self.total_s = 0.0

    # ------------------------------------------------------------ from outside

    @property
    def tokens(self) -> int:
        """Tokens sampled so far, those of the generation under way included."""
        return self.sampled_tokens + (0 if self._handle is None else self._handle.sampled_tokens)

    @property
    def is_mixed(self) -> bool:
        """Whether more than one set of weights sampled its tokens."""
        turns = self.turns
        return any(turn.token_versions is not None or turn.policy_version != turns[0].policy_version for turn in turns)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or has nothing to do but end."""
        return self.finish_reason is not None or self.failure is not None

    def stop(self) -> bool:
        """End it at once, as futile, with the reward so far. False: it is over already, or has not taken a step."""
        if self.is_over or self._is_expired or not self.env_steps:
            return False
        self.finish_reason = "stopped_futile"
        if not self._is_told and self._task is not None:
            self._task.cancel()
        return True

    def hold(self) -> None:
        """Keep it from its next turn."""
        if self._barrier is None:
            self._barrier = self._loop.create_future()

    def release(self) -> None:
        """It may take its next turn."""
        barrier, self._barrier = self._barrier, None
        if barrier is not None and not barrier.done():
            barrier.set_result(None)

    def let_go(self) -> int:
        """It is not wanted any more: count its tokens and end its dialogue. Its seat is free as soon as its task sees the cancel."""
        self.is_let_go = True
        self.finish_reason = "cancelled"
        self._end_dialogue()
        return self.sampled_tokens

    # ------------------------------------------------------------ its task

    async def play(self) -> None:
        """Play it to its end. Waits for a seat, the engine and the environment; unblocked by them, by its time limit and by a cancel.

        Raises what is broken as a whole: the engine, or the environments.
        """
        self._task = asyncio.current_task()
        self.started_at = self._loop.time()
        seats, loop = self._table.seats, self._loop
        try:
            runner = self._runner = await seats.take()
            self.waiting_s = loop.time() - self.started_at
            try:
                if self._table.timeout_s is not None:
                    self._timer = loop.call_later(self._table.timeout_s, self._look_at_clock)
                await self._take_turns(runner)
            except asyncio.CancelledError:
                is_own = self._is_expired or self.finish_reason == "stopped_futile"
                if not is_own or self.is_let_go or (self._task is not None and self._task.uncancel()):
                    raise
                if self._is_expired:
                    self._time_out()
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                runner.leave()
                seats.give_back(runner)
        finally:
            self._end_dialogue()
            self.total_s = loop.time() - self.started_at

    async def _take_turns(self, runner: Runner) -> None:
        table = self._table
        dialogue, max_turns, most = table.dialogue, table.max_turns, table.max_tokens_per_turn
        reset = await self._reset(runner)
        if isinstance(reset, EnvFault):
            self._fault(reset)
            return
        observation, info = reset.observation, reset.info
        self._note(info)
        prompt_ids = dialogue.opening(observation, info, max_turns)
        left = table.sequence_length - len(prompt_ids)
        if left < 1:
            self._out_of_tokens(len(prompt_ids))
            return
        while True:
            number = len(self.turns)
            limit = min(most, left)
            generation = await self._generate(prompt_ids, limit, number)
            if generation is None:
                return
            left -= len(generation.token_ids)
            text = dialogue.text_of(generation.token_ids)
            action: str | None = None
            is_admissible: bool | None = None
            step: EnvStep | EnvFault | None = None
            is_truncated = generation.finish_reason == "length"
            self.truncated_turns += is_truncated
            if not is_truncated or limit == most:
                action, is_admissible = dialogue.action_of(text, info.admissible_commands)
                if is_admissible is not None:
                    self.judged_actions += 1
                    self.admissible_actions += is_admissible
                called_at = self._loop.time()
                try:
                    step = await runner.step(action)
                finally:
                    self.environment_s += self._loop.time() - called_at
            turn = Turn(
                prompt_ids=prompt_ids,
                token_ids=generation.token_ids,
                inference_logprobs=generation.inference_logprobs,
                text=text,
                finish_reason=generation.finish_reason,
                policy_version=generation.policy_version,
                token_versions=generation.token_versions,
                observation=observation,
                action=action,
                is_admissible=is_admissible,
                reward=step.reward if isinstance(step, EnvStep) else None,
                progress=self.progress,
            )
            self.turns.append(turn)
            if step is None:
                self.finish_reason = "length"  # the sequence is full in the middle of a turn
                return
            if isinstance(step, EnvFault):
                self._fault(step)
                return
            self.env_steps += 1
            self._step_rewards.append(step.reward)
            self.reward = math.fsum(self._step_rewards)
            progress = self.progress
            observation, info = step.observation, step.info
            self._note(info)
            turns_left = None if max_turns is None else max_turns - len(self.turns)
            if step.terminated:
                self.finish_reason = "completed"
            elif step.truncated or turns_left == 0:
                self.finish_reason = "max_turns"
            elif self._deadline is not None and self._loop.time() >= self._deadline:  # nothing it waited for let the clock be looked at
                self._time_out()
            else:
                after = generation.token_ids
                prompt_ids = dialogue.reply(observation, info, turn=len(self.turns) + 1, turns_left=turns_left, after=after)
                left -= len(prompt_ids)
                if left < 1:
                    self._out_of_tokens(len(prompt_ids))
            if self._stepped is not None:
                self._is_told = True
                self._stepped(self, turn, step, progress)
                self._is_told = False
            if self.is_over:
                return
            if self._barrier is not None:
                await self._wait(self._barrier)

    async def _wait(self, barrier: asyncio.Future[None]) -> None:
        """Until it may take its next turn. Waits for `release`; unblocked by it, by a stop and by a cancel. Its time limit stands still."""
        since = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        try:
            await barrier
        finally:
            waited = self._loop.time() - since
            self.held_s += waited
        if self._deadline is not None:
            self._deadline += waited
            self._timer = self._loop.call_at(self._deadline, self._look_at_clock)

    async def _reset(self, runner: Runner) -> EnvReset | EnvFault:
        called_at = self._loop.time()
        seconds = None
        try:
            reset = await runner.reset(self.env_seed)
            seconds = reset.seconds
        finally:
            whole = self._loop.time() - called_at
            inside = whole if seconds is None else min(seconds, whole)
            self.environment_s += inside
            self.waiting_s += whole - inside  # for a worker, where workers are fewer than seats
        if self._table.timeout_s is not None and self._deadline is None:
            self._deadline = self._loop.time() - inside + self._table.timeout_s
        return reset

    async def _generate(self, prompt_ids: TokenIds, limit: int, turn: int) -> Generation | None:
        """What the policy writes next; None: the engine failed it."""
        engine, number = self._table.engine, self.number
        request = GenerationRequest(
            request_id=number,
            prompt_ids=prompt_ids,
            max_new_tokens=limit,
            temperature=self._temperature,
            seed=mix(self.seed, turn),
            purpose=self.purpose,
            dialogue_id=number,
        )
        if not turn:
            self.version = engine.policy_version
        asked_at = self._loop.time()
        try:
            handle = engine.submit(request)
        except RequestRefused as error:
            self._fail("request_refused", f"{type(error).__name__}: {error}", is_final=True)
            return None
        self._handle, future = handle, handle.future
        try:
            if not future.done():
                # A future of our own is waited for: a cancel of the task must not cancel the engine's, which still counts tokens.
                waiter: asyncio.Future[None] = self._loop.create_future()
                future.add_done_callback(partial(_wake, waiter))
                await waiter
        finally:
            self.generating_s += self._loop.time() - asked_at
        self._handle = None
        fault = None if future.cancelled() else future.exception()
        if fault is not None or future.cancelled():
            self.sampled_tokens += handle.sampled_tokens
            self._fail("engine_error", "the engine cancelled it" if fault is None else f"{type(fault).__name__}: {fault}")
            return None
        generation = future.result()
        self.sampled_tokens += len(generation.token_ids)
        if generation.finish_reason == "cancelled":
            self._fail("engine_error", "the engine cancelled it")
            return None
        return generation

    # ------------------------------------------------------------ how it ends

    def _fail(self, reason: str, detail: str, *, is_final: bool = False) -> None:
        """It cannot go on, and has nothing to deliver."""
        self.failure = Failure(cause="infrastructure", reason=reason, detail=detail)
        self.is_final = is_final

    def _fault(self, fault: EnvFault) -> None:
        problem = f"seed {self.env_seed}" if self.env_id is None else f"problem {self.env_id}, seed {self.env_seed}"
        self.failure = Failure(cause="infrastructure", reason=fault.kind, detail=f"{fault.detail} ({problem})")
        self.finish_reason = "env_timeout" if fault.kind == "env_timeout" else "env_failed"
        self.flags |= {self.finish_reason}

    def _out_of_tokens(self, more: int) -> None:
        """What it would have to read next leaves no token to write."""
        if self.turns:
            self.finish_reason = "length"
            return
        detail = f"its first observation has {more} tokens, sequence_length is {self._table.sequence_length}"
        self._fail("observation_too_long", f"{detail} - raise it, or shorten what the environment says", is_final=True)

    def _time_out(self) -> None:
        detail = f"the trajectory (seed {self.env_seed}) took more than dialogue.timeout_s = {self._table.timeout_s:g} s"
        self.failure = Failure(cause="infrastructure", reason="trajectory_timeout", detail=detail)
        self.finish_reason = "timeout"
        self.flags |= {"env_timeout"}

    def _look_at_clock(self) -> None:
        """The timer: end it if its time is over, which begins with the call that resets its environment, not with the wait for a worker."""
        assert self._runner is not None
        assert self._table.timeout_s is not None
        now = self._loop.time()
        if self._deadline is None:
            running = self._runner.running
            if running is None:  # it waits for a worker
                self._timer = self._loop.call_later(self._table.timeout_s, self._look_at_clock)
                return
            self._deadline = now - (time.monotonic() - running.since) + self._table.timeout_s
        if now < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._look_at_clock)
        elif self._task is not None and not self.is_over:
            self._is_expired = True
            self._task.cancel()

    def _end_dialogue(self) -> None:
        """The engine may forget it. Whatever it still samples is somebody else's to count."""
        handle, self._handle = self._handle, None
        if handle is not None:
            counted = handle.sampled_tokens  # read once: an engine samples in a thread of its own
            self.sampled_tokens += counted
            self._table.engine.end_dialogue(self.number, self.purpose)
            self._let_go(self, handle, counted)
        elif self.version >= 0:
            self._table.engine.end_dialogue(self.number, self.purpose)

    def _note(self, info: EnvInfo) -> None:
        """Remember what the environment says about the problem."""
        if info.success is not None:
            self.success = info.success
        if info.progress is not None:
            self.progress = info.progress
        if self.env_id is None:
            self.env_id = info.env_id
        if self.task_type is None:
            self.task_type = info.task_type
        if info.extra:
            self.flags |= {flag for flag in FLAGS if info.extra.get(flag) is True}


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)
