"""What to write in place of a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str:
    """Advice for the end of a message: the nearest valid name, or all of them."""
    names = sorted(known)
    if not names:
        return "there is none: leave it out"
    close = get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {names}"
