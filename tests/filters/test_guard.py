from __future__ import annotations

import copy
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.models import GuardConfig
from sluice.errors import ConfigError, FilterError
from sluice.filters import RatioGuard, build_guard
from sluice.types import Verdict

KEEP = Verdict.kept("std_filter")
LOW = Verdict.dropped("no_spread", "low_information", "std_filter", {"std": 0.0})
BAD = Verdict.dropped("incomplete", "invalid", "std_filter")
CATEGORIES = ("invalid", "low_information")

shares = st.fractions(0, 1, max_denominator=12)
limits = st.one_of(shares, st.dictionaries(st.sampled_from(CATEGORIES), shares, min_size=1))
scopes = st.one_of(st.just(("cumulative", 100)), st.integers(1, 9).map(lambda width: ("window", width)))


def as_written(limit):
    """Limits as a configuration has them: floats."""
    return {category: float(share) for category, share in limit.items()} if isinstance(limit, dict) else float(limit)


class Slow:
    """The rule as it is written down, on the list of all judged groups."""

    def __init__(self, limit, scope, window):
        self.limit, self.scope, self.window = limit, scope, window
        self.groups = []  # of each judged group, the categories of the drops that stand with it

    def in_scope(self):
        return self.groups[-self.window :] if self.scope == "window" else self.groups

    def dropped(self, category):
        names = [category] if isinstance(self.limit, dict) else CATEGORIES
        return sum(group.count(name) for group in self.in_scope() for name in names)

    def may_drop(self, category):
        if isinstance(self.limit, dict) and category not in self.limit:
            return True
        limit = self.limit[category] if isinstance(self.limit, dict) else self.limit
        filtered, total = self.dropped(category), len(self.in_scope())
        return limit == 1 or (Fraction(filtered, total) < limit and Fraction(filtered + 1, total) <= limit)

    def drop(self, ticket, category):
        self.groups[ticket if self.scope == "cumulative" or ticket >= len(self.groups) - self.window else -1].append(category)


@given(limits, scopes, st.lists(st.sampled_from([KEEP, LOW, BAD]), max_size=40))
def test_a_drop_is_allowed_exactly_as_the_rule_on_all_judged_groups_says(limit, where, verdicts):
    guard, slow = RatioGuard(as_written(limit), *where), Slow(limit, *where)
    kept = 0
    for verdict in verdicts:
        slow.groups.append([])
        answer = guard.admit(verdict)
        if verdict.keep:
            assert answer is verdict
        elif slow.may_drop(verdict.category):
            assert answer is verdict
            slow.drop(len(slow.groups) - 1, verdict.category)
        else:
            kept += 1
            assert (answer.keep, answer.source, answer.reason) == (True, "ratio_guard", "kept_by_guard")
            bound = limit[verdict.category] if isinstance(limit, dict) else limit
            assert answer.evidence == {
                "total": len(slow.in_scope()),
                "filtered": slow.dropped(verdict.category),
                "limit": pytest.approx(float(bound)),
            }
    assert guard.total == len(slow.in_scope())
    assert guard.filtered == {category: sum(group.count(category) for group in slow.in_scope()) for category in CATEGORIES}
    assert guard.kept_by_guard == kept


@given(limits, scopes, st.lists(st.tuples(st.sampled_from(["count", "late", *CATEGORIES]), st.integers(0, 9)), max_size=60))
def test_groups_that_are_decided_on_later_are_bounded_by_the_same_rule(limit, where, told):
    guard, slow = RatioGuard(as_written(limit), *where), Slow(limit, *where)
    waiting = []
    for what, pick in told:
        if what == "count":
            waiting.append(guard.count())
            slow.groups.append([])
        elif what == "late":
            for category in CATEGORIES if slow.groups else ():
                before = guard.state_dict()
                assert guard.may_drop(category) == slow.may_drop(category)
                assert guard.state_dict() == before
        elif waiting and guard.may_drop(what):
            ticket = waiting.pop(pick % len(waiting))
            guard.filter_counted(ticket, what)
            slow.drop(ticket, what)
        assert guard.filtered == {category: sum(group.count(category) for group in slow.in_scope()) for category in CATEGORIES}
        if not isinstance(limit, dict) and limit < 1:
            assert sum(guard.filtered.values()) <= limit * guard.total


@given(limits, scopes, st.lists(st.sampled_from([KEEP, LOW, BAD]), max_size=30), st.integers(0, 30))
def test_a_guard_that_goes_on_from_a_state_decides_as_the_one_that_never_stopped(limit, where, verdicts, stop):
    first = RatioGuard(as_written(limit), *where)
    for verdict in verdicts[:stop]:
        first.admit(verdict)
    state = first.state_dict()
    second = RatioGuard(as_written(limit), *where)
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state == first.state_dict()
    assert [first.admit(verdict) for verdict in verdicts[stop:]] == [second.admit(verdict) for verdict in verdicts[stop:]]
    assert first.metrics() == second.metrics()


def kept_of(guard, verdicts):
    return [guard.admit(verdict).keep for verdict in verdicts]


def test_the_very_first_group_is_kept_and_the_second_may_be_dropped():
    assert kept_of(RatioGuard(), [LOW, LOW, LOW, LOW]) == [True, False, True, False]
    assert kept_of(RatioGuard(), [KEEP, LOW, BAD, BAD]) == [True, False, True, False]


def test_limits_mean_the_fraction_that_they_were_written_for():
    for limit, drops in (
        (0.1, [10, 20]),
        (0.3, [4, 7, 10]),
        (1 / 3, [3, 6, 9]),
        (Fraction(1, 3), [3, 6, 9]),
        (0.7, [2, 3, 5, 6, 8, 9, 10]),
    ):
        guard = RatioGuard(limit)
        assert [number for number in range(1, drops[-1] + 1) if not guard.admit(LOW).keep] == drops
    assert kept_of(RatioGuard(0.3333), [LOW] * 3) == [True] * 3  # 1 of 3 is more than that
    assert kept_of(RatioGuard(0.12345678901), [LOW] * 9) == [True] * 8 + [False]  # no simple fraction


def test_a_limit_of_0_keeps_everything_and_a_limit_of_1_nothing():
    assert kept_of(RatioGuard(0), [LOW, BAD, KEEP]) == [True] * 3
    assert kept_of(RatioGuard(1.0), [LOW, BAD, KEEP]) == [False, False, True]


def test_each_category_counts_its_own_against_all_and_one_left_out_is_unguarded():
    guard = RatioGuard({"low_information": 0.25})
    assert kept_of(guard, [BAD, BAD, BAD, LOW, LOW, BAD, BAD, LOW]) == [False, False, False, False, True, False, False, False]
    assert guard.filtered == {"invalid": 5, "low_information": 2}
    assert guard.metrics() == {
        "guard/filter_ratio": 7 / 8,
        "guard/filter_ratio/invalid": 5 / 8,
        "guard/filter_ratio/low_information": 2 / 8,
        "guard/kept_by_guard": 1,
        "guard/total": 8,
    }


def test_a_window_forgets_what_lies_before_it():
    guard = RatioGuard(0.5, scope="window", window=2)
    assert kept_of(guard, [KEEP, LOW, LOW, LOW, KEEP, LOW]) == [True, False, True, False, True, False]
    assert (guard.total, guard.filtered, guard.kept_by_guard) == (2, {"invalid": 0, "low_information": 1}, 1)
    cumulative = RatioGuard(0.5)
    assert kept_of(cumulative, [KEEP] * 10 + [LOW] * 3) == [True] * 10 + [False] * 3  # a good past buys a bad present
    assert kept_of(RatioGuard(0.5, "window", 2), [KEEP] * 10 + [LOW] * 3) == [True] * 10 + [False, True, False]


def test_the_memory_of_a_window_is_bounded():
    guard = RatioGuard(0.5, "window", 8)
    for _ in range(1000):
        guard.admit(LOW)
    assert len(guard.state_dict()["drops"]) == 4


def test_a_late_drop_counts_where_its_group_was_judged_or_else_with_the_newest():
    guard = RatioGuard(0.5, "window", 4)
    tickets = [guard.count() for _ in range(6)]
    guard.filter_counted(tickets[3], "invalid")
    guard.filter_counted(tickets[0], "low_information")  # its group has left the window
    assert guard.state_dict()["drops"] == [[3, "invalid"], [5, "low_information"]]
    assert not guard.may_drop("invalid")
    with pytest.raises(FilterError, match=r"guard: expected a ticket below 6, got 6"):
        guard.filter_counted(6, "invalid")


def test_an_empty_guard_has_metrics_and_allows_nothing():
    assert RatioGuard().metrics() == {"guard/filter_ratio": 0.0, "guard/kept_by_guard": 0, "guard/total": 0}
    assert not RatioGuard().may_drop("invalid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_filter_ratio": 1.5}, r"guard\.max_filter_ratio: expected a number >= 0 and <= 1, got 1\.5"),
        ({"max_filter_ratio": float("nan")}, r"guard\.max_filter_ratio: expected a number .* got nan"),
        ({"max_filter_ratio": True}, r"guard\.max_filter_ratio: expected a number .* got True"),
        ({"max_filter_ratio": "0.5"}, r"guard\.max_filter_ratio: expected a number .* got '0\.5'"),
        ({"max_filter_ratio": {}}, r"guard\.max_filter_ratio: expected at least one category"),
        ({"max_filter_ratio": {"invalide": 1}}, r"guard\.max_filter_ratio\.invalide: .* - did you mean 'invalid'\?"),
        ({"max_filter_ratio": {"invalid": -1}}, r"guard\.max_filter_ratio\.invalid: expected a number >= 0"),
        ({"scope": "windows"}, r"guard\.scope: expected one of cumulative, window, got 'windows' - did you mean 'window'\?"),
        ({"window": 0}, r"guard\.window: expected a whole number >= 1, got 0"),
        ({"window": 2.0}, r"guard\.window: expected a whole number >= 1, got 2\.0"),
        ({"policy": "rais"}, r"guard\.policy: expected one of keep, wait, shrink, raise, got 'rais' - did you mean 'raise'\?"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_expected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RatioGuard(**arguments)


def test_only_verdicts_are_admitted():
    guard = RatioGuard()
    with pytest.raises(FilterError, match=r"expected a Verdict, got True \(bool\)"):
        guard.admit(True)
    with pytest.raises(FilterError, match="expected a category out of .* got 'boring'"):
        guard.admit(Verdict.dropped("x", "boring"))
    assert guard.total == 0


def test_a_guard_is_built_from_its_section():
    assert build_guard(None) is None
    section = {"max_filter_ratio": {"invalid": 0.1}, "scope": "window", "window": 7, "policy": "wait"}
    for config in (section, GuardConfig.model_validate(section)):
        guard = build_guard(config)
        assert (guard.scope, guard.window, guard.policy) == ("window", 7, "wait")
        assert guard.evidence("invalid")["limit"] == 0.1
        assert guard.evidence("low_information")["limit"] == 1
    plain = build_guard({})
    assert (plain.scope, plain.policy, plain.evidence("invalid")["limit"]) == ("cumulative", "keep", 0.5)
    for bad, message in (
        ({"max_filter_ratios": 0.5}, "guard: max_filter_ratios: unknown key - did you mean max_filter_ratio"),
        ({"max_filter_ratio": 2}, "guard: max_filter_ratio: expected a number >= 0 and <= 1, or a mapping"),
        (3, "guard: expected a section with the keys max_filter_ratio, scope, window, policy, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_guard(bad)


def broken_states():
    for scope in ("cumulative", "window"):
        guard = RatioGuard(0.5, scope, 4)
        for _ in range(6):
            guard.admit(LOW)
        state = guard.state_dict()
        for name in state:
            yield scope, {key: value for key, value in state.items() if key != name}
            for wrong in (None, -1, True, "x", 2.5, [], {}, {"invalid": 1}, [[9, "invalid"]], [[5, "boring"]], [[5]], [[True, "invalid"]]):
                if wrong != state[name] and not (scope == "cumulative" and (name, wrong) in (("window", None), ("drops", []))):
                    yield scope, {**state, name: wrong}
        yield scope, {**state, "judged": 2}
        yield scope, {**state, "filtered": {"invalid": 9, "low_information": 9}}
        yield scope, {**state, "more": 1}
        yield scope, [state]
    yield "window", {**RatioGuard(0.5, "window", 5).state_dict()}
    yield "window", {**RatioGuard(0.5).state_dict()}
    yield "cumulative", {**RatioGuard(0.5, "window", 4).state_dict()}
    yield "cumulative", {"batch": 3, "running": []}


def test_a_torn_or_foreign_state_is_refused_and_changes_nothing():
    for scope, state in broken_states():
        guard = RatioGuard(0.5, scope, 4)
        guard.admit(LOW)
        before = copy.deepcopy(guard.state_dict())
        with pytest.raises(FilterError, match="^guard: the state is torn, or of another guard: expected"):
            guard.load_state_dict(state)
        assert guard.state_dict() == before
