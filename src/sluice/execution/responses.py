"""The player of single responses: one prompt, one generation, one score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from sluice.errors import RequestRefused
from sluice.execution.member import single_turn_rollout
from sluice.execution.players import Shell
from sluice.generation.base import Engine, Generation, GenerationHandle, GenerationRequest
from sluice.rewards.base import Scorer
from sluice.scheduler import events as ev
from sluice.types import Failure, TokenIds


class _Response:
    """One attempt under way."""

    __slots__ = ("handle", "launch", "score_task", "started_at", "version")

    def __init__(self, launch: ev.LaunchMember, handle: GenerationHandle, started_at: float, version: int) -> None:
        self.version = version  # of the weights when it was submitted; kept only where members restart with new ones
        self.launch = launch
        self.handle = handle
        self.started_at = started_at
        self.score_task: asyncio.Task[None] | None = None


class ResponsePlayer:
    """Plays members that are single responses."""

    def __init__(
        self, *, engine: Engine, scorer: Scorer, decode: Callable[[TokenIds], str], response_length: int, temperature: float
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self.decode = decode
        self.response_length = response_length
        self.temperature = temperature
        self._loop = asyncio.get_running_loop()
        self._responses: dict[int, _Response] = {}
        self._cancelled_scores: set[asyncio.Task[None]] = set()  # have not ended yet

    def bind(self, shell: Shell) -> None:
        """Play for this shell."""
        self._shell = shell
        self._restarts = shell.scheduler.config.on_weight_update == "restart"

    def launch(self, launch: ev.LaunchMember) -> Failure | None:
        """Submit its request."""
        request = GenerationRequest(
            request_id=launch.attempt_id,
            prompt_ids=launch.task.prompt_ids,
            max_new_tokens=self.response_length,
            temperature=self.temperature,
            seed=launch.seed,
        )
        try:
            handle = self.engine.submit(request)
        except RequestRefused as error:
            return Failure(cause="infrastructure", reason="request_refused", detail=f"{type(error).__name__}: {error}")
        response = _Response(launch, handle, self._loop.time(), self.engine.policy_version if self._restarts else 0)
        self._responses[launch.attempt_id] = response
        handle.future.add_done_callback(partial(self._generated, response))
        return None

    def cancel(self, attempt_id: int) -> int | None:
        """Cancel its generation or its reward call."""
        response = self._responses.pop(attempt_id, None)
        if response is None:
            return None
        handle = response.handle
        counted = handle.sampled_tokens  # read once: an engine samples in a thread of its own
        if response.score_task is not None:
            self._cancelled_scores.add(response.score_task)
            response.score_task.add_done_callback(self._cancelled_scores.discard)
            response.score_task.cancel()
        elif not handle.future.done():
            self._shell.late.expect(attempt_id, handle, counted)
            handle.cancel()
        return counted

    def steer(self, order: ev.StopMember | ev.HoldMember | ev.ReleaseMember) -> None:
        """Nobody steers a single response: it takes no turns."""
        raise TypeError(f"expected an attempt that takes turns, got a single response: {order!r}")

    def in_flight(self) -> dict[int, int]:
        """Attempts being played -> tokens sampled for each so far."""
        return {attempt_id: response.handle.sampled_tokens for attempt_id, response in list(self._responses.items())}

    def generating(self, version: int) -> tuple[int, ...]:
        """Attempts whose generation began under older weights and goes on."""
        return tuple([attempt_id for attempt_id, one in self._responses.items() if one.score_task is None and one.version < version])

    def pending(self) -> list[asyncio.Future[Any]]:
        """Scores that were cancelled and have not ended."""
        return list(self._cancelled_scores)

    def _generated(self, response: _Response, future: asyncio.Future[Generation]) -> None:
        error = None if future.cancelled() else future.exception()
        attempt_id = response.launch.attempt_id
        if attempt_id not in self._responses:
            return  # it was let go
        if error is not None or future.cancelled():
            del self._responses[attempt_id]
            detail = "the engine cancelled it" if error is None else f"{type(error).__name__}: {error}"
            failure = Failure(cause="infrastructure", reason="engine_error", detail=detail)
            sampled = response.handle.sampled_tokens
            self._shell.tell(ev.MemberFailed(attempt_id=attempt_id, failure=failure, sampled_tokens=sampled))
            return
        generation = future.result()
        if self._restarts and generation.token_versions is not None:  # it ended before the machine had heard of the update
            self._shell.tell(ev.WeightsUpdated(version=self.engine.policy_version, generating=(attempt_id,)))
            return
        response.score_task = self._loop.create_task(self._score(response, generation), name=f"score {attempt_id}")

    async def _score(self, response: _Response, generation: Generation) -> None:
        launch = response.launch
        try:
            text = self.decode(generation.token_ids)
            score = await self.scorer.score(launch.task, text)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a bug of the scorer, since single failures are data: raised where the batch is awaited
            self._shell.broken(error)
            return
        del self._responses[launch.attempt_id]
        rollout = single_turn_rollout(
            attempt_id=launch.attempt_id,
            group_id=launch.group_id,
            member_index=launch.member_index,
            task=launch.task,
            generation=generation,
            text=text,
            score=score,
            seconds=self._loop.time() - response.started_at,
        )
        self._shell.tell(ev.MemberFinished(rollout=rollout))
