"""The settings of dynamic sampling in TRL: the names are those of a recipe's `resampling` and `guard` sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from sluice.config.models import GuardConfig
from sluice.errors import ConfigError
from sluice.filters import DomainFilters, RatioGuard, build_guard
from sluice.gate import Gate, GateKeeper
from sluice.integrations.judging import DOMAIN, FilterLike, query_filter, response_filter
from sluice.scheduler import SchedulerConfig
from sluice.scheduler.gating import MachineGate
from sluice.types import TruncatedPolicy

NO_SPREAD: Final[Mapping[str, Any]] = {"type": "std_filter"}


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """What is dropped, what replaces it, and where that ends. The default is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2):
    groups whose rewards are all equal are replaced by groups of further prompts, until the batch is full.

    Filters read the raw rewards of the trainer's reward functions: their weighted sum, or with `"metric": "accuracy_reward"` that of one
    function by its name, so that a shaping term cannot make a hopeless group look informative. A batch here is what TRL generates at a time
    (`generation_batch_size / num_generations` groups), which is one optimiser step unless `steps_per_generation` says otherwise.
    """

    query_filter: FilterLike = field(default_factory=lambda: dict(NO_SPREAD))  # judges groups: a configuration, or a filter
    response_filter: FilterLike | None = None  # judges single completions; what it drops is sampled again, same prompt; None: nothing is
    guard: GuardConfig | Mapping[str, Any] | None = None  # most of the judged groups that may be dropped; None: no bound
    max_resample_rounds: int = 10  # round 1 is the groups asked for, a replacement is in the round after the group it replaces
    max_groups_per_batch: int | None = None  # sampled for one batch; None: no such bound
    max_response_rounds: int = 5  # the first completion and at most four more in its place
    max_additional_running_prompts: int = 0  # groups sampled ahead of drops that the acceptance rate foretells: fewer rounds, some surplus
    on_exhausted: Literal["raise", "shrink", "keep_low_information"] = "raise"  # at a bound: an error, fewer groups, or dropped groups
    on_member_failure: Literal["replace", "judge"] = "replace"  # a completion without any reward: sample it again, or let filters judge
    min_members: int | None = None  # completions with a reward that make a group; None: all of them
    truncated: TruncatedPolicy | None = None  # None: "mask" with mask_truncated_completions, else "keep"
    gate: Gate | GateKeeper | None = None  # cuts running groups whose members do the same; needs a rollout function that tells their steps
    on_cut: Literal["replace", "drop"] = "replace"  # another group in the place of one that was cut, or a batch that is smaller by it
    requeue: bool = True  # the prompt of a group that was lost without being judged is drawn once more
    quarantine_after: int | None = 3  # such groups of one prompt, after which it is not drawn again; None: never

    @staticmethod
    def given(dynamic_sampling: DynamicSampling | None) -> DynamicSampling:
        """What a trainer was given, None for the default. Raises `ConfigError` for anything else, such as the settings in a mapping."""
        if dynamic_sampling is None:
            return DynamicSampling()
        if not isinstance(dynamic_sampling, DynamicSampling):
            raise ConfigError(
                f"dynamic_sampling: expected a DynamicSampling, got {dynamic_sampling!r} - write DynamicSampling(max_resample_rounds=20), "
                "or DynamicSampling(**settings) with the settings of a mapping"
            )
        return dynamic_sampling

    def scheduler_config(self, *, group_size: int, seed: int, masks_truncated: bool) -> SchedulerConfig:
        """The machine's settings. Raises `ConfigError` for what cannot be."""
        try:
            return SchedulerConfig(
                group_size=group_size,
                seed=seed,
                max_resample_rounds=self.max_resample_rounds,
                max_groups_per_batch=self.max_groups_per_batch,
                max_response_rounds=self.max_response_rounds,
                max_additional_running_prompts=self.max_additional_running_prompts,
                on_exhausted=self.on_exhausted,
                on_member_failure=self.on_member_failure,
                min_members=self.min_members,
                truncated=self.truncated or ("mask" if masks_truncated else "keep"),
                requeue=self.requeue,
                quarantine_after=self.quarantine_after,
            )
        except ValueError as error:
            raise ConfigError(f"DynamicSampling: {error}".replace("SchedulerConfig.", "")) from None

    def filters(self, *, group_size: int) -> Mapping[str, DomainFilters]:
        """The filters by domain, of which there is one. Raises `ConfigError` for what cannot be."""
        query = query_filter(self.query_filter, where="DynamicSampling.query_filter", group_size=group_size, min_members=self.min_members)
        return {DOMAIN: DomainFilters(query=query, response=response_filter(self.response_filter, where="DynamicSampling.response_filter"))}

    def ratio_guard(self) -> RatioGuard | None:
        """The guard, or None. Raises `ConfigError` for what cannot be."""
        return None if self.guard is None else build_guard(self.guard)

    def machine_gate(self, *, group_size: int, seed: int) -> MachineGate | None:
        """The gate, or None. Raises `ConfigError` for a keeper of groups of another size."""
        if self.gate is None:
            return None
        keeper: Any = GateKeeper(self.gate, group_size=group_size, seed=seed) if isinstance(self.gate, Gate) else self.gate
        if not isinstance(keeper, GateKeeper) or keeper.group_size != group_size:
            raise ConfigError(
                f"DynamicSampling.gate: expected a Gate, or a GateKeeper for groups of {group_size}, got {self.gate!r} "
                "- give Gate(k=..., threshold=...), or build the keeper with group_size=num_generations"
            )
        return MachineGate(keeper, on_cut=self.on_cut)

    def by_function(self, names: list[str]) -> DynamicSampling:
        """For advantages that are normalised function by function: the default filter asks each of them, and any spread keeps the group."""
        if self.query_filter != NO_SPREAD:
            return self
        each = [{**NO_SPREAD, "metric": name} for name in names]
        return replace(self, query_filter={"type": "any", "filter_args": {"filters": each}} if len(each) > 1 else each[0])
