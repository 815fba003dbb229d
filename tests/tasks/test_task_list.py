from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import TaskError
from sluice.tasks import TaskList
from sluice.types import Task

PROMPT_IDS = np.array([1], dtype=np.int64)


def tasks(count: int, prompt: str = "p") -> list[Task]:
    return [Task(task_id=f"data/{k}", domain="math", prompt=f"{prompt}{k}", prompt_ids=PROMPT_IDS, answer=str(k)) for k in range(count)]


def drawn(task_list: TaskList, count: int) -> list[tuple[str, int]]:
    """(task_id, epoch) of up to `count` draws."""
    found = []
    for _ in range(count):
        draw = task_list.draw()
        if draw is None:
            break
        found.append((draw[0].task_id, draw[1]))
    return found


def ids(task_list: TaskList, count: int) -> list[int]:
    """Indices of the next draws."""
    return [int(task_id.split("/")[1]) for task_id, _ in drawn(task_list, count)]


@given(count=st.integers(1, 30), epochs=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), shuffle=st.booleans())
def test_every_task_is_drawn_exactly_once_in_every_epoch_and_then_nothing_for_ever(count: int, epochs: int, seed: int, shuffle: bool):
    task_list = TaskList(tasks(count), seed=seed, epochs=epochs, shuffle=shuffle)
    found = drawn(task_list, count * epochs)
    assert Counter(found) == {(f"data/{k}", epoch): 1 for k in range(count) for epoch in range(epochs)}
    assert [epoch for _, epoch in found] == sorted(epoch for _, epoch in found)
    assert [task_list.draw() for _ in range(3)] == [None, None, None]


@given(count=st.integers(1, 30), seed=st.integers(0, 2**32 - 1))
def test_the_same_seed_gives_the_same_order(count: int, seed: int):
    first, second = (TaskList(tasks(count), seed=seed) for _ in range(2))
    assert drawn(first, 3 * count) == drawn(second, 3 * count)


@given(data=st.data(), count=st.integers(1, 12), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_with_any_put_backs_and_saves_every_prompt_is_used_exactly_once_per_epoch(data: st.DataObject, count: int, epochs: int, seed: int):
    """Draws, put-backs, saves with prompts in flight, and resumed lists in any order: what is not put back is used, once per epoch."""
    task_list = TaskList(tasks(count), seed=seed, epochs=epochs)
    in_flight: list[tuple[str, int]] = []
    used: list[tuple[str, int]] = []
    for _ in range(60):
        action = data.draw(st.sampled_from(["draw", "use", "put_back", "resume"]))
        if action == "draw":
            in_flight += drawn(task_list, 1)
        elif action == "use" and in_flight:
            used.append(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        elif action == "put_back" and in_flight:
            task_list.put_back(*in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        elif action == "resume":
            state = json.loads(json.dumps(task_list.state_dict(in_flight)))
            task_list = TaskList(tasks(count), seed=seed, epochs=epochs)
            task_list.load_state_dict(state)
            in_flight = []
    used += in_flight + drawn(task_list, 10 * count)
    assert Counter(used) == {(f"data/{k}", epoch): 1 for k in range(count) for epoch in range(epochs)}


@given(count=st.integers(1, 20), draws=st.integers(0, 50), seed=st.integers(0, 99), shuffle=st.booleans())
def test_a_prompt_can_come_back_exactly_when_it_has_been_drawn_in_that_epoch(count: int, draws: int, seed: int, shuffle: bool):
    task_list = TaskList(tasks(count), seed=seed, shuffle=shuffle)
    found = drawn(task_list, draws)
    returned = []
    for epoch in range(task_list.epoch + 2):
        for k in range(count):
            try:
                task_list.put_back(f"data/{k}", epoch)
                returned.append((f"data/{k}", epoch))
            except TaskError:
                pass
    assert Counter(returned) == Counter(found)
    assert drawn(task_list, len(returned)) == returned


@given(count=st.integers(1, 20), before=st.integers(0, 50), seed=st.integers(0, 99), shuffle=st.booleans())
def test_a_saved_and_loaded_list_goes_on_as_if_nothing_had_happened(count: int, before: int, seed: int, shuffle: bool):
    undisturbed = TaskList(tasks(count), seed=seed, shuffle=shuffle)
    drawn(undisturbed, before)
    resumed = TaskList(tasks(count), seed=seed, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(undisturbed.state_dict())))
    assert resumed.state_dict() == undisturbed.state_dict()
    assert drawn(resumed, 2 * count) == drawn(undisturbed, 2 * count)


def test_lists_of_two_domains_share_a_seed_and_no_order():
    orders = [ids(TaskList(tasks(50), seed=1, domain=domain), 100) for domain in ("math", "maths", "code", None)]
    epochs = [tuple(order[start : start + 50]) for order in orders for start in (0, 50)]
    assert len(set(epochs)) == 8
    assert ids(TaskList(tasks(50), seed=1, domain="math"), 100) == orders[0]


def test_a_list_does_not_look_ahead_for_a_domain():
    task_list = TaskList(tasks(3), seed=1)
    with pytest.raises(TaskError, match="a task of domain 'math' was asked for - use DomainTasks"):
        task_list.draw("math")
    assert task_list.position == 0


def test_each_epoch_has_an_order_of_its_own_and_another_seed_has_others():
    task_list = TaskList(tasks(50), seed=1)
    first, second = ids(task_list, 50), ids(task_list, 50)
    assert first != second
    other = TaskList(tasks(50), seed=2)
    assert ids(other, 50) not in (first, second)  # the second epoch of seed 1 is not the first of seed 2


def test_without_shuffle_the_order_is_that_of_the_data():
    task_list = TaskList(tasks(3), seed=1, shuffle=False)
    assert drawn(task_list, 4) == [("data/0", 0), ("data/1", 0), ("data/2", 0), ("data/0", 1)]


def test_a_prompt_that_is_put_back_comes_before_new_ones_under_its_old_epoch():
    task_list = TaskList(tasks(2), seed=1, shuffle=False)
    drawn(task_list, 3)  # 0 and 1, then 0 of epoch 1
    task_list.put_back("data/1", 0)
    task_list.put_back("data/0", 1)
    assert drawn(task_list, 3) == [("data/1", 0), ("data/0", 1), ("data/1", 1)]


def test_a_prompt_that_comes_back_after_the_end_is_drawn_and_then_the_end_is_there_again():
    task_list = TaskList(tasks(1), seed=1, epochs=1)
    drawn(task_list, 1)
    assert task_list.draw() is None
    task_list.put_back("data/0", 0)
    assert drawn(task_list, 5) == [("data/0", 0)]


def test_case_94_the_first_prompts_after_a_resume_are_those_in_flight_then_new_ones():
    task_list = TaskList(tasks(10), seed=1, shuffle=False)
    in_flight = drawn(task_list, 6)[4:]  # batches 0-1 and 2-3 are trained
    state = task_list.state_dict(in_flight)
    resumed = TaskList(tasks(10), seed=1, shuffle=False)
    resumed.load_state_dict(state)
    assert ids(resumed, 4) == [4, 5, 6, 7]
    assert ids(task_list, 2) == [6, 7]  # the list that was saved is unchanged


def test_case_41_a_list_that_has_been_gone_through_starts_anew_or_says_that_nothing_is_left():
    for_ever, once = TaskList(tasks(3), seed=1), TaskList(tasks(3), seed=1, epochs=1)
    drawn(for_ever, 3)
    drawn(once, 3)
    assert [epoch for _, epoch in drawn(for_ever, 4)] == [1, 1, 1, 2]
    assert once.draw() is None


def test_case_96_a_dropped_prompt_is_consumed_and_steps_follow_from_the_trained_ones():
    task_list = TaskList(tasks(10), seed=1, shuffle=False)
    consumed = ids(task_list, 5)
    dropped = {2}
    assert len([k for k in consumed if k not in dropped]) == 2 * 2  # two steps of batch 2
    resumed = TaskList(tasks(10), seed=1, shuffle=False)
    resumed.load_state_dict(task_list.state_dict())
    assert ids(resumed, 5) == [5, 6, 7, 8, 9]


def test_a_prompt_cannot_come_back_twice_or_without_having_been_drawn():
    task_list = TaskList(tasks(3), seed=1, shuffle=False)
    drawn(task_list, 1)
    task_list.put_back("data/0", 0)
    with pytest.raises(TaskError, match="put back already"):
        task_list.put_back("data/0", 0)
    with pytest.raises(TaskError, match="has not been drawn in epoch 0"):
        task_list.put_back("data/1", 0)
    with pytest.raises(TaskError, match="is in epoch 0"):
        task_list.put_back("data/0", 1)
    with pytest.raises(TaskError, match="'other/7' is not in this task list of 3 tasks"):
        task_list.put_back("other/7", 0)
    with pytest.raises(TaskError, match="both outstanding and put back"):
        task_list.state_dict([("data/0", 0)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TaskList(tasks(4), seed=1), "tasks must be 3, got 4"),
        (TaskList(tasks(3, prompt="q"), seed=1), "fingerprint"),
        (TaskList(tasks(3)[::-1], seed=1), "fingerprint"),
        (TaskList(tasks(3), seed=2), "seed must be 1, got 2"),
        (TaskList(tasks(3), seed=1, shuffle=False), "shuffle must be True, got False"),
    ],
)
def test_a_state_of_other_data_is_refused_with_what_differs(other: TaskList, message: str):
    with pytest.raises(TaskError, match=message):
        TaskList(tasks(3), seed=1).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version must be 1, got 99"),
        ({"position": 4}, "position up to 3, got 4"),
        ({"position": -1}, "whole number from 0 as position, got -1"),
        ({"epoch": "0"}, "whole number from 0 as epoch, got '0'"),
        ({"put_back": None}, "must be a list"),
        ({"put_back": [["data/0"]]}, r"must be \[task_id, epoch\], got \['data/0'\]"),
        ({"put_back": [["data/2", 0]]}, "has not been drawn"),
        ({"put_back": [["data/0", 0], ["data/0", 0]]}, "put back already"),
        ({"put_back": [["data/9", 0]]}, "not in this task list"),
    ],
)
def test_a_torn_state_is_refused_and_changes_nothing(change: dict[str, Any], message: str):
    task_list = TaskList(tasks(3), seed=1, shuffle=False)
    drawn(task_list, 2)
    task_list.put_back("data/1", 0)
    before = task_list.state_dict()
    with pytest.raises(TaskError, match=message):
        task_list.load_state_dict({**before, **change})
    assert task_list.state_dict() == before


def test_a_state_that_lacks_a_key_is_refused():
    with pytest.raises(TaskError, match="must have 'version', but it has"):
        TaskList(tasks(1), seed=1).load_state_dict({"weights": 1})


def test_a_resumed_run_may_have_another_limit_of_epochs():
    first = TaskList(tasks(2), seed=1, epochs=1)
    drawn(first, 2)
    longer = TaskList(tasks(2), seed=1, epochs=2)
    longer.load_state_dict(first.state_dict())
    assert first.draw() is None
    assert {epoch for _, epoch in drawn(longer, 9)} == {1}


def test_a_resumed_run_with_fewer_epochs_than_it_had_draws_nothing_new_but_what_came_back():
    first = TaskList(tasks(4), seed=1)
    in_flight = drawn(first, 10)[-1:]
    shorter = TaskList(tasks(4), seed=1, epochs=2)
    shorter.load_state_dict(first.state_dict(in_flight))
    assert drawn(shorter, 5) == in_flight


def test_data_are_digested_once_however_often_the_state_is_saved(monkeypatch: pytest.MonkeyPatch):
    task_list = TaskList(tasks(3), seed=1)
    state = task_list.state_dict()
    monkeypatch.setattr("sluice.tasks.task_list.hashlib", None)
    assert task_list.state_dict() == state
    task_list.load_state_dict(state)


def test_the_fingerprint_tells_fields_apart_that_join_to_the_same_text():
    def one(prompt: str, answer: str | None) -> str:
        return TaskList([Task(task_id="a", domain="d", prompt=prompt, prompt_ids=PROMPT_IDS, answer=answer)], seed=1).fingerprint()

    assert len({one("ab", ""), one("a", "b"), one("ab", None), one("a\ud800", "")}) == 4


def test_impossible_task_lists_are_refused():
    with pytest.raises(TaskError, match="at least one task"):
        TaskList([], seed=1)
    with pytest.raises(TaskError, match="'data/1' comes more than once"):
        TaskList([*tasks(3), tasks(2)[1]], seed=1)
    with pytest.raises(TaskError, match="epochs must be at least 1"):
        TaskList(tasks(1), seed=1, epochs=0)


def test_a_task_list_tells_its_size_and_where_it_is():
    task_list = TaskList(tasks(3), seed=1)
    drawn(task_list, 5)
    assert (len(task_list), task_list.epoch, task_list.position) == (3, 1, 2)
    assert [task.task_id for task in task_list.tasks] == ["data/0", "data/1", "data/2"]
