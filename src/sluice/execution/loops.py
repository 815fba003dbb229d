"""User-defined rollout loops: a class of your own makes a group, with a context that accounts for everything it samples.

    class Doubtful(RolloutLoop):
        async def run(self, context):
            rollouts = await context.members()          # generate, score, filter and replace, as without a loop
            return None if context.task.answer is None else rollouts

`run` returns the rollouts of the group (the machine judges them), a `Judged` (its own verdict is final), or None (the group is given up).
What the machine must know it is told by the context: every try at a member is an attempt with its tokens, rounds are counted there, and a
group that was closed meanwhile (batch full, expired, timed out) cancels the loop.

| part | consumes | waits for | unblocked by |
|---|---|---|---|
| a loop | RunLoop | its generations and scores | engine, scorer, CancelLoop |
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from sluice.errors import LoopError
from sluice.generation.base import Generation, GenerationHandle, GenerationRequest
from sluice.rewards.base import Score
from sluice.scheduler import events as ev
from sluice.scheduler.groups import mix
from sluice.types import EMPTY, Failure, FailureCause, Rollout, Task, TokenIds, Turn, Verdict

if TYPE_CHECKING:
    from sluice.execution.shell import LocalShell


class RolloutLoop(Protocol):
    """What a user-defined loop is: one object for the run, `run` once per group, many at the same time."""

    async def run(self, context: LoopContext) -> Sequence[Rollout] | Judged | None:
        """Make one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rollouts with the loop's own verdict on them, which the query filter does not see."""

    rollouts: Sequence[Rollout]
    verdict: Verdict


class RoundsUsedUp(LoopError):
    """The member has been tried `max_response_rounds` times. Uncaught, it gives the group up as `response_retries`."""


class GroupClosed(LoopError):
    """The group has left meanwhile: nothing more can be sampled for it."""


class AttemptFailed(LoopError):
    """The engine did not deliver. The attempt has ended; another one may be started. Uncaught, it gives the group up."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}: {failure.detail}")
        self.failure = failure


class Attempt:
    """One try at one member: any number of generations, then `finish` or `fail`."""

    def __init__(self, context: LoopContext, launch: ev.LaunchMember) -> None:
        self._context = context
        self._launch = launch
        self._turns: list[Turn] = []
        self._handle: GenerationHandle | None = None
        self._before = 0  # tokens of finished generations
        self._started_at = asyncio.get_running_loop().time()
        self.is_open = True
        self.verdict: Verdict | None = None  # after `finish`: whether the response stays in the group

    @property
    def attempt_id(self) -> int:
        """Unique in the run."""
        return self._launch.attempt_id

    @property
    def member_index(self) -> int:
        """The member that is tried."""
        return self._launch.member_index

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._before + (0 if self._handle is None else self._handle.sampled_tokens)

    @property
    def text(self) -> str:
        """The text of the last generation; "" before the first."""
        return self._turns[-1].text if self._turns else ""

    async def generate(self, prompt_ids: TokenIds | None = None, *, max_new_tokens: int | None = None) -> Generation:
        """Sample on. prompt_ids: tokens put before this generation, behind what there is already; None: the task's prompt, the first time.

        Raises `AttemptFailed` when the engine does not deliver, `GroupClosed` when the group has left.
        """
        self._require_open()
        added = self._added(prompt_ids)
        context = [part for turn in self._turns for part in (turn.prompt_ids, turn.token_ids)]
        shell = self._context._shell
        seed = self._launch.seed if not self._turns else mix(self._launch.seed, len(self._turns))
        request = GenerationRequest(
            request_id=mix(self.attempt_id, len(self._turns)) if self._turns else self.attempt_id,
            prompt_ids=np.concatenate([*context, added]) if context else added,
            max_new_tokens=shell.response_length if max_new_tokens is None else max_new_tokens,
            temperature=shell.temperature,
            seed=seed,
        )
        try:
            self._handle = handle = shell.engine.submit(request)
            generation = await asyncio.shield(handle.future)
        except asyncio.CancelledError:
            self._require_open()
            cancelled_by_engine = self._handle is not None and self._handle.future.cancelled()
            self._fail(Failure(cause="infrastructure", reason="engine_error" if cancelled_by_engine else "loop_cancelled"))
            raise
        except Exception as error:
            self._require_open()
            failure = Failure(cause="infrastructure", reason="engine_error", detail=f"{type(error).__name__}: {error}")
            self._fail(failure)
            raise AttemptFailed(failure) from error
        self._require_open()
        self._before += len(generation.token_ids)
        self._handle = None
        self._turns.append(
            Turn(
                prompt_ids=added,
                token_ids=generation.token_ids,
                inference_logprobs=generation.inference_logprobs,
                text=shell.decode(generation.token_ids),
                finish_reason=generation.finish_reason,
                policy_version=generation.policy_version,
                token_versions=generation.token_versions,
            )
        )
        return generation

    async def score(self, response: str | None = None) -> Score:
        """What the domain's verifier says to a response; None: the text of the last generation."""
        self._require_open()
        score = await self._context._shell.scorer.score(self._context.task, self.text if response is None else response)
        self._require_open()
        return score

    def finish(self, reward: float | Score | None, *, metrics: dict[str, float] | None = None) -> Rollout | None:
        """End the attempt with what it earned. The rollout when it stays in the group; None when the response filter, the truncation
        policy or a missing reward takes it out (`verdict` says why): start another attempt then.
        """
        self._require_open()
        if not self._turns:
            raise LoopError(f"attempt {self.attempt_id} of group {self._context.group_id} has sampled nothing - generate first, or fail it")
        score = reward if isinstance(reward, Score) else Score(reward=reward, metrics=metrics or EMPTY)
        rollout = Rollout(
            attempt_id=self.attempt_id,
            group_id=self._context.group_id,
            member_index=self.member_index,
            task_id=self._context.task.task_id,
            turns=tuple(self._turns),
            finish_reason=self._turns[-1].finish_reason,
            reward=score.reward,
            metrics=score.metrics,
            failure=score.failure,
            seconds=asyncio.get_running_loop().time() - self._started_at,
        )
        self.is_open = False
        self.verdict = self._context._shell.attempt_finished(rollout)
        return rollout if self.verdict is not None and self.verdict.keep else None

    def fail(self, reason: str, detail: str = "", *, cause: FailureCause = "infrastructure") -> None:
        """End the attempt without a response. reason: one short, countable word."""
        self._require_open()
        self._fail(Failure(cause=cause, reason=reason, detail=detail))

    def let_go(self) -> int:
        """The machine has cancelled it; its tokens so far. What the engine still samples is told as late."""
        sampled = self.sampled_tokens
        self.is_open = False
        self._stop_generating()
        return sampled

    def _stop_generating(self) -> None:
        if self._handle is not None and not self._handle.future.done():
            self._context._shell.let_go(self._launch, self._handle)

    def _added(self, prompt_ids: TokenIds | None) -> TokenIds:
        if prompt_ids is None:
            return self._context.task.prompt_ids if not self._turns else np.zeros(0, dtype=np.int64)
        added = np.asarray(prompt_ids)
        if added.ndim != 1 or not (np.issubdtype(added.dtype, np.integer) or not len(added)):
            raise LoopError(
                f"expected prompt_ids as one row of token ids, got {added.dtype} of shape {added.shape} - tokenize the text first"
            )
        return added.astype(np.int64)

    def _fail(self, failure: Failure) -> None:
        self.is_open = False
        self._context._failure = failure
        self._context._shell.attempt_failed(self.attempt_id, failure, self.sampled_tokens)
        self._stop_generating()

    def _require_open(self) -> None:
        if not self.is_open:
            if self._context.is_closed:
                raise GroupClosed(f"group {self._context.group_id} has left meanwhile")
            raise LoopError(f"attempt {self.attempt_id} of group {self._context.group_id} has ended - start another one")


class LoopContext:
    """What a loop knows and can do for one group."""

    def __init__(self, shell: LocalShell, order: ev.RunLoop) -> None:
        self._shell = shell
        self._answer: ev.LaunchMember | ev.AttemptRefused | None = None
        self._failure: Failure | None = None
        self._reason = ""
        self.is_closed = False
        self.task: Task = order.task
        self.group_id = order.group_id
        self.epoch = order.epoch
        self.start_step = order.start_step  # global_step at launch
        self.group_size = shell.scheduler.config.group_size
        self.response_length: int = shell.response_length  # tokens
        self.is_val = False  # evaluation runs without loops

    @property
    def domain(self) -> str:
        """The task's reward domain."""
        return self.task.domain

    def start(self, member_index: int) -> Attempt:
        """Begin one try at one member, 0 to group_size + redundancy - 1. A member that was delivered is taken out of the group again.

        Raises `RoundsUsedUp` after max_response_rounds tries, `GroupClosed` when the group has left, `LoopError` for an index that is no
        member or is being tried.
        """
        answer = self._ask(member_index)
        if isinstance(answer, ev.LaunchMember):
            attempt = Attempt(self, answer)
            self._shell.attempt_started(attempt)
            return attempt
        if answer is not None and answer.reason == "response_retries":
            raise RoundsUsedUp(f"member {member_index} of group {self.group_id} has been tried max_response_rounds times")
        raise GroupClosed(f"group {self.group_id} has left meanwhile")

    def _ask(self, member_index: int) -> ev.LaunchMember | ev.AttemptRefused | None:
        self._answer = None
        self._shell.tell(ev.LoopAttempt(group_id=self.group_id, member_index=member_index))
        return self._answer

    async def member(self, member_index: int) -> Rollout | None:
        """One member by one prompt and one response: generated, scored, and replaced while it is rejected or lost. None: rounds used up."""
        while True:
            try:
                attempt = self.start(member_index)
            except RoundsUsedUp:
                return None
            try:
                await attempt.generate()
            except AttemptFailed:
                continue
            rollout = attempt.finish(await attempt.score())
            if rollout is not None:
                return rollout

    async def members(self, count: int | None = None) -> list[Rollout] | None:
        """All members at the same time, in order; None when fewer than `min_members` could be had. count: None for group_size."""
        number = self.group_size if count is None else count
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.member(index), name=f"group {self.group_id} member {index}") for index in range(number)]
        rollouts = [rollout for task in tasks if (rollout := task.result()) is not None]
        least = self._shell.scheduler.config.min_members or number
        if len(rollouts) < min(least, number):
            self.give_up("response_retries")
            return None
        return rollouts

    def give_up(self, reason: str) -> None:
        """Say why `run` is about to return None. reason: one short, countable word."""
        self._reason = reason

    def answered(self, answer: ev.LaunchMember | ev.AttemptRefused) -> None:
        """The machine's answer to `start`."""
        self._answer = answer

    def close(self) -> None:
        """The group has left."""
        self.is_closed = True


async def play(loop: RolloutLoop, context: LoopContext) -> ev.GroupReturned | BaseException:
    """Run a loop for one group: what is told to the machine, or the exception that a loop of a user raised."""
    reason = ""
    try:
        answer = await loop.run(context)
        if isinstance(answer, Judged):
            return ev.GroupReturned(group_id=context.group_id, rollouts=tuple(answer.rollouts), judged=answer.verdict)
        if answer is not None:
            return ev.GroupReturned(group_id=context.group_id, rollouts=_rollouts(answer, context))
        reason = context._reason or ("" if context._failure is None else context._failure.reason)
    except asyncio.CancelledError:
        if not context.is_closed:
            raise
        reason = "cancelled"
    except BaseException as error:  # noqa: BLE001 - user code: told with the story of the group, and counted
        known = _reason_of(error)
        if known is None:
            return error
        reason = known
    return ev.GroupReturned(group_id=context.group_id, rollouts=None, reason=reason)


def _rollouts(answer: object, context: LoopContext) -> tuple[Rollout, ...]:
    rollouts = tuple(answer) if isinstance(answer, Sequence) and not isinstance(answer, str) else None
    if rollouts is None or not all(isinstance(rollout, Rollout) for rollout in rollouts):
        raise LoopError(
            f"expected the rollouts of group {context.group_id} (a list of sluice.Rollout), a Judged, or None, got {answer!r:.200} "
            "- return what context.members() or Attempt.finish gave"
        )
    return rollouts


def _reason_of(error: BaseException) -> str | None:
    """The countable reason of one of our own errors that a loop let through; None: the error is the loop's own."""
    if isinstance(error, BaseExceptionGroup):
        reasons = {_reason_of(inner) for inner in error.exceptions}
        return reasons.pop() if len(reasons) == 1 else None
    if isinstance(error, AttemptFailed):
        return error.failure.reason
    if isinstance(error, RoundsUsedUp):
        return "response_retries"
    return "cancelled" if isinstance(error, GroupClosed) else None


def load_loop(path: str, config: Any = None) -> RolloutLoop:
    """Make the loop that `user_defined_rollout_loop_cls` names. Its class takes no argument, or one: the configuration.

    Raises `LoopError` that says what is wrong with it.
    """
    where = "user_defined_rollout_loop_cls"
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise LoopError(f"{where}: expected an import path package.module.Class, got {path!r}")
    try:
        made: Any = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise LoopError(f"{where}: {path!r} cannot be imported ({type(error).__name__}: {error}) - is its folder on PYTHONPATH?") from error
    if not inspect.isclass(made):
        raise LoopError(f"{where}: expected a class, but {path} is a {type(made).__name__}")
    run = getattr(made, "run", None)
    if not inspect.iscoroutinefunction(run):
        raise LoopError(f"{where}: {path} needs `async def run(self, context)`, got {'none' if run is None else 'a run that is not async'}")
    make: Callable[..., RolloutLoop] = cast(Any, made)
    try:
        takes_config = len(inspect.signature(make).parameters) > 0
        loop: RolloutLoop = made(config) if takes_config else made()
    except Exception as error:
        raise LoopError(
            f"{where}: {path} cannot be made ({type(error).__name__}: {error}) - it takes no argument, or the configuration"
        ) from error
    return loop
