"""One asyncio loop in a thread of its own: the shell lives there, the trainer calls it from the main thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sluice.errors import SluiceError

T = TypeVar("T")

STOP_CHECK_S: Final = 0.1  # how often a waiting call looks whether the run is being stopped
JOIN_S: Final = 5.0  # how long leaving waits for the thread


class Stopped(Exception):
    """A call was given up because the run is being stopped."""


class LoopStuck(SluiceError):
    """The loop does not answer: something that runs on it does not return."""


class LoopThread:
    """`with LoopThread(stop) as loop:` starts the loop; leaving stops it and cancels what is left on it.

    `call` waits for a coroutine, in the calling thread, and gives up with `Stopped` when `stop` is set; `run` waits whatever happens.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sluice-loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop broke and is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Raises what it raises, or `Stopped`, then it is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=STOP_CHECK_S)
            except concurrent.futures.TimeoutError:
                if future.done():  # the coroutine itself raised a TimeoutError
                    raise
                if self._stop.is_set():
                    future.cancel()
                    raise Stopped from None
                if not self._thread.is_alive():
                    raise SluiceError("the loop that samples and scores has ended under the run - see the traceback above") from None
            except concurrent.futures.CancelledError:
                raise Stopped from None

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of a coroutine, also while the run is being stopped. Raises `LoopStuck` after `timeout_s`, and SluiceError
        when the loop no longer runs.
        """
        if not self._thread.is_alive():
            work.close()
            raise SluiceError("the loop that samples and scores has ended under the run - see the traceback above")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout=timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # the coroutine itself raised a TimeoutError
                raise
            future.cancel()
            raise LoopStuck(
                f"sampling and scoring did not answer within {timeout_s:g} s - an inline environment or verifier, a filter or a rollout "
                "loop does not return; environments and verifiers in processes can be killed (environment.run_in, reward_pool.workers)"
            ) from None

    def do(self, action: Callable[[], T], timeout_s: float = 60.0) -> T:
        """The result of a plain function that runs on the loop."""

        async def act() -> T:
            return action()

        return self.run(act(), timeout_s)
