"""The environment and the recipe with which the page on agentic runs begins do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.config import AgenticConfig, load_config
from sluice.pipeline.dry_run_agentic import dry_run_agentic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "agentic.md"


def test_its_first_environment_is_played_and_judged_by_its_first_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    (environment,) = re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL)
    recipe, everything = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[:2]
    assert len(environment.splitlines()) <= 30
    (tmp_path / "sums.py").write_text(environment)
    (tmp_path / "sums.yaml").write_text(recipe)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(tmp_path / "sums.yaml", ["engine.torch_threads=1"])
    assert isinstance(config, AgenticConfig)
    group = dry_run_agentic(config)
    assert re.fullmatch(r"Calculate \d \+ \d - \d", group.prompt)
    assert len(group.rewards) == 8
    assert not group.failures
    assert all(reward in (0.0, 1 / 3, 2 / 3, 1.0) for reward in group.rewards)
    (tmp_path / "everything.yaml").write_text(everything)
    load_config(tmp_path / "everything.yaml")
