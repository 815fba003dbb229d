"""The worker pool: verifiers in processes of their own, with a time limit each. A stuck or dead worker is replaced.

Backpressure:

| who | consumes | waits for | unblocked by |
|---|---|---|---|
| `score` | nothing | its answer | the worker, its time limit, the worker's death, `close`, its own cancel |
| a queued job | nothing | an idle worker | a worker that answered or was replaced |
| `close` | nothing | the end of the fork server | its exit, or `STOP_LIMIT_S` |

All state changes in callbacks of the event loop, none of which waits. A worker has one job at a time; a job is sent once and never again,
so that a verifier that kills its process kills one process for each response, not the pool.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final

from sluice.config.models import RewardConfig
from sluice.errors import RewardError
from sluice.rewards.base import Score
from sluice.rewards.forkserver import ENDED, ForkServer
from sluice.rewards.inline import unknown_domain
from sluice.rewards.score import ScoreCounts, describe, failed
from sluice.rewards.worker import HEADER, pack_job, unpack_score
from sluice.types import Failure, Task

CANCEL_GRACE_S: Final = 0.1  # a cancelled job may end by itself so long: most do, and their worker need not be replaced
START_LIMIT_S: Final = 60.0  # from the command to fork to the first word of a worker, imports included
START_TRIES: Final = 3  # starts in a row that one place in the pool may fail
START_DELAY_S: Final = 0.2  # before the second try; doubles with each further one
MOST_STARTING: Final = 64  # workers being started at once: their commands wait in a socket while the fork server is importing
STOP_LIMIT_S: Final = 1.2  # how long `close` waits for the fork server before it is killed; it needs milliseconds
_POLL_S: Final = 0.005  # how often `close` looks meanwhile
_CHUNK: Final = 1 << 16  # bytes read at once; from 128 KiB on every read would map fresh memory

_log = logging.getLogger(__name__)


class RewardPool:
    """A `Scorer` that runs verifiers in worker processes.

    The processes start with the pool and import the verifiers' modules while the caller does something else; the pool belongs to the event
    loop, in whatever thread, that first calls `score`. `close` it: until then the processes stay. When the program ends without, even by
    `kill -9`, they end too.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], workers: int) -> None:
        """Start the process from which the workers are forked.

        Args:
            rewards: domain -> how its responses are scored. Settings are taken as checked (`check_rewards`).
            workers: number of worker processes, at least 1.

        Raises:
            ValueError: fewer than one worker.
            RewardError: no process can be started.
        """
        if workers < 1:
            raise ValueError(f"a pool needs at least 1 worker, got {workers} - InlineScorer scores without workers")
        self._rewards = dict(rewards)
        self._import_path = [os.getcwd() if entry == "" else str(entry) for entry in sys.path]
        self._folder = os.getcwd()
        self._counts = ScoreCounts()
        self._queue: OrderedDict[int, _Job] = OrderedDict()  # oldest first
        self._next_id = 0
        self._places = [_Place() for _ in range(workers)]
        self._idle: list[_Worker] = []
        self._by_id: dict[int, _Worker] = {}  # workers in a place; one that was told to die is in none
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._broken: str | None = None
        self._server = self._new_server()

    # ------------------------------------------------------------ what the shell calls

    async def score(self, task: Task, response: str) -> Score:
        """Score one response in a worker, within the domain's `reward_timeout_s`, which counts from when a worker takes it.

        Whatever the verifier does becomes a `Failure`: `reward_error`, `reward_timeout`, `reward_worker_lost` and those of `make_score`;
        `task_not_picklable` when the task cannot be sent; `pool_closed` after `close`. When cancelled, a waiting job is withdrawn at once
        and a running one is given `CANCEL_GRACE_S` before its worker is replaced.

        Raises:
            RewardError: the domain has no reward settings, the pool belongs to another event loop, or no worker can be started any more.
        """
        if task.domain not in self._rewards:
            raise RewardError(unknown_domain(task, self._rewards))
        self._attach()
        if self._broken is not None:
            raise RewardError(self._broken)
        self._counts.jobs += 1
        if self._closed:
            return self._counted(failed("pool_closed", "the run is ending"))
        number = self._new_id()
        try:
            message = pack_job(number, task, response)
        except Exception as err:  # noqa: BLE001 - pickling runs code of the data's classes
            return self._counted(failed("task_not_picklable", f"task {task.task_id!r} cannot be sent to a worker: {describe(err)}"))
        job = _Job(number, message, self._rewards[task.domain], asyncio.get_running_loop().create_future())
        self._queue[job.id] = job
        self._hand_out()
        try:
            return await job.answer
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    async def close(self) -> None:
        """Answer everything that waits with `pool_closed` and end all processes, stuck ones too. Under 2 s; may be called again."""
        self._shut(failed("pool_closed", "the run is ending"))
        await self._server_ended()

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and how many workers are alive now."""
        alive = sum(worker.is_ready for worker in self._by_id.values())
        return {**self._counts.metrics(), "rewards/workers_alive": alive, "rewards/queued": len(self._queue)}

    # ------------------------------------------------------------ jobs

    def _hand_out(self) -> None:
        """Give waiting jobs to idle workers."""
        while self._queue and self._idle:
            _, job = self._queue.popitem(last=False)
            worker = self._idle.pop()
            worker.job = job
            job.worker = worker
            job.started_at = perf_counter()
            self._counts.started += 1
            self._counts.queue_seconds += job.started_at - job.queued_at
            worker.timer = self._running_loop.call_later(job.rewards.reward_timeout_s, self._on_limit, worker)
            worker.send(job.message)

    def _answer(self, job: _Job, score: Score) -> None:
        """The one way in which a job ends, unless it was abandoned."""
        if not job.answer.done():
            job.answer.set_result(self._counted(score))

    def _counted(self, score: Score) -> Score:
        self._counts.answered(score)
        return score

    def _abandon(self, job: _Job) -> None:
        """Nobody waits for this job any more."""
        if job.answer.done() and not job.answer.cancelled():
            return  # answered, and counted, in the same moment
        self._counts.cancelled += 1
        self._queue.pop(job.id, None)
        worker = job.worker
        if worker is not None and worker.job is job and worker.timer is not None:
            soon = self._running_loop.time() + CANCEL_GRACE_S
            if soon < worker.timer.when():
                worker.timer.cancel()
                worker.timer = self._running_loop.call_at(soon, self._on_limit, worker)

    # ------------------------------------------------------------ what workers do

    def _on_readable(self, worker: _Worker) -> None:
        """A worker said something, or hung up."""
        for message in worker.read():
            match message:
                case [number, *score] if worker.job is not None and number == worker.job.id:
                    self._on_score(worker, worker.job, unpack_score(score))
                case {"ready": True} if not worker.is_ready:
                    self._on_ready(worker)
                case {"failed": why}:
                    worker.place.last_words = str(why)
                case _:
                    worker.hung_up = True  # a verifier wrote to the connection: nothing it says can be trusted any more
                    break
        if worker.hung_up and worker.id in self._by_id:
            self._running_loop.remove_reader(worker.connection)
            if worker in self._idle:
                self._idle.remove(worker)
            self._tell_to_die(worker)  # it is dead, or may as well be; the report says how it ended

    def _on_ready(self, worker: _Worker) -> None:
        worker.is_ready = True
        worker.place.failed_starts = 0
        worker.stop_timer()
        self._idle.append(worker)
        self._fill()
        self._hand_out()

    def _on_score(self, worker: _Worker, job: _Job, score: Score) -> None:
        worker.job = None
        worker.stop_timer()
        if score.seconds > job.rewards.reward_timeout_s:
            score = _timed_out(job.rewards, score.seconds)  # it came late, before this loop had the time to look at the clock
        self._answer(job, score)
        self._idle.append(worker)
        self._hand_out()

    def _on_limit(self, worker: _Worker) -> None:
        """A job ran too long, or was cancelled and did not end: its worker is replaced."""
        job = worker.job
        self._on_readable(worker)  # the answer may lie there
        if job is None or worker.job is not job:
            return
        self._retire(worker)
        self._answer(job, _timed_out(job.rewards, perf_counter() - job.started_at))
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
        self._counts.worker_losses += worker.is_ready
        self._retire(worker, kill=False)
        if not worker.is_ready:
            worker.place.last_words = worker.place.last_words or how
            self._start_failed(worker.place)
            return
        if job is not None:
            self._answer(job, failed("reward_worker_lost", how, seconds=perf_counter() - job.started_at))
        losses = self._counts.worker_losses
        if losses & (losses - 1) == 0:  # the 1st, 2nd, 4th, 8th: a verifier may do it every time
            when = "between jobs" if job is None else "while scoring"
            _log.warning("a reward worker was lost %s (%d so far): %s; it is replaced", when, losses, how)
        self._fill()

    def _on_server_gone(self) -> None:
        """The fork server was killed, or a module of a verifier ended it while it was being imported. Its workers end with it."""
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
        how = f"the process from which reward workers are forked ended: {_exit_text(self._server.exit_code)}"
        try:
            self._server = self._new_server()
        except RewardError as err:
            self._broken = str(err)
            self._shut(None)
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
            raise RewardError("the reward pool belongs to the event loop that first called it - make one pool per event loop")

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the pool is not attached"
        return self._loop

    def _new_server(self) -> ForkServer:
        return ForkServer(self._rewards, self._import_path, self._folder)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _fill(self) -> None:
        """Start a worker in every free place that may have one now."""
        starting = sum(not worker.is_ready for worker in self._by_id.values())
        for place in self._places:
            if starting >= MOST_STARTING:
                return
            if place.worker is None and not place.is_waiting and not self._closed and self._broken is None:
                starting += 1
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
            except OSError:
                pass  # the fork server is gone: its connection says so next, and that deals with all workers at once

    def _start_failed(self, place: _Place) -> None:
        """Try again after a while, or give up."""
        if self._closed or self._broken is not None:
            return
        place.failed_starts += 1
        if place.failed_starts >= START_TRIES:
            self._broken = f"no reward worker can be started, {START_TRIES} tries failed, the last one because {place.last_words}"
            self._shut(None)
            return
        place.is_waiting = True
        delay = START_DELAY_S * 2 ** (place.failed_starts - 1)
        _log.warning("a reward worker cannot be started: %s; trying again in %.1f s", place.last_words, delay)
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

    def _shut(self, answer: Score | None) -> None:
        """End everything: jobs are answered, or raise why the pool is broken. Does not wait."""
        if self._closed:
            return
        self._closed = True
        jobs = [worker.job for worker in self._by_id.values() if worker.job is not None] + list(self._queue.values())
        self._queue.clear()
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
            if answer is not None:
                self._answer(job, answer)
            elif not job.answer.done():
                self._counted(failed("pool_broken"))
                job.answer.set_exception(RewardError(self._broken))

    async def _server_ended(self) -> None:
        """Waits for the fork server's exit; unblocked by it, or by killing it after a while."""
        for limit_s in (STOP_LIMIT_S, STOP_LIMIT_S / 2):
            deadline = perf_counter() + limit_s
            while perf_counter() < deadline:
                if self._server.exit_code is not None:
                    return
                await asyncio.sleep(_POLL_S)
            self._server.kill_now()


class _Job:
    """One call of `score`."""

    __slots__ = ("answer", "id", "message", "queued_at", "rewards", "started_at", "worker")

    def __init__(self, job_id: int, message: bytes, rewards: RewardConfig, answer: asyncio.Future[Score]) -> None:
        self.id = job_id
        self.message = message
        self.rewards = rewards
        self.answer = answer
        self.queued_at = perf_counter()
        self.started_at = 0.0
        self.worker: _Worker | None = None


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

    __slots__ = (
        "_is_sending",
        "_loop",
        "_received",
        "_unsent",
        "connection",
        "hung_up",
        "id",
        "is_ready",
        "job",
        "place",
        "timer",
        "was_killed",
    )

    def __init__(self, worker_id: int, place: _Place, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.id = worker_id
        self.place = place
        self.connection = connection
        self.connection.setblocking(False)
        self.is_ready = False
        self.hung_up = False
        self.was_killed = False  # by us
        self.job: _Job | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._loop = loop
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._is_sending = False  # the socket was full

    def send(self, message: bytes) -> None:
        """Send a job, as much as the socket takes now and the rest when it takes more."""
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
            end = HEADER.size + HEADER.unpack_from(self._received)[0]
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


def _timed_out(rewards: RewardConfig, seconds: float) -> Score:
    """The score of a job that passed its limit: none, or by setting a value that is marked as such."""
    detail = f"no answer within reward_timeout_s = {rewards.reward_timeout_s:g} s"
    if rewards.on_reward_timeout == "missing":
        return failed("reward_timeout", detail, seconds=seconds)
    failure = Failure(cause="policy", reason="reward_timeout", detail=detail)
    return Score(reward=rewards.timeout_value, failure=failure, seconds=seconds)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"it ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"
