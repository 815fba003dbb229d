"""Groups of trajectories in the machine: episodes of environment groups, members that step, and faults of other systems."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.advantage import group_relative
from sluice.config.models import FilterConfig
from sluice.environments import episode_seed
from sluice.errors import FilterError, SchedulerBug
from sluice.filters import DomainFilters, RatioGuard
from sluice.filters.base import Filter
from sluice.filters.context import FilterContext
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.tasks import EpisodeTasks
from sluice.types import Failure, Flag, Group, Rollout, RolloutFinish, Turn, Verdict
from tests.fakes import NO_FILTER, STD_FILTER, MachinePlayer, make_filters, make_turn

DOMAIN = "household"


@dataclass
class Trajectories(MachinePlayer):
    """Plays a machine whose members are trajectories: each takes steps, and tells the machine of every one."""

    turns: dict[int, list[Turn]] = field(default_factory=dict)  # attempt_id -> what it has done so far
    steps_told: int = 0  # while the attempt was under way

    @classmethod
    def of(
        cls,
        num_env_groups: int = 4,
        *,
        query: FilterConfig | Filter[Any] = STD_FILTER,
        response: FilterConfig | None = None,
        guard: RatioGuard | None = None,
        source: EpisodeTasks | None = None,
        **settings: Any,
    ) -> Trajectories:
        config = SchedulerConfig(**{"group_size": 2, **settings})
        if isinstance(query, Filter):
            filters: Any = {DOMAIN: DomainFilters(query=query, response=None)}
        else:
            filters = make_filters(query, response, group_size=config.group_size, domains=(DOMAIN,), min_members=config.min_members)
        return cls(Scheduler(config, filters, guard=guard), source or EpisodeTasks(DOMAIN, num_env_groups, seed=1))  # type: ignore[arg-type]

    def act(self, attempt_id: int, reward: float = 0.0, action: str = "look", *, observation: str | None = None, **more: Any) -> None:
        """One turn: the policy acts, and its environment answers. more: further fields of the event."""
        turns = self.turns.setdefault(attempt_id, [])
        observation = f"observation {len(turns)}" if observation is None else observation
        version = turns[0].policy_version if turns else self.scheduler.step
        turn = dataclasses.replace(make_turn(version=version), observation=observation, action=action, is_admissible=True, reward=reward)
        turns.append(turn)
        self.engine_tokens += len(turn.token_ids) if attempt_id not in self.pending else 0  # counted at its end otherwise
        self.steps_told += attempt_id in self.pending
        self.tell(ev.MemberStepped(attempt_id=attempt_id, env_step=len(turns), action=action, observation=observation, **more))

    def end(
        self,
        attempt_id: int,
        *,
        finish_reason: RolloutFinish = "completed",
        flags: Iterable[Flag] = (),
        failure: str = "",
        env_id: str | None = None,
        reward: float | None = None,
    ) -> Rollout:
        """The trajectory is delivered. Its reward is the sum over its steps; with a failure it has none."""
        rollout = self.rollout(attempt_id, finish_reason=finish_reason, flags=flags, failure=failure, env_id=env_id, reward=reward)
        del self.pending[attempt_id]
        self.engine_tokens += rollout.sampled_tokens
        self.tell(ev.MemberFinished(rollout=rollout))
        return rollout

    def rollout(
        self,
        attempt_id: int,
        *,
        finish_reason: RolloutFinish = "completed",
        flags: Iterable[Flag] = (),
        failure: str = "",
        env_id: str | None = None,
        reward: float | None = None,
    ) -> Rollout:
        launch = next(launch for launch in self.launches if launch.attempt_id == attempt_id)
        turns = tuple(self.turns.get(attempt_id, ()))
        if reward is None and not failure:
            reward = sum([turn.reward or 0.0 for turn in turns])
        place = launch.task.entry
        return Rollout(
            attempt_id=attempt_id,
            group_id=launch.group_id,
            member_index=launch.member_index,
            task_id=launch.task.task_id,
            turns=turns,
            finish_reason=finish_reason,
            reward=reward,
            failure=Failure(cause="infrastructure", reason=failure) if failure else None,
            flags=frozenset(flags),
            env_id=env_id or f"problem {episode_seed(1, place['env_group'], place['episode'])}",
            task_type="pick_and_place",
        )

    def fault(self, attempt_id: int, reason: str = "env_timeout") -> None:
        """Its environment fails: nothing is delivered."""
        self.fail(attempt_id, tokens=self.sampled(attempt_id), reason=reason)

    def sampled(self, attempt_id: int) -> int:
        return sum(len(turn.token_ids) for turn in self.turns.get(attempt_id, ()))

    def run(self, attempt_id: int, *rewards: float, **end: Any) -> Rollout:
        """A whole trajectory, one step for each reward."""
        for reward in rewards:
            self.act(attempt_id, reward)
        return self.end(attempt_id, **end)

    def run_group(self, group_id: int, *rewards: float) -> None:
        """Trajectories of one step for all members of a group."""
        for attempt_id, reward in zip(self.members(group_id), rewards, strict=True):
            self.run(attempt_id, reward)

    def acknowledge(self, attempt_id: int, tokens: int = 1) -> list[ev.Instruction]:
        return super().acknowledge(attempt_id, self.sampled(attempt_id))

    def episode_of(self, group_id: int) -> tuple[int, int]:
        """(environment group, episode) of a group of the machine."""
        entry = next(launch.task.entry for launch in self.launches if launch.group_id == group_id)
        return entry["env_group"], entry["episode"]

    def episodes(self) -> list[tuple[int, int]]:
        """Those of all groups in the order of their launch."""
        return [self.episode_of(group_id) for group_id in sorted({launch.group_id for launch in self.launches})]


# ---------------------------------------------------------------- the way of a trajectory group


def test_a_batch_holds_whole_trajectories_turn_by_turn():
    player = Trajectories.of()
    player.want(1)
    player.run(1, 0.0, 1.0)
    player.run(0, 0.0, 0.0, 0.0, finish_reason="max_turns")
    (batch,) = player.batches
    (group,) = batch.groups
    assert group.task.entry == {"env_group": 0, "episode": 0}
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 2]
    assert [rollout.env_steps for rollout in group.rollouts] == [3, 2]
    assert [turn.observation for turn in group.rollouts[1].turns] == ["observation 0", "observation 1"]
    assert list(group.rewards) == [0.0, 1.0]  # sums over steps
    assert group.counted == (True, True)  # the environment's limit is an ordinary end
    assert group.sampled_tokens == 2 * 5


def test_the_record_of_a_group_counts_the_steps_of_all_its_attempts():
    player = Trajectories.of(redundancy=1)
    player.want(1)
    player.act(2)
    player.act(2)
    player.act(0)
    player.fault(0)  # the redundant one makes up for it
    player.run(1, 0.0)
    player.run(2, 1.0)
    player.advance()
    record = player.record_of(0)
    assert (record.outcome, record.env_steps, record.task_type) == ("trained", 5, "pick_and_place")
    assert record.rewards == (None, 0.0, 1.0)
    assert record.sampled_tokens == 2 * 5
    assert player.steps_told == 5


def test_steps_of_a_cancelled_member_count_until_its_cancel_is_acknowledged():
    player = Trajectories.of(redundancy=1)
    player.hold_acks = True
    player.want(1)
    player.act(2)
    player.run(0, 0.0)
    player.run(1, 1.0)
    player.act(2)  # its cancel is on its way
    assert player.records == []
    player.acknowledge_all()
    player.tell(ev.MemberStepped(attempt_id=2, env_step=3, action="look", observation=""))  # too late: counted as such, and only there
    player.advance()
    assert player.record_of(0).env_steps == 4
    assert player.scheduler.ledger.late_results == 1
    assert player.scheduler.ledger.tokens["cancelled"] == 4


def test_a_step_of_an_attempt_that_was_never_launched_is_a_bug():
    player = Trajectories.of()
    player.want(1)
    with pytest.raises(SchedulerBug, match="attempt 2 stepped, but was never launched"):
        player.scheduler.handle(ev.MemberStepped(attempt_id=2, env_step=1, action="", observation=""), 0.0)


def test_new_episodes_are_opened_in_turn_and_a_replacement_is_the_next_in_turn():
    player = Trajectories.of(3)
    player.want(4)
    assert player.episodes() == [(0, 0), (1, 0), (2, 0), (0, 1)]
    player.run_group(1, 0.0, 0.0)
    assert player.episodes()[4:] == [(1, 1)]
    assert player.record_of(1).reason == "no_spread"
    assert player.scheduler.prompts.later == []  # it was judged: its episode is not played again


def test_all_members_of_an_episode_have_one_task_and_seeds_of_their_own():
    player = Trajectories.of(2, group_size=3)
    player.want(2)
    by_group = Counter((launch.group_id, launch.task.task_id) for launch in player.launches)
    assert by_group == {(0, "household/g0/e0"): 3, (1, "household/g1/e0"): 3}
    assert len({launch.seed for launch in player.launches}) == 6


def test_members_of_a_replacement_are_all_launched_at_once():
    """Elsewhere the environments of a replaced group played one after another."""
    player = Trajectories.of(group_size=4, redundancy=1)
    player.want(2)
    for attempt_id in player.members(0)[:3]:
        player.run(attempt_id, 1.0)
    before = player.now
    player.run(player.members(0)[0], 1.0)
    assert player.now == before + 2  # of a step, and of an end
    assert len(player.members(2)) == 5


@given(
    data=st.data(),
    groups=st.integers(1, 5),
    size=st.integers(1, 3),
    redundancy=st.integers(0, 2),
    batch=st.integers(1, 3),
    ratio=st.sampled_from([0.0, 0.5, 1.0]),
    mode=st.sampled_from(["replace", "judge"]),
)
def test_whatever_befalls_trajectories_steps_are_counted_once_and_environment_groups_served_alike(
    data: st.DataObject, groups: int, size: int, redundancy: int, batch: int, ratio: float, mode: Any
):
    player = Trajectories.of(
        groups,
        query=NO_FILTER if size == 1 else STD_FILTER,
        group_size=size,
        redundancy=redundancy,
        async_generation_ratio=ratio,
        on_member_failure=mode,
        max_response_rounds=3,
        max_resample_rounds=1000,
        group_timeout_s=200.0,
        on_exhausted="shrink",
    )
    player.hold_acks = data.draw(st.booleans())
    for _ in range(40):
        if player.scheduler.filling is None:
            if player.batches and player.batches[-1].step == player.scheduler.step:
                player.step()
            if data.draw(st.booleans()):
                player.want(batch)
        running = sorted(set(player.pending) - set(player.acks))
        how = data.draw(st.sampled_from(["act", "act", "end", "end", "fault", "failed", "lost", "ack", "wait"]))
        if how == "ack":
            player.acknowledge_all()
        elif how == "wait":
            player.sleep(data.draw(st.sampled_from([1.0, 150.0])))
        elif running:
            attempt_id = data.draw(st.sampled_from(running))
            match how:
                case "act":
                    player.act(attempt_id, reward=data.draw(st.sampled_from([0.0, 1.0])))
                case "end":
                    player.end(attempt_id)
                case "fault":
                    player.fault(attempt_id)
                case "failed":
                    player.end(attempt_id, failure="env_failed", finish_reason="env_failed", flags=["env_failed"])
                case "lost":
                    player.lose_worker([attempt_id], tokens=player.sampled(attempt_id))
        opened = Counter(task.entry["env_group"] for task in player.source.lookup.values())  # type: ignore[union-attr]
        assert max(opened[group] for group in range(groups)) - min(opened[group] for group in range(groups)) <= 1
    player.tell(ev.Shutdown())
    player.acknowledge_all()
    assert not player.pending
    assert sum(record.env_steps for record in player.records) == player.steps_told
    assert {record.task_type for record in player.records} <= {None, "pick_and_place"}
    for record in player.records:
        if record.outcome == "trained" and size > 1:
            assert len({reward for reward in record.rewards if reward is not None}) > 1


# ---------------------------------------------------------------- members that fail


@pytest.mark.parametrize("reason", ["env_timeout", "env_failed", "env_died", "env_closed", "trajectory_timeout"])
def test_a_member_whose_environment_fails_is_played_again_in_the_same_group_with_the_same_task_and_seed(reason: str):
    player = Trajectories.of()
    player.want(1)
    first = player.pending[1]
    player.act(1)
    player.fault(1, reason)
    again = player.launches[-1]
    assert (again.group_id, again.member_index, again.task, again.seed) == (0, 1, first.task, first.seed)
    player.run(0, 1.0)
    player.run(again.attempt_id, 0.0)
    assert player.trained() == [[0]]
    assert player.metrics[0][f"batch/rejected_members/{reason}"] == 1
    assert player.source.state_dict()["put_back"] == []


def test_a_worker_that_dies_takes_members_of_several_groups_and_each_is_replaced_in_its_own():
    player = Trajectories.of(group_size=2)
    player.want(2)
    for attempt_id in (1, 2):
        player.act(attempt_id)
    player.lose_worker([1, 2], tokens=2)
    assert [(launch.group_id, launch.member_index) for launch in player.launches[4:]] == [(0, 1), (1, 0)]
    assert [launch.seed for launch in player.launches[4:]] == [player.launches[1].seed, player.launches[2].seed]
    for group_id in (0, 1):
        player.run_group(group_id, 0.0, 1.0)
    player.advance()
    assert [record.env_steps for record in player.records] == [3, 3]


def test_a_group_whose_environments_fail_again_and_again_is_dropped_and_its_episode_comes_back_once():
    player = Trajectories.of(max_response_rounds=2)
    player.want(1)
    player.lose_group(0)
    assert player.left() == [(0, "dropped", "response_retries")]
    assert player.record_of(0).category == "invalid"
    player.run_group(1, 0.0, 1.0)
    player.step()
    player.want(1)
    assert player.episodes() == [(0, 0), (1, 0), (0, 0)]
    player.lose_group(2)
    player.run_group(3, 0.0, 1.0)
    player.step()
    player.want(1)
    assert player.episodes()[3:] == [(2, 0), (3, 0)]  # not a third time


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("env_failed", "see why environments hang or fail"),
        ("env_died", "see why environments hang or fail"),
        ("trajectory_timeout", "see why environments hang or fail"),
        ("observation_too_long", "raise sequence_length, or shorten what the environment says"),
        ("engine_error", "put the verifier or the engine right"),
    ],
)
def test_when_the_bound_is_reached_the_message_says_what_to_put_right(reason: str, advice: str):
    player = Trajectories.of(max_response_rounds=1, max_resample_rounds=2)
    player.want(1)
    for group_id in range(2):
        player.fault(player.members(group_id)[0], reason)
    (message,) = player.failures
    assert f"responses rejected: {reason} " in message
    assert advice in message
    assert ("verifier" in message) == (reason == "engine_error")
    assert "response filter" not in message


def test_when_all_trajectories_are_cut_the_message_names_the_limit_of_an_agentic_run():
    player = Trajectories.of(max_resample_rounds=2)
    player.want(1)
    for group_id in range(2):
        for attempt_id in player.members(group_id):
            player.run(attempt_id, 1.0, finish_reason="length")
    (message,) = player.failures
    assert "invalid/truncated 2" in message
    assert "in an agentic run sequence_length" in message


def test_where_filters_judge_faults_a_delivered_one_is_among_the_first_and_not_replaced():
    player = Trajectories.of(on_member_failure="judge", redundancy=1)
    player.want(1)
    player.act(0)
    player.end(0, failure="env_timeout", finish_reason="env_timeout", flags=["env_timeout"])
    player.run(1, 1.0)
    assert player.left() == [(0, "dropped", "incomplete")]
    assert player.record_of(0).category == "invalid"
    assert player.record_of(0).rewards == (None, 1.0, None)
    assert player.episodes() == [(0, 0), (1, 0)]


def test_survivors_train_beside_a_member_that_never_took_a_turn_and_the_group_is_as_old_as_they_are():
    """What a member without turns was sampled with is unknown: that makes no group older than it is."""
    player = Trajectories.of(on_member_failure="judge", group_size=3, min_members=2)
    player.scheduler.handle(ev.StepAdvanced(step=5), 0.0)
    player.want(1)
    player.end(0, failure="env_failed", finish_reason="env_failed", flags=["env_failed"])  # already at its reset
    player.run(1, 0.0)
    player.run(2, 1.0)
    (group,) = player.batches[0].groups
    assert group.policy_version == 5
    assert group.counted == (False, True, True)
    assert player.metrics[0]["scheduler/off_policy_ratio"] == 0
    player.advance()
    assert player.record_of(0).policy_version == 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flagged(Filter[Group]):
    """Drops a group with a flagged member."""

    name = "flagged"
    drop_category = "invalid"

    def judge(self, item: Group, /) -> Verdict:
        flags = sorted({flag for rollout in item.rollouts for flag in rollout.flags})
        return self.drop("/".join(flags)) if flags else self.keep()


@pytest.mark.parametrize("flag", ["env_timeout", "env_failed", "drop_flag"])
@pytest.mark.parametrize("mode", ["replace", "judge"])
def test_a_flag_of_a_delivered_trajectory_is_for_the_group_filter_whatever_its_reward(flag: Flag, mode: Any):
    player = Trajectories.of(query=Flagged(context=FilterContext(where="test")), on_member_failure=mode)
    player.want(1)
    player.run(0, 1.0, flags=[flag])
    assert player.pending  # it counts among the first: nothing replaces it
    player.run(1, 1.0)
    assert player.left() == [(0, "dropped", flag)]
    player.run_group(1, 1.0, 1.0)
    assert player.trained() == [[1]]


def test_without_such_a_filter_a_flagged_trajectory_trains_with_its_reward():
    player = Trajectories.of(query=NO_FILTER)
    player.want(1)
    player.run(0, 1.0, flags=["drop_flag"])
    player.run(1, 0.5)
    (group,) = player.batches[0].groups
    assert [(rollout.reward, rollout.flags) for rollout in group.rollouts] == [(1.0, {"drop_flag"}), (0.5, set())]


@pytest.mark.parametrize("finish_reason", ["completed", "max_turns", "timeout", "stop"])
def test_only_a_trajectory_cut_by_its_token_limit_is_truncated(finish_reason: RolloutFinish):
    player = Trajectories.of(group_size=3)
    player.want(1)
    player.run(0, 1.0, finish_reason=finish_reason)
    player.run(1, 0.0)
    player.run(2, 0.0, finish_reason="length")
    assert player.batches[0].groups[0].counted == (True, True, False)


def test_a_filter_that_raises_tells_the_episode_and_its_story():
    class Broken(Flagged):
        def judge(self, item: Group, /) -> Verdict:
            raise ZeroDivisionError("a bug")

    player = Trajectories.of(query=Broken(context=FilterContext(where="test")))
    player.want(1)
    player.run(0, 1.0)
    player.act(1)
    with pytest.raises(FilterError, match=r"a bug[\s\S]*household/g0/e0[\s\S]*delivered 0"):
        player.scheduler.handle(ev.MemberFinished(rollout=player.rollout(1)), player.now)


# ---------------------------------------------------------------- steps and time


def test_an_expired_episode_comes_back_once_before_new_ones():
    player = Trajectories.of(2, async_generation_ratio=1.0)
    player.want(1)
    player.act(player.members(1)[0])
    for step in range(2):
        player.run_group(2 * step, 0.0, 1.0)
        player.step()
        if step == 0:
            player.want(1)
            assert player.episodes() == [(0, 0), (1, 0), (0, 1)]
    assert player.left()[-1] == (1, "expired", "stale")
    assert player.record_of(1).env_steps == 1
    assert player.record_of(1).category is None
    assert player.episodes() == [(0, 0), (1, 0), (0, 1), (1, 0)]


def test_episodes_that_were_stopped_because_the_batch_is_full_come_back_first_in_order():
    player = Trajectories.of(5, max_additional_running_prompts=2, max_resample_rounds=1000)
    player.want(3)
    for group_id in (0, 1, 2):
        player.run_group(group_id, 1.0, 1.0)
    assert len(player.open_group_ids()) > 3  # launched ahead, since all were dropped so far
    kept = player.open_group_ids()[:3]
    stopped = [player.episode_of(group_id) for group_id in player.open_group_ids()[3:]]
    for group_id in kept:
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [kept]
    before = len(player.episodes())
    player.step()
    player.want(3)
    assert player.episodes()[before : before + len(stopped)] == stopped


def test_a_group_timeout_is_one_deadline_for_resets_turns_and_retries():
    player = Trajectories.of(group_timeout_s=20.0)
    player.want(1)
    player.run(0, 0.0, 1.0)
    player.fault(1)
    player.act(2)
    player.sleep(17.0)
    assert player.left() == [(0, "dropped", "group_timeout")]
    record = player.record_of(0)
    assert (record.category, record.seconds, record.env_steps, record.evidence["missing"]) == ("invalid", 20.0, 3, 1.0)
    assert player.open_group_ids() == [1]
    player.run_group(1, 0.0, 1.0)
    player.step()
    player.want(1)
    assert player.episodes() == [(0, 0), (1, 0), (0, 0)]  # machinery was to blame: it comes back


def test_committed_trajectory_groups_come_back_whole_and_their_tasks_are_found_by_name():
    player = Trajectories.of(3)
    player.want(3)
    player.run(0, 0.0, 1.0)
    player.run(1, 0.5)
    player.act(2)
    in_flight = {attempt_id: player.sampled(attempt_id) for attempt_id in player.pending}
    machine = player.scheduler.state_dict(in_flight, player.now)
    source = player.source.state_dict([(task_id, epoch) for task_id, epoch in machine["outstanding"]])
    saved = decode(encode({"machine": machine, "source": source}))
    tasks = EpisodeTasks(DOMAIN, 3, seed=1)
    tasks.load_state_dict(saved["source"])
    later = Trajectories.of(3, source=tasks)
    records = later.scheduler.load_state_dict(saved["machine"], tasks.lookup)
    assert [order.record.env_steps for order in records if isinstance(order, ev.RecordGroup)] == [1, 0]
    (group,) = later.scheduler.buffer.groups()
    (before,) = player.scheduler.buffer.groups()
    assert group.task == before.task
    for ours, theirs in zip(group.rollouts, before.rollouts, strict=True):
        assert (ours.env_id, ours.task_type, ours.flags, ours.reward) == (theirs.env_id, theirs.task_type, theirs.flags, theirs.reward)
        for turn, other in zip(ours.turns, theirs.turns, strict=True):
            assert (turn.observation, turn.action, turn.reward) == (other.observation, other.action, other.reward)
            assert np.array_equal(turn.token_ids, other.token_ids)
    instructions = later.scheduler.handle(ev.BatchWanted(groups=3), 0.0)
    drawn = [tasks.draw() for order in instructions if isinstance(order, ev.DrawTask)]
    assert [None if one is None else one[0].task_id for one in drawn] == ["household/g1/e0", "household/g2/e0"]


# ---------------------------------------------------------------- filling the batch


@pytest.mark.parametrize(("kept", "outcome"), [((0, 0, 0), "error"), ((1, 1, 1), "short"), ((1, 1, 2), "full")])
def test_case_29_a_limit_of_three_rounds_means_three_rounds(kept: tuple[int, ...], outcome: str):
    """Case 29: four groups, three rounds; 0, 0, 0 -> an error, 1, 1, 1 -> three of four by the fallback, 1, 1, 2 -> success."""
    player = Trajectories.of(max_resample_rounds=3, on_exhausted="raise" if outcome == "error" else "shrink")
    player.want(4)
    for count in kept:
        for place, group_id in enumerate(player.open_group_ids()):
            player.run_group(group_id, 0.0, 1.0 if place < count else 0.0)
    if outcome == "error":
        (message,) = player.failures
        assert "kept 0 of 12 judged (acceptance rate 0.0%)" in message
        assert "max_resample_rounds (3)" in message
        assert "low_information/no_spread 12" in message
    else:
        assert not player.failures
        assert len(player.batches[0].groups) == {"short": 3, "full": 4}[outcome]
        assert player.metrics[0]["scheduler/resample_rounds"] == 3


def test_case_33_episodes_never_end_and_no_batch_is_the_last():
    """Case 33: the last partial batch of the data is not thrown away, since there is none: every batch is whole."""
    player = Trajectories.of(3)
    for _ in range(4):
        player.want(4)
        for group_id in player.open_group_ids():
            player.run_group(group_id, 0.0, 1.0)
        player.step()
    assert [(len(batch.groups), batch.is_last) for batch in player.batches] == [(4, False)] * 4


def test_case_35_a_round_of_good_groups_only_completes_the_batch():
    """Case 35: need 4; round 1 accepts 2, round 2 accepts all: 2 + 2 are used, without a warning."""
    player = Trajectories.of()
    player.want(4)
    for group_id in range(4):
        player.run_group(group_id, 0.0, float(group_id < 2))
    for group_id in (4, 5):
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[0, 1, 4, 5]]
    assert player.warnings == []


def test_case_37_surplus_groups_wait_oldest_first_and_nothing_is_lost():
    """Case 37: ten groups ready, four asked for twice: 4, 4, 2 are left."""
    player = Trajectories.of(10, async_generation_ratio=1.5, collect="in_order")
    player.want(4)
    for group_id in (7, 3, 9, 1, 5, 2, 8, 6, 4, 0):
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[0, 1, 2, 3]]
    player.step()
    player.want(4)
    assert player.trained() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [group.group_id for group in player.scheduler.buffer.groups()] == [8, 9]
    assert player.records[-1].outcome == "trained"
    assert player.source.state_dict()["put_back"] == []


def test_case_41_environment_groups_that_are_too_easy_or_too_hard_are_never_used_up():
    """Case 41: means 1, 0, 1 against easy >= 0.9 and hard <= 0.1: all leave, and each environment group goes on with its next episode."""
    band = FilterConfig(type="mean_filter", filter_args={"threshold_down": 0.1, "threshold_up": 0.9})
    player = Trajectories.of(3, query=band, max_resample_rounds=4)
    player.want(3)
    for episode in range(3):
        assert player.episodes()[3 * episode :] == [(env_group, episode) for env_group in range(3)]
        for group_id, reward in zip(player.open_group_ids(), (1.0, 0.0, 1.0), strict=True):
            player.run_group(group_id, reward, reward)
    assert not player.failures
    for group_id in player.open_group_ids():
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[9, 10, 11]]
    assert player.metrics[0]["batch/rejected/low_information/too_easy"] == 6
    assert player.metrics[0]["batch/rejected/low_information/too_hard"] == 3


def test_case_41_where_nothing_of_use_is_left_the_run_says_which_side_it_fell_on():
    """Case 41: it never waits for a pool that has run dry."""
    band = FilterConfig(type="mean_filter", filter_args={"threshold_down": 0.1, "threshold_up": 0.9})
    player = Trajectories.of(3, query=band, max_resample_rounds=2)
    player.want(3)
    for _ in range(2):
        for group_id, reward in zip(player.open_group_ids(), (1.0, 0.0, 1.0), strict=True):
            player.run_group(group_id, reward, reward)
    (message,) = player.failures
    assert "low_information/too_easy 4, low_information/too_hard 2" in message


def test_case_55_and_61_what_tops_a_batch_up_is_a_whole_group_of_its_own_and_nothing_is_there_twice():
    """Cases 55 and 61: nothing is ever copied. A dropped group that is used after all comes whole, with its own members and id."""
    player = Trajectories.of(max_resample_rounds=1, on_exhausted="keep_low_information")
    player.want(4)
    for group_id, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)]):
        player.run_group(group_id, *rewards)
    (batch,) = player.batches
    assert [group.group_id for group in batch.groups] == [0, 1, 2, 3]
    assert [list(group.rewards) for group in batch.groups] == [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    members = [rollout for group in batch.groups for rollout in group.rollouts]
    assert [rollout.group_id for rollout in members] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({rollout.attempt_id for rollout in members}) == 8


def test_case_45_one_truncated_trajectory_does_not_drop_its_group():
    """Case 45: rewards [1, 0, 1, truncated]: kept, three in the statistics, four rows, advantage 0 for the truncated one."""
    player = Trajectories.of(group_size=4)
    player.want(1)
    for attempt_id, reward in enumerate([1.0, 0.0, 1.0]):
        player.run(attempt_id, reward)
    player.run(3, 0.0, 1.0, finish_reason="length")
    (group,) = player.batches[0].groups
    assert group.counted == (True, True, True, False)
    advantages = group_relative(group.rewards, [group.group_id] * 4, mask=group.counted, scale="none")
    assert advantages[3] == 0
    assert np.allclose(advantages[:3], [1 / 3, -2 / 3, 1 / 3])


# ---------------------------------------------------------------- which group


def test_case_47_groups_of_different_sizes_each_have_their_own_mean():
    """Case 47: survivors [1, 3] and [5]: centred [-1, 1] and [0]."""
    player = Trajectories.of(query=NO_FILTER, on_member_failure="judge", min_members=1)
    player.want(2)
    player.run_group(0, 1.0, 3.0)
    failed, alone = player.members(1)
    player.end(failed, failure="env_failed", finish_reason="env_failed")
    player.run(alone, 5.0)
    groups = player.batches[0].groups
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    counted = [is_counted for group in groups for is_counted in group.counted]
    assert rewards == [1.0, 3.0, None, 5.0]
    assert list(group_relative(rewards, [0, 0, 1, 1], mask=counted, scale="none")) == [-1.0, 1.0, 0.0, 0.0]


def test_case_51_trajectories_of_one_episode_are_one_group():
    """Case 51: rewards [1, 0, 1, 0] of one task: advantages [.5, -.5, .5, -.5], whatever the ids of the trajectories."""
    player = Trajectories.of(group_size=4)
    player.want(1)
    for attempt_id, reward in enumerate([1.0, 0.0, 1.0, 0.0]):
        player.run(attempt_id, reward / 2, reward / 2)  # over two steps
    (group,) = player.batches[0].groups
    assert len({rollout.attempt_id for rollout in group.rollouts}) == 4
    advantages = group_relative(group.rewards, [rollout.group_id for rollout in group.rollouts], scale="none")
    assert list(advantages) == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("redundancy", [0, 1])
def test_case_53_a_group_of_different_problems_is_dropped_and_says_so(redundancy: int):
    """Case 53: an environment that counts instead of taking the seed gives every member another problem."""
    player = Trajectories.of(query=NO_FILTER, group_size=4, redundancy=redundancy)
    player.want(1)
    for attempt_id in range(4):
        player.run(attempt_id, float(attempt_id), env_id=f"problem {attempt_id}")
    assert player.left() == [(0, "dropped", "different_problems")]
    record = player.record_of(0)
    assert (record.category, record.source, record.evidence) == ("invalid", "scheduler", {"problems": 4.0})
    (warning,) = player.warnings
    assert "problem 0, problem 1, problem 2" in warning
    player.run_group(1, *[1.0] * 4) if not redundancy else [player.run(one, 1.0) for one in player.members(1)[:4]]
    assert player.trained() == [[1]]
    assert {rollout.env_id for rollout in player.batches[0].groups[0].rollouts} == {f"problem {episode_seed(1, 1, 0)}"}


def test_case_53_a_member_that_was_replaced_or_restarted_is_asked_for_the_same_problem():
    """Case 53: what is played again has the environment group and the episode of the group, hence its seed."""
    player = Trajectories.of(on_weight_update="restart", group_size=3)
    player.want(1)
    player.act(0)
    player.publish(1, [0])
    player.fault(1)
    for attempt_id in player.members(0):
        player.run(attempt_id, float(attempt_id == 2))
    (group,) = player.batches[0].groups
    assert {rollout.env_id for rollout in group.rollouts} == {f"problem {episode_seed(1, 0, 0)}"}


def test_case_57_a_rejected_trajectory_has_no_part_in_the_baseline_of_its_siblings():
    """Case 57: rewards [100, 1], the first is rejected: it is replaced in its group, and the other's advantage is not -49.5."""
    player = Trajectories.of(response=FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 10.0}))
    player.want(1)
    player.run(0, 100.0)
    player.run(1, 1.0)
    (again,) = player.members(0)
    assert player.pending[again].seed != player.launches[0].seed  # something else shall be sampled
    player.run(again, 0.0)
    (group,) = player.batches[0].groups
    assert list(group_relative(group.rewards, [0, 0], scale="none")) == [-0.5, 0.5]
    assert player.metrics[0]["scheduler/response_filter_count"] == 1


# ---------------------------------------------------------------- stopping, retries, leaks


def test_case_62_a_full_batch_cancels_whoever_still_waits_for_a_judge():
    """Case 62: need 2; groups 0 and 1 are done, a member of group 2 waits for its judge: it is cancelled in the same moment."""
    player = Trajectories.of(max_additional_running_prompts=4, max_resample_rounds=1000)
    player.want(2)
    for group_id in (0, 1):
        player.run_group(group_id, 1.0, 1.0)
    running = player.open_group_ids()
    assert len(running) > 2
    for attempt_id in player.members(running[-1]):
        player.act(attempt_id, 1.0)  # played to its end, not scored yet
    for group_id in running[:2]:
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [running[:2]]
    assert not player.pending
    record = player.record_of(running[-1])
    assert (record.outcome, record.reason, record.env_steps) == ("cancelled", "batch_full", 2)


def test_case_66_redundant_trajectories_are_stopped_and_the_next_step_uses_all_places():
    """Case 66: launch 6, need 4: after four are done two are cancelled."""
    player = Trajectories.of(group_size=4, redundancy=2)
    player.want(1)
    for attempt_id in (0, 2, 3, 5):
        player.run(attempt_id, float(attempt_id == 5))
    assert player.scheduler.ledger.attempts["cancelled"] == 2
    assert not player.pending
    player.step()
    player.want(1)
    assert len(player.pending) == 6


def test_case_68_the_limit_of_retries_counts_rounds_of_trajectories():
    """Case 68: eight members, limit 3: all fail in rounds 1 and 2 and succeed in round 3: the group completes."""
    player = Trajectories.of(group_size=8, max_response_rounds=3)
    player.want(1)
    for _ in range(2):
        for attempt_id in player.members(0):
            player.fault(attempt_id)
    player.run_group(0, *[1.0, 0.0] * 4)
    assert player.trained() == [[0]]
    assert player.metrics[0]["batch/rejected_members/env_timeout"] == 16
    player.advance()
    assert player.record_of(0).attempts == 24


def test_case_70_of_two_tries_at_a_member_only_the_second_counts_and_the_late_one_is_counted():
    """Case 70: the first times out and is replaced; then both results come. One from an earlier batch is no exception either."""
    player = Trajectories.of()
    player.want(1)
    player.act(0, 9.0)
    late = player.rollout(0)
    player.fault(0)
    player.run(2, 0.0)
    player.tell(ev.MemberFinished(rollout=late))
    player.run(1, 1.0)
    (group,) = player.batches[0].groups
    assert list(group.rewards) == [0.0, 1.0]
    assert player.scheduler.ledger.late_results == 1
    player.step()
    player.tell(ev.MemberFinished(rollout=late))
    player.want(1)
    player.tell(ev.MemberFinished(rollout=late))
    assert player.scheduler.ledger.late_results == 3


def test_case_72_the_bias_to_short_trajectories_shows_and_in_order_there_is_none():
    """Case 72: of 16 launched half are short with reward 1, half long with reward 0, and 8 make a batch: unbiased its mean is 0.5.

    Mean reward and length of what was launched show it once all of them have ended: over both batches, and in run.db at any time.
    """
    launched = {}
    kept: dict[str, list[float]] = {}
    for collect in ("as_finished", "in_order"):
        player = Trajectories.of(16, query=NO_FILTER, group_size=1, collect=collect, async_generation_ratio=1.0)
        player.want(8, batches_left=1)
        assert len(player.pending) == 16
        for attempt_id in [i for i in player.pending if i % 2]:
            player.run(attempt_id, *[0.0] * 9, 1.0)
        for attempt_id in list(player.pending):
            player.run(attempt_id, *[0.0] * 100)
        player.step()
        player.want(8, batches_left=0)
        steps = [float(np.mean([group.rollouts[0].env_steps for group in batch.groups])) for batch in player.batches]
        assert steps == ([10.0, 100.0] if collect == "as_finished" else [55.0, 55.0])
        kept[collect] = [float(np.mean([group.rewards for group in batch.groups])) for batch in player.batches]
        launched[collect] = [told["reward/launched_mean"] for told in player.metrics if "reward/launched_mean" in told]
    assert kept == {"as_finished": [1.0, 0.0], "in_order": [0.5, 0.5]}  # what finished late is trained later, and not lost
    assert launched["as_finished"] == [1.0, 0.0]


def test_case_72_what_redundancy_costs_is_counted():
    """Case 72: 16 members play and the first 8 make the group: the others leave no reward, but attempts, steps and tokens."""
    player = Trajectories.of(1, query=NO_FILTER, group_size=8, redundancy=8)
    player.want(1)
    for attempt_id in range(1, 16, 2):
        player.act(attempt_id - 1)
        player.run(attempt_id, 1.0)
    assert player.metrics[0]["reward/kept_mean"] == player.metrics[0]["reward/launched_mean"] == 1.0
    player.advance()
    record = player.record_of(0)
    assert (record.attempts, record.env_steps, record.rewards.count(None)) == (16, 16, 8)
    assert player.scheduler.ledger.attempts["cancelled"] == 8
    assert player.scheduler.ledger.tokens["cancelled"] == 16


def test_case_74_a_hang_and_an_exception_free_their_places():
    """Case 74: group 0 hangs, group 1 raises, two groups are needed: two come, one time-out and one error are counted."""
    player = Trajectories.of(group_timeout_s=10.0, max_response_rounds=1)
    player.want(2)
    player.lose_group(1)
    player.sleep(9.0)
    assert player.left() == [(1, "dropped", "response_retries"), (0, "dropped", "group_timeout")]
    for group_id in player.open_group_ids():
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[2, 3]]
    assert player.metrics[0]["batch/rejected/invalid/group_timeout"] == 1
    assert player.metrics[0]["batch/rejected/invalid/response_retries"] == 1


def test_case_76_scoring_has_what_playing_has_left_of_the_deadline():
    """Case 76: limit 10 s; playing takes 9 s: whoever is not scored by 10 s is stopped then."""
    player = Trajectories.of(group_timeout_s=10.0)
    player.want(1)
    for _ in range(4):
        for attempt_id in (0, 1):
            player.act(attempt_id)
    player.run(0)
    assert player.now <= 11.0
    player.sleep(9.0)
    assert player.record_of(0).seconds == 10.0


def test_case_78_a_rejected_trajectory_is_freed_and_its_verdict_stays_readable():
    """Case 78: after many rejected groups only what is in flight is alive; each record still says why."""
    player = Trajectories.of(max_resample_rounds=10_000)
    player.want(1)
    alive: list[weakref.ref[np.ndarray[Any, Any]]] = []
    for group_id in range(200):
        for attempt_id in player.members(group_id):
            player.act(attempt_id)
            alive.append(weakref.ref(player.turns[attempt_id][0].token_ids))
            player.end(attempt_id)
            del player.turns[attempt_id]
        player.instructions.clear()
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    assert Counter(record.reason for record in player.records) == {"no_spread": 200}


def test_case_144_nothing_of_a_dropped_group_is_left_behind():
    """Case 144: its place, its members and what comes late of them."""
    player = Trajectories.of(redundancy=2, max_response_rounds=1)
    player.hold_acks = True
    player.want(1)
    player.act(2)
    for attempt_id in (0, 1):
        player.run(attempt_id, 1.0)
    machine = player.scheduler
    assert machine.buffer.running == 1  # its replacement alone
    late = player.rollout(2)
    player.acknowledge_all()
    assert set(player.pending) == set(player.members(1))
    player.tell(ev.MemberFinished(rollout=late))
    player.tell(ev.MemberStepped(attempt_id=2, env_step=2, action="", observation=""))
    assert machine.ledger.late_results == 2
    assert machine.open_groups == 1


# ---------------------------------------------------------------- asynchrony


def test_case_80_no_age_permitted_waits_for_the_weights_and_says_so():
    """Case 80: the trainer is at 13, the engine still at 12: nothing is launched, what is waited for has a name; then it goes on."""
    player = Trajectories.of()
    player.scheduler.handle(ev.StepAdvanced(step=13), 0.0)
    player.publish(12)
    player.want(1)
    assert not player.pending
    assert "the trainer is at step 13, the engine samples with version 12" in player.scheduler.waiting_for(player.now)
    player.publish(13)
    player.run_group(0, 0.0, 1.0)
    assert player.batches[0].groups[0].start_step == 13


def test_case_80_trajectories_begun_under_the_old_weights_expire_and_others_take_their_place():
    """Case 80: what version 12 sampled is no evidence at step 13; a trajectory is as old as its oldest turn."""
    player = Trajectories.of()
    player.scheduler.handle(ev.StepAdvanced(step=13), 0.0)
    player.want(1)
    player.turns[0] = [dataclasses.replace(make_turn(version=12), action="look", reward=0.0)]
    player.turns[0].append(dataclasses.replace(make_turn(version=13), action="look", reward=0.0))
    player.end(0)
    player.run(1, 1.0)
    assert player.left() == [(0, "expired", "stale")]
    assert player.record_of(0).policy_version == 12
    assert player.episodes() == [(0, 0), (0, 0)]  # its episode comes back once
    player.run_group(1, 0.0, 1.0)
    assert player.trained() == [[1]]


def test_case_82_the_group_with_the_oldest_turn_makes_room_first():
    """Case 82: room for 2; versions A [3, 5], B [3, 3], C [4, 4]: B goes; of a trajectory its oldest turn counts."""
    player = Trajectories.of(async_generation_ratio=2.0)
    machine = player.scheduler
    machine.handle(ev.StepAdvanced(step=3), 0.0)
    player.want(4)
    for group_id, versions in enumerate([(3, 5), (3, 3), (4, 4)]):
        for version, reward, attempt_id in zip(versions, (0.0, 1.0), player.members(group_id), strict=True):
            turns = [dataclasses.replace(make_turn(version=later), action="look", reward=reward / 2) for later in (version, 5)]
            player.turns[attempt_id] = turns
            player.end(attempt_id)
    assert [group.policy_version for group in machine.buffer.groups()] == [3, 3, 4]
    assert [group.group_id for group in machine.buffer.evict(2)] == [1]


def test_case_84_a_member_that_never_ends_wedges_no_step_and_no_resume():
    """Case 84: two groups of two; member 1 of group 1 never ends: dropped at its limit, another episode is played, the step completes."""
    player = Trajectories.of(group_timeout_s=30.0)
    player.want(2)
    player.run_group(0, 0.0, 1.0)
    player.run(player.members(1)[0], 1.0)
    player.sleep(40.0)
    assert player.left() == [(1, "dropped", "group_timeout")]
    player.run_group(2, 0.0, 1.0)
    assert player.trained() == [[0, 2]]
    saved = player.scheduler.state_dict(now=player.now)
    assert saved["outstanding"] == []
    assert player.source.state_dict()["put_back"] == [["household/g1/e0", 0]]  # once, after the batch in progress


def test_case_86_an_episode_that_always_fails_leaves_no_hole():
    """Case 86: its groups are lost again and again: others fill the batch, and it is drawn no more."""
    player = Trajectories.of(1, max_response_rounds=1, quarantine_after=2)
    for step in range(3):
        player.want(1)
        while (group_id := player.open_group_ids()[0]) is not None and player.episode_of(group_id) == (0, 0):
            player.lose_group(group_id)
        player.run_group(group_id, 0.0, 1.0)
        assert len(player.batches) == step + 1
        player.step()
    lost = [record.group_id for record in player.records if record.task_id == "household/g0/e0"]
    assert len(lost) == 2
    assert player.warning_keys.count("quarantine") == 1
    assert "household/g0/e0" in next(message for message in player.warnings if "quarantine" in message)


@pytest.mark.parametrize(("ratio", "groups"), [(0.0, 8), (1.0, 16), (3.0, 32)])
def test_case_90_what_may_be_in_flight_is_the_batch_and_what_is_permitted_ahead(ratio: float, groups: int):
    """Case 90: batch 8, staleness 0, 1, 3 -> 8, 16, 32 groups."""
    player = Trajectories.of(4, async_generation_ratio=ratio)
    player.want(8)
    assert len(player.open_group_ids()) == groups
    opened = Counter(env_group for env_group, _ in player.episodes())
    assert opened == dict.fromkeys(range(4), groups // 4)
