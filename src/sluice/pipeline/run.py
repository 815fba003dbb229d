"""One run under way: the loop with scorer and shell, the trainer, evaluations, checkpoints, and the closing of it all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sluice.config import RunConfig
from sluice.errors import TrainerError
from sluice.execution import LocalShell, ValidationResult
from sluice.filters import filters_state
from sluice.pipeline.display import Display
from sluice.pipeline.feed import Feed
from sluice.pipeline.job import Job
from sluice.pipeline.loop_thread import LoopStuck, LoopThread, Stopped
from sluice.pipeline.resume import ResumePoint, model_fingerprint
from sluice.records import (
    ENGINE_TOKENS,
    MAX_STEPS,
    SCHEDULER,
    BatchRecord,
    Checkpoints,
    Journal,
    RolloutRecorder,
    RunFolder,
    Sinks,
    build_sinks,
)

if TYPE_CHECKING:
    from sluice.trainer.trl import SluiceGRPOTrainer

OPEN_S: Final = 180.0  # most seconds for starting shell, verifiers and environments
CLOSE_S: Final = 15.0  # most seconds for closing shell, verifiers and environments at the end of a run
STUCK_S: Final = 0.5  # the same for a loop that has not answered before
STATUS_EVERY_S: Final = 1.0  # how old what `sluice status` shows may be

OVERHEAD_SECONDS: Final = "overhead_seconds"
"""Fact: seconds spent in machine, filters and ledger, and in handing records to the journal and writing them."""


class Run:
    """One run under way."""

    def __init__(
        self,
        config: RunConfig,
        job: Job,
        folder: RunFolder,
        journal: Journal,
        display: Display,
        stop: threading.Event,
        resumed: ResumePoint | None,
    ) -> None:
        """resumed: where the run goes on; None: it is new."""
        self.config = config
        self.job = job
        self.folder = folder
        self.journal = journal
        self.display = display
        self.stop = stop
        self.resumed = resumed
        self.steps = 0 if resumed is None else resumed.step
        self.sinks = Sinks(journal, build_sinks(folder, config.records, None if resumed is None else resumed.step), self.warn)
        self.scheduler = job.build_scheduler()
        self.checkpoints = Checkpoints(folder.checkpoints, folder.identity, config.trainer.keep_checkpoints)
        self.earlier_tokens = 0  # sampled by earlier processes
        self.evaluated_at = resumed.step if resumed is not None and resumed.is_evaluated else None  # step of the latest evaluation
        self.model = model_fingerprint(Path(config.model.path))
        self.recorder = self._new_recorder() if config.records.rollouts else None
        for text in job.warnings:
            self.warn(text)
        if resumed is not None:
            self._tell_of(resumed)

    def _open(self) -> Coroutine[Any, Any, LocalShell]:
        return self.job.open(self.scheduler, self.journal, self._show_filling, self._show_warning, self.recorder)

    def _new_recorder(self) -> RolloutRecorder:
        run = {"identity": self.folder.identity, "exp_name": self.config.exp_name, "seed": self.config.seed}
        return RolloutRecorder(self.folder.rollouts, run | {"group_size": self.job.scheduler_config().group_size})

    def _show_warning(self, text: str) -> None:
        """Of the shell, which has written it down."""
        self.display.message(text, "warning")

    def warn(self, text: str) -> None:
        """Show a warning, and write it down."""
        self.display.message(text, "warning")
        self.journal.event("warning", text)

    def _tell_of(self, point: ResumePoint) -> None:
        """Say where the run goes on; that it does is an event already."""
        for text in point.passed_over:
            self.warn(text)
        self.display.message(point.message)
        if point.lost_tokens:
            self.warn(f"{point.lost_tokens} tokens had been sampled after the checkpoint and are lost")

    def play(self) -> None:
        """Evaluate, train, evaluate, save; account for everything on every way out."""
        from sluice.trainer import build_trainer

        started = time.monotonic()
        with LoopThread(self.stop) as self.loop:
            self.shell = self.loop.run(self._open(), OPEN_S)
            try:
                self._restore()
                self.loop.do(self._start_reporting)
                self.feed = Feed(
                    self.loop,
                    self.shell,
                    groups=self.job.groups_per_batch,
                    total_steps=self.config.trainer.max_steps,
                    steps=self.steps,
                    before_first=self._catch_up,
                )
                self.display.phase("building the trainer")
                trainer = build_trainer(
                    self.config,
                    longest_completion=self.job.longest_completion,
                    model_path=self.config.model.path,
                    output_dir=self.folder.checkpoints,
                    correction_dir=self.folder.correction,
                    source=self.feed,
                    publisher=self.feed,
                    on_step=self._step_done,
                    on_save=self._save_state,
                    stop=self.stop,
                )
                if not self.steps:
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
            trainer.train(None if self.resumed is None else self.resumed.folder)
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

    def _restore(self) -> None:
        """Bring the machine to where the checkpoint was taken; tasks and filters are there."""
        point = self.resumed
        if point is None:
            return
        self.journal.fact(MAX_STEPS, self.config.trainer.max_steps)
        if point.state is not None:
            tasks, shell_state = self.job.known_tasks, point.state["shell"]
            self.loop.do(lambda: self.shell.load_state_dict(shell_state, tasks))
        self.scheduler.ledger.tokens_were_lost(point.lost_tokens)
        self.earlier_tokens = self.scheduler.ledger.total_tokens
        self._record_ledger(self.steps)

    def _save_state(self, step: int, folder: Path) -> None:
        """Complete the trainer's checkpoint with the state of everything else, taken in one moment: groups may be judged meanwhile."""

        def take() -> dict[str, Any]:
            shell = self.shell.state_dict()
            tokens = sum(shell["scheduler"]["ledger"]["tokens"].values())
            return {"shell": shell, "filters": filters_state(self.job.remembering), "engine_tokens": tokens, "model": self.model}

        state = self.loop.do(take)
        self.journal.flush()
        if self.recorder is not None:
            self.recorder.flush()
        for text in self.checkpoints.write_state(step, state):
            self.warn(text)

    def _start_reporting(self) -> None:
        self.reporting = asyncio.get_running_loop().create_task(self._report_status(), name="report status")

    async def _report_status(self) -> None:
        """Write down where everything stands, for `sluice status`. Consumes nothing, waits for the clock, ends when it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.journal.fact(SCHEDULER, {**self.scheduler.snapshot(loop.time()), "time": time.time()})
            self.journal.fact(ENGINE_TOKENS, self.earlier_tokens + self.job.engine.sampled_tokens("train"))
            await asyncio.sleep(STATUS_EVERY_S)

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
        reports = self.loop.do(lambda: (self.scheduler.metrics(), self.job.metrics(), self.shell.loop_metrics(), self.job.engine.metrics()))
        written = self.sinks.write(step, metrics, self.feed.filling, *reports, {"time/fill_seconds": self.feed.fill_s})
        self._record_ledger(step)
        self.display.step(step, written)
        if self._evaluation_is_due(step) and not batch.is_last:
            self._validate(step)

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.job.evaluate_every
        return every is not None and step % every == 0 and step < self.config.trainer.max_steps

    def _catch_up(self) -> None:
        """Make the evaluation for which a run that was stopped had no time."""
        if self.steps and self._evaluation_is_due(self.steps):
            self._validate(self.steps)

    def _record_ledger(self, step: int) -> None:
        tokens, attempts = self.loop.do(lambda: (dict(self.scheduler.ledger.tokens), dict(self.scheduler.ledger.attempts)))
        self.journal.ledger(step, tokens, attempts)

    def _validate(self, step: int) -> None:
        items = self.job.validation_items
        if not items or self.stop.is_set() or step == self.evaluated_at:
            return
        self.display.phase("evaluating", 0, items)
        try:
            results = self.loop.call(self.job.validate(lambda done, total: self.display.phase("evaluating", done, total)))
        except Stopped:
            return
        for domain, result in results.items():
            for reason, count in result.unscored.items():
                detail = result.details.get(reason, "")
                self.warn(f"evaluation of {domain!r}: {count} of {result.items} rollouts have no score ({reason}): {detail}")
        self.journal.validation(step, results)
        self.journal.flush()  # before metrics.jsonl knows of it: a resumed run goes by run.db
        self.evaluated_at = step
        self.display.validation(step, results)
        self.sinks.write(step, _validation_metrics(results))

    def _close(self, seconds: float) -> list[Exception]:
        """Account for everything, whatever happened: each part is closed even if another one cannot be. Returns what went wrong.

        A loop that does not answer once is not waited for again: it is in a call that does not return, and nothing else moves on it.
        """
        problems: list[Exception] = []
        patience_s, is_stuck = CLOSE_S, False
        parts: tuple[Callable[[], Any], ...] = (
            lambda: self.loop.do(lambda: self.reporting.cancel() if hasattr(self, "reporting") else None, patience_s),
            lambda: self.loop.run(self.shell.close(), patience_s),
            lambda: self.loop.run(self.job.close(), patience_s),
            lambda: None if self.recorder is None else self.recorder.close(),
            lambda: self._account(seconds, is_stuck),
            self.sinks.close,
        )
        for close in parts:
            try:
                close()
            except LoopStuck as error:
                if not is_stuck:
                    call = self.job.longest_call()
                    problems.append(LoopStuck(f"{call}: {error}" if call else str(error)))
                patience_s, is_stuck = STUCK_S, True
            except Exception as error:  # noqa: BLE001 - the other parts are closed first, then it is raised
                problems.append(error)
        return problems

    def _account(self, seconds: float, is_stuck: bool) -> None:
        ledger = self.scheduler.ledger
        if is_stuck:
            self._record_ledger_of_stuck_loop()
        else:
            self._record_ledger(self.steps)
        sampled = self.earlier_tokens + self.job.engine.sampled_tokens("train")
        self.journal.fact(ENGINE_TOKENS, sampled)
        overhead = {"machine": self.shell.machine_seconds, "journal": self.shell.journal_seconds + self.journal.write_seconds}
        self.journal.fact(OVERHEAD_SECONDS, {**overhead, "run": seconds})
        if not is_stuck and ledger.total_tokens != sampled:
            text = f"the ledger accounts for {ledger.total_tokens} sampled tokens, the engine counted {sampled}: please report this"
            self.journal.event("error", text)
            self.display.message(text, "error")

    def _record_ledger_of_stuck_loop(self) -> None:
        """As `_record_ledger`, from this thread: what is under way counts as cancelled."""
        tokens, attempts = dict(self.scheduler.ledger.tokens), dict(self.scheduler.ledger.attempts)
        under_way = self.shell.in_flight()
        tokens["cancelled"] += sum(under_way.values())
        attempts["cancelled"] += len(under_way)
        tokens["late"] += self.shell.late.untold
        self.journal.ledger(self.steps, tokens, attempts)


def _validation_metrics(results: Mapping[str, ValidationResult]) -> dict[str, float | None]:
    """Flat metrics of an evaluation."""
    out: dict[str, float | None] = {}
    for domain, result in results.items():
        out[f"validation/{domain}/reward_mean"] = result.mean
        out.update({f"validation/{domain}/{name}": value for name, value in result.metrics.items()})
        out.update({f"validation/{domain}/would_reject/{reason}": float(count) for reason, count in result.would_reject.items()})
        if result.rejected:
            out.update({f"validation/{domain}/{name}": float(getattr(result, name)) for name in ("items", "rejected", "accepted")})
    return out
