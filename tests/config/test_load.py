"""A file and overrides become a checked configuration, or one error that names everything."""

from __future__ import annotations

import copy
import os
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import AgenticConfig, RlvrConfig, check_config, load_config, parse_config, to_yaml
from sluice.config.models import AdvantageConfig, TrainerConfig
from sluice.config.reading import parse_document
from sluice.errors import ConfigError
from tests.config.recipes import TEXT, agentic, problems_of, smallest, write
from tests.config.values import FOREIGN, TEXTS, VALUES, WRONG, WRONG_VALUES, paths_of

# ---------------------------------------------------------------- properties

NEW = {  # every key of asynchrony, of the mix, of the guard and of your own loop, with a value other than its default
    "rewards__math__max_staleness": 4,
    "rewards__math__query_filter_config": {"type": "std_filter"},
    "rewards__code": {"verifier": {"type": "exact"}},
    "tasks__train": [
        {"type": "reasoning_gym", "name": "basic_arithmetic", "size": 100, "domain": "math"},
        {"type": "reasoning_gym", "name": "chain_sum", "size": 100, "domain": "code"},
    ],
    "group_size_redundancy": 2,
    "async_generation_ratio": 1.5,
    "on_weight_update": "continue",
    "domain_interleave_probs": {"math": 0.75, "code": 0.25},
    "mix_on": "drawn",
    "user_defined_rollout_loop_cls": "my_package.MyLoop",
    "is_num_return_sequences_expand": True,
    "resampling": {
        "collect": "in_order",
        "surplus": "carry",
        "max_staleness": 3,
        "on_member_failure": "judge",
        "group_timeout_s": 60.0,
        "requeue": False,
        "quarantine_after": 5,
        "stall_warning_s": 30.0,
        "absent_after_batches": 4,
    },
    "guard": {"max_filter_ratio": {"invalid": 0.1, "low_information": 0.75}, "scope": "window", "window": 50, "policy": "wait"},
    "trainer": {"max_steps": 10, "learning_rate": 0.001, "save_every_steps": 5, "keep_checkpoints": 3, "stale_tokens": "mask"},
}


@given(
    arguments=st.dictionaries(TEXTS, VALUES, max_size=4),
    params=st.dictionaries(TEXTS, VALUES, max_size=3),
    rate=st.floats(1e-12, 1.0),
    tags=st.lists(TEXTS, max_size=3, unique=True),
)
def test_the_resolved_configuration_loads_again_to_an_equal_one(arguments: Any, params: Any, rate: float, tags: list[str]) -> None:
    data = smallest(
        model__path="/m",
        tasks__train__0__params=params,
        rewards__math__query_filter_config={"type": "package.filter", "filter_args": arguments},
        rewards__math__tag_included=[tag for tag in tags if tag != "math"],
        trainer__learning_rate=rate,
    )
    config = parse_config(data)
    assert config.rewards["math"].query_filter_config.filter_args == arguments
    again, places, problems = parse_document(to_yaml(config), "again")
    assert problems == []
    assert parse_config(again) == config


@pytest.mark.parametrize(
    ("limit", "share", "quarantine"),
    [
        (1 / 3, 0.1, None),
        (1, 0.999999, 9),
        (5e-324, 1e-6, 1),
        ({"invalid": 0.1}, 1 / 3, 3),
        ({"low_information": 1, "invalid": 0.0}, 0.5, 3),
    ],
)
def test_the_keys_of_asynchrony_mix_and_guard_load_again_too(limit: Any, share: float, quarantine: int | None) -> None:
    data = smallest(**NEW, model__path="/m")
    data["guard"]["max_filter_ratio"] = limit
    data["domain_interleave_probs"] = {"math": share, "code": 1 - share}
    data["resampling"]["quarantine_after"] = quarantine
    config = parse_config(data)
    assert config.guard is not None
    assert config.guard.max_filter_ratio == limit
    assert config.resampling.quarantine_after == quarantine
    again, _, problems = parse_document(to_yaml(config), "again")
    assert problems == []
    assert parse_config(again) == config


@given(picks=st.lists(st.tuples(st.integers(0, 10_000), WRONG, st.booleans()), min_size=1, max_size=4))
def test_whatever_is_wrong_the_error_is_ours_and_in_our_words(picks: list[tuple[int, Any, bool]]) -> None:
    config = parse_config(smallest(**NEW, model__lora={}, rewards__math__response_filter_config={"type": "length"}))
    data = yaml.safe_load(to_yaml(config))
    for pick, value, is_new in picks:
        paths = paths_of(data)
        path = paths[pick % len(paths)] if paths else ("exp_name",)
        owner = data
        for part in path[:-1]:
            owner = owner[part]
        key = f"{path[-1]}x" if is_new and isinstance(owner, dict) else path[-1]
        owner[key] = copy.deepcopy(value)  # the next pick may lie within it
    told: list[str] = []
    try:
        parse_config(data)
    except ConfigError as err:
        told = problems_of(err)
    for line in told:
        assert line.startswith("config: ")
        assert not [word for word in FOREIGN if word in line]


def test_every_wrong_value_of_every_new_key_is_told_in_our_words_at_its_key() -> None:
    data = smallest(**NEW)
    sections = [
        *paths_of({"guard": NEW["guard"], "resampling": NEW["resampling"]}),
        ("trainer", "stale_tokens"),
        ("trainer", "keep_checkpoints"),
    ]
    for path in [*sections, *((key,) for key in NEW if "__" not in key)]:
        for value in WRONG_VALUES:
            changed = copy.deepcopy(data)
            owner = changed
            for part in path[:-1]:
                owner = owner[part]
            owner[path[-1]] = copy.deepcopy(value)
            told: list[str] = []
            try:
                parse_config(changed)
            except ConfigError as err:
                told = problems_of(err)
            assert not [word for word in FOREIGN for line in told if word in line], (path, value)
            if isinstance(value, list | dict) and value:  # no key takes any of these
                assert any(line.startswith(f"config: {'.'.join(path)}") for line in told), (path, value, told)


@given(seed=st.integers(0, 2**16), count=st.integers(1, 5))
def test_every_planted_fault_is_told_once(seed: int, count: int) -> None:
    faults = {
        "exp_name": "a/b",
        "rollout_batch_size": 0,
        "prompt_lenght": 3,
        "trainer__beta": -1,
        "engine__temperature": 0,
        "model__lora__rank": 2,
        "resampling__fill": "refil",
        "tasks__train__0__sise": 3,
        "resampling__surplus": "carry",
        "mix_on": "drawn",
        "guard__max_filter_ratio": 2,
        "rewards__math__timeout_value": 1.0,
        "validation__every_steps": 5,
    }
    chosen = random.Random(seed).sample(sorted(faults), count)
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(**{name: faults[name] for name in chosen}))
    told = problems_of(raised.value)
    assert len(told) == count
    for name in chosen:
        assert sum(f"config: {name.replace('__', '.')}: " in line for line in told) == 1


# ---------------------------------------------------------------- files


def test_a_file_loads_with_its_numbers_as_numbers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert config.trainer.learning_rate == 0.001
    assert config.rewards["math"].query_filter_config.type == "no_filter"
    assert config == parse_config(smallest(), folder=tmp_path)


def test_loading_does_little_work(tmp_path: Path) -> None:
    path = write(tmp_path)
    load_config(path)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        load_config(path)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 50_000  # of Python functions: milliseconds


def test_relative_paths_start_at_the_file_and_those_of_overrides_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    text = TEXT.replace(
        "{type: reasoning_gym, name: basic_arithmetic, size: 100, domain: math}", "{type: jsonl, path: ../data/x.jsonl, domain: math}"
    )
    path = write(tmp_path / "recipes", text)
    config = load_config(path)
    assert config.model.path == str(tmp_path / "recipes" / "checkpoint")
    assert config.tasks.train[0].path == tmp_path / "data" / "x.jsonl"
    assert config.records.root == Path("runs")
    other = load_config(Path(os.path.relpath(path)), ["model.path=mine", "tasks.train.0.path=/abs/y.jsonl"])
    assert other.model.path == str(here / "mine")
    assert other.tasks.train[0].path == Path("/abs/y.jsonl")
    whole = load_config(path, ["model={path: mine}", "tasks.validation=[{type: jsonl, path: v.jsonl, domain: math}]"])
    assert whole.model.path == str(here / "mine")
    assert whole.tasks.validation[0].path == here / "v.jsonl"


def test_environment_variables_are_not_expanded_and_home_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("EXP", "x")
    assert parse_config(smallest(model__path="/a/$EXP")).model.path == "/a/$EXP"
    assert parse_config(smallest(model__path="~/model")).model.path == "/home/someone/model"


def test_game_files_start_at_the_recipe_and_what_a_class_of_ones_own_is_given_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    games = {"type": "textworld", "args": {"files": ["games/a.z8", "/abs/b.z8", 7]}}
    own = {"type": "my.Environment", "args": {"files": ["games/a.z8"], "path": "x"}}
    both = agentic(environment=games, val_environment=own, val_env_manager={"num_env_groups": 1})
    config = parse_config(both, folder=tmp_path / "recipes")
    assert isinstance(config, AgenticConfig)
    assert config.val_environment is not None
    assert config.environment.args["files"] == [str(tmp_path / "recipes" / "games" / "a.z8"), "/abs/b.z8", 7]
    assert config.val_environment.args == own["args"]
    other = parse_config(agentic(environment=games), ["environment.args={files: [c.z8]}"], folder=tmp_path / "recipes")
    assert isinstance(other, AgenticConfig)
    assert other.environment.args["files"] == [str(tmp_path / "here" / "c.z8")]


def test_an_error_names_file_line_key_what_was_expected_what_came_and_the_nearest_name(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.replace("learning_rate: 1e-3", "learning_rate: fast\n  warmup_stepz: 2") + "resampling: {fill: refil}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert problems_of(raised.value) == [
        f"{path}:16: trainer.learning_rate: expected a number > 0, got 'fast' (text)",
        f"{path}:17: trainer.warmup_stepz: unknown key - did you mean warmup_steps?",
        f"{path}:18: resampling.fill: expected one of refill, shrink, got 'refil' (text) - did you mean refill?",
    ]


def test_a_key_of_another_section_is_shown_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: unknown key here - did you mean trainer.learning_rate\?"):
        parse_config(smallest(learning_rate=0.1))
    with pytest.raises(ConfigError, match=r"temperature: unknown key here - did you mean engine.temperature or validation.temperature\?"):
        parse_config(smallest(temperature=0.1))
    with pytest.raises(ConfigError, match=r"verifier: unknown key here - did you mean rewards.<domain>.verifier\?"):
        parse_config(smallest(verifier={}))


@pytest.mark.parametrize("key", ["engine__top_p", "engine__top_k", "engine__min_p", "top_p", "engine__repetition_penalty"])
def test_a_cut_of_the_distribution_is_refused_with_its_reason(key: str) -> None:
    told = rf"{key.replace('__', '.')}: unknown key - .*whole vocabulary.* the trainer computes; delete it"
    for make in (smallest, agentic):
        with pytest.raises(ConfigError, match=told):
            parse_config(make(**{key: 0.9}))


def test_a_key_near_to_nothing_is_shown_all_valid_ones() -> None:
    with pytest.raises(ConfigError, match="reward_pool.zebra: unknown key - valid keys: workers"):
        parse_config(smallest(reward_pool__zebra=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rollout_batch_size": "32"},
            "rollout_batch_size: expected a whole number >= 1 and <= 65536, got '32' (text) - write 32 without quotes",
        ),
        ({"rollout_batch_size": True}, "rollout_batch_size: expected a whole number >= 1 and <= 65536, got true"),
        ({"rollout_batch_size": 32.0}, "rollout_batch_size: expected a whole number >= 1 and <= 65536, got 32.0 (a number) - write 32"),
        ({"tasks__shuffle": "no"}, "tasks.shuffle: expected true or false, got 'no' (text) - write false"),
        ({"tasks__shuffle": "True"}, "tasks.shuffle: expected true or false, got 'True' (text) - write it without quotes"),
        ({"trainer__adam_beta1": 1}, "trainer.adam_beta1: expected a number >= 0 and < 1, got 1 (a number)"),
        ({"trainer__max_grad_norm": float("inf")}, "trainer.max_grad_norm: expected a number > 0, got inf (a number)"),
        ({"model__path": 3}, "model.path: expected text that is not empty, got 3 (a number) - put it in quotes"),
        ({"model__path": ""}, "model.path: expected text that is not empty, got '' (text)"),
        ({"model": None}, "model: expected a section with the keys path, lora, got null"),
        ({"tasks__train": []}, "tasks.train: expected a list, at least one, got a list of 0"),
        ({"rewards": {}}, "rewards: expected a mapping, at least one, got a mapping {}"),
        ({"rewards__math__verifier": "exact"}, "rewards.math.verifier: expected a section with the keys type, args, got 'exact' (text)"),
        ({"records__root": 3}, "records.root: expected a path, got 3 (a number)"),
        ({"validation__every_steps": 0}, "validation.every_steps: expected a whole number >= 1 or null, got 0 (a number)"),
        (
            {"exp_name": ".."},
            "exp_name: expected text of at most 100 letters, digits, '.', '_' and '-', a letter or digit first, got '..' (text)",
        ),
        (
            {"validation__temperature": -1},
            "validation.temperature: expected 0 (greedy) or a number >= 0.0001 and <= 100.0, got -1 - 0 takes the likeliest token",
        ),
        ({"pipeline": "agents"}, "pipeline: expected one of rlvr, agentic, got 'agents' (text) - did you mean agentic?"),
        ({"pipeline": None}, "pipeline: expected one of rlvr, agentic, got null"),
        ({"seed": 2**32}, "seed: expected a whole number >= 0 and < 4294967296, got 4294967296 (a number)"),
        ({"engine__type": "vllm"}, "engine.type: expected slot, got 'vllm' (text)"),
        (
            {"guard__max_filter_ratio": 2},
            "guard.max_filter_ratio: expected a number >= 0 and <= 1, or a mapping with the keys invalid, low_information, at least one, "
            "got 2 (a number)",
        ),
        (
            {"guard__max_filter_ratio": "0.5"},
            "guard.max_filter_ratio: expected a number >= 0 and <= 1, or a mapping with the keys invalid, low_information, at least one, "
            "got '0.5' (text) - write 0.5 without quotes",
        ),
        (
            {"guard__max_filter_ratio": {}},
            "guard.max_filter_ratio: expected a number >= 0 and <= 1, or a mapping with the keys invalid, low_information, at least one, "
            "got a mapping {}",
        ),
        (
            {"guard__max_filter_ratio": {"invalid": 2}},
            "guard.max_filter_ratio.invalid: expected a number >= 0 and <= 1, got 2 (a number)",
        ),
        (
            {"guard__max_filter_ratio": {"low_info": 0.5}},
            "guard.max_filter_ratio.low_info: unknown key - did you mean low_information?",
        ),
        ({"guard__limit": 0.5}, "guard.limit: unknown key - valid keys: max_filter_ratio, policy, scope, window"),
        ({"guard": 0.5}, "guard: expected a section with the keys max_filter_ratio, scope, window, policy or null, got 0.5 (a number)"),
        ({"guard__policy": "waits"}, "guard.policy: expected one of keep, wait, shrink, raise, got 'waits' (text) - did you mean wait?"),
        ({"domain_interleave_probs": {"math": 0}}, "domain_interleave_probs.math: expected a number > 0, got 0 (a number)"),
        ({"domain_interleave_probs": {}}, "domain_interleave_probs: expected a mapping, at least one, or null, got a mapping {}"),
        ({"async_generation_ratio": 65}, "async_generation_ratio: expected a number >= 0 and <= 64.0, got 65 (a number)"),
        (
            {"on_weight_update": "restar"},
            "on_weight_update: expected one of finish, restart, continue, got 'restar' (text) - did you mean restart?",
        ),
        (
            {"user_defined_rollout_loop_cls": "loops.py:My"},
            "user_defined_rollout_loop_cls: expected an import path package.module.Class, got 'loops.py:My' - write the module, a dot, and "
            "the name of the class",
        ),
        (
            {"resampling__surplus": "keep"},
            "resampling.surplus: expected one of carry, discard or null, got 'keep' (text) - valid values: carry, discard",
        ),
        ({"resampling__quarantine_after": 0}, "resampling.quarantine_after: expected a whole number >= 1 or null, got 0 (a number)"),
    ],
)
def test_a_wrong_value_is_told_in_the_words_of_yaml(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(**change))
    assert problems_of(raised.value) == [f"config: {message}"]


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("rollout_batch_size", 65_536),
        ("num_return_sequences_in_group", 4_096),
        ("prompt_length", 10_000_000),
        ("response_length", 10_000_000),
        ("resampling.max_groups_per_batch", 10_000_000),
        ("resampling.max_resample_rounds", 10_000),
        ("resampling.max_response_rounds", 10_000),
        ("tasks.train.0.size", 100_000_000),
        ("rewards.math.reward_timeout_s", 86_400),
        ("reward_pool.workers", 1_024),
        ("engine.max_slots", 65_536),
        ("engine.torch_threads", 1_024),
        ("engine.temperature", 100),
        ("trainer.torch_threads", 1_024),
        ("trainer.micro_batch_size", 1_048_576),
        ("trainer.max_steps", 10_000_000),
        ("resampling.group_timeout_s", 604_800),
    ],
)
def test_a_number_that_no_run_needs_is_refused_while_loading(key: str, most: int) -> None:
    assert parse_config(smallest(), [f"{key}={most}"])
    for absurd in (most + 1, 10**18, 10**400):
        with pytest.raises(ConfigError, match=rf"{key}: expected a .*number.* <= {most}"):
            parse_config(smallest(), [f"{key}={absurd}"])


def test_limits_hold_for_keys_that_need_others_too() -> None:
    idle = [{"type": "reasoning_gym", "name": "x", "size": 1, "domain": "math"}]
    with pytest.raises(ConfigError, match=r"validation\.repeats: expected a whole number >= 1 and <= 10000, got 10001"):
        parse_config(smallest(tasks__validation=idle, validation__temperature=1.0, validation__repeats=10_001))
    with pytest.raises(ConfigError, match=r"max_additional_running_prompts: expected a whole number >= 0 and <= 65536, got 65537"):
        parse_config(smallest(is_use_additional_prompts=True, max_additional_running_prompts=65_537))
    with pytest.raises(ConfigError, match=r"timeout_value: expected a number .*3\.40282.*e\+38 or null, got 1e\+39"):
        parse_config(smallest(rewards__math__on_reward_timeout="value", rewards__math__timeout_value=1e39))


def test_a_temperature_is_one_that_can_be_divided_by() -> None:
    data = smallest(tasks__validation=[{"type": "reasoning_gym", "name": "x", "size": 1, "domain": "math"}])
    for temperature in (1e-5, 5e-324, 101.0, -1.0):
        for key in ("engine", "validation"):
            with pytest.raises(ConfigError, match=rf"{key}\.temperature: expected .*number >= 0\.0001 and <= 100\.0, got"):
                parse_config(data, [f"{key}.temperature={temperature}"])
    with pytest.raises(ConfigError, match=r"engine\.temperature"):
        parse_config(data, ["engine.temperature=0"])
    for greedy in (0, 0.0, 1e-4, 100):
        assert parse_config(data, [f"validation.temperature={greedy}"]).validation.temperature == greedy


def test_a_name_that_no_folder_can_have_is_refused() -> None:
    assert parse_config(smallest(exp_name="x" * 100))
    with pytest.raises(ConfigError, match="exp_name: expected text of at most 100 letters"):
        parse_config(smallest(exp_name="x" * 101))


@pytest.mark.parametrize("key", ["model.path", "records.root", "tasks.train.0.path"])
def test_a_path_with_a_nul_character_is_refused(key: str) -> None:
    data = smallest(tasks__train=[{"type": "jsonl", "path": "x", "domain": "math"}])
    with pytest.raises(ConfigError, match=rf"{key}: expected a path without NUL characters, .* got 'a.x00b' - delete them"):
        parse_config(data, [f'{key}="a\\0b"'])


def test_a_mapping_built_in_python_may_have_wrong_keys() -> None:
    for changes, message in (
        ({"rewards": {3: {}}}, "rewards: expected keys that are text, got 3 (a number) - put it in quotes"),
        ({"trainer": {3: 4}}, "trainer: expected keys that are text, got 3 (a number) - put it in quotes"),
        (
            {"guard": {"max_filter_ratio": {3: 4}}},
            "guard.max_filter_ratio: expected keys that are text, got 3 (a number) - put it in quotes",
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            parse_config(smallest(**changes))
        assert f"config: {message}" in problems_of(raised.value)


def test_a_missing_key_says_what_it_takes() -> None:
    data = smallest()
    del data["trainer"]["max_steps"], data["rewards"]["math"]["verifier"]
    with pytest.raises(ConfigError) as raised:
        parse_config(data)
    assert problems_of(raised.value) == [
        "config: trainer.max_steps: expected a whole number >= 1 and <= 10000000, the key is missing",
        "config: rewards.math.verifier: expected a section with the keys type, args, the key is missing",
    ]


def test_rules_across_keys_are_told_beside_wrong_values_but_not_because_of_them() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(is_use_additional_prompts="maybe", max_additional_running_prompts=4, mix_on="drawn", bogus=1))
    told = "\n".join(problems_of(raised.value))
    assert "is_use_additional_prompts: expected true or false" in told
    assert "mix_on: has no effect" in told
    assert "max_additional_running_prompts: " not in told  # whether it has an effect is not known yet


# ---------------------------------------------------------------- written down again


def test_the_resolved_configuration_holds_what_has_an_effect_and_nothing_else() -> None:
    data = yaml.safe_load(to_yaml(parse_config(smallest())))
    assert data["trainer"]["beta"] == 0.0
    assert data["resampling"]["max_resample_rounds"] == 10
    assert "max_additional_running_prompts" not in data
    assert data["validation"] == {}
    assert "path" not in data["tasks"]["train"][0]


def test_what_was_written_is_written_again_even_without_effect() -> None:
    config = parse_config(smallest())
    idle = config.model_copy(
        update={"trainer": TrainerConfig(max_steps=1, learning_rate=1.0, advantage=AdvantageConfig(type="leave_one_out", eps=0.5))}
    )
    assert yaml.safe_load(to_yaml(idle))["trainer"]["advantage"] == {"type": "leave_one_out", "eps": 0.5}


def test_a_configuration_built_in_python_can_be_checked() -> None:
    config = parse_config(smallest())
    check_config(config)
    with pytest.raises(ConfigError, match="resampling.surplus: must be carry with async_generation_ratio 2, got discard"):
        check_config(RlvrConfig.model_validate({**smallest(), "async_generation_ratio": 2.0, "resampling": {"surplus": "discard"}}))
    with pytest.raises(ConfigError, match="max_additional_running_prompts: has no effect"):
        check_config(RlvrConfig.model_validate({**smallest(), "max_additional_running_prompts": 16}))


def test_parsing_leaves_the_mapping_as_it_was() -> None:
    data = smallest()
    parse_config(data, ["trainer.max_steps=3"], folder="/somewhere")
    assert data == smallest()


@pytest.mark.parametrize("word", ["nan", "inf", "-Infinity"])
def test_a_number_that_is_none_is_not_recommended(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(smallest(validation__temperature=word))
    assert "without quotes" not in str(caught.value)
