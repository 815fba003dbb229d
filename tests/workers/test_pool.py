"""What every pool does, with work that is nothing but words: jobs end once, places are filled, what says nonsense is replaced."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from sluice.errors import SluiceError
from sluice.workers import PoolKind, ProcessPool, Worker, pack_job
from sluice.workers import pool as pool_module
from tests.workers.work import HERE

LONG_S = 120.0  # nothing takes so long: it is there to fail instead of hanging


class PoolError(SluiceError):
    """This pool is wrong as a whole."""


class WordJob:
    def __init__(self, number: int, words: str, answer: asyncio.Future[str]) -> None:
        self.number = number
        self.words = words
        self.answer = answer


class WordPool(ProcessPool[WordJob, str]):
    """Gives its jobs to free workers, oldest first."""

    def __init__(self, workers: int, settings: bytes = b"") -> None:
        self.waiting: deque[WordJob] = deque()
        kind = PoolKind(
            name="word", worker="word worker", way_out="speak yourself", preload=f"{HERE}:preload", serve=f"{HERE}:serve",
            settings=settings, start_limit_s=LONG_S, error=PoolError,
        )  # fmt: skip
        super().__init__(kind, workers)

    def ask(self, words: str) -> asyncio.Future[str]:
        self._attach()
        job = WordJob(self._new_id(), words, asyncio.get_running_loop().create_future())
        if self._closed:
            job.answer.set_result("closed")
            return job.answer
        self.waiting.append(job)
        self._hand_out()
        return job.answer

    def _hand_out(self) -> None:
        while self.waiting and self._idle:
            worker, job = self._idle.pop(), self.waiting.popleft()
            worker.job = job
            worker.send(pack_job(job.number, job.words.encode()))

    def _offer(self, worker: Worker[WordJob]) -> None:
        self._idle.append(worker)
        self._hand_out()

    def _unpack(self, fields: list[Any]) -> str:
        what, words = fields
        if what != "answer":
            raise ValueError(what)
        return str(words)

    def _answered(self, worker: Worker[WordJob], job: WordJob, answer: str) -> None:
        job.answer.set_result(answer)
        self._offer(worker)

    def _job_lost(self, job: WordJob, how: str) -> None:
        job.answer.set_result(f"lost: {how}")

    def _end_jobs(self, jobs: Sequence[WordJob]) -> None:
        for job in [*jobs, *self.waiting]:
            if self._broken is None:
                job.answer.set_result("closed")
            else:
                job.answer.set_exception(PoolError(self._broken))
        self.waiting.clear()


def run(workers: int, test: Callable[[WordPool], Coroutine[Any, Any, None]], settings: bytes = b"") -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            pool = WordPool(workers, settings)
            try:
                await test(pool)
            finally:
                await pool.close()

    asyncio.run(bounded())


def test_every_job_ends_once_whatever_becomes_of_its_worker() -> None:
    async def test(pool: WordPool) -> None:
        said = [f"echo {i}" if i % 5 else "die" for i in range(20)]
        answers = await asyncio.gather(*(pool.ask(words) for words in said))
        for i, answer in enumerate(answers):
            assert answer == (str(i) if i % 5 else "lost: it ended by itself with exit code 7")
        assert pool._workers_lost == 4

    run(2, test)


@pytest.mark.parametrize("words", ["promise", "mumble"])
def test_a_worker_that_says_what_is_no_answer_is_replaced_at_once(words: str) -> None:
    async def test(pool: WordPool) -> None:
        assert "it closed its connection or wrote to it" in await pool.ask(words)
        assert await pool.ask("echo again") == "again"

    run(1, test)


def test_places_are_filled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_STARTING", 2)
    starting = []

    async def test(pool: WordPool) -> None:
        start = pool._start

        def watched(place: Any) -> None:
            start(place)
            starting.append(sum(not worker.is_ready for worker in pool._by_id.values()))

        pool._start = watched  # type: ignore[method-assign]
        assert await pool.ask("echo one") == "one"
        while pool._alive < 5:  # noqa: ASYNC110 - what happens in other processes sets no event
            await asyncio.sleep(0.005)

    run(5, test)
    assert len(starting) == 5
    assert max(starting) == 2


def test_a_fork_server_that_cannot_be_told_yet_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_DELAY_S", 0.01)
    fork = pool_module.ForkServer.fork
    refused = []

    def busy(self: pool_module.ForkServer, worker: int, connection: socket.socket) -> None:
        if len(refused) < 5:
            refused.append(worker)
            raise BlockingIOError("its socket is full")
        fork(self, worker, connection)

    monkeypatch.setattr(pool_module.ForkServer, "fork", busy)

    async def test(pool: WordPool) -> None:
        assert await asyncio.gather(*(pool.ask(f"echo {i}") for i in range(4))) == ["0", "1", "2", "3"]

    run(2, test)
    assert len(set(refused)) == 5


def test_workers_that_never_begin_break_the_pool_with_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_DELAY_S", 0.01)

    async def test(pool: WordPool) -> None:
        told = "no word worker can be started, 3 tries failed, the last one because there is no work to be had"
        with pytest.raises(PoolError, match=told):
            await pool.ask("echo")
        with pytest.raises(PoolError, match=told):
            await pool.ask("echo")

    run(1, test, settings=b"fail")


def test_where_no_process_can_be_had_the_pool_says_what_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError("no processes")

    monkeypatch.setattr("subprocess.Popen", none_left)
    with pytest.raises(PoolError, match=r"from which word workers are forked cannot be started with .*no processes - .* or speak yourself"):
        WordPool(1)


def test_closing_ends_what_is_under_way_and_what_waits() -> None:
    async def test(pool: WordPool) -> None:
        assert await pool.ask("echo here") == "here"
        asked = [pool.ask("sleep"), pool.ask("echo never")]
        await asyncio.sleep(0)
        await pool.close()
        assert await asyncio.gather(*asked, pool.ask("echo late")) == ["closed"] * 3

    run(1, test)
