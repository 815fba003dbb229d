from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import TaskError
from sluice.tasks import DomainTasks, TaskList
from sluice.types import Task

PROMPT_IDS = np.array([1], dtype=np.int64)
Draw = tuple[str, int]  # (task_id, epoch)

sizes_of_domains = st.dictionaries(st.sampled_from(["math", "code", "law", "chess"]), st.integers(1, 8), min_size=1)


def tasks(sizes: Mapping[str, int]) -> list[Task]:
    """Tasks math/0, math/1, ... of every domain, the domains in turn as they may be mixed in the data."""
    ordered = sorted((k, domain) for domain, count in sizes.items() for k in range(count))
    return [Task(task_id=f"{domain}/{k}", domain=domain, prompt=f"{domain} {k}", prompt_ids=PROMPT_IDS) for k, domain in ordered]


def by_domain(sizes: Mapping[str, int], *, seed: int = 1, epochs: int | None = None, shuffle: bool = True) -> DomainTasks:
    return DomainTasks(tasks(sizes), sizes, seed=seed, epochs=epochs, shuffle=shuffle)


def drawn(source: DomainTasks, count: int, domain: str | None = None) -> list[Draw]:
    """Up to `count` draws."""
    found = (source.draw(domain) for _ in range(count))
    return [(draw[0].task_id, draw[1]) for draw in found if draw is not None]


@given(data=st.data(), sizes=sizes_of_domains, epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_with_any_draws_put_backs_and_saves_every_prompt_is_used_exactly_once_per_epoch_of_its_domain(
    data: st.DataObject, sizes: dict[str, int], epochs: int, seed: int
):
    """What is not put back is used, once per epoch, and what is put back is drawn once more: never more draws than that."""
    source = by_domain(sizes, seed=seed, epochs=epochs)
    in_flight: list[Draw] = []
    used: list[Draw] = []
    draws, returned = 0, 0
    for _ in range(60):
        action = data.draw(st.sampled_from(["draw", "draw", "use", "put_back", "resume"]))
        if action == "draw":
            domain = data.draw(st.none() | st.sampled_from(sorted(sizes)))
            found = drawn(source, 1, domain)
            assert all(domain in (None, task_id.split("/")[0]) for task_id, _ in found)
            in_flight += found
            draws += len(found)
        elif action == "use" and in_flight:
            used.append(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        elif action == "put_back" and in_flight:
            source.put_back(*in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
            returned += 1
        elif action == "resume":
            state = json.loads(json.dumps(source.state_dict(in_flight)))
            source = by_domain(sizes, seed=seed, epochs=epochs)
            source.load_state_dict(state)
            returned += len(in_flight)
            in_flight = []
    rest = drawn(source, 1000)
    used += in_flight + rest
    assert Counter(used) == {
        (f"{domain}/{k}", epoch): 1 for domain, count in sizes.items() for k in range(count) for epoch in range(epochs)
    }
    assert draws + len(rest) == len(used) + returned
    assert [source.draw(domain) for domain in (None, *sizes)] == [None] * (1 + len(sizes))


@given(sizes=sizes_of_domains, others=sizes_of_domains, seed=st.integers(0, 99), between=st.lists(st.booleans(), max_size=20))
def test_a_domain_has_the_same_order_whatever_the_others_are_and_do(
    sizes: dict[str, int], others: dict[str, int], seed: int, between: list[bool]
):
    domain = next(iter(sizes))
    alone = by_domain({domain: sizes[domain]}, seed=seed)
    among = by_domain({**others, domain: sizes[domain]}, seed=seed)
    for draws_of_others in between:
        if draws_of_others:
            for other in others.keys() - {domain}:
                among.draw(other)
        assert drawn(among, 1, domain) == drawn(alone, 1, domain)


@given(sizes=sizes_of_domains, named=st.lists(st.sampled_from(["math", "code", "law", "chess"]), max_size=10))
def test_draws_of_any_domain_pass_over_none_that_has_something_left(sizes: dict[str, int], named: list[str]):
    source = by_domain(sizes)
    for domain in named:
        if domain in sizes:
            source.draw(domain)
    turns = [task_id.split("/")[0] for task_id, _ in drawn(source, 5 * len(sizes))]
    for start in range(0, len(turns), len(sizes)):
        assert set(turns[start : start + len(sizes)]) == set(sizes)


@given(sizes=sizes_of_domains, before=st.integers(0, 30), asked=st.booleans())
def test_a_saved_and_loaded_source_goes_on_as_if_nothing_had_happened(sizes: dict[str, int], before: int, asked: bool):
    undisturbed, resumed = by_domain(sizes), by_domain(dict(reversed(sizes.items())))  # the shares may be written in another order
    drawn(undisturbed, before)
    if asked:
        drawn(undisturbed, before, next(iter(sizes)))
    state = json.loads(json.dumps(undisturbed.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for domain in (*sizes, *sizes):
        assert drawn(resumed, 3, domain) == drawn(undisturbed, 3, domain)


def test_two_domains_of_one_size_have_orders_of_their_own():
    source = by_domain({"math": 50, "code": 50})
    orders = [[task_id.split("/")[1] for task_id, _ in drawn(source, 50, domain)] for domain in ("math", "code", "math", "code")]
    assert len({tuple(order) for order in orders}) == 4


def test_a_small_domain_goes_through_its_epochs_by_itself_and_then_has_nothing_left():
    source = by_domain({"math": 1, "code": 3}, epochs=2, shuffle=False)
    assert drawn(source, 4, "math") == [("math/0", 0), ("math/0", 1)]
    assert drawn(source, 2, "code") == [("code/0", 0), ("code/1", 0)]
    assert drawn(source, 9) == [("code/2", 0), ("code/0", 1), ("code/1", 1), ("code/2", 1)]


def test_draws_of_any_domain_take_turns_and_go_on_with_what_is_left():
    source = by_domain({"math": 1, "code": 3}, epochs=1, shuffle=False)
    assert drawn(source, 9) == [("math/0", 0), ("code/0", 0), ("code/1", 0), ("code/2", 0)]


def test_case_41_a_domain_never_becomes_empty_unless_its_last_epoch_is_over():
    source = by_domain({"math": 3, "code": 1})
    assert [epoch for _, epoch in drawn(source, 7, "math")] == [0, 0, 0, 1, 1, 1, 2]


def test_case_94_the_first_prompts_of_each_domain_after_a_resume_are_those_in_flight_then_new_ones():
    source = by_domain({"math": 10, "code": 10}, shuffle=False)
    in_flight = [*drawn(source, 6, "math")[4:], *drawn(source, 3, "code")[2:]]
    resumed = by_domain({"math": 10, "code": 10}, shuffle=False)
    resumed.load_state_dict(source.state_dict(in_flight))
    assert drawn(resumed, 4, "math") == [("math/4", 0), ("math/5", 0), ("math/6", 0), ("math/7", 0)]
    assert drawn(resumed, 2, "code") == [("code/2", 0), ("code/3", 0)]
    assert drawn(source, 1, "math") == [("math/6", 0)]  # the source that was saved is unchanged


def test_a_prompt_that_comes_back_is_drawn_again_by_its_own_domain_only():
    source = by_domain({"math": 2, "code": 2}, shuffle=False)
    drawn(source, 1, "math")
    source.put_back("math/0", 0)
    assert drawn(source, 1, "code") == [("code/0", 0)]
    assert drawn(source, 2, "math") == [("math/0", 0), ("math/1", 0)]


def test_what_cannot_be_drawn_or_come_back_is_refused():
    source = by_domain({"math": 2, "code": 2})
    with pytest.raises(TaskError, match=r"expected one of the domains code, math, got 'law' - give it a share in domain_interleave_probs"):
        source.draw("law")
    with pytest.raises(TaskError, match="'law/0' is not among these 4 tasks of the domains code, math"):
        source.put_back("law/0", 0)
    with pytest.raises(TaskError, match="'math/0' has not been drawn in epoch 0"):
        source.put_back("math/0", 0)
    with pytest.raises(TaskError, match="'law/0' is not among"):
        source.state_dict([("law/0", 0)])


def test_impossible_sources_are_refused_with_the_domain_and_the_sizes():
    with pytest.raises(TaskError, match="needs at least one task, got math: 2, code: 0"):
        DomainTasks(tasks({"math": 2}), ["math", "code"], seed=1)
    with pytest.raises(TaskError, match="needs at least one task, got no domain"):
        DomainTasks([], [], seed=1)
    with pytest.raises(TaskError, match=r"task 'code/0' is of domain 'code', which nobody would ask for: expected one of math"):
        DomainTasks(tasks({"math": 2, "code": 1}), ["math"], seed=1)
    with pytest.raises(TaskError, match="'math/0' comes more than once"):
        DomainTasks(tasks({"math": 1}) * 2, ["math"], seed=1)
    with pytest.raises(TaskError, match="epochs must be at least 1"):
        by_domain({"math": 1}, epochs=0)


SAVED = by_domain({"math": 3, "code": 2}, shuffle=False)
drawn(SAVED, 4)
STATE = SAVED.state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            TaskList(tasks({"math": 3, "code": 2}), seed=1, shuffle=False).state_dict(),
            "holds one list of all tasks, but .* draws by domain",
        ),
        (by_domain({"math": 3}, shuffle=False).state_dict(), "its domains must be code, math, got math - resume with the domains of"),
        (by_domain({"math": 3, "law": 2}, shuffle=False).state_dict(), "its domains must be code, math, got law, math"),
        (by_domain({"math": 3, "code": 1}, shuffle=False).state_dict(), "domain 'code': .* tasks must be 2, got 1"),
        (by_domain({"math": 3, "code": 2}).state_dict(), "domain 'math': .* shuffle must be False, got True"),
        ({"weights": 1}, "must have version 1 and 'domains', got version None"),
        ({**STATE, "version": 99}, "must have version 1 and 'domains', got version 99"),
        ({**STATE, "domains": None}, "must have version 1 and 'domains'"),
        ({**STATE, "domains": {**STATE["domains"], "code": 7}}, "domain 'code': .* must be a mapping, got 7"),
        ({**STATE, "domains": {**STATE["domains"], "code": {}}}, "domain 'code': .* must have 'version'"),
        ({**STATE, "next": "law"}, "one of its domains as next, got 'law'"),
        ({**STATE, "next": None}, "one of its domains as next, got None"),
    ],
)
def test_a_state_of_other_data_or_a_torn_one_is_refused_and_changes_nothing(state: dict[str, Any], message: str):
    source = by_domain({"math": 3, "code": 2}, shuffle=False)
    drawn(source, 3)
    source.put_back("math/0", 0)
    before = source.state_dict()
    with pytest.raises(TaskError, match=message):
        source.load_state_dict(state)
    assert source.state_dict() == before


def test_a_state_by_domain_is_refused_by_one_list():
    with pytest.raises(TaskError, match="holds one list for each domain, but this run draws from one list of all 5 tasks"):
        TaskList(tasks({"math": 3, "code": 2}), seed=1, shuffle=False).load_state_dict(STATE)


def test_the_fingerprint_is_that_of_the_data_and_is_computed_from_each_list_once(monkeypatch: pytest.MonkeyPatch):
    source = by_domain({"math": 3, "code": 2})
    assert source.fingerprint() == by_domain({"code": 2, "math": 3}, seed=9, epochs=2).fingerprint()
    assert source.fingerprint() != by_domain({"math": 2, "code": 2}).fingerprint()
    state = source.state_dict()
    monkeypatch.setattr("sluice.tasks.task_list.hashlib", None)
    assert source.state_dict() == state


def test_a_source_tells_its_size_its_tasks_and_its_domains():
    source = by_domain({"math": 2, "code": 1})
    assert len(source) == 3
    assert [task.task_id for task in source.tasks] == ["code/0", "math/0", "math/1"]
    assert source.domains == ("math", "code")
