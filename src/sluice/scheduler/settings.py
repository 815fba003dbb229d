"""The settings of the machine, as it uses them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sluice.types import EMPTY, TruncatedPolicy

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The settings of the machine, as it uses them."""

    group_size: int
    seed: int = 0
    redundancy: int = 0  # members of a group beyond group_size that may run; the first group_size to deliver make the group
    fill: Literal["refill", "shrink"] = "refill"
    collect: Literal["as_finished", "in_order"] = "as_finished"
    max_resample_rounds: int = 10  # round 1 is the groups asked for
    max_groups_per_batch: int | None = None
    max_response_rounds: int = 5  # the first generation and the rounds of replacing members
    on_exhausted: Literal["raise", "shrink", "keep_low_information"] = "raise"
    min_members: int | None = None  # None: group_size
    truncated: TruncatedPolicy = "mask"
    on_member_failure: Literal["replace", "judge"] = "replace"
    max_additional_running_prompts: int = 0  # groups beyond the quota that may run at once; 0 without is_use_additional_prompts
    async_generation_ratio: float = 0.0
    on_weight_update: Literal["finish", "restart", "continue"] = "finish"
    surplus: Literal["carry", "discard"] | None = None  # None: discard when synchronous, else carry
    max_staleness: int | None = None  # None: ceil(async_generation_ratio)
    domain_staleness: Mapping[str, int] = field(default_factory=lambda: EMPTY)  # by domain, where it has its own
    domain_shares: Mapping[str, float] | None = None  # None: domains come as the source gives them
    mix_on: Literal["kept", "drawn"] = "kept"
    absent_after_batches: int = 10  # batches in a row without some domain, after which that is said
    group_timeout_s: float | None = None  # from launch to verdict
    requeue: bool = True
    quarantine_after: int | None = None
    stall_warning_s: float | None = None
    has_user_loop: bool = False  # groups are owned by a user-defined loop

    def __post_init__(self) -> None:
        for name in ("group_size", "max_resample_rounds", "max_response_rounds", "absent_after_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"SchedulerConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.redundancy < 0:
            raise ValueError(f"SchedulerConfig.redundancy must be at least 0, got {self.redundancy}")
        if self.min_members is not None and not 1 <= self.min_members <= self.group_size:
            raise ValueError(f"SchedulerConfig.min_members must lie between 1 and group_size ({self.group_size}), got {self.min_members}")
        for name in ("max_groups_per_batch", "quarantine_after"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"SchedulerConfig.{name} must be at least 1 or None, got {value}")
        for name in ("group_timeout_s", "stall_warning_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"SchedulerConfig.{name} must be above 0 or None, got {value}")
        ahead = math.ceil(self.async_generation_ratio)
        for domain, age in self.domain_staleness.items():
            if age < ahead:
                raise ValueError(f"SchedulerConfig.domain_staleness[{domain!r}] must be at least ceil(async ratio) ({ahead}), got {age}")
        if self.surplus == "carry" and self.staleness < 1:
            raise ValueError("SchedulerConfig.surplus 'carry' needs a max_staleness of at least 1, got 0 - carried groups would all expire")
        if self.surplus == "discard" and self.async_generation_ratio > 0:
            raise ValueError("SchedulerConfig.surplus 'discard' needs async_generation_ratio 0 - all that is prepared ahead would be lost")

    @property
    def staleness(self) -> int:
        """Oldest age at which a group is trained, in steps."""
        return math.ceil(self.async_generation_ratio) if self.max_staleness is None else self.max_staleness

    @property
    def is_async(self) -> bool:
        """Whether groups run while the trainer steps."""
        return self.async_generation_ratio > 0

    @property
    def goes_by_ticket(self) -> bool:
        """Whether a batch is made of the groups launched for it, and not of the first ones to finish."""
        return self.fill == "shrink" or self.collect == "in_order"
