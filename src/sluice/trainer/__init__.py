"""Makes optimiser steps out of whole batches, and hands the new weights on. TRL's GRPOTrainer is the trainer: loss and optimiser are its.

- base.py: the two doors, `BatchSource` (where batches come from) and `Publisher` (who samples with the weights), and who is told of steps
- assemble.py: groups to samples, advantages, padded rows (numpy)
- correcting.py: the train-infer correction of a batch, before its advantages
- trl.py: `SluiceGRPOTrainer` and `build_trainer`

Another trainer is another file beside trl.py: it takes a `BatchSource` and a `Publisher` and starts from what assemble.py returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.trainer.assemble import advantages_for, batch_metrics, collate, samples_from_batch
from sluice.trainer.base import BatchSource, OnSave, OnStep, Publisher

if TYPE_CHECKING:
    from sluice.trainer.trl import SluiceGRPOTrainer, build_trainer

__all__ = [
    "BatchSource",
    "OnSave",
    "OnStep",
    "Publisher",
    "SluiceGRPOTrainer",
    "advantages_for",
    "batch_metrics",
    "build_trainer",
    "collate",
    "samples_from_batch",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name in {"SluiceGRPOTrainer", "build_trainer"}:
        from sluice.trainer import trl

        return getattr(trl, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
