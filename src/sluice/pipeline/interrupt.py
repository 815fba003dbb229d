"""Ctrl-C and SIGTERM: the first one asks the run to stop and save, the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR: Final = b"\x1b[?25h\n"  # a live display may have hidden it


class Interrupt:
    """While inside, the signals set `stop`; before and after, they do what they did. Off the main thread it changes nothing.

    `was_interrupted` says whether a signal came. `on_first` is called from the signal handler: it must be quick and take no lock.
    """

    def __init__(self, stop: threading.Event, on_first: Callable[[], None] | None = None) -> None:
        self._stop = stop
        self._on_first = on_first
        self._before: dict[int, Any] = {}
        self.was_interrupted = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.was_interrupted:
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            os._exit(128 + number)  # no waiting for any thread; run.db keeps what was committed, workers die with us
        self.was_interrupted = True
        self._stop.set()
        if self._on_first is not None:
            self._on_first()
