"""Seats: how many trajectories play at once, and which environment each of them gets.

First come, first served; any environment serves anybody. A seat that comes free goes to whoever waits longest in that same moment, so that
none stands free while somebody waits.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from sluice.environments import Runner


class Host(Protocol):
    """What makes environments: an `EnvironmentHost`."""

    def runner(self) -> Runner:
        """A new one, which plays one episode at a time."""


class Seats:
    """At most `count` runners, made when they are first needed, and reused."""

    def __init__(self, host: Host, count: int) -> None:
        """Nobody sits yet."""
        self.count = count
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._made = 0
        self._free: list[Runner] = []
        self._waiting: dict[asyncio.Future[Runner], None] = {}  # in order of arrival
        self._opened_at = self._noted_at = self._loop.time()
        self._idle_s = 0.0  # seat-seconds free while somebody waited

    @property
    def taken(self) -> int:
        """Seats in which somebody sits."""
        return self._made - len(self._free)

    @property
    def waiting(self) -> int:
        """Those who wait."""
        return len(self._waiting)

    @property
    def idle_share(self) -> float:
        """Of all seats and all the time: how much they stood free while somebody waited."""
        self._note()
        whole = self.count * (self._noted_at - self._opened_at)
        return self._idle_s / whole if whole else 0.0

    async def take(self) -> Runner:
        """Sit down. Waits for a seat; unblocked by one that is given back."""
        self._note()
        if self._free:
            return self._free.pop()  # the one used last: what it holds is warm
        if self._made < self.count:
            runner = self._host.runner()
            self._made += 1
            return runner
        place: asyncio.Future[Runner] = self._loop.create_future()
        self._waiting[place] = None
        try:
            return await place
        except asyncio.CancelledError:
            self._note()
            if place in self._waiting:
                del self._waiting[place]
            elif not place.cancelled():
                self.give_back(place.result())  # it came in the moment of the cancel
            raise

    def give_back(self, runner: Runner) -> None:
        """Stand up."""
        self._note()
        while self._waiting:
            place = next(iter(self._waiting))
            del self._waiting[place]
            if not place.done():
                place.set_result(runner)
                return
        self._free.append(runner)

    def _note(self) -> None:
        """Account for the time since the last change."""
        now = self._loop.time()
        if self._waiting:
            self._idle_s += (self.count - self.taken) * (now - self._noted_at)
        self._noted_at = now
