from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from sluice.correction import apply_train_infer_correction, compute_train_infer_correction
from sluice.errors import CorrectionError
from tests.correction import strategies

CFG = {
    "filters": [{"enabled": True, "ratio_low": 0.5, "ratio_high": 2.0}],
    "is_weight": {"enabled": True, "upper_bound": 2.0},
}


def batch(**changes: Any) -> dict[str, Any]:
    """Two rows of four tokens: the second is rejected in its middle."""
    old = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.9, 0.5]]))
    return {
        "old_log_probs": old,
        "infer_logprobs": torch.log(torch.tensor([[0.5, 0.4, 0.5], [0.5, 0.1, 0.5]])),
        "response_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]),
        "final_response_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]),
    } | changes


def test_masks_of_either_shape_lose_what_the_filters_reject() -> None:
    given = batch()
    before = {name: tensor.clone() for name, tensor in given.items()}
    held = dict(given)
    found, metrics = apply_train_infer_correction(given, CFG)
    assert found is given
    assert found["response_mask"].tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert found["final_response_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert found["train_infer_is_weight"][0].tolist() == pytest.approx([1.0, 1.25, 1.0])
    assert found["train_infer_is_weight"].shape == (2, 3)
    assert metrics["actor/train_infer_final_mask_mean"] == pytest.approx(0.8)
    assert all(torch.equal(held[name], before[name]) for name in held)  # others may hold the same tensors


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_keep_their_type_and_their_first_column(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).to(dtype)
    found, _ = apply_train_infer_correction(batch(response_mask=mask), CFG)
    assert found["response_mask"].dtype == dtype
    assert found["response_mask"].int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


@given(strategies.settings, strategies.batches())
def test_the_masks_are_the_given_ones_times_the_filter_mask(cfg: Any, arrays: Any) -> None:
    mask, old, inference = (torch.from_numpy(array) for array in arrays)
    is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, mask, old, inference)
    wide = torch.cat([torch.ones(len(mask), 1, dtype=torch.bool), mask], 1)
    final = mask & (torch.arange(mask.shape[1]) % 2 == 0)
    found, told = apply_train_infer_correction(
        {"old_log_probs": old, "infer_logprobs": inference, "response_mask": wide, "final_response_mask": final}, cfg
    )
    assert torch.equal(found["response_mask"][:, 1:], mask & filter_mask)
    assert found["response_mask"][:, 0].all()
    assert torch.equal(found["final_response_mask"], final & filter_mask)
    assert torch.equal(found["train_infer_is_weight"], is_weight)
    assert dict(told) == dict(metrics)


def test_a_tensordict_is_a_batch() -> None:
    given = TensorDict(batch(), batch_size=2)  # type: ignore[arg-type]
    found, _ = apply_train_infer_correction(given, CFG)  # type: ignore[type-var]
    assert found["response_mask"].tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert found["train_infer_is_weight"].shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"infer_logprobs": None}, "infer_logprobs: expected a tensor, got None - let the engine report"),
        ({"final_response_mask": torch.ones(2, 5)}, r"final_response_mask: expected shape \(2, 3\).*or \(2, 4\).*got \(2, 5\)"),
        ({"final_response_mask": torch.ones(3, 3)}, r"final_response_mask: expected shape .*got \(3, 3\)"),
        ({"response_mask": torch.ones(2, 2)}, r"response_mask: expected shape .*got \(2, 2\)"),
        ({"infer_logprobs": torch.zeros(2, 4)}, r"infer_logprobs: expected the shape of old_log_probs, \(2, 3\), got \(2, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name_in_the_batch_and_nothing_is_changed(changes: dict[str, Any], message: str) -> None:
    given = batch(**changes)
    before = dict(given)
    with pytest.raises(CorrectionError, match=message):
        apply_train_infer_correction(given, CFG)
    assert given.keys() == before.keys()
    assert all(given[name] is before[name] for name in before)


@pytest.mark.parametrize("name", ["old_log_probs", "infer_logprobs", "response_mask"])
def test_missing_log_probs_are_an_error_that_names_them(name: str) -> None:
    given = batch()
    del given[name]
    with pytest.raises(CorrectionError, match=f"got none of the name {name} - let trainer and engine report"):
        apply_train_infer_correction(given, CFG)


def test_other_masks_may_be_named_and_one_that_is_not_there_is_passed_over() -> None:
    given = batch(loss_mask=torch.ones(2, 3))
    found, _ = apply_train_infer_correction(given, CFG, stat_mask_key="response_mask", update_mask_keys=["loss_mask", "no_mask"])
    assert found["loss_mask"].tolist() == [[1, 1, 1], [1, 0, 1]]
    assert found["response_mask"].tolist() == [[0, 1, 1, 1], [0, 1, 1, 0]]
