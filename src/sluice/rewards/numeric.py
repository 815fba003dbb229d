"""`numeric`: the number in the response equals the reference, exactly or within a tolerance.

Numbers are read as exact fractions, so that `0.1` equals `1/10` and no rounding decides about a reward. What is a number: digits with an
optional sign, thousands separators (`1,234,567`), decimal point, exponent (`1.5e3`), and a quotient of two such numbers (`3/4`).
Infinity and NaN are not numbers and equal nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, Literal

from pydantic import Field

from sluice.rewards.base import BuiltinVerifier, reference_answer
from sluice.types import Task

LONGEST_NUMBER: Final = 400  # characters; a longer one is no number: its arithmetic would cost more than any honest answer
LARGEST_EXPONENT: Final = 400  # beyond the range of floats (308); `1e999999999` as a fraction would fill the memory

_UNSIGNED: Final = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NUMBER: Final = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z_)\]])[-+−])?"  # a sign right after a digit or a bracket is an operator: 5-3 ends with 3
    rf"(?<![0-9A-Za-z_])(?P<over>{_UNSIGNED})(?:\s{{0,2}}/\s{{0,2}}(?P<under>[-+−]?{_UNSIGNED}))?"
)


class Numeric(BuiltinVerifier):
    """1.0 when |number - reference| <= max(abs_tolerance, rel_tolerance * |reference|), else 0.0; a response without a number earns 0.0."""

    which: Literal["last", "only"] = "last"  # only: a response with several numbers earns 0.0
    abs_tolerance: float = Field(0.0, ge=0)
    rel_tolerance: float = Field(0.0, ge=0)

    def __call__(self, task: Task, response: str) -> float:
        """Compare the last, or only, number of the response."""
        reference = parse_number(reference_answer(task, "numeric"))
        if reference is None:
            raise ValueError(
                f"verifier 'numeric' expects a finite number as reference answer, task {task.task_id!r} has {task.answer!r} - "
                f"use another verifier for this domain"
            )
        found = list(_NUMBER.finditer(response))
        if not found or (self.which == "only" and len(found) > 1):
            return 0.0
        number = _value(found[-1])
        if number is None:
            return 0.0
        if number == reference:
            return 1.0
        tolerance = max(Fraction(self.abs_tolerance), Fraction(self.rel_tolerance) * abs(reference))
        return float(abs(number - reference) <= tolerance)


def parse_number(text: str) -> Fraction | None:
    """The number that the whole text is, white space apart; None when it is none, not finite, or absurdly long."""
    match = _NUMBER.fullmatch(text.strip())
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > LONGEST_NUMBER:
        return None
    over, under = _fraction(match["over"]), _fraction(match["under"]) if match["under"] else Fraction(1)
    if over is None or not under:
        return None
    return -over / under if match["sign"] in ("-", "−") else over / under


def _fraction(text: str) -> Fraction | None:
    text = text.replace(",", "").replace("−", "-")
    exponent = re.search(r"[eE]([-+]?[0-9]+)", text)
    if exponent and abs(int(exponent[1])) > LARGEST_EXPONENT:
        return None
    return Fraction(text)
