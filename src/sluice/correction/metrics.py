"""What a correction found, as sums that are read when somebody asks, so that computing it waits for no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from sluice.config.correction import LEVELS

TOKENS: Final = "tokens"
ROWS: Final = "rows"

_OF_TOKENS: Final[Mapping[str, str]] = {  # sum -> metric that is its mean over the tokens of the mask
    **{f"passed_{level}_{kind}": f"actor/train_infer_{level}_{kind}_mask_mean@sum" for level in LEVELS for kind in ("ratio", "diff")},
    "clipped": "actor/is_weight_clipfrac@sum",
    "weight": "actor/is_weight_mean",
    "kept": "actor/train_infer_final_mask_mean",
    "k1": "actor/train_infer_k1",
    "k2": "actor/train_infer_k2",
    "k3": "actor/train_infer_k3",
}
_OF_ROWS: Final[Mapping[str, str]] = {  # sum -> metric that is its mean over the rows with a token
    f"{kind}_{level}": f"actor/train_infer_{kind}_{level}_mean@sum" for level in LEVELS for kind in ("ratio", "diff")
}
_COUNTS: Final[Mapping[str, str]] = {
    "rejected_rows": "actor/train_infer_rejected_rows",
    "nan_tokens": "actor/train_infer_nan_tokens",
    "non_finite": "actor/train_infer_non_finite",
    "clamped": "actor/train_infer_clamped",
}


class CorrectionMetrics(Mapping[str, float]):
    """Metrics by name. The first look reads all of them from the device in one go; until then nothing waits.

    Of a mask without a single token there are no means, and the counts are 0. `merge` gives those of several calls as if they had been one.
    """

    def __init__(self, names: Sequence[str], sums: Tensor, *, tokens: float | None = None, rows: float | None = None) -> None:
        """names: of the sums, [M] float64. tokens, rows: what means are divided by; None: what was counted."""
        self._names = tuple(names)
        self._sums = sums.detach()
        self._tokens = tokens
        self._rows = rows

    @staticmethod
    def merge(parts: Sequence[CorrectionMetrics]) -> CorrectionMetrics:
        """Of calls with the same settings. They keep their own divisors only if they were given none."""
        first = parts[0]
        return CorrectionMetrics(first._names, torch.stack([part._sums for part in parts]).sum(0), tokens=first._tokens, rows=first._rows)

    def total(self, name: str) -> float:
        """A sum behind the metrics, such as "tokens", "rows" or "kept" (tokens)."""
        return self._read[name]

    @cached_property
    def _read(self) -> dict[str, float]:
        return dict(zip(self._names, self._sums.tolist(), strict=True))

    @cached_property
    def _metrics(self) -> dict[str, float]:
        sums = self._read
        metrics: dict[str, float] = {}
        for wanted, count, given in ((_OF_TOKENS, sums[TOKENS], self._tokens), (_OF_ROWS, sums[ROWS], self._rows)):
            divisor = count if given is None else max(float(given), 1.0)
            if divisor:
                metrics |= {metric: sums[name] / divisor for name, metric in wanted.items() if name in sums}
        return metrics | {metric: sums[name] for name, metric in _COUNTS.items()}

    def __getitem__(self, name: str) -> float:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"CorrectionMetrics({self._metrics})"
