from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.rewards import build_verifier
from sluice.rewards.numeric import parse_number
from tests.rewards.examples import task, verifier


def score(name: str, answer: str | None, response: str, **args: object) -> float:
    result = build_verifier(verifier(name, **args))(task(answer), response)
    assert isinstance(result, float)
    return result


# ---------------------------------------------------------------- exact


@given(st.text())
def test_exact_every_text_equals_itself_under_every_option(text: str):
    for strip in (True, False):
        for collapse in (True, False):
            for ignore_case in (True, False):
                assert score("exact", text, text, strip=strip, collapse_whitespace=collapse, ignore_case=ignore_case) == 1.0


def test_exact_options_decide_what_does_not_matter():
    assert score("exact", "Paris", " Paris\n") == 1.0
    assert score("exact", "Paris", " Paris\n", strip=False) == 0.0
    assert score("exact", "Paris", "paris") == 0.0
    assert score("exact", "Paris", "PARIS", ignore_case=True) == 1.0
    assert score("exact", "New York", "New \n York") == 0.0
    assert score("exact", "New York", "New \n York", collapse_whitespace=True) == 1.0
    assert score("exact", "", "") == 1.0


@pytest.mark.parametrize("name", ["exact", "numeric", "math_verify"])
def test_a_missing_reference_answer_is_an_error_that_names_the_task_and_not_a_wrong_response(name: str):
    with pytest.raises(ValueError, match="task 't1' has none"):
        score(name, None, "42")


# ---------------------------------------------------------------- numeric


@given(st.integers(), st.integers(min_value=1))
def test_numeric_reads_back_every_fraction_exactly(over: int, under: int):
    assert parse_number(f"{over}/{under}") == Fraction(over, under)


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_numeric_thousands_separators_change_nothing(number: int):
    assert parse_number(f"{number:,}") == number
    assert score("numeric", str(number), f"so it is {number:,}.") == 1.0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numeric_reads_every_float_as_python_writes_it(number: float):
    assert parse_number(repr(number)) == Fraction(repr(number))


@given(st.text())
def test_numeric_never_fails_on_a_response(text: str):
    assert score("numeric", "42", text) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("42", "42", 1.0),
        ("42", "The answer is 42.", 1.0),
        ("42", "First 41, then 42", 1.0),
        ("42", "42, not 43", 0.0),
        ("42", "no number", 0.0),
        ("42", "", 0.0),
        ("0.5", "1/2", 1.0),
        ("1/2", "it is 0.50", 1.0),
        ("0.1", "1 / 10", 1.0),
        ("1234567", "$1,234,567", 1.0),
        ("2", "1, 2", 1.0),
        ("1500", "1.5e3", 1.0),
        ("-6", "12+7-25=-6", 1.0),
        ("-6", "= −6", 1.0),
        ("3", "5-3", 1.0),  # the minus is an operator
        (".5", "0.5", 1.0),
        ("42", "答案是42", 1.0),
        ("2", "x2", 0.0),  # part of a name
        ("1", "1/0", 0.0),
        ("42", "nan", 0.0),
        ("42", "inf", 0.0),
        ("1e400", "1e999999999", 0.0),  # no honest number, and no memory is spent on it
        ("1", "9" * 100_000, 0.0),
    ],
)
def test_numeric_examples(reference: str, response: str, reward: float):
    assert score("numeric", reference, response) == reward


def test_numeric_only_wants_a_single_number():
    assert score("numeric", "42", "41 42", which="only") == 0.0
    assert score("numeric", "42", "it is 42", which="only") == 1.0


def test_numeric_tolerances_are_inclusive_and_the_wider_one_counts():
    assert score("numeric", "3.14", "3.14159") == 0.0
    assert score("numeric", "2", "2.5", abs_tolerance=0.5) == 1.0
    assert score("numeric", "2", "2.5000001", abs_tolerance=0.5) == 0.0
    assert score("numeric", "-100", "-101", rel_tolerance=0.0625) == 1.0
    assert score("numeric", "0", "0.1", rel_tolerance=0.5) == 0.0


@pytest.mark.parametrize("reference", ["nan", "inf", "-inf", "Infinity", "none", "", "1/0", "4 2"])
def test_numeric_a_reference_that_is_no_finite_number_is_an_error_even_for_the_same_response(reference: str):
    with pytest.raises(ValueError, match="expects a finite number as reference answer"):
        score("numeric", reference, reference)


# ---------------------------------------------------------------- regex


def test_regex_a_group_named_answer_is_compared_with_the_reference():
    pattern = r"<answer>(?P<answer>.*?)</answer>"
    assert score("regex", "42", "so <answer> 42 </answer>", pattern=pattern) == 1.0
    assert score("regex", "42", "<answer>41</answer><answer>42</answer>", pattern=pattern) == 0.0
    assert score("regex", "42", "<answer>41</answer><answer>42</answer>", pattern=pattern, match="last") == 1.0
    assert score("regex", "42", "42", pattern=pattern) == 0.0
    assert score("regex", "Yes", "<answer>yes</answer>", pattern=pattern) == 0.0
    assert score("regex", "Yes", "<answer>yes</answer>", pattern=pattern, ignore_case=True) == 1.0


def test_regex_without_the_group_a_match_is_the_reward_and_no_reference_is_needed():
    assert score("regex", None, "abc", pattern="b") == 1.0
    assert score("regex", None, "abc", pattern="b", match="full") == 0.0
    assert score("regex", None, "ABC", pattern="b") == 0.0
    assert score("regex", None, "ABC", pattern="b", flags=["ignore_case"]) == 1.0


def test_regex_a_group_that_took_no_part_in_the_match_is_wrong():
    assert score("regex", "", "b", pattern="(?P<answer>a)?b") == 0.0


# ---------------------------------------------------------------- math_verify


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("0.5", "1/2", 1.0),
        ("1/2", "0.5", 1.0),
        (r"\frac{1}{2}", "so it is $0.5$", 1.0),
        ("42", r"therefore \boxed{42}.", 1.0),
        ("42", "43", 0.0),
        ("x+1", "$1+x$", 1.0),
        ("2x+1", "$2x$", 0.0),
        ("2x+1", "the answer is 2", 0.0),
        ("1e5", "100000", 1.0),
        ("1,234", "1234", 1.0),
        (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
        ("5", "", 0.0),
        ("5", "I do not know", 0.0),
    ],
)
def test_math_verify_examples(reference: str, response: str, reward: float):
    assert score("math_verify", reference, response) == reward


def test_math_verify_reads_a_bare_expression_as_a_whole_only_when_told_to():
    assert score("math_verify", "x+1", "1+x") == 0.0
    assert score("math_verify", "x+1", "1+x", whole_response=True) == 1.0


def test_math_verify_a_reference_that_is_no_expression_is_an_error():
    with pytest.raises(ValueError, match="expects a mathematical expression as reference answer"):
        score("math_verify", "", "1")


# ---------------------------------------------------------------- reasoning_gym


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    gym = pytest.importorskip("reasoning_gym")
    return {name: gym.create_dataset(name, size=1, seed=1)[0] for name in ("basic_arithmetic", "countdown", "maze")}


def gym_score(row: dict[str, object], response: str, **args: object) -> float:
    result = build_verifier(verifier("reasoning_gym", **args))(task(None, entry=row), response)
    assert isinstance(result, float)
    return result


def test_reasoning_gym_the_data_set_that_made_a_row_scores_it(rows: dict[str, dict[str, object]]):
    for row in rows.values():
        assert gym_score(row, str(row["answer"])) == 1.0
        assert gym_score(row, f"  {row['answer']}\n") == 1.0


def test_reasoning_gym_partial_credit_is_kept_and_binary_leaves_only_the_exactly_right(rows: dict[str, dict[str, object]]):
    row = rows["basic_arithmetic"]
    almost = f"{row['answer']}, I think"
    assert 0.0 < gym_score(row, almost) < 1.0
    assert gym_score(row, almost, binary=True) == 0.0
    assert gym_score(row, str(row["answer"]), binary=True) == 1.0


def test_reasoning_gym_parameters_that_the_scorer_reads_can_be_given():
    pytest.importorskip("reasoning_gym")
    row = {"question": "?", "answer": "0.12", "metadata": {"source_dataset": "decimal_arithmetic"}}
    assert gym_score(row, "0.14") == 0.0
    assert gym_score(row, "0.14", params={"decimal_arithmetic": {"max_num_decimal_places": 1, "min_num_decimal_places": 1}}) == 1.0


def test_reasoning_gym_a_row_of_other_origin_is_an_error_that_names_its_fields():
    with pytest.raises(ValueError, match=r"metadata\.source_dataset.*question, answer"):
        gym_score({"question": "?", "answer": "1"}, "1")
