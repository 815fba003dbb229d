"""Whole groups of finished trajectories as arrays, and what the gate would have seen of them at any K.

Groups stand in the order of their keys and members in the order of their names, so that it does not matter in which order they were
recorded. Actions are numbered within their group: they are never compared across groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from sluice.analysis.prefixes import Codes, Floats, Ints, signals_at
from sluice.analysis.recorded import Recorded
from sluice.errors import AnalysisError
from sluice.gate.offline import Bools, RecordedGroups

MOST_REWARD: Final = 1e150  # whose square a float can hold
LARGEST_K: Final = 100_000  # environment steps after which groups are looked at: what they fill in memory grows with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One finished trajectory of a group."""

    actions: Sequence[Hashable]  # one per environment step
    observations: Sequence[Hashable] | None  # what it saw before each action; None: not known
    reward: float | None  # None: delivered, but does not count in the statistics of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """One whole group that ran to its end."""

    key: str  # unique over everything that is read together
    members: Sequence[Member]
    task_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """N groups of G members, T environment steps at most."""

    keys: tuple[str, ...]  # [N], ascending
    task_types: tuple[str | None, ...]  # [N]
    actions: Codes  # [N, G, T] numbered from 1 within the group; 0: the member has ended
    observations: Codes | None  # [N, G, T] the same of what it saw before each action; None: not known of all groups
    lengths: Ints  # [N, G] environment steps
    rewards: Floats  # [N, G]; NaN: does not count

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def group_size(self) -> int:
        """G."""
        size: int = self.lengths.shape[1]
        return size

    @classmethod
    def of_groups(cls, groups: Iterable[TrajectoryGroup]) -> Trajectories:
        """From groups of one size. Raises `AnalysisError` for none, for two of one key, and for different sizes."""
        ordered = sorted(groups, key=lambda group: group.key)
        if not ordered:
            raise AnalysisError("expected at least one whole group, got none - record some")
        keys = tuple(group.key for group in ordered)
        if len({*keys}) < len(keys):
            twice = next(one for one, other in pairwise(keys) if one == other)
            raise AnalysisError(f"expected every group once, got {twice} again - read every recording once")
        sizes = {len(group.members) for group in ordered}
        if len(sizes) > 1 or min(sizes) < 2:
            raise AnalysisError(f"expected groups of one size of at least 2, got sizes {sorted(sizes)} - analyse each size apart")
        lengths = np.array([[len(member.actions) for member in group.members] for group in ordered])
        is_seen = all(member.observations is not None for group in ordered for member in group.members)
        shape = (*lengths.shape, max(1, int(lengths.max())))
        actions = np.zeros(shape, dtype=np.int32)
        observations = np.zeros(shape, dtype=np.int32) if is_seen else None
        for n, group in enumerate(ordered):
            _number(actions[n], [member.actions for member in group.members])
            if observations is not None:
                _number(observations[n], [(member.observations or ())[: len(member.actions)] for member in group.members])
        for group in ordered:
            for member in group.members:
                if member.reward is not None and abs(member.reward) > MOST_REWARD:
                    raise AnalysisError(
                        f"group {group.key}: expected rewards up to {MOST_REWARD:g}, got {member.reward:g} - their variance would be no "
                        "number: scale them, or leave the group out"
                    )
        rewards = [[np.nan if member.reward is None else member.reward for member in group.members] for group in ordered]
        return cls(
            keys=keys,
            task_types=tuple(group.task_type for group in ordered),
            actions=actions,
            observations=observations,
            lengths=lengths,
            rewards=np.array(rewards, dtype=np.float64),
        )

    def recorded(self, ks: Sequence[int], horizon: int, notes: Sequence[str] = ()) -> Recorded:
        """What the gate would have seen at each K, and how the groups ended."""
        if int(self.lengths.max()) > horizon:
            raise AnalysisError(
                f"horizon: expected at least the longest trajectory, that is {self.lengths.max()} steps, got {horizon} - raise it"
            )
        if max(ks, default=0) > LARGEST_K:
            raise AnalysisError(f"k: expected steps up to {LARGEST_K}, got {max(ks)} - choose smaller ones with --k")
        low, high = _ends(self.rewards)
        is_equal = low == high
        variance = np.where(is_equal, 0.0, np.maximum(np.nanvar(self.rewards, axis=1), np.finfo(np.float64).tiny))
        found = signals_at(self.actions, self.lengths, ks, self.observations)
        types = self.task_types if any(self.task_types) else None
        return Recorded(
            keys=self.keys,
            horizon=horizon,
            group_size=self.group_size,
            outcomes=_outcomes(low, high),
            steps={
                k: RecordedGroups(
                    signals=found[k],
                    zero_variance=is_equal,
                    k=k,
                    horizon=horizon,
                    reward_var=variance,
                    lengths=self.lengths,
                    task_types=types,
                )
                for k in sorted(found)
            },
            is_running={k: self.is_running(k) for k in sorted(found)},
            notes=tuple(notes),
        )

    def is_running(self, k: int) -> Bools:
        """[N] groups that a running gate decides on at K: not all members have ended by then, and those that have agree in their rewards.

        As if all members stepped together: in a run some are ahead, and may have ended by the time the slowest gets to K.
        """
        has_ended = self.lengths <= k
        low, high = _ends(np.where(has_ended, self.rewards, np.nan))
        # NaN where nobody with a reward has ended: then nothing differs.
        running: Bools = ~has_ended.all(axis=1) & ~(low < high)
        return running

    def take(self, chosen: npt.NDArray[np.int64]) -> Trajectories:
        """The groups at these positions."""
        return Trajectories(
            keys=tuple(self.keys[i] for i in chosen.tolist()),
            task_types=tuple(self.task_types[i] for i in chosen.tolist()),
            actions=self.actions[chosen],
            observations=None if self.observations is None else self.observations[chosen],
            lengths=self.lengths[chosen],
            rewards=self.rewards[chosen],
        )

    def take_members(self, chosen: npt.NDArray[np.int64]) -> Trajectories:
        """Smaller groups: [N, g] positions of the members that stay. Groups in which fewer than two rewards count are left out."""
        rewards = np.take_along_axis(self.rewards, chosen, axis=1)
        smaller = Trajectories(
            keys=self.keys,
            task_types=self.task_types,
            actions=np.take_along_axis(self.actions, chosen[:, :, None], axis=1),
            observations=None if self.observations is None else np.take_along_axis(self.observations, chosen[:, :, None], axis=1),
            lengths=np.take_along_axis(self.lengths, chosen, axis=1),
            rewards=rewards,
        )
        counts = np.isfinite(rewards).sum(axis=1) >= 2
        return smaller if counts.all() else smaller.take(np.flatnonzero(counts))


def _number(codes: Codes, members: Sequence[Sequence[Hashable]]) -> None:
    """Write the values of one group as numbers from 1, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    for row, values in zip(codes, members, strict=True):
        row[: len(values)] = [numbers.setdefault(value, len(numbers) + 1) for value in values]


def _ends(rewards: Floats) -> tuple[Floats, Floats]:
    """[N] smallest and largest reward that counts; NaN where none does."""
    is_missing = np.isnan(rewards)
    low = np.where(is_missing, np.inf, rewards).min(axis=1)
    high = np.where(is_missing, -np.inf, rewards).max(axis=1)
    is_empty = is_missing.all(axis=1)
    return np.where(is_empty, np.nan, low), np.where(is_empty, np.nan, high)


def _outcomes(low: Floats, high: Floats) -> tuple[str, ...]:
    """How each group ended; "all fail" and "all succeed" are equal rewards at the lowest and the highest reward that was seen at all."""
    worst, best = float(low.min()), float(high.max())

    def outcome(least: float, most: float) -> str:
        if least != most:
            return "mixed"
        if worst == best:
            return "all equal"
        return "all fail" if most == worst else "all succeed" if least == best else "all equal"

    return tuple(outcome(least, most) for least, most in zip(low.tolist(), high.tolist(), strict=True))
