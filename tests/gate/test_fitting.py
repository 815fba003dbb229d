"""A rule that is fitted on finished groups: it knows more of unseen ones than any signal, its floors hold, and it is saved whole."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from sluice.errors import ConfigError, GateError
from sluice.gate import FutilityRule
from sluice.gate.fitting import fit_learned
from sluice.gate.learned import LearnedFutility, LearnedRule
from sluice.gate.offline import auroc
from sluice.gate.played import looks, with_futility
from sluice.gate.traces import INPUTS, GroupTrace, MemberTrace
from tests.gate.played_groups import FEW, HORIZON, fitted, played

UNSEEN = [played(seed) for seed in range(1000, 1150)]


def test_it_knows_more_of_unseen_groups_than_the_edit_distance() -> None:
    rule = fitted()
    scores, distances, outcomes = [], [], []
    for group in UNSEEN:
        for look in looks(group, GroupTrace(HORIZON), [5]):
            scores.append(rule.of_group(look).score)
            distances.append(-look.of_group[4])
            outcomes.append(group.is_equal)
    assert auroc(scores, outcomes) > max(0.8, auroc(distances, outcomes) + 0.05)


def test_chances_are_near_the_outcomes() -> None:
    rule = fitted()
    told = [(rule.of_group(look).chance, group.is_equal) for group in UNSEEN for look in looks(group, GroupTrace(HORIZON), rule.steps)]
    chances, outcomes = (np.array(column) for column in zip(*told, strict=True))
    assert abs(chances.mean() - outcomes.mean()) < 0.1
    assert np.mean((chances - outcomes) ** 2) < 0.8 * outcomes.var()


def test_members_are_stopped_as_often_rightly_as_the_floor_says() -> None:
    futility = LearnedFutility(fitted(), floor=0.9)
    right = stopped = saved = 0
    for group in UNSEEN:
        for before, after in zip(group.members, with_futility(group, futility).members, strict=True):
            if len(after.steps) < len(before.steps):
                stopped += 1
                right += before.reward == after.reward == 0.0
                saved += len(before.steps) - len(after.steps)
    assert right / stopped > 0.88
    assert saved > 0.2 * sum(group.env_steps for group in UNSEEN)


def test_a_rule_beside_a_futility_stop_is_fitted_on_groups_with_that_stop() -> None:
    beside = fitted(0.9)
    assert (beside.futility_floor, fitted().futility_floor) == (0.9, None)
    assert beside.provenance["looks"] < fitted().provenance["looks"], "stopped groups are over earlier"
    assert beside.provenance["equal_groups"] >= fitted().provenance["equal_groups"], "who is stopped earns nothing more"


def test_the_same_groups_and_seed_give_the_same_rule_and_it_is_saved_whole(tmp_path) -> None:
    groups = [played(seed) for seed in range(100)]
    rule = fit_learned(groups, horizon=HORIZON, inputs=["progress", "reply"], folds=2, provenance={"policy": "tests"}, **FEW)
    again = fit_learned(groups, horizon=HORIZON, inputs=["reply", "progress"], folds=2, provenance={"policy": "tests"}, **FEW)
    path = tmp_path / "rule.json"
    rule.save(path)
    loaded = LearnedRule.load(path)
    again.save(tmp_path / "again.json")
    assert path.read_text() == (tmp_path / "again.json").read_text()
    assert loaded.inputs == ("reply", "progress")
    assert loaded.provenance["policy"] == "tests"
    for group in UNSEEN[:10]:
        for look in looks(group, GroupTrace(HORIZON, rule.inputs), rule.steps):
            assert loaded.of_group(look) == rule.of_group(look)
    trace = MemberTrace(HORIZON, rule.inputs)
    row = trace.add(UNSEEN[0].members[0].steps[0])
    assert loaded.of_member(row) == rule.of_member(row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "a rule of schema 1"),
        ({"group_features": ["step"]}, "where this version has"),
        ({"inputs": ["sight"]}, "inputs: expected some of"),
        ({"member_model": {}}, "trees as they were saved"),
        ({"group_calibration": {}}, "calibration as it was saved"),
        ({"horizon": None}, "a whole rule.*horizon: expected a whole number >= 2, got None"),
        ({"horizon": 8.7}, "horizon: expected a whole number >= 2, got 8.7"),
        ({"horizon": math.inf}, "horizon: expected a whole number >= 2, got inf"),
        ({"group_size": 1}, "group_size: expected a whole number >= 2, got 1"),
        ({"group_size": True}, "group_size: expected a whole number >= 2, got True"),
        ({"steps": []}, "steps: expected ascending steps from 1 to 11, got "),
        ({"steps": {}}, "steps: expected ascending steps"),
        ({"steps": [0, 4]}, "steps: expected ascending steps"),
        ({"steps": [4, 4]}, "steps: expected ascending steps"),
        ({"steps": [5, 4]}, "steps: expected ascending steps"),
        ({"steps": [HORIZON]}, "steps: expected ascending steps"),
        ({"steps": [4.5]}, "steps: expected ascending steps"),
        ({"futility_floor": -1}, "futility_floor: expected a number > 0 and < 1, or null, got -1"),
        ({"futility_floor": math.nan}, "futility_floor: expected a number > 0 and < 1, or null, got nan"),
        ({"provenance": {"x": math.nan}}, "a whole rule"),
        ({"provenance": []}, "a whole rule"),
    ],
)
def test_a_torn_file_is_refused(tmp_path, change, message) -> None:
    path = tmp_path / "rule.json"
    fitted().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        LearnedRule.load(path)


def test_what_is_no_file_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="expected a file"):
        LearnedRule.load(tmp_path / "none.json")
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        LearnedRule.load(tmp_path / "text")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ConfigError, match="of schema 1"):
        LearnedRule.load(tmp_path / "list")
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="expected JSON"):
        LearnedRule.load(tmp_path / "deep")
    with pytest.raises(ConfigError, match=r"gate\.model: expected a file, got .*: Is a directory"):
        LearnedRule.load(tmp_path)


def test_thresholds_of_trees_are_numbers(tmp_path) -> None:
    data = fitted().as_data()
    data["group_model"]["thresholds"][0][0] = math.nan
    path = tmp_path / "rule.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="trees as they were saved"):
        LearnedRule.load(path)


def test_an_error_names_the_key_of_the_file_that_it_is_about(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"^gate\.futility\.model: expected a file"):
        LearnedRule.load(tmp_path / "none.json", key="gate.futility.model")
    with pytest.raises(ConfigError, match=r"^gate\.futility\.model: expected groups as those it was fitted on, with horizon"):
        LearnedFutility(fitted(), floor=0.8, horizon=HORIZON + 1)
    with pytest.raises(ConfigError, match=r"^gate\.futility\.floor: expected more than 0"):
        LearnedFutility(fitted(), floor=0.9999)
    with pytest.raises(ConfigError, match=r"^gate\.futility\.floor: expected a number"):
        LearnedFutility(fitted(), floor=2)


def test_groups_that_cannot_teach_it_are_refused() -> None:
    groups = [played(seed) for seed in range(100)]
    fit = {"horizon": HORIZON, "inputs": INPUTS}
    with pytest.raises(GateError, match="at least 20 with equal rewards"):
        fit_learned(groups[:20], **fit)
    with pytest.raises(GateError, match="groups of one size"):
        fit_learned([*groups, played(3, size=3)], **fit)
    with pytest.raises(GateError, match="at most 5 steps"):
        fit_learned(groups, horizon=5, inputs=INPUTS)
    with pytest.raises(ConfigError, match="steps: expected environment steps from 1"):
        fit_learned(groups, steps=[HORIZON], **fit)
    with pytest.raises(ConfigError, match="folds: expected a whole number >= 2"):
        fit_learned(groups, folds=1, **fit)
    with pytest.raises(GateError, match="at least two members"):
        replace(groups[0], members=groups[0].members[:1])


def test_groups_that_it_was_not_fitted_for_are_refused() -> None:
    rule = fitted()
    with pytest.raises(ConfigError, match="group_size 4, got 8"):
        rule.check(8, HORIZON)
    with pytest.raises(ConfigError, match=f"horizon {HORIZON}, got 30"):
        LearnedFutility(rule, floor=0.9, horizon=30)
    with pytest.raises(ConfigError, match="the highest lower bound of this rule, got 0.99999"):
        LearnedFutility(rule, floor=0.99999)


def test_a_member_that_is_stopped_has_what_it_had_earned() -> None:
    member = replace(played(3).members[0], earned=tuple(float(t) for t in range(1, HORIZON + 1)), reward=12.0)
    assert (member.until(3).reward, len(member.until(3).steps)) == (3.0, 3)
    assert member.until(0) == member.until(len(member.steps)) == member


def test_a_hand_written_rule_stops_recorded_groups_too() -> None:
    group = next(group for group in UNSEEN if any(len(member.steps) == HORIZON for member in group.members))
    stopped = with_futility(group, FutilityRule(steps=2))
    assert stopped.env_steps < group.env_steps
    for before, after in zip(group.members, stopped.members, strict=True):
        seen = ["room 0", *(step.reply for step in after.steps[:-1])]
        if len(after.steps) < len(before.steps):
            assert after.steps[-1].reply in seen
            assert after.steps[-2].reply in seen[:-1]
