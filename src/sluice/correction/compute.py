"""The correction itself: from two rows of log-probs to weights, a mask and metrics.

Rows are taken a stretch at a time, so that memory stays a few arrays of the size of a stretch, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sluice.config.correction import LEVELS, IsWeightConfig, Level
from sluice.correction.levels import MOST_LOG, Divergence, diverge, ratio_of
from sluice.correction.metrics import ROWS, TOKENS, CorrectionMetrics
from sluice.correction.settings import KINDS, Bands, Kind, read_settings
from sluice.errors import CorrectionError

STRETCH: Final = 1 << 18  # tokens looked at together on a CPU: about twelve arrays of 1 MB, which stay near the processor
STRETCH_ON_DEVICE: Final = 1 << 24  # elsewhere, where each call costs more than its work

Sums = dict[str, Tensor]


def compute_train_infer_correction(
    cfg: Any,
    response_mask: Tensor,
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    global_valid_samples: float | None = None,
    global_valid_tokens: float | None = None,
    apply_filters: bool = True,
) -> tuple[Tensor, Tensor, CorrectionMetrics]:
    """Importance weights, the tokens that stay in the loss, and how far the two engines lie apart.

    The ratio is p_train / p_inference. Its logarithm `old_logprobs - inference_logprobs` is taken by token, as the mean of each contiguous
    run of the mask (segment), or as the mean (geometric) or sum (sequence) of each row; then exp. The difference p_train - p_inference is
    taken together in the same way. All statistics are over the mask as given, also those of a filter that stands behind another one.

    Safe whatever comes: positions outside the mask never matter. A token with NaN as its inference log-prob counts as one on which the two
    agree. A row with an old log-prob that is no finite number, or an infinite inference one, leaves the loss. Logarithms are kept within
    +-20 before exp.

    Args:
        cfg: `TrainInferCorrectionConfig`, a mapping of the same keys, or None, which only measures.
        response_mask: [B, T] or [B, T - 1], of any type; True or not 0 where the policy sampled. Of [B, T] `[:, 1:]` is read.
        old_logprobs: [B, T - 1] the trainer's at the start of the step; entry t belongs to token t + 1.
        inference_logprobs: [B, T - 1] the sampler's, of the same type. Half precision is computed in float32.
        global_valid_samples: divides the means over rows; None: the rows with a token. For parts of a batch whose means are to be added.
        global_valid_tokens: divides the means over tokens; None: the tokens of the mask.
        apply_filters: False leaves every token in the loss.

    Returns:
        is_weight: [B, T - 1] floating, 1 where no weight is enabled; to be read under the mask only. Has no gradient unless
            `detach: false`.
        filter_mask: [B, T - 1] bool, False on the tokens of the mask that leave the loss, True everywhere else.
        metrics: a mapping of names to numbers, read from the device at the first look.

    Raises:
        ConfigError: the settings are wrong.
        CorrectionError: the tensors do not fit each other, or one is missing.
    """
    config = read_settings(cfg)
    mask = check_tensors(response_mask, old_logprobs, inference_logprobs)
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    bands = Bands.of(config.enabled_filters if apply_filters else (), dtype)
    weight = config.weight
    has_gradient = (
        weight.enabled
        and not weight.detach
        and torch.is_grad_enabled()
        and (old_logprobs.requires_grad or inference_logprobs.requires_grad)
    )
    rows, width = mask.shape
    may_look = mask.device.type == "cpu" and not has_gradient
    step = max(1, rows if has_gradient else (STRETCH if mask.device.type == "cpu" else STRETCH_ON_DEVICE) // max(width, 1))
    filter_mask = torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
    is_weight = (torch.empty if weight.enabled else torch.ones)(mask.shape, dtype=dtype, device=mask.device)
    total: Sums = {}
    with torch.set_grad_enabled(has_gradient):
        for start in range(0, rows if width else 0, step):
            at = slice(start, start + step)
            part = mask[at].bool()
            old, inference = old_logprobs[at].to(dtype), inference_logprobs[at].to(dtype)
            divergence = diverge(part, old, inference, may_look=may_look)
            weights = _weights(divergence, weight)
            with torch.no_grad():
                verdict = _judge(divergence, bands)
                sums = _measure(divergence, verdict, weights)
                torch.bitwise_xor(part, verdict.kept, out=filter_mask[at]).logical_not_()
                total = {name: total[name] + value for name, value in sums.items()} if total else sums
            if weights is not None:
                if has_gradient:
                    is_weight = weights.values  # of all rows
                else:
                    is_weight[at] = weights.values
    if not total:
        total = dict.fromkeys((*_names(weight), TOKENS, ROWS), torch.zeros((), dtype=torch.float64, device=mask.device))
    sums_read = torch.stack([value.double() for value in total.values()])
    return is_weight, filter_mask, CorrectionMetrics(tuple(total), sums_read, tokens=global_valid_tokens, rows=global_valid_samples)


# ---------------------------------------------------------------- input


def check_tensors(response_mask: Any, old_logprobs: Any, inference_logprobs: Any) -> Tensor:
    """The mask of the tokens that the log-probs are of. [B, T - 1]

    Raises:
        CorrectionError: what is given does not fit together; it names the argument.
    """
    for name, value in (("old_logprobs", old_logprobs), ("inference_logprobs", inference_logprobs), ("response_mask", response_mask)):
        if value is None:
            raise CorrectionError(
                f"{name}: expected a tensor, got None - {_ADVICE[name]}, or leave the correction off: without both log-probs of every "
                "token nothing can be compared"
            )
        if not isinstance(value, Tensor):
            raise CorrectionError(f"{name}: expected a torch tensor, got {type(value).__name__} - torch.as_tensor makes one")
        if value.ndim != 2:
            raise CorrectionError(f"{name}: expected two dimensions, rows and tokens, got shape {_shape(value)} - add or flatten one")
    for name, value in (("old_logprobs", old_logprobs), ("inference_logprobs", inference_logprobs)):
        if not value.is_floating_point():
            raise CorrectionError(f"{name}: expected a floating type, got {_type(value)} - give logarithms of probabilities")
    if old_logprobs.shape != inference_logprobs.shape:
        raise CorrectionError(
            f"inference_logprobs: expected the shape of old_logprobs, {_shape(old_logprobs)}, got {_shape(inference_logprobs)} - cut or "
            "pad both together: of T tokens there are T - 1 log-probs, entry t being that of token t + 1"
        )
    if old_logprobs.dtype != inference_logprobs.dtype:
        raise CorrectionError(
            f"inference_logprobs: expected the type of old_logprobs, {_type(old_logprobs)}, got {_type(inference_logprobs)} - convert one: "
            "what was rounded before cannot be told from a divergence"
        )
    for name, value in (("inference_logprobs", inference_logprobs), ("response_mask", response_mask)):
        if value.device != old_logprobs.device:
            raise CorrectionError(f"{name}: expected it on {old_logprobs.device}, as old_logprobs, got {value.device} - move it there")
    if response_mask.is_complex():
        raise CorrectionError(f"response_mask: expected a mask of true and false, got {_type(response_mask)} - compare it with something")
    return fit_mask("response_mask", response_mask, old_logprobs.shape)


def fit_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """The part of a mask that belongs to log-probs of this shape, as a view. [B, T - 1]

    Raises:
        CorrectionError: it fits neither as it is nor without its first column.
    """
    rows, width = shape
    if mask.shape == shape:
        return mask
    if mask.shape == (rows, width + 1):
        return mask[:, 1:]
    raise CorrectionError(
        f"{name}: expected shape ({rows}, {width}), that of the log-probs, or ({rows}, {width + 1}), of the tokens, got {_shape(mask)} - "
        "give the mask of the same rows and tokens"
    )


_ADVICE: Final = {
    "old_logprobs": "compute the trainer's log-probs at the start of the step",
    "inference_logprobs": "let the engine report the log-prob of every token that it samples",
    "response_mask": "give True where the policy sampled",
}


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))


def _type(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Importance weights of a stretch."""

    values: Tensor  # [R, T], or [R, 1] where the level is of whole rows
    total: Tensor  # [] their sum over the tokens of the mask
    clipped: Tensor  # [] tokens of the mask whose ratio was above the bound


def _weights(divergence: Divergence, config: IsWeightConfig) -> _Weights | None:
    if not config.enabled:
        return None
    level, bound = config.weight_type, config.upper_bound
    tokens, runs = divergence.tokens, divergence.runs
    if level == "token":
        ratio, counts = tokens.ratio, tokens.weight
    elif level == "segment":
        ratio, counts = ratio_of(divergence.segment_log_ratio), runs.sizes
    else:
        ratio, counts = ratio_of(_row_log_ratio(divergence, level)), divergence.counts
    cut = ratio if bound is None else ratio.clamp(max=bound)
    with torch.no_grad():
        of_unit = counts.to(cut.dtype).flatten()
        total = torch.dot(cut.flatten(), of_unit)
        clipped = torch.zeros_like(total)
        if bound is not None:
            is_below = cut.clone().eq_(ratio)  # as 1 and 0; comparing into bool takes several times as long
            clipped = divergence.counts.sum() - torch.dot(is_below.flatten(), of_unit)
    dtype = tokens.ratio.dtype
    if level == "segment":
        cut = runs.to_tokens(cut.to(dtype), outside=1.0)
    elif level != "token":
        cut = cut.to(dtype)[:, None].expand(divergence.runs.shape)
    return _Weights(values=cut.detach() if config.detach else cut, total=total, clipped=clipped)


def _row_log_ratio(divergence: Divergence, level: Level) -> Tensor:
    return divergence.geometric_log_ratio if level == "geometric" else divergence.sequence_log_ratio


# ---------------------------------------------------------------- filters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What stays of a stretch."""

    kept: Tensor  # [R, T] bool: tokens of the mask that stay in the loss
    passed: dict[tuple[Level, Kind], Tensor]  # [] tokens that the filters of a level and kind let pass; all of them where it is missing


def _judge(divergence: Divergence, bands: Bands) -> _Verdict:
    tokens, runs, counts = divergence.tokens, divergence.runs, divergence.counts
    rows: list[Tensor] = [] if tokens.is_sound is None else [tokens.is_sound]  # [R] bool each: which rows stay
    segments: list[Tensor] = []  # [K] bool each
    singles: list[Tensor] = []  # [R, T] 0 or 1 each
    passed: dict[tuple[Level, Kind], Tensor] = {}
    for level in LEVELS:
        for kind in KINDS:
            unit, veto = bands.unit.get((level, kind)), bands.veto.get((level, kind))
            if unit is None and veto is None:
                continue
            values = _values(divergence, level, kind)
            of_row = counts
            if unit is not None and level == "token":
                inside = unit.weights(values)
                singles.append(inside)
                if veto is None:
                    passed[level, kind] = torch.dot(inside.flatten(), tokens.weight.flatten())
                    continue
                of_row = (inside * tokens.weight).sum(1).double()
            elif unit is not None and level == "segment":
                segments.append(unit.contains(values))
                of_row = runs.by_row(runs.sizes * segments[-1]).double()
            elif unit is not None:
                rows.append(unit.contains(values))
                of_row = counts * rows[-1]
            if veto is not None and level == "token":
                rows.append((veto.weights(values) * tokens.weight).sum(1) == counts)
                of_row = of_row * rows[-1]
            elif veto is not None:
                rows.append(runs.by_row(runs.sizes * veto.contains(values)) == counts)
                of_row = of_row * rows[-1]
            passed[level, kind] = of_row.sum()
    kept = tokens.mask
    if singles:
        kept = kept & (singles[0] if len(singles) == 1 else singles[0].mul_(singles[1])).bool()
    stays = _all(rows)
    if segments:
        of_runs = _all(segments if stays is None else [*segments, stays[runs.rows]])
        assert of_runs is not None
        kept = kept & runs.tokens_of(of_runs)
    elif stays is not None:
        kept = kept & stays[:, None]
    return _Verdict(kept=kept, passed=passed)


def _values(divergence: Divergence, level: Level, kind: Kind) -> Tensor:
    """What a filter of this level and kind compares: logarithms of ratios, or differences."""
    tokens = divergence.tokens
    if kind == "diff":
        return tokens.diff if level == "token" else getattr(divergence, f"{level}_diff")
    return tokens.log_ratio if level == "token" else getattr(divergence, f"{level}_log_ratio")


def _all(conditions: list[Tensor]) -> Tensor | None:
    """Where all of them hold; None: there is none."""
    both: Tensor | None = None
    for condition in conditions:
        both = condition if both is None else both & condition
    return both


# ---------------------------------------------------------------- metrics


def _measure(divergence: Divergence, verdict: _Verdict, weights: _Weights | None) -> Sums:
    """What is added up over stretches, one number each."""
    tokens, runs, counts = divergence.tokens, divergence.runs, divergence.counts
    has_tokens, divisor = counts > 0, counts.clamp(min=1)
    in_row = verdict.kept.view(torch.int8).sum(1, dtype=torch.int32)  # tokens that stay
    count = counts.sum()
    log_ratio = divergence.sequence_log_ratio.sum()
    ratio = (tokens.ratio * tokens.weight).sum(1).double()
    of_segments = runs.by_row(runs.sizes * ratio_of(divergence.segment_log_ratio)) / divisor
    mean_diff = divergence.geometric_diff.sum()  # the mean over a row of token differences, and of those of its segments, is the same
    sums: Sums = {
        TOKENS: count,
        ROWS: has_tokens.sum(),
        "ratio_token": (ratio / divisor).sum(),
        "ratio_segment": of_segments.sum(),
        "ratio_geometric": (ratio_of(divergence.geometric_log_ratio) * has_tokens).sum(),
        "ratio_sequence": (ratio_of(divergence.sequence_log_ratio) * has_tokens).sum(),
        "diff_token": mean_diff,
        "diff_segment": mean_diff,
        "diff_geometric": mean_diff,
        "diff_sequence": divergence.sequence_diff.sum(),
    }
    sums |= {f"passed_{level}_{kind}": verdict.passed.get((level, kind), count) for level in LEVELS for kind in KINDS}
    sums |= {
        "kept": in_row.sum(),
        "rejected_rows": (has_tokens & (in_row == 0)).sum(),
        "k1": -log_ratio,
        "k2": tokens.squares / 2,
        "k3": ratio.sum() - count - log_ratio,
        "nan_tokens": tokens.nan_tokens,
        "non_finite": count.new_zeros(()) if tokens.is_sound is None else (~tokens.is_sound).sum(),
        "clamped": tokens.clamped,
    }
    if weights is not None:
        sums |= {"weight": weights.total, "clipped": weights.clipped}
    return sums


def _names(config: IsWeightConfig) -> list[str]:
    """The sums of a batch without a token, which nothing adds to."""
    of_levels = [f"{kind}_{level}" for kind in KINDS for level in LEVELS] + [f"passed_{level}_{kind}" for level in LEVELS for kind in KINDS]
    others = ["kept", "rejected_rows", "k1", "k2", "k3", "nan_tokens", "non_finite", "clamped"]
    return [*of_levels, *others, *(("weight", "clipped") if config.enabled else ())]


__all__ = ["MOST_LOG", "check_tensors", "compute_train_infer_correction", "fit_mask"]
