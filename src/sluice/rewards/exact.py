"""`exact`: the response is the reference answer, letter for letter."""

from __future__ import annotations

import re
from typing import Final

from sluice.rewards.base import BuiltinVerifier, reference_answer
from sluice.types import Task

_SPACE: Final = re.compile(r"\s+")


class Exact(BuiltinVerifier):
    """1.0 when response and reference are the same text after the chosen simplifications, else 0.0."""

    strip: bool = True  # leave out white space at both ends
    collapse_whitespace: bool = False  # any run of white space counts as one space
    ignore_case: bool = False

    def __call__(self, task: Task, response: str) -> float:
        """Compare the whole response."""
        return float(self._simplified(response) == self._simplified(reference_answer(task, "exact")))

    def _simplified(self, text: str) -> str:
        text = text.strip() if self.strip else text
        text = _SPACE.sub(" ", text) if self.collapse_whitespace else text
        return text.casefold() if self.ignore_case else text
