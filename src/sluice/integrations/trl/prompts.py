"""The order in which prompts are drawn: each once per epoch, in the order in which TRL's own sampler would give them.

For a data set of known length an epoch is a permutation by `torch.randperm`, drawn from one generator with the trainer's seed, as TRL's
`RepeatSampler` does. So a run in which nothing is dropped sees the prompts of a plain run, except that no prompt is left out at the end of
an epoch. A stream is shuffled by its own buffer, with another order in every epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from sluice.errors import RecordError, TaskError
from sluice.integrations.judging import DOMAIN
from sluice.types import Task


class PromptStream:
    """Tasks without end from a `datasets.Dataset` or `IterableDataset`: after the last prompt of an epoch the next one begins."""

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int) -> None:
        self._dataset = dataset
        self._size: int | None = len(dataset) if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else None
        self._shuffle = shuffle
        self._seed = seed
        self._back: deque[tuple[Task, int]] = deque()
        self._epoch = 0
        self._position = 0  # prompts drawn in this epoch
        self._drawn = 0  # since the start; those that came back are counted once
        self._begin(0)
        if self._size == 0:
            raise TaskError("train_dataset: expected at least one prompt, got an empty data set")

    @property
    def epochs(self) -> float:
        """Passes over the data so far; of a stream, whole ones."""
        return self._epoch + (self._position / self._size if self._size else 0.0)

    @property
    def drawn(self) -> int:
        """Prompts drawn since the start."""
        return self._drawn

    def draw(self) -> tuple[Task, int]:
        """The next task and its epoch. Raises `TaskError` for a row without a prompt, and for a stream without rows."""
        if self._back:
            return self._back.popleft()
        if self._size is not None:
            if self._position == self._size:
                self._begin(self._epoch + 1)
            index = self._order[self._position]
            task = task_of(self._dataset[index], str(index))
        else:
            row = next(self._rows, None)
            if row is None:
                if not self._position:
                    raise TaskError("train_dataset: expected at least one prompt per pass, got a stream without rows")
                self._begin(self._epoch + 1)
                row = next(self._rows, None)
                if row is None:
                    raise TaskError("train_dataset: expected a stream that can be read again, got nothing in its second pass")
            task = task_of(row, f"{self._epoch}:{self._position}")
        self._position += 1
        self._drawn += 1
        return task, self._epoch

    def put_back(self, task: Task, epoch: int) -> None:
        """A task that was not judged comes again, before new ones."""
        self._back.append((task, epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where it stands. Rows of a stream that were put back are not in it."""
        back = [[task.task_id, epoch] for task, epoch in self._back] if self._size is not None else []
        return {"epoch": self._epoch, "position": self._position, "drawn": self._drawn, "back": back, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises `RecordError` for a state of other data."""
        if set(state) != set(self.state_dict()):
            raise RecordError(f"prompts: expected the state of a prompt stream, got {state!r} - resume from a checkpoint of this run")
        if state["size"] != self._size:
            raise RecordError(
                f"prompts: expected the state of a data set with {self._size} rows, got one with {state['size']} - resume with the "
                "data that the run began with"
            )
        self._begin(int(state["epoch"]))
        self._position, self._drawn = int(state["position"]), int(state["drawn"])
        if self._size is None:
            for _ in range(self._position):
                next(self._rows, None)
        self._back = deque([(task_of(self._dataset[int(task_id)], task_id), epoch) for task_id, epoch in state["back"]])

    def task(self, task_id: str) -> Task:
        """A task of a data set of known length, by its id."""
        return task_of(self._dataset[int(task_id)], task_id)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        if self._size is None:
            dataset = self._dataset.shuffle(seed=self._seed) if self._shuffle else self._dataset
            dataset.set_epoch(epoch)
            self._rows: Iterator[Any] = iter(dataset)
        elif self._shuffle:
            generator = torch.Generator().manual_seed(self._seed)
            orders = [torch.randperm(self._size, generator=generator) for _ in range(epoch + 1)]
            self._order: list[int] = orders[-1].tolist()
        else:
            self._order = list(range(self._size))


def task_of(row: Mapping[str, Any], task_id: str) -> Task:
    """One row of the data set as a task; the row itself is its entry."""
    return Task(
        task_id=task_id, domain=DOMAIN, prompt=text_of(row.get("prompt", "")), prompt_ids=np.zeros(0, dtype=np.int64), entry=dict(row)
    )


def text_of(prompt: Any) -> str:
    """A prompt as text, for filters of users: of chat messages their contents, one after another."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content", "") for message in prompt]
    return "\n".join([content if isinstance(content, str) else _text_parts(content) for content in contents])


def _text_parts(content: Any) -> str:
    return " ".join([part.get("text", "") for part in content or () if isinstance(part, Mapping)])
