"""Batches of log-probs, ordinary and hostile, and settings to correct them with."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.correction.naive import LEVELS

ordinary = st.floats(-8, 0, width=16)
hostile = st.sampled_from([0.0, -1.0, -25.0, -60.0, -1e4, -1e10, float("-inf"), float("nan"), float("inf")])


@st.composite
def batches(draw: st.DrawFn, *, hostile_share: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask, old and inference log-probs, [R, T] float64 with values that float16 holds exactly."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    size = rows * width
    kinds = draw(st.lists(st.sampled_from(["empty", "full", "one", "any", "any"]), min_size=rows, max_size=rows))
    mask = np.zeros((rows, width), dtype=bool)
    for row, kind in enumerate(kinds):
        if kind == "full":
            mask[row] = True
        elif kind == "one":
            mask[row, draw(st.integers(0, width - 1))] = True
        elif kind == "any":
            mask[row] = draw(st.lists(st.booleans(), min_size=width, max_size=width))
    values = ordinary if not hostile_share or draw(st.booleans()) else st.one_of(ordinary, hostile)
    old = np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(rows, width)
    near = draw(st.booleans())
    if near:
        gaps = np.array(draw(st.lists(st.floats(-0.5, 0.5, width=16), min_size=size, max_size=size))).reshape(rows, width)
        inference = np.minimum(old - gaps, 0.0)
    else:
        inference = np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(rows, width)
    return mask, old, inference


@st.composite
def bounds(draw: st.DrawFn, low: tuple[float, float], high: tuple[float, float]) -> tuple[float | None, float | None]:
    return draw(st.one_of(st.none(), st.floats(*low))), draw(st.floats(*high))


@st.composite
def filters(draw: st.DrawFn) -> dict[str, Any]:
    level = draw(st.sampled_from(LEVELS))
    ratio, diff = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    (ratio_low, ratio_high), (diff_low, diff_high) = draw(bounds((0, 1), (1, 9))), draw(bounds((-1, 0), (0, 1)))
    return {
        "enabled": draw(st.booleans()), "agg_type": level, "ratio_enabled": ratio, "ratio_low": ratio_low, "ratio_high": ratio_high,
        "diff_enabled": diff, "diff_low": diff_low, "diff_high": diff_high,
        "rejects": draw(st.sampled_from(["unit", "sequence"])) if level in ("token", "segment") else "unit",
    }  # fmt: skip


settings = st.fixed_dictionaries(
    {
        "filters": st.lists(filters(), max_size=4),
        "is_weight": st.fixed_dictionaries(
            {
                "enabled": st.booleans(),
                "weight_type": st.sampled_from(LEVELS),
                "upper_bound": st.one_of(st.none(), st.floats(0.5, 4)),
            }
        ),
    }
)
