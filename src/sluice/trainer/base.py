"""What the trainer is fed from and what it feeds: the two doors between the optimiser and everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sluice.types import Batch

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called in the training thread after each optimiser step, its weights published: the step reached and the metrics of that step."""

OnSave = Callable[[int, Path], None]
"""Called in the training thread when the checkpoint of a step has been written, `OnStep` of that step called: the step and the folder."""


class BatchSource(Protocol):
    """Where batches come from."""

    def next_batch(self) -> Batch | None:
        """The next batch, in the calling thread; blocks until it is full. None: the run ends here. Raises what went wrong otherwise.

        A batch holds at least one group, and may hold fewer than were asked for (shrunk, or the rest of the data).
        """


class Publisher(Protocol):
    """Who samples with the trained weights: the engine."""

    def publish(self, state: Mapping[str, Any], version: int) -> None:
        """Take the weights of `version` (the global step that made them).

        The tensors are the trainer's own and change with its next step: copy them before returning. Keys are those of the plain model's
        state dict; with LoRA only the adapter's, as peft's `get_peft_model_state_dict` names them.
        """
