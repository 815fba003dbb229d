"""Settings are checked while loading: a wrong one names what was expected and the nearest valid name."""

from __future__ import annotations

import pytest

from sluice.config.load import ENVIRONMENT_FILES
from sluice.environments import ENVIRONMENTS, EnvironmentConfig, build_environment, check_environment
from sluice.errors import ConfigError, EnvError
from tests.environments.environments_for_tests import HERE, Obedient


def complaint(**config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_environment(EnvironmentConfig(**config))
    return str(caught.value)


@pytest.mark.parametrize("config", [{"type": "frozen_lake"}, {"type": "household"}, {"type": f"{HERE}.Obedient", "args": {"horizon": 3}}])
def test_an_environment_is_built_by_name_or_import_path(config) -> None:
    environment = build_environment(config)
    observation, info = environment.reset(3)
    assert isinstance(observation, str)
    environment.close()


def test_a_misspelt_name_names_the_nearest() -> None:
    assert "did you mean frozen_lake?" in complaint(type="frozen_lack")


def test_a_misspelt_argument_names_the_nearest() -> None:
    assert complaint(type="frozen_lake", args={"slipery": True}) == (
        "environment.args.slipery: the environment 'frozen_lake' has no such argument - did you mean slippery?"
    )


def test_a_wrong_type_of_an_argument_is_told() -> None:
    assert "environment.args.size: " in complaint(type="frozen_lake", args={"size": "large"})


def test_a_missing_argument_is_told() -> None:
    assert "needs this argument" in complaint(type="textworld")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tests.no_such_module.Class", "there is no module 'tests.no_such_module'"),
        (f"{HERE}.Obedeint", "did you mean Obedient?"),
        (f"{HERE}.Lame", "lacks step"),
        (f"{HERE}.A_NUMBER", "is int"),
        ("__main__.Class", "a module that worker processes can import"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_told(path, expected) -> None:
    assert expected in complaint(type=path)


def test_arguments_that_do_not_fit_the_class_are_told() -> None:
    assert "unexpected keyword argument 'length'" in complaint(type=f"{HERE}.Obedient", args={"length": 3})


def test_something_built_that_is_no_environment_is_told() -> None:
    with pytest.raises(EnvError, match="got int without reset, step, close"):
        build_environment({"type": f"{HERE}.nothing"})


def test_an_environment_that_raises_while_it_is_built_is_told() -> None:
    with pytest.raises(EnvError, match="cannot be built: ValueError: it was told not to be built"):
        build_environment({"type": f"{HERE}.Obedient", "args": {"build": "raise"}})


def test_an_unknown_key_is_told() -> None:
    with pytest.raises(ConfigError, match="workres"):
        build_environment({"type": "frozen_lake", "workres": 3})


def test_missing_packages_are_told_with_the_extra_that_brings_them(monkeypatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert complaint(type="household", args={"engine": "alfworld"}).endswith("needs the package textworld - install sluice-rl[agentic]")
    check_environment(EnvironmentConfig(type="household"))


def test_game_files_must_be_there() -> None:
    assert "there is no 'nowhere.z8'" in complaint(type="textworld", args={"files": ["nowhere.z8"]})


def test_the_class_in_the_test_is_the_one_that_was_built() -> None:
    assert isinstance(build_environment({"type": f"{HERE}.Obedient"}), Obedient)


def test_arguments_that_the_configuration_takes_for_paths_of_files_are_lists_of_texts() -> None:
    for name, argument in ENVIRONMENT_FILES.items():
        assert ENVIRONMENTS[name].model_fields[argument].annotation == list[str]
