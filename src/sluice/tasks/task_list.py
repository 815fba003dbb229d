"""Hands out tasks, each exactly once per epoch, in an order that seed and epoch alone decide.

The invariant: in every epoch every task is drawn once, plus once for every time it was put back. A prompt whose group was judged, kept or
dropped, is consumed and never put back; one whose group was never judged is, and comes again before new ones, under its old epoch. So
trained = drawn - dropped holds per epoch. Draws and put-backs are the only changes of state: the same calls give the same tasks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.errors import TaskError
from sluice.types import Task

_STATE_VERSION: Final = 1
_HASHED_AT_ONCE: Final = 4096  # tasks joined into one string for the fingerprint: few calls, little memory


class TaskList:
    """A `TaskSource` over tasks in memory.

    Raises `TaskError` when there is no task, when a task_id comes twice, and when `epochs` is below 1.
    """

    def __init__(
        self, tasks: Sequence[Task], *, seed: int, epochs: int | None = None, shuffle: bool = True, domain: str | None = None
    ) -> None:
        """`epochs`: passes over the data, None without limit. `shuffle: False` keeps the order of the data in every epoch.

        `domain`: whose tasks these are, where several lists share a seed: each then has orders of its own.
        """
        self._tasks = tuple(tasks)
        self._index_of = {task.task_id: index for index, task in enumerate(self._tasks)}
        if not self._tasks:
            raise TaskError("a task list needs at least one task, got none")
        if len(self._index_of) < len(self._tasks):
            twice = next(task.task_id for index, task in enumerate(self._tasks) if self._index_of[task.task_id] != index)
            raise TaskError(f"every task needs a task_id of its own, but {twice!r} comes more than once")
        if epochs is not None and epochs < 1:
            raise TaskError(f"epochs must be at least 1, or None for no limit, got {epochs}")
        self._seed = seed
        self._epochs = epochs
        self._shuffle = shuffle
        # Seed, epoch and domain are words of one seed: run 1's second epoch is not run 2's first, and no domain has another's order.
        self._own_words = () if domain is None else tuple(hashlib.blake2b(domain.encode("utf-8", "surrogatepass"), digest_size=8).digest())
        # (epoch, task index), first in first out; a plain dict slows down the more often its first key is taken
        self._put_back: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._fingerprint: str | None = None
        self._begin(0)

    def __len__(self) -> int:
        """Tasks of one epoch."""
        return len(self._tasks)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order of the data."""
        return self._tasks

    @property
    def epoch(self) -> int:
        """The epoch that new prompts are drawn in, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Tasks of this epoch drawn so far."""
        return self._position

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next task and its epoch (from 0): put-back ones first, in the order in which they came back.

        None after the last epoch, and from then on, unless something is put back. Raises `TaskError` when a domain is asked for: the list
        does not look ahead for one, and whatever comes next would upset the shares of the domains unseen.
        """
        if domain is not None:
            raise TaskError(f"a task list draws whatever comes next, but a task of domain {domain!r} was asked for - use DomainTasks")
        if self._put_back:
            (epoch, returned), _ = self._put_back.popitem(last=False)
            return self._tasks[returned], epoch
        epoch = self._epoch + (self._position == len(self._tasks))  # that the next new prompt belongs to
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if epoch > self._epoch:
            self._begin(epoch)
        index = self._order[self._position]
        self._position += 1
        return self._tasks[index], self._epoch

    def put_back(self, task_id: str, epoch: int) -> None:
        """Give back a drawn prompt that was not used. Raises `TaskError` for one that was not drawn, or is back already."""
        place = self._drawn(task_id, epoch)
        if place in self._put_back:
            raise TaskError(f"task {task_id!r} of epoch {epoch} was put back already and not drawn since - it would be trained twice")
        self._put_back[place] = None

    def state_dict(self, outstanding: Iterable[tuple[str, int]] = ()) -> dict[str, Any]:
        """Everything a resumed run needs to draw on, as plain data for JSON. This list is not changed.

        `outstanding`: (task_id, epoch) of prompts that are drawn and whose groups do not outlive this process; the resumed run draws them
        first. Raises `TaskError` as `put_back` does.
        """
        returned = dict(self._put_back)
        for task_id, epoch in outstanding:
            place = self._drawn(task_id, epoch)
            if place in returned:
                raise TaskError(f"task {task_id!r} of epoch {epoch} is both outstanding and put back - it would be trained twice")
            returned[place] = None
        return {
            "version": _STATE_VERSION,
            "fingerprint": self.fingerprint(),
            "tasks": len(self._tasks),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "put_back": [[self._tasks[index].task_id, epoch] for epoch, index in returned],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved; `epochs` may differ, the data, the seed and `shuffle` may not.

        Raises `TaskError` that says what differs, and then changes nothing.
        """
        if "domains" in state:
            raise TaskError(
                f"the saved state of the tasks holds one list for each domain, but this run draws from one list of all "
                f"{len(self._tasks)} tasks - resume with domain_interleave_probs of the saved run"
            )
        own = {
            "version": (_STATE_VERSION, "it was saved by another version of Sluice"),
            "tasks": (len(self._tasks), "the data have changed: resume with the data of the saved run"),
            "fingerprint": (self.fingerprint(), "the data have changed: resume with the data of the saved run"),
            "seed": (self._seed, "resume with the seed of the saved run"),
            "shuffle": (self._shuffle, "resume with tasks.shuffle of the saved run"),
        }
        for key, (expected, advice) in own.items():
            if key not in state:
                raise TaskError(
                    f"the saved state of the tasks must have '{key}', but it has {sorted(map(str, state))} - it is torn or not ours"
                )
            if state[key] != expected:
                raise TaskError(f"the saved state of the tasks does not fit: {key} must be {expected!r}, got {state[key]!r} - {advice}")
        epoch, position = _count(state, "epoch"), _count(state, "position")
        if position > len(self._tasks):
            raise TaskError(f"the saved state of the tasks must have a position up to {len(self._tasks)}, got {position}")
        loaded = copy(self)
        loaded._begin(epoch, position)
        loaded._put_back = OrderedDict()
        try:
            for returned in _pairs(state.get("put_back")):
                loaded.put_back(*returned)
        except TaskError as error:
            raise TaskError(f"the saved state of the tasks has a faulty put_back: {error}") from error
        vars(self).update(vars(loaded))  # all at once, now that nothing can be wrong any more

    def fingerprint(self) -> str:
        """Digest of all task_ids, domains, prompts and answers in their order: the same for the same data only."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            for start in range(0, len(self._tasks), _HASHED_AT_ONCE):
                chunk = self._tasks[start : start + _HASHED_AT_ONCE]
                for field in ("task_id", "domain", "prompt", "answer"):
                    # the lengths tell ("a", "b") from ("ab", ""), and "-" None from ""
                    values: list[str | None] = [getattr(task, field) for task in chunk]
                    digest.update(",".join("-" if value is None else str(len(value)) for value in values).encode())
                    digest.update("".join(value or "" for value in values).encode("utf-8", "surrogatepass"))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _begin(self, epoch: int, position: int = 0) -> None:
        """Stand in an epoch, after `position` of its tasks."""
        count = len(self._tasks)
        self._epoch = epoch
        self._position = position  # tasks of this epoch drawn so far, put-back ones apart
        self._order: npt.NDArray[np.int64] = (  # task indices as they are drawn in this epoch
            np.random.default_rng([self._seed, epoch, *self._own_words]).permutation(count) if self._shuffle else np.arange(count)
        )
        self._places: npt.NDArray[np.int64] | None = None  # its inverse: where in the order a task stands; made when something comes back

    def _drawn(self, task_id: str, epoch: int) -> tuple[int, int]:
        """(epoch, task index) of a prompt that has been drawn in that epoch, else `TaskError`."""
        index = self._index_of.get(task_id)
        if index is None:
            raise TaskError(f"task {task_id!r} is not in this task list of {len(self._tasks)} tasks")
        if epoch < 0 or epoch > self._epoch:
            raise TaskError(f"task {task_id!r} cannot come back to epoch {epoch}: the task list is in epoch {self._epoch}")
        if epoch == self._epoch and self._place(index) >= self._position:
            raise TaskError(f"task {task_id!r} has not been drawn in epoch {epoch}, so that it cannot be put back")
        return epoch, index

    def _place(self, index: int) -> int:
        if self._places is None:
            self._places = np.empty_like(self._order)
            self._places[self._order] = np.arange(len(self._order))
        return int(self._places[index])


def _count(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise TaskError(f"the saved state of the tasks must have a whole number from 0 as {key}, got {value!r} - it is torn or not ours")


def _pairs(value: object) -> list[tuple[str, int]]:
    """The put-back queue of a saved state."""
    if not isinstance(value, list | tuple):
        raise TaskError(f"it must be a list of [task_id, epoch], got {value!r}")
    pairs = []
    for pair in value:
        match pair:
            case [str(task_id), int(epoch)] if not isinstance(epoch, bool):
                pairs.append((task_id, epoch))
            case _:
                raise TaskError(f"its entries must be [task_id, epoch], got {pair!r}")
    return pairs
