"""What every engine offers: submit a request, follow it, cancel it, take new weights, count what it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from sluice.types import FinishReason, Logprobs, TokenIds

Purpose = Literal["train", "validation"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

OnWeightUpdate = Literal["finish", "restart", "continue"]
"""What becomes of a response that is under way when new weights come.

finish: it goes on to its end under the weights of its first pass. continue: it goes on under the new weights, and `token_versions` say
which token is whose. restart: as continue, until whoever asked for it cancels it and asks anew.
"""


class GenerationRequest(NamedTuple):
    """One continuation to sample. A named tuple, as `Generation` is: one is made for every attempt, and this is twice as fast.

    Requests of the same purpose and `dialogue_id` continue one another, one at a time: the engine keeps what it computed, and `prompt_ids`
    are only the tokens that come after all that the dialogue holds, its earlier prompts and its sampled tokens. The first one opens the
    dialogue. A request that ended by itself or by a cancel leaves it open with what had been sampled by then (one that was cancelled before
    it began leaves its prompt); one that failed leaves nothing: later ones fail too, until `Engine.end_dialogue`. Whoever wants a response
    anew, rather than to go on after its tokens, ends the dialogue and begins another.
    """

    request_id: int  # unique among open requests of the same purpose
    prompt_ids: TokenIds  # [P], P >= 1
    max_new_tokens: int  # >= 1
    temperature: float  # > 0 samples; 0 takes the most probable token
    seed: int  # the same seed, tokens before and weights give the same tokens, whatever else the engine is doing
    purpose: Purpose = "train"  # which counter its tokens go to
    dialogue_id: int | None = None  # the dialogue that it continues; None: it stands alone


class Generation(NamedTuple):
    """What was sampled for one request. The arrays are not shared with the engine."""

    request_id: int
    token_ids: TokenIds  # [N], end token included when it was sampled
    inference_logprobs: Logprobs  # [N] full-vocabulary log-probs at the sampling temperature (at temperature 1 when greedy)
    finish_reason: FinishReason
    policy_version: int  # of the weights that sampled its first token
    token_versions: TokenIds | None = None  # [N] version that sampled each token; None: policy_version sampled them all


class Span(NamedTuple):
    """The time that a request was under the same weights."""

    version: int
    sampled: int  # tokens sampled for the request in all by its end


def versions_of(spans: Sequence[Span]) -> tuple[int, TokenIds | None]:
    """`policy_version` and `token_versions` of a generation. spans: one or more, in order. Without tokens the version is the last one."""
    if len(spans) == 1:
        return spans[0].version, None
    counts = np.diff([0, *[span.sampled for span in spans]])
    versions = np.repeat(np.array([span.version for span in spans], dtype=np.int64), counts)
    if not len(versions):
        return spans[-1].version, None
    first = int(versions[0])
    return first, None if np.all(versions == first) else versions


class GenerationHandle(Protocol):
    """An open request."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled for it so far."""

    @property
    def future(self) -> asyncio.Future[Generation]:
        """Resolves once, with the generation (finish_reason "cancelled" after a cancel) or a `GenerationError`."""

    def cancel(self) -> None:
        """Ask the engine to stop; returns at once. The future resolves later with what had been sampled by then.

        A request that ends by itself before the engine carries the cancel out keeps its own finish reason.
        """


class Engine(Protocol):
    """A model that produces tokens. `submit`, `cancel` and `end_dialogue` are called from the event loop, `publish` from any thread."""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use."""

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """Take a request; must be called with a running event loop, to which the handle's future belongs.

        Raises `RequestRefused` when the request can never be served (too long, with all that its dialogue holds; unknown tokens) or another
        one of its dialogue is open, `GenerationError` when one of its dialogue has failed, and when the engine was closed or has broken.
        """

    def end_dialogue(self, dialogue_id: int, purpose: Purpose = "train") -> None:
        """Free what is kept of a dialogue; returns at once. Its open request is cancelled as by its handle. The number is free again.

        Unknown dialogues and those that have ended are ignored, so that whoever is done with one may always say so.
        """

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Put new weights in place, between two forward passes; returns when they are. Keys and shapes as in the model's state dict.

        Every request that begins afterwards is sampled by them, those that continue a dialogue too; for those under way see
        `OnWeightUpdate`.
        Raises `GenerationError` for weights that do not fit or are not finite (the old ones stay), or when the engine has stopped.
        """

    def sampled_tokens(self, purpose: Purpose) -> int:
        """Every token ever sampled for that purpose: the engine's own count, against which the ledger must sum."""

    def metrics(self) -> dict[str, float]:
        """What it has done since the start, under names that begin with `engine/`."""

    def close(self) -> None:
        """Fail open requests with `GenerationError` and free threads and memory; bounded in time, idempotent."""
