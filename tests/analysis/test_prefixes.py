"""Signals of many groups at many K are those of single groups at one K."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.analysis import Member, Trajectories, TrajectoryGroup
from sluice.analysis.prefixes import signals_at
from sluice.gate import signals
from tests.analysis.recordings import some_groups
from tests.gate.naive import naive_signals


@st.composite
def recordings(draw):
    g = draw(st.integers(2, 5))
    longest = draw(st.integers(1, 6))
    groups = []
    for i in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(0, longest), min_size=g, max_size=g))
        words = st.sampled_from("abc")
        members = [
            Member(
                actions=draw(st.lists(words, min_size=n, max_size=n)),
                observations=draw(st.lists(words, min_size=n, max_size=n)),
                reward=0.0,
            )
            for n in lengths
        ]
        groups.append(TrajectoryGroup(key=str(i), members=members))
    return groups, sorted(draw(st.sets(st.integers(1, longest + 2), min_size=1, max_size=4)))


@given(recordings())
def test_they_agree_with_their_definitions(recording) -> None:
    groups, ks = recording
    data = Trajectories.of_groups(groups)
    found = signals_at(data.actions, data.lengths, ks, data.observations)
    for i, group in enumerate(groups):
        actions = [member.actions for member in group.members]
        seen = [member.observations for member in group.members]
        for k in ks:
            expected = naive_signals(actions, k, seen)
            assert {name: float(column[i]) for name, column in found[k].items()} == pytest.approx(expected, abs=1e-12)


@given(recordings())
def test_the_distance_is_the_same_float_as_that_of_a_running_gate(recording) -> None:
    """So that a threshold means the same: comparisons are strict."""
    groups, ks = recording
    data = Trajectories.of_groups(groups)
    found = signals_at(data.actions, data.lengths, ks)
    for i, group in enumerate(groups):
        for k in ks:
            running = signals([member.actions for member in group.members], k)
            for name in running.keys() - {"action_bigram_jaccard_mean"}:
                assert float(found[k][name][i]) == running[name]


def test_many_groups_are_cut_into_parts_without_a_seam() -> None:
    groups = some_groups(n=600, g=3)
    whole = Trajectories.of_groups(groups)
    found = signals_at(whole.actions, whole.lengths, [4], whole.observations)[4]
    for i in (0, 255, 256, 511, 512, 599):
        alone = Trajectories.of_groups([groups[i]])
        one = signals_at(alone.actions, alone.lengths, [4], alone.observations)[4]
        assert {name: column[i] for name, column in found.items()} == {name: column[0] for name, column in one.items()}


def test_without_observations_their_signal_is_absent() -> None:
    data = Trajectories.of_groups(some_groups(n=2, observations=False))
    assert data.observations is None
    assert "obs_unique_ratio" not in signals_at(data.actions, data.lengths, [3])[3]
