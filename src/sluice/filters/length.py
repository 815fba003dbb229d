"""Keep responses of a permitted length."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.filters.base import RolloutFilter
from sluice.types import Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class Length(RolloutFilter):
    """Keeps a response when min_tokens <= length <= max_tokens, where length is the number of tokens that the policy sampled.

    Replies of an environment between the turns do not count: the length is a sum over turns, not a span.
    """

    name = "length"

    min_tokens: int | None = None  # inclusive
    max_tokens: int | None = None  # inclusive

    def __post_init__(self) -> None:
        if self.min_tokens is None and self.max_tokens is None:
            raise self.context.wrong("min_tokens or max_tokens", "given", "neither", "set at least one bound")
        for argument, value in (("min_tokens", self.min_tokens), ("max_tokens", self.max_tokens)):
            if value is not None and value < 0:
                raise self.context.wrong(argument, "at least 0", value, "it is a number of tokens")
        if self.min_tokens is not None and self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise self.context.wrong("max_tokens", f"at least min_tokens ({self.min_tokens})", self.max_tokens, "swap them or drop one")

    def rule(self, rollout: Rollout) -> Verdict:
        """Drop what is too short or too long."""
        tokens = rollout.sampled_tokens
        if self.min_tokens is not None and tokens < self.min_tokens:
            return self.drop("too_short", {"tokens": tokens})
        if self.max_tokens is not None and tokens > self.max_tokens:
            return self.drop("too_long", {"tokens": tokens})
        return self.keep({"tokens": tokens})
