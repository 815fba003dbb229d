"""The train-infer correction on a training batch of ROLL: `sluice.correction` with the columns and the default that ROLL has."""

from __future__ import annotations

from typing import Any, Final

import torch

from sluice.correction.apply import FINAL_MASK, INFERENCE, IS_WEIGHT, MASK, OLD
from sluice.correction.apply import apply_train_infer_correction as apply_to_columns
from sluice.correction.metrics import CorrectionMetrics
from sluice.correction.settings import read_settings
from sluice.errors import ConfigError, CorrectionError
from sluice.roll.data import METRICS, DataProto

ADVANTAGES: Final = "advantages"


def apply_train_infer_correction(batch: DataProto, config: Any) -> tuple[DataProto, CorrectionMetrics]:
    """Take the tokens that the filters reject out of the masks of a batch, and put the weights beside them. No row leaves the batch.

    ROLL computes the advantages first, so that rejected rows stay in the baseline of their group: `baseline: all`, which is the default
    here. With `baseline: survivors`, said in so many words, this must come before the advantages: leave the rows of which no token is left
    in `response_mask` out of them (`sluice.advantage` takes a mask).

    Args:
        batch: old_log_probs, infer_logprobs [B, T - 1]; response_mask and, if there is one, final_response_mask [B, T] or [B, T - 1].
            Changed: the masks, and train_infer_is_weight [B, T - 1] and the metrics in meta_info are new.
        config: a whole configuration with `train_infer_correction`, that section, or a mapping of the same keys.

    Returns:
        The batch, and its metrics.

    Raises:
        ConfigError: the settings are wrong, or ask for survivors when there are advantages.
        CorrectionError: something is missing or does not fit; nothing has been changed then.
    """
    settings = read_settings(config)
    if not isinstance(batch, DataProto):
        raise CorrectionError(
            f"expected a DataProto, got {type(batch).__name__} - for a mapping of tensors there is the function of the same name in "
            "sluice.correction"
        )
    names = [] if batch.batch is None else list(batch.batch.keys())
    if "baseline" in settings.model_fields_set and settings.baseline == "survivors" and ADVANTAGES in names:
        raise ConfigError(
            "train_infer_correction.baseline: survivors needs the correction before the advantages, and the batch has them already - "
            "call it earlier, or set baseline to all, as ROLL has it"
        )
    columns: dict[str, torch.Tensor] = {name: batch[name] for name in (OLD, INFERENCE, MASK, FINAL_MASK) if name in names}
    corrected, metrics = apply_to_columns(columns, settings.model_copy(update={"baseline": "all"}))
    for name in (MASK, FINAL_MASK, IS_WEIGHT):
        if name in corrected:
            batch[name] = corrected[name]
    batch.meta_info[METRICS] = {**(batch.meta_info.get(METRICS) or {}), **metrics}
    return batch, metrics
