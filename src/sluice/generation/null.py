"""An engine without a model, for tests, simulations and benchmarks. No torch.

It keeps the whole contract of `base.Engine`: slots, cancels with late tokens, counters, versions, failures. What a request gets is decided
by a function from the request to an `Answer`; when it gets it, by the event loop's clock, virtual or real.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

import numpy as np

from sluice.errors import ConfigError, GenerationError
from sluice.generation.base import Generation, GenerationRequest, OnWeightUpdate, Purpose, Span, versions_of
from sluice.generation.dialogues import Dialogue, Dialogues
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

    __slots__ = ("_engine", "answer", "dialogue", "future", "is_cancelled", "is_seated", "length", "request", "settled", "spans",
                 "started_at", "timer", "version")  # fmt: skip

    def __init__(
        self, engine: NullEngine, request: GenerationRequest, future: asyncio.Future[Generation], answer: Answer, length: int
    ) -> None:
        self.request = request
        self.future = future
        self._engine = engine
        # Kept by the engine:
        self.dialogue: Dialogue[NullHandle] | None = None  # None: it stands alone
        self.settled = -1  # tokens sampled in all, once it has ended
        self.answer = answer
        self.length = length  # tokens it gets if nobody cancels
        self.is_seated = False  # has or had a slot
        self.version = -1  # of the weights that it is under, once it is seated
        self.spans: tuple[Span, ...] = ()  # of the earlier weights it was under
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
        if not self.is_seated:
            return 0
        share = (self.future.get_loop().time() - self.started_at) / self.answer.latency_s
        return min(int(self.length * share), self.length)

    def cancel(self) -> None:
        """Ask the engine to stop; returns at once. It stops `cancel_latency_s` later, and samples on until then.

        One that still waits for a slot resolves before this returns, without tokens.
        """
        self._engine.cancel(self)


class NullEngine:
    """Answers requests from a function; see the module.

    A request begins, under the weights of that moment, when it is seated: at its submit, or when a slot is free. Cancelling the future
    instead of the handle changes nothing for the engine: the tokens are sampled and counted. Of a dialogue nothing is kept but its name: at
    rest it takes no slot.
    """

    def __init__(
        self,
        answer: Answers | None = None,
        *,
        cancel_latency_s: float = 0.0,
        max_slots: int | None = None,
        on_weight_update: OnWeightUpdate = "finish",
    ) -> None:
        """answer: from a request to its `Answer`; None: `answers()`, at once. cancel_latency_s: 0 stops on the loop's next turn.

        max_slots: requests that run at once, further ones wait in order of arrival; None: all run. on_weight_update: see `OnWeightUpdate`.
        """
        if max_slots is not None and max_slots < 1:
            raise ConfigError(f"NullEngine: max_slots must be at least 1, got {max_slots} - or None, with which no request waits")
        if on_weight_update not in get_args(OnWeightUpdate):
            choices = ", ".join(get_args(OnWeightUpdate))
            raise ConfigError(f"NullEngine: on_weight_update must be one of {choices}, got {on_weight_update!r}")
        self._answer = answers() if answer is None else answer
        self._cancel_latency_s = cancel_latency_s
        self._max_slots = max_slots
        self._on_weight_update: OnWeightUpdate = on_weight_update
        self._version = 0
        self._settled: dict[Purpose, int] = {"train": 0, "validation": 0}  # tokens of ended requests
        self._running: dict[NullHandle, None] = {}  # in the order in which they were seated
        self._waiting: OrderedDict[NullHandle, None] = OrderedDict()  # in order of arrival
        self._is_seating = False
        self._dialogues: Dialogues[NullHandle] = Dialogues()
        self._stopped: GenerationError | None = None

    @property
    def policy_version(self) -> int:
        """Version last published; 0 until then."""
        return self._version

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._running) + len(self._waiting)

    def sampled_tokens(self, purpose: Purpose) -> int:
        """Every token ever sampled for that purpose, those of open requests included."""
        return self._settled[purpose] + sum(h.sampled_tokens for h in self._running if h.request.purpose == purpose)

    def metrics(self) -> dict[str, float]:
        """`engine/dialogues`: open ones; none ever has to make room."""
        return {"engine/dialogues": float(self._dialogues.open_count), "engine/dialogues_evicted": 0.0}

    def submit(self, request: GenerationRequest) -> NullHandle:
        """Take a request; needs a running event loop. An answer without latency resolves before this returns."""
        if self._stopped is not None:
            raise GenerationError(str(self._stopped)) from self._stopped.__cause__
        loop = asyncio.get_running_loop()
        dialogue = None if request.dialogue_id is None else self._dialogues.find(request)
        answer = self._answer(request)
        length = len(answer.token_ids)
        if length > request.max_new_tokens:
            length = request.max_new_tokens
        handle = NullHandle(self, request, loop.create_future(), answer, length)
        if dialogue is not None:
            handle.dialogue = dialogue
            self._dialogues.begin(dialogue, handle, request.prompt_ids)
        if self._max_slots is None or len(self._running) < self._max_slots:
            self._seat(handle, loop)
        else:
            self._waiting[handle] = None
        return handle

    def _seat(self, handle: NullHandle, loop: asyncio.AbstractEventLoop) -> None:
        handle.is_seated = True
        handle.version = self._version
        latency_s = handle.answer.latency_s
        if latency_s == 0:
            self._end(handle)
            return
        self._running[handle] = None
        handle.started_at = loop.time()
        if latency_s != math.inf:
            handle.timer = loop.call_later(latency_s, self._end, handle)

    def _seat_waiting(self) -> None:
        """Fill the slots that are free. An answer without latency ends while it is seated, which leads here again: one call does it all."""
        if self._is_seating or self._max_slots is None:
            return
        self._is_seating = True
        while self._waiting and len(self._running) < self._max_slots:
            handle, _ = self._waiting.popitem(last=False)
            self._seat(handle, handle.future.get_loop())
        self._is_seating = False

    def cancel(self, handle: NullHandle) -> None:
        """Stop a request; see `NullHandle.cancel`."""
        if handle.is_settled or handle.is_cancelled:
            return
        handle.is_cancelled = True
        if not handle.is_seated:
            handle.version = self._version
            self._settle(handle, 0)
            self._resolve_cancelled(handle)
            return
        loop = handle.future.get_loop()
        if self._cancel_latency_s == 0:
            loop.call_soon(self._end_cancelled, handle)
        else:
            loop.call_later(self._cancel_latency_s, self._end_cancelled, handle)

    def end_dialogue(self, dialogue_id: int, purpose: Purpose = "train") -> None:
        """Forget a dialogue and cancel its open request, as by its handle; unknown and ended ones are ignored."""
        dialogue = self._dialogues.end(dialogue_id, purpose)
        if dialogue is not None and dialogue.handle is not None:
            self.cancel(dialogue.handle)

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Take the version; the weights are not looked at."""
        if self._stopped is not None:
            raise GenerationError(str(self._stopped)) from self._stopped.__cause__
        if self._on_weight_update != "finish":
            for handle in list(self._running):  # a copy, made in one go: requests come and go in the loop's thread
                sampled = handle.sampled_tokens
                if sampled > (handle.spans[-1].sampled if handle.spans else 0):
                    handle.spans += (Span(handle.version, sampled),)
                handle.version = version
        self._version = version

    def fail_running(self, which: int | Callable[[GenerationRequest], bool], detail: str) -> int:
        """Fail running requests with a `GenerationError` of this text, as when a worker crashes; everything else goes on.

        which: so many of those seated longest, or those for which it is true. Returns how many it were. Call it from the event loop.
        """
        if isinstance(which, int):
            failing = list(islice(self._running, which))
        else:
            failing = [handle for handle in self._running if which(handle.request)]
        for handle in failing:
            self._fail(handle, GenerationError(detail))
        self._seat_waiting()
        return len(failing)

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
        for handle in (*self._running, *self._waiting):
            error = GenerationError(str(reason))
            error.__cause__ = reason.__cause__
            self._fail(handle, error)
        self._dialogues.clear()

    def _fail(self, handle: NullHandle, error: GenerationError) -> None:
        self._settle(handle, handle.sampled_tokens, failure=str(error))
        if not handle.future.done() and not handle.future.get_loop().is_closed():
            handle.future.set_exception(error)

    def _settle(self, handle: NullHandle, sampled: int, failure: str | None = None) -> None:
        handle.settled = sampled
        dialogue = handle.dialogue
        if dialogue is not None:
            dialogue.handle = None
            dialogue.held += sampled
            dialogue.failure = failure
        self._settled[handle.request.purpose] += sampled
        (self._running if handle.is_seated else self._waiting).pop(handle, None)  # one that needs no time was in neither
        if handle.timer is not None:
            handle.timer.cancel()

    def _end(self, handle: NullHandle) -> None:
        if handle.settled >= 0:
            return
        answer, length = handle.answer, handle.length
        self._settle(handle, length, answer.error)
        if not handle.future.done():
            if answer.error is not None:
                handle.future.set_exception(GenerationError(answer.error))
            elif length == len(answer.token_ids):
                self._resolve(handle, answer.token_ids, answer.inference_logprobs, answer.finish_reason)
            else:
                self._resolve(handle, answer.token_ids[:length], answer.inference_logprobs[:length], "length")
        if self._waiting:
            self._seat_waiting()

    def _end_cancelled(self, handle: NullHandle) -> None:
        if handle.settled >= 0:
            return
        sampled = handle.sampled_tokens
        self._settle(handle, sampled)
        self._resolve_cancelled(handle)
        if self._waiting:
            self._seat_waiting()

    def _resolve_cancelled(self, handle: NullHandle) -> None:
        if not handle.future.done():
            sampled = handle.settled
            self._resolve(handle, handle.answer.token_ids[:sampled], handle.answer.inference_logprobs[:sampled], "cancelled")

    def _resolve(self, handle: NullHandle, token_ids: TokenIds, logprobs: Logprobs, reason: FinishReason) -> None:
        version, token_versions = handle.version, None
        if handle.spans:
            # A publish from another thread may count a token that is not in what the loop's thread has settled just then.
            earlier = [Span(span.version, min(span.sampled, len(token_ids))) for span in handle.spans]
            version, token_versions = versions_of([*earlier, Span(handle.version, len(token_ids))])
        handle.future.set_result(
            Generation(
                request_id=handle.request.request_id,
                token_ids=token_ids,
                inference_logprobs=logprobs,
                finish_reason=reason,
                policy_version=version,
                token_versions=token_versions,
            )
        )
