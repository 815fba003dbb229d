"""What plays members for the shell: one protocol for single responses and whole trajectories, and the count of what comes late.

A player is told to launch and to cancel attempts, and tells the machine, through the shell, what became of them. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sluice.generation.base import Generation, GenerationHandle
from sluice.scheduler import events as ev
from sluice.types import Failure

if TYPE_CHECKING:
    from sluice.scheduler import Scheduler


class Shell(Protocol):
    """What a player asks of the shell for which it plays."""

    scheduler: Scheduler
    late: LateTokens

    def tell(self, event: ev.Event) -> None:
        """Tell the machine one event and carry out what follows from it."""

    def broken(self, error: BaseException) -> None:
        """Something is broken as a whole: the run ends with this error."""


class Player(Protocol):
    """Plays attempts. Every method returns at once and is called on the shell's loop."""

    def bind(self, shell: Shell) -> None:
        """Play for this shell. Called once, before anything else."""

    def launch(self, launch: ev.LaunchMember) -> Failure | None:
        """Begin an attempt. Answers with a failure when no try at that member can ever succeed; then nothing has begun.

        Raises whatever is broken as a whole.
        """

    def cancel(self, attempt_id: int) -> int | None:
        """Let go of an attempt, wherever it stands: the tokens that it had sampled. None: it is not being played.

        What the engine samples for it afterwards goes to `Shell.late`.
        """

    def steer(self, order: ev.StopMember | ev.HoldMember | ev.ReleaseMember) -> None:
        """Stop, hold or release an attempt that takes turns. One that is not being played any more is left alone."""

    def in_flight(self) -> Mapping[int, int]:
        """Attempts being played -> tokens sampled for each so far."""

    def generating(self, version: int) -> tuple[int, ...]:
        """Attempts that began under weights older than `version` and still generate. Asked only where members restart with new weights."""

    def pending(self) -> list[asyncio.Future[Any]]:
        """What is still on its way out after a cancel, besides generations."""


class LateTokens:
    """Generations whose attempt has ended. What the engine samples for them afterwards is told once they settle."""

    def __init__(self, tell: Callable[[ev.Event], None]) -> None:
        """Nothing is late yet."""
        self._tell = tell
        self._open: dict[GenerationHandle, int] = {}  # not settled -> tokens that are counted already

    def expect(self, attempt_id: int, handle: GenerationHandle, counted: int) -> None:
        """The attempt has ended, with `counted` tokens of this generation accounted for. Whoever calls this has cancelled it."""
        self._open[handle] = counted
        handle.future.add_done_callback(partial(self._settled, attempt_id, handle))

    def _settled(self, attempt_id: int, handle: GenerationHandle, future: asyncio.Future[Generation]) -> None:
        counted = self._open.pop(handle)
        is_whole = not future.cancelled() and future.exception() is None
        sampled = len(future.result().token_ids) if is_whole else handle.sampled_tokens
        if sampled > counted:
            self._tell(ev.LateTokens(attempt_id=attempt_id, sampled_tokens=sampled - counted))

    @property
    def untold(self) -> int:
        """Tokens that are late already, though not settled."""
        return sum([handle.sampled_tokens - counted for handle, counted in self._open.items()])

    def pending(self) -> list[asyncio.Future[Any]]:
        """Generations that have not settled."""
        return [handle.future for handle in self._open]
