"""An agentic recipe: loads, is written down again, and tells what is wrong with it as an RLVR one does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import AgenticConfig, load_config, parse_config, to_yaml
from sluice.config.models import RunConfig, Section
from sluice.config.reading import parse_document
from sluice.errors import ConfigError
from tests.config.recipes import AGENTIC, AGENTIC_FULL, AGENTIC_TEXT, agentic, problems_of, write
from tests.config.values import FOREIGN, TEXTS, VALUES, WRONG, WRONG_VALUES, paths_of


def loaded(data: dict[str, Any], overrides: tuple[str, ...] = ()) -> AgenticConfig:
    config = parse_config(data, overrides)
    assert isinstance(config, AgenticConfig)
    return config


def again(config: AgenticConfig) -> AgenticConfig:
    data, _, problems = parse_document(to_yaml(config), "again")
    assert problems == []
    return loaded(data)


def own_sections(section: Section) -> Iterator[Section]:
    """The sections that only an agentic run has."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section) and not (isinstance(section, RunConfig) and name in RunConfig.model_fields):
            yield value
            yield from own_sections(value)


# ---------------------------------------------------------------- properties


@given(arguments=st.dictionaries(TEXTS, VALUES, max_size=4), rate=st.floats(1e-12, 1.0), template=TEXTS, stop=st.lists(TEXTS, unique=True))
def test_the_resolved_configuration_loads_again_to_an_equal_one(arguments: Any, rate: float, template: str, stop: list[str]) -> None:
    data = agentic(
        model__path="/m",
        environment__args=arguments,
        trainer__learning_rate=rate,
        dialogue__turn_template="{observation}" + template.replace("{", "{{").replace("}", "}}"),
        dialogue__stop=[text for text in stop if text],
    )
    config = loaded(data)
    assert config.environment.args == arguments
    assert again(config) == config


def test_the_full_example_gives_every_key_of_its_own_another_value_than_the_default() -> None:
    config = loaded(AGENTIC_FULL)
    for section in own_sections(config):
        for name, field in type(section).model_fields.items():
            if name in (
                "enable",
                "run_in",
                "group_filter_cls",
                "group_filter_config",
                "metric",
                "episodes_per_worker",
                "workers",
                "rule",
                "barrier",
                "shadow",
                "model",
                "floor",
            ):
                continue  # each excludes another key of the example
            if section is config.val_env_manager and name in ("group_size_redundancy", "max_traj_per_env"):
                continue  # not of an evaluation
            if section is config.val_environment and name in ("reset_timeout_s", "step_timeout_s"):
                continue
            assert getattr(section, name) != field.default, (type(section).__name__, name)


def test_the_full_example_loads_again_to_an_equal_one() -> None:
    config = loaded({**AGENTIC_FULL, "model": {"path": "/m"}})
    assert again(config) == config
    data = yaml.safe_load(to_yaml(config))
    for name, value in AGENTIC_FULL.items():
        if isinstance(value, dict) and name != "model":
            assert value.items() <= {**data[name], **{key: value[key] for key in value if isinstance(value[key], dict)}}.items(), name


@given(picks=st.lists(st.tuples(st.integers(0, 10_000), WRONG, st.booleans()), min_size=1, max_size=4))
def test_whatever_is_wrong_the_error_is_ours_and_in_our_words(picks: list[tuple[int, Any, bool]]) -> None:
    data = yaml.safe_load(to_yaml(loaded(AGENTIC_FULL)))
    for pick, value, is_new in picks:
        paths = paths_of(data)
        path = paths[pick % len(paths)] if paths else ("exp_name",)
        owner = data
        for part in path[:-1]:
            owner = owner[part]
        owner[f"{path[-1]}x" if is_new and isinstance(owner, dict) else path[-1]] = copy.deepcopy(value)
    told: list[str] = []
    try:
        parse_config(data)
    except ConfigError as err:
        told = problems_of(err)
    for line in told:
        assert line.startswith("config: ")
        assert not [word for word in FOREIGN if word in line]


@pytest.mark.parametrize("path", [path for path in paths_of(AGENTIC_FULL) if "args" not in path and "filter_args" not in path])
def test_every_wrong_value_of_every_key_is_told_in_our_words_at_its_key(path: tuple[Any, ...]) -> None:
    for value in WRONG_VALUES:
        data = copy.deepcopy(AGENTIC_FULL)
        owner: Any = data
        for part in path[:-1]:
            owner = owner[part]
        owner[path[-1]] = copy.deepcopy(value)
        told: list[str] = []
        try:
            parse_config(data)
        except ConfigError as err:
            told = problems_of(err)
        assert not [word for word in FOREIGN for line in told if word in line], (path, value)
        if isinstance(value, list | dict) and value and path[-1] != "stop":  # no other key takes any of these
            where = ".".join(map(str, path))
            assert any(line.startswith(f"config: {where}") for line in told), (path, value, told)


def test_an_override_is_the_same_as_the_setting_in_the_file() -> None:
    overrides = [
        "environment.args.size=6",
        "train_env_manager.group_filter_config={type: std_filter}",
        "val_env_manager.num_env_groups=9",
        "dialogue.stop=['>', ';']",
        "dialogue.turn_template={observation}",
    ]
    changes = {
        "environment__args__size": 6,
        "train_env_manager__group_filter_config": {"type": "std_filter"},
        "val_env_manager__num_env_groups": 9,
        "dialogue__stop": [">", ";"],
        "dialogue__turn_template": "{observation}",
    }
    quoted = [text.replace("={observation}", "='{observation}'") for text in overrides]
    assert parse_config(agentic(), quoted) == parse_config(agentic(**changes))


# ---------------------------------------------------------------- errors


def test_an_error_names_file_line_key_what_was_expected_what_came_and_the_nearest_name(tmp_path: Path) -> None:
    text = AGENTIC_TEXT.replace("num_env_groups: 4", "num_env_group: 4").replace("rollout_batch_size: 64", "rollout_batch_size: 60")
    path = write(tmp_path, text + "dialogue: {style: chatty}\nrewards: {}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["environment.run_in=process", "environment.workers=0"])
    assert problems_of(raised.value) == [
        f"{path}:8: train_env_manager.num_env_group: unknown key - did you mean num_env_groups?",
        f"{path}:10: rollout_batch_size: must be a multiple of train_env_manager.group_size (8), got 60: a batch is whole groups - set it "
        "to 56 or 64",
        f"{path}:15: dialogue.style: expected one of plain, chat, got 'chatty' (text) - did you mean chat?",
        f"{path}:16: rewards: belongs to pipeline rlvr, this recipe is of pipeline agentic - delete it, or set pipeline to rlvr",
        "override 'environment.workers=0': environment.workers: expected a whole number >= 1 and <= 1024, got 0 (a number)",
    ]


@pytest.mark.parametrize("key", ["exp_name", "rollout_batch_size", "sequence_length"])
def test_rules_across_keys_are_told_beside_a_missing_key_but_not_because_of_it(key: str) -> None:
    data = agentic(dialogue__system_prompt="Play.")
    del data[key]
    with pytest.raises(ConfigError) as raised:
        parse_config(data)
    missing, idle = problems_of(raised.value)
    assert missing.startswith(f"config: {key}: expected ")
    assert missing.endswith("the key is missing")
    assert idle.startswith("config: dialogue.system_prompt: has no effect")


def test_a_missing_type_of_environment_hides_nothing() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(agentic(environment={"workers": 2, "run_in": "inline"}))
    assert problems_of(raised.value) == [
        "config: environment.type: expected text that is not empty, the key is missing",
        "config: environment.workers: has no effect because environment.run_in is inline, which has no worker processes - delete it, or "
        "set run_in to process",
    ]


def test_a_missing_section_says_what_it_takes() -> None:
    data = agentic()
    del data["train_env_manager"]
    with pytest.raises(ConfigError, match="train_env_manager: expected a section with the keys num_env_groups, group_size, .* is missing"):
        parse_config(data)


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("rollout_batch_size", 4_194_304),
        ("sequence_length", 10_000_000),
        ("train_env_manager.num_env_groups", 65_536),
        ("train_env_manager.group_size", 4_096),
        ("train_env_manager.group_size_redundancy", 4_096),
        ("train_env_manager.max_traj_per_env", 65_536),
        ("environment.workers", 1_024),
        ("environment.reset_timeout_s", 604_800),
        ("environment.step_timeout_s", 604_800),
        ("env_monitor.interval_s", 604_800),
        ("env_monitor.hung_after_s", 604_800),
        ("dialogue.max_tokens_per_turn", 10_000_000),
        ("dialogue.max_turns", 100_000),
        ("dialogue.timeout_s", 604_800),
    ],
)
def test_a_number_that_no_run_needs_is_refused_while_loading(key: str, most: int) -> None:
    for absurd in (most + 1, 10**18, 10**400):
        with pytest.raises(ConfigError, match=rf"{key}: expected a .*number.* <= {most}"):
            parse_config(agentic(), [f"{key}={absurd}"])


def test_the_model_is_found_from_the_folder_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "recipes", AGENTIC_TEXT)
    assert load_config(path).model.path == str(tmp_path / "recipes" / "checkpoint")
    assert load_config(path, ["model.path=mine"]).model.path == str(tmp_path / "mine")
    config = load_config(path, ["environment.args.path=games/one.z8"])
    assert isinstance(config, AgenticConfig)
    assert config.environment.args == {"path": "games/one.z8"}  # what arguments mean is for the environment to say


# ---------------------------------------------------------------- what a run reads


def test_a_batch_in_trajectories_is_counted_in_groups_and_in_episodes_of_environment_groups() -> None:
    config = loaded(AGENTIC)
    assert (config.groups_per_batch, config.fewest_episodes_per_env, config.episodes_per_env, config.additional_groups) == (8, 2, 2, 0)
    more = loaded(agentic(train_env_manager__max_traj_per_env=3))
    assert (more.fewest_episodes_per_env, more.episodes_per_env, more.additional_groups) == (2, 3, 4)
    many = loaded(agentic(train_env_manager__num_env_groups=128))
    assert (many.groups_per_batch, many.episodes_per_env, many.additional_groups) == (8, 1, 0)
    uneven = loaded(agentic(train_env_manager__num_env_groups=3))
    assert (uneven.groups_per_batch, uneven.episodes_per_env) == (8, 3)


@pytest.mark.parametrize(
    ("given", "with_class", "without"),
    [(None, "judge", "replace"), ("judge", "judge", "judge"), ("replace", "replace", "replace")],
)
def test_a_class_that_judges_groups_sees_failed_members_unless_the_recipe_says_otherwise(
    given: str | None, with_class: str, without: str
) -> None:
    plain = loaded(agentic(resampling__on_member_failure=given))
    judged = loaded(agentic(resampling__on_member_failure=given, train_env_manager__group_filter_cls="mine.Filter"))
    assert (judged.on_member_failure, plain.on_member_failure) == (with_class, without)
    assert again(judged).on_member_failure == with_class  # a resumed run reads the resolved configuration


@pytest.mark.parametrize(("kind", "domain"), [("household", "household"), ("my_package.games.Chess", "Chess")])
def test_groups_are_counted_under_the_name_of_the_environment(kind: str, domain: str) -> None:
    assert loaded(agentic(environment__type=kind)).domain == domain
