"""`SequentialKeeper`: cuts in any interleaving what it would cut on a recorded group, at the same step; audits; exact stops."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import GateKeeper
from sluice.gate.exact import ExactStop
from sluice.gate.learned import threshold
from sluice.gate.played import looks
from sluice.gate.sequential import SequentialKeeper
from sluice.gate.traces import GroupTrace
from tests.gate.played_groups import HORIZON, fitted, interleavings, played

FLOOR = 0.8
SURE = ExactStop(deterministic_environment=True, same_continuation=True)
GROUPS = [played(seed) for seed in range(2000, 2060)]


def keeper(rule=True, **more) -> SequentialKeeper:
    return SequentialKeeper(fitted() if rule else None, **{"group_size": 4, "horizon": HORIZON, "floor": FLOOR, "audit_rate": 0.0, **more})


def tell(watch, key, group, event):
    """One event, and the verdict that comes of it."""
    if event[0] == "step":
        _, name, t = event
        step = group.members[name].steps[t - 1]
        before = "room 0" if t == 1 else group.members[name].steps[t - 2].reply
        watch.observe(
            key,
            name,
            t,
            step.action,
            before,
            reply=step.reply,
            is_admissible=step.is_admissible,
            progress=step.progress,
            logprob=step.logprob,
        )
        if t == len(group.members[name].steps):
            return None  # how it ends is told next, and may matter
    else:
        watch.member_ended(key, event[1], group.members[event[1]].reward)
    return watch.decision(key)


def together(group):
    """The events of a group whose members step together."""
    for t in range(1, HORIZON + 1):
        for name, member in enumerate(group.members):
            if len(member.steps) >= t:
                yield "step", name, t
                if len(member.steps) == t:
                    yield "end", name


def play(watch, key, group, events=None):
    """All that came; events after a cut are told too, and do no harm."""
    watch.group_launched(key)
    came = [verdict for event in (events or together(group)) if (verdict := tell(watch, key, group, event)) is not None]
    watch.group_ended(key, [member.reward for member in group.members])
    assert len(came) <= 1
    return came[0] if came else None


def expected_cut(group) -> int | None:
    """The step at which a recorded group is cut."""
    rule = fitted()
    least = threshold(rule.group_calibration, FLOOR)
    return next((look.step for look in looks(group, GroupTrace(HORIZON), rule.steps) if rule.of_group(look).score >= least), None)


# ---------------------------------------------------------------- in every interleaving


def test_a_group_is_cut_where_a_recorded_one_is() -> None:
    came = {group.key: play(keeper(), 0, group) for group in GROUPS}
    cut = {key: int(verdict.evidence["k"]) for key, verdict in came.items() if verdict is not None and not verdict.keep}
    assert cut == {group.key: step for group in GROUPS if (step := expected_cut(group)) is not None}
    assert 10 < len(cut) < 50
    assert sum(group.is_equal for group in GROUPS if group.key in cut) / len(cut) > 0.75


@settings(max_examples=30)
@given(st.data(), st.sampled_from(GROUPS))
def test_it_does_not_matter_who_runs_ahead(data, group) -> None:
    """A member that ran ahead and ended otherwise than another is known, so that such a group is never cut; else nothing differs."""
    _, events = data.draw(interleavings(group))
    verdict = play(keeper(), 0, group, events)
    if verdict is not None and not verdict.keep:
        assert verdict.evidence["k"] == expected_cut(group)
        assert (verdict.reason, verdict.category, verdict.source) == ("predicted_equal", "low_information", "gate")
        assert verdict.evidence["bound"] >= FLOOR
    elif expected_cut(group) is not None:
        assert not group.is_equal, "only because members are known to have ended differently"


@given(st.data(), st.sampled_from(GROUPS), st.integers(0, 3))
@settings(max_examples=15)
def test_a_lost_member_is_waited_for_and_is_as_if_it_had_never_been(data, group, lost) -> None:
    _, events = data.draw(interleavings(group))
    whole, broken = keeper(), keeper()
    broken.group_launched(1)
    before = GROUPS[0] if group is not GROUPS[0] else GROUPS[1]
    for t in range(1, min(4, len(before.members[lost].steps))):  # another trajectory, which fails
        assert tell(broken, 1, before, ("step", lost, t)) is None
    broken.member_ended(1, lost, comparable=False)
    came = [verdict for event in events if (verdict := tell(broken, 1, group, event)) is not None]
    expected = play(whole, 0, group, events)
    assert (came[0].evidence if came else None) == (expected.evidence if expected is not None else None)


def test_redundant_members_are_not_waited_for() -> None:
    group = next(group for group in GROUPS if expected_cut(group) is not None)
    watch = keeper(redundancy=1)
    verdict = play(watch, 0, group)
    assert verdict.evidence["k"] == expected_cut(group)


def test_a_group_that_is_too_small_is_left_alone() -> None:
    watch = keeper()
    watch.group_launched(0)
    for name in range(3):
        watch.member_ended(0, name, comparable=False, is_replaced=False)
    assert watch.decision(0) is None
    assert watch.watched == 0
    assert watch.metrics()["gate/undecided"] == 1


def test_finished_members_with_different_rewards_are_never_cut() -> None:
    watch = keeper(shadow=True)
    for group in GROUPS:
        verdict = play(watch, group.key, group)
        rewards = {member.reward for member in group.members if verdict is not None and len(member.steps) <= verdict.evidence["k"]}
        assert verdict is None or verdict.reason == "kept" or len(rewards) < 2


def test_with_a_barrier_members_wait_for_every_look() -> None:
    watch, group = keeper(), GROUPS[0]
    watch.group_launched(0)
    first = fitted().steps[0]
    for t in range(1, first + 1):
        assert not watch.holds(0, 0)
        tell(watch, 0, group, ("step", 0, t))
    assert watch.holds(0, 0)
    for name in (1, 2, 3):
        for t in range(1, first + 1):
            tell(watch, 0, group, ("step", name, t))
    assert not watch.holds(0, 0)
    assert not watch.holds(7, 0)


# ---------------------------------------------------------------- audits


def test_audited_groups_run_on_and_tell() -> None:
    watch = keeper(audit_rate=1.0)
    came = {group.key: play(watch, group.key, group) for group in GROUPS}
    audited = {key for key, verdict in came.items() if verdict is not None and verdict.reason == "audited"}
    assert audited == {group.key for group in GROUPS if expected_cut(group) is not None}
    right = sum(group.is_equal for group in GROUPS if group.key in audited)
    assert (watch.precision.right, watch.precision.n) == (right, len(audited))
    shown = watch.metrics(tokens_per_env_step=2.0)
    assert (shown["gate/cut"], shown["gate/would_cut"], shown["gate/audited"]) == (0, len(audited), len(audited))
    assert shown["gate/judged"] + shown["gate/undecided"] == len(GROUPS)
    assert watch.watched == 0


def test_saved_steps_are_those_that_audited_groups_still_took() -> None:
    group = next(group for group in GROUPS if expected_cut(group) is not None)
    watch = keeper(shadow=True)
    for number in range(2):
        assert play(watch, number, group).reason == "shadow"
    steps = sum(max(0, len(member.steps) - expected_cut(group)) for member in group.members)
    assert watch._audit._remaining.mean == steps
    assert not watch.is_cutting
    cutting = keeper()
    play(cutting, 0, group)
    running = sum(len(member.steps) > expected_cut(group) for member in group.members)
    assert cutting.metrics()["gate/env_steps_saved_bound"] == running * (HORIZON - expected_cut(group))


def test_a_precision_that_is_held_opens_and_moves_the_threshold() -> None:
    watch = keeper(hold_precision=0.5, audit_rate=0.5)
    assert not watch.is_cutting
    cut = 0
    for number in range(150):
        group = GROUPS[number % len(GROUPS)]
        verdict = play(watch, number, group)
        cut += verdict is not None and not verdict.keep
    assert watch.is_cutting
    assert cut
    assert watch.scale != 1.0
    assert watch.precision.low >= 0.5


def test_a_state_goes_on_where_it_was() -> None:
    first, second = keeper(audit_rate=1.0), keeper(audit_rate=1.0)
    for group in GROUPS[:20]:
        play(first, group.key, group)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics() == first.metrics()
    with pytest.raises(GateError, match="of another gate"):
        keeper(floor=0.7).load_state_dict(first.state_dict())


def test_it_has_all_that_a_keeper_of_groups_has() -> None:
    names = {name for name in vars(GateKeeper) if not name.startswith("_")} - {"learn"}
    assert names <= {name for name in vars(SequentialKeeper) if not name.startswith("_")}


# ---------------------------------------------------------------- the exact stop


def twins(same: int, size: int = 3):
    """Members that do the same for so many steps."""
    return [[("go", "hall")] * same + [(f"look {name}", "room")] * (4 - same) for name in range(size)]


@pytest.mark.parametrize("same", range(5))
def test_members_that_have_done_and_seen_the_same_are_one(same) -> None:
    watch = keeper(rule=False, exact=SURE, group_size=3)
    watch.group_launched(0)
    came = []
    for t in range(4):
        for name, row in enumerate(twins(same)):
            watch.observe(0, name, t + 1, row[t][0], reply=row[t][1])
            came.append((t + 1, watch.decision(0)))
    cuts = [(t, verdict) for t, verdict in came if verdict is not None]
    if same == 0:
        assert cuts == []
        return
    [(t, verdict)] = cuts
    assert t == 1, "at the first step"
    assert (verdict.keep, verdict.reason, verdict.evidence["k"]) == (False, "identical_members", 1)


def test_a_group_that_parted_is_not_identical_again() -> None:
    watch = keeper(rule=False, exact=SURE, group_size=2, floor=0.5)
    watch.group_launched(0)
    for t, actions in enumerate([("a", "b"), ("c", "c"), ("c", "c")], 1):
        for name, action in enumerate(actions):
            watch.observe(0, name, t, action, reply="hall")
            assert watch.decision(0) is None
    watch.group_ended(0, [0.0, 0.0])
    assert watch.watched == 0


def test_both_stops_go_together() -> None:
    watch = keeper(exact=SURE)
    verdicts = [play(watch, group.key, group) for group in GROUPS]
    reasons = {verdict.reason for verdict in verdicts if verdict is not None}
    assert {"predicted_equal"} <= reasons <= {"predicted_equal", "identical_members", "kept"}


@pytest.mark.parametrize("name", ["deterministic_environment", "same_continuation"])
def test_what_is_not_declared_is_not_assumed(name) -> None:
    with pytest.raises(ConfigError, match=f"gate.exact.{name}: expected true, got False"):
        ExactStop(**{"deterministic_environment": True, "same_continuation": True, name: False})


# ---------------------------------------------------------------- errors


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="a fitted rule, the exact stop or both, got neither"):
        keeper(rule=False)
    with pytest.raises(ConfigError, match="group_size 4, got 3"):
        keeper(group_size=3)
    with pytest.raises(ConfigError, match="highest lower bound of this rule, got 0.9999"):
        keeper(floor=0.9999)
    with pytest.raises(ConfigError, match="floor: expected a number"):
        keeper(floor=2)
    with pytest.raises(ConfigError, match="gate.audit_rate"):
        keeper(audit_rate=7)


def test_what_cannot_have_happened_is_refused() -> None:
    watch, group = keeper(), GROUPS[0]
    watch.group_launched(0)
    with pytest.raises(GateError, match="not watched yet, got 0 again"):
        watch.group_launched(0)
    tell(watch, 0, group, ("step", 0, 1))
    with pytest.raises(GateError, match="expected step 2 of member 0 of group 0, got step 1"):
        tell(watch, 0, group, ("step", 0, 1))
    with pytest.raises(GateError, match="gate: group 0, step 2, member 0: expected is_admissible with every step"):
        watch.observe(0, 0, 2, "look", reply="x", progress=0.0, logprob=0.0)
    watch.member_ended(0, 1, 0.0)
    with pytest.raises(GateError, match="expected no further step"):
        tell(watch, 0, group, ("step", 1, 1))
    watch.observe(9, 0, 5, "of a group that is gone")


def test_groups_that_run_at_a_checkpoint_are_lost_to_the_audits() -> None:
    first = keeper(audit_rate=1.0)
    for group in GROUPS[:20]:
        first.group_launched(group.key)
        for event in list(together(group))[:-1]:
            tell(first, group.key, group, event)
    second = keeper(audit_rate=1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for group in GROUPS[:20]:
        first.group_ended(group.key)
    assert second.metrics() == first.metrics()
    assert first.metrics()["gate/audited_lost"]


@pytest.mark.parametrize("horizon", [0, 1.5, None, "5", float("nan")], ids=repr)
def test_a_horizon_that_is_none_is_refused(horizon) -> None:
    with pytest.raises(ConfigError, match="gate.horizon: expected a whole number >= 1"):
        SequentialKeeper(None, exact=SURE, group_size=2, horizon=horizon)
