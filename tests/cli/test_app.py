"""The commands: what they hand on, what they print, how they end."""

from __future__ import annotations

import os
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

ROOT = Path(__file__).parents[2]


@dataclass
class FakePipeline:
    """Stands in for `sluice.pipeline.train`: notes what it is asked for, writes an empty run folder."""

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
    module = ModuleType("sluice.pipeline.train")
    module.train = fake.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sluice.pipeline.train", module)
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
        (GenerationError("no slot"), 1),
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


def test_of_a_seed_given_twice_the_option_holds(pipeline: FakePipeline, recipe: Path) -> None:
    assert run("train", recipe, "seed=1", "--seed", "2").exit_code == 0
    assert pipeline.calls[0]["config"].seed == 2


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


def started(tmp_path: Path, code: str, *arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that calls `main()`, as the installed command does: its own folder is first on sys.path, not the current one."""
    script = tmp_path / "bin" / "sluice.script"
    script.parent.mkdir(exist_ok=True)
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120, "env": environment, **how}
    return subprocess.run([sys.executable, str(script), *map(str, arguments)], check=False, **settings)


MAIN = "from sluice.cli import main\nmain()\n"

FAKED = """
import sys
from pathlib import Path
from types import ModuleType
from tests.cli.test_app import FakePipeline
module = ModuleType("sluice.pipeline.train")
module.train = FakePipeline(Path(sys.argv.pop(1))).train
sys.modules[module.__name__] = module
from sluice.cli import main
main()
"""

FIRST_STEP = """
import sys
from types import ModuleType
module = ModuleType("sluice.pipeline.train")
def train(config, **_):
    from sluice.rewards import check_rewards
    check_rewards(config.rewards)  # what a real run asks first, without its import of torch
module.train = train
sys.modules[module.__name__] = module
from sluice.cli import main
main()
"""


def test_filters_and_verifiers_are_found_in_the_current_folder(tmp_path: Path, recipe: Path) -> None:
    project = tmp_path / "project"
    (project / "my_package").mkdir(parents=True)
    (project / "my_package" / "__init__.py").write_text("def keep(group):\n    return True\n\ndef score(task, response):\n    return 1.0\n")
    own = ("rewards.math.query_filter_config.type=my_package.keep", "rewards.math.verifier.type=my_package.score")
    found = started(tmp_path, MAIN, "train", recipe, *own, "model.path=nowhere", cwd=project)
    assert "error: model.path must be a" in found.stderr  # what is asked after filters and verifiers
    assert found.returncode == 2
    elsewhere = started(tmp_path, FIRST_STEP, "train", recipe, *own, cwd=tmp_path)
    assert "there is no module 'my_package'" in elsewhere.stderr
    assert elsewhere.returncode == 2


def test_worker_processes_find_them_too(tmp_path: Path) -> None:
    (tmp_path / "own_verifier.py").write_text("def score(task, response):\n    return 0.5\n")
    code = """
import asyncio, sys
from sluice.cli import _look_in_the_current_folder
_look_in_the_current_folder()
from sluice.config.models import RewardPoolConfig
from sluice.rewards import build_scorer
from tests.rewards.examples import rewards, task
async def run():
    scorer = build_scorer(rewards("own_verifier.score"), RewardPoolConfig(workers=1))
    try:
        print((await scorer.score(task(), "")).reward)
    finally:
        await scorer.close()
asyncio.run(run())
"""
    assert started(tmp_path, code, cwd=tmp_path).stdout == "0.5\n"


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_reader_that_has_left_is_no_fault(tmp_path: Path, recipe: Path, interrupted: bool) -> None:
    code = FAKED.replace("argv.pop(1))", f"argv.pop(1)), {interrupted}")
    reading, writing = os.pipe()
    os.close(reading)
    ended = started(tmp_path, code, tmp_path / "runs", "train", recipe, "--quiet", stdout=writing)
    os.close(writing)
    assert ended.stderr == "warning: look here\n"
    assert ended.returncode == (130 if interrupted else 0)


def test_a_doctor_whose_reader_has_left_complains_no_more(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = started(tmp_path, MAIN, "doctor", stdout=writing, cwd=tmp_path)
    os.close(writing)
    assert (ended.stderr, ended.returncode) == ("", 0)


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_leave_their_cores_to_others_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    code = (
        "import atexit, os, sys\natexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules, file=sys.stderr))\n"
    )
    assert started(tmp_path, code + MAIN, "--version").stderr == f"{expected} False\n"


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
        module = ModuleType("sluice.pipeline.train")
        module.dry_run = lambda config: (answer,)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sluice.pipeline.train", module)

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


def test_record_switches_recorded_rollouts_on_whatever_the_recipe_says(pipeline: FakePipeline, recipe: Path) -> None:
    assert run("train", recipe).exit_code == 0
    assert run("train", recipe, "records.rollouts=false", "--record").exit_code == 0
    assert [call["config"].records.rollouts for call in pipeline.calls] == [False, True]


def test_record_is_refused_where_a_run_is_resumed(tmp_path: Path) -> None:
    result = run("train", "--resume", tmp_path, "--record")
    assert result.exit_code == 2
    assert "--record is for a new run" in " ".join(result.stderr.split())
