from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, FilterError
from sluice.filters import build_query_filter, build_response_filter
from sluice.types import Verdict
from tests.fakes import make_group, make_rollout
from tests.filters.filters_for_tests import HERE

WHERE = "rewards.math.query_filter_config"


def custom(name, **arguments):
    return build_query_filter({"type": f"{HERE}.{name}", "filter_args": arguments}, where=WHERE)


@pytest.mark.parametrize(("name", "keep"), [("keep_all", True), ("drop_all", False), ("numpy_bool", True), ("zero_dim_array", False)])
def test_booleans_of_every_kind_are_answers_and_true_keeps(name, keep):
    verdict = custom(name).judge(make_group([1.0, 0.0]))
    assert verdict.keep is keep
    assert verdict.source == f"{HERE}.{name}"
    if not keep:
        assert (verdict.reason, verdict.category) == (name, "low_information")


def test_a_zero_dim_tensor_is_an_answer():
    pytest.importorskip("torch")
    assert custom("zero_dim_tensor").judge([1, 0]).keep


def test_a_verdict_is_an_answer_and_is_passed_on():
    verdict = custom("verdict").judge([1, 0])
    assert (verdict.reason, verdict.evidence, verdict.source) == ("too_boring", {"yawns": 3.0}, f"{HERE}.verdict")


@pytest.mark.parametrize(
    ("name", "cls"),
    [("integer", "1 .builtins.int"), ("nothing", "None .builtins.NoneType"), ("one_element_array", "ndarray"), ("score", "ndarray")],
)
def test_any_other_answer_is_an_error_that_names_class_and_value(name, cls):
    query = custom(name)
    with pytest.raises(FilterError, match=rf"{WHERE}: {HERE}.{name} must answer True .keep., False .drop. or a Verdict, got .*{cls}"):
        query.judge([1, 0])


def test_a_category_that_there_is_not_is_an_error_that_names_the_filter():
    with pytest.raises(FilterError, match=rf"{WHERE}: {HERE}.strange_category must answer with a category out of .* got 'boring'"):
        custom("strange_category").judge([1, 0])


ANY = st.none() | st.integers() | st.text(st.characters(exclude_categories=())) | st.floats() | st.lists(st.integers())


@given(reason=ANY, source=ANY, evidence=st.dictionaries(ANY.filter(lambda key: not isinstance(key, list)), ANY) | ANY)
def test_whatever_a_verdict_of_ones_own_holds_it_can_be_counted_and_written_down_or_is_an_error(reason, source, evidence):
    given_ = Verdict(keep=False, category="invalid", reason=reason, source=source, evidence=evidence)
    try:
        verdict = custom("says", verdict=given_).judge([1, 0])
    except FilterError:
        return
    assert verdict.reason.isprintable()
    assert 1 <= len(verdict.reason.encode()) <= 400
    assert verdict.source.isprintable()
    assert all(name.isprintable() and float(number) is not None for name, number in verdict.evidence.items())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reason": 7}, "a reason of 1 to 100 printable characters, got 7 .int."),
        ({"reason": ""}, "a reason of 1 to 100 printable characters, got ''"),
        ({"reason": "x" * 101}, "put what differs from group to group into the evidence"),
        ({"reason": "two\nlines"}, "printable characters"),
        ({"reason": "half a pair \ud800"}, "printable characters"),
        ({"source": None}, "a source of 0 to 100 printable characters, got None"),
        ({"evidence": [1.0]}, "a mapping of names to numbers as evidence, got .1.0. .list."),
        ({"evidence": {"why": "so"}}, "names and numbers as evidence, got 'why': 'so' .str."),
        ({"evidence": {3: 1.0}}, "names and numbers as evidence, got 3: 1.0"),
    ],
)
def test_what_no_record_can_hold_of_a_verdict_is_an_error_that_names_the_filter(changes, told):
    wrong = Verdict(**{"keep": False, "category": "invalid", "reason": "dull", **changes})
    with pytest.raises(FilterError, match=f"{WHERE}: {HERE}.says must answer with {told}" if told[0] == "a" or told[0] == "n" else told):
        custom("says", verdict=wrong).judge([1, 0])


def test_numbers_of_numpy_are_evidence():
    evidence = {"spread": np.float32(0.5), "all": np.bool_(True), "n": 3}
    assert custom("says", verdict=Verdict.dropped("dull", "invalid", "", evidence)).judge([1, 0]).evidence == evidence


def test_filter_args_go_to_the_function_or_the_class():
    assert custom("best_above", limit=2.0).judge(make_group([1.0, 3.0])).keep
    assert not custom("best_above").judge(make_group([0.0, 0.5])).keep
    counting = custom("Counting", start=1)
    assert [counting.judge([1]).keep for _ in range(2)] == [False, True]
    said = build_response_filter({"type": f"{HERE}.mentions", "filter_args": {"word": "42"}})
    assert said.judge(make_rollout(text="it is 42")).keep
    verdict = said.judge(make_rollout(text="no idea"))
    assert (verdict.reason, verdict.category) == ("mentions", "invalid")


def test_a_group_that_is_not_whole_never_reaches_user_code():
    query = custom("raises")
    assert query.judge(make_group([None, None])).reason == "incomplete"
    assert query.judge(replace(make_group([1.0, None]), counted=(True, True))).reason == "incomplete"
    assert query.judge(replace(make_group([1.0, 1.0]), counted=(False, False))).reason == "truncated"


def test_case_21_and_45_user_code_sees_a_group_of_which_enough_members_count():
    survivors = build_query_filter({"type": f"{HERE}.keep_all"}, min_members=3)
    assert survivors.judge(replace(make_group([1.0, 0.0, 1.0, None]), counted=(True,) * 4)).keep
    assert survivors.judge(make_group([None] * 4)).reason == "incomplete"
    assert custom("keep_all").judge(replace(make_group([1.0, 0.0, 1.0, 0.0]), counted=(True, True, True, False))).keep


def test_an_exception_in_user_code_names_the_filter_and_the_group():
    with pytest.raises(FilterError, match=rf"{HERE}.raises raised KeyError on group 7 \(task 't0'\)") as error:
        custom("raises").judge(make_group([1.0, 0.0], group_id=7))
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(("name", "what"), [("exits", "SystemExit"), ("interrupts", "KeyboardInterrupt"), ("unreadable", "SystemExit")])
def test_user_code_that_exits_or_interrupts_is_an_error_of_the_filter_like_any_other(name, what):
    with pytest.raises(FilterError, match=rf"{WHERE}: {HERE}.{name} .*{what}"):
        custom(name).judge(make_group([1.0, 0.0]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.filters.f", "importing 'no_such_package.filters' raised ModuleNotFoundError"),
        (f"{HERE}.keep_al", "has no 'keep_al' - did you mean 'keep_all'"),
        (f"{HERE}.NOT_CALLABLE", "must name a function or a class, got .* = 3"),
        (f"{HERE}.takes_nothing", "which its signature .* does not take"),
        (f"{HERE}.coroutine", "got the coroutine function"),
        (f"{HERE}.SpeaksRoll", r"without .filter .True drops."),
        (f"{HERE}.SpeaksBoth", r"without .filter .True drops."),
        (f"{HERE}.SpeaksNeither", "got the class .* without it"),
        (f"{HERE}.BreaksWhenBuilt", "raised RuntimeError: no licence"),
        (f"{HERE}.ExitsWhenBuilt", "raised SystemExit: 5"),
        ("tests.filters.exits_on_import.f", "importing 'tests.filters.exits_on_import' raised SystemExit"),
        (".judge", "importing '' raised ValueError"),
        (f"{HERE}.OnlySaves", "with state_dict and load_state_dict, or with neither, got .* with state_dict alone - add load_state_dict"),
        (f"{HERE}.SavesWithArguments", "state_dict is called without arguments, which its signature .* does not take"),
        (f"{HERE}.LoadsNothing", "load_state_dict is called with the state, which its signature .* does not take"),
    ],
)
def test_a_wrong_path_or_signature_fails_when_the_filter_is_built(path, message):
    with pytest.raises(ConfigError, match=rf"^{WHERE}.*{message}"):
        build_query_filter({"type": path}, where=WHERE)


def test_arguments_that_the_function_does_not_take_fail_when_the_filter_is_built():
    with pytest.raises(ConfigError, match=r"filter_args \['limt'\].*signature"):
        custom("best_above", limt=1.0)
    with pytest.raises(ConfigError, match=r"filter_args \['stop'\].*signature"):
        custom("Counting", stop=1)
    with pytest.raises(ConfigError, match="signature"):
        build_response_filter({"type": f"{HERE}.mentions"})
    with pytest.raises(ConfigError, match="metric has no effect on"):
        build_query_filter({"type": f"{HERE}.keep_all", "metric": "acc"})
