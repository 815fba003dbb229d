"""A run that records its rollouts: everything that was judged is there, as run.db has it, also after a kill and on a full disk."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import RecordError
from sluice.pipeline.train import resume
from sluice.records import RolloutRecorder, read_facts, read_rollouts, read_summary, rollout_parts
from sluice.scheduler import GroupRecord
from tests.pipeline.test_resume import Recorder, ask, change_facts, play


def start(folder: Path, model: Path, **changes: Any) -> Path:
    return play(folder, model, records__rollouts=True, **changes).folder


def check_against_run_db(folder: Path) -> None:
    """The recording and run.db tell of the same groups."""
    rows = ask(folder, "SELECT group_id, task_id, outcome, reason, category, end_step, sampled_tokens, rewards FROM groups")
    told = {row[0]: row[1:] for row in rows}
    recorded = {group.group_id: group for group in read_rollouts(folder)}
    assert recorded.keys() <= told.keys()
    assert {number for number, row in told.items() if row[1] in ("trained", "dropped", "surplus")} <= recorded.keys()
    for number, group in recorded.items():
        *ways, sampled_tokens, rewards = told[number]
        assert [group.task_id, group.outcome, group.reason, group.category, group.end_step] == ways
        assert group.sampled_tokens == sampled_tokens
        assert [member.reward for member in group.members] == [reward for reward in json.loads(rewards) if reward is not None]
        if group.outcome == "trained":
            assert len(group.members) == read_rollouts(folder).facts["group_size"] == 4


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_every_judged_group_is_recorded_as_run_db_has_it(ratio: float, tmp_path: Path, model: Path) -> None:
    folder = start(tmp_path, model, async_generation_ratio=ratio)
    check_against_run_db(folder)
    facts = read_rollouts(folder).facts
    assert facts["identity"] == read_facts(folder / "run.db")["identity"]
    assert (facts["exp_name"], facts["seed"]) == ("tiny", 1)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_killed_run_that_is_resumed_records_no_group_twice_and_loses_none(ratio: float, tmp_path: Path, model: Path) -> None:
    whole = start(tmp_path, model, async_generation_ratio=ratio)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "checkpoint-6")
    shutil.rmtree(killed / "model")
    change_facts(killed, status="running")
    resume(killed, display=Recorder())
    check_against_run_db(killed)
    if not ratio:
        groups = [[(group.task_id, group.outcome, *group.rewards) for group in read_rollouts(folder)] for folder in (whole, killed)]
        assert sorted(groups[0]) == sorted(groups[1])


def test_a_full_disk_ends_the_run_with_its_reason_and_run_db_whole(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rollout_parts, "write_part", full)
    with pytest.raises(RecordError, match="rollouts of .* members could not be written .* No space left on device"):
        start(tmp_path, model)
    (folder,) = (tmp_path / "runs").iterdir()
    summary = read_summary(folder / "run.db")
    assert summary.status == "failed"
    assert summary.engine_tokens == summary.tokens > 0


def test_an_error_of_the_recorder_ends_the_run_after_what_happened_with_it_is_written_down(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: RolloutRecorder, record: GroupRecord, members: object, *, is_whole: bool) -> None:
        if record.outcome == "trained" and record.end_step >= 1:  # the first of the second batch: its siblings leave with it
            monkeypatch.undo()
            raise RecordError("the disk is full")

    monkeypatch.setattr(RolloutRecorder, "group", breaks)
    with pytest.raises(RecordError, match="the disk is full"):
        start(tmp_path, model)
    (folder,) = (tmp_path / "runs").iterdir()
    summary = read_summary(folder / "run.db")
    assert (summary.status, summary.engine_tokens) == ("failed", summary.tokens)
    assert sum(total.groups for total in summary.groups if total.outcome == "trained") % 3 == 0
