"""The trainer's side of the shell: it asks for batches, and tells what an optimiser step made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sluice.execution import LocalShell
from sluice.pipeline.loop_thread import LoopThread, Stopped
from sluice.types import Batch


class Feed:
    """A `BatchSource`: one batch of `groups` groups at a time, from the shell on its loop. None when the data end or the run is stopped."""

    def __init__(self, loop: LoopThread, shell: LocalShell, groups: int) -> None:
        self._loop = loop
        self._shell = shell
        self._groups = groups
        self.batch: Batch | None = None  # the one being trained
        self.filling: Mapping[str, float] = {}  # metrics of its filling
        self.fill_s = 0.0

    def next_batch(self) -> Batch | None:
        """Block until the next batch is full. Raises what broke the run."""
        started = time.monotonic()
        try:
            batch, self.filling = self._loop.call(self._shell.next_batch(self._groups))
        except Stopped:
            return None
        self.fill_s = time.monotonic() - started
        self.batch = batch
        return batch if batch.groups else None

    def step_done(self, step: int, *, useful_groups: int, useful_tokens: int) -> None:
        """The batch has been trained on; its groups leave as trained."""
        self._loop.do(lambda: self._shell.step_advanced(step, useful_groups=useful_groups, useful_tokens=useful_tokens))
