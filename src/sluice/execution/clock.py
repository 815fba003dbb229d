"""A clock that jumps: an event loop for tests and simulations whose time passes only when nothing else is to do.

An hour of `asyncio.sleep` costs nothing, the order of timers is exact, and a program in which everybody waits for everybody fails at once
with the names of those who wait, instead of hanging.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_ASYNCIO = str(Path(asyncio.__file__).parent)
_RESOLUTION_S = 1e-9
_OWN_FILES = 1  # the loop's own wake-up pipe is always registered


class Deadlock(RuntimeError):
    """Nothing can happen any more: no callback is ready, no timer is set, no file is watched. The message names who waits, and where."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where a loop waits, this one moves the clock instead."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is there at once; otherwise jump to the next timer, or wait for files when no timer is set."""
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.loop.jump():
            return events
        if len(self.get_map()) > _OWN_FILES:
            return super().select(None)
        raise Deadlock(_story(self.loop))


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and jumps to the next timer when nothing is ready.

    Real files and sockets work (they are looked at before each jump). Threads do not: they take real time, which this clock does not
    know, so that waiting for one alone counts as a deadlock.
    """

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def jump(self) -> bool:
        """Move the clock to the next timer. False: there is none."""
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled")  # noqa: B009 - not in asyncio's typed interface; a heap
        if not timers:
            return False
        self._now = max(self._now, timers[0].when())
        # The loop fires what is due within its clock's resolution, which must not vanish beside the time.
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(self._now))
        return True


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """`asyncio.run` on a virtual clock. Raises `Deadlock` where `asyncio.run` would hang."""
    with asyncio.Runner(loop_factory=VirtualClockLoop, debug=debug) as runner:
        return runner.run(main)


def _story(loop: asyncio.AbstractEventLoop) -> str:
    waiting = sorted(f"{task.get_name()} ({_place(task)})" for task in asyncio.all_tasks(loop))
    who = "; ".join(waiting) if waiting else "no task is left, but the loop runs on: stop() was not called"
    return f"nothing is ready, no timer is set and no file is watched, but {len(waiting)} tasks wait for each other, or for nobody: {who}"


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the innermost coroutine that it awaits and that is not asyncio's own."""
    place = ""
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and not (place and frame.f_code.co_filename.startswith(_ASYNCIO)):
            place = f"{frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return place
