"""Watches for environments that are in one call for far too long: names them, and by setting has them replaced.

Time limits of calls end most hangs; this is for calls without a limit, and for calls that block the event loop, where no timer runs. So it
looks from a thread of its own. What it finds is a decision of `hung_calls`, told the time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from sluice.environments.runners import Runner, RunningCall
from sluice.environments.settings import EnvMonitorConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HungCall:
    """An environment that is in one call for longer than it should be."""

    name: str  # of the environment
    running: RunningCall
    seconds: float  # since the call began

    def __str__(self) -> str:
        problem = self.running.env_id or f"seed {self.running.seed}"
        return f"environment {self.name} ({problem}) is in one {self.running.call} for {self.seconds:.0f} s"


def hung_calls(runners: Iterable[Runner], now: float, hung_after_s: float) -> list[tuple[Runner, HungCall]]:
    """The runners whose call began more than `hung_after_s` before `now` (time.monotonic()), longest first."""
    found = []
    for runner in runners:
        running = runner.running  # read once: another thread may end it
        if running is not None and now - running.since > hung_after_s:
            found.append((runner, HungCall(name=runner.name, running=running, seconds=now - running.since)))
    return sorted(found, key=lambda one: -one[1].seconds)


class EnvMonitor:
    """Looks at all runners in regular intervals. A runner that nobody else holds any more is forgotten."""

    def __init__(self, config: EnvMonitorConfig) -> None:
        """Watch nothing yet."""
        self.config = config
        self.hung = 0  # calls found so far
        self._runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._lock = threading.Lock()  # runners are added from other threads
        self._told: weakref.WeakKeyDictionary[Runner, RunningCall] = weakref.WeakKeyDictionary()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, runner: Runner) -> None:
        """Look at this runner as well."""
        with self._lock:
            self._runners.add(runner)

    def start(self) -> None:
        """Begin to look, from a thread; calls are ended in the running event loop. Nothing when it is not enabled."""
        if self.config.enable and self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="environment monitor", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End at once; idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def look(self, now: float) -> list[HungCall]:
        """Name each hung call once, and by setting have it ended. Answers with those that are new."""
        with self._lock:
            runners = list(self._runners)
        new = []
        for runner, hung in hung_calls(runners, now, self.config.hung_after_s):
            if self._told.get(runner) == hung.running:
                continue
            self._told[runner] = hung.running
            self.hung += 1
            new.append(hung)
            if self.config.on_hung == "replace" and self._loop is not None:
                _log.warning("%s: it is ended and replaced (env_monitor.on_hung)", hung)
                try:
                    self._loop.call_soon_threadsafe(self._end, runner, hung)
                except RuntimeError:
                    pass  # the event loop has ended, and its runners with it
            else:
                _log.warning("%s - `env_monitor.on_hung: replace` would end it", hung)
        return new

    def metrics(self) -> dict[str, float]:
        """Hung calls found since the start."""
        return {"env/hung": float(self.hung)}

    def _end(self, runner: Runner, hung: HungCall) -> None:
        """End the call, if it is still the one that was found."""
        if runner.running == hung.running:
            runner.interrupt(f"hung, for {hung.seconds:.0f} s in one call (env_monitor.hung_after_s = {self.config.hung_after_s:g})")

    def _run(self) -> None:
        """Waits for the interval; unblocked by `close`."""
        while not self._stop.wait(self.config.interval_s):
            self.look(time.monotonic())
