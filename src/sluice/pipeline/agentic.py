"""An agentic run: episodes of environments, trajectories played turn by turn, group filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sluice.config import AgenticConfig
from sluice.environments import EnvironmentHost, check_environment
from sluice.execution import Journal, LocalShell, Recorder, ValidationResult
from sluice.execution.dialogue import DialogueFormat, build_dialogue_format
from sluice.execution.trajectories import TrajectoryPlayer
from sluice.execution.trajectory_validation import validate_trajectories
from sluice.filters import DomainFilters, RatioGuard, build_group_filter, build_guard
from sluice.filters.base import QueryFilter
from sluice.filters.context import Mode
from sluice.generation import Engine, SlotEngine
from sluice.generation.tokenizer import load_tokenizer
from sluice.pipeline.gate import build_gate
from sluice.pipeline.job import Job, common_scheduler_config
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.tasks import EpisodeTasks, held_out_episodes

if TYPE_CHECKING:
    from sluice.types import Task

HELD_OUT_SEED: Final = 2_000_000_000
"""Base of the environment seeds of an evaluation; not the run's seed, so that runs with several seeds are measured on the same episodes."""


class AgenticJob(Job):
    """The parts of an agentic run."""

    def __init__(
        self,
        config: AgenticConfig,
        *,
        tokenizer: Any,
        dialogue: DialogueFormat,
        group_filter: QueryFilter,
        val_group_filter: QueryFilter | None,
        guard: RatioGuard | None,
        engine: Engine,
    ) -> None:
        self.config: AgenticConfig = config
        self.tokenizer = tokenizer
        self.dialogue = dialogue
        self.filters: Mapping[str, DomainFilters] = {config.domain: DomainFilters(query=group_filter, response=None)}
        self.val_group_filter = val_group_filter
        self.guard = guard
        self.engine = engine
        self.task_source = EpisodeTasks(config.domain, config.train_env_manager.num_env_groups, seed=config.seed)
        self.groups_per_batch = config.groups_per_batch
        self.longest_completion = config.sequence_length
        held_out = config.val_env_manager
        self.validation_items = 0 if held_out is None else held_out.num_env_groups * held_out.group_size
        self.evaluate_every = config.validation.every_steps
        self._host: EnvironmentHost | None = None  # between `open` and `close`
        self._val_host: EnvironmentHost | None = None
        self._player: TrajectoryPlayer | None = None
        self._val_player: TrajectoryPlayer | None = None  # one for all evaluations: it keeps its environments

    @classmethod
    def build(cls, config: AgenticConfig, phase: Callable[[str], None]) -> AgenticJob:
        """Build them. Raises `ConfigError` when a setting is wrong."""
        check_environment(config.environment)
        if config.val_environment is not None:
            check_environment(config.val_environment, where="val_environment")
        build_gate(config)  # each machine gets its own: here only what is wrong with its settings
        phase("loading the model")
        tokenizer = load_tokenizer(config.model.path)
        held_out = config.val_env_manager
        group_filter = agentic_group_filter(config, "train", tokenizer.pad_token_id)
        val_group_filter = None
        if held_out is not None and (held_out.group_filter_cls is not None or held_out.group_filter_config is not None):
            val_group_filter = agentic_group_filter(config, "val", tokenizer.pad_token_id)
        guard = build_guard(config.guard)
        dialogue = build_dialogue_format(config.dialogue, tokenizer)
        engine = SlotEngine.load(
            config.model.path,
            max_slots=config.engine.max_slots,
            max_length=config.sequence_length,
            threads=config.engine.torch_threads,
            lora=config.model.lora,
            on_weight_update=config.on_weight_update,
            precision=config.engine.precision,
            stop_token_ids=dialogue.stop_token_ids,
        )
        return cls(
            config, tokenizer=tokenizer, dialogue=dialogue, group_filter=group_filter, val_group_filter=val_group_filter, guard=guard,
            engine=engine,
        )  # fmt: skip

    @property
    def remembering(self) -> Mapping[str, DomainFilters]:
        """The filters of training, and that of the evaluation."""
        if self.val_group_filter is None:
            return self.filters
        return {**self.filters, f"{self.config.domain}, evaluation": DomainFilters(query=self.val_group_filter, response=None)}

    @property
    def known_tasks(self) -> Mapping[str, Task]:
        """Episodes by task_id, each made from its name."""
        lookup: Mapping[str, Task] = self.task_source.lookup
        return lookup

    def scheduler_config(self) -> SchedulerConfig:
        """The machine's settings."""
        return agentic_scheduler_config(self.config)

    def build_scheduler(self) -> Scheduler:
        """The machine of a run, with its gate."""
        return Scheduler(self.scheduler_config(), self.filters, guard=self.guard, gate=build_gate(self.config))

    async def open(
        self,
        scheduler: Scheduler,
        journal: Journal,
        on_change: Callable[[], None],
        on_warning: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> LocalShell:
        """Start the environments and the shell."""
        config = self.config
        self._host = await _opened(EnvironmentHost(config.environment, config.env_monitor))
        self._val_host = self._host
        if config.val_environment is not None and self.validation_items:
            try:
                self._val_host = await _opened(EnvironmentHost(config.val_environment, config.env_monitor))
            except BaseException:
                await self._host.close()
                raise
        self._player = self.new_player(self._host, config.seed)
        self._val_player = self.new_player(self._val_host, HELD_OUT_SEED)
        return LocalShell(
            scheduler=scheduler,
            source=self.task_source,
            engine=self.engine,
            journal=journal,
            player=self._player,
            on_change=on_change,
            on_warning=on_warning,
            recorder=recorder,
        )

    def new_player(self, host: EnvironmentHost, seed: int) -> TrajectoryPlayer:
        """A player of trajectories in the environments of a host, on the event loop. seed: base of the environment seeds."""
        return TrajectoryPlayer(self.config, host=host, engine=self.engine, dialogue=self.dialogue, seed=seed)

    async def validate(self, on_result: Callable[[int, int], None]) -> dict[str, ValidationResult]:
        """Play every held-out episode."""
        assert self._val_player is not None
        held_out = self.config.val_env_manager
        assert held_out is not None
        return await validate_trajectories(
            held_out_episodes(self.config.domain, held_out.num_env_groups),  # made anew: filters of the user are shown them
            self._val_player,
            repeats=held_out.group_size,
            temperature=self.config.validation.temperature,
            seed=HELD_OUT_SEED,
            group_filter=self.val_group_filter,
            filtering=self.config.validation.filtering,
            on_result=on_result,
        )

    def metrics(self) -> dict[str, float]:
        """Of player and environments."""
        if self._host is None or self._player is None:
            return {}
        return {**self._player.metrics(), **self._host.metrics()}

    def longest_call(self) -> str:
        """The environment that is in one call for longest."""
        calls = [call for host in (self._host, self._val_host) if host is not None and (call := host.longest_call()) is not None]
        return str(max(calls, key=lambda call: call.seconds)) if calls else ""

    async def close(self) -> None:
        """End the environments."""
        for host in {id(one): one for one in (self._host, self._val_host) if one is not None}.values():
            await host.close()


async def _opened(host: EnvironmentHost) -> EnvironmentHost:
    return await host.__aenter__()


def agentic_group_filter(config: AgenticConfig, mode: Mode, pad_token_id: int | None = None) -> QueryFilter:
    """The filter on groups of training or of evaluation, of our kind or of ROLL's. Raises `ConfigError`."""

    def speak_roll(theirs: object) -> object:
        from sluice.roll.group_filter import adapt_group_filter  # torch and tensordict, for those who need it

        return adapt_group_filter(theirs, sequence_length=config.sequence_length, pad_token_id=pad_token_id or 0)

    manager = config.train_env_manager if mode == "train" else config.val_env_manager
    assert manager is not None
    return build_group_filter(
        manager,
        mode=mode,
        where=f"{mode}_env_manager",
        min_members=config.resampling.min_members if mode == "train" else None,
        config=config,
        adapt=speak_roll,
    )


def agentic_scheduler_config(config: AgenticConfig) -> SchedulerConfig:
    """The machine's settings in a configuration."""
    manager = config.train_env_manager
    common = common_scheduler_config(config, group_size=manager.group_size, redundancy=manager.group_size_redundancy)
    return replace(common, max_additional_running_prompts=config.additional_groups)
