from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.filters import build_query_filter, build_response_filter
from tests.fakes import make_group, make_rollout
from tests.filters.filters_for_tests import HERE

CUSTOM = {"type": f"{HERE}.keep_all"}

STD = {"type": "std_filter"}
HARD = {"type": "mean_filter", "filter_args": {"threshold_down": 0.25}}
EASY = {"type": "mean_filter", "filter_args": {"threshold_up": 0.75}}
NO = {"type": "no_filter"}


def composed_of(leaves):
    return st.recursive(
        st.sampled_from(leaves),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda fs: {"type": "all", "filter_args": {"filters": fs}}),
            st.lists(inner, min_size=1, max_size=3).map(lambda fs: {"type": "any", "filter_args": {"filters": fs}}),
            inner.map(lambda f: {"type": "not", "filter_args": {"filter": f}}),
        ),
        max_leaves=6,
    )


trees = composed_of([STD, HARD, EASY, NO])


def expected(config, rewards):
    """What the tree means, by hand."""
    kind, arguments = config["type"], config.get("filter_args", {})
    mean = sum(rewards) / len(rewards)
    match kind:
        case "all":
            return all(expected(inner, rewards) for inner in arguments["filters"])
        case "any":
            return any(expected(inner, rewards) for inner in arguments["filters"])
        case "not":
            return not expected(arguments["filter"], rewards)
        case "std_filter":
            return len(rewards) == 1 or max(rewards) > min(rewards)
        case "mean_filter":
            return arguments.get("threshold_down", -1) < mean < arguments.get("threshold_up", 2)
        case _:
            return True


@given(trees, st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8))
def test_compositions_are_boolean_algebra(config, rewards):
    query = build_query_filter(config)
    assert query.judge(rewards).keep == expected(config, rewards)
    assert query.judge(make_group(rewards)) == query.judge(rewards)


@given(trees, st.lists(st.sampled_from([0.0, 1.0]), max_size=4))
def test_no_composition_keeps_what_cannot_be_judged(config, rewards):
    verdict = build_query_filter(config).judge([*rewards, None])
    assert (verdict.keep, verdict.reason, verdict.category) == (False, "incomplete", "invalid")


@given(composed_of([STD, NO, CUSTOM]))
def test_a_filter_is_opaque_exactly_when_user_code_has_a_say_in_it(config):
    assert build_query_filter(config).is_opaque == (HERE in str(config))


def test_each_inner_filter_keeps_its_own_reason():
    both = build_query_filter({"type": "all", "filter_args": {"filters": [HARD, STD]}})
    assert (both.judge([0, 0]).reason, both.judge([0, 0]).source) == ("too_hard", "mean_filter")
    assert (both.judge([1, 1]).reason, both.judge([1, 1]).source) == ("no_spread", "std_filter")
    kept = both.judge([0, 1])
    assert (kept.source, kept.evidence["n"]) == ("all", 2)
    either = build_query_filter({"type": "any", "filter_args": {"filters": [STD, EASY]}})
    assert (either.judge([1, 1]).reason, either.judge([1, 1]).source) == ("no_spread", "std_filter")
    assert (either.judge([0, 0]).keep, either.judge([0, 0]).source) == (True, "mean_filter")
    not_hard = build_query_filter({"type": "not", "filter_args": {"filter": HARD}}).judge([1, 1])
    assert (not_hard.reason, not_hard.category, not_hard.source) == ("not_mean_filter", "low_information", "not")


def test_any_reports_broken_data_before_low_information():
    broken = {"type": f"{HERE}.verdict"}
    either = build_query_filter({"type": "any", "filter_args": {"filters": [broken, STD]}})
    assert either.judge([1, 1]).reason == "too_boring"
    assert either.judge([1, None]).reason == "incomplete"


def test_response_filters_compose_in_the_same_way():
    refusal = {"type": "format", "filter_args": {"pattern": "I cannot"}}
    query = build_response_filter(
        {
            "type": "all",
            "filter_args": {
                "filters": [{"type": "length", "filter_args": {"max_tokens": 5}}, {"type": "not", "filter_args": {"filter": refusal}}]
            },
        }
    )
    assert query.judge(make_rollout(text="42")).keep
    verdict = query.judge(make_rollout(text="I cannot do that"))
    assert (verdict.reason, verdict.category) == ("not_format", "invalid")
    assert query.judge(make_rollout(text="42", tokens=6)).reason == "too_long"
    low = {"type": "reward_range", "filter_args": {"low": 0.5}}
    not_low = build_response_filter({"type": "not", "filter_args": {"filter": low}})
    assert not_low.judge(make_rollout(reward=0.0)).keep
    assert not_low.judge(make_rollout(reward=None)).reason == "incomplete"


@pytest.mark.parametrize("name", ["keep_all", "drop_all"])
def test_custom_filters_compose(name):
    custom = {"type": f"{HERE}.{name}"}
    assert build_query_filter({"type": "all", "filter_args": {"filters": [custom, STD]}}).judge([0, 1]).keep == (name == "keep_all")
    negated = build_query_filter({"type": "not", "filter_args": {"filter": custom}}).judge([0, 1])
    assert negated.keep == (name == "drop_all")
    assert negated.reason == ("kept" if negated.keep else "not_keep_all")
