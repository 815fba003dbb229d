"""Our filters inside ROLL: the same verdicts, on data of ROLL's form, in ROLL's polarity."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError, FilterError
from sluice.filters import RatioGuard, build_query_filter
from sluice.roll import DataProto, FilterForRoll
from tests.roll.test_filters import FILTERS, REWARDS, row
from tests.roll.test_group_filter import WIDTH, members_of, two


def foreign(reward: float, **meta_info: Any) -> Any:
    """An item that is no DataProto of ours: the same three attributes."""
    return SimpleNamespace(batch={"response_level_rewards": torch.tensor([reward])}, non_tensor_batch={}, meta_info=meta_info)


@given(rewards=REWARDS, chosen=FILTERS, is_foreign=st.booleans())
def test_both_calls_say_what_the_filter_says_each_in_its_polarity(rewards: list[float], chosen: dict[str, Any], is_foreign: bool) -> None:
    exact = [float(np.float32(reward)) for reward in rewards]
    expected = build_query_filter(chosen).judge(exact)
    items = [foreign(reward) for reward in rewards] if is_foreign else [row(reward) for reward in rewards]
    for given_filter in (chosen, build_query_filter(chosen)):
        inside = FilterForRoll(given_filter)
        assert inside.query_filter(items) is expected.keep
        assert inside.filter(3, 2, items) is not expected.keep
        verdict = inside.verdict_on(items)
        assert (verdict.keep, verdict.reason, verdict.category) == (expected.keep, expected.reason, expected.category)


def test_one_element_that_holds_a_whole_group_is_judged() -> None:
    same = DataProto.concat([row(1.0), row(1.0)])
    assert not FilterForRoll({"type": "std_filter"}).query_filter([same], "any configuration")
    assert FilterForRoll({"type": "std_filter"}).query_filter([row(1.0)])


def test_faults_missing_members_and_metrics_are_read_from_the_notes() -> None:
    filters = [{"type": "missing_member"}, {"type": "env_timeout"}, {"type": "env_failed"}]
    inside = FilterForRoll({"type": "all", "filter_args": {"filters": filters}}, group_size=2)
    assert not inside.filter(0, 0, [foreign(1.0), foreign(0.0)])
    assert inside.verdict_on([foreign(1.0), foreign(0.0, env_timeout=True)]).reason == "env_timeout"
    assert inside.verdict_on([foreign(1.0), foreign(0.0, env_failed=True)]).reason == "env_failed"
    assert inside.verdict_on([foreign(1.0), None]).reason == "missing_member"
    assert inside.verdict_on([foreign(1.0)]).reason == "missing_member"
    assert FilterForRoll({"type": "std_filter"}).verdict_on([foreign(1.0), None]).reason == "incomplete"
    accurate = FilterForRoll({"type": "std_filter", "metric": "acc"})
    assert not accurate.filter(0, 0, [foreign(1.0, metrics={"acc": 1, "name": "x"}), foreign(1.0, metrics={"acc": 0.0})])


def test_the_guard_bounds_what_is_dropped() -> None:
    inside = FilterForRoll({"type": "std_filter"}, guard=RatioGuard(max_filter_ratio=0.5))
    same = [foreign(1.0), foreign(1.0)]
    assert [inside.filter(0, episode, same) for episode in range(6)] == [False, True] * 3


def test_the_outcome_of_a_trajectory_is_read_where_it_stands() -> None:
    def item(scores: list[float], **columns: Any) -> Any:
        return SimpleNamespace(batch={"scores": torch.tensor([scores])}, non_tensor_batch=columns, meta_info={})

    spread = FilterForRoll({"type": "std_filter"})
    assert spread.filter(0, 0, [item([0.0, 1.0]), item([1.0, 0.0])])
    assert not spread.filter(0, 0, [item([0.0, 1.0]), item([0.0, 0.0])])
    assert spread.filter(0, 0, [item([0.0], episode_scores=np.array([2.0], dtype=object)) for _ in range(2)])
    with pytest.raises(FilterError, match=r"expected response_level_rewards, episode_scores or scores in a trajectory, got \['ids'\]"):
        spread.filter(0, 0, [SimpleNamespace(batch={"ids": torch.zeros(1)}, non_tensor_batch={}, meta_info={})] * 2)


def test_members_of_our_own_runs_are_read_as_well() -> None:
    assert not FilterForRoll({"type": "std_filter"}).filter(0, 0, members_of(two(), sequence_length=WIDTH))
    assert FilterForRoll({"type": "std_filter"}).filter(0, 0, members_of(two((1.0, 1.0)), sequence_length=WIDTH))


def test_a_trajectory_of_which_no_token_trains_has_no_vote() -> None:
    """NVIDIA-NeMo/RL#4160: seen: a group whose only spread came of a masked row was kept, and trained on noise."""

    def item(reward: float, *masks: list[int]) -> Any:
        batch = {"response_level_rewards": torch.tensor([reward] * len(masks)), "response_mask": torch.tensor(masks)}
        return SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={})

    inside = FilterForRoll({"type": "std_filter"})
    out, same, other = item(0.0, [0, 0]), [item(1.0, [1, 1])] * 3, item(0.0, [1, 0])
    assert inside.filter(0, 0, [*same, out])
    assert not inside.query_filter([*same, out])
    assert not inside.filter(0, 0, [*same, out, other])
    assert inside.query_filter([*same, out, other])
    assert not inside.query_filter([item(1.0, [1, 1], [1, 1]), out])  # rows of one item, each with a mask of its own


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="std_filtr"):
        FilterForRoll({"type": "std_filtr"})
    with pytest.raises(FilterError, match="expected the members of a group, got none"):
        FilterForRoll({"type": "std_filter"}).filter(0, 0, [])


ACC = {"type": "std_filter", "metric": "acc"}


def test_case_13_metrics_may_be_numbers_of_any_library_in_both_calls() -> None:
    for one, other in ((True, False), (np.bool_(1), np.float32(0)), (np.int64(1), 0), (torch.tensor(1.0), torch.tensor(0.0))):
        inside, items = FilterForRoll(ACC), [foreign(1.0, metrics={"acc": one}), foreign(1.0, metrics={"acc": other})]
        assert not inside.filter(0, 0, items)
        assert inside.query_filter(items)
        several = DataProto.concat([row(1.0), row(1.0)])
        several.meta_info["metrics"] = {"acc": [one, other]}
        assert inside.query_filter([several])
    with pytest.raises(FilterError, match="expected one number as the reward of member 0, got the text '1'"):
        FilterForRoll(ACC).filter(0, 0, [foreign(1.0, metrics={"acc": "1"}), foreign(1.0, metrics={"acc": "0"})])


def test_missing_and_infinite_rewards_make_a_group_incomplete_and_what_is_no_number_is_said() -> None:
    def item(*rewards: float, **columns: Any) -> Any:
        batch = {"response_level_rewards": torch.tensor(rewards)} if rewards else {}
        return SimpleNamespace(batch=batch, non_tensor_batch={name: [value] for name, value in columns.items()}, meta_info={})

    inside = FilterForRoll({"type": "std_filter"})
    for missing in (item(math.inf, -math.inf), item(math.nan, 1.0), item(episode_scores=None), item(episode_scores=math.nan)):
        assert inside.verdict_on([item(1.0), missing]).reason == "incomplete"
    assert not inside.query_filter([None, item(1.0)])
    with pytest.raises(FilterError, match="expected one number as the reward of .*episode_scores.*, got the text 'a'"):
        inside.filter(0, 0, [item(episode_scores="a"), item(1.0)])
    with pytest.raises(FilterError, match="expected response_level_rewards in the responses, got"):
        inside.query_filter([item(), item(1.0)])


@pytest.mark.parametrize("given_as", [{"type": "std_filter", "args": 1}, None, lambda group: True], ids=["unknown key", "none", "function"])
def test_a_configuration_that_is_none_is_refused_in_our_words(given_as: Any) -> None:
    with pytest.raises(ConfigError, match="FilterForRoll"):
        FilterForRoll(given_as)
