"""The correction by its definition, row by row and run by run, in plain NumPy and float64. Slow on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

LEVELS = ("token", "segment", "geometric", "sequence")
MOST = 20.0


def runs(mask: np.ndarray) -> Iterator[list[int]]:
    """The positions of each contiguous run of a row of the mask."""
    run: list[int] = []
    for position, inside in enumerate(mask):
        if inside:
            run.append(position)
        elif run:
            yield run
            run = []
    if run:
        yield run


def compare(mask: np.ndarray, old: np.ndarray, inference: np.ndarray) -> dict[str, Any]:
    """Log ratios and differences at every level, broadcast to tokens, and what was wrong with the numbers. [R, T] each"""
    rows, width = mask.shape
    log_ratio, diff = np.zeros((rows, width)), np.zeros((rows, width))
    is_sound = np.ones(rows, dtype=bool)
    nan_tokens = clamped = 0
    for row in range(rows):
        for t in range(width):
            if not mask[row, t]:
                continue
            a, b = float(old[row, t]), float(inference[row, t])
            nan_tokens += np.isnan(b)
            if not np.isfinite(a) or np.isinf(b):
                is_sound[row] = False
            elif not np.isnan(b):
                log_ratio[row, t] = a - b
                diff[row, t] = np.exp(min(a, MOST)) - np.exp(min(b, MOST))
                clamped += abs(a - b) > MOST
    levels = {("token", "log_ratio"): log_ratio, ("token", "diff"): diff}
    for name, values in (("log_ratio", log_ratio), ("diff", diff)):
        for level in LEVELS[1:]:
            levels[level, name] = np.zeros((rows, width))
        for row in range(rows):
            inside = np.flatnonzero(mask[row])
            for run in runs(mask[row]):
                levels["segment", name][row, run] = values[row, run].mean()
            if len(inside):
                levels["geometric", name][row, inside] = values[row, inside].mean()
                levels["sequence", name][row, inside] = values[row, inside].sum()
    ratios = {level: np.exp(np.clip(levels[level, "log_ratio"], -MOST, MOST)) for level in LEVELS}
    diffs = {level: levels[level, "diff"] for level in LEVELS}
    return {
        "ratio": ratios, "diff": diffs, "is_sound": is_sound, "nan_tokens": nan_tokens, "clamped": clamped, "log_ratio": log_ratio,
    }  # fmt: skip


def correct(cfg: dict[str, Any], mask: np.ndarray, old: np.ndarray, inference: np.ndarray) -> dict[str, Any]:
    """Weights, filter mask, metrics; and how close anything came to a bound, where rounding decides."""
    found = compare(mask, old, inference)
    rows, width = mask.shape
    kept = mask & found["is_sound"][:, None]
    passed = {(level, kind): mask.copy() for level in LEVELS for kind in ("ratio", "diff")}
    margin = np.inf
    for chosen in cfg.get("filters", []):
        if not chosen.get("enabled"):
            continue
        level = chosen.get("agg_type", "token")
        for kind, default, low, high in (("ratio", True, 0.8, 1.2), ("diff", False, -0.2, 0.2)):
            if not chosen.get(f"{kind}_enabled", default):
                continue
            low, high = chosen.get(f"{kind}_low", low), chosen.get(f"{kind}_high", high)
            values = found[kind][level]
            inside = np.ones_like(mask)
            for bound, is_inside in ((low, lambda v, b: v >= b), (high, lambda v, b: v <= b)):
                if bound is not None:
                    inside &= is_inside(values, bound)
                    if mask.any():
                        margin = min(margin, float(np.min(np.abs(values[mask] - bound) / max(abs(bound), 1e-3))))
            if chosen.get("rejects") == "sequence":
                inside = np.repeat((inside | ~mask).all(1)[:, None], width, axis=1)
            passed[level, kind] &= inside
            kept &= inside
    weight = np.ones((rows, width))
    clipped = 0
    chosen = cfg.get("is_weight", {})
    if chosen.get("enabled"):
        raw = found["ratio"][chosen.get("weight_type", "token")]
        bound = chosen.get("upper_bound", 1.2)
        weight = raw if bound is None else np.minimum(raw, bound)
        clipped = 0 if bound is None else int((raw > bound)[mask].sum())
        if bound is not None and mask.any():
            margin = min(margin, float(np.min(np.abs(raw[mask] - bound) / bound)))
    tokens, full = int(mask.sum()), mask.any(1)
    metrics: dict[str, float] = {
        "actor/train_infer_nan_tokens": found["nan_tokens"],
        "actor/train_infer_non_finite": int((~found["is_sound"]).sum()),
        "actor/train_infer_clamped": int(found["clamped"]),
        "actor/train_infer_rejected_rows": int((full & ~kept.any(1)).sum()),
    }
    if tokens:
        delta = found["log_ratio"][mask]
        metrics["actor/train_infer_final_mask_mean"] = kept.sum() / tokens
        metrics["actor/train_infer_k1"] = -delta.mean()
        metrics["actor/train_infer_k2"] = (delta**2).mean() / 2
        metrics["actor/train_infer_k3"] = (np.exp(np.clip(delta, -MOST, MOST)) - 1 - delta).mean()
        for level in LEVELS:
            for kind in ("ratio", "diff"):
                means = [found[kind][level][row][mask[row]].mean() for row in range(rows) if full[row]]
                metrics[f"actor/train_infer_{kind}_{level}_mean@sum"] = float(np.mean(means))
                metrics[f"actor/train_infer_{level}_{kind}_mask_mean@sum"] = passed[level, kind][mask].mean()
        if chosen.get("enabled"):
            metrics["actor/is_weight_clipfrac@sum"] = clipped / tokens
            metrics["actor/is_weight_mean"] = weight[mask].mean()
    return {"is_weight": weight, "filter_mask": ~(mask & ~kept), "metrics": metrics, "margin": margin}
