"""The trainer's side of the shell: it asks for batches, hands weights over, and tells what an optimiser step made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sluice.execution import LocalShell
from sluice.pipeline.loop_thread import LoopThread, Stopped
from sluice.types import Batch


class Feed:
    """A `BatchSource` and a `Publisher`: one batch of `groups` groups at a time, from the shell on its loop; weights to its engine.

    next_batch gives None when the data end or the run is stopped.
    """

    def __init__(
        self,
        loop: LoopThread,
        shell: LocalShell,
        *,
        groups: int,
        total_steps: int,
        steps: int = 0,
        before_first: Callable[[], None] | None = None,
    ) -> None:
        """steps: optimiser steps that are done already. before_first: called when the first batch is wanted, its weights published."""
        self._loop = loop
        self._shell = shell
        self._groups = groups
        self._batches_left = total_steps - steps
        self._before_first = before_first
        self.batch: Batch | None = None  # the one being trained
        self.filling: Mapping[str, float] = {}  # metrics of its filling
        self.fill_s = 0.0

    def next_batch(self) -> Batch | None:
        """Block until the next batch is full. Raises what broke the run."""
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        started = time.monotonic()
        self._batches_left -= 1
        try:
            batch, self.filling = self._loop.call(self._shell.next_batch(self._groups, max(0, self._batches_left)))
        except Stopped:
            return None
        self.fill_s = time.monotonic() - started
        self.batch = batch
        return batch if batch.groups else None

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Give weights to the engine; the machine learns of them at once."""
        self._shell.engine.publish(state, version)
        self._loop.do(lambda: self._shell.weights_updated(version))

    def step_done(self, step: int, *, useful_groups: int, useful_tokens: int) -> None:
        """The batch has been trained on; its groups leave as trained."""
        self._loop.do(lambda: self._shell.step_advanced(step, useful_groups=useful_groups, useful_tokens=useful_tokens))
