"""Hands out the episodes of environment groups: endless, in turn over the groups, so that none is ahead of another by more than one.

An episode is a task whose name says everything: `<domain>/g<group>/e<episode>`. New episode number n is episode n // N of environment group
n % N, so that one number is the whole position, however long the run; what was put back stands beside it. The seed of the environment is
no part of a task: whoever plays the member makes it from the base seed, the environment group and the episode.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, Final

import numpy as np

from sluice.errors import TaskError
from sluice.types import Task, TokenIds

_STATE_VERSION: Final = 1
_EPOCH: Final = 0  # episodes never repeat: the whole run is one pass
_NAME: Final = re.compile(r"g(0|[1-9][0-9]*)/e(0|[1-9][0-9]*)")  # of an episode within its domain; one spelling for each
_NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int64)  # what the policy sees comes from the environment
_NO_TOKENS.setflags(write=False)


class EpisodeTasks:
    """A source of tasks for the scheduler: the episodes of `num_env_groups` environment groups.

    New episodes are opened in turn over the groups, whatever is dropped, put back or replaced. What was put back is drawn again first, in
    the order in which it came back. Raises `TaskError` for settings that cannot be.
    """

    def __init__(self, domain: str, num_env_groups: int, *, seed: int) -> None:
        """`seed`: the base seed of the environments. It decides nothing here, but a resumed run must have the same."""
        _check(domain, num_env_groups)
        self.domain: Final = domain
        self.num_env_groups: Final = num_env_groups
        self.seed: Final = seed
        self._opened = 0  # new episodes drawn so far
        self._put_back: OrderedDict[int, None] = OrderedDict()  # numbers of episodes, first in first out

    @property
    def opened(self) -> int:
        """Episodes drawn so far, each counted once however often it came back."""
        return self._opened

    @property
    def lookup(self) -> Mapping[str, Task]:
        """The episodes opened so far, by task_id. A view: it makes a task when it is asked for one, and holds none."""
        return _Opened(self)

    def draw(self, domain: str | None = None) -> tuple[Task, int] | None:
        """The next episode and its epoch, which is 0: put-back ones first. There is always one.

        Raises `TaskError` for a domain that these episodes do not have.
        """
        if domain is not None and domain != self.domain:
            raise TaskError(
                f"these episodes are of domain {self.domain!r}, but one of {domain!r} was asked for - ask for that, or for none"
            )
        if self._put_back:
            number, _ = self._put_back.popitem(last=False)
        else:
            number = self._opened
            self._opened += 1
        return self._task(number), _EPOCH

    def put_back(self, task_id: str, epoch: int) -> None:
        """Give back a drawn episode that was not used. Raises `TaskError` for one that was not drawn, or is back already."""
        number = self._drawn(task_id, epoch)
        if number in self._put_back:
            raise TaskError(f"episode {task_id!r} was put back already and not drawn since - it would be trained twice")
        self._put_back[number] = None

    def state_dict(self, outstanding: Iterable[tuple[str, int]] = ()) -> dict[str, Any]:
        """Everything a resumed run needs to draw on, as plain data for JSON; it does not grow with the run. This source is not changed.

        `outstanding`: (task_id, epoch) of episodes that are drawn and whose groups do not outlive this process; the resumed run draws them
        first. Raises `TaskError` as `put_back` does.
        """
        returned = dict(self._put_back)
        for task_id, epoch in outstanding:
            number = self._drawn(task_id, epoch)
            if number in returned:
                raise TaskError(f"episode {task_id!r} is both outstanding and put back - it would be trained twice")
            returned[number] = None
        return {
            "version": _STATE_VERSION,
            "episodes_of": self.domain,
            "env_groups": self.num_env_groups,
            "seed": self.seed,
            "opened": self._opened,
            "put_back": [[self._name(number), _EPOCH] for number in returned],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved; domain, environment groups and seed may not differ.

        Raises `TaskError` that says what differs, and then changes nothing.
        """
        own = {
            "version": (_STATE_VERSION, "it was saved by another version of Sluice"),
            "episodes_of": (self.domain, "resume with the environment of the saved run"),
            "env_groups": (self.num_env_groups, "resume with train_env_manager.num_env_groups of the saved run"),
            "seed": (self.seed, "resume with the seed of the saved run"),
        }
        for key, (expected, advice) in own.items():
            if key not in state:
                raise TaskError(
                    f"the saved state of the episodes must have '{key}', but it has {sorted(map(str, state))} - it is torn or not ours"
                )
            if state[key] != expected:
                raise TaskError(f"the saved state of the episodes does not fit: {key} must be {expected!r}, got {state[key]!r} - {advice}")
        opened, returned = state.get("opened"), state.get("put_back")
        if not isinstance(opened, int) or isinstance(opened, bool) or opened < 0:
            raise TaskError(f"the saved state of the episodes must have a whole number from 0 as opened, got {opened!r} - it is torn")
        if not isinstance(returned, list | tuple):
            raise TaskError(f"the saved state of the episodes must have a list of [task_id, epoch] as put_back, got {returned!r}")
        loaded = copy(self)
        loaded._opened = opened
        loaded._put_back = OrderedDict()
        for entry in returned:
            match entry:
                case [str(task_id), int(epoch)] if not isinstance(epoch, bool):
                    try:
                        loaded.put_back(task_id, epoch)
                    except TaskError as error:
                        raise TaskError(f"the saved state of the episodes has a faulty put_back: {error}") from error
                case _:
                    raise TaskError(f"the entries of put_back in the saved state of the episodes must be [task_id, epoch], got {entry!r}")
        vars(self).update(vars(loaded))  # all at once, now that nothing can be wrong any more

    def fingerprint(self) -> str:
        """Digest of the domain and the number of environment groups: the same for the same episodes only."""
        text = f"episodes {self.num_env_groups} {self.domain}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _name(self, number: int) -> str:
        episode, group = divmod(number, self.num_env_groups)
        return f"{self.domain}/g{group}/e{episode}"

    def _task(self, number: int) -> Task:
        episode, group = divmod(number, self.num_env_groups)
        return _episode(self._name(number), self.domain, group, episode)

    def _number(self, task_id: str) -> int | None:
        """Which new episode has this name; None: none ever will."""
        prefix = f"{self.domain}/"
        found = _NAME.fullmatch(task_id, len(prefix)) if task_id.startswith(prefix) else None
        if found is None:
            return None
        group, episode = int(found[1]), int(found[2])
        return episode * self.num_env_groups + group if group < self.num_env_groups else None

    def _drawn(self, task_id: str, epoch: int) -> int:
        """The number of an episode that has been drawn, else `TaskError`."""
        number = self._number(task_id)
        if number is None:
            raise TaskError(
                f"{task_id!r} is none of these episodes: expected '{self.domain}/g<group>/e<episode>', group below {self.num_env_groups}"
            )
        if epoch != _EPOCH:
            raise TaskError(f"episode {task_id!r} cannot come back to epoch {epoch}: episodes are all of epoch {_EPOCH}")
        if number >= self._opened:
            raise TaskError(f"episode {task_id!r} has not been drawn, so that it cannot be put back")
        return number


class _Opened(Mapping[str, Task]):
    """The opened episodes of a source, by task_id, in the order in which they were opened."""

    def __init__(self, source: EpisodeTasks) -> None:
        self._source = source

    def __getitem__(self, task_id: str) -> Task:
        number = self._source._number(task_id)
        if number is None or number >= self._source._opened:
            raise KeyError(task_id)
        return self._source._task(number)

    def __iter__(self) -> Iterator[str]:
        return map(self._source._name, range(self._source._opened))

    def __len__(self) -> int:
        return self._source._opened


def held_out_episodes(domain: str, num_env_groups: int, repeats: int = 1) -> list[Task]:
    """What an evaluation plays: episode 0 of each environment group, `repeats` times in a row, named `<domain>/val/g<group>`.

    Their names are no names of episodes in training; that their problems differ is a matter of the seed they are played with.
    Raises `TaskError` for settings that cannot be.
    """
    _check(domain, num_env_groups)
    if repeats < 1:
        raise TaskError(f"repeats must be at least 1, got {repeats}")
    episodes = [_episode(f"{domain}/val/g{group}", domain, group, 0) for group in range(num_env_groups)]
    return [task for task in episodes for _ in range(repeats)]


def _check(domain: str, num_env_groups: int) -> None:
    if not domain:
        raise TaskError("episodes need the name of a domain, got an empty one")
    if num_env_groups < 1:
        raise TaskError(f"num_env_groups must be at least 1, got {num_env_groups}")


def _episode(task_id: str, domain: str, group: int, episode: int) -> Task:
    entry = {"env_group": group, "episode": episode}
    return Task(task_id=task_id, domain=domain, prompt="", prompt_ids=_NO_TOKENS, entry=entry)
