"""Drop groups of which a member met a fault of its environment: it hung, or it failed."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, Final

from sluice.filters.base import MemberFilter
from sluice.types import Flag, Rollout

# The words in which a failure tells of its environment: the kinds of `EnvFault`, and a trajectory that ran out of time of its own.
TIMEOUTS: Final = frozenset({"env_timeout", "trajectory_timeout"})
FAILURES: Final = frozenset({"env_failed", "env_died", "env_closed"})


@dataclass(frozen=True, kw_only=True)
class EnvFaultFilter(MemberFilter):
    """Drops a group with a member that has the flag, or that failed for one of the reasons.

    A failure that the policy provoked is none of the environment: its low reward is real, and it stays. A flag counts whoever set it.
    """

    flag: ClassVar[Flag]
    failures: ClassVar[Set[str]]

    def is_faulty(self, rollout: Rollout) -> bool:
        """Whether its environment let it down."""
        if self.flag in rollout.flags:
            return True
        failure = rollout.failure
        return failure is not None and failure.cause == "infrastructure" and failure.reason in self.failures


@dataclass(frozen=True, kw_only=True)
class EnvTimeout(EnvFaultFilter):
    """Drops a group with a member whose environment gave no answer in time, or whose trajectory took too long as a whole."""

    name = "env_timeout"
    flag = "env_timeout"
    failures = TIMEOUTS


@dataclass(frozen=True, kw_only=True)
class EnvFailed(EnvFaultFilter):
    """Drops a group with a member whose environment raised, answered with nonsense, died, or was closed under it."""

    name = "env_failed"
    flag = "env_failed"
    failures = FAILURES
