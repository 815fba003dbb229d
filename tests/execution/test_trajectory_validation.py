"""Held-out evaluation by trajectories: one result per episode and repeat, faults apart from zeros, drops counted or applied."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.environments import EnvironmentHost
from sluice.environments.base import FaultKind
from sluice.errors import FilterError, GenerationError, SluiceError
from sluice.execution.clock import run
from sluice.execution.dialogue import build_dialogue_format
from sluice.execution.trajectories import TrajectoryPlayer
from sluice.execution.trajectory_validation import validate_trajectories
from sluice.execution.validation import ValidationResult
from sluice.tasks import held_out_episodes
from sluice.types import Group, Task, Verdict
from tests.execution.playing import DOMAIN, TOKENIZER, Host, SayingEngine, config, read
from tests.fakes import DelayedHost, ScriptedEnvironment


@asynccontextmanager
async def played(engine: SayingEngine, host: Host | None = None, **changes: Any) -> Any:
    chosen = config(**changes)
    async with host or EnvironmentHost(chosen.environment, build=ScriptedEnvironment) as opened:
        player = TrajectoryPlayer(chosen, host=opened, engine=engine, dialogue=build_dialogue_format(chosen.dialogue, TOKENIZER), seed=7)
        yield player
        assert player.table.seats.taken == player.table.seats.waiting == 0
        assert player.table.seats.idle_share == 0
    assert engine.metrics()["engine/dialogues"] == 0


async def evaluate(
    engine: SayingEngine, *, episodes: int = 3, host: Host | None = None, changes: dict[str, Any] | None = None, **given: Any
) -> ValidationResult:
    tasks = held_out_episodes(DOMAIN, episodes)
    async with played(engine, host, **(changes or {})) as player:
        results = await validate_trajectories(tasks, player, **given)
        assert list(results) == [DOMAIN]
        return results[DOMAIN]


def test_every_episode_is_played_once_per_repeat_under_the_purpose_of_validation() -> None:
    engine = SayingEngine(latency_s=1.0)
    seen: list[tuple[int, int]] = []
    result = run(evaluate(engine, repeats=4, on_result=lambda done, total: seen.append((done, total))))
    assert (result.items, result.scored, result.unscored) == (12, 12, {})
    assert result.mean == pytest.approx(0.75)
    assert engine.sampled_tokens("train") == 0
    assert result.sampled_tokens == engine.sampled_tokens("validation") == 12 * 3 * 9
    assert {request.temperature for request in engine.requests} == {0.0}
    assert len({request.dialogue_id for request in engine.requests}) == 12
    assert seen == [(done, 12) for done in range(1, 13)]
    assert (result.rejected, result.accepted, result.would_reject, result.truncated) == (0, 12, {}, 0)


def test_scores_beside_the_reward_are_means_over_the_results_that_have_them() -> None:
    calls = 0

    def make() -> ScriptedEnvironment:
        nonlocal calls
        calls += 1
        return ScriptedEnvironment(info={"success": calls <= 1} if calls <= 2 else {})

    engine = SayingEngine(lambda request: "win" if request.dialogue_id == 0 else "go north", latency_s=1.0)
    result = run(evaluate(engine, host=EnvironmentHost(config().environment, build=make)))
    assert result.metrics["success"] == 0.5
    assert result.metrics["turns"] == pytest.approx((1 + 3 + 3) / 3)
    assert result.mean == pytest.approx((1.0 + 0.75 + 0.75) / 3)


@settings(max_examples=25)
@given(
    seats=st.integers(1, 3),
    group=st.integers(1, 4),
    episodes=st.integers(1, 5),
    repeats=st.integers(1, 4),
    fault_share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_results_are_exactly_one_each_however_few_seats_there_are_and_whatever_fails(
    seats: int, group: int, episodes: int, repeats: int, fault_share: float, seed: int
) -> None:
    async def main() -> None:
        random = Random(seed)
        host = DelayedHost(
            ScriptedEnvironment,
            seconds=lambda call: random.expovariate(1.0),
            fault=lambda call: "env_died" if random.random() < fault_share else None,
        )
        engine = SayingEngine(latency_s=lambda request: random.expovariate(1.0))
        changes = {"train_env_manager": {"num_env_groups": seats, "group_size": group}}
        result = await evaluate(engine, episodes=episodes, host=host, changes=changes, repeats=repeats)
        assert result.items == episodes * repeats == result.scored + sum(result.unscored.values())
        assert set(result.unscored) <= {"env_died"}
        assert len(host.runners) <= seats * group
        assert result.sampled_tokens == engine.sampled_tokens("validation")
        if fault_share == 1.0:
            assert result.mean is None

    run(main())


def test_a_fault_is_tried_once_more_with_the_same_seeds_and_then_unscored_by_its_reason() -> None:
    def faults(numbers: set[int]) -> Callable[[str], FaultKind | None]:
        calls = 0

        def fault(call: str) -> FaultKind | None:
            nonlocal calls
            calls += call == "reset"
            return "env_timeout" if call == "step" and calls in numbers else None

        return fault

    for numbers, scored in (({1}, 1), ({1, 2}, 0)):
        engine = SayingEngine()
        host = DelayedHost(ScriptedEnvironment, fault=faults(numbers))
        result = run(evaluate(engine, episodes=1, host=host))
        assert (result.items, result.scored) == (1, scored)
        assert result.unscored == ({} if scored else {"env_timeout": 1})
        assert (result.details == {}) == bool(scored)
        first, second = [request for request in engine.requests if "room" in read(request)]
        assert first.seed == second.seed
        assert first.dialogue_id != second.dialogue_id


def test_an_engine_that_fails_once_is_asked_again_and_one_that_fails_everything_is_broken() -> None:
    once = SayingEngine(latency_s=1.0, error=lambda request: "hiccup" if request.request_id == 1 else None)
    assert run(evaluate(once)).scored == 3
    some = SayingEngine(latency_s=1.0, error=lambda request: "broken" if request.request_id in (1, 2, 8, 9) else None)
    assert run(evaluate(some, episodes=8)).unscored == {"engine_error": 2}
    with pytest.raises(GenerationError, match="failed every trajectory of an evaluation: GenerationError: broken"):
        run(evaluate(SayingEngine(latency_s=1.0, error=lambda request: "broken")))


def test_an_engine_that_is_closed_ends_the_evaluation() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=1.0)
        asyncio.get_running_loop().call_later(2.5, engine.close)
        await evaluate(engine)

    with pytest.raises(GenerationError, match="closed"):
        run(main())


def test_a_request_that_is_refused_is_unscored_and_not_asked_again() -> None:
    engine = SayingEngine(refuse=lambda request: request.request_id == 0)
    result = run(evaluate(engine))
    assert result.unscored == {"request_refused": 1}
    assert result.scored == 2


def test_what_is_truncated_is_scored_and_counted() -> None:
    result = run(evaluate(SayingEngine(), changes={"sequence_length": 30}))
    assert (result.truncated, result.scored) == (3, 3)


class DropsEpisode:
    """A group filter that drops one episode; remembers what it was shown."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.groups: list[Group] = []

    def judge(self, group: Group, /) -> Verdict:
        self.groups.append(group)
        return Verdict.dropped("too_easy", "low_information", "mine") if group.task.task_id == self.task_id else Verdict.kept("mine")


@pytest.mark.parametrize("filtering", ["record", "apply"])
def test_a_group_filter_sees_every_episode_whole_and_its_drops_are_counted_or_applied(filtering: Any) -> None:
    tasks = held_out_episodes(DOMAIN, 3)
    judge = DropsEpisode(tasks[1].task_id)
    engine = SayingEngine(lambda request: "win" if request.dialogue_id in (2, 3) else "go north", latency_s=1.0)
    result = run(evaluate(engine, repeats=2, group_filter=judge, filtering=filtering))
    assert [len(group.rollouts) for group in judge.groups] == [2, 2, 2]
    assert [[rollout.member_index for rollout in group.rollouts] for group in judge.groups] == [[0, 1]] * 3
    assert all(all(group.counted) for group in judge.groups)
    assert result.items == 6
    assert result.would_reject == {"too_easy": 2}
    if filtering == "record":
        assert (result.rejected, result.accepted, result.scored) == (0, 6, 6)
        assert result.mean == pytest.approx((4 * 0.75 + 2 * 1.0) / 6)
    else:
        assert (result.rejected, result.accepted, result.scored) == (2, 4, 4)
        assert result.mean == pytest.approx(0.75)
        assert result.metrics["turns"] == 3
    assert result.sampled_tokens == engine.sampled_tokens("validation")


class NoSpread:
    """Drops what a training run would not train on."""

    def judge(self, group: Group, /) -> Verdict:
        if None in [rollout.reward for rollout in group.rollouts]:
            return Verdict.dropped("incomplete", "invalid", "mine")
        spread = len({rollout.reward for rollout in group.rollouts}) > 1
        return Verdict.kept("mine") if spread else Verdict.dropped("no_spread", "low_information", "mine")


@pytest.mark.parametrize("group_filter", [None, NoSpread()])
def test_case_138_an_evaluation_sees_every_episode_and_repeat_once_and_refills_nothing(group_filter: Any) -> None:
    """Case 138: outcomes [1, 1], [0.75, 0.75], [1, 0.75] and failed: the mean is over the six that have one, whatever a filter says."""
    wins = {0, 1, 4}
    engine = SayingEngine(lambda request: "win" if request.dialogue_id in wins else "go north", latency_s=1.0)
    begun = 0

    def fault(call: str) -> FaultKind | None:
        nonlocal begun
        begun += call == "reset"
        return "env_died" if call == "reset" and begun > 6 else None

    changes = {"train_env_manager": {"num_env_groups": 1, "group_size": 1}}  # one after another
    host = DelayedHost(ScriptedEnvironment, fault=fault)
    result = run(evaluate(engine, episodes=4, repeats=2, host=host, changes=changes, group_filter=group_filter))
    assert (result.items, result.scored, result.unscored) == (8, 6, {"env_died": 2})
    assert result.reward_sum == pytest.approx(3 * 1.0 + 3 * 0.75)
    assert result.mean == pytest.approx(5.25 / 6)
    assert result.would_reject == ({} if group_filter is None else {"no_spread": 4, "incomplete": 2})
    assert result.rejected == 0
    assert begun == 6 + 2 * 2  # a fault of the machinery is tried once more, and nothing is played in its place


def test_a_group_filter_is_shown_members_without_a_reward() -> None:
    judge = DropsEpisode("none")
    result = run(
        evaluate(
            SayingEngine(),
            episodes=1,
            repeats=2,
            host=DelayedHost(ScriptedEnvironment, fault=lambda call: "env_failed"),
            group_filter=judge,
        )
    )
    assert result.unscored == {"env_failed": 2}
    (group,) = judge.groups
    assert group.counted == (False, False)
    assert {rollout.flags for rollout in group.rollouts} == {frozenset({"env_failed"})}


def test_a_group_filter_that_breaks_names_the_episode() -> None:
    class Breaks:
        def judge(self, group: Group, /) -> Verdict:
            raise ZeroDivisionError("no")

    with pytest.raises(FilterError, match=r"the group filter failed on the held-out episode '.*': no"):
        run(evaluate(SayingEngine(), group_filter=Breaks()))


def test_an_evaluation_that_is_cancelled_leaves_no_seat_and_no_dialogue() -> None:
    async def main() -> None:
        engine = SayingEngine(latency_s=3.0, cancel_latency_s=0.5)
        async with played(engine, DelayedHost(ScriptedEnvironment)) as player:
            task = asyncio.create_task(validate_trajectories(held_out_episodes(DOMAIN, 5), player, repeats=4), name="evaluation")
            await asyncio.sleep(2.0)
            assert player.table.seats.taken == 8
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(1.0)
            assert engine.open_requests == 0

    run(main())


def test_environments_that_are_broken_as_a_whole_end_the_evaluation() -> None:
    class Broken(DelayedHost):
        def runner(self) -> Any:
            raise SluiceError("no worker can be started")

    with pytest.raises(SluiceError, match="no worker can be started"):
        run(evaluate(SayingEngine(), host=Broken(ScriptedEnvironment)))


def test_the_same_evaluation_gives_the_same_result_whatever_finishes_first() -> None:
    def once(latency_s: float) -> ValidationResult:
        engine = SayingEngine(
            lambda request: "win" if request.seed % 2 else "go north", latency_s=lambda request: request.seed % 7 * latency_s
        )
        return run(evaluate(engine, episodes=9, repeats=3, temperature=0.7, seed=5))

    first, second = once(0.1), once(0.0)
    assert first.reward_sum == second.reward_sum
    assert first.metrics["turns"] == second.metrics["turns"]


def test_nothing_to_evaluate_is_no_result() -> None:
    async def main() -> dict[str, ValidationResult]:
        async with played(SayingEngine()) as player:
            tasks: list[Task] = []
            return await validate_trajectories(tasks, player)

    assert run(main()) == {}
