"""Group filters inside the machine: one member that decides about its group, guards, redundancy, and how batches fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import EnvManagerConfig, FilterConfig
from sluice.filters import DomainFilters, RatioGuard, build_group_filter
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import Failure, Flag, Rollout
from tests.fakes import ListSource, MachinePlayer, make_rollout, make_task
from tests.filters.filters_for_tests import HERE

TIMEOUT = {"type": "env_timeout"}
FAILED = {"type": "env_failed"}
FLAG = {"type": "drop_flag"}
STD = {"type": "std_filter"}
KEEP_ALL = {"type": f"{HERE}.keep_all"}
MIXED = [1.0, 0.0]


def composed(kind: str, *inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "filter_args": {"filter": inner[0]} if kind == "not" else {"filters": list(inner)}}


FAULTS = composed("all", TIMEOUT, FAILED, STD)


def playing(
    group_filter: dict[str, Any] | None = None,
    *,
    guard: RatioGuard | None = None,
    source: ListSource | None = None,
    group_size: int = 4,
    min_members: int | None = None,
    **settings: Any,
) -> MachinePlayer:
    manager = EnvManagerConfig(
        group_size=group_size, group_filter_config=None if group_filter is None else FilterConfig.model_validate(group_filter)
    )
    query = build_group_filter(manager, mode="train", where="train_env_manager", min_members=min_members)
    settings = {"on_member_failure": "judge", **settings}
    config = SchedulerConfig(group_size=group_size, min_members=min_members, **settings)
    scheduler = Scheduler(config, {"math": DomainFilters(query=query, response=None)}, guard=guard)
    return MachinePlayer(scheduler, source or ListSource(make=lambda i: make_task(f"t{i}")))


def deliver(
    player: MachinePlayer, attempt_id: int, reward: float | None = 1.0, *flags: Flag, reason: str = "", env_id: str | None = None
) -> Rollout:
    """A member ends: with a reward, flags of its environment, or a fault of it (reason)."""
    launch = player.pending.pop(attempt_id)
    rollout = make_rollout(launch, None if reason else reward, version=player.scheduler.step)
    if reason:
        rollout = dataclasses.replace(rollout, failure=Failure(cause="infrastructure", reason=reason))
    player.engine_tokens += rollout.sampled_tokens
    player.tell(ev.MemberFinished(rollout=dataclasses.replace(rollout, flags=frozenset(flags), env_id=env_id)))
    return rollout


def deliver_group(player: MachinePlayer, group_id: int, *members: tuple[Any, ...]) -> None:
    """All members of a group end, in order of launch, until it has left."""
    for attempt_id, what in zip(player.members(group_id), members, strict=True):
        if attempt_id in player.pending:
            deliver(player, attempt_id, *what)


# ---------------------------------------------------------------- one member decides


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"reason": "env_timeout"}, "env_timeout"),
        ({"reason": "trajectory_timeout"}, "env_timeout"),
        ({"reason": "env_died"}, "env_failed"),
        ({"reason": "env_closed"}, "env_failed"),
        ({"flags": ["env_timeout"]}, "env_timeout"),
        ({"flags": ["env_failed"]}, "env_failed"),
    ],
)
def test_a_broken_member_stops_its_group_at_once(end: dict[str, Any], reason: str) -> None:
    player = playing(FAULTS)
    player.want(1)
    deliver(player, 0, 1.0)
    deliver(player, 2, 0.0, *end.get("flags", ()), reason=end.get("reason", ""))
    assert player.left() == [(0, "dropped", reason)]
    record = player.record_of(0)
    assert (record.category, record.source, record.evidence) == ("invalid", reason, {"member": 2})
    assert player.scheduler.ledger.attempts["cancelled"] == 2
    assert player.scheduler.acceptance_rate == 0.0
    assert player.open_group_ids() == [1]
    assert player.scheduler.prompts.later == []  # it was judged: its prompt is consumed
    assert player.source.returned == []


def test_a_broken_last_member_is_judged_with_its_group() -> None:
    player = playing(FAULTS, group_size=2)
    player.want(1)
    deliver(player, 0, 1.0)
    deliver(player, 1, reason="env_died")
    assert player.left() == [(0, "dropped", "env_failed")]
    assert player.record_of(0).evidence == {"members": 1, "size": 2}


def test_a_failure_that_the_policy_provoked_stops_nothing() -> None:
    """Case 122."""
    player = playing(FAULTS, group_size=2)
    player.want(1)
    launch = player.pending.pop(0)
    provoked = dataclasses.replace(make_rollout(launch, 0.0), failure=Failure(cause="policy", reason="env_timeout"))
    player.engine_tokens += provoked.sampled_tokens
    player.tell(ev.MemberFinished(rollout=provoked))
    assert not player.records
    deliver(player, 1, 1.0)
    assert player.trained() == [[0]]


@pytest.mark.parametrize(
    ("group_filter", "reason"),
    [
        (composed("all", TIMEOUT, KEEP_ALL), "env_timeout"),
        (composed("all", KEEP_ALL, TIMEOUT), "env_timeout"),
        (composed("all", TIMEOUT, composed("any", KEEP_ALL, STD)), "env_timeout"),
        (composed("all", TIMEOUT, FLAG), "env_timeout"),
        (composed("not", composed("not", TIMEOUT)), "not_not"),
        (composed("any", TIMEOUT, FAILED), None),
        (STD, None),
        (None, None),
    ],
)
def test_a_group_runs_to_its_end_when_nobody_can_foresee_the_verdict(group_filter: dict[str, Any] | None, reason: str | None) -> None:
    player = playing(group_filter, group_size=3)
    player.want(1)
    deliver(player, 0, 1.0, "env_timeout")
    deliver(player, 1, 0.0)
    assert not player.records
    assert sorted(player.pending) == [2]
    deliver(player, 2, 0.0)
    if reason is None:
        assert player.trained() == [[0]]
    else:
        assert player.left() == [(0, "dropped", reason)]
        assert player.record_of(0).evidence["members"] == 1


def test_a_filter_behind_one_that_decides_early_may_be_of_any_foreseeable_kind() -> None:
    free = {"type": "drop_flag", "filter_args": {"max_filter_ratio": None}}
    player = playing(composed("all", {"type": "missing_member"}, free, composed("any", STD, TIMEOUT)), group_size=3)
    player.want(1)
    deliver(player, 0, 1.0, "drop_flag")
    assert player.left() == [(0, "dropped", "drop_flag")]


def test_rlvr_pays_nothing_for_it() -> None:
    assert MachinePlayer.make().scheduler._disqualifying == {}
    assert playing(FAULTS).scheduler._disqualifying.keys() == {"math"}
    assert playing(composed("all", TIMEOUT, FLAG)).scheduler._disqualifying == {}


def test_groups_that_a_loop_owns_are_left_to_their_loop() -> None:
    player = playing(FAULTS, group_size=2, has_user_loop=True)
    player.want(1)
    attempt = player.start_attempt(0, 0)
    assert attempt is not None
    broken = deliver(player, attempt, 1.0, "env_timeout")
    assert not player.records
    again = player.start_attempt(0, 0)  # the loop does not want what it got
    other = player.start_attempt(0, 1)
    assert again is not None
    assert other is not None
    whole = [deliver(player, again, 1.0), deliver(player, other, 0.0)]
    player.give_back(0, [dataclasses.replace(rollout, env_id=None) for rollout in whole])
    assert player.trained() == [[0]]
    assert broken.member_index == 0


Fate = tuple[float, tuple[Flag, ...], str]
fates: st.SearchStrategy[Fate] = st.one_of(
    st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([(), (), (), ("env_timeout",), ("env_failed",)]), st.just("")),
    st.tuples(st.just(0.0), st.just(()), st.sampled_from(["env_timeout", "env_died"])),
)


@given(data=st.data(), table=st.lists(st.tuples(fates, fates, fates), min_size=6, max_size=6))
def test_deciding_early_keeps_the_same_groups_as_waiting_for_the_end(data: st.DataObject, table: list[tuple[Fate, ...]]) -> None:
    """What befalls the members of a task is fixed; the order in which they end is not."""
    trained = []
    table = [*table, ((1.0, (), ""), (0.0, (), ""), (0.0, (), ""))]  # of nothing there is no batch
    for group_filter in (FAULTS, composed("all", FAULTS, KEEP_ALL)):
        player = playing(group_filter, group_size=3, fill="shrink", max_resample_rounds=1)
        player.want(len(table))
        while player.pending:
            attempt_id = data.draw(st.sampled_from(sorted(player.pending)))
            launch = player.pending[attempt_id]
            reward, flags, reason = table[int(launch.task.task_id[1:])][launch.member_index]
            deliver(player, attempt_id, reward, *flags, reason=reason)
        trained.append([group.task.task_id for batch in player.batches for group in batch.groups])
    assert sorted(trained[0]) == sorted(trained[1])


# ---------------------------------------------------------------- redundancy


def test_case_66_and_144_a_stopped_group_leaves_nothing_behind() -> None:
    """Cases 66 and 144: one of six members is broken: the others are cancelled, what still comes of them is counted, one group refills."""
    player = playing(FAULTS, redundancy=2, max_additional_running_prompts=0)
    player.hold_acks = True
    player.want(1)
    assert sorted(player.pending) == [0, 1, 2, 3, 4, 5]
    deliver(player, 0, 1.0)
    deliver(player, 5, reason="env_timeout")
    assert player.acks == [1, 2, 3, 4]
    assert not player.records  # its attempts are still to be settled
    assert [launch.group_id for launch in player.launches[6:]] == [1] * 6
    deliver(player, 1, 1.0)  # was on its way
    deliver(player, 2, 0.0, "env_failed")
    player.acks = [3, 4]
    player.acknowledge_all()
    assert player.left() == [(0, "dropped", "env_timeout")]
    ledger = player.scheduler.ledger
    assert (ledger.attempts["cancelled"], ledger.groups["dropped"]) == (4, 1)
    assert player.scheduler.buffer.committed == 0
    assert player.open_group_ids() == [1]


def test_with_redundancy_only_the_first_members_count() -> None:
    player = playing(FAULTS, group_size=2, redundancy=1)
    player.want(1)
    deliver(player, 0, 1.0)
    deliver(player, 1, 0.0)  # whole: the third, which would have broken it, is cancelled
    assert player.trained() == [[0]]
    assert not player.pending


def test_a_member_that_never_delivered_is_replaced_and_decides_nothing() -> None:
    player = playing(FAULTS, group_size=2, on_member_failure="replace")
    player.want(1)
    player.fail(0, reason="env_timeout")
    assert [launch.member_index for launch in player.launches] == [0, 1, 0]
    deliver(player, 1, 1.0)
    deliver(player, 2, 0.0)
    assert player.trained() == [[0]]


# ---------------------------------------------------------------- the ratio guard of the run


def test_the_guard_is_asked_once_and_a_group_that_it_keeps_runs_to_its_end() -> None:
    player = playing(FAULTS, guard=RatioGuard(0.5))
    player.want(2)
    deliver(player, 0, 1.0, "env_timeout")  # the first group of all: it may not go
    deliver(player, 1, 1.0, "env_timeout")
    assert not player.records
    assert player.scheduler.guard is not None
    assert player.scheduler.guard.total == 1
    deliver(player, 4, reason="env_died")  # one of two may
    assert player.left() == [(1, "dropped", "env_failed")]
    deliver(player, 2, 0.0)
    deliver_group(player, 2, *[(1.0,), (0.0,), (1.0,), (0.0,)])
    deliver(player, 3, 0.0)  # by now one more could go, but this one has been decided on
    assert player.trained() == [[0, 2]]
    assert player.scheduler.guard.total == 3
    assert player.scheduler.guard.filtered == {"invalid": 1, "low_information": 0}
    player.step()
    assert (player.record_of(0).reason, player.record_of(0).source) == ("kept_by_guard", "ratio_guard")
    assert player.metrics[0]["scheduler/kept_by_guard"] == 1


def test_a_group_that_the_guard_let_run_on_may_still_be_dropped_for_another_reason() -> None:
    player = playing(composed("all", STD, TIMEOUT), guard=RatioGuard(0.5), group_size=2)
    player.want(2)
    deliver(player, 0, 1.0, "env_timeout")
    deliver_group(player, 1, (1.0,), (0.0,))
    deliver(player, 1, 1.0)
    assert player.left() == [(0, "dropped", "no_spread")]


def test_what_the_guard_keeps_must_still_have_a_member_to_train_on() -> None:
    player = playing(FAULTS, guard=RatioGuard(0.0), group_size=2)
    player.want(1)
    deliver(player, 0, reason="env_timeout")
    deliver(player, 1, reason="env_timeout")
    assert player.left() == [(0, "dropped", "env_timeout")]
    deliver(player, 2, reason="env_timeout")
    deliver(player, 3, 1.0)
    assert player.trained() == [[1]]
    assert player.batches[0].groups[0].counted == (False, True)


@pytest.mark.parametrize("policy", ["keep", "wait", "shrink", "raise"])
def test_the_policy_of_the_guard_acts_when_the_group_is_whole(policy: Any) -> None:
    player = playing(FAULTS, guard=RatioGuard(0.4, policy=policy), group_size=2)
    player.want(2)
    deliver(player, 0, 1.0, "env_timeout")
    assert sorted(player.pending) == [1, 2, 3]
    deliver(player, 1, 0.0)
    if policy == "raise":
        assert "invalid/env_timeout" in player.failures[0]
        return
    if policy == "wait":
        assert not player.records
        deliver_group(player, 1, (1.0,), (0.0,))
        assert player.trained() == [[0, 1]]  # nothing else could fill the batch
        return
    deliver_group(player, 1, (1.0,), (0.0,))
    assert player.trained() == ([[0, 1]] if policy == "keep" else [[1]])


# ---------------------------------------------------------------- the guard of drop_flag


def test_what_the_guard_of_drop_flag_keeps_is_counted() -> None:
    player = playing(composed("all", TIMEOUT, FLAG, STD), group_size=2)
    player.want(2)
    deliver_group(player, 0, (1.0, "drop_flag"), (0.0,))
    deliver_group(player, 1, (1.0, "drop_flag"), (0.0,))
    assert player.left() == [(1, "dropped", "drop_flag")]
    deliver_group(player, 2, (1.0,), (0.0,))
    assert player.trained() == [[0, 2]]
    assert player.metrics[0]["scheduler/kept_by_guard"] == 1
    player.step()
    record = player.record_of(0)
    assert (record.reason, record.source, record.evidence["total"]) == ("kept_by_guard", "drop_flag", 1)


def test_a_guarded_drop_flag_counts_every_group_that_is_judged() -> None:
    player = playing(composed("all", TIMEOUT, FLAG), group_size=2)
    player.want(2)
    deliver_group(player, 0, (1.0, "env_timeout"), (0.0,))
    deliver_group(player, 1, (1.0, "env_timeout"), (0.0,))
    deliver_group(player, 2, (1.0, "drop_flag"), (0.0,))  # the third: it may go
    assert player.left() == [(0, "dropped", "env_timeout"), (1, "dropped", "env_timeout"), (2, "dropped", "drop_flag")]
    assert player.record_of(2).evidence["total"] == 3


# ---------------------------------------------------------------- how batches fill (faults of other systems)


BROKEN = ((1.0, "env_timeout"), (0.0,))
FINE = ((1.0,), (0.0,))


def fill(player: MachinePlayer, outcomes: Iterable[tuple[tuple[Any, ...], ...]]) -> None:
    for outcome in outcomes:
        deliver_group(player, player.open_group_ids()[0], *outcome)


def test_case_27_a_partly_failed_group_leaves_with_all_its_members_and_one_takes_its_place() -> None:
    """Case 27: batch of 2; A finished [1, 0], B failed with one row: A and one replacement train, nothing of B does."""
    player = playing(composed("all", {"type": "missing_member"}, FAULTS), group_size=2)
    player.want(2)
    fill(player, [FINE, ((1.0,), (0.0, "env_failed")), FINE])
    assert player.trained() == [[0, 2]]
    assert player.left() == [(1, "dropped", "env_failed")]
    assert len(player.draws) == 0
    assert len(player.source.drawn) == 3


def test_case_27_and_29_a_filter_that_drops_everything_ends_in_an_error_that_names_it() -> None:
    """Cases 27 and 29: after exactly three rounds."""
    player = playing(FAULTS, group_size=2, max_resample_rounds=3)
    player.want(1)
    fill(player, [BROKEN] * 3)
    assert len(player.source.drawn) == 3
    assert "invalid/env_timeout" in player.failures[0]


def test_case_31_refill_gives_the_whole_batch_and_shrink_what_is_left() -> None:
    """Case 31: of 8 groups 3 are rejected."""
    outcomes = [FINE, BROKEN, FINE, FINE, BROKEN, FINE, BROKEN, FINE]
    refill = playing(FAULTS, group_size=2)
    refill.want(8)
    fill(refill, [*outcomes, FINE, FINE, FINE])
    assert [len(batch.groups) for batch in refill.batches] == [8]
    shrink = playing(FAULTS, group_size=2, fill="shrink")
    shrink.want(8)
    fill(shrink, outcomes)
    assert [len(batch.groups) for batch in shrink.batches] == [5]


def test_case_39_accepted_rejected_and_lost_groups_all_count_as_finished() -> None:
    """Case 39: accept, reject, lost, accept: the wait ends, with two groups."""
    player = playing(FAULTS, group_size=2, fill="shrink", max_response_rounds=1)
    player.want(4)
    fill(player, [FINE, BROKEN])
    player.lose_group(2)
    fill(player, [FINE])
    assert player.trained() == [[0, 3]]
    assert player.left()[:2] == [(1, "dropped", "env_timeout"), (2, "dropped", "response_retries")]


def test_case_43_filtering_without_refill_draws_exactly_what_was_asked_for() -> None:
    """Case 43: keep, drop, keep, drop, keep, keep, with four groups wanted."""
    outcomes = [FINE, BROKEN, FINE, BROKEN, FINE, FINE]
    for fill_mode, drawn, kept in (("shrink", 4, 2), ("refill", 6, 4)):
        player = playing(FAULTS, group_size=2, fill=fill_mode)
        player.want(4)
        fill(player, outcomes[:drawn])
        assert (len(player.source.drawn), len(player.batches[0].groups)) == (drawn, kept)


def test_case_53_members_that_got_different_problems_never_reach_the_filter() -> None:
    """Case 53: four members, four problems."""
    player = playing({"type": f"{HERE}.raises"})
    player.want(1)
    for index in range(4):
        deliver(player, index, float(index), env_id=f"game-{index}")
    assert player.left() == [(0, "dropped", "different_problems")]
    assert player.record_of(0).category == "invalid"


def test_case_88_the_place_of_a_group_that_was_stopped_is_free_again() -> None:
    """Case 88: the buffer holds nothing for it, and one more group is asked for."""
    player = playing(FAULTS, group_size=2)
    player.want(2)
    deliver(player, 0, reason="env_timeout")
    assert player.scheduler.buffer.running == 2
    fill(player, [FINE, FINE])
    assert player.trained() == [[1, 2]]
    assert player.scheduler.buffer.running == 0


def test_case_126_every_launched_group_has_one_outcome() -> None:
    """Case 126: shares sum to one, whatever the reason."""
    player = playing(composed("all", TIMEOUT, FAILED, FLAG, STD), group_size=2, fill="shrink", max_response_rounds=1)
    player.want(8)
    flag, same, died = ((1.0, "drop_flag"), (0.0,)), ((1.0,), (1.0,)), ((1.0,), (0.0, "env_failed"))
    fill(player, [FINE, BROKEN, same, died, flag, FINE])
    player.lose_group(6)
    fill(player, [FINE])
    player.step()
    reasons = [record.reason for record in sorted(player.records, key=lambda record: record.group_id)]
    assert reasons == ["kept", "env_timeout", "no_spread", "env_failed", "drop_flag", "kept", "response_retries", "kept"]
    metrics = player.metrics[0]
    rejected = {name.removeprefix("batch/rejected/"): n for name, n in metrics.items() if name.startswith("batch/rejected/")}
    assert rejected == dict.fromkeys(
        ["invalid/env_timeout", "low_information/no_spread", "invalid/env_failed", "invalid/drop_flag", "invalid/response_retries"], 1.0
    )
    assert sum(rejected.values()) + metrics["scheduler/collect_query_count"] == 8
