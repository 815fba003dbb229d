"""The correction on a batch of ROLL: the columns that ROLL has, the numbers of `sluice.correction`, and ROLL's order of things."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.correction import compute_train_infer_correction
from sluice.errors import ConfigError, CorrectionError
from sluice.roll import DataProto, apply_train_infer_correction

SETTINGS = {"filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.8, "ratio_high": 1.2}], "is_weight": {"enabled": True}}


def batch_of(seed: int, rows: int = 3, width: int = 6, **more: torch.Tensor) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width - 1, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    tensors = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "old_log_probs": old,
        "infer_logprobs": old - 0.5 * torch.randn(rows, width - 1, generator=generator),
        "response_mask": mask,
        "final_response_mask": mask.long(),
    }
    return DataProto.from_dict(tensors | more, {"domain": ["math"] * rows}, meta_info={"metrics": {"before": 1.0}, "step": 3})


@given(seed=st.integers(0, 999))
def test_masks_weights_and_metrics_are_those_of_the_correction_and_nothing_else_changes(seed: int) -> None:
    before, batch = batch_of(seed), batch_of(seed)
    weight, kept, expected = compute_train_infer_correction(
        SETTINGS, before["response_mask"], before["old_log_probs"], before["infer_logprobs"]
    )
    answer, metrics = apply_train_infer_correction(batch, SimpleNamespace(train_infer_correction=SETTINGS))
    assert answer is batch
    assert torch.equal(batch["train_infer_is_weight"], weight)
    for name in ("response_mask", "final_response_mask"):
        assert batch[name].dtype == before[name].dtype
        assert torch.equal(batch[name][:, 0], before[name][:, 0])
        assert torch.equal(batch[name][:, 1:].bool(), before[name][:, 1:].bool() & kept)
    for name in ("input_ids", "old_log_probs", "infer_logprobs"):
        assert torch.equal(batch[name], before[name])
    assert dict(metrics) == dict(expected)
    assert batch.meta_info == {"metrics": {"before": 1.0, **expected}, "step": 3}
    assert len(batch) == 3


def test_case_57_survivors_come_before_the_advantages_and_roll_has_them_after() -> None:
    given_advantages = {"advantages": torch.zeros(3, 6)}
    apply_train_infer_correction(batch_of(0, **given_advantages), SETTINGS)
    apply_train_infer_correction(batch_of(0, **given_advantages), {**SETTINGS, "baseline": "all"})
    apply_train_infer_correction(batch_of(0), {**SETTINGS, "baseline": "survivors"})
    with pytest.raises(ConfigError, match="survivors needs the correction before the advantages"):
        apply_train_infer_correction(batch_of(0, **given_advantages), {**SETTINGS, "baseline": "survivors"})


@pytest.mark.parametrize("missing", ["old_log_probs", "infer_logprobs", "response_mask"])
def test_what_is_missing_is_named_and_nothing_is_changed(missing: str) -> None:
    batch = batch_of(0)
    batch.pop(batch_keys=[missing])
    with pytest.raises(CorrectionError, match=f"got none of the name {missing}"):
        apply_train_infer_correction(batch, SETTINGS)
    names: Any = batch.batch
    assert "train_infer_is_weight" not in set(names.keys())
    assert batch.meta_info["metrics"] == {"before": 1.0}


def test_what_is_no_batch_is_said_and_notes_that_are_none_are_begun() -> None:
    with pytest.raises(CorrectionError, match="expected a DataProto, got dict"):
        apply_train_infer_correction({"old_log_probs": torch.zeros(1, 1)}, SETTINGS)  # type: ignore[arg-type]
    batch = batch_of(0)
    batch.meta_info["metrics"] = None
    _, metrics = apply_train_infer_correction(batch, SETTINGS)
    assert batch.meta_info["metrics"] == dict(metrics)
