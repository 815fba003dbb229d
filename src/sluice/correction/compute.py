"""The correction itself: from two rows of log-probs to weights, a mask and metrics.

Rows are taken a stretch at a time, so that memory stays a few arrays of the size of a stretch, whatever the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sluice.config.correction import IsWeightConfig, Level
from sluice.correction.levels import Divergence, Runs, Tokens, of_tokens, ratio_of, runs_of
from sluice.correction.metrics import PASSED, SUMS, CorrectionMetrics, passed_by
from sluice.correction.settings import KINDS, Bands, Kind, read_settings
from sluice.errors import CorrectionError

STRETCH: Final = 1 << 18  # tokens looked at together on a CPU: about twelve arrays of 1 MB, which stay near the processor
STRETCH_ON_DEVICE: Final = 1 << 24  # elsewhere, where each call costs more than its work

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
    weight = config.weight
    has_gradient = (
        weight.enabled
        and not weight.detach
        and torch.is_grad_enabled()
        and (old_logprobs.requires_grad or inference_logprobs.requires_grad)
    )
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    tokens = _Tokens(mask, dtype, Bands.of(config.enabled_filters if apply_filters else (), dtype), weight, has_gradient=has_gradient)
    with torch.set_grad_enabled(has_gradient):
        for at in _stretches(mask, whole=has_gradient):
            tokens.look_at(at, old_logprobs[at].to(dtype), inference_logprobs[at].to(dtype))
        if not tokens.runs:  # not a single place for a token
            sums = torch.zeros(len(SUMS), dtype=torch.float64, device=mask.device)
            return tokens.is_weight, tokens.kept, CorrectionMetrics(sums, has_weight=weight.enabled)
        divergence = Divergence.of(Runs.join(tokens.runs), torch.cat(tokens.log_ratios), torch.cat(tokens.diffs))
        weights = _weights(divergence, weight, tokens)
        with torch.no_grad():
            verdict = _judge(divergence, tokens)
            found = _measure(divergence, verdict, weights, tokens)
            filter_mask = verdict.kept.bitwise_xor_(tokens.mask).bitwise_not_()
    sums = torch.stack([found[name].double() for name in SUMS])
    metrics = CorrectionMetrics(sums, has_weight=weight.enabled, tokens=global_valid_tokens, rows=global_valid_samples)
    return weights.values, filter_mask, metrics


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


# ---------------------------------------------------------------- tokens, a stretch at a time


def _stretches(mask: Tensor, *, whole: bool) -> Iterator[slice]:
    rows, width = mask.shape
    if rows and width:
        at_once = STRETCH if mask.device.type == "cpu" else STRETCH_ON_DEVICE
        step = rows if whole else max(1, at_once // width)
        yield from (slice(start, start + step) for start in range(0, rows, step))


def _answers_at_once(tensor: Tensor) -> bool:
    """Whether its numbers can be read without waiting for a device."""
    return tensor.device.type == "cpu"


class _Tokens:
    """What single tokens say, and the sums over runs that the other levels are made of."""

    def __init__(self, mask: Tensor, dtype: torch.dtype, bands: Bands, weight: IsWeightConfig, *, has_gradient: bool) -> None:
        """mask: [B, T - 1] of any type."""
        self._given = mask
        self._has_gradient = has_gradient
        self.may_look = not has_gradient and _answers_at_once(mask)  # whether numbers may be read in between
        self.mask = mask if mask.dtype == torch.bool else torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
        self.bands = bands
        self._weight = weight
        is_filled = weight.enabled and weight.weight_type == "token"
        self.is_weight = (torch.empty if is_filled else torch.ones)(mask.shape, dtype=dtype, device=mask.device)
        self.kept = torch.ones(mask.shape, dtype=torch.bool, device=mask.device)  # after `look_at`: what the filters of tokens leave
        self.stays: list[Tensor] = []  # [R] bool each: rows without a fault; what else is here is one tensor for each stretch
        self.vetoed: list[Tensor] = []  # [R] bool each: rows that no token takes out
        self.runs: list[Runs] = []
        self.log_ratios: list[Tensor] = []  # [K] sums over runs
        self.diffs: list[Tensor] = []
        self.ratios: list[Tensor] = []  # [R] sums over rows
        self.counted: dict[str, list[Tensor]] = {}  # name of a sum -> [] each

    def look_at(self, at: slice, old: Tensor, inference: Tensor) -> None:
        """Take in some rows."""
        mask, may_look = self.mask[at], self.may_look
        if self._given is not self.mask:
            mask.copy_(self._given[at].bool())
        tokens, runs = of_tokens(mask, old, inference, may_look=may_look), runs_of(mask, may_look=may_look)
        self.runs.append(runs)
        self.log_ratios.append(runs.sums(tokens.exact, exactly=True, may_look=may_look))
        self.diffs.append(-runs.sums(tokens.minus_diff, exactly=False, may_look=may_look))
        self._judge(tokens, self.kept[at])
        if self._weight.enabled and self._weight.weight_type == "token":
            self._weigh(tokens, at)
        with torch.no_grad():
            ratio = tokens.ratio * tokens.weight if self._has_gradient else tokens.ratio.mul_(tokens.weight)  # not looked at any more
            self.ratios.append(ratio.sum(1).double())
            self._count(squares=tokens.squares, nan_tokens=tokens.nan_tokens, clamped=tokens.clamped)
            if tokens.is_sound is not None:
                self.stays.append(tokens.is_sound)
            else:
                self.stays.append(torch.ones(len(mask), dtype=torch.bool, device=mask.device))

    def total(self, name: str) -> Tensor:
        """One of the sums over all rows. []"""
        return torch.stack(self.counted[name]).double().sum()

    def _count(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.counted.setdefault(name, []).append(value)

    def _weigh(self, tokens: Tokens, at: slice) -> None:
        bound = self._weight.upper_bound
        if self._has_gradient:  # of all rows at once
            self.is_weight = tokens.ratio if bound is None else tokens.ratio.clamp(max=bound)
        else:
            torch.clamp(tokens.ratio, max=math.inf if bound is None else bound, out=self.is_weight[at])
        with torch.no_grad():
            cut = self.is_weight[at]
            self._count(weight=cut.sum(1).double().sum())
            if bound is not None:
                self._count(unclipped=cut.clone().eq_(tokens.ratio).sum())  # as 1 and 0: comparing into bool takes several times as long

    @torch.no_grad()
    def _judge(self, tokens: Tokens, kept: Tensor) -> None:
        inside: Tensor | None = None
        vetoes: list[Tensor] = []
        for kind in KINDS:
            unit, veto = self.bands.unit.get(("token", kind)), self.bands.veto.get(("token", kind))
            values = tokens.log_ratio
            if kind == "diff":
                values, unit, veto = tokens.minus_diff, unit and -unit, veto and -veto
            passes = None if unit is None else unit.weights(values)
            if veto is not None:
                of_row = tokens.weight.sum(1)
                vetoes.append((veto.weights(values) * tokens.weight).sum(1) == of_row)
                passed = vetoes[-1] * (of_row if passes is None else (passes * tokens.weight).sum(1))
                self._count(**{passed_by("token", kind): passed.double().sum()})
            elif passes is not None:
                self._count(**{_everywhere("token", kind): passes.sum()})
            if passes is not None:
                inside = passes if inside is None else inside.mul_(passes)
        if inside is None:
            kept.copy_(tokens.mask)
        else:
            torch.bitwise_and(tokens.mask, inside.bool(), out=kept)
        if vetoes:
            self.vetoed.append(vetoes[0] if len(vetoes) == 1 else vetoes[0] & vetoes[1])

    def passed(self, outside: Tensor) -> dict[str, Tensor]:
        """Tokens of the mask that filters of single tokens let pass. outside: [] places that are not in the mask"""
        found = {name: self.total(name) for name in self.counted if name in PASSED}
        for kind in KINDS:
            band = self.bands.unit.get(("token", kind))
            if band is not None and _everywhere("token", kind) in self.counted:  # outside the mask the two agree everywhere
                found[passed_by("token", kind)] = self.total(_everywhere("token", kind)) - (outside if band.holds_agreement else 0)
        return found


def _everywhere(level: Level, kind: Kind) -> str:
    """The sum of the places that filters let pass, those outside the mask included."""
    return f"everywhere_{passed_by(level, kind)}"


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Importance weights."""

    values: Tensor  # [B, T - 1]
    total: Tensor  # [] their sum over the tokens of the mask
    clipped: Tensor  # [] tokens of the mask whose ratio was above the bound


def _weights(divergence: Divergence, config: IsWeightConfig, tokens: _Tokens) -> _Weights:
    if not config.enabled:
        nothing = torch.zeros((), device=tokens.is_weight.device)
        return _Weights(values=tokens.is_weight, total=nothing, clipped=nothing)
    if config.weight_type == "token":
        values = tokens.is_weight.detach() if config.detach else tokens.is_weight
        places, bound = values.numel(), config.upper_bound
        outside = places - divergence.counts.sum()  # where the ratio is 1
        clipped = divergence.counts.new_zeros(())
        if bound is not None:
            clipped = places - tokens.total("unclipped") - (outside if bound < 1 else 0)
        total = tokens.total("weight") - outside * min(1.0, math.inf if bound is None else bound)
        return _Weights(values=values, total=total, clipped=clipped)
    runs, bound, dtype = divergence.runs, config.upper_bound, tokens.is_weight.dtype
    counts = runs.sizes if config.weight_type == "segment" else divergence.counts
    ratio = ratio_of(divergence.log_ratio(config.weight_type))
    cut = ratio if bound is None else ratio.clamp(max=bound)
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

    kept: Tensor  # [B, T - 1] bool: tokens of the mask that stay
    passed: dict[str, Tensor]  # [] tokens that the filters of a level and kind let pass; all of them where it is missing


def _judge(divergence: Divergence, tokens: _Tokens) -> _Verdict:
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


def _measure(divergence: Divergence, verdict: _Verdict, weights: _Weights, tokens: _Tokens) -> dict[str, Tensor]:
    """The sums behind the metrics."""
    runs, counts = divergence.runs, divergence.counts
    has_tokens, divisor = counts > 0, counts.clamp(min=1)
    kept = verdict.kept.view(torch.int8).sum(1, dtype=torch.int32)  # [R] tokens that stay
    count, log_ratio, ratio = counts.sum(), divergence.sequence_log_ratio.sum(), torch.cat(tokens.ratios)
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
