"""Keep responses by the way in which they ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from sluice.filters.base import RolloutFilter
from sluice.filters.naming import nearest
from sluice.types import FinishReason, Rollout, Verdict

KNOWN: tuple[str, ...] = get_args(FinishReason)


@dataclass(frozen=True, kw_only=True)
class FinishReasonFilter(RolloutFilter):
    """Keeps a response whose finish reason is among the allowed ones, or is not among the denied ones. Exactly one of the two is given."""

    name = "finish_reason"

    allowed: list[str] | None = None
    denied: list[str] | None = None

    def __post_init__(self) -> None:
        if (self.allowed is None) == (self.denied is None):
            got = "neither" if self.allowed is None else "both"
            raise self.context.wrong("allowed or denied", "given, one of the two", got, f"list finish reasons out of {list(KNOWN)}")
        argument = "denied" if self.allowed is None else "allowed"
        reasons: list[str] = getattr(self, argument)
        if not reasons:
            raise self.context.wrong(argument, "a list with at least one finish reason", "an empty one", f"choose from {list(KNOWN)}")
        for reason in reasons:
            if reason not in KNOWN:
                raise self.context.wrong(argument, f"a list of finish reasons out of {list(KNOWN)}", repr(reason), nearest(reason, KNOWN))

    def rule(self, rollout: Rollout) -> Verdict:
        """Drop what ended in another way."""
        reason = rollout.finish_reason
        if self.allowed is not None:
            is_kept = reason in self.allowed
        else:
            is_kept = self.denied is not None and reason not in self.denied
        return self.keep() if is_kept else self.drop("finish_reason")
