"""Whole tiny runs with a gate: cut groups are replaced or not, a shadow changes nothing, audits tell, stops train, resumes know it all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sluice.errors import ConfigError
from sluice.pipeline.train import resume
from sluice.records import read_rollouts, read_status, read_summary, status_lines, summary_lines
from tests.pipeline.test_agentic import check_accounts, play
from tests.pipeline.test_resume import ask, change_facts
from tests.pipeline.test_rlvr import Recorder

GATE = {"k": 2, "threshold": 0.85, "audit_rate": 0.0}


def run(folder: Path, model: Path, display: Recorder | None = None, *, place: str = "SayA", **changes: Any) -> Path:
    """A policy that says one letter a turn, for four turns, and hardly learns: most groups agree in some of their first two letters."""
    settings: dict[str, Any] = {
        "environment": {"type": f"tests.pipeline.environments.{place}", "args": {"turns": 4}, "run_in": "inline", "max_steps": 4},
        "dialogue__max_tokens_per_turn": 1,
        "sequence_length": 40,
        "trainer__learning_rate": 1e-5,
        "trainer__max_steps": 2,
    }
    return play(folder, model, display, **{**settings, **changes}).folder


def groups(folder: Path, columns: str = "group_id, task_id, outcome, reason, rewards, sampled_tokens, env_steps") -> list[tuple[Any, ...]]:
    return ask(folder, f"SELECT {columns} FROM groups ORDER BY group_id")


def batches(folder: Path) -> list[list[int]]:
    return [json.loads(ids) for (ids,) in ask(folder, "SELECT group_ids FROM batches ORDER BY step")]


def cut_groups(folder: Path) -> list[int]:
    return [group_id for (group_id,) in ask(folder, "SELECT group_id FROM groups WHERE outcome = 'cut'")]


def test_every_batch_is_full_though_groups_are_cut_and_all_of_it_is_on_record(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    folder = run(tmp_path, model, display, gate=GATE)
    check_accounts(folder)
    assert [len(batch) for batch in batches(folder)] == [4, 4]
    cut = cut_groups(folder)
    assert cut
    assert not {group_id for batch in batches(folder) for group_id in batch} & set(cut)
    records = ask(folder, "SELECT reason, category, source, task_type, rewards, evidence, env_steps FROM groups WHERE outcome = 'cut'")
    for reason, category, source, task_type, rewards, evidence, env_steps in records:
        assert (reason, category, source, task_type) == ("converged_prefix", "low_information", "gate", "letters")
        seen = json.loads(evidence)
        assert seen["prefix_edit_distance_mean"] < seen["threshold"] == 0.85
        assert seen["policy_version"] >= 0
        assert json.loads(rewards) == [None] * 6
        assert 12 <= env_steps < 24
    last = display.steps[-1]
    assert last["gate/cut"] == last["ledger/groups/cut"] == len(cut)
    assert last["ledger/attempts/cut"] == 6 * len(cut)
    assert last["gate/seconds"] > 0
    assert last["gate/tokens_saved_bound"] == pytest.approx(last["gate/env_steps_saved_bound"] * last["ledger/tokens_per_env_step"])
    assert sum(metrics["reward/cut_groups"] for metrics in display.steps) == len(cut)
    shares = [value for name, value in last.items() if name.startswith("ledger/token_share/")]
    assert sum(shares) == pytest.approx(1.0)
    text = "\n".join(summary_lines(read_summary(folder / "run.db")))
    assert "low_information/converged_prefix" in text
    assert "seconds spent deciding" in text
    assert "Kinds of problems" in text
    assert any("converged_prefix" in line for line in status_lines(read_status(folder / "run.db", now=0.0)))
    assert not {group.group_id for group in read_rollouts(folder)} & set(cut)


def test_without_replacement_batches_are_smaller_by_what_was_cut(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    folder = run(tmp_path, model, display, gate=GATE | {"on_cut": "drop"}, train_env_manager={"num_env_groups": 4, "group_size": 6})
    check_accounts(folder)
    sizes = [len(batch) for batch in batches(folder)]
    assert len(sizes) == 2
    assert all(1 <= size <= 4 for size in sizes)
    assert min(sizes) < 4
    for size, metrics in zip(sizes, display.steps, strict=True):
        assert metrics["batch/groups"] == size == 4 - metrics["scheduler/closed_by_gate"]


def test_a_shadow_is_the_same_run_to_the_token(tmp_path: Path, model: Path) -> None:
    folders = []
    for name, gate in (("plain", None), ("shadow", {"k": 2, "threshold": 0.85, "shadow": True, "futility": {"steps": 1}})):
        (tmp_path / name).mkdir()
        folders.append(run(tmp_path / name, model, gate=gate))
    plain, shadow = folders
    assert groups(plain) == groups(shadow)
    assert batches(plain) == batches(shadow)
    assert ask(plain, "SELECT * FROM ledger ORDER BY step, outcome") == ask(shadow, "SELECT * FROM ledger ORDER BY step, outcome")
    weights = [load_file(folder / "model" / "model.safetensors") for folder in folders]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    told = dict(ask(shadow, "SELECT name, value FROM metrics WHERE name LIKE 'gate/%' AND step = 2"))
    assert told["gate/would_cut"] > 0 == told["gate/cut"] == told["gate/is_cutting"]
    assert 0 <= told["gate/precision_low"] <= told["gate/precision"] <= told["gate/precision_high"] <= 1
    assert told["gate/precision_n"] == told["gate/audited"] > 0


def test_audited_groups_run_to_their_end_and_tell(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    folder = run(tmp_path, model, display, gate=GATE | {"audit_rate": 0.5})
    check_accounts(folder)
    last = display.steps[-1]
    assert last["gate/would_cut"] > last["gate/cut"] > 0
    assert last["gate/precision_n"] > 0
    audited = [
        json.loads(evidence)
        for outcome, evidence in groups(folder, "outcome, evidence")
        if outcome in ("trained", "dropped") and "gate/margin" in json.loads(evidence)
    ]
    assert any(seen["gate/margin"] < 1 for seen in audited)


def test_an_asynchronous_run_cuts_what_is_prepared_ahead(tmp_path: Path, model: Path) -> None:
    folder = run(tmp_path, model, gate=GATE, async_generation_ratio=1)
    check_accounts(folder)
    assert [len(batch) for batch in batches(folder)] == [4, 4]
    assert cut_groups(folder)


def test_at_a_barrier_cut_groups_cost_k_steps_a_member(tmp_path: Path, model: Path) -> None:
    folder = run(tmp_path, model, gate=GATE | {"barrier": True}, trainer__max_steps=1)
    check_accounts(folder)
    assert {steps for outcome, steps in groups(folder, "outcome, env_steps") if outcome == "cut"} == {12}


def test_the_evaluation_knows_no_gate(tmp_path: Path, model: Path) -> None:
    results = []
    for name, gate in (("plain", None), ("gate", GATE | {"futility": {"steps": 1, "audit_rate": 0.0}})):
        (tmp_path / name).mkdir()
        display = Recorder()
        run(tmp_path / name, model, display, place="SayAInOnePlace", gate=gate, trainer__max_steps=1)
        found = display.validations[0]["SayAInOnePlace"]
        assert found.items == found.scored == 24
        assert found.metrics["env_steps"] == 4.0
        results.append((found.reward_sum, found.sampled_tokens))
    assert results[0] == results[1]


def test_futile_trajectories_are_stopped_and_their_tokens_train(tmp_path: Path, model: Path) -> None:
    display = Recorder()
    gate = {"futility": {"steps": 2, "audit_rate": 0.25}}
    folder = run(tmp_path, model, display, place="SayAInOnePlace", gate=gate)
    check_accounts(folder)
    members = [member for group in read_rollouts(folder) if group.outcome == "trained" for member in group.members]
    assert {member.finish_reason for member in members} == {"stopped_futile", "completed"}
    for member in members:
        assert len(member.turns) == (2 if member.finish_reason == "stopped_futile" else 4)
        assert member.reward == pytest.approx(sum(turn.reward or 0.0 for turn in member.turns))
    last = display.steps[-1]
    assert last["rollout/ended/stopped_futile"] == last["ledger/stopped_attempts"] > 0
    assert last["gate/futile_stopped"] >= last["ledger/stopped_attempts"]
    assert last["gate/futile_audited"] > 0
    assert last["batch/loss_tokens"] > 0


def test_a_resumed_run_goes_on_with_what_the_gate_had_learnt(tmp_path: Path, model: Path) -> None:
    gate = GATE | {"audit_rate": 0.3, "futility": {"steps": 3}}
    whole = run(tmp_path, model, gate=gate, trainer__max_steps=3, trainer__save_every_steps=1)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "checkpoint-3")
    shutil.rmtree(killed / "model")
    change_facts(killed, status="running")
    display = Recorder()
    resume(killed, display=display)
    check_accounts(killed)
    before = dict(ask(whole, "SELECT name, value FROM metrics WHERE name LIKE 'gate/%' AND step = 2"))
    assert display.steps[0]["gate/judged"] >= before["gate/judged"] > 0
    assert display.steps[0]["gate/seconds"] >= before["gate/seconds"]
    assert groups(killed) == groups(whole)
    assert batches(killed) == batches(whole)
    at_the_end = "SELECT name, value FROM metrics WHERE name LIKE 'gate/%' AND name != 'gate/seconds' AND step = 3 ORDER BY name"
    assert ask(killed, at_the_end) == ask(whole, at_the_end)


def test_a_gate_that_cannot_be_is_told_before_anything_is_written(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"gate\.rule\.type"):
        run(tmp_path, model, gate={"k": 2, "rule": {"type": "nowhere.Rule"}})
    assert not (tmp_path / "runs").exists()
