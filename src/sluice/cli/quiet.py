"""The display of `sluice train --quiet`: warnings and errors, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from sluice.cli.progress import Level
    from sluice.execution.validation import ValidationResult


class QuietDisplay:
    """Takes everything that `ProgressDisplay` takes, and shows what needs a person."""

    def start(self, total_steps: int) -> None:
        """Not shown."""

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Not shown."""

    def filling(self, kept: int, needed: int, running: int) -> None:
        """Not shown."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Not shown."""

    def validation(self, step: int, results: Mapping[str, ValidationResult]) -> None:
        """Not shown: the summary at the end has the first and the last one."""

    def message(self, text: str, level: Level = "info") -> None:
        """Warnings and errors, on standard error."""
        if level != "info":
            typer.echo(f"{level}: {text}", err=True)

    def stop(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
