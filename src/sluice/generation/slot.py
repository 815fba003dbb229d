"""The in-process engine: many requests in one forward pass, joining and leaving between passes.

One daemon thread owns the model. It seats waiting requests in free slots, prefills them (siblings with the same prompt once), decodes all
seated ones together, and hands results to the event loops they came from. Whoever submits, cancels or publishes only leaves a note that
the thread reads between two passes; nobody waits for a pass except `publish` and `close`.

With `on_weight_update: finish` a publish leaves live rows under the weights that began them: those stay in memory beside the new ones, as
an edition of their own, and each edition that has rows decodes in a pass of its own, until its last row has ended.
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
from sluice.errors import ConfigError, GenerationError, RequestRefused
from sluice.generation.base import Generation, GenerationRequest, OnWeightUpdate, Purpose, Span, versions_of
from sluice.generation.loading import check_architecture, load_net, stop_tokens
from sluice.generation.model import SlotModel
from sluice.generation.rows import Index, RowTable
from sluice.generation.sampling import has_probabilities, noise_key, sample, uniforms
from sluice.generation.weights import Tensors, Weights
from sluice.types import FinishReason

OnPublish = Literal["recompute", "keep"]

_PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_PREFILL_TOKENS = 2048  # computed by one prefill pass: bounds how long decoding rows, and a cancel, wait for it
_MIN_TEMPERATURE = 1e-4  # below it, logits divided by it leave float32, and nothing but the most probable token is drawn anyway
_CLOSE_TIMEOUT_S = 30.0  # a forward pass that lasts longer is left behind in its daemon thread


class SlotHandle:
    """An open request of a `SlotEngine`. Cancelling its future is taken as `cancel()`."""

    __slots__ = ("_engine", "future", "is_cancelled", "is_seated", "loop", "request", "settled", "slot", "spans", "ticket")

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
        self.spans: list[Span] = []  # of the earlier weights it was under

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


_Outcome = tuple[SlotHandle, Generation | GenerationError]


class _Publish:
    """Weights on their way into the model."""

    __slots__ = ("done", "error", "tensors", "version")

    def __init__(self, tensors: Tensors, version: int) -> None:
        self.tensors = tensors
        self.version = version
        self.done = threading.Event()
        self.error: GenerationError | None = None


class SlotEngine:
    """Samples many continuations at once from a model of its own, on the CPU.

    Tokens depend on weights, prompt, seed and temperature only, not on the company (up to ties in the last bit of the logits).
    `inference_logprobs` are those of an ordinary full forward pass at the sampling temperature. Torch's global random state is not used.
    Weights whose logits are not finite fail the requests that met them; anything else that breaks in the thread stops the engine.

    Memory: one set of weights, and one more for every older version under which requests are still being finished.

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
        on_weight_update: OnWeightUpdate = "finish",
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
        self._on_weight_update: OnWeightUpdate = on_weight_update
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
        self._results: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
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
        on_weight_update: OnWeightUpdate = "finish",
        on_publish: OnPublish = "recompute",
        prefill_tokens: int = _PREFILL_TOKENS,
    ) -> SlotEngine:
        """Load a model of the engine's own and start.

        path: folder written by save_pretrained. max_slots: requests in one forward pass, further ones wait. max_length: prompt and
        response together, in tokens. threads: torch threads of the engine, None for torch's own choice. lora: add an adapter, and publish
        only that. stop_token_ids: end tokens besides the model's own. on_weight_update: see `OnWeightUpdate`. on_publish: what
        sequences that go on under new weights do: compute their keys and values again, or keep those of the old ones.
        prefill_tokens: at most so many are computed between two decoding passes.

        Raises `ConfigError` for settings that do not fit the model, and for a folder whose model cannot be loaded or cannot work in slots.
        """
        for name, value in (("max_slots", max_slots), ("max_length", max_length), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ConfigError(f"SlotEngine.load: {name} must be at least 1, got {value}")
        for name, choice, choices in (
            ("on_weight_update", on_weight_update, get_args(OnWeightUpdate)),
            ("on_publish", on_publish, get_args(OnPublish)),
        ):
            if choice not in choices:
                raise ConfigError(f"SlotEngine.load: {name} must be one of {', '.join(choices)}, got {choice!r}")
        if on_weight_update == "finish" and on_publish == "keep":
            raise ConfigError(
                "SlotEngine.load: on_publish must be recompute with on_weight_update finish, got keep - no sequence changes its weights "
                "then: leave it out, or set on_weight_update to continue or restart"
            )
        net, weights = load_net(path, dtype=dtype, lora=lora)
        check_architecture(net, max_length)
        model = SlotModel(net, max_slots=max_slots, max_length=max_length)
        stops = stop_tokens(net, path, stop_token_ids, model.vocab_size)
        with torch.inference_mode():
            model.check_slots()
        return cls(
            model, weights, stops, max_slots=max_slots, max_length=max_length, on_weight_update=on_weight_update,
            on_publish=on_publish, prefill_tokens=prefill_tokens, threads=threads,
        )  # fmt: skip

    # ---------------------------------------------------------------- called from the event loop, or any thread

    @property
    def policy_version(self) -> int:
        """Version of the newest weights, by which requests begin; 0 until the first publish."""
        return self._version

    def sampled_tokens(self, purpose: Purpose) -> int:
        """Every token ever sampled for that purpose, cancelled and failed requests included, prompts excluded."""
        return self._sampled[purpose]

    def metrics(self) -> dict[str, float]:
        """What the thread has done so far: passes, prompt tokens computed and shared between siblings, seconds of work.

        And `engine/versions_live`: sets of weights in memory now.
        """
        live = 0 if self._model is None else len(self._weights.versions)
        return {f"engine/{name}": value for name, value in self._metrics.items()} | {"engine/versions_live": float(live)}

    def live_tokens(self, ticket: int) -> int:
        """Tokens sampled so far for the seated request with this ticket."""
        return int(self._live[ticket])

    def submit(self, request: GenerationRequest) -> SlotHandle:
        """Take a request; needs a running event loop.

        Requests submitted in the same iteration of the loop reach the engine together, so that siblings share their prefill.
        Raises `RequestRefused` when the request can never be served, `GenerationError` when the engine has stopped.
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
        the call. Requests that begin afterwards are sampled by these weights; those that have begun follow `OnWeightUpdate`. Raises
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
            raise RequestRefused(f"{name}: prompt_ids must be a numpy array of at least one token id, [P] int64, got {got}")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._vocab_size:
            raise RequestRefused(
                f"{name}: prompt_ids must lie within 0 .. {self._vocab_size - 1}, got {low if low < 0 else high} - tokenizer and model do "
                f"not belong together"
            )
        if request.max_new_tokens < 1 or len(prompt) + request.max_new_tokens > self._max_length:
            raise RequestRefused(
                f"{name}: prompt and max_new_tokens (at least 1) must fit into max_length {self._max_length}, got {len(prompt)} + "
                f"{request.max_new_tokens} - load the engine with a larger max_length, or ask for less"
            )
        if not (request.temperature == 0 or _MIN_TEMPERATURE <= request.temperature < math.inf):
            raise RequestRefused(
                f"{name}: temperature must be 0 (most probable token) or at least {_MIN_TEMPERATURE}, got {request.temperature}"
            )
        if request.purpose not in _PURPOSES:
            raise RequestRefused(f"{name}: purpose must be one of {', '.join(_PURPOSES)}, got {request.purpose!r}")

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
            cancels, self._cancels = self._cancels, []
        self._carry_out(cancels)  # first: for a row that ends here no weights have to be kept
        self._take_weights()
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

    def _take_weights(self) -> None:
        with self._lock:
            publishes, self._publishes = self._publishes, []
        try:
            for order in publishes:
                if self._on_weight_update == "finish":
                    self._weights.put(order.tensors, order.version, beside=self._rows.has_begun(self._weights.newest))
                    self._rows.renew(self._weights.newest)
                else:
                    self._note_spans()
                    self._weights.put(order.tensors, order.version, beside=False)
                    if self._on_publish == "recompute":
                        self._rows.forget_cache()
                self._version = order.version
                order.done.set()
        except BaseException:
            with self._lock:
                self._publishes.extend(order for order in publishes if not order.done.is_set())  # whoever waits must be told
            raise

    def _note_spans(self) -> None:
        """Write down which tokens of the live rows are of the weights that leave now."""
        rows = self._rows
        sampled = (rows.length - rows.prompt_length)[: rows.count].tolist()
        for handle, count in zip(rows.owners, sampled, strict=True):
            if count > (handle.spans[-1].sampled if handle.spans else 0):
                handle.spans.append(Span(self._version, count))

    def _carry_out(self, cancels: list[SlotHandle]) -> None:
        live = [handle for handle in cancels if handle.settled is None]
        if live:
            for handle in live:
                self._finish(handle.slot, "cancelled")
            self._remove([handle.slot for handle in live])

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
                    noise_key=noise_key(request.seed), edition=self._weights.newest, ticket=ticket,
                    account=_PURPOSES.index(request.purpose),
                )  # fmt: skip
                handle.slot, handle.ticket, handle.is_seated = slot, ticket, True

    def _prefill(self) -> None:
        assert self._model is not None
        rows = self._rows
        plan = rows.plan_prefill(self._prefill_tokens)
        starts = rows.cached[plan.leaders]
        columns = np.minimum(starts[:, None] + np.arange(int(plan.counts.max())), self._max_length - 1)
        tokens = rows.tokens[plan.leaders[:, None], columns]
        edition = int(rows.edition[plan.rows[0]])
        self._weights.use(edition)
        logits = self._model.prefill(tokens, plan.counts, starts, plan.rows, plan.leaders, plan.leader_of)
        rows.cached[plan.rows] += plan.counts[plan.leader_of]
        computed = int(plan.counts.sum())
        self._metrics["prefill_passes"] += 1
        self._metrics["prefill_tokens"] += computed
        self._metrics["prefill_tokens_shared"] += int(plan.counts[plan.leader_of].sum()) - computed
        if plan.is_complete:
            rows.ready += len(plan.rows)
            self._append(plan.rows, logits[torch.from_numpy(plan.leader_of)], edition)
        else:
            broken = plan.rows[~has_probabilities(logits)[plan.leader_of]]
            self._fail(broken, edition)
            self._remove(broken)

    def _decode(self) -> None:
        assert self._model is not None
        rows = self._rows
        for edition, first, end in reversed(rows.stretches()):  # rows that end move later rows only
            self._weights.use(edition)
            slots = np.arange(first, end)
            at = rows.cached[slots]
            logits = self._model.decode(rows.tokens[slots, at], at, first)
            rows.cached[slots] += 1
            self._metrics["decode_passes"] += 1
            self._append(slots, logits, edition)

    def _append(self, slots: Index, logits: torch.Tensor, edition: int) -> None:
        """Sample one token for each of the slots, and let go of the rows that end with it or cannot be sampled. logits [R, V]"""
        rows = self._rows
        noise = uniforms(rows.noise_key[slots], rows.length[slots] - rows.prompt_length[slots])
        tokens, logprobs, is_good = sample(logits, rows.temperature[slots], noise)
        broken = slots[~is_good]
        if len(broken):
            self._fail(broken, edition)
            slots, tokens, logprobs = slots[is_good], tokens[is_good], logprobs[is_good]
        rows.append(slots, tokens, logprobs)
        self._live[rows.ticket[slots]] += 1
        for purpose, sampled in zip(_PURPOSES, np.bincount(rows.account[slots], minlength=len(_PURPOSES)).tolist(), strict=True):
            self._sampled[purpose] += sampled
        is_stop = self._stops[tokens]
        ended = np.flatnonzero(is_stop | (rows.length[slots] >= rows.limit[slots]))
        for row in ended.tolist():
            self._finish(int(slots[row]), "stop" if is_stop[row] else "length")
        self._remove(np.concatenate([slots[ended], broken]))

    def _fail(self, slots: Index, edition: int) -> None:
        """Settle requests whose logits are not finite. The slots themselves are freed by `_remove`."""
        assert self._model is not None
        for slot in slots.tolist():
            handle = self._rows.owners[slot]
            self._settle(
                handle,
                handle.sampled_tokens,
                GenerationError(
                    f"request {handle.request.request_id}: logits must be finite, but the weights of version "
                    f"{self._weights.versions[edition]} give NaN or infinity - they have diverged, or dtype is too narrow for them: lower "
                    f"the learning rate, or load the engine in float32"
                ),
            )
        if len(slots):
            self._model.cache.clear(slots)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        """Settle the request in a slot. The slot itself is freed by `_remove`."""
        rows = self._rows
        handle = rows.owners[slot]
        token_ids, logprobs = rows.sampled(slot)
        version, token_versions = versions_of([*handle.spans, Span(self._weights.versions[int(rows.edition[slot])], len(token_ids))])
        generation = Generation(
            request_id=handle.request.request_id,
            token_ids=token_ids,
            inference_logprobs=logprobs,
            finish_reason=reason,
            policy_version=version,
            token_versions=token_versions,
        )
        self._settle(handle, len(token_ids), generation)

    def _settle(self, handle: SlotHandle, sampled: int, outcome: Generation | GenerationError) -> None:
        handle.settled = sampled
        self._tickets.append(handle.ticket)
        self._results.setdefault(handle.loop, []).append((handle, outcome))

    def _remove(self, slots: Sequence[int] | Index) -> None:
        """Free the slots of settled requests, and send what they got."""
        if not len(slots):
            return
        assert self._model is not None
        moves, moved = self._rows.remove(slots)
        for slot, handle in moved:
            handle.slot = slot
        if moves is not None:
            self._model.cache.move(torch.from_numpy(moves.sources), torch.from_numpy(moves.targets), moves.length)
        if len(self._weights.versions) > 1:
            self._weights.keep(set(self._rows.edition[: self._rows.count].tolist()))
        self._deliver()

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
        self._weights = Weights(torch.nn.Module(), {})
        self._rows = RowTable(0, 0)


def _call(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def _resolve(results: list[_Outcome]) -> None:
    for handle, outcome in results:
        if handle.future.done():
            continue
        if isinstance(outcome, GenerationError):
            handle.future.set_exception(outcome)
        else:
            handle.future.set_result(outcome)


def _reject(handles: list[SlotHandle], reason: GenerationError) -> None:
    for handle in handles:
        if not handle.future.done():
            error = GenerationError(str(reason))
            error.__cause__ = reason.__cause__
            handle.future.set_exception(error)
