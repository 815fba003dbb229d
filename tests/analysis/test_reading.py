"""Whatever the format and the order of rows, the same groups are read; what is left out is counted, and what cannot be is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.analysis import Member, Recorded, Trajectories, TrajectoryGroup, read_recording
from sluice.errors import AnalysisError
from sluice.gate import SIGNALS
from sluice.records import Journal, RunFolder
from tests.analysis.recordings import DISTANCE, features_of, record, rows_of, some_groups, write
from tests.records.conftest import make_record


def same(one: Recorded, other: Recorded) -> bool:
    return (one.keys, one.ks, one.horizon, one.group_size) == (other.keys, other.ks, other.horizon, other.group_size) and all(
        np.array_equal(one.steps[k].signals[name], other.steps[k].signals[name])
        and np.array_equal(one.zero_variance, other.zero_variance)
        and np.array_equal(one.is_running[k], other.is_running[k])
        for k in one.ks
        for name in one.signals
    )


# ---------------------------------------------------------------- action sequences


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_action_sequences_are_the_groups_that_were_written(tmp_path: Path, suffix: str) -> None:
    groups = some_groups(n=6)
    read = read_recording([write(tmp_path / f"groups{suffix}", rows_of(groups))], horizon=8)
    assert same(read.recorded, Trajectories.of_groups(groups).recorded(range(1, 8), 8))
    assert [*(read.recorded.first.task_types or ())] == [group.task_type for group in groups]
    assert read.recorded.notes == ()


@pytest.mark.parametrize("has_names", [True, False])
def test_the_order_of_rows_changes_nothing(tmp_path: Path, has_names: bool) -> None:
    rows = rows_of(some_groups(n=8, g=5))
    if not has_names:
        rows = [{name: value for name, value in row.items() if name != "member"} for row in rows]
    first = read_recording([write(tmp_path / "first.jsonl", rows)])
    random.Random(3).shuffle(rows)
    second = read_recording([write(tmp_path / "second.jsonl", rows)])
    assert same(first.recorded, second.recorded)
    assert first.trajectories is not None
    assert second.trajectories is not None
    assert np.array_equal(first.trajectories.rewards, second.trajectories.rewards)  # members too stand in one order
    assert np.array_equal(first.trajectories.actions, second.trajectories.actions)


def test_rows_that_say_the_same_twice_count_once_and_are_told(tmp_path: Path) -> None:
    rows = rows_of(some_groups(n=4))
    once = read_recording([write(tmp_path / "once.jsonl", rows)])
    twice = read_recording([write(tmp_path / "twice.jsonl", rows + rows[:3])])
    assert same(once.recorded, twice.recorded)
    assert "left out: 3 duplicated rows" in twice.recorded.notes


def test_partial_groups_and_groups_without_all_rewards_are_left_out_and_told(tmp_path: Path) -> None:
    rows = rows_of(some_groups(n=6))
    rows[0]["reward"] = None
    del rows[-1]
    read = read_recording([write(tmp_path / "groups.jsonl", rows)])
    assert len(read.recorded) == 4
    assert read.recorded.notes[:2] == (
        "left out: 1 groups with a member without reward",
        "left out: 1 partial groups (fewer than 4 members)",
    )


def test_one_id_in_two_files_is_an_error_or_two_groups_as_the_user_says(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{seed}.jsonl", rows_of(some_groups(n=3, seed=seed))) for seed in (1, 2)]
    with pytest.raises(
        AnalysisError, match=r"2.jsonl, line 1, column group: expected ids that are unique over all files, got group group 000 also"
    ):
        read_recording(paths)
    assert len(read_recording(paths, ids_per_file=True).recorded) == 6
    for seed in (1, 2):
        write(tmp_path / f"{seed}.jsonl", [row | {"run": seed} for row in rows_of(some_groups(n=3, seed=seed))])
    assert len(read_recording(paths).recorded) == 6


def test_a_folder_of_files_is_read_whole(tmp_path: Path) -> None:
    groups = some_groups(n=6)
    write(tmp_path / "a.csv", rows_of(groups[:3]))
    write(tmp_path / "b.parquet", rows_of(groups[3:]))
    (tmp_path / "README.md").write_text("not a table")
    assert same(read_recording([tmp_path], horizon=8).recorded, Trajectories.of_groups(groups).recorded(range(1, 8), 8))


def test_without_all_observations_their_signal_is_left_out_and_told(tmp_path: Path) -> None:
    rows = rows_of(some_groups(n=4))
    rows[3]["observations"] = None
    read = read_recording([write(tmp_path / "groups.jsonl", rows)])
    assert "obs_unique_ratio" not in read.recorded.signals
    assert any("obs_unique_ratio is not there" in note for note in read.recorded.notes)


def test_the_horizon_is_the_longest_trajectory_unless_it_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", rows_of(some_groups(n=9, horizon=8)))
    assert read_recording([path]).recorded.horizon == 8
    assert any("horizon 8: the longest trajectory" in note for note in read_recording([path]).recorded.notes)
    assert read_recording([path], horizon=20).recorded.ks == tuple(range(1, 20))
    with pytest.raises(AnalysisError, match="horizon: expected at least the longest trajectory, that is 8 steps, got 6"):
        read_recording([path], horizon=6)


def test_a_long_horizon_is_looked_at_at_thirty_steps(tmp_path: Path) -> None:
    ks = read_recording([write(tmp_path / "groups.jsonl", rows_of(some_groups(n=3)))], horizon=200).recorded.ks
    assert (len(ks), ks[0], ks[-1]) == (30, 1, 199)


def changed(row: int, **cells: Any):
    def change(rows: list[dict[str, Any]]) -> None:
        rows[row] |= cells

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed(1, actions=["a", 2, "c"]),
            r"line 2, column actions: expected actions of one type, str as in line 1, got 2 - write all as text",
        ),
        (changed(1, actions=["a", None]), r"line 2, column actions: expected a value for every step, got None"),
        (changed(1, actions=[["a"], ["b"]]), r"line 2, column actions: expected texts or numbers, got \['a'\]"),
        (changed(1, actions="a, b"), r"line 2, column actions: expected a list in JSON, got 'a, b'"),
        (changed(1, reward=float("nan")), r"line 2, column reward: expected a finite number, got nan"),
        (changed(1, reward=1e308), r"group group 000: expected rewards up to 1e\+150, got 1e\+308 - "),
        (changed(1, group=None), r"line 2, column group: expected the name of a group, got None"),
        (
            changed(1, member=0, reward=7.0),
            r"line 2: expected every member once, got member 0 of group group 000 again, and different from",
        ),
        (changed(1, task_type="other"), r"line 2, column task_type: expected 'look' as in the other rows of group group 000, got 'other'"),
        (changed(1, observations=["x"]), r"line 2, column observations: expected at least \d entries, one before each action, got '1'"),
        (lambda rows: rows.append(rows[0] | {"member": 9}), r"line 1: expected groups of 4 members, got 5 in group group 000"),
        (lambda rows: [row.pop("reward") for row in rows], r"expected a column reward \(what each trajectory earned\), got .* - add it"),
        (lambda rows: [row.pop("group") for row in rows], r"expected a column group or group_id or task_id"),
        (lambda rows: [row.update(Actions=row.pop("actions")) for row in rows], r"expected a column actions or .* - rename 'Actions'"),
        (
            lambda rows: [row.update(reward=None) for row in rows],
            r"expected at least one whole group of 4 with rewards, got none \(left out: 5 ",
        ),
        (lambda rows: [row.update(group=i) for i, row in enumerate(rows)], "expected groups of at least two members, got 20 of one"),
        (
            lambda rows: [row.update(group=i if i < 7 else 7 + i % 2, task_type=None, member=i) for i, row in enumerate(rows)],
            "expected groups of at least two members, got 7 of one",
        ),
    ],
)
def test_what_is_wrong_with_action_sequences_names_its_place(tmp_path: Path, change: Any, message: str) -> None:
    rows = rows_of(some_groups(n=5))
    change(rows)
    with pytest.raises(AnalysisError, match=message):
        read_recording([write(tmp_path / "groups.jsonl", rows)])


def test_k_must_lie_below_the_horizon(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", rows_of(some_groups(n=4)))
    for k in (0, 8, 9):
        with pytest.raises(AnalysisError, match=f"k: expected steps from 1 to 7, below the horizon, got {k}"):
            read_recording([path], ks=[k])


def test_steps_that_no_trajectory_takes_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", rows_of(some_groups(n=4)))
    for ks, horizon in ((None, 10**12), ([10**9], 10**12), ([100_001], 200_000)):
        with pytest.raises(AnalysisError, match=r"k: expected steps up to 100000, got \d+ - "):
            read_recording([path], ks=ks, horizon=horizon)
    assert read_recording([path], ks=[20_000], horizon=10**12).recorded.at(20_000).signals["termination_fraction"].tolist() == [1.0] * 4


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="expected at least one recording, got none"):
        read_recording([])
    with pytest.raises(AnalysisError, match=r"expected recorded rollouts or files ending in .csv, .jsonl, .parquet, got neither"):
        read_recording([tmp_path])
    with pytest.raises(AnalysisError, match="expected a file that can be read, got: No such file"):
        read_recording([tmp_path / "gone.jsonl"])
    with pytest.raises(AnalysisError, match="gone: expected a run folder or a file of recorded groups, got nothing of that name"):
        read_recording([tmp_path / "gone"])


@pytest.mark.parametrize("others", [(), ("metrics.jsonl",)])
def test_a_run_that_recorded_nothing_is_told_so_whatever_else_lies_in_it(tmp_path: Path, others: tuple[str, ...]) -> None:
    for name in ("run.db", *others):
        (tmp_path / name).write_text('{"step": 1}\n')
    with pytest.raises(AnalysisError, match=r"expected recorded rollouts in this run, got none - record them with 'sluice train --record'"):
        read_recording([tmp_path])


# ---------------------------------------------------------------- who is decided on


def test_a_running_gate_leaves_groups_alone_that_have_ended_or_whose_finished_members_differ() -> None:
    def group(key: str, *members: tuple[int, float]) -> TrajectoryGroup:
        return TrajectoryGroup(key=key, members=[Member(actions=["a"] * n, observations=None, reward=reward) for n, reward in members])

    data = Trajectories.of_groups(
        [
            group("a: runs", (2, 1.0), (6, 0.0), (6, 0.0)),
            group("b: all have ended", (2, 1.0), (3, 1.0), (3, 1.0)),
            group("c: finished ones differ", (2, 1.0), (3, 0.0), (6, 0.0)),
            group("d: finished ones agree", (2, 1.0), (3, 1.0), (6, 0.0)),
        ]
    )
    assert data.is_running(3).tolist() == [True, False, False, True]
    assert data.is_running(2).tolist() == [True, True, True, True]
    recorded = data.recorded([2, 3], 6)
    assert recorded.cuts(DISTANCE, 3, 1.0).tolist() == [True, False, False, True]
    assert recorded.deciding_on_all().cuts(DISTANCE, 3, 1.0).all()
    assert recorded.outcomes == ("mixed", "all succeed", "mixed", "mixed")


def test_equal_rewards_are_equal_whatever_their_size() -> None:
    """The variance of three times 0.1 is not 0 in floating point; that of 1e-200 and 0 is."""
    groups = [
        TrajectoryGroup(key=str(i), members=[Member(actions=["a"], observations=None, reward=reward) for reward in rewards])
        for i, rewards in enumerate([[0.1, 0.1, 0.1], [1e9 + 0.1] * 3, [1e-200, 0.0, 0.0]])
    ]
    recorded = Trajectories.of_groups(groups).recorded([1], 2)
    assert recorded.zero_variance.tolist() == [True, True, False]


def test_a_member_that_does_not_count_has_no_say_in_the_outcome() -> None:
    members = [Member(actions=["a", "b"], observations=None, reward=reward) for reward in (1.0, 1.0, None)]
    recorded = Trajectories.of_groups([TrajectoryGroup(key="a", members=members)]).recorded([1], 2)
    assert recorded.zero_variance.tolist() == [True]


# ---------------------------------------------------------------- runs


def test_a_run_is_the_groups_that_it_recorded(tmp_path: Path) -> None:
    groups = some_groups(n=6)
    folder = record(tmp_path / "run", groups)
    read = read_recording([folder], horizon=8)
    expected = Trajectories.of_groups(groups)
    assert read.trajectories is not None
    assert np.array_equal(read.trajectories.actions, expected.actions)
    assert np.array_equal(read.trajectories.observations, expected.observations)
    assert np.array_equal(read.trajectories.rewards, expected.rewards)
    for path in (folder / "rollouts", folder / "rollouts" / "part-000001.parquet"):
        assert same(read_recording([path], horizon=8).recorded, read.recorded)


def test_two_runs_have_the_groups_of_both_and_one_run_twice_is_an_error(tmp_path: Path) -> None:
    first = record(tmp_path / "first", some_groups(n=3), identity="first")
    second = record(tmp_path / "second", some_groups(n=4), identity="second")
    assert len(read_recording([first, second]).recorded) == 7
    with pytest.raises(AnalysisError, match="expected every run once, got that of .*first again"):
        read_recording([first, first])
    other = record(tmp_path / "other", some_groups(n=3, g=2), identity="other")
    with pytest.raises(AnalysisError, match=r"expected runs of one group size, got \[2, 4\]"):
        read_recording([first, other])


def test_groups_that_the_gate_had_cut_are_never_scored_by_their_truncated_rewards(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", some_groups(n=5), of_2={"source": "gate", "outcome": "cut", "category": "low_information"})
    read = read_recording([folder])
    assert len(read.recorded) == 4
    assert any("1 groups that the gate had cut" in note for note in read.recorded.notes)


def test_groups_cut_before_a_member_had_ended_are_counted_from_the_database(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "exp", 1, "exp_name: exp\n") as made, Journal(made.run_db) as journal:
        for i in range(3):
            journal.group(make_record(100 + i, outcome="cut", category="low_information"))
    read = read_recording([record(made.path, some_groups(n=5))])
    assert len(read.recorded) == 5
    assert any("left out: 3 groups that the gate had cut" in note for note in read.recorded.notes)


def test_groups_smaller_than_the_run_says_are_partial(tmp_path: Path) -> None:
    groups = some_groups(n=3)
    groups[1] = replace(groups[1], members=groups[1].members[:3])
    read = read_recording([record(tmp_path / "run", groups)])
    assert len(read.recorded) == 2
    assert "left out: 1 partial groups (fewer than 4 members)" in read.recorded.notes


def test_a_run_without_environment_steps_is_refused(tmp_path: Path) -> None:
    groups = [replace(group, members=[replace(one, actions=[], observations=[]) for one in group.members]) for group in some_groups(n=2)]
    with pytest.raises(AnalysisError, match="expected trajectories with environment steps, got a run without any"):
        read_recording([record(tmp_path / "run", groups)])


def test_a_copied_part_is_refused(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", some_groups(n=2)) / "rollouts"
    (folder / "part-000002.parquet").write_bytes((folder / "part-000001.parquet").read_bytes())
    with pytest.raises(AnalysisError, match=r"part-000002.parquet: expected groups that no other part holds, got group 0 again"):
        read_recording([folder])
    (folder / "part-000002.parquet").write_bytes(b"torn")
    with pytest.raises(AnalysisError, match=r"part-000002.parquet must be a whole Parquet file"):
        read_recording([folder])


# ---------------------------------------------------------------- features


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_features_are_the_groups_that_were_written(tmp_path: Path, suffix: str) -> None:
    expected = Trajectories.of_groups(some_groups(n=7)).recorded([2, 5], 8)
    rows = features_of(expected)
    random.Random(1).shuffle(rows)
    read = read_recording([write(tmp_path / f"features{suffix}", rows)], horizon=8)
    assert (read.trajectories, read.recorded.keys, read.recorded.ks) == (None, expected.keys, (2, 5))
    assert read.recorded.group_size == 4
    for k in (2, 5):
        for name in SIGNALS:
            assert np.array_equal(read.recorded.steps[k].signals[name], expected.steps[k].signals[name])
        assert np.array_equal(read.recorded.steps[k].reward_var, expected.steps[k].reward_var)
        assert np.array_equal(read.recorded.steps[k].lengths, expected.steps[k].lengths)
        # Of features alone nobody knows that finished members differ.
        assert (read.recorded.is_running[k] >= expected.is_running[k]).all()


def test_features_of_one_k_need_neither_k_nor_names(tmp_path: Path) -> None:
    path = write(tmp_path / "features.csv", [{DISTANCE: 0.1 * i, "zero_variance": i < 3} for i in range(6)])
    read = read_recording([path], ks=[10], horizon=30)
    assert (read.recorded.ks, len(read.recorded), read.recorded.signals) == ((10,), 6, (DISTANCE,))
    with pytest.raises(AnalysisError, match=r"expected a column K \(the environment step of the signals; or give one --k\)"):
        read_recording([path], horizon=30)


def test_groups_that_are_not_there_at_every_k_are_left_out_and_told(tmp_path: Path) -> None:
    rows = features_of(Trajectories.of_groups(some_groups(n=5)).recorded([2, 5], 8))
    path = write(tmp_path / "features.jsonl", [*rows[1:], rows[-1]])
    read = read_recording([path])
    assert len(read.recorded) == 4
    assert read.recorded.notes == ("left out: 1 duplicated rows", "left out: 1 groups that are not there at every K (2, 5)")
    assert len(read_recording([path], ks=[5]).recorded) == 5


def test_a_group_of_features_that_has_ended_is_not_decided_on(tmp_path: Path) -> None:
    rows = [{"group": i, "K": 3, DISTANCE: 0.0, "termination_fraction": share, "zero_variance": True} for i, share in enumerate([0.5, 1.0])]
    read = read_recording([write(tmp_path / "features.jsonl", rows)], horizon=9)
    assert read.recorded.is_running[3].tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(1, **{DISTANCE: 1.5}), rf"line 2, column {DISTANCE}: expected a number >= 0 and <= 1, got 1.5"),
        (changed(1, **{DISTANCE: float("nan")}), rf"line 2, column {DISTANCE}: expected a finite number, got nan"),
        (changed(1, reward_var=None), r"line 2, column reward_var: expected a number, got None - leave this group out"),
        (changed(1, reward_var=-0.1), r"line 2, column reward_var: expected a variance >= 0, got -0.1"),
        (changed(1, zero_variance=True, reward_var=0.2), r"column reward_var: expected 0 exactly where zero_variance is true, got 0.2"),
        (changed(1, K=None), r"line 2, column K: expected an environment step, got None"),
        (changed(1, K=2.5), r"line 2, column K: expected a whole number >= 1, got 2.5"),
        (changed(1, group="group 000"), r"line 2: expected group group 000 once at K = 2, got it again, and different from .* line 1"),
        (changed(1, reward_var=0.9), r"expected the outcome, lengths and task type of this group as at the other K"),
        (changed(1, lengths=[1, 2, 3.5, 4]), r"line 2, column lengths: expected whole numbers >= 0, got 3.5"),
        (changed(1, lengths=[10**400] * 4), r"line 2, column lengths: expected whole numbers >= 0, got 1000"),
        (changed(1, lengths=[3]), r"line 2, column lengths: expected one entry for each of at least two members, got \[3\]"),
        (changed(1, lengths=[]), r"line 2, column lengths: expected one entry for each of at least two members, got \[\]"),
        (lambda rows: [row.pop("reward_var") for row in rows], r"expected a column reward_var or zero_variance"),
        (lambda rows: [row.pop("group") for row in rows], r"expected a column group or group_id or task_id \(which rows are of one group"),
    ],
)
def test_what_is_wrong_with_features_names_its_place(tmp_path: Path, change: Any, message: str) -> None:
    rows = features_of(Trajectories.of_groups(some_groups(n=5)).recorded([2, 5], 8))
    change(rows)
    with pytest.raises(AnalysisError, match=message):
        read_recording([write(tmp_path / "features.jsonl", rows)])


def test_features_need_a_horizon_from_lengths_or_from_outside(tmp_path: Path) -> None:
    rows = features_of(Trajectories.of_groups(some_groups(n=5)).recorded([2, 5], 8))
    path = write(tmp_path / "features.jsonl", rows)
    assert read_recording([path]).recorded.horizon == 8
    with pytest.raises(AnalysisError, match=r"expected K below the horizon 4, got 5"):
        read_recording([path], horizon=4)
    with pytest.raises(AnalysisError, match=r"column lengths: expected at most the horizon 6"):
        read_recording([path], horizon=6)
    with pytest.raises(AnalysisError, match=r"k: expected steps that the file has, got \[4\] where it has \[2\]"):
        read_recording([path], ks=[2, 4])
    bare = write(tmp_path / "bare.jsonl", [{name: value for name, value in row.items() if name != "lengths"} for row in rows])
    with pytest.raises(
        AnalysisError, match="expected the most environment steps of a trajectory, got a file without lengths - give --horizon"
    ):
        read_recording([bare])


def test_features_and_action_sequences_do_not_mix(tmp_path: Path) -> None:
    groups = some_groups(n=4)
    sequences = write(tmp_path / "groups.jsonl", rows_of(groups))
    features = write(tmp_path / "features.jsonl", features_of(Trajectories.of_groups(groups).recorded([2], 8)))
    with pytest.raises(AnalysisError, match=r"features.jsonl: expected action sequences like the other paths, got features"):
        read_recording([sequences, features])
