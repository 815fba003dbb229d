"""The pool with real worker processes: limits are short, waits are for events, and bounds on time are generous.

Starting a pool takes about a second, so most tests share one, which has to be as good as new after each of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.config.models import RewardConfig
from sluice.errors import RewardError
from sluice.rewards import RewardPool, Score
from sluice.rewards import pool as pool_module
from sluice.workers import pool as workers_module
from tests.rewards.examples import HERE, rewards, task, verifier

LONG_S = 60.0  # nothing in these tests takes so long: it is there to fail instead of hanging

DOMAINS = {
    "numeric": RewardConfig(verifier=verifier("numeric")),
    "mapping": RewardConfig(verifier=verifier(".mapping"), reward_key="acc"),
    "many": RewardConfig(verifier=verifier(".many_metrics"), reward_key="reward"),
    "echo": RewardConfig(verifier=verifier(".echo"), reward_key="reward"),
    "counting": RewardConfig(verifier=verifier(".Counting", start=7)),
    "length": RewardConfig(verifier=verifier(".length")),
    "by_response": RewardConfig(verifier=verifier(".by_response")),
    "told": RewardConfig(verifier=verifier(".as_told"), reward_timeout_s=LONG_S),
    "hasty": RewardConfig(verifier=verifier(".as_told"), reward_timeout_s=0.2),
    "patient": RewardConfig(verifier=verifier(".as_told"), reward_timeout_s=1.0),
    "valued": RewardConfig(verifier=verifier(".as_told"), reward_timeout_s=0.1, on_reward_timeout="value", timeout_value=-1.0),
}

Use = Callable[[Callable[[RewardPool], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def loop_and_pool() -> Iterator[tuple[asyncio.Runner, RewardPool]]:
    with asyncio.Runner() as runner:
        pool = RewardPool(DOMAINS, 2)
        yield runner, pool
        runner.run(pool.close())


@pytest.fixture(autouse=True)
def no_error_in_a_callback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]


@pytest.fixture
def use(loop_and_pool: tuple[asyncio.Runner, RewardPool]) -> Use:
    """Run a test on the shared pool of two workers, which is whole before and after."""
    runner, pool = loop_and_pool

    async def between(test: Callable[[RewardPool], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.timeout(LONG_S):
            await pool.score(task("1", domain="numeric"), "1")
            await until(lambda: pool.metrics()["rewards/workers_alive"] == 2)
            await test(pool)
            await until(lambda: pool.metrics()["rewards/workers_alive"] == 2 and len(pool._idle) == 2)
            assert pool.metrics()["rewards/queued"] == 0
            metrics = pool.metrics()
            errors = sum(value for key, value in metrics.items() if key.startswith("rewards/errors/"))
            assert metrics["rewards/jobs"] == metrics["rewards/scored"] + errors + metrics["rewards/cancelled"]

    return lambda test: runner.run(between(test))


class Changes:
    """How far the totals of a pool have moved since it was made."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._before = pool.metrics()

    def __getitem__(self, key: str) -> float:
        return self._pool.metrics().get(f"rewards/{key}", 0.0) - self._before.get(f"rewards/{key}", 0.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - what happens in other processes sets no event
            await asyncio.sleep(0.005)


def reason(score: Score) -> str | None:
    return None if score.failure is None else score.failure.reason


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Every process that descends from this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, UnicodeDecodeError):
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


# ---------------------------------------------------------------- scoring


def test_scores_responses_with_built_in_and_user_verifiers(use: Use):
    async def test(pool: RewardPool) -> None:
        asked = task("42", domain="numeric")
        scores = await asyncio.gather(pool.score(asked, "it is 42"), pool.score(asked, "it is 41"))
        assert [score.reward for score in scores] == [1.0, 0.0]
        score = await pool.score(task("42", domain="mapping"), "42")
        assert (score.reward, dict(score.metrics)) == (1.0, {"acc": 1.0, "fmt": 1.0})

    use(test)


def test_an_object_of_the_user_is_built_once_per_worker(use: Use):
    async def test(pool: RewardPool) -> None:
        scores = await asyncio.gather(*(pool.score(task(domain="counting"), "") for _ in range(20)))
        rewards = sorted(score.reward or 0.0 for score in scores)
        assert rewards[0] == 8.0
        assert rewards[-1] >= 17.0  # 20 calls of at most two objects

    use(test)


def test_every_answer_comes_to_the_call_that_asked_for_it(use: Use):
    async def test(pool: RewardPool) -> None:
        scores = await asyncio.gather(*(pool.score(task(domain="length"), "x" * length) for length in range(300)))
        assert [score.reward for score in scores] == [float(length) for length in range(300)]

    use(test)


def test_the_worker_sees_the_task_as_it_is(use: Use):
    async def test(pool: RewardPool) -> None:
        shown = task("42", domain="echo", entry={"metadata": {"digits": [1, 2]}, "blob": np.arange(3)})
        score = await pool.score(shown, "")
        assert dict(score.metrics) == {"reward": 1.0, "prompt_ids_sum": 116.0, "digits": 2.0, "blob_sum": 3.0, "prompt_length": 4.0}

    use(test)


def test_each_bad_answer_is_a_counted_failure_and_costs_no_worker(use: Use):
    answers = {
        "None": "reward_missing",
        "nan": "reward_not_finite",
        "-inf": "reward_not_finite",
        "'1'": "reward_type",
        "[1]": "reward_type",
        "1j": "reward_type",
        "{'acc': 1}": "reward_key_missing",
        "1/0": "reward_error",
        "exit()": "reward_error",
    }

    async def test(pool: RewardPool) -> None:
        changes = Changes(pool)
        asked = task(domain="by_response")
        assert (await pool.score(asked, "True")).reward == 1.0
        for response, why in answers.items():
            score = await pool.score(asked, response)
            assert (score.reward, reason(score)) == (None, why), response
        assert changes["jobs"] == len(answers) + 1
        assert changes["scored"] == 1
        assert changes["errors/reward_type"] == 3
        assert changes["worker_losses"] == 0

    use(test)


def test_a_megabyte_each_way_does_not_block_anybody(use: Use):
    async def test(pool: RewardPool) -> None:
        scores = await asyncio.gather(*(pool.score(task(domain="length"), "x" * 1_000_000) for _ in range(8)))
        assert [score.reward for score in scores] == [1_000_000.0] * 8
        score = await pool.score(task(domain="many"), "20000")
        assert len(score.metrics) == 20_001  # and the reward

    use(test)


def test_a_task_that_cannot_be_sent_is_a_counted_failure(use: Use):
    async def test(pool: RewardPool) -> None:
        for blob in (threading.Lock(), OddWhenUnpickled()):
            score = await pool.score(task("42", domain="numeric", entry={"blob": blob}), "42")
            assert (score.reward, reason(score)) == (None, "task_not_picklable")

    use(test)


class OddWhenUnpickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_a_domain_without_reward_settings_is_an_error_that_names_the_known_ones(use: Use):
    async def test(pool: RewardPool) -> None:
        with pytest.raises(RewardError, match="belongs to the domain 'logic', `rewards` has by_response, counting"):
            await pool.score(task(domain="logic"), "42")

    use(test)


def test_verifiers_print_to_the_error_stream_and_read_nothing(tmp_path: Path):
    program = start_program(tmp_path, "print", "read", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = program.communicate(timeout=LONG_S)
    assert program.returncode == 0
    assert b"a verifier prints" in err
    assert out == b""


# ---------------------------------------------------------------- limits, deaths, replacements


def test_case_132_stuck_verifiers_time_out_are_replaced_and_leave_no_process_behind(tmp_path: Path):
    async def run() -> None:
        before = children()
        pool = RewardPool(DOMAINS, 2)
        recorded = task(domain="hasty", entry={"pids": str(tmp_path)})
        scores = await asyncio.gather(*(pool.score(recorded, "loop deaf") for _ in range(4)))
        assert [(score.reward, reason(score)) for score in scores] == [(None, "reward_timeout")] * 4
        endless = task(domain="told", entry={"pids": str(tmp_path)})
        assert (await pool.score(endless, "fine")).reward == 1.0
        await until(lambda: pool.metrics()["rewards/workers_alive"] == 2)
        assert pool.metrics()["rewards/timeouts"] == 4
        known = pids_in(tmp_path)
        stuck = [asyncio.create_task(pool.score(endless, "loop deaf")) for _ in range(2)]
        await until(lambda: len(pids_in(tmp_path)) > len(known))
        started = time.monotonic()
        await pool.close()
        assert time.monotonic() - started < 2.0
        assert [reason(score) for score in await asyncio.gather(*stuck)] == ["pool_closed"] * 2
        assert len(pids_in(tmp_path)) >= 4
        assert not [pid for pid in pids_in(tmp_path) if alive(pid)]
        assert children() == before

    asyncio.run(run())


def test_a_time_out_can_be_given_a_value_and_is_still_marked_and_counted(use: Use):
    async def test(pool: RewardPool) -> None:
        changes = Changes(pool)
        score = await pool.score(task(domain="valued"), "loop")
        assert score.reward == -1.0
        assert score.failure is not None
        assert (score.failure.cause, score.failure.reason) == ("policy", "reward_timeout")
        assert "reward_timeout_s = 0.1" in score.failure.detail
        assert changes["timeouts"] == changes["errors/reward_timeout"] == 1
        assert changes["scored"] == 0

    use(test)


def test_waiting_for_a_worker_does_not_count_against_the_limit(use: Use):
    async def test(pool: RewardPool) -> None:
        changes = Changes(pool)
        scores = await asyncio.gather(*(pool.score(task(domain="patient"), "short sleep") for _ in range(120)))  # 1.2 s for the last one
        assert [score.reward for score in scores] == [1.0] * 120
        assert changes["timeouts"] == 0

    use(test)


@pytest.mark.parametrize(
    ("response", "how"),
    [("die", "exit code 7"), ("crash", "SIGSEGV"), ("kill", "killed"), ("hang up", "closed its connection")],
)
def test_a_worker_that_dies_costs_its_own_job_only_and_is_replaced(response: str, how: str, use: Use):
    async def test(pool: RewardPool) -> None:
        changes = Changes(pool)
        calls = [pool.score(task(domain="told"), said) for said in (response, *["fine"] * 20)]
        lost, *others = await asyncio.gather(*calls)
        assert (lost.reward, reason(lost)) == (None, "reward_worker_lost")
        assert lost.failure is not None
        assert how in lost.failure.detail
        assert [score.reward for score in others] == [1.0] * 20
        assert changes["worker_losses"] == changes["errors/reward_worker_lost"] == 1

    use(test)


@pytest.mark.parametrize("response", ["fork", "babble", "answer twice"])
def test_a_verifier_that_meddles_with_its_process_never_confuses_the_answers_of_others(response: str, use: Use):
    async def test(pool: RewardPool) -> None:
        for _ in range(3):
            meddling = pool.score(task(domain="told"), response)
            others = [pool.score(task(domain="length"), "x" * length) for length in range(20)]
            _, *scores = await asyncio.gather(meddling, *others)
            wrong = [(score.reward, reason(score)) for length, score in enumerate(scores) if score.reward != float(length)]
            assert all(reward is None and why == "reward_worker_lost" for reward, why in wrong)

    use(test)


def test_a_pool_that_runs_out_of_descriptors_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "START_DELAY_S", 0.01)

    def none_left() -> None:
        raise OSError(24, "Too many open files")

    async def run() -> None:
        pool = RewardPool(DOMAINS, 1)
        with monkeypatch.context() as patch:
            patch.setattr(workers_module.socket, "socketpair", none_left)
            with pytest.raises(RewardError, match="Too many open files"):
                await pool.score(task(domain="told"), "fine")
        await pool.close()

    asyncio.run(run())


def test_a_job_is_never_tried_a_second_time(tmp_path: Path, use: Use):
    async def test(pool: RewardPool) -> None:
        for response in ("die", "loop", "fine"):
            await pool.score(task(domain="hasty", entry={"calls": str(tmp_path / "calls")}), response)
        assert (tmp_path / "calls").read_text().split() == ["die", "loop", "fine"]

    use(test)


def test_an_idle_worker_that_is_killed_is_replaced(use: Use):
    async def test(pool: RewardPool) -> None:
        changes = Changes(pool)
        pid = (await pool.score(task(domain="by_response"), "__import__('os').getpid()")).reward
        assert pid is not None
        os.kill(int(pid), signal.SIGKILL)
        await until(lambda: changes["worker_losses"] == 1)
        assert (await pool.score(task("1", domain="numeric"), "1")).reward == 1.0

    use(test)


def test_when_the_fork_server_is_killed_its_workers_end_and_a_new_one_takes_over(tmp_path: Path, use: Use):
    async def test(pool: RewardPool) -> None:
        recorded = task(domain="told", entry={"pids": str(tmp_path)})
        stuck = asyncio.create_task(pool.score(recorded, "loop"))
        await until(lambda: pids_in(tmp_path))
        (stuck_pid,) = pids_in(tmp_path)
        pool._server.kill_now()
        assert reason(await stuck) == "reward_worker_lost"
        await until(lambda: not alive(stuck_pid))
        assert (await pool.score(recorded, "fine")).reward == 1.0

    use(test)


def test_what_a_killed_verifier_had_started_ends_with_it_even_in_a_session_of_its_own(tmp_path: Path, use: Use):
    async def test(pool: RewardPool) -> None:
        call = asyncio.create_task(pool.score(task(domain="told", entry={"pids": str(tmp_path)}), "sandbox"))
        await until(lambda: len(pids_in(tmp_path)) == 2)
        call.cancel()
        await until(lambda: not any(alive(pid) for pid in pids_in(tmp_path)))

    use(test)


def test_workers_do_not_hear_ctrl_c(use: Use):
    async def test(pool: RewardPool) -> None:
        assert (await pool.score(task(domain="told"), "interrupt me")).reward == 1.0

    use(test)


def test_whatever_verifiers_do_every_call_ends_once_and_the_pool_stays_whole(use: Use):
    choose = random.Random(7)

    async def one(pool: RewardPool) -> str:
        said = choose.choice(["fine"] * 6 + ["short sleep", "die", "crash", "loop", "hang up", "cancel"])
        call = asyncio.create_task(pool.score(task(domain="hasty"), "loop" if said == "cancel" else said))
        if said == "cancel":
            await asyncio.sleep(choose.random() / 10)
            call.cancel()
        await asyncio.wait([call])
        return "cancelled" if call.cancelled() else reason(call.result()) or "scored"

    async def test(pool: RewardPool) -> None:
        changes, before = Changes(pool), open_descriptors()
        ends = Counter(await asyncio.gather(*(one(pool) for _ in range(80))))
        assert ends.total() == changes["jobs"] == 80
        assert ends["scored"] == changes["scored"] > 0
        assert ends["cancelled"] == changes["cancelled"] > 0
        assert ends["reward_timeout"] == changes["timeouts"] > 0
        assert ends["reward_worker_lost"] == changes["worker_losses"] > 0
        await until(lambda: pool.metrics()["rewards/workers_alive"] == 2)
        assert open_descriptors() == before

    use(test)


# ---------------------------------------------------------------- cancelling and closing


def test_case_62_cancelling_withdraws_a_waiting_call_at_once_and_a_running_one_within_bounds(tmp_path: Path, use: Use):
    async def test(pool: RewardPool) -> None:
        changes = Changes(pool)
        slow = task(domain="told", entry={"pids": str(tmp_path)})
        calls = [asyncio.create_task(pool.score(slow, "sleep")) for _ in range(2)]
        await until(lambda: len(pids_in(tmp_path)) == 2)
        calls.append(asyncio.create_task(pool.score(slow, "fine")))
        await asyncio.sleep(0)
        assert pool.metrics()["rewards/queued"] == 1
        started = time.monotonic()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert time.monotonic() - started < 1.0
        assert all(call.cancelled() for call in calls)
        assert pool.metrics()["rewards/queued"] == 0
        assert (await pool.score(slow, "fine")).reward == 1.0  # by a worker that replaced a sleeping one
        assert time.monotonic() - started < 10.0
        assert (changes["cancelled"], changes["scored"], changes["timeouts"], changes["worker_losses"]) == (3, 1, 0, 0)

    use(test)


def test_a_cancelled_call_that_ends_by_itself_within_the_grace_keeps_its_worker(monkeypatch: pytest.MonkeyPatch, use: Use):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", LONG_S)

    async def test(pool: RewardPool) -> None:
        workers = set(pool._by_id)
        call = asyncio.create_task(pool.score(task(domain="told"), "short sleep"))
        await asyncio.sleep(0)
        call.cancel()
        await until(lambda: len(pool._idle) == 2)
        assert set(pool._by_id) == workers

    use(test)


def test_close_answers_running_and_waiting_calls_and_all_later_ones():
    async def run() -> None:
        pool = RewardPool(DOMAINS, 1)
        assert (await pool.score(task(domain="told"), "fine")).reward == 1.0
        calls = [asyncio.create_task(pool.score(task(domain="told"), "sleep")) for _ in range(5)]
        await asyncio.sleep(0)
        started = time.monotonic()
        await asyncio.gather(pool.close(), pool.close())
        await pool.close()
        assert time.monotonic() - started < 2.0
        assert [reason(score) for score in await asyncio.gather(*calls)] == ["pool_closed"] * 5
        assert reason(await pool.score(task(domain="told"), "fine")) == "pool_closed"
        assert pool.metrics()["rewards/workers_alive"] == 0

    asyncio.run(run())


def test_a_pool_that_was_never_used_and_one_that_is_still_starting_close_as_well():
    asyncio.run(RewardPool(rewards("exact"), 2).close())

    async def run() -> None:
        pool = RewardPool(rewards("exact"), 2)
        call = asyncio.create_task(pool.score(task(), "42"))
        await asyncio.sleep(0)
        await pool.close()
        assert reason(await call) == "pool_closed"

    asyncio.run(run())


def test_works_on_an_event_loop_in_a_second_thread():
    rewards_seen: list[float | None] = []

    async def run() -> None:
        pool = RewardPool(DOMAINS, 1)
        rewards_seen.extend(
            [(await pool.score(task(domain=domain), response)).reward for domain, response in [("hasty", "loop"), ("told", "fine")]]
        )
        await pool.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join(LONG_S)
    assert rewards_seen == [None, 1.0]


def test_a_pool_belongs_to_one_event_loop():
    async def run(pool: RewardPool) -> float | None:
        return (await pool.score(task("42"), "42")).reward

    pool = RewardPool(rewards("exact"), 1)
    assert asyncio.run(run(pool)) == 1.0
    with pytest.raises(RewardError, match="one pool per event loop"):
        asyncio.run(run(pool))
    asyncio.run(pool.close())


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="at least 1 worker"):
        RewardPool(rewards("exact"), 0)


# ---------------------------------------------------------------- workers that cannot start


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{HERE}.CannotBeBuilt", "RuntimeError: no model file"),
        ("tests.rewards.breaks_on_import.f", "RuntimeError: no licence file"),
        ("tests.rewards.exits_on_import.f", "exit code 5"),
    ],
)
def test_workers_that_cannot_start_are_an_error_after_a_bound_for_every_waiting_call(path: str, why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "START_DELAY_S", 0.01)

    async def run() -> None:
        pool = RewardPool(rewards(path), 2)
        async with asyncio.timeout(LONG_S):
            answers = await asyncio.gather(*(pool.score(task(), "") for _ in range(5)), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, RewardError)
            assert "no reward worker can be started, 3 tries failed" in str(answer)
            assert why in str(answer)
        with pytest.raises(RewardError, match="no reward worker can be started"):
            await pool.score(task(), "")
        await pool.close()

    asyncio.run(run())


def test_a_worker_that_does_not_start_in_time_counts_as_one_that_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.3)
    monkeypatch.setattr(workers_module, "START_DELAY_S", 0.01)

    async def run() -> None:
        pool = RewardPool(rewards(".NeverBuilt"), 1)
        with pytest.raises(RewardError, match=r"did not start within 0\.3 s"):
            async with asyncio.timeout(LONG_S):
                await pool.score(task(), "")
        await pool.close()

    asyncio.run(run())


# ---------------------------------------------------------------- the program around it

PROGRAM = """
import asyncio, sys
import numpy as np
from sluice.config.models import RewardConfig, VerifierConfig
from sluice.rewards import RewardPool
from sluice.types import Task

async def main():
    pool = RewardPool({"math": RewardConfig(verifier=VerifierConfig(type=sys.argv[1]))}, 2)
    shown = Task(task_id="t", domain="math", prompt="", prompt_ids=np.array([1]), entry={"pids": sys.argv[2]})
    await asyncio.gather(*(pool.score(shown, response) for response in sys.argv[3:]))
    await pool.close()

asyncio.run(main())  # on purpose without `if __name__ == "__main__"`: workers must not run the script again
"""


def start_program(folder: Path, *responses: str, verifier: str = f"{HERE}.as_told", **streams: int) -> subprocess.Popen[bytes]:
    """A script that scores these responses; its verifiers write their process ids into `folder/pids`."""
    script, pids = folder / "program.py", folder / "pids"
    script.write_text(PROGRAM)
    pids.mkdir()
    environment = {**os.environ, "PIDS": str(pids), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, str(script), verifier, str(pids), *responses], env=environment, **streams)


def test_a_script_without_a_main_guard_can_use_the_pool(tmp_path: Path):
    program = start_program(tmp_path, "fine", "die", "fine")
    assert program.wait(LONG_S) == 0
    assert not [pid for pid in pids_in(tmp_path / "pids") if alive(pid)]


@pytest.mark.parametrize(
    ("verifier", "processes"),
    [(f"{HERE}.as_told", 3), ("tests.rewards.loops_on_import.f", 1)],  # two workers and a sandbox; the process that was to fork workers
)
def test_when_the_program_is_killed_everything_that_is_stuck_ends_too(verifier: str, processes: int, tmp_path: Path):
    program = start_program(tmp_path, "loop deaf", "sandbox", verifier=verifier)
    pids = tmp_path / "pids"
    deadline = time.monotonic() + LONG_S
    while len(pids_in(pids)) < processes and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids_in(pids)) == processes
    assert all(alive(pid) for pid in pids_in(pids))
    program.kill()
    program.wait(LONG_S)
    while any(alive(pid) for pid in pids_in(pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids_in(pids) if alive(pid)]
