"""What becomes of the prompts of groups that were never judged: drawn once more, or, when they are lost again and again, never again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sluice.types import Task


class Prompts:
    """Counts losses by prompt. Memory grows with the prompts, by epoch, that were ever lost or expired, not with their losses."""

    def __init__(self, *, requeue: bool, quarantine_after: int | None) -> None:
        self._requeue = requeue
        self._quarantine_after = quarantine_after
        self._came_back: dict[str, list[int]] = {}  # task_id -> epochs in which it was put back
        self._losses: dict[str, int] = {}  # task_id -> groups lost since the last one that was judged
        self.quarantined: dict[str, str] = {}  # task_id -> reason of its last loss
        self.back: set[tuple[str, int]] = set()  # (task_id, epoch) that were put back and have not been drawn again
        self.later: list[tuple[Task, int]] = []  # go back to the source when the batch in progress has been delivered
        self.requeued = 0
        self.skipped = 0  # draws of quarantined prompts

    def may_come_back(self, task: Task, epoch: int) -> bool:
        """Whether a prompt that was not judged is put back: once per epoch, by setting. Counted."""
        if not self._requeue or epoch in self._came_back.get(task.task_id, ()):
            return False
        self._came_back.setdefault(task.task_id, []).append(epoch)
        self.requeued += 1
        return True

    def is_drawn_again(self, task_id: str, epoch: int) -> bool:
        """Whether a drawn prompt is one that had been put back; it is not any more."""
        if (task_id, epoch) not in self.back:
            return False
        self.back.remove((task_id, epoch))
        return True

    def lost(self, task: Task, epoch: int, reason: str) -> bool:
        """A group of this prompt was lost to broken machinery or broken data; True: the prompt is in quarantine from now on."""
        losses = self._losses[task.task_id] = self._losses.get(task.task_id, 0) + 1
        if self._quarantine_after is None or losses < self._quarantine_after or task.task_id in self.quarantined:
            return False
        self.quarantined[task.task_id] = reason
        return True

    def judged(self, task_id: str) -> None:
        """A group of this prompt was judged: its losses are forgotten."""
        if self._losses:
            self._losses.pop(task_id, None)

    def state_dict(self, outstanding: Iterable[Sequence[Any]] = ()) -> dict[str, Any]:
        """All counts; `later` is part of what is outstanding: [task_id, epoch] of prompts that the next process draws again."""
        back = self.back.union((task_id, epoch) for task_id, epoch in outstanding)
        return {
            "came_back": {task_id: list(epochs) for task_id, epochs in self._came_back.items()},
            "back": [list(prompt) for prompt in sorted(back)],
            "losses": dict(self._losses),
            "quarantined": dict(self.quarantined),
            "requeued": self.requeued,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved."""
        self._came_back = {task_id: list(epochs) for task_id, epochs in state["came_back"].items()}
        self.back = {(task_id, int(epoch)) for task_id, epoch in state["back"]}
        self._losses = dict(state["losses"])
        self.quarantined = dict(state["quarantined"])
        self.requeued, self.skipped = int(state["requeued"]), int(state["skipped"])
