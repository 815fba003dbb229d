"""A run from its configuration to its summary: everything is built here, nothing is decided here.

Order: the job with filters, the engine's own model, tokenizer and tasks (nearly all that can be wrong is wrong before a run folder
exists), then the run folder and journal, the loop with the shell, the trainer; evaluate, train, save, evaluate. Whatever ends the
run, the shell is closed, every token is accounted for, and the ledger is compared with the engine's own count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sluice.config import AgenticConfig, RlvrConfig, check_config, to_yaml
from sluice.errors import SluiceError
from sluice.pipeline.build import build_job
from sluice.pipeline.collector import calm_garbage_collector
from sluice.pipeline.display import Display
from sluice.pipeline.dry_run import DryRun, dry_run
from sluice.pipeline.interrupt import Interrupt
from sluice.pipeline.job import Job
from sluice.pipeline.log_to_run import LogToRun
from sluice.pipeline.resume import ResumePoint, check_memory, find_resume_point, open_run, restore_job, roll_back, write_config
from sluice.pipeline.run import Run
from sluice.records import MAX_STEPS, Checkpoints, Journal, RunFolder

__all__ = ["Display", "DryRun", "RunResult", "dry_run", "resume", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    steps: int  # optimiser steps done
    interrupted: bool  # by Ctrl-C or SIGTERM


def train(config: RlvrConfig | AgenticConfig, *, config_path: Path, display: Display) -> RunResult:
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
        job = build_job(config, display.phase)
        stack.callback(job.engine.close)
        check_memory(job)
        folder = stack.enter_context(
            RunFolder.create(
                config.records.root,
                config.exp_name,
                config.seed,
                to_yaml(config),
                facts={MAX_STEPS: config.trainer.max_steps, "recipe": config_path.name},
            )
        )
        return _play(config, job, folder, display, stop, interrupt, resumed=None)


def resume(path: Path, *, overrides: Sequence[str] = (), display: Display) -> RunResult:
    """Take up a run again that was stopped, failed or was killed, from its newest whole checkpoint.

    overrides: of the settings in `resume.CHANGEABLE` only.

    Raises:
        RecordError: there is no such run, it lives, or it has nothing left to do.
        ConfigError, TaskError: its data or its model are not what they were.
        SluiceError: the run broke again.
    """
    stop = threading.Event()
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(stop))
        folder, config = open_run(path, overrides)
        folder.lock()
        stack.enter_context(folder)
        display.start(config.trainer.max_steps)
        job = build_job(config, display.phase)
        stack.callback(job.engine.close)
        checkpoints = Checkpoints(folder.checkpoints, folder.identity, config.trainer.keep_checkpoints)
        point = find_resume_point(folder, config, checkpoints)
        restore_job(point, job)
        roll_back(point, folder, checkpoints)
        write_config(folder, config)
        return _play(config, job, folder, display, stop, interrupt, resumed=point)


def _play(
    config: RlvrConfig | AgenticConfig,
    job: Job,
    folder: RunFolder,
    display: Display,
    stop: threading.Event,
    interrupt: Interrupt,
    *,
    resumed: ResumePoint | None,
) -> RunResult:
    display.message(f"run folder: {folder.path}")
    journal = Journal(folder.run_db)
    try:
        run = Run(config, job, folder, journal, display, stop, resumed)
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
