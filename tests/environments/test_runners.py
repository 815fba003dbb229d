"""An environment has the same outcomes wherever it runs, and whatever it does is data: nothing it does ends a run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.environments import EnvFault, EnvironmentConfig, EnvironmentHost, EnvReset, EnvStep, Runner
from sluice.environments import thread as thread_module
from sluice.errors import ConfigError, EnvError
from tests.environments.environments_for_tests import HERE, Obedient

LONG_S = 60.0  # nothing in these tests takes so long: it is there to fail instead of hanging
WHERE = ("inline", "thread", "process")

# What an environment does, in words that every place can survive.
ACTIONS = st.sampled_from(
    [
        "",
        "go on",
        "end",
        "raise",
        "exit",
        "interrupt",
        "wrong list",
        "wrong reward nan",
        "numpy",
        "x" * 20_000,
        "\ud800 \0",
        "wrong observation surrogate",
        "wrong reward of 5000 digits",
        "wrong too many commands",
        "integer",
    ]
)


def config(run_in: str = "inline", **changes: Any) -> EnvironmentConfig:
    given_ = {"type": f"{HERE}.Obedient", "args": {"horizon": 5}, "run_in": run_in, "workers": 1, "reset_timeout_s": LONG_S, **changes}
    return EnvironmentConfig(**given_)


class Hosts:
    """One host for each place, in one event loop."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.by_place = {run_in: EnvironmentHost(config(run_in)) for run_in in WHERE}
        self._runners = {run_in: host.runner() for run_in, host in self.by_place.items()}

    def play(self, run_in: str, seed: int, actions: list[str]) -> list[Any]:
        return self._runner.run(self._play(self._runners[run_in], seed, actions))

    async def _play(self, runner: Runner, seed: int, actions: list[str]) -> list[Any]:
        async with asyncio.timeout(LONG_S):
            return [alike(await runner.reset(seed)), *[alike(await runner.step(action)) for action in actions]]

    async def close(self) -> None:
        for host in self.by_place.values():
            await host.close()


def alike(answer: EnvReset | EnvStep | EnvFault) -> EnvReset | EnvStep | EnvFault:
    """An answer without what differs between processes."""
    if isinstance(answer, EnvFault):
        return replace(answer, seconds=0.0)
    extra = {key: value for key, value in answer.info.extra.items() if key not in ("pid", "thread")}
    return replace(answer, seconds=0.0, info=replace(answer.info, extra=extra))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with asyncio.Runner() as runner:
        hosts = Hosts(runner)
        yield hosts
        runner.run(hosts.close())


@pytest.fixture(autouse=True)
def no_error_in_a_callback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            await test()

    asyncio.run(bounded())


@settings(max_examples=30)
@given(st.sampled_from([1, 0, -1, 2**63 - 1, 2**200, 666, 667]), st.lists(ACTIONS, max_size=8))
def test_the_outcomes_are_the_same_in_every_place(hosts: Hosts, seed: int, actions: list[str]) -> None:
    inline, thread, process = (hosts.play(run_in, seed, actions) for run_in in WHERE)
    assert inline == thread == process


@pytest.mark.parametrize("run_in", WHERE)
def test_an_episode_by_hand(hosts: Hosts, run_in: str) -> None:
    told = hosts.play(run_in, 4, ["go on", "end", "go on"])
    assert told[0].observation == "seed 4"
    assert told[0].info.env_id == "problem 4"
    assert (told[1].observation, told[1].reward, told[1].is_last) == ("told: go on", 0.0, False)
    assert (told[2].reward, told[2].terminated, told[2].truncated) == (1.0, True, False)
    assert told[3].kind == "env_failed"
    assert "call reset first" in told[3].detail


@pytest.mark.parametrize("run_in", WHERE)
def test_a_step_limit_of_the_environment_is_an_ordinary_end(hosts: Hosts, run_in: str) -> None:
    told = hosts.play(run_in, 4, ["go on"] * 5)
    assert [step.truncated for step in told[1:]] == [False] * 4 + [True]


@pytest.mark.parametrize("run_in", WHERE)
def test_an_environment_that_never_ends_is_ended_by_the_runner(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost(config(run_in, args={}, max_steps=3)) as host:
            runner = host.runner()
            for _ in range(2):
                await runner.reset(1)
                steps = [await runner.step("go on") for _ in range(4)]
                assert [isinstance(step, EnvStep) and step.truncated for step in steps] == [False, False, True, False]
                assert isinstance(steps[3], EnvFault)

    run(test)


@pytest.mark.parametrize("run_in", WHERE)
def test_a_fault_ends_the_episode_and_names_the_problem(hosts: Hosts, run_in: str) -> None:
    told = hosts.play(run_in, 4, ["raise", "go on"])
    assert (told[1].kind, told[1].call, told[1].env_id) == ("env_failed", "step", "problem 4")
    assert "ValueError: it was told to raise" in told[1].detail
    assert "call reset first" in told[2].detail
    assert isinstance(hosts.play(run_in, 5, [])[0], EnvReset)


@pytest.mark.parametrize("run_in", WHERE)
def test_rewards_that_add_up_beyond_float32_are_a_fault(hosts: Hosts, run_in: str) -> None:
    told = hosts.play(run_in, 4, ["rich", "rich", "go on"])
    assert told[1].reward == 2e38
    assert (told[2].kind, told[2].call, told[2].env_id) == ("env_failed", "step", "problem 4")
    assert "those of its 2 steps add up to 4e+38" in told[2].detail
    assert "call reset first" in told[3].detail
    assert hosts.play(run_in, 5, ["rich"])[1].reward == 2e38


@pytest.mark.parametrize("run_in", WHERE)
def test_two_members_with_the_same_seed_see_the_same_problem(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost({"type": "household", "run_in": run_in, "args": {"size": "tiny"}}) as host:
            members = [host.runner(), host.runner()]
            resets = [await member.reset(2**62 + 5) for member in members]
            other = await members[0].reset(6)
            assert all(isinstance(reset, EnvReset) for reset in resets)
            assert resets[0].info.env_id == resets[1].info.env_id != other.info.env_id
            assert resets[0].observation == resets[1].observation

    run(test)


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_an_environment_that_cannot_be_built_is_tried_three_times_and_then_an_error(run_in: str) -> None:
    """As in a pool of processes: faults of single episodes would go on for ever."""

    async def test() -> None:
        builds: list[str] = []
        ways = iter(["raise", "raise", "well", "raise", "raise", "raise"])

        def build() -> Obedient:
            builds.append(next(ways))
            return Obedient(build=builds[-1])

        async with EnvironmentHost({"type": "mine", "run_in": run_in}, build=build) as host:
            runners = [host.runner() for _ in range(6)]
            for runner in runners[:5]:
                answer = await runner.reset(1)
                assert isinstance(answer, EnvReset) == (builds[-1] == "well")
            with pytest.raises(EnvError, match="mine: it cannot be built, 3 tries failed, the last one because .* told not to be built"):
                await runners[5].reset(1)
            with pytest.raises(EnvError, match="cannot be built"):
                await runners[4].reset(1)

    run(test)


@pytest.mark.parametrize("run_in", WHERE)
def test_arguments_reach_the_environment_as_they_were_written(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost(config(run_in, args={"number": float("inf")})) as host:
            runner = host.runner()
            await runner.reset(1)
            step = await runner.step("number")
            assert isinstance(step, EnvStep)
            assert step.observation == "inf"

    run(test)


def test_arguments_that_no_process_can_be_told_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment.args: expected numbers, texts, .* - give plain data, or set run_in to thread"):
        EnvironmentHost(config("process", args={"number": object()}))


@pytest.mark.parametrize("run_in", WHERE)
def test_everything_is_counted(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost(config(run_in)) as host:
            runner = host.runner()
            for action in ("end", "raise", "go on"):
                await runner.reset(1)
                await runner.step(action)
            metrics = host.metrics()
            assert (metrics["env/episodes"], metrics["env/env_steps"], metrics["env/faults/env_failed"]) == (3, 2, 1)

    run(test)


@pytest.mark.parametrize("run_in", WHERE)
def test_after_close_everything_is_closed_and_closing_again_does_nothing(run_in: str) -> None:
    async def test() -> None:
        host = EnvironmentHost(config(run_in))
        runner, other = host.runner(), host.runner()
        await runner.reset(1)
        await host.close()
        await host.close()
        for answer in (await runner.step("go on"), await runner.reset(1), await other.reset(1)):
            assert isinstance(answer, EnvFault)
            assert answer.kind == "env_closed"

    run(test)


@pytest.mark.parametrize("run_in", ["thread", "process"])
@pytest.mark.parametrize(("seed", "action", "call"), [(668, None, "reset"), (1, "hang", "step")])
def test_a_call_that_hangs_ends_at_its_limit_and_the_next_episode_works(run_in: str, seed: int, action: str | None, call: str) -> None:
    async def test() -> None:
        limits = {"reset_timeout_s": 0.2 if call == "reset" else LONG_S, "step_timeout_s": 0.2}
        async with EnvironmentHost(config(run_in, **limits)) as host:
            runner = host.runner()
            answer = await runner.reset(seed)
            if action is not None:
                answer = await runner.step(action)
            assert isinstance(answer, EnvFault)
            assert (answer.kind, answer.call) == ("env_timeout", call)
            assert f"{call}_timeout_s = 0.2 s" in answer.detail
            assert isinstance(await runner.step("go on"), EnvFault)
            if call == "step":
                assert isinstance(await runner.reset(2), EnvReset)

    run(test)


def test_a_slow_inline_call_is_a_time_out_afterwards() -> None:
    async def test() -> None:
        async with EnvironmentHost(config(step_timeout_s=0.01)) as host:
            runner = host.runner()
            await runner.reset(1)
            answer = await runner.step("sleep 0.05")
            assert isinstance(answer, EnvFault)
            assert answer.kind == "env_timeout"
            assert isinstance(await runner.reset(1), EnvReset)

    run(test)


def test_an_abandoned_thread_is_counted_and_keeps_nobody_waiting(caplog) -> None:
    async def test() -> None:
        async with EnvironmentHost(config("thread", step_timeout_s=0.05)) as host:
            runners = [host.runner() for _ in range(3)]
            for runner in runners:
                await runner.reset(1)
            faults = await asyncio.gather(*(runner.step("hang") for runner in runners))
            assert [fault.kind for fault in faults] == ["env_timeout"] * 3
            assert host.metrics()["env/abandoned_threads"] == 3
            started = time.monotonic()
        assert time.monotonic() - started < LONG_S / 2

    run(test)
    assert "run_in: process" in caplog.text


def test_a_thread_that_does_not_close_is_abandoned(monkeypatch) -> None:
    monkeypatch.setattr(thread_module, "CLOSE_LIMIT_S", 0.05)

    async def test() -> None:
        async with EnvironmentHost(config("thread")) as host:
            runner = host.runner()
            await runner.reset(671)
            await runner.close()
            assert host.metrics()["env/abandoned_threads"] == 1

    run(test)


def test_threads_end_with_their_runner() -> None:
    async def test() -> None:
        before = threading.active_count()
        async with EnvironmentHost(config("thread")) as host:
            runners = [host.runner() for _ in range(4)]
            await asyncio.gather(*(runner.reset(1) for runner in runners))
        assert threading.active_count() <= before

    run(test)


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_cancelled_call_gives_its_place_back(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost(config(run_in)) as host:
            runner = host.runner()
            await runner.reset(1)
            call = asyncio.create_task(runner.step("hang"))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert host.metrics()["env/cancelled"] == 1
            assert isinstance(await runner.step("go on"), EnvFault)
            assert isinstance(await runner.reset(2), EnvReset)

    run(test)


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_closing_during_a_call_ends_it(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost(config(run_in)) as host:
            runner = host.runner()
            await runner.reset(1)
            call = asyncio.create_task(runner.step("hang"))
            await asyncio.sleep(0)
            await runner.close()
            answer = await call
            assert isinstance(answer, EnvFault)
            assert (answer.kind, answer.env_id) == ("env_closed", "problem 1")

    run(test)


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_two_calls_at_once_are_the_callers_mistake(run_in: str) -> None:
    async def test() -> None:
        async with EnvironmentHost(config(run_in)) as host:
            runner = host.runner()
            await runner.reset(1)
            call = asyncio.create_task(runner.step("sleep 0.1"))
            await asyncio.sleep(0)
            with pytest.raises(EnvError, match="expected one call at a time"):
                await runner.step("go on")
            assert isinstance(await call, EnvStep)

    run(test)


def test_wrong_settings_raise_before_anything_starts() -> None:
    with pytest.raises(ConfigError):
        EnvironmentHost({"type": "frozen_like"})


def test_a_builder_cannot_be_sent_to_a_process() -> None:
    with pytest.raises(ConfigError, match="expected inline or thread"):
        EnvironmentHost({"type": "mine"}, build=object)


def test_an_environment_given_as_a_builder_needs_no_name() -> None:
    async def test() -> None:
        async with EnvironmentHost({"type": "mine", "run_in": "inline"}, build=Obedient) as host:
            assert isinstance(await host.runner().reset(1), EnvReset)

    run(test)
