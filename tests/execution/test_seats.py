"""Seats: first come, first served, kept and used again, none free while somebody waits."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.execution.clock import run
from sluice.execution.seats import Seats
from tests.fakes import DelayedHost, ScriptedEnvironment


def seats(count: int) -> tuple[Seats, DelayedHost]:
    host = DelayedHost(ScriptedEnvironment)
    return Seats(host, count), host


def test_runners_are_made_when_they_are_needed_and_used_again() -> None:
    async def main() -> None:
        table, host = seats(3)
        assert not host.runners
        first = await table.take()
        second = await table.take()
        assert host.runners == [first, second]
        table.give_back(first)
        assert await table.take() is first
        assert len(host.runners) == 2
        assert (table.taken, table.waiting) == (2, 0)

    run(main())


def test_whoever_waits_longest_sits_down_first() -> None:
    async def main() -> None:
        table, _ = seats(1)
        runner = await table.take()
        order: list[int] = []

        async def one(number: int) -> None:
            mine = await table.take()
            order.append(number)
            await asyncio.sleep(1)
            table.give_back(mine)

        tasks = [asyncio.create_task(one(number), name=f"{number}") for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        table.give_back(runner)
        await asyncio.wait(tasks)
        assert order == [0, 2, 3]
        assert asyncio.get_running_loop().time() == pytest.approx(3)
        assert (table.taken, table.waiting, table.idle_share) == (0, 0, 0)

    run(main())


def test_a_seat_that_comes_in_the_moment_of_a_cancel_goes_to_the_next() -> None:
    async def main() -> None:
        table, _ = seats(1)
        runner = await table.take()
        waiting = [asyncio.create_task(table.take(), name=f"{number}") for number in range(2)]
        await asyncio.sleep(0)
        table.give_back(runner)
        waiting[0].cancel()
        assert await waiting[1] is runner
        assert waiting[0].cancelled()
        table.give_back(runner)
        assert table.taken == 0

    run(main())


@given(count=st.integers(1, 4), people=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_nobody_shares_a_seat_and_none_is_lost_whoever_is_cancelled_when(count: int, people: int, seed: int) -> None:
    async def main() -> None:
        random = Random(seed)
        table, host = seats(count)
        sitting: set[Any] = set()

        async def one() -> None:
            await asyncio.sleep(random.choice([0, 1, 2]))
            runner = await table.take()
            try:
                assert runner not in sitting
                sitting.add(runner)
                await asyncio.sleep(random.choice([0, 1, 2]))
            finally:
                sitting.discard(runner)
                table.give_back(runner)

        async def end(task: asyncio.Task[None]) -> None:
            await asyncio.sleep(random.choice([0, 1, 2, 3]))
            if random.random() < 0.5:
                task.cancel()

        tasks = [asyncio.create_task(one(), name=f"{number}") for number in range(people)]
        enders = [asyncio.create_task(end(task), name="end") for task in tasks]
        await asyncio.wait([*tasks, *enders])
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert (table.taken, table.waiting, table.idle_share) == (0, 0, 0)
        assert len(host.runners) <= count

    run(main())


def test_a_seat_that_stood_free_while_somebody_waited_would_be_told() -> None:
    """The measure itself: nothing in `Seats` can bring it about."""

    async def main() -> None:
        table, _ = seats(2)
        runner = await table.take()
        await table.take()
        waiting = asyncio.create_task(table.take(), name="waits")
        await asyncio.sleep(1)
        assert table.idle_share == 0
        table._free.append(runner)  # what a bug would do
        await asyncio.sleep(1)
        assert table.idle_share == pytest.approx(1 / 4)
        waiting.cancel()

    run(main())
