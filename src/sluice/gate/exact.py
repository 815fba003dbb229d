"""The exact stop: members that have done and seen the same, and will go on doing the same, end with the same reward.

Where the environment is deterministic (the same actions from the same start give the same observations and rewards) and its members began
with the same problem, two members with the same actions are in the same state. Where the policy then goes on the same way (it is greedy, or
members draw the same random numbers), they stay together to the end. So a group whose members have all done and seen the same is one
trajectory played several times: its rewards are equal for certain, and it is cut at once.

Nothing of it can be seen in the trajectories: that members of a sampling policy have agreed so far says nothing about the next action. So
it acts only where both are declared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sluice.errors import ConfigError

IDENTICAL: Final = "identical_members"
"""Reason of such a cut."""


@dataclass(frozen=True, kw_only=True)
class ExactStop:
    """Declares both conditions. Raises `ConfigError` unless both hold: then the stop would be a guess."""

    deterministic_environment: bool  # the same actions from the same start give the same observations and rewards
    same_continuation: bool  # members that have seen the same do the same: a greedy policy, or members with the same seed

    def __post_init__(self) -> None:
        for name, why in (
            ("deterministic_environment", "an environment that draws anything parts members that have done the same"),
            ("same_continuation", "members of a sampling policy part at any step: use greedy sampling, or do without the exact stop"),
        ):
            if getattr(self, name) is not True:
                raise ConfigError(f"gate.exact.{name}: expected true, got {getattr(self, name)!r} - {why}")
