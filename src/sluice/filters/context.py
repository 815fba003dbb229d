"""What a filter knows besides its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterContext:
    """Where a filter stands in the configuration and what it is told from outside."""

    where: str  # path of its configuration, for messages: "rewards.math.query_filter_config"
    metric: str | None = None  # None: the raw task reward; else the named metric
    min_members: int | None = None  # members with a reward that still make a group; None: all of them
    group_size: int | None = None  # as configured; None: unknown, each group is taken as whole

    def wrong(self, argument: str, expected: str, got: object, advice: str) -> ConfigError:
        """A bad argument, told in full: where, what was expected, what came, what to do."""
        return ConfigError(f"{self.where}.filter_args.{argument} must be {expected}, got {got} - {advice}")

    def refuse_singletons(self, name: str) -> ConfigError:
        """A filter on spread, where no group can have any."""
        return ConfigError(
            f"{self.where}.type is {name}, which compares the members of a group, and needs num_return_sequences_in_group >= 2, got 1 - "
            "raise num_return_sequences_in_group, or use no_filter or mean_filter"
        )
