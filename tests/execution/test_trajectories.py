"""The player of trajectories with the real machine and shell: what is sampled is what trains, every way to end, nothing left behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.environments import episode_seed
from sluice.environments.base import FaultKind
from sluice.errors import GenerationError, SluiceError
from sluice.execution import LocalShell
from sluice.execution.clock import run
from sluice.execution.trajectory import Trajectory
from sluice.generation import GenerationRequest, NullEngine
from sluice.scheduler import events as ev
from sluice.trainer.assemble import samples_from_batch
from sluice.types import Batch
from tests.execution.playing import TOKENIZER, SayingEngine, World, config, read, rollouts, turn_of, world
from tests.execution.test_shell import make_shell
from tests.fakes import DelayedHost, ScriptedEnvironment

# ---------------------------------------------------------------- what is sampled is what trains


def assert_samples_are_what_the_engine_gave(batch: Batch, engine: SayingEngine) -> None:
    for sample in samples_from_batch(batch):
        answers = engine.answers[sample.attempt_id]
        requests = [request for request in engine.requests if request.dialogue_id == sample.attempt_id]
        assert np.array_equal(sample.prompt_ids, requests[0].prompt_ids)
        parts: list[Any] = []
        masks: list[Any] = []
        logprobs: list[Any] = []
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            sampled = answer.token_ids[: request.max_new_tokens]
            before = request.prompt_ids if number else request.prompt_ids[:0]
            parts += [before, sampled]
            masks += [np.zeros(len(before), dtype=bool), np.ones(len(sampled), dtype=bool)]
            logprobs += [np.zeros(len(before), dtype=np.float32), answer.inference_logprobs[: len(sampled)]]
        assert np.array_equal(sample.completion_ids, np.concatenate(parts))
        assert np.array_equal(sample.loss_mask, np.concatenate(masks) & sample.is_counted)
        assert np.array_equal(sample.inference_logprobs, np.concatenate(logprobs))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 6), sequence=st.integers(60, 400), most=st.integers(3, 32))
def test_the_trainer_gets_the_engines_own_tokens_log_probs_and_versions(seed: int, length: int, sequence: int, most: int) -> None:
    """Also where turns are cut, sequences are full, texts differ and weights change: with a tokenizer that would encode all of it anew."""

    async def main() -> None:
        random = Random(seed)
        words = [random.choice(["go north", "look", "win", "", "x" * 40, "<end> a", "Ünïcode 中"]) for _ in range(97)]
        engine = SayingEngine(lambda request: words[request.seed % 97], latency_s=lambda request: request.seed % 5 / 4)
        chosen = config(sequence_length=sequence, dialogue={"max_tokens_per_turn": most}, on_weight_update="continue")
        async with world(lambda: ScriptedEnvironment(length=length), engine, chosen, truncated="keep") as one:
            for _ in range(2):
                batch = await one.batch()
                assert_samples_are_what_the_engine_gave(batch, engine)
                for rollout in rollouts(batch):
                    assert rollout.sampled_tokens + sum(len(turn.prompt_ids) for turn in rollout.turns) <= sequence
                    assert all(len(turn.token_ids) <= most for turn in rollout.turns)

    run(main())


def test_case_1_the_same_step_rewards_in_another_order_make_the_same_reward() -> None:
    """Added up one after another 0.1, 0.2, 0.3 would be more than 0.3, 0.2, 0.1, and a group without any difference would have spread."""

    class InTurn(ScriptedEnvironment):
        plays = 0

        def reset(self, seed: int) -> tuple[str, Mapping[str, object]]:
            InTurn.plays = self.play = InTurn.plays + 1
            return super().reset(seed)

        def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, object]]:
            observation, _, is_won, is_over, info = super().step(action)
            rewards = (0.1, 0.2, 0.3) if self.play % 2 else (0.3, 0.2, 0.1)
            return observation, rewards[self.steps - 1], is_won, is_over, info

    async def main() -> None:
        async with world(InTurn) as one:
            members = rollouts(await one.batch())
            assert {tuple(turn.reward for turn in rollout.turns) for rollout in members} == {(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)}
            assert {rollout.reward for rollout in members} == {0.6}

    run(main())


def test_a_batch_of_trajectories_holds_what_engine_and_environments_said() -> None:
    async def main() -> None:
        async with world() as one:
            batch = await one.batch()
            assert [len(group.rollouts) for group in batch.groups] == [4, 4]
            for rollout in rollouts(batch):
                assert rollout.finish_reason == "max_turns"
                assert rollout.reward == pytest.approx(0.75)
                assert rollout.env_steps == 3
                assert rollout.task_type == "rooms"
                assert rollout.flags == frozenset()
                assert rollout.failure is None
                first, second, third = rollout.turns
                assert first.observation.startswith("room ")
                assert second.observation == third.observation == "after go north"
                assert [turn.text for turn in rollout.turns] == [turn.action for turn in rollout.turns] == ["go north"] * 3
                assert [turn.is_admissible for turn in rollout.turns] == [True] * 3
                assert [turn.reward for turn in rollout.turns] == [0.25] * 3
                assert (rollout.metrics["turns"], rollout.metrics["env_steps"], rollout.metrics["truncated_turns"]) == (3, 3, 0)
                assert rollout.metrics["admissible_share"] == 1
                assert "success" not in rollout.metrics
            assert all(record.env_steps == 12 for record in one.records)

    run(main())


def test_what_a_filter_is_shown_cannot_be_written_to() -> None:
    """Filters of the user see a group before the trainer does."""

    async def main() -> None:
        async with world() as one:
            batch = await one.batch()
            for rollout in rollouts(batch):
                with pytest.raises(TypeError, match="does not support item assignment"):
                    rollout.metrics["turns"] = 0.0  # type: ignore[index]
                for turn in rollout.turns:
                    for array in (turn.prompt_ids, turn.token_ids, turn.inference_logprobs):
                        with pytest.raises(ValueError, match="read-only"):
                            array[:] = 0

    run(main())


def test_the_machine_hears_of_every_step_in_order() -> None:
    async def main() -> None:
        async with world(engine=SayingEngine(latency_s=1.0)) as one:
            steps: list[ev.MemberStepped] = []
            handle = one.shell.scheduler.handle

            def listen(event: ev.Event, now: float) -> list[ev.Instruction]:
                if isinstance(event, ev.MemberStepped):
                    steps.append(event)
                return handle(event, now)

            one.shell.scheduler.handle = listen  # type: ignore[method-assign]
            batch = await one.batch()
            for rollout in rollouts(batch):
                told = [step for step in steps if step.attempt_id == rollout.attempt_id]
                assert [step.env_step for step in told] == [1, 2, 3]
                assert [step.action for step in told] == ["go north"] * 3
                assert [step.observation for step in told] == [turn.observation for turn in rollout.turns]

    run(main())


def test_all_members_of_an_episode_play_the_same_problem_and_sample_with_seeds_of_their_own() -> None:
    async def main() -> list[tuple[int, int]]:
        async with world() as one:
            batch = await one.batch()
            for group in batch.groups:
                seed = episode_seed(42, group.task.entry["env_group"], group.task.entry["episode"])
                assert {rollout.env_id for rollout in group.rollouts} == {f"problem {seed}"}
            seeds = [request.seed for request in one.engine.requests]
            assert len(set(seeds)) == len(seeds) == 24
            return [(request.request_id, request.seed) for request in one.engine.requests]

    assert sorted(run(main())) == sorted(run(main()))


def test_every_turn_continues_the_dialogue_of_its_attempt_with_new_tokens_alone() -> None:
    async def main() -> None:
        async with world() as one:
            await one.batch()
            for request in one.engine.requests:
                assert request.dialogue_id == request.request_id
                assert re.fullmatch(r"after go north\n>|room \d+\n>", read(request))

    run(main())


# ---------------------------------------------------------------- every way to end


async def one_batch(**given: Any) -> Batch:
    async with world(**given) as one:
        return await one.batch()


def test_a_solved_problem_is_completed() -> None:
    batch = run(one_batch(engine=SayingEngine(lambda request: "win")))
    assert {rollout.finish_reason for rollout in rollouts(batch)} == {"completed"}
    assert {(rollout.reward, len(rollout.turns)) for rollout in rollouts(batch)} == {(1.0, 1)}


def test_the_environments_own_limit_and_that_of_the_dialogue_end_a_trajectory_with_its_reward() -> None:
    by_environment = run(one_batch(make=lambda: ScriptedEnvironment(length=2)))
    by_dialogue = run(one_batch(make=lambda: ScriptedEnvironment(ends=False), settings=config(dialogue={"max_turns": 2})))
    for batch in (by_environment, by_dialogue):
        assert {(rollout.finish_reason, rollout.reward, len(rollout.turns)) for rollout in rollouts(batch)} == {("max_turns", 0.5, 2)}
        assert all(all(group.counted) for group in batch.groups)


def test_turns_left_count_down() -> None:
    async def main() -> None:
        chosen = config(dialogue={"max_turns": 3, "turn_template": "{turn}/{turns_left}:{observation}>"})
        async with world(lambda: ScriptedEnvironment(ends=False), settings=chosen) as one:
            batch = await one.batch()
            assert {tuple(read_prompt(turn.prompt_ids)[:4] for turn in rollout.turns) for rollout in rollouts(batch)} == {
                ("1/3:", "2/2:", "3/1:")
            }

    run(main())


def read_prompt(prompt_ids: Any) -> str:
    return TOKENIZER.decode(prompt_ids.tolist(), skip_special_tokens=True)


def test_an_environment_that_never_ends_ends_with_the_sequence() -> None:
    batch = run(one_batch(make=lambda: ScriptedEnvironment(ends=False), truncated="keep"))
    for rollout in rollouts(batch):
        assert rollout.finish_reason == "length"
        assert rollout.reward == 0.25 * len(rollout.turns) > 5
        assert rollout.failure is None
    assert {rollout.is_truncated for rollout in rollouts(batch)} == {True}


def test_a_turn_that_its_own_limit_cuts_acts_with_what_it_wrote() -> None:
    batch = run(one_batch(settings=config(dialogue={"max_tokens_per_turn": 3})))
    for rollout in rollouts(batch):
        assert rollout.finish_reason == "max_turns"
        assert [turn.action for turn in rollout.turns] == ["go"] * 3
        assert [turn.finish_reason for turn in rollout.turns] == ["length"] * 3
        assert [turn.is_admissible for turn in rollout.turns] == [False] * 3
        assert (rollout.metrics["truncated_turns"], rollout.metrics["admissible_share"]) == (3, 0)


@pytest.mark.parametrize(
    ("room", "turns", "acted"),
    [
        (0, 1, 1),  # the first turn fits exactly, its reply does not
        (16, 1, 1),  # the reply fits, and leaves nothing to write
        (17, 2, 1),  # one token of the second turn
        (24, 2, 1),  # all of it but the end token
        (25, 2, 2),  # all of it: what it wrote is acted on
    ],
)
def test_the_sequence_ends_a_trajectory_where_it_is_full(room: int, turns: int, acted: int) -> None:
    """A first turn of 9 tokens, a reply of 16, a second turn of 9."""

    async def main() -> None:
        seed = episode_seed(42, 0, 0)
        opening = len(f"room {seed % 97}\n>")
        chosen = config(sequence_length=opening + 9 + room, train_env_manager={"num_env_groups": 1})
        async with world(settings=chosen, truncated="keep") as one:
            batch = await one.batch(1)
            for rollout in rollouts(batch):
                assert rollout.finish_reason == "length"
                assert len(rollout.turns) == turns
                assert rollout.env_steps == acted
                assert rollout.reward == 0.25 * acted
                last = rollout.turns[-1]
                assert (last.action is None) == (last.reward is None) == (turns > acted)
            assert_samples_are_what_the_engine_gave(batch, one.engine)

    run(main())


def test_a_truncated_trajectory_is_masked_as_a_truncated_response_is() -> None:
    batch = run(one_batch(settings=config(sequence_length=30)))
    assert not any(any(group.counted) for group in batch.groups)
    assert not any(sample.loss_mask.any() for sample in samples_from_batch(batch))


def test_an_observation_that_leaves_no_token_to_write_loses_the_member_for_good() -> None:
    async def main() -> None:
        async with world(settings=config(sequence_length=5), max_resample_rounds=2) as one:
            with pytest.raises(SluiceError, match=r"observation_too_long.*sequence_length is 5"):
                await one.batch()
            ledger = one.shell.scheduler.ledger
            assert ledger.attempts["failed"] == ledger.attempts_launched - ledger.attempts["cancelled"]
            assert not one.engine.requests
            assert {record.reason for record in one.records} <= {"response_retries", "shutdown"}

    run(main())


def test_what_the_environment_says_of_a_problem_comes_with_the_rollout() -> None:
    info = {"success": True, "progress": 0.5, "drop_flag": True, "env_timeout": False, "env_failed": "yes"}
    batch = run(one_batch(make=lambda: ScriptedEnvironment(info=info, commands=None)))
    for rollout in rollouts(batch):
        assert rollout.flags == {"drop_flag"}
        assert rollout.reward == 0.75
        assert (rollout.metrics["success"], rollout.metrics["progress"]) == (1, 0.5)
        assert [turn.progress for turn in rollout.turns] == [0.5] * 3
        assert "admissible_share" not in rollout.metrics
        assert [turn.is_admissible for turn in rollout.turns] == [None] * 3


@pytest.mark.parametrize("text", ["", "x" * 20_000, "{observation}", "\x00\n\t", "<end><end>"])
def test_an_action_of_any_text_is_played(text: str) -> None:
    async def main() -> None:
        seen: list[str] = []

        def make() -> ScriptedEnvironment:
            environment = ScriptedEnvironment()
            environment.actions = seen
            return environment

        chosen = config(sequence_length=100_000, dialogue={"max_tokens_per_turn": 30_000})
        async with world(make, SayingEngine(lambda request: text), chosen) as one:
            batch = await one.batch()
            for rollout in rollouts(batch):
                assert [turn.is_admissible for turn in rollout.turns] == [False] * 3
                assert all(turn.action == turn.text.strip() for turn in rollout.turns)
            assert max(map(len, seen)) <= 8192  # what the environment is given is bounded

    run(main())


def test_an_action_that_differs_in_case_and_space_is_given_as_the_command() -> None:
    batch = run(one_batch(engine=SayingEngine(lambda request: " GO  north ")))
    for rollout in rollouts(batch):
        assert [turn.action for turn in rollout.turns] == ["go north"] * 3
        assert [turn.text for turn in rollout.turns] == [" GO  north "] * 3


# ---------------------------------------------------------------- seats


def test_a_free_environment_is_waited_for_first_come_first_served_and_none_stands_idle() -> None:
    async def main() -> None:
        order: list[int] = []
        engine = SayingEngine(lambda request: order.append(request.request_id) or "win", latency_s=1.0)  # type: ignore[func-returns-value]
        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2})
        host = DelayedHost(ScriptedEnvironment)
        async with world(engine=engine, settings=chosen, host=host) as one:
            waiting = asyncio.create_task(one.shell.next_batch(4), name="batch")
            await asyncio.sleep(0.5)
            assert one.player.metrics()["rollout/playing"] == 2
            assert one.player.metrics()["rollout/waiting"] == 6
            await waiting
            one.advance()
            assert order == sorted(order)
            assert len(host.runners) == 2  # kept, and used again
            assert asyncio.get_running_loop().time() == pytest.approx(4 * 3.0)  # reset, generation, step: no pause between
            metrics = one.player.metrics()
            assert metrics["rollout/idle_env_share"] == 0
            assert metrics["rollout/time_share/seat"] > 0.5

    run(main())


def test_the_wait_for_a_seat_is_not_in_the_time_limit() -> None:
    async def main() -> None:
        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2}, dialogue={"timeout_s": 3.5})
        async with world(
            engine=SayingEngine(lambda request: "win", latency_s=1.0), settings=chosen, host=DelayedHost(ScriptedEnvironment)
        ) as one:
            batch = await one.batch(4)
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"completed"}

    run(main())


def test_redundant_members_are_cancelled_when_the_group_is_whole_and_their_seats_are_free_at_once() -> None:
    async def main() -> None:
        engine = SayingEngine(lambda request: "win", latency_s=lambda request: 1.0 + request.request_id)
        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2, "group_size_redundancy": 2})
        async with world(engine=engine, settings=chosen) as one:
            batch = await one.batch(1)
            assert [rollout.attempt_id for rollout in rollouts(batch)] == [0, 1]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert one.player.table.seats.taken == 0
            assert one.engine.metrics()["engine/dialogues"] == 0
            assert one.shell.scheduler.ledger.attempts["cancelled"] == 2
            assert one.player.metrics()["rollout/ended/cancelled"] == 2

    run(main())


@pytest.mark.parametrize("slow", ["reset", "step"])
def test_case_62_a_whole_group_does_not_wait_for_an_environment_that_takes_a_minute(slow: str) -> None:
    """Case 62: a redundant member is in a call of its environment: it is let go at once, and its seat is free for the next group."""

    async def main() -> None:
        begun = 0

        def seconds(call: str) -> float:
            nonlocal begun
            begun += call == slow
            return 60.0 if call == slow and begun == 3 else 1.0

        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2, "group_size_redundancy": 1})
        host = DelayedHost(ScriptedEnvironment, seconds=seconds)
        async with world(engine=SayingEngine(lambda request: "win"), settings=chosen, host=host) as one:
            batch = await one.batch(1)
            assert len(rollouts(batch)) == 2
            assert asyncio.get_running_loop().time() == pytest.approx(2.0)
            await one.batch(1)
            assert asyncio.get_running_loop().time() == pytest.approx(4.0)  # all three seats played again
            assert one.shell.scheduler.ledger.attempts["cancelled"] == 2

    run(main())


@pytest.mark.parametrize("slow", ["reset", "step", "engine"])
def test_case_76_and_84_a_member_that_never_ends_costs_its_group_at_the_one_deadline(slow: str) -> None:
    """Cases 76 and 84: set-up, turns and retries share 20 seconds; then the group leaves, its seats are free and another one is played."""

    async def main() -> None:
        begun = 0

        def seconds(call: str) -> float:
            nonlocal begun
            begun += call == slow
            return 1e6 if call == slow and begun == 2 else 1.0

        engine = SayingEngine(lambda request: "win", latency_s=lambda request: 1e6 if slow == "engine" and request.request_id == 1 else 0.0)
        chosen = config(train_env_manager={"num_env_groups": 2, "group_size": 2})
        host = DelayedHost(ScriptedEnvironment, seconds=seconds)
        async with world(engine=engine, settings=chosen, host=host, group_timeout_s=20.0) as one:
            batch = await one.batch(2)
            assert asyncio.get_running_loop().time() == pytest.approx(22.0)
            assert [record.reason for record in one.records if record.outcome == "dropped"] == ["group_timeout"]
            assert {rollout.finish_reason for rollout in rollouts(batch)} == {"completed"}
            assert {group.task.entry["episode"] for group in batch.groups} == {0, 1}
            await asyncio.sleep(0)
            assert one.player.table.seats.taken == 0

    run(main())


def test_case_92_with_nobody_to_take_the_batch_trajectories_end_and_the_stop_returns() -> None:
    """Case 92: groups ahead of the batch are done, nobody asks: every seat comes free, the loop stays free, and `close` returns at once."""

    async def main() -> None:
        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2})
        async with world(engine=SayingEngine(latency_s=1.0), settings=chosen, async_generation_ratio=2.0) as one:
            asking = asyncio.ensure_future(one.shell.next_batch(1))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.sleep(1000.0)
            assert asking.cancelled()
            assert one.player.table.seats.taken == 0
            assert one.shell.scheduler.buffer.committed == 2  # and a batch is ready
            before = asyncio.get_running_loop().time()
            await one.shell.close()
            assert asyncio.get_running_loop().time() == before
            assert {record.outcome for record in one.records} == {"discarded"}

    run(main())


def test_case_64_a_trajectory_that_is_cut_in_a_turn_has_no_half_of_it() -> None:
    """Case 64: tokens, mask and log-probs end with the last whole turn; what the cut turn had sampled is counted, and no part of a row."""

    async def main() -> None:
        engine = SayingEngine(latency_s=lambda request: 1e5 if turn_of(request) == 2 else 1.0, cancel_latency_s=0.25)
        chosen = config(dialogue={"timeout_s": 20.0}, train_env_manager={"num_env_groups": 1, "group_size": 1})
        async with world(engine=engine, settings=chosen, on_member_failure="judge") as one:
            batch = await one.batch(1)
            (rollout,) = rollouts(batch)
            (sample,) = samples_from_batch(batch)
            assert (rollout.finish_reason, len(rollout.turns)) == ("timeout", 1)
            assert len(sample.completion_ids) == len(sample.loss_mask) == len(sample.inference_logprobs) == rollout.sampled_tokens == 9
            await asyncio.sleep(1.0)  # what is late has come
            assert one.shell.scheduler.ledger.total_tokens == engine.sampled_tokens("train")

    run(main())


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("call", ["reset", "step"])
@pytest.mark.parametrize("fault", ["raise", "exit", "types"])
@pytest.mark.parametrize("policy", ["replace", "judge"])
def test_a_bad_environment_is_replaced_or_judged(call: str, fault: str, policy: str) -> None:
    """The first environment of every second member is bad; the one built after it is good."""

    async def main() -> None:
        built = 0

        def make() -> ScriptedEnvironment:
            nonlocal built
            built += 1
            return ScriptedEnvironment(faults={call: fault} if built % 2 and built < 8 else {})

        async with world(make, SayingEngine(latency_s=1.0), on_member_failure=policy) as one:
            batch = await one.batch()
            good = [rollout for rollout in rollouts(batch) if rollout.failure is None]
            assert all(rollout.finish_reason == "max_turns" and rollout.reward == 0.75 for rollout in good)
            assert len({rollout.group_id for rollout in rollouts(batch)}) == 2
            bad = [rollout for rollout in rollouts(batch) if rollout.failure is not None]
            ledger = one.shell.scheduler.ledger
            if policy == "replace":
                assert not bad
                assert ledger.attempts["failed"] == 4
            else:
                assert len(bad) == 4
                assert ledger.attempts["failed"] == 0
                for rollout in bad:
                    assert rollout.failure is not None
                    assert rollout.failure.reason == "env_failed"
                    assert rollout.failure.cause == "infrastructure"
                    assert rollout.flags == {"env_failed"}
                    assert rollout.finish_reason == "env_failed"
                    assert rollout.reward is None
                    assert len(rollout.turns) == (0 if call == "reset" else 1)
                    assert all(turn.action == "go north" and turn.reward is None for turn in rollout.turns)
                samples = samples_from_batch(batch)
                assert not any(sample.loss_mask.any() for sample in samples if not sample.is_counted)
                assert [sample.is_counted for sample in samples].count(False) == 4

    run(main())


@pytest.mark.parametrize("kind", ["env_timeout", "env_failed", "env_died", "env_closed"])
@pytest.mark.parametrize("policy", ["replace", "judge"])
def test_each_kind_of_fault_is_counted_by_its_name(kind: FaultKind, policy: str) -> None:
    async def main() -> None:
        calls = 0

        def fault(call: str) -> FaultKind | None:
            nonlocal calls
            calls += 1
            return kind if calls == 11 else None

        async with world(host=DelayedHost(ScriptedEnvironment, fault=fault), on_member_failure=policy) as one:
            batch = await one.batch()
            flag = "env_timeout" if kind == "env_timeout" else "env_failed"
            if policy == "judge":
                (bad,) = [rollout for rollout in rollouts(batch) if rollout.failure is not None]
                assert (bad.failure.reason, bad.flags, bad.finish_reason) == (kind, {flag}, flag)  # type: ignore[union-attr]
            else:
                assert one.shell.scheduler.ledger.attempts["failed"] == 1
                assert not any(rollout.flags for rollout in rollouts(batch))
            assert one.player.metrics()[f"rollout/ended/{flag}"] == 1
            warnings = [message for _, message in one.shell.journal.events]  # type: ignore[attr-defined]
            assert any(kind in message and "as it was told" in message for message in warnings)

    run(main())


def test_a_replacement_plays_the_same_problem_in_the_same_group_with_the_same_seed() -> None:
    async def main() -> None:
        calls = 0

        def fault(call: str) -> FaultKind | None:
            nonlocal calls
            calls += 1
            return "env_died" if calls == 12 else None

        async with world(host=DelayedHost(ScriptedEnvironment, fault=fault)) as one:
            batch = await one.batch()
            (group,) = [group for group in batch.groups if max(rollout.attempt_id for rollout in group.rollouts) == 8]
            replaced = next(rollout for rollout in group.rollouts if rollout.attempt_id == 8)
            assert len({rollout.env_id for rollout in group.rollouts}) == 1
            seeds = {request.request_id: request.seed for request in one.engine.requests if turn_of(request) == 1}
            lost = ({*range(8)} - {rollout.attempt_id for rollout in rollouts(batch)}).pop()
            assert seeds[lost] == seeds[8]
            assert replaced.member_index == lost % 4

    run(main())


def test_siblings_that_are_given_different_problems_drop_their_group() -> None:
    async def main() -> None:
        async with world(lambda: ScriptedEnvironment(same_problem=False), SayingEngine(latency_s=1.0), max_resample_rounds=1) as one:
            with pytest.raises(SluiceError, match="different_problems"):
                await one.batch()
            assert {record.reason for record in one.records if record.outcome == "dropped"} == {"different_problems"}

    run(main())


@pytest.mark.parametrize("slow", ["engine", "reset", "step"])
@pytest.mark.parametrize("policy", ["replace", "judge"])
def test_a_trajectory_that_takes_too_long_ends_and_every_token_is_counted(slow: str, policy: str) -> None:
    async def main() -> None:
        begun = 0

        def seconds(call: str) -> float:
            nonlocal begun
            begun += call == slow
            return 1e5 if call == slow and begun == 2 else 1.0

        engine = SayingEngine(latency_s=lambda request: 1e5 if slow == "engine" and request.request_id == 3 else 1.0, cancel_latency_s=0.25)
        chosen = config(dialogue={"timeout_s": 20.0})
        async with world(
            engine=engine, settings=chosen, host=DelayedHost(ScriptedEnvironment, seconds=seconds), on_member_failure=policy
        ) as one:
            batch = await one.batch()
            over = 40.0 if slow == "reset" else 20.0  # of a call that never ends the virtual clock does not know when it began
            assert asyncio.get_running_loop().time() == pytest.approx(over if policy == "judge" else over + 7.0, abs=0.1)
            ledger = one.shell.scheduler.ledger
            if policy == "judge":
                (bad,) = [rollout for rollout in rollouts(batch) if rollout.failure is not None]
                assert (bad.finish_reason, bad.flags, bad.reward) == ("timeout", {"env_timeout"}, None)
                assert bad.failure.reason == "trajectory_timeout"  # type: ignore[union-attr]
                assert [turn.reward for turn in bad.turns] == []
            else:
                assert ledger.attempts["failed"] == 1
            assert one.player.metrics()["rollout/ended/timeout"] == 1
            await asyncio.sleep(1.0)  # what is late has come

    run(main())


def test_a_trajectory_that_never_lets_the_clock_be_looked_at_ends_at_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        class Slow(ScriptedEnvironment):
            def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, object]]:
                loop._now += 3.0  # type: ignore[attr-defined]
                return super().step(action)

        chosen = config(dialogue={"timeout_s": 5.0}, train_env_manager={"num_env_groups": 1, "group_size": 1})
        async with world(lambda: Slow(length=9), settings=chosen, on_member_failure="judge") as one:
            batch = await one.batch(1)
            (rollout,) = rollouts(batch)
            assert (rollout.finish_reason, len(rollout.turns)) == ("timeout", 2)

    run(main())


# ---------------------------------------------------------------- the engine


def test_a_generation_that_fails_loses_its_member_which_is_tried_again() -> None:
    async def main() -> None:
        engine = SayingEngine(
            latency_s=1.0, error=lambda request: "out of memory" if request.request_id == 1 and turn_of(request) == 2 else None
        )
        async with world(engine=engine) as one:
            batch = await one.batch()
            assert sorted(rollout.attempt_id for rollout in rollouts(batch)) == [0, 2, 3, 4, 5, 6, 7, 8]
            assert one.shell.scheduler.ledger.attempts["failed"] == 1

    run(main())


def test_a_request_that_can_never_be_served_loses_its_member_for_good() -> None:
    async def main() -> None:
        engine = SayingEngine(refuse=lambda request: request.request_id == 1 and turn_of(request) == 2)
        async with world(engine=engine) as one:
            batch = await one.batch()
            assert one.shell.scheduler.ledger.attempts["failed"] == 1
            assert [record.reason for record in one.records if record.outcome == "dropped"] == ["response_retries"]
            assert 1 not in {rollout.attempt_id for rollout in rollouts(batch)}

    run(main())


def test_an_engine_that_breaks_ends_the_run_with_its_reason() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0)
        async with world(engine=engine) as one:
            waiting = asyncio.ensure_future(one.batch())
            await asyncio.sleep(1.5)
            engine.break_down(ZeroDivisionError("no"))
            with pytest.raises(GenerationError, match="the engine stopped after ZeroDivisionError: no"):
                await waiting

    run(main())


def test_environments_that_are_broken_as_a_whole_end_the_run() -> None:
    async def main() -> None:
        class Broken(DelayedHost):
            def runner(self) -> Any:
                raise SluiceError("no worker can be started")

        async with world(host=Broken(ScriptedEnvironment)) as one:
            with pytest.raises(SluiceError, match="no worker can be started"):
                await one.batch()
            one.player.table.seats._made = 0

    run(main())


@pytest.mark.parametrize("rule", ["finish", "continue"])
def test_the_next_turn_takes_the_newest_weights(rule: str) -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0, on_weight_update=rule)
        async with world(engine=engine, settings=config(on_weight_update=rule)) as one:
            asyncio.get_running_loop().call_later(1.5, publish, one, 1)
            batch = await one.batch()
            for rollout in rollouts(batch):
                assert [turn.policy_version for turn in rollout.turns] == [0, 0, 1]
                assert (rollout.turns[1].token_versions is None) == (rule == "finish")
                assert rollout.policy_version == 0

    run(main())


def publish(one: World, version: int) -> None:
    one.engine.publish({}, version)
    one.shell.weights_updated(version)
    one.step = version


def test_with_restart_a_trajectory_that_began_under_older_weights_begins_anew_wherever_it_stands() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0, on_weight_update="restart")
        async with world(engine=engine, settings=config(on_weight_update="restart"), host=DelayedHost(ScriptedEnvironment)) as one:
            asyncio.get_running_loop().call_later(2.5, publish, one, 1)  # in the first step
            batch = await one.batch()
            assert {turn.policy_version for rollout in rollouts(batch) for turn in rollout.turns} == {1}
            assert min(rollout.attempt_id for rollout in rollouts(batch)) == 8
            ledger = one.shell.scheduler.ledger
            assert ledger.attempts["cancelled"] == 8
            assert ledger.attempts["failed"] == 0
            first = {request.request_id: request.seed for request in engine.requests if turn_of(request) == 1}
            assert [first[attempt] for attempt in range(8)] == [first[attempt + 8] for attempt in range(8)]  # their seeds stay

    run(main())


def test_with_restart_a_trajectory_that_has_not_begun_to_sample_goes_on() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0, on_weight_update="restart")
        async with world(engine=engine, settings=config(on_weight_update="restart"), host=DelayedHost(ScriptedEnvironment)) as one:
            asyncio.get_running_loop().call_later(0.5, publish, one, 1)  # in its reset
            batch = await one.batch()
            assert sorted(rollout.attempt_id for rollout in rollouts(batch)) == list(range(8))

    run(main())


def test_with_restart_a_trajectory_that_ended_between_an_update_and_its_news_is_begun_anew() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0, on_weight_update="restart")
        async with world(engine=engine, settings=config(on_weight_update="restart")) as one:
            asyncio.get_running_loop().call_later(1.5, engine.publish, {}, 1)  # and the shell is not told
            batch = await one.batch()
            assert {turn.policy_version for rollout in rollouts(batch) for turn in rollout.turns} == {1}
            assert all(turn.token_versions is None for rollout in rollouts(batch) for turn in rollout.turns)
            assert one.shell.scheduler.ledger.attempts["cancelled"] == 8
            one.step = 1

    run(main())


# ---------------------------------------------------------------- cancels, and what is left


@settings(max_examples=60)
@given(
    seed=st.integers(0, 100_000),
    redundancy=st.integers(0, 3),
    cancel_latency=st.sampled_from([0.0, 0.3]),
    policy=st.sampled_from(["replace", "judge"]),
    rule=st.sampled_from(["finish", "continue", "restart"]),
    ratio=st.sampled_from([0.0, 1.0]),
    timeout_s=st.sampled_from([None, 6.0]),
)
def test_cancelled_at_any_await_it_leaves_no_seat_no_dialogue_no_call_and_every_token_is_counted_once(
    seed: int, redundancy: int, cancel_latency: float, policy: str, rule: str, ratio: float, timeout_s: float | None
) -> None:
    """Random times, faults and failures; whoever waits for a batch is cancelled and asks again; the shell is closed in the middle."""

    async def main() -> None:
        random = Random(seed)
        engine = SayingEngine(
            lambda request: random.choice(["go north", "look", "win", "nonsense", ""]),
            latency_s=lambda request: random.choice([0.0, 0.1, 0.5, random.expovariate(1.0)]),
            error=lambda request: "broken" if random.random() < 0.02 else None,
            refuse=lambda request: random.random() < 0.01,
            cancel_latency_s=cancel_latency,
            on_weight_update=rule,
            max_slots=random.choice([None, 3]),
        )
        kinds: list[FaultKind] = ["env_timeout", "env_failed", "env_died"]
        host = DelayedHost(
            lambda: ScriptedEnvironment(length=3),
            seconds=lambda call: random.choice([0.0, 0.2, random.expovariate(1.0)]),
            fault=lambda call: random.choice(kinds) if random.random() < 0.05 else None,
        )
        chosen = config(
            train_env_manager={"num_env_groups": 2, "group_size": 3, "group_size_redundancy": redundancy},
            on_weight_update=rule,
            sequence_length=random.choice([60, 200]),
            dialogue={"timeout_s": timeout_s},
        )
        async with world(
            engine=engine, settings=chosen, host=host, on_member_failure=policy, async_generation_ratio=ratio, max_resample_rounds=50,
            max_response_rounds=9,
        ) as one:  # fmt: skip
            ends_at = random.expovariate(0.05)
            try:
                async with asyncio.timeout(ends_at):
                    for _ in range(3):
                        await cancelled_now_and_then(one, random)
            except TimeoutError:
                pass
            await one.shell.close()

    run(main())


async def cancelled_now_and_then(one: World, random: Random) -> None:
    while True:
        waiting = asyncio.ensure_future(one.shell.next_batch(3))
        try:
            batch, _ = await asyncio.wait_for(asyncio.shield(waiting), random.expovariate(0.2))
        except TimeoutError:
            state = one.shell.state_dict()
            assert sum(state["scheduler"]["ledger"]["tokens"].values()) == one.engine.sampled_tokens("train")
            waiting.cancel()
            await asyncio.wait([waiting])
            if waiting.cancelled():
                continue
            batch, _ = waiting.result()
        except asyncio.CancelledError:
            waiting.cancel()
            await asyncio.wait([waiting])
            raise
        for sample in samples_from_batch(batch):
            assert len(sample.completion_ids) == len(sample.loss_mask)
        one.advance()
        return


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_cancel_that_comes_in_the_moment_of_the_time_limit_is_not_swallowed(cancelled_first: bool) -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1e6)
        async with world(engine=engine, settings=config(dialogue={"timeout_s": 3.0})) as one:
            loop = asyncio.get_running_loop()
            trajectory = Trajectory(
                one.player.table, number=99, seed=1, env_seed=1, temperature=1.0, purpose="validation", let_go=lambda *_: None
            )
            task = asyncio.create_task(trajectory.play(), name="play")
            if cancelled_first:
                loop.call_at(3.0, task.cancel)
            await asyncio.sleep(1.0)
            if not cancelled_first:
                loop.call_at(3.0, task.cancel)
            await asyncio.wait([task])
            assert task.cancelled()
            assert loop.time() == pytest.approx(3.0)

    run(main())


def test_tokens_sampled_after_a_cancel_are_late_and_the_sum_still_holds() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=lambda request: 1.0 if request.request_id < 2 else 10.0, cancel_latency_s=1.0)
        chosen = config(train_env_manager={"num_env_groups": 1, "group_size": 2, "group_size_redundancy": 2})
        async with world(engine=engine, settings=chosen) as one:
            await one.batch(1)
            assert one.shell.scheduler.ledger.tokens["late"] == 0
            state = one.shell.state_dict()
            assert sum(state["scheduler"]["ledger"]["tokens"].values()) == engine.sampled_tokens("train")
            await asyncio.sleep(0.75)
            state = one.shell.state_dict()
            assert state["scheduler"]["ledger"]["tokens"]["late"] > 0
            assert sum(state["scheduler"]["ledger"]["tokens"].values()) == engine.sampled_tokens("train")
            await asyncio.sleep(1.0)
            assert one.shell.scheduler.ledger.tokens["late"] > 0

    run(main())


def test_a_resumed_run_goes_on_with_every_token_accounted_for() -> None:
    async def main() -> None:
        async with world(engine=SayingEngine(latency_s=1.0)) as one:
            await one.batch()
            waiting = asyncio.ensure_future(one.shell.next_batch(2))
            await asyncio.sleep(1.5)
            state = one.shell.state_dict()
            sampled = one.engine.sampled_tokens("train")
            assert sum(state["scheduler"]["ledger"]["tokens"].values()) == sampled
            waiting.cancel()
        async with world(engine=SayingEngine(latency_s=1.0)) as two:
            two.shell.load_state_dict(state, two.shell.source.lookup)  # type: ignore[attr-defined]
            two.records[:0] = one.records[:2]
            two.step = 1
            two.engine.publish({}, 1)
            batch = await two.batch()
            assert len(rollouts(batch)) == 8
            assert two.shell.scheduler.ledger.total_tokens == sampled + two.engine.sampled_tokens("train")
            two.engine._settled["train"] += sampled  # what an earlier engine has sampled

    run(main())


# ---------------------------------------------------------------- shell and metrics


def test_a_shell_has_a_player_or_what_single_responses_need_and_loops_make_single_responses() -> None:
    async def main() -> None:
        async with world() as one:
            with pytest.raises(SluiceError, match="got both"):
                LocalShell(
                    scheduler=one.shell.scheduler, source=one.shell.source, engine=one.engine, journal=one.shell.journal,
                    player=one.player, user_loop=object(),
                )  # fmt: skip
            with pytest.raises(SluiceError, match="needs scorer, decode, response_length and temperature"):
                LocalShell(scheduler=one.shell.scheduler, source=one.shell.source, engine=one.engine, journal=one.shell.journal)
        shell = make_shell()
        await shell.close()

    run(main())


def test_the_metrics_say_how_trajectories_ended_and_where_their_time_went() -> None:
    async def main() -> None:
        engine = SayingEngine(lambda request: "win" if request.request_id < 4 else "dance", latency_s=2.0)
        async with world(engine=engine, host=DelayedHost(ScriptedEnvironment)) as one:
            await one.batch()
            metrics = one.player.metrics()
            assert metrics["rollout/trajectories"] == 8
            assert metrics["rollout/ended/completed"] == metrics["rollout/ended/max_turns"] == 4
            assert metrics["rollout/turns/mean"] == (4 * 1 + 4 * 3) / 8
            assert metrics["rollout/env_steps"] == 16
            assert metrics["rollout/admissible_share"] == 4 / 16
            assert metrics["rollout/truncated_turns"] == 0
            engine_share, environment_share = metrics["rollout/time_share/engine"], metrics["rollout/time_share/environment"]
            assert engine_share == pytest.approx(16 * 2 / (16 * 2 + 16 + 8))
            assert environment_share + metrics["rollout/time_share/seat"] == pytest.approx(24 / 56, abs=0.01)
            assert metrics["rollout/time_share/own"] == pytest.approx(0.0, abs=1e-9)

    run(main())


def test_requests_of_the_null_engine_stand_for_those_of_every_engine() -> None:
    """The fake engine keeps the real one's rules for dialogues: a second request at the same time would be refused."""

    async def main() -> None:
        engine = NullEngine()
        request = GenerationRequest(request_id=1, prompt_ids=np.array([3]), max_new_tokens=4, temperature=1.0, seed=1, dialogue_id=1)
        await engine.submit(request).future
        assert engine.metrics()["engine/dialogues"] == 1
        engine.end_dialogue(1)
        assert engine.metrics()["engine/dialogues"] == 0

    run(main())
