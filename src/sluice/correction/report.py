"""What there is to see before thresholds are chosen: how ratios are distributed, where in a response they grow, what each rule rejects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sluice.config.correction import LEVELS, PRESETS, Level, TrainInferCorrectionConfig
from sluice.correction.compute import compute_train_infer_correction
from sluice.correction.levels import Divergence, of_tokens, ratio_of, runs_of
from sluice.correction.saved import SavedBatch

SHARES: Final = (0.001, 0.01, 0.05)  # of tokens, segments or rows, that thresholds are given for
QUANTILES: Final = (0.0, 0.001, 0.01, 0.05, 0.5, 0.95, 0.99, 0.999, 1.0)
BINS: Final = 60  # of a histogram, and of the curve over positions
WIDEST: Final = 5.0  # histograms reach to this log ratio on either side; what lies beyond is in the last bins
_MOST_QUANTILES: Final = 1 << 24  # numbers that torch.quantile takes; of more, every n-th is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport:
    """The ratios of one level: of tokens, segments or rows, each counted once."""

    level: Level
    count: int
    quantiles: tuple[float, ...]  # of the ratio, parallel to QUANTILES
    bounds: tuple[tuple[float, float], ...]  # parallel to SHARES: the ratios outside of which that share lies, half of it on either side
    edges: tuple[float, ...]  # of the histogram, log ratios, one more than counts
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Sampled tokens of responses between two places, counted from the first sampled one."""

    first: int
    last: int
    tokens: int
    mean: float  # of |log ratio|
    highest: float  # 99th percentile of |log ratio|


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What one rule would take out of the loss."""

    name: str
    token_share: float  # of sampled tokens
    row_share: float  # of rows with a token: rejected whole
    clipped_share: float | None  # tokens whose weight is cut off; None: it weights nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceReport:
    """All of it."""

    files: tuple[str, ...]
    rows: int  # with a token
    tokens: int
    metrics: Mapping[str, float]  # of `compute_train_infer_correction`, nothing enabled
    mean_gap: float  # mean |log ratio|
    largest_gap: float
    levels: tuple[LevelReport, ...]
    positions: tuple[Position, ...]
    rejections: tuple[Rejection, ...]  # the configured rules first, then every preset


def report_on(batch: SavedBatch, configured: TrainInferCorrectionConfig | None = None) -> DivergenceReport:
    """Look at a saved batch. configured: rules of a recipe, told beside the presets: each filter by itself, and all together."""
    _, _, metrics = compute_train_infer_correction(None, batch.mask, batch.old, batch.inference)
    if not metrics.total("tokens"):
        return DivergenceReport(
            files=tuple(str(file) for file in batch.files), rows=0, tokens=0, metrics=dict(metrics), mean_gap=math.nan,
            largest_gap=math.nan, levels=(), positions=(), rejections=(),
        )  # fmt: skip
    tokens = of_tokens(batch.mask, batch.old.double(), batch.inference.double(), may_look=True)
    runs = runs_of(batch.mask, may_look=True)
    divergence = Divergence.of(
        runs, runs.sums(tokens.exact, exactly=True, may_look=True), -runs.sums(tokens.minus_diff, exactly=True, may_look=True)
    )
    has_tokens = divergence.counts > 0
    log_ratios: dict[Level, Tensor] = {
        "token": tokens.exact[batch.mask],
        "segment": divergence.segment_log_ratio,
        "geometric": divergence.geometric_log_ratio[has_tokens],
        "sequence": divergence.sequence_log_ratio[has_tokens],
    }
    gaps = log_ratios["token"].abs()
    return DivergenceReport(
        files=tuple(str(file) for file in batch.files),
        rows=int(metrics.total("rows")),
        tokens=int(metrics.total("tokens")),
        metrics=dict(metrics),
        mean_gap=float(gaps.mean()),
        largest_gap=float(gaps.max()),
        levels=tuple(_level(level, log_ratios[level]) for level in LEVELS),
        positions=_positions(batch.mask, tokens.exact.abs()),
        rejections=tuple(_rejection(name, rule, batch) for name, rule in _rules(configured)),
    )


def _level(level: Level, log_ratios: Tensor) -> LevelReport:
    def ratios(shares: Sequence[float]) -> tuple[float, ...]:
        return tuple(ratio_of(_quantiles(log_ratios, shares)).tolist())

    reach = min(max(float(log_ratios.abs().max()), 1e-6), WIDEST)
    edges = torch.linspace(-reach, reach, BINS + 1, dtype=torch.float64)
    counts = torch.histc(log_ratios.clamp(-reach, reach), bins=BINS, min=-reach, max=reach)
    return LevelReport(
        level=level,
        count=len(log_ratios),
        quantiles=ratios(QUANTILES),
        bounds=tuple((ratios([share / 2])[0], ratios([1 - share / 2])[0]) for share in SHARES),
        edges=tuple(edges.tolist()),
        counts=tuple(int(count) for count in counts.tolist()),
    )


def _quantiles(values: Tensor, shares: Sequence[float]) -> Tensor:
    thinned = values[:: -(-len(values) // _MOST_QUANTILES)]
    return torch.quantile(thinned, torch.tensor(shares, dtype=values.dtype))


def _positions(mask: Tensor, gaps: Tensor) -> tuple[Position, ...]:
    """In at most `BINS` stretches of one length, up to the longest response."""
    place = (mask.cumsum(1) - 1)[mask]  # [N] of every sampled token in its response
    values = gaps[mask]
    step = max(1, -(-(int(place.max()) + 1) // BINS))
    found = []
    for index in range(int(place.max()) // step + 1):
        here = values[place.div(step, rounding_mode="floor") == index]
        found.append(
            Position(
                first=index * step,
                last=(index + 1) * step - 1,
                tokens=len(here),
                mean=float(here.mean()),
                highest=float(_quantiles(here, [0.99])[0]),
            )
        )
    return tuple(found)


def _rules(configured: TrainInferCorrectionConfig | None) -> list[tuple[str, Any]]:
    rules: list[tuple[str, Any]] = []
    if configured is not None:
        if configured.enabled_filters or configured.weight.enabled:
            rules.append(("configured, all together", configured))
        for index, chosen in enumerate(configured.filters):
            alone = chosen.model_copy(update={"enabled": True})
            name = f"filters.{index} ({_describe(alone)})" + ("" if chosen.enabled else ", not enabled")
            rules.append((name, TrainInferCorrectionConfig(filters=[alone])))
    return [*rules, *((name, {"presets": [name]}) for name in PRESETS if name != "diagnostics")]


def _describe(chosen: Any) -> str:
    parts = [chosen.agg_type]
    for kind in ("ratio", "diff"):
        if getattr(chosen, f"{kind}_enabled"):
            low, high = (getattr(chosen, f"{kind}_{end}") for end in ("low", "high"))
            parts.append(f"{kind} {'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:g}'}")
    return ", ".join(parts)


def _rejection(name: str, rule: Any, batch: SavedBatch) -> Rejection:
    _, _, metrics = compute_train_infer_correction(rule, batch.mask, batch.old, batch.inference)
    return Rejection(
        name=name,
        token_share=1 - metrics["actor/train_infer_final_mask_mean"],
        row_share=metrics["actor/train_infer_rejected_rows"] / metrics.total("rows"),
        clipped_share=metrics.get("actor/is_weight_clipfrac@sum"),
    )
