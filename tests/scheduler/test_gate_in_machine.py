"""The gate in the machine: running groups are cut, replaced or not, trajectories are stopped, members wait; nothing is lost or doubled."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import GateError, RecordError
from sluice.filters import RatioGuard
from sluice.gate import FutilityKeeper, FutilityRule, Gate, GateKeeper, LearnedFutility, SequentialKeeper
from sluice.gate.audit import drawn
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import MachineGate, Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.tasks import EpisodeTasks
from sluice.types import Rollout, Verdict
from tests.fakes import NO_FILTER, STD_FILTER, ListSource, MachinePlayer, make_filters, make_task
from tests.gate.played_groups import HORIZON, fitted, played
from tests.scheduler.test_trajectory_groups import DOMAIN, Trajectories

SEED = 3
SAME = ["open door", "take lamp", "go north", "go south"]


def make_gate(k: int = 2, threshold: float = 0.3, *, futility: FutilityRule | None = None, **more: Any) -> MachineGate:
    """A gate for groups of `group_size`; on_cut and barrier are the machine's, the rest the keeper's."""
    machine = {name: more.pop(name) for name in ("on_cut", "barrier", "clock") if name in more}
    keeper = GateKeeper(Gate(k=k, threshold=threshold, horizon=20), **{"group_size": 2, "audit_rate": 0.0, "seed": SEED, **more})
    return MachineGate(keeper, None if futility is None else FutilityKeeper(futility, audit_rate=0.0), **machine)


@dataclass
class Gated(Trajectories):
    """Trajectories in a machine with a gate, and a slow model of what the gate must have said."""

    gate: MachineGate = field(default_factory=MachineGate)
    done: dict[int, list[str]] = field(default_factory=dict)  # attempt_id -> its actions
    ended: dict[int, float | None] = field(default_factory=dict)  # attempt_id -> reward, of delivered members that can be compared
    lost: set[int] = field(default_factory=set)  # attempts that cannot
    order: dict[int, list[int]] = field(default_factory=dict)  # group_id -> attempts in the order in which they became comparable
    decided: dict[int, bool | None] = field(default_factory=dict)  # group_id -> whether it must have been cut; None: it left before

    @classmethod
    def make(cls, gate: MachineGate, *, query: Any = STD_FILTER, source: Any = None, **settings: Any) -> Gated:
        config = SchedulerConfig(**{"group_size": 2, "max_resample_rounds": 50, **settings})
        filters = make_filters(query, group_size=config.group_size, domains=(DOMAIN,), min_members=config.min_members)
        machine = Scheduler(config, filters, gate=gate)
        return cls(machine, source or EpisodeTasks(DOMAIN, 4, seed=1), gate=gate)  # type: ignore[arg-type]

    # ------------------------------------------------------------ what happens

    def act(self, attempt_id: int, reward: float = 0.0, action: str = "look", **more: Any) -> None:
        """One step. more: further fields of the event."""
        self.done.setdefault(attempt_id, []).append(action)
        if attempt_id in self.pending and len(self.done[attempt_id]) == self.k:
            self._is_comparable(attempt_id)
        self.is_last_step = bool(more.get("is_last"))
        super().act(attempt_id, reward, action, **more)

    def end(self, attempt_id: int, **how: Any) -> Rollout:
        rollout = self.rollout(attempt_id, **how)
        is_comparable = rollout.reward is not None and rollout.failure is None and rollout.finish_reason != "length"
        if is_comparable:
            self.ended[attempt_id] = rollout.reward
            self._is_comparable(attempt_id)
        else:
            self.lost.add(attempt_id)
        self.held.discard(attempt_id)
        return super().end(attempt_id, **how)

    def fail(self, attempt_id: int, *args: Any, **how: Any) -> None:
        self.lost.add(attempt_id)
        self.held.discard(attempt_id)
        super().fail(attempt_id, *args, **how)

    def lose_worker(self, attempt_ids: Any, tokens: int = 1) -> None:
        attempts = list(attempt_ids)
        self.lost.update(attempts)
        self.held.difference_update(attempts)
        super().lose_worker(attempts, tokens)

    def _is_comparable(self, attempt_id: int) -> None:
        ranks = self.order.setdefault(self.group_of(attempt_id), [])
        if attempt_id not in ranks:
            ranks.append(attempt_id)

    # ------------------------------------------------------------ what must hold

    is_last_step: bool = False
    audit_rate: float = 0.0  # of the keeper, where it draws lots

    def is_drawn(self, key: tuple[str, int]) -> bool:
        """The lot of a group: it is audited."""
        return drawn(f"{SEED}/{key!r}", self.audit_rate)

    @property
    def k(self) -> int:
        return self.gate.groups.gate.k if isinstance(self.gate.groups, GateKeeper) else 0

    def group_of(self, attempt_id: int) -> int:
        return next(launch.group_id for launch in self.launches if launch.attempt_id == attempt_id)

    def check(self) -> None:
        super().check()
        if isinstance(self.gate.groups, GateKeeper):
            self.check_decisions(self.gate.groups)
        self.is_last_step = False
        machine = self.scheduler
        assert {one for group in machine._groups.values() for one in group.held if one in group.slots} >= self.held
        for group in machine._groups.values():
            under_way = [one for one in group.slots if one >= 0]
            assert group.closed or not under_way or not self.held.issuperset(under_way), "they would wait for each other"
            if not group.closed and group.group_id in self.decided:
                assert self.held.isdisjoint(under_way), "there is nothing to wait for"
        for record in self.records:
            if record.outcome == "cut" and isinstance(self.gate.groups, GateKeeper):
                assert (record.category, record.reason, record.source) == ("low_information", "converged_prefix", "gate")
                assert record.evidence["margin"] < record.evidence["scale"]
        cut = {record.group_id for record in self.records if record.outcome == "cut"}
        assert cut.isdisjoint(group_id for batch in self.trained() for group_id in batch)

    def check_decisions(self, keeper: GateKeeper) -> None:
        """The keeper has cut exactly what a slow look at all open groups says."""
        machine, size = self.scheduler, self.scheduler.config.group_size
        assert keeper.watched <= machine.open_groups
        outcomes = {record.group_id: record.outcome for record in self.records}
        attempts: dict[int, list[ev.LaunchMember]] = {}
        for launch in self.launches:
            if launch.group_id not in self.decided:
                attempts.setdefault(launch.group_id, []).append(launch)
        for group_id, launches in attempts.items():
            group = machine._groups.get(group_id)
            is_cut = (outcomes.get(group_id) if group is None else group.outcome) == "cut"
            if not is_cut and (group is None or group.closed):
                self.decided[group_id] = None
                continue
            if not is_cut and self.is_last_step:
                continue  # how it ends is told next
            ranks = [one for one in self.order.get(group_id, []) if one not in self.lost]
            needed = min(size, len(ranks))  # of one that was cut: its running members are gone
            if group is not None and not is_cut:
                needed = min(size, sum([one >= 0 for one in group.slots]) + len({one.attempt_id for one in launches} & self.ended.keys()))
            if len(ranks) < needed:
                assert not is_cut
                continue
            chosen = ranks[:needed]
            rewards = {self.ended[one.attempt_id] for one in launches if one.attempt_id in self.ended}
            verdict = None
            if len(rewards) < 2 and len(chosen) >= 2:
                verdict = keeper.gate.decide([self.done.get(one, []) for one in chosen], rewards=[self.ended.get(one) for one in chosen])
            is_audited = not keeper.is_cutting or self.is_drawn((launches[0].task.task_id, 0))
            self.decided[group_id] = verdict is not None and not verdict.keep and not is_audited
            assert self.decided[group_id] == is_cut, (group_id, chosen, verdict)


def converge(player: Gated, group_id: int, steps: int = 2) -> None:
    """All running members of a group do the same, in lock step, until one of them makes the gate look."""
    for step in range(steps):
        for attempt_id in player.members(group_id):
            if attempt_id in player.pending and attempt_id not in player.held:
                player.act(attempt_id, action=SAME[step])


def part(player: Gated, group_id: int, steps: int = 2) -> None:
    """The same, each on a way of its own."""
    for step in range(steps):
        for attempt_id in player.members(group_id):
            if attempt_id not in player.held:
                player.act(attempt_id, action=f"way {attempt_id}, step {step}")


# ---------------------------------------------------------------- a cut


def test_a_group_that_has_converged_is_cut_with_all_its_members_and_replaced() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    converge(player, 0)
    record = player.record_of(0)
    assert (record.outcome, record.reason, record.category, record.source) == ("cut", "converged_prefix", "low_information", "gate")
    assert (record.env_steps, record.rewards) == (4, (None, None))
    evidence = record.evidence
    assert evidence["prefix_edit_distance_mean"] == 0.0
    assert (evidence["k"], evidence["n"], evidence["threshold"], evidence["scale"], evidence["stopped_members"]) == (2, 2, 0.3, 1.0, 2)
    assert player.open_group_ids() == [1]
    assert player.scheduler._groups[1].round == 2
    ledger = player.scheduler.ledger
    assert (ledger.groups["cut"], ledger.attempts["cut"]) == (1, 2)
    assert ledger.tokens["cut"] == record.sampled_tokens == 8
    assert ledger.rejected_groups == {("low_information", "converged_prefix"): 1}
    assert player.scheduler.acceptance_rate == 0.0


def test_a_group_that_has_parted_runs_on_and_its_record_says_what_the_gate_saw() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    part(player, 0)
    assert not player.records
    one, two = player.members(0)
    player.end(one, reward=1.0)
    player.end(two, reward=0.0)
    assert player.trained() == [[0]]
    player.step()
    evidence = player.record_of(0).evidence
    assert evidence["gate/margin"] == pytest.approx(1.0 / 0.3)
    assert {"std", "gate/prefix_edit_distance_mean", "gate/k", "gate/scale"} <= evidence.keys()


def test_members_that_run_ahead_do_not_wait_and_the_last_one_makes_the_decision() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    ahead, behind = player.members(0)
    for action in (*SAME, "look"):
        player.act(ahead, action=action)
    player.act(behind, action=SAME[0])
    assert not player.records
    player.act(behind, action=SAME[1])
    assert player.left() == [(0, "cut", "converged_prefix")]
    assert player.record_of(0).env_steps == 7


def test_redundant_members_are_cancelled_too() -> None:
    player = Gated.make(make_gate(redundancy=2), redundancy=2)
    player.want(1)
    one, two, *_ = player.members(0)
    for attempt_id in (one, two):
        for action in SAME[:2]:
            player.act(attempt_id, action=action)
    assert player.left() == [(0, "cut", "converged_prefix")]
    assert player.scheduler.ledger.attempts["cut"] == 4


def test_a_finished_member_counts_and_its_reward_is_only_kept() -> None:
    player = Gated.make(make_gate(k=4, threshold=0.6))
    player.want(1)
    one, _ = player.members(0)
    for action in SAME[:2]:
        player.act(one, action=action)
    player.end(one, reward=1.0)
    converge(player, 0, steps=4)
    record = player.record_of(0)
    assert (record.outcome, record.rewards) == ("cut", (1.0, None))
    assert record.evidence["stopped_members"] == 1
    ledger = player.scheduler.ledger
    assert (ledger.attempts["cut"], ledger.tokens["cut"]) == (2, 12)
    assert player.metrics == []
    part(player, 1, steps=4)
    first, second = player.members(1)
    player.end(first, reward=0.25)
    player.end(second, reward=0.75)
    metrics = player.metrics[0]
    assert metrics["reward/launched_mean"] == metrics["reward/kept_mean"] == 0.5
    assert metrics["reward/cut_groups"] == 1.0
    assert metrics["scheduler/group_filter_count"] == 0.0
    assert metrics["batch/rejected/low_information/converged_prefix"] == 1.0


def test_finished_members_with_different_rewards_keep_their_group() -> None:
    player = Gated.make(make_gate(group_size=3), group_size=3)
    player.want(1)
    one, two, _ = player.members(0)
    player.run(one, 1.0)
    player.run(two, 0.0)
    converge(player, 0)
    assert not player.records


def test_when_all_members_have_ended_the_filters_judge() -> None:
    player = Gated.make(make_gate(k=3))
    player.want(1)
    player.run_group(0, 0.5, 0.5)
    assert player.left() == [(0, "dropped", "no_spread")]


def test_the_step_with_which_a_trajectory_ends_waits_for_its_reward() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    one, two = player.members(0)
    for attempt_id, reward in ((one, 0.0), (two, 1.0)):
        player.act(attempt_id, action=SAME[0])
        player.act(attempt_id, reward, action=SAME[1], is_last=True)
        assert not player.records
        player.end(attempt_id)
    assert player.trained() == [[0]]


def test_a_lost_member_is_waited_for_until_it_has_come_again() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    one, two = player.members(0)
    for action in SAME[:2]:
        player.act(one, action=action)
    player.act(two, action=SAME[0])
    player.fault(two)
    assert not player.records
    (again,) = [attempt_id for attempt_id in player.members(0) if attempt_id != one]
    for action in SAME[:2]:
        assert not player.records
        player.act(again, action=action)
    assert player.left() == [(0, "cut", "converged_prefix")]


def test_a_member_that_is_lost_for_good_is_not_waited_for() -> None:
    player = Gated.make(make_gate(group_size=3), group_size=3, max_response_rounds=1, min_members=2)
    player.want(1)
    one, two, three = player.members(0)
    for attempt_id in (one, two):
        for action in SAME[:2]:
            player.act(attempt_id, action=action)
    assert not player.records
    player.fault(three)
    assert player.left() == [(0, "cut", "converged_prefix")]


def test_a_worker_that_takes_two_members_with_it_makes_no_decision_on_the_dead() -> None:
    player = Gated.make(make_gate(group_size=3, redundancy=1), group_size=3, redundancy=1, max_response_rounds=1, min_members=1)
    player.want(1)
    members = player.members(0)
    for attempt_id in members[:3]:
        for action in SAME[:2] if attempt_id != members[0] else ["other", "way"]:
            player.act(attempt_id, action=action)
        if attempt_id == members[1]:
            player.lose_worker([members[0], members[3]])
    assert player.left() == [(0, "cut", "converged_prefix")]
    assert player.record_of(0).evidence["n"] == 2


def test_steps_after_a_cut_are_ignored_and_counted() -> None:
    player = Gated.make(make_gate())
    player.hold_acks = True
    player.want(1)
    one, two = player.members(0)
    converge(player, 0)
    assert player.scheduler._groups[0].outcome == "cut"
    player.act(one, action="on and on")  # its cancel is on its way
    player.end(two, reward=1.0)  # it was faster than its cancel
    player.acknowledge_all()
    record = player.record_of(0)
    assert (record.outcome, record.rewards, record.env_steps) == ("cut", (None, None), 5)
    before = player.scheduler.ledger.late_results
    player.tell(ev.MemberStepped(one, 4, "late", ""))
    assert player.scheduler.ledger.late_results == before + 1
    assert player.scheduler.ledger.attempts["cut"] == 2


def test_weights_that_restart_a_member_make_it_begin_anew_for_the_gate() -> None:
    player = Gated.make(make_gate(), async_generation_ratio=1.0, on_weight_update="restart")
    player.want(1)
    one, two = player.members(0)
    player.act(one, action="other")
    player.lost.add(one)
    player.publish(0)
    player.publish(1, [one])
    (again,) = [attempt_id for attempt_id in player.members(0) if attempt_id != two]
    for action in SAME[:2]:
        player.act(two, action=action)
        player.act(again, action=action)
    assert player.record_of(0).outcome == "cut"


def test_the_policy_version_of_the_decision_is_on_record() -> None:
    player = Gated.make(make_gate(), async_generation_ratio=1.0)
    player.publish(0)
    player.want(1)
    converge(player, 0)
    assert player.record_of(0).evidence["policy_version"] == 0.0


def test_the_kind_of_problem_is_known_from_the_first_step() -> None:
    seen: list[Any] = []

    class Witness(GateKeeper):
        def task_type_known(self, group_key, task_type):
            seen.append((group_key, task_type))
            super().task_type_known(group_key, task_type)

    player = Gated.make(MachineGate(Witness(Gate(k=2, threshold=0.3), group_size=2, audit_rate=0.0)))
    player.want(1)
    for step in range(2):
        for attempt_id in player.members(0):
            player.act(attempt_id, action=SAME[step], task_type="cleaning")
    assert seen == [((f"{DOMAIN}/g0/e0", 0), "cleaning")]
    assert player.record_of(0).task_type == "cleaning"


# ---------------------------------------------------------------- without replacement


def test_on_cut_drop_makes_the_batch_smaller_by_the_group() -> None:
    player = Gated.make(make_gate(on_cut="drop"))
    player.want(3)
    converge(player, 1)
    assert player.open_group_ids() == [0, 2]
    for group_id in (0, 2):
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[0, 2]]
    assert player.batches[0].requested == 3
    assert player.metrics[0]["scheduler/closed_by_gate"] == 1.0
    player.step()
    player.want(3)
    assert len(player.open_group_ids()) == 3


def test_a_dropped_group_beside_a_cut_one_is_replaced_as_ever() -> None:
    player = Gated.make(make_gate(on_cut="drop"))
    player.want(2)
    converge(player, 0)
    player.run_group(1, 1.0, 1.0)
    assert player.open_group_ids() == [2]
    player.run_group(2, 0.0, 1.0)
    assert player.trained() == [[2]]


def test_a_batch_of_which_every_group_was_cut_is_filled_again_and_three_in_a_row_are_an_error() -> None:
    player = Gated.make(make_gate(on_cut="drop"))
    player.want(2)
    for attempt in range(3):
        for group_id in player.open_group_ids():
            assert not player.failures
            converge(player, group_id)
        assert not player.batches
        assert len(player.records) == 2 * (attempt + 1)
    (message,) = player.failures
    assert "3 batches in a row kept nothing" in message
    assert "low_information/converged_prefix 6" in message
    assert "gate.threshold" in message
    assert "loosen the filter" not in message  # no filter dropped anything


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
def test_a_group_in_reserve_keeps_no_place_of_a_batch_that_is_filled_again(collect: str) -> None:
    player = Gated.make(make_gate(on_cut="drop"), collect=collect, on_exhausted="keep_low_information")
    player.want(2)
    player.run_group(0, 1.0, 1.0)  # no spread: held in reserve, and replaced
    converge(player, 1)
    converge(player, 2)
    assert player.scheduler.filling == (0, 2)
    assert len(player.open_group_ids()) == 2
    for group_id in player.open_group_ids():
        player.run_group(group_id, 0.0, 1.0)
    assert [len(batch.groups) for batch in player.batches] == [2]


def test_a_group_that_is_cut_before_its_batch_is_asked_for_makes_that_batch_smaller() -> None:
    player = Gated.make(make_gate(on_cut="drop"), async_generation_ratio=1.0)
    player.want(2)
    for group_id in (0, 1):
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[0, 1]]
    converge(player, 2)
    assert player.open_group_ids() == [3]
    player.step()
    player.want(2)
    assert player.scheduler.filling == (0, 1)
    player.run_group(3, 0.0, 1.0)
    assert player.trained() == [[0, 1], [3]]
    assert len(player.open_group_ids()) == 2


@pytest.mark.parametrize("collect", ["as_finished", "in_order"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_in_an_asynchronous_run_every_place_is_kept_or_cut(groups: int, collect: str) -> None:
    player = Gated.make(make_gate(on_cut="drop"), async_generation_ratio=1.0, collect=collect)
    cut = 0
    for step in range(6):
        player.want(groups)
        for turn in range(40):
            if len(player.batches) > step:
                break
            group_id = player.open_group_ids()[0]
            if (group_id + step + turn) % 3 == 0:
                converge(player, group_id)
                cut += 1
            else:
                player.run_group(group_id, 0.0, 1.0)
        if player.open_group_ids() and step % 2:
            converge(player, player.open_group_ids()[-1])  # while nobody asks
            cut += 1
        player.step()
    sizes = [len(batch.groups) for batch in player.batches]
    assert len(sizes) == 6
    assert all(1 <= size <= groups for size in sizes)
    if groups > 1:
        assert sum(sizes) < 6 * groups


def test_by_ticket_a_cut_group_of_a_later_batch_leaves_this_one_whole() -> None:
    player = Gated.make(make_gate(on_cut="drop"), async_generation_ratio=1.0, collect="in_order")
    player.want(2)
    converge(player, 3)
    assert player.scheduler.filling == (0, 2)
    for group_id in (0, 1):
        player.run_group(group_id, 0.0, 1.0)
    assert player.trained() == [[0, 1]]
    player.step()
    player.want(2)
    assert player.scheduler.filling == (0, 1)
    player.run_group(2, 0.0, 1.0)
    assert player.trained()[1] == [2]


def test_a_place_closed_ahead_is_saved() -> None:
    player = Gated.make(make_gate(on_cut="drop"), async_generation_ratio=1.0)
    player.want(2)
    for group_id in (0, 1):
        player.run_group(group_id, 0.0, 1.0)
    converge(player, 2)
    player.step()
    state = decode(encode(player.scheduler.state_dict()))
    fresh = Scheduler(player.scheduler.config, player.scheduler.filters, gate=make_gate(on_cut="drop"))
    fresh.load_state_dict(state, player.source.lookup)  # type: ignore[union-attr]
    fresh.handle(ev.BatchWanted(groups=2), 0.0)
    assert fresh.filling == (0, 1)


def gone_on(player: Gated, **gate: Any) -> Gated:
    """A fresh machine that goes on where this one stands now, as after a kill."""
    state = decode(encode(player.scheduler.state_dict(dict.fromkeys(player.pending, 1))))
    source = EpisodeTasks(DOMAIN, 4, seed=1)
    source.load_state_dict(decode(encode(player.source.state_dict(list(map(tuple, state["outstanding"]))))))  # type: ignore[union-attr]
    fresh = make_gate(**gate)
    later = Gated(Scheduler(player.scheduler.config, player.scheduler.filters, gate=fresh), source, gate=fresh)  # type: ignore[arg-type]
    later.carry_out_unchecked(later.scheduler.load_state_dict(state, player.source.lookup))  # type: ignore[union-attr]
    later.inherited_launches = later.scheduler.ledger.attempts_launched
    later.inherited_records = player.inherited_records + len(player.records)
    later.engine_tokens = later.scheduler.ledger.total_tokens
    return later


CLOSED_MODES: list[dict[str, Any]] = [
    {},
    {"async_generation_ratio": 1.0},
    {"async_generation_ratio": 1.0, "collect": "in_order"},
    {"collect": "in_order"},
    {"max_additional_running_prompts": 2},
]


@pytest.mark.parametrize("mode", CLOSED_MODES, ids=str)
def test_a_place_that_is_closed_stays_closed_in_a_batch_that_is_filled_again(mode: dict[str, Any]) -> None:
    player = Gated.make(make_gate(on_cut="drop"), query=NO_FILTER, **mode)
    player.want(3)
    converge(player, 1)
    assert player.scheduler.filling == (0, 2)
    later = gone_on(player, on_cut="drop")
    later.want(3)
    assert later.scheduler.filling == (0, 2)
    for group_id in later.open_group_ids()[:2]:
        later.run_group(group_id, 0.0, 1.0)
    assert [len(batch.groups) for batch in later.batches] == [2]
    assert later.metrics[0]["scheduler/closed_by_gate"] == 1.0
    later.step()
    later.want(3)
    assert later.scheduler.filling == (0, 3)


@pytest.mark.parametrize("mode", CLOSED_MODES, ids=str)
def test_a_batch_that_was_delivered_and_not_stepped_on_is_the_same_after_a_resume(mode: dict[str, Any]) -> None:
    player = Gated.make(make_gate(on_cut="drop"), query=NO_FILTER, **mode)
    player.want(3)
    converge(player, 1)
    for group_id in (0, 2):
        player.run_group(group_id, 0.0, 1.0)
    (delivered,) = player.trained()
    assert len(delivered) == 2
    is_ahead = bool(player.open_group_ids()) and "async_generation_ratio" in mode
    if is_ahead:
        converge(player, player.open_group_ids()[0])  # of the next batch
    later = gone_on(player, on_cut="drop")
    later.want(3)
    assert later.trained() == [delivered]
    later.step()
    later.want(3)
    assert later.scheduler.filling == (0, 3 - is_ahead)


def test_what_the_guard_left_out_stays_out_of_a_batch_that_is_filled_again() -> None:
    def guarded() -> MachinePlayer:
        config = SchedulerConfig(group_size=2)
        machine = Scheduler(config, make_filters(STD_FILTER, group_size=2), guard=RatioGuard(0.0, "cumulative", 10, "shrink"))
        return MachinePlayer(machine, ListSource(make=lambda i: make_task(f"t{i}")))

    player = guarded()
    player.want(3)
    player.finish_group(0, [1.0, 1.0])
    assert player.scheduler.filling == (0, 2)
    later = guarded()
    later.scheduler.load_state_dict(decode(encode(player.scheduler.state_dict())), player.source._by_id)
    later.scheduler.handle(ev.BatchWanted(groups=3), 0.0)
    assert later.scheduler.filling == (0, 2)


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["cut", "run", "run", "step", "kill"]), st.integers(0, 9)), max_size=25),
    groups=st.integers(1, 4),
    mode=st.sampled_from(CLOSED_MODES),
)
def test_whenever_a_checkpoint_is_taken_every_place_is_kept_or_closed(
    moves: list[tuple[str, int]], groups: int, mode: dict[str, Any]
) -> None:
    """What a batch still lacks is the same before and after."""
    player = Gated.make(make_gate(on_cut="drop"), query=NO_FILTER, **mode)
    player.want(groups)
    delivered = 0
    for what, place in moves:
        open_groups = player.open_group_ids()
        if what == "kill":
            before, is_delivered = player.scheduler.filling, len(player.batches) > delivered
            trained = player.trained()[-1:] if is_delivered else []
            player = gone_on(player, on_cut="drop")
            player.want(groups)
            if is_delivered:
                again = player.trained()
                assert [len(batch) for batch in again] == [len(batch) for batch in trained]
                if mode.get("async_generation_ratio", 0) == 0 or mode.get("collect") == "in_order":
                    assert again == trained  # else one that was launched earlier and accepted since may take the place of a later one
            else:
                assert player.scheduler.filling == before
            delivered = 0
        elif what == "step" and len(player.batches) > delivered:
            delivered += 1
            player.step()
            player.want(groups)
        elif open_groups and what == "cut":
            converge(player, open_groups[place % len(open_groups)])
        elif open_groups and what == "run":
            player.run_group(open_groups[place % len(open_groups)], 0.0, 1.0)
        if player.failures:
            return


def test_a_batch_that_shrinks_replaces_nothing_whatever_the_gate_says() -> None:
    player = Gated.make(make_gate(), fill="shrink")
    player.want(2)
    converge(player, 0)
    assert player.open_group_ids() == [1]
    player.run_group(1, 0.0, 1.0)
    assert player.trained() == [[1]]


# ---------------------------------------------------------------- shadow and audit


def test_a_shadow_cuts_nothing_and_learns_how_groups_end() -> None:
    player = Gated.make(make_gate(shadow=True))
    player.want(1)
    converge(player, 0)
    assert not player.records
    for attempt_id in player.members(0):
        player.end(attempt_id, reward=0.0)
    assert player.left() == [(0, "dropped", "no_spread")]
    metrics = player.scheduler.metrics()
    assert (metrics["gate/would_cut"], metrics["gate/cut"], metrics["gate/precision"]) == (1, 0, 1.0)


def test_an_audited_group_is_ordinary_and_tells() -> None:
    player = Gated.make(make_gate(audit_rate=1.0), query=NO_FILTER)
    player.audit_rate = 1.0
    player.want(1)
    converge(player, 0)
    one, two = player.members(0)
    player.end(one, reward=0.0)
    player.end(two, reward=1.0)
    assert player.trained() == [[0]]
    metrics = player.scheduler.metrics()
    assert (metrics["gate/audited"], metrics["gate/precision"]) == (1, 0.0)


def test_the_gate_says_loudly_that_it_switches_itself_off() -> None:
    gate = make_gate(shadow=True, hold_precision=0.5, window=20)
    player = Gated.make(gate, query=NO_FILTER)
    for rewards in (*[(0.0, 0.0)] * 8, *[(0.0, 1.0)] * 20):
        player.want(1)
        (group_id,) = player.open_group_ids()
        converge(player, group_id)
        for attempt_id, reward in zip(player.members(group_id), rewards, strict=True):
            player.end(attempt_id, reward=reward)
        player.step()
    assert any("switched off" in warning for warning in player.warnings)


def test_a_stopped_group_leaves_nothing_behind() -> None:
    """Case 144: four members, stopped at K = 3, two answers come afterwards: no row, two late results, four ends, one refill."""
    player = Gated.make(make_gate(k=3, group_size=4), group_size=4)
    player.want(1)
    first = player.members(0)
    converge(player, 0, steps=3)
    player.tell(ev.MemberStepped(first[0], 4, "look", "late"))
    player.tell(ev.MemberStepped(first[1], 4, "look", "late"))
    player.acknowledge_all()
    ledger = player.scheduler.ledger
    assert ledger.late_results == 2
    assert (ledger.attempts["cut"], ledger.groups["cut"]) == (4, 1)
    assert player.record_of(0).outcome == "cut"
    assert player.open_group_ids() == [1]
    assert player.scheduler.running_attempts == 4
    part(player, 1, steps=3)
    for attempt_id, reward in zip(player.members(1), (0.0, 1.0, 0.0, 1.0), strict=True):
        player.end(attempt_id, reward=reward)
    assert player.trained() == [[1]]


def test_answers_that_cross_with_the_cancel_of_their_group_are_settled_once_and_no_row() -> None:
    """Case 144: two of four members end before the shell has carried out the cancel, which then finds nothing to do."""
    player = Gated.make(make_gate(k=3, group_size=4), group_size=4)
    player.hold_acks = True
    player.want(1)
    first = player.members(0)
    converge(player, 0, steps=3)
    answers = [player.end(attempt_id, reward=1.0) for attempt_id in first[:2]]
    player.acknowledge_all()
    for answer in answers:
        player.tell(ev.MemberFinished(rollout=answer))
    ledger = player.scheduler.ledger
    assert (ledger.attempts["cut"], ledger.groups["cut"], ledger.late_results) == (4, 1, 2)
    record = player.record_of(0)
    assert (record.outcome, record.attempts, set(record.rewards)) == ("cut", 4, {None})
    assert ledger.tokens["cut"] == record.sampled_tokens
    assert player.open_group_ids() == [1]


def test_what_the_keeper_of_members_warns_of_is_shown() -> None:
    class Loud(FutilityKeeper):
        def member_ended(self, *args: Any, **how: Any) -> str | None:
            super().member_ended(*args, **how)
            return "futility stops are switched off"

    player = Gated.make(MachineGate(None, Loud(FutilityRule(steps=3))), query=NO_FILTER)
    player.want(1)
    player.end(player.members(0)[0], reward=0.0)
    assert player.warnings == ["futility stops are switched off"]


def test_lots_are_of_the_episode_and_not_of_the_order_of_launches() -> None:
    drawn = []
    for groups in (1, 3):
        gate = make_gate(audit_rate=0.5)
        player = Gated.make(gate)
        player.want(groups)
        assert isinstance(gate.groups, GateKeeper)
        drawn.append({key: group.is_audited for key, group in gate.groups._groups.items()})
    assert drawn[0].items() <= drawn[1].items()


# ---------------------------------------------------------------- the barrier


def test_at_a_barrier_members_wait_for_the_decision() -> None:
    player = Gated.make(make_gate(barrier=True))
    player.want(1)
    one, two = player.members(0)
    player.act(one, action="up")
    player.act(one, action="down")
    assert player.held == {one}
    assert "1 wait for the decision of the gate" in player.scheduler.waiting_for(player.now)
    player.act(two, action="left")
    player.act(two, action="right")
    assert player.held == set()
    assert not player.records


def test_a_cut_at_a_barrier_costs_no_step_beyond_it() -> None:
    player = Gated.make(make_gate(barrier=True))
    player.want(1)
    converge(player, 0, steps=4)
    record = player.record_of(0)
    assert (record.outcome, record.env_steps) == ("cut", 4)


@pytest.mark.parametrize("how", ["failed", "lost for good", "ended", "worker", "restarted"])
def test_a_member_that_goes_leaves_nobody_waiting_for_ever(how: str) -> None:
    restarts = {"on_weight_update": "restart", "async_generation_ratio": 1.0} if how == "restarted" else {}
    rounds = {"max_response_rounds": 1, "min_members": 2} if how == "lost for good" else {}
    player = Gated.make(make_gate(barrier=True, group_size=3), group_size=3, **rounds, **restarts)
    player.publish(0)
    player.want(1)
    one, two, three = player.members(0)
    for attempt_id in (one, two):
        for step in range(2):
            player.act(attempt_id, action=f"{attempt_id} {step}")
    assert player.held == {one, two}
    match how:
        case "failed":
            player.fault(three)
        case "lost for good":
            player.fault(three)
            assert player.held == set()
            return
        case "ended":
            player.end(three, reward=1.0)
            assert player.held == set()
            return
        case "worker":
            player.lost.add(three)
            player.lose_worker([three, one])
            assert player.held == {two}
        case "restarted":
            player.lost.update({three, one})
            player.publish(1, [three, one])
            assert player.held == {two}
    for attempt_id in player.members(0):
        if attempt_id not in player.held:
            for step in range(2):
                player.act(attempt_id, action=f"{attempt_id} {step}")
    assert player.held == set()


def test_the_deadline_of_the_group_ends_a_wait() -> None:
    player = Gated.make(make_gate(barrier=True), group_timeout_s=30.0)
    player.want(1)
    one, _ = player.members(0)
    for action in SAME[:2]:
        player.act(one, action=action)
    assert player.held == {one}
    player.sleep(35.0)
    assert player.left() == [(0, "dropped", "group_timeout")]
    assert player.held == set()


# ---------------------------------------------------------------- futility


def futile(**more: Any) -> MachineGate:
    """No gate of groups: single trajectories are stopped after two steps without a new observation."""
    return MachineGate(None, FutilityKeeper(FutilityRule(steps=2), **{"audit_rate": 0.0, **more}))


def test_a_member_without_a_new_observation_is_stopped_and_delivers_what_it_has() -> None:
    player = Gated.make(futile())
    player.want(1)
    one, two = player.members(0)
    for reply in ("hall", "hall", "hall"):
        assert not player.stops
        player.act(one, reply=reply, observation="hall")
        if player.stops:
            break
    assert player.stops == [one]
    assert len(player.turns[one]) == 2
    player.end(one, finish_reason="stopped_futile", reward=0.0)
    player.run(two, 1.0)
    assert player.trained() == [[0]]
    metrics = player.scheduler.metrics()
    assert metrics["gate/futile_stopped"] == 1.0
    assert (metrics["ledger/stopped_attempts"], metrics["ledger/stopped_tokens"]) == (1.0, 4.0)
    player.step()
    assert player.scheduler.ledger.tokens["trained"] == 6


def test_a_group_whose_members_are_all_stopped_is_judged_and_replaced_at_once() -> None:
    player = Gated.make(futile())
    player.want(1)
    for attempt_id in player.members(0):
        while attempt_id not in player.stops:
            player.act(attempt_id, reply="hall", observation="hall")
        player.end(attempt_id, finish_reason="stopped_futile", reward=0.0)
    assert player.left() == [(0, "dropped", "no_spread")]
    assert player.open_group_ids() == [1]


def test_an_audited_member_runs_on() -> None:
    player = Gated.make(futile(audit_rate=1.0))
    player.want(1)
    one, two = player.members(0)
    for _ in range(5):
        player.act(one, reply="hall", observation="hall")
    assert not player.stops
    player.end(one, reward=0.0)
    player.run(two, 1.0)
    metrics = player.scheduler.metrics()
    assert (metrics["gate/futile_audited"], metrics["gate/futile_precision"]) == (1.0, 1.0)


def test_nobody_is_stopped_with_its_last_step() -> None:
    player = Gated.make(futile())
    player.want(1)
    one, _ = player.members(0)
    player.act(one, reply="hall", observation="hall")
    player.act(one, reply="hall", observation="hall", is_last=True)
    assert not player.stops


def test_a_replaced_member_begins_anew() -> None:
    player = Gated.make(futile())
    player.want(1)
    one, two = player.members(0)
    player.act(one, reply="hall", observation="hall")
    player.fault(one)
    (again,) = [attempt_id for attempt_id in player.members(0) if attempt_id != two]
    player.act(again, reply="hall", observation="hall")
    assert not player.stops
    player.act(again, reply="hall", observation="hall")
    assert player.stops == [again]


def test_progress_before_the_first_step_counts() -> None:
    player = Gated.make(MachineGate(None, FutilityKeeper(FutilityRule(progress_steps=2), audit_rate=0.0)))
    player.want(1)
    one, two = player.members(0)
    player.act(one, progress=0.5, progress_before=0.5)
    player.act(two, progress=0.5, progress_before=0.25)
    player.act(one, progress=0.5, progress_before=0.5)
    player.act(two, progress=0.5, progress_before=0.5)
    assert player.stops == [one]
    with pytest.raises(GateError, match="progress"):
        player.act(two)


def test_a_cut_goes_before_a_stop() -> None:
    player = Gated.make(make_gate(futility=FutilityRule(steps=1)))
    player.want(1)
    converge(player, 0, steps=1)
    assert player.stops == []
    converge(player, 0, steps=1)
    assert player.stops == player.members(0)[:1] or player.record_of(0).outcome == "cut"


# ---------------------------------------------------------------- state, cost, refusals


def test_a_resumed_machine_knows_what_the_gate_had_learnt() -> None:
    player = Gated.make(make_gate(audit_rate=0.5, futility=FutilityRule(steps=3)), query=NO_FILTER)
    player.audit_rate = 0.5
    for _ in range(6):
        player.want(1)
        while not player.batches or player.batches[-1].step < player.scheduler.step:
            group_id = player.open_group_ids()[0]
            converge(player, group_id)
            for attempt_id in player.members(group_id):
                player.end(attempt_id, reward=0.0)
        player.step()
    state = decode(encode(player.scheduler.state_dict()))
    fresh = Scheduler(player.scheduler.config, player.scheduler.filters, gate=make_gate(audit_rate=0.5, futility=FutilityRule(steps=3)))
    fresh.load_state_dict(state, player.source.lookup)  # type: ignore[union-attr]
    assert fresh.metrics() == player.scheduler.metrics()
    other = Scheduler(player.scheduler.config, player.scheduler.filters, gate=make_gate(k=3, futility=FutilityRule(steps=3)))
    with pytest.raises(GateError, match="of another gate"):
        other.load_state_dict(state, player.source.lookup)  # type: ignore[union-attr]
    another = Scheduler(player.scheduler.config, player.scheduler.filters, gate=make_gate())
    with pytest.raises(RecordError, match="keeper of members"):
        another.load_state_dict(state, player.source.lookup)  # type: ignore[union-attr]


def test_a_checkpoint_in_the_middle_counts_a_cut_group_as_cut() -> None:
    player = Gated.make(make_gate())
    player.hold_acks = True
    player.want(1)
    converge(player, 0)
    state = player.scheduler.state_dict(dict.fromkeys(player.acks, 3))
    assert state["ledger"]["attempts"]["cut"] == 2
    assert state["ledger"]["tokens"]["cut"] == 6
    assert [entry["outcome"] for entry in state["interrupted"]] == ["cut", "cancelled"]


def test_its_own_cost_is_measured_by_the_clock_it_is_given() -> None:
    ticks = iter(range(10_000))
    player = Gated.make(make_gate(clock=lambda: float(next(ticks))))
    player.want(1)
    converge(player, 0)
    assert player.scheduler.metrics()["gate/seconds"] >= 4.0
    assert Gated.make(make_gate()).scheduler.metrics()["gate/seconds"] == 0.0


def test_the_snapshot_for_a_person_holds_what_the_gate_says() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    converge(player, 0)
    assert player.scheduler.snapshot(player.now)["gate"]["gate/cut"] == 1.0
    assert player.scheduler.snapshot(player.now)["rejected"] == {"low_information/converged_prefix": 1}


def test_saved_tokens_are_measured_by_what_groups_that_left_have_cost() -> None:
    player = Gated.make(make_gate())
    player.want(1)
    converge(player, 0)
    metrics = player.scheduler.metrics()
    assert metrics["ledger/tokens_per_env_step"] == 2.0
    assert metrics["gate/env_steps_saved_bound"] == 36
    assert metrics["gate/tokens_saved_bound"] == 72


def test_a_machine_whose_groups_belong_to_loops_takes_no_gate() -> None:
    config = SchedulerConfig(group_size=2, has_user_loop=True)
    with pytest.raises(ValueError, match="user-defined loop"):
        Scheduler(config, make_filters(group_size=2), gate=make_gate())


def test_a_keeper_of_another_kind_needs_only_the_methods() -> None:
    class OnlyEveryThird:
        """Cuts group after group, by number."""

        def __init__(self) -> None:
            self.told: Counter[str] = Counter()
            self.asked = 0

        def __getattr__(self, name: str) -> Any:
            def tell(*args: Any, **kwargs: Any) -> None:
                self.told[name] += 1

            if name.startswith("_"):
                raise AttributeError(name)
            return tell

        def holds(self, group_key: Any, member: Any) -> bool:
            return False

        def decision(self, group_key: Any) -> Verdict | None:
            self.asked += 1
            return Verdict.dropped("third", "low_information", "mine") if self.asked % 3 == 0 else None

        def metrics(self, tokens_per_env_step: float | None = None) -> dict[str, float]:
            return {"gate/mine": 1.0}

    keeper = OnlyEveryThird()
    player = Gated.make(MachineGate(keeper))
    player.want(1)
    for attempt_id in player.members(0):
        player.act(attempt_id)
    player.act(player.members(0)[0])
    assert player.scheduler._groups.keys() == {1}
    assert player.records[0].reason == "third"
    assert player.scheduler.metrics()["gate/mine"] == 1.0
    assert keeper.told["group_launched"] == 2


def test_a_learned_rule_cuts_in_the_machine_what_it_cuts_alone() -> None:
    """Groups that were played are played again, in lock step: the machine cuts a group exactly when a keeper that nobody disturbs does."""
    settings: Any = {"group_size": 4, "horizon": HORIZON, "floor": 0.8, "audit_rate": 0.0}
    gate = MachineGate(SequentialKeeper(fitted(), **settings), FutilityKeeper(LearnedFutility(fitted(), floor=0.8), audit_rate=1.0))
    alone = SequentialKeeper(fitted(), **settings)
    player = Gated.make(gate, query=NO_FILTER, group_size=4)
    cut = 0
    for seed in range(2000, 2030):
        player.want(1)
        (group_id,) = player.open_group_ids()
        members = dict(zip(player.members(group_id), played(seed).members, strict=True))
        alone.group_launched(seed)
        expected = None
        for step in range(1, HORIZON + 1):
            for attempt_id, member in members.items():
                if player.scheduler._groups.get(group_id) is None or step > len(member.steps):
                    continue
                one, before = member.steps[step - 1], "room 0" if step == 1 else str(member.steps[step - 2].reply)
                is_last = step == len(member.steps)
                told = {"reply": one.reply, "is_admissible": one.is_admissible, "progress": one.progress, "logprob": one.logprob}
                alone.observe(seed, attempt_id, step, one.action, before, **told)
                if is_last:
                    alone.member_ended(seed, attempt_id, member.reward)
                verdict = alone.decision(seed)
                expected = expected or (verdict if verdict is not None and not verdict.keep else None)
                if not is_last or expected is None:
                    player.act(attempt_id, action=str(one.action), observation=before, is_last=is_last, **told)
                if is_last and attempt_id in player.pending:
                    player.end(attempt_id, reward=member.reward)
        alone.group_ended(seed)
        record = next((record for record in player.records if record.group_id == group_id), None)
        assert (expected is None) == (record is None or record.outcome != "cut")
        if expected is not None:
            cut += 1
            assert record is not None
            assert record.reason == expected.reason == "predicted_equal"
            assert expected.evidence.items() <= record.evidence.items()
            for attempt_id in player.members(player.open_group_ids()[0]):
                player.end(attempt_id, reward=0.0)
        player.step()
    assert cut >= 3


# ---------------------------------------------------------------- every interleaving


@st.composite
def gated_players(draw: st.DrawFn) -> Gated:
    """A machine with a gate, of any settings."""
    size, redundancy = draw(st.integers(2, 4)), draw(st.sampled_from([0, 0, 1, 2]))
    audit_rate = draw(st.sampled_from([0.0, 0.0, 0.5]))
    ratio = draw(st.sampled_from([0.0, 0.0, 1.0]))
    gate = make_gate(
        k=draw(st.integers(1, 3)),
        threshold=draw(st.sampled_from([0.3, 0.6, 1.0])),
        group_size=size,
        redundancy=redundancy,
        audit_rate=audit_rate,
        shadow=draw(st.sampled_from([False, False, False, True])),
        on_cut=draw(st.sampled_from(["replace", "drop"])),
        barrier=draw(st.booleans()),
        futility=draw(st.none() | st.just(FutilityRule(steps=2))),
    )
    fill = draw(st.sampled_from(["refill", "refill", "shrink"]))
    player = Gated.make(
        gate,
        query=draw(st.sampled_from([STD_FILTER, NO_FILTER])),
        source=draw(st.none() | st.builds(_some_tasks, st.integers(2, 9))),
        group_size=size,
        redundancy=redundancy,
        fill=fill,
        collect=draw(st.sampled_from(["as_finished", "in_order"])) if fill == "refill" else "as_finished",
        async_generation_ratio=ratio,
        on_weight_update=draw(st.sampled_from(["finish", "restart"])),
        max_resample_rounds=draw(st.sampled_from([1, 3, 50])),
        max_response_rounds=draw(st.integers(1, 3)),
        min_members=draw(st.sampled_from([None, 1, 2])),
        on_member_failure=draw(st.sampled_from(["replace", "judge"])),
        on_exhausted=draw(st.sampled_from(["raise", "shrink", "keep_low_information"])),
        truncated=draw(st.sampled_from(["mask", "invalid"])),
        group_timeout_s=draw(st.sampled_from([None, None, 25.0])),
    )
    player.audit_rate = audit_rate
    return player


def _some_tasks(count: int) -> ListSource:
    return ListSource([dataclasses.replace(make_task(f"t{i}", DOMAIN), entry={"env_group": 0, "episode": i}) for i in range(count)])


MOVES = ["act"] * 8 + ["end", "end", "fail", "crash", "ack", "tick", "late"]


@settings(max_examples=50, deadline=None)
@given(player=gated_players(), data=st.data())
def test_whatever_the_order_no_cut_group_is_trained_every_group_leaves_once_and_nobody_waits_for_ever(
    player: Gated, data: st.DataObject
) -> None:
    player.hold_acks = data.draw(st.booleans())
    player.publish(0)
    player.want(2)
    for _ in range(data.draw(st.integers(5, 60))):
        machine = player.scheduler
        if player.failures:
            break
        if len(player.batches) > machine.step:
            if player.batches[-1].is_last:
                break
            updated = [one for one in player.pending if machine.config.on_weight_update == "restart"]
            player.lost.update(updated)
            player.held.difference_update(updated)
            player.publish(machine.step + 1, updated)
            player.advance()
            player.want(2)
            continue
        free = sorted(one for one in player.pending if one not in player.held and one not in player.stops and one not in player.acks)
        cancelled = sorted(one for one in player.acks if one in player.pending)
        match data.draw(st.sampled_from(MOVES)):
            case "act" if free:
                attempt_id = data.draw(st.sampled_from(free))
                is_last = data.draw(st.sampled_from([False] * 6 + [True]))
                reply = data.draw(st.sampled_from(["hall", "room", "attic", "yard"]))
                player.act(attempt_id, action=data.draw(st.sampled_from("aab")), reply=reply, is_last=is_last)
                if is_last and attempt_id in player.pending:
                    player.end(attempt_id, reward=data.draw(st.sampled_from([0.0, 0.0, 1.0])))
            case "end" if player.pending:
                attempt_id = data.draw(st.sampled_from(sorted(player.pending)))
                how = data.draw(st.sampled_from(["well", "well", "truncated", "no reward"]))
                if attempt_id in player.stops:
                    player.end(attempt_id, finish_reason="stopped_futile", reward=0.0)
                elif attempt_id not in player.held:
                    reward = None if how == "no reward" else data.draw(st.sampled_from([0.0, 0.0, 1.0]))
                    failure = "env_failed" if how == "no reward" else ""
                    reason: Any = "length" if how == "truncated" else "completed"
                    player.end(attempt_id, finish_reason=reason, reward=reward, failure=failure)
            case "fail" if player.pending:
                player.fault(data.draw(st.sampled_from(sorted(player.pending))))
            case "crash" if player.pending:
                dying = data.draw(st.lists(st.sampled_from(sorted(player.pending)), min_size=1, max_size=3, unique=True))
                player.lose_worker(dying)
            case "ack":
                player.acknowledge_all()
            case "tick":
                player.sleep(data.draw(st.sampled_from([1.0, 30.0])))
            case "late" if cancelled:
                player.act(cancelled[0], action="a")
    player.acknowledge_all()
    player.hold_acks = False
    player.tell(ev.Shutdown())
    machine = player.scheduler
    assert not machine.open_groups
    assert not machine.running_attempts
    assert not player.pending
    assert len(player.records) == machine.ledger.groups_launched
    assert machine.ledger.groups["cut"] == sum(record.outcome == "cut" for record in player.records)
    keepers = [keeper for keeper in (player.gate.groups, player.gate.members) if keeper is not None]
    assert all(keeper.watched == 0 for keeper in keepers if isinstance(keeper, GateKeeper | FutilityKeeper))
    for name in ("token", "attempt", "group"):
        shares = [value for key, value in machine.metrics().items() if key.startswith(f"ledger/{name}_share/")]
        assert not shares or math.isclose(sum(shares), 1.0)


@settings(max_examples=25, deadline=None)
@given(
    chosen=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=15),
    groups=st.integers(1, 4),
    size=st.integers(2, 3),
    ratio=st.sampled_from([0.0, 1.0]),
)
def test_with_replacement_every_batch_is_full(chosen: list[tuple[int, bool]], groups: int, size: int, ratio: float) -> None:
    player = Gated.make(make_gate(group_size=size, threshold=0.9), group_size=size, async_generation_ratio=ratio, query=NO_FILTER)
    for step in range(3):
        player.want(groups)
        while len(player.batches) <= step:
            open_groups = player.open_group_ids()
            place, is_cut = chosen.pop() if chosen else (0, False)
            group_id = open_groups[place % len(open_groups)]
            if is_cut:
                converge(player, group_id)
            else:
                player.run_group(group_id, *[float(place) for place in range(size)])
        player.step()
    assert [len(batch.groups) for batch in player.batches] == [groups] * 3


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_shadow_changes_nothing(data: st.DataObject) -> None:
    """The same events to a machine without a gate and to one with a shadow: the same instructions."""
    shadowed = Gated.make(make_gate(shadow=True, barrier=False))
    plain = MachinePlayer(Scheduler(shadowed.scheduler.config, shadowed.scheduler.filters), EpisodeTasks(DOMAIN, 4, seed=1))  # type: ignore[arg-type]
    told: list[ev.Event] = []
    tell = shadowed.tell

    def told_to_both(event: ev.Event, seconds: float = 1.0) -> None:
        told.append(event)
        tell(event, seconds)

    shadowed.tell = told_to_both  # type: ignore[method-assign]
    shadowed.want(2)
    for _ in range(data.draw(st.integers(1, 30))):
        if shadowed.batches:
            break
        attempt_id = data.draw(st.sampled_from(sorted(shadowed.pending)))
        if data.draw(st.booleans()):
            shadowed.act(attempt_id, action=data.draw(st.sampled_from("ab")))
        else:
            shadowed.end(attempt_id, reward=data.draw(st.sampled_from([0.0, 1.0])))
    for event in told:
        if isinstance(event, ev.MemberFinished):
            plain.pending.pop(event.rollout.attempt_id)
            plain.engine_tokens += event.rollout.sampled_tokens
        plain.tell(event)
    assert [type(one) for one in plain.instructions] == [type(one) for one in shadowed.instructions]
    assert plain.trained() == shadowed.trained()
    assert plain.left() == shadowed.left()
