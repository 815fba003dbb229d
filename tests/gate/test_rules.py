"""Rules: what they cut, and how they are built from a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, GateError
from sluice.gate import SIGNALS, ByTaskType, Gate, OrTermination, Rule, SingleAxis, build_rule
from sluice.gate.rules import margin_of

SHARES = st.floats(0, 1)


def measured(**values: float) -> dict[str, float]:
    return {**dict.fromkeys(SIGNALS, 0.5), "termination_fraction": 0.0, **values}


@dataclass(frozen=True, kw_only=True)
class TwoAxes(Rule):
    """Of a user: both signals must be low."""

    most: float = 0.2

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"prefix_edit_distance_mean", "action_entropy"})

    def margin(self, signals, task_type) -> float:
        return max(signals[name] for name in self.reads) / self.most


class Answers(Rule):
    """Of a user, with any answer."""

    reads = frozenset()

    def __init__(self, answer: object = 0.5) -> None:
        self.answer = answer

    def margin(self, signals, task_type):
        return self.answer


@given(SHARES, SHARES)
def test_a_single_axis_cuts_strictly_below_its_threshold(value: float, threshold: float) -> None:
    rule = SingleAxis(threshold=threshold)
    assert (margin_of(rule, measured(prefix_edit_distance_mean=value), None) < 1) == (value < threshold)


def test_neighbouring_floats_are_told_apart() -> None:
    """Case 140: `<`, not `<=`, and nothing is lost by the division."""
    for threshold in (0.12, 0.125, 0.1, 1 / 3, 1.0, 5e-324, 0.9999999999999999):
        rule = SingleAxis(threshold=threshold)
        assert rule.margin(measured(prefix_edit_distance_mean=threshold)) == 1.0
        assert rule.margin(measured(prefix_edit_distance_mean=math.nextafter(threshold, 0))) < 1.0


def test_a_threshold_of_0_never_cuts() -> None:
    assert SingleAxis(threshold=0).margin(measured(prefix_edit_distance_mean=0.0)) == math.inf


@given(SHARES, SHARES)
def test_or_termination_cuts_what_the_axis_cuts_and_what_has_ended(value: float, ended: float) -> None:
    rule = OrTermination(threshold=0.3)
    margin = margin_of(rule, measured(prefix_edit_distance_mean=value, termination_fraction=ended), None)
    assert (margin < 1) == (value < 0.3 or ended >= 0.9)


def test_every_task_type_has_its_rule() -> None:
    low = measured(prefix_edit_distance_mean=0.2)
    rule = ByTaskType(rules={"look": SingleAxis(threshold=0.3), "put": SingleAxis(threshold=0.1)}, default=SingleAxis(threshold=0.25))
    assert [margin_of(rule, low, kind) < 1 for kind in ("look", "put", "else", None)] == [True, False, True, True]
    alone = ByTaskType(rules={"look": SingleAxis(threshold=0.3)})
    assert [margin_of(alone, low, kind) < 1 for kind in ("look", "put", None)] == [True, False, False]
    assert alone.limits("look") == {"threshold": 0.3}
    assert not alone.limits("put")
    assert ByTaskType(rules={"a": OrTermination()}, default=TwoAxes()).reads == {
        "prefix_edit_distance_mean",
        "termination_fraction",
        "action_entropy",
    }


def test_rules_are_built_from_a_configuration() -> None:
    assert build_rule({"type": "single_axis"}) == SingleAxis(signal="prefix_edit_distance_mean", threshold=0.12)
    assert build_rule(0.3) == build_rule({"type": "single_axis", "threshold": 0.3})
    assert build_rule({"type": "single_axis", "signal": "action_entropy", "threshold": 1}) == SingleAxis(
        signal="action_entropy", threshold=1
    )
    assert build_rule({"type": "or_termination", "threshold": 0.2}) == OrTermination(threshold=0.2, termination_threshold=0.9)
    config = {"type": "by_task_type", "rules": {"look": 0.1, "put": {"type": "or_termination"}}, "default": 0.2}
    assert build_rule(config) == ByTaskType(
        rules={"look": SingleAxis(threshold=0.1), "put": OrTermination()}, default=SingleAxis(threshold=0.2)
    )
    assert build_rule({"type": f"{__name__}.TwoAxes", "most": 0.4}) == TwoAxes(most=0.4)
    own = TwoAxes()
    assert build_rule(own) is own


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "single_axes"}, "gate.rule.type: expected one of .*did you mean 'single_axis'"),
        ({}, "gate.rule.type: expected the name of a rule, got None"),
        ([], r"gate.rule: expected a mapping with the key type, got \[\]"),
        (SingleAxis, "gate.rule: expected a mapping"),
        ({"type": "single_axis", "treshold": 0.1}, "gate.rule.treshold: .*did you mean 'threshold'"),
        ({"type": "single_axis", "threshold": 1.5}, "gate.rule.threshold: expected a number >= 0 and <= 1, got 1.5"),
        ({"type": "single_axis", "threshold": -0.1}, "gate.rule.threshold: .* got -0.1"),
        ({"type": "single_axis", "threshold": math.nan}, "gate.rule.threshold: .* got nan"),
        ({"type": "single_axis", "threshold": "0.1"}, "gate.rule.threshold: .* got '0.1'"),
        ({"type": "single_axis", "threshold": True}, "gate.rule.threshold: .* got True"),
        ({"type": "single_axis", "signal": "edit_distance"}, "gate.rule.signal: expected one of prefix_edit_distance_mean"),
        ({"type": "or_termination", "termination_threshold": 2}, "gate.rule.termination_threshold: .* got 2"),
        ({"type": "by_task_type"}, "gate.rule.rules: by_task_type needs it"),
        ({"type": "by_task_type", "rules": {}}, "gate.rule.rules: expected a rule for at least one task type"),
        ({"type": "by_task_type", "rules": 3}, "gate.rule.rules: expected a mapping from task type"),
        ({"type": "by_task_type", "rules": {"look": 7}}, "gate.rule.rules.look.threshold: .* got 7"),
        ({"type": "by_task_type", "rules": {"look": 0.1}, "default": {"type": "x"}}, "gate.rule.default.type: expected one of"),
        ({"type": "no_such_package.Rule"}, "importing 'no_such_package' raised ModuleNotFoundError"),
        ({"type": f"{__name__}.Nothing"}, "expected a class with reads and margin, got nothing of that name"),
        ({"type": "math.sqrt"}, "expected a class with reads and margin, got <built-in function sqrt>"),
        ({"type": f"{__name__}.TwoAxes", "least": 1}, "building .*TwoAxes with .* raised TypeError"),
    ],
    ids=str,
)
def test_a_bad_rule_fails_with_the_path_of_its_key(config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rule(config)


def test_a_rule_that_lacks_its_signal_says_so() -> None:
    rule = SingleAxis(signal="obs_unique_ratio")
    with pytest.raises(GateError, match="the rule reads obs_unique_ratio, .* give observations"):
        Gate(k=1, rule=rule).decide(["a", "a"])
    with pytest.raises(GateError, match="the rule reads action_entropy"):
        margin_of(TwoAxes(), {"prefix_edit_distance_mean": 0.1}, None)


@pytest.mark.parametrize("answer", [math.nan, -1, None, "0.5", True], ids=repr)
def test_a_rule_that_answers_no_margin_is_named(answer) -> None:
    with pytest.raises(GateError, match="expected a margin >= 0 of the rule"):
        margin_of(Answers(answer), {}, None)


class Untyped:
    """Of a user who does not subclass: all three members are there."""

    reads = frozenset({"action_entropy"})

    def margin(self, signals, task_type):
        return 0.5

    def limits(self, task_type):
        return {}


class NoLimits:
    reads = frozenset()
    margin = Untyped.margin


class ReadsText(Untyped):
    reads = "action_entropy"


class ReadsList(Untyped):
    reads = ["action_entropy"]  # noqa: RUF012


class ReadsMethod(Untyped):
    def reads(self):
        return frozenset()


class ReadsRaises(Untyped):
    @property
    def reads(self):
        raise KeyError("not there")


class ReadsUnknown(Untyped):
    reads = frozenset({"edit_distance"})


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (NoLimits, "expected an object with reads, margin and limits"),
        (ReadsText, "reads: expected a set of signals, got 'action_entropy'"),
        (ReadsList, r"reads: expected a set of signals, got \['action_entropy'\]"),
        (ReadsMethod, "reads: expected a set of signals, got <bound method .*@property"),
        (ReadsRaises, "reads: expected a set of signals, got KeyError: 'not there'"),
        (ReadsUnknown, "reads: expected some of prefix_edit_distance_mean, .* got edit_distance"),
    ],
)
def test_a_rule_of_a_user_that_cannot_decide_is_refused_before_it_is_asked(cls, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gate(k=1, rule=cls())
    for config in (cls(), {"type": f"{__name__}.{cls.__name__}"}, {"type": "by_task_type", "rules": {"look": cls()}}):
        with pytest.raises(ConfigError, match=message):
            build_rule(config)
    with pytest.raises(ConfigError, match=f"rules.look.*{message}"):
        ByTaskType(rules={"look": cls()})
    assert Gate(k=1, rule=Untyped()).decide(["a", "a"]).evidence["margin"] == 0.5


class Breaks(Untyped):
    reads = frozenset()

    def margin(self, signals, task_type):
        return signals["no such signal"]


class LimitsBreak(Untyped):
    reads = frozenset()

    def __init__(self, limits) -> None:
        self.own = limits

    def limits(self, task_type):
        return self.own


class Forgets(Untyped):
    reads = frozenset()

    def margin(self, signals, task_type):
        signals.clear()
        return 0.5


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Breaks(), "the rule .*Breaks.* raised KeyError: 'no such signal'"),
        (Forgets(), "the rule .*Forgets.* raised AttributeError"),
        (LimitsBreak(None), "limits: expected a mapping from name to number, got None"),
        (LimitsBreak({"most": "x"}), "limits: expected a mapping from name to number, got {'most': 'x'}"),
    ],
)
def test_a_rule_of_a_user_that_breaks_is_named(rule, message: str) -> None:
    with pytest.raises(GateError, match=message):
        Gate(k=1, rule=rule).decide(["a", "a"])


@pytest.mark.parametrize("rules", [None, 3, ["look"], {}], ids=repr)
def test_rules_by_task_type_are_a_mapping(rules) -> None:
    with pytest.raises(ConfigError, match="rules: expected a (mapping|rule)"):
        ByTaskType(rules=rules)
