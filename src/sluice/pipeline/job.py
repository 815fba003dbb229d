"""What a run is made of besides its folder, its loop and its trainer. Each kind of run has its own `Job`: rlvr.py, agentic.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sluice.config import RunConfig
from sluice.execution import Journal, LocalShell, Recorder, ValidationResult
from sluice.filters import DomainFilters, RatioGuard
from sluice.generation import Engine
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.types import Task, TokenIds


class Job(ABC):
    """What differs between kinds of runs: where tasks come from, how members are made of them, how the policy is evaluated.

    Built before anything is written: nearly all that can be wrong with a recipe is wrong then. Whoever builds one closes its engine.
    """

    config: RunConfig
    engine: Engine
    tokenizer: Any
    filters: Mapping[str, DomainFilters]
    guard: RatioGuard | None
    groups_per_batch: int
    longest_completion: int  # tokens behind a prompt, at most
    validation_items: int  # results of one evaluation; 0: there is none
    evaluate_every: int | None  # steps between evaluations; None: before and after the run only
    warnings: Sequence[str] = ()  # about the data, for the user
    task_source: Any  # where tasks are drawn from; it has state_dict and load_state_dict

    @property
    def remembering(self) -> Mapping[str, DomainFilters]:
        """All filters whose memory is a part of checkpoints, by domain or by what else they judge."""
        return self.filters

    @property
    @abstractmethod
    def known_tasks(self) -> Mapping[str, Task]:
        """Tasks by task_id, for a resumed run: groups of a checkpoint are only told by the names of their tasks."""

    @abstractmethod
    def scheduler_config(self) -> SchedulerConfig:
        """The machine's settings."""

    def build_scheduler(self) -> Scheduler:
        """The machine of a run."""
        return Scheduler(self.scheduler_config(), self.filters, guard=self.guard)

    @abstractmethod
    async def open(
        self,
        scheduler: Scheduler,
        journal: Journal,
        on_change: Callable[[], None],
        on_warning: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> LocalShell:
        """Start what makes members (verifiers, environments) and the shell that plays the machine. On the run's loop."""

    @abstractmethod
    async def validate(self, on_result: Callable[[int, int], None]) -> dict[str, ValidationResult]:
        """Evaluate the engine's weights on the held-out items. on_result: called with (done, total). After `open`."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Of whatever `open` started, since the start."""

    @abstractmethod
    async def close(self) -> None:
        """End what `open` started besides the shell; bounded in time."""

    def longest_call(self) -> str:
        """In words, what of the user's own the loop has been in for longest; "" when it is in nothing, or nobody knows."""
        return ""

    def decode(self, token_ids: TokenIds) -> str:
        """The text of sampled tokens, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode(self, text: str) -> TokenIds:
        """The token ids of a text, without special tokens: what is put between two generations."""
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def common_scheduler_config(config: RunConfig, *, group_size: int, redundancy: int) -> SchedulerConfig:
    """The machine's settings that every kind of run has; each kind puts its own in place of the defaults of the others."""
    resampling = config.resampling
    return SchedulerConfig(
        group_size=group_size,
        seed=config.seed,
        redundancy=redundancy,
        fill=resampling.fill,
        collect=resampling.collect,
        max_resample_rounds=resampling.max_resample_rounds,
        max_groups_per_batch=resampling.max_groups_per_batch,
        max_response_rounds=resampling.max_response_rounds,
        on_exhausted=resampling.on_exhausted,
        min_members=resampling.min_members,
        truncated=resampling.truncated,
        on_member_failure=config.on_member_failure,
        async_generation_ratio=config.async_generation_ratio,
        on_weight_update=config.on_weight_update,
        surplus=resampling.surplus,
        max_staleness=resampling.max_staleness,
        group_timeout_s=resampling.group_timeout_s,
        requeue=resampling.requeue,
        quarantine_after=resampling.quarantine_after,
        stall_warning_s=resampling.stall_warning_s,
    )
