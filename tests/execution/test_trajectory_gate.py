"""The gate around real trajectories: cut, stopped and held ones leave their seat, their dialogue and every token in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.environments.base import FaultKind
from sluice.execution.clock import run
from sluice.execution.trajectory import Trajectory
from sluice.gate import FutilityKeeper, FutilityRule, Gate, GateKeeper
from sluice.generation import GenerationRequest
from sluice.scheduler import MachineGate
from sluice.scheduler import events as ev
from tests.execution.playing import SayingEngine, World, config, rollouts, world
from tests.execution.test_trajectories import cancelled_now_and_then
from tests.fakes import DelayedHost, ScriptedEnvironment

WALKS = ("go north", "go south", "look", "open door")


def gate_of(k: int = 2, *, size: int = 4, redundancy: int = 0, futility: int | None = None, **more: Any) -> MachineGate:
    machine = {name: more.pop(name) for name in ("on_cut", "barrier") if name in more}
    keeper = GateKeeper(
        Gate(k=k, threshold=0.3, horizon=50), group_size=size, redundancy=redundancy, **{"audit_rate": 0.0, "seed": 1, **more}
    )
    members = None if futility is None else FutilityKeeper(FutilityRule(steps=futility), audit_rate=0.0, horizon=50)
    return MachineGate(keeper, members, **machine)


def only_futility(steps: int = 2, **more: Any) -> MachineGate:
    return MachineGate(None, FutilityKeeper(FutilityRule(steps=steps), **{"audit_rate": 0.0, **more}))


def first_groups_converge(groups: int) -> Callable[[GenerationRequest], str]:
    """The members of the first groups all do the same; later ones go ways of their own."""
    return lambda request: "go north" if request.request_id < 4 * groups else WALKS[request.seed % 4]


def listen(one: World) -> list[ev.Event]:
    """Everything that the machine is told."""
    told: list[ev.Event] = []
    handle = one.shell.scheduler.handle

    def heard(event: ev.Event, now: float) -> list[ev.Instruction]:
        told.append(event)
        return handle(event, now)

    one.shell.scheduler.handle = heard  # type: ignore[method-assign]
    return told


# ---------------------------------------------------------------- what is told


def test_the_machine_hears_all_that_a_keeper_may_want_to_know() -> None:
    async def main() -> None:
        environment = ScriptedEnvironment(length=3, info={"progress": 0.5})
        async with world(lambda: environment, gate=gate_of(k=9)) as one:
            told = listen(one)
            batch = await one.batch()
            for rollout in rollouts(batch):
                steps = [event for event in told if isinstance(event, ev.MemberStepped) and event.attempt_id == rollout.attempt_id]
                assert [step.env_step for step in steps] == [1, 2, 3]
                assert [step.reply for step in steps] == ["after go north"] * 3
                assert [step.observation for step in steps] == [turn.observation for turn in rollout.turns]
                assert [step.reward for step in steps] == [0.25, 0.5, 0.75]
                assert [step.is_admissible for step in steps] == [True] * 3
                assert [(step.progress_before, step.progress) for step in steps] == [(0.5, 0.5)] * 3
                assert [step.task_type for step in steps] == ["rooms"] * 3
                assert [step.is_last for step in steps] == [False, False, True]
                for step, turn in zip(steps, rollout.turns, strict=True):
                    assert step.logprob == pytest.approx(float(turn.inference_logprobs.mean()))

    run(main())


@pytest.mark.parametrize(
    ("how", "environment", "changes"),
    [
        ("completed", {}, {}),
        ("max_turns", {"length": 2}, {}),
        ("max_turns", {"ends": False}, {"dialogue": {"max_turns": 2}}),
        ("length", {"ends": False}, {"sequence_length": 41}),
    ],
)
def test_the_step_that_ends_a_trajectory_says_so(how: str, environment: Any, changes: Any) -> None:
    async def main() -> None:
        engine = SayingEngine(lambda request: "win" if how == "completed" else "go north")
        async with world(
            lambda: ScriptedEnvironment(**environment), engine, config(**changes), gate=gate_of(k=40), truncated="keep"
        ) as one:
            told = listen(one)
            batch = await one.batch()
            for rollout in rollouts(batch):
                assert rollout.finish_reason == how
                steps = [event for event in told if isinstance(event, ev.MemberStepped) and event.attempt_id == rollout.attempt_id]
                last_is_told = how != "length" or rollout.turns[-1].reward is not None
                assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [last_is_told]

    run(main())


# ---------------------------------------------------------------- a cut


def test_a_cut_group_gives_back_its_seats_and_others_fill_the_batch() -> None:
    async def main() -> None:
        engine = SayingEngine(first_groups_converge(2), latency_s=lambda request: 1.0 + request.seed % 3, cancel_latency_s=0.5)
        async with world(lambda: ScriptedEnvironment(length=8), engine, gate=gate_of(), max_resample_rounds=50) as one:
            batch = await one.batch()
            assert len(batch.groups) == 2
            cut = [record for record in one.records if record.outcome == "cut"]
            assert {record.group_id for record in cut} >= {0, 1}
            assert {group.group_id for group in batch.groups}.isdisjoint({record.group_id for record in cut})
            ledger = one.shell.scheduler.ledger
            assert ledger.attempts["cut"] == 4 * len(cut)
            assert ledger.tokens["cut"] == sum(record.sampled_tokens for record in cut) > 0
            assert all(2 * 4 <= record.env_steps < 8 * 4 for record in cut)
            assert all(record.task_type == "rooms" for record in cut)
            assert one.player.metrics()["rollout/ended/cancelled"] == 4 * len(cut)
            await asyncio.sleep(1.0)  # what is late has come

    run(main())


def test_a_shadow_samples_the_same_tokens_at_the_same_time() -> None:
    async def main(gate: MachineGate | None) -> Any:
        engine = SayingEngine(first_groups_converge(1), latency_s=lambda request: 1.0 + request.seed % 7)
        async with world(lambda: ScriptedEnvironment(length=5), engine, gate=gate, async_generation_ratio=1.0) as one:
            batches = [await one.batch() for _ in range(2)]
            requests = [(request.request_id, request.seed, tuple(request.prompt_ids.tolist())) for request in engine.requests]
            return requests, [group.group_id for batch in batches for group in batch.groups], asyncio.get_running_loop().time()

    shadow = gate_of(shadow=True, futility=2)
    assert shadow.groups is not None
    plain = run(main(None))
    assert run(main(MachineGate(shadow.groups, FutilityKeeper(FutilityRule(steps=2), audit_rate=1.0)))) == plain
    assert shadow.groups.metrics()["gate/would_cut"] >= 1


# ---------------------------------------------------------------- a stop


def test_a_futile_trajectory_ends_at_once_with_its_reward_and_its_environment_plays_on() -> None:
    async def main() -> None:
        engine = SayingEngine(lambda request: "go north" if request.request_id % 2 else f"say {request.seed % 1000}")
        chosen = config(train_env_manager={"num_env_groups": 2, "group_size": 4})
        async with world(lambda: ScriptedEnvironment(length=30), engine, chosen, gate=only_futility(2)) as one:
            batch = await one.batch()
            by_parity = {0: [], 1: []}  # type: ignore[var-annotated]
            for rollout in rollouts(batch):
                by_parity[rollout.attempt_id % 2].append(rollout)
            for rollout in by_parity[1]:
                assert rollout.finish_reason == "stopped_futile"
                assert (len(rollout.turns), rollout.reward, rollout.failure) == (3, 0.75, None)
                assert rollout.env_steps == 3
            assert {rollout.finish_reason for rollout in by_parity[0]} == {"max_turns"}
            ledger = one.shell.scheduler.ledger
            assert ledger.stopped_attempts == 4
            assert ledger.stopped_tokens == sum(rollout.sampled_tokens for rollout in by_parity[1])
            assert one.player.metrics()["rollout/ended/stopped_futile"] == 4
            assert len((await one.batch()).groups) == 2

    run(main())


def steer(one: World, attempt_id: int) -> None:
    one.player.steer(ev.StopMember(attempt_id=attempt_id))


@pytest.mark.parametrize("where", ["engine", "environment"])
def test_a_stop_in_the_middle_of_a_turn_leaves_the_turn_out_and_counts_its_tokens(where: str) -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=lambda request: 10.0 if where == "engine" else 0.5, cancel_latency_s=0.25)
        host = DelayedHost(lambda: ScriptedEnvironment(length=5), seconds=lambda call: 0.5 if where == "engine" else 10.0)
        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2})
        async with world(None, engine, chosen, host=host, gate=gate_of(k=40, size=2)) as one:
            waiting = asyncio.ensure_future(one.batch(1))
            await asyncio.sleep(27.0)
            steps = one.player._playing[0][0].env_steps
            assert steps >= 1
            steer(one, 0)
            await asyncio.sleep(0.1)
            assert 0 not in one.player.in_flight()
            batch = await waiting
            (stopped,) = [rollout for rollout in rollouts(batch) if rollout.finish_reason == "stopped_futile"]
            assert (stopped.env_steps, stopped.failure) == (steps, None)
            assert stopped.reward == pytest.approx(0.25 * steps)
            await asyncio.sleep(1.0)
            assert one.shell.scheduler.ledger.tokens["late"] > 0

    run(main())


def test_a_stop_that_comes_too_late_is_a_counted_no_op() -> None:
    async def main() -> None:
        async with world(gate=gate_of(k=40)) as one:
            steer(one, 12345)
            batch = await one.batch()
            steer(one, batch.groups[0].rollouts[0].attempt_id)
            assert one.player.metrics()["rollout/late_stops"] == 2

    run(main())


def test_a_trajectory_without_a_step_is_not_stopped() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0)
        async with world(engine=engine, gate=gate_of(k=40)) as one:
            waiting = asyncio.ensure_future(one.batch())
            await asyncio.sleep(0.5)
            steer(one, 0)
            batch = await waiting
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"max_turns"}
            assert one.player.late_stops == 1

    run(main())


@pytest.mark.parametrize("first", ["stop", "time limit"])
def test_a_stop_in_the_moment_of_the_time_limit_ends_it_once(first: str) -> None:
    async def main() -> None:
        chosen = config(dialogue={"timeout_s": 3.0}, train_env_manager={"num_env_groups": 1, "group_size": 1})
        async with world(lambda: ScriptedEnvironment(length=9), SayingEngine(latency_s=1.75), chosen, on_member_failure="judge") as one:
            loop = asyncio.get_running_loop()
            if first == "stop":
                loop.call_at(3.0, steer, one, 0)
            waiting = asyncio.ensure_future(one.batch(1))
            await asyncio.sleep(1.0)
            if first == "time limit":
                loop.call_at(3.0, steer, one, 0)
            (rollout,) = rollouts(await waiting)
            assert rollout.finish_reason == ("stopped_futile" if first == "stop" else "timeout")

    run(main())


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_cancel_in_the_moment_of_a_stop_is_not_swallowed(cancelled_first: bool) -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0)
        async with world(lambda: ScriptedEnvironment(length=9), engine) as one:
            trajectory = Trajectory(
                one.player.table, number=99, seed=1, env_seed=1, temperature=1.0, purpose="validation", let_go=lambda *_: None
            )
            task = asyncio.create_task(trajectory.play(), name="play")
            await asyncio.sleep(1.5)
            assert trajectory.env_steps == 1
            if cancelled_first:
                task.cancel()
                trajectory.stop()
            else:
                trajectory.stop()
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    run(main())


# ---------------------------------------------------------------- the barrier


def test_at_a_barrier_nobody_takes_a_step_more_than_k_before_the_decision() -> None:
    async def main() -> None:
        engine = SayingEngine(first_groups_converge(2), latency_s=lambda request: 0.5 + request.seed % 5)
        gate = gate_of(k=3, barrier=True)
        async with world(lambda: ScriptedEnvironment(length=8), engine, gate=gate, max_resample_rounds=50) as one:
            batch = await one.batch()
            cut = [record for record in one.records if record.outcome == "cut"]
            assert {record.group_id for record in cut} >= {0, 1}
            assert {record.env_steps for record in cut} == {12}
            assert len(batch.groups) == 2
            assert one.player.metrics()["rollout/time_share/barrier"] > 0

    run(main())


def test_the_time_limit_stands_still_while_a_trajectory_is_held() -> None:
    async def main() -> None:
        engine = SayingEngine(lambda request: f"say {request.seed}", latency_s=lambda request: 9.0 if request.request_id == 3 else 1.0)
        chosen = config(sequence_length=9000, dialogue={"timeout_s": 40.0}, train_env_manager={"num_env_groups": 1, "group_size": 4})
        gate = gate_of(k=3, barrier=True)
        async with world(lambda: ScriptedEnvironment(length=30), engine, chosen, gate=gate, on_member_failure="judge") as one:
            batch = await one.batch(1)
            quick = [rollout for rollout in rollouts(batch) if rollout.attempt_id != 3]
            assert {rollout.finish_reason for rollout in quick} == {"max_turns"}  # 3 turns, 24 s of waiting, 27 turns
            (slow,) = [rollout for rollout in rollouts(batch) if rollout.attempt_id == 3]
            assert slow.finish_reason == "timeout"

    run(main())


def test_a_held_trajectory_has_its_time_limit_afterwards() -> None:
    async def main() -> None:
        engine = SayingEngine(lambda request: f"say {request.seed}", latency_s=lambda request: 9.0 if request.request_id == 1 else 1.0)
        chosen = config(sequence_length=9000, dialogue={"timeout_s": 20.5}, train_env_manager={"num_env_groups": 1, "group_size": 2})
        gate = gate_of(k=2, size=2, barrier=True)
        async with world(lambda: ScriptedEnvironment(length=90), engine, chosen, gate=gate, on_member_failure="judge") as one:
            batch = await one.batch(1)
            first, second = rollouts(batch)
            assert (first.finish_reason, first.env_steps) == ("timeout", 20)
            assert (second.finish_reason, second.env_steps) == ("timeout", 2)

    run(main())


# ---------------------------------------------------------------- whatever happens


@settings(max_examples=40)
@given(
    seed=st.integers(0, 100_000),
    redundancy=st.integers(0, 2),
    barrier=st.booleans(),
    policy=st.sampled_from(["replace", "judge"]),
    rule=st.sampled_from(["finish", "restart"]),
    ratio=st.sampled_from([0.0, 1.0]),
    timeout_s=st.sampled_from([None, 6.0]),
    futility=st.sampled_from([None, 1, 2]),
    on_cut=st.sampled_from(["replace", "drop"]),
)
def test_cut_stopped_held_or_cancelled_at_any_await_it_leaves_no_seat_no_dialogue_no_call_and_no_token(
    seed: int,
    redundancy: int,
    barrier: bool,
    policy: str,
    rule: str,
    ratio: float,
    timeout_s: float | None,
    futility: int | None,
    on_cut: str,
) -> None:
    async def main() -> None:
        random = Random(seed)
        engine = SayingEngine(
            lambda request: random.choice(["go north", "go north", "look", "win", ""]),
            latency_s=lambda request: random.choice([0.0, 0.1, 0.5, random.expovariate(1.0)]),
            error=lambda request: "broken" if random.random() < 0.02 else None,
            cancel_latency_s=random.choice([0.0, 0.3]),
            on_weight_update=rule,
        )
        kinds: list[FaultKind] = ["env_timeout", "env_failed", "env_died"]
        host = DelayedHost(
            lambda: ScriptedEnvironment(length=4),
            seconds=lambda call: random.choice([0.0, 0.2, random.expovariate(1.0)]),
            fault=lambda call: random.choice(kinds) if random.random() < 0.05 else None,
        )
        chosen = config(
            train_env_manager={"num_env_groups": 6, "group_size": 3, "group_size_redundancy": redundancy},
            on_weight_update=rule,
            sequence_length=random.choice([60, 200]),
            dialogue={"timeout_s": timeout_s},
        )
        gate = gate_of(
            k=random.choice([1, 2, 3]), size=3, redundancy=redundancy, futility=futility, on_cut=on_cut, barrier=barrier,
            audit_rate=random.choice([0.0, 0.5]),
        )  # fmt: skip
        async with world(
            engine=engine, settings=chosen, host=host, on_member_failure=policy, async_generation_ratio=ratio, max_resample_rounds=200,
            max_response_rounds=9, on_exhausted="shrink", gate=gate,
        ) as one:  # fmt: skip
            try:
                async with asyncio.timeout(random.expovariate(0.03)):
                    for _ in range(3):
                        await cancelled_now_and_then(one, random)
            except TimeoutError:
                pass
            await one.shell.close()
        assert gate.groups is not None
        assert gate.groups.watched == 0  # type: ignore[attr-defined]

    run(main())
