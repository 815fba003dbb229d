"""What the doctor asks the machine, on machines with a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli import environment
from sluice.cli.doctor import problem
from sluice.cli.environment import environment_checks, missing_packages
from sluice.cli.reporting import extra_packages, package_of


def answers(runs: Path, name: str) -> list[tuple[str, str]]:
    return [(check.status, "\n".join(check.lines())) for check in environment_checks(runs) if check.name == name]


def test_the_extra_is_read_from_the_installed_package() -> None:
    assert {"torch", "trl", "math-verify"} <= set(extra_packages("train"))
    assert set(extra_packages(None)) == {"numpy", "pydantic", "PyYAML", "rapidfuzz", "rich", "typer"}
    assert package_of("math_verify.parser") == "math-verify"
    assert package_of("mine") is None
    textworld = extra_packages("agentic")["textworld"]  # written with an extra of its own: textworld[pddl]
    assert [environment._is_within(version, textworld) for version in ("1.6.9", "1.7.0", "2.0")] == [False, True, False]


def test_a_missing_package_of_the_extra_is_a_warning_and_of_the_core_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment._version
    monkeypatch.setattr(environment, "_version", lambda name: None if name in ("trl", "rich") else found(name))
    assert "trl" in missing_packages("train")
    ((status, text),) = answers(tmp_path, "packages")
    assert (status, "missing: rich" in text) == ("problem", True)
    ((status, text),) = answers(tmp_path, "[train]")
    assert status == "warning"
    assert "trl" in text
    assert text.endswith("pip install 'sluice-rl[train]'")


def test_a_version_outside_the_tested_range_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment._version
    monkeypatch.setattr(environment, "_version", lambda name: "9.0.1" if name == "numpy" else found(name))
    ((status, text),) = answers(tmp_path, "packages")
    assert status == "warning"
    assert "numpy 9.0.1 (tested: " in text


@pytest.mark.parametrize(
    ("version", "bounds", "within"),
    [
        ("2.13.0+cpu", ">=2.13,<3", True),
        ("2.12.9", "<3,>=2.13", False),
        ("3.0.0", ">=2.13,<3", False),
        ("1.17.0", ">=1.16,<1.17", False),
        ("0.10", ">=0.9,<0.10", False),
        ("1", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, bounds: str, within: bool) -> None:
    assert environment._is_within(version, bounds) is within


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # root may write into any folder, but nobody into a file as if it were one
    ((status, text),) = answers(tmp_path / "file" / "runs", "runs folder")
    assert status == "problem"
    assert "cannot be written" in text


def test_a_disk_without_write_ahead_log_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_wal_trouble", lambda file: "journal mode stays delete")
    ((status, text),) = answers(tmp_path / "deep" / "runs", "runs folder")
    assert status == "problem"
    assert f"{tmp_path}: SQLite's write-ahead log does not work here (journal mode stays delete)" in text
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_processors_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(environment, "_cpu_quota", lambda: 0.5)
    ((status, text),) = answers(tmp_path, "processors")
    assert status == "warning"
    assert "limited to the time of 0.5" in text


def test_an_answer_of_several_lines_stands_below_its_name() -> None:
    assert problem("recipe", "two problems\n  one", "mend them").lines() == [
        "problem  recipe       two problems",
        "                        one - mend them",
    ]
