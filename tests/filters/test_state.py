from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import RewardConfig
from sluice.errors import FilterError
from sluice.filters import DomainFilters, build_domain_filters, build_query_filter, filters_state, load_filters_state
from tests.fakes import make_group, make_rollout
from tests.filters.filters_for_tests import HERE

SURPRISING = {"type": f"{HERE}.Surprising"}
STD = {"type": "std_filter"}
NESTED = {"type": "any", "filter_args": {"filters": [STD, {"type": "not", "filter_args": {"filter": SURPRISING}}]}}

MATH = "rewards.math.query_filter_config.filter_args.filters[1].filter_args.filter"
CODE = "rewards.code.response_filter_config"


def reward(query=STD, response=None):
    return RewardConfig.model_validate({"verifier": {"type": "exact"}, "query_filter_config": query, "response_filter_config": response})


def build(**domains):
    return build_domain_filters(domains, group_size=2)


def with_memory():
    return build(math=reward(NESTED), code=reward({"type": f"{HERE}.keep_all"}, SURPRISING), law=reward(STD))


def judge(filters, best):
    return (
        filters["math"].query.judge(make_group([best, best])).keep,
        filters["code"].response.judge(make_rollout(reward=best)).keep,
    )


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_filters_that_go_on_from_a_state_judge_as_those_that_never_stopped(before, after):
    first = with_memory()
    for best in before:
        judge(first, best)
    state = json.loads(json.dumps(filters_state(first)))
    second = with_memory()
    load_filters_state(second, state)
    assert filters_state(second) == state
    assert [judge(first, best) for best in after] == [judge(second, best) for best in after]


def test_states_are_found_by_the_path_of_the_configuration():
    filters = with_memory()
    judge(filters, 3.0)
    assert filters_state(filters) == {MATH: {"seen": [3.0]}, CODE: {"seen": [3.0]}}


def test_filters_without_a_memory_are_silent():
    plain = build(math=reward({"type": "all", "filter_args": {"filters": [STD, {"type": f"{HERE}.Counting"}]}}))
    assert filters_state(plain) == {}
    load_filters_state(plain, {})


def test_a_state_is_plain_data_and_does_not_change_when_the_filter_goes_on():
    filters = build(math=reward({"type": f"{HERE}.GivesItselfAway"}))
    judge_group = filters["math"].query.judge
    judge_group(make_group([1.0, 0.0]))
    state = filters_state(filters)["rewards.math.query_filter_config"]
    for _ in range(2):
        assert [type(value) for value in state.values()] == [dict, list, np.ndarray]
        assert (state["counts"], state["last"], state["sums"].tolist()) == ({"1.0": 1}, [[1.0, 0.0]], [1.0])
        judge_group(make_group([1.0, 1.0]))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({MATH: {"seen": []}, CODE: {"seen": []}, "rewards.cod.response_filter_config": {}}, rf"^rewards\.cod\..* did you mean '{CODE}'"),
        ({MATH: {"seen": []}}, rf"^{CODE}: expected the state of {HERE}\.Surprising, got none - the state is torn"),
        ([MATH, CODE], "^filters: expected their state as a mapping, got list"),
        (None, "^filters: expected their state as a mapping, got NoneType"),
        ({MATH: {"seen": []}, CODE: {"sen": []}}, rf"^{CODE}: {HERE}\.Surprising\.load_state_dict raised KeyError: 'seen'"),
    ],
)
def test_a_torn_or_foreign_state_is_refused(state, message):
    with pytest.raises(FilterError, match=message.replace("[1]", r"\[1\]")):
        load_filters_state(with_memory(), state)


def test_a_state_of_other_filters_is_refused_before_any_filter_is_touched():
    filters = with_memory()
    judge(filters, 1.0)
    before = filters_state(filters)
    for state in ({MATH: {"seen": []}}, {MATH: {"seen": []}, CODE: {"seen": []}, "other": {}}):
        with pytest.raises(FilterError):
            load_filters_state(filters, state)
        assert filters_state(filters) == before
    with pytest.raises(FilterError, match="there is none: leave it out"):
        load_filters_state(build(law=reward(STD)), before)


def test_user_code_that_exits_on_saving_is_an_error_of_the_filter():
    filters = build(math=reward({"type": f"{HERE}.ExitsOnSave"}))
    with pytest.raises(FilterError, match=rf"rewards\.math\.query_filter_config: {HERE}\.ExitsOnSave\.state_dict raised SystemExit: 6"):
        filters_state(filters)


def test_two_filters_of_one_path_cannot_share_a_state():
    same = {name: DomainFilters(query=build_query_filter(SURPRISING), response=None) for name in ("a", "b")}
    with pytest.raises(FilterError, match="query_filter: expected one filter with a memory, got two"):
        filters_state(same)
