"""The keys of the gate: which running groups of trajectories are cut, and which single trajectories are stopped."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from sluice.config.models import MOST_GROUPS_LAUNCHED, FilePath, Section

MOST_ENV_STEPS: Final = 1_000_000  # of one trajectory: far above any horizon
MOST_SCALE: Final = 100.0  # of a threshold: every signal is below 1 long before

Signal = Literal[
    "prefix_edit_distance_mean",
    "action_bigram_jaccard_mean",
    "unique_prefix_ratio",
    "unique_action_ratio",
    "action_entropy",
    "obs_unique_ratio",
    "termination_fraction",
]


class FutilityConfig(Section):
    """When a single trajectory gets nowhere and is stopped. Each sign is off unless it is given; the first one that shows stops it."""

    steps: int | None = Field(default=None, ge=1, le=MOST_ENV_STEPS)  # in a row whose observation it had had before
    loops: int | None = Field(default=None, ge=2, le=MOST_ENV_STEPS)  # times that it took one action after one observation
    invalid_actions: int | None = Field(default=None, ge=1, le=MOST_ENV_STEPS)  # in a row that are not admissible
    progress_steps: int | None = Field(default=None, ge=1, le=MOST_ENV_STEPS)  # in a row without progress, as the environment says
    model: FilePath | None = None  # in place of the signs: a learned rule (`LearnedRule.save`); None: the signs
    floor: float = Field(default=0.95, gt=0, lt=1)  # of the model: least share of its stops that are right
    audit_rate: float = Field(default=0.1, ge=0, le=1)  # chance that a member runs on and tells whether its stop would have been right
    window: int = Field(default=500, ge=1, le=MOST_GROUPS_LAUNCHED)  # audited members that count, the newest ones
    hold_precision: float | None = Field(default=None, gt=0, lt=1)  # nobody is stopped while audits are below this for certain


class GateConfig(Section):
    """Looks at running groups after `k` environment steps and cuts those whose members have not parted; stops futile trajectories."""

    k: int | None = Field(default=None, ge=1, le=MOST_ENV_STEPS)  # environment step at which a group is looked at; None: none is
    threshold: float = Field(default=0.12, ge=0, le=1)  # a group is cut when its signal is below; the published value: calibrate it
    signal: Signal = "prefix_edit_distance_mean"
    rule: dict[str, Any] | None = None  # in place of signal and threshold: its type and its arguments
    model: FilePath | None = None  # in place of k and its rule: a learned rule (`LearnedRule.save`), which looks at several steps
    floor: float = Field(default=0.95, gt=0, lt=1)  # of the model: least share of its cuts that are right
    on_cut: Literal["replace", "drop"] = "replace"  # another group in its place, or a batch that is smaller by it
    barrier: bool = False  # members that have come to step k wait until their group is decided on
    shadow: bool = False  # only record: nothing is cut or stopped, and everything tells how it would have gone
    audit_rate: float = Field(default=0.1, ge=0, le=1)  # chance that a group that would be cut runs on and tells
    hold_precision: float | None = Field(default=None, gt=0, lt=1)  # floor under the precision of cuts, held by moving the threshold
    most_scale: float = Field(default=2.0, ge=0.05, le=MOST_SCALE)  # how far above its value that may move, as a factor
    window: int = Field(default=200, ge=1, le=MOST_GROUPS_LAUNCHED)  # audited groups that count, the newest ones
    confidence: float = Field(default=0.95, gt=0, lt=1)  # of all intervals
    futility: FutilityConfig | None = None  # None: no trajectory is stopped

    @property
    def cuts_groups(self) -> bool:
        """Whether groups are looked at."""
        return self.k is not None or self.model is not None
