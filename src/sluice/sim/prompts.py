"""What became of every prompt that was drawn: it is judged, trained, or put back, each draw once, and nothing is drawn twice at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from copy import copy
from typing import Final

from sluice.scheduler import GroupRecord
from sluice.sim.violation import Violation
from sluice.types import Task

LOST_REASONS: Final = frozenset({"group_timeout", "response_retries"})
"""Reasons of groups that were dropped without being judged, as are those that a loop gives up: their prompts may come back."""

Prompt = tuple[str, int]
"""task_id and epoch."""


class PromptBooks:
    """The books of one run about its prompts. Told by the player; copied with every checkpoint."""

    def __init__(self, *, requeue: bool, epochs: int | None, tasks: tuple[Task, ...]) -> None:
        self.of: dict[int, Prompt] = {}  # groups without a record
        self.quarantined: Container[str] = ()  # the machine's: prompts that may be drawn in vain
        self.due_back: dict[Prompt, int] = {}  # of groups that left unjudged: before anything else happens they are put back
        self._requeue = requeue
        self._epochs = epochs
        self._tasks = tasks
        self._in_use: dict[Prompt, int] = {}  # -> their group; -1: none yet
        self._drawing: deque[Prompt] = deque()  # were drawn, and no group is known for them yet
        self._given_back: dict[int, str | None] = {}  # groups without a record whose prompt was put back -> outcome, where it is known
        self._lost: dict[Prompt, tuple[int, str]] = {}  # of groups that were lost, until they are put back -> that group, its reason
        self._came_back: set[Prompt] = set()  # put back because its group was lost or expired
        # Counted where the data end.
        self._times_drawn: Counter[Prompt] = Counter()
        self._times_back: Counter[Prompt] = Counter()

    def copy(self) -> PromptBooks:
        """The books as they stand."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, set | dict | deque):  # counters too
                setattr(other, name, copy(value))
        return other

    def drawn(self, task: Task, epoch: int) -> None:
        """The source gave a prompt, of which the machine is told next."""
        prompt = task.task_id, epoch
        if prompt in self._in_use:
            raise Violation(f"the source gave prompt {prompt} while it was in use", [self._in_use[prompt]])
        self._in_use[prompt] = -1
        self._drawing.append(prompt)
        if self._epochs is not None:
            self._times_drawn[prompt] += 1

    def launched(self, group_id: int, task: Task) -> None:
        """A group was launched for the task."""
        drawing = self._drawing
        if not drawing or drawing[0][0] != task.task_id:
            self.see_draws(task.task_id)
            if not drawing:
                raise Violation(f"a group is launched for task {task.task_id!r}, which was not drawn for it", [group_id])
        prompt = drawing.popleft()
        self.of[group_id] = prompt
        self._in_use[prompt] = group_id

    def see_draws(self, task_id: str | None = None) -> None:
        """Prompts drawn before this task (None: all) were neither launched nor put back: then they are in quarantine, and consumed."""
        drawing = self._drawing
        while drawing and drawing[0][0] != task_id:
            prompt = drawing.popleft()
            if prompt[0] not in self.quarantined:
                raise Violation(f"prompt {prompt} was drawn, and no group was launched for it")
            del self._in_use[prompt]

    def put_back(self, task_id: str, epoch: int, outcome_of: Callable[[int], str | None]) -> None:
        """The machine put a prompt back. outcome_of: of a group that waits for its record; None: not known."""
        prompt = task_id, epoch
        group_id = self._in_use.pop(prompt, None)
        self.due_back.pop(prompt, None)
        if group_id is None:
            lost = self._lost.pop(prompt, None)
            if lost is None:
                raise Violation(f"prompt {prompt} is put back, but it is not in use")
            self._comes_back(prompt, lost[0])
        elif group_id < 0:
            self._drawing.remove(prompt)
        elif group_id in self.of:  # else its record was faster
            outcome = self._given_back[group_id] = outcome_of(group_id)
            if outcome is not None and outcome != "cancelled":
                self._comes_back(prompt, group_id)
        if self._epochs is not None:
            self._times_back[prompt] += 1

    def left(self, record: GroupRecord) -> None:
        """A group has left: its prompt is spent, or was put back because nothing had judged it."""
        group_id, outcome = record.group_id, record.outcome
        prompt = self.of.pop(group_id)
        was_lost = record.category == "invalid" and (record.reason in LOST_REASONS or record.source == "loop")
        was_unused = outcome == "expired" or (outcome == "surplus" and record.reason == "domain_full")
        if group_id in self._given_back:
            if self._given_back.pop(group_id) is None and outcome != "cancelled":
                self._comes_back(prompt, group_id)
            if not was_lost and not was_unused and outcome != "cancelled":
                raise Violation(f"group {group_id} was {outcome} ({record.reason}), and yet its prompt {prompt} was put back", [group_id])
        elif outcome == "cancelled":
            self.due_back[prompt] = group_id
        elif was_unused and self._requeue and prompt not in self._came_back:
            self._came_back.add(prompt)
            self.due_back[prompt] = group_id
        else:
            del self._in_use[prompt]
            if was_lost:  # it may still come back, when the batch has been delivered
                self._lost[prompt] = group_id, record.reason

    def _comes_back(self, prompt: Prompt, group_id: int) -> None:
        if prompt in self._came_back or not self._requeue:
            why = "a second time" if self._requeue else "without requeue"
            raise Violation(f"prompt {prompt} comes back {why} because its group was lost or expired", [group_id])
        self._came_back.add(prompt)

    def end(self, *, have_data_ended: bool) -> None:
        """The run is over."""
        if self.of or self._in_use:
            raise Violation(f"groups without a record: {sorted(self.of)}, prompts in use: {sorted(self._in_use)}", self.of)
        for prompt, (group_id, reason) in self._lost.items():
            is_due = reason == "group_timeout" and self._requeue and prompt not in self._came_back
            if is_due and prompt[0] not in self.quarantined:
                raise Violation(f"group {group_id} was lost ({reason}), and its prompt {prompt} never came back", [group_id])
        if have_data_ended:
            for prompt in self._all():
                drawn, back = self._times_drawn[prompt], self._times_back[prompt]
                if drawn != 1 + back:
                    raise Violation(f"the data have ended, but prompt {prompt} was drawn {drawn} times and put back {back} times")

    def _all(self) -> Iterable[Prompt]:
        return ((task.task_id, epoch) for epoch in range(self._epochs or 0) for task in self._tasks)
