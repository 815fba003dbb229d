"""What the documents for contributors say is true."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import sluice
from sluice.filters import build, build_query_filter

ROOT = Path(sluice.__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="installed without its source tree")


def test_the_filter_in_ten_lines_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    (tmp_path / "example_of_contributing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    written = importlib.import_module("example_of_contributing").BestFilter
    monkeypatch.setattr(build, "QUERY_FILTERS", {**build.QUERY_FILTERS, "best_filter": written})
    judge = build_query_filter({"type": "best_filter", "filter_args": {"most": 0.9}}).judge
    assert judge([1.0, 0.0]).keep
    assert judge([1.0, 1.0]).reason == "mastered"
    with pytest.raises(sluice.ConfigError, match="most"):
        build_query_filter({"type": "best_filter", "filter_args": {"msot": 0.9}})


@pytest.mark.parametrize("future", ["from __future__ import annotations\n", ""])
def test_the_filter_of_the_architecture_page_works_with_and_without_postponed_annotations(
    future: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.DOTALL)
    name = f"example_of_architecture_{bool(future)}"
    (tmp_path / f"{name}.py").write_text(code.replace("from __future__ import annotations\n", future))
    monkeypatch.syspath_prepend(tmp_path)
    written = importlib.import_module(name).CalmFilter
    monkeypatch.setattr(build, "QUERY_FILTERS", {**build.QUERY_FILTERS, "calm_filter": written})
    judge = build_query_filter({"type": "calm_filter", "filter_args": {"most": 0.4}}).judge
    assert judge([1.0, 0.9]).keep
    assert judge([1.0, 0.0]).reason == "too_noisy"


def test_the_changelog_has_the_version() -> None:
    assert f"## [{sluice.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_only_the_light_packages_are_always_needed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[<>=]", line)[0] for line in project["dependencies"]} == {
        "numpy",
        "pydantic",
        "PyYAML",
        "rapidfuzz",
        "rich",
        "typer",
    }


@pytest.mark.parametrize("goal", ["train", "test"])
def test_make_says_what_to_do_about_an_old_python(goal: str, tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.9.1; else exit 1; fi\n')
    old.chmod(0o755)
    ended = subprocess.run(
        ["make", "-C", ROOT, goal, f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode != 0
    assert f"error: expected Python 3.11 or newer, PYTHON={old} is Python 3.9.1" in ended.stdout
