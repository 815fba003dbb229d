"""Arguments that cannot be meant: refused in words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sluice.correction import apply_train_infer_correction, compute_train_infer_correction
from sluice.errors import CorrectionError


def a_batch(**columns: Any) -> dict[str, Any]:
    return {
        "old_log_probs": torch.tensor([[-1.0, -2.0]]),
        "infer_logprobs": torch.tensor([[-1.5, -2.0]]),
        "response_mask": torch.ones(1, 3),
        **columns,
    }


@pytest.mark.parametrize("mask", [None, np.ones((1, 2)), [[1, 1]]], ids=["none", "array", "list"])
def test_a_mask_to_be_changed_that_is_no_tensor_is_refused_by_its_name(mask: Any) -> None:
    with pytest.raises(CorrectionError, match=r"final_response_mask: expected a torch tensor, got (NoneType|ndarray|list|None)"):
        apply_train_infer_correction(a_batch(final_response_mask=mask), {})


@pytest.mark.parametrize("keys", ["response_mask", ("final_response_masks",), ()], ids=["text", "misspelt", "none"])
def test_filters_of_which_no_mask_would_learn_are_refused(keys: Any) -> None:
    cfg = {"filters": [{"enabled": True, "ratio_low": 0.9, "ratio_high": 1.1}]}
    with pytest.raises(CorrectionError, match="update_mask_keys"):
        apply_train_infer_correction(a_batch(), cfg, update_mask_keys=keys)


@pytest.mark.parametrize("given", [math.nan, math.inf, -1.0])
def test_divisors_of_means_are_numbers(given: float) -> None:
    batch = a_batch()
    with pytest.raises(CorrectionError, match="global_valid_tokens"):
        compute_train_infer_correction(
            {}, batch["response_mask"], batch["old_log_probs"], batch["infer_logprobs"], global_valid_tokens=given
        )


def test_a_mask_with_nan_is_refused() -> None:
    batch = a_batch(response_mask=torch.tensor([[1.0, math.nan, 1.0]]))
    with pytest.raises(CorrectionError, match=r"response_mask: .*nan"):
        apply_train_infer_correction(batch, {})


def test_eight_bit_floats_are_refused_in_words() -> None:
    eight = torch.float8_e4m3fn
    with pytest.raises(CorrectionError, match="old_logprobs: expected a floating type"):
        compute_train_infer_correction({}, torch.ones(1, 2), torch.zeros(1, 2).to(eight), torch.zeros(1, 2).to(eight))


def test_sparse_tensors_are_refused_in_words() -> None:
    rows = torch.zeros(1, 2).to_sparse()
    with pytest.raises(CorrectionError, match="old_logprobs"):
        compute_train_infer_correction({}, torch.ones(1, 2), rows, rows)
