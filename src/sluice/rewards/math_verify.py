"""`math_verify`: the response holds an expression that is mathematically equal to the reference (the math-verify package).

`1/2` equals `0.5`, `x+1` equals `1+x`. The package's own time limits are switched off: they work by signals, which a thread cannot use, and
they turn a time-out into "wrong". The time limit of the domain ends an endless simplification instead, and says so.
"""

from __future__ import annotations

import importlib
import logging
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final

from pydantic import Field

from sluice.rewards.base import BuiltinVerifier, reference_answer
from sluice.rewards.numeric import parse_number
from sluice.types import Task

REMEMBERED_REFERENCES: Final = 1024  # parsed reference answers kept per worker: the members of a group share one
_DELIMITERS: Final = ("$", "\\(", "\\[", "\\boxed")


class MathVerify(BuiltinVerifier):
    """1.0 when the response's last extractable expression equals the reference, else 0.0; one without any earns 0.0.

    The reference may be a bare number, a bare LaTeX expression or text with `$...$`. One that cannot be read is an error, never a 0.
    """

    package: ClassVar[str | None] = "math_verify"

    whole_response: bool = False  # the response is one bare expression without `$...$`; else expressions are looked for in running text
    float_rounding: int = Field(6, ge=0)  # decimal places at which two decimal numbers are compared
    strict: bool = True  # variable names and the kind of brackets matter

    def __call__(self, task: Task, response: str) -> float:
        """Parse both, compare; the reference goes first, the comparison is not symmetric."""
        answer = reference_answer(task, "math_verify")
        reference = self._reference(answer)
        if not reference:
            raise ValueError(
                f"verifier 'math_verify' expects a mathematical expression as reference answer, task {task.task_id!r} has {answer!r} - "
                f"use another verifier for this domain"
            )
        text = f"${response.strip()}$" if self.whole_response and not any(mark in response for mark in _DELIMITERS) else response
        found = self._package.parse(text, parsing_timeout=None)
        return float(self._package.verify(reference, found, float_rounding=self.float_rounding, strict=self.strict, timeout_seconds=None))

    def preload(self) -> None:
        """Import the package and build its grammar, which the first comparison would otherwise pay for."""
        self._package.verify(self._reference("\\frac{1}{2}"), self._package.parse("$0.5$", parsing_timeout=None), timeout_seconds=None)

    @cached_property
    def _package(self) -> Any:
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).addFilter(_is_news)
        return importlib.import_module("math_verify")

    @cached_property
    def _reference(self) -> Any:
        return lru_cache(REMEMBERED_REFERENCES)(self._parsed_reference)

    def _parsed_reference(self, text: str) -> Any:
        number = parse_number(text)
        if number is not None:  # the package reads a bare 1e5 as 1
            return [importlib.import_module("sympy").Rational(number.numerator, number.denominator)]
        bare = not any(mark in text for mark in _DELIMITERS)  # the package reads a bare 2x+1 as 2
        return self._package.parse(f"${text.strip()}$" if bare else text, parsing_timeout=None)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log line says more than that the package's own time limit is off."""
    return not str(record.msg).startswith("Timeout is disabled")
