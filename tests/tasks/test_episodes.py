from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import TaskError
from sluice.tasks import EpisodeTasks, held_out_episodes
from sluice.types import Task


def drawn(source: EpisodeTasks, count: int) -> list[Task]:
    found = []
    for _ in range(count):
        draw = source.draw()
        assert draw is not None
        task, epoch = draw
        assert epoch == 0
        found.append(task)
    return found


def places(tasks: list[Task]) -> list[tuple[int, int]]:
    """(environment group, episode) of each."""
    return [(task.entry["env_group"], task.entry["episode"]) for task in tasks]


def resumed(source: EpisodeTasks, in_flight: list[Task]) -> EpisodeTasks:
    state = json.loads(json.dumps(source.state_dict([(task.task_id, 0) for task in in_flight])))
    later = EpisodeTasks(source.domain, source.num_env_groups, seed=source.seed)
    later.load_state_dict(state)
    return later


@given(groups=st.integers(1, 20), draws=st.integers(0, 100))
def test_each_environment_group_opens_episode_0_1_2_and_so_on_in_turn(groups: int, draws: int):
    found = places(drawn(EpisodeTasks("env", groups, seed=1), draws))
    assert found == [(n % groups, n // groups) for n in range(draws)]
    opened = Counter(group for group, _ in found)
    counts = [opened[group] for group in range(groups)]
    assert max(counts) - min(counts) <= 1


@given(data=st.data(), groups=st.integers(1, 6))
def test_whatever_is_dropped_put_back_or_resumed_no_group_is_ahead_by_more_than_one_episode(data: st.DataObject, groups: int):
    """Drawn episodes are used (kept or dropped: the source is not told), put back, or in flight at a kill: each is used exactly once."""
    source = EpisodeTasks("env", groups, seed=3)
    in_flight: list[Task] = []
    used: list[Task] = []
    for _ in range(60):
        action = data.draw(st.sampled_from(["draw", "draw", "use", "put_back", "resume"]))
        if action == "draw":
            in_flight += drawn(source, 1)
        elif action == "use" and in_flight:
            used.append(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        elif action == "put_back" and in_flight:
            source.put_back(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))).task_id, 0)
        elif action == "resume":
            source = resumed(source, in_flight)
            in_flight = []
        opened = Counter(task.entry["env_group"] for task in source.lookup.values())
        counts = [opened[group] for group in range(groups)]
        assert max(counts) - min(counts) <= 1
    while source.state_dict()["put_back"]:
        in_flight += drawn(source, 1)
    all_of_them = Counter(places(used + in_flight))
    assert all_of_them == {(n % groups, n // groups): 1 for n in range(source.opened)}


@given(groups=st.integers(1, 5), before=st.integers(0, 20), returned=st.lists(st.integers(0, 19), unique=True), seed=st.integers(0, 9))
def test_a_resumed_source_goes_on_exactly_where_the_saved_one_was(groups: int, before: int, returned: list[int], seed: int):
    source = EpisodeTasks("env", groups, seed=seed)
    tasks = drawn(source, before)
    for number in returned:
        if number < before:
            source.put_back(tasks[number].task_id, 0)
    later = resumed(source, [])
    assert drawn(later, 30) == drawn(source, 30)
    assert later.state_dict() == source.state_dict()


def test_what_came_back_is_drawn_first_in_that_order_and_what_was_in_flight_after_it():
    source = EpisodeTasks("env", 2, seed=1)
    tasks = drawn(source, 5)
    source.put_back(tasks[3].task_id, 0)
    source.put_back(tasks[0].task_id, 0)
    later = resumed(source, [tasks[4], tasks[1]])
    assert places(drawn(later, 5)) == [(1, 1), (0, 0), (0, 2), (1, 0), (1, 2)]
    assert places(drawn(source, 3)) == [(1, 1), (0, 0), (1, 2)]  # saving has changed nothing


def test_an_episode_is_a_task_whose_name_says_everything():
    (first, *_, last) = drawn(EpisodeTasks("home/hold", 3, seed=1), 8)
    assert (first.task_id, first.domain, first.prompt, first.entry) == (
        "home/hold/g0/e0",
        "home/hold",
        "",
        {"env_group": 0, "episode": 0},
    )
    assert (last.task_id, last.entry) == ("home/hold/g1/e2", {"env_group": 1, "episode": 2})
    assert last.prompt_ids.dtype == "int64"
    assert last.prompt_ids.shape == (0,)
    assert last.answer is None
    assert pickle.loads(pickle.dumps(last)) == last


def test_the_lookup_makes_the_task_of_every_opened_episode_and_of_no_other():
    source = EpisodeTasks("env", 2, seed=1)
    assert dict(source.lookup) == {}
    tasks = drawn(source, 5)
    lookup = source.lookup
    assert dict(lookup) == {task.task_id: task for task in tasks}
    assert len(lookup) == 5
    for missing in (
        "env/g1/e2",
        "env/g2/e0",
        "env/g0/e9",
        "env/g00/e0",
        "env/g0/e-1",
        "other/g0/e0",
        "env/val/g0",
        "env/g0/e0/",
        "",
        "env",
    ):
        assert missing not in lookup
        assert lookup.get(missing) is None
    drawn(source, 1)
    assert lookup["env/g1/e2"].entry == {"env_group": 1, "episode": 2}  # a view, not a copy


def test_a_resumed_source_finds_the_tasks_of_the_episodes_that_the_saved_one_had_opened():
    source = EpisodeTasks("env", 3, seed=1)
    tasks = drawn(source, 7)
    later = resumed(source, tasks[5:])
    assert dict(later.lookup) == {task.task_id: task for task in tasks}


def test_the_state_stays_small_however_long_the_run():
    source = EpisodeTasks("env", 4, seed=1)
    small = len(json.dumps(source.state_dict()))
    drawn(source, 20_000)
    assert len(json.dumps(source.state_dict())) <= small + len("20000")


@pytest.mark.parametrize(
    ("task_id", "epoch", "told"),
    [
        ("env/g0/e1", 0, "has not been drawn"),
        ("env/g0/e0", 1, "epoch"),
        ("env/g2/e0", 0, "none of these episodes"),
        ("env/val/g0", 0, "none of these episodes"),
        ("math/1", 0, "none of these episodes"),
    ],
)
def test_what_was_not_drawn_cannot_come_back(task_id: str, epoch: int, told: str):
    source = EpisodeTasks("env", 2, seed=1)
    drawn(source, 2)
    before = source.state_dict()
    with pytest.raises(TaskError, match=told):
        source.put_back(task_id, epoch)
    with pytest.raises(TaskError, match=told):
        source.state_dict([(task_id, epoch)])
    assert source.state_dict() == before


def test_an_episode_comes_back_once_until_it_is_drawn_again():
    source = EpisodeTasks("env", 2, seed=1)
    drawn(source, 2)
    source.put_back("env/g1/e0", 0)
    with pytest.raises(TaskError, match="put back already"):
        source.put_back("env/g1/e0", 0)
    with pytest.raises(TaskError, match="both outstanding and put back"):
        source.state_dict([("env/g1/e0", 0)])
    drawn(source, 1)
    source.put_back("env/g1/e0", 0)
    assert places(drawn(source, 1)) == [(1, 0)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "another version"),
        ({"episodes_of": "other"}, "the environment of the saved run"),
        ({"env_groups": 3}, "num_env_groups of the saved run"),
        ({"seed": 2}, "the seed of the saved run"),
        ({"opened": -1}, "opened"),
        ({"opened": True}, "opened"),
        ({"opened": None}, "opened"),
        ({"opened": 1}, "faulty put_back"),  # one that came back had not been drawn
        ({"put_back": None}, "put_back"),
        ({"put_back": ["env/g0/e0"]}, "put_back"),
        ({"put_back": [["env/g0/e0", 0], ["env/g0/e0", 0]]}, "faulty put_back"),
        ({"put_back": [["env/g0/e0", False]]}, "put_back"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], told: str):
    saved = EpisodeTasks("env", 2, seed=1)
    drawn(saved, 4)
    saved.put_back("env/g1/e0", 0)
    source = EpisodeTasks("env", 2, seed=1)
    drawn(source, 1)
    before = source.state_dict()
    with pytest.raises(TaskError, match=told):
        source.load_state_dict(saved.state_dict() | change)
    assert source.state_dict() == before


@pytest.mark.parametrize("key", ["version", "episodes_of", "env_groups", "seed", "opened", "put_back"])
def test_a_torn_state_is_refused(key: str):
    state = EpisodeTasks("env", 2, seed=1).state_dict()
    del state[key]
    with pytest.raises(TaskError, match=key):
        EpisodeTasks("env", 2, seed=1).load_state_dict(state)


def test_a_draw_of_another_domain_is_refused():
    source = EpisodeTasks("env", 2, seed=1)
    assert source.draw("env") is not None
    with pytest.raises(TaskError, match="'math'"):
        source.draw("math")
    assert source.opened == 1


@pytest.mark.parametrize(("domain", "groups"), [("", 1), ("env", 0), ("env", -1)])
def test_settings_that_cannot_be_are_refused(domain: str, groups: int):
    with pytest.raises(TaskError):
        EpisodeTasks(domain, groups, seed=1)
    with pytest.raises(TaskError):
        held_out_episodes(domain, groups)


def test_the_fingerprint_tells_other_episodes():
    prints = {EpisodeTasks(domain, groups, seed=1).fingerprint() for domain in ("a", "b") for groups in (1, 2)}
    assert len(prints) == 4
    assert EpisodeTasks("a", 1, seed=2).fingerprint() in prints


def test_an_evaluation_plays_episode_0_of_each_environment_group():
    tasks = held_out_episodes("env", 3)
    assert [task.task_id for task in tasks] == ["env/val/g0", "env/val/g1", "env/val/g2"]
    assert places(tasks) == [(0, 0), (1, 0), (2, 0)]
    assert {task.domain for task in tasks} == {"env"}
    twice = held_out_episodes("env", 2, repeats=2)
    assert [task.task_id for task in twice] == ["env/val/g0", "env/val/g0", "env/val/g1", "env/val/g1"]
    with pytest.raises(TaskError, match="repeats"):
        held_out_episodes("env", 2, repeats=0)
