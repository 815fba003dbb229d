"""The commands: what they hand on, what they print, how they end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import sluice
from sluice.cli.app import app
from sluice.cli.progress import ProgressDisplay
from sluice.cli.quiet import QuietDisplay
from sluice.config import RlvrConfig, to_yaml
from sluice.errors import ConfigError, GenerationError, ResampleError, SchedulerBug, TaskError
from sluice.records import RunFolder
from tests.config.recipes import write


@dataclass
class FakePipeline:
    """Stands in for `sluice.pipeline.rlvr`: notes what it is asked for, writes an empty run folder."""

    root: Path
    interrupted: bool = False
    error: BaseException | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return next(path for path in self.root.iterdir())

    def train(self, config: RlvrConfig, *, config_path: Path, display: Any) -> FakePipeline:
        self.calls.append({"config": config, "config_path": config_path, "display": display})
        display.start(config.trainer.max_steps)
        display.message("look here", "warning")
        if self.error is not None:
            raise self.error
        with RunFolder.create(self.root, config.exp_name, config.seed, to_yaml(config)):
            pass
        return self


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline(tmp_path / "runs")
    module = ModuleType("sluice.pipeline.rlvr")
    module.train = fake.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sluice.pipeline.rlvr", module)
    return fake


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_train_loads_the_recipe_with_overrides_and_seed_and_prints_where_the_results_are(pipeline: FakePipeline, recipe: Path) -> None:
    result = run("train", recipe, "trainer.max_steps=3", "--seed", "5")
    assert result.exit_code == 0, result.output
    (call,) = pipeline.calls
    assert (call["config"].trainer.max_steps, call["config"].seed, call["config_path"]) == (3, 5, recipe)
    assert isinstance(call["display"], ProgressDisplay)
    assert str(pipeline.folder) in result.stdout
    assert "warning: look here" in result.stderr


def test_quiet_shows_warnings_and_the_result_only(pipeline: FakePipeline, recipe: Path) -> None:
    result = run("train", recipe, "--quiet")
    assert isinstance(pipeline.calls[0]["display"], QuietDisplay)
    assert result.stderr == "warning: look here\n"
    assert str(pipeline.folder) in result.stdout


def test_ctrl_c_ends_with_130_and_still_prints_the_results(pipeline: FakePipeline, recipe: Path) -> None:
    pipeline.interrupted = True
    result = run("train", recipe)
    assert result.exit_code == 130
    assert str(pipeline.folder) in result.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong key"), 2),
        (TaskError("no rows"), 2),
        (GenerationError("no model"), 1),
        (ResampleError("nothing kept"), 1),
        (KeyboardInterrupt(), 130),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1),
        (ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym.data"), 1),
    ],
)
def test_errors_of_ours_are_told_without_traceback(pipeline: FakePipeline, recipe: Path, error: BaseException, code: int) -> None:
    if isinstance(error, ResampleError):
        error.add_note("run folder: /there")
    pipeline.error = error
    result = run("train", recipe, "--quiet")
    assert result.exit_code == code
    assert "error: " in result.stderr
    assert "Traceback" not in result.output
    if isinstance(error, ResampleError):
        assert "nothing kept\nrun folder: /there" in result.stderr
    if isinstance(error, ModuleNotFoundError):
        assert "pip install 'sluice-rl[train]'" in result.stderr


@pytest.mark.parametrize(
    "error", [SchedulerBug("a story"), ZeroDivisionError("ours"), ModuleNotFoundError("No module named 'mine'", name="mine")]
)
def test_bugs_keep_their_traceback(pipeline: FakePipeline, recipe: Path, error: Exception) -> None:
    pipeline.error = error
    assert run("train", recipe).exception is error


def test_a_bad_recipe_ends_with_2_before_anything_starts(pipeline: FakePipeline, recipe: Path) -> None:
    result = run("train", recipe, "trainer.max_step=3", "seed=-1")
    assert result.exit_code == 2
    assert "did you mean max_steps?" in result.stderr
    assert "override 'seed=-1'" in result.stderr
    assert pipeline.calls == []


def test_a_seed_given_twice_is_refused(pipeline: FakePipeline, recipe: Path) -> None:
    result = run("train", recipe, "seed=1", "--seed", "2")
    assert result.exit_code == 2
    assert "has the last word over 'seed=1'" in result.stderr


@pytest.mark.parametrize(("arguments", "words"), [(["--help"], "train"), (["train", "--help"], "RECIPE"), (["doctor", "-h"], "problem")])
def test_help_says_what_a_command_is_for(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert words in result.output


def test_version_is_printed() -> None:
    assert run("--version").output == f"sluice {sluice.__version__}\n"


def test_the_installed_command_is_the_module() -> None:
    shown = subprocess.run([sys.executable, "-m", "sluice.cli", "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == f"sluice {sluice.__version__}\n"


# ---------------------------------------------------------------- doctor


@dataclass(frozen=True, kw_only=True)
class FakeDryRun:
    task_id: str = "sums/0"
    domain: str = "math"
    prompt: str = "1+1="
    responses: tuple[str, ...] = ("2", "3")
    rewards: tuple[float | None, ...] = (1.0, 0.0)
    failures: tuple[str, ...] = ()
    verdict: Any = field(default_factory=lambda: sluice.Verdict.kept("std_filter"))
    seconds: Any = field(default_factory=lambda: {"generate": 0.1, "score": 0.2})


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeDryRun], None]:
    """A machine and a recipe without fault, but for what the dry run says."""
    from sluice.cli import recipe

    def put(answer: FakeDryRun) -> None:
        module = ModuleType("sluice.pipeline.rlvr")
        module.dry_run = lambda config: answer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sluice.pipeline.rlvr", module)

    monkeypatch.setattr(recipe, "missing_packages", lambda extra: [])
    for name in ("_check_model", "_check_tasks"):
        monkeypatch.setattr(recipe, name, lambda config: iter(()))
    put(FakeDryRun())
    return put


def test_doctor_of_the_machine_alone_finds_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    names = [line.split()[1] for line in result.output.splitlines()[:-1]]
    assert names == ["python", "packages", "[train]", "processors", "runs", "workers"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_shows_a_group_that_got_through(healthy: Callable[[FakeDryRun], None], recipe: Path) -> None:
    result = run("doctor", recipe)
    assert result.exit_code == 0, result.output
    assert "task sums/0 (math): kept by std_filter" in result.output
    assert "'1+1='" in result.output
    assert "generate 0.10 s, score 0.20 s" in result.output


def test_doctor_finds_a_group_without_rewards(healthy: Callable[[FakeDryRun], None], recipe: Path) -> None:
    healthy(FakeDryRun(rewards=(None, None), verdict=sluice.Verdict.dropped("incomplete", "invalid", "scheduler")))
    result = run("doctor", recipe)
    assert result.exit_code == 1
    assert "dropped as invalid / incomplete" in result.output
    assert "no response has a reward" in result.output


def test_doctor_asks_on_after_a_problem_but_leaves_out_the_dry_run(healthy: Callable[[FakeDryRun], None], recipe: Path) -> None:
    result = run("doctor", recipe, "rewards.math.query_filter_config.type=std_filtre", "rewards.math.verifier.type=exakt")
    assert result.exit_code == 1
    assert "problem  filters" in result.output
    assert "problem  verifiers" in result.output
    assert "left out - solve the problems above first" in result.output


def test_doctor_tells_all_that_is_wrong_with_a_recipe(recipe: Path) -> None:
    result = run("doctor", recipe, "trainer.max_step=3", "zzz=1")
    assert result.exit_code == 1
    assert "did you mean max_steps?" in result.output
    assert "zzz: unknown key" in result.output


def test_doctor_survives_a_question_that_raises(
    healthy: Callable[[FakeDryRun], None], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sluice.cli import recipe as questions

    def broken(config: RlvrConfig) -> Iterator[Any]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(questions, "_check_model", broken)
    result = run("doctor", recipe)
    assert result.exit_code == 1
    assert "OSError: the disk is gone" in result.output
