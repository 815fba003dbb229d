"""An open request of the slot engine, and how its outcome reaches the event loop that waits for it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from sluice.errors import GenerationError
from sluice.generation.base import Generation, GenerationRequest, Span
from sluice.generation.dialogues import Dialogue


class _Engine(Protocol):
    """What a handle asks of its engine."""

    def cancel(self, handle: SlotHandle) -> None: ...

    def live_tokens(self, ticket: int) -> int: ...


class SlotHandle:
    """An open request of a `SlotEngine`. Cancelling its future is taken as `cancel()`."""

    __slots__ = ("_engine", "dialogue", "future", "is_cancelled", "is_seated", "loop", "request", "settled", "spans", "ticket")

    def __init__(
        self, engine: _Engine, request: GenerationRequest, dialogue: Dialogue[SlotHandle], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request = request
        self.dialogue = dialogue
        self.loop = loop
        self.future: asyncio.Future[Generation] = loop.create_future()
        self.future.add_done_callback(self._on_done)
        self._engine = engine
        # Kept by the engine:
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


Outcome = tuple[SlotHandle, Generation | GenerationError]


def call(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> None:
    """Have a loop call a function, from any thread."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def resolve(outcomes: list[Outcome]) -> None:
    """Tell those who wait; called in their loop."""
    for handle, outcome in outcomes:
        if handle.future.done():
            continue
        if isinstance(outcome, GenerationError):
            handle.future.set_exception(outcome)
        else:
            handle.future.set_result(outcome)


def reject(handles: list[SlotHandle], reason: GenerationError) -> None:
    """Fail requests whose engine has stopped; called in their loop."""
    for handle in handles:
        if not handle.future.done():
            error = GenerationError(str(reason))
            error.__cause__ = reason.__cause__
            handle.future.set_exception(error)
