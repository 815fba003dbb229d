"""Dialogues: requests that continue one another, and the rules about them that every engine keeps. No torch."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from sluice.errors import GenerationError, RequestRefused
from sluice.generation.base import GenerationRequest, Purpose
from sluice.types import TokenIds

Handle = TypeVar("Handle")


class Dialogue(Generic[Handle]):
    """What requests that continue one another have in common. A request that stands alone is a dialogue that has ended when it begins.

    `held` is what the next request continues: every prompt that was taken and every token that was sampled.
    """

    __slots__ = ("failure", "handle", "held", "is_ended", "key", "rested_at", "slot", "unseated")

    def __init__(self, key: tuple[Purpose, int] | None) -> None:
        self.key = key  # None: a request that stands alone
        self.handle: Handle | None = None  # its open request
        self.held = 0  # tokens, the prompt of the open request included
        self.is_ended = key is None  # nothing is kept beyond its open request
        self.failure: str | None = None  # why its last request failed
        # Kept by an engine with slots, in its own thread:
        self.slot = -1  # where its tokens are, seated or at rest
        self.rested_at = 0.0  # when its last request ended, by time.perf_counter
        self.unseated: list[TokenIds] = []  # tokens held that are in no slot: all, or those after the slot's

    def take_unseated(self, prompt: TokenIds) -> TokenIds:
        """What a slot has to be given: the tokens that are in none yet, and the prompt."""
        if not self.unseated:
            return prompt
        tokens = np.concatenate([*self.unseated, prompt])
        self.unseated = []
        return tokens


class Dialogues(Generic[Handle]):
    """The dialogues of an engine that have not ended, failed ones included. Not safe for several threads by itself."""

    def __init__(self) -> None:
        self._known: dict[tuple[Purpose, int], Dialogue[Handle]] = {}

    def find(self, request: GenerationRequest) -> Dialogue[Handle]:
        """The dialogue that a request continues, or a new one, which `begin` enters.

        Raises `RequestRefused` when a request of that dialogue is open, `GenerationError` when one of it has failed.
        """
        if request.dialogue_id is None:
            return Dialogue(None)
        key = (request.purpose, request.dialogue_id)
        dialogue = self._known.get(key)
        if dialogue is None:
            return Dialogue(key)
        if dialogue.failure is not None:
            raise GenerationError(
                f"request {request.request_id}: dialogue {request.dialogue_id} must not have failed, but a request of it did, and the "
                f"engine holds nothing of it any more - call end_dialogue({request.dialogue_id}), then send all its tokens in one request; "
                f"what failed: {dialogue.failure}"
            )
        if dialogue.handle is not None:
            raise RequestRefused(
                f"request {request.request_id}: dialogue {request.dialogue_id} may have one open request at a time, and one of it has not "
                f"ended yet - wait for its future; one whose future was cancelled is open until the engine stops it: cancel by the handle"
            )
        return dialogue

    def begin(self, dialogue: Dialogue[Handle], handle: Handle, prompt: TokenIds) -> None:
        """Enter the request that was taken."""
        dialogue.handle = handle
        dialogue.held += len(prompt)
        if dialogue.key is not None:
            self._known[dialogue.key] = dialogue

    def end(self, dialogue_id: int, purpose: Purpose) -> Dialogue[Handle] | None:
        """Forget a dialogue: its number is free. Returns it, with the request that may be open; None for one that is not known."""
        dialogue = self._known.pop((purpose, dialogue_id), None)
        if dialogue is not None:
            dialogue.is_ended = True
        return dialogue

    def clear(self) -> None:
        """Forget them all."""
        self._known.clear()

    @property
    def open_count(self) -> int:
        """Dialogues that can go on."""
        return sum(dialogue.failure is None for dialogue in list(self._known.values()))  # a copy: others may add meanwhile
