"""User-defined rollout loops: a class of your own makes a group, with a context that accounts for everything it samples.

    class CheckYourAnswer(RolloutLoop):
        async def run(self, context):
            return await context.members(self.play)     # replaces what is rejected or lost, as without a loop

        async def play(self, attempt):
            await attempt.generate(max_new_tokens=attempt.tokens_left // 2)
            await attempt.generate(attempt.context.encode("Check your answer."))
            return await attempt.score()

`run` returns the rollouts of the group (the query filter judges them), a `Judged` (its own verdict is final), or None (the group is given
up). What the machine must know it is told by the context: every try at a member is an attempt with its tokens, rounds are counted there,
and a group that was closed meanwhile (batch full, expired, timed out) cancels the loop.

| part | consumes | waits for | unblocked by |
|---|---|---|---|
| a loop | RunLoop | its generations and scores | engine, scorer, CancelLoop |

docs/rollout_loops.md is the guide.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from sluice.errors import FilterError, LoopError, RequestRefused, describe
from sluice.execution.member import fixed
from sluice.generation.base import Generation, GenerationHandle, GenerationRequest
from sluice.rewards.base import Score
from sluice.rewards.score import make_score
from sluice.scheduler import events as ev
from sluice.scheduler.groups import mix
from sluice.types import Failure, Group, Rollout, Task, TokenIds, Turn, Verdict

if TYPE_CHECKING:
    from sluice.execution.shell import LocalShell

NO_TOKENS: Final = np.zeros(0, dtype=np.int64)


class RolloutLoop:
    """Base of user-defined loops: one object for the run, `run` once per group, for many groups at the same time.

    As it stands it does what is done without a loop. Any other class with the same `run` will do as well.
    """

    async def run(self, context: LoopContext) -> Sequence[Rollout] | Judged | None:
        """Make one group."""
        return await context.members()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rollouts with the loop's own verdict on them, which the query filter does not see. A drop may have any number of rollouts."""

    rollouts: Sequence[Rollout]
    verdict: Verdict


class RoundsUsedUp(LoopError):
    """The member has been tried `max_response_rounds` times. Uncaught, it gives the group up as `response_retries`."""


class TokensUsedUp(LoopError):
    """`response_length` leaves no token for another generation. The attempt stays open: finish it. Uncaught: `tokens_used_up`."""


class GroupClosed(LoopError):
    """The group has left meanwhile: nothing more can be sampled for it."""


class AttemptFailed(LoopError):
    """The engine did not deliver. The attempt has ended; another one may be started. Uncaught, it gives the group up by its reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}: {failure.detail}")
        self.failure = failure


class Attempt:
    """One try at one member: any number of generations, then `finish`, `reject`, `fail` or `cancel`."""

    def __init__(self, context: LoopContext, launch: ev.LaunchMember) -> None:
        self.context = context
        self.attempt_id = launch.attempt_id  # unique in the run
        self.member_index = launch.member_index  # the member that is tried
        self.is_open = True
        self.verdict: Verdict | None = None  # after `finish`: whether the response stays in the group
        self.rollout: Rollout | None = None  # after `finish`: the response, where it stays in the group
        self._shell = context._shell
        self._launch = launch
        self._turns: list[Turn] = []
        self._handle: GenerationHandle | None = None  # of the generation under way
        self._before = 0  # tokens of finished generations
        self._added_tokens = 0  # put between generations
        self._started_at = self._generated_at = asyncio.get_running_loop().time()
        self._generating_s = 0.0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The generations so far."""
        return tuple(self._turns)

    @property
    def text(self) -> str:
        """The text of the last generation; "" before the first."""
        return self._turns[-1].text if self._turns else ""

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._before + (0 if self._handle is None else self._handle.sampled_tokens)

    @property
    def tokens_left(self) -> int:
        """What is left of response_length, which bounds everything behind the first prompt: sampled tokens and those put between."""
        return self.context.response_length - self._before - self._added_tokens

    async def generate(self, prompt_ids: TokenIds | None = None, *, max_new_tokens: int | None = None) -> Generation:
        """Sample on. prompt_ids: tokens put before this generation, behind what there is already; None: the task's prompt, the first time.

        max_new_tokens: at most so many, and never more than `tokens_left`. Raises `AttemptFailed` when the engine does not deliver,
        `TokensUsedUp` when no token is left for it, `GroupClosed` when the group has left. Cancelled (by a time-out, say), it cancels the
        attempt.
        """
        self._require_idle("generate")
        added = self._added(prompt_ids)
        limit = self._limit(added, max_new_tokens)
        before = [part for turn in self._turns for part in (turn.prompt_ids, turn.token_ids)]
        request = GenerationRequest(
            request_id=mix(self.attempt_id, len(self._turns)) if self._turns else self.attempt_id,
            prompt_ids=np.concatenate([*before, added]) if before else added,
            max_new_tokens=limit,
            temperature=self._shell.temperature,
            seed=mix(self._launch.seed, len(self._turns)) if self._turns else self._launch.seed,
        )
        generation = await self._sample(request)
        self._before += len(generation.token_ids)
        self._added_tokens += len(added) if self._turns else 0
        self._turns.append(
            Turn(
                prompt_ids=added,
                token_ids=generation.token_ids,
                inference_logprobs=generation.inference_logprobs,
                text=self._shell.decode(generation.token_ids),
                finish_reason=generation.finish_reason,
                policy_version=generation.policy_version,
                token_versions=generation.token_versions,
            )
        )
        return generation

    async def _sample(self, request: GenerationRequest) -> Generation:
        """What the engine delivers. The attempt has ended when this raises."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            self._handle = handle = self._shell.engine.submit(request)
        except RequestRefused as error:  # the same tokens would be put together again: the next try samples others
            raise self._failed(Failure(cause="policy", reason="request_refused", detail=describe_briefly(error))) from error
        except Exception as error:  # the engine is broken or closed as a whole: no group can go on
            self._shell.broken(error)
            raise GroupClosed(f"group {self.context.group_id} has left: the engine takes no request any more") from error
        future = handle.future
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            if self.is_open:
                self.cancel()
            raise
        fault = None if future.cancelled() else future.exception()
        self._require_open()
        if fault is not None or future.cancelled():
            detail = "the engine cancelled it" if fault is None else describe_briefly(fault)
            raise self._failed(Failure(cause="infrastructure", reason="engine_error", detail=detail)) from fault
        self._handle = None
        self._generated_at = loop.time()
        self._generating_s += self._generated_at - started
        return future.result()

    async def score(self, response: str | None = None) -> Score:
        """What the domain's verifier says to a response; None: the text of the last generation. Raises `GroupClosed`."""
        self._require_open()
        score = await self.context.score(self.text if response is None else response)
        self._require_open()
        return score

    def finish(self, reward: float | Mapping[str, float] | Score | None, *, metrics: Mapping[str, float] | None = None) -> Rollout | None:
        """End the attempt with what it earned. The rollout when it stays in the group; None when the response filter, the truncation
        policy or a missing reward takes it out (`verdict` says why): start another attempt then.

        reward: a number, or what `score` answered. What is no finite number is a missing reward, counted by its reason. metrics: further
        named scores.
        """
        self._require_idle("finish")
        if not self._turns:
            raise LoopError(
                f"expected a generation before attempt {self.attempt_id} of group {self.context.group_id} is finished, got none - "
                "generate first, or fail it"
            )
        score = reward if isinstance(reward, Score) else make_score(reward)
        now = asyncio.get_running_loop().time()
        rollout = Rollout(
            attempt_id=self.attempt_id,
            group_id=self.context.group_id,
            member_index=self.member_index,
            task_id=self.context.task.task_id,
            turns=tuple(map(fixed, self._turns)),
            finish_reason=self._turns[-1].finish_reason,
            reward=score.reward,
            metrics={**score.metrics, **metrics} if metrics else score.metrics,
            failure=score.failure,
            seconds=now - self._started_at,
        )
        self.is_open = False
        self.verdict = self._shell.attempt_finished(rollout, self._generating_s, now - self._generated_at)
        is_kept = self.verdict is not None and self.verdict.keep
        self.rollout = rollout if is_kept else None
        self.context._ended(self, None if is_kept or self.verdict is None else self.verdict.reason)
        return self.rollout

    def fail(self, reason: str, detail: str = "") -> None:
        """End the attempt because machinery broke (a tool, an environment): the next try at the member samples with the same seed.

        reason: one short, countable word. detail: for a person; the first one of each reason is told.
        """
        self._require_open()
        self._fail(Failure(cause="infrastructure", reason=reason, detail=detail))

    def reject(self, reason: str, detail: str = "") -> None:
        """End the attempt because what the policy wrote will not do: the next try at the member samples with another seed."""
        self._require_open()
        self._fail(Failure(cause="policy", reason=reason, detail=detail))

    def cancel(self) -> None:
        """End the attempt because it is not wanted any more: no fault, its tokens are counted as cancelled."""
        self._require_open()
        sampled = self.let_go()
        self._shell.attempt_cancelled(self.attempt_id, sampled)

    def let_go(self) -> int:
        """It is over; its tokens so far. What the engine still samples is told as late."""
        handle = self._handle
        in_flight = 0 if handle is None else handle.sampled_tokens  # read once: an engine samples in a thread of its own
        self.is_open = False
        self.context._ended(self, None)
        if handle is not None:
            self._shell.let_go(self._launch, handle, in_flight)
        return self._before + in_flight

    def _added(self, prompt_ids: TokenIds | None) -> TokenIds:
        if prompt_ids is None:
            return NO_TOKENS if self._turns else self.context.task.prompt_ids
        added = np.asarray(prompt_ids)
        if added.ndim != 1 or not (np.issubdtype(added.dtype, np.integer) or not len(added)):
            raise LoopError(
                f"expected prompt_ids as one row of token ids, got {added.dtype} of shape {added.shape} - tokenize the text: context.encode"
            )
        return added.astype(np.int64)

    def _limit(self, added: TokenIds, max_new_tokens: int | None) -> int:
        if max_new_tokens is not None and max_new_tokens < 1:
            raise LoopError(f"expected max_new_tokens of at least 1, got {max_new_tokens} - look at attempt.tokens_left")
        left = self.tokens_left - (len(added) if self._turns else 0)
        if left < 1:
            raise TokensUsedUp(
                f"response_length {self.context.response_length} leaves no token to sample after {self._before} sampled and "
                f"{self._added_tokens + len(added)} put between - look at attempt.tokens_left, or raise response_length"
            )
        return left if max_new_tokens is None else min(max_new_tokens, left)

    def _failed(self, failure: Failure) -> AttemptFailed:
        self._fail(failure)
        return AttemptFailed(failure)

    def _fail(self, failure: Failure) -> None:
        sampled = self.let_go()
        self.context._ended(self, failure.reason)
        self._shell.attempt_failed(self.attempt_id, failure, sampled)

    def _require_open(self) -> None:
        if not self.is_open:
            if self.context.is_closed:
                raise GroupClosed(f"group {self.context.group_id} has left meanwhile")
            raise LoopError(
                f"expected an open attempt, but attempt {self.attempt_id} of group {self.context.group_id} has ended - start another one"
            )

    def _require_idle(self, what: str) -> None:
        self._require_open()
        if self._handle is not None:
            raise LoopError(
                f"attempt {self.attempt_id} of group {self.context.group_id} is being generated - await that before you {what} "
                "(other members are attempts of their own)"
            )


Play = Callable[[Attempt], Awaitable[float | Mapping[str, float] | Score | None]]
"""Plays one attempt and answers what it earned. One that ends the attempt itself (`finish`, `reject`, ...) may answer anything."""


async def single_turn(attempt: Attempt) -> Score:
    """One prompt, one response, scored by the domain's verifier."""
    await attempt.generate()
    return await attempt.score()


class LoopContext:
    """What a loop knows and can do for one group."""

    def __init__(self, shell: LocalShell, order: ev.RunLoop) -> None:
        config = shell.scheduler.config
        self.task: Task = order.task
        self.group_id = order.group_id
        self.epoch = order.epoch
        self.start_step = order.start_step  # global_step at launch
        self.round = order.round  # 1 for the groups first asked for, n + 1 for the replacement of a group of round n
        self.group_size = config.group_size
        self.redundancy = config.redundancy  # members beyond group_size that may run; the first group_size to deliver make the group
        self.min_members: int = config.group_size if config.min_members is None else config.min_members  # fewest that still make a group
        self.response_length: int = shell.response_length  # tokens behind the first prompt, of all turns together
        self.temperature: float = shell.temperature  # of sampling
        self.is_val = False  # evaluation runs without loops
        self.is_closed = False  # the group has left: return
        self.meta: dict[str, Any] = {}  # for the loop's own notes on this group; nothing here reads it
        self._shell = shell
        self._answer: ev.LaunchMember | ev.AttemptRefused | None = None
        self._further = 0  # members beyond those of the group that `start_another` has tried
        self._open: dict[int, Attempt] = {}  # by member_index
        self._delivered: set[int] = set()  # members
        self._why_not: dict[int, str] = {}  # why a member has not delivered, the latest last
        self._given_up = ("", "")  # reason and detail

    @property
    def domain(self) -> str:
        """The task's reward domain."""
        return self.task.domain

    @property
    def missing_members(self) -> list[int]:
        """Members 0 to group_size - 1, and further ones that were begun, that have not delivered and are not being tried."""
        places = self.group_size + self.redundancy
        known = (*range(self.group_size), *range(places, places + self._further))
        return [index for index in known if index not in self._delivered and index not in self._open]

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text, without special tokens beyond those that it names. [N]"""
        if self._shell.encode is None:
            raise LoopError("expected a shell with a tokenizer for context.encode, got one without - give it encode")
        return self._shell.encode(text)

    async def score(self, response: str, *, domain: str | None = None) -> Score:
        """What the domain's verifier says to any text: time-limited, in the worker pool. Raises `GroupClosed` when the pool is broken.

        domain: ask the verifier of another one.
        """
        task = self.task if domain is None or domain == self.task.domain else replace(self.task, domain=domain)
        try:
            return await self._shell.scorer.score(task, response)
        except Exception as error:  # a bad verifier is a score without reward: this is the scorer as a whole
            self._shell.broken(error)
            raise GroupClosed(f"group {self.group_id} has left: the scorer is broken") from error

    def start(self, member_index: int) -> Attempt:
        """Begin one try at one member, 0 to group_size + redundancy - 1. A member that was delivered is taken out of the group again.

        Raises `RoundsUsedUp` after max_response_rounds tries, `GroupClosed` when the group has left, `LoopError` for an index that is no
        member or is being tried.
        """
        places = self.group_size + self.redundancy + self._further
        if not 0 <= member_index < places:
            raise LoopError(f"expected a member_index from 0 to {places - 1}, got {member_index} - a group has no other members")
        if member_index in self._open:
            raise LoopError(
                f"member {member_index} of group {self.group_id} is being tried - finish or cancel that attempt first, or start "
                "another member"
            )
        return self._begin(member_index)

    def start_another(self) -> Attempt:
        """Begin a try at a further member: for a loop that wants more responses to choose from than the group has members.

        What is chosen must still be a group; the others are left out of what `run` returns. Raises `RoundsUsedUp` when as many members have
        been begun as max_response_rounds whole groups have, `GroupClosed` when the group has left.
        """
        attempt = self._begin(self.group_size + self.redundancy + self._further)
        self._further += 1
        return attempt

    def _begin(self, member_index: int) -> Attempt:
        answer = self._ask(member_index)
        if isinstance(answer, ev.LaunchMember):
            attempt = self._open[member_index] = Attempt(self, answer)
            self._delivered.discard(member_index)
            self._shell.attempt_started(attempt)
            return attempt
        if answer is not None and answer.reason == "response_retries":
            self._why_not[member_index] = answer.reason
            raise RoundsUsedUp(f"member {member_index} of group {self.group_id} may not be tried once more: max_response_rounds is reached")
        raise GroupClosed(f"group {self.group_id} has left meanwhile")

    def _ask(self, member_index: int) -> ev.LaunchMember | ev.AttemptRefused | None:
        self._answer = None
        self._shell.tell(ev.LoopAttempt(group_id=self.group_id, member_index=member_index))
        return self._answer

    async def member(self, member_index: int, play: Play = single_turn) -> Rollout | None:
        """One member, played again while it is rejected or lost. None: its rounds are used up.

        play: plays one attempt and answers its reward.
        """
        while True:
            try:
                attempt = self.start(member_index)
            except RoundsUsedUp:
                return None
            rollout = await self._played(attempt, play)
            if rollout is not None:
                return rollout

    async def members(self, play: Play = single_turn, *, count: int | None = None) -> list[Rollout] | None:
        """All members at the same time, replaced and, where there are redundant ones, cancelled as without a loop. In order of
        member_index. None when fewer than `min_members` could be had. Raises the first of what `play` raised.

        play: plays one attempt and answers its reward. count: how many; None: group_size, and redundant ones beside them.
        """
        wanted = self.group_size if count is None else count
        places = range(self.group_size + self.redundancy if count is None else count)
        if not 1 <= wanted <= self.group_size + self.redundancy:
            raise LoopError(f"expected a count from 1 to {self.group_size + self.redundancy}, got {count} - a group has no other members")
        least = min(self.min_members, wanted)
        delivered: dict[int, Rollout] = {}
        running: dict[int, tuple[Attempt, asyncio.Task[None]]] = {}
        lost = 0  # members whose rounds are used up
        is_over = False

        def begin(index: int) -> bool:
            try:
                attempt = self.start(index)
            except RoundsUsedUp:
                return False
            name = f"attempt {attempt.attempt_id} of group {self.group_id}"
            running[index] = attempt, group.create_task(one_try(attempt), name=name)
            return True

        async def one_try(attempt: Attempt) -> None:
            nonlocal lost
            index = attempt.member_index
            rollout = await self._played(attempt, play)
            del running[index]
            if is_over:
                return
            if rollout is not None:
                delivered[index] = rollout
            elif len(running) >= wanted - lost - len(delivered):
                return  # those under way are enough
            elif begin(index) or any(begin(other) for other in places if other not in running and other not in delivered):
                return
            else:
                lost += 1
            end_if_decided()

        def end_if_decided() -> None:
            nonlocal is_over
            if least <= wanted - lost != len(delivered):
                return
            is_over = True
            for attempt, task in running.values():
                if attempt.is_open:
                    attempt.cancel()
                task.cancel()

        try:
            async with asyncio.TaskGroup() as group:
                lost = max(0, wanted - sum([begin(index) for index in places]))
                end_if_decided()
        except BaseExceptionGroup as errors:
            first = _first_of(errors)
            raise first from first.__cause__
        if wanted - lost < least:
            self.give_up("response_retries")
            return None
        return [delivered[index] for index in sorted(delivered)]

    async def _played(self, attempt: Attempt, play: Play) -> Rollout | None:
        try:
            reward = await play(attempt)
        except AttemptFailed:
            return None
        except TokensUsedUp as error:
            if attempt.is_open:
                attempt.reject("tokens_used_up", str(error))
            return None
        except BaseException:
            if attempt.is_open:
                attempt.cancel()
            raise
        return attempt.finish(reward) if attempt.is_open else attempt.rollout

    def cancel_running(self) -> int:
        """Cancel every attempt under way; how many it were."""
        attempts = list(self._open.values())
        for attempt in attempts:
            attempt.cancel()
        return len(attempts)

    def as_group(self, rollouts: Sequence[Rollout]) -> Group:
        """These rollouts as the group that a filter would be shown."""
        members = tuple(sorted(rollouts, key=lambda rollout: rollout.member_index))
        is_masked = self._shell.scheduler.config.truncated == "mask"
        return Group(
            group_id=self.group_id,
            task=self.task,
            rollouts=members,
            start_step=self.start_step,
            round=self.round,
            epoch=self.epoch,
            counted=tuple([not (rollout.is_truncated and is_masked) for rollout in members]),
        )

    def judge(self, rollouts: Sequence[Rollout]) -> Verdict:
        """What the query filter of the domain says to these rollouts. A filter that remembers has then seen the group: return the verdict
        in a `Judged`, so that it is not asked again. Raises `GroupClosed` when the filter is broken.
        """
        try:
            return self._shell.scheduler.filters[self.domain].query.judge(self.as_group(rollouts))
        except Exception as error:
            self._shell.broken(FilterError(f"the query filter of domain {self.domain!r} failed: {error}"))
            raise GroupClosed(f"group {self.group_id} has left: its filter is broken") from error

    def give_up(self, reason: str, detail: str = "") -> None:
        """Say why `run` is about to return None. reason: one short, countable word. detail: for a person; the first one is told."""
        self._given_up = reason, detail

    def answered(self, answer: ev.LaunchMember | ev.AttemptRefused) -> None:
        """The machine's answer to `start`."""
        self._answer = answer

    def close(self) -> None:
        """The group has left."""
        self.is_closed = True

    def why_nothing(self) -> tuple[str, str]:
        """Reason and detail of a None: what the loop said, or why a member is missing, or nothing."""
        reason, detail = self._given_up
        return reason or next(reversed(self._why_not.values()), ""), detail

    def _ended(self, attempt: Attempt, why_not: str | None) -> None:
        """An attempt is over. why_not: why it did not deliver; None: it did, or nobody wanted it to."""
        index = attempt.member_index
        self._open.pop(index, None)
        self._why_not.pop(index, None)
        if why_not is not None:
            self._why_not[index] = why_not
        elif attempt.rollout is not None:
            self._delivered.add(index)


async def play(loop: RolloutLoop, context: LoopContext) -> ev.GroupReturned:
    """Run a loop for one group: what is told to the machine, also when the loop raises.

    Raises `LoopError` for an answer that is none, and `CancelledError`.
    """
    group_id = context.group_id
    try:
        answer: Any = await loop.run(context)
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - user code, sys.exit() included: counted, and told with the story of the group
        reason = _reason_of(error)
        detail = "" if reason else describe(_first_of(error))
        return ev.GroupReturned(group_id=group_id, rollouts=None, reason=reason or "loop_error", detail=detail)
    if answer is None:
        reason, detail = context.why_nothing()
        return ev.GroupReturned(group_id=group_id, rollouts=None, reason=reason, detail=detail)
    if not isinstance(answer, Judged):
        return ev.GroupReturned(group_id=group_id, rollouts=_rollouts(answer, group_id))
    if not isinstance(answer.verdict, Verdict):
        raise LoopError(f"expected Judged.verdict of group {group_id} to be a Verdict, got {answer.verdict!r:.200} - Verdict.kept(), say")
    verdict = answer.verdict if answer.verdict.source else replace(answer.verdict, source="loop")
    return ev.GroupReturned(group_id=group_id, rollouts=_rollouts(answer.rollouts, group_id), judged=verdict)


def _rollouts(answer: object, group_id: int) -> tuple[Rollout, ...]:
    rollouts = tuple(answer) if isinstance(answer, Sequence) and not isinstance(answer, str) else None
    if rollouts is None or not all(isinstance(rollout, Rollout) for rollout in rollouts):
        raise LoopError(
            f"expected the rollouts of group {group_id} (a list of sluice.Rollout), a Judged, or None, got {answer!r:.200} "
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
    for cls, reason in ((RoundsUsedUp, "response_retries"), (TokensUsedUp, "tokens_used_up"), (GroupClosed, "group_closed")):
        if isinstance(error, cls):
            return reason
    return None


def _first_of(error: BaseException) -> BaseException:
    """The first single error in a group that a TaskGroup made, and not one of ours where there is another."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    return _first_of(min(error.exceptions, key=lambda inner: _reason_of(inner) is not None))


def describe_briefly(error: BaseException) -> str:
    """Type and message, for a fault whose place in the code tells nothing."""
    return f"{type(error).__name__}: {error}"


def load_loop(path: str, config: Any = None, *, adapt: Callable[[object], RolloutLoop] | None = None) -> RolloutLoop:
    """Make the loop that `user_defined_rollout_loop_cls` names. Its class takes no argument, or one: the configuration.

    adapt: gets an object of a class with `process_new_prompt`, as loops of ROLL have, and answers with one that has `run`; None: such a
    class is refused. Raises `LoopError` that says what is wrong with it.
    """
    where = "user_defined_rollout_loop_cls"
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise LoopError(f"{where}: expected an import path package.module.Class, got {path!r} - put the class into a module")
    try:
        made: Any = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise LoopError(f"{where}: {path!r} cannot be imported ({describe(error)}) - is its folder on PYTHONPATH?") from error
    if not inspect.isclass(made):
        raise LoopError(f"{where}: expected a class, but {path} is a {type(made).__name__} - name the class")
    run, process = getattr(made, "run", None), getattr(made, "process_new_prompt", None)
    if run is not None and process is not None:
        raise LoopError(
            f"{where}: {path} has both run (returns rollouts) and process_new_prompt (as in ROLL), and only one of them can make a group "
            "- take one out"
        )
    if process is not None and adapt is None:
        raise LoopError(
            f"{where}: {path} has process_new_prompt, as loops of ROLL have, which nobody here speaks - write run(self, context)"
        )
    if process is None and not inspect.iscoroutinefunction(run):
        raise LoopError(f"{where}: {path} needs `async def run(self, context)`, got {'none' if run is None else 'a run that is not async'}")
    make = cast(Callable[..., RolloutLoop], made)
    try:
        loop = make(config) if _takes_one(make) else make()
    except (Exception, SystemExit) as error:
        raise LoopError(
            f"{where}: {path} cannot be made ({describe(error)}) - its class takes no argument, or the configuration alone"
        ) from error
    if process is not None:
        assert adapt is not None
        try:
            return adapt(loop)
        except (LoopError, ImportError) as error:
            raise LoopError(f"{where}: {path}: {error}") from error
    if not _takes_one(loop.run):
        raise LoopError(f"{where}: {path} needs `async def run(self, context)`, got run{inspect.signature(loop.run)} - take the context")
    return loop


def _takes_one(function: Callable[..., object]) -> bool:
    """Whether it can be called with one argument by its place."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):  # it does not bind, or is written in C and has no signature
        return False
    return True
