"""Which rows are let through before anything is generated: `dataset_filter` by source and difficulty. Validation never passes here."""

from __future__ import annotations

from sluice.config.models import DatasetFilterConfig
from sluice.tasks.base import Row


class DatasetFilter:
    """Judges rows by where they come from and how hard they are said to be; `num_samples` is applied last, by build.py."""

    def __init__(self, settings: DatasetFilterConfig) -> None:
        self._sources = frozenset(settings.source)
        self._low = settings.min_difficulty
        self._high = settings.max_difficulty

    def reason_to_drop(self, row: Row, source: str) -> str | None:
        """One of "source", "no_difficulty" and "difficulty"; None keeps. Bounds are inclusive; without bounds a row needs no difficulty."""
        if self._sources and source not in self._sources:
            return "source"
        if self._low is None and self._high is None:
            return None
        if row.difficulty is None:
            return "no_difficulty"
        if (self._low is not None and row.difficulty < self._low) or (self._high is not None and row.difficulty > self._high):
            return "difficulty"
        return None
