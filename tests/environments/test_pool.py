"""Environments in real worker processes: what dies is replaced, capacity returns, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.environments import EnvFault, EnvironmentConfig, EnvironmentPool, EnvReset, EnvStep, PooledRunner
from sluice.environments import pool as pool_module
from sluice.errors import EnvError
from sluice.workers import pool as workers_module
from tests.environments.environments_for_tests import HERE

LONG_S = 60.0


def config(**changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"type": f"{HERE}.Obedient", "workers": 1, "step_timeout_s": LONG_S, "reset_timeout_s": LONG_S, **changes})


def run(test: Callable[[EnvironmentPool], Coroutine[Any, Any, None]], **changes: Any) -> None:
    before = set(descendants())  # of other tests in this process, such as the servers of Python's own process pools

    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            pool = EnvironmentPool(config(**changes))
            try:
                await test(pool)
            finally:
                await pool.close()

    asyncio.run(bounded())
    assert not set(descendants()) - before


def descendants() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - what happens in other processes sets no event
            await asyncio.sleep(0.005)


async def pid(runner: PooledRunner, seed: int = 1) -> int:
    reset = await runner.reset(seed)
    assert isinstance(reset, EnvReset), reset
    return int(reset.info.extra["pid"])


@pytest.mark.parametrize(("action", "how"), [("die", "ended by itself with exit code 7"), ("killed", "it was killed")])
def test_a_process_that_dies_is_a_fault_and_is_replaced(action: str, how: str) -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        first = await pid(runner)
        fault = await runner.step(action)
        assert isinstance(fault, EnvFault)
        assert (fault.kind, fault.call, fault.env_id) == ("env_died", "step", "problem 1")
        assert how in fault.detail
        assert await pid(runner) != first
        assert pool.metrics()["env/workers_lost"] == 1

    run(test)


def test_a_process_that_dies_between_two_calls_is_one_as_well() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        await runner.reset(1)
        assert isinstance(await runner.step("doomed"), EnvStep)
        await until(lambda: pool.metrics()["env/workers_lost"] == 1)
        fault = await runner.step("go on")
        assert isinstance(fault, EnvFault)
        assert (fault.kind, fault.env_id) == ("env_died", "problem 1")
        assert isinstance(await runner.reset(2), EnvReset)

    run(test)


def test_a_step_after_the_pool_was_closed_is_told_so() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        await runner.reset(1)
        await pool.close()
        fault = await runner.step("go on")
        assert isinstance(fault, EnvFault)
        assert fault.kind == "env_closed"

    run(test)


def test_a_process_that_dies_in_reset_is_one_too() -> None:
    async def test(pool: EnvironmentPool) -> None:
        fault = await pool.runner().reset(669)
        assert isinstance(fault, EnvFault)
        assert fault.kind == "env_died"

    run(test)


def test_a_process_that_spins_is_killed() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        first = await pid(runner)
        fault = await runner.step("spin")
        assert isinstance(fault, EnvFault)
        assert fault.kind == "env_timeout"
        await until(lambda: not psutil.pid_exists(first))
        assert isinstance(await runner.reset(2), EnvReset)

    run(test, step_timeout_s=0.2)


@pytest.mark.parametrize(("seed", "action", "call"), [(1, "spin", "step"), (668, "", "reset"), (1, "hang", "step")])
def test_case_132_stuck_environments_time_out_are_replaced_and_leave_no_process_behind(seed: int, action: str, call: str) -> None:
    """Case 132: two places, four calls that never return: four time-outs, then an episode is played; `run` looks for what is left."""

    async def test(pool: EnvironmentPool) -> None:
        async def stick() -> tuple[EnvReset | EnvStep | EnvFault, int]:
            runner = pool.runner()
            answer: EnvReset | EnvStep | EnvFault = await runner.reset(seed)
            worker = int(answer.info.extra["pid"]) if isinstance(answer, EnvReset) else 0
            return (await runner.step(action) if isinstance(answer, EnvReset) else answer), worker

        answers = await asyncio.gather(*(stick() for _ in range(4)))
        assert [(answer.kind, answer.call) for answer, _ in answers if isinstance(answer, EnvFault)] == [("env_timeout", call)] * 4
        assert pool.metrics()["env/faults/env_timeout"] == 4
        await until(lambda: not any(worker and psutil.pid_exists(worker) for _, worker in answers))
        runners = [pool.runner(), pool.runner()]
        pids = {await pid(runner, 2) for runner in runners}  # both places are there again
        assert len(pids) == 2
        assert all([isinstance(await runner.step("end"), EnvStep) for runner in runners])
        assert pool.metrics()["env/workers_alive"] == 2

    limits = {"reset_timeout_s": 0.3} if call == "reset" else {"step_timeout_s": 0.2}
    run(test, workers=2, **limits)


def test_a_worker_is_reused_for_many_episodes() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runners = [pool.runner(), pool.runner()]
        pids = set()
        for seed in range(10):
            runner = runners[seed % 2]
            pids.add(await pid(runner, seed))
            assert isinstance(await runner.step("end" if seed % 3 else "raise"), EnvStep | EnvFault)
        assert len(pids) == 1

    run(test)


def test_an_old_worker_is_replaced_between_episodes() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        pids = []
        for seed in range(6):
            pids.append(await pid(runner, seed))
            await runner.step("end")
        assert [pids[0]] * 2 + [pids[2]] * 2 + [pids[4]] * 2 == pids
        assert len(set(pids)) == 3
        assert pool.metrics()["env/workers_lost"] == 0

    run(test, episodes_per_worker=2)


def test_more_members_than_workers_all_get_their_turn() -> None:
    async def test(pool: EnvironmentPool) -> None:
        async def play(seed: int) -> int:
            runner = pool.runner()
            for _ in range(3):
                await runner.reset(seed)
                for action in ("go on", "go on", "end" if seed % 4 else "die"):
                    await runner.step(action)
            return seed

        assert await asyncio.gather(*(play(seed) for seed in range(12))) == list(range(12))
        assert pool.metrics()["env/faults/env_died"] == 9
        assert pool.metrics()["env/waiting"] == 0

    run(test, workers=2)


def test_a_member_that_waits_for_a_worker_can_be_cancelled() -> None:
    async def test(pool: EnvironmentPool) -> None:
        holder, waiting, last = pool.runner(), pool.runner(), pool.runner()
        await holder.reset(1)
        calls = [asyncio.create_task(waiting.reset(2)), asyncio.create_task(last.reset(3))]
        await asyncio.sleep(0)
        calls[0].cancel()
        await holder.close()
        assert isinstance(await calls[1], EnvReset)
        with pytest.raises(asyncio.CancelledError):
            await calls[0]

    run(test)


def test_closing_a_member_that_waits_for_a_worker_ends_its_wait() -> None:
    async def test(pool: EnvironmentPool) -> None:
        holder, waiting, last = pool.runner(), pool.runner(), pool.runner()
        await holder.reset(1)
        calls = [asyncio.create_task(waiting.reset(2)), asyncio.create_task(last.reset(3))]
        await asyncio.sleep(0)
        await waiting.close()
        fault = await calls[0]
        assert isinstance(fault, EnvFault)
        assert fault.kind == "env_closed"
        await holder.step("end")
        assert isinstance(await calls[1], EnvReset)

    run(test)


def test_closing_in_the_moment_a_worker_is_given_loses_no_worker() -> None:
    async def test(pool: EnvironmentPool) -> None:
        holder, waiting = pool.runner(), pool.runner()
        await holder.reset(1)
        call = asyncio.create_task(waiting.reset(2))
        await asyncio.sleep(0)
        await holder.close()  # the worker is given, the waiting task has not run yet
        await waiting.close()
        assert isinstance(await call, EnvFault)
        assert isinstance(await pool.runner().reset(3), EnvReset)

    run(test)


def test_a_cancel_in_the_moment_a_worker_is_given_loses_no_worker() -> None:
    async def test(pool: EnvironmentPool) -> None:
        holder, waiting = pool.runner(), pool.runner()
        await holder.reset(1)
        call = asyncio.create_task(waiting.reset(2))
        await asyncio.sleep(0)
        await holder.close()  # the worker is given, the waiting task has not run yet
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert isinstance(await pool.runner().reset(3), EnvReset)

    run(test)


def test_a_cancelled_call_that_ends_soon_keeps_its_worker(monkeypatch) -> None:
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", LONG_S)

    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        first = await pid(runner)
        call = asyncio.create_task(runner.step("go on"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await pid(runner, 2) == first

    run(test)


def test_a_child_that_comes_back_from_a_fork_is_ended() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        await runner.reset(1)
        step = await runner.step("fork")
        assert isinstance(step, EnvStep)
        assert step.observation == "told: fork"

    run(test)


def test_a_printing_environment_disturbs_nothing() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        await runner.reset(1)
        assert isinstance(await runner.step("print"), EnvStep)

    run(test)


@pytest.mark.parametrize(("build", "why"), [("raise", "it was told not to be built"), ("exit", "exit code 3")])
def test_an_environment_that_never_starts_is_an_error_that_says_why(build: str, why: str, monkeypatch) -> None:
    monkeypatch.setattr(workers_module, "START_DELAY_S", 0.01)

    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        for _ in range(2):
            with pytest.raises(EnvError, match=f"no worker of environment .*Obedient can be started, 3 tries failed.*{why}"):
                await runner.reset(1)

    run(test, args={"build": build})


def test_a_killed_fork_server_is_replaced() -> None:
    before = set(psutil.Process().children())

    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        await runner.reset(1)
        call = asyncio.create_task(runner.step("hang"))
        await asyncio.sleep(0)
        (server,) = set(psutil.Process().children()) - before
        server.kill()
        fault = await call
        assert isinstance(fault, EnvFault)
        assert fault.kind == "env_died"
        assert isinstance(await runner.reset(2), EnvReset)

    run(test)


def test_close_is_bounded_while_all_hang() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runners = [pool.runner() for _ in range(3)]
        for runner in runners[:2]:
            await runner.reset(1)
        calls = [asyncio.create_task(runner.step("spin")) for runner in runners[:2]] + [asyncio.create_task(runners[2].reset(1))]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await pool.close()
        assert time.monotonic() - started < 10
        answers = await asyncio.gather(*calls)
        assert [answer.kind for answer in answers] == ["env_closed"] * 3

    run(test, workers=2)


def test_processes_end_with_the_program_even_when_it_is_killed() -> None:
    code = f"""
import asyncio
from sluice.environments import EnvironmentConfig, EnvironmentPool
async def main():
    pool = EnvironmentPool(EnvironmentConfig(type="{HERE}.Obedient", workers=1))
    runner = pool.runner()
    reset = await runner.reset(1)
    print(reset.info.extra["pid"], flush=True)
    await runner.step("spin")
asyncio.run(main())
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert program.stdout is not None
    worker = int(program.stdout.readline())
    program.kill()
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + LONG_S
    while psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(worker)


def test_no_descriptor_is_left_behind() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        for _ in range(3):
            await runner.reset(1)
            await runner.step("die")

    run(test)
    before = len(os.listdir("/proc/self/fd"))
    run(test)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ctrl_c_in_the_terminal_reaches_no_worker() -> None:
    async def test(pool: EnvironmentPool) -> None:
        runner = pool.runner()
        os.kill(await pid(runner), signal.SIGINT)
        assert isinstance(await runner.step("go on"), EnvStep)

    run(test)
