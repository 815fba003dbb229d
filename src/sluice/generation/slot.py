"""The in-process engine: many requests in one forward pass, joining and leaving between passes.

One daemon thread owns the model. It seats waiting requests in free slots, prefills them (siblings with the same prompt once), decodes all
seated ones together, and hands results to the event loops they came from. Whoever submits, cancels or publishes only leaves a note that
the thread reads between two passes; nobody waits for a pass except `publish` and `close`.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np
import torch

from sluice.config.models import LoraConfig
from sluice.errors import ConfigError, GenerationError
from sluice.generation.base import Generation, GenerationRequest, Purpose
from sluice.generation.loading import check_architecture, load_net, stop_tokens
from sluice.generation.model import SlotModel
from sluice.generation.rows import Index, RowTable
from sluice.generation.sampling import noise_key, sample, uniforms
from sluice.generation.weights import Copies, Weights
from sluice.types import FinishReason

OnPublish = Literal["recompute", "keep"]

_PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_PREFILL_TOKENS = 2048  # computed by one prefill pass: bounds how long decoding rows, and a cancel, wait for it
_MIN_TEMPERATURE = 1e-4  # below it, logits divided by it leave float32, and nothing but the most probable token is drawn anyway
_CLOSE_TIMEOUT_S = 30.0  # a forward pass that lasts longer is left behind in its daemon thread


class SlotHandle:
    """An open request of a `SlotEngine`. Cancelling its future is taken as `cancel()`."""

    __slots__ = ("_engine", "future", "is_cancelled", "is_seated", "loop", "request", "settled", "slot", "ticket")

    def __init__(self, engine: SlotEngine, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.future: asyncio.Future[Generation] = loop.create_future()
        self.future.add_done_callback(self._on_done)
        self._engine = engine
        # Kept by the engine:
        self.slot = -1
        self.ticket = -1  # where its tokens are counted while it is seated
        self.is_seated = False  # has or had a slot
        self.is_cancelled = False  # asked to stop
        self.settled: int | None = None  # tokens sampled in all, once its outcome is decided, though perhaps still on the way to the loop

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled for it so far."""
        # Order matters: the engine sets the final number before it gives the ticket to another request.
        live = self._engine.live_tokens(self.ticket) if self.is_seated else 0
        return live if self.settled is None else self.settled

    def cancel(self) -> None:
        """Ask the engine to stop; returns at once.

        A request that still waits for a slot resolves at once, with no tokens. One that is being decoded resolves after the forward pass
        under way. One that had already ended by itself keeps its own finish reason.
        """
        self._engine.cancel(self)

    def _on_done(self, future: asyncio.Future[Generation]) -> None:
        if future.cancelled():
            self.cancel()


class _Publish:
    """Weights on their way into the model."""

    __slots__ = ("copies", "done", "error", "version")

    def __init__(self, copies: Copies, version: int) -> None:
        self.copies = copies
        self.version = version
        self.done = threading.Event()
        self.error: GenerationError | None = None


class SlotEngine:
    """Samples many continuations at once from a model of its own, on the CPU.

    Tokens depend on weights, prompt, seed and temperature only, not on the company (up to ties in the last bit of the logits).
    `inference_logprobs` are those of an ordinary full forward pass at the sampling temperature. Torch's global random state is not used.

    Invariant: every sampled token is counted once, under its request's purpose, before the request resolves; so the lengths of all
    resolved generations sum to `sampled_tokens`, failed requests apart.
    """

    def __init__(
        self,
        model: SlotModel,
        weights: Weights,
        stops: np.ndarray[Any, np.dtype[np.bool_]],
        *,
        max_slots: int,
        max_length: int,
        on_publish: OnPublish = "recompute",
        prefill_tokens: int = _PREFILL_TOKENS,
        threads: int | None = None,
    ) -> None:
        """Start the engine's thread on a model that nobody else uses. Most callers want `SlotEngine.load`. stops [V]"""
        self._model: SlotModel | None = model
        self._vocab_size = model.vocab_size
        self._weights = weights
        self._stops = stops
        self._max_slots = max_slots
        self._max_length = max_length
        self._on_publish: OnPublish = on_publish
        self._prefill_tokens = prefill_tokens
        self._threads = threads
        self._version = 0
        # Shared, under the lock. The engine's thread holds it for moments only, never during a pass.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._arriving: dict[asyncio.AbstractEventLoop, list[SlotHandle]] = {}  # submitted in the current iteration of their loop
        self._waiting: deque[SlotHandle] = deque()  # in order of arrival; may hold settled ones
        self._cancels: list[SlotHandle] = []
        self._publishes: list[_Publish] = []
        self._stopped: GenerationError | None = None  # why no request is taken any more
        # The engine thread's own. Counts are read by others.
        self._rows: RowTable[SlotHandle] = RowTable(max_slots, max_length)
        self._live = np.zeros(max_slots, dtype=np.int64)  # by ticket: tokens sampled for a seated request
        self._tickets = list(range(max_slots - 1, -1, -1))
        self._results: dict[asyncio.AbstractEventLoop, list[tuple[SlotHandle, Generation]]] = {}
        self._sampled: dict[Purpose, int] = dict.fromkeys(_PURPOSES, 0)
        self._metrics = dict.fromkeys(("prefill_passes", "prefill_tokens", "prefill_tokens_shared", "decode_passes", "busy_s"), 0.0)
        atexit.register(self.close)  # a daemon thread inside torch does not survive the end of the interpreter
        threads_here = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="sluice-slot-engine", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        # Setting threads in one thread also sets what later threads begin with: put that back.
        torch.set_num_threads(threads_here)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        threads: int | None = None,
        lora: LoraConfig | None = None,
        stop_token_ids: Sequence[int] = (),
        on_publish: OnPublish = "recompute",
        prefill_tokens: int = _PREFILL_TOKENS,
    ) -> SlotEngine:
        """Load a model of the engine's own and start.

        path: folder written by save_pretrained. max_slots: requests in one forward pass, further ones wait. max_length: prompt and
        response together, in tokens. threads: torch threads of the engine, None for torch's own choice. lora: add an adapter, and publish
        only that. stop_token_ids: end tokens besides the model's own. on_publish: what live sequences do when weights change: compute
        their keys and values again, or keep those of the old weights. prefill_tokens: at most so many are computed between two
        decoding passes.

        Raises `ConfigError` for settings that do not fit the model, and for a folder whose model cannot be loaded or cannot work in slots.
        """
        for name, value in (("max_slots", max_slots), ("max_length", max_length), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ConfigError(f"SlotEngine.load: {name} must be at least 1, got {value}")
        if on_publish not in get_args(OnPublish):
            raise ConfigError(f"SlotEngine.load: on_publish must be one of {', '.join(get_args(OnPublish))}, got {on_publish!r}")
        net, weights = load_net(path, dtype=dtype, lora=lora)
        check_architecture(net, max_length)
        model = SlotModel(net, max_slots=max_slots, max_length=max_length)
        stops = stop_tokens(net, path, stop_token_ids, model.vocab_size)
        with torch.inference_mode():
            model.check_slots()
        return cls(
            model, weights, stops, max_slots=max_slots, max_length=max_length, on_publish=on_publish,
            prefill_tokens=prefill_tokens, threads=threads,
        )  # fmt: skip

    # ---------------------------------------------------------------- called from the event loop, or any thread

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; 0 until the first publish."""
        return self._version

    def sampled_tokens(self, purpose: Purpose) -> int:
        """Every token ever sampled for that purpose, cancelled and failed requests included, prompts excluded."""
        return self._sampled[purpose]

    def metrics(self) -> dict[str, float]:
        """What the thread has done so far: passes, prompt tokens computed and shared between siblings, seconds of work."""
        return {f"engine/{name}": value for name, value in self._metrics.items()}

    def live_tokens(self, ticket: int) -> int:
        """Tokens sampled so far for the seated request with this ticket."""
        return int(self._live[ticket])

    def submit(self, request: GenerationRequest) -> SlotHandle:
        """Take a request; needs a running event loop.

        Requests submitted in the same iteration of the loop reach the engine together, so that siblings share their prefill.
        Raises `GenerationError` when the request cannot be served, or the engine has stopped.
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        with self._lock:
            self._require_running()
            handle = SlotHandle(self, request, loop)
            arriving = self._arriving.setdefault(loop, [])
            arriving.append(handle)
        if len(arriving) == 1:
            loop.call_soon(self._flush, loop)
        return handle

    def cancel(self, handle: SlotHandle) -> None:
        """Stop a request; see `SlotHandle.cancel`."""
        with self._lock:
            if handle.settled is not None or handle.is_cancelled:
                return
            handle.is_cancelled = True
            if handle.is_seated:
                self._cancels.append(handle)
                self._wake.set()
                return
            handle.settled = 0
        nothing = Generation(
            request_id=handle.request.request_id,
            token_ids=np.empty(0, dtype=np.int64),
            inference_logprobs=np.empty(0, dtype=np.float32),
            finish_reason="cancelled",
            policy_version=self._version,
        )
        if asyncio._get_running_loop() is handle.loop:
            _resolve([(handle, nothing)])
        else:
            _call(handle.loop, _resolve, [(handle, nothing)])

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Put new weights in place, between two forward passes; returns when they are.

        state: the model's state dict, or with LoRA what peft's get_peft_model_state_dict gives. The tensors must not change during
        the call. Live sequences go on under the new weights; their policy_version stays that of their first token. Raises
        `GenerationError` for weights that do not fit or are not finite (the old ones stay), or when the engine has stopped.
        """
        self._require_running()
        order = _Publish(self._weights.check(state), version)
        with self._lock:
            self._require_running()
            self._publishes.append(order)
        self._wake.set()
        order.done.wait()
        if order.error is not None:
            raise GenerationError(str(order.error)) from order.error.__cause__

    def close(self) -> None:
        """Fail open requests with `GenerationError`, end the thread, free the model; waits for at most 30 seconds; idempotent."""
        atexit.unregister(self.close)
        self._stop(GenerationError("the engine was closed - submit before close()"))
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> SlotEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise GenerationError(str(self._stopped)) from self._stopped.__cause__

    def _check(self, request: GenerationRequest) -> None:
        prompt: Any = request.prompt_ids
        name = f"request {request.request_id}"
        if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind not in "iu":
            got = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else type(prompt).__name__
            raise GenerationError(f"{name}: prompt_ids must be a numpy array of at least one token id, [P] int64, got {got}")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._vocab_size:
            raise GenerationError(
                f"{name}: prompt_ids must lie within 0 .. {self._vocab_size - 1}, got {low if low < 0 else high} - tokenizer and model do "
                f"not belong together"
            )
        if request.max_new_tokens < 1 or len(prompt) + request.max_new_tokens > self._max_length:
            raise GenerationError(
                f"{name}: prompt and max_new_tokens (at least 1) must fit into max_length {self._max_length}, got {len(prompt)} + "
                f"{request.max_new_tokens} - load the engine with a larger max_length, or ask for less"
            )
        if not (request.temperature == 0 or _MIN_TEMPERATURE <= request.temperature < math.inf):
            raise GenerationError(
                f"{name}: temperature must be 0 (most probable token) or at least {_MIN_TEMPERATURE}, got {request.temperature}"
            )
        if request.purpose not in _PURPOSES:
            raise GenerationError(f"{name}: purpose must be one of {', '.join(_PURPOSES)}, got {request.purpose!r}")

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._waiting.extend(self._arriving.pop(loop, ()))
            for other in [other for other in self._arriving if other.is_closed()]:
                del self._arriving[other]  # it ended before its requests set out
        self._wake.set()

    def _stop(self, reason: GenerationError) -> None:
        """Take no more requests and tell the thread to end. The first reason stays."""
        with self._lock:
            if self._stopped is None:
                self._stopped = reason
        self._wake.set()

    # ---------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        """Consumes requests, cancels and publishes. Waits for the wake event when nothing is seated. Ends when stopped or broken."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._started.set()
        try:
            with torch.inference_mode():
                while self._stopped is None:
                    self._turn()
        except BaseException as error:  # noqa: BLE001 - whatever it was, nobody may wait for ever: it reaches every request as a cause
            reason = GenerationError(
                f"the engine stopped after {type(error).__name__}: {error} - every open request fails; the cause is attached"
            )
            reason.__cause__ = error
            self._stop(reason)
        finally:
            self._fail_all()

    def _turn(self) -> None:
        """What happens between two decoding passes, then one of them."""
        self._wake.clear()
        with self._lock:
            if self._stopped is not None:
                return
            publishes, self._publishes = self._publishes, []
            cancels, self._cancels = self._cancels, []
        self._take_weights(publishes)
        self._carry_out(cancels)
        self._seat_waiting()
        rows = self._rows
        if not rows.count:
            self._wake.wait()
            return
        started = perf_counter()
        if rows.count > rows.ready:
            self._prefill()
        if rows.ready:
            self._decode()
        self._metrics["busy_s"] += perf_counter() - started

    def _take_weights(self, publishes: list[_Publish]) -> None:
        try:
            for order in publishes:
                for target, source in order.copies:
                    target.copy_(source)
                self._version = order.version
                if self._on_publish == "recompute":
                    self._rows.forget_cache()
                order.done.set()
        except BaseException:
            with self._lock:
                self._publishes.extend(order for order in publishes if not order.done.is_set())  # whoever waits must be told
            raise

    def _carry_out(self, cancels: list[SlotHandle]) -> None:
        live = [handle for handle in cancels if handle.settled is None]
        if live:
            for handle in live:
                self._finish(handle.slot, "cancelled")
            self._remove([handle.slot for handle in live])
            self._deliver()

    def _seat_waiting(self) -> None:
        rows = self._rows
        if rows.count == self._max_slots or not self._waiting:
            return
        with self._lock:
            while self._waiting and rows.count < self._max_slots:
                handle = self._waiting.popleft()
                if handle.settled is not None:
                    continue
                request = handle.request
                ticket = self._tickets.pop()
                self._live[ticket] = 0
                slot = rows.add(
                    handle, request.prompt_ids, max_new=request.max_new_tokens, temperature=request.temperature,
                    noise_key=noise_key(request.seed), ticket=ticket, account=_PURPOSES.index(request.purpose),
                )  # fmt: skip
                handle.slot, handle.ticket, handle.is_seated = slot, ticket, True

    def _prefill(self) -> None:
        assert self._model is not None
        rows = self._rows
        plan = rows.plan_prefill(self._prefill_tokens)
        starts = rows.cached[plan.leaders]
        columns = np.minimum(starts[:, None] + np.arange(int(plan.counts.max())), self._max_length - 1)
        tokens = rows.tokens[plan.leaders[:, None], columns]
        logits = self._model.prefill(tokens, plan.counts, starts, plan.rows, plan.leaders, plan.leader_of)
        rows.cached[plan.rows] += plan.counts[plan.leader_of]
        computed = int(plan.counts.sum())
        self._metrics["prefill_passes"] += 1
        self._metrics["prefill_tokens"] += computed
        self._metrics["prefill_tokens_shared"] += int(plan.counts[plan.leader_of].sum()) - computed
        if plan.is_complete:
            first = rows.ready
            rows.ready += len(plan.rows)
            self._append(first, logits[torch.from_numpy(plan.leader_of)])

    def _decode(self) -> None:
        assert self._model is not None
        rows = self._rows
        n = rows.ready
        at = rows.cached[:n]
        logits = self._model.decode(rows.tokens[np.arange(n), at], at.copy())
        rows.cached[:n] += 1
        self._metrics["decode_passes"] += 1
        self._append(0, logits)

    def _append(self, first: int, logits: torch.Tensor) -> None:
        """Sample one token for each of the rows `first`, `first + 1`, ..., and let go of those that end with it. logits [R, V]"""
        rows = self._rows
        count = len(logits)
        span = slice(first, first + count)
        noise = uniforms(rows.noise_key[span], rows.length[span] - rows.prompt_length[span])
        tokens, logprobs = sample(logits, rows.temperature[span], noise)
        rows.append(first, tokens, logprobs, self._version)
        self._live[rows.ticket[span]] += 1
        for purpose, sampled in zip(_PURPOSES, np.bincount(rows.account[span], minlength=len(_PURPOSES)).tolist(), strict=True):
            self._sampled[purpose] += sampled
        is_stop = self._stops[tokens]
        ended = np.flatnonzero(is_stop | (rows.length[span] >= rows.limit[span]))
        if len(ended):
            for row in ended.tolist():
                self._finish(first + row, "stop" if is_stop[row] else "length")
            self._remove(ended + first)
            self._deliver()

    def _finish(self, slot: int, reason: FinishReason) -> None:
        """Settle the request in a slot. The slot itself is freed by `_remove`."""
        rows = self._rows
        handle = rows.owners[slot]
        token_ids, logprobs = rows.sampled(slot)
        version = int(rows.version[slot])
        generation = Generation(
            request_id=handle.request.request_id,
            token_ids=token_ids,
            inference_logprobs=logprobs,
            finish_reason=reason,
            policy_version=self._version if version < 0 else version,
        )
        handle.settled = len(token_ids)
        self._tickets.append(handle.ticket)
        self._results.setdefault(handle.loop, []).append((handle, generation))

    def _remove(self, slots: Sequence[int] | Index) -> None:
        assert self._model is not None
        moves, moved = self._rows.remove(slots)
        for slot, handle in moved:
            handle.slot = slot
        if moves is not None:
            self._model.cache.move(torch.from_numpy(moves.sources), torch.from_numpy(moves.targets), moves.length)

    def _deliver(self) -> None:
        """Send what was settled since the last call to the loops it belongs to: one call per loop."""
        for loop, results in self._results.items():
            _call(loop, _resolve, results)
        self._results.clear()

    def _fail_all(self) -> None:
        """Fail every open request and publish with the reason why the engine stopped, and let go of the model."""
        assert self._stopped is not None
        with self._lock:
            arriving = [handle for handles in self._arriving.values() for handle in handles]
            open_handles = [handle for handle in (*self._rows.owners, *self._waiting, *arriving) if handle.settled is None]
            self._waiting.clear()
            self._arriving.clear()
            publishes, self._publishes = self._publishes, []
            for handle in open_handles:
                handle.settled = handle.sampled_tokens
        self._deliver()
        failed: dict[asyncio.AbstractEventLoop, list[SlotHandle]] = {}
        for handle in open_handles:
            failed.setdefault(handle.loop, []).append(handle)
        for loop, batch in failed.items():
            _call(loop, _reject, batch, self._stopped)
        for order in publishes:
            order.error = self._stopped
            order.done.set()
        self._model = None
        self._weights = Weights({})
        self._rows = RowTable(0, 0)


def _call(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def _resolve(results: list[tuple[SlotHandle, Generation]]) -> None:
    for handle, generation in results:
        if not handle.future.done():
            handle.future.set_result(generation)


def _reject(handles: list[SlotHandle], reason: GenerationError) -> None:
    for handle in handles:
        if not handle.future.done():
            error = GenerationError(str(reason))
            error.__cause__ = reason.__cause__
            handle.future.set_exception(error)
