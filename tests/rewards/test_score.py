from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import LARGEST_REWARD
from sluice.errors import DETAIL_CHARS, describe
from sluice.rewards import Score, make_score
from sluice.rewards.score import ScoreCounts, failed, run_verifier
from tests.rewards import verifiers_for_tests as verifiers
from tests.rewards.examples import task


def reason(score: Score) -> str:
    assert score.failure is not None
    return score.failure.reason


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers() | st.fractions(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(anything, st.none() | st.text())
def test_any_answer_is_a_finite_reward_or_a_failure_and_never_an_exception(answer: object, reward_key: str | None):
    score = make_score(answer, reward_key=reward_key)
    assert (score.reward is None) == (score.failure is not None)
    assert score.reward is None or (type(score.reward) is float and math.isfinite(score.reward))
    assert all(type(key) is str and math.isfinite(value) for key, value in score.metrics.items())


@given(st.floats(-LARGEST_REWARD, LARGEST_REWARD))
def test_a_finite_number_is_the_reward_whatever_its_type(number: float):
    for answer in (number, np.float64(number), np.array(number), Fraction(number), Decimal(number)):
        assert make_score(answer).reward == number


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (np.bool_(True), 1.0),
        (np.int8(-2), -2.0),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.25), 0.25),
        (np.array(True), 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.75"), 0.75),
        (-0.0, 0.0),
    ],
)
def test_numbers_of_every_kind_are_rewards(answer: object, reward: float):
    score = make_score(answer)
    assert score.reward == reward
    assert type(score.reward) is float


def test_a_tensor_without_dimensions_is_a_number_and_one_with_a_dimension_is_not():
    torch = pytest.importorskip("torch")
    assert make_score(torch.tensor(0.5, requires_grad=True)).reward == 0.5
    assert make_score(torch.tensor(True)).reward == 1.0
    assert reason(make_score(torch.tensor([0.5]))) == "reward_type"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "reward_missing"),
        (math.nan, "reward_not_finite"),
        (math.inf, "reward_not_finite"),
        (np.float32("-inf"), "reward_not_finite"),
        (np.array(math.nan), "reward_not_finite"),
        (10**400, "reward_not_finite"),
        (1e39, "reward_not_finite"),
        (-3.5e38, "reward_not_finite"),
        (np.float64(1e300), "reward_not_finite"),
        (10**40, "reward_not_finite"),
        (Decimal("sNaN"), "reward_not_finite"),
        ("1.0", "reward_type"),
        (b"1", "reward_type"),
        ([1.0], "reward_type"),
        ((1.0, 0.0), "reward_type"),
        (np.array([1.0]), "reward_type"),
        (np.array("1"), "reward_type"),
        (1 + 0j, "reward_type"),
        (np.complex128(1), "reward_type"),
        (object(), "reward_type"),
    ],
)
def test_what_is_no_finite_number_is_a_counted_failure_of_the_machinery_and_never_0(answer: object, why: str):
    score = make_score(answer)
    assert score.reward is None
    assert reason(score) == why
    assert score.failure is not None
    assert score.failure.cause == "infrastructure"
    assert score.failure.detail


def test_the_detail_names_the_type_the_shape_and_the_value():
    score = make_score(np.zeros((2, 3)))
    assert score.failure is not None
    assert "ndarray of shape (2, 3)" in score.failure.detail
    score = make_score("high")
    assert score.failure is not None
    assert "str 'high'" in score.failure.detail


def test_a_reward_that_training_in_float32_cannot_hold_says_so():
    assert make_score(LARGEST_REWARD).reward == float(np.float32(np.finfo(np.float32).max))
    score = make_score({"acc": 1e200, "big": 1e200}, reward_key="acc")
    assert score.failure is not None
    assert "1e+200, training is done in float32, which ends at 3.4028235e+38" in score.failure.detail
    assert score.metrics == {"acc": 1e200, "big": 1e200}


# ---------------------------------------------------------------- mappings


def test_case_13_of_a_mapping_the_reward_key_is_the_reward_and_the_other_numbers_are_metrics():
    answers = [{"acc": 1, "fmt": 0}, {"acc": 0, "fmt": 1}]
    assert [make_score(a, reward_key="acc").reward for a in answers] == [1.0, 0.0]
    assert [make_score(a, reward_key="fmt").reward for a in answers] == [0.0, 1.0]
    assert make_score(answers[0], reward_key="acc").metrics == {"acc": 1.0, "fmt": 0.0}


def test_case_13_without_a_reward_key_the_failure_names_the_option_and_the_fields_seen():
    score = make_score({"acc": 1, "fmt": 0})
    assert reason(score) == "reward_key_missing"
    assert score.failure is not None
    assert "rewards.<domain>.reward_key" in score.failure.detail
    assert "'acc', 'fmt'" in score.failure.detail


def test_case_13_a_wrong_reward_key_names_itself_and_the_fields_seen():
    score = make_score({"acc": 1, "fmt": 0}, reward_key="accuracy")
    assert reason(score) == "reward_key_missing"
    assert score.failure is not None
    assert "'accuracy'" in score.failure.detail
    assert "'acc', 'fmt'" in score.failure.detail


def test_case_13_bools_and_numpy_scalars_count_as_numbers_and_text_is_no_metric():
    answer = {"acc": np.bool_(True), "fmt": True, "n": np.int64(3), "why": "because", "spread": math.nan, "missing": None}
    score = make_score(answer, reward_key="acc")
    assert score.reward == 1.0
    assert score.metrics == {"acc": 1.0, "fmt": 1.0, "n": 3.0}


@pytest.mark.parametrize(
    ("entry", "why"), [(None, "reward_missing"), (math.nan, "reward_not_finite"), ("1", "reward_type"), ({}, "reward_type")]
)
def test_a_mapping_whose_reward_is_no_number_keeps_its_metrics_and_says_which_field(entry: object, why: str):
    score = make_score({"acc": entry, "fmt": 1}, reward_key="acc")
    assert score.reward is None
    assert reason(score) == why
    assert score.metrics == {"fmt": 1.0}
    assert score.failure is not None
    assert "'acc'" in score.failure.detail


def test_a_plain_number_is_taken_as_it_is_when_a_reward_key_is_set():
    assert make_score(0.0, reward_key="acc").reward == 0.0


# ---------------------------------------------------------------- exceptions


def test_an_exception_becomes_a_failure_with_type_message_and_place():
    score = run_verifier(verifiers.raising, task(), "xyz", None)
    assert reason(score) == "reward_error"
    assert score.failure is not None
    assert "ValueError: cannot read 'xyz'" in score.failure.detail
    assert "verifiers_for_tests.py" in score.failure.detail
    assert "in raising" in score.failure.detail


def test_a_verifier_that_exits_ends_its_call_and_not_the_run():
    assert reason(run_verifier(verifiers.exiting, task(), "", None)) == "reward_error"


def test_a_verifier_that_raises_keyboard_interrupt_is_counted_like_any_error():
    score = run_verifier(verifiers.interrupting, task(), "", None)
    assert reason(score) == "reward_error"
    assert score.failure is not None
    assert "KeyboardInterrupt" in score.failure.detail


def test_an_answer_that_exits_when_it_is_read_is_a_counted_failure():
    class Exits:
        @property
        def shape(self) -> tuple[int, ...]:
            raise SystemExit(1)

    assert reason(make_score(Exits())) == "reward_type"


def test_details_are_bounded_and_hostile_exceptions_and_answers_do_no_harm():
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    class HostileAnswer:
        @property
        def shape(self) -> tuple[int, ...]:
            raise RuntimeError("no")

    assert "Hostile" in describe(Hostile())
    assert reason(make_score(HostileAnswer())) == "reward_type"
    score = failed("reward_error", "x" * 100_000)
    assert score.failure is not None
    assert len(score.failure.detail) == DETAIL_CHARS
    assert describe(ValueError("half a pair: \ud800")).encode() == rb"ValueError: half a pair: \ud800"  # SQLite writes no such half


# ---------------------------------------------------------------- counting


@given(st.lists(st.sampled_from([1, True, None, math.nan, "1", [1], {"acc": 1}, np.float32(0.5)]), max_size=20))
def test_case_124_every_answer_is_counted_once_as_scored_or_by_its_reason(answers: list[object]):
    counts = ScoreCounts()
    for answer in answers:
        counts.jobs += 1
        counts.answered(make_score(answer))
    metrics = counts.metrics()
    errors = sum(value for key, value in metrics.items() if key.startswith("rewards/errors/"))
    assert metrics["rewards/jobs"] == len(answers) == metrics["rewards/scored"] + errors


def test_case_124_what_could_not_be_scored_is_never_a_wrong_answer():
    scores = [make_score(1.0), make_score(0.0), run_verifier(verifiers.raising, task(), "", None)]
    rewards = [score.reward for score in scores if score.reward is not None]
    assert sum(rewards) / len(rewards) == 0.5
    assert sum(score.failure is not None for score in scores) == 1
    unscored = [run_verifier(verifiers.raising, task(), "", None) for _ in range(3)]
    assert [score.reward for score in unscored] == [None, None, None]
    assert "rewards/score_seconds/mean" not in ScoreCounts().metrics()  # nothing to average: no value


def test_case_21_and_23_none_is_a_missing_reward_and_is_never_filled_with_0():
    scores = [make_score(answer) for answer in (1, 0, None, 1)]
    assert [score.reward for score in scores] == [1.0, 0.0, None, 1.0]
    assert reason(scores[2]) == "reward_missing"
