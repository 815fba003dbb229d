"""An engine without a model, for tests, simulations and benchmarks. No torch.

It keeps the whole contract of `base.Engine`: cancels with late tokens, counters, versions, failures. What a request gets is decided by a
function from the request to an `Answer`; when it gets it, by the event loop's clock, virtual or real.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.errors import GenerationError
from sluice.generation.base import Generation, GenerationRequest, Purpose
from sluice.types import FinishReason, Logprobs, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the null engine samples for one request."""

    token_ids: TokenIds  # [N], N >= 1; not copied
    inference_logprobs: Logprobs  # [N]
    finish_reason: FinishReason = "stop"
    latency_s: float = 0.0  # seconds on the loop's clock over which the tokens appear evenly; 0: at once; inf: never ends by itself
    error: str | None = None  # not None: after the latency the future fails with a `GenerationError` of this text


Answers = Callable[[GenerationRequest], Answer]


def answers(
    *,
    seed: int = 0,
    lengths: tuple[int, int] = (1, 16),
    latency_s: tuple[float, float] = (0.0, 0.0),
    vocab_size: int = 100,
    variants: int = 256,
) -> Answers:
    """Answers that depend on `seed` and the request's own seed only: prepared once, so that answering costs one look-up.

    lengths: fewest and most tokens; a length above the request's max_new_tokens is cut there with finish reason "length". latency_s:
    shortest and longest. variants: how many different answers there are.
    """
    rng = np.random.default_rng(seed)
    prepared: list[Answer] = []
    for _ in range(variants):
        n = int(rng.integers(lengths[0], lengths[1] + 1))
        token_ids = rng.integers(0, vocab_size, n)
        logprobs = np.log(rng.uniform(0.01, 1.0, n)).astype(np.float32)
        token_ids.setflags(write=False)  # shared by all who get this answer
        logprobs.setflags(write=False)
        prepared.append(Answer(token_ids=token_ids, inference_logprobs=logprobs, latency_s=float(rng.uniform(*latency_s))))

    def answer(request: GenerationRequest) -> Answer:
        # Multiplication by an odd number spreads neighbouring seeds over the variants.
        return prepared[(request.seed * 0x9E3779B1 >> 8) % variants]

    return answer


class NullHandle:
    """An open request of a `NullEngine`."""

    __slots__ = ("_engine", "answer", "future", "is_cancelled", "length", "request", "settled", "started_at", "timer", "version")

    def __init__(
        self, engine: NullEngine, request: GenerationRequest, future: asyncio.Future[Generation], answer: Answer, length: int, version: int
    ) -> None:
        self.request = request
        self.future = future
        self._engine = engine
        # Kept by the engine:
        self.settled = -1  # tokens sampled in all, once it has ended
        self.answer = answer
        self.length = length  # tokens it gets if nobody cancels
        self.version = version
        self.started_at = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.is_cancelled = False

    @property
    def is_settled(self) -> bool:
        """Whether it has ended."""
        return self.settled >= 0

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled for it so far: they appear evenly over the answer's latency."""
        if self.settled >= 0:
            return self.settled
        share = (self.future.get_loop().time() - self.started_at) / self.answer.latency_s
        return min(int(self.length * share), self.length)

    def cancel(self) -> None:
        """Ask the engine to stop; returns at once. It stops `cancel_latency_s` later, and samples on until then."""
        self._engine.cancel(self)


class NullEngine:
    """Answers requests from a function; see the module.

    The policy_version of a generation is that at its submit. Cancelling the future instead of the handle changes nothing for the engine:
    the tokens are sampled and counted.
    """

    def __init__(self, answer: Answers | None = None, *, cancel_latency_s: float = 0.0) -> None:
        """answer: from a request to its `Answer`; None: `answers()`, at once. cancel_latency_s: 0 stops on the loop's next turn."""
        self._answer = answers() if answer is None else answer
        self._cancel_latency_s = cancel_latency_s
        self._version = 0
        self._settled: dict[Purpose, int] = {"train": 0, "validation": 0}  # tokens of ended requests
        self._open: set[NullHandle] = set()
        self._stopped: GenerationError | None = None

    @property
    def policy_version(self) -> int:
        """Version last published; 0 until then."""
        return self._version

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def sampled_tokens(self, purpose: Purpose) -> int:
        """Every token ever sampled for that purpose, those of open requests included."""
        return self._settled[purpose] + sum(h.sampled_tokens for h in self._open if h.request.purpose == purpose)

    def metrics(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}

    def submit(self, request: GenerationRequest) -> NullHandle:
        """Take a request; needs a running event loop. An answer without latency resolves before this returns."""
        if self._stopped is not None:
            raise GenerationError(str(self._stopped)) from self._stopped.__cause__
        loop = asyncio.get_running_loop()
        answer = self._answer(request)
        length = len(answer.token_ids)
        if length > request.max_new_tokens:
            length = request.max_new_tokens
        handle = NullHandle(self, request, loop.create_future(), answer, length, self._version)
        self._open.add(handle)
        if answer.latency_s == 0:
            self._end(handle)
            return handle
        handle.started_at = loop.time()
        if answer.latency_s != math.inf:
            handle.timer = loop.call_later(answer.latency_s, self._end, handle)
        return handle

    def cancel(self, handle: NullHandle) -> None:
        """Stop a request; see `NullHandle.cancel`."""
        if handle.is_settled or handle.is_cancelled:
            return
        handle.is_cancelled = True
        loop = handle.future.get_loop()
        if self._cancel_latency_s == 0:
            loop.call_soon(self._end_cancelled, handle)
        else:
            loop.call_later(self._cancel_latency_s, self._end_cancelled, handle)

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Take the version; the weights are not looked at."""
        if self._stopped is not None:
            raise GenerationError(str(self._stopped)) from self._stopped.__cause__
        self._version = version

    def break_down(self, cause: BaseException) -> None:
        """Fail like an engine whose thread died of `cause`: every open and later request fails. Call it from the event loop."""
        reason = GenerationError(
            f"the engine stopped after {type(cause).__name__}: {cause} - every open request fails; the cause is attached"
        )
        reason.__cause__ = cause
        self._stop(reason)

    def close(self) -> None:
        """Fail open requests with `GenerationError`; idempotent. Call it from the event loop, or when the loop no longer runs."""
        self._stop(GenerationError("the engine was closed - submit before close()"))

    def _stop(self, reason: GenerationError) -> None:
        if self._stopped is not None:
            return
        self._stopped = reason
        for handle in list(self._open):
            self._settle(handle, handle.sampled_tokens)
            if not handle.future.done() and not handle.future.get_loop().is_closed():
                error = GenerationError(str(reason))
                error.__cause__ = reason.__cause__
                handle.future.set_exception(error)

    def _settle(self, handle: NullHandle, sampled: int) -> None:
        handle.settled = sampled
        self._settled[handle.request.purpose] += sampled
        self._open.remove(handle)
        if handle.timer is not None:
            handle.timer.cancel()

    def _end(self, handle: NullHandle) -> None:
        if handle.settled >= 0:
            return
        answer, length = handle.answer, handle.length
        self._settle(handle, length)
        if handle.future.done():
            return
        if answer.error is not None:
            handle.future.set_exception(GenerationError(answer.error))
        elif length == len(answer.token_ids):
            self._resolve(handle, answer.token_ids, answer.inference_logprobs, answer.finish_reason)
        else:
            self._resolve(handle, answer.token_ids[:length], answer.inference_logprobs[:length], "length")

    def _end_cancelled(self, handle: NullHandle) -> None:
        if handle.settled >= 0:
            return
        sampled = handle.sampled_tokens
        self._settle(handle, sampled)
        if not handle.future.done():
            self._resolve(handle, handle.answer.token_ids[:sampled], handle.answer.inference_logprobs[:sampled], "cancelled")

    def _resolve(self, handle: NullHandle, token_ids: TokenIds, logprobs: Logprobs, reason: FinishReason) -> None:
        handle.future.set_result(
            Generation(
                request_id=handle.request.request_id,
                token_ids=token_ids,
                inference_logprobs=logprobs,
                finish_reason=reason,
                policy_version=handle.version,
            )
        )
