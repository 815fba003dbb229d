"""Whole tiny runs, for real: engine, worker processes, machine, trainer and records."""

from __future__ import annotations

import itertools
import json
import signal
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sluice.config import RlvrConfig, load_config
from sluice.errors import ResampleError, SluiceError
from sluice.execution import ValidationResult
from sluice.pipeline.train import RunResult, dry_run, train
from sluice.records import open_for_reading, over_all, read_metrics, read_summary
from tests.pipeline.processes import MOST_S, Process, Zygote


class Recorder:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []
        self.steps: list[Mapping[str, float]] = []
        self.validations: list[Mapping[str, ValidationResult]] = []

    def start(self, total_steps: int) -> None: ...

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None: ...

    def filling(self, kept: int, needed: int, running: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)

    def validation(self, step: int, results: Mapping[str, ValidationResult]) -> None:
        self.validations.append(results)

    def message(self, text: str, level: str = "info") -> None:
        self.messages.append((level, text))


def prompts(number: int) -> list[str]:
    return ["".join(letters) for letters in itertools.islice(itertools.product("abcdefghij", repeat=3), number)]


def write_recipe(folder: Path, model: Path, *, rows: int = 200, **changes: Any) -> Path:
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(rows)))
    (folder / "held_out.jsonl").write_text("".join(json.dumps({"prompt": text[::-1] + "j"}) + "\n" for text in prompts(40)))
    recipe: dict[str, Any] = {
        "exp_name": "tiny",
        "seed": 1,
        "model": {"path": str(model)},
        "tasks": {
            "prompt_template": "{prompt}",
            "train": [{"type": "jsonl", "path": "train.jsonl", "domain": "letters"}],
            "validation": [{"type": "jsonl", "path": "held_out.jsonl", "domain": "letters"}],
        },
        "rewards": {
            "letters": {
                "verifier": {"type": "tests.pipeline.verifiers.begins_with_a"},
                "query_filter_config": {"type": "std_filter"},
                "reward_timeout_s": 20.0,
            }
        },
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 6,
        "prompt_length": 8,
        "response_length": 4,
        "resampling": {"truncated": "keep", "max_resample_rounds": 30},
        "engine": {"torch_threads": 1},
        "trainer": {"max_steps": 8, "learning_rate": 6e-3, "lr_scheduler_type": "constant", "torch_threads": 1},
        "records": {"root": str(folder / "runs"), "tensorboard": False},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = recipe
        for key in parents:
            section = section[key]
        section[last] = value
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def before_the_run() -> set[psutil.Process]:
    """Processes that earlier tests left running."""
    return children()


def play(folder: Path, model: Path, **changes: Any) -> tuple[RunResult, Recorder, RlvrConfig]:
    file = write_recipe(folder, model, **changes)
    config = load_config(file)
    display = Recorder()
    return train(config, config_path=file, display=display), display, config


def test_a_whole_run_learns_fills_every_batch_and_accounts_for_every_token(
    tmp_path: Path, model: Path, before_the_run: set[psutil.Process]
) -> None:
    result, display, config = play(tmp_path, model)
    before, after = (over_all(results.values()).mean for results in display.validations)
    assert before is not None
    assert after is not None
    assert after > before + 0.2
    assert (result.steps, result.interrupted) == (8, False)
    summary = read_summary(result.folder / "run.db")
    assert summary.status == "finished"
    assert summary.engine_tokens == summary.tokens > 0
    assert summary.requested == summary.kept == 8 * 4
    assert summary.useful_groups == 8 * 4
    assert not [message for message in display.messages if message[0] != "info"]
    for metrics in display.steps:
        assert metrics["batch/groups"] == 4
        assert metrics["batch/zero_advantage_share"] == 0.0
        assert metrics["actor/logprob_gap_max"] <= 1e-4
        assert sum(value for name, value in metrics.items() if name.startswith("ledger/token_share/")) == pytest.approx(1.0)
    with open_for_reading(result.folder / "run.db") as db:
        rewards = [json.loads(row[0]) for row in db.execute("SELECT rewards FROM groups WHERE outcome = 'trained'")]
        dropped = db.execute("SELECT rewards FROM groups WHERE outcome = 'dropped'").fetchall()
    assert len(rewards) == 8 * 4
    assert all(len(row) == 6 and len(set(row)) == 2 for row in rewards)
    assert all(len(set(json.loads(row[0]))) == 1 for row in dropped)
    assert len(list(read_metrics(result.folder / "metrics.jsonl"))) >= 8
    assert load_config(result.folder / "config.yaml") == config
    assert children() <= before_the_run


def test_the_trained_model_is_saved_and_starts_another_run_where_it_left_off(tmp_path: Path, model: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, display, _ = play(tmp_path / "first", model, trainer__max_steps=6)
    _, again, _ = play(tmp_path / "second", first.folder / "model", trainer__max_steps=1)
    assert over_all(again.validations[0].values()).mean == over_all(display.validations[-1].values()).mean


def test_lora_trains_the_adapter_alone_and_the_engine_samples_from_it(tmp_path: Path, model: Path) -> None:
    result, display, _ = play(tmp_path, model, trainer__max_steps=3, model__lora={"r": 4}, tasks__validation=[])
    assert result.steps == 3
    assert max(metrics["actor/logprob_gap_max"] for metrics in display.steps) <= 1e-4
    assert (result.folder / "model" / "adapter_config.json").is_file()


def test_case_33_the_end_of_the_data_trains_the_rest_and_ends_the_run(tmp_path: Path, model: Path) -> None:
    result, display, _ = play(
        tmp_path, model, rows=6, tasks__epochs=1, rewards__letters__query_filter_config={"type": "no_filter"}, tasks__validation=[]
    )
    assert result.steps == 2
    assert [metrics["batch/groups"] for metrics in display.steps] == [4, 2]
    assert read_summary(result.folder / "run.db").status == "finished"


def test_filters_that_reject_everything_end_the_run_by_the_bound_with_the_reasons(
    tmp_path: Path, model: Path, before_the_run: set[psutil.Process]
) -> None:
    always = {"type": "tests.pipeline.verifiers.always_right"}
    with pytest.raises(ResampleError, match=r"kept 0 of 12 judged[\s\S]*low_information/no_spread 12"):
        play(tmp_path, model, rewards__letters__verifier=always, resampling__max_resample_rounds=3, tasks__validation=[])
    (run_db,) = (tmp_path / "runs").glob("*/run.db")
    summary = read_summary(run_db)
    assert summary.status == "failed"
    assert summary.engine_tokens == summary.tokens
    assert children() <= before_the_run


def test_case_132_verifiers_that_never_return_are_counted_and_the_run_ends_by_the_bound(
    tmp_path: Path, model: Path, before_the_run: set[psutil.Process]
) -> None:
    stuck = {"type": "tests.pipeline.verifiers.never_returns"}
    with pytest.raises(ResampleError, match="responses rejected: reward_timeout"):
        play(
            tmp_path,
            model,
            rewards__letters__verifier=stuck,
            rewards__letters__reward_timeout_s=0.02,
            rollout_batch_size=1,
            num_return_sequences_in_group=2,
            resampling__max_resample_rounds=1,
            resampling__max_response_rounds=2,
            reward_pool={"workers": 2},
            tasks__validation=[],
        )
    assert children() <= before_the_run


def test_a_dry_run_shows_one_group_of_each_domain_and_its_verdict(tmp_path: Path, model: Path) -> None:
    config = load_config(write_recipe(tmp_path, model))
    (shown,) = dry_run(config)
    assert len(shown.responses) == len(shown.rewards) == 6
    assert shown.rewards == tuple(float(response.startswith("a")) for response in shown.responses)
    assert shown.verdict.keep == (len(set(shown.rewards)) > 1)
    assert not (tmp_path / "runs").exists()


def wait_for_steps(root: Path, process: Process, steps: int) -> Path:
    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline and not process.ended.is_set():
        for run_db in root.glob("*/run.db"):
            try:
                if read_summary(run_db).steps >= steps:
                    return run_db
            except (sqlite3.Error, SluiceError):  # it is just being made
                continue
        time.sleep(0.05)
    pytest.fail(f"the run did not reach step {steps}: {process.told()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_in_bounded_time_with_everything_saved(tmp_path: Path, model: Path, runs: Zygote, number: int) -> None:
    file = write_recipe(tmp_path, model, trainer__max_steps=100_000, trainer__learning_rate=1e-6)
    process = runs.run(tmp_path / "output.txt", "train", str(file), "--plain")
    try:
        run_db = wait_for_steps(tmp_path / "runs", process, 1)
        workers = psutil.Process(process.pid).children(recursive=True)
        runs.kill(process, number)
        assert process.ended.wait(MOST_S)
    finally:
        runs.kill(process)
    assert process.code == 130, process.told()
    summary = read_summary(run_db)
    assert summary.status == "stopped"
    assert summary.engine_tokens == summary.tokens
    assert (run_db.parent / "model" / "config.json").is_file()
    assert workers
    assert not psutil.wait_procs(workers, timeout=MOST_S)[1]
