"""Filters on groups of trajectories: what befell the members, the guard of `drop_flag`, compositions, and what no group filter keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import EnvManagerConfig, FilterConfig
from sluice.errors import ConfigError, FilterError
from sluice.filters import DomainFilters, QueryFilter, build_group_filter, build_query_filter, filters_state, load_filters_state
from sluice.filters.build import GROUP_FILTERS
from sluice.types import Failure, Group, Rollout
from tests.fakes import make_group, make_rollout, make_turn
from tests.filters.filters_for_tests import HERE

MISSING = {"type": "missing_member"}
TIMEOUT = {"type": "env_timeout"}
FAILED = {"type": "env_failed"}
FLAG = {"type": "drop_flag"}
STD = {"type": "std_filter"}
NO = {"type": "no_filter"}
WHERE = "train_env_manager.group_filter_config"


def free_flag() -> dict[str, Any]:
    return {"type": "drop_flag", "filter_args": {"max_filter_ratio": None}}


def survivors(least: int) -> dict[str, Any]:
    return {"type": "min_survivors", "filter_args": {"least": least}}


def composed(kind: str, *inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "filter_args": {"filter": inner[0]} if kind == "not" else {"filters": list(inner)}}


def build(
    config: dict[str, Any] | None = None, *, group_size: int = 4, mode: Any = "train", min_members: int | None = None, **manager: Any
) -> QueryFilter:
    chosen = None if config is None else FilterConfig.model_validate(config)
    settings = EnvManagerConfig(group_size=group_size, group_filter_config=chosen, **manager)
    return build_group_filter(
        settings, mode=mode, where="train_env_manager" if mode == "train" else "val_env_manager", min_members=min_members
    )


# What may befall a member: (rollout, whether it enters statistics as the machine counts it); None: it was lost.
Fate = str
FATES = (
    "right",
    "wrong",
    "flag_timeout",
    "flag_failed",
    "drop_flag",
    "hung",
    "out_of_time",
    "failed",
    "died",
    "closed",
    "provoked",
    "unscored",
    "truncated",
    "never_began",
    "lost",
)
REASONS = {"hung": "env_timeout", "out_of_time": "trajectory_timeout", "failed": "env_failed", "died": "env_died", "closed": "env_closed"}


def member(index: int, fate: Fate) -> Rollout:
    reward = {"right": 1.0, "drop_flag": 1.0, "flag_timeout": 1.0, "truncated": 1.0}.get(fate, 0.0)
    rollout = replace(make_rollout(reward=reward, member_index=index, attempt_id=index), turns=(make_turn(), make_turn()))
    if fate in REASONS:
        failure = Failure(cause="infrastructure", reason=REASONS[fate])
        flag = "env_timeout" if fate in ("hung", "out_of_time") else "env_failed"
        return replace(rollout, reward=None, failure=failure, flags=frozenset([flag]))
    if fate == "provoked":  # the policy is to blame: its low reward is real
        return replace(rollout, failure=Failure(cause="policy", reason="env_timeout"))
    if fate in ("unscored", "never_began"):
        rollout = replace(rollout, reward=None, failure=Failure(cause="infrastructure", reason="reward_missing"))
        return replace(rollout, turns=()) if fate == "never_began" else rollout
    flags = {"flag_timeout": "env_timeout", "flag_failed": "env_failed", "drop_flag": "drop_flag"}
    return replace(rollout, flags=frozenset([flags[fate]] if fate in flags else []))


def group_of(fates: Iterable[Fate], group_id: int = 0) -> Group:
    """As the machine makes it: what was lost is not in it, and what is truncated and masked does not count."""
    there = [(index, fate) for index, fate in enumerate(fates) if fate != "lost"]
    rollouts = tuple(replace(member(index, fate), group_id=group_id) for index, fate in there)
    return replace(make_group([0.0]), group_id=group_id, rollouts=rollouts, counted=tuple(fate != "truncated" for _, fate in there))


fates = st.lists(st.sampled_from(FATES), min_size=4, max_size=4).filter(lambda fates: set(fates) != {"lost"})
many_groups = st.lists(fates, max_size=12)

BROKEN = {
    "missing_member": {"lost", "never_began"},
    "env_timeout": {"flag_timeout", "hung", "out_of_time"},
    "env_failed": {"flag_failed", "failed", "died", "closed"},
    "drop_flag": {"drop_flag"},
}
UNSCORED = {*REASONS, "unscored", "never_began"}


def fault_of(fates: Iterable[Fate]) -> str:
    """Why such a group could not train, if it could not."""
    counted = [fate for fate in fates if fate not in ("lost", "truncated")]
    if not counted:
        return "truncated"
    return "incomplete" if UNSCORED & set(counted) else ""


def trees(leaves: list[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.recursive(
        st.sampled_from(leaves),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: composed("all", *parts)),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: composed("any", *parts)),
            inner.map(lambda part: composed("not", part)),
        ),
        max_leaves=6,
    )


KEEP_ALL = {"type": f"{HERE}.keep_all"}
LEAVES = [MISSING, TIMEOUT, FAILED, FLAG, free_flag(), survivors(1), survivors(3), STD, NO]


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name", sorted(BROKEN))
@given(fates=fates)
def test_a_filter_on_members_drops_exactly_the_groups_with_such_a_member(name: str, fates: list[Fate]) -> None:
    config = free_flag() if name == "drop_flag" else {"type": name}
    verdict = build(config).judge(group_of(fates))
    if BROKEN[name] & set(fates):
        assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (False, name, "invalid", name)
    elif fault_of(fates):
        assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (False, fault_of(fates), "invalid", "whole_group")
    else:
        assert (verdict.keep, verdict.reason, verdict.category, verdict.source) == (True, "kept", None, name)


@given(config=trees([*LEAVES, KEEP_ALL]), fates=fates, order=st.permutations(range(4)))
def test_the_order_of_the_members_never_matters(config: dict[str, Any], fates: list[Fate], order: list[int]) -> None:
    group = group_of(fates)
    places = [place for place in order if place < len(group.rollouts)]
    turned = replace(
        group, rollouts=tuple(group.rollouts[place] for place in places), counted=tuple(group.counted[place] for place in places)
    )
    assert build(config).judge(turned) == build(config).judge(group)


@given(config=trees([*LEAVES, KEEP_ALL]), fates=fates)
def test_every_verdict_has_a_reason_and_a_drop_has_a_category(config: dict[str, Any], fates: list[Fate]) -> None:
    verdict = build(config).judge(group_of(fates))
    assert verdict.reason
    assert verdict.source
    assert (verdict.category in ("invalid", "low_information")) is not verdict.keep
    assert all(math.isfinite(number) for number in verdict.evidence.values() if verdict.keep)


@given(config=trees([*LEAVES, KEEP_ALL]), fates=fates, min_members=st.sampled_from([None, 2]))
def test_whatever_a_composition_or_user_code_says_no_group_is_kept_that_could_not_train(
    config: dict[str, Any], fates: list[Fate], min_members: int | None
) -> None:
    group = group_of(fates)
    verdict = build(config, min_members=min_members).judge(group)
    if verdict.keep:
        counted = [rollout for rollout, is_counted in zip(group.rollouts, group.counted, strict=True) if is_counted]
        scored = [rollout for rollout in counted if rollout.reward is not None]
        assert scored
        assert len(scored) == len(counted) or (min_members is not None and len(scored) >= min_members)


@given(config=trees([*LEAVES, KEEP_ALL]), fates=fates)
def test_what_one_member_decides_is_what_the_whole_group_gets(config: dict[str, Any], fates: list[Fate]) -> None:
    query, group = build(config), group_of(fates)
    early = [verdict for rollout in group.rollouts if (verdict := query.disqualifies(rollout)) is not None]
    if early and not query.is_opaque:
        assert query.can_disqualify
        assert not query.judge(group).keep
    for verdict in early:
        assert (verdict.keep, verdict.category) == (False, "invalid")
        assert verdict.reason in BROKEN


@given(config=trees([*LEAVES, KEEP_ALL]))
def test_a_composition_is_opaque_exactly_when_user_code_or_a_guard_has_a_say_in_it(config: dict[str, Any]) -> None:
    guarded = "'drop_flag'}" in str(config)  # without arguments: its guard is on
    assert build(config).is_opaque == (guarded or HERE in str(config))


@given(config=trees(LEAVES), groups=many_groups)
def test_in_an_evaluation_a_verdict_depends_on_the_group_alone(config: dict[str, Any], groups: list[list[Fate]]) -> None:
    """Case 138: an evaluation has no guard, so that neither the order of its groups nor those of an earlier one matter."""
    query = build(config, mode="val")
    verdicts = [query.judge(group_of(fates)) for fates in groups]
    assert verdicts == [build(config, mode="val").judge(group_of(fates)) for fates in groups]
    assert list(reversed([query.judge(group_of(fates)) for fates in reversed(groups)])) == verdicts
    assert filters_state({"validation": DomainFilters(query=query, response=None)}) == {}


# ---------------------------------------------------------------- the guard of drop_flag


def reference(candidates: Iterable[bool], limit: Fraction) -> list[str]:
    """The rule of the guard, word for word, in exact numbers."""
    filtered, outcomes = 0, []
    for total, is_candidate in enumerate(candidates, start=1):
        if not is_candidate:
            outcomes.append("kept")
        elif Fraction(filtered, total) < limit and Fraction(filtered + 1, total) <= limit:
            filtered += 1
            outcomes.append("drop_flag")
        else:
            outcomes.append("kept_by_guard")
    return outcomes


def flagged(limit: float | None = 0.5) -> dict[str, Any]:
    return {"type": "drop_flag", "filter_args": {"max_filter_ratio": limit}}


def candidate(is_candidate: bool) -> Group:
    return group_of(["drop_flag" if is_candidate else "right", "wrong", "right", "wrong"])


limits = st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10), Fraction(1)])


@given(candidates=st.lists(st.booleans(), max_size=60), limit=limits)
def test_the_guard_counts_as_the_rule_says(candidates: list[bool], limit: Fraction) -> None:
    query = build(flagged(float(limit)))
    verdicts = [query.judge(candidate(is_candidate)) for is_candidate in candidates]
    assert [verdict.reason for verdict in verdicts] == reference(candidates, limit)
    dropped = sum(not verdict.keep for verdict in verdicts)
    assert dropped <= limit * len(candidates)


@given(candidates=st.lists(st.booleans(), max_size=40), until=st.integers(0, 40), limit=limits)
def test_the_counts_of_the_guard_survive_a_resume(candidates: list[bool], until: int, limit: Fraction) -> None:
    def filters() -> dict[str, DomainFilters]:
        return {"household": DomainFilters(query=build(composed("all", TIMEOUT, flagged(float(limit)), STD)), response=None)}

    first, second = filters(), filters()
    for is_candidate in candidates[:until]:
        first["household"].query.judge(candidate(is_candidate))
    state = json.loads(json.dumps(filters_state(first)))
    assert list(state) == [f"{WHERE}.filter_args.filters[1]"]
    load_filters_state(second, state)
    assert filters_state(second) == state
    rest = [second["household"].query.judge(candidate(is_candidate)).reason for is_candidate in candidates[until:]]
    assert rest == reference(candidates, limit)[until:]


@given(groups=many_groups, limit=limits, place=st.integers(0, 3))
def test_the_guard_counts_every_group_once_wherever_it_stands(groups: list[list[Fate]], limit: Fraction, place: int) -> None:
    """Also a group that an earlier part drops (`all`) or keeps (`any`): the counts are those of a filter that stands alone."""
    alone, expected = build(flagged(float(limit))), []
    for fates in groups:
        alone.judge(group_of(fates))
        expected = filters_state({"a": DomainFilters(query=alone, response=None)})[WHERE]
    for kind in ("all", "any"):
        parts = [MISSING, TIMEOUT, composed("any", STD, FAILED)]
        parts.insert(place, composed("not", composed("all", KEEP_ALL, flagged(float(limit)))))
        query = build(composed(kind, *parts))
        for fates in groups:
            query.judge(group_of(fates))
        (state,) = filters_state({"a": DomainFilters(query=query, response=None)}).values()
        assert state == expected or not groups


def test_the_first_candidate_of_all_is_kept_and_the_second_may_be_dropped() -> None:
    query = build(FLAG)
    verdicts = [query.judge(candidate(True)) for _ in range(4)]
    assert [verdict.reason for verdict in verdicts] == ["kept_by_guard", "drop_flag", "kept_by_guard", "drop_flag"]
    first, second = verdicts[:2]
    assert (first.keep, first.source) == (True, "drop_flag")
    assert first.evidence == {"members": 1, "size": 4, "total": 1, "filtered": 0, "limit": 0.5}
    assert second.evidence == {"members": 1, "size": 4, "total": 2, "filtered": 0, "limit": 0.5}


def test_kept_groups_make_room_for_a_drop() -> None:
    query = build(FLAG)
    reasons = [query.judge(candidate(is_candidate)).reason for is_candidate in (False, True, True, False, True)]
    assert reasons == ["kept", "drop_flag", "kept_by_guard", "kept", "drop_flag"]


def test_all_says_that_a_guard_kept_a_group_and_still_asks_the_others() -> None:
    query = build(composed("all", FLAG, STD))
    kept = query.judge(candidate(True))
    assert (kept.keep, kept.reason, kept.source) == (True, "kept_by_guard", "drop_flag")
    boring = query.judge(group_of(["right", "right", "right", "drop_flag"]))
    assert boring.reason == "drop_flag"
    assert query.judge(group_of(["right", "right", "right", "drop_flag"])).reason == "no_spread"  # its guard would have kept it


def test_without_a_limit_every_flagged_group_goes_and_one_member_decides() -> None:
    query = build(free_flag())
    assert [query.judge(candidate(True)).reason for _ in range(3)] == ["drop_flag"] * 3
    assert (query.is_opaque, query.can_disqualify) == (False, True)
    assert query.disqualifies(member(2, "drop_flag")) == query.judge(candidate(True)).__class__.dropped(
        "drop_flag", "invalid", "drop_flag", {"member": 2}
    )
    guarded = build(FLAG)
    assert (guarded.is_opaque, guarded.can_disqualify) == (True, False)
    assert guarded.disqualifies(member(2, "drop_flag")) is None


def test_a_torn_state_of_the_guard_is_refused() -> None:
    filters = {"household": DomainFilters(query=build(FLAG), response=None)}
    with pytest.raises(FilterError, match=rf"^{WHERE}: drop_flag\.load_state_dict raised FilterError: guard: the state is torn"):
        load_filters_state(filters, {WHERE: {"judged": 3}})
    with pytest.raises(FilterError, match=rf"^{WHERE}: expected the state of drop_flag, got none"):
        load_filters_state(filters, {})


# ---------------------------------------------------------------- examples by hand


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("lost", "missing_member"),
        ("never_began", "missing_member"),
        ("hung", "env_timeout"),
        ("out_of_time", "env_timeout"),
        ("flag_timeout", "env_timeout"),
        ("failed", "env_failed"),
        ("died", "env_failed"),
        ("closed", "env_failed"),
        ("flag_failed", "env_failed"),
        ("unscored", "incomplete"),
        ("provoked", "kept"),
        ("truncated", "kept"),
    ],
)
def test_the_specific_filter_names_what_befell_the_group(fate: Fate, reason: str) -> None:
    chain = build(composed("all", MISSING, TIMEOUT, FAILED, STD))
    verdict = chain.judge(group_of(["right", "wrong", fate, "right"]))
    assert verdict.reason == reason
    assert verdict.category == (None if reason == "kept" else "invalid")
    late = build(composed("all", STD, TIMEOUT, FAILED)).judge(group_of(["right", "wrong", "hung", "right"]))
    assert late.reason == "incomplete"  # std_filter was asked first, and there is no reward to compare


def test_evidence_says_how_many_members_it_was() -> None:
    timeout = build(TIMEOUT).judge(group_of(["hung", "right", "flag_timeout", "wrong"]))
    assert timeout.evidence == {"members": 2, "size": 4}
    missing = build(MISSING).judge(group_of(["lost", "right", "never_began", "wrong"]))
    assert missing.evidence == {"members": 2, "size": 4}
    few = build(survivors(3)).judge(group_of(["right", "unscored", "truncated", "wrong"]))
    assert (few.reason, few.category, few.evidence) == ("min_survivors", "invalid", {"n": 2, "least": 3})


@pytest.mark.parametrize("mode", ["train", "val"])
def test_without_a_filter_every_whole_group_is_kept(mode: str) -> None:
    query = build(mode=mode)
    assert query.judge(group_of(["right"] * 4)).keep
    assert query.judge(group_of(["right", "right", "right", "hung"])).reason == "incomplete"
    assert not query.is_opaque
    assert not query.can_disqualify


def test_the_rule_on_spread_is_std_filter_and_no_second_name_for_it() -> None:
    assert build(STD).judge(group_of(["right"] * 4)).reason == "no_spread"
    assert sorted(GROUP_FILTERS) == [
        "drop_flag", "env_failed", "env_timeout", "mean_filter", "min_survivors", "missing_member", "no_filter", "std_filter",
    ]  # fmt: skip
    for name, cls in GROUP_FILTERS.items():
        assert cls.name == name
        assert cls.__doc__


def test_a_negated_filter_keeps_the_kind_of_its_drops() -> None:
    only_broken = build(composed("not", free_flag())).judge(candidate(False))
    assert (only_broken.reason, only_broken.category) == ("not_drop_flag", "invalid")
    only_equal = build(composed("not", STD)).judge(candidate(False))
    assert (only_equal.reason, only_equal.category) == ("not_std_filter", "low_information")


def test_what_user_code_drops_without_a_word_is_invalid_so_that_no_bound_trains_on_it() -> None:
    verdict = build({"type": f"{HERE}.drop_all"}).judge(candidate(False))
    assert (verdict.reason, verdict.category, verdict.source) == ("drop_all", "invalid", f"{HERE}.drop_all")


def test_user_code_sees_members_without_a_reward_and_cannot_keep_them() -> None:
    seen_first = build({"type": f"{HERE}.drop_all"}).judge(group_of(["hung", "right", "wrong", "right"]))
    assert seen_first.reason == "drop_all"
    kept = build(KEEP_ALL).judge(group_of(["hung", "right", "wrong", "right"]))
    assert (kept.reason, kept.source, kept.evidence) == ("incomplete", "whole_group", {"n": 3, "size": 4})
    assert build(KEEP_ALL, min_members=3).judge(group_of(["hung", "right", "wrong", "right"])).keep
    assert build(KEEP_ALL).judge(group_of(["truncated"] * 4)).reason == "truncated"


@pytest.mark.parametrize(("mode", "keep"), [("train", False), ("val", True)])
def test_a_function_or_class_that_names_a_mode_is_told_it(mode: str, keep: bool) -> None:
    assert build({"type": f"{HERE}.only_in_training"}, mode=mode).judge(candidate(False)).keep is keep
    with_mode = {"type": f"{HERE}.WithMode", "filter_args": {"least": 2.0}}
    assert build(with_mode, mode=mode).judge(candidate(False)).keep is keep
    own = {"type": f"{HERE}.WithMode", "filter_args": {"least": 2.0, "mode": "val"}}
    assert build(own, mode=mode).judge(candidate(False)).keep
    with pytest.raises(ConfigError, match="signature"):
        build_query_filter({"type": f"{HERE}.only_in_training"})  # of a prompt's group there is no mode


def test_rewards_alone_are_enough_for_what_decides_on_rewards() -> None:
    assert build(composed("all", survivors(2), STD), min_members=2).judge([1.0, 0.0, None, None]).keep
    assert build(survivors(3)).judge([1.0, 0.0, None, None]).reason == "min_survivors"
    for config in (MISSING, TIMEOUT, FAILED, FLAG):
        with pytest.raises(FilterError, match=rf"^{WHERE}: {config['type']} looks at the members of a group and expects a Group, got list"):
            build(config).judge([1.0, 0.0])


# ---------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"type": "env_timeouts"},
            r"\.type must be one of \['drop_flag', 'env_failed', .* got 'env_timeouts' - did you mean 'env_timeout'",
        ),
        ({"type": "length", "filter_args": {"max_tokens": 3}}, r"\.type must be one of .* got 'length'"),
        (
            {"type": "env_timeout", "filter_args": {"seconds": 3}},
            r"\.filter_args\.seconds is no argument of env_timeout, which takes none - there is none: leave it out$",
        ),
        ({"type": "env_failed", "metric": "acc"}, r"\.metric has no effect on env_failed, got 'acc' - remove it$"),
        ({"type": "min_survivors"}, r"\.filter_args\.least must be given, got nothing - it is a whole number$"),
        (survivors(0), r"\.filter_args\.least must be at least 1, got 0 - it is a number of members$"),
        (survivors(5), r"\.filter_args\.least must be at most train_env_manager\.group_size \(4\), got 5 - no group has more members$"),
        ({"type": "min_survivors", "filter_args": {"least": None}}, r"\.filter_args\.least must be a whole number, got None"),
        ({"type": "min_survivors", "filter_args": {"least": 2.5}}, r"\.filter_args\.least must be a whole number, got 2\.5 \(float\)"),
        (
            {"type": "min_survivors", "filter_args": {"most": 3}},
            r"\.filter_args\.most is no argument of min_survivors, expected \['least'\]",
        ),
        (
            flagged(1.5),
            r"\.filter_args\.max_filter_ratio must be a share from 0 to 1, or null, got 1\.5 - 0\.5 lets half of the groups go, null all$",
        ),
        (flagged(-0.1), r"\.filter_args\.max_filter_ratio must be a share from 0 to 1, or null, got -0\.1"),
        ({"type": "drop_flag", "filter_args": {"max_filter_ratio": "half"}}, r"\.filter_args\.max_filter_ratio must be a finite number"),
        ({"type": "drop_flag", "filter_args": {"_guard": None}}, r"\.filter_args\._guard is no argument of drop_flag"),
        (
            composed("all", MISSING, composed("not", survivors(9))),
            r"\.filter_args\.filters\[1\]\.filter_args\.filter\.filter_args\.least must be at most .*group_size \(4\), got 9",
        ),
        ({"type": f"{HERE}.SpeaksRoll"}, r"\.type must name a class with \.judge \(True keeps\) and without \.filter \(True drops\)"),
        ({"type": f"{HERE}.no_such"}, r"\.type: module .* has no 'no_such'"),
    ],
)
def test_a_bad_group_filter_fails_with_the_path_of_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train_env_manager\.group_filter_config{message}"):
        build(config)


def test_case_3_a_filter_on_spread_is_refused_for_groups_of_one() -> None:
    """Case 3."""
    with pytest.raises(ConfigError, match=r"needs train_env_manager\.group_size >= 2, got 1 - raise train_env_manager\.group_size"):
        build(composed("all", TIMEOUT, STD), group_size=1)
    assert build(TIMEOUT, group_size=1).judge(group_of(["right"])).keep


def test_two_group_filters_at_once_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^train_env_manager: expected group_filter_cls or group_filter_config, got both - leave one out"
    ):
        build(STD, group_filter_cls=f"{HERE}.OnlyMode")


# ---------------------------------------------------------------- faults of other systems


def test_case_21_a_member_without_a_reward_is_never_a_zero() -> None:
    """Case 21: [1, 0, None, 1] is incomplete, by any filter; with survivors permitted it is judged on those."""
    group = group_of(["right", "wrong", "unscored", "right"])
    assert [build(config).judge(group).reason for config in (NO, STD, TIMEOUT, KEEP_ALL)] == ["incomplete"] * 4
    survivors_permitted = build(composed("all", survivors(3), STD), min_members=3)
    assert survivors_permitted.judge(group).keep
    assert survivors_permitted.judge(group_of(["right", "right", "unscored", "right"])).reason == "no_spread"
    assert build(STD).judge(group_of(["unscored"] * 4)).reason == "incomplete"


@pytest.mark.parametrize("config", [MISSING, survivors(2)])
def test_case_27_of_a_failed_group_one_finished_member_is_no_group(config: dict[str, Any]) -> None:
    """Case 27: group A finished [1, 0]; of group B one row is left."""
    query = build(config, group_size=2, min_members=1)
    assert query.judge(group_of(["right", "wrong"])).keep
    assert query.judge(group_of(["right", "lost"])).reason == config["type"]


def test_case_45_one_truncated_member_does_not_drop_the_group() -> None:
    """Case 45: [1, 0, 1, TRUNC] has three members in the statistics; how many must be left is a setting."""
    group = group_of(["right", "wrong", "right", "truncated"])
    assert build(composed("all", MISSING, survivors(3), STD)).judge(group).keep
    assert build(survivors(4)).judge(group).reason == "min_survivors"


def test_case_49_a_trajectory_of_many_turns_has_one_vote() -> None:
    """Case 49: rewards of turns are not rewards of members: A has three turns, B one, and both earned 1."""
    long, short = member(0, "right"), member(1, "right")
    long = replace(long, turns=tuple(replace(make_turn(), reward=reward) for reward in (0.0, 0.0, 1.0)))
    group = replace(group_of(["right", "right"]), rollouts=(long, short))
    verdict = build(STD, group_size=2).judge(group)
    assert (verdict.reason, verdict.evidence["n"]) == ("no_spread", 2)
    hung = replace(long, flags=frozenset(["env_timeout"]))
    assert build(TIMEOUT, group_size=2).judge(replace(group, rollouts=(hung, short))).evidence == {"members": 1, "size": 2}


def test_case_51_and_53_a_group_is_its_members_whatever_they_are_called() -> None:
    """Cases 51 and 53: what makes members a group is the group they are in, not ids of their own; the machine compares their problems."""
    group = group_of(["right", "wrong", "right", "wrong"])
    named = replace(group, rollouts=tuple(replace(one, env_id=f"game-{one.member_index}") for one in group.rollouts))
    chain = build(composed("all", MISSING, TIMEOUT, STD))
    assert chain.judge(named) == chain.judge(group)
    assert chain.judge(named).evidence["n"] == 4


def test_case_122_what_the_policy_brings_on_itself_stays_in_the_group() -> None:
    """Case 122: an early end that the policy caused is a failure with its real reward, not a dropped group."""
    provoked = group_of(["provoked", "right", "provoked", "provoked"])
    assert build(composed("all", MISSING, TIMEOUT, FAILED, STD)).judge(provoked).keep
    not_ours = group_of(["hung", "right", "provoked", "provoked"])
    assert build(composed("all", MISSING, TIMEOUT, FAILED, STD)).judge(not_ours).reason == "env_timeout"


def test_case_124_what_could_not_be_scored_is_not_wrong() -> None:
    """Case 124: [right, wrong, unscored] is judged over two where survivors are permitted, and a group of unscored ones has no value."""
    query = build(NO, group_size=3, min_members=1)
    verdict = query.judge(group_of(["right", "wrong", "unscored"]))
    assert (verdict.keep, verdict.evidence["mean"], verdict.evidence["n"]) == (True, 0.5, 2)
    assert query.judge(group_of(["unscored"] * 3)).reason == "incomplete"


def test_case_126_every_judged_group_is_counted_under_one_reason() -> None:
    """Case 126: of ten groups each has one verdict, and the counts add up to ten."""
    query = build(composed("all", MISSING, TIMEOUT, FAILED, FLAG, STD))
    groups = [
        ["right", "wrong", "right", "wrong"],
        ["right", "right", "right", "right"],
        ["hung", "failed", "drop_flag", "lost"],
        ["hung", "failed", "drop_flag", "right"],
        ["wrong", "failed", "drop_flag", "right"],
        ["wrong", "right", "drop_flag", "right"],
        ["wrong", "right", "drop_flag", "right"],
        ["wrong", "right", "unscored", "right"],
        ["wrong", "truncated", "right", "right"],
        ["right", "truncated", "right", "right"],
    ]
    reasons = [query.judge(group_of(fates)).reason for fates in groups]
    assert reasons == [
        "kept", "no_spread", "missing_member", "env_timeout", "env_failed", "drop_flag", "kept_by_guard", "incomplete", "kept", "no_spread",
    ]  # fmt: skip
