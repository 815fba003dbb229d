"""What every engine offers: submit a request, follow it, cancel it, take new weights, count what it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from sluice.types import FinishReason, Logprobs, TokenIds

Purpose = Literal["train", "validation"]


class GenerationRequest(NamedTuple):
    """One continuation to sample. A named tuple, as `Generation` is: one is made for every attempt, and this is twice as fast."""

    request_id: int  # unique among open requests of the same purpose
    prompt_ids: TokenIds  # [P], P >= 1
    max_new_tokens: int  # >= 1
    temperature: float  # > 0 samples; 0 takes the most probable token
    seed: int  # the same seed, prompt and weights give the same tokens, whatever else the engine is doing
    purpose: Purpose = "train"  # which counter its tokens go to


class Generation(NamedTuple):
    """What was sampled for one request. The arrays are not shared with the engine."""

    request_id: int
    token_ids: TokenIds  # [N], end token included when it was sampled
    inference_logprobs: Logprobs  # [N] full-vocabulary log-probs at the sampling temperature (at temperature 1 when greedy)
    finish_reason: FinishReason
    policy_version: int  # of the weights that sampled its first token


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
    """A model that produces tokens. `submit` and `cancel` are called from the event loop, `publish` from any thread."""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use."""

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """Take a request; must be called with a running event loop, to which the handle's future belongs.

        Raises `GenerationError` when the request can never be served (too long, unknown tokens), or the engine was closed or has broken.
        """

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Put new weights in place, between two forward passes; returns when they are. Keys and shapes as in the model's state dict.

        Raises `GenerationError` for weights that do not fit or are not finite (the old ones stay), or when the engine has stopped.
        """

    def sampled_tokens(self, purpose: Purpose) -> int:
        """Every token ever sampled for that purpose: the engine's own count, against which the ledger must sum."""

    def metrics(self) -> dict[str, float]:
        """What it has done since the start, under names that begin with `engine/`."""

    def close(self) -> None:
        """Fail open requests with `GenerationError` and free threads and memory; bounded in time, idempotent."""
