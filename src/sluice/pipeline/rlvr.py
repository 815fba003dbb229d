"""An RLVR run from its configuration to its summary: everything is built here, nothing is decided here.

Order: filters and verifiers, the engine's own model, tokenizer and tasks (nearly all that can be wrong is wrong before a run folder
exists), then the run folder and journal, the loop with scorer and shell, the trainer; evaluate, train, save, evaluate. Whatever ends the
run, the shell is closed, every token is accounted for, and the ledger is compared with the engine's own count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from sluice.config import RlvrConfig, check_config, to_yaml
from sluice.errors import RewardError, SluiceError, TrainerError
from sluice.execution import LocalShell, ValidationResult, validate
from sluice.filters import DomainFilters, build_domain_filters
from sluice.generation import Engine, SlotEngine
from sluice.generation.tokenizer import load_tokenizer
from sluice.pipeline.collector import calm_garbage_collector
from sluice.pipeline.feed import Feed
from sluice.pipeline.interrupt import Interrupt
from sluice.pipeline.log_to_run import LogToRun
from sluice.pipeline.loop_thread import LoopThread, Stopped
from sluice.records import ENGINE_TOKENS, MAX_STEPS, BatchRecord, Journal, RunFolder, Sinks, build_sinks
from sluice.rewards import Scorer, build_scorer, check_rewards
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.tasks import LoadedTasks, build_tasks
from sluice.types import Group, Task, TokenIds, Verdict

if TYPE_CHECKING:
    from sluice.trainer.trl import SluiceGRPOTrainer

CLOSE_S: Final = 15.0  # most seconds for closing shell and workers at the end of a run

OVERHEAD_SECONDS: Final = "overhead_seconds"
"""Fact: seconds spent in machine, filters and ledger, and in handing records to the journal and writing them."""


class Display(Protocol):
    """What a run shows while it goes on. All calls are quick, from any thread, and never raise."""

    def start(self, total_steps: int) -> None:
        """The run begins."""

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """What goes on beside filling and training."""

    def filling(self, kept: int, needed: int, running: int) -> None:
        """How full the batch in progress is, in groups."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""

    def validation(self, step: int, results: Mapping[str, ValidationResult]) -> None:
        """A held-out evaluation is done."""

    def message(self, text: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Something to read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    steps: int  # optimiser steps done
    interrupted: bool  # by Ctrl-C or SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """One group, generated, scored and judged, and nothing trained."""

    task_id: str
    domain: str
    prompt: str
    responses: tuple[str, ...]
    rewards: tuple[float | None, ...]
    failures: tuple[str, ...]  # why responses have no reward, each kind once
    verdict: Verdict
    seconds: Mapping[str, float]  # by part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What can be built before anything is written."""

    tokenizer: Any
    tasks: LoadedTasks
    filters: Mapping[str, DomainFilters]
    engine: Engine

    def decode(self, token_ids: TokenIds) -> str:
        """The text of sampled tokens, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _build_parts(config: RlvrConfig, phase: Callable[[str], None]) -> _Parts:
    check_rewards(config.rewards)
    filters = build_domain_filters(config.rewards, config.num_return_sequences_in_group, min_members=config.resampling.min_members)
    phase("loading the model")
    engine = SlotEngine.load(
        config.model.path,
        max_slots=config.engine.max_slots,
        max_length=config.prompt_length + config.response_length,
        threads=config.engine.torch_threads,
        lora=config.model.lora,
    )
    try:
        phase("loading the tasks")
        tokenizer = load_tokenizer(config.model.path)
        tasks = build_tasks(config, tokenizer)
    except BaseException:
        engine.close()
        raise
    return _Parts(tokenizer=tokenizer, tasks=tasks, filters=filters, engine=engine)


def scheduler_config(config: RlvrConfig) -> SchedulerConfig:
    """The machine's settings in a configuration."""
    resampling = config.resampling
    return SchedulerConfig(
        group_size=config.num_return_sequences_in_group,
        seed=config.seed,
        fill=resampling.fill,
        max_resample_rounds=resampling.max_resample_rounds,
        max_groups_per_batch=resampling.max_groups_per_batch,
        max_response_rounds=resampling.max_response_rounds,
        on_exhausted=resampling.on_exhausted,
        min_members=resampling.min_members,
        truncated=resampling.truncated,
        max_additional_running_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
    )


def train(config: RlvrConfig, *, config_path: Path, display: Display) -> RunResult:
    """Run a recipe to its end, or until it is interrupted, in the calling (main) thread.

    Raises:
        ConfigError, TaskError: the configuration or the data are wrong; nothing has been trained then.
        SluiceError: the run broke; its folder keeps what was recorded until then, with status "failed".
    """
    check_config(config)
    stop = threading.Event()
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(stop))
        display.start(config.trainer.max_steps)
        parts = _build_parts(config, display.phase)
        stack.callback(parts.engine.close)
        folder = stack.enter_context(
            RunFolder.create(
                config.records.root,
                config.exp_name,
                config.seed,
                to_yaml(config),
                facts={MAX_STEPS: config.trainer.max_steps, "recipe": config_path.name},
            )
        )
        display.message(f"run folder: {folder.path}")
        journal = Journal(folder.run_db)
        try:
            run = _Run(config, parts, folder, journal, display, stop)
            with calm_garbage_collector(), LogToRun(run.warn):
                run.play()
        except BaseException as error:
            status: Literal["stopped", "failed"] = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            try:
                journal.event("error", f"{type(error).__name__}: {error}")
                journal.close(status)
            except SluiceError as second:
                error.add_note(f"and the journal could not be closed: {second}")
            if isinstance(error, SluiceError):
                error.add_note(f"run folder: {folder.path}")
            raise
        journal.close("stopped" if interrupt.was_interrupted else "finished")
        return RunResult(folder=folder.path, steps=run.steps, interrupted=interrupt.was_interrupted)


class _Run:
    """One run under way."""

    def __init__(
        self, config: RlvrConfig, parts: _Parts, folder: RunFolder, journal: Journal, display: Display, stop: threading.Event
    ) -> None:
        self.config = config
        self.parts = parts
        self.folder = folder
        self.journal = journal
        self.display = display
        self.stop = stop
        self.steps = 0
        self.sinks = Sinks(journal, build_sinks(folder, config.records), self.warn)
        self.scheduler = Scheduler(scheduler_config(config), parts.filters)
        for text in parts.tasks.report.warnings:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Show a warning, and write it down."""
        self.display.message(text, "warning")
        self.journal.event("warning", text)

    def play(self) -> None:
        """Evaluate, train, evaluate, save; account for everything on every way out."""
        from sluice.trainer import build_trainer

        started = time.monotonic()
        with LoopThread(self.stop) as self.loop:
            self.scorer, self.shell = self.loop.do(self._build_shell)
            try:
                self.feed = Feed(self.loop, self.shell, self.config.rollout_batch_size)
                self.display.phase("building the trainer")
                trainer = build_trainer(
                    self.config,
                    model_path=self.config.model.path,
                    output_dir=self.folder.checkpoints,
                    source=self.feed,
                    publisher=self.parts.engine,
                    on_step=self._step_done,
                    stop=self.stop,
                )
                self._validate(0)
                if not self.stop.is_set():
                    self._train(trainer)
                if self.steps:
                    self._validate(self.steps)
            except BaseException as error:
                for problem in self._close(time.monotonic() - started):
                    error.add_note(f"and while closing: {type(problem).__name__}: {problem}")
                raise
            problems = self._close(time.monotonic() - started)
            if problems:
                raise problems[0]

    def _train(self, trainer: SluiceGRPOTrainer) -> None:
        """Train and save; also when a later batch could not be filled: what was learnt is kept."""
        try:
            trainer.train()
        except BaseException as error:
            if self.steps:
                try:
                    trainer.save_policy(self.folder.model)
                except TrainerError as second:
                    error.add_note(f"and the trained model could not be saved: {second}")
            raise
        if self.steps:
            self.display.phase("saving")
            trainer.save_policy(self.folder.model)

    def _build_shell(self) -> tuple[Scorer, LocalShell]:
        scorer = build_scorer(self.config.rewards, self.config.reward_pool)
        shell = LocalShell(
            scheduler=self.scheduler,
            source=self.parts.tasks.train,
            engine=self.parts.engine,
            scorer=scorer,
            journal=self.journal,
            decode=self.parts.decode,
            response_length=self.config.response_length,
            temperature=self.config.engine.temperature,
            on_change=self._show_filling,
            on_warning=lambda text: self.display.message(text, "warning"),  # the shell has written it down
        )
        return scorer, shell

    def _show_filling(self) -> None:
        filling = self.scheduler.filling
        if filling is not None:
            self.display.filling(*filling, self.scheduler.running_groups)

    def _step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every optimiser step, in the training thread, its weights published."""
        batch = self.feed.batch
        assert batch is not None
        useful_groups, useful_tokens = int(metrics["batch/useful_groups"]), int(metrics["batch/useful_tokens"])
        self.feed.step_done(step, useful_groups=useful_groups, useful_tokens=useful_tokens)
        self.steps = step
        self.journal.batch(
            BatchRecord(
                step=step,
                requested=batch.requested,
                group_ids=tuple(group.group_id for group in batch.groups),
                tokens=sum(group.sampled_tokens for group in batch.groups),
                useful_groups=useful_groups,
                useful_tokens=useful_tokens,
                fill_s=self.feed.fill_s,
            )
        )
        reports = self.loop.do(lambda: (self.scheduler.ledger.metrics(), self.scorer.metrics(), self.parts.engine.metrics()))
        written = self.sinks.write(step, metrics, self.feed.filling, *reports, {"time/fill_seconds": self.feed.fill_s})
        self._record_ledger(step)
        self.display.step(step, written)
        every = self.config.validation.every_steps
        if every is not None and step % every == 0 and step < self.config.trainer.max_steps and not batch.is_last:
            self._validate(step)

    def _record_ledger(self, step: int) -> None:
        tokens, attempts = self.loop.do(lambda: (dict(self.scheduler.ledger.tokens), dict(self.scheduler.ledger.attempts)))
        self.journal.ledger(step, tokens, attempts)

    def _validate(self, step: int) -> None:
        tasks = self.parts.tasks.validation
        if not tasks or self.stop.is_set():
            return
        settings = self.config.validation
        self.display.phase("evaluating", 0, len(tasks) * settings.repeats)
        try:
            results = self.loop.call(
                validate(
                    tasks,
                    engine=self.parts.engine,
                    scorer=self.scorer,
                    decode=self.parts.decode,
                    response_length=self.config.response_length,
                    temperature=settings.temperature,
                    repeats=settings.repeats,
                    seed=self.config.seed,
                    on_result=lambda done, total: self.display.phase("evaluating", done, total),
                )
            )
        except Stopped:
            return
        for domain, result in results.items():
            for reason, count in result.unscored.items():
                detail = result.details.get(reason, "")
                self.warn(f"evaluation of {domain!r}: {count} of {result.items} responses have no score ({reason}): {detail}")
        self.journal.validation(step, results)
        self.display.validation(step, results)
        self.sinks.write(step, {f"validation/{domain}/reward_mean": result.mean for domain, result in results.items()})

    def _close(self, seconds: float) -> list[Exception]:
        """Account for everything, whatever happened: each part is closed even if another one cannot be. Returns what went wrong."""
        problems: list[Exception] = []
        parts: tuple[Callable[[], None], ...] = (
            lambda: self.loop.run(self.shell.close(), CLOSE_S),
            lambda: self.loop.run(self.scorer.close(), CLOSE_S),
            lambda: self._account(seconds),
            self.sinks.close,
        )
        for close in parts:
            try:
                close()
            except TimeoutError:
                problems.append(RewardError(f"sampling and scoring did not stop within {CLOSE_S:.0f} s - an inline verifier may be stuck"))
            except Exception as error:  # noqa: BLE001 - the other parts are closed first, then it is raised
                problems.append(error)
        return problems

    def _account(self, seconds: float) -> None:
        self._record_ledger(self.steps)
        ledger = self.scheduler.ledger
        sampled = self.parts.engine.sampled_tokens("train")
        self.journal.fact(ENGINE_TOKENS, sampled)
        overhead = {"machine": self.shell.machine_seconds, "journal": self.shell.journal_seconds + self.journal.write_seconds}
        self.journal.fact(OVERHEAD_SECONDS, {**overhead, "run": seconds})
        if ledger.total_tokens != sampled:
            text = f"the ledger accounts for {ledger.total_tokens} sampled tokens, the engine counted {sampled}: please report this"
            self.journal.event("error", text)
            self.display.message(text, "error")


def _verdict(filters: DomainFilters, group: Group) -> Verdict:
    """What a run would make of a group whose rejected members could not be replaced."""
    for rollout in group.rollouts:
        if rollout.reward is None:
            return Verdict.dropped("incomplete", "invalid", "scheduler")
        if filters.response is not None and not (verdict := filters.response.judge(rollout)).keep:
            return verdict
    return filters.query.judge(group)


def dry_run(config: RlvrConfig) -> tuple[DryRun, ...]:
    """Generate, score and judge one group of the first task of each domain, without trainer and without a run folder.

    Raises:
        ConfigError, TaskError, SluiceError: as `train` would.
    """
    started = time.monotonic()
    parts = _build_parts(config, lambda text: None)
    load_s = time.monotonic() - started
    first: dict[str, Task] = {}
    for task in parts.tasks.train.tasks:
        first.setdefault(task.domain, task)
    try:
        with LoopThread(threading.Event()) as loop:
            scorer = loop.do(lambda: build_scorer(config.rewards, config.reward_pool))
            try:
                return tuple(_dry_run_of(task, config, parts, loop, scorer, load_s) for task in first.values())
            finally:
                loop.run(scorer.close(), CLOSE_S)
    finally:
        parts.engine.close()


def _dry_run_of(task: Task, config: RlvrConfig, parts: _Parts, loop: LoopThread, scorer: Scorer, load_s: float) -> DryRun:
    from sluice.pipeline.dry_run import one_group

    seconds = {"load": load_s}
    rollouts, group = loop.run(
        one_group(config, task, engine=parts.engine, scorer=scorer, decode=parts.decode, seconds=seconds), timeout_s=600.0
    )
    started = time.monotonic()
    verdict = _verdict(parts.filters[task.domain], group)
    seconds["judge"] = time.monotonic() - started
    return DryRun(
        task_id=task.task_id,
        domain=task.domain,
        prompt=task.prompt,
        responses=tuple(rollout.turns[0].text for rollout in rollouts),
        rewards=tuple(rollout.reward for rollout in rollouts),
        failures=tuple({f.reason: f"{f.reason}: {f.detail}" for rollout in rollouts if (f := rollout.failure) is not None}.values()),
        verdict=verdict,
        seconds=seconds,
    )
