"""The correction itself: from two rows of log-probs to weights, a mask and metrics.

Rows are taken a stretch at a time, so that memory stays a few arrays of the size of a stretch, whatever the batch. On a CPU runs and rows
are then judged all together; a device, which must not be waited for, gets some blocks of rows, each from beginning to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sluice.config.correction import IsWeightConfig, Level
from sluice.correction.levels import Divergence, Runs, ratio_of
from sluice.correction.metrics import PASSED, SUMS, CorrectionMetrics, passed_by
from sluice.correction.settings import KINDS, Bands, read_settings
from sluice.correction.tensors import answers_at_once, check_divisor, check_tensors
from sluice.correction.tokens import TokenPass

STRETCH: Final = 1 << 18  # tokens looked at together on a CPU: about ten arrays of 1 MB, which stay near the processor
BLOCK: Final = 1 << 17  # tokens decided on together elsewhere, at least: some twenty arrays of that size
MOST_BLOCKS: Final = 6  # of one batch, since each is some hundred calls, which cost more than their work

ROW_LEVELS: Final[tuple[Level, ...]] = ("geometric", "sequence")


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
        response_mask: [B, T] or [B, T - 1], of any type; True or not 0 where the policy sampled. Of [B, T] `[:, 1:]` is read. NaN is
            refused on a CPU; on a device, which is not waited for, it counts as outside.
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
    check_divisor("global_valid_samples", global_valid_samples)
    check_divisor("global_valid_tokens", global_valid_tokens)
    weight = config.weight
    has_gradient = (
        weight.enabled
        and not weight.detach
        and torch.is_grad_enabled()
        and (old_logprobs.requires_grad or inference_logprobs.requires_grad)
    )
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    bands = Bands.of(config.enabled_filters if apply_filters else (), dtype)
    may_look = not has_gradient and answers_at_once(mask)
    is_filled = weight.enabled and not has_gradient
    is_weight = (torch.empty if is_filled else torch.ones)(mask.shape, dtype=dtype, device=mask.device)
    filter_mask = torch.ones(mask.shape, dtype=torch.bool, device=mask.device)
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=mask.device)
    with torch.set_grad_enabled(has_gradient):
        for block in _blocks(mask, whole=may_look or has_gradient):
            tokens = TokenPass(
                mask[block],
                filter_mask[block],
                is_weight[block],
                bands=bands,
                weight=weight,
                may_look=may_look,
                has_gradient=has_gradient,
            )
            old, inference = old_logprobs[block], inference_logprobs[block]
            for at in _stretches(tokens.mask, whole=not may_look):
                tokens.look_at(at, old[at].to(dtype), inference[at].to(dtype))
            divergence = Divergence.of(Runs.join(tokens.runs), torch.cat(tokens.log_ratios), torch.cat(tokens.diffs))
            weights = _weights(divergence, weight, tokens)
            if has_gradient:  # of all rows, in one block
                is_weight = weights.values
            elif weight.enabled and weight.weight_type != "token":
                is_weight[block] = weights.values
            with torch.no_grad():
                verdict = _judge(divergence, tokens)
                found = _measure(divergence, verdict, weights, tokens)
                verdict.kept.bitwise_xor_(tokens.mask).bitwise_not_()
                sums += torch.stack([found[name].double() for name in SUMS])
    metrics = CorrectionMetrics(sums, has_weight=weight.enabled, tokens=global_valid_tokens, rows=global_valid_samples)
    return is_weight, filter_mask, metrics


def _blocks(mask: Tensor, *, whole: bool) -> Iterator[slice]:
    """Rows that are decided on together. Where runs cannot be counted, there is room for as many as there can be: fewer rows at once."""
    rows, width = mask.shape
    if rows and width:
        step = rows if whole else max(1, BLOCK // width, -(-rows // MOST_BLOCKS))
        yield from (slice(start, start + step) for start in range(0, rows, step))


def _stretches(mask: Tensor, *, whole: bool) -> Iterator[slice]:
    """Rows that are looked at together."""
    rows, width = mask.shape
    step = rows if whole else max(1, STRETCH // width)
    yield from (slice(start, start + step) for start in range(0, rows, step))


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Importance weights."""

    values: Tensor  # [R, T]
    total: Tensor  # [] their sum over the tokens of the mask
    clipped: Tensor  # [] tokens of the mask whose ratio was above the bound


def _weights(divergence: Divergence, config: IsWeightConfig, tokens: TokenPass) -> _Weights:
    if not config.enabled:
        nothing = torch.zeros((), device=tokens.is_weight.device)
        return _Weights(values=tokens.is_weight, total=nothing, clipped=nothing)
    bound = math.inf if config.upper_bound is None else config.upper_bound
    if config.weight_type == "token":
        values = tokens.is_weight.detach() if config.detach else tokens.is_weight
        places = values.numel()
        outside = places - divergence.counts.sum()  # where the ratio is 1
        unclipped = tokens.total("unclipped") + (outside if bound < 1 else 0)
        return _Weights(values=values, total=tokens.total("weight") - outside * min(1.0, bound), clipped=places - unclipped)
    runs, dtype = divergence.runs, tokens.is_weight.dtype
    counts = runs.sizes if config.weight_type == "segment" else divergence.counts
    ratio = ratio_of(divergence.log_ratio(config.weight_type))
    cut = ratio.clamp(max=bound)
    of_tokens = cut.to(dtype)
    if config.weight_type == "segment":
        of_tokens = runs.to_tokens(of_tokens, outside=1.0, may_look=tokens.may_look)
    else:
        of_tokens = of_tokens[:, None].expand(runs.shape).contiguous()
    return _Weights(
        values=of_tokens.detach() if config.detach else of_tokens,
        total=(cut.detach() * counts).sum(),
        clipped=((ratio > cut) * counts).sum(),
    )


# ---------------------------------------------------------------- filters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What stays in the loss."""

    kept: Tensor  # [R, T] bool: tokens of the mask that stay
    passed: dict[str, Tensor]  # [] tokens that the filters of a level and kind let pass; all of them where it is missing


def _judge(divergence: Divergence, tokens: TokenPass) -> _Verdict:
    runs, counts, bands = divergence.runs, divergence.counts, tokens.bands
    rows = [torch.cat(tokens.stays)]  # [R] bool each: which rows stay
    segments: list[Tensor] = []  # [K] bool each
    passed = tokens.passed(tokens.mask.numel() - counts.sum())
    if tokens.vetoed:
        rows.append(torch.cat(tokens.vetoed))
    for kind in KINDS:
        unit, veto = bands.unit.get(("segment", kind)), bands.veto.get(("segment", kind))
        values = divergence.segment_log_ratio if kind == "ratio" else divergence.segment_diff
        of_row = counts
        if unit is not None:
            segments.append(unit.contains(values))
            of_row = runs.by_row(runs.sizes * segments[-1]).double()
        if veto is not None:
            rows.append(runs.by_row(runs.sizes * veto.contains(values)) == counts)
            of_row = of_row * rows[-1]
        if unit is not None or veto is not None:
            passed[passed_by("segment", kind)] = of_row.sum()
    for level in ROW_LEVELS:
        for kind in KINDS:
            unit = bands.unit.get((level, kind))
            if unit is not None:
                rows.append(unit.contains(divergence.log_ratio(level) if kind == "ratio" else divergence.diff(level)))
                passed[passed_by(level, kind)] = (counts * rows[-1]).sum()
    stays = torch.stack(rows).all(0)
    kept = tokens.kept
    if segments:
        kept &= runs.to_tokens(torch.stack([*segments, stays[runs.rows]]).all(0), outside=True, may_look=tokens.may_look)
    else:
        kept &= stays[:, None]
    return _Verdict(kept=kept, passed=passed)


# ---------------------------------------------------------------- metrics


def _measure(divergence: Divergence, verdict: _Verdict, weights: _Weights, tokens: TokenPass) -> dict[str, Tensor]:
    """The sums behind the metrics."""
    runs, counts = divergence.runs, divergence.counts
    has_tokens, divisor = counts > 0, counts.clamp(min=1)
    kept = verdict.kept.view(torch.int8).sum(1, dtype=torch.int32)  # [R] tokens that stay
    count, log_ratio, ratio = counts.sum(), divergence.sequence_log_ratio.sum(), torch.cat(tokens.ratios).double()
    of_segments = runs.by_row(runs.sizes * ratio_of(divergence.segment_log_ratio))
    mean_diff = divergence.geometric_diff.sum()  # the mean over a row of token differences, and of those of its segments, is the same
    return {
        "tokens": count,
        "rows": has_tokens.sum(),
        "ratio_token": (ratio / divisor).sum(),
        "ratio_segment": (of_segments / divisor).sum(),
        "ratio_geometric": (ratio_of(divergence.geometric_log_ratio) * has_tokens).sum(),
        "ratio_sequence": (ratio_of(divergence.sequence_log_ratio) * has_tokens).sum(),
        "diff_token": mean_diff,
        "diff_segment": mean_diff,
        "diff_geometric": mean_diff,
        "diff_sequence": divergence.sequence_diff.sum(),
        **{name: verdict.passed.get(name, count) for name in PASSED},
        "kept": kept.sum(),
        "rejected_rows": (has_tokens & (kept == 0)).sum(),
        "k1": -log_ratio,
        "k2": tokens.total("squares") / 2,
        "k3": ratio.sum() - count - log_ratio,
        "nan_tokens": tokens.total("nan_tokens"),
        "non_finite": (~torch.cat(tokens.stays)).sum(),
        "clamped": tokens.total("clamped"),
        "weight": weights.total,
        "clipped": weights.clipped,
    }
