"""Whatever an environment answers becomes a record or a fault that names the environment and the call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments import EnvFault, EnvInfo, EnvReset, EnvStep
from sluice.environments.boundary import (
    LONGEST_ACTION,
    LONGEST_OBSERVATION,
    Answer,
    HeldEnvironment,
    call_reset,
    call_step,
)
from sluice.errors import DETAIL_CHARS, EnvError, SluiceError, cut, describe
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


ANY_TEXT = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs as well
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner, inner)
    ),
    max_leaves=8,
)
INFOS = st.dictionaries(st.sampled_from(["admissible_commands", "progress", "success", "task_type", "env_id", "x"]), ANYTHING)


@given(ANYTHING | st.tuples(ANY_TEXT, st.floats() | st.integers(), st.booleans(), st.booleans(), INFOS))
def test_any_answer_becomes_a_step_or_a_fault(answer) -> None:
    came = HeldEnvironment("any", lambda: Answers(answer)).perform("step", "look")
    if isinstance(came, EnvStep):
        assert all(text.encode() is not None for text in texts_of(came))
        assert abs(came.reward) < 3.5e38  # what float32 can hold
        assert came.observation == answer[0]
        assert came.reward == answer[1]
        assert (came.terminated, came.truncated) == answer[2:4]
        assert came.info.progress is None or 0 <= came.info.progress <= 1
    else:
        assert isinstance(came, EnvFault)
        assert came.kind == "env_failed"
        assert "any, step" in came.detail
        assert len(came.detail) <= DETAIL_CHARS


def texts_of(came: EnvReset | EnvStep) -> list[str]:
    """What a policy reads of it, and what is recorded."""
    info = came.info
    return [came.observation, *(info.admissible_commands or ()), info.task_type or "", info.env_id or ""]


@given(ANYTHING | st.tuples(ANY_TEXT, INFOS))
def test_any_answer_becomes_a_reset_or_a_fault(answer) -> None:
    came = HeldEnvironment("any", lambda: Answers(answer)).perform("reset", 1)
    assert isinstance(came, EnvReset | EnvFault)
    if isinstance(came, EnvReset):
        assert all(text.encode() is not None for text in texts_of(came))


@given(ANY_TEXT, st.integers(0, 40))
def test_what_is_told_of_a_fault_can_be_written_down_and_is_bounded(text: str, limit: int) -> None:
    told = cut(text, limit)
    assert len(told.encode().decode()) <= max(limit, 3)
    if text.isascii() and len(text) <= limit:
        assert told == text


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


def test_a_tensor_without_dimensions_is_the_number_that_it_holds() -> None:
    torch = pytest.importorskip("torch")
    answer = ("text", torch.tensor(0.5), torch.tensor(True), False, {"progress": torch.tensor(0.25)})
    step = call_step(Answers(answer), "look", "maze")
    assert (step.reward, step.terminated, step.info.progress) == (0.5, True, 0.25)
    with pytest.raises(EnvError, match=r"expected a finite number as reward, got tensor\(\[0.5000\]\)"):
        call_step(Answers(("text", torch.tensor([0.5]), False, False, {})), "look", "maze")


def test_what_else_info_holds_is_bounded_together() -> None:
    half = "x" * (LONGEST_OBSERVATION // 2)
    info = {"first": half, "second": half, "third": "y", "large": 10**5000, "small": -3, "truth": True}
    step = call_step(Answers(("text", 0.0, False, False, info)), "look", "maze")
    assert step.info.extra == {"first": half, "third": "y", "small": -3, "truth": True}


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


def in_a_thread(what: Any) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(what()))
    thread.start()
    thread.join()
    return answers[0]


def test_ctrl_c_is_the_users_in_the_main_thread_alone() -> None:
    """Signals arrive there; elsewhere the environment itself has raised it."""
    with pytest.raises(KeyboardInterrupt):
        HeldEnvironment("maze", Obedient).perform("step", "ctrl-c")
    fault: Answer = in_a_thread(lambda: HeldEnvironment("maze", Obedient).perform("step", "ctrl-c"))
    assert isinstance(fault, EnvFault)
    assert "KeyboardInterrupt" in fault.detail

    class Rude(Obedient):
        def close(self) -> None:
            raise KeyboardInterrupt

    def closed() -> bool:
        held = HeldEnvironment("maze", Rude)
        held.perform("reset", 1)
        held.drop()
        return True

    assert in_a_thread(closed)
    with pytest.raises(KeyboardInterrupt):
        closed()


def test_a_fault_tells_where_a_text_cannot_be_written() -> None:
    with pytest.raises(EnvError, match=r"in the observation, got '\\ud800' at character 13 - decode bytes with errors='replace'"):
        call_step(Obedient(), "wrong observation surrogate", "maze")


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
