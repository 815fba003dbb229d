"""The train-infer correction of one batch, between its old log-probs and its advantages.

What leaves the loss leaves the samples too, so that nothing after it has to know of the correction: their loss masks, the counts of tokens
and, with `baseline: survivors`, the baseline of their group. The samples themselves stay in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from sluice.config.correction import TrainInferCorrectionConfig
from sluice.correction import CorrectionMetrics, compute_train_infer_correction
from sluice.errors import TrainerError
from sluice.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A batch after its correction."""

    samples: list[Sample]  # all of them, in their order
    micro_batches: list[dict[str, Any]]  # those rows that still have a token to train on; with `is_weight` [B, C]
    metrics: dict[str, float]


def correct(samples: Sequence[Sample], micro_batches: Sequence[dict[str, Any]], config: TrainInferCorrectionConfig) -> Corrected:
    """Correct all rows that train.

    Args:
        samples: the batch.
        micro_batches: its rows that train, with `rows` (which samples they are; neutral rows may follow), `tool_mask`,
            `old_per_token_logps` and `sampling_per_token_logps` [B, C]. Not changed.
        config: what leaves the loss, and what is weighted.

    Raises:
        TrainerError: the engine reported not a single log-prob: every ratio would be 1, whatever the divergence.
    """
    corrected = list(samples)
    kept: list[dict[str, Any]] = []
    parts: list[CorrectionMetrics] = []
    for tensors in micro_batches:
        mask = tensors["tool_mask"].bool()
        is_weight, filter_mask, found = compute_train_infer_correction(
            config, mask, tensors["old_per_token_logps"].float(), tensors["sampling_per_token_logps"].float()
        )
        parts.append(found)
        mask &= filter_mask
        for row, loss_mask in zip(tensors["rows"], mask.cpu().numpy(), strict=False):
            sample = samples[row]
            is_rejected = bool(sample.loss_mask.any() and not loss_mask.any())
            corrected[row] = replace(
                sample,
                loss_mask=loss_mask[: len(sample.completion_ids)],
                is_counted=sample.is_counted and not (is_rejected and config.baseline == "survivors"),
            )
        kept += _rows_of(tensors | {"tool_mask": mask.to(tensors["tool_mask"].dtype), "is_weight": is_weight}, mask.any(1))
    metrics = dict(CorrectionMetrics.merge(parts)) if parts else {}
    tokens = sum([int(np.count_nonzero(sample.loss_mask)) for sample in samples])
    if tokens and metrics.get("actor/train_infer_nan_tokens") == tokens:
        raise TrainerError(
            f"train_infer_correction: expected the engine's log-prob of every sampled token, got none in a batch of {tokens} tokens - use "
            "an engine that reports them, or leave the correction out"
        )
    return Corrected(samples=corrected, micro_batches=kept, metrics=metrics)


def side_by_side(micro_batches: Sequence[dict[str, Any]]) -> tuple[Any, Any, Any]:
    """Mask, old and inference log-probs of all rows that train, filled up to one length. [B, C] each"""
    width = max(tensors["tool_mask"].shape[1] for tensors in micro_batches)
    found = []
    for name, dtype in (("tool_mask", torch.bool), ("old_per_token_logps", torch.float32), ("sampling_per_token_logps", torch.float32)):
        rows = [tensors[name][: len(tensors["rows"])].to(dtype) for tensors in micro_batches]  # neutral rows may follow
        found.append(torch.cat([pad(one, (0, width - one.shape[1])) for one in rows]).cpu().numpy())
    return found[0], found[1], found[2]


def _rows_of(tensors: dict[str, Any], has_tokens: torch.Tensor) -> list[dict[str, Any]]:
    """A micro batch without its rows that have no token any more; none when there is no other."""
    at = has_tokens.nonzero()[:, 0]
    if len(at) == len(has_tokens):
        return [tensors]
    if not len(at):
        return []
    chosen = at.tolist()

    def of_rows(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            return value[at]
        return [value[row] for row in chosen if row < len(value)] if isinstance(value, list) else value  # a number is of the whole batch

    return [{name: of_rows(value) for name, value in tensors.items()}]
