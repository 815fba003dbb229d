"""What became of trajectories and where their time went, counted since the start."""

from __future__ import annotations

from collections import Counter

from sluice.execution.trajectory import Trajectory

TIMES = ("engine", "environment", "seat", "barrier", "own")  # where the time of a trajectory goes; their shares sum to 1


class TrajectoryCounts:
    """Sums over the trajectories that have ended, however they did."""

    def __init__(self) -> None:
        """None has ended."""
        self._ended: Counter[str] = Counter()
        self._turns = self._env_steps = self._truncated_turns = self._judged = self._admissible = self._with_success = self._successes = 0
        self._seconds = dict.fromkeys(TIMES, 0.0)

    def add(self, one: Trajectory) -> None:
        """One has ended."""
        self._ended[one.finish_reason or "failed"] += 1
        self._turns += len(one.turns)
        self._env_steps += one.env_steps
        self._truncated_turns += one.truncated_turns
        self._judged += one.judged_actions
        self._admissible += one.admissible_actions
        if one.success is not None:
            self._with_success += 1
            self._successes += one.success
        for name, seconds in zip(TIMES, times_of(one), strict=True):
            self._seconds[name] += seconds

    def metrics(self) -> dict[str, float]:
        """Under names that begin with `rollout/`."""
        ended = self._ended.total()
        out = {
            "rollout/trajectories": float(ended),
            "rollout/env_steps": float(self._env_steps),
            "rollout/truncated_turns": float(self._truncated_turns),
        }
        out |= {f"rollout/ended/{reason}": float(count) for reason, count in sorted(self._ended.items())}
        if ended:
            out["rollout/turns/mean"] = self._turns / ended
        if self._judged:
            out["rollout/admissible_share"] = self._admissible / self._judged
        if self._with_success:
            out["rollout/success_share"] = self._successes / self._with_success
        whole = sum(self._seconds.values())
        if whole:
            out |= {f"rollout/time_share/{name}": seconds / whole for name, seconds in self._seconds.items()}
        return out


def times_of(one: Trajectory) -> tuple[float, float, float, float, float]:
    """Seconds in the engine, in the environment, waiting for a seat or a worker, for a decision of the gate, and in code of our own.

    Together they are its whole time.
    """
    own = max(0.0, one.total_s - one.generating_s - one.environment_s - one.waiting_s - one.held_s)  # not below 0 by rounding
    return one.generating_s, one.environment_s, one.waiting_s, one.held_s, own
