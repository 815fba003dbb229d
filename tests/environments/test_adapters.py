"""Environments of other libraries, played in text."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest

from sluice.environments import EnvironmentConfig, GymnasiumEnvironment, build_environment, check_environment
from sluice.environments.boundary import call_reset, call_step
from sluice.errors import ConfigError, EnvError


class Space:
    """As gymnasium.spaces.Discrete."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n = n
        self.start = start


class Corridor:
    """A gymnasium-style environment of numbers: walk right to the end."""

    def __init__(self, start: int = 0) -> None:
        self.action_space = Space(2, start)
        self.seed: int | None = None
        self.at = 0
        self.taken: list[int] = []
        self.is_closed = False

    def reset(self, *, seed=None):
        self.seed, self.at = seed, 0
        return self.at, {"where": "corridor", "progress": 57, "env_id": 3}

    def step(self, action):
        self.taken.append(action)
        self.at += 1 if action == self.action_space.start + 1 else -1
        return self.at, self.at == 2, self.at == 2, False, {}

    def close(self):
        self.is_closed = True


class Reward(Corridor):
    """Its reward is a number, as it should be."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward), terminated, truncated, info


def test_a_gymnasium_environment_is_played_by_names_and_numbers() -> None:
    corridor = Reward()
    environment = GymnasiumEnvironment(corridor, action_names=["left", "Go Right"])
    reset = call_reset(environment, 2**62 + 1, "corridor")
    assert (reset.observation, reset.info.admissible_commands, reset.info.extra) == ("0", ("left", "go right"), {"where": "corridor"})
    assert corridor.seed == (2**62 + 1) % 2**32
    told = [call_step(environment, action, "corridor") for action in (" GO  right", "0", "1", "1")]
    assert corridor.taken == [1, 0, 1, 1]
    assert [step.observation for step in told] == ["1", "0", "1", "2"]
    assert (told[-1].reward, told[-1].terminated) == (1.0, True)
    environment.close()
    assert corridor.is_closed


def test_actions_may_begin_elsewhere_than_at_zero() -> None:
    corridor = Reward(start=5)
    environment = GymnasiumEnvironment(corridor)
    environment.reset(1)
    environment.step("6")
    assert corridor.taken == [6]
    assert environment.step("0")[0] == "Nothing happens. Actions are: 5, 6."


@pytest.mark.parametrize("action", ["", "jump", "2", "x" * 10_000, "-1", "1.0"])
def test_an_action_that_is_none_changes_nothing(action) -> None:
    corridor = Reward()
    environment = GymnasiumEnvironment(corridor)
    environment.reset(1)
    observation, reward, terminated, truncated, info = environment.step(action)
    assert (observation, reward, terminated, truncated) == ("Nothing happens. Actions are: 0, 1.", 0.0, False, False)
    assert not corridor.taken


def test_wrong_types_of_a_gymnasium_environment_stop_at_the_boundary() -> None:
    environment = GymnasiumEnvironment(Corridor())
    environment.reset(1)
    with pytest.raises(EnvError, match=r"expected a finite number as reward \(float.*\), got False"):
        call_step(environment, "1", "corridor")


@pytest.mark.parametrize("names", [["left"], ["left", "left"], ["left", "right", "up"], ["a b", "A  B"]])
def test_names_must_fit_the_actions(names) -> None:
    with pytest.raises(EnvError, match="expected 2 different action_names"):
        GymnasiumEnvironment(Corridor(), action_names=names)


def test_continuous_actions_are_refused() -> None:
    corridor = Corridor()
    corridor.action_space = "Box(3)"
    with pytest.raises(EnvError, match="expected discrete actions"):
        GymnasiumEnvironment(corridor)


def test_without_gymnasium_the_settings_say_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package gymnasium - install sluice-rl\[agentic\]"):
        check_environment(EnvironmentConfig(type="gymnasium", args={"id": "FrozenLake-v1"}))


def test_a_registered_environment_is_made_by_its_id() -> None:
    pytest.importorskip("gymnasium")
    args = {"id": "FrozenLake-v1", "action_names": ["left", "down", "right", "up"], "kwargs": {"is_slippery": False}}
    environment = build_environment({"type": "gymnasium", "args": args})
    assert call_reset(environment, 3, "lake").info.env_id == "FrozenLake-v1/3"
    told = [call_step(environment, action, "lake") for action in ("down", "down", "right", "right", "down", "right")]
    assert (told[-1].reward, told[-1].terminated) == (1.0, True)
    environment.close()


@pytest.fixture(scope="module")
def textworld_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Go north and take the apple."""
    pytest.importorskip("textworld")
    from textworld import GameMaker, GameOptions
    from textworld.generator import compile_game

    maker = GameMaker()
    kitchen, attic = maker.new_room("Kitchen"), maker.new_room("Attic")
    maker.connect(kitchen.north, attic.south)
    maker.set_player(kitchen)
    attic.add(maker.new(type="o", name="apple"))
    with warnings.catch_warnings(action="ignore"):  # the interpreter does not know every game
        maker.set_quest_from_commands(["go north", "take apple"])
    options = GameOptions()
    options.path = str(tmp_path_factory.mktemp("textworld") / "apple.z8")
    return Path(compile_game(maker.build(), options))


def test_a_textworld_game_is_played_to_its_end(textworld_game: Path) -> None:
    environment = build_environment({"type": "textworld", "args": {"files": [str(textworld_game)], "max_steps": 4}})
    for _ in range(2):
        reset = call_reset(environment, 7, "textworld")
        assert "Kitchen" in reset.observation
        assert reset.info.env_id == "textworld/apple"
        assert "go north" in (reset.info.admissible_commands or ())
        told = [call_step(environment, action, "textworld") for action in ("", "go north", "take apple\nquit")]
        assert [step.reward for step in told] == [0.0, 0.0, 1.0]
        assert (told[-1].terminated, told[-1].info.success, told[-1].info.progress) == (True, True, 1.0)
    environment.close()


def test_a_textworld_game_that_is_not_won_is_truncated(textworld_game: Path) -> None:
    environment = build_environment({"type": "textworld", "args": {"files": [str(textworld_game)], "max_steps": 3}})
    environment.reset(7)
    told = [call_step(environment, action, "textworld") for action in ("look", "jump over the moon", "look")]
    assert [step.truncated for step in told] == [False, False, True]
    assert told[-1].info.progress == 0.0
    environment.close()
