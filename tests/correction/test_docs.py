"""The page on the correction says what is so: its examples run and print what they say, and every name is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sluice.config import parse_config
from sluice.config.correction import LEVELS, PRESETS, CorrectionFilterConfig, IsWeightConfig, TrainInferCorrectionConfig
from sluice.correction import load_batches, report_on
from sluice.correction.metrics import CorrectionMetrics
from tests.config.recipes import smallest

DOCS = Path(__file__).parents[2] / "docs" / "correction.md"
TEXT = DOCS.read_text(encoding="utf-8")


def test_the_examples_run_and_print_what_they_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves a file
    examples = re.findall(r"```python\n(.*?)```\n+(?:prints ((?:`[^`]*`(?: and )?)+))?", TEXT, flags=re.DOTALL)
    assert len(examples) == 3
    for code, promised in examples:
        exec(compile(code, str(DOCS), "exec", dont_inherit=True), {"__name__": "example"})
        assert capsys.readouterr().out.splitlines() == re.findall(r"`([^`]*)`", promised)
    assert report_on(load_batches(tmp_path / "batch.npz")).tokens == 5


def test_the_settings_shown_load() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(shown) == 2
    for block in shown:
        assert parse_config(smallest() | yaml.safe_load(block)).train_infer_correction is not None  # type: ignore[union-attr]


def test_every_key_level_preset_and_metric_is_named() -> None:
    import torch

    from sluice.correction import compute_train_infer_correction

    one = torch.zeros(1, 1)
    _, _, metrics = compute_train_infer_correction({"is_weight": {"enabled": True}}, one + 1, one, one)
    assert isinstance(metrics, CorrectionMetrics)
    metric_names = {re.sub(rf"_({'|'.join(LEVELS)})_", "_<level>_", name) for name in metrics}
    keys = {*TrainInferCorrectionConfig.model_fields, *CorrectionFilterConfig.model_fields}
    for name in (*LEVELS, *PRESETS, *metric_names, *keys - {"is_weight"}, *(f"is_weight.{key}" for key in IsWeightConfig.model_fields)):
        assert f"`{name}`" in TEXT, name


def test_what_the_metrics_page_names_is_what_is_recorded() -> None:
    page = (DOCS.parent / "metrics.md").read_text(encoding="utf-8")
    for name in ("actor/train_infer_...", "actor/step_skipped", "actor/nan_logprobs", "actor/is_weight_clipfrac@sum"):
        assert f"`{name}`" in page, name
