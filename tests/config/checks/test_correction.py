"""What a recipe says about the distance between trainer and engine. Rules of the section itself: tests/correction/test_settings.py."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.config import AgenticConfig, RlvrConfig, parse_config, to_yaml
from sluice.config.reading import parse_document
from sluice.errors import ConfigError
from tests.config.recipes import agentic, problems_of, smallest

FULL = {
    "presets": ["token_veto"],
    "is_weight": {"enabled": True, "weight_type": "segment", "upper_bound": None},
    "filters": [
        {"enabled": True, "agg_type": "geometric", "ratio_low": 0.9, "ratio_high": 1.1},
        {"enabled": False, "agg_type": "token", "ratio_enabled": False, "diff_enabled": True, "diff_low": None, "diff_high": 0.5},
    ],
    "baseline": "all",
}

BOTH = pytest.mark.parametrize("made", [smallest, agentic])


@BOTH
def test_the_section_loads_in_either_pipeline_and_again_from_its_resolved_form(made: Any) -> None:
    config = parse_config(made(train_infer_correction=FULL))
    assert isinstance(config, (RlvrConfig, AgenticConfig))
    assert config.train_infer_correction is not None
    assert [found.agg_type for found in config.train_infer_correction.enabled_filters] == ["token", "geometric"]
    data, _, problems = parse_document(to_yaml(config), "resolved.yaml")
    assert not problems
    assert parse_config(data) == config
    assert parse_config(made()).train_infer_correction is None


def refused(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(data)
    return [problem.removeprefix("config: ") for problem in problems_of(raised.value)]


@BOTH
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train_infer_correction": {"filters": [{"ratio_low": 2.0}]}},
            "train_infer_correction.filters.0.ratio_low: must not be above ratio_high (1.2), got 2 - swap them or set one to null",
        ),
        (
            {"train_infer_correction": {"is_weight": {"weight_type": "tokens"}}},
            "train_infer_correction.is_weight.weight_type: expected one of token, segment, geometric, sequence, got 'tokens' (text) - did "
            "you mean token?",
        ),
        (
            {"train_infer_correction": {"is_weight": {"enabled": True, "detach": False}}},
            "train_infer_correction.is_weight.detach: must be true in a run, got false: its old log-probs are computed without gradients - "
            "delete it; false is for whoever calls the library",
        ),
        (
            {"engine": {"precision": "bfloat16"}},
            "trainer.logprob_tolerance: must be null with engine.precision bfloat16, got 0.0001: an engine of another precision than the "
            "trainer's never gives the same log-probs - write null, so that they are compared and recorded only",
        ),
        (
            {"engine": {"precision": "int4"}},
            "engine.precision: expected one of float32, bfloat16, int8, got 'int4' (text) - did you mean int8?",
        ),
        ({"trainer__logprob_tolerance": 0.0}, "trainer.logprob_tolerance: expected a number > 0 or null, got 0.0 (a number)"),
    ],
)
def test_what_cannot_hold_is_refused_while_loading(made: Any, changes: dict[str, Any], says: str) -> None:
    assert refused(made(**changes)) == [says]


@BOTH
def test_another_precision_needs_the_tolerance_switched_off_in_the_recipe(made: Any) -> None:
    for precision in ("bfloat16", "int8"):
        config = parse_config(made(engine={"precision": precision}, trainer__logprob_tolerance=None))
        assert (config.engine.precision, config.trainer.logprob_tolerance) == (precision, None)
        parse_config(made(engine={"precision": precision}, trainer__bf16=True))  # there the tolerance holds nowhere


@BOTH
@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_sampling_from_a_part_of_the_vocabulary_is_refused(made: Any, key: str) -> None:
    """Its ratio would be that of other probabilities than the token was drawn with."""
    (problem,) = refused(made(engine={key: 1}, train_infer_correction=FULL))
    assert problem.startswith(f"engine.{key}: unknown key")
