"""The monitor names what is in one call for too long, once, and by setting has it ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments import EnvFault, EnvironmentHost, EnvMonitor, EnvMonitorConfig, EnvReset, RunningCall
from sluice.environments.monitor import hung_calls
from tests.environments.environments_for_tests import HERE

CONFIG = {"type": f"{HERE}.Obedient", "reset_timeout_s": None, "step_timeout_s": None, "workers": 1}


@dataclass(eq=False)
class Still:
    """A runner that does nothing but be in a call."""

    running: RunningCall | None
    name: str = "maze"
    ended: list[str] = field(default_factory=list)

    def interrupt(self, why: str) -> None:
        self.ended.append(why)


def in_step(since: float, env_id: str | None = "problem 1") -> Still:
    return Still(RunningCall(call="step", since=since, env_id=env_id, seed=1))


@given(st.lists(st.none() | st.floats(0, 1000)), st.floats(0, 2000), st.floats(0.1, 1000))
def test_exactly_the_calls_that_are_too_long_are_found(since, now, hung_after_s) -> None:
    runners = [Still(None) if begun is None else in_step(begun) for begun in since]
    found = [runner for runner, _ in hung_calls(runners, now, hung_after_s)]
    assert {id(runner) for runner in found} == {
        id(runner) for runner in runners if runner.running is not None and now - runner.running.since > hung_after_s
    }


def test_each_hung_call_is_named_once(caplog) -> None:
    monitor = EnvMonitor(EnvMonitorConfig(hung_after_s=3600))
    hung, other = in_step(0.0), in_step(3000.0)
    monitor.watch(hung)
    monitor.watch(other)
    assert monitor.look(3599.0) == []
    assert [str(call) for call in monitor.look(3700.0)] == ["environment maze (problem 1) is in one step for 3700 s"]
    assert monitor.look(3730.0) == []
    hung.running = RunningCall(call="step", since=3740.0, env_id="problem 1", seed=1)
    assert len(monitor.look(10_000.0)) == 2
    assert monitor.metrics() == {"env/hung": 3}
    assert "on_hung: replace" in caplog.text
    assert not hung.ended


def test_a_call_without_a_problem_yet_is_named_by_its_seed() -> None:
    monitor = EnvMonitor(EnvMonitorConfig(hung_after_s=1))
    hung = in_step(0.0, env_id=None)
    monitor.watch(hung)
    assert "environment maze (seed 1)" in str(monitor.look(5.0)[0])


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_hung_environment_is_ended_and_replaced_by_setting(run_in: str) -> None:
    async def test() -> None:
        monitor = EnvMonitorConfig(interval_s=0.05, hung_after_s=0.1, on_hung="replace")
        async with asyncio.timeout(60), EnvironmentHost({**CONFIG, "run_in": run_in}, monitor) as host:
            runner = host.runner()
            while not isinstance(await runner.reset(1), EnvReset):
                pass  # on a busy machine the first start may be taken for hung as well
            fault = await runner.step("hang")
            assert isinstance(fault, EnvFault)
            assert fault.kind == "env_timeout"
            assert "hung_after_s" in fault.detail
            while not isinstance(await runner.reset(2), EnvReset):
                pass
            assert host.metrics()["env/hung"] >= 1

    asyncio.run(test())


def test_a_call_that_blocks_the_event_loop_is_named_too(caplog) -> None:
    async def test() -> None:
        monitor = EnvMonitorConfig(interval_s=0.02, hung_after_s=0.05)
        async with EnvironmentHost({**CONFIG, "run_in": "inline"}, monitor) as host:
            runner = host.runner()
            await runner.reset(1)
            await runner.step("sleep 1")
            assert host.metrics()["env/hung"] >= 1  # on a busy machine the reset may take long as well

    asyncio.run(test())
    assert "environment tests.environments.environments_for_tests.Obedient (problem 1) is in one step" in caplog.text


def test_a_monitor_that_is_not_enabled_starts_nothing() -> None:
    async def test() -> None:
        monitor = EnvMonitor(EnvMonitorConfig(enable=False))
        monitor.start()
        assert monitor._thread is None
        monitor.close()

    asyncio.run(test())


def test_closing_does_not_wait_for_the_interval() -> None:
    async def test() -> None:
        monitor = EnvMonitor(EnvMonitorConfig(interval_s=10_000))
        monitor.start()
        started = time.monotonic()
        monitor.close()
        assert time.monotonic() - started < 30

    asyncio.run(test())
