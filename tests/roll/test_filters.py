"""query_filter and response_filter as ROLL calls them: the rules of our own filters, whatever the form of data and configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import FilterError
from sluice.filters import build_query_filter
from sluice.roll import DataProto, query_filter, response_filter
from sluice.types import Rollout

HERE = "tests.roll.test_filters"


def row(reward: float, *, domain: str = "math", dtype: torch.dtype = torch.float32, tokens: int = 2, **more: Any) -> DataProto:
    """One response of so many tokens behind a prompt of two."""
    width = 2 + tokens
    sampled = torch.arange(width)[None] >= 2
    tensors = {
        "response_level_rewards": torch.tensor([reward], dtype=dtype),
        "input_ids": torch.arange(width)[None],
        "prompt_mask": ~sampled,
        "response_mask": sampled,
        "infer_logprobs": torch.full((1, width - 1), -0.5),
    }
    return DataProto.from_dict(tensors, {"domain": [domain]} | {name: [value] for name, value in more.items()}, meta_info={"metrics": {}})


def rows(rewards: Sequence[float], **more: Any) -> list[DataProto]:
    return [row(reward, **more) for reward in rewards]


def config(kind: str = "std_filter", *, metric: str | None = None, response: Any = None, **filter_args: Any) -> Any:
    chosen = SimpleNamespace(type=kind, filter_args=filter_args, metric=metric)
    own = SimpleNamespace(query_filter_config=chosen, response_filter_config=response, tag_included=["algebra"])
    return SimpleNamespace(rewards={"math": own, "code": SimpleNamespace(query_filter_config=None)})


REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, math.nan, -2.0]), min_size=2, max_size=8)
FILTERS = st.sampled_from(
    [
        {"type": "no_filter"},
        {"type": "std_filter"},
        {"type": "std_filter", "filter_args": {"std_threshold": 0.3}},
        {"type": "mean_filter", "filter_args": {"threshold_down": 0.0, "threshold_up": 1.0}},
        {"type": "mean_filter", "filter_args": {"threshold_up": 0.4}},
    ]
)


@given(rewards=REWARDS, chosen=FILTERS, data=st.data())
def test_it_keeps_what_our_own_filter_keeps_however_the_responses_are_cut(
    rewards: list[float], chosen: dict[str, Any], data: st.DataObject
) -> None:
    exact = [float(np.float32(reward)) for reward in rewards]
    expected = build_query_filter(chosen).judge(exact).keep
    whole = DataProto.concat(rows(rewards))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rewards) - 1))))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(rewards)], strict=True)]
    as_mapping = {"rewards": {"math": {"query_filter_config": chosen}}}
    for given_config in (config(chosen["type"], **chosen.get("filter_args", {})), as_mapping):
        assert query_filter(parts, given_config) is expected
        assert query_filter([whole], given_config) is expected
        assert query_filter(data.draw(st.permutations(parts)), given_config) is expected


def test_one_element_that_holds_several_responses_is_judged_and_a_single_response_is_kept() -> None:
    equal = DataProto.concat(rows([1.0, 1.0, 1.0]))
    assert not query_filter([equal], config())
    assert query_filter(rows([1.0]), config())
    assert query_filter(rows([math.nan]), config())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("value", "count"), [(0.1, 3), (0.9, 3), (0.6, 7), (1e9 + 0.1, 7), (1e12 + 0.3, 3)])
def test_case_1_equal_rewards_have_no_spread_whatever_their_value_and_dtype(value: float, count: int, dtype: torch.dtype) -> None:
    assert not query_filter(rows([value] * count, dtype=dtype), config())


def test_case_1_a_real_difference_is_kept() -> None:
    assert query_filter(rows([0.1, 0.1, 0.1001]), config())


@pytest.mark.parametrize(("rewards", "keeps"), [([2.0, 0, 1, 1], True), ([-1.0, 1, -1, 1], True), ([0.5] * 4, False), ([1.125] * 4, False)])
def test_case_5_difficulty_does_not_decide_about_spread(rewards: list[float], keeps: bool) -> None:
    assert query_filter(rows(rewards), config()) is keeps


def test_case_21_a_missing_reward_is_no_zero() -> None:
    assert not query_filter(rows([1.0, math.nan, 0.0]), config("no_filter"))


def test_the_domain_selects_the_rules_by_name_or_tag_and_one_without_rules_keeps() -> None:
    same = [1.0, 1.0]
    assert not query_filter(rows(same, domain="algebra"), config())
    assert query_filter(rows(same, domain="code"), config())
    with pytest.raises(FilterError, match=r"rewards: expected a domain out of \['code', 'math'\], got 'maths' - did you mean 'math'"):
        query_filter(rows(same, domain="maths"), config())
    with pytest.raises(FilterError, match=r"expected non_tensor_batch\['domain'\]"):
        query_filter([DataProto.from_dict({"response_level_rewards": torch.ones(2)})], config())
    with pytest.raises(FilterError, match="expected the responses to one prompt, got none"):
        query_filter([], config())


def test_a_named_metric_is_read_from_the_notes() -> None:
    group = rows([1.0, 1.0])
    for index, item in enumerate(group):
        item.meta_info["metrics"]["acc"] = float(index)
    assert query_filter(group, config(metric="acc"))
    assert not query_filter(group, config())


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_one_element_that_holds_several_responses_has_one_metric_for_each(make: Any) -> None:
    for scores, keeps in (([1.0, 0.0], True), ([1.0, 1.0], False)):
        element = DataProto.concat(rows([1.0, 1.0]))
        element.meta_info["metrics"] = {"acc": make(scores), "of_all": 3.0}
        assert query_filter([element], config(metric="acc")) is keeps
    alone = rows([1.0, 1.0])
    for item, score in zip(alone, (1.0, 0.0), strict=True):
        item.meta_info["metrics"] = {"acc": make([score])}
    assert query_filter(alone, config(metric="acc"))


def test_a_response_without_the_metric_makes_its_group_incomplete_and_one_that_nobody_has_is_a_mistake() -> None:
    group = rows([1.0, 0.0])
    group[1].meta_info["metrics"] = None
    with pytest.raises(FilterError, match="metric is 'acc'"):
        query_filter(group, config(metric="acc"))
    group[0].meta_info["metrics"]["acc"] = 1.0
    assert not query_filter(group, config(metric="acc"))
    group[1].meta_info["metrics"] = {"other": 1.0}
    assert not query_filter(group, config(metric="acc"))


def test_responses_of_two_domains_are_no_group() -> None:
    with pytest.raises(FilterError, match=r"of one prompt, and so of one domain, got \['code', 'math'\]"):
        query_filter([row(1.0), row(0.0, domain="code")], config())


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: query_filter(None, config()), "expected the responses to one prompt, got None"),  # type: ignore[arg-type]
        (lambda: response_filter(None, config()), "expected one response, got NoneType"),  # type: ignore[arg-type]
        (
            lambda: query_filter([DataProto(non_tensor_batch={"domain": np.array(["math"], dtype=object)})] * 2, config()),
            "response_level_rewards",
        ),
        (
            lambda: query_filter([DataProto.from_dict({"response_level_rewards": torch.ones(1, 2)}, {"domain": ["math"]})] * 2, config()),
            r"one reward for each response, shape \[1\], got \[1, 2\]",
        ),
        (
            lambda: response_filter(
                DataProto.from_dict({"response_level_rewards": torch.ones(1)}, {"domain": ["math"]}),
                config(response={"type": "length", "filter_args": {"max_tokens": 1}}),
            ),
            "response_mask",
        ),
        (lambda: query_filter(rows([1.0, 0.0]), None), "expected a configuration with rewards, got NoneType"),
    ],
    ids=["no responses", "no response", "no rewards", "two rewards in a row", "no columns", "no configuration"],
)
def test_what_cannot_be_judged_is_said(ask: Any, says: str) -> None:
    with pytest.raises(FilterError, match=says):
        ask()


def test_warnings_of_a_filter_come_once_for_all_groups(caplog: pytest.LogCaptureFixture) -> None:
    chosen = config("mean_filter", threshold_down=0.125, threshold_up=0.875)
    for _ in range(3):
        assert query_filter(rows([0.5, 0.5]), chosen)
    assert len(caplog.records) == 1


# ---------------------------------------------------------------- responses


@pytest.mark.parametrize(
    ("response", "item", "keeps"),
    [
        (None, row(1.0), True),
        ({"type": "no_filter"}, row(1.0), True),
        ({"type": "reward_range", "filter_args": {"low": 0.0}}, row(-1.0), False),
        ({"type": "reward_range", "filter_args": {"low": 0.0}}, row(1.0), True),
        ({"type": "length", "filter_args": {"min_tokens": 3}}, row(1.0), False),
        ({"type": "length", "filter_args": {"min_tokens": 3}}, row(1.0, tokens=3), True),
        ({"type": "format", "filter_args": {"pattern": "x+"}}, row(1.0, response_text="axxb"), True),
        ({"type": "format", "filter_args": {"pattern": "x+"}}, row(1.0, response_text="ab"), False),
        ({"type": f"{HERE}.ends_with_three"}, row(1.0), True),
    ],
)
def test_the_response_filter_of_the_domain_is_really_applied(response: Any, item: DataProto, keeps: bool) -> None:
    assert response_filter(item, config(response=response)) is keeps


def ends_with_three(rollout: Rollout) -> bool:
    assert rollout.turns[0].prompt_ids.tolist() == [0, 1]
    assert rollout.turns[0].token_ids.tolist() == [2, 3]
    assert rollout.turns[0].inference_logprobs.tolist() == [-0.5, -0.5]
    return bool(rollout.turns[0].token_ids[-1] == 3)


def test_a_truncated_response_is_known_as_one() -> None:
    item = row(1.0)
    item.meta_info["stop_reason"] = "length"
    chosen = {"type": "finish_reason", "filter_args": {"allowed": ["stop"]}}
    assert not response_filter(item, config(response=chosen))
    item.meta_info["stop_reason"] = "something else"
    assert response_filter(item, config(response=chosen))


def test_a_response_filter_takes_one_response() -> None:
    with pytest.raises(FilterError, match="expected one response, got 2"):
        response_filter(DataProto.concat(rows([1.0, 0.0])), config())
