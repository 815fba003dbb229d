"""`sluice simulate`: counts, violations, exit codes."""

from __future__ import annotations

import logging
import re

import pytest
import typer
from typer.testing import CliRunner

from sluice.cli.simulate import simulate as command
from sluice.scheduler import Scheduler

app = typer.Typer()
app.command()(command)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_it_tells_what_was_played_and_which_faults_happened() -> None:
    code, output = run("--seeds", "20", "--player", "both")
    assert code == 0
    assert re.search(r"machine: 20 runs, [\d,]+ batches, [\d,]+ group lifecycles", output)
    assert re.search(r"shell: 20 runs, [\d,]+ batches", output)
    assert re.search(r"faults: .*worker_crash \d+", output)
    assert "violations: 0" in output


def test_one_seed_alone_is_always_the_same() -> None:
    first, second = run("--seed", "14")[1], run("--seed", "14", "--player", "machine")[1]
    assert "machine: 1 runs" in first
    counts = re.compile(r"[\d,]+ (?:batches|group lifecycles|attempts|events)")
    assert counts.findall(first) == counts.findall(second) != []


def test_a_violation_is_shown_with_the_command_that_repeats_it_and_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_return", lambda self, task, epoch, out: None)
    code, output = run("--seeds", "40", "--first", "5")
    assert code == 1
    found = re.findall(r"repeat it with: (sluice simulate --seed (\d+) --player machine)", output)
    assert found
    assert re.search(r"violations: [1-9]", output)
    assert output.count("the last events:") <= 3
    again = run("--seed", found[0][1])
    assert again[0] == 1
    assert found[0][0] in again[1]


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.CRITICAL])
@pytest.mark.parametrize("breaks", [False, True])
def test_what_is_logged_afterwards_is_as_it_was(level: int, breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("sluice")
    monkeypatch.setattr(logger, "level", logger.level)
    logger.setLevel(level)
    during: list[int] = []

    def play(seeds: object, players: object, workers: object) -> bool:
        during.append(logger.level)
        if breaks:
            raise ZeroDivisionError
        return True

    monkeypatch.setattr("sluice.cli.simulate._play", play)
    run("--seed", "1")
    assert during == [logging.ERROR]
    assert logger.level == level
