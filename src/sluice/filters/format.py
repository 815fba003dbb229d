"""Keep responses whose text has a given form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sluice.filters.base import RolloutFilter
from sluice.types import Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class Format(RolloutFilter):
    """Keeps a response whose text matches a regular expression (Python's `re`; put flags into the pattern, as in `(?s)`).

    The text is what the policy wrote; that of several turns is joined by line breaks.
    """

    name = "format"

    pattern: str
    full: bool = False  # True: the whole text must match; False: some part of it
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            got = f"{self.pattern!r} ({error})"
            raise self.context.wrong("pattern", "a regular expression that compiles", got, "correct it") from error
        object.__setattr__(self, "_compiled", compiled)

    def rule(self, rollout: Rollout) -> Verdict:
        """Drop what does not match."""
        text = "\n".join([turn.text for turn in rollout.turns])
        match = self._compiled.fullmatch(text) if self.full else self._compiled.search(text)
        return self.drop("format") if match is None else self.keep()
