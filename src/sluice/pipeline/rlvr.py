"""An RLVR run: prompts from data sets, one response each (or a rollout loop of the user's own), verifiers, query and response filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sluice.config import RlvrConfig
from sluice.errors import ConfigError, LoopError
from sluice.execution import Journal, LocalShell, Recorder, ValidationResult, validate
from sluice.execution.loops import RolloutLoop, load_loop
from sluice.filters import DomainFilters, RatioGuard, build_domain_filters, build_guard
from sluice.generation import Engine, SlotEngine
from sluice.generation.tokenizer import load_tokenizer
from sluice.pipeline.job import Job, common_scheduler_config
from sluice.rewards import build_scorer, check_rewards
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.tasks import LoadedTasks, build_tasks

if TYPE_CHECKING:
    from sluice.rewards import Scorer
    from sluice.types import Task


class RlvrJob(Job):
    """The parts of an RLVR run."""

    def __init__(
        self,
        config: RlvrConfig,
        *,
        tokenizer: Any,
        tasks: LoadedTasks,
        filters: Mapping[str, DomainFilters],
        guard: RatioGuard | None,
        user_loop: RolloutLoop | None,
        engine: Engine,
    ) -> None:
        self.config: RlvrConfig = config
        self.tokenizer = tokenizer
        self.tasks = tasks
        self.task_source = tasks.train
        self.filters = filters
        self.guard = guard
        self.user_loop = user_loop
        self.engine = engine
        self.groups_per_batch = config.rollout_batch_size
        self.longest_completion = config.response_length
        self.validation_items = len(tasks.validation) * config.validation.repeats
        self.evaluate_every = config.validation.every_steps
        self.warnings = tasks.report.warnings
        self._scorer: Scorer | None = None  # between `open` and `close`

    @classmethod
    def build(cls, config: RlvrConfig, phase: Callable[[str], None]) -> RlvrJob:
        """Build them. Raises `ConfigError` or `TaskError` when a setting or the data are wrong."""
        check_rewards(config.rewards)
        filters = build_domain_filters(config.rewards, config.num_return_sequences_in_group, min_members=config.resampling.min_members)
        guard = build_guard(config.guard)
        phase("loading the model")
        tokenizer = load_tokenizer(config.model.path)
        path = config.user_defined_rollout_loop_cls
        user_loop = None if path is None else _user_loop(path, config, tokenizer)
        engine = SlotEngine.load(
            config.model.path,
            max_slots=config.engine.max_slots,
            max_length=config.prompt_length + config.response_length,
            threads=config.engine.torch_threads,
            lora=config.model.lora,
            on_weight_update=config.on_weight_update,
            precision=config.engine.precision,
        )
        try:
            phase("loading the tasks")
            tasks = build_tasks(config, tokenizer)
        except BaseException:
            engine.close()
            raise
        return cls(config, tokenizer=tokenizer, tasks=tasks, filters=filters, guard=guard, user_loop=user_loop, engine=engine)

    @property
    def known_tasks(self) -> Mapping[str, Task]:
        """All training tasks by task_id."""
        return {task.task_id: task for task in self.tasks.train.tasks}

    def scheduler_config(self) -> SchedulerConfig:
        """The machine's settings."""
        return scheduler_config(self.config)

    async def open(
        self,
        scheduler: Scheduler,
        journal: Journal,
        on_change: Callable[[], None],
        on_warning: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> LocalShell:
        """Start the verifiers and the shell."""
        self._scorer = build_scorer(self.config.rewards, self.config.reward_pool)
        return LocalShell(
            scheduler=scheduler,
            source=self.task_source,
            engine=self.engine,
            scorer=self._scorer,
            journal=journal,
            decode=self.decode,
            response_length=self.config.response_length,
            temperature=self.config.engine.temperature,
            on_change=on_change,
            on_warning=on_warning,
            recorder=recorder,
            user_loop=self.user_loop,
            encode=self.encode,
        )

    async def validate(self, on_result: Callable[[int, int], None]) -> dict[str, ValidationResult]:
        """Generate and score every held-out prompt."""
        assert self._scorer is not None
        settings = self.config.validation
        return await validate(
            self.tasks.validation,
            engine=self.engine,
            scorer=self._scorer,
            decode=self.decode,
            response_length=self.config.response_length,
            temperature=settings.temperature,
            repeats=settings.repeats,
            seed=self.config.seed,
            on_result=on_result,
        )

    def metrics(self) -> dict[str, float]:
        """Of the verifiers."""
        return {} if self._scorer is None else self._scorer.metrics()

    async def close(self) -> None:
        """End the verifiers."""
        if self._scorer is not None:
            await self._scorer.close()


def _user_loop(path: str, config: RlvrConfig, tokenizer: Any) -> RolloutLoop:
    """The loop of the user's, of our kind or of ROLL's. Raises `ConfigError`."""
    adapted = []

    def speak_roll(theirs: object) -> RolloutLoop:
        from sluice.roll.loop import adapt_loop  # torch and tensordict, for those who need it

        adapted.append(adapt_loop(theirs, config, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
        return adapted[0]

    try:
        loop = load_loop(path, config, adapt=speak_roll)
    except LoopError as error:
        raise ConfigError(str(error)) from error
    if config.group_size_redundancy and adapted:
        raise ConfigError(
            f"group_size_redundancy has no effect because {path} has process_new_prompt(context), which asks for as many responses as it "
            "likes - delete it, or write run(context)"
        )
    if config.is_num_return_sequences_expand and not adapted:
        raise ConfigError(
            f"is_num_return_sequences_expand has no effect because {path} has run(context), which makes no requests - delete it, or write "
            "process_new_prompt(context)"
        )
    return loop


def scheduler_config(config: RlvrConfig) -> SchedulerConfig:
    """The machine's settings in a configuration."""
    return replace(
        common_scheduler_config(config, group_size=config.num_return_sequences_in_group, redundancy=config.group_size_redundancy),
        max_additional_running_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
        domain_staleness={domain: reward.max_staleness for domain, reward in config.rewards.items() if reward.max_staleness is not None},
        domain_shares=config.domain_interleave_probs,
        mix_on=config.mix_on,
        absent_after_batches=config.resampling.absent_after_batches,
        has_user_loop=config.user_defined_rollout_loop_cls is not None,
    )
