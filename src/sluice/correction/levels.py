"""From the log-probs of two engines to their divergence: for every token, and taken together over runs of the mask and over rows.

A run is a contiguous stretch of the mask within a row. Whatever is taken together is summed in float64, over logarithms, before any exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sluice.config.correction import Level

MOST_LOG: Final = 20.0  # logarithms are kept within this before exp: e^20 is 5e8, beyond any threshold, and far from overflow
_LARGEST_P: Final = math.exp(MOST_LOG)  # what exp of a log-prob is taken for at most: beyond 1 it is none, and must only stay finite
_LARGEST: Final = 1e30  # of a log ratio, in size: sums of such stay finite
_LOG2_E: Final = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The divergence of single tokens. Where the mask is False, and where a log-prob is no number, everything is that of equal engines."""

    mask: Tensor  # [R, T] bool
    weight: Tensor  # [R, T] the mask as 0 and 1, floating
    log_ratio: Tensor  # [R, T] old - inference, as it came
    exact: Tensor  # [R, T] the same for sums: in float64 where single ones are so large that they may cancel each other
    ratio: Tensor  # [R, T] p_old / p_inference, from the log ratio within +-20
    minus_diff: Tensor  # [R, T] p_inference - p_old, which takes a pass less than the difference
    is_sound: (
        Tensor | None
    )  # [R] False where an old log-prob under the mask is no finite number, or an inference one is infinite; None: all
    squares: Tensor  # [] sum of the squared log ratios
    nan_tokens: Tensor  # [] under the mask, with NaN as their inference log-prob
    clamped: Tensor  # [] under the mask, with a log ratio beyond +-20


def of_tokens(mask: Tensor, old: Tensor, inference: Tensor, *, may_look: bool) -> Tokens:
    """Compare two rows of log-probs. [R, T] each, floating and of one type.

    may_look: whether numbers may be read in between, which only a CPU gives away for nothing; then what is usual takes a shorter way, along
    which no gradient flows.
    """
    weight = mask.view(torch.int8).to(old.dtype)
    none = torch.zeros((), dtype=torch.int64, device=old.device)
    if may_look:
        log_ratio = (old - inference).mul_(weight)
        low, high = (one.item() for one in log_ratio.aminmax())
        if low >= -MOST_LOG and high <= MOST_LOG and inference.amax().item() <= MOST_LOG:  # not with a NaN among them
            ratio, p_inference = exp_of(log_ratio), exp_of(inference)
            return Tokens(
                mask=mask,
                weight=weight,
                log_ratio=log_ratio,
                exact=log_ratio,
                ratio=ratio,
                minus_diff=p_inference.addcmul_(p_inference, ratio, value=-1),
                is_sound=None,
                squares=torch.dot(log_ratio.flatten(), log_ratio.flatten()),
                nan_tokens=none,
                clamped=none,
            )
    is_nan = inference.isnan() & mask
    is_bad = mask & ~(old.isfinite() & (inference.isfinite() | is_nan))
    usable = mask & ~is_nan & ~is_bad
    old, inference = torch.where(usable, old, 0.0), torch.where(usable, inference, 0.0)
    wide = (old.double() - inference.double()).clamp(-_LARGEST, _LARGEST)
    log_ratio = wide.to(old.dtype)
    ratio, is_far = ratio_of(log_ratio), log_ratio.abs() > MOST_LOG
    usual, far = torch.where(is_far, 0.0, log_ratio).detach().flatten(), torch.where(is_far, wide, 0.0).detach()
    p_inference = exp_of(inference).clamp(max=_LARGEST_P)
    near = torch.addcmul(p_inference, p_inference, ratio, value=-1)  # as above, to the last bit
    return Tokens(
        mask=mask,
        weight=weight,
        log_ratio=log_ratio,
        exact=torch.where(is_far, wide, log_ratio.double()),
        ratio=ratio,
        minus_diff=torch.where(is_far, p_inference - exp_of(old).clamp(max=_LARGEST_P), near),
        is_sound=~is_bad.any(1),
        squares=torch.dot(usual, usual) + far.square().sum(),  # the first one as above, to the last bit
        nan_tokens=is_nan.sum(),
        clamped=is_far.sum(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of a mask, row after row. Where their number may not be looked at, empty ones follow after the last of each stretch."""

    starts: Tensor  # [K] first token of each, counted through all rows
    sizes: Tensor  # [K] tokens
    rows: Tensor  # [K] the row it is in
    shape: tuple[int, int]  # (R, T)

    @property
    def lengths(self) -> Tensor:
        """Tokens before the first run, in it, before the second, in it, ..., after the last: they sum to R T. [2 K + 1]"""
        edges = torch.stack([self.starts, self.starts + self.sizes], 1).flatten()
        return pad(pad(edges, (1, 0)), (0, 1), value=self.shape[0] * self.shape[1]).diff()

    def sums(self, values: Tensor, *, exactly: bool, may_look: bool) -> Tensor:
        """The sum over each run of values that are 0 outside. [R, T] -> [K] float64

        exactly: also where they cancel; else the sums may be taken in the type of the values.
        """
        if may_look:
            return torch.from_numpy(
                np.add.reduceat(values.numpy().ravel(), self.starts.numpy(), dtype=np.float64 if exactly else None)
            ).double()
        return torch.segment_reduce(values.double().flatten(), "sum", lengths=self.lengths, unsafe=True)[1::2]

    def by_row(self, values: Tensor) -> Tensor:
        """The sum over the runs of each row. [K] -> [R]"""
        return torch.zeros(self.shape[0], dtype=values.dtype, device=values.device).index_add(0, self.rows, values)

    def to_tokens(self, values: Tensor, *, outside: float, may_look: bool) -> Tensor:
        """Each token gets the value of its run. [K] -> [R, T]"""
        spread = torch.full((2 * len(values) + 1,), outside, dtype=values.dtype, device=values.device)
        spread[1::2] = values
        if may_look:
            return torch.from_numpy(np.repeat(spread.numpy(), self.lengths.numpy())).view(self.shape)
        return torch.repeat_interleave(spread, self.lengths, output_size=self.shape[0] * self.shape[1]).view(self.shape)

    @staticmethod
    def join(parts: Sequence[Runs]) -> Runs:
        """The runs of all rows from those of consecutive stretches."""
        if len(parts) == 1:
            return parts[0]
        width = parts[0].shape[1]
        first = [sum(part.shape[0] for part in parts[:index]) for index in range(len(parts))]
        return Runs(
            starts=torch.cat([part.starts + row * width for part, row in zip(parts, first, strict=True)]),
            sizes=torch.cat([part.sizes for part in parts]),
            rows=torch.cat([part.rows + row for part, row in zip(parts, first, strict=True)]),
            shape=(sum(part.shape[0] for part in parts), width),
        )


def runs_of(mask: Tensor, *, may_look: bool) -> Runs:
    """Find the runs of a mask. [R, T] bool, R and T at least 1"""
    rows, width = mask.shape
    edges = torch.empty(rows, width + 1, dtype=torch.bool, device=mask.device)  # one column more, so that no run leaves its row
    edges[:, 0], edges[:, width] = mask[:, 0], mask[:, width - 1]
    torch.bitwise_xor(mask[:, 1:], mask[:, :-1], out=edges[:, 1:width])
    if may_look:
        at = torch.from_numpy(np.flatnonzero(edges.numpy()))
    else:  # two edges a run, and a run and a gap need two columns
        at = torch.nonzero_static(edges.flatten(), size=rows * (width + 1), fill_value=rows * (width + 1))[:, 0]
        at = at[: at.numel() // 2 * 2]
    row = at.div(width + 1, rounding_mode="floor")
    at = at - row
    return Runs(starts=at[::2], sizes=at[1::2] - at[::2], rows=row[::2].clamp(max=rows - 1), shape=(rows, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The divergence of runs and rows, float64. Ratios as logarithms, as they came."""

    runs: Runs
    counts: Tensor  # [R] tokens under the mask
    segment_log_ratio: Tensor  # [K] mean over each run
    segment_diff: Tensor  # [K]
    geometric_log_ratio: Tensor  # [R] mean over the row, 0 where the mask is empty
    geometric_diff: Tensor  # [R]
    sequence_log_ratio: Tensor  # [R] sum over the row
    sequence_diff: Tensor  # [R]

    @classmethod
    def of(cls, runs: Runs, log_ratio: Tensor, diff: Tensor) -> Divergence:
        """From the sums over each run. [K] each"""
        sizes = runs.sizes.double()
        counts = runs.by_row(sizes)
        some_tokens, some_rows = sizes.clamp(min=1), counts.clamp(min=1)
        row_log_ratio, row_diff = runs.by_row(log_ratio), runs.by_row(diff)
        return cls(
            runs=runs,
            counts=counts,
            segment_log_ratio=log_ratio / some_tokens,
            segment_diff=diff / some_tokens,
            geometric_log_ratio=row_log_ratio / some_rows,
            geometric_diff=row_diff / some_rows,
            sequence_log_ratio=row_log_ratio,
            sequence_diff=row_diff,
        )

    def log_ratio(self, level: Level) -> Tensor:
        """Of a level above single tokens. [K] or [R]"""
        return {"segment": self.segment_log_ratio, "geometric": self.geometric_log_ratio, "sequence": self.sequence_log_ratio}[level]

    def diff(self, level: Level) -> Tensor:
        """Of a level above single tokens. [K] or [R]"""
        return {"segment": self.segment_diff, "geometric": self.geometric_diff, "sequence": self.sequence_diff}[level]


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, within +-20."""
    return exp_of(log_ratio.clamp(-MOST_LOG, MOST_LOG))


def exp_of(values: Tensor) -> Tensor:
    """exp, by way of powers of two, which takes half the time. Of logarithms within +-20 the relative error is below 1e-6 in float32."""
    powers = values * _LOG2_E
    return powers.exp2() if powers.requires_grad else powers.exp2_()
