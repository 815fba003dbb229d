"""`FutilityKeeper`: a trajectory that gets nowhere is stopped, once; audits tell how often rightly; nothing is left behind."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import FutilityKeeper, FutilityRule
from tests.gate.strategies import NOT_BY_VALUE

OBSERVATIONS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14)


def keeper(audit_rate: float = 0.0, settings=None, **rule) -> FutilityKeeper:
    return FutilityKeeper(FutilityRule(**(rule or {"steps": 2})), audit_rate=audit_rate, **(settings or {}))


def play(watch, observations, *, group="g", member=0, **more) -> int | None:
    """Tell of all steps of a member; the step at which it was to be stopped."""
    stopped = [step for step, seen in enumerate(observations, 1) if watch.observe(group, member, step, seen, **more)]
    assert stopped == ([] if not stopped else list(range(stopped[0], len(observations) + 1))), "and every step after it"
    return stopped[0] if stopped else None


# ---------------------------------------------------------------- signs, against a slow model that looks at the whole trajectory again


def _first(observations, n, is_bad):
    """The first step at which the last n steps are all bad."""
    bad = [is_bad(t) for t in range(len(observations))]
    return next((t + 1 for t in range(len(bad)) if t + 1 >= n and all(bad[t + 1 - n : t + 1])), None)


@given(OBSERVATIONS, st.integers(1, 4))
def test_no_new_observation_for_n_steps(observations, n) -> None:
    expected = _first(observations, n, lambda t: observations[t] in observations[:t])
    assert play(keeper(steps=n), observations) == expected


@given(OBSERVATIONS, st.integers(1, 4))
def test_what_the_reset_answered_is_not_new_when_it_was_told(observations, n) -> None:
    watch = keeper(steps=n)
    assert not watch.observe("g", 0, 0, "a")
    assert play(watch, observations) == _first(observations, n, lambda t: observations[t] in ["a", *observations[:t]])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), min_size=1, max_size=14), st.integers(2, 4))
def test_a_loop_is_the_same_action_after_the_same_observation(steps, n) -> None:
    watch = keeper(loops=n)
    watch.observe("g", 0, 0, "start")
    pairs = [(before, action) for (before, _), (_, action) in zip([("start", ""), *steps], steps, strict=False)]
    expected = next((t + 1 for t, pair in enumerate(pairs) if pairs[: t + 1].count(pair) >= n), None)
    came = [t + 1 for t, (seen, action) in enumerate(steps) if watch.observe("g", 0, t + 1, seen, action=action)]
    assert (came[0] if came else None) == expected


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=14), st.integers(1, 4))
def test_refused_actions_in_a_row(allowed, n) -> None:
    watch = keeper(invalid_actions=n)
    came = [t + 1 for t, is_allowed in enumerate(allowed) if watch.observe("g", 0, t + 1, t, is_admissible=is_allowed)]
    assert (came[0] if came else None) == _first(allowed, n, lambda t: allowed[t] is False)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=1, max_size=14), st.integers(1, 4))
def test_progress_that_is_no_higher_than_ever_before(progress, n) -> None:
    watch = keeper(progress_steps=n)
    watch.observe("g", 0, 0, "start", progress=0.0)
    came = [t + 1 for t, value in enumerate(progress) if watch.observe("g", 0, t + 1, t, progress=value)]
    assert (came[0] if came else None) == _first(progress, n, lambda t: progress[t] <= max([0.0, *progress[:t]]))


def test_signs_are_off_unless_given() -> None:
    watch = keeper(invalid_actions=3)
    assert play(watch, ["a"] * 20, action="look", progress=0.0, is_admissible=True) is None


def test_the_first_sign_is_the_reason() -> None:
    watch = keeper(steps=5, invalid_actions=2)
    play(watch, ["a", "b"], is_admissible=False)
    assert watch.reason("g", 0) == "invalid_actions"
    assert watch.reason("g", 1) is None
    assert watch.metrics()["gate/futile_reason/invalid_actions"] == 1


# ---------------------------------------------------------------- members and groups


def test_members_are_apart() -> None:
    watch = keeper(steps=2)
    for step, seen in enumerate("aaa", 1):
        assert not watch.observe("g", "moving", step, f"{seen}{step}")
        assert watch.observe("g", "stuck", step, seen) == (step == 3)
    assert not watch.observe("other", "stuck", 1, "a")


def test_a_lost_member_is_as_if_it_had_never_been() -> None:
    watch = keeper(steps=2)
    play(watch, "aa")
    watch.member_ended("g", 0, comparable=False)
    assert play(watch, "aaa") == 3


def test_events_of_members_and_groups_that_are_gone_do_no_harm() -> None:
    watch = keeper(steps=1)
    watch.observe("g", 0, 1, "a")
    watch.member_ended("g", 0, 0.0)
    assert not watch.observe("g", 0, 1, "a")
    assert not watch.observe("g", 0, 2, "a")
    watch.group_ended("g")
    watch.group_ended("g")
    watch.member_ended("g", 0, 0.0)
    assert not watch.observe("g", 0, 7, "a")
    assert watch.watched == 0


def test_a_group_is_known_when_all_are_stopped_or_ended_alike() -> None:
    watch = keeper(steps=1)
    for member in range(3):
        assert watch.verdict("g", 3) is None
        play(watch, "aa", member=member)
    verdict = watch.verdict("g", 3)
    assert not verdict.keep
    assert (verdict.reason, verdict.category, verdict.source) == ("all_futile", "low_information", "gate")
    assert verdict.evidence == {"n": 3, "stopped": 3, "reward": 0.0}
    watch.member_ended("g", 0, 0.0)  # by the stop
    assert watch.verdict("g", 3) is not None


@pytest.mark.parametrize(("rewards", "is_known"), [([0.0, 0.0], True), ([1.0, 0.0], False), ([None, 0.0], False)])
def test_a_group_with_a_success_is_never_given_up(rewards, is_known) -> None:
    watch = keeper(steps=1)
    for member, reward in enumerate(rewards):
        watch.observe("g", member, 1, "a")
        watch.member_ended("g", member, reward)
    assert watch.verdict("g", 2) is None, "nobody was stopped: the filters judge it"
    play(watch, "aa", member=2)
    assert (watch.verdict("g", 3) is not None) == is_known


# ---------------------------------------------------------------- audits


def test_the_lot_is_of_group_and_member_and_the_same_again() -> None:
    def stopped(seed: int) -> list[bool]:
        watch = FutilityKeeper(FutilityRule(steps=1), seed=seed, audit_rate=0.4)
        return [play(watch, "aa", group=group, member=member) is not None for group in range(60) for member in range(5)]

    assert stopped(1) == stopped(1) != stopped(2)
    assert 0.5 < sum(stopped(1)) / 300 < 0.7


def test_audited_members_run_on_and_tell() -> None:
    watch = keeper(1.0, {"horizon": 10}, steps=1)
    for member, (steps, reward) in enumerate([(8, 0.0), (5, 1.0), (3, 0.0), (4, None)]):
        assert play(watch, ["a"] * steps, member=member) is None
        assert watch.reason("g", member) == "no_new_observation"
        watch.member_ended("g", member, reward)
    play(watch, "aa", member=9)
    watch.group_ended("g")
    shown = watch.metrics()
    assert (shown["gate/futile_would_stop"], shown["gate/futile_stopped"]) == (5, 0)
    assert (shown["gate/futile_audited"], shown["gate/futile_audited_lost"]) == (3, 2)
    assert shown["gate/futile_precision"] == 2 / 3
    assert shown["gate/futile_precision_low"] < 2 / 3 < shown["gate/futile_precision_high"]


def test_right_means_the_reward_that_it_already_had() -> None:
    watch = keeper(1.0, steps=1)
    for member, final in enumerate([0.5, 0.75]):
        play(watch, "aa", member=member, reward=0.5)
        watch.member_ended("g", member, final)
    assert watch.precision.right == 1


def test_saved_steps_are_estimated_from_audited_members() -> None:
    watch = FutilityKeeper(FutilityRule(steps=1), audit_rate=0.5, horizon=10)
    stopped = 0
    for member in range(200):
        is_stopped = play(watch, "aa", member=member) is not None
        stopped += is_stopped
        watch.member_ended("g", member, 0.0, env_steps=2 if is_stopped else 8)
    shown = watch.metrics(tokens_per_env_step=5.0)
    assert shown["gate/futile_env_steps_saved_estimate"] == stopped * 6
    assert shown["gate/futile_env_steps_saved_estimate_low"] == shown["gate/futile_env_steps_saved_estimate_high"] == stopped * 6
    assert shown["gate/futile_env_steps_saved_bound"] == stopped * 8
    assert shown["gate/futile_tokens_saved_estimate"] == stopped * 30


def judged(watch, number: int, reward: float):
    """One more member that would be stopped, and its end."""
    is_stopped = play(watch, "aa", group=number) is not None
    warning = watch.member_ended(number, 0, 0.0 if is_stopped else reward)
    watch.group_ended(number)
    return is_stopped, warning


def test_a_precision_that_is_held_switches_it_off_and_on_again() -> None:
    watch = keeper(0.5, {"hold_precision": 0.9}, steps=1)
    told = [judged(watch, number, 0.0) for number in range(100)]
    assert 30 < sum(stopped for stopped, _ in told) < 70
    assert watch.is_stopping
    told = [judged(watch, number, 1.0) for number in range(100, 160)]  # the policy has learnt: all of them would have succeeded
    [warning] = [warning for _, warning in told if warning]
    assert "hold_precision 0.9" in warning
    off = next(place for place, (_, warning) in enumerate(told) if warning)
    assert not any(stopped for stopped, _ in told[off + 1 :])
    assert watch.metrics()["gate/futile_is_stopping"] == 0
    again = keeper(0.5, {"hold_precision": 0.9}, steps=1)
    again.load_state_dict(watch.state_dict())
    assert not again.is_stopping
    told = [judged(watch, number, 0.0) for number in range(200, 1000)]
    assert any(stopped for stopped, _ in told), "and on again"
    assert not any(warning for _, warning in told)


def test_a_precision_above_its_floor_is_left_alone() -> None:
    watch = keeper(0.5, {"hold_precision": 0.8}, steps=1)
    for number in range(400):
        _, warning = judged(watch, number, float(number % 10 == 0))
        assert warning is None
    assert watch.is_stopping


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(["step", "step", "step", "end", "lost", "gone"]), st.booleans()),
        max_size=80,
    )
)
def test_counts_conserve_in_every_interleaving(events) -> None:
    watch = FutilityKeeper(FutilityRule(steps=1), audit_rate=0.5, seed=3)
    steps: dict[tuple[int, int], int] = {}
    stopped = set()
    for group, member, what, is_new in events:
        key = (group, member)
        if what == "step" and key not in stopped:
            steps[key] = steps.get(key, 0) + 1
            if watch.observe(group, member, steps[key], steps[key] if is_new else 0):
                stopped.add(key)
        elif what in ("end", "lost"):
            watch.member_ended(group, member, 0.0, what == "end")
            steps.pop(key, None)
            if what == "lost":
                stopped.discard(key)
        elif what == "gone":
            watch.group_ended(group)
            for one in [one for one in steps if one[0] == group]:
                del steps[one]
            stopped = {one for one in stopped if one[0] != group}
    for group in range(3):
        watch.group_ended(group)
    shown = watch.metrics()
    assert watch.watched == 0
    assert (
        shown["gate/futile_would_stop"] == shown["gate/futile_stopped"] + shown["gate/futile_audited"] + shown["gate/futile_audited_lost"]
    )


# ---------------------------------------------------------------- states and errors


def test_a_state_goes_on_where_it_was() -> None:
    first = keeper(1.0, steps=1)
    for member in range(3):
        play(first, "aaa", member=member)
        first.member_ended("g", member, float(member == 0))
    state = json.loads(json.dumps(first.state_dict()))
    second = keeper(1.0, steps=1)
    second.load_state_dict(state)
    assert second.metrics() == first.metrics()
    assert second.watched == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rule": "other"},
        {"is_stopping": 1},
        {"reasons": [1]},
        {"outcomes": [1]},
        {"counts": {}},
        {"remaining": [1, 2]},
        {"remaining": [0, float("nan"), 0.0]},
        {"remaining": [2, 1.0, -1.0]},
        {"remaining": [2, 10**400, 1.0]},
    ],
)
def test_a_torn_state_is_refused_and_changes_nothing(change) -> None:
    watch = keeper()
    before = watch.state_dict()
    with pytest.raises(GateError, match="go on from a checkpoint"):
        watch.load_state_dict({**before, **change})
    with pytest.raises(GateError, match="go on from a checkpoint"):
        watch.load_state_dict(None)
    assert watch.state_dict() == before


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "at least one sign"),
        ({"steps": 0}, "futility.steps: expected a whole number >= 1, got 0"),
        ({"steps": True}, "got True"),
        ({"loops": 1}, "futility.loops: expected a whole number >= 2, got 1"),
        ({"invalid_actions": 2.5}, "got 2.5"),
        ({"progress_steps": -1}, "got -1"),
    ],
)
def test_rules_that_cannot_work_are_refused(rule, message) -> None:
    with pytest.raises(ConfigError, match=message):
        FutilityRule(**rule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"audit_rate": 1.5}, "futility.audit_rate"),
        ({"confidence": 1}, "futility.confidence"),
        ({"window": 0}, "futility.window"),
        ({"horizon": "30"}, "futility.horizon"),
        ({"hold_precision": 1}, "futility.hold_precision: expected a number > 0 and < 1"),
        ({"hold_precision": 0.9, "audit_rate": 0}, "with an audit_rate above 0"),
        ({"hold_precision": 0.95, "window": 71}, "futility.window: expected at least 72 audited members for hold_precision 0.95, got 71"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        FutilityKeeper(FutilityRule(steps=1), **settings)


def test_what_cannot_have_happened_is_refused() -> None:
    watch = keeper(steps=1)
    watch.observe("g", 0, 1, "a")
    for step in (1, 3):
        with pytest.raises(GateError, match="expected step 2 of member 0 of group 'g'"):
            watch.observe("g", 0, step, "a")
    with pytest.raises(GateError, match="an observation that is hashable"):
        watch.observe("g", 0, 2, ["a"])
    with pytest.raises(GateError, match="the action of every step, which loops needs"):
        keeper(loops=2).observe("g", 0, 1, "a")
    with pytest.raises(GateError, match="an action that is hashable"):
        keeper(loops=2).observe("g", 0, 1, "a", action=["b"])
    for progress in (None, float("nan")):
        with pytest.raises(GateError, match="the environment's progress with every step"):
            keeper(progress_steps=2).observe("g", 0, 1, "a", progress=progress)


@pytest.mark.parametrize("value", NOT_BY_VALUE, ids=repr)
def test_what_cannot_be_compared_by_value_is_refused(value) -> None:
    with pytest.raises(GateError, match="member 0 of group 'g', step 1: expected an observation that equals another one"):
        keeper().observe("g", 0, 1, value)
    with pytest.raises(GateError, match="member 0 of group 'g': expected an observation that equals another one"):
        keeper().observe("g", 0, 0, value)
    with pytest.raises(GateError, match="expected an action that equals another one"):
        keeper(loops=2).observe("g", 0, 1, "a", action=value)


def test_truths_and_numbers_of_numpy_count_as_such() -> None:
    watch = keeper(invalid_actions=2)
    assert [watch.observe("g", 0, step, str(step), np.bool_(False)) for step in (1, 2)] == [False, True]
    watch = keeper(progress_steps=1)
    assert [watch.observe("g", 0, step, str(step), None, np.float32(0.5)) for step in (1, 2)] == [False, True]
    for value in (0, "no", np.array([False])):
        with pytest.raises(GateError, match="step 1: expected is_admissible as True, False or None, got"):
            keeper().observe("g", 0, 1, "a", value)


@pytest.mark.parametrize("env_steps", [math.nan, "3", 2.5, -1, True], ids=repr)
def test_steps_of_a_member_are_a_whole_number(env_steps) -> None:
    watch = keeper(1.0, steps=1)
    play(watch, "aa")
    with pytest.raises(GateError, match="env_steps: expected a whole number >= 0, or None, got"):
        watch.member_ended("g", 0, 0.0, env_steps=env_steps)


@pytest.mark.parametrize("rule", [None, {"steps": 2}, FutilityRule, 6], ids=repr)
def test_what_is_no_rule_is_refused(rule) -> None:
    with pytest.raises(ConfigError, match="futility: expected a rule with name and watch, got .* - make a FutilityRule"):
        FutilityKeeper(rule)


def test_members_that_run_at_a_checkpoint_are_lost_to_the_audits() -> None:
    first = keeper(1.0, steps=1)
    play(first, "aa")
    play(first, "ab", member=1)
    play(first, "aa", member=2)
    first.member_ended("g", 2, 0.0)
    second = keeper(1.0, steps=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    first.group_ended("g")
    assert second.metrics() == first.metrics()
    assert first.metrics()["gate/futile_audited_lost"] == 1


def test_no_estimate_of_what_is_saved_is_above_its_bound() -> None:
    first, watch = keeper(1.0, {"horizon": 10}, steps=1), keeper(0.0, {"horizon": 10}, steps=1)
    for member, more in ((0, 1), (1, 8)):
        play(first, "aa", member=member)
        first.member_ended("g", member, 0.0, env_steps=2 + more)
    watch.load_state_dict(first.state_dict())
    play(watch, "abcdefga")
    shown = watch.metrics()
    assert shown["gate/futile_env_steps_saved_bound"] == 2
    assert shown["gate/futile_env_steps_saved_estimate"] == shown["gate/futile_env_steps_saved_estimate_high"] == 2
