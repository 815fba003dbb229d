from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.config.models import RlvrConfig
from sluice.errors import ConfigError
from sluice.tasks import check_task_settings, task_problems
from tests.tasks.fakes import jsonl, run_config, sums

GYM: dict[str, Any] = {"type": "reasoning_gym", "name": "chain_sum", "domain": "math", "size": 5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "sums.jsonl", sums(2))


def problems(config: RlvrConfig) -> dict[str, str]:
    """Key -> message."""
    return {".".join(map(str, problem.path)): problem.message for problem in task_problems(config)}


def lines(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "jsonl", "path": str(path), "domain": "math", **more}


def test_sound_settings_pass(file: Path, tmp_path: Path):
    check_task_settings(run_config([GYM, lines(file)], [{**lines(tmp_path), "type": "huggingface"}], dataset_filter={"source": ["sums"]}))


def test_keys_of_another_type_are_refused_with_their_path(file: Path):
    found = problems(run_config([lines(file, split="train"), {**GYM, "prompt_field": "q"}], [lines(file, seed=3)]))
    assert set(found) == {"tasks.train.0.split", "tasks.train.1.prompt_field", "tasks.validation.0.seed"}


def test_a_key_that_a_type_cannot_do_without_is_named():
    found = problems(run_config([{"type": "reasoning_gym", "domain": "math"}, {"type": "jsonl", "domain": "math"}]))
    assert set(found) == {"tasks.train.0.name", "tasks.train.0.size", "tasks.train.1.path"}


def test_paths_and_names_that_are_not_there_are_told_together_each_with_its_key(tmp_path: Path):
    config = run_config(
        [lines(tmp_path / "gone.jsonl"), {**GYM, "name": "chain_sun"}], [{**lines(tmp_path / "away"), "type": "huggingface"}]
    )
    with pytest.raises(ConfigError) as raised:
        check_task_settings(config)
    told = str(raised.value)
    assert f"tasks.train.0.path: expected a file with one JSON object a line, but {tmp_path / 'gone.jsonl'} does not exist" in told
    assert "tasks.train.1.name: expected the name of a reasoning-gym data set, got 'chain_sun' - did you mean chain_sum?" in told
    assert "tasks.validation.0.path: expected a local data set" in told


def test_a_relative_path_is_told_as_the_absolute_one_it_stands_for():
    assert str(Path.cwd() / "gone.jsonl") in problems(run_config([lines(Path("gone.jsonl"))]))["tasks.train.0.path"]


def test_settings_without_effect_are_refused(file: Path):
    config = run_config([lines(file, prompt_field="q")], prompt_template="{answer}", system_prompt="s", exclude_train_from_validation=True)
    assert set(problems(config)) == {"tasks.train.0.prompt_field", "tasks.system_prompt", "tasks.exclude_train_from_validation"}


@pytest.mark.parametrize("template", ["no field", "{question", "{}", "{0}", "{question.__class__}"])
def test_a_template_that_cannot_be_filled_or_says_nothing_is_refused(file: Path, template: str):
    assert set(problems(run_config(file, prompt_template=template))) == {"tasks.prompt_template"}


def test_the_filter_must_name_sources_that_are_there(file: Path):
    found = problems(run_config(file, dataset_filter={"source": ["sum"], "min_difficulty": 2.0, "max_difficulty": 1.0}))
    assert set(found) == {"dataset_filter.source.0", "dataset_filter.min_difficulty"}
    assert "did you mean sums?" in found["dataset_filter.source.0"]
    assert set(problems(run_config(file, dataset_filter={"source": ["sums.jsonl"]}))) == {"dataset_filter.source.0"}


def test_a_source_name_cannot_hold_the_sign_that_parts_task_ids(file: Path):
    assert set(problems(run_config([lines(file, source_name="a/b")]))) == {"tasks.train.0.source_name"}
    assert set(problems(run_config([lines(file, source_name=" ")]))) == {"tasks.train.0.source_name"}


def test_a_domain_that_is_not_configured_is_refused(file: Path):
    found = problems(run_config([lines(file), {**lines(file), "domain": "maths"}]))
    assert set(found) == {"tasks.train.1.domain"}


def test_a_label_that_two_domains_claim_is_refused(file: Path):
    verifier = {"type": "exact"}
    rewards = {"math": {"verifier": verifier, "tag_included": ["x"]}, "code": {"verifier": verifier, "tag_included": ["x"]}}
    source = {"type": "jsonl", "path": str(file)}
    assert set(problems(run_config([source], rewards=rewards))) == {"rewards.code.tag_included"}


def test_problems_of_other_rooms_are_not_told_here(file: Path):
    assert problems(run_config(file, num_return_sequences_in_group=1)) == {}
