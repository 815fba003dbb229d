"""Virtual time: sleeping costs nothing, and waiting for nobody is an error."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.execution.clock import Deadlock, VirtualClockLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


@given(st.lists(st.floats(0, 1e12), max_size=20))
def test_timers_fire_in_order_each_at_its_own_time(delays):
    fired = []

    async def play():
        loop = asyncio.get_running_loop()
        for delay in delays:
            loop.call_at(delay, lambda delay=delay: fired.append((delay, loop.time())))
        await asyncio.sleep(max(delays, default=0.0) + 1)

    run(play())
    assert [delay for delay, _ in fired] == sorted(delays)
    for delay, at in fired:
        assert at == pytest.approx(delay, abs=1e-9, rel=1e-15)


def test_an_hour_of_sleep_costs_nothing_and_the_clock_shows_it():
    async def play():
        await asyncio.sleep(3600)
        assert now() == 3600
        await asyncio.sleep(0.1)
        return now()

    began = time.perf_counter()
    assert run(play()) == 3600.1
    assert time.perf_counter() - began < 60


def test_the_clock_stands_still_while_anything_is_ready():
    async def play():
        asyncio.get_running_loop().call_later(1, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run(play()) == 0


def test_time_limits_end_what_waits_too_long():
    async def play():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await asyncio.Event().wait()
        return now()

    assert run(play()) == 50


def test_a_year_passes_in_one_jump():
    async def play():
        await asyncio.sleep(365 * 86400.0)
        await asyncio.sleep(1e-3)
        return now()

    assert run(play()) == pytest.approx(365 * 86400 + 1e-3)


def test_everybody_waiting_is_an_error_that_names_who_and_where():
    async def play():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="for a bell")
            group.create_task(reads_an_empty_queue(), name="reader")

    async def reads_an_empty_queue():
        await asyncio.Queue().get()

    with pytest.raises(Deadlock) as raised:
        run(play())
    message = str(raised.value)
    assert "3 tasks wait" in message
    assert "for a bell (Event.wait" in message
    assert "reader (test_everybody_waiting_is_an_error_that_names_who_and_where.<locals>.reads_an_empty_queue" in message
    assert "test_clock.py:" in message


def test_waiting_tasks_are_cancelled_after_a_deadlock():
    ended = []

    async def play():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    with pytest.raises(Deadlock):
        run(play())
    assert ended == ["cleaned up"]


def test_real_sockets_work():
    async def play():
        left, right = socket.socketpair()
        left.setblocking(False)
        right.setblocking(False)
        loop = asyncio.get_running_loop()
        reading = asyncio.create_task(loop.sock_recv(right, 10))
        await asyncio.sleep(5)
        assert now() == 5
        await loop.sock_sendall(left, b"hello")
        received = await reading
        left.close()
        right.close()
        return received

    assert run(play()) == b"hello"


def test_results_and_exceptions_come_through():
    async def fails():
        raise KeyError("a")

    async def returns():
        return 5

    assert run(returns()) == 5
    with pytest.raises(KeyError, match="a"):
        run(fails())


def test_two_loops_have_clocks_of_their_own():
    one, other = VirtualClockLoop(), VirtualClockLoop()
    one.run_until_complete(asyncio.sleep(10))
    assert (one.time(), other.time()) == (10, 0)
    one.close()
    other.close()
