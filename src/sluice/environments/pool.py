"""Worker processes in which environments run, reused for many episodes. A stuck or dead one is killed and replaced in the background.

A `PooledRunner` holds a worker from `reset` to the end of the episode and gives it back by itself, so that capacity returns with the last
step, with a fault, with `close` and with the caller's cancel. Runners may outnumber workers: those that come later wait in a row.

The processes are the affair of `sluice.workers`. All state changes in callbacks of the event loop, none of which waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final, cast

from sluice.environments.base import Call, EnvFault, EnvReset, EnvStep
from sluice.environments.boundary import LONGEST_ACTION, Answer
from sluice.environments.build import check_environment
from sluice.environments.runners import EpisodeState, RunnerCounts, RunningCall, closed, late, no_episode
from sluice.environments.settings import EnvironmentConfig
from sluice.environments.worker import pack_call, unpack_answer
from sluice.errors import ConfigError, EnvError
from sluice.workers import CANCEL_GRACE_S, PoolKind, ProcessPool, Worker, pack_job

START_LIMIT_S: Final = 120.0  # from the command to fork to the first word of a worker, imports included


class EnvironmentPool(ProcessPool["_Job", Answer]):
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
        self.counts = RunnerCounts() if counts is None else counts
        self._waiting: deque[asyncio.Future[Worker[_Job] | None]] = deque()  # for a worker, first come first served; None: closed
        self._episodes: Counter[int] = Counter()  # worker -> episodes that it has played to their end, or left
        self._interrupted = 0  # workers killed in a call that somebody waited for
        kind = PoolKind(
            name="environment",
            worker=f"worker of environment {config.type}",
            way_out="use run_in: thread",
            preload="sluice.environments.worker:preload_config",
            serve="sluice.environments.worker:serve",
            settings=_packed(config),
            start_limit_s=START_LIMIT_S,
            error=EnvError,
        )
        super().__init__(kind, config.workers)

    # ------------------------------------------------------------ what runners call

    def runner(self) -> PooledRunner:
        """A runner that plays its episodes in this pool."""
        return PooledRunner(self)

    def request(self) -> asyncio.Future[Worker[_Job] | None]:
        """Ask for a worker, which the caller then holds; None: there is none, the pool is closed. Whoever leaves calls `withdraw`.

        Raises:
            EnvError: no worker can be started any more, or the pool belongs to another event loop.
        """
        self._attach()
        request: asyncio.Future[Worker[_Job] | None] = asyncio.get_running_loop().create_future()
        if self._closed:
            request.set_result(None)
        elif self._idle:
            request.set_result(self._idle.pop())
        else:
            self._waiting.append(request)
        return request

    def withdraw(self, request: asyncio.Future[Worker[_Job] | None]) -> None:
        """The worker asked for is not wanted any more; one that came in the same moment is given back."""
        if not request.done():
            request.set_result(None)
        elif not request.cancelled() and request.exception() is None and (worker := request.result()) is not None:
            self.release(worker)

    def ask(self, worker: Worker[_Job], call: Call, argument: int | str) -> asyncio.Future[Answer]:
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
        worker.send(pack_job(job.number, pack_call(call, argument)))
        return job.answer

    def release(self, worker: Worker[_Job]) -> None:
        """The holder needs it no more. One that is in a call has `CANCEL_GRACE_S` to end it, and is replaced if it does not."""
        if worker.id not in self._by_id or self._closed:
            return
        self._episodes[worker.id] += 1
        if worker.job is None:
            self._offer(worker)
            return
        worker.stop_timer()
        worker.job.is_left = True
        worker.timer = self._running_loop.call_later(CANCEL_GRACE_S, self._on_grace, worker, worker.job)

    def end_call(self, worker: Worker[_Job], fault: EnvFault) -> None:
        """End the call that a worker is in with this fault, kill it and replace it."""
        job = worker.job
        if job is not None and worker.id in self._by_id:
            self._interrupted += 1
            self._retire(worker)
            job.end(fault)
            self._fill()

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and how many workers are alive now."""
        return {
            **self.counts.metrics(),
            "env/workers_alive": float(self._alive),
            "env/workers_lost": float(self._workers_lost + self._interrupted),
            "env/waiting": float(sum(not request.done() for request in self._waiting)),
        }

    # ------------------------------------------------------------ what workers do

    def _offer(self, worker: Worker[_Job]) -> None:
        """Give a worker that nobody holds to whoever waits longest, or lay it down; an old one is replaced instead."""
        limit = self.config.episodes_per_worker
        if limit is not None and self._episodes[worker.id] >= limit:
            self._replace(worker)
            return
        while self._waiting:
            request = self._waiting.popleft()
            if not request.done():
                request.set_result(worker)
                return
        self._idle.append(worker)

    def _unpack(self, fields: list[Any]) -> Answer:
        return unpack_answer(fields)

    def _answered(self, worker: Worker[_Job], job: _Job, answer: Answer) -> None:
        limit_s = self.config.limit_s(job.call)
        if limit_s is not None and answer.seconds > limit_s and not isinstance(answer, EnvFault):
            # It came late, before this loop had the time to look at the clock.
            answer = late(job.call, self.config.type, limit_s, None, answer.seconds)
        if job.is_left:
            self._offer(worker)
        else:
            job.end(answer)

    def _on_limit(self, worker: Worker[_Job], job: _Job, limit_s: float) -> None:
        """A call ran too long: its worker is replaced."""
        if self._is_in(worker, job):
            self.end_call(worker, late(job.call, self.config.type, limit_s, None, limit_s))

    def _on_grace(self, worker: Worker[_Job], job: _Job) -> None:
        """A call that nobody waits for did not end."""
        if self._is_in(worker, job):
            self._replace(worker)

    def _retire(self, worker: Worker[_Job], *, kill: bool = True) -> None:
        super()._retire(worker, kill=kill)
        self._episodes.pop(worker.id, None)

    def _job_lost(self, job: _Job, how: str) -> None:
        detail = f"environment {self.config.type}, {job.call}: its process ended: {how}"
        job.end(EnvFault(kind="env_died", detail=detail, call=job.call, seconds=time.monotonic() - job.since))

    def _end_jobs(self, jobs: Sequence[_Job]) -> None:
        """Answer calls with `env_closed`; whoever waits for a worker gets none, or the error of a broken pool."""
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
        self._worker: Worker[_Job] | None = None  # held while an episode is open or a call under way
        self._request: asyncio.Future[Worker[_Job] | None] | None = None  # for a worker, while waiting for one
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

    async def _next_worker(self) -> Worker[_Job] | None:
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

    async def _call(self, worker: Worker[_Job], call: Call, argument: int | str) -> Answer:
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


def _packed(config: EnvironmentConfig) -> bytes:
    """The settings as a worker gets them. Raises `ConfigError` when another process cannot be told of them."""
    try:
        return json.dumps(config.model_dump()).encode()
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"environment.args: expected numbers, texts, truth values, lists and mappings of them, which a worker process can be told, "
            f"got {config.args!r} ({err}) - give plain data, or set run_in to thread"
        ) from err
