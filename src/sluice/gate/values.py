"""What actions, observations and the numbers beside them must be, so that two that say the same count as the same.

An action or an observation is any hashable that is compared by value. Refused are values that do not equal another one of the same value:
NaN, alone or inside a tuple, and single numbers of a tensor library, which are hashed by where they lie in memory.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Final

import numpy as np

from sluice.errors import GateError

PLAIN: Final = frozenset({str, int, bool, bytes, type(None)})
"""Types of which every value equals itself and can be hashed."""

_LONGEST: Final = 60  # characters of a value that an error shows


def check_value(value: Any, what: str, who: str = "") -> None:
    """Refuse what cannot be compared by value. what: "an action" or "an observation"; who: whose it is. Raises `GateError`."""
    if type(value) in PLAIN:
        return
    where = f"{who}: " if who else ""
    if not is_hashable(value):
        raise GateError(
            f"{where}expected {what} that is hashable, got {short(value)} ({type(value).__name__}) - give a text, a number or a tuple of "
            "them"
        )
    if not _is_by_value(value):
        raise GateError(
            f"{where}expected {what} that equals another one of the same value, got {short(value)} ({type(value).__name__}) - give plain "
            "numbers (tensor.item()) or a text; what could not be read needs a text of its own"
        )


def is_hashable(value: object) -> bool:
    """Whether a value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def read_truth(value: Any, what: str) -> bool | None:
    """True, False, or None where nobody says; numpy's as well. Raises `GateError` for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise GateError(f"expected {what} as True, False or None, got {short(value)} ({type(value).__name__}) - convert it")


def is_finite_number(value: Any) -> bool:
    """Whether it is a number, of Python or numpy, that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except (OverflowError, ValueError):
        return False


def short(value: object) -> str:
    """A value for an error."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _is_by_value(value: Any) -> bool:
    if type(value) in PLAIN:
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(_is_by_value, value))
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        return False
    return bool(value == value)  # noqa: PLR0124 - NaN
