"""What is raised when something that must hold does not."""

from __future__ import annotations

from collections.abc import Iterable


class Violation(Exception):
    """Something that must hold does not. groups: those it is about."""

    def __init__(self, message: str, groups: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.groups = tuple(groups)
