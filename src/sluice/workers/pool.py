"""What every pool of worker processes does: start them, hear them, lose them, replace them, end them.

All state changes in callbacks of the event loop, none of which waits. A worker is in one job at a time; a job is sent once and never again,
so that work that kills its process kills one process for each job, not the pool.

Backpressure:

| who | consumes | waits for | unblocked by |
|---|---|---|---|
| a place | nothing | the first word of its worker | the word, the worker's death, `start_limit_s` |
| `close` | nothing | the end of the fork server | its exit, or `STOP_LIMIT_S` |
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from sluice.errors import SluiceError
from sluice.workers.connection import Place, Worker
from sluice.workers.forkserver import ENDED, ForkServer

CANCEL_GRACE_S: Final = 0.1  # a cancelled job may end by itself so long: most do, and their worker need not be replaced
START_TRIES: Final = 3  # starts in a row that one place in the pool may fail
START_DELAY_S: Final = 0.2  # before the second try; doubles with each further one
MOST_STARTING: Final = 64  # workers being started at once: their commands wait in a socket while the fork server is importing
STOP_LIMIT_S: Final = 1.2  # how long `close` waits for the fork server before it is killed; it needs milliseconds
_POLL_S: Final = 0.005  # how often `close` looks meanwhile

_log = logging.getLogger(__name__)


class Job(Protocol):
    """What a worker is asked to do once."""

    @property
    def number(self) -> int:
        """Differs from that of every other job of the pool."""


JobT = TypeVar("JobT", bound=Job)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """What a pool does, and how it speaks of it."""

    name: str  # of the pool and its workers as a whole, in messages: "reward"
    worker: str  # one of them, in messages: "reward worker"
    way_out: str  # what else to do where no process can be started
    preload: str  # "module:function", called once with the settings in the process from which workers are forked
    serve: str  # "module:function", called in a worker with (connection, settings)
    settings: bytes  # for both
    start_limit_s: float  # from the command to fork to the first word of a worker, imports included
    error: type[SluiceError]  # raised when the pool is wrong as a whole


class ProcessPool(ABC, Generic[JobT, AnswerT]):
    """A fixed number of places for worker processes.

    The processes start with the pool and import while the caller does something else; the pool belongs to the event loop, in whatever
    thread, that first uses it (`_attach`). `close` it: until then the processes stay. When the program ends without, even by `kill -9`,
    they end too.

    A subclass says what is done with a free worker, an answer, a lost job, and the end.
    """

    def __init__(self, kind: PoolKind, workers: int) -> None:
        """Start the process from which the workers are forked.

        Raises:
            kind.error: no process can be started.
        """
        self._kind = kind
        self._import_path = [os.getcwd() if entry == "" else str(entry) for entry in sys.path]
        self._folder = os.getcwd()
        self._places: list[Place[JobT]] = [Place() for _ in range(workers)]
        self._idle: list[Worker[JobT]] = []
        self._by_id: dict[int, Worker[JobT]] = {}  # workers in a place; one that was told to die is in none
        self._workers_lost = 0  # ready ones that ended on their own, with or without a job
        self._next_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._broken: str | None = None
        self._server = self._new_server()

    async def close(self) -> None:
        """Answer everything that waits and end all processes, stuck ones too. Under 2 s; may be called again.

        Waits for the fork server's exit; unblocked by it, or by killing it after a while.
        """
        self._shut()
        for limit_s in (STOP_LIMIT_S, STOP_LIMIT_S / 2):
            deadline = time.monotonic() + limit_s
            while time.monotonic() < deadline:
                if self._server.exit_code is not None:
                    return
                await asyncio.sleep(_POLL_S)
            self._server.kill_now()

    # ------------------------------------------------------------ what a kind of pool says

    @abstractmethod
    def _offer(self, worker: Worker[JobT]) -> None:
        """A worker is free: give it a job, or lay it down in `_idle`."""

    @abstractmethod
    def _unpack(self, fields: list[Any]) -> AnswerT:
        """The answer that a worker gave. Raises `ValueError` or `TypeError` for what is none."""

    @abstractmethod
    def _answered(self, worker: Worker[JobT], job: JobT, answer: AnswerT) -> None:
        """A worker answered; it is in no job any more."""

    @abstractmethod
    def _job_lost(self, job: JobT, how: str) -> None:
        """The worker of this job ended."""

    @abstractmethod
    def _end_jobs(self, jobs: Sequence[JobT]) -> None:
        """The pool is closed, or `_broken` says why there is none: end these, which were under way, and whatever waits."""

    # ------------------------------------------------------------ what it can rely on

    @property
    def _alive(self) -> int:
        """Workers that are ready or in a job."""
        return sum(worker.is_ready for worker in self._by_id.values())

    def _attach(self) -> None:
        """Bind the pool to the running event loop, once; start its workers.

        Raises:
            kind.error: it belongs to another event loop, or no worker can be started any more.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None and not self._closed:
            self._loop = loop
            loop.add_reader(self._server.connection, self._on_reports)
            self._fill()
        elif self._loop not in (None, loop):
            raise self._kind.error(
                f"the {self._kind.name} pool belongs to the event loop that first called it - make one pool per event loop"
            )
        if self._broken is not None:
            self._raise_broken()

    def _raise_broken(self) -> NoReturn:
        raise self._kind.error(self._broken)

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the pool is not attached"
        return self._loop

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _is_in(self, worker: Worker[JobT], job: JobT) -> bool:
        """Whether a worker is in this job yet, after reading what it has said: the answer may lie there."""
        self._on_readable(worker)
        return worker.job is job and worker.id in self._by_id

    def _replace(self, worker: Worker[JobT]) -> None:
        """Have a worker killed, and start another one in its place."""
        self._retire(worker)
        self._fill()

    # ------------------------------------------------------------ what workers do

    def _on_readable(self, worker: Worker[JobT]) -> None:
        """A worker said something, or hung up."""
        for message in worker.read():
            match message:
                case [number, *fields] if worker.job is not None and number == worker.job.number:
                    try:
                        answer = self._unpack(fields)
                    except (ValueError, TypeError):
                        worker.hung_up = True
                        break
                    job, worker.job = worker.job, None
                    worker.stop_timer()
                    self._answered(worker, job, answer)
                case {"ready": True} if not worker.is_ready:
                    self._on_ready(worker)
                case {"failed": why}:
                    worker.place.last_words = str(why)
                case _:
                    worker.hung_up = True  # the work wrote to the connection: nothing it says can be trusted any more
                    break
        if worker.hung_up and worker.id in self._by_id:
            self._running_loop.remove_reader(worker.connection)
            if worker in self._idle:
                self._idle.remove(worker)
            self._tell_to_die(worker)  # it is dead, or may as well be; the report says how it ended

    def _on_ready(self, worker: Worker[JobT]) -> None:
        worker.is_ready = True
        worker.place.failed_starts = 0
        worker.stop_timer()
        self._offer(worker)
        self._fill()

    def _on_slow_start(self, worker: Worker[JobT]) -> None:
        worker.place.last_words = f"it did not start within {self._kind.start_limit_s:g} s"
        self._retire(worker)
        self._start_failed(worker.place)

    def _on_reports(self) -> None:
        """The fork server reported, or is gone."""
        try:
            for what, worker_id, code in self._server.reports():
                worker = self._by_id.get(worker_id)
                if worker is None:
                    continue  # it was told to die
                self._on_readable(worker)  # what it said before it died
                if worker.id not in self._by_id:
                    continue
                if what != ENDED:
                    how = f"it could not be forked: {os.strerror(code)}"
                elif worker.was_killed and code == -signal.SIGKILL:
                    how = "it was killed, perhaps for lack of memory, or it closed its connection or wrote to it"
                else:
                    how = _exit_text(code)
                self._lost(worker, how)
        except EOFError:
            if not self._closed:
                self._on_server_gone()

    def _lost(self, worker: Worker[JobT], how: str) -> None:
        """A worker ended that should not have."""
        job = worker.job
        self._retire(worker, kill=False)
        if not worker.is_ready:
            worker.place.last_words = worker.place.last_words or how
            self._start_failed(worker.place)
            return
        self._workers_lost += 1
        if job is not None:
            self._job_lost(job, how)
        if self._workers_lost & (self._workers_lost - 1) == 0:  # the 1st, 2nd, 4th, 8th: the work may do it every time
            when = "while idle" if job is None else "while at work"
            _log.warning("a %s was lost %s (%d so far): %s; it is replaced", self._kind.worker, when, self._workers_lost, how)
        self._fill()

    # ------------------------------------------------------------ the process from which they are forked

    def _new_server(self) -> ForkServer:
        kind = self._kind
        try:
            return ForkServer(
                preload=kind.preload, serve=kind.serve, settings=kind.settings, import_path=self._import_path, folder=self._folder
            )
        except (OSError, ValueError) as err:
            raise kind.error(
                f"the process from which {kind.name} workers are forked cannot be started with {sys.executable!r}: {err} - "
                f"check limits on processes and memory, or {kind.way_out}"
            ) from err

    def _on_server_gone(self) -> None:
        """It was killed, or a module ended it while it was being imported. Its workers end with it."""
        self._running_loop.remove_reader(self._server.connection)
        self._server.stop()
        self._running_loop.call_later(_POLL_S, self._replace_server, _POLL_S)

    def _replace_server(self, waited_s: float) -> None:
        """Start a new one when it is known how the old one ended."""
        if self._closed:
            return
        if self._server.exit_code is None:  # it is on its way out
            if waited_s > STOP_LIMIT_S:
                self._server.kill_now()
            self._running_loop.call_later(_POLL_S, self._replace_server, waited_s + _POLL_S)
            return
        how = f"the process from which {self._kind.name} workers are forked ended: {_exit_text(self._server.exit_code)}"
        try:
            self._server = self._new_server()
        except SluiceError as err:
            self._break(str(err))
            return
        self._running_loop.add_reader(self._server.connection, self._on_reports)
        for worker in list(self._by_id.values()):
            if worker.id in self._by_id:  # losing one may break the pool, and that retires all others
                self._lost(worker, how)

    # ------------------------------------------------------------ starting and ending workers

    def _fill(self) -> None:
        """Start a worker in every free place that may have one now."""
        starting = sum(not worker.is_ready for worker in self._by_id.values())
        for place in self._places:
            if starting >= MOST_STARTING:
                return
            if place.worker is None and not place.is_waiting and not self._closed:
                starting += 1
                self._start(place)

    def _start(self, place: Place[JobT]) -> None:
        loop = self._running_loop
        place.is_waiting = False
        place.last_words = ""
        try:
            ours, theirs = socket.socketpair()
        except OSError as err:
            place.last_words = f"there is no connection to be had: {err}"
            self._start_failed(place)
            return
        worker = Worker(self._new_id(), place, ours, loop)
        place.worker = worker
        self._by_id[worker.id] = worker
        loop.add_reader(ours, self._on_readable, worker)
        worker.timer = loop.call_later(self._kind.start_limit_s, self._on_slow_start, worker)
        with theirs:
            try:
                self._server.fork(worker.id, theirs)
            except BlockingIOError:  # it is importing, and its socket is full of commands
                self._retire(worker, kill=False)
                self._start_later(place, START_DELAY_S)
            except OSError:
                pass  # the fork server is gone: its connection says so next, and that deals with all workers at once

    def _start_failed(self, place: Place[JobT]) -> None:
        """Try again after a while, or give up."""
        if self._closed:
            return
        place.failed_starts += 1
        if place.failed_starts >= START_TRIES:
            self._break(f"no {self._kind.worker} can be started, {START_TRIES} tries failed, the last one because {place.last_words}")
            return
        delay = START_DELAY_S * 2 ** (place.failed_starts - 1)
        _log.warning("a %s cannot be started: %s; trying again in %.1f s", self._kind.worker, place.last_words, delay)
        self._start_later(place, delay)

    def _start_later(self, place: Place[JobT], delay_s: float) -> None:
        place.is_waiting = True
        place.retry = self._running_loop.call_later(delay_s, self._start, place)

    def _retire(self, worker: Worker[JobT], *, kill: bool = True) -> None:
        """Take a worker out of its place, and have it killed."""
        if kill:
            self._tell_to_die(worker)
        self._running_loop.remove_reader(worker.connection)
        worker.hang_up()
        worker.place.worker = None
        worker.job = None
        del self._by_id[worker.id]
        if worker in self._idle:
            self._idle.remove(worker)

    def _tell_to_die(self, worker: Worker[JobT]) -> None:
        worker.was_killed = True
        try:
            self._server.kill(worker.id)
        except OSError:
            pass  # the fork server is gone, and its workers with it

    def _break(self, why: str) -> None:
        """Nothing can run here any more: whoever waits is told."""
        self._broken = why
        self._shut()

    def _shut(self) -> None:
        """End everything. Does not wait."""
        if self._closed:
            return
        self._closed = True
        jobs = [worker.job for worker in self._by_id.values() if worker.job is not None]
        for place in self._places:
            if place.retry is not None:
                place.retry.cancel()
        if self._loop is not None:
            if not self._server.is_stopped:
                self._loop.remove_reader(self._server.connection)
            for worker in list(self._by_id.values()):
                self._retire(worker, kill=False)
        self._server.stop()
        self._end_jobs(jobs)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"it ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"
