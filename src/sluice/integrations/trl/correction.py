"""The train-infer correction on a generation batch of TRL, between its log-probs and its loss.

Tokens that leave the loss leave `tool_mask` (what the loss sees; attention sees `completion_mask`). Weights enter as advantages of shape
[B, T], which TRL's losses take. A row that is rejected whole leaves the baseline of its group, with `baseline: survivors`, and is not
counted by losses that are means over rows. A batch of which every token is rejected leaves the weights as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from accelerate.utils import gather_object
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanstd

from sluice.config.correction import TrainInferCorrectionConfig
from sluice.correction import compute_train_infer_correction, read_settings
from sluice.errors import ConfigError, TrainerError

TRL_EPS: Final = 1e-4  # that TRL adds to a standard deviation

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (None, 0),
    "logits_processors": (None, []),
    "structured_outputs": (None,),
    "vllm_structured_outputs_regex": (None,),
}
"""What cuts or bends the distribution that is drawn from (by the names of TRL and vLLM), and the values with which it does not."""

_FORWARD: Final = (  # what a forward pass of a model with images needs, by TRL's names
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def check_correction(trainer: Any, given: TrainInferCorrectionConfig | Mapping[str, Any] | None) -> TrainInferCorrectionConfig | None:
    """The settings, or None. Raises `ConfigError` for what cannot be, alone or together with the trainer's settings."""
    if given is None:
        return None
    config = read_settings(given)
    if not trainer.use_vllm and trainer.rollout_func is None:
        raise ConfigError(
            "train_infer_correction: expected a sampler that reports log-probs, got transformers' generate, which reports none - sample "
            "with use_vllm=True or a rollout_func that returns logprobs, or leave the correction out"
        )
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        raise ConfigError(
            "train_infer_correction: expected vllm_importance_sampling_correction=False beside it, got True - TRL would correct the same "
            "divergence a second time"
        )
    name, value = next(iter(_bent(trainer)), ("", None))
    if name:
        raise ConfigError(
            f"train_infer_correction: expected log-probs of the whole vocabulary at the temperature of the trainer, but {name} is "
            f"{value!r} - the sampler draws from another distribution and reports that one; leave one of them out"
        )
    if not config.weight.detach:
        raise ConfigError("train_infer_correction.is_weight.detach: expected true, got false - TRL's weights are fixed before its loss")
    if config.baseline == "survivors" and trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError(
            "train_infer_correction.baseline: expected 'all' beside multi_objective_aggregation='normalize_then_sum', got 'survivors' - "
            "its advantages are made from the whole batch"
        )
    return config


def _bent(trainer: Any) -> list[tuple[str, Any]]:
    """The settings by which the sampler draws from another distribution than that of the trainer's log-probs."""
    own = {name: getattr(trainer, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    own["vllm_structured_outputs_regex"] = trainer.args.vllm_structured_outputs_regex
    given = own | dict(trainer.args.generation_kwargs or {})
    found = [(name, given[name]) for name, neutral in NEUTRAL.items() if name in given and given[name] not in neutral]
    if given.get("temperature") not in (None, trainer.temperature):
        found.append(("temperature", given["temperature"]))
    return found


def correct(
    trainer: Any, output: dict[str, Any], config: TrainInferCorrectionConfig, rewards: Sequence[float]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Correct the batch of this process in place. rewards: of the rows of all processes, NaN where a row does not count.

    Returns which rows of this process are rejected whole [B], and the metrics, of all processes. Raises `TrainerError` for a batch without
    the sampler's log-probs.
    """
    inference, mask = output.get("sampling_per_token_logps"), loss_mask(output)
    if inference is None or (mask.any() and inference[mask].isnan().all()):
        raise TrainerError(
            "train_infer_correction: expected the sampler's log-prob of every sampled token, got none - return them as logprobs from the "
            "rollout function"
        )
    old = output.get("old_per_token_logps")
    if old is None:
        old = _old_logprobs(trainer, output)
    weight, kept, found = compute_train_infer_correction(config, mask, old.float(), inference.float())
    is_rejected = mask.any(dim=1) & ~(mask & kept).any(dim=1)
    output["tool_mask"] = output.get("tool_mask", torch.ones_like(output["completion_mask"])) * kept
    if config.baseline == "survivors":
        everywhere = trainer.accelerator.gather(is_rejected)
        if everywhere.any():
            counted = torch.tensor(rewards, device=everywhere.device).masked_fill(everywhere, torch.nan)
            start = trainer.accelerator.process_index * len(is_rejected)
            output["advantages"] = advantages(counted, trainer.num_generations, trainer.scale_rewards)[start : start + len(is_rejected)]
    if config.weight.enabled:
        output["advantages"] = output["advantages"].unsqueeze(1) * weight
    return is_rejected, _averaged(dict(found), trainer)


def loss_mask(output: Mapping[str, Any]) -> torch.Tensor:
    """Which tokens the loss sees. [B, T] bool"""
    mask: torch.Tensor = output["completion_mask"].bool()
    return mask & output["tool_mask"].bool() if "tool_mask" in output else mask


def advantages(rewards: torch.Tensor, group_size: int, scale: str) -> torch.Tensor:
    """TRL's advantages of rewards [N] in groups of `group_size`; rows with NaN have 0 and no part. scale: as TRL names it."""
    groups = rewards.view(-1, group_size)
    centred = groups - torch.nanmean(groups, dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (nanstd(groups, dim=1, keepdim=True) + TRL_EPS)
    elif scale == "batch":
        centred = centred / (nanstd(rewards) + TRL_EPS)
    has_spread = (groups.nan_to_num(-torch.inf).amax(1) > groups.nan_to_num(torch.inf).amin(1)).unsqueeze(1)
    return torch.nan_to_num(torch.where(has_spread, centred, 0.0), nan=0.0).reshape(-1)


def _old_logprobs(trainer: Any, output: Mapping[str, Any]) -> torch.Tensor:
    """The trainer's log-probs at the start of the step, in a forward pass of their own: TRL computes none where it updates once."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    forward = {name: output[name] for name in _FORWARD if name in output}
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        logprobs: torch.Tensor = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            ids,
            attention,
            output["completion_ids"].size(1),
            batch_size=trainer.args.per_device_train_batch_size,
            **forward,
        )[0]
    return logprobs


def _averaged(metrics: dict[str, float], trainer: Any) -> dict[str, float]:
    """The mean over the processes that have a metric."""
    if trainer.accelerator.num_processes == 1:
        return metrics
    every: list[dict[str, float]] = gather_object([metrics])
    names = sorted({name for one in every for name in one})
    return {name: sum(having := [one[name] for one in every if name in one]) / len(having) for name in names}
