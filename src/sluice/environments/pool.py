"""Worker processes in which environments run, reused for many episodes. A stuck or dead one is killed and replaced in the background.

A `PooledRunner` holds a worker from `reset` to the end of the episode and gives it back by itself, so that capacity returns with the last
step, with a fault, with `close` and with the caller's cancel. Runners may outnumber workers: those that come later wait in a row.

All state changes in callbacks of the event loop, none of which waits. A worker is in one call at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, Final, cast

from sluice.environments.base import Call, EnvFault, EnvReset, EnvStep
from sluice.environments.boundary import LONGEST_ACTION, Answer
from sluice.environments.build import check_environment
from sluice.environments.forkserver import ENDED, ForkServer
from sluice.environments.runners import START_TRIES, EpisodeState, RunnerCounts, RunningCall, closed, late, no_episode
from sluice.environments.settings import EnvironmentConfig
from sluice.environments.worker import HEADER, pack, unpack_answer
from sluice.errors import ConfigError, EnvError

CANCEL_GRACE_S: Final = 0.1  # a cancelled call may end by itself so long: most do, and their worker need not be replaced
START_LIMIT_S: Final = 120.0  # from the command to fork to the first word of a worker, imports included
START_DELAY_S: Final = 0.2  # before the second try; doubles with each further one
STOP_LIMIT_S: Final = 1.2  # how long `close` waits for the fork server before it is killed; it needs milliseconds
LARGEST_MESSAGE: Final = 1 << 26  # bytes that a worker may say at once: far beyond the bounds of boundary.py
_POLL_S: Final = 0.005  # how often `close` looks meanwhile
_CHUNK: Final = 1 << 16  # bytes read at once

_log = logging.getLogger(__name__)


class EnvironmentPool:
    """Processes for one kind of environment.

    They start with the pool and import while the caller does something else; the pool belongs to the event loop that first uses it. `close`
    it: until then the processes stay. When the program ends without, even by `kill -9`, they end too.
    """

    def __init__(self, config: EnvironmentConfig, counts: RunnerCounts | None = None) -> None:
        """Start the process from which the workers are forked.

        Raises:
            ConfigError: a setting is wrong.
            EnvError: no process can be started.
        """
        check_environment(config)
        self.config = config
        self._settings = _packed(config)
        self.counts = RunnerCounts() if counts is None else counts
        self.workers_lost = 0  # that died, or were killed in a call that somebody waited for
        self._import_path = [os.getcwd() if entry == "" else str(entry) for entry in sys.path]
        self._folder = os.getcwd()
        self._places = [_Place() for _ in range(config.workers)]
        self._idle: list[_Worker] = []
        self._by_id: dict[int, _Worker] = {}  # workers in a place; one that was told to die is in none
        self._waiting: deque[asyncio.Future[_Worker | None]] = deque()  # for a worker, first come first served; None: closed
        self._next_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._broken: str | None = None
        self._server = self._new_server()

    # ------------------------------------------------------------ what runners call

    def runner(self) -> PooledRunner:
        """A runner that plays its episodes in this pool."""
        return PooledRunner(self)

    def request(self) -> asyncio.Future[_Worker | None]:
        """Ask for a worker, which the caller then holds; None: there is none, the pool is closed. Whoever leaves calls `withdraw`.

        Raises:
            EnvError: no worker can be started any more, or the pool belongs to another event loop.
        """
        self._attach()
        if self._broken is not None:
            raise EnvError(self._broken)
        request: asyncio.Future[_Worker | None] = asyncio.get_running_loop().create_future()
        if self._closed:
            request.set_result(None)
        elif self._idle:
            request.set_result(self._idle.pop())
        else:
            self._waiting.append(request)
        return request

    def withdraw(self, request: asyncio.Future[_Worker | None]) -> None:
        """The worker asked for is not wanted any more; one that came in the same moment is given back."""
        if not request.done():
            request.set_result(None)
        elif not request.cancelled() and request.exception() is None and (worker := request.result()) is not None:
            self.release(worker)

    def ask(self, worker: _Worker, call: Call, argument: int | str) -> asyncio.Future[Answer]:
        """Have a held worker make a call; the answer comes within the time limit."""
        job = _Job(self._new_id(), call, self._running_loop.create_future())
        if worker.id not in self._by_id:  # it ended while it was held
            detail = f"environment {self.config.type}, {call}: its process ended before this call"
            job.end(closed(call, self.config.type) if self._closed else EnvFault(kind="env_died", detail=detail, call=call))
            return job.answer
        worker.job = job
        limit_s = self.config.limit_s(call)
        if limit_s is not None:
            worker.timer = self._running_loop.call_later(limit_s, self._on_limit, worker, job, limit_s)
        worker.send(pack([job.number, call, argument]))
        return job.answer

    def release(self, worker: _Worker) -> None:
        """The holder needs it no more. One that is in a call has `CANCEL_GRACE_S` to end it, and is replaced if it does not."""
        if worker.id not in self._by_id or self._closed:
            return
        worker.episodes += 1
        if worker.job is None:
            self._offer(worker)
            return
        worker.stop_timer()
        worker.job.is_left = True
        worker.timer = self._running_loop.call_later(CANCEL_GRACE_S, self._on_grace, worker, worker.job)

    def end_call(self, worker: _Worker, fault: EnvFault) -> None:
        """End the call that a worker is in with this fault, kill it and replace it."""
        job = worker.job
        if job is not None and worker.id in self._by_id:
            self.workers_lost += 1
            self._retire(worker)
            job.end(fault)
            self._fill()

    async def close(self) -> None:
        """Answer everything that waits with `env_closed` and end all processes, stuck ones too. Under 2 s; may be called again."""
        self._shut()
        for limit_s in (STOP_LIMIT_S, STOP_LIMIT_S / 2):
            deadline = time.monotonic() + limit_s
            while time.monotonic() < deadline:
                if self._server.exit_code is not None:
                    return
                await asyncio.sleep(_POLL_S)
            self._server.kill_now()

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and how many workers are alive now."""
        return {
            **self.counts.metrics(),
            "env/workers_alive": float(sum(worker.is_ready for worker in self._by_id.values())),
            "env/workers_lost": float(self.workers_lost),
            "env/waiting": float(sum(not request.done() for request in self._waiting)),
        }

    # ------------------------------------------------------------ what workers do

    def _offer(self, worker: _Worker) -> None:
        """Give a worker that nobody holds to whoever waits longest, or lay it down; an old one is replaced instead."""
        limit = self.config.episodes_per_worker
        if limit is not None and worker.episodes >= limit:
            self._retire(worker)
            self._fill()
            return
        while self._waiting:
            request = self._waiting.popleft()
            if not request.done():
                request.set_result(worker)
                return
        self._idle.append(worker)

    def _on_readable(self, worker: _Worker) -> None:
        """A worker said something, or hung up."""
        for message in worker.read():
            match message:
                case [number, *answer] if worker.job is not None and number == worker.job.number:
                    try:
                        came = unpack_answer(answer)
                    except (ValueError, TypeError):
                        worker.hung_up = True
                        break
                    self._on_answer(worker, worker.job, came)
                case {"ready": True} if not worker.is_ready:
                    worker.is_ready = True
                    worker.place.failed_starts = 0
                    worker.stop_timer()
                    self._offer(worker)
                case {"failed": why}:
                    worker.place.last_words = str(why)
                case _:
                    worker.hung_up = True  # the environment wrote to the connection: nothing it says can be trusted any more
                    break
        if worker.hung_up and worker.id in self._by_id:
            self._running_loop.remove_reader(worker.connection)
            if worker in self._idle:
                self._idle.remove(worker)
            self._tell_to_die(worker)  # it is dead, or may as well be; the report says how it ended

    def _on_answer(self, worker: _Worker, job: _Job, answer: Answer) -> None:
        worker.job = None
        worker.stop_timer()
        limit_s = self.config.limit_s(job.call)
        if limit_s is not None and answer.seconds > limit_s and not isinstance(answer, EnvFault):
            # It came late, before this loop had the time to look at the clock.
            answer = late(job.call, self.config.type, limit_s, None, answer.seconds)
        if job.is_left:
            self._offer(worker)
        else:
            job.end(answer)

    def _on_limit(self, worker: _Worker, job: _Job, limit_s: float) -> None:
        """A call ran too long: its worker is replaced."""
        self._on_readable(worker)  # the answer may lie there
        if worker.job is job and worker.id in self._by_id:
            self.end_call(worker, late(job.call, self.config.type, limit_s, None, limit_s))

    def _on_grace(self, worker: _Worker, job: _Job) -> None:
        """A call that nobody waits for did not end."""
        self._on_readable(worker)
        if worker.job is job and worker.id in self._by_id:
            self._retire(worker)
            self._fill()

    def _on_slow_start(self, worker: _Worker) -> None:
        worker.place.last_words = f"it did not start within {START_LIMIT_S:g} s"
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

    def _lost(self, worker: _Worker, how: str) -> None:
        """A worker ended that should not have."""
        job = worker.job
        self._retire(worker, kill=False)
        if not worker.is_ready:
            worker.place.last_words = worker.place.last_words or how
            self._start_failed(worker.place)
            return
        self.workers_lost += 1
        if job is not None:
            detail = f"environment {self.config.type}, {job.call}: its process ended: {how}"
            job.end(EnvFault(kind="env_died", detail=detail, call=job.call, seconds=time.monotonic() - job.since))
        if self.workers_lost & (self.workers_lost - 1) == 0:  # the 1st, 2nd, 4th, 8th: an environment may do it every time
            when = "between calls" if job is None else f"in a {job.call}"
            _log.warning(
                "a worker of environment %s was lost %s (%d so far): %s; it is replaced", self.config.type, when, self.workers_lost, how
            )
        self._fill()

    def _on_server_gone(self) -> None:
        """The fork server was killed, or a module ended it while it was being imported. Its workers end with it."""
        self._running_loop.remove_reader(self._server.connection)
        self._server.stop()
        self._running_loop.call_later(_POLL_S, self._replace_server, _POLL_S)

    def _replace_server(self, waited_s: float) -> None:
        """Start a new fork server when it is known how the old one ended."""
        if self._closed:
            return
        if self._server.exit_code is None:  # it is on its way out
            if waited_s > STOP_LIMIT_S:
                self._server.kill_now()
            self._running_loop.call_later(_POLL_S, self._replace_server, waited_s + _POLL_S)
            return
        how = f"the process from which environment workers are forked ended: {_exit_text(self._server.exit_code)}"
        try:
            self._server = self._new_server()
        except EnvError as err:
            self._break(str(err))
            return
        self._running_loop.add_reader(self._server.connection, self._on_reports)
        for worker in list(self._by_id.values()):
            if worker.id in self._by_id:  # losing one may break the pool, and that retires all others
                self._lost(worker, how)

    # ------------------------------------------------------------ starting and ending workers

    def _attach(self) -> None:
        """Bind the pool to the running event loop, once."""
        loop = asyncio.get_running_loop()
        if self._loop is None and not self._closed:
            self._loop = loop
            loop.add_reader(self._server.connection, self._on_reports)
            self._fill()
        elif self._loop not in (None, loop):
            raise EnvError("the environment pool belongs to the event loop that first called it - make one pool per event loop")

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the pool is not attached"
        return self._loop

    def _new_server(self) -> ForkServer:
        return ForkServer(
            preload="sluice.environments.worker:preload_config",
            serve="sluice.environments.worker:serve",
            settings=self._settings,
            import_path=self._import_path,
            folder=self._folder,
        )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _fill(self) -> None:
        """Start a worker in every free place that may have one now."""
        for place in self._places:
            if place.worker is None and not place.is_waiting and not self._closed:
                self._start(place)

    def _start(self, place: _Place) -> None:
        loop = self._running_loop
        place.is_waiting = False
        place.last_words = ""
        try:
            ours, theirs = socket.socketpair()
        except OSError as err:
            place.last_words = f"there is no connection to be had: {err}"
            self._start_failed(place)
            return
        worker = _Worker(self._new_id(), place, ours, loop)
        place.worker = worker
        self._by_id[worker.id] = worker
        loop.add_reader(ours, self._on_readable, worker)
        worker.timer = loop.call_later(START_LIMIT_S, self._on_slow_start, worker)
        with theirs:
            try:
                self._server.fork(worker.id, theirs)
            except BlockingIOError:  # it is importing, and its socket is full of commands
                self._retire(worker, kill=False)
                place.is_waiting = True
                place.retry = loop.call_later(START_DELAY_S, self._start, place)
            except OSError:
                pass  # the fork server is gone: its connection says so next, and that deals with all workers at once

    def _start_failed(self, place: _Place) -> None:
        """Try again after a while, or give up."""
        if self._closed:
            return
        place.failed_starts += 1
        if place.failed_starts >= START_TRIES:
            self._break(
                f"environment {self.config.type}: no worker can be started, {START_TRIES} tries failed, the last one because "
                f"{place.last_words}"
            )
            return
        place.is_waiting = True
        delay = START_DELAY_S * 2 ** (place.failed_starts - 1)
        _log.warning("a worker of environment %s cannot be started: %s; trying again in %.1f s", self.config.type, place.last_words, delay)
        place.retry = self._running_loop.call_later(delay, self._start, place)

    def _retire(self, worker: _Worker, *, kill: bool = True) -> None:
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

    def _tell_to_die(self, worker: _Worker) -> None:
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
        """End everything: calls are answered, and whoever waits for a worker. Does not wait."""
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
        for job in jobs:
            job.end(closed(job.call, self.config.type))
        for request in self._waiting:
            if request.done():
                continue
            if self._broken is None:
                request.set_result(None)
            else:
                request.set_exception(EnvError(self._broken))
        self._waiting.clear()


class PooledRunner:
    """A `Runner` that plays each episode in a worker process of a pool."""

    def __init__(self, pool: EnvironmentPool) -> None:
        """Play in this pool; a worker is taken with the first `reset`."""
        self.name = pool.config.type
        self.running: RunningCall | None = None
        self._pool = pool
        self._episode = EpisodeState(pool.config.type, pool.config.max_steps)
        self._worker: _Worker | None = None  # held while an episode is open or a call under way
        self._request: asyncio.Future[_Worker | None] | None = None  # for a worker, while waiting for one
        self._is_busy = False
        self._closed = False

    async def reset(self, seed: int) -> EnvReset | EnvFault:
        """Begin the episode of the seed, as soon as there is a worker; the limit counts from then.

        Raises:
            EnvError: no worker can be started any more.
        """
        self._take_turn("reset")
        try:
            self._episode.begin(seed)
            if not self._closed and self._worker is None:
                self._worker = await self._next_worker()
            if self._closed or self._worker is None:
                return cast(EnvReset | EnvFault, self._ended(closed("reset", self.name)))
            return cast(EnvReset | EnvFault, await self._call(self._worker, "reset", seed))
        finally:
            self._is_busy = False

    async def step(self, action: str) -> EnvStep | EnvFault:
        """Act."""
        self._take_turn("step")
        try:
            if self._closed or self._worker is None or not self._episode.is_open:
                return cast(EnvStep | EnvFault, self._ended((closed if self._closed else no_episode)("step", self.name)))
            return cast(EnvStep | EnvFault, await self._call(self._worker, "step", action[:LONGEST_ACTION]))
        finally:
            self._is_busy = False

    def leave(self) -> None:
        """End the episode and give the worker back."""
        self._episode.is_open = False
        if not self._is_busy:
            self._let_go()

    async def close(self) -> None:
        """Give the worker back."""
        self._closed = True
        if self._request is not None:
            self._pool.withdraw(self._request)
        worker, running = self._worker, self.running
        if worker is not None and running is not None and worker.job is not None:
            job = worker.job
            self._let_go()
            job.end(closed(running.call, self.name))
        else:
            self._let_go()

    def interrupt(self, why: str) -> None:
        """End the call that is under way, kill its process and replace it."""
        if self._worker is not None and self.running is not None:
            call, seconds = self.running.call, time.monotonic() - self.running.since
            detail = f"environment {self.name}, {call}: {why}"
            self._pool.end_call(self._worker, EnvFault(kind="env_timeout", detail=detail, call=call, seconds=seconds))

    async def _next_worker(self) -> _Worker | None:
        """Waits for a worker; unblocked by one, by the end of the pool and by `close`."""
        request = self._request = self._pool.request()
        try:
            worker = await asyncio.shield(request)  # shielded: a cancel must not lose a worker that comes in the same moment
            return None if self._closed else worker
        except asyncio.CancelledError:
            self._pool.withdraw(request)
            raise
        finally:
            self._request = None

    async def _call(self, worker: _Worker, call: Call, argument: int | str) -> Answer:
        self.running = RunningCall(call=call, since=time.monotonic(), env_id=self._episode.env_id, seed=self._episode.seed)
        try:
            return self._ended(await self._pool.ask(worker, call, argument))
        except asyncio.CancelledError:
            self._pool.counts.cancelled += 1
            self._episode.is_open = False
            self._let_go()
            raise
        finally:
            self.running = None

    def _take_turn(self, call: Call) -> None:
        if self._is_busy:
            raise EnvError(f"environment {self.name}, {call}: expected one call at a time, another one is under way - await that first")
        self._is_busy = True

    def _ended(self, answer: Answer) -> Answer:
        answer = self._episode.after(answer)
        self._pool.counts.answered(answer)
        if not self._episode.is_open:
            self._let_go()
        return answer

    def _let_go(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.release(worker)


class _Job:
    """One call of a worker."""

    __slots__ = ("answer", "call", "is_left", "number", "since")

    def __init__(self, number: int, call: Call, answer: asyncio.Future[Answer]) -> None:
        self.number = number
        self.call: Call = call
        self.answer = answer
        self.since = time.monotonic()
        self.is_left = False  # nobody waits for it any more

    def end(self, answer: Answer) -> None:
        """Answer, unless its caller is gone."""
        if not self.answer.done():
            self.answer.set_result(answer)


class _Place:
    """One of the pool's places: it holds a worker, starts one, or waits to try again."""

    __slots__ = ("failed_starts", "is_waiting", "last_words", "retry", "worker")

    def __init__(self) -> None:
        self.worker: _Worker | None = None
        self.failed_starts = 0  # in a row
        self.is_waiting = False  # for the next try
        self.last_words = ""  # why the last start failed, in the worker's words
        self.retry: asyncio.TimerHandle | None = None


class _Worker:
    """The pool's end of one worker process."""

    def __init__(self, worker_id: int, place: _Place, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.id = worker_id
        self.place = place
        self.connection = connection
        self.connection.setblocking(False)
        self.is_ready = False
        self.hung_up = False
        self.was_killed = False  # by us
        self.episodes = 0  # played to their end, or left
        self.job: _Job | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._loop = loop
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._is_sending = False  # the socket was full

    def send(self, message: bytes) -> None:
        """Send a call, as much as the socket takes now and the rest when it takes more."""
        self._unsent = memoryview(message)
        self._send_more()

    def read(self) -> list[Any]:
        """The messages that have arrived whole; nothing any more once it hung up."""
        if self.hung_up:
            return []
        try:
            while data := self.connection.recv(_CHUNK):
                self._received += data
                if len(data) < _CHUNK:
                    break
            else:
                self.hung_up = True
        except BlockingIOError:
            pass
        except OSError:
            self.hung_up = True
        messages = []
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            if size > LARGEST_MESSAGE:
                self.hung_up = True
                break
            end = HEADER.size + size
            if len(self._received) < end:
                break
            try:
                messages.append(json.loads(self._received[HEADER.size : end]))
            except ValueError:
                self.hung_up = True
                break
            del self._received[:end]
        return messages

    def stop_timer(self) -> None:
        """Whatever it was waited for has come."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def hang_up(self) -> None:
        """Stop listening to it."""
        self.stop_timer()
        self._loop.remove_writer(self.connection)
        self.connection.close()
        self.hung_up = True

    def _send_more(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(self.connection, self._send_more)
            self._is_sending = True
            return
        except OSError:
            self._unsent = memoryview(b"")  # it is dead: the report says so
        if self._is_sending:
            self._loop.remove_writer(self.connection)
            self._is_sending = False


def _packed(config: EnvironmentConfig) -> bytes:
    """The settings as a worker gets them. Raises `ConfigError` when another process cannot be told of them."""
    try:
        return json.dumps(config.model_dump()).encode()
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"environment.args: expected numbers, texts, truth values, lists and mappings of them, which a worker process can be told, "
            f"got {config.args!r} ({err}) - give plain data, or set run_in to thread"
        ) from err


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"it ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was killed by {name}{', perhaps for lack of memory' if -code == signal.SIGKILL else ''}"
