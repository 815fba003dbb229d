"""From the log-probs of two engines to their divergence: for every token, and taken together over runs of the mask and over rows.

A run is a contiguous stretch of the mask within a row. Whatever is taken together is summed in float64, over logarithms, before any exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_LOG: Final = 20.0  # logarithms are kept within this before exp: e^20 is 5e8, beyond any threshold, and far from overflow
_LARGEST: Final = 1e30  # of a log ratio, in size: sums of such stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The divergence of single tokens. Where the mask is False, and where a log-prob is no number, everything is that of equal engines."""

    mask: Tensor  # [R, T] bool
    weight: Tensor  # [R, T] the mask as 0 and 1, floating
    log_ratio: Tensor  # [R, T] old - inference, as it came
    exact: Tensor  # [R, T] the same in float64, for sums: single huge ones may cancel
    ratio: Tensor  # [R, T] p_old / p_inference, from the log ratio within +-20
    diff: Tensor  # [R, T] p_old - p_inference
    is_sound: (
        Tensor | None
    )  # [R] False where an old log-prob under the mask is no finite number, or an inference one is infinite; None: all
    squares: Tensor  # [] sum of the squared log ratios
    nan_tokens: Tensor  # [] under the mask, with NaN as their inference log-prob
    clamped: Tensor  # [] under the mask, with a log ratio beyond +-20


def of_tokens(mask: Tensor, old: Tensor, inference: Tensor, *, may_look: bool) -> Tokens:
    """Compare two rows of log-probs. [R, T] each, floating and of one type.

    may_look: whether numbers may be read in between, which costs nothing on a CPU; then what is usual takes a shorter way. Gradients flow
    only along the other one.
    """
    weight = mask.view(torch.int8).to(old.dtype)
    none = torch.zeros((), dtype=torch.int64, device=old.device)
    if may_look:
        exact = old.to(torch.float64, copy=True).sub_(inference).mul_(weight)
        log_ratio = exact.to(old.dtype)
        low, high = log_ratio.aminmax()
        if bool(low >= -MOST_LOG) and bool(high <= MOST_LOG):  # not with a NaN among them
            ratio = log_ratio.exp()
            p_inference = inference.clamp(max=MOST_LOG).exp_()
            return Tokens(
                mask=mask,
                weight=weight,
                log_ratio=log_ratio,
                exact=exact,
                ratio=ratio,
                diff=(p_inference * ratio).sub_(p_inference),
                is_sound=None,
                squares=torch.dot(log_ratio.flatten(), log_ratio.flatten()),
                nan_tokens=none,
                clamped=none,
            )
    is_nan = inference.isnan() & mask
    is_bad = mask & ~(old.isfinite() & (inference.isfinite() | is_nan))
    usable = mask & ~is_nan & ~is_bad
    old, inference = torch.where(usable, old, 0.0), torch.where(usable, inference, 0.0)
    exact = (old.double() - inference.double()).clamp(-_LARGEST, _LARGEST)
    log_ratio = exact.to(old.dtype)
    ratio, is_far = ratio_of(log_ratio), log_ratio.abs() > MOST_LOG
    p_inference = inference.clamp(max=MOST_LOG).exp()
    p_old = torch.where(is_far, old.clamp(max=MOST_LOG).exp(), p_inference * ratio)
    return Tokens(
        mask=mask,
        weight=weight,
        log_ratio=log_ratio,
        exact=exact,
        ratio=ratio,
        diff=p_old - p_inference,
        is_sound=~is_bad.any(1),
        squares=exact.detach().square().sum(),
        nan_tokens=is_nan.sum(),
        clamped=is_far.sum(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of a mask, row after row. Where their number may not be looked at, empty ones follow after the last."""

    lengths: Tensor  # [2 K + 1] tokens before the first run, in it, before the second, in it, ..., after the last: they sum to R T
    sizes: Tensor  # [K] tokens of each run
    rows: Tensor  # [K] the row it is in
    starts: Tensor  # [K] its first token, counted through all rows
    shape: torch.Size  # (R, T)

    def sums(self, values: Tensor) -> Tensor:
        """The sum over each run. [R, T] -> [K] float64"""
        return torch.segment_reduce(values.double().flatten(), "sum", lengths=self.lengths, unsafe=True)[1::2]

    def by_row(self, values: Tensor) -> Tensor:
        """The sum over the runs of each row. [K] -> [R]"""
        return torch.zeros(self.shape[0], dtype=values.dtype, device=values.device).index_add(0, self.rows, values)

    def to_tokens(self, values: Tensor, *, outside: float) -> Tensor:
        """Each token gets the value of its run. [K] -> [R, T]"""
        spread = torch.full((len(self.lengths),), outside, dtype=values.dtype, device=values.device)
        spread[1::2] = values
        return torch.repeat_interleave(spread, self.lengths, output_size=self.shape.numel()).view(self.shape)

    def tokens_of(self, chosen: Tensor) -> Tensor:
        """The tokens of the chosen runs; several times faster than `to_tokens`. [K] bool -> [R, T] bool"""
        change = torch.zeros(self.shape.numel() + 1, dtype=torch.int8, device=chosen.device)  # one more, for runs that end with the rows
        change[self.starts] = chosen.to(torch.int8)
        change.index_add_(0, self.starts + self.sizes, -chosen.to(torch.int8))
        return change[:-1].cumsum(0, dtype=torch.int8).view(torch.bool).view(self.shape)


def runs_of(mask: Tensor, *, may_look: bool) -> Runs:
    """Find the runs of a mask. [R, T] bool, T at least 1"""
    rows, width = mask.shape
    edges = torch.empty(rows, width + 1, dtype=torch.bool, device=mask.device)  # one column more, so that no run leaves its row
    edges[:, 0], edges[:, width] = mask[:, 0], mask[:, width - 1]
    torch.bitwise_xor(mask[:, 1:], mask[:, :-1], out=edges[:, 1:width])
    if may_look and edges.device.type == "cpu":
        at = torch.from_numpy(np.flatnonzero(edges.numpy()))
    else:  # two edges a run, and a run and a gap need two columns
        at = torch.nonzero_static(edges.flatten(), size=rows * (width + 1), fill_value=rows * (width + 1))[:, 0]
        at = at[: at.numel() // 2 * 2]
    row = at.div(width + 1, rounding_mode="floor")
    at = at - row
    lengths = pad(pad(at, (1, 0)), (0, 1), value=rows * width).diff()
    return Runs(lengths=lengths, sizes=lengths[1::2], rows=row[::2].clamp(max=rows - 1), starts=at[::2], shape=mask.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The divergence of a stretch of rows at all four levels. Ratios as logarithms, as they came."""

    tokens: Tokens
    runs: Runs
    counts: Tensor  # [R] tokens under the mask, float64
    segment_log_ratio: Tensor  # [K] mean over each run, float64; so are the others
    segment_diff: Tensor  # [K]
    geometric_log_ratio: Tensor  # [R] mean over the row, 0 where the mask is empty
    geometric_diff: Tensor  # [R]
    sequence_log_ratio: Tensor  # [R] sum over the row
    sequence_diff: Tensor  # [R]


def diverge(mask: Tensor, old: Tensor, inference: Tensor, *, may_look: bool) -> Divergence:
    """Everything at once. [R, T] each"""
    tokens = of_tokens(mask, old, inference, may_look=may_look)
    runs = runs_of(mask, may_look=may_look)
    sizes = runs.sizes.double()
    counts = runs.by_row(sizes)
    some_tokens, some_rows = sizes.clamp(min=1), counts.clamp(min=1)
    log_ratio, diff = runs.sums(tokens.exact), runs.sums(tokens.diff)
    row_log_ratio, row_diff = runs.by_row(log_ratio), runs.by_row(diff)
    return Divergence(
        tokens=tokens,
        runs=runs,
        counts=counts,
        segment_log_ratio=log_ratio / some_tokens,
        segment_diff=diff / some_tokens,
        geometric_log_ratio=row_log_ratio / some_rows,
        geometric_diff=row_diff / some_rows,
        sequence_log_ratio=row_log_ratio,
        sequence_diff=row_diff,
    )


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, within +-20."""
    return log_ratio.clamp(-MOST_LOG, MOST_LOG).exp()
