"""The household as an environment: rewards, ends and what it says of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments import EnvironmentConfig, build_environment, check_environment
from sluice.environments.boundary import call_reset, call_step
from sluice.environments.household.environment import HouseholdSettings
from sluice.environments.household.expert import Expert
from sluice.errors import ConfigError


@given(st.integers(0, 10_000))
def test_the_reward_is_one_for_reaching_the_goal_and_nothing_else(seed: int) -> None:
    environment = HouseholdSettings(size="tiny").build()
    reset = call_reset(environment, seed, "household")
    assert reset.info.success is False
    expert = Expert(environment.house)
    told = []
    while not told or not told[-1].is_last:
        told.append(call_step(environment, expert.act(), "household"))
    assert sum(step.reward for step in told) == told[-1].terminated == told[-1].info.success
    assert all(step.info.env_id == reset.info.env_id for step in told)


def test_an_episode_that_leads_nowhere_is_truncated() -> None:
    environment = HouseholdSettings(max_steps=3).build()
    environment.reset(1)
    told = [call_step(environment, "look around", "household") for _ in range(3)]
    assert [(step.terminated, step.truncated) for step in told] == [(False, False), (False, False), (False, True)]
    assert {step.observation for step in told} == {"Nothing happens."}


@pytest.mark.parametrize("action", ["", " ", "x" * 1_000_000, "go to the moon", "\n", "\ud800"])
def test_actions_that_make_no_sense_change_nothing(action: str) -> None:
    environment = HouseholdSettings(size="tiny").build()
    reset = call_reset(environment, 4, "household")
    step = call_step(environment, action, "household")
    assert (step.observation, step.info) == ("Nothing happens.", reset.info)


def test_what_it_says_of_itself() -> None:
    environment = build_environment({"type": "household", "args": {"split": "unseen", "task_types": ["look_at_obj_in_light"]}})
    info = call_reset(environment, 9, "household").info
    assert info.task_type == "look_at_obj_in_light"
    assert info.env_id is not None
    assert info.env_id.startswith("household/unseen/look_at_obj_in_light/FloorPlan")
    assert info.progress == 0.0
    assert "look" in (info.admissible_commands or ())
    environment.close()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"task_types": []}, "task_types"),
        ({"task_types": ["pick_and_place"]}, "task_types"),
        ({"task_types": ["look_at_obj_in_light"] * 2}, "each task type once"),
        ({"size": "huge"}, "size"),
        ({"engine": "twins"}, "engine"),
    ],
)
def test_wrong_settings_are_told(args, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_environment(EnvironmentConfig(type="household", args=args))
