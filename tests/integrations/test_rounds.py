"""The player of rounds: full batches or a bound, every group and token accounted for, and the same whoever plays it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.errors import ResampleError, SchedulerBug
from sluice.filters import RatioGuard
from sluice.gate import Gate, GateKeeper
from sluice.integrations.rounds import Filled, RoundPlayer
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.scheduler.gating import MachineGate
from sluice.types import Rollout, Task
from tests.fakes import ListSource, make_filters, make_rollout, make_task

Script = list[float | None]


class Prompts(ListSource):
    """A list that is given the task itself back."""

    def put_back(self, task: Task, epoch: int) -> None:  # type: ignore[override]
        super().put_back(task.task_id, epoch)


class Scripted:
    """Answers each round with the next rewards of a script, over and over."""

    def __init__(self, script: Script) -> None:
        self.rewards = itertools.cycle(script)
        self.launches: list[list[ev.LaunchMember]] = []

    def __call__(self, launches: Sequence[ev.LaunchMember]) -> list[Rollout]:
        self.launches.append(list(launches))
        return [make_rollout(launch, next(self.rewards), tokens=1 + launch.member_index) for launch in launches]


def player_of(script: Script, **settings: Any) -> tuple[RoundPlayer, Scripted, Prompts]:
    sample = Scripted(script)
    source = Prompts(make=lambda index: make_task(f"t{index}"))
    response = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})
    guard = RatioGuard(max_filter_ratio=0.8) if settings.pop("guarded", False) else None
    machine = Scheduler(SchedulerConfig(group_size=2, **settings), make_filters(response=response, group_size=2), guard=guard)
    return RoundPlayer(machine, source, sample, lambda _: None), sample, source


rewards = st.sampled_from([0.0, 1.0, 0.5, 2.0, None])


@given(
    st.lists(rewards, min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["raise", "shrink", "keep_low_information"]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_batch_is_full_or_a_bound_ends_it_and_everything_is_accounted_for(
    script: Script, groups: int, policy: Any, additional: int, guarded: bool
) -> None:
    played = []
    for _ in range(2):
        player, sample, source = player_of(
            script,
            max_resample_rounds=3,
            max_response_rounds=2,
            on_exhausted=policy,
            max_additional_running_prompts=additional,
            guarded=guarded,
        )
        seen: list[Filled] = []
        try:
            for _ in range(2):
                seen.append(player.fill(groups))
                player.trained(0, 0)
        except ResampleError:
            player.machine.handle(ev.Shutdown(), 1e9)  # what was kept waits for whoever asks again
        for filled in seen:
            spares = [record for record in filled.records if (record.outcome, record.category) == ("dropped", "low_information")]
            may_be_short = policy == "shrink" or (policy == "keep_low_information" and not spares)  # broken groups never top up
            assert len(filled.batch.groups) == groups or (may_be_short and filled.batch.groups)
            assert len({group.group_id for group in filled.batch.groups}) == len(filled.batch.groups)
        machine = player.machine
        assert machine.running_attempts == 0
        sampled = sum(1 + launch.member_index for launches in sample.launches for launch in launches)
        assert machine.ledger.total_tokens == sampled
        assert machine.open_groups == 0
        launched = sum(machine.ledger.groups.values())  # what was drawn for a batch that was full by then came back
        assert launched <= len(source.drawn) <= launched + len(source.returned)
        ids = [[(launch.group_id, launch.member_index) for launch in launches] for launches in sample.launches]
        played.append((ids, [[group.group_id for group in filled.batch.groups] for filled in seen], machine.ledger.state_dict()))
    assert played[0] == played[1]


def test_new_groups_stand_side_by_side_in_a_round() -> None:
    player, sample, _ = player_of([0.0, 0.0, 1.0, 0.0])
    player.fill(3)
    for launches in sample.launches:
        assert [launch.member_index for launch in launches] == [0, 1] * (len(launches) // 2)
        assert all(first.group_id == second.group_id for first, second in itertools.pairwise(launches[::1]) if second.member_index == 1)


def test_replacements_are_sampled_together_in_the_next_round() -> None:
    player, sample, _ = player_of([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    filled = player.fill(3)
    assert [len(launches) for launches in sample.launches] == [6, 4]
    assert filled.rounds == 2
    assert filled.metrics["scheduler/group_filter_count"] == 2


def test_a_member_of_a_cut_group_is_not_waited_for() -> None:
    machine = Scheduler(
        SchedulerConfig(group_size=2),
        make_filters(FilterConfig(type="no_filter"), group_size=2),
        gate=MachineGate(GateKeeper(Gate(k=2, threshold=0.5), group_size=2, audit_rate=0.0)),
    )
    source = Prompts(make=lambda index: make_task(f"t{index}"))
    cut: list[list[bool]] = []

    def sample(launches: Sequence[ev.LaunchMember]) -> list[Rollout]:
        for step in (1, 2):
            for launch in launches:
                if not player.is_cut(launch.attempt_id):
                    action = "same" if launch.task.task_id == "t0" else f"{launch.member_index}"
                    player.stepped(launch.attempt_id, step, action, "")
        cut.append([player.is_cut(launch.attempt_id) for launch in launches])
        return [make_rollout(launch, 1.0) for launch in launches]

    player = RoundPlayer(machine, source, sample, lambda _: None)
    filled = player.fill(2)
    assert cut == [[True, True, False, False], [False, False]]
    assert [group.task.task_id for group in filled.batch.groups] == ["t1", "t2"]
    assert machine.ledger.tokens["cut"] == 4


def test_a_member_that_ends_by_itself_may_be_what_the_decision_waited_for() -> None:
    machine = Scheduler(
        SchedulerConfig(group_size=3, max_resample_rounds=1, on_exhausted="shrink"),
        make_filters(FilterConfig(type="no_filter"), group_size=3),
        gate=MachineGate(GateKeeper(Gate(k=2, threshold=0.5), group_size=3, audit_rate=0.0)),
    )
    seen: list[list[bool]] = []

    def sample(launches: Sequence[ev.LaunchMember]) -> list[Rollout]:
        for start in range(0, len(launches), 3):
            *others, early = [launch.attempt_id for launch in launches[start : start + 3]]
            action = "same" if start == 0 else ""
            for attempt_id in others:
                for step in (1, 2):
                    player.stepped(attempt_id, step, action or f"{attempt_id}", "")
            player.stepped(early, 1, action or "other", "")
            before = [player.is_cut(launch.attempt_id) for launch in launches[start : start + 3]]
            player.ended(early)
            player.ended(early)  # once is enough, and twice does no harm
            seen.extend([before, [player.is_cut(launch.attempt_id) for launch in launches[start : start + 3]]])
        return [make_rollout(launch, 1.0) for launch in launches]

    player = RoundPlayer(machine, Prompts(make=lambda index: make_task(f"t{index}")), sample, lambda _: None)
    filled = player.fill(2)
    assert seen == [[False] * 3, [True] * 3, [False] * 3, [False] * 3]
    assert [group.task.task_id for group in filled.batch.groups] == ["t1"]
    player.ended(0)  # of a round that is over: nobody is there to be told
    with pytest.raises(SchedulerBug, match="attempt 99 ended, but was never launched"):
        player.ended(99)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(SchedulerBug, match="async_generation_ratio 0"):
        player_of([1.0], async_generation_ratio=1.0)
    player, _, _ = player_of([1.0, 0.0])
    player._sample = lambda _: []
    with pytest.raises(SchedulerBug, match="one rollout for each of 2 launches, got 0"):
        player.fill(1)
