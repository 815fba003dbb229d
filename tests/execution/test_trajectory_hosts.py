"""Trajectories in real threads and processes: what hangs or dies is replaced, and what is left in the middle is free again."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from sluice.types import Batch
from tests.execution.playing import SayingEngine, config, rollouts, world
from tests.fakes import ScriptedEnvironment


class Deadly(ScriptedEnvironment):
    """Its process ends in the middle of a step, in the first lives of a pool: as long as a file of that name can be made."""

    def __init__(self, folder: str, deaths: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder, self.deaths = folder, deaths

    def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        for number in range(self.deaths):
            try:
                os.close(os.open(f"{self.folder}/{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os._exit(9)
        return super().step(action)


def in_processes(kind: type = ScriptedEnvironment, args: dict[str, Any] | None = None, **changes: Any) -> Any:
    where = f"{kind.__module__}.{kind.__qualname__}"
    settings = {"type": where, "args": args or {}, "run_in": "process", "workers": 2, **changes.pop("environment", {})}
    return config(environment=settings, **changes)


def test_an_environment_that_hangs_in_a_thread_costs_its_member_which_is_replaced() -> None:
    async def main() -> None:
        built = 0

        def make() -> ScriptedEnvironment:
            nonlocal built
            built += 1
            return ScriptedEnvironment(faults={"step": "hang"} if built == 3 else {})

        chosen = config(environment={"run_in": "thread", "step_timeout_s": 0.3})
        async with world(make, SayingEngine(), chosen) as one:
            batch = await one.batch()
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"max_turns"}
            assert one.player.metrics()["rollout/ended/env_timeout"] == 1
            assert one.host.metrics()["env/abandoned_threads"] == 1  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_step_in_a_thread_that_is_cancelled_leaves_the_seat_at_once() -> None:
    async def main() -> None:
        chosen = config(environment={"run_in": "thread"}, dialogue={"timeout_s": 0.3})
        async with world(lambda: ScriptedEnvironment(faults={"step": "hang"}), SayingEngine(), chosen, on_member_failure="judge") as one:
            batch = await one.batch(1)
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"timeout"}
            assert one.player.table.seats.taken == 0

    asyncio.run(main())


def test_a_worker_process_that_dies_costs_its_member_which_is_replaced(tmp_path: Any) -> None:
    async def main() -> None:
        chosen = in_processes(Deadly, {"folder": str(tmp_path), "deaths": 2})
        async with world(None, SayingEngine(), chosen) as one:
            batch = await one.batch()
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"max_turns"}
            assert one.shell.scheduler.ledger.attempts["failed"] == 2
            assert one.host.metrics()["env/faults/env_died"] == 2  # type: ignore[union-attr]

    asyncio.run(main())


class Endless(ScriptedEnvironment):
    """Never returns from its first step with a problem, as long as a file can be made for it: every group has one such member."""

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        try:
            os.close(os.open(f"{self.folder}/{self.seed}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().step(action)
        while True:
            pass


@pytest.mark.parametrize("policy", ["replace", "judge"])
def test_case_132_groups_whose_environments_never_return_cost_time_outs_and_nothing_else(policy: str, tmp_path: Any) -> None:
    """Case 132: two workers, a step without end in each of two groups: both are killed, counted and replaced, and the batch is whole."""

    async def main() -> None:
        chosen = in_processes(Endless, {"folder": str(tmp_path)}, environment={"workers": 2, "step_timeout_s": 0.3})
        async with world(None, SayingEngine(), chosen, on_member_failure=policy) as one:
            batch = await one.batch()
            metrics, ledger = one.host.metrics(), one.shell.scheduler.ledger  # type: ignore[union-attr]
            assert metrics["env/faults/env_timeout"] == metrics["env/workers_lost"] == 2
            lost = [rollout for rollout in rollouts(batch) if rollout.failure is not None]
            assert len(lost) == (2 if policy == "judge" else 0)
            assert ledger.attempts["failed"] == (0 if policy == "judge" else 2)
            assert {rollout.finish_reason for rollout in rollouts(batch)} - {"env_timeout"} == {"max_turns"}
            assert all(len(group.rollouts) == 4 for group in batch.groups)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, {"max_turns"}),
        ({"dialogue": {"max_turns": 1}}, {"max_turns"}),  # the environments do not end: what holds a worker must give it back
        ({"sequence_length": 30}, {"length"}),
    ],
)
def test_more_seats_than_workers_play_to_the_end(changes: dict[str, Any], ends: set[str]) -> None:
    async def main() -> list[Batch]:
        chosen = in_processes(args={"length": 3, "ends": not changes}, **changes)
        async with world(None, SayingEngine(), chosen, truncated="keep") as one:
            batches = [await one.batch() for _ in range(2)]
            assert one.host.metrics()["env/workers_lost"] == 0  # type: ignore[union-attr]
            return batches

    batches = asyncio.run(asyncio.wait_for(main(), 60))
    assert {rollout.finish_reason for batch in batches for rollout in rollouts(batch)} == ends


def test_the_wait_for_a_worker_is_not_in_the_time_limit_and_not_the_environments_time() -> None:
    async def main() -> None:
        chosen = in_processes(Slow, dialogue={"timeout_s": 0.6}, environment={"workers": 1})
        async with world(None, SayingEngine(lambda request: "win"), chosen) as one:
            batch = await one.batch()
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"completed"}
            metrics = one.player.metrics()
            assert metrics["rollout/time_share/seat"] > metrics["rollout/time_share/environment"] > 0

    asyncio.run(main())


class Slow(ScriptedEnvironment):
    """A fifth of a second per problem."""

    def reset(self, seed: int) -> Any:
        import time

        time.sleep(0.2)
        return super().reset(seed)


def test_a_reset_in_a_process_that_hangs_ends_by_the_time_limit_of_the_trajectory() -> None:
    async def main() -> None:
        chosen = in_processes(args={"faults": {"reset": "hang"}}, dialogue={"timeout_s": 0.3})
        async with world(None, SayingEngine(), chosen, on_member_failure="judge") as one:
            batch = await one.batch(1)
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"timeout"}
            assert not any(rollout.turns for rollout in rollouts(batch))

    asyncio.run(main())
