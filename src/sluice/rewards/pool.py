"""The worker pool: verifiers in processes of their own, with a time limit each. A stuck or dead worker is replaced.

Backpressure:

| who | consumes | waits for | unblocked by |
|---|---|---|---|
| `score` | nothing | its answer | the worker, its time limit, the worker's death, `close`, its own cancel |
| a queued job | nothing | an idle worker | a worker that answered or was replaced |

The processes are the affair of `sluice.workers`. All state changes in callbacks of the event loop, none of which waits.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

from sluice.config.models import RewardConfig
from sluice.errors import RewardError, describe
from sluice.rewards.base import Score
from sluice.rewards.inline import unknown_domain
from sluice.rewards.score import ScoreCounts, failed
from sluice.rewards.worker import pack_task, unpack_score
from sluice.types import Failure, Task
from sluice.workers import CANCEL_GRACE_S, PoolKind, ProcessPool, Worker, pack_job

START_LIMIT_S: Final = 60.0  # from the command to fork to the first word of a worker, imports included


class RewardPool(ProcessPool["_Job", Score]):
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
        self._counts = ScoreCounts()
        self._queue: OrderedDict[int, _Job] = OrderedDict()  # oldest first
        kind = PoolKind(
            name="reward",
            worker="reward worker",
            way_out="use reward_pool.workers: 0",
            preload="sluice.rewards.worker:preload_verifiers",
            serve="sluice.rewards.worker:serve",
            settings=pickle.dumps(self._rewards),
            start_limit_s=START_LIMIT_S,
            error=RewardError,
        )
        super().__init__(kind, workers)

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
        self._counts.jobs += 1
        if self._closed:
            return self._counted(failed("pool_closed", "the run is ending"))
        number = self._new_id()
        try:
            message = pack_job(number, pack_task(task, response))
        except Exception as err:  # noqa: BLE001 - pickling runs code of the data's classes
            return self._counted(failed("task_not_picklable", f"task {task.task_id!r} cannot be sent to a worker: {describe(err)}"))
        job = _Job(number, message, self._rewards[task.domain], asyncio.get_running_loop().create_future())
        self._queue[job.number] = job
        self._hand_out()
        try:
            return await job.answer
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and how many workers are alive now."""
        return {
            **self._counts.metrics(),
            "rewards/worker_losses": self._workers_lost,
            "rewards/workers_alive": self._alive,
            "rewards/queued": len(self._queue),
        }

    # ------------------------------------------------------------ jobs

    def _offer(self, worker: Worker[_Job]) -> None:
        self._idle.append(worker)
        self._hand_out()

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
            worker.timer = self._running_loop.call_later(job.rewards.reward_timeout_s, self._on_limit, worker, job)
            worker.send(job.message)

    def _unpack(self, fields: list[Any]) -> Score:
        return unpack_score(fields)

    def _answered(self, worker: Worker[_Job], job: _Job, answer: Score) -> None:
        if answer.seconds > job.rewards.reward_timeout_s:
            answer = _timed_out(job.rewards, answer.seconds)  # it came late, before this loop had the time to look at the clock
        self._answer(job, answer)
        self._offer(worker)

    def _on_limit(self, worker: Worker[_Job], job: _Job) -> None:
        """A job ran too long, or was cancelled and did not end: its worker is replaced."""
        if self._is_in(worker, job):
            self._retire(worker)
            self._answer(job, _timed_out(job.rewards, perf_counter() - job.started_at))
            self._fill()

    def _job_lost(self, job: _Job, how: str) -> None:
        self._answer(job, failed("reward_worker_lost", how, seconds=perf_counter() - job.started_at))

    def _end_jobs(self, jobs: Sequence[_Job]) -> None:
        """Answer all jobs with `pool_closed`, or raise why the pool is broken."""
        jobs = [*jobs, *self._queue.values()]
        self._queue.clear()
        for job in jobs:
            if self._broken is None:
                self._answer(job, failed("pool_closed", "the run is ending"))
            elif not job.answer.done():
                self._counted(failed("pool_broken"))
                job.answer.set_exception(RewardError(self._broken))

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
        self._queue.pop(job.number, None)
        worker = job.worker
        if worker is not None and worker.job is job and worker.timer is not None:
            soon = self._running_loop.time() + CANCEL_GRACE_S
            if soon < worker.timer.when():
                worker.timer.cancel()
                worker.timer = self._running_loop.call_at(soon, self._on_limit, worker, job)


class _Job:
    """One call of `score`."""

    __slots__ = ("answer", "message", "number", "queued_at", "rewards", "started_at", "worker")

    def __init__(self, number: int, message: bytes, rewards: RewardConfig, answer: asyncio.Future[Score]) -> None:
        self.number = number
        self.message = message
        self.rewards = rewards
        self.answer = answer
        self.queued_at = perf_counter()
        self.started_at = 0.0
        self.worker: Worker[_Job] | None = None


def _timed_out(rewards: RewardConfig, seconds: float) -> Score:
    """The score of a job that passed its limit: none, or by setting a value that is marked as such."""
    detail = f"no answer within reward_timeout_s = {rewards.reward_timeout_s:g} s"
    if rewards.on_reward_timeout == "missing":
        return failed("reward_timeout", detail, seconds=seconds)
    failure = Failure(cause="policy", reason="reward_timeout", detail=detail)
    return Score(reward=rewards.timeout_value, failure=failure, seconds=seconds)
