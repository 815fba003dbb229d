from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from sluice.correction import TrainInferCorrectionConfig, compute_train_infer_correction, report_on
from sluice.correction.report import SHARES
from sluice.correction.saved import SavedBatch
from tests.correction import strategies


def batch(mask: Any, old: Any, inference: Any) -> SavedBatch:
    return SavedBatch(
        mask=torch.as_tensor(mask), old=torch.as_tensor(old), inference=torch.as_tensor(inference), files=(Path("batch.npz"),)
    )


@given(strategies.batches())
def test_every_token_is_in_every_part_of_the_report_once(arrays: Any) -> None:
    found = report_on(batch(*arrays))
    assert found.tokens == int(arrays[0].sum())
    assert found.rows == int(arrays[0].any(1).sum())
    if not found.tokens:
        assert found.levels == found.positions == found.rejections == ()
        return
    for level in found.levels:
        assert sum(level.counts) == level.count
        assert list(level.quantiles) == sorted(level.quantiles)
        assert all(low <= high for low, high in level.bounds)
    counts = {level.level: level.count for level in found.levels}
    assert counts["token"] == found.tokens
    assert counts["geometric"] == counts["sequence"] == found.rows
    assert sum(place.tokens for place in found.positions) == found.tokens
    assert all(0 <= one.token_share <= 1 and 0 <= one.row_share <= 1 for one in found.rejections)


def test_the_bounds_it_gives_reject_about_the_share_they_are_given_for() -> None:
    random = np.random.default_rng(0)
    old = -random.exponential(size=(40, 500))
    arrays = np.ones((40, 500), dtype=bool), old, old - 0.1 * random.standard_normal((40, 500))
    found = report_on(batch(*arrays))
    (tokens,) = (level for level in found.levels if level.level == "token")
    for share, (low, high) in zip(SHARES, tokens.bounds, strict=True):
        cfg = {"filters": [{"enabled": True, "ratio_low": low, "ratio_high": high}]}
        _, _, metrics = compute_train_infer_correction(cfg, *map(torch.from_numpy, arrays))
        assert 1 - metrics["actor/train_infer_final_mask_mean"] == pytest.approx(share, rel=0.1)


def test_positions_count_sampled_tokens_and_configured_rules_are_told_one_by_one() -> None:
    """Two turns with a reply in between: the third sampled token is the worst one."""
    old = torch.tensor([[-1.0, -1.0, -9.0, -1.0, -1.0]], dtype=torch.float64)
    gaps = torch.tensor([[0.1, 0.2, 7.0, 1.0, 0.0]], dtype=torch.float64)
    chosen = TrainInferCorrectionConfig.model_validate(
        {"filters": [{"enabled": True, "ratio_low": 0.5, "ratio_high": 2.0}, {"agg_type": "segment", "ratio_low": None, "ratio_high": 1.3}]}
    )
    found = report_on(batch([[True, True, False, True, True]], old, old - gaps), chosen)
    assert [place.first for place in found.positions] == [0, 1, 2, 3]
    assert [place.mean for place in found.positions] == pytest.approx([0.1, 0.2, 1.0, 0.0])
    assert found.largest_gap == pytest.approx(1.0)
    shares = {one.name: one.token_share for one in found.rejections}
    assert shares["configured, all together"] == 0.25
    assert shares["filters.0 (token, ratio 0.5..2)"] == 0.25
    assert shares["filters.1 (segment, ratio ..1.3), not enabled"] == 0.5
    assert shares["sequence_mis"] == 1.0
    (segments,) = (level for level in found.levels if level.level == "segment")
    assert (segments.quantiles[0], segments.quantiles[-1]) == pytest.approx((math.exp(0.15), math.exp(0.5)))
