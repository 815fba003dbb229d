"""Where a run is taken up again: its newest whole checkpoint, and what of its records is older than that.

A run that was killed has done things after its last checkpoint: they are done again, so that their records are taken out of run.db, and the
tokens that they cost are counted as lost. What was saved is used whole or not at all: a torn or foreign checkpoint is passed over with a
warning, and the one before it is used; without any the run begins anew, in the same folder.

Nothing is changed before it is known that the run can go on: `find_resume_point`, `restore_job`, then `roll_back`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.config import AgenticConfig, RlvrConfig, RunConfig, load_config, to_yaml
from sluice.errors import ConfigError, FilterError, RecordError
from sluice.filters import filters_state, load_filters_state
from sluice.pipeline.job import Job
from sluice.records import ENGINE_TOKENS, MAX_STEPS, Checkpoints, RunFolder, open_for_reading, read_facts, rollback, rollback_rollouts
from sluice.records.checkpoints import encode

CHANGEABLE: Final = (
    "trainer.max_steps",
    "trainer.save_every_steps",
    "trainer.keep_checkpoints",
    "trainer.torch_threads",
    "trainer.micro_batch_size",
    "engine.torch_threads",
    "engine.max_slots",
    "reward_pool.workers",
    "environment.workers",
    "environment.reset_timeout_s",
    "environment.step_timeout_s",
    "env_monitor.interval_s",
    "env_monitor.hung_after_s",
    "env_monitor.on_hung",
    "validation.every_steps",
    "trainer.logprob_tolerance",
    "resampling.max_resample_rounds",
    "resampling.max_groups_per_batch",
    "resampling.on_exhausted",
    "resampling.stall_warning_s",
    "resampling.group_timeout_s",
    "guard.max_filter_ratio",
    "guard.policy",
    "gate.on_cut",
    "gate.barrier",
    "gate.shadow",
    "gate.audit_rate",
    "gate.futility.audit_rate",
)
"""Settings that may differ after a resume: none of them changes what has been saved, or the order of the prompts. Every bound is among
them whose error advises to loosen it."""

_MODEL_FILES: Final = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")  # endings of what model and tokenizer are loaded from
_PIECES: Final = 64  # of a file, that its fingerprint looks at: training moves nearly every weight
_PIECE_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    step: int  # 0: from its beginning
    folder: Path | None  # the checkpoint; None: there is none
    state: dict[str, Any] | None  # what was saved beside the trainer's files
    is_evaluated: bool  # the held-out evaluation of these weights is on record
    lost_tokens: int  # sampled after the checkpoint by processes that are gone
    passed_over: tuple[str, ...]  # a sentence for each checkpoint that could not be used

    @property
    def message(self) -> str:
        """What happens, for the user."""
        return f"resuming at step {self.step}" if self.step else "there is no checkpoint to resume from: the run begins anew"


def open_run(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, RlvrConfig | AgenticConfig]:
    """The folder of a run and its configuration, with overrides put over it. Not locked yet.

    Raises:
        RecordError: it is no run folder.
        ConfigError: an override changes what a resumed run must keep.
    """
    folder = RunFolder.open(path)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in CHANGEABLE:
            raise ConfigError(
                f"{key} must stay as it is when a run is resumed; what may change is {', '.join(CHANGEABLE)} - start a new run"
            )
    return folder, load_config(folder.config, overrides)


def find_resume_point(folder: RunFolder, config: RunConfig, checkpoints: Checkpoints) -> ResumePoint:
    """Choose the checkpoint. The folder must be locked.

    Raises:
        RecordError: the run has nothing left to do, or its files cannot be read.
    """
    found = checkpoints.newest()
    step, path, state = (0, None, None) if found is None else found
    facts = read_facts(folder.run_db)
    with open_for_reading(folder.run_db) as db:
        (done,) = db.execute("SELECT coalesce(max(step), 0) FROM batches").fetchone()
        (evaluated,) = db.execute("SELECT count(*) FROM validation WHERE step = ?", (step,)).fetchone()
    if facts["status"] == "finished":
        _require_more_to_do(folder, config, done, facts.get(MAX_STEPS, done), has_checkpoint=path is not None)
    saved = 0 if state is None else int(state["engine_tokens"])
    return ResumePoint(
        step=step,
        folder=path,
        state=state,
        is_evaluated=step > 0 and evaluated > 0,
        lost_tokens=max(0, int(facts.get(ENGINE_TOKENS, 0)) - saved),
        passed_over=tuple(checkpoints.passed_over),
    )


def _require_more_to_do(folder: RunFolder, config: RunConfig, done: int, planned: int, *, has_checkpoint: bool) -> None:
    """Raise `RecordError` unless a finished run has been given more steps, and can take them."""
    more = f"sluice train --resume {folder.path} trainer.max_steps={2 * done}"
    if done < planned:
        raise RecordError(
            f"{folder.path} must have something left to do, but it has finished: its data ended after step {done} of {planned} - start a "
            f"new run with more of them, or with more tasks.epochs"
        )
    if done >= config.trainer.max_steps:
        raise RecordError(f"{folder.path} has done all of its {done} steps - to go on, raise the number: {more}")
    if not has_checkpoint:
        raise RecordError(
            f"{folder.path} must have a whole checkpoint to go on from after its end, but it has none - start a new run with "
            f"model.path={folder.model}"
        )


def restore_job(point: ResumePoint, job: Job) -> None:
    """Bring tasks, filters and guard to where the checkpoint was taken, and see that everything else fits it.

    Raises:
        ConfigError: the folder of the model holds another one.
        TaskError: the data are not what they were.
        FilterError, RecordError: filters or settings are not what they were.
    """
    if point.state is None:
        return
    if point.state["model"] != model_fingerprint(Path(job.config.model.path)):
        raise ConfigError(
            f"model.path: expected in {job.config.model.path} the model that the run began with, got another one - put it back: data are "
            f"tokenised with it, and adapters and trainer.beta start from it"
        )
    shell = point.state["shell"]
    job.task_source.load_state_dict(shell["tasks"])
    job.build_scheduler().load_state_dict(shell["scheduler"], job.known_tasks)
    load_filters_state(job.remembering, point.state["filters"])


def check_memory(job: Job) -> None:
    """Raise `ConfigError` for a filter of the user's whose memory no checkpoint can hold: now, and not at the first checkpoint."""
    try:
        encode({"filters": filters_state(job.remembering)})
    except (FilterError, RecordError) as error:
        raise ConfigError(str(error)) from error


def roll_back(point: ResumePoint, folder: RunFolder, checkpoints: Checkpoints) -> None:
    """Take run.db, recorded rollouts and the checkpoints back to where the run goes on.

    Raises:
        RecordError: they cannot be written.
    """
    scheduler: dict[str, Any] = {"next_group": 0, "open_groups": []} if point.state is None else point.state["shell"]["scheduler"]
    next_group, open_groups = scheduler["next_group"], scheduler["open_groups"]
    rollback_rollouts(folder.rollouts, next_group=next_group, open_groups=open_groups)  # first: damage is told before anything changes
    checkpoints.discard_after(point.step)
    rollback(folder.run_db, step=point.step, next_group=next_group, open_groups=open_groups)


def model_fingerprint(folder: Path) -> str:
    """What tells a model (and its tokenizer) from another one: a digest of names and sizes of its files, and of pieces of their content."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size};".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def write_config(folder: RunFolder, config: RlvrConfig | AgenticConfig) -> None:
    """Keep the changed configuration for the next resume; whole or not at all."""
    text = to_yaml(config)
    if folder.config.read_text(encoding="utf-8") == text:
        return
    temporary = folder.config.with_name(folder.config.name + ".new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder.config)
    except OSError as error:
        raise RecordError(f"{folder.config} must be writable, got: {error.strerror or error} - check disk and permissions") from error
