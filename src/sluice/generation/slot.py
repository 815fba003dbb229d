"""The in-process engine: many requests in one forward pass, joining and leaving between passes.

One daemon thread owns the model. It seats waiting requests in free slots, prefills them (siblings with the same prompt once), decodes all
seated ones together, and hands results to the event loops they came from. Whoever submits, cancels or publishes only leaves a note that
the thread reads between two passes; nobody waits for a pass except `publish` and `close`.

A dialogue comes to rest in its slot when a request of it ends, and its next request computes the new tokens only. When all slots are taken,
a request that needs one gets that of the dialogue that has rested longest, whose tokens are put aside and prefilled anew when it goes on.
It has rested for a moment then, so that a crowd of dialogues with fast replies does not take the slots from one another at every turn.

With `on_weight_update: finish` a publish leaves live rows under the weights that began them: those stay in memory beside the new ones, as
an edition of their own, and each edition that has rows decodes in a pass of its own, until its last row has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np
import torch

from sluice.config.models import LoraConfig
from sluice.errors import ConfigError, GenerationError
from sluice.generation.base import PURPOSES, Generation, GenerationRequest, OnWeightUpdate, Purpose, Span, versions_of
from sluice.generation.checks import check_length, check_request
from sluice.generation.dialogues import Dialogue, Dialogues
from sluice.generation.handle import Outcome, SlotHandle, call, reject, resolve
from sluice.generation.loading import check_architecture, load_net, stop_tokens
from sluice.generation.model import SlotModel
from sluice.generation.planning import Pace, Spread, plan_decode, plan_prefill
from sluice.generation.precision import Precision
from sluice.generation.rows import Index, RowTable
from sluice.generation.sampling import has_probabilities, sample, uniforms
from sluice.generation.seats import Seats
from sluice.generation.weights import Tensors, Weights
from sluice.types import FinishReason

OnPublish = Literal["recompute", "keep"]

_PREFILL_TOKENS = 2048  # computed by one prefill pass: bounds how long decoding rows, and a cancel, wait for it
_CLOSE_TIMEOUT_S = 30.0  # a forward pass that lasts longer is left behind in its daemon thread


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
        self._dialogues: Dialogues[SlotHandle] = Dialogues()
        self._arriving: dict[asyncio.AbstractEventLoop, list[SlotHandle]] = {}  # submitted in the current iteration of their loop
        self._arrived: list[SlotHandle] = []  # in order; may hold settled ones
        self._cancels: list[SlotHandle] = []
        self._ended: list[Dialogue[SlotHandle]] = []  # dialogues whose slots are to be freed
        self._publishes: list[_Publish] = []
        self._stopped: GenerationError | None = None  # why no request is taken any more
        # The engine thread's own. Counts are read by others.
        self._rows: RowTable[Dialogue[SlotHandle]] = RowTable(max_slots, max_length)
        self._seats = Seats(self._rows, max_slots)
        self._pace = Pace()
        self._spread = Spread()
        self._results: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        self._sampled: dict[Purpose, int] = dict.fromkeys(PURPOSES, 0)
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
        precision: Precision | torch.dtype = "float32",
        threads: int | None = None,
        lora: LoraConfig | None = None,
        stop_token_ids: Sequence[int] = (),
        on_weight_update: OnWeightUpdate = "finish",
        on_publish: OnPublish = "recompute",
        prefill_tokens: int = _PREFILL_TOKENS,
    ) -> SlotEngine:
        """Load a model of the engine's own and start.

        path: folder written by save_pretrained. max_slots: requests in one forward pass, further ones wait. max_length: prompt and
        response together, of a dialogue all of them, in tokens. precision: in which numbers it computes, see `precision.py`; or any
        floating type. threads: torch threads of the engine, None for torch's own choice. lora: add an adapter, and publish only that.
        stop_token_ids: end tokens besides the model's own. on_weight_update: see `OnWeightUpdate`. on_publish: what sequences and
        dialogues that go on under new weights do: compute their keys and values again, or keep those of the old ones. prefill_tokens: at
        most so many are computed between two decoding passes.

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
        if precision not in get_args(Precision) and not isinstance(precision, torch.dtype):
            raise ConfigError(f"SlotEngine.load: precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
        net, weights = load_net(path, precision=precision, lora=lora)
        check_architecture(net, max_length)
        model = SlotModel(net, max_slots=max_slots, max_length=max_length, is_rounded=precision == "int8")
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
        """What the thread has done so far: passes, prompt tokens computed and shared between siblings, dialogues that lost their slot to
        others, seconds of work.

        And, as they are now, `engine/versions_live`: sets of weights in memory; `engine/dialogues`: open ones.
        """
        live = 0 if self._model is None else len(self._weights.versions)
        return {f"engine/{name}": value for name, value in self._metrics.items()} | {
            "engine/dialogues_evicted": float(self._seats.evicted),
            "engine/versions_live": float(live),
            "engine/dialogues": float(self._dialogues.open_count),
        }

    def live_tokens(self, ticket: int) -> int:
        """Tokens sampled so far for the seated request with this ticket."""
        return int(self._seats.live[ticket])

    def submit(self, request: GenerationRequest) -> SlotHandle:
        """Take a request; needs a running event loop.

        Requests submitted in the same iteration of the loop reach the engine together, so that siblings share their prefill.
        Raises `RequestRefused` when the request can never be served or its dialogue has an open one, `GenerationError` when the engine has
        stopped or a request of its dialogue has failed.
        """
        check_request(request, vocab_size=self._vocab_size)
        loop = asyncio.get_running_loop()
        with self._lock:
            self._require_running()
            dialogue = self._dialogues.find(request)
            check_length(request, held=dialogue.held, max_length=self._max_length)
            handle = SlotHandle(self, request, dialogue, loop)
            self._dialogues.begin(dialogue, handle, request.prompt_ids)
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
            dialogue = handle.dialogue
            dialogue.handle = None
            dialogue.unseated.append(handle.request.prompt_ids)
        nothing = Generation(
            request_id=handle.request.request_id,
            token_ids=np.empty(0, dtype=np.int64),
            inference_logprobs=np.empty(0, dtype=np.float32),
            finish_reason="cancelled",
            policy_version=self._version,
        )
        if asyncio._get_running_loop() is handle.loop:
            resolve([(handle, nothing)])
        else:
            call(handle.loop, resolve, [(handle, nothing)])

    def end_dialogue(self, dialogue_id: int, purpose: Purpose = "train") -> None:
        """Free what is kept of a dialogue, and cancel its open request; returns at once. Its number may be used again.

        Unknown and ended ones are ignored.
        """
        with self._lock:
            dialogue = self._dialogues.end(dialogue_id, purpose)
            if dialogue is None:
                return
            handle = dialogue.handle
        if handle is not None:
            self.cancel(handle)
        with self._lock:
            self._ended.append(dialogue)  # after its cancel, so that no request of it is open when the engine comes to it
        self._wake.set()

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

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._arrived.extend(self._arriving.pop(loop, ()))
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
            ended, self._ended = self._ended, []
        self._carry_out(cancels, ended)  # first: for a row that ends here no weights have to be kept
        self._take_weights()
        patience_s = None
        if self._arrived or self._seats.waiting:
            with self._lock:
                patience_s = self._seats.seat(self._arrived, edition=self._weights.newest, now=perf_counter())
                self._arrived.clear()
        rows = self._rows
        if not rows.open_count:
            self._wake.wait(patience_s)
            return
        started = perf_counter()
        if self._pace.is_due(rows):
            self._prefill()
        self._decode()
        self._metrics["busy_s"] += perf_counter() - started

    def _take_weights(self) -> None:
        with self._lock:
            publishes, self._publishes = self._publishes, []
        if not publishes:
            return
        rows, weights = self._rows, self._weights
        go_over = self._on_weight_update != "finish"
        try:
            for order in publishes:
                if go_over:
                    self._note_spans()
                weights.put(order.tensors, order.version, beside=not go_over and rows.needs(weights.newest))
                rows.change_weights(edition=weights.newest, under_way=go_over, keep=self._on_publish == "keep")
                self._version = order.version
                order.done.set()
        except BaseException:
            with self._lock:
                self._publishes.extend(order for order in publishes if not order.done.is_set())  # whoever waits must be told
            raise
        stale = rows.resting() if self._on_publish == "recompute" else np.empty(0, dtype=np.int64)
        self._seats.put_aside(stale)
        self._tidy(stale)

    def _note_spans(self) -> None:
        """Write down which tokens of the open requests are of the weights that leave now."""
        rows = self._rows
        for row in np.flatnonzero(rows.is_open[: rows.count]).tolist():
            handle = _open_request(rows.owners[row])
            count = int(rows.length[row] - rows.prompt_length[row])
            if count > (handle.spans[-1].sampled if handle.spans else 0):
                handle.spans.append(Span(self._version, count))

    def _carry_out(self, cancels: list[SlotHandle], ended: list[Dialogue[SlotHandle]]) -> None:
        slots = [handle.dialogue.slot for handle in cancels if handle.settled is None]
        for slot in slots:
            self._finish(slot, "cancelled")
        self._let_go(np.array(slots, dtype=np.int64))
        resting = [dialogue.slot for dialogue in ended if dialogue.slot >= 0]
        if resting:
            self._tidy(resting)

    def _prefill(self) -> None:
        assert self._model is not None
        rows = self._rows
        plan = plan_prefill(rows, self._prefill_tokens)
        starts = rows.cached[plan.leaders]
        columns = np.minimum(starts[:, None] + np.arange(int(plan.counts.max())), self._max_length - 1)
        tokens = rows.tokens[plan.leaders[:, None], columns]
        edition = int(rows.edition[plan.rows[0]])
        self._weights.use(edition)
        logits = self._model.prefill(tokens, plan.counts, starts, plan.rows, plan.leaders, plan.leader_of)
        counts = plan.counts[plan.leader_of]
        rows.stored(plan.rows, counts, is_complete=plan.is_complete)
        computed = int(plan.counts.sum())
        self._metrics["prefill_passes"] += 1
        self._metrics["prefill_tokens"] += computed
        self._metrics["prefill_tokens_shared"] += int(counts.sum()) - computed
        if plan.is_complete:
            self._append(plan.rows, logits[torch.from_numpy(plan.leader_of)], edition)
        else:
            broken = plan.rows[~has_probabilities(logits)[plan.leader_of]]
            self._fail(broken, edition)
            self._let_go(broken)

    def _decode(self) -> None:
        assert self._model is not None
        rows = self._rows
        passes = plan_decode(rows)
        if self._spread.is_too_wide(rows, passes):
            self._tidy((), apart=True)
            passes = plan_decode(rows)
        for plan in reversed(passes):  # rows that end move later rows only
            self._weights.use(plan.edition)
            at = rows.cached[plan.slots]
            logits = self._model.decode(rows.tokens[plan.slots, at], at, plan.slots, plan.rows)
            rows.cached[plan.rows] += 1
            self._metrics["decode_passes"] += 1
            self._append(plan.rows, logits, plan.edition)

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
        self._seats.live[rows.ticket[slots]] += 1
        for purpose, sampled in zip(PURPOSES, np.bincount(rows.account[slots], minlength=len(PURPOSES)).tolist(), strict=True):
            self._sampled[purpose] += sampled
        is_stop = self._stops[tokens]
        ended = np.flatnonzero(is_stop | (rows.length[slots] >= rows.limit[slots]))
        for row in ended.tolist():
            self._finish(int(slots[row]), "stop" if is_stop[row] else "length")
        self._let_go(np.concatenate([slots[ended], broken]))

    def _fail(self, slots: Index, edition: int) -> None:
        """Settle requests whose logits are not finite. `_let_go` must follow."""
        assert self._model is not None
        for slot in slots.tolist():
            dialogue = self._rows.owners[slot]
            handle = _open_request(dialogue)
            error = GenerationError(
                f"request {handle.request.request_id}: logits must be finite, but the weights of version "
                f"{self._weights.versions[edition]} give NaN or infinity - they have diverged, or the engine's precision is too narrow "
                f"for them: lower the learning rate, or set engine.precision to float32"
            )
            dialogue.failure = str(error)
            self._settle(handle, handle.sampled_tokens, error)
        if len(slots):
            self._model.cache.clear(slots)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        """Settle the request in a slot. `_let_go` must follow."""
        rows = self._rows
        handle = _open_request(rows.owners[slot])
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
        self._spread.note_end(len(token_ids))

    def _settle(self, handle: SlotHandle, sampled: int, outcome: Generation | GenerationError) -> None:
        handle.settled = sampled
        handle.dialogue.held += sampled
        handle.dialogue.handle = None
        self._seats.settled(handle)
        self._results.setdefault(handle.loop, []).append((handle, outcome))

    def _let_go(self, slots: Index) -> None:
        """Let dialogues whose requests are settled come to rest, free the slots of those that have ended, and send what they got."""
        if not len(slots):
            return
        rows, newest = self._rows, self._weights.newest
        now = perf_counter()
        stays = []
        for slot in slots.tolist():
            dialogue = rows.owners[slot]
            dialogue.rested_at = now
            stays.append(not dialogue.is_ended and dialogue.failure is None)
        resting = slots[stays]
        leaving = slots[~np.array(stays)]
        is_stale = rows.edition[resting] != newest
        rows.rest(resting, edition=newest)
        if self._on_publish == "recompute" and is_stale.any():
            self._seats.put_aside(resting[is_stale])
            leaving = np.concatenate([leaving, resting[is_stale]])
        if len(leaving) or is_stale.any():
            self._tidy(leaving)
        self._deliver()

    def _tidy(self, leaving: Sequence[int] | Index, *, apart: bool = False) -> None:
        """Free slots, move the rows that must move, and free weights that no request needs any more. apart: see `RowTable.tidy`."""
        assert self._model is not None
        for slot in leaving:
            self._rows.owners[slot].slot = -1
        moves, moved = self._rows.tidy(leaving, apart=apart)
        for slot, dialogue in moved:
            dialogue.slot = slot
        if moves is not None:
            self._model.cache.move(torch.from_numpy(moves.sources), torch.from_numpy(moves.targets), moves.length)
        if len(self._weights.versions) > 1:
            self._weights.keep(set(self._rows.edition[: self._rows.count].tolist()))

    def _deliver(self) -> None:
        """Send what was settled since the last call to the loops it belongs to: one call per loop."""
        for loop, results in self._results.items():
            call(loop, resolve, results)
        self._results.clear()

    def _fail_all(self) -> None:
        """Fail every open request and publish with the reason why the engine stopped, and let go of the model."""
        assert self._stopped is not None
        with self._lock:
            arriving = [handle for handles in self._arriving.values() for handle in handles]
            seated = [dialogue.handle for dialogue in self._rows.owners if dialogue.handle is not None]
            # Once each: the thread may have broken anywhere.
            given = dict.fromkeys((*seated, *self._seats.waiting, *self._arrived, *arriving))
            open_handles = [handle for handle in given if handle.settled is None]
            self._arrived.clear()
            self._arriving.clear()
            self._dialogues.clear()
            self._ended.clear()
            publishes, self._publishes = self._publishes, []
            for handle in open_handles:
                handle.settled = handle.sampled_tokens
        self._deliver()
        failed: dict[asyncio.AbstractEventLoop, list[SlotHandle]] = {}
        for handle in open_handles:
            failed.setdefault(handle.loop, []).append(handle)
        for loop, batch in failed.items():
            call(loop, reject, batch, self._stopped)
        for order in publishes:
            order.error = self._stopped
            order.done.set()
        self._model = None
        self._weights = Weights(torch.nn.Module(), {})
        self._rows = RowTable(0, 0)
        self._seats.clear(self._rows)


def _open_request(dialogue: Dialogue[SlotHandle]) -> SlotHandle:
    assert dialogue.handle is not None, f"dialogue {dialogue.key} in slot {dialogue.slot} has no open request"
    return dialogue.handle
