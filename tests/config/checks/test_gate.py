"""The gate of an agentic run: what it may be told, what of it does nothing, and what is the same in the rooms that use it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import AgenticConfig, parse_config, to_yaml
from sluice.config.checks.gate import RULES, SIGNS
from sluice.config.gate import GateConfig, Signal
from sluice.config.reading import parse_document
from sluice.errors import ConfigError
from sluice.gate import SIGNALS, FutilityRule, LearnedFutility, SequentialKeeper
from sluice.gate.rules import PUBLISHED_THRESHOLD
from sluice.gate.rules import RULES as BUILT_IN
from sluice.pipeline.gate import build_gate, horizon_of
from tests.config.recipes import agentic, problems_of, smallest
from tests.gate.played_groups import fitted

K = {"k": 10}


def refused(gate: Any, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(agentic(gate=gate, **changes))
    return [problem.removeprefix("config: ") for problem in problems_of(raised.value)]


def loaded(gate: Any, **changes: Any) -> AgenticConfig:
    config = parse_config(agentic(gate=gate, **changes))
    assert isinstance(config, AgenticConfig)
    return config


def test_names_that_two_rooms_know_are_the_same() -> None:
    assert get_args(Signal) == SIGNALS
    assert set(RULES) == set(BUILT_IN)
    assert list(SIGNS) == [one.name for one in fields(FutilityRule)]
    assert GateConfig.model_fields["threshold"].default == PUBLISHED_THRESHOLD


def test_without_the_section_there_is_no_gate() -> None:
    config = parse_config(agentic())
    assert isinstance(config, AgenticConfig)
    assert config.gate is None
    assert build_gate(config) is None
    assert "gate" not in {name for name, value in parse_document(to_yaml(config), "again")[0].items() if value is not None}


def test_in_an_rlvr_recipe_it_says_where_it_belongs() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(smallest(gate=K))
    assert "gate: belongs to pipeline agentic, this recipe is of pipeline rlvr" in str(raised.value)


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        (
            {},
            "gate: expected k, the environment step at which groups are looked at, model or futility, got none - give one, or delete gate",
        ),
        ({"threshold": 0.1}, "gate: expected k, the environment step at which groups are looked at, model or futility, got none"),
        ({"k": 0}, "gate.k: expected a whole number >= 1"),
        ({"k": 2.5}, "gate.k: expected a whole number >= 1"),
        ({**K, "threshold": 1.5}, "gate.threshold: expected a number >= 0 and <= 1, got 1.5"),
        ({**K, "threshold": -0.1}, "gate.threshold: expected a number >= 0 and <= 1"),
        ({**K, "threshold": float("nan")}, "gate.threshold: expected a number"),
        ({**K, "signal": "prefix_edit_distance"}, "gate.signal: expected one of prefix_edit_distance_mean,"),
        ({**K, "signal": "prefix_edit_distance"}, "did you mean prefix_edit_distance_mean?"),
        ({**K, "treshold": 0.1}, "gate.treshold: unknown key - did you mean threshold?"),
        ({**K, "on_cut": "dorp"}, "did you mean drop?"),
        (
            {**K, "rule": {"type": "or_terminaton"}},
            "gate.rule.type: expected one of by_task_type, or_termination, single_axis, or an import",
        ),
        ({**K, "rule": {"type": "or_terminaton"}}, "did you mean or_termination?"),
        (
            {**K, "rule": {}},
            "gate.rule.type: expected one of by_task_type, or_termination, single_axis, or an import path, got none - give it",
        ),
        ({**K, "rule": {"type": "single_axis", "threshold": 2}}, "gate.rule.threshold: expected a number >= 0 and <= 1, got 2"),
        (
            {**K, "rule": {"type": "by_task_type", "rules": {"look": 0.1, "clean": {"type": "single_axs"}}, "default": 7}},
            "gate.rule.rules.clean.type: expected one of",
        ),
        (
            {**K, "rule": {"type": "by_task_type", "rules": {"look": 0.1}, "default": 7}},
            "gate.rule.default: expected a number >= 0 and <= 1, got 7",
        ),
        (
            {**K, "audit_rate": 0.0, "hold_precision": 0.9},
            "gate.audit_rate: must be above 0 with gate.hold_precision 0.9, got 0: without audits no precision is known - set 0.1",
        ),
        ({**K, "audit_rate": 1.0}, "gate.audit_rate: must be below 1, got 1: every group would be audited, and none cut"),
        ({**K, "audit_rate": 1.1}, "gate.audit_rate: expected a number >= 0 and <= 1"),
        (
            {**K, "hold_precision": 0.95, "window": 71},
            "gate.window: must be at least 72 with gate.hold_precision 0.95, got 71: even if all of so few audited groups were right",
        ),
        (
            {**K, "hold_precision": 0.95, "window": 71, "shadow": True},
            "gate.window: must be at least 72 with gate.hold_precision 0.95, got 71: even if all of so few audited groups were right",
        ),
        (
            {"futility": {"steps": 4, "hold_precision": 0.95, "window": 71}},
            "gate.futility.window: must be at least 72 with gate.futility.hold_precision 0.95, got 71: even if all of so few audited "
            "members were right",
        ),
        (
            {"k": 1, "signal": "action_bigram_jaccard_mean"},
            "gate.signal: must be another one with gate.k 1, got action_bigram_jaccard_mean: after one step it is 0 for every group",
        ),
        ({"k": 1, "signal": "termination_fraction"}, "gate.signal: must be another one with gate.k 1, got termination_fraction"),
        (
            {"k": 1, "rule": {"type": "by_task_type", "rules": {"look": {"type": "or_termination", "signal": "termination_fraction"}}}},
            "gate.rule.rules.look.signal: must be another one with gate.k 1, got termination_fraction",
        ),
        ({**K, "hold_precision": 1.0}, "gate.hold_precision: expected a number > 0 and < 1 or null, got 1.0"),
        (
            {**K, "futility": {}},
            "gate.futility: expected at least one of steps, loops, invalid_actions, progress_steps, or model, got none",
        ),
        ({"futility": {"steps": 0}}, "gate.futility.steps: expected a whole number >= 1"),
        ({"futility": {"loops": 1}}, "gate.futility.loops: expected a whole number >= 2"),
        ({"futility": {"step": 4}}, "gate.futility.step: unknown key - did you mean steps?"),
    ],
)
def test_what_cannot_be_is_told_while_loading(gate: Any, problem: str) -> None:
    assert any(problem in told for told in refused(gate)), refused(gate)


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ({"k": 10, "model": "rule.json"}, "gate.k: excludes model, which looks at steps of its own - delete one of the two"),
        ({"model": "rule.json", "threshold": 0.1}, "gate.threshold: has no effect because gate.model is given, and decides alone"),
        ({"k": 10, "floor": 0.9}, "gate.floor: has no effect because gate.model is not given - delete it, or give it"),
        (
            {"futility": {"steps": 4, "audit_rate": 0.0, "hold_precision": 0.9}},
            "gate.futility.audit_rate: must be above 0 with gate.futility.hold_precision, got 0: without audits no precision is known",
        ),
        ({"futility": {"model": "rule.json", "steps": 4}}, "gate.futility.model: excludes steps: a model decides alone"),
        ({"futility": {"steps": 4, "floor": 0.9}}, "gate.futility.floor: has no effect because gate.futility.model is not given"),
        ({"model": "rule.json", "floor": 1.0}, "gate.floor: expected a number > 0 and < 1"),
    ],
)
def test_a_learned_rule_stands_alone(gate: Any, problem: str) -> None:
    (found,) = refused(gate)
    assert found.startswith(problem)


def test_a_learned_rule_is_found_beside_the_recipe_and_fits_its_groups_or_is_refused(tmp_path: Path) -> None:
    rule = fitted()
    rule.save(tmp_path / "rule.json")
    data = agentic(gate={"model": "rule.json", "floor": 0.8, "futility": {"model": "rule.json", "floor": 0.8}})
    data["environment"]["args"] = {"max_steps": rule.horizon}
    data["train_env_manager"]["group_size"] = rule.group_size
    config = parse_config(data, folder=tmp_path)
    assert isinstance(config, AgenticConfig)
    assert config.gate is not None
    assert config.gate.model == tmp_path / "rule.json"
    built = build_gate(config)
    assert built is not None
    assert isinstance(built.groups, SequentialKeeper)
    assert isinstance(built.members.rule, LearnedFutility)  # type: ignore[union-attr]
    data["environment"]["args"] = {"max_steps": rule.horizon + 1}
    with pytest.raises(ConfigError, match=r"gate\.model: expected groups as those it was fitted on, with horizon"):
        build_gate(parse_config(data, folder=tmp_path))  # type: ignore[arg-type]
    data["environment"] = {"type": "my.Environment"}
    with pytest.raises(ConfigError, match=r"gate\.model: expected a known step limit"):
        build_gate(parse_config(data, folder=tmp_path))  # type: ignore[arg-type]
    data["gate"]["model"] = "elsewhere.json"
    data["environment"]["max_steps"] = rule.horizon
    with pytest.raises(ConfigError, match=r"gate\.model: expected a file, got .*elsewhere\.json"):
        build_gate(parse_config(data, folder=tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [{"environment__max_steps": 10}, {"dialogue__max_turns": 10}])
def test_nothing_is_decided_at_or_beyond_the_step_limit(limit: dict[str, int]) -> None:
    (name,) = [key.replace("__", ".") for key in limit]
    (problem,) = refused({"k": 10}, **limit)
    told = f"must be below {name} (10), where every trajectory ends, got 10: nothing is left to save there - lower it"
    assert problem == f"gate.k: {told}"
    assert refused({"futility": {"steps": 12}}, **limit) == [f"gate.futility.steps: {told.replace('got 10', 'got 12')}"]
    loaded({"k": 9, "futility": {"steps": 9}}, **limit)


def test_the_step_limit_of_an_environment_with_a_name_counts_too() -> None:
    with pytest.raises(ConfigError, match=r"gate\.k: expected a step below the horizon 30, got 40"):
        build_gate(loaded({"k": 40}))
    with pytest.raises(ConfigError, match=r"gate\.futility\.steps: expected a number below 12"):
        build_gate(loaded({"futility": {"steps": 12}}, environment__args={"max_steps": 12}))
    assert horizon_of(loaded(K)) == 30
    assert horizon_of(loaded(K, dialogue__max_turns=14)) == 14
    assert horizon_of(loaded(K, environment__type="my.Environment")) is None


def test_a_barrier_needs_an_environment_for_every_member() -> None:
    gate = {**K, "barrier": True}
    (seats, workers) = refused(gate)
    assert seats == (
        "gate.barrier: needs an environment for every member of every open group, and 8 groups may be open, "
        "train_env_manager.num_env_groups is 4: members would wait for each other - raise num_env_groups to 8, or delete barrier"
    )
    assert workers == (
        "gate.barrier: needs a worker for every member of every open group, and 64 may be open, environment.workers is 2: members would "
        "wait for each other - raise workers to 64, set environment.run_in to inline or thread, or delete barrier"
    )
    inline = {"environment__run_in": "inline"}
    loaded(gate, train_env_manager__num_env_groups=8, **inline)
    assert len(refused(gate, train_env_manager__num_env_groups=15, async_generation_ratio=1.0, **inline)) == 1
    loaded(gate, train_env_manager__num_env_groups=16, async_generation_ratio=1.0, **inline)


@pytest.mark.parametrize(
    ("gate", "changes", "key", "because"),
    [
        ({"futility": {"steps": 4}, "threshold": 0.1}, {}, "gate.threshold", "gate.k is not given, so that no group is looked at"),
        ({"futility": {"steps": 4}, "on_cut": "drop"}, {}, "gate.on_cut", "gate.k is not given"),
        ({**K, "rule": {"type": "or_termination"}, "threshold": 0.1}, {}, "gate.threshold", "gate.rule is given"),
        ({**K, "rule": {"type": "or_termination"}, "signal": "action_entropy"}, {}, "gate.signal", "gate.rule is given"),
        ({**K, "shadow": True, "on_cut": "drop"}, {}, "gate.on_cut", "gate.shadow is true"),
        ({**K, "shadow": True, "barrier": True}, {}, "gate.barrier", "gate.shadow is true"),
        ({**K, "shadow": True, "audit_rate": 0.2}, {}, "gate.audit_rate", "gate.shadow is true"),
        ({**K, "most_scale": 3.0}, {}, "gate.most_scale", "gate.hold_precision is not given"),
        ({**K, "audit_rate": 0.0, "window": 50}, {}, "gate.window", "gate.audit_rate is 0"),
        ({**K, "audit_rate": 0.0, "confidence": 0.9}, {}, "gate.confidence", "gate.audit_rate is 0"),
        ({**K, "on_cut": "replace"}, {"resampling__fill": "shrink"}, "gate.on_cut", "resampling.fill is shrink"),
        (
            {"futility": {"steps": 4, "audit_rate": 0.0, "window": 9}},
            {},
            "gate.futility.window",
            "gate.futility.audit_rate is 0, so that no member tells",
        ),
        ({"shadow": True, "futility": {"steps": 4, "audit_rate": 0.3}}, {}, "gate.futility.audit_rate", "gate.shadow is true"),
        ({"shadow": True, "futility": {"steps": 4, "hold_precision": 0.9}}, {}, "gate.futility.hold_precision", "gate.shadow is true"),
    ],
)
def test_settings_without_effect_are_refused(gate: Any, changes: Any, key: str, because: str) -> None:
    (problem,) = refused(gate, **changes)
    assert problem.startswith(f"{key}: has no effect because {because}")


@pytest.mark.parametrize(
    "gate",
    [
        K,
        {**K, "shadow": True, "hold_precision": 0.9},
        {"futility": {"steps": 6}},
        {"k": 5, "threshold": 0.2, "futility": {"loops": 3, "audit_rate": 0.0}},
        {**K, "rule": {"type": "by_task_type", "rules": {"look": 0.1, "clean": {"type": "or_termination"}}}, "audit_rate": 0.0},
    ],
)
def test_the_resolved_configuration_loads_again_and_builds(gate: Any) -> None:
    config = loaded(gate, model__path="/m")
    data, _, _ = parse_document(to_yaml(config), "again")
    again = parse_config(data)
    assert again == config
    built = build_gate(config)
    assert built is not None
    assert (built.groups is None) == ("k" not in gate)
    assert (built.members is None) == ("futility" not in gate)


def test_a_shadow_stops_nobody_either() -> None:
    built = build_gate(loaded({**K, "shadow": True, "futility": {"steps": 3}}))
    assert built is not None
    assert built.members.audit_rate == 1.0  # type: ignore[union-attr]
    assert not built.groups.is_cutting  # type: ignore[union-attr]


def test_a_rule_of_ones_own_that_cannot_be_found_is_told_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match=r"gate\.rule\.type: expected a built-in rule or an import path"):
        build_gate(loaded({**K, "rule": {"type": "nowhere.Rule"}}))
    with pytest.raises(ConfigError, match=r"gate\.rule.*treshold"):
        build_gate(loaded({**K, "rule": {"type": "single_axis", "treshold": 0.2}}))


@given(hold=st.floats(0.5, 0.99), confidence=st.floats(0.5, 0.99), window=st.integers(1, 400))
def test_a_window_that_loads_is_one_that_the_keeper_takes(hold: float, confidence: float, window: int) -> None:
    gate = {**K, "hold_precision": hold, "confidence": confidence, "window": window}
    enough = hold**window <= (1 - confidence) / 2
    if abs(hold**window - (1 - confidence) / 2) < 1e-9:
        return  # on the edge, where rounding decides
    if not enough:
        assert [problem.partition(":")[0] for problem in refused(gate)] == ["gate.window"]
        return
    assert build_gate(loaded(gate)) is not None
