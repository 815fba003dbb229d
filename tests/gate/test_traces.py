"""What a running group has shown: the same numbers in any interleaving as on a recorded group, and as counted by a slow model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import signals
from sluice.gate.played import looks
from sluice.gate.traces import INPUTS, GroupTrace, MemberTrace, Step, group_features, member_features
from tests.gate.played_groups import HORIZON, interleavings, played
from tests.gate.strategies import NOT_BY_VALUE

STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["look", "take", "go"]),
        st.sampled_from(["hall", "room", "nothing"]),
        st.booleans(),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.floats(-3, 0),
    ),
    min_size=1,
    max_size=HORIZON,
)


def same(a, b) -> bool:
    return (
        (a.step, a.running, a.rewards, a.is_open, a.are_identical) == (b.step, b.running, b.rewards, b.is_open, b.are_identical)
        and np.array_equal(a.of_group, b.of_group)
        and np.array_equal(a.of_members, b.of_members)
    )


@given(interleavings())
def test_a_running_group_shows_what_a_recorded_one_shows(told) -> None:
    group, events = told
    names = range(len(group.members))
    trace = GroupTrace(HORIZON)
    came = {}
    for event in events:
        if event[0] == "step":
            trace.add(event[1], group.members[event[1]].steps[event[2] - 1], "room 0")
        else:
            trace.end(event[1], group.members[event[1]].reward)
        for t in range(1, HORIZON):
            if t not in came and len(trace.comparable(t)) == len(names):
                came[t] = trace.look(t, names)
    recorded = list(looks(group, GroupTrace(HORIZON)))
    assert recorded, "the first step of two members that part is open"
    for look in recorded:
        # A member whose last step was told and whose end was not may still be seen as running: the end comes with it.
        if look.step in came and len(came[look.step].running) == len(look.running):
            assert same(came[look.step], look)
    final = [trace.look(t, names) for t in range(1, HORIZON)]
    assert all(same(final[look.step - 1], look) for look in recorded), "and afterwards too"


@given(STEPS, st.booleans())
def test_features_of_a_member_are_what_a_slow_count_makes(steps, is_known) -> None:
    trace = MemberTrace(HORIZON, INPUTS, "hall" if is_known else None)
    for t, step in enumerate(steps, 1):
        shown = dict(zip(member_features(), trace.add(step), strict=True))
        past = steps[:t]
        befores = ["hall" if is_known else None, *(one.reply for one in past)]
        seen = [one for one in befores[:1] if one is not None]
        new = []
        for one in past:
            new.append(one.reply not in seen)
            seen.append(one.reply)
        repeats = [one.action in [other.action for other in past[:i]] for i, one in enumerate(past)]
        places = [(before, one.action) for before, one in zip(befores, past, strict=False)]
        loops = [places.index(place) < i for i, place in enumerate(places)]
        refused = [not one.is_admissible for one in past]
        expected = {
            "repeat_share": np.mean(repeats),
            "repeat_recent": np.mean(repeats[-5:]),
            "since_new": new[::-1].index(True) if any(new) else t,
            "new_share": np.mean(new),
            "new_recent": np.mean(new[-5:]),
            "loop_share": np.mean(loops),
            "loop_recent": np.mean(loops[-5:]),
            "loop_most": max(map(places.count, places)),
            "refused_share": np.mean(refused),
            "refused_recent": np.mean(refused[-5:]),
            "refused_row": refused[::-1].index(False) if not all(refused) else t,
            "progress": step.progress,
            "progress_best": max(one.progress for one in past),
            "since_progress": t - 1 - next(i for i, one in enumerate(past) if one.progress == max(other.progress for other in past)),
            "logprob_mean": np.mean([one.logprob for one in past]),
            "logprob_recent": np.mean([one.logprob for one in past[-5:]]),
            "step": t,
            "time_left": (HORIZON - t) / HORIZON,
        }
        assert list(shown) == list(expected)
        assert shown == pytest.approx(expected)


@given(interleavings(), st.integers(1, HORIZON - 1))
def test_signals_of_a_look_are_those_of_the_gate(told, t) -> None:
    group, _ = told
    look = next((look for look in looks(group, GroupTrace(HORIZON)) if look.step == t), None)
    if look is None:
        return
    shown = dict(zip(group_features(), look.of_group.tolist(), strict=True))
    expected = signals([[step.action for step in member.steps] for member in group.members], t)
    for name in ("prefix_edit_distance_mean", "action_bigram_jaccard_mean", "unique_prefix_ratio", "unique_action_ratio", "action_entropy"):
        assert shown[name] == expected[name]
    ended = [member for member in group.members if len(member.steps) <= t]
    assert shown["share_ended"] == len(ended) / len(group.members)
    column = look.of_members[:, member_features().index("since_new")]
    assert (shown["since_new_least"], shown["since_new_most"]) == (column.min(), column.max())


@given(st.lists(STEPS, min_size=2, max_size=4))
def test_members_are_identical_when_they_have_done_and_seen_the_same(members) -> None:
    trace = GroupTrace(HORIZON)
    for name, steps in enumerate(members):
        for step in steps:
            trace.add(name, step, "hall")
    for t in range(1, min(map(len, members)) + 1):
        is_same = len({tuple((step.action, step.reply) for step in steps[:t]) for steps in members}) == 1
        assert trace.look(t).are_identical == is_same


def test_features_are_those_of_the_inputs() -> None:
    assert member_features([]) == ("repeat_share", "repeat_recent", "step", "time_left")
    assert "reply_unique_ratio" not in group_features(["progress"])
    for inputs in ([], ["reply"], ["logprob", "reply"], INPUTS):
        trace = GroupTrace(HORIZON, inputs)
        for name in range(2):
            trace.add(name, Step("look", "hall", True, 0.0, -1.0))
        look = trace.look(1)
        assert look.of_members.shape == (2, len(member_features(inputs)))
        assert len(look.of_group) == len(group_features(inputs))
        for name in range(2):
            trace.end(name, 0.0)
        look = trace.look(1)
        assert look.of_members.shape == (0, len(member_features(inputs)))
        assert len(look.of_group) == len(group_features(inputs))
        assert not look.is_open


def test_a_forgotten_member_has_never_been() -> None:
    trace = GroupTrace(HORIZON, [])
    trace.add("a", Step("look"))
    trace.add("b", Step("take"))
    trace.forget("a")
    assert trace.members == ("b",)
    assert trace.steps_of("a") == 0
    trace.add("a", Step("go"))
    assert trace.comparable(1) == ["b", "a"], "in the order of getting there"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(["look"], "x", True, 0.0, 0.0), "an action that is hashable"),
        (Step("look", ["x"], True, 0.0, 0.0), "a reply that is hashable"),
        (Step("look", "x", None, 0.0, 0.0), "is_admissible with every step"),
        (Step("look", "x", True, None, 0.0), "progress with every step"),
        (Step("look", "x", True, 0.0, float("nan")), "logprob with every step"),
    ],
)
def test_what_is_missing_is_named(step, message) -> None:
    with pytest.raises(GateError, match=f"member 3: expected {message}"):
        GroupTrace(HORIZON).add(3, step)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="inputs: expected some of"):
        GroupTrace(HORIZON, ["replies"])
    with pytest.raises(ConfigError, match="horizon"):
        GroupTrace(0)
    trace = GroupTrace(HORIZON, [])
    trace.add(0, Step("look"))
    trace.end(0, 1.0)
    with pytest.raises(GateError, match="no step after its end"):
        trace.add(0, Step("look"))
    with pytest.raises(GateError, match="at least two members"):
        trace.look(1)
    trace.add(1, Step("look"))
    with pytest.raises(GateError, match="got 1 with 1 - wait for it"):
        trace.look(2, [0, 1])


def test_groups_for_tests_end_in_all_ways() -> None:
    outcomes = {tuple(sorted({member.reward for member in played(seed).members})) for seed in range(40)}
    assert outcomes == {(0.0,), (1.0,), (0.0, 1.0)}


@pytest.mark.parametrize("value", NOT_BY_VALUE, ids=repr)
def test_what_cannot_be_compared_by_value_is_refused(value) -> None:
    with pytest.raises(GateError, match="member 0: expected an action that equals another one"):
        GroupTrace(5, ["reply"]).add(0, Step(value, "hall"))
    with pytest.raises(GateError, match="member 0: expected a reply that equals another one"):
        GroupTrace(5, ["reply"]).add(0, Step("look", value))
    with pytest.raises(GateError, match="member 0: expected an observation that equals another one"):
        GroupTrace(5, ["reply"]).add(0, Step("look", "hall"), value)


def test_actions_of_one_group_are_of_one_type() -> None:
    trace = GroupTrace(5, ["reply"])
    trace.add(0, Step(1, "hall"))
    with pytest.raises(GateError, match="member 1: expected actions of one type, got bool, int"):
        trace.add(1, Step(True, "hall"))
    assert trace.steps_of(1) == 0


def test_a_truth_of_numpy_is_one() -> None:
    told = [MemberTrace(5, ("is_admissible",)).add(Step("look", is_admissible=value)) for value in (False, np.bool_(False))]
    assert told[0] == told[1]
