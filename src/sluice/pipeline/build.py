"""What a configuration is built into before anything is written: model, tokenizer, tasks, filters, guard, loop, and the machine's settings.

Nearly all that can be wrong with a recipe is wrong here, before a run folder exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.config import RlvrConfig
from sluice.errors import ConfigError, LoopError
from sluice.execution.loops import RolloutLoop, load_loop
from sluice.filters import DomainFilters, RatioGuard, build_domain_filters, build_guard
from sluice.generation import Engine, SlotEngine
from sluice.generation.tokenizer import load_tokenizer
from sluice.rewards import check_rewards
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.tasks import LoadedTasks, build_tasks
from sluice.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, besides its folder and its loop."""

    tokenizer: Any
    tasks: LoadedTasks
    filters: Mapping[str, DomainFilters]
    guard: RatioGuard | None
    user_loop: RolloutLoop | None
    engine: Engine

    def decode(self, token_ids: TokenIds) -> str:
        """The text of sampled tokens, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode(self, text: str) -> TokenIds:
        """The token ids of a text, without special tokens: what a rollout loop puts between two generations."""
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def build_parts(config: RlvrConfig, phase: Callable[[str], None]) -> Parts:
    """Build them. Whoever gets them closes the engine.

    Raises:
        ConfigError, TaskError: a setting or the data are wrong.
    """
    check_rewards(config.rewards)
    filters = build_domain_filters(config.rewards, config.num_return_sequences_in_group, min_members=config.resampling.min_members)
    guard = build_guard(config.guard)
    user_loop = None
    if config.user_defined_rollout_loop_cls is not None:
        try:
            user_loop = load_loop(config.user_defined_rollout_loop_cls, config)
        except LoopError as error:
            raise ConfigError(str(error)) from error
    phase("loading the model")
    engine = SlotEngine.load(
        config.model.path,
        max_slots=config.engine.max_slots,
        max_length=config.prompt_length + config.response_length,
        threads=config.engine.torch_threads,
        lora=config.model.lora,
        on_weight_update=config.on_weight_update,
    )
    try:
        phase("loading the tasks")
        tokenizer = load_tokenizer(config.model.path)
        tasks = build_tasks(config, tokenizer)
    except BaseException:
        engine.close()
        raise
    return Parts(tokenizer=tokenizer, tasks=tasks, filters=filters, guard=guard, user_loop=user_loop, engine=engine)


def build_scheduler(config: RlvrConfig, parts: Parts) -> Scheduler:
    """The machine of a run."""
    return Scheduler(scheduler_config(config), parts.filters, guard=parts.guard)


def scheduler_config(config: RlvrConfig) -> SchedulerConfig:
    """The machine's settings in a configuration."""
    resampling = config.resampling
    own_staleness = {domain: reward.max_staleness for domain, reward in config.rewards.items() if reward.max_staleness is not None}
    return SchedulerConfig(
        group_size=config.num_return_sequences_in_group,
        seed=config.seed,
        redundancy=config.group_size_redundancy,
        fill=resampling.fill,
        collect=resampling.collect,
        max_resample_rounds=resampling.max_resample_rounds,
        max_groups_per_batch=resampling.max_groups_per_batch,
        max_response_rounds=resampling.max_response_rounds,
        on_exhausted=resampling.on_exhausted,
        min_members=resampling.min_members,
        truncated=resampling.truncated,
        on_member_failure=resampling.on_member_failure,
        max_additional_running_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
        async_generation_ratio=config.async_generation_ratio,
        on_weight_update=config.on_weight_update,
        surplus=resampling.surplus,
        max_staleness=resampling.max_staleness,
        domain_staleness=own_staleness,
        domain_shares=config.domain_interleave_probs,
        mix_on=config.mix_on,
        absent_after_batches=resampling.absent_after_batches,
        group_timeout_s=resampling.group_timeout_s,
        requeue=resampling.requeue,
        quarantine_after=resampling.quarantine_after,
        stall_warning_s=resampling.stall_warning_s,
        has_user_loop=config.user_defined_rollout_loop_cls is not None,
    )
