"""The page on recorded rollouts says what is so, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.filters import build_query_filter
from sluice.records import RolloutRecorder, RunFolder, read_rollouts, rollout_parts
from tests.records.test_rollouts import tell

PAGE = (Path(__file__).parents[2] / "docs" / "recorded_rollouts.md").read_text(encoding="utf-8")
EXAMPLES = dict(zip(("sluice", "pyarrow", "pandas", "polars", "duckdb"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder in which runs/RUN has recorded three groups."""
    with RunFolder.create(tmp_path / "runs", "exp", 1, "exp_name: exp\n") as folder:
        pass
    folder.path.rename(tmp_path / "runs" / "RUN")
    recorder = RolloutRecorder(tmp_path / "runs" / "RUN" / "rollouts", {"identity": "a run"})
    for group_id in range(3):
        tell(recorder, group_id, outcome="dropped" if group_id else "trained")
    recorder.close()
    return tmp_path


@pytest.mark.parametrize("library", EXAMPLES)
def test_the_examples_run(library: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(run)
    exec(compile(EXAMPLES[library], f"example for {library}", "exec"), {})
    shown = capsys.readouterr().out
    assert "0.5" in shown or "[1. 0.]" in shown or "1.0" in shown


def test_a_recorded_group_goes_into_a_filter_as_the_page_says(run: Path) -> None:
    (call,) = re.findall(r"`(build_query_filter\(.*\))`", PAGE)
    group = next(iter(read_rollouts(run / "runs" / "RUN")))
    assert eval(call, {"build_query_filter": build_query_filter, "group": group}).keep


def test_the_tables_name_every_column_in_order_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == rollout_parts.SCHEMA.names
