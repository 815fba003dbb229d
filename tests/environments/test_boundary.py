"""Whatever an environment answers becomes a record or a fault that names the environment and the call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments import EnvFault, EnvInfo, EnvReset, EnvStep
from sluice.environments.boundary import DETAIL_CHARS, LONGEST_ACTION, HeldEnvironment, call_reset, call_step, describe
from sluice.errors import EnvError, SluiceError
from tests.environments.environments_for_tests import WRONG_STEPS, Obedient


class Answers:
    """Answers with anything."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def reset(self, seed):
        return self.answer

    def step(self, action):
        return self.answer

    def close(self) -> None:
        pass


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner, inner)
    ),
    max_leaves=8,
)
INFOS = st.dictionaries(st.sampled_from(["admissible_commands", "progress", "success", "task_type", "env_id", "x"]), ANYTHING)


@given(ANYTHING | st.tuples(st.text(), st.floats() | st.integers(), st.booleans(), st.booleans(), INFOS))
def test_any_answer_becomes_a_step_or_a_fault(answer) -> None:
    came = HeldEnvironment("any", lambda: Answers(answer)).perform("step", "look")
    if isinstance(came, EnvStep):
        assert came.observation == answer[0]
        assert came.reward == answer[1]
        assert (came.terminated, came.truncated) == answer[2:4]
        assert came.info.progress is None or 0 <= came.info.progress <= 1
    else:
        assert isinstance(came, EnvFault)
        assert came.kind == "env_failed"
        assert "any, step" in came.detail
        assert len(came.detail) <= DETAIL_CHARS


@given(ANYTHING | st.tuples(st.text(), INFOS))
def test_any_answer_becomes_a_reset_or_a_fault(answer) -> None:
    came = HeldEnvironment("any", lambda: Answers(answer)).perform("reset", 1)
    assert isinstance(came, EnvReset | EnvFault)


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_wrong_answer_is_an_error_that_names_environment_and_call(wrong) -> None:
    with pytest.raises(EnvError, match="^environment maze, step: expected "):
        call_step(Obedient(), f"wrong {wrong}", "maze")


def test_a_wrong_reset_is_one_too() -> None:
    with pytest.raises(
        SluiceError, match=r"^environment maze, reset: expected a tuple \(observation, info\), got 'text without info' \(str\)"
    ):
        call_reset(Obedient(), 667, "maze")


def test_numpy_scalars_are_taken_for_what_they_are() -> None:
    step = call_step(Obedient(), "numpy", "maze")
    assert type(step.observation) is str
    assert (type(step.reward), step.reward) == (float, 0.25)
    assert (step.terminated, step.truncated) == (False, False)
    assert step.info == EnvInfo(progress=0.5, success=True, extra={"count": 3})


def test_plain_entries_of_info_are_kept_and_objects_left_out() -> None:
    step = call_step(Obedient(), "go on", "maze")
    assert step.info.admissible_commands == ("end", "go on")
    assert set(step.info.extra) == {"length", "pid"}


def test_an_enormous_action_is_cut() -> None:
    assert call_step(Obedient(), "x" * 10_000_000, "maze").info.extra["length"] == LONGEST_ACTION


def test_an_empty_action_reaches_the_environment() -> None:
    assert call_step(Obedient(), "", "maze").info.extra["length"] == 0


@pytest.mark.parametrize("action", ["raise", "exit", "interrupt"])
def test_whatever_is_raised_is_a_fault_with_its_place(action) -> None:
    fault = HeldEnvironment("maze", Obedient).perform("step", action)
    assert isinstance(fault, EnvFault)
    assert fault.kind == "env_failed"
    assert "environment maze, step: " in fault.detail
    assert "environments_for_tests.py" in fault.detail


def test_an_environment_that_failed_is_closed_and_built_anew() -> None:
    built = []

    def build():
        built.append(Obedient())
        return built[-1]

    held = HeldEnvironment("maze", build)
    held.perform("reset", 1)
    held.perform("step", "raise")
    assert isinstance(held.perform("reset", 2), EnvReset)
    held.drop()
    held.drop()
    assert [environment.closed for environment in built] == [1, 1]


def test_an_environment_that_cannot_be_built_is_a_fault_of_the_call() -> None:
    fault = HeldEnvironment("maze", lambda: Obedient(build="raise")).perform("reset", 1)
    assert isinstance(fault, EnvFault)
    assert "it was told not to be built" in fault.detail


def test_an_environment_that_raises_when_closed_is_only_warned_about(caplog) -> None:
    held = HeldEnvironment("maze", Obedient)
    held.perform("reset", 670)
    held.drop()
    assert "environment maze, close: ValueError: closing raises" in caplog.text


def test_a_message_that_cannot_be_read_is_no_obstacle() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(Rude()) == "Rude: (its message cannot be read)"
