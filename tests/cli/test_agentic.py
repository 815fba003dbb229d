"""What the doctor asks about an agentic recipe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.cli import agentic as questions
from sluice.cli import environment, recipe
from sluice.cli.agentic import AgenticQuestions, needed_modules
from sluice.cli.app import app
from sluice.cli.doctor import Check
from sluice.config import AgenticConfig, EnvironmentConfig, parse_config
from sluice.errors import ConfigError
from tests.config.recipes import AGENTIC_TEXT, agentic, write
from tests.gate.played_groups import fitted

HERE = "tests.cli.test_agentic"


def config_of(**changes: Any) -> AgenticConfig:
    config = parse_config(agentic(environment__run_in="inline", **changes))
    assert isinstance(config, AgenticConfig)
    return config


def told(checks: Iterator[Check]) -> list[tuple[str, str]]:
    return [(check.status, f"{check.detail}\n{check.remedy}") for check in checks]


class Silent:
    """An environment that names no commands, and whose second reply never comes in time."""

    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        return "A dark room.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        return f"You said {action!r}.", 0.5, False, False, {}

    def close(self) -> None:
        pass


class Broken(Silent):
    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        raise OSError("no game file")


class BreaksLater(Silent):
    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        raise OSError("no more moves")


class Stuck(Silent):
    def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        time.sleep(1.0)  # in a thread of its own, which ends with it
        return super().reset(seed)


class Characters:
    """A tokenizer of single characters."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(int(number)) for number in ids)


# ---------------------------------------------------------------- environments


def test_a_working_environment_is_shown_with_one_turn_of_it() -> None:
    ((status, text),) = told(AgenticQuestions(config_of()).environment())
    first, *lines = text.splitlines()
    assert status == "ok"
    assert first.startswith("frozen_lake inline: reset 0.0")
    assert "step 0.00" in first
    assert lines[0].startswith("observation  'Walk from S to G")
    assert lines[1] == "action       'left'"
    assert lines[2].startswith("reply        'You ")


def test_an_environment_in_a_process_is_started_for_it() -> None:
    config = parse_config(agentic())
    assert isinstance(config, AgenticConfig)
    ((status, text),) = told(AgenticQuestions(config).environment())
    assert status == "ok"
    assert text.startswith("frozen_lake in a process: ")


@pytest.mark.parametrize(("name", "words"), [("Broken", "no game file"), ("BreaksLater", "no more moves")])
def test_an_environment_that_fails_is_a_problem_with_its_story(name: str, words: str) -> None:
    ((status, text),) = told(AgenticQuestions(config_of(environment__type=f"{HERE}.{name}")).environment())
    assert status == "problem"
    assert text.startswith("env_failed: ")
    assert words in text
    assert "see environment.args" in text


def test_an_environment_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "PATIENCE_S", 0.05)
    stuck = {"type": f"{HERE}.Stuck", "run_in": "thread", "reset_timeout_s": None}
    config = config_of(val_environment=stuck, val_env_manager={"num_env_groups": 4})
    ((status, text),) = told(AgenticQuestions(config).evaluation())
    assert status == "problem"
    assert "no answer within 0.05 s, and reset_timeout_s gives no limit" in text
    assert "see val_environment.args" in text


def test_settings_that_an_environment_does_not_take_are_told_with_their_key() -> None:
    with pytest.raises(
        ConfigError, match=r"environment\.args\.sizes: the environment 'frozen_lake' has no such argument - did you mean size"
    ):
        list(AgenticQuestions(config_of(environment__args={"sizes": 3})).environment())


def test_commands_that_a_template_asks_for_and_nobody_tells_are_a_warning() -> None:
    template = "{observation} [{admissible_commands}]"
    config = config_of(environment__type=f"{HERE}.Silent", dialogue__turn_template=template)
    (first, second) = told(AgenticQuestions(config).environment())
    assert first[0] == "ok"
    assert "reply        \"You said ''.\", reward 0.5" in first[1]
    assert second == ("warning", "dialogue.turn_template names {admissible_commands}, and this environment tells none\nleave it out")


def test_an_evaluation_is_asked_about_where_its_environment_is_another_one() -> None:
    held_out = {"num_env_groups": 4}
    assert told(AgenticQuestions(config_of(val_env_manager=held_out)).evaluation()) == []
    other = config_of(val_env_manager=held_out, val_environment={"type": "frozen_lake", "run_in": "inline", "args": {"size": 3}})
    ((status, text),) = told(AgenticQuestions(other).evaluation())
    assert status == "ok"
    assert "frozen_lake inline" in text


# ---------------------------------------------------------------- packages of the extra


@pytest.mark.parametrize(
    ("kind", "args", "modules"),
    [
        ("household", {"engine": "alfworld"}, {"alfworld"}),
        ("household", {}, set()),
        ("gymnasium", {"id": "CartPole-v1"}, {"gymnasium"}),
        ("gymnasium", {}, set()),  # its settings are wrong: that is told elsewhere
        ("textworld", {"files": ["x.z8"]}, {"textworld"}),
        ("mine.Environment", {}, set()),
    ],
)
def test_the_packages_that_an_environment_needs_are_known_without_building_it(kind: str, args: dict[str, Any], modules: set[str]) -> None:
    assert modules <= set(needed_modules(EnvironmentConfig(type=kind, args=args)))
    assert bool(modules) == bool(needed_modules(EnvironmentConfig(type=kind, args=args)))


def test_packages_that_a_recipe_needs_are_named_and_missing_ones_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(environment__type="gymnasium", environment__args={"id": "CartPole-v1"})
    found = environment._version
    monkeypatch.setattr(environment, "_version", lambda name: None if name == "gymnasium" else found(name))
    (check,) = AgenticQuestions(config).environment()
    assert (check.name, check.status) == ("[agentic]", "problem")
    assert check.detail == "missing: gymnasium, which the environment gymnasium needs"
    assert check.remedy == "pip install 'sluice-rl[agentic]'"


def test_packages_that_are_there_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_version", lambda name: "1.7.3" if name == "textworld" else None)
    config = config_of(environment__type="textworld", environment__args={"files": ["nowhere.z8"]})
    checks = AgenticQuestions(config).environment()
    first = next(checks)
    assert (first.name, first.status, first.detail) == ("[agentic]", "ok", "textworld 1.7.3")


def test_a_recipe_that_needs_none_of_them_does_not_hear_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_version", lambda name: None)
    assert [check.name for check in AgenticQuestions(config_of()).environment()] == ["environment"]


# ---------------------------------------------------------------- filters


def test_group_filters_are_built_and_named() -> None:
    assert told(AgenticQuestions(config_of()).group_filters()) == [("ok", "training: none, every whole group is kept\n")]
    both = config_of(
        train_env_manager__group_filter_config={"type": "std_filter"},
        val_env_manager={"num_env_groups": 4, "group_filter_config": {"type": "env_timeout"}},
        validation__filtering="apply",
    )
    assert told(AgenticQuestions(both).group_filters()) == [
        ("ok", "training: std_filter\n"),
        ("ok", "evaluation: env_timeout, what it drops is left out of the mean\n"),
    ]


def test_a_wrong_group_filter_is_told_with_its_key() -> None:
    for changes, words in (
        (
            {"train_env_manager__group_filter_config": {"type": "std_filtre"}},
            r"train_env_manager\.group_filter_config\.type must be one of",
        ),
        ({"train_env_manager__group_filter_cls": "nowhere.Filter"}, r"train_env_manager\.group_filter_cls"),
        (
            {"val_env_manager": {"group_filter_config": {"type": "std_filtre"}}},
            r"val_env_manager\.group_filter_config\.type must be one of",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            list(AgenticQuestions(config_of(**changes)).group_filters())


# ---------------------------------------------------------------- dialogue


def test_a_dialogue_is_shown_with_what_the_policy_reads_first() -> None:
    agentic_questions = AgenticQuestions(config_of(dialogue__stop=["\n"]))
    list(agentic_questions.environment())
    ((status, text),) = told(agentic_questions.dialogue(Characters()))
    assert status == "ok"
    assert text.startswith("plain, a turn ends at '\\n', '\\x00' or after 64 tokens; the first observation takes ")
    assert " of 512 tokens (sequence_length)\n'Walk from S to G" in text


@pytest.mark.parametrize(
    ("length", "status", "remedy"),
    [
        (100, "problem", "it leaves none for a turn: raise sequence_length, or shorten the templates"),
        (150, "warning", "it leaves no room for one whole turn: raise sequence_length"),
    ],
)
def test_a_sequence_too_short_for_the_first_observation_is_found(length: int, status: str, remedy: str) -> None:
    agentic_questions = AgenticQuestions(config_of(sequence_length=length))
    list(agentic_questions.environment())
    ((found, text),) = told(agentic_questions.dialogue(Characters()))
    assert found == status
    assert text.endswith(remedy)


def test_a_dialogue_is_asked_about_even_where_no_environment_played() -> None:
    ((status, text),) = told(AgenticQuestions(config_of()).dialogue(Characters()))
    assert (status, text) == ("ok", "plain, a turn ends at '\\x00' or after 64 tokens\n")


def test_a_stop_text_of_several_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="exactly one token"):
        list(AgenticQuestions(config_of(dialogue__stop=["END"])).dialogue(Characters()))


# ---------------------------------------------------------------- the gate


AFTER = "groups are looked at after {k} environment steps of at most 30"
TELL = "10% of them run on and tell"


@pytest.mark.parametrize(
    ("gate", "status", "text"),
    [
        (
            {"k": 10, "threshold": 0.2},
            "ok",
            f"{AFTER.format(k=10)}: prefix_edit_distance_mean < 0.2; a cut group is replaced, {TELL}\n",
        ),
        (
            {"k": 10},
            "warning",
            f"{AFTER.format(k=10)}: prefix_edit_distance_mean < 0.12; a cut group is replaced, {TELL}\n"
            "the threshold was fitted to another model and environment\n"
            "set gate.shadow first and see gate/precision, or set gate.hold_precision",
        ),
        (
            {"k": 5, "rule": {"type": "or_termination"}, "shadow": True},
            "ok",
            f"{AFTER.format(k=5)}: or_termination; nothing is cut (shadow)\n",
        ),
        (
            {"k": 5, "hold_precision": 0.9, "on_cut": "drop"},
            "ok",
            f"{AFTER.format(k=5)}: prefix_edit_distance_mean < 0.12; a cut group is left out, {TELL}, precision held above 0.9\n",
        ),
        (
            {"futility": {"steps": 6, "loops": 4, "invalid_actions": 3, "progress_steps": 9}},
            "ok",
            "trajectories are stopped after 6 steps without a new observation, or one action 4 times after one observation, "
            f"or 3 actions in a row that are not admissible, or 9 steps without progress; {TELL}\n",
        ),
    ],
)
def test_the_gate_is_told_in_words(gate: dict[str, Any], status: str, text: str) -> None:
    agentic_questions = AgenticQuestions(config_of(gate=gate))
    list(agentic_questions.environment())
    assert told(agentic_questions.gate()) == [(status, text)]


def test_where_nobody_knows_the_horizon_it_is_told_what_that_costs() -> None:
    ((status, text),) = told(AgenticQuestions(config_of(environment__type=f"{HERE}.Silent", gate={"k": 1, "threshold": 0.2})).gate())
    assert status == "ok"
    assert text.startswith("groups are looked at after 1 environment step: prefix_edit_distance_mean < 0.2; ")
    assert "savings are not counted: set dialogue.max_turns" in text


def test_a_barrier_is_told() -> None:
    gate = {"k": 5, "threshold": 0.2, "barrier": True}
    ((status, text),) = told(AgenticQuestions(config_of(gate=gate, train_env_manager__num_env_groups=8)).gate())
    assert status == "ok"
    assert text.startswith(f"{AFTER.format(k=5)}, where members wait for it: prefix_edit_distance_mean < 0.2")


def test_without_a_gate_nothing_is_said_of_it() -> None:
    assert told(AgenticQuestions(config_of()).gate()) == []


@pytest.mark.parametrize(
    ("sign", "status", "words"),
    [("invalid_actions", "warning", "tells its admissible commands"), ("progress_steps", "problem", "tells its progress")],
)
def test_an_environment_that_does_not_say_what_a_sign_reads_is_named(sign: str, status: str, words: str) -> None:
    agentic_questions = AgenticQuestions(config_of(environment__type=f"{HERE}.Silent", gate={"futility": {sign: 3}}))
    list(agentic_questions.environment())
    ((found, text),) = told(agentic_questions.gate())
    assert found == status
    assert words in text


@pytest.mark.parametrize("of_members", [False, True])
@pytest.mark.parametrize(("environment", "status"), [("frozen_lake", "ok"), (f"{HERE}.Silent", "problem")])
def test_a_learned_rule_needs_an_environment_that_says_what_it_was_fitted_with(
    environment: str, status: str, of_members: bool, tmp_path: Path
) -> None:
    fitted().save(tmp_path / "rule.json")
    learned = {"model": str(tmp_path / "rule.json"), "floor": 0.8}
    config = config_of(
        environment__type=environment,
        environment__max_steps=12,
        train_env_manager__group_size=4,
        gate={"futility": learned} if of_members else learned,
    )
    agentic_questions = AgenticQuestions(config)
    list(agentic_questions.environment())
    ((found, text),) = told(agentic_questions.gate())
    assert found == status
    assert "the learned rule rule.json, floor 0.8" in text
    if status == "problem":
        assert "it was fitted with is_admissible, progress, which this environment does not say" in text


def test_a_gate_that_cannot_be_is_told_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"gate\.k: expected a step below the horizon 30"):
        list(AgenticQuestions(config_of(gate={"k": 30, "threshold": 0.2})).gate())


# ---------------------------------------------------------------- the command


def test_doctor_asks_about_an_agentic_recipe_and_says_what_it_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "missing_packages", lambda extra: [])
    monkeypatch.setattr(recipe, "_check_model", lambda config: iter(()))
    monkeypatch.setattr(recipe, "_check_agentic_dry_run", lambda config: iter(()))  # a model is needed: tests/pipeline/test_agentic.py
    monkeypatch.setattr(recipe, "_tokenizer", lambda config: Characters())
    path = write(tmp_path, AGENTIC_TEXT.replace("type: frozen_lake", "type: frozen_lake\n  run_in: inline"))
    result = CliRunner().invoke(app, ["doctor", str(path)])
    assert result.exit_code == 0, result.output
    assert f"{path}: lake, 10 steps of 8 groups of 8 trajectories, 4 environment groups" in result.output
    names = [line.split()[1] for line in result.output.splitlines() if line.startswith("ok ")]
    assert names[-4:] == ["recipe", "environment", "group", "dialogue"]


def test_doctor_asks_on_after_an_environment_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "missing_packages", lambda extra: [])
    monkeypatch.setattr(recipe, "_check_model", lambda config: iter(()))
    monkeypatch.setattr(recipe, "_check_agentic_dry_run", lambda config: iter(()))  # a model is needed: tests/pipeline/test_agentic.py
    monkeypatch.setattr(recipe, "_tokenizer", lambda config: Characters())
    path = write(tmp_path, AGENTIC_TEXT.replace("type: frozen_lake", "type: frozen_lakes"))
    result = CliRunner().invoke(app, ["doctor", str(path)])
    assert result.exit_code == 1
    assert "problem  environment" in result.output
    assert "did you mean frozen_lake?" in result.output
    assert "ok       dialogue" in result.output
