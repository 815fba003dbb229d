"""A learned rule from recorded runs: what of a recording teaches it, and how the command tells of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sluice.analysis import learning
from sluice.analysis.learning import learn_rule
from sluice.analysis.played import played_groups
from sluice.cli.app import app
from sluice.errors import AnalysisError
from sluice.gate.fitting import fit_learned
from sluice.gate.learned import LearnedRule
from sluice.records import RolloutRecorder, read_rollouts
from sluice.types import Rollout
from tests.fakes import make_rollout, make_turn
from tests.gate.played_groups import FEW, HORIZON, played
from tests.records.conftest import make_record


def rollouts(number: int, is_judged: bool = True, is_measured: bool = False) -> list[Rollout]:
    """A played group as a run records it."""
    found = []
    for index, member in enumerate(played(number).members):
        seen = ["room 0", *(step.reply for step in member.steps)]
        progress = [0.0, *(step.progress for step in member.steps)]
        turns = tuple(
            replace(
                make_turn(),
                observation=before,
                action=step.action,
                is_admissible=step.is_admissible if is_judged else None,
                inference_logprobs=np.full(len(make_turn().token_ids), step.logprob, dtype=np.float32),
                reward=member.reward if t == len(member.steps) else 0.0,
                progress=progress[t - 1] if is_measured else None,
            )
            for t, (before, step) in enumerate(zip(seen, member.steps, strict=False), 1)
        )
        metrics = {"progress": progress[-1]} if is_measured else {}
        plain = make_rollout(reward=member.reward, attempt_id=100 * number + index, group_id=number, member_index=index, metrics=metrics)
        found.append(replace(plain, turns=turns, task_type="walk", finish_reason="completed"))
    return found


def record(
    folder: Path, numbers=range(110), is_judged: bool = True, identity: str = "a run", change=None, is_measured: bool = False, **more
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recorder = RolloutRecorder(folder / "rollouts", {"identity": identity, "group_size": 4})
    for number in numbers:
        members = rollouts(number, is_judged, is_measured)
        if change is not None:
            members = change(number, members)
        for member in members:
            recorder.member(member)
        recorder.group(make_record(number, **more.get(f"of_{number}", {})), [(member, True) for member in members], is_whole=True)
    recorder.close()
    return folder


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "fit_learned", partial(fit_learned, **FEW))


def test_a_recording_holds_what_was_played(tmp_path: Path) -> None:
    folder = record(tmp_path, range(6))
    read = list(played_groups(read_rollouts(folder), group_size=4, progress=lambda member: [0.0] * (member.env_steps + 1)))
    for number, group in enumerate(read):
        for member, original in zip(group.members, played(number).members, strict=True):
            assert member.reward == original.reward
            assert member.first_observation == "room 0"
            assert member.first_progress == 0.0
            assert [step.action for step in member.steps] == [step.action for step in original.steps]
            assert [step.reply for step in member.steps[:-1]] == [step.reply for step in original.steps[:-1]]
            assert [step.is_admissible for step in member.steps] == [step.is_admissible for step in original.steps]
            assert [step.logprob for step in member.steps] == pytest.approx([step.logprob for step in original.steps], rel=1e-6)
            assert member.earned == tuple([0.0] * (len(member.steps) - 1) + [member.reward])
            assert member.tokens == (len(make_turn().token_ids),) * len(member.steps)
    with pytest.raises(AnalysisError, match=r"progress of attempt 0: expected \d+ numbers"):
        list(played_groups(read_rollouts(folder), group_size=4, progress=lambda member: []))


def test_the_progress_that_an_environment_told_is_recorded_with_every_step(tmp_path: Path) -> None:
    folder = record(tmp_path, range(6), is_measured=True)
    for number, group in enumerate(played_groups(read_rollouts(folder), group_size=4)):
        for member, original in zip(group.members, played(number).members, strict=True):
            assert member.first_progress == 0.0
            assert [step.progress for step in member.steps] == [step.progress for step in original.steps]
    silent = record(tmp_path / "silent", range(2))
    assert {step.progress for group in played_groups(read_rollouts(silent), group_size=4) for step in group.members[0].steps} == {None}


def test_a_rule_is_learned_from_progress_where_every_recording_has_it(tmp_path: Path) -> None:
    one = record(tmp_path / "one", range(80), is_measured=True)
    assert learn_rule([one], folds=3).inputs == ("reply", "is_admissible", "progress", "logprob")
    silent = record(tmp_path / "two", range(100, 140), identity="another run")
    assert learn_rule([one, silent], folds=3).inputs == ("reply", "is_admissible", "logprob")


def test_only_groups_that_ran_to_their_end_are_evidence(tmp_path: Path) -> None:
    def change(number, members):
        first = members[0]
        if number == 1:
            return [replace(first, finish_reason="stopped_futile"), *members[1:]]
        if number == 2:
            return [replace(first, finish_reason="length"), *members[1:]]
        return members[:3] if number == 3 else members

    folder = record(tmp_path, range(6), change=change, of_4={"outcome": "cut"})
    assert [group.key[1] for group in played_groups(read_rollouts(folder), group_size=4)] == [0, 5]


def test_a_rule_is_learned_from_runs(tmp_path: Path) -> None:
    one = record(tmp_path / "one", range(80))
    two = record(tmp_path / "two", range(100, 140), is_judged=False, identity="another run")
    rule = learn_rule([one, two], folds=3)
    assert (rule.group_size, rule.horizon, rule.inputs) == (4, HORIZON, ("reply", "logprob"))
    assert rule.provenance["runs"] == ["a run", "another run"]
    assert rule.provenance["groups"] == 120
    assert learn_rule([one, record(tmp_path / "three", range(200, 240), identity="a third")], folds=3).inputs == (
        "reply",
        "is_admissible",
        "logprob",
    )


def test_the_command_writes_the_rule_and_tells_what_it_would_have_done(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    out = tmp_path / "rule.json"
    arguments = ["gate", "learn", str(folder), "--out", str(out), "--cv", "3", "--horizon", str(HORIZON), "--futility-floor", "0.8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rule = LearnedRule.load(out)
    assert (rule.futility_floor, rule.horizon) == (0.8, HORIZON)
    assert "fitted on 110 groups of 4" in result.stdout
    told = {(line.split()[0], line.split()[1]): line.split() for line in result.stdout.splitlines() if line.startswith(("stops", "cuts"))}
    assert len(told) == 8
    stops = next(one for one in rule.provenance["cross_fitted"] if (one["what"], one["floor"]) == ("stops", 0.8))
    assert 0 < stops["saved"] < 1
    assert stops["right"] / stops["decisions"] > 0.8
    assert told["stops", "0.8"][2] == str(stops["decisions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "nowhere"), (["run", "--horizon", "5"], "at most 5 steps"), (["run", "--out", "."], "--out: expected a file")],
)
def test_what_cannot_be_learned_from_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run")
    result = CliRunner().invoke(app, ["gate", "learn", "--cv", "2", *arguments])
    assert result.exit_code == 2
    assert message in result.output
