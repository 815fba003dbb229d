"""Runs that are taken up again, in this process: what is chosen, what is refused, and that nothing shows afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from sluice.cli.app import app
from sluice.config import load_config
from sluice.errors import ConfigError, RecordError, ResampleError, SluiceError, TaskError
from sluice.pipeline.resume import CHANGEABLE, model_fingerprint
from sluice.pipeline.train import RunResult, resume, train
from sluice.records import Checkpoints, RunFolder, open_for_reading, read_facts, read_metrics, read_status, read_summary
from sluice.types import Group, Task
from tests.pipeline.test_rlvr import Recorder, write_recipe

STEPS = 6
SETTINGS: dict[str, Any] = {
    "rows": 40,
    "rollout_batch_size": 3,
    "num_return_sequences_in_group": 4,
    "reward_pool": {"workers": 0},
    "rewards": {
        "letters": {
            "verifier": {"type": "tests.pipeline.verifiers.begins_with_a"},
            "query_filter_config": {"type": "std_filter"},
        }
    },
    "trainer": {"max_steps": STEPS, "learning_rate": 2e-4, "lr_scheduler_type": "constant", "torch_threads": 1},
    "trainer__save_every_steps": 2,
    "trainer__keep_checkpoints": 3,
    "validation": {"every_steps": 3, "max_items": 8},
    "resampling__max_resample_rounds": 50,
}


class Stopper(Recorder):
    """Presses Ctrl-C after a step."""

    def __init__(self, after_step: int) -> None:
        super().__init__()
        self.after_step = after_step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        if step == self.after_step:
            os.kill(os.getpid(), signal.SIGINT)


class StopperWhileFilling(Recorder):
    """Presses Ctrl-C once a later batch is partly filled, and holds that up until the run has stopped."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.stopped_after = 0  # steps
        self.kept = 0

    def filling(self, kept: int, needed: int, running: int) -> None:
        if self.steps and not self.kept and 0 < kept < needed:
            self.stopped_after, self.kept = len(self.steps), kept
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 60
            while not list(self.root.glob(f"*/checkpoints/checkpoint-{self.stopped_after}/*")) and time.monotonic() < deadline:
                time.sleep(0.01)


def play(folder: Path, model: Path, display: Recorder | None = None, **changes: Any) -> RunResult:
    file = write_recipe(folder, model, **deepcopy(SETTINGS | changes))
    return train(load_config(file), config_path=file, display=display or Recorder())


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbed, with the checkpoints of steps 2, 4 and 6."""
    return play(tmp_path_factory.mktemp("whole"), model).folder


@pytest.fixture
def killed(whole: Path, tmp_path: Path) -> Path:
    """What would have been left of that run, had it been killed in the middle of step 6."""
    folder = tmp_path / "killed"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-6")
    shutil.rmtree(folder / "model")
    change_facts(folder, status="running")
    return folder


def change_facts(folder: Path, **facts: Any) -> None:
    with closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as db:
        db.executemany("UPDATE run SET value = ? WHERE key = ?", [(json.dumps(value), key) for key, value in facts.items()])


def ask(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with open_for_reading(folder / "run.db") as db:
        return db.execute(sql).fetchall()


def batches(folder: Path) -> list[list[tuple[Any, ...]]]:
    """By step, what was trained on."""
    groups = {row[0]: row[1:] for row in ask(folder, "SELECT group_id, task_id, epoch, rewards, sampled_tokens FROM groups")}
    return [[groups[group_id] for group_id in json.loads(ids)] for (ids,) in ask(folder, "SELECT group_ids FROM batches ORDER BY step")]


def evaluations(folder: Path) -> list[tuple[Any, ...]]:
    columns = "evaluation, step, domain, items, scored, mean, reward_sum, truncated, sampled_tokens"
    return ask(folder, f"SELECT {columns} FROM validation ORDER BY rowid")


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def assert_like_undisturbed(folder: Path, whole: Path) -> None:
    assert batches(folder) == batches(whole)
    assert evaluations(folder) == evaluations(whole)
    assert weights(folder) == weights(whole)
    assert_in_order(folder)


def assert_in_order(folder: Path, steps: int = STEPS) -> None:
    """Finished, nothing twice, every token accounted for."""
    summary = read_summary(folder / "run.db")
    assert (summary.status, summary.steps, summary.errors) == ("finished", steps, 0)
    assert summary.tokens == summary.engine_tokens
    assert ask(folder, "SELECT step FROM batches ORDER BY rowid") == [(step,) for step in range(1, steps + 1)]
    assert ask(folder, "SELECT step, name FROM metrics GROUP BY 1, 2 HAVING count(*) > 1") == []
    lines = list(read_metrics(folder / "metrics.jsonl"))
    assert [line["step"] for line in lines if "actor/loss" in line] == list(range(1, steps + 1))
    evaluated = [step for (step,) in ask(folder, "SELECT step FROM validation ORDER BY rowid")]
    assert [line["step"] for line in lines if "validation/letters/reward_mean" in line] == evaluated
    tokens = (
        "SELECT (SELECT sum(sampled_tokens) FROM groups), (SELECT sum(tokens) FROM ledger WHERE step = ?1 AND outcome IN ('late', 'lost'))"
    )
    ((of_groups, others),) = ask(folder, tokens.replace("?1", str(steps)))
    assert of_groups + others == summary.tokens


def told(display: Recorder) -> list[tuple[str, str]]:
    """Messages without the one that names the folder."""
    return [message for message in display.messages if not message[1].startswith("run folder")]


def content(folder: Path) -> dict[str, Any]:
    """Everything that a refused resume must leave alone."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock" and not path.name.startswith("run.db")]
    tables = ("run", "groups", "ledger", "batches", "metrics", "validation", "events")
    rows = {table: ask(folder, f"SELECT * FROM {table}") for table in tables}
    return {**{str(path.relative_to(folder)): path.read_bytes() for path in files}, **rows}


@contextmanager
def refused(folder: Path, error: type[SluiceError], match: str) -> Iterator[None]:
    before = content(folder)
    with pytest.raises(error, match=match):
        yield
    assert content(folder) == before


# ---------------------------------------------------------------- which checkpoint


def test_a_killed_run_goes_on_from_its_newest_checkpoint_and_nothing_shows_afterwards(killed: Path, whole: Path) -> None:
    assert read_status(killed / "run.db", time.time()).can_be_resumed
    lost = (
        read_facts(killed / "run.db")["engine_tokens"]
        - Checkpoints(killed / "checkpoints", RunFolder.open(killed).identity, 3).newest()[2]["engine_tokens"]
    )  # type: ignore[index]
    display = Recorder()
    result = resume(killed, display=display)
    assert (result.folder, result.steps, result.interrupted) == (killed, STEPS, False)
    assert told(display) == [
        ("info", "resuming at step 4"),
        ("warning", f"{lost} tokens had been sampled after the checkpoint and are lost"),
    ]
    assert len(display.steps) == 2
    assert_like_undisturbed(killed, whole)
    assert ask(killed, "SELECT message FROM events WHERE level = 'info'") == [("resumed from step 4",)]
    assert ask(killed, "SELECT tokens FROM ledger WHERE outcome = 'lost' ORDER BY step DESC LIMIT 1") == [(lost,)]
    status = read_status(killed / "run.db", time.time())
    assert (status.state, status.can_be_resumed, status.checkpoints) == ("finished", False, (2, 4, 6))


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no manifest": (lambda folder: (folder / "sluice_manifest.json").unlink(), "it is torn: sluice_manifest.json"),
    "cut weights": (lambda folder: os.truncate(folder / "model.safetensors", 100), "it is torn: model.safetensors has 100 bytes"),
    "changed state": (
        lambda folder: (folder / "sluice_state.json").write_bytes((folder / "sluice_state.json").read_bytes()[:-1] + b" "),
        "it is torn: the content of sluice_state.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_used(killed: Path, whole: Path, damage: str) -> None:
    newest = killed / "checkpoints" / "checkpoint-4"
    harm, why = DAMAGES[damage]
    harm(newest)
    display = Recorder()
    resume(killed, display=display)
    (first, second, third) = told(display)
    assert first[0] == "warning"
    assert first[1].startswith(f"{newest} cannot be resumed from: {why}")
    assert second == ("info", "resuming at step 2")
    assert third[0] == "warning"
    assert_like_undisturbed(killed, whole)


def test_a_checkpoint_of_another_run_is_never_used(killed: Path, whole: Path) -> None:
    change_facts(killed, identity="other")
    display = Recorder()
    resume(killed, display=display)
    assert [text.partition(": ")[2].partition(":")[0] for level, text in told(display)[:2]] == ["it is foreign", "it is foreign"]
    assert ("info", "there is no checkpoint to resume from: the run begins anew") in told(display)
    assert_like_undisturbed(killed, whole)


def test_a_run_killed_before_its_first_checkpoint_begins_anew_in_its_folder(killed: Path, whole: Path) -> None:
    shutil.rmtree(killed / "checkpoints")
    spent = read_facts(killed / "run.db")["engine_tokens"]
    display = Recorder()
    resume(killed, display=display)
    assert told(display) == [
        ("info", "there is no checkpoint to resume from: the run begins anew"),
        ("warning", f"{spent} tokens had been sampled after the checkpoint and are lost"),
    ]
    assert len(display.validations) == 3
    assert_like_undisturbed(killed, whole)


def test_a_run_killed_after_its_last_step_saves_its_model_and_ends_and_is_evaluated_once(whole: Path, tmp_path: Path) -> None:
    for is_evaluated in (True, False):
        folder = tmp_path / str(is_evaluated)
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "model")
        change_facts(folder, status="running")
        if not is_evaluated:
            with closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as db:
                db.execute("DELETE FROM validation WHERE step = 6")
                db.execute("DELETE FROM metrics WHERE step = 6 AND name LIKE 'validation/%'")
            lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            (folder / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
        display = Recorder()
        result = resume(folder, display=display)
        assert (result.steps, display.steps, len(display.validations)) == (STEPS, [], not is_evaluated)
        assert_like_undisturbed(folder, whole)


# ---------------------------------------------------------------- what is refused


def test_a_finished_run_is_not_done_again(whole: Path) -> None:
    with refused(whole, RecordError, rf"has done all of its 6 steps - to go on, raise the number: .*--resume {whole} trainer.max_steps=12"):
        resume(whole, display=Recorder())


def test_a_finished_run_without_a_checkpoint_keeps_its_records(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoints"))
    with refused(folder, RecordError, rf"it has none - start a new run with model.path={folder / 'model'}"):
        resume(folder, overrides=["trainer.max_steps=9"], display=Recorder())


def test_a_run_whose_data_ended_has_nothing_to_go_on_with(model: Path, tmp_path: Path) -> None:
    rewards = {"letters": {"verifier": {"type": "tests.pipeline.verifiers.begins_with_a"}}}
    folder = play(tmp_path, model, rows=5, rewards=rewards, tasks__epochs=1, tasks__validation=[], validation={}).folder
    with refused(folder, RecordError, "its data ended after step 2 of 6"):
        resume(folder, overrides=["trainer.max_steps=9"], display=Recorder())


def test_a_living_run_is_left_alone(killed: Path) -> None:
    with RunFolder.open(killed):
        assert read_status(killed / "run.db", time.time()).state == "running"
        with refused(killed, RecordError, rf"must be free for writing, but process {os.getpid()} "):
            resume(killed, display=Recorder())


def test_a_folder_that_is_no_run_is_refused(killed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for path, why in (
        (tmp_path / "none", "found nothing there"),
        (tmp_path / "file", "found a file there"),
        (tmp_path / "empty", "no config.yaml and no run.db"),
        (tmp_path, rf"it holds 1 runs, the newest is {killed}"),
    ):
        with pytest.raises(RecordError, match=why):
            resume(path, display=Recorder())


def test_other_data_are_refused(whole: Path, tmp_path: Path, model: Path) -> None:
    folder = play(tmp_path, model, display=Stopper(2)).folder
    data = tmp_path / "train.jsonl"
    data.write_text(data.read_text().replace('"aab"', '"aaz"', 1))
    with refused(folder, TaskError, "the data have changed: resume with the data of the saved run"):
        resume(folder, display=Recorder())


def test_another_model_in_its_folder_is_refused(killed: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    (killed / "config.yaml").write_text((killed / "config.yaml").read_text().replace(str(model), str(other)))
    with refused(killed, ConfigError, re.escape(f"expected in {other} the model that the run began with")):
        resume(killed, display=Recorder())
    shutil.rmtree(other)
    with refused(killed, ConfigError, re.escape(str(other))):
        resume(killed, display=Recorder())


def test_a_model_is_told_from_another_one_by_any_of_its_files_but_not_by_notes_beside_it(model: Path, tmp_path: Path) -> None:
    own = model_fingerprint(model)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        other = tmp_path / name
        shutil.copytree(model, other)
        assert model_fingerprint(other) == own
        (other / "README.md").write_text("a note")
        (other / "checkpoint-5").mkdir()
        assert model_fingerprint(other) == own
        with (other / name).open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"?")
        assert model_fingerprint(other) != own


@pytest.mark.parametrize(("key", "error"), [("seed", TaskError), ("num_return_sequences_in_group", RecordError)])
def test_a_configuration_that_was_edited_afterwards_is_refused(killed: Path, key: str, error: type[SluiceError]) -> None:
    config = yaml.safe_load((killed / "config.yaml").read_text())
    config[key] += 1
    (killed / "config.yaml").write_text(yaml.safe_dump(config))
    with refused(killed, error, rf"must be {config[key]}, got {config[key] - 1}"):
        resume(killed, display=Recorder())


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("override", ["seed=2", "rollout_batch_size=4", "trainer.learning_rate=1e-3", "model.path=x", "nonsense=1"])
def test_what_a_resumed_run_must_keep_cannot_be_changed(killed: Path, override: str) -> None:
    key = override.partition("=")[0]
    with refused(killed, ConfigError, rf"{re.escape(key)} must stay as it is when a run is resumed; what may change is trainer.max_steps"):
        resume(killed, overrides=[override], display=Recorder())


def test_a_value_that_does_not_fit_is_refused_as_in_a_recipe(killed: Path) -> None:
    with refused(killed, ConfigError, "trainer.max_steps"):
        resume(killed, overrides=["trainer.max_steps=many"], display=Recorder())


def test_every_setting_that_may_change_is_one(killed: Path) -> None:
    rlvr = load_config(killed / "config.yaml", ["guard.policy=keep"])
    given = ["guard.policy=keep", "gate.k=10", "gate.futility.steps=6"]
    agentic = load_config(Path(__file__).parents[2] / "recipes" / "agentic_household.yaml", given)
    for key in CHANGEABLE:
        *path, name = key.split(".")
        sections = [config for config in (rlvr, agentic) if hasattr(config, path[0])]
        assert sections
        for part in path:
            sections = [getattr(section, part) for section in sections]
        assert all(name in type(one).model_fields for one in sections)


def test_a_finished_run_goes_on_when_it_is_given_more_steps_and_keeps_the_new_settings(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    display = Stopper(7)
    overrides = ["trainer.max_steps=8", "trainer.save_every_steps=1", "trainer.keep_checkpoints=1", "resampling.max_resample_rounds=90"]
    assert resume(folder, overrides=overrides, display=display).interrupted
    assert told(display) == [("info", "resuming at step 6")]
    config = load_config(folder / "config.yaml")
    assert config == load_config(whole / "config.yaml", overrides)
    status = read_status(folder / "run.db", time.time())
    assert (status.state, status.step, status.max_steps, status.can_be_resumed) == ("stopped", 7, 8, True)
    assert resume(folder, display=Recorder()).steps == 8
    assert_in_order(folder, 8)
    assert batches(folder)[:6] == batches(whole)
    assert [step for _, step, *_ in evaluations(folder)] == [0, 3, 6, 8]
    assert read_status(folder / "run.db", time.time()).checkpoints == (8,)


# ---------------------------------------------------------------- how a run had ended


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(model: Path, whole: Path, tmp_path: Path) -> None:
    stopped = play(tmp_path, model, display=Stopper(3))
    assert stopped.interrupted
    status = read_status(stopped.folder / "run.db", time.time())
    assert (status.state, status.step, status.checkpoints) == ("stopped", 3, (2, 3))
    display = Recorder()
    resume(stopped.folder, display=display)
    assert ("info", "resuming at step 3") in told(display)
    assert_like_undisturbed(stopped.folder, whole)


def test_a_run_stopped_while_a_batch_was_half_full_keeps_what_there_was(model: Path, whole: Path, tmp_path: Path) -> None:
    display = StopperWhileFilling(tmp_path / "runs")
    folder = play(tmp_path, model, display=display, engine__max_slots=4, trainer__save_every_steps=50).folder  # one group after the other
    step, _, state = Checkpoints(folder / "checkpoints", RunFolder.open(folder).identity, 3).newest()  # type: ignore[misc]
    committed = {group["group_id"] for group in state["shell"]["scheduler"]["committed"]}
    assert step == display.stopped_after
    assert len(committed) >= display.kept > 0
    resume(folder, display=Recorder())
    assert_like_undisturbed(folder, whole)
    assert committed <= set(json.loads(ask(folder, f"SELECT group_ids FROM batches WHERE step = {step + 1}")[0][0]))


def test_a_run_that_failed_at_a_bound_goes_on_with_a_looser_one(model: Path, whole: Path, tmp_path: Path) -> None:
    needed = ask(whole, "SELECT max(round) FROM groups")[0][0]
    with pytest.raises(ResampleError, match="max_resample_rounds"):
        play(tmp_path, model, resampling__max_resample_rounds=needed - 1)
    (folder,) = (tmp_path / "runs").iterdir()
    status = read_status(folder / "run.db", time.time())
    assert (status.state, status.can_be_resumed) == ("failed", True)
    assert status.troubles[0].level == "error"
    with pytest.raises(ResampleError, match="max_resample_rounds"):
        resume(folder, display=Recorder())
    resume(folder, overrides=["resampling.max_resample_rounds=50"], display=Recorder())
    assert batches(folder) == batches(whole)
    assert weights(folder) == weights(whole)
    assert read_summary(folder / "run.db").status == "finished"


# ---------------------------------------------------------------- what outlives a process


def test_groups_that_were_under_way_are_launched_again_where_each_batch_gets_what_was_launched_for_it(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "async_generation_ratio": 1.0,
        "rewards": {"letters": {"verifier": {"type": "tests.pipeline.verifiers.begins_with_a"}}},
        "resampling": {"fill": "shrink", "truncated": "keep"},
        "engine__max_slots": 4,
        "trainer__save_every_steps": 1,
        "tasks__validation": [],
        "validation": {},
    }
    folder = play(tmp_path, model, display=Stopper(2), **settings).folder
    resume(folder, display=Recorder())
    assert ask(folder, "SELECT requested, kept FROM batches") == [(3, 3)] * STEPS


class Counting:
    """A filter that keeps groups with spread and remembers what it saw of each task."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def judge(self, group: Group) -> bool:
        self.seen[group.task.task_id] += 1
        return len(set(group.rewards)) > 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not self.seen, "a state is given to a new filter, once"
        self.seen.update(state["seen"])


def begins_with_a_but_fails_on_f(task: Task, response: str) -> float:
    if task.prompt.startswith("f"):
        raise ValueError("no such letter")
    return float(response.startswith("a"))


def test_filters_guard_quarantine_and_the_mix_of_domains_outlive_the_process(model: Path, tmp_path: Path) -> None:
    domain = {
        "verifier": {"type": "tests.pipeline.test_resume.begins_with_a_but_fails_on_f"},
        "query_filter_config": {"type": "tests.pipeline.test_resume.Counting"},
    }
    lines = [{"prompt": text, "domain": name} for name in ("one", "two") for text in ("aa", "ab", "bc", "ea", "fa", "fb")]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, Any] = {
        "rewards": {"one": domain, "two": domain},
        "tasks__train": [{"type": "jsonl", "path": "mixed.jsonl"}],
        "tasks__validation": [],
        "validation": {},
        "domain_interleave_probs": {"one": 0.5, "two": 0.5},
        "guard": {"max_filter_ratio": {"low_information": 0.3}},
        "resampling__quarantine_after": 2,
        "resampling__max_response_rounds": 1,
    }
    display = Stopper(3)
    folder = play(tmp_path, model, display=display, **settings).folder
    resume(folder, display=Recorder())
    assert read_summary(folder / "run.db").status == "finished"

    rows = ask(folder, "SELECT task_id, domain, outcome, reason, source FROM groups ORDER BY group_id")
    judged = [row for row in rows if row[3] != "response_retries" and row[2] in ("trained", "dropped")]
    _, _, state = Checkpoints(folder / "checkpoints", RunFolder.open(folder).identity, 3).newest()  # type: ignore[misc]
    for name in ("one", "two"):
        (seen,) = [memory["seen"] for where, memory in state["filters"].items() if f".{name}." in where]
        assert seen == Counter(row[0] for row in judged if row[1] == name)
    guard = state["shell"]["scheduler"]["guard"]
    assert guard["judged"] == len(judged)
    assert guard["kept_by_guard"] == sum(row[4] == "ratio_guard" for row in judged) > 0
    lost = Counter(row[0] for row in rows if row[3] == "response_retries")
    assert sorted(state["shell"]["scheduler"]["prompts"]["quarantined"]) == sorted(task for task, count in lost.items() if count == 2)
    assert len(lost) == 4
    assert max(lost.values()) == 2
    of_batches = "FROM batches, json_each(batches.group_ids), groups WHERE group_id = value GROUP BY step"
    assert ask(folder, f"SELECT sum(domain = 'one'), sum(domain = 'two') {of_batches}") == [(2, 1), (1, 2)] * 3


# ---------------------------------------------------------------- the command


def test_the_command_takes_a_run_up_again_and_prints_its_summary(killed: Path, whole: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--resume", str(killed), "resampling.max_resample_rounds=60", "--plain"])
    assert result.exit_code == 0, result.output
    assert "resuming at step 4" in result.stderr
    assert "Run finished after 6 of 6 steps" in result.stdout
    assert "lost to kills" in result.stdout
    assert_like_undisturbed(killed, whole)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["recipe.yaml", "--resume", "{run}"], 2, "--resume takes no recipe, only settings to change (KEY=VALUE), got recipe.yaml"),
        (["--resume", "{run}", "seed=3"], 2, "seed must stay as it is"),
        (["--resume", "{run}", "--seed", "3"], 2, "seed must stay as it is"),
        (["--resume", "{run}"], 1, "has done all of its 6 steps"),
        (["--resume", "{run}/checkpoints"], 1, "must be a run folder"),
        ([], 2, "expected the YAML file of a run, got none - sluice train RECIPE, or sluice train --resume RUN"),
    ],
)
def test_mistakes_on_the_command_line_are_told(whole: Path, args: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(app, ["train", *(arg.format(run=whole) for arg in args), "--quiet"])
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
