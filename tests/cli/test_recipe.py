"""What the doctor says about a recipe, question by question. The command as a whole: test_app.py; agentic questions: test_agentic.py."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.cli.recipe import _agentic_questions, _rlvr_questions
from sluice.config import AgenticConfig, RlvrConfig, parse_config
from tests.config.recipes import agentic, smallest

BAND = {"agg_type": "geometric", "ratio_low": 0.99, "ratio_high": 1.01}


def answers(made: Any, settings: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What is said about a correction: status and text."""
    config = parse_config(made(train_infer_correction=settings) if settings is not None else made())
    assert isinstance(config, RlvrConfig | AgenticConfig)
    questions = dict(_rlvr_questions(config) if isinstance(config, RlvrConfig) else _agentic_questions(config))
    return [(check.status, check.detail) for check in questions["correction"]()]


@pytest.mark.parametrize("made", [smallest, agentic])
def test_the_doctor_names_what_of_the_correction_is_in_force(made: Any) -> None:
    assert answers(made, None) == []
    assert answers(made, {"presets": ["diagnostics"]}) == [("ok", "only measures, nothing is enabled")]
    chosen = {"presets": ["icepop"], "filters": [{"enabled": True, **BAND}, {"enabled": False, **BAND}]}
    assert answers(made, chosen) == [("ok", "weight by token, filter by token, filter by geometric")]


@pytest.mark.parametrize("made", [smallest, agentic])
def test_case_121_the_doctor_warns_of_parts_that_have_settings_and_no_effect(made: Any) -> None:
    forgotten = {"presets": ["token_veto"], "is_weight": {"upper_bound": 5.0}, "filters": [BAND, {"enabled": True, **BAND}]}
    in_force, *warnings = answers(made, forgotten)
    assert in_force == ("ok", "filter by token, filter by geometric")
    assert warnings == [
        ("warning", f"train_infer_correction.{name} has settings and does nothing, since it is not enabled")
        for name in ("is_weight", "filters.0")
    ]
