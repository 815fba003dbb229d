"""Warnings that a room tells by `logging` (a filter, the reward pool) reach the display and run.db of the run under way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self


class LogToRun(logging.Handler):
    """While inside, what the `sluice` loggers warn of goes to `tell` and nowhere else."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._logger = logging.getLogger("sluice")
        self._propagated = True

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one warning; a journal that is full must not break whoever logs."""
        try:
            self._tell(record.getMessage())
        except Exception:  # noqa: BLE001 - logging's own way: reported on standard error, never raised
            self.handleError(record)

    def __enter__(self) -> Self:
        self._propagated, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
