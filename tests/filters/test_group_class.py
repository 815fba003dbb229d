"""The class of `group_filter_cls`: how it is built, which contract it keeps, what it answers, what it remembers."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.config import EnvManagerConfig
from sluice.errors import ConfigError, FilterError
from sluice.filters import DomainFilters, QueryFilter, build_group_filter, filters_state, load_filters_state
from sluice.filters.custom import contract_of
from tests.filters import filters_for_tests
from tests.filters.filters_for_tests import HERE
from tests.filters.test_group_filters import group_of

KEY = "train_env_manager.group_filter_cls"
CONFIG = object()


def manager(name: str) -> EnvManagerConfig:
    return EnvManagerConfig(group_size=2, group_filter_cls=f"{HERE}.{name}" if "." not in name else name)


def build(name: str, mode: Any = "train", **more: Any) -> QueryFilter:
    where = "train_env_manager" if mode == "train" else "val_env_manager"
    return build_group_filter(manager(name), mode=mode, where=where, min_members=None, config=CONFIG, **more)


def built(name: str, mode: Any = "train") -> tuple[Any, ...]:
    (custom,) = build(name, mode).parts
    told: tuple[Any, ...] = custom.function.__self__.told  # type: ignore[attr-defined]
    return told


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("name", ["ThreeByName", "ThreeByPosition", "ThreeOfAnyName", "AnyArguments", "AnyKeywords"])
def test_a_class_that_takes_all_three_is_built_with_configuration_manager_and_mode(name: str, mode: str) -> None:
    assert built(name, mode) == (CONFIG, manager(name), mode)


@pytest.mark.parametrize("mode", ["train", "val"])
def test_a_class_that_takes_less_is_built_with_less(mode: str) -> None:
    assert built("OnlyMode", mode) == (mode,)
    assert built("OwnSettingsAndMode", mode) == (0.5, 3, mode)
    assert built("OwnSettings", mode) == (0.5, 3, "own")  # three arguments of its own: not ours to give


@pytest.mark.parametrize(
    ("name", "contract"), [("Told", "judge"), ("SpeaksRoll", "filter"), ("SpeaksBoth", "both"), ("SpeaksNeither", "neither")]
)
def test_one_place_tells_the_contracts_apart(name: str, contract: str) -> None:
    assert contract_of(getattr(filters_for_tests, name)) == contract


def test_true_keeps_and_the_mode_is_for_the_class_to_use() -> None:
    hung, fine = group_of(["flag_timeout", "wrong"]), group_of(["right", "wrong"])
    verdict = build("NamesTimeouts").judge(hung)
    assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (False, "NamesTimeouts", "invalid", f"{HERE}.NamesTimeouts")
    assert build("NamesTimeouts").judge(fine).keep
    assert build("NamesTimeouts", "val").judge(hung).keep


def test_a_class_is_opaque_and_decides_nothing_for_a_single_member() -> None:
    query = build("NamesTimeouts")
    assert query.is_opaque
    assert not query.can_disqualify
    assert query.disqualifies(group_of(["hung", "wrong"]).rollouts[0]) is None


def test_a_class_sees_members_without_a_reward_and_cannot_keep_them() -> None:
    assert build("NamesTimeouts").judge(group_of(["hung", "wrong"])).reason == "NamesTimeouts"
    assert build("NamesTimeouts").judge(group_of(["died", "wrong"])).reason == "incomplete"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.filters.Class", r" must be an import path package\.module\.Class, got .* raised ModuleNotFoundError"),
        ("tests.filters.exits_on_import.Class", r" must be an import path .* raised SystemExit: 0"),
        ("NamesTimeout", r": module '.*' has no 'NamesTimeout' - did you mean 'NamesTimeouts'\?$"),
        ("keep_all", r" must name a class, got .*keep_all = <function .* - name a function as a type in group_filter_config$"),
        ("NOT_CALLABLE", r" must name a class, got .* = 3 "),
        ("SpeaksNeither", r" must name a class with \.judge\(group\) \(True keeps\), got .*SpeaksNeither without it - add it$"),
        ("SpeaksBoth", r" .* got .*SpeaksBoth with both, which contradict each other - take one out$"),
        (
            "SpeaksRoll",
            r" must name a class with \.judge\(group\) \(True keeps\), got .*SpeaksRoll with \.filter\(group_id, episode_id, group\) "
            r"\(True drops\) - rename the method, take the group alone, and return the opposite$",
        ),
        (
            "WrongOrder",
            r": .*WrongOrder is built with \(config, env_manager_config, mode\), with mode alone, or with nothing, which its signature "
            r".* does not take .* - change the signature$",
        ),
        ("FourArguments", r": .*FourArguments is built with .* does not take .*- change the signature$"),
        ("BreaksWhenBuilt", r": building .*BreaksWhenBuilt raised RuntimeError: no licence - correct the class$"),
        ("ExitsWhenBuilt", r": building .*ExitsWhenBuilt raised SystemExit: 5"),
        ("JudgesNothing", r": .*JudgesNothing\.judge is called with the group or rollout, which its signature \(\) does not take"),
        ("JudgesLater", r" must name a plain function, got the coroutine function .*JudgesLater - filters decide without waiting$"),
        ("OnlySaves", r" must name a class with state_dict and load_state_dict, or with neither, got .* with state_dict alone"),
        ("SavesWithArguments", r": .*state_dict is called without arguments, which its signature .* does not take"),
        ("LoadsNothing", r": .*load_state_dict is called with the state, which its signature .* does not take"),
    ],
)
def test_whatever_is_wrong_with_a_class_is_said_at_load_with_the_path_of_the_key(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train_env_manager\.group_filter_cls{message}"):
        build(name)


def test_an_answer_of_another_kind_is_an_error_at_the_first_call() -> None:
    with pytest.raises(
        FilterError, match=rf"^{KEY}: {HERE}\.Grumbles must answer True \(keep\), False \(drop\) or a Verdict, got 0\.5 \(builtins\.float\)"
    ):
        build("Grumbles").judge(group_of(["right", "wrong"]))
    with pytest.raises(FilterError, match=rf"^val_env_manager\.group_filter_cls: {HERE}\.Grumbles"):
        build("Grumbles", "val").judge(group_of(["right", "wrong"]))


def test_a_class_keeps_its_memory_over_a_resume() -> None:
    def filters() -> dict[str, DomainFilters]:
        return {"household": DomainFilters(query=build("Surprising"), response=None)}

    first, second = filters(), filters()
    assert first["household"].query.judge(group_of(["right", "wrong"])).keep
    state = filters_state(first)
    assert state == {KEY: {"seen": [1.0]}}
    load_filters_state(second, state)
    assert not second["household"].query.judge(group_of(["right", "wrong"])).keep


class Turned:
    """What another room makes of a class with `.filter`."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def judge(self, group: Any) -> bool:
        return not self.theirs.filter(0, 0, list(group.rollouts))

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.theirs.seen}

    def load_state_dict(self, state: Any) -> None:
        self.theirs.seen = state["seen"]


def test_another_room_may_turn_a_class_with_filter_into_one_with_judge() -> None:
    query = build("SpeaksRollInFull", adapt=Turned)
    assert query.judge(group_of(["right", "wrong"])).keep
    assert query.judge(group_of(["right", "lost"])).reason == "SpeaksRollInFull"
    assert build("SpeaksRollInFull", "val", adapt=Turned).judge(group_of(["right", "lost"])).keep
    assert filters_state({"household": DomainFilters(query=query, response=None)}) == {KEY: {"seen": 2}}


def test_what_goes_wrong_in_turning_it_is_said_at_load() -> None:
    def refuses(theirs: object) -> object:
        raise TypeError("not such a one")

    with pytest.raises(ConfigError, match=rf"^{KEY}: building {HERE}\.SpeaksRollInFull raised TypeError: not such a one"):
        build("SpeaksRollInFull", adapt=refuses)
    for name, message in (("SpeaksBoth", "with both"), ("SpeaksNeither", "without it")):
        with pytest.raises(ConfigError, match=message):
            build(name, adapt=Turned)


def test_a_native_class_is_not_turned() -> None:
    assert build("NamesTimeouts", adapt=Turned).judge(group_of(["right", "wrong"])).keep
