"""The correction of a whole batch: masks and weights under the names that ROLL's training batch has."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final, TypeVar

import torch

from sluice.correction.compute import compute_train_infer_correction
from sluice.correction.metrics import CorrectionMetrics
from sluice.correction.settings import read_settings
from sluice.correction.tensors import fit_mask
from sluice.errors import CorrectionError

OLD: Final = "old_log_probs"
INFERENCE: Final = "infer_logprobs"
MASK: Final = "response_mask"
FINAL_MASK: Final = "final_response_mask"
IS_WEIGHT: Final = "train_infer_is_weight"

B = TypeVar("B", bound=MutableMapping[str, Any])


def apply_train_infer_correction(
    batch: B, cfg: Any, *, stat_mask_key: str = MASK, update_mask_keys: Sequence[str] = (MASK, FINAL_MASK)
) -> tuple[B, CorrectionMetrics]:
    """Take the tokens that the filters reject out of the masks of a batch, and put the weights beside them. No row leaves the batch.

    Args:
        batch: `old_log_probs` and `infer_logprobs` [B, T - 1]; masks [B, T], whose first column is left as it is, or [B, T - 1]. Gets
            masks of the same types, and `train_infer_is_weight` [B, T - 1]. The tensors that it held are not changed.
        cfg: as for `compute_train_infer_correction`.
        stat_mask_key: the mask that statistics are taken over.
        update_mask_keys: the masks to be changed; one that the batch lacks is passed over, unless it lacks all. Empty, where nothing is
            filtered: none.

    Returns:
        The batch, and the metrics of `compute_train_infer_correction`.

    Raises:
        ConfigError: the settings are wrong.
        CorrectionError: something is missing or does not fit; nothing has been changed then.
    """
    names = set(batch.keys())
    missing = [name for name in (OLD, INFERENCE, stat_mask_key) if name not in names]
    if missing:
        raise CorrectionError(
            f"batch: expected {OLD}, {INFERENCE} and {stat_mask_key}, got none of the name {', '.join(missing)} - let trainer and engine "
            "report the log-prob of every sampled token, or leave the correction off"
        )
    try:
        is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, batch[stat_mask_key], batch[OLD], batch[INFERENCE])
    except CorrectionError as error:
        raise CorrectionError(_in_terms_of_the_batch(str(error), stat_mask_key)) from error
    _check_update(update_mask_keys, names, cfg)
    updated = {name: _updated(name, batch[name], filter_mask) for name in update_mask_keys if name in names}
    for name, mask in updated.items():
        batch[name] = mask
    batch[IS_WEIGHT] = is_weight
    return batch, metrics


def _check_update(keys: Any, names: set[str], cfg: Any) -> None:
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise CorrectionError(f"update_mask_keys: expected names of masks, got {keys!r} - give a list, such as ['{MASK}']")
    if not names.intersection(keys) and (keys or read_settings(cfg).enabled_filters):
        raise CorrectionError(
            f"update_mask_keys: expected at least one of the batch's {', '.join(sorted(map(str, names)))}, got {list(keys)} - "
            "name the mask that the loss reads: what filters reject would train otherwise"
        )


def _updated(name: str, mask: torch.Tensor, filter_mask: torch.Tensor) -> torch.Tensor:
    part = fit_mask(name, mask, filter_mask.shape)
    if mask.device != filter_mask.device:
        raise CorrectionError(f"{name}: expected it on {filter_mask.device}, as the log-probs, got {mask.device} - move it there")
    kept = part * filter_mask.to(mask.dtype)
    return kept if part.shape == mask.shape else torch.cat([mask[:, :1], kept], dim=1)


def _in_terms_of_the_batch(message: str, stat_mask_key: str) -> str:
    for ours, theirs in (("old_logprobs", OLD), ("inference_logprobs", INFERENCE), ("response_mask", stat_mask_key)):
        message = message.replace(ours, theirs)
    return message
