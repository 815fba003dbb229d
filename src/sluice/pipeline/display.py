"""What a run shows while it goes on: the one door between a run and whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from sluice.execution import ValidationResult


class Display(Protocol):
    """What a run shows while it goes on. All calls are quick, from any thread, and never raise."""

    def start(self, total_steps: int) -> None:
        """The run begins."""

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """What goes on beside filling and training."""

    def filling(self, kept: int, needed: int, running: int) -> None:
        """How full the batch in progress is, in groups."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""

    def validation(self, step: int, results: Mapping[str, ValidationResult]) -> None:
        """A held-out evaluation is done."""

    def message(self, text: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Something to read now."""
