"""Data shaped as those of other trainers, for machines without them. Facts: slime's and miles' `Sample`, verl's `DataProto` and
`AgentLoopOutput`, as far as filters touch them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One sample of slime or miles."""

    reward: Any
    group_index: int = 0
    response: str = ""
    response_length: int = 1
    loss_mask: list[int] | None = None
    status: Status = Status.COMPLETED
    remove_sample: bool = False


@dataclass
class Args:
    """The arguments of slime that a filter may read."""

    reward_key: str | None = None


@dataclass
class AgentLoopOutput:
    """One trajectory of verl."""

    reward_score: float | None
    response_mask: list[int] = field(default_factory=lambda: [1])
    extra_fields: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """Rows with columns, as verl's: `batch` of arrays, `non_tensor_batch` of numpy arrays."""

    def __init__(self, batch: Mapping[str, Any], non_tensor_batch: Mapping[str, Any]) -> None:
        self.batch = dict(batch)
        self.non_tensor_batch = dict(non_tensor_batch)

    def __len__(self) -> int:
        return len(next(iter(self.non_tensor_batch.values())))

    def select_idxs(self, rows: Any) -> DataProto:
        return DataProto(
            {name: values[rows] for name, values in self.batch.items()},
            {name: values[rows] for name, values in self.non_tensor_batch.items()},
        )

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        first = parts[0]
        return DataProto(
            {name: np.concatenate([part.batch[name] for part in parts]) for name in first.batch},
            {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch},
        )


def rows_of(groups: Sequence[Sequence[float | None]], *, interleaved: bool = False) -> tuple[list[str], list[float]]:
    """uid and reward of each row; NaN for a reward that is missing. interleaved: the rows of a group do not stand together."""
    pairs = [(f"prompt{index}", np.nan if reward is None else reward) for index, group in enumerate(groups) for reward in group]
    if interleaved:
        pairs = [*pairs[::2], *pairs[1::2]]
    return [uid for uid, _ in pairs], [reward for _, reward in pairs]
