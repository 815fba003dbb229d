"""The train-infer correction in whole tiny runs, in both pipelines: on and off change what trains."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.config import load_config
from sluice.correction import load_batches, report_on
from sluice.errors import ConfigError
from sluice.pipeline.train import train
from sluice.trainer.trl import SluiceGRPOTrainer
from tests.pipeline import test_agentic, test_rlvr
from tests.pipeline.test_rlvr import Recorder

CORRECTION = {
    "is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 2.0},
    "filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.995, "ratio_high": 1.005}],
}
MISMATCH = {"engine": {"torch_threads": 1, "precision": "bfloat16"}, "trainer__logprob_tolerance": None, "trainer__max_steps": 2}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every loss of a run was computed from."""
    seen: list[dict[str, Any]] = []
    compute_loss = SluiceGRPOTrainer.compute_loss

    def noted(self: Any, trained_model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        seen.append({"mask": inputs["tool_mask"].bool(), "advantages": inputs["advantages"], "items": int(inputs["num_items_in_batch"])})
        return compute_loss(self, trained_model, inputs, *given, **more)

    monkeypatch.setattr(SluiceGRPOTrainer, "compute_loss", noted)
    return seen


RLVR = {"tasks__validation": [], "rewards__letters__query_filter_config": {"type": "no_filter"}}
AGENTIC: dict[str, Any] = {"val_env_manager": None, "validation": {}}
LORA = {"model__lora": {"r": 2}}
PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rlvr": (test_rlvr.write_recipe, RLVR),
    "rlvr with an adapter": (test_rlvr.write_recipe, RLVR | LORA),
    "rlvr, asynchronous": (test_rlvr.write_recipe, RLVR | {"async_generation_ratio": 1, "on_weight_update": "continue"}),
    "agentic, two turns": (test_agentic.write_recipe, AGENTIC),
    "agentic, asynchronous": (test_agentic.write_recipe, AGENTIC | {"async_generation_ratio": 1}),
}


def play(folder: Path, make: Any, model: Path, **changes: Any) -> tuple[Path, Recorder]:
    folder.mkdir()
    file, display = make(folder, model, **changes), Recorder()
    return train(load_config(file), config_path=file, display=display).folder, display


@pytest.mark.parametrize("path", PATHS)
def test_case_121_on_and_off_change_the_training_mask_of_a_running_pipeline(
    path: str, tmp_path: Path, model: Path, trained: list[dict[str, Any]]
) -> None:
    make, changes = PATHS[path]
    tokens: dict[str, list[int]] = {}
    for name, section in {"on": CORRECTION, "off": None}.items():
        trained.clear()
        _, display = play(tmp_path / name, make, model, **MISMATCH, **changes, train_infer_correction=section)
        tokens[name] = [int(metrics["batch/loss_tokens"]) for metrics in display.steps]
        assert sum(tokens[name]) == sum(int(one["mask"].sum()) for one in trained)
        assert {one["items"] for one in trained} == {count for count in tokens[name] if count}
        gaps = [max(value for at, value in metrics.items() if at.endswith("logprob_gap_max")) for metrics in display.steps]
        assert min(gaps) > 1e-4, "two precisions that can be told apart"
        for metrics in display.steps:
            assert ("actor/train_infer_final_mask_mean" in metrics) == (name == "on")
            if name == "on":
                kept, sampled = metrics["batch/loss_tokens"], metrics["batch/completion_length_mean"] * metrics["batch/rollouts"]
                assert metrics["actor/train_infer_final_mask_mean"] < 1
                assert kept < sampled
                assert metrics["actor/old_logprobs_seconds"] > 0
        assert {one["advantages"].dim() for one in trained} == {2 if name == "on" else 1}
    # the first batch is the same in both: sampled from the same weights, before any step
    assert tokens["on"][0] < tokens["off"][0]


def test_every_token_is_accounted_for_and_the_log_probs_can_be_looked_at_afterwards(tmp_path: Path, model: Path) -> None:
    folder, display = play(
        tmp_path / "run", test_rlvr.write_recipe, model, **MISMATCH, **RLVR, train_infer_correction=CORRECTION | {"save_every_steps": 2}
    )
    (file,) = (folder / "correction").iterdir()
    assert file.name == "step-000002.npz"
    found = report_on(load_batches(folder), load_config(folder / "config.yaml").train_infer_correction)
    together = found.rejections[0]
    assert together.name == "configured, all together"
    assert 1 - together.token_share == pytest.approx(display.steps[1]["actor/train_infer_final_mask_mean"])
    assert found.metrics["actor/train_infer_k2"] == pytest.approx(display.steps[1]["actor/train_infer_k2"], rel=1e-5)
    assert found.tokens * together.token_share == pytest.approx(found.tokens - display.steps[1]["batch/loss_tokens"], abs=1e-6)


def test_with_equal_precision_the_tolerance_holds_and_nothing_is_rejected(tmp_path: Path, model: Path) -> None:
    _, display = play(
        tmp_path / "run", test_agentic.write_recipe, model, **AGENTIC, trainer__max_steps=2, train_infer_correction=CORRECTION
    )
    assert all(metrics["actor/logprob_gap_max"] <= 1e-4 for metrics in display.steps)
    assert all(metrics["actor/train_infer_final_mask_mean"] == 1.0 for metrics in display.steps)


def test_a_run_of_which_everything_is_rejected_takes_no_step_and_says_so(tmp_path: Path, model: Path) -> None:
    nothing = {"filters": [{"enabled": True, "agg_type": "token", "ratio_low": 2.0, "ratio_high": 3.0}]}
    folder, display = play(tmp_path / "run", test_rlvr.write_recipe, model, **MISMATCH, **RLVR, train_infer_correction=nothing)
    assert [metrics["actor/step_skipped"] for metrics in display.steps] == [1.0, 1.0]
    assert [metrics["batch/useful_groups"] for metrics in display.steps] == [0.0, 0.0]
    before, after = (np.frombuffer((path / "model.safetensors").read_bytes(), np.uint8) for path in (model, folder / "model"))
    assert np.array_equal(before[-1000:], after[-1000:])


def test_another_precision_with_the_tolerance_left_on_never_starts(tmp_path: Path, model: Path) -> None:
    for index, make in enumerate((test_rlvr.write_recipe, test_agentic.write_recipe)):
        folder = tmp_path / str(index)
        folder.mkdir()
        file = make(folder, model, engine={"precision": "int8"})
        with pytest.raises(ConfigError, match="logprob_tolerance: must be null with engine.precision int8"):
            load_config(file)
        assert not list(itertools.chain(folder.glob("runs/*")))
