"""Where a run is taken up again: its newest whole checkpoint, and what of its records is older than that.

A run that was killed has done things after its last checkpoint: they are done again, so that their records are taken out of run.db, and the
tokens that they cost are counted as lost. What was saved is used whole or not at all: a torn or foreign checkpoint is passed over with a
warning, and the one before it is used; without any the run begins anew, in the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.config import RlvrConfig, load_config, to_yaml
from sluice.errors import ConfigError, RecordError
from sluice.records import ENGINE_TOKENS, Checkpoints, RunFolder, read_facts, rollback

CHANGEABLE: Final = (
    "trainer.max_steps",
    "trainer.save_every_steps",
    "trainer.keep_checkpoints",
    "trainer.torch_threads",
    "trainer.micro_batch_size",
    "engine.torch_threads",
    "engine.max_slots",
    "reward_pool.workers",
    "validation.every_steps",
    "resampling.max_resample_rounds",
    "resampling.on_exhausted",
    "resampling.stall_warning_s",
    "resampling.group_timeout_s",
)
"""Settings that may differ after a resume: none of them changes what has been saved, or which prompts come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    step: int  # 0: from its beginning
    folder: Path | None  # the checkpoint; None: there is none
    state: dict[str, Any] | None  # what was saved beside the trainer's files
    lost_tokens: int  # sampled after the checkpoint by processes that are gone
    notes: tuple[str, ...]  # what to tell the user


def open_run(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, RlvrConfig]:
    """The folder of a run and its configuration, with overrides put over it and written down. Not locked yet.

    Raises:
        RecordError: it is no run folder.
        ConfigError: an override changes what a resumed run must keep.
    """
    folder = RunFolder.open(path)
    for override in overrides:
        key = override.partition("=")[0]
        if key not in CHANGEABLE:
            raise ConfigError(
                f"{key} must stay as it is when a run is resumed; what may change is {', '.join(CHANGEABLE)} - start a new run"
            )
    return folder, load_config(folder.config, overrides)


def find_resume_point(folder: RunFolder, config: RlvrConfig, checkpoints: Checkpoints) -> ResumePoint:
    """Choose the checkpoint, and take run.db and the checkpoints back to it. The folder must be locked.

    Raises:
        RecordError: the run has nothing left to do, or its files cannot be read or written.
    """
    found = checkpoints.newest()
    notes = list(checkpoints.passed_over)
    step, path, state = (0, None, None) if found is None else found
    if step >= config.trainer.max_steps:
        raise RecordError(
            f"{folder.path} has done all of its {config.trainer.max_steps} steps - to go on, raise the number: "
            f"sluice train --resume {folder.path} trainer.max_steps={2 * config.trainer.max_steps}"
        )
    sampled = int(read_facts(folder.run_db).get(ENGINE_TOKENS, 0))
    saved = 0 if state is None else int(state["engine_tokens"])
    scheduler: dict[str, Any] = {"next_group": 0, "open_groups": []} if state is None else state["shell"]["scheduler"]
    checkpoints.discard_after(step)
    rollback(folder.run_db, step=step, next_group=scheduler["next_group"], open_groups=scheduler["open_groups"])
    notes.append(f"resuming at step {step}" if step else "there is no checkpoint to resume from: the run begins anew")
    return ResumePoint(step=step, folder=path, state=state, lost_tokens=max(0, sampled - saved), notes=tuple(notes))


def write_config(folder: RunFolder, config: RlvrConfig) -> None:
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
