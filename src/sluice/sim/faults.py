"""What goes wrong in a simulated run: how often, by kind, and how often it really did.

Every fault is drawn from the run's own random numbers, so that a seed repeats it. Kinds:

    worker_crash    a worker dies with all it was generating (WorkerLost)
    engine_error    one generation fails (MemberFailed)
    hang            a generation, or a user-defined loop, never ends; only `group_timeout_s` saves the run
    reward_error    the verifier raises: no reward, with a failure that blames the machinery
    reward_timeout  the verifier does not answer in time: no reward, with a failure that blames the policy
    reward_nan      the verifier answers NaN
    duplicate       a result is told a second time
    late_result     an attempt that was cancelled delivers all the same
    slow_ack        a cancel is acknowledged late; the result may come before
    slow_consumer   the trainer takes far longer than usual for a step
    slow_publish    the new weights reach the engine late
    slow_draw       the task source answers late
    false_tick      a ClockTick that nobody asked for
    kill            the process dies and a new one goes on from the last checkpoint
    stop            the run is shut down in the middle
    cancel          whoever waits for the batch is cancelled (shell only)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

ATTEMPT_KINDS: Final = ("engine_error", "hang", "reward_error", "reward_timeout", "reward_nan")
KINDS: Final = (
    "worker_crash",
    *ATTEMPT_KINDS,
    "duplicate",
    "late_result",
    "slow_ack",
    "slow_consumer",
    "slow_publish",
    "slow_draw",
    "false_tick",
    "kill",
    "stop",
    "cancel",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One death of the process. Both moments are counted in events told to the machine, from the start of that process."""

    saved_at: int  # when the checkpoint is taken from which the next process goes on
    killed_at: int  # >= saved_at
    at_step: bool  # the checkpoint waits for the next StepAdvanced, as a trainer's does


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How often things go wrong in one scenario."""

    # Shares of the attempts that meet this.
    engine_error: float = 0.0
    hang: float = 0.0
    reward_error: float = 0.0
    reward_timeout: float = 0.0
    reward_nan: float = 0.0
    # Shares of the results, cancels, steps, publishes and draws.
    duplicate: float = 0.0
    late_result: float = 0.0
    slow_ack: float = 0.0
    slow_consumer: float = 0.0
    slow_publish: float = 0.0
    slow_draw: float = 0.0
    # Mean seconds between two of them; 0: none.
    worker_crash_s: float = 0.0
    false_tick_s: float = 0.0
    # Single events.
    kills: tuple[Kill, ...] = ()
    stop_at: int | None = None  # events after which the run is shut down
    cancel_at: tuple[float, ...] = ()  # shell: seconds of waiting after which a wait for a batch is cancelled, one a batch; inf: not


class Injector:
    """Draws the faults of one run and counts them."""

    __slots__ = ("_chances", "_random", "counts", "fate_share", "plan")

    def __init__(self, plan: FaultPlan, random: Callable[[], float]) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self._random = random
        shares = accumulate([plan.engine_error, plan.hang, plan.reward_error, plan.reward_timeout, plan.reward_nan])
        self._chances = tuple(zip(shares, ATTEMPT_KINDS, strict=True))
        self.fate_share = self._chances[-1][0]  # of attempts that do not end well

    def fate(self) -> str:
        """What happens to one attempt: a kind of `ATTEMPT_KINDS`, or "" when all goes well. Counted by whoever lets it happen."""
        drawn = self._random()
        if drawn >= self.fate_share:
            return ""
        return next(kind for share, kind in self._chances if drawn < share)

    def happens(self, kind: str, share: float) -> bool:
        """Whether a fault of this kind happens now; counted."""
        if not share or self._random() >= share:
            return False
        self.counts[kind] += 1
        return True
