"""Hands out tasks by reward domain: one task list for each, so that a share of every batch can be kept for every domain.

Every domain goes through its own data at its own pace: its epochs, its order (from seed, domain and epoch) and what was put back do not
depend on what the others do, or on which others there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from sluice.errors import TaskError
from sluice.tasks.base import listed
from sluice.tasks.task_list import TaskList
from sluice.types import Task

_STATE_VERSION: Final = 1


class DomainTasks:
    """A `TaskSource` that can be asked for a domain.

    Raises `TaskError` when a domain has no task, a task has none of the domains, a task_id comes twice, or `epochs` is below 1.
    """

    def __init__(
        self, tasks: Sequence[Task], domains: Iterable[str], *, seed: int, epochs: int | None = None, shuffle: bool = True
    ) -> None:
        """`domains`: those that can be asked for. `epochs`: passes over the data of each domain by itself, None without limit."""
        self._tasks = tuple(tasks)
        by_domain: dict[str, list[Task]] = {domain: [] for domain in domains}
        self._domain_of: dict[str, str] = {}
        for task in self._tasks:
            if task.domain not in by_domain:
                raise TaskError(
                    f"task {task.task_id!r} is of domain {task.domain!r}, which nobody would ask for: expected one of {listed(by_domain)}"
                )
            if task.task_id in self._domain_of:
                raise TaskError(f"every task needs a task_id of its own, but {task.task_id!r} comes more than once")
            by_domain[task.domain].append(task)
            self._domain_of[task.task_id] = task.domain
        if not by_domain or not all(by_domain.values()):
            sizes = ", ".join(f"{domain}: {len(its_tasks)}" for domain, its_tasks in by_domain.items())
            raise TaskError(f"every domain to draw from needs at least one task, got {sizes or 'no domain'}")
        self._lists = {
            domain: TaskList(its_tasks, seed=seed, epochs=epochs, shuffle=shuffle, domain=domain) for domain, its_tasks in by_domain.items()
        }
        self._next = next(iter(self._lists))  # whose turn it is when any domain will do

    def __len__(self) -> int:
        """Tasks of one epoch of every domain."""
        return len(self._tasks)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order of the data."""
        return self._tasks

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that can be asked for."""
        return tuple(self._lists)

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next task of a domain and its epoch there (from 0); None when that domain has nothing left.

        Without a domain the domains take turns, whatever their sizes and shares, and one that has nothing left is passed over: the domain
        drawn from last is asked last. None then: nothing is left of any. Raises `TaskError` for a domain that there is not.
        """
        if domain is not None:
            return self._list_of(domain).draw()
        names = self.domains
        turn = names.index(self._next)
        for name in names[turn:] + names[:turn]:
            drawn = self._lists[name].draw()
            if drawn is not None:
                self._next = names[(names.index(name) + 1) % len(names)]
                return drawn
        return None

    def put_back(self, task_id: str, epoch: int) -> None:
        """Give back a drawn prompt that was not used: its domain draws it before new ones. Raises as `TaskList.put_back` does."""
        self._lists[self._domain_with(task_id)].put_back(task_id, epoch)

    def state_dict(self, outstanding: Iterable[tuple[str, int]] = ()) -> dict[str, Any]:
        """Everything a resumed run needs to draw on, as plain data for JSON; see `TaskList.state_dict`."""
        of_domain: dict[str, list[tuple[str, int]]] = {domain: [] for domain in self._lists}
        for task_id, epoch in outstanding:
            of_domain[self._domain_with(task_id)].append((task_id, epoch))
        return {
            "version": _STATE_VERSION,
            "domains": {domain: tasks.state_dict(of_domain[domain]) for domain, tasks in self._lists.items()},
            "next": self._next,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved; `epochs` may differ, the domains, the data, the seed and `shuffle` may not.

        Raises `TaskError` that says what differs, and in which domain, and then changes nothing.
        """
        saved, turn = state.get("domains"), state.get("next")
        if saved is None and "tasks" in state:
            raise TaskError(
                f"the saved state of the tasks holds one list of all tasks, but this run draws by domain ({listed(self._lists)}) - resume "
                f"without domain_interleave_probs, as the run was saved"
            )
        if not isinstance(saved, Mapping) or state.get("version") != _STATE_VERSION:
            raise TaskError(
                f"the saved state of the tasks must have version {_STATE_VERSION} and 'domains', got version {state.get('version')!r} and "
                f"{sorted(map(str, state))} - it is torn, or was saved by another version of Sluice"
            )
        if set(saved) != set(self._lists):
            raise TaskError(
                f"the saved state of the tasks does not fit: its domains must be {listed(self._lists)}, got {listed(saved)} - resume with "
                f"the domains of domain_interleave_probs of the saved run"
            )
        if not isinstance(turn, str) or turn not in self._lists:
            raise TaskError(f"the saved state of the tasks must have one of its domains as next, got {turn!r} - it is torn or not ours")
        loaded = {domain: copy(tasks) for domain, tasks in self._lists.items()}
        for domain, tasks in loaded.items():
            if not isinstance(saved[domain], Mapping):
                raise TaskError(f"domain {domain!r}: the saved state of its tasks must be a mapping, got {saved[domain]!r} - it is torn")
            try:
                tasks.load_state_dict(saved[domain])
            except TaskError as error:
                raise TaskError(f"domain {domain!r}: {error}") from error
        self._lists, self._next = loaded, turn

    def fingerprint(self) -> str:
        """Digest of the domains and their data: the same for the same data only."""
        parts = sorted(f"{domain} {tasks.fingerprint()}" for domain, tasks in self._lists.items())
        return hashlib.blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _list_of(self, domain: str) -> TaskList:
        found = self._lists.get(domain)
        if found is None:
            raise TaskError(
                f"expected one of the domains {listed(self._lists)}, got {domain!r} - give it a share in domain_interleave_probs"
            )
        return found

    def _domain_with(self, task_id: str) -> str:
        found = self._domain_of.get(task_id)
        if found is None:
            raise TaskError(f"task {task_id!r} is not among these {len(self._tasks)} tasks of the domains {listed(self._lists)}")
        return found
