"""`sluice status` prints how a run is doing, for a person or as JSON, and disturbs nothing."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.app import app
from sluice.cli.status import show_status
from sluice.records import MAX_STEPS, SCHEDULER, Journal, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that goes on in this process."""
    with RunFolder.create(tmp_path / "runs", "sums", 7, "exp_name: sums\n", facts={MAX_STEPS: 20}) as made, Journal(made.run_db) as journal:
        journal.fact(SCHEDULER, {"time": 1.0, "step": 3, "running_groups": 2, "waiting_for": "weights", "acceptance_rate": None})
        journal.event("warning", "é and \N{SNOWMAN}")
        journal.flush()
        yield made


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


def test_a_person_gets_lines_and_the_run_is_left_alone(folder: RunFolder) -> None:
    result = run(folder.path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"Run {folder.path.name}: running, 3 of 20 steps done in 0:0")
    assert any(line.startswith("  waiting         for weights") for line in lines)
    assert any(line.endswith("warning: é and \N{SNOWMAN}") for line in lines)
    assert sorted(path.name for path in folder.path.iterdir() if "-" not in path.name) == ["config.yaml", "run.db", "run.lock"]


def test_a_program_gets_one_json_object(folder: RunFolder) -> None:
    status = json.loads(run(folder.path, "--json").stdout, parse_constant=pytest.fail)
    assert (status["folder"], status["state"], status["step"], status["max_steps"]) == (str(folder.path), "running", 3, 20)
    assert (status["running_groups"], status["waiting_for"], status["acceptance_rate"], status["oldest_group"]) == (
        2,
        "weights",
        None,
        None,
    )
    assert status["troubles"][0]["message"] == "é and \N{SNOWMAN}"
    assert status["can_be_resumed"] is False
    folder.release()
    status = json.loads(run(folder.path, "--json").stdout)
    assert (status["state"], status["can_be_resumed"]) == ("killed", True)


def test_what_is_no_run_ends_with_1_and_says_what_to_give(folder: RunFolder, tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "nowhere", "found nothing there"),
        (folder.path.parent, f"it holds 1 runs, the newest is {folder.path}"),
    ):
        result = run(path)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert words in result.stderr
        assert "Traceback" not in result.output


def test_a_terminal_without_the_letters_gets_their_codes(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    show_status(folder.path, as_json=False)
    sys.stdout.flush()
    assert b"warning: \\xe9 and \\u2603" in output.getvalue()
