"""What a filter knows besides its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sluice.errors import ConfigError

Mode: TypeAlias = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterContext:
    """Where a filter stands in the configuration and what it is told from outside."""

    where: str  # path of its configuration, for messages: "rewards.math.query_filter_config"
    metric: str | None = None  # None: the raw task reward; else the named metric
    min_members: int | None = None  # members with a reward that still make a group; None: all of them
    group_size: int | None = None  # as configured; None: unknown, each group is taken as whole
    group_size_key: str = "num_return_sequences_in_group"  # the setting that it comes from, for messages
    mode: Mode | None = None  # of a filter on groups of trajectories: what they are sampled for; None: it is none of these

    def wrong(self, argument: str, expected: str, got: object, advice: str) -> ConfigError:
        """A bad argument, told in full: where, what was expected, what came, what to do."""
        return ConfigError(f"{self.where}.filter_args.{argument} must be {expected}, got {got} - {advice}")

    def refuse_singletons(self, name: str) -> ConfigError:
        """A filter on spread, where no group can have any."""
        return ConfigError(
            f"{self.where}.type is {name}, which compares the members of a group, and needs {self.group_size_key} >= 2, got 1 - "
            f"raise {self.group_size_key}, or use no_filter or mean_filter"
        )
