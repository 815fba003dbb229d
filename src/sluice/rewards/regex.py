"""`regex`: a pattern finds the answer in the response, or is itself the test."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal

from pydantic import Field

from sluice.config.problems import KeyPath
from sluice.rewards.base import BuiltinVerifier, reference_answer
from sluice.types import Task

_FLAGS = {"ignore_case": re.IGNORECASE, "multiline": re.MULTILINE, "dotall": re.DOTALL}


class Regex(BuiltinVerifier):
    """With a group named `answer`: 1.0 when what it captured is the reference answer. Without: 1.0 when the pattern matches. Else 0.0.

    Patterns are Python's (https://docs.python.org/3/library/re.html). A pattern that backtracks for ever ends by the time limit.
    """

    pattern: str
    match: Literal["first", "last", "full"] = "first"  # which occurrence counts; full: the pattern must cover the whole response
    flags: list[Literal["ignore_case", "multiline", "dotall"]] = Field([])
    strip: bool = True  # leave out white space around what was captured and around the reference
    ignore_case: bool = False  # when comparing with the reference; the pattern has its own flag

    def __call__(self, task: Task, response: str) -> float:
        """Find, and compare."""
        compares = "answer" in self._compiled.groupindex
        reference = self._simplified(reference_answer(task, "regex")) if compares else ""
        if self.match == "full":
            found = self._compiled.fullmatch(response)
        elif self.match == "first":
            found = self._compiled.search(response)
        else:
            found = None
            for found in self._compiled.finditer(response):  # noqa: B007 - the last one stays
                pass
        if found is None:
            return 0.0
        if not compares:
            return 1.0
        captured = found["answer"]
        return float(captured is not None and self._simplified(captured) == reference)

    def preload(self) -> None:
        """Compile the pattern."""
        self._compiled.search("")

    def check(self) -> tuple[KeyPath, str] | None:
        """A pattern that is none, and settings that would do nothing."""
        try:
            groups = re.compile(self.pattern).groupindex
        except (re.error, RecursionError, OverflowError) as err:
            return ("pattern",), f"expected a regular expression, got {self.pattern!r}: {err}"
        if "answer" not in groups and "ignore_case" in self.model_fields_set:
            return (
                "ignore_case",
            ), "has no effect, the pattern has no group named 'answer' to compare - write (?P<answer>...), or use flags"
        return None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        flags = re.RegexFlag(0)
        for name in self.flags:
            flags |= _FLAGS[name]
        return re.compile(self.pattern, flags)

    def _simplified(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
