from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sluice.cli.app import app
from sluice.correction import save_batch
from tests.config.recipes import TEXT


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    old = -random.exponential(size=(8, 30))
    mask = np.arange(30) % 10 < 7
    save_batch(tmp_path / "batch.npz", np.broadcast_to(mask, (8, 30)), old, old - 0.1 * random.standard_normal((8, 30)))
    return tmp_path / "batch.npz"


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["correction", "report", *map(str, arguments)])


def test_the_report_shows_ratios_bounds_positions_and_what_every_rule_rejects(saved: Path) -> None:
    result = run(saved)
    assert result.exit_code == 0, result.output
    assert "8 rows, 168 sampled tokens" in result.output
    for part in ("KL(inference || train)", "quantiles", "Bounds that leave", "Tokens by ratio", "By position in the response", "rule"):
        assert part in result.output
    assert re.search(r"geometric_rejection +\d+\.\d+%", result.output)
    page = (saved.parent / "correction_report.html").read_text()
    assert page.count("Plotly.newPlot") == 3
    assert not re.search(r"<script[^>]+src=|<link", page)  # nothing is loaded from a network


def test_without_plotly_the_text_is_all_and_says_what_to_install(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any, **more: Any) -> Any:
        if name.startswith("plotly"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="plotly")
        return real(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run(saved)
    assert result.exit_code == 0
    assert "pip install 'sluice-rl[report]'" in result.output
    assert "Tokens by ratio" in result.output
    assert not (saved.parent / "correction_report.html").exists()
    wanted = run(saved, "--html", saved.parent / "page.html")
    assert wanted.exit_code == 1
    assert "--html needs the package plotly" in wanted.output


def test_a_recipe_adds_its_own_rules(saved: Path) -> None:
    recipe = saved.parent / "recipe.yaml"
    recipe.write_text(TEXT + "train_infer_correction:\n  filters:\n    - {enabled: true, ratio_low: 0.9, ratio_high: 1.1}\n")
    result = run(saved, "--recipe", recipe)
    assert re.search(r"filters\.0 \(token, ratio 0\.9\.\.1\.1\) +\d", result.output)
    recipe.write_text(TEXT)
    result = run(saved, "--recipe", recipe)
    assert result.exit_code == 2
    assert "expected a section train_infer_correction" in result.output


def test_for_programs_there_is_json(saved: Path) -> None:
    result = run(saved, "--format", "json")
    found = json.loads(result.output)
    assert found["tokens"] == 168
    assert [level["level"] for level in found["levels"]] == ["token", "segment", "geometric", "sequence"]


def test_a_file_without_a_sampled_token_and_one_that_is_none_are_told_apart(tmp_path: Path) -> None:
    nothing = np.zeros((2, 3))
    save_batch(tmp_path / "empty.npz", nothing.astype(bool), nothing, nothing)
    result = run(tmp_path / "empty.npz")
    assert result.exit_code == 0
    assert "nothing to compare" in result.output
    assert json.loads(run(tmp_path / "empty.npz", "--format", "json").output)["mean_gap"] is None
    result = run(tmp_path / "none.npz")
    assert result.exit_code == 1
    assert "correct the path" in result.output
