"""What a correction found, as sums that are read when somebody asks, so that computing it waits for no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from sluice.config.correction import LEVELS, Level
from sluice.correction.settings import KINDS, Kind


def passed_by(level: Level, kind: Kind) -> str:
    """The sum of the tokens that the filters of a level and kind let pass."""
    return f"passed_{level}_{kind}"


PASSED: Final = frozenset(passed_by(level, kind) for level in LEVELS for kind in KINDS)

_OF_TOKENS: Final[Mapping[str, str]] = {  # sum -> metric that is its mean over the tokens of the mask
    **{passed_by(level, kind): f"actor/train_infer_{level}_{kind}_mask_mean@sum" for level in LEVELS for kind in KINDS},
    "kept": "actor/train_infer_final_mask_mean",
    "k1": "actor/train_infer_k1",
    "k2": "actor/train_infer_k2",
    "k3": "actor/train_infer_k3",
}
_OF_WEIGHTS: Final[Mapping[str, str]] = {"clipped": "actor/is_weight_clipfrac@sum", "weight": "actor/is_weight_mean"}  # means over tokens
_OF_ROWS: Final[Mapping[str, str]] = {  # sum -> metric that is its mean over the rows with a token
    f"{kind}_{level}": f"actor/train_infer_{kind}_{level}_mean@sum" for level in LEVELS for kind in KINDS
}
_COUNTS: Final[Mapping[str, str]] = {
    "rejected_rows": "actor/train_infer_rejected_rows",
    "nan_tokens": "actor/train_infer_nan_tokens",
    "non_finite": "actor/train_infer_non_finite",
    "clamped": "actor/train_infer_clamped",
}

SUMS: Final = ("tokens", "rows", *_OF_TOKENS, *_OF_WEIGHTS, *_OF_ROWS, *_COUNTS)
"""The sums that metrics are made of, in their order in a tensor."""


class CorrectionMetrics(Mapping[str, float]):
    """Metrics by name. The first look reads all of them from the device in one go; until then nothing waits.

    Of a mask without a single token there are no means, and the counts are 0. `merge` gives those of several calls as if they had been one.
    """

    def __init__(self, sums: Tensor, *, has_weight: bool, tokens: float | None = None, rows: float | None = None) -> None:
        """sums: in the order of `SUMS`, float64. tokens, rows: what means are divided by; None: what was counted."""
        self._sums = sums
        self._has_weight = has_weight
        self._tokens = tokens
        self._rows = rows

    @staticmethod
    def merge(parts: Sequence[CorrectionMetrics]) -> CorrectionMetrics:
        """Of calls with the same settings."""
        sums, first = torch.stack([part._sums for part in parts]).sum(0), parts[0]
        return CorrectionMetrics(sums, has_weight=first._has_weight, tokens=first._tokens, rows=first._rows)

    def total(self, name: str) -> float:
        """One of `SUMS`, such as "tokens", "rows" or "kept" (tokens)."""
        return self._read[name]

    @cached_property
    def _read(self) -> dict[str, float]:
        return dict(zip(SUMS, self._sums.tolist(), strict=True))

    @cached_property
    def _metrics(self) -> dict[str, float]:
        sums = self._read
        metrics: dict[str, float] = {}
        of_tokens = {**_OF_TOKENS, **_OF_WEIGHTS} if self._has_weight else _OF_TOKENS
        for wanted, count, given in ((of_tokens, sums["tokens"], self._tokens), (_OF_ROWS, sums["rows"], self._rows)):
            divisor = count if given is None else max(float(given), 1.0)
            if divisor:
                metrics |= {metric: sums[name] / divisor for name, metric in wanted.items()}
        return metrics | {metric: sums[name] for name, metric in _COUNTS.items()}

    def __getitem__(self, name: str) -> float:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"CorrectionMetrics({self._metrics})"
