"""What every analysis of the gate works on: the same N groups as they stood at several K, and how they ended.

It comes from trajectories (`trajectories.py`), where any K can be looked at, or from a file of features (`features.py`), which has some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.errors import AnalysisError
from sluice.gate.divergence import SIGNALS
from sluice.gate.offline import Bools, RecordedGroups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """N finished groups at several K."""

    keys: tuple[str, ...]  # [N], ascending: who is who, whatever the order of recording
    steps: Mapping[int, RecordedGroups]  # by K, ascending; the same groups in the same order
    is_running: Mapping[int, Bools]  # by K: [N] groups that a running gate would decide on
    outcomes: tuple[str, ...]  # [N] "mixed", "all fail", "all succeed" or "all equal"
    horizon: int  # most environment steps of a trajectory
    group_size: int | None  # None: not known
    notes: tuple[str, ...] = ()  # what was left out of the files, and what else a reader of the results must know

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def ks(self) -> tuple[int, ...]:
        """The K that can be looked at."""
        return tuple(self.steps)

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that are known at every K, in their usual order."""
        return tuple(name for name in SIGNALS if all(name in groups.signals for groups in self.steps.values()))

    @property
    def zero_variance(self) -> Bools:
        """[N] groups whose rewards are all equal."""
        return self.first.zero_variance

    @property
    def first(self) -> RecordedGroups:
        """The groups at the smallest K: for what is the same at all of them."""
        return next(iter(self.steps.values()))

    def at(self, k: int) -> RecordedGroups:
        """The groups at K. Raises `AnalysisError` for a K that is not there."""
        if k not in self.steps:
            raise AnalysisError(f"k: expected one of {', '.join(map(str, self.ks))}, got {k} - only these are in the recording")
        return self.steps[k]

    def cuts(self, signal: str, k: int, threshold: float) -> Bools:
        """[N] what a running gate would cut."""
        groups = self.at(k)
        if signal not in groups.signals:
            raise AnalysisError(f"signal: expected one of {', '.join(groups.signals)}, got {signal!r} - the recording has no other")
        cut: Bools = (groups.signals[signal] < threshold) & self.is_running[k]
        return cut

    def take(self, chosen: npt.NDArray[Any]) -> Recorded:
        """Some of the groups, by mask or by index."""
        index = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        return Recorded(
            keys=tuple(self.keys[i] for i in index.tolist()),
            steps={k: groups.take(index) for k, groups in self.steps.items()},
            is_running={k: running[index] for k, running in self.is_running.items()},
            outcomes=tuple(self.outcomes[i] for i in index.tolist()),
            horizon=self.horizon,
            group_size=self.group_size,
            notes=self.notes,
        )

    def deciding_on_all(self) -> Recorded:
        """The same, with groups decided on that a running gate leaves alone: the convention of the published figures."""
        everywhere = {k: np.ones(len(self), dtype=np.bool_) for k in self.steps}
        return Recorded(
            keys=self.keys,
            steps=self.steps,
            is_running=everywhere,
            outcomes=self.outcomes,
            horizon=self.horizon,
            group_size=self.group_size,
            notes=self.notes,
        )
